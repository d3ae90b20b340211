"""Scheduler: which sequences run in the next step, with how many tokens each.

Prompts that begin with the same tokens share full blocks of the KV cache (Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, section 4.4).
"""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from raymoe._native import compiled
from raymoe.engine.outputs import Int32s
from raymoe.engine.request import Request, Sample
from raymoe.engine.sequence import (
    NO_END,
    Admission,
    Bools,
    Int64s,
    SchedulerOutput,
    SequenceTable,
    assemble_step,
    choose_scheduled_tokens,
)
from raymoe.engine.window_blocks import WindowBlocks
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.block_pool import BlockPool
from raymoe.memory.prefixes import (
    ComingPrefixes,
    PrefixSalt,
    StateSnapshots,
    branch_points,
    no_salt,
    prefix_keys,
)
from raymoe.plan.job import MEAN_WASTE, SteadyAdmission
from raymoe.plan.policy import Policy
from raymoe.runtime.batch import blocks_of_tokens

HISTORY = 1024  # finished rows that are remembered
MIN_HISTORY = 16  # with fewer, every row counts as long as it may become
PREEMPTION_STEP = 0.25  # how much of the way to the worst case one preemption moves the estimate
FINISH_DECAY = 0.98
GOLDEN_RATIO = 0.618034  # its multiples spread evenly over 0..1, whatever their number


class LengthForecast:
    """Expected number of tokens that a sequence still generates.

    The mean of what finished rows generated beyond the same point, moved towards the limit of
    the row by `pessimism`, which grows with each preemption and fades with each finished row.
    """

    def __init__(self) -> None:
        self._lengths = np.zeros(HISTORY, np.int64)
        self._num_finished = 0
        self._is_dirty = True
        self._sorted, self._suffix_sums = self._lengths[:0], np.zeros(1, np.int64)
        self.pessimism = 0.0

    def record_finished(self, num_generated: int) -> None:
        """Learn from a row that ended by itself or by its limit."""
        self._lengths[self._num_finished % HISTORY] = num_generated
        self._num_finished += 1
        self._is_dirty = True
        self.pessimism *= FINISH_DECAY

    def record_preemption(self) -> None:
        self.pessimism += (1.0 - self.pessimism) * PREEMPTION_STEP

    def remaining(
        self, generated: Int32s | Int64s, limit: Int32s | Int64s, is_fixed: Bools
    ) -> Int64s:
        """Expected tokens still to come of sequences.

        Args:
            limit: How many it may have.
            is_fixed: Whether nothing else ends it.
        """
        worst = (limit - generated).astype(np.int64)
        if not self.has_history:
            return worst
        if self._is_dirty:
            self._summarise()
        index = np.searchsorted(self._sorted, generated, side="right")
        num_longer = len(self._sorted) - index
        mean = self._suffix_sums[index] / np.maximum(num_longer, 1) - generated
        is_known = (num_longer > 0) & ~is_fixed
        expected = np.where(is_known, np.minimum(np.ceil(mean), worst), worst)
        estimate: Int64s = np.ceil(expected + self.pessimism * (worst - expected)).astype(np.int64)
        return estimate

    def typical(self, limit: Int64s, is_fixed: Bools) -> Int64s:
        """Lengths of rows that begin, as different as those of finished rows."""
        if not self.has_history:
            return limit
        if self._is_dirty:
            self._summarise()
        quantiles = np.arange(len(limit)) * GOLDEN_RATIO % 1.0
        drawn = self._sorted[(quantiles * len(self._sorted)).astype(np.int64)]
        drawn = np.where(is_fixed, limit, np.minimum(drawn, limit))
        lengths: Int64s = np.ceil(drawn + self.pessimism * (limit - drawn)).astype(np.int64)
        return lengths

    @property
    def has_history(self) -> bool:
        return self._num_finished >= MIN_HISTORY

    def _summarise(self) -> None:
        self._sorted = np.sort(self._lengths[: min(self._num_finished, HISTORY)])
        self._suffix_sums = np.zeros(len(self._sorted) + 1, np.int64)
        self._suffix_sums[:-1] = np.cumsum(self._sorted[::-1])[::-1]
        self._is_dirty = False


def count_admissible(
    live: tuple[Int64s, Int64s], waiting: tuple[Int64s, Int64s], capacity_tokens: int
) -> int:
    """How many of the waiting sequences, in order, join before the peak exceeds the capacity.

    Args:
        live: (tokens, remaining) of the sequences in the cache: what each has now, and how many
            it will still append, one in each step.
        waiting: The same of those that wait.
    """
    order = np.argsort(-live[1], kind="stable")
    return _count_admissible((live[0][order], live[1][order]), waiting, capacity_tokens)


@compiled
def _count_admissible(
    live: tuple[Int64s, Int64s], waiting: tuple[Int64s, Int64s], capacity_tokens: int
) -> int:
    num_live, num_waiting = len(live[0]), len(waiting[0])
    tokens, remaining = (
        np.zeros(num_live + num_waiting, np.int64),
        np.zeros(num_live + num_waiting, np.int64),
    )
    tokens[:num_live], remaining[:num_live] = live[0], live[1]
    for index in range(num_waiting):
        size = num_live + index
        place = size  # insertion sort by remaining, longest first
        while place > 0 and remaining[place - 1] < waiting[1][index]:
            tokens[place], remaining[place] = tokens[place - 1], remaining[place - 1]
            place -= 1
        tokens[place], remaining[place] = waiting[0][index], waiting[1][index]
        total = 0
        for rank in range(size + 1):
            total += tokens[rank]
            if total + remaining[rank] * (rank + 1) > capacity_tokens:
                return index
    return num_waiting


MIN_CANDIDATES = 256  # for one step; twice as many as joined the one before, where that is more
LOOK_AHEAD = 4  # samples looked at for each candidate: some wait for the prompt of another
RESERVED_FRACTION = 64  # one block of so many stays free for growth that no forecast saw
TYPICAL_ROWS = 256  # whose lengths set the rate of admission
# While no length is known, one in so many sequences may start at once: they show how long rows are.
FIRST_ROWS = 16


class Candidates(NamedTuple):
    """Sequences that may enter next, in order, and the blocks that each finds in the cache."""

    samples: list[Sample]
    shared_blocks: list[Int32s]


class Scheduler:
    """Turns waiting and live sequences into steps. The engine thread owns it.

    Every step holds one token of each sequence that decodes and, up to
    `policy.max_num_batched_tokens`, chunks of prompts: experts see more rows, so each token costs
    less. Sequences join while the cache is not forecast to overflow and, with
    `policy.steady_admission`, at the rate that it sustains. When a sequence needs a block and
    none is free, the newest one gives up its blocks, keeps its tokens and computes them again
    later; the oldest always finishes, so everything does.

    A prompt that begins like an earlier one takes over its full blocks, which stay in the cache
    until their memory is needed. While more are being computed, and are at least half of its rest,
    a sequence lets others go before it.

    Where layers keep states, a sequence takes over blocks up to a snapshot of the state after them.
    Its own state is kept where prompts that wait, or one in the cache, branch off its own: a chunk
    of its prompt ends there. A snapshot goes with its blocks, or for newer ones.

    Layers with a sliding window may have blocks of their own (`WindowBlocks`). A prefix is then
    shared as far as these layers have the window before its end.

    Args:
        policy: Sizes of steps and of the KV cache.
        prefix_salt: Of a prompt's length; prompts of different salts share nothing.
        has_states: Whether layers keep states; prefixes are then shared from snapshots.
        window: Tokens that layers with a window keep (`ModelSpec.cache_window`).
        restart_length: Rows that grow beyond so many tokens compute all their KV again, as if
            these were their prompts (`RopeSpec.restarts`).
        num_past_tokens: As `ModelSpec.num_past_tokens`.
        num_slots: The most sequences of any policy to come; those of `policy` by default.
    """

    def __init__(
        self,
        policy: Policy,
        max_model_len: int,
        *,
        prefix_salt: PrefixSalt = no_salt,
        has_states: bool = False,
        window: int | None = None,
        restart_length: int | None = None,
        num_past_tokens: int = 0,
        num_slots: int | None = None,
    ) -> None:
        self.policy = policy
        num_slots = num_slots or policy.max_num_seqs
        self.pool = BlockPool(policy.num_kv_blocks)
        self.table = SequenceTable(
            num_slots, max_model_len, policy.num_kv_blocks, num_past_tokens=num_past_tokens
        )
        self.forecast = LengthForecast()
        self.live: list[Sample | None] = [None] * num_slots
        self.admitted: list[Sample] = []  # by the latest step
        self.num_preemptions = 0
        self._waiting: deque[Sample] = deque()
        self._num_queue_changes = 0  # that candidates may depend on
        self._coming = ComingPrefixes()
        self._prefix_salt = prefix_salt
        assert not has_states or num_slots == policy.max_num_seqs, "slots of snapshots come next"
        snapshots = range(num_slots, policy.num_state_slots)
        self._snapshots = StateSnapshots(snapshots) if has_states else None
        self._windows: WindowBlocks | None = None
        if window is not None and (num_blocks := policy.num_window_blocks(window)):
            assert num_slots == policy.max_num_seqs, "each has blocks for its window"
            assert not has_states, "a snapshot and a window may end at other blocks"
            self._windows = WindowBlocks(window, num_blocks, self.table.block_table.shape)
        self._restart_length = restart_length
        self._num_candidates = MIN_CANDIDATES
        self._candidates = Candidates([], [])
        self._candidates_of: tuple[int, ...] = ()  # what they depend on, when they were chosen
        self._reserved_blocks = policy.num_kv_blocks // RESERVED_FRACTION
        self._capacity_tokens = (policy.num_kv_blocks - self._reserved_blocks) * BLOCK_TOKENS
        self._admission = self._steady_admission()

    def _steady_admission(self) -> SteadyAdmission | None:
        if not self.policy.steady_admission:
            return None
        return SteadyAdmission(self._capacity_tokens, self.policy.max_prefill_chunk_tokens)

    def adopt(self, policy: Policy) -> None:
        """Follow another policy from the next step on; its blocks and chunks are the same."""
        self.policy = policy
        self._admission = self._steady_admission()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.table.num_live > 0

    def sample_of(self, slot: int) -> Sample:
        sample = self.live[slot]
        assert sample is not None
        return sample

    def unfinished(self) -> list[Sample]:
        return [*self._waiting, *(sample for sample in self.live if sample is not None)]

    def running_slots(self) -> set[int]:
        """Slots of sequences that are not over."""
        return {*self.table.live_slots().tolist()}

    def add(self, sample: Sample) -> None:
        self._num_queue_changes += len(self._waiting) < self._num_looked_at
        self._waiting.append(sample)

    def add_first(self, samples: Iterable[Sample]) -> None:
        """Let these samples go before all that wait, in their order."""
        self._num_queue_changes += 1
        self._waiting.extendleft(reversed(list(samples)))

    def next_step(self) -> SchedulerOutput | None:
        """Assemble the next step; there must be work. `admitted` says who joined.

        Returns:
            None while all live sequences wait for their next tokens to be chosen, and have what the
            others need: nothing can be computed before.
        """
        self.admitted = []
        if self._admission is not None:
            self._admission.begin_step()
        if self._restart_length is not None:
            self._restart(self._restart_length)
        has_preempted = self._make_room()
        if not has_preempted or not self.table.num_live:
            self._admit()
        slots = self.table.live_slots()
        num_scheduled_tokens = self._num_scheduled_tokens(slots)
        if not num_scheduled_tokens.any():
            assert self.table.waits_for_token(slots).all(), "there is work, but no sequence fits"
            assert len(slots), "there is work, but no sequence is live"
            return None
        copies = () if self._snapshots is None else self._snapshots.begin_step()
        windows, computed = self._windows, self.table.num_computed_tokens[slots]
        if windows is None:
            return assemble_step(self.table, slots, num_scheduled_tokens, copies)
        num_scheduled_tokens = windows.fit(slots, computed, num_scheduled_tokens)
        windows.extend(slots, computed + num_scheduled_tokens)
        return assemble_step(
            self.table, slots, num_scheduled_tokens, copies, window_table=windows.table
        )

    def complete(self, done: SchedulerOutput) -> None:
        """Record that the KV of a step is in the cache."""
        before = self.table.num_computed_tokens[done.slots]
        self.table.num_computed_tokens[done.slots] += done.num_scheduled_tokens
        is_prompt = before < self.table.prompt_tokens[done.slots]
        for slot, computed in zip(done.slots[is_prompt], before[is_prompt], strict=True):
            self._share(int(slot), int(computed))
        if self._windows is not None:
            self._windows.free_behind(done.slots, before + done.num_scheduled_tokens)

    def finish(self, slot: int) -> Sample:
        """Free the slot and the blocks of a sequence that ended."""
        sample = self.sample_of(slot)
        self._leave(sample)
        return sample

    def drop_kept_prefixes(self) -> None:
        """Forget what no live sequence uses, between steps."""
        self._lose(self.pool.drop_kept())
        if self._windows is not None:
            self._windows.pool.drop_kept()

    def drop(self, requests: Collection[Request]) -> None:
        """Free what the sequences of these rows have, between steps."""
        kept = (one for one in self._waiting if one.request not in requests)
        self._waiting = deque(kept)
        self._num_queue_changes += 1
        for sample in self.live:
            if sample is not None and sample.request in requests:
                self._leave(sample)

    def _num_scheduled_tokens(self, slots: Int64s) -> Int32s:
        policy = self.policy
        return choose_scheduled_tokens(
            self.table, slots, policy.max_num_batched_tokens, policy.max_prefill_chunk_tokens
        )

    def _make_room(self) -> bool:
        table, before = self.table, self.num_preemptions
        slots = table.live_slots()
        while True:
            is_decoding = table.num_tokens[slots] - table.num_computed_tokens[slots] == 1
            is_full = table.num_computed_tokens[slots] == table.num_blocks[slots] * BLOCK_TOKENS
            needing = slots[is_decoding & is_full]
            if len(needing) <= self.pool.num_free:
                break
            self._preempt(self.sample_of(int(slots[-1])))
            slots = slots[:-1]
        if len(needing):
            table.add_blocks(needing, self._allocate(len(needing)))
        return self.num_preemptions > before

    def _restart(self, length: int) -> None:
        table, slots = self.table, self.table.live_slots()
        outgrows = (table.num_tokens[slots] > length) & (table.rope_tokens[slots] <= length)
        for slot in slots[outgrows][::-1].tolist():
            self._requeue(self.sample_of(slot))

    def _preempt(self, sample: Sample) -> None:
        self._requeue(sample)
        self.num_preemptions += 1
        self.forecast.record_preemption()

    def _requeue(self, sample: Sample) -> None:
        tokens = sample.tokens = self.table.tokens(sample.slot)
        if sample.wants_prompt_logits:
            sample.prompt_logprobs = None  # collected again from the start
        self._leave(sample)
        length = self._restart_length
        sample.is_restarted = length is not None and sample.num_prompt_tokens <= length < len(
            tokens
        )
        self.add_first([sample])

    def _leave(self, sample: Sample) -> None:
        computed = int(self.table.num_computed_tokens[sample.slot])
        self._coming.forget(self._coming_keys(sample, slice(computed // BLOCK_TOKENS, None)))
        self.pool.release(self.table.remove(sample.slot))
        if self._windows is not None:
            self._windows.leave(sample.slot)
        sample.snapshot_blocks = ()
        self.live[sample.slot] = None
        sample.slot = -1

    def _admit(self) -> None:
        budget = self.policy.max_num_batched_tokens - int(
            self._num_scheduled_tokens(self.table.live_slots()).sum()
        )
        if budget <= 0 or not self._waiting or not self._may_admit:
            return
        candidates, num_before = self._find_candidates(), len(self.admitted)
        for sample in candidates.samples[: self._num_admissible(candidates)]:
            is_full = self.table.num_live >= self.policy.max_num_seqs
            if budget <= 0 or is_full or not self._has_blocks(sample):
                break
            budget -= self._enter(sample)
        if self._admission is not None:
            self._admission.enter(len(self.admitted) - num_before)
        if len(self.admitted) > num_before:
            num_looked_at = min(self._num_looked_at, self.num_waiting)
            looked_at = [self._waiting.popleft() for _ in range(num_looked_at)]
            self.add_first(sample for sample in looked_at if sample.slot < 0)
            if self._snapshots is not None:
                self._choose_snapshots(self.admitted[num_before:], self._snapshots)
        self._num_candidates = max(MIN_CANDIDATES, 2 * len(self.admitted))

    @property
    def _may_admit(self) -> bool:
        """Whether a slot, a block and the rate leave room for a sequence, whatever it shares.

        A full cache stays so for many steps, and what follows looks up the prefixes of hundreds of
        sequences that wait. Each needs a block of its own at least, that of its last token.
        """
        num_live = self.table.num_live
        if num_live == 0:
            return True
        if num_live >= self.policy.max_num_seqs or self.pool.num_free <= self._reserved_blocks:
            return False
        is_limited = num_live + self.num_waiting > self.policy.max_num_seqs
        return not is_limited or self._admission is None or self._admission.has_credit

    def _find_candidates(self) -> Candidates:
        """Choose again only if one may be another: a full cache stays so for many steps."""
        windows, snapshots = self._windows, self._snapshots
        depends_on = (
            self._num_queue_changes,
            self._num_candidates,
            self._coming.num_changes,
            self.pool.num_changes,
            0 if windows is None else windows.pool.num_changes,
            0 if snapshots is None else snapshots.num_changes,
        )
        if depends_on != self._candidates_of:
            samples = self._choose_candidates()
            self._candidates = Candidates(samples, [*map(self._shared_blocks, samples)])
            self._candidates_of = depends_on
        return self._candidates

    @property
    def _num_looked_at(self) -> int:
        return LOOK_AHEAD * self._num_candidates

    def _choose_candidates(self) -> list[Sample]:
        chosen: list[Sample] = []
        coming: set[bytes] = set()
        looked_at = [*itertools.islice(self._waiting, self._num_looked_at)]
        if self._has_lost_prefixes:  # where the cache holds all prefixes, no order saves any
            looked_at.sort(key=self._eighths_to_compute)
        for sample in looked_at:
            keys = self._shareable_keys(sample)
            rest = keys[self._num_shared(keys) :]
            middle = len(rest) // 2
            # A snapshot may come anywhere in the second half; blocks come one after another.
            half = rest[middle : middle + 1 if self._snapshots is None else None]
            if any(key in coming or key in self._coming for key in half):
                continue
            chosen.append(sample)
            if len(chosen) == self._num_candidates:
                break
            coming.update(self._keys(sample))
        return chosen

    @property
    def _has_lost_prefixes(self) -> bool:
        num_evicted = self.pool.num_evicted
        if self._windows is not None:
            num_evicted += self._windows.pool.num_evicted
        return num_evicted > 0

    def _eighths_to_compute(self, sample: Sample) -> int:
        keys = self._shareable_keys(sample)
        return 8 - 8 * self._num_shared(keys) // max(len(keys), 1)

    def _num_admissible(self, candidates: Candidates) -> int:
        samples = candidates.samples
        if not samples:
            return 0
        known = np.array([len(sample.known) for sample in samples])
        held = known - BLOCK_TOKENS * self._num_used(candidates) + MEAN_WASTE
        prompt = np.array([sample.num_prompt_tokens for sample in samples])
        limit = np.array([sample.request.max_tokens_total for sample in samples])
        is_fixed = np.array([sample.has_fixed_length for sample in samples])
        remaining = self.forecast.remaining(known - prompt, limit - prompt, is_fixed)
        live, waiting = self._live_lengths(), (held, remaining)
        capacity = self._capacity_tokens - BLOCK_TOKENS * self._num_inherited_blocks()
        count = count_admissible(live, waiting, capacity)
        if self._admission is not None and not self._may_all_enter(live, waiting):
            rows = np.resize(np.arange(len(known)), TYPICAL_ROWS)
            lengths = self.forecast.typical((limit - known)[rows], is_fixed[rows])
            is_unknown = not (self.forecast.has_history or is_fixed.all())
            self._admission.expect(
                zip(waiting[0][rows].tolist(), lengths.tolist(), strict=True),
                min_burst=self.policy.max_num_seqs // FIRST_ROWS if is_unknown else 0,
            )
            count = min(count, self._admission.num_rows)
        return max(count, 1) if self.table.num_live == 0 else count

    def _may_all_enter(
        self, live: tuple[Int64s, Int64s], candidates: tuple[Int64s, Int64s]
    ) -> bool:
        """Whether all that wait would fit at once, if they are like the candidates."""
        if self.table.num_live + self.num_waiting > self.policy.max_num_seqs:
            return False
        held = float(sum(each.sum() for each in live))
        held += self.num_waiting * float(sum(each.mean() for each in candidates))
        return held <= self._capacity_tokens

    def _live_lengths(self) -> tuple[Int64s, Int64s]:
        table = self.table
        slots = table.live_slots()
        known, prompt = table.num_tokens[slots], table.prompt_tokens[slots]
        limit, is_fixed = table.max_tokens_total[slots], table.has_fixed_length[slots]
        remaining = self.forecast.remaining(known - prompt, limit - prompt, is_fixed)
        own = (known - table.num_cached_tokens[slots]).astype(np.int64)
        return own + MEAN_WASTE, remaining

    def _num_used(self, candidates: Candidates) -> Int64s:
        """Blocks of each that sequences use already when it enters, in this order."""
        counts, taken = [], set[int]()
        for shared in candidates.shared_blocks:
            unused = shared[self.pool.references(shared) == 0].tolist()
            counts.append(len(shared) - sum(block not in taken for block in unused))
            taken.update(unused)
        return np.array(counts, np.int64)

    def _num_inherited_blocks(self) -> int:
        """Blocks in use that no live sequence allocated: the one that did has ended."""
        table, slots = self.table, self.table.live_slots()
        own = table.num_blocks[slots] - table.num_cached_tokens[slots] // BLOCK_TOKENS
        return self.pool.num_blocks - self.pool.num_free - int(own.sum())

    def _has_blocks(self, sample: Sample) -> bool:
        reserved = self._reserved_blocks if self.table.num_live else 0
        in_use = int((self.pool.references(self._shared_blocks(sample)) > 0).sum())
        needed = blocks_of_tokens(len(sample.known)) - in_use
        return needed + reserved <= self.pool.num_free

    def _allocate(self, num_blocks: int) -> Int32s:
        blocks, lost = self.pool.allocate(num_blocks)
        self._lose(lost)
        return blocks

    def _lose(self, keys: Iterable[bytes]) -> None:
        if self._snapshots is not None:
            self._snapshots.drop(keys)

    def _enter(self, sample: Sample) -> int:
        shared, known = self._shared_blocks(sample), sample.known
        self.pool.retain(shared)
        fresh = self._allocate(blocks_of_tokens(len(known)) - len(shared))
        computed = len(shared) * BLOCK_TOKENS
        logit_begin, logit_end = sample.logit_positions
        sample.slot = self.table.admit(
            Admission(
                tokens=known,
                blocks=np.concatenate([shared, fresh]),
                prompt_tokens=sample.num_prompt_tokens,
                rope_tokens=self._rope_tokens(sample),
                max_tokens_total=sample.request.max_tokens_total,
                num_computed_tokens=computed,
                arrival=sample.arrival,
                logit_begin=logit_begin,
                logit_end=logit_end,
                is_read=sample.request.reading is not None,
                has_fixed_length=sample.has_fixed_length,
            )
        )
        if self._windows is not None:
            self._windows.enter(sample.slot, self._keys(sample)[: len(shared)])
        if self._snapshots is None:
            self._coming.expect(self._keys(sample)[len(shared) :])
        elif len(shared):
            self._snapshots.restore(self._keys(sample)[len(shared) - 1], sample.slot)
        sample.num_cached_tokens = computed
        sample.tokens = None
        self.live[sample.slot] = sample
        self.admitted.append(sample)
        return min(len(known) - computed, self.policy.max_prefill_chunk_tokens)

    def _rope_tokens(self, sample: Sample) -> int:
        if sample.is_restarted and self._restart_length is not None:
            return self._restart_length + 1
        return sample.num_prompt_tokens

    def _shared_blocks(self, sample: Sample) -> Int32s:
        keys = self._shareable_keys(sample)
        return self.pool.find(keys[: self._num_shared(keys)])

    def _num_shared(self, keys: Sequence[bytes]) -> int:
        num_blocks = self.pool.num_found(keys)
        if self._windows is not None:
            return self._windows.num_shared(keys[:num_blocks])
        if self._snapshots is None:
            return num_blocks
        return self._snapshots.num_blocks(keys[:num_blocks])

    def _shareable_keys(self, sample: Sample) -> tuple[bytes, ...]:
        return self._keys(sample)[: sample.logit_positions[0] // BLOCK_TOKENS]

    def _keys(self, sample: Sample) -> tuple[bytes, ...]:
        request = sample.request
        if sample.is_restarted:
            return ()  # restarted: the same tokens, rotated otherwise
        if request.prefix_keys is None:
            salt = self._prefix_salt(len(request.prompt))
            request.prefix_keys = prefix_keys(request.prompt, salt)
        return request.prefix_keys

    def _coming_keys(self, sample: Sample, blocks: slice) -> Sequence[bytes]:
        """Keys that others wait for, of these blocks of a live sequence."""
        keys = self._keys(sample)
        if self._snapshots is None:
            return keys[blocks]
        begin, end, _ = blocks.indices(len(keys))
        return [keys[length - 1] for length in sample.snapshot_blocks if begin < length <= end]

    def _share(self, slot: int, computed: int) -> None:
        sample, end = self.sample_of(slot), int(self.table.num_computed_tokens[slot])
        new = slice(computed // BLOCK_TOKENS, end // BLOCK_TOKENS)
        self._coming.forget(self._coming_keys(sample, new))
        keys = self._keys(sample)[new]
        self.pool.share(keys, self.table.block_table[slot, new][: len(keys)].tolist())
        if self._windows is not None:
            self._windows.share(slot, keys, new.start)
        if self._snapshots is not None and end == self.table.chunk_end[slot]:
            self._snapshots.take(keys[-1], slot)
            self._limit_chunk(sample)

    def _choose_snapshots(self, entered: Iterable[Sample], snapshots: StateSnapshots) -> None:
        """Decide where the states of sequences that begin are kept for those that wait."""
        waiting = itertools.islice(self._waiting, self._num_looked_at)
        wanted = Counter(itertools.chain.from_iterable(map(self._shareable_keys, waiting)))
        room = snapshots.num_slots - snapshots.want(wanted) - len(self._coming)
        for sample in entered:
            keys, num_shared = self._keys(sample), sample.num_cached_tokens // BLOCK_TOKENS
            num_found = self.pool.num_found(keys)  # that an earlier sequence has computed
            others = sample.request.params.n - 1 if sample.index == 0 else 0
            sharing = [wanted[key] + others + (i < num_found) for i, key in enumerate(keys)]
            points = branch_points(sharing, num_shared, max(room, 0))
            sample.snapshot_blocks = tuple(
                length for length in points if keys[length - 1] not in self._coming
            )
            room -= len(sample.snapshot_blocks)
            self._coming.expect(self._coming_keys(sample, slice(num_shared, None)))
            self._limit_chunk(sample)

    def _limit_chunk(self, sample: Sample) -> None:
        """End the next chunk of a prompt where its state is kept next."""
        computed = self.table.num_computed_tokens[sample.slot]
        ends = (length * BLOCK_TOKENS for length in sample.snapshot_blocks)
        self.table.chunk_end[sample.slot] = next((end for end in ends if end > computed), NO_END)
