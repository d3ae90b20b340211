"""Costs of tasks on a node with a GPU, against published measurements and their own roofs."""

import dataclasses
import math

import pytest

from raymoe.errors import ConfigError
from raymoe.plan.cost import OVERHEAD_S, Rates, StepCost
from raymoe.plan.work import Matrices, MicroBatchShape, ModelWork, StepLoad
from raymoe.schedule.builders import STREAMING_BUILDERS, build_resident
from raymoe.schedule.graph import RESOURCES_OF, Op, Resource, Task
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm
from raymoe.schedule.timeline import simulate
from raymoe.specs.attention.work import Choice
from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec, HostCurves, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from tests.unit.plan.device_jobs import placed_model

MIXTRAL = model_preset("mixtral-8x7b")
WORK = ModelWork.of(MIXTRAL, 2)
NODE = HardwareSpec(
    name="round numbers",
    num_cores=1,
    host_memory_bytes=1,
    host_bytes_per_s=100e9,
    host_flop_per_s=1e12,
    gpu_memory_bytes=1,
    gpu_bytes_per_s=200e9,
    gpu_flop_per_s=50e12,
    htod_bytes_per_s=10e9,
    dtoh_bytes_per_s=5e9,
    host_copy_bytes_per_s=20e9,
)
HIDDEN, KV_ROW = 4096 * 2, 2 * 8 * 128 * 2  # bytes of a hidden state, and of KV in one layer


def cost_of(
    *micro_batches: MicroBatchShape,
    node: HardwareSpec = NODE,
    pages: tuple[int, ...] = (),
    group: int = 1,
) -> StepCost:
    return StepCost(
        WORK,
        node,
        micro_batches=micro_batches,
        layers=(of_pages(*pages),) * 32 if pages else (),
        micro_batches_per_group=group,
    )


def of_pages(*pages: int) -> LayerPlacement:
    every = tuple(range(len(pages)))
    return LayerPlacement(page_bytes=pages, attention_pages=every, expert_pages=every)


def lane_of(op: Op) -> Resource:
    """Where an operation of a streaming schedule runs."""
    if op in {Op.EMBED, Op.ATTN}:
        return Resource.CPU
    lanes = RESOURCES_OF[op]
    return Resource.GPU if Resource.GPU in lanes else next(iter(lanes))


def work_s(cost: StepCost, op: Op, *, part: int = 0, resource: Resource | None = None) -> float:
    """Duration of a task in layer 1 without the overhead of its lane."""
    task = Task(op=op, layer=1, part=part, resource=resource or lane_of(op))
    return cost.kernel_s(task)


# The L4 host of MoE-Lightning, figure 9: seconds of one layer of Mixtral-8x7B, by rows and context.
KV_S = {
    (32, 128): 0.00141,
    (32, 2048): 0.0218,
    (64, 512): 0.01090,
    (128, 256): 0.01092,
    (256, 128): 0.01089,
    (256, 2048): 0.17388,
}
EXPERTS_S = {32: 0.0122, 64: 0.0123, 128: 0.0125, 256: 0.0130}


@pytest.mark.parametrize(("shape", "seconds"), KV_S.items(), ids=str)
def test_kv_transfer_takes_its_published_time(shape: tuple[int, int], seconds: float) -> None:
    micro_batch = MicroBatchShape.decode(*shape, cpu_attention_fraction=0.0)
    assert work_s(cost_of(micro_batch, node=hardware_preset("l4")), Op.KV) == pytest.approx(
        seconds, rel=0.05
    )


@pytest.mark.parametrize(("rows", "seconds"), EXPERTS_S.items())
def test_experts_take_their_published_time(rows: int, seconds: float) -> None:
    cost = cost_of(MicroBatchShape.decode(rows, 1), node=hardware_preset("l4"))
    assert work_s(cost, Op.EXPERTS) == pytest.approx(seconds, rel=0.05)


def test_streaming_mixtral_over_the_link_of_an_a40_takes_its_published_time() -> None:
    """MoE-Lens, section 8.1: 94 GB at 19.5 GB/s; embedding and head, 0.5 GB, do not stream."""
    cut = placed_model(MIXTRAL, 2)
    cost = StepCost(
        WORK,
        hardware_preset("a40"),
        (MicroBatchShape.decode(1, 1),),
        layers=cut.layers,
    )
    pages = [
        Task(op=Op.W, layer=i, part=p, resource=Resource.HTOD)
        for i, layer in enumerate(cut.layers)
        for p in range(layer.num_pages)
    ]
    assert sum(map(cost.duration_s, pages)) == pytest.approx(94e9 / 19.5e9, rel=0.02)


def test_an_a40_needs_the_published_tokens_to_hide_the_link() -> None:
    """MoE-Lens, section 6.3, figure 7: about 18,500 tokens of prompts of 98 tokens."""
    prompts = 18_500 // 98
    cost = cost_of(MicroBatchShape.prefill(prompts, 98), node=hardware_preset("a40"))
    busy_s = 32 * sum(work_s(cost, op) for op in (Op.PRE, Op.GATTN, Op.POST, Op.EXPERTS))
    assert busy_s == pytest.approx(94e9 / 19.5e9, rel=0.1)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        (Op.EMBED, 2 * 10 * HIDDEN / 100e9),
        (Op.UP, 10 * HIDDEN / 10e9),
        (Op.QKV, (0.6 * 10 * HIDDEN + 10 * KV_ROW) / 5e9),
        (Op.ATTN, (0.6 * 10 * 500 / 0.85 + 2 * 0.6 * 10) * KV_ROW / 100e9),
        (Op.KV, 0.4 * 10 * 499 * KV_ROW / 10e9),
        (Op.GATTN, 0.4 * 10 * 500 * KV_ROW / 200e9),
        (Op.APPEND, 2 * 0.4 * 10 * KV_ROW / 100e9),
        (Op.HID, 0.6 * 10 * HIDDEN / 10e9),
        (Op.PRE, 4096 * (4096 + 2 * 1024) * 2 / 200e9),
        (Op.POST, (4096 * 4096 + 8 * 4096) * 2 / 200e9),
    ],
)
def test_a_decode_wave_split_between_cpu_and_device(op: Op, seconds: float) -> None:
    """Ten rows of 500 tokens, six of them on the CPU; every product is bound by its weights."""
    cost = cost_of(MicroBatchShape.decode(10, 500, cpu_attention_fraction=0.6))
    assert work_s(cost, op) == pytest.approx(seconds, rel=1e-6)


def test_prompt_tokens_send_keys_and_values_down_and_nothing_up() -> None:
    cost = cost_of(MicroBatchShape.prefill(2, 100))
    assert work_s(cost, Op.QKV) == pytest.approx(200 * KV_ROW / 5e9)
    assert work_s(cost, Op.APPEND) == pytest.approx(2 * 200 * KV_ROW / 100e9)
    assert work_s(cost, Op.ATTN) == pytest.approx(0, abs=1e-12)
    assert work_s(cost, Op.HID) == pytest.approx(0, abs=1e-12)
    assert work_s(cost, Op.KV) == pytest.approx(0, abs=1e-12)


def test_attention_of_long_prompts_grows_with_their_square() -> None:
    few, many = (
        work_s(cost_of(MicroBatchShape.prefill(rows, 8000 // rows)), Op.GATTN) for rows in (8, 1)
    )
    pairs = (8000 * 8001 - 8 * 1000 * 1001) / 2
    assert many - few == pytest.approx(pairs * 4 * 4096 / (0.7 * 50e12), rel=1e-6)


def test_pages_take_the_link_and_staging_the_host() -> None:
    cost = cost_of(MicroBatchShape.prefill(1, 1), pages=(64_000_000, 1_000_000))
    assert work_s(cost, Op.W, part=0) == pytest.approx(6.4e-3)
    assert work_s(cost, Op.W, part=1) == pytest.approx(1e-4)
    assert work_s(cost, Op.STAGE, part=0) == pytest.approx(3.2e-3)


def test_the_link_leaves_the_cpu_the_rest_of_the_bandwidth() -> None:
    """MoE-Lens, equation 5; a staged page is read and written once more on its way."""
    micro_batch = MicroBatchShape.decode(10, 500)
    streaming = cost_of(micro_batch, pages=(1,))
    staged = dataclasses.replace(streaming, is_staged=True)
    slow = dataclasses.replace(staged, hardware=dataclasses.replace(NODE, htod_bytes_per_s=40e9))
    alone_s = work_s(cost_of(micro_batch), Op.ATTN)
    assert work_s(streaming, Op.ATTN) == pytest.approx(alone_s / 0.9)
    assert work_s(staged, Op.ATTN) == pytest.approx(alone_s / 0.7)
    assert work_s(slow, Op.ATTN) == pytest.approx(alone_s / 0.5)


def test_weights_take_six_seconds_instead_of_five_beside_a_large_cache() -> None:
    """MoE-Lens, section 13: Mixtral on an A40 host whose CPU reads 210 GB of KV in a step."""
    cut, rows = placed_model(MIXTRAL, 2), 210e9 / (32 * KV_ROW * 400)
    free, busy = (
        StepCost(
            WORK,
            hardware_preset("a40"),
            (micro_batch,),
            layers=cut.layers,
        ).pages_s(cut.streamed_bytes, cut.num_pages)
        for micro_batch in (
            MicroBatchShape.decode(rows, 400, 0.0),
            MicroBatchShape.decode(rows, 400),
        )
    )
    assert free == pytest.approx(5.0, rel=0.05)
    assert busy == pytest.approx(6.0, rel=0.05)


def test_the_link_slows_down_to_its_measured_rate_at_most() -> None:
    node = dataclasses.replace(NODE, device_curves=device_curves(busy_htod=8e9))
    few, many = (
        cost_of(MicroBatchShape.decode(rows, 1000), node=node, pages=(10_000_000,))
        for rows in (1, 10**6)
    )
    assert work_s(many, Op.W) == pytest.approx(10e6 / 8e9)
    reading_s = 1000 * KV_ROW / (0.85 * 90e9)
    assert work_s(few, Op.W) == pytest.approx(10e6 / 10e9 + (1 - 0.8) * reading_s)


def test_a_measured_gpu_multiplies_at_its_measured_rate() -> None:
    """At the rows of the product and of each expert; quantised weights by formula."""
    rates = Curve(((8, 1e12), (64, 8e12)))
    curves = device_curves(product=rates, expert=rates.scaled(0.5))
    node = dataclasses.replace(NODE, device_curves=curves)
    cost = cost_of(MicroBatchShape.decode(32, 1), node=node)
    assert work_s(cost, Op.PRE) == pytest.approx(2 * 32 * 4096 * (4096 + 2 * 1024) / 4e12)
    parameters = 3 * 4096 * 14336
    assert work_s(cost, Op.EXPERTS) == pytest.approx(2 * 64 * parameters / 0.5e12, rel=1e-3)
    quantised = dataclasses.replace(
        WORK.layers[1], expert=Matrices(parameters=parameters, num_bytes=parameters // 2)
    )
    work = dataclasses.replace(WORK, layers=(quantised,) * 32)
    by_formula = StepCost(work, NODE, cost.micro_batches)
    assert work_s(StepCost(work, node, cost.micro_batches), Op.EXPERTS) == work_s(
        by_formula, Op.EXPERTS
    )


def device_curves(
    *, busy_htod: float = 1e10, product: Curve | None = None, expert: Curve | None = None
) -> DeviceCurves:
    any_rate = Curve(((1, 1e12),))
    return DeviceCurves(
        product_flop_per_s=product or any_rate,
        expert_flop_per_s=expert or any_rate,
        pageable_htod_bytes_per_s=1e9,
        pageable_dtoh_bytes_per_s=1e9,
        duplex_htod_bytes_per_s=1e10,
        duplex_dtoh_bytes_per_s=1e10,
        busy_htod_bytes_per_s=busy_htod,
        busy_attention_bytes_per_s=1e11,
    )


def test_what_was_measured_on_the_gpu_replaces_formulas() -> None:
    flat = {name: Curve(((1, rate),)) for name, rate in (("a", 3e9), ("b", 7e11), ("c", 5e11))}
    measured = dataclasses.replace(
        device_curves(),
        attention_bytes_per_s=flat["a"],
        prefill_flop_per_s=flat["b"],
        expert_flop_per_s_of_4_bits=flat["c"],
        tasks_per_s=1e3,
    )
    node = dataclasses.replace(NODE, device_curves=measured)
    decode = MicroBatchShape.decode(10, 500, cpu_attention_fraction=0.0)
    cost = cost_of(decode, node=node)
    token_bytes = WORK.layers[0].attention.kv_token_bytes
    assert work_s(cost, Op.GATTN) == pytest.approx(10 * 500 * token_bytes / 3e9, rel=0.02)
    (prompts,) = StepLoad(prompt_tokens=512, prompt_chunk=128).micro_batches(1, 0.0)
    flop = 4 * 4096 * 512 * 129 / 2
    assert work_s(cost_of(prompts, node=node), Op.GATTN) == pytest.approx(flop / 7e11, rel=0.02)
    task = Task(op=Op.GATTN, layer=0, part=0, resource=Resource.GPU)
    assert cost.duration_s(task) - work_s(cost, Op.GATTN) == pytest.approx(1e-3)
    quantised = dataclasses.replace(WORK.layers[1], expert=Matrices(parameters=1000, num_bytes=531))
    work = dataclasses.replace(WORK, layers=(quantised,) * 32)
    cost = StepCost(work, node, (decode,))
    experts = quantised.activated_experts(10)
    common_s = cost.rates.network_s(Resource.GPU, 10, quantised.common)
    assert work_s(cost, Op.EXPERTS) - common_s == pytest.approx(
        2 * 10 * quantised.top_k * 1000 / 5e11, rel=1e-3
    ), experts


def test_attention_is_bound_by_operations_where_the_cpu_is_slow() -> None:
    weak = dataclasses.replace(NODE, host_flop_per_s=1e9)
    cost = cost_of(MicroBatchShape.decode(10, 500), node=weak)
    assert work_s(cost, Op.ATTN) == pytest.approx(4 * 4096 * 5000 / 1e9)


@pytest.mark.parametrize("op", [Op.PRE, Op.POST, Op.EXPERTS, Op.HEAD])
def test_a_product_is_never_faster_than_its_roofs_and_nears_the_higher_one(op: Op) -> None:
    attention, ffn = 4096 * (4096 + 2 * 1024), 3 * 4096 * 14336
    parameters = {
        Op.PRE: (attention, attention),
        Op.POST: (4096 * 4096 + 8 * 4096,) * 2,
        Op.EXPERTS: (2 * ffn, 8 * ffn),
        Op.HEAD: (32000 * 4096,) * 2,
    }
    active, read = parameters[op]
    last = 0.0
    for rows in (64, 512, 4096, 32768):
        seconds = work_s(cost_of(MicroBatchShape.decode(rows, 1)), op)
        roof = max(2 * rows * active / 50e12, 2 * read / 200e9)
        assert roof * (1 - 1e-6) <= seconds <= 1.7 * roof
        assert seconds >= last
        last = seconds
    assert last == pytest.approx(2 * 32768 * active / 50e12, rel=0.02)


def test_few_tokens_read_few_experts() -> None:
    one = work_s(cost_of(MicroBatchShape.decode(1, 1)), Op.EXPERTS)
    assert one == pytest.approx(2 * 3 * 4096 * 14336 * 2 / 200e9, rel=1e-3)


def test_an_expert_group_reads_its_experts_once() -> None:
    micro_batches = (MicroBatchShape.decode(50, 1),) * 5
    apart, together = cost_of(*micro_batches), cost_of(*micro_batches, group=2)
    assert together.launch_tokens(0) == 100
    assert together.launch_tokens(2) == 50  # the last group is short
    each = work_s(apart, Op.EXPERTS)
    assert work_s(together, Op.EXPERTS, part=2) == pytest.approx(each)
    assert work_s(together, Op.EXPERTS) < 1.01 * each


def test_a_shared_expert_is_read_by_every_launch() -> None:
    work = ModelWork.of(model_preset("qwen3-30b-a3b"), 2)
    common = Matrices(parameters=10**8, num_bytes=2 * 10**8)
    shared = tuple(dataclasses.replace(layer, common=common) for layer in work.layers)
    micro_batch = MicroBatchShape.decode(1, 1)
    plain = StepCost(work, NODE, (micro_batch,))
    with_shared = StepCost(dataclasses.replace(work, layers=shared), NODE, (micro_batch,))
    more_s = work_s(with_shared, Op.EXPERTS) - work_s(plain, Op.EXPERTS)
    assert more_s == pytest.approx(2 * 10**8 / 200e9)


def test_logits_of_all_waves_are_one_product() -> None:
    one = work_s(cost_of(MicroBatchShape.decode(2000, 1)), Op.HEAD)
    assert work_s(cost_of(*(MicroBatchShape.decode(500, 1),) * 4), Op.HEAD) == pytest.approx(one)


def test_a_device_wide_wait_takes_no_time() -> None:
    task = Task(op=Op.SYNC, layer=0, part=0, resource=Resource.GPU)
    assert cost_of(MicroBatchShape.decode(1, 1)).duration_s(task) == 0


@pytest.mark.parametrize("name", STREAMING_BUILDERS)
def test_every_task_of_every_schedule_has_a_duration(name: str) -> None:
    on_device = name == "flexgen_s4"
    cut = placed_model(MIXTRAL, 2, resident_bytes=3_000_000_000)
    form = StepForm(
        layers=cut.layers,
        num_micro_batches=2,
        has_cpu_attention=not on_device,
        has_device_attention=on_device,
        staging_slots=3,
    )
    micro_batches = (
        MicroBatchShape.decode(8, 100, cpu_attention_fraction=float(not on_device)),
    ) * 2
    cost = StepCost(
        WORK,
        NODE,
        micro_batches,
        layers=cut.layers,
        is_staged=True,
    )
    timeline = simulate(STREAMING_BUILDERS[name](form), cost)
    assert all(0 <= span.duration_s < 1 for span in timeline.spans)
    assert math.isfinite(timeline.makespan_s)
    assert timeline.makespan_s >= cut.streamed_bytes / NODE.htod_bytes_per_s


def test_a_resident_model_attends_at_the_speed_of_device_memory() -> None:
    cost = cost_of(MicroBatchShape.decode(10, 500))
    on_gpu = work_s(cost, Op.ATTN, resource=Resource.GPU)
    assert on_gpu == pytest.approx((10 * 500 + 2 * 10) * KV_ROW / 200e9)
    timeline = simulate(build_resident(32), cost)
    assert timeline.resources == (Resource.GPU,)


def test_a_resident_model_attends_for_both_shares() -> None:
    split = MicroBatchShape.decode(10, 500, cpu_attention_fraction=0.3)
    whole = MicroBatchShape.decode(10, 500)
    split_s, whole_s = (
        work_s(cost_of(micro_batch), Op.ATTN, resource=Resource.GPU)
        for micro_batch in (split, whole)
    )
    assert split_s == pytest.approx(whole_s)
    prompts = cost_of(MicroBatchShape.prefill(1, 8000))
    flop = 4 * 4096 * 8000 * 8001 / 2
    assert work_s(prompts, Op.ATTN, resource=Resource.GPU) == pytest.approx(flop / (0.7 * 50e12))


def test_layers_with_a_window_read_no_more_than_it() -> None:
    work = ModelWork.of(model_preset("gpt-oss-20b"), 2)
    assert [layer.attention.window for layer in work.layers[:3]] == [128, None, 128]
    cost = StepCost(work, NODE, (MicroBatchShape.decode(10, 1000, cpu_attention_fraction=0.5),))
    row = work.layers[0].attention.kv_token_bytes

    def seconds(op: Op, layer: int) -> float:
        task = Task(op=op, layer=layer, part=0, resource=lane_of(op))
        return cost.duration_s(task) - OVERHEAD_S[task.resource]

    assert seconds(Op.KV, 0) == pytest.approx(5 * 127 * row / 10e9)
    assert seconds(Op.KV, 1) == pytest.approx(5 * 999 * row / 10e9)
    assert seconds(Op.ATTN, 0) == pytest.approx((5 * 128 / 0.85 + 2 * 5) * row / 100e9)
    assert seconds(Op.GATTN, 1) == pytest.approx(5 * 1000 * row / 200e9)


def test_layers_with_an_indexer_read_what_they_choose_and_score_the_rest() -> None:
    work = ModelWork.of(ModelSpec.from_config({"model_type": "deepseek_v32"}), 2)
    attention = work.layers[0].attention
    assert attention.choice == Choice(2048, 2 * 64 * 128, 2 * 128, copies=True)
    assert attention.kv_token_bytes == 2 * (512 + 64 + 128)
    row, index = attention.kv_token_bytes, attention.choice.token_bytes

    def seconds(op: Op, context: int, **changes: object) -> float:
        node = dataclasses.replace(NODE, **changes)
        shape = MicroBatchShape.decode(10, context, cpu_attention_fraction=0.5)
        task = Task(op=op, layer=0, part=0, resource=lane_of(op))
        return StepCost(work, node, (shape,)).duration_s(task) - OVERHEAD_S[task.resource]

    fast = {"host_flop_per_s": 1e18, "gpu_flop_per_s": 1e18}  # bytes decide
    short, long = seconds(Op.ATTN, 2048, **fast), seconds(Op.ATTN, 5048, **fast)
    # Index keys of 3,000 more tokens are read, and 2,048 rows are written and read once more.
    assert long - short == pytest.approx(5 * (3000 * index + 2 * 2048 * row) / 100e9)
    short, long = seconds(Op.GATTN, 2048, **fast), seconds(Op.GATTN, 5048, **fast)
    assert long - short == pytest.approx(5 * 3000 * index / 200e9)
    slow = {"host_flop_per_s": 1e9}
    short, long = seconds(Op.ATTN, 2048, **slow), seconds(Op.ATTN, 5048, **slow)
    assert long - short == pytest.approx(4 * 5 * 5048 * attention.choice.pair_flop / 1e9)
    assert seconds(Op.KV, 5048) == pytest.approx(5 * 5047 * row / 10e9)  # all blocks move


@pytest.mark.parametrize(
    ("fields", "num_chosen", "flop", "index_bytes", "copied"),
    [
        ({"model_type": "glm5_next_text", "index_kpool": 4}, 2051, 2 * 32 * 128 // 4, 64, 2051),
        (
            {"model_type": "minimax_m3_vl_text", "layer_types": ["minimax_m3_sparse"] * 60},
            2048,
            2 * 4 * 128,
            256,
            0,
        ),
        ({"model_type": "deepseek_v4"}, 2051, 2 * 64 * 128 // 4, 64, 0),
        (
            {
                "model_type": "qwen4_exp_text",
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 128,
                "indexer_budget": 2048,
                "indexer_compress_ratio": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.25,
                },
            },
            2051,
            2 * 4 * 128 // 4,
            64,
            2051,
        ),
    ],
    ids=["pools", "blocks", "entries", "pooled blocks"],
)
def test_pools_blocks_and_entries_are_scored_by_their_keys(
    fields: dict[str, object], num_chosen: int, flop: int, index_bytes: int, copied: int
) -> None:
    work = ModelWork.of(ModelSpec.from_config(fields), 2)
    attention = next(each.attention for each in work.layers if each.attention.choice is not None)
    assert attention.choice == Choice(num_chosen, flop, index_bytes, copies=copied > 0)
    node = dataclasses.replace(NODE, host_flop_per_s=1e18, gpu_flop_per_s=1e18)  # bytes decide
    shape = MicroBatchShape.decode(10, 5048, cpu_attention_fraction=1.0)
    rates = StepCost(work, node, (shape,)).rates

    def seconds(context: int) -> float:
        share = MicroBatchShape.decode(10, context, cpu_attention_fraction=1.0).host
        return rates.attention_s(Resource.CPU, share, attention)

    rows = 2 * copied * attention.kv_token_bytes
    unread = (8051 - num_chosen) * index_bytes
    more = seconds(8051) - seconds(num_chosen)
    assert more == pytest.approx(10 * (unread + rows) / 100e9)


def on_cores(rows: int, share: float, pages: tuple[int, ...] = (), **node: object) -> StepCost:
    """A decode step of which cores compute this share of the experts, and the device the rest."""
    cost = cost_of(
        MicroBatchShape.decode(rows, 100, cpu_attention_fraction=0.0),
        node=dataclasses.replace(NODE, **node),
        pages=pages,
    )
    return dataclasses.replace(cost, layers=(partly(share, *pages),) * 32)


def partly(share: float, *pages: int) -> LayerPlacement:
    """A layer of which cores compute a share of the experts."""
    first = round(100 * (1 - share))
    return dataclasses.replace(
        of_pages(*pages),
        num_experts=100,
        host_experts=range(first, 100),
        group_bounds=(0, first) if first else (),
    )


def test_cores_read_the_experts_that_are_chosen_of_theirs() -> None:
    layer = WORK.layers[1]
    slow = on_cores(1, 0.5, host_flop_per_s=1e15)
    read = 0.5 * layer.activated_experts(1) * layer.expert.num_bytes
    assert work_s(slow, Op.CEXPERTS) == pytest.approx(read / NODE.host_bytes_per_s)
    busy = on_cores(1000, 0.5, host_flop_per_s=1e9)
    rows = 1000 * layer.top_k / layer.activated_experts(1000)
    flop = 0.5 * 1000 * layer.top_k * 2 * layer.expert.parameters * (rows + 5) / rows
    assert work_s(busy, Op.CEXPERTS) == pytest.approx(flop / 1e9)
    assert work_s(busy, Op.SUMS) == pytest.approx(1000 * 4096 * 4 / 10e9)


def test_cores_and_link_share_the_bandwidth_of_the_host() -> None:
    """Together they read at the whole bandwidth if the cores read longer than the link copies."""
    layer = WORK.layers[1]
    cost = on_cores(1000, 1.0, pages=(10_000_000,), host_flop_per_s=1e15)
    read = layer.num_experts * layer.expert.num_bytes
    left = cost.rates.host_bytes_per_s
    assert left == pytest.approx(NODE.host_bytes_per_s * read / (read + 10_000_000))
    assert work_s(cost, Op.CEXPERTS) == pytest.approx(read / left)
    mostly_link = on_cores(1, 0.01, pages=(10**9,))
    assert (
        mostly_link.rates.host_bytes_per_s
        == cost_of(MicroBatchShape.decode(1, 100), pages=(10**9,)).rates.host_bytes_per_s
    )


def test_the_last_task_of_a_launch_adds_what_the_cores_computed() -> None:
    cost = on_cores(1000, 0.5)
    experts, addition = (work_s(cost, Op.EXPERTS, part=part) for part in (0, 1))
    whole = work_s(cost_of(MicroBatchShape.decode(1000, 100)), Op.EXPERTS)
    sums = 2 * 1000 * 4096 * 4 / 200e9
    assert addition == pytest.approx(sums)
    assert experts == pytest.approx(whole / 2 + sums)
    everything = dataclasses.replace(cost, layers=(partly(1.0),) * 32)
    assert work_s(everything, Op.EXPERTS) == pytest.approx(sums)


def test_quantised_experts_are_decoded_before_cores_multiply() -> None:
    plain = on_cores(4, 0.5)
    layers = tuple(
        dataclasses.replace(layer, expert=layer.expert._replace(num_bytes=layer.expert.parameters))
        for layer in WORK.layers
    )
    quantised = dataclasses.replace(plain, work=dataclasses.replace(WORK, layers=layers))
    assert work_s(quantised, Op.CEXPERTS) > 2 * work_s(plain, Op.CEXPERTS)


def test_a_measured_host_attends_at_its_measured_rate() -> None:
    """Rates at the context, the share that the link leaves, and operations where these bind."""
    node = dataclasses.replace(NODE, host_curves=attention_curves(((100, 20e9), (1000, 50e9))))
    micro_batch = MicroBatchShape.decode(10, 1000)
    read = 10 * 1000 * KV_ROW
    assert work_s(cost_of(micro_batch, node=node), Op.ATTN) == pytest.approx(read / 50e9)
    streaming = cost_of(micro_batch, node=node, pages=(1,))
    assert work_s(streaming, Op.ATTN) == pytest.approx(read / (0.9 * 50e9))
    short = cost_of(MicroBatchShape.decode(10, 100), node=node)
    assert work_s(short, Op.ATTN) == pytest.approx(read / 10 / 20e9)
    crowded = attention_curves(((1, 1e15),), flop_per_s=1e12)
    bound = cost_of(micro_batch, node=dataclasses.replace(NODE, host_curves=crowded))
    assert work_s(bound, Op.ATTN) == pytest.approx(4 * 4096 * 10 * 1000 / 1e12)


def attention_curves(
    points: tuple[tuple[float, float], ...], flop_per_s: float = 1e18
) -> HostCurves:
    any_rate = Curve(((1, 1e12),))
    return HostCurves(
        product_flop_per_s=any_rate,
        expert_flop_per_s=any_rate,
        attention_bytes_per_s=Curve(points),
        attention_flop_per_s=flop_per_s,
        attention_bytes_per_s_of_threads=any_rate,
        prefill_flop_per_s=any_rate,
        activation_bytes_per_s=1e12,
    )


def test_a_node_without_a_gpu_is_refused() -> None:
    host = HardwareSpec(
        name="no gpu", num_cores=1, host_memory_bytes=1, host_bytes_per_s=1.0, host_flop_per_s=1.0
    )
    with pytest.raises(ConfigError, match="no gpu has no GPU"):
        cost_of(MicroBatchShape.decode(1, 1, cpu_attention_fraction=0.0), node=host)
    with pytest.raises(ConfigError, match="no gpu has no GPU"):
        cost_of(MicroBatchShape.decode(1, 1), node=host, pages=(1,))


def test_a_pass_without_waves_or_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 micro-batches in groups of 1"):
        cost_of()
    with pytest.raises(ConfigError, match="1 micro-batches in groups of 0"):
        cost_of(MicroBatchShape.decode(1, 1), group=0)


@pytest.mark.parametrize(("bits", "share"), [(16, 1.0), (8, 0.5), (4, 0.25)])
def test_experts_of_stored_weights_run_at_their_share_of_the_rate(bits: int, share: float) -> None:
    node = dataclasses.replace(NODE, expert_share_of_8_bits=0.5, expert_share_of_4_bits=0.25)
    rates = Rates(hardware=node, is_16_bit=True)
    expert = Matrices(parameters=10**8, num_bytes=10**8 * bits // 8)
    whole, slower = (
        Rates(hardware=each, is_16_bit=True).experts_s(Resource.GPU, 4096, 2, expert)
        for each in (NODE, node)
    )
    assert slower == pytest.approx(whole / share)
    few = rates.experts_s(Resource.GPU, 1, 2, expert)  # the memory limits
    assert few >= 2 * expert.num_bytes / node.gpu_bytes_per_s
