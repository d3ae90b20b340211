"""`raymoe plan --write` writes a file for a cluster, and `raymoe doctor FILE` checks it."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raymoe.cli import run
from raymoe.cli.cluster_file import WantedFile
from raymoe.plan.cluster_file import Machine
from raymoe.plan.prediction import Prediction
from raymoe.plan.rank import JobPlanner, OverBudgetError, plan_in_budget, rank, read_prices
from raymoe.specs.hardware import HARDWARE_INSTANCES, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from tests.unit.cli.test_plan import CONFIG, JOB, words

A100 = "a2-ultragpu-1g"  # holds the model, which is planned fast


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def plan(*arguments: str) -> int:
    return run(["plan", "--model", "tiny", *JOB, "--schedule", "resident", *arguments])


def findings(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    code = run(["doctor", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(path)
    assert code == (not found["is_healthy"])
    return {each["name"]: each for each in found["findings"]}


def statuses(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: each["status"] for name, each in found.items() if each["status"] != "ok"}


def test_options_of_the_plan_reach_the_job_and_doctor_finds_the_rest(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cluster on Google Cloud, as written and after edits that break it."""
    path = here / "cluster.yaml"
    more = ("--max-context", "512", "--output", "gs://jobs/out", "--nodes", "2", "--dtype")
    assert plan("--hardware", A100, *more, "bfloat16", "--write", str(path)) == 0
    text = path.read_text()
    content = yaml.safe_load(text)
    assert (content["provider"]["type"], content["max_workers"]) == ("gcp", 2)
    joined = text.replace(" \\\n#      ", "")
    assert (
        "--model /data/models/tiny --input /data/prompts --output gs://jobs/out --journal "
        "gs://jobs/out.journal --id-column id --resume --num-actors 2 --device cuda --max-tokens 8 "
        "--dtype bfloat16 --max-model-len 512 --engine-config schedule=resident --price-per-hour "
        "5.0688"
    ) in joined

    found = findings(capsys, path)
    assert statuses(found) == {"left to replace": "failed", "copied files": "warning"}
    assert re.fullmatch(
        r"PROJECT_ID in line \d+, SERVICE_EMAIL in line \d+, FILE_SYSTEM in line \d+",
        found["left to replace"]["value"],
    )
    price = read_prices().prices[A100].on_demand
    assert found["cost"]["value"].startswith(f"{2 * price:.2f} USD an hour: 2 x {A100} at {price} ")
    assert read_prices().date in found["cost"]["value"]
    assert "predicted" in found["plan"]["value"]

    mine = text.replace("FILE_SYSTEM", "10.0.0.2:/data").replace("PROJECT_ID", "mine")
    path.write_text(mine.replace("SERVICE_EMAIL", "me@mine"))
    assert statuses(findings(capsys, path)) == {"copied files": "warning"}
    for old, new, broken in (
        (" FILE_SYSTEM ", " 10.0.0.2:/data ", {}),
        ("--num-actors 2", "--num-actors 3", {"engines": "failed"}),
        (f"machineType: {A100}", "machineType: a2-ultragpu-1", {
            "node": "failed", "plan": "failed", "cost": "skipped"}),
        ("gs://jobs/out.journal", "/tmp/out.journal", {"rows and journal": "failed"}),
        ("gs://jobs/out.journal", "hf://out.journal", {"rows and journal": "failed"}),
        ("--input /data/prompts", "--input prompts", {"rows and journal": "failed"}),
        ("--resume ", "", {"command": "warning"}),
        ("--max-tokens", "--max-token", {"command": "failed"}),
        ("/data/models/tiny ", "/home/me/tiny ", {"model": "failed"}),
        ("memory: 182536110080", "memory: 1073741824", {"plan": "failed"}),
        ("memory: 182536110080", "memory: 999999999999", {"node": "failed"}),
        ("max_workers: 2", "max_workers: none", {"schema": "failed"}),
    ):  # fmt: skip
        assert old in joined, old
        path.write_text(joined.replace(old, new))
        if broken == {"schema": "failed"}:
            assert run(["doctor", str(path)]) == 2
            assert "a field is missing" in capsys.readouterr().err
            continue
        expected = {"left to replace": "failed", "copied files": "warning"} | broken
        found = findings(capsys, path)
        assert {name: found[name]["status"] for name in expected} == expected, old
        assert statuses(found).keys() <= expected.keys(), old


@pytest.mark.parametrize("kind", ["ray-aws", "kuberay", "skypilot", "slurm"])
def test_doctor_reads_each_kind(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = here / "file.yaml"
    job = ("--hardware", "g6e.8xlarge", "--spot", "--nodes", "3", "--write-as", kind)
    assert plan(*job, "--write", str(path)) == 0
    found = findings(capsys, path)
    assert found["node"]["section"] == kind
    assert found["engines"]["value"] == "3 on 3 nodes"
    spot = read_prices().prices["g6e.8xlarge"].spot
    assert spot is not None
    assert found["cost"]["value"].startswith(f"{3 * spot:.2f} USD an hour: 3 x g6e.8xlarge at ")
    assert "(spot, prices of " in found["cost"]["value"]
    checked = {name: each["status"] for name, each in found.items()}
    assert checked.pop("left to replace") == "failed"
    assert set(checked.values()) <= {"ok", "skipped", "warning"}


def test_spot_nodes_of_google_cloud_are_found_in_both_of_its_forms(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "cluster.yaml"
    assert plan("--hardware", "a3-highgpu-1g", "--spot", "--write", str(path)) == 0
    content = yaml.safe_load(path.read_text())
    config = content["available_node_types"]["worker"]["node_config"]
    assert config["scheduling"]["provisioningModel"] == "SPOT"
    for scheduling, kind in (
        (config["scheduling"], "spot"),
        ([{"preemptible": True}, {"onHostMaintenance": "TERMINATE"}], "spot"),
        ({"onHostMaintenance": "TERMINATE"}, "on demand"),
    ):
        config["scheduling"] = scheduling
        path.write_text(yaml.safe_dump(content))
        assert f"({kind}, prices of" in findings(capsys, path)["cost"]["value"]


def test_slurm_takes_nodes_that_no_cloud_has(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "job.sh"
    assert plan("--hardware", "a100", "--write-as", "slurm", "--write", str(path)) == 0
    path.write_text(path.read_text().replace("PARTITION", "gpu").replace("ACCOUNT", "mine"))
    found = findings(capsys, path)
    assert statuses(found) == {"schema": "skipped", "plan": "skipped", "cost": "skipped"}
    assert "no instance is named; memory of a node: " in found["node"]["value"]
    path.write_text(path.read_text().replace("ls -d /data/", "ls -d /scratch/"))
    assert statuses(findings(capsys, path))["rows and journal"] == "failed"


def test_a_pod_is_planned_with_the_memory_that_it_gets() -> None:
    node, given = HARDWARE_INSTANCES["g6e.8xlarge"], {"write": Path("f"), "spot": False}
    machine = Machine.find("g6e.8xlarge", node)
    for kind, memory in (("kuberay", machine.pod_bytes), ("skypilot", node.host_memory_bytes)):
        wanted = WantedFile.of(given | {"write_as": kind}, [])
        assert wanted is not None
        assert wanted.node("g6e.8xlarge", node).host_memory_bytes == memory


def test_a_ranking_writes_its_cheapest_node(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = here / "prices.json"
    both = {"g6e.8xlarge": {"on_demand": 4.0, "spot": 0.1}, A100: {"on_demand": 1.0, "spot": 0.9}}
    prices.write_text(json.dumps(both))
    given = ("--prices", str(prices), "--write", "job.yaml", "--write-as")
    assert plan(*given, "kuberay") == 0
    assert A100 in (here / "job.yaml").read_text()
    assert plan(*given, "skypilot", "--spot") == 0
    task = yaml.safe_load((here / "job.yaml").read_text())
    assert task["resources"]["instance_type"] == "g6e.8xlarge"
    capsys.readouterr()
    prices.write_text(json.dumps({"g6.xlarge": 1.0}))
    assert plan(*given, "kuberay", "--device-memory", "1GiB") == 2
    capsys.readouterr()
    assert run(["plan", "--model", "mixtral-8x7b", *given, "kuberay"]) == 1
    assert "none of 1 nodes can run the job; g6.xlarge: " in words(capsys.readouterr().err)


def test_what_cannot_be_written_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert plan(*arguments) == 2
        return words(capsys.readouterr().err)

    node = ("--hardware", A100)
    assert "--write-as, --input is for a file: name it with --write" in refused(
        *node, "--write-as", "kuberay", "--input", "x"
    )
    assert "an instance of gcp" in refused(*node, "--write", "f", "--write-as", "ray-aws")
    assert "leave out the others" in refused(*node, "--budget", "9", "--nodes", "2")
    assert "give --price-per-hour" in refused("--hardware", "a100", "--budget", "9")
    assert not (here / "f").exists()
    (here / "f").write_text("a: [")
    for text, problem in (("a: [", "is not YAML"), ("a: 1", "is neither a cluster")):
        (here / "f").write_text(text)
        assert run(["doctor", "f"]) == 2
        assert problem in words(capsys.readouterr().err)


def test_a_budget_buys_as_many_nodes_as_still_compute() -> None:
    spec, node = ModelSpec.from_config(CONFIG), hardware_preset(A100)
    workload = Workload(num_rows=10_000, prompt_tokens=512, generated_tokens=128)
    planner = JobPlanner(spec, workload, schedule="resident")

    @functools.cache
    def cost(count: int) -> float:
        found = Prediction.of(planner(node, count), count)
        return count * (found.loading_s + found.running_s) / 3600

    found = Prediction.of(planner(node))
    # It would pay for three if they computed together as fast as one does alone.
    budget = (found.running_s + 3.001 * found.loading_s) / 3600
    assert cost(2) <= budget < cost(3)
    bought, count = plan_in_budget(planner, node, 1.0, budget)
    assert (count, bought.workload.num_rows) == (2, workload.num_rows // 2)
    # With any budget, none loads for longer than it computes.
    _, count = plan_in_budget(planner, node, 1.0, 1e6)
    assert count == int(found.running_s / found.loading_s)
    with pytest.raises(OverBudgetError, match="the budget is"):
        plan_in_budget(planner, node, 1.0, 0.5 * cost(1))
    prices = {name: read_prices().prices[name] for name in (A100, "a3-highgpu-1g")}
    offers = rank(prices, planner, budget=0.5 * cost(1), spot=True)
    assert [offer.label for offer in offers] == ["no spot price", "over budget"]
    assert A100 in HARDWARE_INSTANCES


def test_doctor_reads_a_file_and_does_nothing_that_it_says(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    monkeypatch.setenv("SHELL", "/bin/bash")
    path = here / "cluster.yaml"
    assert plan("--hardware", A100, "--output", "gs://jobs/out", "--write", str(path)) == 0
    text = path.read_text()
    (here / "provider.py").write_text(f"open({str(here / 'ran')!r}, 'w')")
    for option in ("--install-completion", "--show-completion", "--help"):
        for command in ("raymoe plan ", "python examples/submit_job.py -- "):
            path.write_text(text.replace(f"#   {command}", f"#   {command}{option} "))
            found = findings(capsys, path)
            row = found["plan" if command.startswith("raymoe") else "command"]
            assert row["status"] == "failed"
            assert option in row["value"] + row["advice"]
    path.write_text(text.replace("type: gcp", "type: external, module: provider.Provider"))
    assert run(["doctor", str(path)]) == 2
    assert not (here / "home").exists()
    assert not (here / "ran").exists()


def doubled(first: str, part: str) -> str:
    lines = [part.replace("@", f"*a{i - 1}") for i in range(1, 40)]
    return "\n".join(
        [f"a0: &a0 {first}", *(f"a{i}: &a{i} {line}" for i, line in enumerate(lines, 1))]
    )


BOMBS = {
    "doubled": doubled("[x]", "[@, @]"),
    "merged": doubled("{x: 1}", "{<<: [@, @]}"),
    "round": "a: &a [*a]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_aliases_are_counted_before_they_are_followed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{BOMBS[name]}\navailable_node_types: {{}}\n")
    assert run(["doctor", str(path)]) == 2
    error = capsys.readouterr().err
    assert "an alias leads back to itself" in error or "more than 100,000 parts, with" in error
    path.write_text("[" * 20_000)
    assert run(["doctor", str(path)]) == 2


def test_names_are_quoted_in_comments_and_begin_no_line(here: Path) -> None:
    name = "tiny " + "x" * 60 + " raymoe plan --install-completion; rm -rf $HOME"
    (here / "tiny").rename(here / name)
    for number, kind in enumerate(("ray-gcp", "kuberay", "skypilot", "slurm")):
        path = here / f"a; reboot {number}.yaml"
        job = ["plan", "--model", name, *JOB, "--schedule", "resident", "--hardware", A100]
        assert run([*job, "--output", "gs://jobs/o", "--write", str(path), "--write-as", kind]) == 0
        lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert not any(
            line.removeprefix("#").lstrip().startswith("raymoe plan --i") for line in lines
        )
        named = [line for line in lines if "; r" in line]
        assert named
        assert all(re.search(r"'[^']*; r[^']*'", line) for line in named), named
