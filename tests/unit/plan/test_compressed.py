"""Plans of DeepSeek-V4-Flash: work of its attention, counted by hand, and what memory it takes."""

import dataclasses
import json
from pathlib import Path

import pytest

from raymoe.plan.bound import device_bound, job_bound
from raymoe.plan.cost import (
    CPU_ATTENTION_EFFICIENCY,
    DEVICE_ATTENTION_EFFICIENCY,
    OVERHEAD_S,
    StepCost,
)
from raymoe.plan.footprint import cache_bytes, device_footprint
from raymoe.plan.operations import attention
from raymoe.plan.placement import Placement
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.specs.attention.work import AttentionWork
from raymoe.specs.hardware import HARDWARE_PRESETS, Curve, HostCurves
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import GIB

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_models.json").read_text())
(CONFIG,) = (x["config"] for x in PUBLISHED if x["name"] == "deepseek-ai/DeepSeek-V4-Flash")
MODEL = ModelSpec.from_config(CONFIG)
WORK = ModelWork.of(MODEL, 2)
NODE = HARDWARE_PRESETS["l4"]
WINDOW, CSA, HCA = 0, 2, 3  # a layer of each kind; there are 2, 21 and 20
ROW_FLOP = 2 * 2 * 64 * 512  # of a token and a row that it sees: two products of 64 heads
# Bytes of a row or entry, and of a sum: maximum, weight and weighted sum, each float32.
ROW_BYTES, SUM_BYTES = 2 * 512, 3 * 4 * 512
# An entry of CSA has an index key of 128 elements, which is pooled in the same way. As with any
# indexer, what reads an entry counts its index key, though a token of a short context chooses none.
KEY_BYTES, KEY_SUM_BYTES = 2 * 128, 3 * 4 * 128
CSA_ENTRY_BYTES, CSA_SUM_BYTES = ROW_BYTES + KEY_BYTES, SUM_BYTES + KEY_SUM_BYTES
TOKEN_BYTES = 21 * CSA_ENTRY_BYTES // 4 + 20 * ROW_BYTES // 32  # of all layers, in blocks
ALL_SUM_BYTES = 21 * 2 * CSA_SUM_BYTES + 20 * SUM_BYTES


def decoding(rows: int, context: int) -> StepCost:
    return StepCost(WORK, NODE, (MicroBatchShape.decode(rows, context),))


def seconds(cost: StepCost, op: Op, resource: Resource, layer: int) -> float:
    task = Task(op=op, layer=layer, part=0, resource=resource)
    return cost.duration_s(task) - OVERHEAD_S[resource]


@pytest.mark.parametrize(
    ("layer", "entries", "entry_bytes", "sum_bytes"),
    [
        (WINDOW, 0, 0, 0),
        (CSA, 256, 256 * CSA_ENTRY_BYTES, 2 * CSA_SUM_BYTES),
        (HCA, 8, 32 * ROW_BYTES, SUM_BYTES),
    ],
)
def test_a_decoding_token_reads_its_window_and_the_entries_before_it(
    layer: int, entries: int, entry_bytes: int, sum_bytes: int
) -> None:
    """At 1,024 tokens of context; of an entry of 128 tokens a block keeps four places."""
    work = WORK.layers[layer].attention.of(MicroBatchShape.decode(10, 1024).host)
    assert work.decode_flop == 10 * (128 + entries) * ROW_FLOP
    assert work.prompt_flop == 0
    assert work.read_bytes == 10 * (128 * ROW_BYTES + entry_bytes)
    assert WORK.layers[layer].attention.updated_bytes == sum_bytes
    assert WORK.layers[layer].attention.state_bytes == 128 * ROW_BYTES + sum_bytes
    assert WORK.layers[layer].attention.token_flop == 8 * sum_bytes / 12  # of three float32 numbers


def test_a_row_of_1024_takes_what_arithmetic_says() -> None:
    """1.45 GFLOP and 13.2 MB of a step, index keys included: 110 operations for each byte."""
    row = attention(WORK, 1024)
    flop = (43 * 128 + 21 * 256 + 20 * 8) * ROW_FLOP
    read = 43 * 128 * ROW_BYTES + 21 * 256 * CSA_ENTRY_BYTES + 20 * 32 * ROW_BYTES
    assert row.flop == flop == pytest.approx(1.45e9, rel=5e-3)
    assert row.near_bytes == read == pytest.approx(13.2e6, rel=5e-3)
    assert row.near_intensity == flop / read == pytest.approx(110, rel=5e-3)


def test_a_prompt_sees_half_of_its_entries_and_its_window() -> None:
    prompt = MicroBatchShape.prefill(2, 512).device
    near = 128 * 129 / 2 + (512 - 128) * 128  # pairs of a prompt
    pairs = 512 * 513 / 2
    for layer, ratio in ((CSA, 4), (HCA, 128)):
        flop = WORK.layers[layer].attention.of(prompt).prompt_flop
        assert flop == pytest.approx(2 * (near + pairs / ratio) * ROW_FLOP, rel=1e-3)


def test_cores_and_gpu_take_the_longer_of_operations_and_bytes() -> None:
    flop = 100 * (128 + 256) * ROW_FLOP
    read = 100 * (128 * ROW_BYTES + 256 * CSA_ENTRY_BYTES)
    # Bytes of what a token adds to two sums, and of what decides their weights.
    values = 2 * 2 * 2 * (512 + 128)
    kept = 100 * (2 * ROW_BYTES + 2 * CSA_ENTRY_BYTES // 4 + values + 2 * 2 * CSA_SUM_BYTES)
    on_cores = seconds(decoding(100, 1024), Op.ATTN, Resource.CPU, CSA)
    moved_s = (read / CPU_ATTENTION_EFFICIENCY + kept) / NODE.host_bytes_per_s
    assert on_cores == pytest.approx(max(flop / NODE.host_flop_per_s, moved_s))
    on_gpu = seconds(decoding(100, 1024), Op.ATTN, Resource.GPU, CSA)
    flop_s = flop / (DEVICE_ATTENTION_EFFICIENCY * NODE.gpu_flop_per_s)
    assert on_gpu == pytest.approx(max(flop_s, (read + kept) / NODE.gpu_bytes_per_s))


def test_measured_rates_of_attention_serve_on_cores() -> None:
    """As for latent attention: the rate of products of decoding, and that of prompts."""
    constant = Curve(((1.0, 1e12),))
    curves = HostCurves(
        product_flop_per_s=constant,
        expert_flop_per_s=constant,
        attention_bytes_per_s=Curve(((1.0, 5e10),)),
        attention_flop_per_s=4e11,
        attention_bytes_per_s_of_threads=constant,
        prefill_flop_per_s=Curve(((1.0, 3e11),)),
        activation_bytes_per_s=1e10,
    )
    node = dataclasses.replace(NODE, host_curves=curves)
    rates, layer = StepCost(WORK, node, (MicroBatchShape.decode(10, 1024),)).rates, WORK.layers[CSA]
    shape = MicroBatchShape.decode(10, 1024).host
    flop_s = 10 * (128 + 256) * ROW_FLOP / 4e11
    assert rates.attention_s(Resource.CPU, shape, layer.attention) == pytest.approx(flop_s)
    prompt = MicroBatchShape.prefill(1, 512, is_on_host=True).host
    prompt_s = layer.attention.of(prompt).prompt_flop / 3e11
    assert rates.attention_s(Resource.CPU, prompt, layer.attention) == pytest.approx(prompt_s)


def test_the_link_is_slowed_by_what_cores_read() -> None:
    """Of states they read the last rows, and read and write sums."""
    read = 10 * (43 * 128 * ROW_BYTES + 1024 * TOKEN_BYTES + 2 * ALL_SUM_BYTES)
    assert decoding(10, 1024).rates.read_bytes == pytest.approx(read / 43)


def test_a_row_keeps_its_windows_and_seven_kilobytes_for_each_token() -> None:
    """21 times 320 bytes and 20 times 32; without index keys 21 times 256."""
    assert WORK.kv_token_bytes == TOKEN_BYTES == 7360
    assert WORK.state_bytes == 43 * 128 * ROW_BYTES + ALL_SUM_BYTES
    assert WORK.state_bytes == pytest.approx(6.08e6, rel=1e-3)
    short, long = (ModelWork.of(MODEL.within(length), 2) for length in (2051, 2052))
    assert long == WORK
    assert short.kv_token_bytes == 21 * ROW_BYTES // 4 + 20 * ROW_BYTES // 32 == 6016
    assert short.state_bytes == 43 * 128 * ROW_BYTES + (21 * 2 + 20) * SUM_BYTES
    policy = Policy(
        max_num_seqs=100,
        max_num_batched_tokens=1024,
        max_prefill_chunk_tokens=512,
        num_kv_blocks=3200,
    )
    states = policy.num_state_slots * WORK.state_bytes
    assert cache_bytes(WORK, policy) == 3200 * 32 * TOKEN_BYTES + states


def test_grouped_outputs_and_streams_count_among_products() -> None:
    """Eight groups of 4,096 values, each to 1,024; 24 factors of 4 streams around each block."""
    layer = WORK.layers[HCA]
    assert layer.post.parameters == 8 * 4096 * 1024 + 8192 * 4096
    assert layer.mixers.parameters == 2 * 24 * 4 * 4096
    down, up, pooled = 4096 * (1024 + 512), 1024 * 64 * 512, 4096 * 2 * 512
    assert layer.pre.parameters == down + up + pooled
    queries, weights, pooled_keys = 1024 * 64 * 128, 4096 * 64, 4096 * 2 * 2 * 128
    indexer = queries + weights + pooled_keys
    assert WORK.layers[CSA].pre.parameters == down + up + 2 * pooled + indexer
    assert all(each.router.parameters == 256 * 4096 for each in WORK.layers)


def test_bounds_count_recent_rows_once_and_the_states_of_live_rows() -> None:
    rows, prompt, generated = 50_000, 512, 128
    workload = Workload(num_rows=rows, prompt_tokens=prompt, generated_tokens=generated)
    bound = device_bound(WORK, NODE, workload)
    without = [
        dataclasses.replace(each, attention=_without_recent(each.attention)) for each in WORK.layers
    ]
    less = device_bound(dataclasses.replace(WORK, layers=tuple(without)), NODE, workload)
    near = 128 * 129 / 2 + (prompt - 128) * 128 + (generated - 1) * 128
    rate = NODE.gpu_flop_per_s + NODE.host_flop_per_s
    assert bound.gpu_s - less.gpu_s == pytest.approx(rows * 43 * near * ROW_FLOP / rate)
    memory = NODE.host_memory_bytes + NODE.gpu_memory_bytes - WORK.all_weight_bytes
    contexts = sum(range(prompt, prompt + generated))
    held = rows * (TOKEN_BYTES * contexts + generated * WORK.state_bytes)
    assert bound.num_steps == pytest.approx(held / memory)
    fast, none = (
        job_bound(model, [prompt] * 64, generated, flop_per_s=1e12, bytes_per_s=1e18)
        for model in (MODEL, _with_window_of_one())
    )
    more = 64 * 43 * (generated - 1) * 127 * ROW_FLOP / 1e12
    assert fast.decode_s - none.decode_s == pytest.approx(more)


def _without_recent(work: AttentionWork) -> AttentionWork:
    assert work.state is not None
    return work._replace(state=work.state._replace(recent=None))


def _with_window_of_one() -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, "sliding_window": 1})


def test_recurrent_layers_have_no_recent_rows() -> None:
    model = ModelSpec.from_config({"model_type": "kimi_linear"})
    layers = [layer.attention for layer in ModelWork.of(model, 2).layers]
    assert all(each.recent is None and each.updated_bytes == each.state_bytes for each in layers)


def test_rows_on_the_device_bring_their_states_with_their_entries() -> None:
    device = DevicePolicy(num_micro_batches=2, staged_blocks=100)
    policy = Policy(
        max_num_seqs=60,
        max_num_batched_tokens=1024,
        max_prefill_chunk_tokens=512,
        num_kv_blocks=3200,
        device=device,
    )
    placement = Placement.of(MODEL, "micro_batches", policy, 2)
    assert not placement.attends_on_host
    assert placement.staged_rows == 60
    staged = device_footprint(MODEL, WORK, placement).bytes_of("staged KV")
    state_bytes = 128 * ROW_BYTES + 2 * CSA_SUM_BYTES
    assert staged == 2 * (100 * 8 * CSA_ENTRY_BYTES + 60 * state_bytes)
    half = (MicroBatchShape.decode(100, 1024, cpu_attention_fraction=0.5),)
    cost = StepCost(WORK, NODE, half)
    moved = 50 * (1023 * CSA_ENTRY_BYTES // 4 + state_bytes)
    assert seconds(cost, Op.KV, Resource.HTOD, CSA) == pytest.approx(
        moved / cost.rates.htod_bytes_per_s
    )
    flop_s = 50 * (128 + 256) * ROW_FLOP / (DEVICE_ATTENTION_EFFICIENCY * NODE.gpu_flop_per_s)
    assert seconds(cost, Op.GATTN, Resource.GPU, CSA) >= flop_s
    prompts = StepCost(WORK, NODE, (MicroBatchShape.prefill(2, 512),))
    assert seconds(prompts, Op.KV, Resource.HTOD, CSA) == 0  # nothing is kept of them yet


def test_recurrent_states_stay_where_they_are() -> None:
    model = ModelSpec.from_config({"model_type": "kimi_linear"})
    policy = Policy(
        max_num_seqs=60,
        max_num_batched_tokens=1024,
        max_prefill_chunk_tokens=512,
        num_kv_blocks=3200,
        device=DevicePolicy(staged_blocks=100),
    )
    assert Placement.of(model, "micro_batches", policy, 2).attends_on_host
    assert not ModelWork.of(model, 2).stages_states


@pytest.mark.slow
def test_more_host_memory_plans_no_slower_job() -> None:
    """With 435 GiB walks ended at micro-batches of experts of their own, 6 % slower than 218."""
    job = Workload(num_rows=100_000, prompt_tokens=512, generated_tokens=128)

    def tokens_per_s(gib: int) -> float:
        node = dataclasses.replace(HARDWARE_PRESETS["4090"], host_memory_bytes=gib * GIB)
        plan = find_plan(MODEL, node, job, schedule="micro_batches", max_model_len=2048)
        return plan.tokens_per_s

    assert tokens_per_s(435) >= tokens_per_s(218)
