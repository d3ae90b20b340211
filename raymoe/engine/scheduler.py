"""Which tokens go into the next pass: decode, chunks of prompts, admission and preemption."""

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from raymoe.engine.forecast import LengthForecast, count_admissible
from raymoe.engine.prefixes import PrefixIndex, prefix_keys
from raymoe.engine.request import Sample
from raymoe.engine.sequence import (
    Admission,
    Int32s,
    Int64s,
    Pass,
    SequenceTable,
    assemble_pass,
    choose_takes,
)
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.kv_cache import BlockPool, blocks_of_tokens
from raymoe.plan.policy import Policy

LEAST_CANDIDATES = 256  # for one pass; twice as many as joined the one before, where that is more
LOOK_AHEAD = 4  # samples looked at for each candidate: some wait for the prompt of another
MEAN_WASTE = BLOCK_TOKENS // 2  # tokens that a last block could still take, on average
RESERVED_FRACTION = 64  # one block of so many stays free for growth that no forecast saw


class PassScheduler:
    """Turns waiting and live sequences into passes. The engine thread owns it.

    Every pass holds one token of each sequence that decodes and, up to `policy.pass_tokens`,
    chunks of prompts: experts see more rows, so each token costs less. Sequences join at the rate
    that the KV cache sustains. When a sequence needs a block and none is free, the newest one
    gives up its blocks, keeps its tokens and computes them again later; the oldest always
    finishes, so everything does.

    A prompt that begins like that of a live sequence takes over its full blocks. While those are
    still being computed, and are at least half of it, a sequence lets others go before it.

    Args:
        policy: Sizes of passes and of the KV cache.
        max_context_tokens: Of any sequence.
        shares_across_lengths: Whether KV does not depend on how long the prompt is.
    """

    def __init__(
        self, policy: Policy, max_context_tokens: int, *, shares_across_lengths: bool = True
    ) -> None:
        self.policy = policy
        self.pool = BlockPool(policy.num_kv_blocks)
        self.table = SequenceTable(policy.batch_size, max_context_tokens, policy.num_kv_blocks)
        self.forecast = LengthForecast()
        self.live: list[Sample | None] = [None] * policy.batch_size
        self.admitted: list[Sample] = []  # by the latest pass
        self.num_preemptions = 0
        self._waiting: deque[Sample] = deque()
        self._prefixes = PrefixIndex()
        self._shares_across_lengths = shares_across_lengths
        self._num_candidates = LEAST_CANDIDATES
        self._reserved_blocks = policy.num_kv_blocks // RESERVED_FRACTION

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._waiting) or self.table.num_live > 0

    def sample_of(self, slot: int) -> Sample:
        """The sample that lives in a slot."""
        sample = self.live[slot]
        assert sample is not None
        return sample

    def unfinished(self) -> list[Sample]:
        """All samples that wait or live."""
        return [*self._waiting, *(sample for sample in self.live if sample is not None)]

    def add(self, sample: Sample) -> None:
        """Let a sample wait behind all others."""
        self._waiting.append(sample)

    def add_first(self, samples: Iterable[Sample]) -> None:
        """Let these samples go before all that wait, in their order."""
        self._waiting.extendleft(reversed(list(samples)))

    def next_pass(self, held: Collection[int] = ()) -> Pass:
        """Assemble the next pass; there must be work. `admitted` says who joined.

        Args:
            held: Slots that stay out of it; not all that live.
        """
        self.admitted = []
        has_preempted = self._make_room()
        if not has_preempted or self.table.num_live == 0:
            self._admit()
        slots = self.table.live_slots()
        slots = slots[~np.isin(slots, list(held))] if held else slots
        takes = self._takes(slots)
        assert takes.any(), "there is work, but no sequence fits"
        return assemble_pass(self.table, slots, takes)

    def complete(self, done: Pass) -> None:
        """Record that the KV of a pass is in the cache."""
        before = self.table.computed_tokens[done.slots]
        self.table.computed_tokens[done.slots] += done.takes
        is_prompt = before < self.table.prompt_tokens[done.slots]
        for slot, computed in zip(done.slots[is_prompt], before[is_prompt], strict=True):
            self._share(int(slot), int(computed))

    def finish(self, slot: int) -> Sample:
        """Free the slot and the blocks of a sequence that ended."""
        sample = self.sample_of(slot)
        self._leave(sample)
        return sample

    def _takes(self, slots: Int64s) -> Int32s:
        policy = self.policy
        return choose_takes(self.table, slots, policy.pass_tokens, policy.prefill_chunk_tokens)

    def _make_room(self) -> bool:
        """Give a block to every decoding sequence that needs one; returns whether any had to go."""
        table, before = self.table, self.num_preemptions
        slots = table.live_slots()
        while True:
            is_decoding = table.known_tokens[slots] - table.computed_tokens[slots] == 1
            is_full = table.computed_tokens[slots] == table.num_blocks[slots] * BLOCK_TOKENS
            needing = slots[is_decoding & is_full]
            if len(needing) <= self.pool.num_free:
                break
            self._preempt(self.sample_of(int(slots[-1])))
            slots = slots[:-1]
        if len(needing):
            table.add_blocks(needing, self.pool.allocate(len(needing)))
        return self.num_preemptions > before

    def _preempt(self, sample: Sample) -> None:
        sample.tokens = self.table.tokens(sample.slot)
        if sample.wants_prompt_logits:
            sample.prompt_logprobs = None  # collected again from the start
        self._leave(sample)
        self._waiting.appendleft(sample)
        self.num_preemptions += 1
        self.forecast.record_preemption()

    def _leave(self, sample: Sample) -> None:
        computed = int(self.table.computed_tokens[sample.slot])
        self._prefixes.forget(self._keys(sample)[computed // BLOCK_TOKENS :])
        freed = self.pool.release(self.table.remove(sample.slot))
        self._prefixes.remove(freed.tolist())
        self.live[sample.slot] = None
        sample.slot = -1

    def _admit(self) -> None:
        budget = self.policy.pass_tokens - int(self._takes(self.table.live_slots()).sum())
        if budget <= 0 or not self._waiting:
            return
        candidates = self._candidates()
        for sample in candidates[: self._num_admissible(candidates)]:
            if budget <= 0 or self.table.num_free_slots == 0 or not self._has_blocks(sample):
                break
            budget -= self._enter(sample)
        num_looked_at = min(LOOK_AHEAD * self._num_candidates, self.num_waiting)
        looked_at = [self._waiting.popleft() for _ in range(num_looked_at)]
        self.add_first(sample for sample in looked_at if sample.slot < 0)
        self._num_candidates = max(LEAST_CANDIDATES, 2 * len(self.admitted))

    def _candidates(self) -> list[Sample]:
        """Samples to admit next: in order, but for those that gain by waiting for another."""
        chosen: list[Sample] = []
        coming: set[bytes] = set()
        for sample in itertools.islice(self._waiting, LOOK_AHEAD * self._num_candidates):
            keys = self._keys(sample)
            middle = keys[len(keys) // 2] if keys else None
            if middle is not None and not sample.wants_prompt_logits:
                is_coming = middle in coming and not self._prefixes.is_computed(middle)
                if is_coming or self._prefixes.is_coming(middle):
                    continue
            chosen.append(sample)
            if len(chosen) == self._num_candidates:
                break
            coming.update(keys)
        return chosen

    def _num_admissible(self, candidates: Sequence[Sample]) -> int:
        """How many of them may join without the cache becoming too full before others end."""
        if not candidates:
            return 0
        known = np.array([len(sample.known) for sample in candidates])
        prompt = np.array([sample.num_prompt_tokens for sample in candidates])
        limit = np.array([sample.request.limit_tokens for sample in candidates])
        is_fixed = np.array([sample.has_fixed_length for sample in candidates])
        remaining = self.forecast.remaining(known - prompt, limit - prompt, is_fixed)
        count = count_admissible(
            self._live_lengths(),
            (known + MEAN_WASTE, remaining),
            (self.policy.num_kv_blocks - self._reserved_blocks) * BLOCK_TOKENS,
        )
        return max(count, 1) if self.table.num_live == 0 else count

    def _live_lengths(self) -> tuple[Int64s, Int64s]:
        table = self.table
        slots = table.live_slots()
        known, prompt = table.known_tokens[slots], table.prompt_tokens[slots]
        limit, is_fixed = table.limit_tokens[slots], table.has_fixed_length[slots]
        remaining = self.forecast.remaining(known - prompt, limit - prompt, is_fixed)
        return known.astype(np.int64) + MEAN_WASTE, remaining

    def _has_blocks(self, sample: Sample) -> bool:
        reserved = self._reserved_blocks if self.table.num_live else 0
        needed = blocks_of_tokens(len(sample.known)) - len(self._shared_blocks(sample))
        return needed + reserved <= self.pool.num_free

    def _enter(self, sample: Sample) -> int:
        """Admit a sample; returns the tokens that it may add to this pass."""
        shared, known = self._shared_blocks(sample), sample.known
        self.pool.retain(shared)
        fresh = self.pool.allocate(blocks_of_tokens(len(known)) - len(shared))
        computed = len(shared) * BLOCK_TOKENS
        sample.slot = self.table.admit(
            Admission(
                tokens=known,
                blocks=np.concatenate([shared, fresh]),
                prompt_tokens=sample.num_prompt_tokens,
                limit_tokens=sample.request.limit_tokens,
                computed_tokens=computed,
                arrival=sample.arrival,
                wants_prompt_logits=sample.wants_prompt_logits,
                has_fixed_length=sample.has_fixed_length,
            )
        )
        self._prefixes.expect(self._keys(sample)[len(shared) :])
        sample.num_cached_tokens = computed
        sample.tokens = None
        self.live[sample.slot] = sample
        self.admitted.append(sample)
        return min(len(known) - computed, self.policy.prefill_chunk_tokens)

    def _shared_blocks(self, sample: Sample) -> Int32s:
        """Blocks of the prompt that live sequences have computed."""
        return self._prefixes.find(() if sample.wants_prompt_logits else self._keys(sample))

    def _keys(self, sample: Sample) -> tuple[bytes, ...]:
        request = sample.request
        if request.prefix_keys is None:
            salt = 0 if self._shares_across_lengths else len(request.prompt)
            request.prefix_keys = prefix_keys(request.prompt, salt)
        return request.prefix_keys

    def _share(self, slot: int, computed: int) -> None:
        """Let others find the blocks of a prompt that were completed since `computed` tokens."""
        new = slice(computed // BLOCK_TOKENS, int(self.table.computed_tokens[slot]) // BLOCK_TOKENS)
        keys = self._keys(self.sample_of(slot))[new]
        self._prefixes.forget(keys)
        self._prefixes.add(keys, self.table.block_table[slot, new][: len(keys)].tolist())
