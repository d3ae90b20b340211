"""Which pipelines find room on which nodes, and what is said of the others."""

import logging
import os
from types import SimpleNamespace

import pytest
import ray

from raymoe.data import cluster
from raymoe.data.cluster import CheckFit, Stage, check_before_start, find_problem
from raymoe.data.generator import MoEGenerator
from raymoe.data.sizing import map_batches_kwargs
from raymoe.errors import InfeasiblePlanError
from raymoe.units import GIB

NODE = {"CPU": 16.0, "memory": 32.0 * GIB}
READ = Stage(name="Read", num_actors=0, each={"CPU": 1, "GPU": 0, "memory": 0})


def generator(cpus=0.0, *, actors=1, gpus=0.0, gib=0.0, name="Write"):
    each = {"CPU": cpus, "GPU": gpus, "memory": gib * GIB}
    return Stage(name=name, num_actors=actors, each=each, is_generator=True)


@pytest.mark.parametrize(
    ("stages", "nodes"),
    [
        ([READ, generator(15)], [NODE]),
        ([generator(16)], [NODE]),  # nothing is to be read
        ([READ, generator(7), generator(7)], [NODE]),
        ([READ, generator(15, actors=2)], [NODE, NODE]),
        ([READ, generator(16, actors=2)], [NODE, NODE, {"CPU": 1.0}]),
        ([READ, generator(0.1, actors=10)], [{"CPU": 2.0}]),
        ([READ, generator(gib=16), generator(gib=16)], [NODE]),
        ([READ, generator(1, gpus=0.5), generator(1, gpus=0.5)], [NODE | {"GPU": 1.0}]),
    ],
)
def test_pipelines_that_find_room(stages, nodes):
    assert find_problem(stages, nodes) == ""


@pytest.mark.parametrize(
    ("stages", "nodes", "reasons"),
    [
        ([READ, generator(16)], [NODE], ["no room for Read, which needs 1 CPU", "16 CPU"]),
        ([READ, generator(1), generator(1)], [{"CPU": 2.0}], ["no room for Read"]),
        (
            [READ, generator(15), generator(15, name="Judge")],
            [NODE],
            ["1 of 1 actors of Judge", "1 x Write with 15 CPU; 1 x Judge", "the nodes have 16 CPU"],
        ),
        ([READ, generator(9, actors=3)], [NODE, NODE], ["1 of 3 actors of Write"]),
        (
            [READ, generator(1, gib=20), generator(1, gib=20, name="Judge")],
            [NODE],
            ["actors of Judge", "1 CPU + 20.00 GiB of memory", "have 16 CPU + 32.00 GiB of memory"],
        ),
        ([generator(1, gpus=1), generator(1, gpus=1)], [NODE | {"GPU": 1.0}], ["1 CPU + 1 GPU"]),
    ],
)
def test_what_finds_no_room_is_named_with_figures(stages, nodes, reasons):
    problem = find_problem(stages, nodes)
    for reason in reasons:
        assert reason in problem


def operator(fn, cpu):
    each = SimpleNamespace(cpu=cpu, gpu=None, memory=None)
    pool = SimpleNamespace(min_size=lambda: 1)
    return SimpleNamespace(
        name=f"MapBatches({fn.__name__})",
        min_scheduling_resources=lambda: each,
        get_autoscaling_actor_pools=lambda: [pool],
        _logical_operators=[SimpleNamespace(fn=fn)],
    )


class Own(MoEGenerator):
    pass


class OfSomebodyElse:
    pass


def start(monkeypatch, fn, *, num_nodes=1, autoscaler=None):
    nodes = [{"Alive": True, "Resources": NODE}] * num_nodes
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {}}])
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: autoscaler)
    executor = SimpleNamespace(_topology=[operator(fn, 15)] * (num_nodes + 1))
    CheckFit().before_execution_starts(executor)


def test_a_pipeline_on_one_machine_is_refused_and_elsewhere_warned_of(monkeypatch, caplog):
    with pytest.raises(InfeasiblePlanError, match=r"MapBatches\(Own\).*num_generators"):
        start(monkeypatch, Own)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        start(monkeypatch, Own, num_nodes=2)
        start(monkeypatch, Own, autoscaler=object())
    assert len(caplog.records) == 2
    assert "unless more nodes come" in caplog.text


def test_pipelines_without_a_generator_are_left_alone(monkeypatch):
    start(monkeypatch, OfSomebodyElse)


def test_the_check_stands_next_to_callbacks_of_others(monkeypatch):
    monkeypatch.setenv(cluster.VARIABLE, "somebody.Else")
    map_batches_kwargs("m")
    check_before_start()
    assert os.environ[cluster.VARIABLE] == "somebody.Else,raymoe.data.cluster.CheckFit"
