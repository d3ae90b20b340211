"""Which nodes count, what an actor has there, and what sizes follow from it."""

import json
import logging
from types import SimpleNamespace

import pytest
import ray
from ray.data import ActorPoolStrategy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.config import EngineConfig
from raymoe.data import nodes as nodes_module
from raymoe.data import sizing
from raymoe.data.cluster import Cluster
from raymoe.data.generator import MoEGenerator
from raymoe.data.nodes import GROUP_LABEL, NODE_LABEL, NodeGroup
from raymoe.data.sizing import map_batches_kwargs, plan_job
from raymoe.errors import ConfigError
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.workload import Workload
from raymoe.units import GB
from tests.unit.specs.test_model import MIXTRAL

HEAD = {"memory": 20 * GB, "object_store_memory": 4 * GB}  # without CPUs, as in cluster.yaml
L4 = {
    "CPU": 64.0,
    "GPU": 1.0,
    "memory": 230 * GB,
    "object_store_memory": 8 * GB,
    "accelerator_type:L4": 1.0,
}
CPUS = {"CPU": 16.0, "memory": 100 * GB, "object_store_memory": 8 * GB}


class Nodes(list):
    """Resources of nodes that run, labels of some by their number, and groups of an autoscaler."""

    def __init__(self):
        self.labels = {}
        self.groups = []

    def entries(self):
        return [
            {
                "Alive": True, "Resources": each, "NodeID": f"{number:056x}",
                "Labels": {NODE_LABEL: f"{number:056x}"} | self.labels.get(number, {}),
            }
            for number, each in enumerate(self)
        ]  # fmt: skip


@pytest.fixture
def nodes(monkeypatch):
    """The nodes that Ray names; a test fills it."""
    found = Nodes()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(sizing, "fetch_for_plan", lambda *_, **__: None)  # nobody has the model "m"
    monkeypatch.setattr(ray, "nodes", found.entries)
    monkeypatch.setattr(nodes_module, "find_groups", lambda _: (found.groups, None))
    return found


@pytest.fixture
def mixtral(tmp_path):
    """All that a plan needs of a model."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    return tmp_path


def test_a_head_without_cpus_runs_no_engine(nodes):
    nodes += [HEAD, L4, L4]
    cluster = Cluster.connected()
    assert (cluster.num_nodes, cluster.num_cpus, cluster.num_gpus) == (2, 128, 2)
    assert cluster.cpus_for(2) == 63
    share = cluster.share(2)
    assert share.num_cores == 64
    assert share.host_memory_bytes == int(0.85 * 230 * GB)
    nodes[1:] = [CPUS]
    assert Cluster.connected().num_nodes == 1
    assert Cluster.connected().share(1).host_memory_bytes == int(0.85 * 100 * GB)


def test_engines_run_where_gpus_are_unless_they_are_for_the_cpu(nodes):
    nodes += [CPUS, L4]
    assert Cluster.connected().num_cpus == 64
    assert Cluster.connected("cpu").num_cpus == 2 * 16
    nodes[0] = L4
    for device in ("cpu", "emulated"):
        cluster = Cluster.connected(device)
        assert cluster.num_gpus == 0
        assert not cluster.share(1).has_gpu
        assert cluster.actors_per_node(4) == 2


def test_the_smallest_node_counts(nodes):
    nodes += [L4, L4 | {"CPU": 32.0, "memory": 100 * GB}]
    cluster = Cluster.connected()
    assert cluster.share(2).num_cores == 32
    assert cluster.share(2).host_memory_bytes == int(0.85 * 100 * GB)


@pytest.mark.parametrize(
    ("name", "preset"), [("L4", "l4"), ("T4", "t4"), ("A10G", "a10"), ("L40S", "l40s")]
)
def test_the_gpu_is_known_by_rays_name_for_it(nodes, name, preset):
    nodes.append({f"accelerator_type:{name}": 1.0, "CPU": 8.0, "GPU": 1.0, "memory": 200 * GB})
    share = Cluster.connected().share(1)
    assert share.has_gpu
    assert share.gpu_memory_bytes == hardware_preset(preset).gpu_memory_bytes
    assert share.host_memory_bytes == int(0.85 * 200 * GB)


def test_a_gpu_that_nobody_knows_leaves_a_plan_for_the_host(nodes):
    nodes += [L4, {"CPU": 8.0, "GPU": 1.0, "memory": 200 * GB, "accelerator_type:X9": 1.0}]
    assert not Cluster.connected().share(1).has_gpu


def test_nodes_that_are_still_to_come_take_the_other_actors(nodes):
    """The first node of a cluster that grows must not be divided between all actors."""
    nodes += [HEAD, L4]
    cluster = Cluster.connected()
    assert cluster.actors_per_node(16) == 1
    assert cluster.share(16) == cluster.share(1)
    nodes[1] = L4 | {"GPU": 4.0}
    assert Cluster.connected().actors_per_node(16) == 4
    assert Cluster.connected(gpus_per_actor=2).actors_per_node(16) == 2


def test_nodes_with_too_few_gpus_for_an_engine_run_none(nodes):
    nodes += [L4, L4 | {"GPU": 2.0, "CPU": 96.0}]
    assert Cluster.connected(gpus_per_actor=2).num_cpus == 96
    assert Cluster.connected(gpus_per_actor=4).num_gpus == 2 * 1  # none has four: Ray will wait


def test_actors_may_share_a_gpu_or_do_without(nodes):
    nodes += [L4, L4]
    assert map_batches_kwargs("m", num_actors=4, num_gpus=0.5)["num_cpus"] == 31
    shared = map_batches_kwargs("m", num_actors=4, num_gpus=0.5)["fn_constructor_kwargs"]
    assert shared["engine_config"].host_memory_bytes == int(0.85 * 230 * GB / 2)
    without = map_batches_kwargs("m", num_actors=6, num_gpus=0)
    assert (without["num_gpus"], without["num_cpus"]) == (0, 21)


def test_sizes_are_those_of_the_plan_on_such_a_node(nodes, mixtral):
    nodes += [HEAD, L4, L4]
    kwargs = map_batches_kwargs(mixtral, num_actors=2)
    calls = kwargs["fn_constructor_kwargs"]["max_concurrent_calls"]
    assert (kwargs["num_gpus"], kwargs["num_cpus"]) == (1, 63)
    assert 94 * GB < kwargs["memory"] < 0.85 * 230 * GB  # weights, and what the KV cache gets
    assert calls * kwargs["batch_size"] > 2000
    assert kwargs["fn_constructor_kwargs"]["engine_config"].num_threads is None
    nodes[1:] = [L4 | {"memory": 80 * GB}] * 2  # the weights do not fit: the engine says so
    assert map_batches_kwargs(mixtral, num_actors=2)["memory"] is None


def test_hardware_that_is_given_counts_before_any_node(nodes, mixtral):
    nodes.append(HEAD)
    assert map_batches_kwargs(mixtral)["memory"] is None
    config = {"hardware": hardware_preset("l4"), "schedule": "in_place"}  # planned faster
    assert map_batches_kwargs(mixtral, engine_config=config)["memory"] > 94 * GB


def test_a_large_object_store_is_pointed_out(nodes, caplog):
    nodes.append(L4)
    with caplog.at_level(logging.WARNING):
        map_batches_kwargs("m")
        assert not caplog.records
        nodes[0] = L4 | {"object_store_memory": 70 * GB}
        map_batches_kwargs("m")
    assert "--object-store-memory=8000000000" in caplog.text


@pytest.mark.parametrize(
    ("found", "gpus_per_actor", "num_generators", "expected", "idle"),
    [
        pytest.param([HEAD, L4, L4, L4], 1, None, 3, [], id="one-GPU-each"),
        pytest.param([L4 | {"GPU": 4.0}] * 2, 1, None, 8, [], id="four-GPUs-each"),
        pytest.param([L4 | {"GPU": 4.0}] * 2, 2, None, 4, [], id="two-GPUs-an-engine"),
        pytest.param([L4] * 2, 0.5, None, 4, [], id="half-a-GPU"),
        pytest.param([L4] * 6, 1, 2, 3, [], id="two-generators"),
        pytest.param([HEAD, CPUS, CPUS], 1, None, 2, [], id="no-GPUs"),
        pytest.param([CPUS, CPUS], 1, 2, 2, [], id="two-generators-no-GPUs"),
        pytest.param([CPUS, L4], 1, None, 1, ["1 of 2 nodes run none"], id="one-without-a-GPU"),
        pytest.param([L4, L4 | {"GPU": 8.0}], 1, None, 9, [], id="unlike"),
        pytest.param([L4, L4 | {"GPU": 8.0}], 1, 1, 2, ["7 of 9 GPUs are not"], id="unlike-beside"),
        pytest.param([], 1, None, 1, [], id="no-node-yet"),
    ],
)
def test_a_job_has_as_many_actors_as_the_cluster_has_places(
    nodes, found, gpus_per_actor, num_generators, expected, idle, caplog
):
    nodes += found
    with caplog.at_level(logging.INFO, logger="ray.data.raymoe"):
        kwargs = map_batches_kwargs("m", num_gpus=gpus_per_actor, num_generators=num_generators)
    assert (kwargs["compute"].min_size, kwargs["compute"].max_size) == (expected, expected)
    texts = [record.message for record in caplog.records if record.name == "ray.data.raymoe"]
    assert len(texts) == (expected > 1 or bool(idle))
    for text, sentence in zip(texts, [*idle, ""], strict=False):
        assert f"actors: {expected}, with room for {expected}" in text
        assert sentence in text


def test_a_few_rows_have_no_more_actors_than_end_the_job_sooner(nodes, mixtral):
    """Each actor loads 94 GB; 64 rows are less than one batch of one of them."""
    nodes += [L4] * 16
    config = {"schedule": "in_place"}  # planned faster

    def job_of(num_rows, **options):
        workload = Workload(num_rows=num_rows, prompt_tokens=100, generated_tokens=50)
        return map_batches_kwargs(mixtral, workload=workload, engine_config=config, **options).plan

    few, many, chosen = job_of(64), job_of(100_000), job_of(64, num_actors=4)
    assert (few.num_actors, many.num_actors, chosen.num_actors) == (3, 16, 4)
    assert few.prediction.seconds < 1.1 * chosen.prediction.seconds
    last = few.describe().splitlines()[-1]
    assert last == "  actors: 3, with room for 16: more would hardly end the job sooner"
    assert many.describe().endswith("  actors: 16, with room for 16")
    assert chosen.places == ()  # the user's own choice


SPOT, STABLE = {"market": "spot"}, {"market": "on-demand"}
THIRD = NodeAffinitySchedulingStrategy(f"{2:056x}", soft=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, 4, id="all"),
        pytest.param({"label_selector": SPOT}, 2, id="label"),
        pytest.param({"label_selector": {"market": "!spot"}}, 2, id="not"),
        pytest.param({"label_selector": {"market": "in(spot,on-demand)"}}, 3, id="in"),
        pytest.param({"label_selector": {"market": "gone"},
                      "fallback_strategy": [{"label_selector": STABLE}]}, 1, id="fallback"),
        pytest.param({"accelerator_type": "L4"}, 4, id="accelerator"),
        pytest.param({"resources": {"disk": 1}}, 1, id="resources"),
        pytest.param({"resources": {"disk": 3}}, 1, id="none-yet"),
        pytest.param({"ray_remote_args": {"label_selector": SPOT, "max_restarts": 2}}, 2, id="all"),
        pytest.param({"scheduling_strategy": THIRD}, 1, id="affinity"),
        pytest.param({"runtime_env": {"env_vars": {"A": "b"}}}, 4, id="environment"),
    ],
)  # fmt: skip
def test_only_nodes_where_actors_may_run_count(nodes, options, expected, caplog):
    nodes += [L4, L4, L4 | {"disk": 2.0}, L4]
    nodes.labels = {0: SPOT, 1: SPOT, 2: STABLE}
    kwargs = map_batches_kwargs("m", **options)
    assert kwargs["compute"].max_size == expected
    given = {**options, **options.get("ray_remote_args", {})}
    given.pop("ray_remote_args", None)
    assert given.items() <= kwargs.items()
    assert ("no node of the cluster meets resources" in caplog.text) == ("3}" in str(options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"label_selector": {"market": "in(spot,"}}, "label_selector=.*Invalid label selector"),
        ({"label_selector": {"market": None}}, "must be string"),
        ({"fallback_strategy": [{"resources": {}}]}, "fallback_strategy=.*Unsupported option"),
        ({"accelerator_type": 4}, "accelerator_type=4.*must be"),
        ({"resources": {"CPU": 2}}, "Use the 'num_cpus'"),
        ({"scheduling_strategy": "PACK"}, "'PACK'; it takes DEFAULT or SPREAD"),
        ({"runtime_env": {"pip": ["a"], "conda": "b"}}, "runtime_env="),
        ({"ray_remote_args": {"max_restart": 3}}, "Invalid option keyword max_restart"),
        ({"ray_remote_args": {"num_cpus": 3}}, "num_cpus; give it to map_batches_kwargs"),
        ({"ray_remote_args": {"resources": {}}, "resources": {"a": 1}}, "give it once"),
        ({"ray_remote_args": 3}, "it has options of ray.remote by name"),
    ],
)
def test_what_ray_does_not_take_is_refused_at_once(options, reason):
    with pytest.raises(ConfigError, match=reason):
        map_batches_kwargs("m", **options)


def test_a_cluster_without_workers_is_planned_for_those_that_its_autoscaler_starts(nodes, mixtral):
    """Of three, one runs."""
    nodes += [HEAD, L4]
    nodes.labels[1] = {GROUP_LABEL: "l4"}
    resources = {name: L4[name] for name in ("CPU", "GPU", "memory", "accelerator_type:L4")}
    nodes.groups = [NodeGroup(name="l4", resources=resources, max_count=3)]
    running = map_batches_kwargs(mixtral, engine_config={"schedule": "in_place"})
    del nodes[1]
    workload = Workload(num_rows=50_000, prompt_tokens=100, generated_tokens=50)
    kwargs = map_batches_kwargs(
        mixtral, engine_config={"schedule": "in_place"}, workload=workload, label_selector={}
    )
    for found in (running, kwargs):
        assert (found["num_gpus"], found["num_cpus"], found["compute"].max_size) == (1, 63, 3)
        assert 94 * GB < found["memory"] < 0.85 * 230 * GB
    assert kwargs.plan.places[1].startswith("3 of 3 nodes do not run yet: the autoscaler starts")


SMALL = {"CPU": 16.0, "memory": 160 * GB}
LARGE = {"CPU": 64.0, "memory": 400 * GB}
IN_PLACE = {"schedule": "in_place", "device": "cpu"}


def unlike(mixtral, num_rows, **options):
    workload = Workload(num_rows=num_rows, prompt_tokens=100, generated_tokens=50)
    return map_batches_kwargs(mixtral, engine_config=IN_PLACE, workload=workload, **options)


def test_unlike_nodes_have_a_plan_each_and_rows_by_its_speed(nodes, mixtral):
    nodes += [{"CPU": 8.0, "memory": 20 * GB}, SMALL, SMALL, LARGE]
    kwargs = unlike(mixtral, 100_000)
    large, small = kwargs.plan.kinds
    assert (large.num_actors, small.num_actors, kwargs["compute"].max_size) == (1, 2, 3)
    assert large.speed > 2 * small.speed
    rows = [kind.plan.workload.num_rows for kind in (large, small)]
    assert rows[0] + 2 * rows[1] == pytest.approx(100_000, abs=3)
    assert rows[0] / rows[1] == pytest.approx(large.speed / small.speed, rel=0.15)
    assert large.plan.host_bytes > small.plan.host_bytes == kwargs["memory"]
    assert kwargs["num_cpus"] == 15
    assert large.num_tasks > small.num_tasks > kwargs["fn_constructor_kwargs"].plan.num_actors
    assert "label_selector" not in kwargs  # the head is too small for the request
    text = kwargs.plan.describe()
    assert "100,000 rows" in text
    assert "2 nodes with 16 CPU + 149.01 GiB of memory: 2 actors, " in text
    assert text.endswith("1 node with 8 CPU + 18.63 GiB of memory: the model does not fit there")
    alone = unlike(mixtral, 100_000, label_selector={NODE_LABEL: f"{3:056x}"}).plan
    assert kwargs.plan.prediction.seconds < 0.8 * alone.prediction.seconds


def test_a_few_rows_go_to_the_fastest_nodes(nodes, mixtral):
    nodes += [SMALL, LARGE, LARGE]
    kwargs = unlike(mixtral, 40)
    assert kwargs["compute"].max_size <= 2
    assert kwargs["num_cpus"] == 63
    text = kwargs.plan.describe()
    assert "left out: 1 node with 16 CPU + 149.01 GiB of memory: more would hardly end" in text
    assert "with room for 3" in text


def test_nodes_that_are_left_out_but_would_do_for_ray_are_excluded(nodes, mixtral):
    """By their names, so that new nodes count."""
    nodes += [{"CPU": 96.0, "memory": 105 * GB}, LARGE, SMALL]
    kwargs = unlike(mixtral, 100_000, label_selector=SPOT | {"zone": "!b"}, memory=1000)
    assert kwargs["compute"].max_size == 1  # no node meets the labels
    kwargs = unlike(mixtral, 100_000, memory=1000)
    assert kwargs["label_selector"] == {NODE_LABEL: f"!in({0:056x})"}


def test_gpus_of_unlike_nodes_divide_each_its_own(nodes, mixtral):
    nodes += [L4, L4 | {"GPU": 4.0, "CPU": 96.0, "memory": 500 * GB}]
    workload = Workload(num_rows=50_000, prompt_tokens=100, generated_tokens=50)
    config = {"schedule": "in_place"}  # planned faster
    kwargs = map_batches_kwargs(mixtral, workload=workload, engine_config=config)
    assert (kwargs["compute"].max_size, kwargs["num_gpus"]) == (5, 1)
    assert kwargs["num_cpus"] == 23  # of 95, for each of four
    config = kwargs["fn_constructor_kwargs"]["engine_config"]
    assert config.divides_node
    assert (config.num_threads, config.host_memory_bytes) == (None, None)
    assert {kind.num_actors for kind in kwargs.plan.kinds} == {1, 4}


def dataset_behind(compute, **fields):
    """What `map_batches_kwargs` looks at of a dataset that comes from a stage of actors."""
    stage = SimpleNamespace(compute=compute, ray_remote_args={}, **fields)
    stages = [SimpleNamespace(), stage]  # the first reads
    dag = SimpleNamespace(post_order_iter=lambda: stages, infer_schema=lambda: None)
    context = SimpleNamespace(custom_execution_callback_classes=[])
    return SimpleNamespace(_logical_plan=SimpleNamespace(dag=dag), context=context)


def test_stages_before_a_generator_keep_their_places(nodes):
    nodes += [L4] * 4
    user = dataset_behind(ActorPoolStrategy(size=3), fn=dict)
    user._logical_plan.dag.post_order_iter()[1].ray_remote_args["num_gpus"] = 1
    assert map_batches_kwargs("m", ds=user)["compute"].max_size == 1
    nodes[:] = [CPUS] * 2
    generator = {"fn": MoEGenerator, "fn_constructor_args": ("m",), "fn_constructor_kwargs": {}}
    first = dataset_behind(ActorPoolStrategy(size=2), **generator)
    with pytest.raises(ConfigError, match=r"take all 2 places.*num_generators=N"):
        map_batches_kwargs("m", ds=first)
    assert map_batches_kwargs("m", ds=first, num_generators=2)["compute"].max_size == 2


@pytest.mark.parametrize("num_actors", [0, -1, 2.0, True, "all"])
def test_a_number_of_actors_is_a_whole_one_or_auto(num_actors):
    with pytest.raises(ConfigError, match='must be a whole number from 1 or "auto"'):
        map_batches_kwargs("m", num_actors=num_actors)


def test_a_planned_job_counts_the_places_too(mixtral):
    workload = Workload(num_rows=50_000, prompt_tokens=100, generated_tokens=50)
    four = Cluster(num_nodes=4, num_cpus=256, num_gpus=0, memory_bytes=4 * 230 * GB)
    planned = plan_job(mixtral, EngineConfig(device="cpu"), workload, four, num_actors="auto")
    assert (planned.num_actors, planned.num_nodes) == (4, 4)
