"""Rows that wait for their masks while the cache is full: others and they have the same tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fakes import expected_tokens, small_policy
from tests.unit.engine.test_prefixes import assert_nothing_is_left, family
from tests.unit.engine.test_scheduler import Bench, prompts_of

FORM = {"regex": "[a-z]*"}  # the masks below allow everything


class LateMasks:
    """Bitmasks that allow every token and come late: `is_late` says so each time one is asked.

    As `TokenBitmasks`, it gives all that is pending to a caller who waits without limit.
    """

    def __init__(self, is_late=lambda: True):
        self._is_late, self._rows, self._pending = is_late, set(), set()
        self.num_waits = 0

    def begin(self, slot, outputs, tokens, reasoning_token):
        self._rows.add(slot)
        self._pending.add(slot)

    def accept(self, slots, tokens):
        self._pending |= self._rows.intersection(slots.tolist())

    def end(self, slot):
        self._rows.discard(slot)
        self._pending.discard(slot)

    def error(self, slot):
        return None

    def pending(self):
        return set(self._pending)

    def synchronize(self, patience_s=0.0, slots=None):
        if slots is not None and self._pending.isdisjoint(slots):
            return
        self.num_waits += patience_s is None
        if patience_s is None or not self._is_late():
            self._pending.clear()

    def apply(self, logits_RV, rows, slots):
        assert self._pending.isdisjoint(slots.tolist()), "a mask is used before it is there"


def full_bench(masks) -> Bench:
    """Five blocks, and rows that are expected to grow by nothing."""
    bench = Bench(small_policy(num_kv_blocks=5, max_num_seqs=2), masks=masks)
    bench.core.scheduler.forecast.remaining = lambda generated, *_: 0 * generated
    return bench


def test_a_late_row_keeps_its_blocks_while_a_newer_one_needs_the_last() -> None:
    """No step can be assembled: the newer row gives up its blocks, the older one has no token."""
    masks = LateMasks()
    bench, (short, long) = full_bench(masks), prompts_of([20, 100])
    late = bench.add(short, max_tokens=10, structured_outputs=FORM)
    newer = bench.add(long, max_tokens=40)
    for _ in range(60):  # not `run`: rows that wait for each other would do so for ever
        if bench.core.has_work:
            bench.core.step()
    assert bench.core.scheduler.num_preemptions == 1
    assert masks.num_waits > 0
    assert list(bench.results[late.order].token_ids) == expected_tokens(short, 10)
    assert list(bench.results[newer.order].token_ids) == expected_tokens(long, 40)
    assert_nothing_is_left(bench)


def test_a_late_row_gives_up_its_blocks_for_an_older_one() -> None:
    bench, (long, short) = full_bench(LateMasks()), prompts_of([100, 20])
    older = bench.add(long, max_tokens=40)
    late = bench.add(short, max_tokens=10, structured_outputs=FORM)
    for _ in range(40):
        bench.core.step()
    assert bench.core.scheduler.num_preemptions == 1
    assert (older.samples[0].slot >= 0, late.samples[0].slot) == (True, -1)
    bench.run()
    assert list(bench.results[older.order].token_ids) == expected_tokens(long, 40)
    assert list(bench.results[late.order].token_ids) == expected_tokens(short, 10)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    head=st.sampled_from([0, 40, 70]),
    lateness=st.sampled_from([0.5, 1.0]),
    forms=st.lists(st.booleans(), min_size=8, max_size=8),
    max_tokens=st.integers(1, 60),
    max_num_batched_tokens=st.sampled_from([1, 2, 5, 40]),
    num_blocks=st.integers(8, 12),
    memory=st.sampled_from([{}, {"has_states": True}, {"window": 33}, {"restart_length": 50}]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=12, deadline=None)
def test_whatever_a_row_waits_for_in_a_full_cache_tokens_are_those_of_rows_alone(
    lengths, head, lateness, forms, max_tokens, max_num_batched_tokens, num_blocks, memory, seed
) -> None:
    """Rows wait for masks, budget, blocks, others' prefixes, snapshots, windows and restarts."""
    random = np.random.default_rng(seed)
    masks = LateMasks(lambda: random.random() < lateness)
    policy = small_policy(
        max_num_seqs=5, max_num_batched_tokens=max_num_batched_tokens, num_kv_blocks=num_blocks
    )
    bench, prompts = Bench(policy, masks=masks, **memory), family(head, lengths)
    bench.core.scheduler.forecast.remaining = lambda generated, *_: 0 * generated  # too few
    for prompt, has_form in zip(prompts, forms, strict=False):
        form = {"structured_outputs": FORM} if has_form else {}
        bench.add(prompt, max_tokens=max_tokens, n=1 + seed % 2, **form)
    bench.run()
    bench.assert_all_as_expected(prompts, max_tokens)
    assert_nothing_is_left(bench)
