"""Rows of models with states share prefixes from snapshots: each token once, and none changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.prefixes import StateSnapshots, branch_points
from raymoe.plan.policy import max_sequences, num_state_slots
from tests.unit.engine.fakes import expected_tokens, small_policy
from tests.unit.engine.test_prefixes import ROOMY, assert_nothing_is_left, cached, family
from tests.unit.engine.test_scheduler import Bench, prompts_of, short_rows_then_long_ones


def run(policy, prompts, *, max_tokens=4, has_states=True, **params) -> Bench:
    bench = Bench(policy, has_states=has_states)
    for prompt in prompts:
        bench.add(prompt, max_tokens=max_tokens, **params)
    bench.run()
    bench.assert_all_as_expected(prompts, max_tokens)
    if has_states:
        assert_nothing_is_left(bench)
    return bench


@pytest.mark.parametrize("head", [33, 64, 95, 96, 100])
def test_a_prefix_is_computed_once(head) -> None:
    prompts = family(head, [9 + index for index in range(6)])
    bench = run(ROOMY, prompts)
    shared = head // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(bench) == 5 * shared
    useful = sum(len(prompt) + 3 for prompt in prompts) - 5 * shared
    assert bench.core.counters.num_computed_tokens == useful
    assert bench.runner.max_num_batched_tokens[0] == shared  # the chunk ends with the prefix


def test_states_save_what_blocks_save() -> None:
    families = [family(96, [8] * 4, seed) for seed in (0, 10, 20)]
    prompts = [prompt for group in families for prompt in group]
    with_states, with_kv = (run(ROOMY, prompts, has_states=has) for has in (True, False))
    assert cached(with_states) == cached(with_kv) == 9 * 96


def test_prefixes_of_prefixes_are_shared() -> None:
    (head,) = prompts_of([96])
    documents = [head + document for document in prompts_of([64] * 3, seed=1)]
    prompts = [
        document + question
        for index, document in enumerate(documents)
        for question in prompts_of([7] * 4, seed=2 + index)
    ]
    bench = run(ROOMY, prompts)
    # Three rows begin a document, one of them the head too.
    assert bench.core.counters.num_computed_tokens == 96 + 3 * 64 + 12 * (7 + 3)


def test_a_row_that_comes_later_goes_on_from_the_second_of_its_family() -> None:
    bench, prompts = Bench(ROOMY, has_states=True), family(100, [10, 30, 1])
    for prompt, computed in zip(prompts, (110, 1 + 96, 1 + 34 + 5), strict=True):
        bench.add(prompt, max_tokens=9)  # the first knows of no other, the second sees the first
        bench.core.step()
        assert bench.runner.max_num_batched_tokens[-1] == computed
    bench.run()
    bench.assert_all_as_expected(prompts, 9)
    assert cached(bench) == 96
    assert_nothing_is_left(bench)


def test_samples_share_their_prompt() -> None:
    bench, (prompt,) = Bench(ROOMY, has_states=True), prompts_of([70])
    row = bench.add(prompt, n=3, max_tokens=5)
    bench.run()
    for sample in (bench.results[row.order], *bench.results[row.order].others):
        assert list(sample.token_ids) == expected_tokens(prompt, 5)
    assert bench.core.counters.num_cached_tokens == 2 * 64
    assert_nothing_is_left(bench)


def test_a_prompt_whose_probabilities_are_wanted_is_computed_and_shared() -> None:
    bench, prompts = Bench(ROOMY, has_states=True), family(100, [10, 10, 10])
    rows = [bench.add(prompts[0], max_tokens=3, prompt_logprobs=0)]
    rows += [bench.add(prompt, max_tokens=3) for prompt in prompts[1:]]
    bench.run()
    assert [bench.results[row.order].num_cached_tokens for row in rows] == [0, 96, 96]
    bench.assert_all_as_expected(prompts, 3)


def test_more_prefixes_than_snapshots_replace_each_other() -> None:
    policy = small_policy(
        max_num_seqs=16, max_num_batched_tokens=256, max_prefill_chunk_tokens=128, num_kv_blocks=96
    )
    families = [family(96, [5 + i for i in range(6)], 10 * seed) for seed in range(20)]
    mixed = [group[index] for index in range(6) for group in families]
    apart = run(policy, mixed)
    together = run(policy, [prompt for group in families for prompt in group])
    assert cached(together) > cached(apart)
    assert cached(together) >= 96 * 20 * 4  # of 5 rows of each that could


def test_rows_alone_take_no_snapshots() -> None:
    bench = run(small_policy(max_num_seqs=1), family(64, [5] * 4))
    assert cached(bench) == 0
    assert bench.core.counters.num_steps == 4 * (3 + 3)  # three chunks, then decode


@given(
    heads=st.lists(st.integers(0, 120), min_size=1, max_size=4),
    tails=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=14),
    max_tokens=st.integers(1, 20),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 80),
    chunk=st.integers(1, 80),
    num_blocks=st.integers(8, 24),
    num_samples=st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_tokens_are_those_of_rows_alone(
    heads, tails, max_tokens, max_num_seqs, max_num_batched_tokens, chunk, num_blocks, num_samples
):
    policy = small_policy(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=chunk,
        num_kv_blocks=num_blocks,
    )
    shared = prompts_of(heads)
    prompts = [
        shared[which % len(shared)] + prompts_of([length], seed=index)[0]
        for index, (which, length) in enumerate(tails)
    ]
    bench = run(policy, prompts, max_tokens=max_tokens, n=num_samples)
    assert max(bench.runner.max_num_batched_tokens) <= max_num_batched_tokens
    assert bench.runner.largest_chunk <= chunk


def test_preempted_rows_go_on_from_snapshots() -> None:
    policy = small_policy(num_kv_blocks=12, max_num_seqs=8)
    bench, _ = short_rows_then_long_ones(policy, has_states=True)
    prompts = family(64, [3, 9, 20, 1, 30, 5])
    orders = [bench.add(prompt, max_tokens=90).order for prompt in prompts]
    bench.run()
    assert bench.core.scheduler.num_preemptions > 0
    for order, prompt in zip(orders, prompts, strict=True):
        assert list(bench.results[order].token_ids) == expected_tokens(prompt, 90)
    assert max(bench.results[order].num_cached_tokens for order in orders) == 64
    assert_nothing_is_left(bench)


def test_a_prompt_that_is_given_up_before_its_snapshot_is_no_longer_waited_for() -> None:
    bench = Bench(small_policy(max_prefill_chunk_tokens=BLOCK_TOKENS), has_states=True)
    prompts = family(128, [5, 7, 3])
    first, *_ = [bench.add(prompt, max_tokens=3) for prompt in prompts]
    bench.core.step()
    assert bench.core.scheduler.table.num_live == 1
    bench.core.drop([first])
    assert_nothing_is_left(bench)
    bench.run()
    assert [bench.results[order].num_cached_tokens for order in (1, 2)] == [0, 128]
    assert list(bench.results[2].token_ids) == expected_tokens(prompts[2], 3)


def test_the_least_recently_used_snapshot_goes_first() -> None:
    snapshots = StateSnapshots(range(4, 6))
    snapshots.take(b"a", 0)
    snapshots.take(b"b", 1)
    snapshots.restore(b"a", 2)
    snapshots.take(b"c", 3)
    assert snapshots.num_blocks([b"a", b"b", b"x"]) == 1
    assert snapshots.num_blocks([b"b"]) == 0
    assert snapshots.begin_step() == ((0, 4), (1, 5), (4, 2), (3, 5))
    snapshots.take(b"c", 0)  # is there
    snapshots.drop([b"a", b"x"])
    assert (len(snapshots), snapshots.begin_step()) == (1, ())
    snapshots.take(b"d", 1)
    assert snapshots.begin_step() == ((1, 4),)


def test_snapshots_are_where_prompts_branch_off() -> None:
    assert branch_points([], 0, 4) == []
    assert branch_points([0, 0], 0, 4) == []
    assert branch_points([9, 9, 5, 5, 1, 0], 0, 4) == [2, 4, 5]
    assert branch_points([9, 9, 5, 5, 1, 0], 0, 2) == [2, 4]
    assert branch_points([9, 9, 5, 5, 1, 0], 0, 1) == [4]  # 20 blocks instead of 18
    assert branch_points([9, 9, 5, 5, 1, 0], 2, 4) == [4, 5]
    assert branch_points([3, 3, 3], 0, 4) == [3]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 16, 33, 100])
def test_sequences_that_fit_leave_room_for_snapshots(max_num_seqs) -> None:
    kv_bytes, state_bytes = 1000, 777
    slots = num_state_slots(max_num_seqs)
    assert slots - max_num_seqs == {1: 0, 2: 2, 16: 2, 33: 3, 100: 7}[max_num_seqs]
    needed = max_num_seqs * kv_bytes + slots * state_bytes
    fitting = max_sequences(needed, kv_bytes, state_bytes)
    assert max_num_seqs - 3 <= fitting <= max_num_seqs


def test_snapshots_that_rows_wait_for_stay_longest():
    snapshots = StateSnapshots(range(8, 10))
    snapshots.take(b"a", 0)
    snapshots.take(b"b", 1)
    assert snapshots.want({b"a", b"z"}) == 1
    snapshots.take(b"c", 2)
    assert [snapshots.num_blocks([key]) for key in (b"a", b"b", b"c")] == [1, 0, 1]
