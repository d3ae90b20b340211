"""The files for clusters fit the schemas of Ray, KubeRay and Kubernetes, and each other."""

import fnmatch
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from raymoe.cli import COMMANDS, run
from raymoe.specs.presets_models import model_preset

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
CLUSTERS = (ROOT / "cluster.yaml", EXAMPLES / "cluster-gcp.yaml")
RAYJOB, SKYPILOT = EXAMPLES / "kuberay-rayjob.yaml", EXAMPLES / "skypilot.yaml"
SLURM = EXAMPLES / "slurm.sh"
WRITTEN = (*CLUSTERS, RAYJOB, SKYPILOT, SLURM)
STORAGE, DOCKERFILE = EXAMPLES / "kuberay-storage.yaml", EXAMPLES / "Dockerfile"
USER, GROUP = 1000, 100  # of rayproject/ray: docker/base-deps/Dockerfile of Ray
TEXT, BOOL, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[kMGTP]i?|)$"}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}


def an_object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


def a_list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def a_map(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


# What we use of Kubernetes' Pod and claim; nothing else may be there.
# `test_kubernetes_takes_pods_and_claims` compares with all of it.
POD = an_object(
    ("containers",),
    securityContext=an_object(
        fsGroup=COUNT, fsGroupChangePolicy={"enum": ["Always", "OnRootMismatch"]}
    ),
    nodeSelector=a_map(TEXT),
    containers=a_list(
        an_object(
            ("name", "image", "resources", "volumeMounts"),
            name=NAME,
            image=TEXT,
            command=a_list(TEXT),
            resources=an_object(limits=a_map(QUANTITY), requests=a_map(QUANTITY)),
            securityContext=an_object(capabilities=an_object(add=a_list(TEXT))),
            volumeMounts=a_list(
                an_object(("name", "mountPath"), name=NAME, mountPath=TEXT, readOnly=BOOL)
            ),
        )
    ),
    volumes=a_list(
        an_object(
            ("name",),
            name=NAME,
            persistentVolumeClaim=an_object(("claimName",), claimName=NAME, readOnly=BOOL),
            emptyDir=an_object(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
        )
    ),
)
RAYJOB_SCHEMA = json.loads((ROOT / "tests" / "data" / "kuberay_rayjob.json").read_text())
OBJECTS = {
    "RayJob": RAYJOB_SCHEMA,
    "PersistentVolumeClaim": an_object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "v1"},
        kind=TEXT,
        metadata=an_object(("name",), name=NAME),
        spec=an_object(
            ("accessModes", "resources"),
            accessModes=a_list(
                {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}
            ),
            storageClassName=NAME,
            resources=an_object(("requests",), requests=an_object(("storage",), storage=QUANTITY)),
        ),
    ),
    "Pod": an_object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "v1"},
        kind=TEXT,
        metadata=an_object(("name",), name=NAME),
        spec=POD,
    ),
}


def ray_schema() -> dict[str, Any]:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    return json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def objects() -> list[dict[str, Any]]:
    """Those of both files for Kubernetes, the job first."""
    return [one for path in (RAYJOB, STORAGE) for one in yaml.safe_load_all(path.read_text())]


def pods() -> Iterator[dict[str, Any]]:
    for one in objects():
        if one["kind"] == "Pod":
            yield one["spec"]
        elif one["kind"] == "RayJob":
            groups = one["spec"]["rayClusterSpec"]
            for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
                yield group["template"]["spec"]


def check(command: str, name: str) -> dict[str, Any]:
    """Parse a command line of ours; return its options."""
    words = shlex.split(command)
    assert words[:2] == ["raymoe", name]
    assert name in COMMANDS
    app = typer.Typer()
    app.command()(importlib.import_module(f"raymoe.cli.{name}").run)
    return typer.main.get_command(app).make_context("raymoe", words[2:]).params


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_cluster_launcher_takes_the_cluster(path: Path) -> None:
    cluster = read(path)
    jsonschema.validate(cluster, ray_schema())
    assert cluster["head_node_type"] in cluster["available_node_types"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster | {"head_node": 1}, ray_schema())


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_launcher_itself_fills_in_the_cluster(path: Path) -> None:
    """Ray's own steps before it asks the cloud: defaults, merged commands, and its checks."""
    util = importlib.import_module("ray.autoscaler._private.util")
    filled = util.prepare_config(read(path))
    util.validate_config(filled)
    types = filled["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    # All three: on Google Cloud the launcher knows none, and on AWS it would declare less memory.
    assert types["worker"]["resources"].keys() == {"CPU", "GPU", "memory"}
    assert filled["setup_commands"] == read(path)["setup_commands"]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_cluster_installs_what_it_mounts_and_knows_the_token(path: Path) -> None:
    cluster = read(path)
    mounts = cluster["file_mounts"]
    (checkout,) = (remote for remote, local in mounts.items() if local == ".")
    assert cluster["setup_commands"] == [f"pip install {checkout}"]
    assert mounts["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"
    options = cluster["docker"]["run_options"]
    assert "--env=RAY_AUTH_MODE=token" in options
    # What the nodes share is mounted on the machine and in the container, and is the user's.
    before = cluster["initialization_commands"]
    mounted = re.compile(r"mountpoint -q /data \|\| sudo mount -t nfs4? .* /data$")
    assert any(mounted.match(one) for one in before)
    assert before[-1] == f"sudo chown {USER}:{GROUP} /data"
    assert "--volume=/data:/data" in options


def test_kuberay_takes_the_job() -> None:
    for one in objects():
        jsonschema.validate(one, OBJECTS[one["kind"]])
    job = objects()[0]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job | {"spec": job["spec"] | {"entryPoint": ""}}, OBJECTS["RayJob"])
    # Checks of KubeRay's own that its schema does not have (validation.go).
    assert job["spec"]["shutdownAfterJobFinishes"] or not job["spec"]["ttlSecondsAfterFinished"]
    assert tuple(map(int, job["spec"]["rayClusterSpec"]["rayVersion"].split("."))) >= (2, 52, 0)
    assert job["spec"]["rayClusterSpec"]["authOptions"]["mode"] == "token"


def test_pods_find_their_claims_and_may_write_on_them() -> None:
    claims = {
        one["metadata"]["name"]: one["spec"]
        for one in objects()
        if one["kind"] == "PersistentVolumeClaim"
    }
    assert all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims.values())
    used = set()
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        used |= {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert pod["securityContext"]["fsGroup"] == GROUP
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert used == claims.keys()


@pytest.mark.slow
def test_kubernetes_takes_pods_and_claims() -> None:
    """Its whole published schema, in which unknown fields are errors."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="in the extra `slow`")
    whole = [one for one in objects() if one["kind"] != "RayJob"]
    whole += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{i}"}, "spec": pod}
        for i, pod in enumerate(pods())
    ]
    version = kubernetes.latest_version()
    for one in whole:
        kubernetes.validate(one, version, strict=True)
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(whole[-1] | {"specs": {}}, version, strict=True)


def test_the_job_of_kuberay_is_one_of_our_commands_on_what_is_mounted() -> None:
    job = objects()[0]["spec"]
    given = check(job["entrypoint"], "generate")
    assert given["resume"]
    assert given["id_column"] == "id"
    assert given["num_actors"] == job["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    mounted = {mount["mountPath"] for mount in head["volumeMounts"]}
    for name in ("model", "input_", "output"):
        assert any(given[name].startswith(f"{path}/") for path in mounted)


def test_comments_give_commands_that_exist() -> None:
    """Of the files themselves, line by line: what is told to be run names files that are there."""
    for path in (*WRITTEN, STORAGE, DOCKERFILE):
        told = re.findall(r"^# {2,}(\w.*)$", path.read_text(), re.MULTILINE)
        named = set(re.findall(r"\S+\.(?:yaml|py|sh)\b|\S*Dockerfile", "\n".join(told)))
        assert [one for one in named if not (ROOT / one).exists()] == []
        assert told


def test_images_are_named_by_digest_or_say_how_to_find_it() -> None:
    for pod in pods():
        for container in pod["containers"]:
            assert re.fullmatch(r"\S+@sha256:(DIGEST|[0-9a-f]{64})", container["image"])
    for path in (*CLUSTERS, DOCKERFILE):
        text = path.read_text()
        assert "docker buildx imagetools inspect" in text
        assert all(len(one) == 64 for one in re.findall(r"@sha256:([0-9a-f]+)", text))


NAME_OF_MODEL = "mistralai/Mixtral-8x7B-Instruct-v0.1"


@pytest.mark.parametrize(
    "path",
    [path if path is RAYJOB else pytest.param(path, marks=pytest.mark.slow) for path in WRITTEN],
    ids=lambda path: path.stem,
)
def test_the_files_are_what_their_command_writes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the prediction, which changes with each change of the cost model."""
    spec = replace(model_preset("mixtral-8x7b"), name=NAME_OF_MODEL)
    monkeypatch.setattr("raymoe.cli.plan.model_by_name", {NAME_OF_MODEL: spec}.__getitem__)
    versions = {"ray_version": "2.60.0", "python_version": "3.11"}
    monkeypatch.setattr("raymoe.cli.cluster_file._versions", lambda: versions)
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    told = "\n".join(line.lstrip("# ") for line in path.read_text().splitlines())
    (command,) = re.findall(r"^raymoe (plan .*)$", told.replace("\\\n", " "), re.MULTILINE)
    assert run(shlex.split(command)) == 0
    written = (tmp_path / path.relative_to(ROOT)).read_text()
    assert without_prediction(written) == without_prediction(path.read_text())


def without_prediction(text: str) -> str:
    return re.sub(r"# The plan: .*?#\n", "", text, count=1, flags=re.DOTALL)


# What SkyPilot's catalogue says of the instance, which it would download.
CATALOGUE = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,\
AvailabilityZone,Arch
g6e.8xlarge,L40S,1.0,32.0,256.0,,4.52856,1.3292,us-east-1,us-east-1a,x86_64
"""
PARSE = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.instance_type, resources.use_spot, resources.job_recovery)
"""


@pytest.mark.slow
def test_skypilot_takes_the_task(tmp_path: Path) -> None:
    """With its own parser, in the environment whose `sky` is on the path: its click is older."""
    sky = shutil.which("sky")
    if sky is None:
        pytest.skip("no sky on the path: pip install skypilot in an environment of its own")
    python = Path(sky).read_text().splitlines()[0].removeprefix("#!")
    catalogue = tmp_path / ".sky" / "catalogs" / "v8" / "aws" / "vms.csv"
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text(CATALOGUE)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")

    def parse(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "task.yaml").write_text(text)
        return subprocess.run(
            [python, "-c", PARSE, tmp_path / "task.yaml"], capture_output=True, text=True,
            check=False, cwd=ROOT, env=os.environ | {"HOME": str(tmp_path)},
        )  # fmt: skip

    text = SKYPILOT.read_text()
    done = parse(text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("3 g6e.8xlarge True {'strategy': 'FAILOVER'")
    assert "num_nodez" in parse(text.replace("num_nodes: ", "num_nodez: ")).stderr


# What SLURM runs on the nodes of an allocation, and Ray, say which words they were given.
PROGRAMS = {
    "srun": 'echo "srun $*" >> "$CALLS"',
    "ray": 'echo "ray $*" >> "$CALLS"',
    "raymoe": 'echo "raymoe $*" >> "$CALLS"; exit 3',
    # The address of the head; then the nodes that are alive, all once the others have started.
    "python": 'case "$*" in *address*) echo 10.0.0.1;; '
    '*) grep -q -- --block "$CALLS" && echo 3;; esac',
    "sleep": "true",
}


def test_the_script_of_slurm_starts_ray_on_each_node_once(tmp_path: Path) -> None:
    text = SLURM.read_text()
    options, commands = text.split("set -euo pipefail")
    assert "#SBATCH" not in commands  # SLURM reads none behind the first command
    assert all(line.startswith("#") for line in options.splitlines() if line)
    assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n#SBATCH --exclusive\n" in options
    for name, lines in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    activate = tmp_path / "raymoe-env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    variables = {"HOME": str(tmp_path), "CALLS": str(tmp_path / "calls"),
                 "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
                 "SLURMD_NODENAME": "first", "SLURM_JOB_NUM_NODES": "3"}  # fmt: skip
    done = subprocess.run(["bash", SLURM], env=os.environ | variables, check=False, timeout=60)
    assert done.returncode == 3  # that of the command
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "srun --cpu-bind=none ls -d /data/"
    (head,) = (call for call in calls if call.startswith("ray start --head --port=6379 "))
    (others,) = (call for call in calls if " ray start " in call)
    assert others.startswith("srun --nodes=2 --ntasks=2 --exclude=first --cpu-bind=none ")
    assert "ray start --address=10.0.0.1:6379 --block" in others
    of_node = "--num-gpus=1 --memory=274877906944 --object-store-memory=8000000000"
    assert head.endswith(of_node)
    assert others.endswith(of_node)
    (command,) = (call for call in calls if call.startswith("raymoe "))
    assert check(command, "generate")["num_actors"] == 3


def is_in_the_image(path: str) -> bool:
    """Whether .dockerignore leaves a file there; the last rule for it or a folder of it counts."""
    folders = [path, *map(str, Path(path).parents)]
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").replace("**/", "*")
            if any(fnmatch.fnmatch(one, pattern) for one in folders):
                kept = line.startswith("!")
    return kept


def test_an_image_gets_what_pip_needs_and_nothing_else() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project, build = tomllib.loads(text)["project"], tomllib.loads(text)["tool"]["scikit-build"]
    needed = [
        *("pyproject.toml", project["readme"], *project["license-files"]),
        *(f"{build['cmake']['source-dir']}/CMakeLists.txt", build["metadata"]["version"]["input"]),
        *("raymoe/assets/prices.json", "raymoe/assets/clusters/ray.yaml.jinja"),
        "raymoe/assets/demo_model/model.safetensors",
    ]
    assert [one for one in needed if not (ROOT / one).exists() or not is_in_the_image(one)] == []
    others = (".git/config", ".venv/bin/python", "answers/part.parquet", ".env", "auth_token",
              "tests/tiny.py", "raymoe/__pycache__/cli.pyc", "raymoe/native.so")  # fmt: skip
    assert [one for one in others if is_in_the_image(one)] == []


def test_all_files_name_one_version_of_ray_that_we_support() -> None:
    texts = [path.read_text() for path in (*WRITTEN, DOCKERFILE)]
    versions = {found for text in texts for found in re.findall(r"2\.\d+\.\d+", text)}
    (version,) = versions
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (line for line in project["dependencies"] if line.startswith("ray["))
    low, high = re.findall(r"2\.(\d+)", pin)
    assert int(low) <= int(version.split(".")[1]) < int(high)
