"""Costs of a step on a measured host: each kernel by its own curve, and nothing by two."""

import dataclasses

import pytest

from raymoe.plan.cost import CPU_ATTENTION_EFFICIENCY, OVERHEAD_S, StepCost
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.graph import Op, Resource
from raymoe.schedule.timeline import simulate
from raymoe.specs.hardware import Curve, HardwareSpec, HostCurves
from raymoe.specs.model import ModelSpec

HIDDEN, HEADS, KV_HEADS, DIM, VOCABULARY = 1024, 16, 4, 64, 32000
EXPERTS, TOP_K, EXPERT_HIDDEN = 8, 2, 2816
MODEL = ModelSpec.from_config(
    {
        "model_type": "mixtral",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "intermediate_size": EXPERT_HIDDEN,
        "max_position_embeddings": 4096,
        "vocab_size": VOCABULARY,
    }
)
CURVES = HostCurves(
    product_flop_per_s=Curve(((1, 3e10), (16, 4e11), (64, 4.4e11))),
    expert_flop_per_s=Curve(((1, 5e10), (16, 3.9e11), (64, 4.3e11))),
    attention_bytes_per_s=Curve(((32, 1e10), (512, 2.5e10))),
    attention_flop_per_s=1.5e11,
    attention_bytes_per_s_of_threads=Curve(((1, 2e10),)),
    prefill_flop_per_s=Curve(((32, 5e10), (512, 2.5e11))),
    activation_bytes_per_s=1.5e10,
)
NODE = HardwareSpec(
    name="node", num_cores=2, host_memory_bytes=1, host_bytes_per_s=3.5e10, host_flop_per_s=4.7e11,
    host_curves=CURVES,
)  # fmt: skip
DECODE = MicroBatchShape.decode(64, 512)
PREFILL = MicroBatchShape.prefill(8, 512, is_on_host=True)


def seconds(
    shape: MicroBatchShape, node: HardwareSpec = NODE, *, bytes_per_element: int = 2
) -> dict[str, float]:
    """Seconds of each operation, without what the interpreter takes."""
    cost = StepCost(ModelWork.of(MODEL, bytes_per_element), node, (shape,))
    return {
        op: taken - OVERHEAD_S[Resource.CPU]
        for op, taken in simulate(build_in_place(1), cost).seconds_by_op().items()
    }


def with_curves(**curves: object) -> HardwareSpec:
    return dataclasses.replace(NODE, host_curves=dataclasses.replace(CURVES, **curves))


def faster(curve: str) -> HardwareSpec:
    """The node with one of its curves at twice its values."""
    old = getattr(CURVES, curve)
    if isinstance(old, float):
        return with_curves(**{curve: 2 * old})
    return with_curves(**{curve: Curve(tuple((size, 2 * rate) for size, rate in old.points))})


def test_a_decode_pass_by_hand() -> None:
    taken = seconds(DECODE)
    between = 2 / 1.5e10  # seconds of one element per row
    projected = (HEADS + 2 * KV_HEADS) * DIM
    assert taken[Op.PRE] == pytest.approx(
        2 * 64 * HIDDEN * projected / 4.4e11 + 64 * 2 * (HIDDEN + projected) * between
    )
    assert taken[Op.POST] == pytest.approx(
        2 * 64 * HIDDEN * (HEADS * DIM + EXPERTS) / 4.4e11 + 64 * 4 * HIDDEN * between
    )
    assert taken[Op.ATTN] == pytest.approx(64 * 512 * 2 * KV_HEADS * DIM * 2 / 2.5e10)
    # Nearly all experts have one of the 128 rows: 16 each.
    assert taken[Op.EXPERTS] == pytest.approx(
        2 * 128 * 3 * HIDDEN * EXPERT_HIDDEN / 3.9e11 + 64 * 3 * HIDDEN * between, rel=1e-6
    )
    assert taken[Op.HEAD] == pytest.approx(
        2 * 64 * HIDDEN * VOCABULARY / 4.4e11 + 64 * VOCABULARY * between
    )


def test_a_prefill_pass_attends_at_the_rate_of_its_prompts() -> None:
    pairs = 8 * 512 * 513 / 2
    assert seconds(PREFILL)[Op.ATTN] == pytest.approx(4 * HEADS * DIM * pairs / 2.5e11, rel=2e-3)
    short = MicroBatchShape.prefill(128, 32, is_on_host=True)
    rate = 4 * HEADS * DIM * (128 * 32 * 33 / 2) / seconds(short)[Op.ATTN]
    assert rate == pytest.approx(5e10, rel=0.03)


def test_a_mixed_pass_attends_for_both() -> None:
    mixed = DECODE + PREFILL
    attention = seconds(DECODE)[Op.ATTN] + seconds(PREFILL)[Op.ATTN]
    assert seconds(mixed)[Op.ATTN] == pytest.approx(attention)


@pytest.mark.parametrize(
    ("curve", "shape", "ops"),
    [
        ("product_flop_per_s", DECODE, {Op.PRE, Op.POST, Op.HEAD}),
        ("expert_flop_per_s", DECODE, {Op.EXPERTS}),
        ("attention_bytes_per_s", DECODE, {Op.ATTN}),
        ("attention_bytes_per_s", PREFILL, set()),
        ("attention_flop_per_s", DECODE, set()),
        ("attention_bytes_per_s_of_threads", DECODE, set()),
        ("prefill_flop_per_s", PREFILL, {Op.ATTN}),
        ("prefill_flop_per_s", DECODE, set()),
        ("activation_bytes_per_s", DECODE, {Op.EMBED, Op.PRE, Op.POST, Op.EXPERTS, Op.HEAD}),
    ],
)
def test_a_curve_is_felt_by_its_own_kernels(
    curve: str, shape: MicroBatchShape, ops: set[Op]
) -> None:
    before, after = seconds(shape), seconds(shape, faster(curve))
    assert {op for op in before if after[op] != pytest.approx(before[op])} == ops
    assert all(after[op] < before[op] for op in ops)


def test_few_tokens_touch_few_experts() -> None:
    experts_flop = 2 * TOP_K * 3 * HIDDEN * EXPERT_HIDDEN
    taken = seconds(MicroBatchShape.decode(1, 512), with_curves(activation_bytes_per_s=1e30))
    assert taken[Op.EXPERTS] == pytest.approx(experts_flop / 5e10)


def test_operations_bind_attention_where_many_heads_share_keys() -> None:
    slow = with_curves(attention_flop_per_s=1e9)
    assert seconds(DECODE, slow)[Op.ATTN] == pytest.approx(4 * HEADS * DIM * 64 * 512 / 1e9)


def test_curves_are_those_of_16_bit_weights() -> None:
    plain = dataclasses.replace(NODE, host_curves=None)
    assert seconds(DECODE, bytes_per_element=4) == seconds(DECODE, plain, bytes_per_element=4)
    assert seconds(DECODE) != seconds(DECODE, plain)


def test_without_curves_a_task_is_the_longer_of_its_roofs() -> None:
    plain = dataclasses.replace(NODE, host_curves=None)
    for slow in ({"host_flop_per_s": 1e9}, {"host_bytes_per_s": 1e8}):
        node = dataclasses.replace(plain, **slow)
        taken = seconds(MicroBatchShape.decode(16, 512), node)
        read = 16 * 512 * 1024 / CPU_ATTENTION_EFFICIENCY + 2 * 16 * 1024
        pairs_s = 16 * 512 * 4 * HEADS * DIM / node.host_flop_per_s
        assert taken[Op.ATTN] == pytest.approx(max(pairs_s, read / node.host_bytes_per_s))
        head = HIDDEN * VOCABULARY
        roofs = (2 * (16 + 5) * head / node.host_flop_per_s, 2 * head / node.host_bytes_per_s)
        assert taken[Op.HEAD] == pytest.approx(max(roofs))
        assert taken[Op.EMBED] == pytest.approx(2 * 2 * 16 * HIDDEN / node.host_bytes_per_s)


def test_a_pass_without_logits_has_no_head() -> None:
    chunk = dataclasses.replace(PREFILL, logit_rows=0)
    assert seconds(chunk)[Op.HEAD] == pytest.approx(0.0, abs=1e-12)
