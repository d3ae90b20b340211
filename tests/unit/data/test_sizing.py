"""The arguments of map_batches."""

import dataclasses
import inspect
import json
import re

import pytest
import ray.data
from hypothesis import given
from hypothesis import strategies as st

from raymoe.config import EngineConfig, Settings
from raymoe.data.cluster import Cluster
from raymoe.data.sizing import map_batches_kwargs, plan_actor
from raymoe.engine import node as engine_node
from raymoe.errors import ConfigError
from raymoe.measure.kept import identify_machine
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import Curve, HardwareSpec, MeasuredNode, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import GIB, format_money, format_seconds
from tests.tiny import make_checkpoint


def test_rows_in_flight_become_calls_of_small_batches():
    kwargs = map_batches_kwargs("m", rows_in_flight=1000, batch_size=16, num_actors=3)
    compute = kwargs["compute"]
    assert compute.max_concurrent_calls_per_actor == 63
    assert 63 * 1.25 <= compute.max_tasks_in_flight_per_actor < 63 * 1.25 + 1
    assert (compute.min_size, compute.max_size) == (3, 3)
    assert kwargs["fn_constructor_kwargs"]["max_concurrent_calls"] == 63


OF_RAY = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")  # makes its own context


def pool_of(**options):
    compute = map_batches_kwargs("m", num_actors=4, **options)["compute"]
    calls = compute.max_concurrent_calls_per_actor
    return calls, compute.max_tasks_in_flight_per_actor / calls


@OF_RAY
def test_a_range_of_actors_can_reach_the_load_at_which_ray_starts_another():
    context = ray.data.DataContext.get_current()
    threshold = context.autoscaling_config.actor_pool_util_upscaling_threshold
    for rows in (1, 16, 100, 5000):
        assert pool_of(rows_in_flight=rows)[1] < 1.75 or rows <= 32
        assert pool_of(rows_in_flight=rows, min_actors=1)[1] >= threshold


@OF_RAY
def test_the_first_actors_of_a_range_leave_the_others_their_part():
    def share(num_rows, **options):
        workload = Workload(num_rows=num_rows, prompt_tokens=8, generated_tokens=8)
        calls, factor = pool_of(min_actors=1, workload=workload, batch_size=16, **options)
        return calls * factor * 16 * 4 / num_rows  # of the rows, when all actors hold theirs

    assert all(0.5 < share(num_rows) <= 1.1 for num_rows in (640, 1600, 4000))
    assert share(10**6) < 0.1
    samples = {"n": 4}  # the workload counts samples
    assert 0.5 < share(4 * 1600, sampling_params=samples) * 4 <= 1.1


def test_calls_stay_below_the_limit_of_dispatch():
    kwargs = map_batches_kwargs("m", rows_in_flight=10**6, batch_size=16)
    assert kwargs["compute"].max_concurrent_calls_per_actor == 256


def test_calls_hold_more_rows_where_there_would_be_too_many_calls():
    assert map_batches_kwargs("m", rows_in_flight=2000)["batch_size"] == 16
    kwargs = map_batches_kwargs("m", rows_in_flight=21_760)
    assert kwargs["batch_size"] == 85
    assert kwargs["compute"].max_concurrent_calls_per_actor == 256
    assert map_batches_kwargs("m", rows_in_flight=21_760, batch_size=16)["batch_size"] == 16


def test_calls_of_a_large_job_stay_few_enough_for_its_driver():
    def batch_size(num_actors):
        return map_batches_kwargs("m", rows_in_flight=2928, num_actors=num_actors)["batch_size"]

    assert [batch_size(n) for n in (1, 16, 100, 1000)] == [16, 16, 37, 183]


def test_all_arguments_are_named_ones_of_map_batches():
    names = inspect.signature(ray.data.Dataset.map_batches).parameters
    kwargs = map_batches_kwargs("m", sampling_params={"max_tokens": 3}, id_column="id")
    assert set(kwargs) <= set(names)
    assert kwargs["batch_format"] == "pyarrow"
    assert kwargs["fn_constructor_kwargs"]["id_column"] == "id"
    assert not {"concurrency", "ray_remote_args_fn"} & set(kwargs)


@pytest.mark.parametrize(
    ("num_cpus", "num_nodes", "num_actors", "expected"),
    [
        (2, 1, 1, 0.5),
        (2, 1, 2, 0.25),
        (1, 1, 1, 0),
        (2, 2, 2, 0),
        (16, 1, 1, 7),
        (17, 1, 4, 2),
        (32, 4, 4, 7),
    ],
)
def test_actors_leave_a_cpu_of_each_node_to_the_reads(num_cpus, num_nodes, num_actors, expected):
    """On a single node, and a second generator's as well."""
    cluster = Cluster(num_cpus=num_cpus, num_nodes=num_nodes, num_gpus=0)
    assert cluster.cpus_for(num_actors) == expected


@given(
    num_nodes=st.integers(1, 5),
    num_generators=st.integers(1, 8),
    num_actors=st.integers(1, 6),
    cpus=st.integers(1, 128),
)
def test_all_generators_of_a_pipeline_leave_a_cpu(num_nodes, num_generators, num_actors, cpus):
    cluster = Cluster(
        num_nodes=num_nodes,
        num_cpus=cpus * num_nodes,
        num_gpus=0,
        memory_bytes=32 * GIB * num_nodes,
        num_generators=num_generators,
    )
    per_node = cluster.actors_per_node(num_actors) * num_generators
    assert cluster.cpus_for(num_actors) * per_node <= cpus - 1 + 1e-9
    share = cluster.share(num_actors)
    assert share.host_memory_bytes * per_node <= 32 * GIB
    assert share.num_cores * per_node <= max(cpus, per_node)


@pytest.mark.parametrize("field", ["num_actors", "num_generators", "rows_in_flight", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        map_batches_kwargs("m", **{field: value})


@pytest.mark.parametrize(("size", "num_gpus"), [(1, 1), (2, 2), (4, 4)])
def test_an_actor_asks_for_a_gpu_for_each_rank(size, num_gpus):
    config = {"device": "cuda", "tensor_parallel_size": size}
    kwargs = map_batches_kwargs("m", engine_config=config)
    assert kwargs["num_gpus"] == num_gpus
    assert kwargs["fn_constructor_kwargs"]["engine_config"].tensor_parallel_size == size


def test_ranks_of_an_emulated_device_need_no_gpu():
    config = {"device": "emulated", "tensor_parallel_size": 2}
    assert map_batches_kwargs("m", engine_config=config)["num_gpus"] is None


def test_gpus_that_are_too_few_for_the_ranks_are_refused():
    config = {"device": "cuda", "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="num_gpus is 1, but tensor_parallel_size is 2"):
        map_batches_kwargs("m", engine_config=config, num_gpus=1)


def test_memory_of_an_actor_is_that_of_all_its_ranks(tmp_path):
    make_checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    node = hardware_preset("t4")
    config = EngineConfig(hardware=node, tensor_parallel_size=2)
    plan = find_plan(ModelSpec.from_directory(tmp_path), node, tensor_parallel_size=2)
    found = plan_actor(tmp_path, dataclasses.replace(config, dtype="bfloat16"), node)
    assert found is not None
    assert found.memory_bytes == 2 * plan.footprint.total
    assert found.max_num_seqs == plan.policy.max_num_seqs


@pytest.fixture
def model(tmp_path):
    """Only a configuration: 1.6 GB of experts in bfloat16."""
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 1000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_weights_in_int8_take_half_the_memory_of_an_actor(model):
    config = EngineConfig(
        hardware=dataclasses.replace(RATES, host_memory_bytes=8 << 30), device="cpu"
    )
    int8 = dataclasses.replace(config, compute_dtype="int8")
    sizes = [
        plan_actor(model, each, None).plan.footprint.bytes_of("weights") for each in (config, int8)
    ]
    assert 0.5 < sizes[1] / sizes[0] < 0.52


def on_a_node(monkeypatch, num_gpus):
    cluster = Cluster(num_nodes=1, num_cpus=32, num_gpus=num_gpus, memory_bytes=32 * GIB)
    monkeypatch.setattr(Cluster, "connected", staticmethod(lambda *_: cluster))


def test_actors_on_the_gpus_of_one_node_share_the_weights_and_their_memory(model, monkeypatch):
    on_a_node(monkeypatch, 4)
    shared, own = (
        map_batches_kwargs(model, num_actors=4, engine_config={"shared_weights": choice})
        for choice in ("auto", False)
    )
    configs = [kwargs["fn_constructor_kwargs"]["engine_config"] for kwargs in (shared, own)]
    assert [config.shared_weights for config in configs] == [True, False]
    weights = configs[0].host_memory_bytes - configs[1].host_memory_bytes
    assert 0.75 * 1.6e9 < weights < 0.75 * 2.0e9  # three quarters are the neighbours'
    assert configs[1].host_memory_bytes * 4 <= 32 * GIB
    assert shared["memory"] < own["memory"]


def test_generators_of_one_pipeline_plan_with_their_part_of_a_node(model, monkeypatch):
    cluster = Cluster(num_nodes=1, num_cpus=33, num_gpus=0, memory_bytes=32 * GIB)
    monkeypatch.setattr(Cluster, "connected", staticmethod(lambda *_: cluster))
    alone, one_of_two = (map_batches_kwargs(model, num_generators=n) for n in (1, 2))
    assert (alone["num_cpus"], one_of_two["num_cpus"]) == (32, 16)
    config = one_of_two["fn_constructor_kwargs"]["engine_config"]
    assert config.host_memory_bytes == int(0.85 * 16 * GIB)
    assert config.num_threads == 16
    assert one_of_two["memory"] <= 16 * GIB
    assert alone["fn_constructor_kwargs"]["engine_config"].host_memory_bytes is None


@pytest.mark.parametrize(
    ("num_gpus", "num_actors", "options"),
    [(4, 1, {}), (0, 4, {}), (4, 4, {"device": "cpu"}), (4, 4, {"load_format": "dummy"})],
)
def test_weights_are_not_shared_alone_or_without_a_device(
    model, monkeypatch, num_gpus, num_actors, options
):
    on_a_node(monkeypatch, num_gpus)
    kwargs = map_batches_kwargs(model, num_actors=num_actors, engine_config=options)
    assert kwargs["fn_constructor_kwargs"]["engine_config"].shared_weights is False


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("/nope", {}, "'/nope' is neither a directory"),
        ("org/model", {"foo": 3}, "'foo'; known: "),
        ("org/model", {"num_actor": 3}, "did you mean 'num_actors'"),
        ("org/model", {"sampling_params": {"max_new_tokens": 5}}, "did you mean 'max_tokens'"),
        ("org/model", {"engine_config": {"device": "gpu"}}, "device is 'gpu'"),
    ],
)
def test_what_is_wrong_is_said_on_the_driver(model, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        map_batches_kwargs(model, **options)


@pytest.mark.parametrize("num_actors", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_plan_of_the_job_comes_with_its_time_and_cost(model, num_actors):
    workload = Workload(num_rows=40_000, prompt_tokens=100, generated_tokens=50)
    node = hardware_preset("l4")
    kwargs = map_batches_kwargs(
        model, workload=workload, num_actors=num_actors, engine_config={"hardware": node}
    )
    config = kwargs["fn_constructor_kwargs"]["engine_config"]
    assert config.workload.num_rows == 40_000 // num_actors
    planned = config.planned
    expected = find_plan(
        ModelSpec.from_directory(model),
        node,
        config.workload,
        schedule=planned.schedule,
        policy=planned.policy,
    )
    job = kwargs.plan
    assert job.plan.job.seconds == expected.job.seconds
    assert job.cost(3.6) == pytest.approx(expected.job.seconds / 1000)  # no cluster: on one node
    lines = job.describe(price_per_hour=3.6).splitlines()
    assert lines[0].startswith(f"plan: {40_000 // num_actors:,} rows; prompts of 100 tokens")
    assert f", {format_seconds(expected.job.seconds)} to generate, " in lines[2]
    assert f"{num_actors * expected.tokens_per_s:,.0f} generated tokens/s" in lines[2]
    million = format_money(job.cost(3.6) / 2, "EUR")
    assert job.describe(3.6, "EUR").endswith(f" in all, {million} per million generated tokens")
    assert map_batches_kwargs("m").plan is None


RATES = HardwareSpec(
    name="measured", num_cores=8, host_memory_bytes=1 << 30, host_bytes_per_s=50e9,
    host_flop_per_s=900e9, task_overhead_s=Curve(((1.0, 40e-6), (2048.0, 1e-3))),
)  # fmt: skip


@pytest.mark.parametrize(("num_actors", "num_cores"), [(1, 8), (2, 4)])
def test_actors_on_this_machine_plan_with_the_drivers_measurement(
    model, monkeypatch, num_actors, num_cores
):
    """By their part of it, once: the job is predicted as each of them plans it."""
    cluster = Cluster(num_nodes=1, num_cpus=8, num_gpus=0, memory_bytes=8 * GIB, is_here=True)
    monkeypatch.setattr(Cluster, "connected", staticmethod(lambda *_: cluster))
    measured = []
    monkeypatch.setattr(engine_node, "_measure_quickly", lambda threads: measured.append(threads) or RATES)  # fmt: skip # noqa: E501
    monkeypatch.setenv("RAYMOE_CACHE", "/dev/null/raymoe")
    workload = Workload(num_rows=4000, prompt_tokens=100, generated_tokens=50)
    kwargs = map_batches_kwargs(model, workload=workload, num_actors=num_actors)
    config = kwargs["fn_constructor_kwargs"]["engine_config"]
    assert measured == [None]
    handed = config.hardware
    assert isinstance(handed, MeasuredNode)
    assert handed.hardware.num_cores == num_cores
    assert handed.hardware.host_flop_per_s == RATES.host_flop_per_s * num_cores / 8
    assert handed.machine == identify_machine(config.num_threads).file_name
    node = engine_node.find_node(config, Settings(), "cpu")
    planned = config.planned
    expected = find_plan(
        ModelSpec.from_directory(model),
        node,
        config.workload,
        schedule=planned.schedule,
        policy=planned.policy,
    )
    assert kwargs.plan.prediction.running_s == pytest.approx(expected.job.seconds)
    assert measured == [None], "the actor measures nothing"
    given = map_batches_kwargs(model, workload=workload, engine_config={"hardware": RATES})
    assert given["fn_constructor_kwargs"]["engine_config"].hardware == RATES


def test_a_task_is_predicted_by_what_it_reads(model):
    workload = Workload(num_rows=4000, prompt_tokens=100, generated_tokens=50)
    options = {"workload": workload, "engine_config": {"hardware": RATES, "device": "cpu"}}
    options["engine_config"]["hardware"] = dataclasses.replace(RATES, host_memory_bytes=32 * GIB)
    scored = map_batches_kwargs(model, task="score", **options).plan
    written = map_batches_kwargs(model, **options).plan
    assert scored.prediction.running_s < 0.8 * written.prediction.running_s
    text = scored.describe(1.0)
    assert " to read, " in text
    assert "prompt tokens/s, reading is bound by" in text
    assert "per million prompt tokens" in text
    assert "generate" not in text
