"""Rows that begin the same share KV blocks: fewer tokens are computed, and none changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.data.sorting import deal_rows, prompt_bytes
from raymoe.engine.core import EngineCore
from raymoe.engine.scheduler import Scheduler
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.prefixes import prefix_keys
from tests.unit.engine.fakes import expected_tokens, small_policy
from tests.unit.engine.test_scheduler import Bench, prompts_of, short_rows_then_long_ones

ROOMY = small_policy(
    max_num_seqs=64, max_num_batched_tokens=4096, max_prefill_chunk_tokens=4096, num_kv_blocks=512
)


def family(head: int, tails, seed=0):
    """Prompts that share their first `head` tokens."""
    (shared,) = prompts_of([head], seed)
    return [shared + tail for tail in prompts_of(tails, seed + 1)]


def cached(bench: Bench) -> int:
    return sum(generation.num_cached_tokens for generation in bench.results.values())


def assert_nothing_is_left(bench: Bench) -> None:
    scheduler = bench.core.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert len(scheduler._coming) == 0


def test_keys_say_whether_all_tokens_before_are_equal() -> None:
    one, other = (np.asarray(prompt) for prompt in family(3 * BLOCK_TOKENS, [50, 50]))
    keys, others = prefix_keys(one), prefix_keys(other)
    assert len(keys) == (3 * BLOCK_TOKENS + 49) // BLOCK_TOKENS
    assert keys[:3] == others[:3]
    assert keys[3] != others[3]
    assert len(prefix_keys(one[: 2 * BLOCK_TOKENS])) == 1
    assert not set(keys) & set(prefix_keys(one, salt=b"1"))
    one[0] += 1
    assert not set(keys) & set(prefix_keys(one))


def test_a_row_takes_over_what_a_live_one_has_computed() -> None:
    bench = Bench(ROOMY)
    prompts = family(100, [10, 30, 1])
    bench.add(prompts[0], max_tokens=9)
    bench.core.step()
    for prompt in prompts[1:]:
        bench.add(prompt, max_tokens=9)
    bench.core.step()
    assert bench.runner.max_num_batched_tokens[-1] == 1 + (130 - 96) + (101 - 96)
    bench.run()
    bench.assert_all_as_expected(prompts, 9)
    assert cached(bench) == 2 * 96
    assert_nothing_is_left(bench)


def test_rows_wait_for_the_first_of_their_family_and_let_others_pass() -> None:
    bench = Bench(ROOMY)
    families = [family(96, [8] * 4, seed) for seed in (0, 10, 20)]
    prompts = [prompt for group in families for prompt in group]
    for prompt in prompts:
        bench.add(prompt, max_tokens=4)
    bench.core.step()
    assert bench.runner.max_num_batched_tokens == [3 * 104]  # one of each
    bench.core.step()
    assert bench.runner.max_num_batched_tokens[1] == 3 + 9 * 8
    bench.run()
    bench.assert_all_as_expected(prompts, 4)
    assert cached(bench) == 9 * 96


@pytest.mark.parametrize("has_states", [False, True], ids=["KV", "states"])
def test_rows_that_end_with_their_prompts_leave_their_prefix(has_states) -> None:
    bench, prompts = Bench(ROOMY, has_states=has_states), family(96, range(1, 41))
    for prompt in prompts:
        bench.add(prompt, max_tokens=1)
    bench.run()
    bench.assert_all_as_expected(prompts, 1)
    assert bench.core.counters.num_computed_tokens == 96 + sum(range(1, 41))
    assert_nothing_is_left(bench)


@pytest.mark.parametrize("has_states", [False, True], ids=["KV", "states"])
def test_a_later_job_computes_no_prefix_again(has_states) -> None:
    bench, prompts = Bench(ROOMY, has_states=has_states), family(96, [9, 20, 30, 4])
    for prompt in prompts[:2]:
        bench.add(prompt, max_tokens=3)
    bench.run()
    bench.core.counters.num_computed_tokens = 0
    for prompt in prompts[2:]:
        bench.add(prompt, max_tokens=3)
    bench.run()
    assert bench.core.counters.num_computed_tokens == 30 + 4 + 2 * 2
    bench.core.scheduler.drop_kept_prefixes()
    again = bench.add(prompts[0], max_tokens=3)
    bench.run()
    assert bench.results[again.order].num_cached_tokens == 0
    bench.assert_all_as_expected([*prompts, prompts[0]], 3)
    assert_nothing_is_left(bench)


def test_rows_given_up_leave_the_blocks_that_they_computed() -> None:
    bench, prompts = Bench(small_policy(max_prefill_chunk_tokens=BLOCK_TOKENS)), family(128, [5, 7])
    cancelled = bench.add(prompts[0], max_tokens=3)
    for _ in range(3):
        bench.core.step()
    bench.core.drop([cancelled])
    row = bench.add(prompts[1], max_tokens=3)
    bench.run()
    assert bench.results[row.order].num_cached_tokens == 3 * BLOCK_TOKENS
    assert list(bench.results[row.order].token_ids) == expected_tokens(prompts[1], 3)


def test_prompts_that_begin_each_other_share_whole_blocks_of_all_but_the_last_token() -> None:
    bench, (longest,) = Bench(ROOMY), prompts_of([200])
    lengths = (200, 64, 65, 96, 31, 200, 129)
    for length in lengths:
        bench.add(longest[:length], max_tokens=2)
        bench.run()
    bench.assert_all_as_expected([longest[:length] for length in lengths], 2)
    found = [bench.results[i].num_cached_tokens for i in range(len(lengths))]
    assert found == [0, 32, 64, 64, 0, 192, 128]


def test_different_prompts_need_no_more_than_the_cache() -> None:
    bench = Bench(small_policy(num_kv_blocks=20))
    prompts = prompts_of([40 + index % 90 for index in range(300)])
    for prompt in prompts:
        bench.add(prompt, max_tokens=2)
    bench.run()
    bench.assert_all_as_expected(prompts, 2)
    assert cached(bench) == 0
    assert bench.core.scheduler.pool.num_evicted > 300
    assert_nothing_is_left(bench)


def test_blocks_that_rows_share_count_once_at_admission() -> None:
    policy = small_policy(
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_prefill_chunk_tokens=4096,
        num_kv_blocks=64,
    )
    bench, prompts = Bench(policy, 1024), family(20 * BLOCK_TOKENS, [9] * 30)
    for prompt in prompts:
        bench.add(prompt, max_tokens=8)
    bench.core.step()
    bench.core.step()
    assert bench.core.scheduler.table.num_live == 30  # 20 blocks together and one each
    bench.run()
    assert bench.core.scheduler.num_preemptions == 0
    bench.assert_all_as_expected(prompts, 8)


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 4, "num_kv_blocks": 64},
        {"max_num_seqs": 16, "num_kv_blocks": 20},
        {"max_num_seqs": 8, "num_kv_blocks": 40, "steady_admission": True},
    ],
    ids=["no slot", "no block", "not yet by the rate"],
)
def test_a_full_cache_looks_up_prefixes_only_when_something_has_changed(sizes) -> None:
    bench, searches = Bench(small_policy(max_num_batched_tokens=512, **sizes)), []
    scheduler, prompts = bench.core.scheduler, prompts_of([70] * 16)
    choose = scheduler._choose_candidates
    scheduler._choose_candidates = lambda: searches.append(1) or choose()
    for prompt in prompts:
        bench.add(prompt, max_tokens=30, ignore_eos=True)
    num_steps = 0
    while scheduler.num_waiting:
        bench.core.step()
        num_steps += 1
    assert num_steps >= 50
    assert len(searches) <= num_steps / 3
    bench.run()
    bench.assert_all_as_expected(prompts, 30)


def test_rows_that_share_little_do_not_wait() -> None:
    bench = Bench(ROOMY)
    for prompt in family(40, [100] * 3):
        bench.add(prompt, max_tokens=4)
    bench.core.step()
    assert bench.runner.max_num_batched_tokens == [3 * 140]


def test_a_prompt_whose_probabilities_are_wanted_is_computed() -> None:
    bench = Bench(ROOMY)
    prompts = family(100, [10, 10])
    bench.add(prompts[0], max_tokens=9)
    bench.core.step()
    row = bench.add(prompts[1], max_tokens=9, prompt_logprobs=0)
    bench.run()
    assert bench.results[row.order].num_cached_tokens == 0
    assert len(bench.results[row.order].prompt_logprobs) == 110
    bench.assert_all_as_expected(prompts, 9)
    assert_nothing_is_left(bench)


@pytest.mark.parametrize(("salt", "expected"), [(lambda _: b"", 96), (lambda n: bytes([n]), 0)])
def test_lengths_that_matter_keep_prompts_apart(salt, expected) -> None:
    scheduler = Scheduler(ROOMY, 512, prefix_salt=salt)
    bench = Bench(ROOMY)
    bench.core.scheduler = scheduler
    first, longer, equal = (bench_request(bench, prompt) for prompt in family(100, [10, 20, 10]))
    scheduler.add(first.samples[0])
    scheduler.complete(scheduler.next_step())
    for request, shared in ((longer, expected), (equal, 96)):
        scheduler.add(request.samples[0])
        scheduler.next_step()
        assert request.samples[0].num_cached_tokens == shared


def bench_request(bench: Bench, prompt):
    """A request that the bench's own scheduler does not see."""
    bench.core.add = lambda _request: None
    return bench.add(prompt, max_tokens=3)


@given(
    heads=st.lists(st.integers(0, 120), min_size=1, max_size=3),
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70)), min_size=1, max_size=12),
    max_tokens=st.integers(1, 20),
    max_num_batched_tokens=st.integers(1, 80),
    chunk=st.integers(1, 80),
    num_blocks=st.integers(8, 24),
    num_samples=st.integers(1, 2),
)
@settings(max_examples=30, deadline=None)
def test_tokens_are_those_of_rows_alone(
    heads, tails, max_tokens, max_num_batched_tokens, chunk, num_blocks, num_samples
):
    policy = small_policy(
        max_num_seqs=5,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=chunk,
        num_kv_blocks=num_blocks,
    )
    bench, shared = Bench(policy), prompts_of(heads)
    prompts = [
        shared[which % len(shared)] + prompts_of([length], seed=index)[0]
        for index, (which, length) in enumerate(tails)
    ]
    for prompt in prompts:
        bench.add(prompt, max_tokens=max_tokens, n=num_samples)
    bench.run()
    bench.assert_all_as_expected(prompts, max_tokens)
    assert_nothing_is_left(bench)


def test_families_survive_preemption() -> None:
    bench, _ = short_rows_then_long_ones(small_policy(num_kv_blocks=12, max_num_seqs=8))
    prompts = family(64, [3, 9, 20, 1, 30, 5])
    orders = [bench.add(prompt, max_tokens=90).order for prompt in prompts]
    bench.run()
    assert bench.core.scheduler.num_preemptions > 0
    for order, prompt in zip(orders, prompts, strict=True):
        assert list(bench.results[order].token_ids) == expected_tokens(prompt, 90)
    assert_nothing_is_left(bench)


def test_a_prompt_that_is_given_up_half_way_is_no_longer_waited_for() -> None:
    bench = Bench(small_policy(max_prefill_chunk_tokens=BLOCK_TOKENS))
    prompts = family(128, [5, 7])
    first = bench.add(prompts[0], max_tokens=3)
    bench.core.step()
    bench.core.scheduler._preempt(first.samples[0])
    assert_nothing_is_left(bench)
    bench.add(prompts[1], max_tokens=3)
    bench.run()
    bench.assert_all_as_expected(prompts, 3)


SMALL = small_policy(  # a cache of 16 prefixes
    max_num_seqs=8, max_num_batched_tokens=256, max_prefill_chunk_tokens=128, num_kv_blocks=48
)


@pytest.mark.parametrize(("has_states", "share"), [(False, 0.98), (True, 0.8)])
def test_waiting_rows_of_one_prefix_meet_in_a_cache_too_small_for_all(has_states, share) -> None:
    bench, num_families = Bench(SMALL, has_states=has_states), 60
    families = [family(96, range(5, 10), 10 * seed) for seed in range(num_families)]
    prompts = [prompt for group in families for prompt in group]
    np.random.default_rng(0).shuffle(prompts)
    for prompt in prompts:
        bench.add(prompt, max_tokens=2)
    bench.run()
    bench.assert_all_as_expected(prompts, 2)
    assert cached(bench) >= share * 96 * num_families * 4
    assert_nothing_is_left(bench)


def test_arranged_rows_share_more() -> None:
    families = [family(96, [5 + i for i in range(6)], 10 * seed) for seed in range(60)]
    mixed = [group[index] for index in range(6) for group in families]
    texts = sorted((prompt_bytes(None, None, prompt), prompt) for prompt in mixed)
    order = deal_rows([text for text, _ in texts], [len(text) for text, _ in texts], 16)
    benches = []
    for prompts in (mixed, [texts[index][1] for index in order]):
        bench = Bench(SMALL)
        for index, prompt in enumerate(prompts):
            while index - len(bench.results) >= 16:  # as a stream: so many rows at once
                bench.core.step()
            bench.add(prompt, max_tokens=4)
        bench.run()
        bench.assert_all_as_expected(prompts, 4)
        benches.append(bench)
    apart, together = benches
    assert cached(apart) < 96 * 10
    assert cached(together) >= 96 * 60 * 4  # of 5 rows of each family that could
    tokens = [bench.core.counters.num_computed_tokens for bench in benches]
    assert tokens[1] < tokens[0] / 2


def test_a_core_takes_the_setting_along() -> None:
    core = EngineCore(
        Bench(ROOMY).runner, ROOMY, max_model_len=512, vocab_size=8, eos_token_ids=(),
        decode_all=list, finish=lambda *_: None, prefix_salt=str,
    )  # fmt: skip
    assert core.scheduler._prefix_salt is str


@pytest.mark.slow
@pytest.mark.parametrize("has_states", [False, True], ids=["KV", "states"])
@pytest.mark.parametrize("num_actors", [1, 4])
@pytest.mark.parametrize("num_families", [2, 20])
def test_instructions_that_alternate_are_computed_once_by_each_actor(
    num_families, num_actors, has_states
):
    random = np.random.default_rng(num_families)
    heads = prompts_of([96] * num_families)
    tails = prompts_of(random.integers(1, 30, 10_000), seed=1)
    families, actors = random.integers(num_families, size=10_000), random.integers(4, size=10_000)
    policy = small_policy(  # 25 snapshots of states
        max_num_seqs=400,
        max_num_batched_tokens=256,
        max_prefill_chunk_tokens=256,
        num_kv_blocks=256,
    )
    for actor in range(num_actors):
        mine = [i for i in range(10_000) if num_actors == 1 or actors[i] == actor]
        prompts = [heads[families[i]] + tails[i] for i in mine]
        bench = Bench(policy, has_states=has_states)
        for prompt in prompts:
            bench.add(prompt, max_tokens=2)
        bench.run()
        bench.assert_all_as_expected(prompts, 2)
        computed = sum(map(len, prompts)) - cached(bench)
        own = sum(len(tails[i]) for i in mine)
        assert computed - own <= 1.05 * 96 * len(set(families[mine].tolist()))
