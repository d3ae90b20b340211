"""Which pipelines find room on which nodes, and what is said of the others."""

import logging
from types import SimpleNamespace

import pytest
import ray

from raymoe.data.cluster import CheckFit, PoolWatch, Stage, find_problem
from raymoe.data.generator import MoEGenerator
from raymoe.data.nodes import Node
from raymoe.errors import ExecutionError, InfeasiblePlanError
from raymoe.units import GIB

NODE = {"CPU": 16.0, "memory": 32.0 * GIB}
READ = Stage(name="Read", num_actors=0, each={"CPU": 1, "GPU": 0, "memory": 0})


def generator(cpus=0.0, *, actors=1, gpus=0.0, gib=0.0, name="Write"):
    each = {"CPU": cpus, "GPU": gpus, "memory": gib * GIB}
    return Stage(name=name, num_actors=actors, each=each)


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
    assert find_problem(stages, [Node(resources=each) for each in nodes]) == ""


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
    problem = find_problem(stages, [Node(resources=each) for each in nodes])
    for reason in reasons:
        assert reason in problem


class Operator(SimpleNamespace):
    __hash__ = object.__hash__


def operator(fn, cpu):
    each = SimpleNamespace(cpu=cpu, gpu=None, memory=None)
    pool = SimpleNamespace(min_size=lambda: 1, max_size=lambda: 2)
    return Operator(
        name=f"MapBatches({fn.__name__})",
        min_scheduling_resources=lambda: each,
        get_autoscaling_actor_pools=lambda: [pool],
        _logical_operators=[SimpleNamespace(fn=fn)],
    )


class Own(MoEGenerator):
    pass


class OfSomebodyElse:
    pass


def start(monkeypatch, fn, *, num_nodes=1, autoscaler=None, deaths=0):
    nodes = [{"Alive": True, "Resources": NODE}] * num_nodes
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {}}])
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: autoscaler)
    operators = [operator(fn, 15) for _ in range(num_nodes + 1)]
    state = SimpleNamespace(total_enqueued_input_blocks=lambda: 0)
    context = SimpleNamespace(max_consecutive_actor_init_deaths=deaths)
    executor = SimpleNamespace(_topology=dict.fromkeys(operators, state), _data_context=context)
    CheckFit().before_execution_starts(executor)
    return context.max_consecutive_actor_init_deaths


def test_a_pipeline_on_one_machine_is_refused_and_elsewhere_warned_of(monkeypatch, caplog):
    with pytest.raises(InfeasiblePlanError, match=r"MapBatches\(Own\).*num_generators"):
        start(monkeypatch, Own)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        start(monkeypatch, Own, num_nodes=2)
        start(monkeypatch, Own, autoscaler=SimpleNamespace(node_group_configs=[]))
    assert len(caplog.records) == 2
    assert "unless more nodes come" in caplog.text


def test_pipelines_without_a_generator_are_left_alone(monkeypatch):
    assert start(monkeypatch, OfSomebodyElse) == 0


def test_each_actor_may_fail_twice_before_any_has_loaded(monkeypatch):
    assert start(monkeypatch, Own, num_nodes=2) == 2 * 2  # pools have at most two
    assert start(monkeypatch, Own, num_nodes=2, deaths=7) == 7


class Pool:
    """Actors by their state: "placed" ones load, "waiting" ones have no node."""

    num_restarts = 0

    def __init__(self, *states):
        self.states = states
        self._pending_actors = {}

    def num_pending_actors(self):
        self._pending_actors = {
            index: SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda index=index: str(index)))
            for index, state in enumerate(self.states)
            if state != "running"
        }
        return len(self._pending_actors)

    def num_running_actors(self):
        return self.states.count("running")

    def min_size(self):
        return len(self.states)

    max_size = min_size

    def max_tasks_in_flight_per_actor(self):
        return 90

    def table(self, actor_state_name):
        wanted = actor_state_name == "RESTARTING"
        return {
            str(index): {
                "Address": {
                    "IPAddress": "10.0.0.1" if state == "placed" else "",
                    "NodeID": "a" if state == "placed" else "",
                },
                "NumRestarts": self.num_restarts,
            }
            for index, state in enumerate(self.states)
            if wanted == (state == "restarting")
        }


@pytest.fixture
def watch(monkeypatch):
    """Watches a pool of two actors on a cluster of two nodes, planned to take 100 s."""

    def make(pool):
        state = SimpleNamespace(
            actors=pool.table,
            available_resources_per_node=lambda: {
                "a": {"memory": 9.0 * GIB},
                "b": {"CPU": 0.5, "memory": 1.0 * GIB},
            },
        )
        monkeypatch.setattr(ray._private, "state", state)
        plan = SimpleNamespace(num_actors=2, seconds_with=lambda number: 200 / number)
        options = SimpleNamespace(plan=plan)
        logical = SimpleNamespace(fn=Own, fn_constructor_kwargs=options)
        each = SimpleNamespace(cpu=1, gpu=None, memory=1.5 * GIB)
        return PoolWatch(
            SimpleNamespace(
                name="Write",
                min_scheduling_resources=lambda: each,
                get_autoscaling_actor_pools=lambda: [pool],
                _logical_operators=[logical],
            ),
            SimpleNamespace(total_enqueued_input_blocks=lambda: 0),
        )

    return make


def said(caplog, watch, seconds):
    caplog.clear()
    for now_s in seconds:
        watch.look(float(now_s))
    return [record.getMessage() for record in caplog.records]


def test_actors_that_find_no_room_on_a_busy_cluster_are_told_of_with_figures(watch, caplog):
    pool = Pool("waiting", "placed")
    watched = watch(pool)
    (text,) = said(caplog, watched, range(30))
    assert "waiting for 1 CPU + 1.50 GiB of memory for 1 of 2 actors of Write" in text
    assert "0.5 CPU + 1.00 GiB of memory free" in text  # of the node that has most
    assert watched._shares.loading == ["a"]
    assert len(said(caplog, watched, range(30, 160))) == 2
    pool.states = ("placed", "placed")  # the model loads, however long
    assert not said(caplog, watched, range(160, 300))


def test_the_prediction_follows_the_actors_that_run(watch, caplog):
    pool = Pool("running", "placed")
    watched = watch(pool)
    assert not said(caplog, watched, range(30))
    pool.states = ("running", "waiting")
    texts = said(caplog, watched, range(30, 60))
    assert sorted(text.split()[0] for text in texts) == ["1", "waiting"]
    assert "1 of 2 actors of Write run: the job is predicted to take 3m20s after loading" in texts
    pool.states = ("running", "running")
    (text,) = said(caplog, watched, range(60, 90))
    assert text == "2 of 2 actors of Write run: the job is predicted to take 1m40s after loading"
    pool.states = ("running",)  # the last rows
    assert not said(caplog, watched, range(90, 120))


def test_a_pool_that_runs_as_planned_says_nothing(watch, caplog):
    assert not said(caplog, watch(Pool("running", "running")), range(100))


def test_an_actor_that_dies_whenever_it_loads_ends_the_job(watch):
    pool = Pool("running", "restarting")
    check, pool.num_restarts = CheckFit(), 4
    check._pools = [watch(pool)]
    check.on_execution_step(None)  # the others generate all rows
    for states, num_restarts in ((("placed", "restarting"), 3), (("restarting",), 4)):
        check.on_execution_step(None)
        pool.states, pool.num_restarts, check._next_look_s = states, num_restarts, 0.0
    with pytest.raises(ExecutionError, match="has ended 4 times while it loaded"):
        check.on_execution_step(None)


def test_what_cannot_be_told_does_not_end_the_job(monkeypatch, caplog):
    check = CheckFit()
    check._pools = [SimpleNamespace(look=lambda _: 1 / 0)]
    check.on_execution_step(None)
    assert "no longer says what actors wait for" in caplog.text
    assert not check._pools
