"""Blocks of layers with a window are freed behind it; the runner checks what every token sees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.engine.window_blocks import WindowBlocks
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.plan.policy import window_blocks
from tests.unit.engine.fakes import expected_tokens, small_policy
from tests.unit.engine.test_prefixes import assert_nothing_is_left, cached, family
from tests.unit.engine.test_scheduler import Bench, prompts_of

WINDOWS = (2, 5, 31, 32, 33, 34, 64, 65)
ROOMY = small_policy(
    max_num_seqs=16, max_num_batched_tokens=1024, max_prefill_chunk_tokens=512, num_kv_blocks=512
)


def windows_of(bench: Bench) -> WindowBlocks:
    windows = bench.core.scheduler._windows
    assert windows is not None
    return windows


@given(
    window=st.sampled_from(WINDOWS),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    max_tokens=st.integers(1, 80),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(1, 80),
    chunk=st.integers(1, 80),
    num_blocks=st.integers(28, 40),
    head=st.integers(0, 128),
)
@settings(max_examples=40, deadline=None)
def test_tokens_do_not_depend_on_any_size(
    window, lengths, max_tokens, max_num_seqs, max_num_batched_tokens, chunk, num_blocks, head
):
    policy = small_policy(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=chunk,
        num_kv_blocks=num_blocks,
    )
    bench, prompts = Bench(policy, window=window), family(head, lengths)
    windows = windows_of(bench)
    for prompt in prompts:
        bench.add(prompt, max_tokens=max_tokens)
    bench.run()
    bench.assert_all_as_expected(prompts, max_tokens)
    assert windows.pool.num_free == windows.pool.num_blocks
    assert_nothing_is_left(bench)


@pytest.mark.parametrize("window", WINDOWS)
def test_preempted_rows_with_windows_continue_with_the_same_tokens(window) -> None:
    policy = small_policy(num_kv_blocks=30, max_num_seqs=4, max_num_batched_tokens=64)
    bench = Bench(policy, window=window)
    for prompt in prompts_of([3] * 20):  # teach the forecast short rows
        bench.add(prompt, max_tokens=1)
    bench.run()
    prompts = prompts_of([130, 220, 231, 5, 116, 209])
    orders = [bench.add(prompt, max_tokens=140).order for prompt in prompts]
    bench.run()
    assert bench.core.scheduler.num_preemptions > 0
    for order, prompt in zip(orders, prompts, strict=True):
        assert list(bench.results[order].token_ids) == expected_tokens(prompt, 140)


def test_a_long_row_keeps_the_blocks_of_its_window_alone() -> None:
    bench = Bench(ROOMY, window=33)
    windows, used = windows_of(bench), []
    bench.add(prompts_of([400])[0], max_tokens=90, ignore_eos=True)
    bench.core.step()
    assert bench.core.scheduler.pool.num_free == 512 - 13
    while bench.core.scheduler.table.num_live:
        used.append(windows.pool.num_blocks - windows.pool.num_free)
        bench.core.step()
    assert set(used) == {1, 2}  # the last 32 tokens, after a whole block and within one


def test_where_windows_save_nothing_all_layers_have_the_same_blocks() -> None:
    bench, prompts = Bench(ROOMY, window=2000), prompts_of([40, 300])
    assert bench.core.scheduler._windows is None
    for prompt in prompts:
        bench.add(prompt, max_tokens=9)
    bench.run()
    bench.assert_all_as_expected(prompts, 9)


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_share_a_prefix_whose_window_is_in_the_cache(window) -> None:
    bench, prompts = Bench(ROOMY, window=window), family(320, [10, 30, 1, 150])
    for prompt in prompts:
        bench.add(prompt, max_tokens=9)
    bench.run()
    bench.assert_all_as_expected(prompts, 9)
    assert cached(bench) == 3 * 320


def test_samples_of_a_row_share_its_prompt() -> None:
    bench, (prompt,) = Bench(ROOMY, window=33), prompts_of([170])
    bench.add(prompt, n=3, max_tokens=40)
    bench.run()
    assert bench.core.counters.num_computed_tokens == 160 + 3 * (10 + 39)


def test_a_prefix_ends_where_its_window_was_evicted() -> None:
    bench, prompts = Bench(ROOMY, window=65), family(320, [10, 30])
    bench.add(prompts[0], max_tokens=3)
    bench.run()
    pool, scheduler = windows_of(bench).pool, bench.core.scheduler
    keys = list(pool._blocks)
    assert len(keys) == 10
    for key in keys[6:9]:  # two blocks before the end of a prefix are its window
        block = pool._blocks[key]
        del pool._used_once[block]
        pool._forget(block)
        pool._empty.append(block)
    assert scheduler.pool.num_kept == 10
    bench.add(prompts[1], max_tokens=3)
    bench.run()
    assert bench.results[1].num_cached_tokens == 6 * BLOCK_TOKENS
    bench.assert_all_as_expected(prompts, 3)


def test_dropped_prefixes_are_gone_from_windows_too() -> None:
    bench, prompts = Bench(ROOMY, window=33), family(320, [10, 30])
    bench.add(prompts[0], max_tokens=3)
    bench.run()
    bench.core.scheduler.drop_kept_prefixes()
    assert windows_of(bench).pool.num_kept == 0
    bench.add(prompts[1], max_tokens=3)
    bench.run()
    assert cached(bench) == 0


@given(
    window=st.integers(2, 140),
    computed=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    tokens=st.integers(1, 200),
    room=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_a_step_that_fits_computes_a_token_of_each_and_never_runs_out(
    window, computed, tokens, room
) -> None:
    num_slots = len(computed)
    windows = WindowBlocks(window, num_slots * window_blocks(window) + room, (num_slots, 40))
    slots, before = np.arange(num_slots), np.zeros(num_slots, np.int32)
    wanted = np.asarray(computed, np.int32)
    while (before < wanted).any():  # prompts, as fast as blocks allow
        before += fitted(windows, slots, before, wanted - before)
    fitted(windows, slots, before, np.full(num_slots, tokens, np.int32))


def fitted(windows, slots, computed, asked) -> np.ndarray:
    taken = windows.fit(slots, computed, asked)
    assert ((taken >= np.minimum(asked, 1)) & (taken <= asked)).all()
    windows.extend(slots, computed + taken)
    windows.free_behind(slots, computed + taken)
    return taken


def test_more_tokens_than_blocks_are_cut_from_later_prompts() -> None:
    windows = WindowBlocks(33, 2 * 2 + 5, (2, 40))  # two blocks for each, and five
    asked = np.full(2, 200, np.int32)
    taken = windows.fit(np.arange(2), np.zeros(2, np.int32), asked)
    assert taken.tolist() == [200, 2 * BLOCK_TOKENS]
