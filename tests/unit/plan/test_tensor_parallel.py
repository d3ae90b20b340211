"""Plans of one of several ranks: its part of the node, the time of sums, and what GPUs gain."""

from dataclasses import replace

import pytest

from raymoe.errors import ConfigError
from raymoe.plan.cost import OVERHEAD_S, PEER_STEP_S, StepCost
from raymoe.plan.plan import Plan
from raymoe.plan.search import find_plan
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.specs.attention.work import AttentionShape
from raymoe.specs.hardware import Curve, HardwareSpec, HostCurves, hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.tensor_shards import shard_model
from raymoe.specs.workload import Workload
from raymoe.units import GIB

T4 = hardware_preset("t4")
# S6 to S9 of MoE-Lightning, table 2: a node with two and with four T4, a link each.
T4_NODE = replace(T4, num_cores=32, host_memory_bytes=int(0.85 * 416 * GIB))
MTBENCH = Workload(num_rows=2000, prompt_tokens=417, generated_tokens=128)
UNPADDED = Workload(num_rows=2000, prompt_tokens=98, generated_tokens=128)


def test_a_share_of_a_node_is_a_whole_gpu_and_a_part_of_the_host() -> None:
    share = T4.share(2)
    for name in ("num_cores", "host_memory_bytes", "host_bytes_per_s", "host_flop_per_s"):
        assert getattr(share, name) == getattr(T4, name) / 2
    for name in ("gpu_memory_bytes", "gpu_flop_per_s", "htod_bytes_per_s", "dtoh_bytes_per_s"):
        assert getattr(share, name) == getattr(T4, name)
    assert share.name == "1/2 of t4"
    assert T4.share(1) is T4


def test_measured_rates_of_cores_are_shared_and_their_overhead_is_not() -> None:
    curve = Curve(((1.0, 8.0), (2.0, 16.0)))
    curves = HostCurves(
        product_flop_per_s=curve,
        expert_flop_per_s=curve,
        attention_bytes_per_s=curve,
        attention_flop_per_s=8.0,
        attention_bytes_per_s_of_threads=curve,
        prefill_flop_per_s=curve,
        activation_bytes_per_s=8.0,
        task_overhead_s=curve,
    )
    shared = replace(T4, host_curves=curves).share(4).host_curves
    assert shared is not None
    assert shared.product_flop_per_s.at(1) == shared.prefill_flop_per_s.at(1) == 2
    assert shared.attention_flop_per_s == shared.activation_bytes_per_s == 2
    assert shared.task_overhead_s == shared.attention_bytes_per_s_of_threads == curve


def test_more_ranks_than_cores_have_one_each() -> None:
    share = replace(T4, num_cores=2).share(4)
    assert share.num_cores == 1
    assert share.host_flop_per_s == T4.host_flop_per_s / 4


def cost(count: int, node: HardwareSpec) -> StepCost:
    model = shard_model(model_preset("mixtral-8x7b"), count)
    rows = AttentionShape(rows=500, decode_rows=500, pairs=0, prompt_pairs=0, context_tokens=500)
    micro_batch = MicroBatchShape(host=rows, device=AttentionShape(), logit_rows=500)
    return StepCost(ModelWork.of(model, 2), node, micro_batches=(micro_batch,))


@pytest.mark.parametrize("op", [Op.POST, Op.EXPERTS])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_sums_take_the_time_of_a_ring(op: Op, count: int) -> None:
    task = Task(op=op, layer=1, part=0, resource=Resource.GPU)
    known, free = (replace(T4, peer_bytes_per_s=rate) for rate in (5e9, 1e30))
    found = cost(count, known).duration_s(task) - cost(count, free).duration_s(task)
    sent = 2 * (count - 1) / count * 500 * 4096 * 2
    assert found == pytest.approx(sent / 5e9, rel=1e-9)
    steps = 2 * (count - 1) * PEER_STEP_S
    assert cost(count, free).all_reduce_s(500) == pytest.approx(steps)
    assert cost(count, free).duration_s(task) > steps + OVERHEAD_S[Resource.GPU]


def test_gpus_without_a_known_way_to_each_other_go_over_their_links() -> None:
    slow = replace(T4, dtoh_bytes_per_s=3e9)
    assert cost(2, slow).all_reduce_s(500) == pytest.approx(
        cost(2, replace(T4, peer_bytes_per_s=3e9)).all_reduce_s(500)
    )


def test_one_rank_adds_up_nothing() -> None:
    assert cost(1, T4).all_reduce_s(500) == 0
    assert cost(2, T4).all_reduce_s(0) == 0


@pytest.mark.slow
def test_the_plan_of_a_part_is_that_of_a_rank() -> None:
    model = model_preset("mixtral-8x7b")
    plan = find_plan(model, T4, MTBENCH, tensor_parallel_size=2)
    of_part = find_plan(shard_model(model, 2), T4.share(2), MTBENCH)
    assert plan.policy == of_part.policy
    assert plan.num_ranks == of_part.num_ranks == 2
    assert plan.host_bytes == 2 * plan.footprint.total <= T4.host_memory_bytes
    assert "2 GPUs share each step" in plan.describe()


def test_a_node_without_a_gpu_has_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but t4 has no GPU"):
        find_plan(model_preset("mixtral-8x7b"), T4.without_gpu(), tensor_parallel_size=2)


def plan_of(name: str, count: int, workload: Workload) -> Plan:
    return find_plan(
        model_preset(name), T4_NODE, workload, tensor_parallel_size=count, max_model_len=1024
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workload", "published"),
    [("mixtral-8x22b", MTBENCH, (2.77, 3.38)), ("dbrx", UNPADDED, (2.1, 2.8))],
)
def test_four_t4_gain_about_as_much_over_two_as_published(
    name: str, workload: Workload, published: tuple[float, float]
) -> None:
    """MoE-Lightning, section 5.3: from 2 to 4 GPUs, more than twice for the model of 281 GB.

    Their batches are bound by device memory, which grows with the ranks; those here by host memory,
    which does not: weights that stay on the devices leave the link, and the host to the cache.
    """
    two, four = (plan_of(name, count, workload) for count in (2, 4))
    gain = four.tokens_per_s / two.tokens_per_s
    assert 1.9 < gain < published[1]
    assert two.bound is four.bound is Resource.HTOD
    if name == "mixtral-8x22b":
        assert gain > 2  # more than the links alone give
