"""The files for clusters hold together: Ray's schema, KubeRay's fields, and one version of Ray."""

import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from raymoe.cli import COMMANDS

ROOT = Path(__file__).parents[3]
CLUSTER, RAYJOB = ROOT / "cluster.yaml", ROOT / "examples" / "kuberay-rayjob.yaml"
DOCKERFILE = ROOT / "examples" / "Dockerfile"
# Of the custom resource of KubeRay 1.5, what a job of ours uses; nothing else may be there.
CONTAINER = {
    "name": {"type": "string"},
    "image": {"type": "string"},
    "resources": {"type": "object"},
    "securityContext": {"type": "object"},
    "volumeMounts": {"type": "array"},
}
GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": {
        "type": "object",
        "required": ["spec"],
        "additionalProperties": False,
        "properties": {
            "spec": {
                "type": "object",
                "required": ["containers"],
                "additionalProperties": False,
                "properties": {
                    "containers": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["name", "image"],
                            "additionalProperties": False,
                            "properties": CONTAINER,
                        },
                    },
                    "nodeSelector": {"type": "object"},
                    "volumes": {"type": "array"},
                },
            }
        },
    },
}


def an_object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


RAYJOB_SCHEMA = an_object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object"},
    spec=an_object(
        ("entrypoint", "rayClusterSpec"),
        entrypoint={"type": "string"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode"]},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished={"type": "integer"},
        backoffLimit={"type": "integer"},
        rayClusterSpec=an_object(
            ("headGroupSpec",),
            rayVersion={"type": "string"},
            headGroupSpec=an_object(("template",), **GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": an_object(
                    ("groupName", "template"),
                    groupName={"type": "string"},
                    replicas={"type": "integer"},
                    minReplicas={"type": "integer"},
                    maxReplicas={"type": "integer"},
                    **GROUP,
                ),
            },
        ),
    ),
)


def ray_schema() -> dict[str, Any]:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    return json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def test_the_cluster_launcher_takes_the_cluster() -> None:
    cluster = yaml.safe_load(CLUSTER.read_text())
    jsonschema.validate(cluster, ray_schema())
    assert cluster["head_node_type"] in cluster["available_node_types"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster | {"head_node": 1}, ray_schema())


def test_kuberay_takes_the_job() -> None:
    job = yaml.safe_load(RAYJOB.read_text())
    jsonschema.validate(job, RAYJOB_SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job | {"spec": job["spec"] | {"entryPoint": ""}}, RAYJOB_SCHEMA)
    groups = job["spec"]["rayClusterSpec"]
    for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_job_of_kuberay_is_one_of_our_commands() -> None:
    words = yaml.safe_load(RAYJOB.read_text())["spec"]["entrypoint"].split()
    assert words[0] == "raymoe"
    assert words[1] in COMMANDS
    app = typer.Typer()
    app.command()(importlib.import_module(f"raymoe.cli.{words[1]}").run)
    given = typer.main.get_command(app).make_context("raymoe", words[2:]).params
    assert given["resume"]
    assert given["id_column"] == "id"


def test_all_files_name_one_version_of_ray_that_we_support() -> None:
    texts = [path.read_text() for path in (CLUSTER, RAYJOB, DOCKERFILE)]
    versions = {found for text in texts for found in re.findall(r"2\.\d+\.\d+", text)}
    (version,) = versions
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (line for line in project["dependencies"] if line.startswith("ray["))
    low, high = re.findall(r"2\.(\d+)", pin)
    assert int(low) <= int(version.split(".")[1]) < int(high)
