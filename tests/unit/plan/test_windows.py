"""Memory of layers with sliding windows: what a policy keeps, and what a search makes of it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.plan.footprint import cache_bytes, host_footprint, kv_block_bytes
from raymoe.plan.policy import Policy, blocks_of, window_blocks
from raymoe.plan.search import find_plan
from raymoe.plan.sizes import Sizes
from raymoe.plan.work import ModelWork
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB
from tests.unit.plan.device_jobs import POINTS, device_job

GPT_OSS = model_preset("gpt-oss-20b")  # every second layer has a window of 128
WORK = ModelWork.of(GPT_OSS, 2)


def without_windows(model: ModelSpec) -> ModelSpec:
    """The same model, whose layers keep all tokens."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, sliding_window=None))  # type: ignore[call-arg]
        for layer in model.layers
    )
    return replace(model, layers=layers)


def policy_of(**sizes: int) -> Policy:
    usual = {
        "max_num_seqs": 100,
        "max_num_batched_tokens": 1024,
        "max_prefill_chunk_tokens": 1024,
        "num_kv_blocks": 4096,
    }
    return Policy(**(usual | sizes))


@given(st.integers(2, 5000), st.integers(0, 20_000))
def test_window_blocks_are_the_most_that_the_next_token_needs(window: int, computed: int) -> None:
    first = max(0, computed - window + 1) // KV_BLOCK_TOKENS
    assert blocks_of(computed + 1) - first <= window_blocks(window)
    at_worst = blocks_of(window) * KV_BLOCK_TOKENS + window - 1  # the window begins a block
    last = [at_worst + extra for extra in range(KV_BLOCK_TOKENS)]
    needed = [blocks_of(at + 1) - (at - window + 1) // KV_BLOCK_TOKENS for at in last]
    assert max(needed) == window_blocks(window)


def test_a_policy_has_windows_of_all_sequences_of_prefixes_and_a_step() -> None:
    policy = policy_of()
    assert policy.num_window_blocks(128) == (100 + 7) * 5 + 1024 // 32
    assert policy.num_window_blocks(None) == 0
    assert policy_of(num_kv_blocks=567).num_window_blocks(128) == 0  # they would save nothing
    assert policy_of(num_kv_blocks=568).num_window_blocks(128) == 567
    half = kv_block_bytes(WORK) // 2
    assert cache_bytes(WORK, policy) == (4096 + 567) * half
    assert cache_bytes(WORK, policy_of(num_kv_blocks=567)) == 2 * 567 * half


def test_models_without_windows_and_those_with_nothing_else_have_one_group() -> None:
    assert GPT_OSS.cache_window == 128
    assert without_windows(GPT_OSS).cache_window is None
    windowed = replace(GPT_OSS, layers=GPT_OSS.layers[:1])
    assert windowed.cache_window is None
    one = replace(GPT_OSS.layers[0].attention, sliding_window=1)  # type: ignore[call-arg]
    layers = (replace(GPT_OSS.layers[0], attention=one), GPT_OSS.layers[1])
    assert replace(GPT_OSS, layers=layers).cache_window == 2


@pytest.mark.parametrize("seed", range(12))
def test_memory_holds_windows_next_to_all_other_kv(seed: int) -> None:
    dice = random.Random(seed)
    node = replace(hardware_preset("l4"), host_memory_bytes=dice.randint(24, 200) * GIB)
    prompt, generated = (round(2 ** dice.uniform(4, 12)) for _ in range(2))
    num_rows = dice.choice((3, 100, 5000, 10**6))
    workload = Workload(num_rows=num_rows, prompt_tokens=prompt, generated_tokens=generated)
    job = device_job(GPT_OSS, node, workload)
    plain = device_job(without_windows(GPT_OSS), node, workload)
    for point in dice.sample(POINTS, 10):
        schedule = dice.choice(("micro_batches", "in_place"))
        sizes, bits = Sizes(job, schedule), dice.choice((None, 4, 7))
        placed = sizes.placement(sizes.fixed(point), size_bits=bits)
        before = Sizes(plain, schedule).placement(sizes.fixed(point), size_bits=bits)
        if before is None:
            continue
        assert placed is not None, "windows take less memory, not more"
        needs = host_footprint(job.model, job.work, placed).total
        assert needs <= node.host_memory_bytes or schedule == "in_place"
        assert placed.policy.num_kv_blocks >= job.min_blocks
        assert placed.policy.max_num_seqs >= 0.98 * before.policy.max_num_seqs


def test_long_rows_are_more_at_once_and_faster() -> None:
    node = hardware_preset("l4")
    workload = Workload(num_rows=10_000, prompt_tokens=4000, generated_tokens=1000)
    models = (GPT_OSS, without_windows(GPT_OSS))
    plan, before = (
        find_plan(model, node, workload, schedule="layer_by_layer", max_model_len=8192)
        for model in models
    )
    assert plan.policy.num_kv_blocks > 1.7 * before.policy.num_kv_blocks
    assert plan.tokens_per_s > before.tokens_per_s
    assert "in layers with a window of 128" in plan.describe()
    assert "in layers with a window" not in before.describe()
