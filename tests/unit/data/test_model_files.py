"""Names on a hub are planned as directories are, or refused, by the driver or a node."""

import pytest
import ray
from ray.exceptions import RayTaskError

from raymoe.assets import demo_model_path
from raymoe.cli import run
from raymoe.cli.pipeline import check_model
from raymoe.config import EngineConfig
from raymoe.data import model_files
from raymoe.data.model_files import fetch_for_plan
from raymoe.data.sizing import map_batches_kwargs
from raymoe.download.files import UnreachableError
from raymoe.download.models import find_files
from raymoe.errors import CheckpointError
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.workload import Workload
from tests.hub import used_hub

DEMO = demo_model_path()
HERE, THERE = "10.0.0.1", "10.0.0.2"
IDS = {HERE: "aa" * 28, THERE: "bb" * 28}


@pytest.fixture
def hub(tmp_path):
    with used_hub(tmp_path / "hub") as found:
        found.put("org/demo", DEMO)
        yield found


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path / "cache"))


def test_a_name_on_the_hub_is_planned_like_its_directory(hub) -> None:
    workload = Workload(num_rows=1000, prompt_tokens=20, generated_tokens=10)
    options = {"engine_config": {"hardware": hardware_preset("l4")}, "workload": workload}
    there, here = (map_batches_kwargs(model, **options) for model in ("org/demo", DEMO))
    assert there["memory"] == here["memory"] is not None
    assert there.plan.prediction == here.plan.prediction
    assert hub.downloads() == []
    with pytest.raises(CheckpointError, match="no model 'org/missing'"):
        map_batches_kwargs("org/missing", **options)


def test_the_command_refuses_without_weights_too(hub) -> None:
    check_model("org/demo", {}, EngineConfig(), 1)
    assert hub.downloads() == []
    with pytest.raises(CheckpointError, match="no model 'org/missing'"):
        check_model("org/missing", {}, EngineConfig(), 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "no model 'org/missing'"),
        ("gated", "is gated"),
        ("mamba", "'mamba' is not supp"),
    ],
)
def test_the_command_refuses_before_ray_starts(hub, tmp_path, capsys, name, said) -> None:
    hub.put("org/gated", DEMO, token="yours", is_gated=True)
    hub.put("org/mamba", {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b""})
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    options = ["--model", f"org/{name}", "--input", str(rows), "--output", str(output)]
    assert run(["generate", *options]) != 0
    assert said in capsys.readouterr().err
    assert not ray.is_initialized()
    assert not output.exists()


class Nodes:
    """A Ray of two nodes, in whose place this process fetches; `answer` comes from the other."""

    def __init__(self, monkeypatch, answer) -> None:
        self.asked = []
        nodes = [
            {"Alive": True, "NodeManagerAddress": address, "NodeID": node, "Resources": {}}
            for address, node in IDS.items()
        ]
        self.nodes = nodes
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(model_files, "get_node_ip_address", lambda: HERE)
        monkeypatch.setattr(ray, "remote", lambda **_: lambda _: self)
        monkeypatch.setattr(ray, "get", lambda *_, **__: answer())

    def options(self, *, scheduling_strategy, runtime_env):
        self.asked.append((scheduling_strategy.node_id, runtime_env))
        return self

    def remote(self, model_source):
        return model_source


def raised(error):
    def answer():
        raise RayTaskError("f", "", error).as_instanceof_cause()

    return answer


def test_a_node_fetches_what_the_driver_cannot(cache, monkeypatch) -> None:
    """Whose copy is here until it can."""
    files = {"config.json": (DEMO / "config.json").read_bytes(), "a/b.jinja": b"-"}
    nodes = Nodes(monkeypatch, lambda: files)
    fetch_for_plan("org/name")  # tests are offline
    assert nodes.asked == [(IDS[THERE], {})]
    directory = find_files("org/name")
    assert directory.name == "name"
    assert (directory / "a" / "b.jinja").read_bytes() == b"-"
    monkeypatch.setattr(ray, "nodes", list)
    fetch_for_plan("org/name")
    with pytest.raises(UnreachableError):
        fetch_for_plan("org/other")


def test_a_node_that_is_refused_refuses_the_job(cache, monkeypatch) -> None:
    Nodes(monkeypatch, raised(CheckpointError("gated")))
    with pytest.raises(CheckpointError, match="gated"):
        fetch_for_plan("org/name")


def test_an_answer_to_the_driver_counts_before_the_silence_of_a_node(
    cache, hub, monkeypatch
) -> None:
    Nodes(monkeypatch, raised(UnreachableError("no network")))
    with pytest.raises(CheckpointError, match="no model 'org/missing'"):
        fetch_for_plan("org/missing")


def test_the_environment_of_actors_has_their_token(cache, hub, monkeypatch) -> None:
    hub.put("org/gated", DEMO, token="mine", is_gated=True)
    env = {"env_vars": {"HF_TOKEN": "mine"}}
    fetch_for_plan("org/gated", runtime_env=env)  # the same before Ray runs
    nodes = Nodes(monkeypatch, lambda: {"config.json": b"{}"})
    monkeypatch.setattr(ray, "nodes", lambda: nodes.nodes[:1])
    fetch_for_plan("org/gated", runtime_env=env)
    assert nodes.asked == [(IDS[HERE], env)]
