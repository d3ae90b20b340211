"""The pass scheduler, through the core and the checksum model: same tokens whatever the sizes."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.config import SamplingParams
from raymoe.engine.core import EngineCore
from raymoe.engine.request import Request
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.plan.job import job_steps
from raymoe.specs.workload import Workload
from tests.unit.engine.fakes import EOS, VOCAB_SIZE, FakeRunner, expected_tokens, small_policy
from tests.unit.memory.test_block_pool import check_pool


class Bench:
    """A core without threads: rows in, results out."""

    def __init__(
        self,
        policy,
        max_model_len=512,
        before=lambda _inputs: None,
        replanner=None,
        *,
        has_states=False,
        window=None,
        masks=None,
        restart_length=None,
    ):
        num_states = policy.num_state_slots if has_states else 0
        self.runner = FakeRunner(
            policy.num_kv_blocks,
            self._checked(before),
            num_states=num_states,
            window=window or 0,
            num_window_blocks=policy.num_window_blocks(window),
        )
        self.results = {}
        self.core = EngineCore(
            self.runner,
            policy,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            decode_all=lambda sequences: [""] * len(sequences),
            finish=lambda request: self.results.update({request.order: request.generation}),
            replanner=replanner,
            has_states=has_states,
            window=window,
            masks=masks,
            restart_length=restart_length,
        )
        self.num_rows = 0

    def _checked(self, before):
        def check(inputs) -> None:
            assert_blocks_add_up(self.core.scheduler)
            windows = self.core.scheduler._windows
            if windows is not None:  # a step reads nothing of blocks that are free
                self.runner.windowed[windows.pool._empty] = -1
            before(inputs)

        return check

    def add(self, prompt, **params) -> Request:
        params = SamplingParams(**({"temperature": 0.0} | params))
        request = Request(
            prompt=np.asarray(prompt, np.int32),
            params=params,
            max_tokens_total=len(prompt) + params.max_tokens,
            seed=0,
            row_key=self.num_rows,
            future=Future(),
            order=self.num_rows,
        )
        self.num_rows += 1
        self.core.add(request)
        return request

    def run(self) -> None:
        while self.core.has_work:
            self.core.step()
        assert_blocks_add_up(self.core.scheduler)

    def assert_all_as_expected(self, prompts, max_tokens) -> None:
        assert sorted(self.results) == list(range(len(prompts)))
        for order, prompt in enumerate(prompts):
            assert list(self.results[order].token_ids) == expected_tokens(prompt, max_tokens)


def assert_blocks_add_up(scheduler) -> None:
    """No block is lost or used twice, and snapshots are those of prefixes in the cache."""
    table, pool, snapshots = scheduler.table, scheduler.pool, scheduler._snapshots
    references = np.zeros(pool.num_blocks, np.int32)
    for slot in table.live_slots():
        np.add.at(references, table.blocks(slot), 1)
    assert (references == pool._references).all()
    check_pool(pool)
    if snapshots is not None:
        assert set(snapshots._slots) <= set(pool._blocks)
        slots = [*snapshots._free, *snapshots._slots.values()]
        policy = scheduler.policy
        assert sorted(slots) == list(range(policy.max_num_seqs, policy.num_state_slots))
    if scheduler._windows is not None:
        assert_windows_add_up(scheduler)


def assert_windows_add_up(scheduler) -> None:
    """Each sequence has the blocks of its window and of its new tokens, and no others."""
    windows, slots = scheduler._windows, scheduler.table.live_slots()
    references = np.zeros(windows.pool.num_blocks, np.int32)
    for slot in slots:
        np.add.at(references, windows._table[slot, windows._first[slot] : windows._end[slot]], 1)
    assert (references == windows.pool._references).all()
    check_pool(windows.pool)
    behind = scheduler.table.num_computed_tokens[slots] - windows._window + 1
    assert (windows._first[slots] == np.maximum(behind, 0) // BLOCK_TOKENS).all()


def prompts_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length).tolist() for length in lengths]


def short_rows_then_long_ones(policy, *, has_states=False):
    """Rows of one token teach the forecast a low mean, so that the cache is overfilled after."""
    bench = Bench(policy, has_states=has_states)
    prompts = prompts_of([3] * 20)
    for prompt in prompts:
        bench.add(prompt, max_tokens=1)
    bench.run()
    return bench, prompts


@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=10),
    max_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(4, 20),
    steady_admission=st.booleans(),
    is_fixed=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_tokens_do_not_depend_on_any_size(
    lengths,
    max_tokens,
    max_num_seqs,
    max_num_batched_tokens,
    chunk,
    num_blocks,
    steady_admission,
    is_fixed,
):
    policy = small_policy(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=chunk,
        num_kv_blocks=num_blocks,
        steady_admission=steady_admission,
    )
    bench, prompts = Bench(policy), prompts_of(lengths)
    for prompt in prompts:
        bench.add(prompt, max_tokens=max_tokens, ignore_eos=is_fixed)
    bench.run()
    bench.assert_all_as_expected(prompts, max_tokens)
    assert bench.core.scheduler.pool.num_free == num_blocks
    assert max(bench.runner.max_num_batched_tokens) <= max_num_batched_tokens
    assert bench.runner.largest_chunk <= chunk


@pytest.mark.parametrize("max_tokens", [40, 100])
def test_preempted_sequences_continue_with_the_same_tokens(max_tokens):
    bench, _ = short_rows_then_long_ones(small_policy(num_kv_blocks=8, max_num_seqs=6))
    prompts = prompts_of([30, 20, 31, 5, 16, 9])
    orders = [bench.add(prompt, max_tokens=max_tokens).order for prompt in prompts]
    bench.run()
    assert bench.core.scheduler.num_preemptions > 0
    for order, prompt in zip(orders, prompts, strict=True):
        assert list(bench.results[order].token_ids) == expected_tokens(prompt, max_tokens)


def test_prompt_logprobs_are_collected_again_by_a_row_preempted_in_its_prompt():
    bench, (prompt,) = Bench(small_policy(max_prefill_chunk_tokens=32)), prompts_of([100])
    row = bench.add(prompt, max_tokens=3, prompt_logprobs=0)
    for _ in range(2):
        bench.core.step()
    bench.core.scheduler._preempt(row.samples[0])
    bench.run()
    found = bench.results[row.order].prompt_logprobs
    assert [entry.token_id for entry in found[1:]] == prompt[1:]


def test_rows_enter_while_blocks_for_growth_stay_free():
    policy = small_policy(num_kv_blocks=128, max_num_seqs=128, max_num_batched_tokens=8192)
    bench = Bench(policy)
    for prompt in prompts_of([33] * 80):  # two blocks each
        bench.add(prompt, max_tokens=2, ignore_eos=True)
    bench.core.step()
    assert (bench.core.scheduler.table.num_live, bench.core.scheduler.pool.num_free) == (63, 2)


def test_a_row_computes_its_tokens_again_once_it_is_longer_than_the_limit():
    for max_tokens, num_computed in ((11, 50), (12, 50 + 51)):  # the last token is not computed
        bench = Bench(small_policy(), restart_length=50)
        (prompt,) = prompts_of([40])
        bench.add(prompt, max_tokens=max_tokens)
        bench.run()
        assert bench.core.counters.num_computed_tokens == num_computed
        bench.assert_all_as_expected([prompt], max_tokens)


def test_the_oldest_sequence_is_never_preempted():
    bench, _ = short_rows_then_long_ones(small_policy(num_kv_blocks=8, max_num_seqs=6))
    oldest = bench.add([1, 2, 3], max_tokens=100)
    for prompt in prompts_of([20, 31, 5, 16, 9]):
        bench.add(prompt, max_tokens=100)
    bench.core.step()
    while oldest.order not in bench.results:
        assert oldest.samples[0].slot >= 0
        bench.core.step()


def test_preemption_does_not_thrash():
    bench, _ = short_rows_then_long_ones(small_policy(num_kv_blocks=32, max_num_seqs=32))
    for prompt in prompts_of([30] * 60):
        bench.add(prompt, max_tokens=90)
    bench.run()
    useful = 60 * (30 + 89) + 20 * 3
    assert bench.core.counters.num_computed_tokens < 1.5 * useful


def test_decode_goes_before_prefill_and_fills_up_with_it():
    bench = Bench(small_policy(max_num_batched_tokens=20, max_prefill_chunk_tokens=8))
    for prompt in prompts_of([1, 1, 1]):
        bench.add(prompt, max_tokens=30)
    bench.core.step()
    for prompt in prompts_of([50, 50, 50]):
        bench.add(prompt, max_tokens=2)
    bench.core.step()
    assert bench.runner.max_num_batched_tokens[-1] == 3 + 8 + 8 + 1


def test_a_free_slot_is_filled_in_the_next_pass():
    bench = Bench(small_policy(max_num_seqs=2))
    for prompt in prompts_of([4] * 6):
        bench.add(prompt, max_tokens=1)
    bench.core.step()
    assert len(bench.results) == 2
    bench.core.step()
    assert len(bench.results) == 4


def test_rows_of_few_tokens_fill_all_slots():
    bench = Bench(small_policy(max_num_seqs=2048, num_kv_blocks=4096, max_num_batched_tokens=8192))
    for prompt in prompts_of([2] * 6000):
        bench.add(prompt, max_tokens=3, ignore_eos=True)
    slots_in_use = []
    while bench.core.has_work:
        before = len(bench.results)
        bench.core.step()
        num_finished = len(bench.results) - before
        slots_in_use.append(bench.core.scheduler.table.num_live + num_finished)
    assert slots_in_use[:3] == [256, 256 + 512, 256 + 512 + 1024]
    assert 2048 in slots_in_use


def test_rows_of_unknown_length_are_admitted_only_while_their_worst_case_fits():
    bench = Bench(small_policy(num_kv_blocks=8, max_num_seqs=8))
    for prompt in prompts_of([16] * 8):
        bench.add(prompt, max_tokens=90)
    bench.core.step()
    assert bench.core.scheduler.table.num_live == 2


def test_rows_that_end_early_raise_the_number_that_is_admitted():
    bench, _ = short_rows_then_long_ones(small_policy(num_kv_blocks=8, max_num_seqs=8))
    for prompt in prompts_of([16] * 8):
        bench.add(prompt, max_tokens=100)
    bench.core.step()
    assert bench.core.scheduler.table.num_live > 2


def test_samples_of_a_row_share_the_full_blocks_of_its_prompt():
    bench = Bench(small_policy(max_num_batched_tokens=128, max_prefill_chunk_tokens=128))
    prompt = prompts_of([70])[0]
    request = bench.add(prompt, n=3, max_tokens=5)
    bench.core.step()
    bench.core.step()
    table, pool = bench.core.scheduler.table, bench.core.scheduler.pool
    first = table.blocks(request.samples[0].slot)
    assert (table.blocks(request.samples[2].slot)[:2] == first[:2]).all()
    assert [pool.references(int(block)) for block in first] == [3, 3, 1]
    bench.run()
    generation = bench.results[request.order]
    assert [len(generation.others), generation.others[0].num_cached_tokens] == [2, 64]
    assert bench.core.counters.num_cached_tokens == 2 * 64
    for sample in (generation, *generation.others):
        assert list(sample.token_ids) == expected_tokens(prompt, 5)
    assert pool.num_free == pool.num_blocks


def test_samples_of_a_row_survive_preemption():
    bench, _ = short_rows_then_long_ones(small_policy(num_kv_blocks=8, max_num_seqs=6))
    prompts = prompts_of([40, 33])
    orders = [bench.add(prompt, n=3, max_tokens=60).order for prompt in prompts]
    bench.run()
    assert bench.core.scheduler.num_preemptions > 0
    for order, prompt in zip(orders, prompts, strict=True):
        for sample in (bench.results[order], *bench.results[order].others):
            assert list(sample.token_ids) == expected_tokens(prompt, 60)
    assert bench.core.scheduler.pool.num_free == 8


STEADY = small_policy(
    num_kv_blocks=64,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_prefill_chunk_tokens=512,
    steady_admission=True,
)


def steps_of(policy, num_rows: int, *, ignore_eos: bool = True) -> int:
    bench = Bench(policy)
    for prompt in prompts_of([20] * num_rows):
        bench.add(prompt, max_tokens=40, ignore_eos=ignore_eos)
    num_steps = 0
    while bench.core.has_work:
        bench.core.step()
        num_steps += 1
    assert not (policy.steady_admission and bench.core.scheduler.num_preemptions)
    assert len(bench.results) == num_rows
    return num_steps


def test_rows_at_the_steady_rate_keep_the_cache_full():
    """As many steps as the plan's job, which admits by the same rule; others take more."""
    num_steps = steps_of(STEADY, 200)
    workload = Workload(num_rows=200, prompt_tokens=20, generated_tokens=40)
    planned = sum(number for _, number in job_steps(workload, STEADY))
    assert num_steps == pytest.approx(planned, rel=0.03)
    full = 200 * (20 + BLOCK_TOKENS / 2 + 40 / 2) * 40 / (63 * BLOCK_TOKENS)
    assert num_steps <= full + 40 + 10
    assert steps_of(replace(STEADY, steady_admission=False), 200) > 1.1 * num_steps
    assert steps_of(STEADY, 200, ignore_eos=False) < 1.05 * num_steps


@pytest.mark.parametrize("generated", [1, 40])
def test_shared_prefixes_are_planned_as_they_run(generated):
    policy = replace(STEADY, max_num_batched_tokens=256, max_prefill_chunk_tokens=256)
    head, tails = prompts_of([10 * BLOCK_TOKENS])[0], prompts_of([20] * 200, seed=1)
    bench = Bench(policy)
    for tail in tails:
        bench.add(head + tail, max_tokens=generated, ignore_eos=True)
    bench.run()
    shared = len(head) * 199 // 200
    workload = Workload(
        num_rows=200, prompt_tokens=len(head) + 20, generated_tokens=generated,
        shared_prompt_tokens=shared,
    )  # fmt: skip
    steps = job_steps(workload, policy)
    counters = bench.core.counters
    planned = sum(number * load.prompt_tokens for load, number in steps)
    assert planned == pytest.approx(counters.num_prompt_tokens, rel=0.1)
    assert sum(number for _, number in steps) == pytest.approx(counters.num_steps, rel=0.1, abs=2)
    contexts = {load.decode_context for load, _ in steps if load.decode_rows}
    assert all(context > shared for context in contexts)
    alone = job_steps(replace(workload, shared_prompt_tokens=0), policy)
    assert sum(number for _, number in alone) > 1.5 * sum(number for _, number in steps)


def test_rows_that_all_fit_enter_at_once_whatever_the_rate():
    assert steps_of(STEADY, 20) == 40


class OnePolicy:
    """Stands in for a `Replanner`: after some steps, one other policy."""

    def __init__(self, policy, num_slots: int, num_steps: int) -> None:
        self.num_slots, self.rows = num_slots, []
        self._policies = iter([*[None] * num_steps, policy])

    def poll(self, num_unfinished):
        assert num_unfinished > 0
        return next(self._policies, None)

    def record_row(self, num_prompt_tokens, num_generated_tokens, num_cached_tokens):
        assert num_cached_tokens == 0
        self.rows.append((num_prompt_tokens, num_generated_tokens))


@pytest.mark.parametrize("max_num_seqs", [2, 12])
def test_another_policy_between_steps_changes_sizes_and_no_tokens(max_num_seqs):
    before = small_policy(max_num_seqs=4, num_kv_blocks=40)
    after = replace(
        before, max_num_seqs=max_num_seqs, max_num_batched_tokens=24, steady_admission=True
    )
    replanner = OnePolicy(after, 12, num_steps=10)
    bench, prompts = Bench(before, replanner=replanner), prompts_of(range(1, 31))
    for prompt in prompts:
        bench.add(prompt, max_tokens=20)
    most_live = [0, 0]
    while bench.core.has_work:
        bench.core.step()
        is_after = bench.core.scheduler.policy is after
        most_live[is_after] = max(most_live[is_after], bench.core.scheduler.table.num_live)
    bench.assert_all_as_expected(prompts, 20)
    assert most_live == [4, max(4, max_num_seqs)]  # those that are live stay
    assert sorted(replanner.rows) == [(length, 20) for length in range(1, 31)]
    assert bench.core.scheduler.pool.num_free == 40
