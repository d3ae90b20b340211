"""Machines as a cluster rents them, and the text of the files."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raymoe.cli.doctor.cluster_file import examine_file
from raymoe.doctor.examine import Status
from raymoe.errors import ConfigError
from raymoe.plan.cluster_file import KINDS, ClusterJob, Machine, kind_of
from raymoe.plan.plan import Plan
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import INSTANCES, find_hardware, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.units import GB, GIB
from tests.unit.cli.test_plan import CONFIG, HOST, WORKLOAD

PATHS = {"source": "/data/my prompts", "output": "/data/it's: {here} #1"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return find_plan(
        ModelSpec.from_config(CONFIG), find_hardware("a100"), WORKLOAD, schedule="resident"
    )


def job_of(plan: Plan, instance: str, **changes: Any) -> ClusterJob:
    fields = {
        "plan": plan, "machine": Machine.find(instance, plan.hardware), "num_nodes": 3,
        "num_rows": 64, "why_nodes": "as --nodes says", "model": "owner/name",
        "weight_bytes": 100 * GB, "options": ("--max-tokens", "8"), "source": "/data/prompts",
        "output": "/data/answers", "is_spot": True, "price": 2.0, "prices_of": "today",
        "written_by": ("--model", "owner/name"), "file": "cluster.yaml", "ray_version": "2.60.0",
        "python_version": "3.12",
    }  # fmt: skip
    return ClusterJob(**(fields | changes))


def strings(content: object) -> Iterator[str]:
    """All of them in a file."""
    if isinstance(content, str):
        yield content
    for each in content.values() if isinstance(content, dict) else content or ():
        if not isinstance(content, str) and isinstance(each, str | dict | list):
            yield from strings(each)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_the_nodes_and_the_command_whatever_it_contains(kind: str, plan: Plan) -> None:
    instance = "a2-ultragpu-1g" if kind == "ray-gcp" else "g6e.8xlarge"
    job = job_of(plan, instance, **PATHS)
    text = job.render(kind)
    content = text if kind == "slurm" else yaml.safe_load(text)
    if kind.startswith("ray-"):
        worker = content["available_node_types"]["worker"]
        assert (content["max_workers"], worker["max_workers"]) == (3, 3)
        assert instance in worker["node_config"].values()
        assert "SPOT" in str(worker).upper()
        comments = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#"))
        (told,) = (
            line for line in comments.replace("\\\n", " ").splitlines() if "submit_job" in line
        )
        assert ["raymoe", "generate", *shlex.split(told)[3:]] == job.command(kind)
    elif kind == "kuberay":
        (group,) = content["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert group["replicas"] == 3
        assert shlex.split(content["spec"]["entrypoint"]) == job.command(kind)
    elif kind == "slurm":
        assert "\n#SBATCH --nodes=3\n" in text
        assert shlex.split(text.splitlines()[-1]) == job.command(kind)
    else:
        assert content["num_nodes"] == 3
        assert content["resources"]["use_spot"] is True
        assert shlex.split(content["run"].splitlines()[-1]) == job.command(kind)
    stored = str(job.machine.store_bytes)
    assert any(stored in one for one in strings(content))
    assert all(len(line) < 210 for line in text.splitlines())


def test_on_demand_is_not_spot(plan: Plan) -> None:
    for kind in KINDS.keys() - {"slurm"}:  # whose nodes are nobody's to sell
        instance = "a2-ultragpu-1g" if kind == "ray-gcp" else "g6e.8xlarge"
        content = yaml.safe_load(job_of(plan, instance, is_spot=False).render(kind))
        assert not [one for one in strings(content) if "spot" in one.lower()]
        assert content.get("resources", {}).get("use_spot", False) is False


def test_the_command_asks_for_gpus_and_keeps_the_journal_where_nodes_see_it(plan: Plan) -> None:
    job = job_of(plan, "g6e.8xlarge", output="s3://jobs/out", model="mixtral-8x7b")
    words = job.command("ray-aws")
    assert words[words.index("--journal") + 1] == "s3://jobs/out.journal"
    assert words[words.index("--device") + 1] == "cuda"
    assert words[words.index("--model") + 1] == "/data/models/mixtral-8x7b"
    assert job.command("kuberay")[3] == "/models/mixtral-8x7b"
    assert "--journal" not in job_of(plan, "g6e.8xlarge").command("ray-aws")
    for output in ("s3://jobs/out?region=x", "hf://datasets/me/out", "s3://out"):
        words = job_of(plan, "g6e.8xlarge", output=output).command("ray-aws")
        assert words[words.index("--journal") + 1].startswith("/data/out")
    # Nodes that download the weights have room for them.
    assert job.disk_gb == 150
    assert job_of(plan, "g6e.8xlarge").disk_gb == 250
    bucket = job_of(plan, "g6e.8xlarge", model="s3://models/mixtral")
    assert bucket.disk_gb == 250
    assert {bucket.command(kind)[3] for kind in KINDS} == {"s3://models/mixtral"}
    host = replace(plan, hardware=HOST)
    assert "--device" not in job_of(host, "node.json").command("kuberay")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_in_buckets_and_of_the_hub_needs_no_file_system(
    kind: str, plan: Plan, tmp_path: Path
) -> None:
    instance = "a2-ultragpu-1g" if kind == "ray-gcp" else "g6e.8xlarge"
    model = "s3://jobs/model" if kind == "kuberay" else "owner/name"  # pods have a claim for those
    rows = {"source": "s3://jobs/in", "output": "s3://jobs/out"}
    text = job_of(plan, instance, model=model, written_by=(), **rows).render(kind)
    assert not re.search(r"FILE_SYSTEM|nfs|/data\b|/models|raymoe-data", text)
    assert "fsspec[s3]" in text
    path = tmp_path / "file.yaml"
    path.write_text(text)
    found = {one.name: one for one in examine_file(path)}
    assert found["rows and journal"].status is Status.OK
    assert found["model"].status is Status.OK
    assert "FILE_SYSTEM" not in found["left to replace"].value
    # One thing that is not there needs it again.
    for changes in ({"source": "/data/in"}, {"output": "/data/out"}, {"model": "mixtral-8x7b"}):
        text = job_of(plan, instance, **{"model": model, **rows, **changes}).render(kind)
        assert re.search(r"/data\b|/models", text), changes


@pytest.mark.parametrize(
    ("given", "changes", "problem"),
    [
        ("g6e.12xlarge", {}, "has 4 GPUs, and the plan uses 1"),
        ("g6e.8xlarge", {"model": "a\nb"}, "--model 'a\\nb'"),
        ("g6e.8xlarge", {"source": ""}, "--input ''"),
    ],
)
def test_what_a_file_cannot_say_is_refused(
    given: str, changes: dict[str, Any], problem: str, plan: Plan
) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(plan, given, **changes)
    assert problem in str(caught.value)


def test_a_gpu_that_the_plan_leaves_idle_is_not_rented(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="leaves the GPU of a100 idle"):
        job_of(replace(plan, note="the cores are faster"), "g6e.8xlarge")


def test_the_kind_is_that_of_the_cloud() -> None:
    aws, gcp = (
        Machine.find(name, hardware_preset(name)) for name in ("g6.8xlarge", "g2-standard-8")
    )
    own = Machine.find("l4", hardware_preset("l4"))
    assert [kind_of(each, None) for each in (aws, gcp, own)] == ["ray-aws", "ray-gcp", "kuberay"]
    assert (own.instance, own.num_vcpus, own.memory_gib, own.num_gpus) == (None, 48, 192, 1)
    assert kind_of(gcp, "skypilot") == "skypilot"
    with pytest.raises(ConfigError, match="did you mean 'kuberay'"):
        kind_of(aws, "kubray")
    with pytest.raises(ConfigError, match="an instance of gcp; write it as ray-gcp"):
        kind_of(gcp, "ray-aws")
    with pytest.raises(ConfigError, match="needs an instance of a cloud"):
        kind_of(own, "skypilot")


def test_memory_is_divided_so_that_ray_kills_nothing() -> None:
    """What raymoe, the object store and the system need is less than a node has, or a pod."""
    for name in INSTANCES:
        machine, hardware = Machine.find(name, hardware_preset(name)), hardware_preset(name)
        assert machine.cloud == ("gcp" if "-" in name else "aws")
        used = hardware.host_memory_bytes + machine.store_bytes
        assert used < 0.95 * 0.98 * machine.memory_gib * GIB
        assert machine.pod_bytes + machine.store_bytes < 0.95 * machine.pod_memory_gib * GIB
        assert 0.7 * machine.memory_gib < machine.pod_memory_gib < 0.97 * machine.memory_gib
        assert machine.store_bytes < (machine.shared_memory_gib - 1) * GIB
