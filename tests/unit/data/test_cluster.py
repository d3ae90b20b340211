"""Which nodes count, what an actor has there, and what sizes follow from it."""

import json
import logging
from types import SimpleNamespace

import pytest
import ray
from ray.data import ActorPoolStrategy, DataContext

from raymoe.config import EngineConfig
from raymoe.data import sizing
from raymoe.data.cluster import Cluster
from raymoe.data.generator import MoEGenerator
from raymoe.data.sizing import configure_data_context, map_batches_kwargs, plan_job
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


@pytest.fixture
def nodes(monkeypatch):
    """The nodes that Ray names; a test fills it."""
    found: list[dict] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(sizing, "fetch_for_plan", lambda _: None)  # nobody has the model "m"
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Alive": True, "Resources": each} for each in found]
    )
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
        pytest.param([L4, L4 | {"GPU": 8.0}], 1, None, 2, ["7 of 9 GPUs are not"], id="unlike"),
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


def dataset_behind(compute, **fields):
    """What `map_batches_kwargs` looks at of a dataset that comes from a stage of actors."""
    stage = SimpleNamespace(compute=compute, ray_remote_args={}, **fields)
    stages = [SimpleNamespace(), stage]  # the first reads
    dag = SimpleNamespace(post_order_iter=lambda: stages, infer_schema=lambda: None)
    return SimpleNamespace(_logical_plan=SimpleNamespace(dag=dag))


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")  # makes its own context
def test_nodes_that_are_lost_while_they_load_end_no_job():
    context = configure_data_context(context=DataContext())
    assert context.max_consecutive_actor_init_deaths == 3
    context.max_consecutive_actor_init_deaths = 7
    assert configure_data_context(context=context).max_consecutive_actor_init_deaths == 7
