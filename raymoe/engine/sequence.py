"""SequenceTable: the state of live sequences as arrays, a slot each, and the tokens of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raymoe._native import compiled
from raymoe.engine.outputs import Int32s
from raymoe.errors import ExecutionError
from raymoe.kernels.ngrams import NO_TOKEN
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.runtime.batch import InputBatch, Sequences, blocks_of_tokens

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a sequence brings into its slot.

    Attributes:
        tokens: All known tokens: the prompt, and what was generated before a preemption.
        blocks: Enough for `tokens`; the first may be shared and computed already.
        prompt_tokens: How many of `tokens` are the prompt.
        rope_tokens: Length for which the first tokens are rotated (`model.rope`).
        max_tokens_total: Known tokens at which the sequence is over.
        num_computed_tokens: Whose KV is in the first blocks.
        arrival: Order among all sequences; preemption takes the newest.
        logit_begin: First position of the prompt whose logits are wanted too.
        logit_end: End of these positions.
        is_read: Whether nothing is generated: the sequence is over when its prompt is computed.
        has_fixed_length: Whether nothing but the limit ends the sequence.
    """

    tokens: Int32s
    blocks: Int32s
    prompt_tokens: int
    rope_tokens: int
    max_tokens_total: int
    num_computed_tokens: int
    arrival: int
    logit_begin: int = 0
    logit_end: int = 0
    is_read: bool = False
    has_fixed_length: bool = False


NO_END = np.iinfo(np.int32).max

# Sampling parameters that are numbers, as `SamplingParams` calls them.
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SequenceTable:
    """Live sequences. The engine thread owns it; nothing here is thread-safe.

    Invariants of a live slot: computed < known <= limit (computed = known while its next token is
    still to be chosen, or if it is only read and over); blocks cover known - 1 tokens at least.
    The last known token may have no block yet: it is in `last_token` until a step computes it.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, num_blocks: int, *, num_past_tokens: int = 0
    ) -> None:
        """Make room for sequences.

        Args:
            num_past_tokens: As `ModelSpec.num_past_tokens`.
        """
        max_blocks = min(blocks_of_tokens(max_model_len), num_blocks)
        self.num_slots, self.num_past_tokens = num_slots, num_past_tokens
        self.is_live: Bools = np.zeros(num_slots, np.bool_)
        self.prompt_tokens: Int32s = np.zeros(num_slots, np.int32)
        self.rope_tokens: Int32s = np.zeros(num_slots, np.int32)
        self.num_tokens: Int32s = np.zeros(num_slots, np.int32)
        self.num_computed_tokens: Int32s = np.zeros(num_slots, np.int32)
        self.num_cached_tokens: Int32s = np.zeros(num_slots, np.int32)  # at admission
        self.max_tokens_total: Int32s = np.zeros(num_slots, np.int32)
        self.chunk_end: Int32s = np.zeros(num_slots, np.int32)  # that no chunk of a prompt passes
        self.last_token: Int32s = np.zeros(num_slots, np.int32)
        self.arrival: Int64s = np.zeros(num_slots, np.int64)
        self.logit_begin: Int32s = np.zeros(num_slots, np.int32)
        self.logit_end: Int32s = np.zeros(num_slots, np.int32)
        self.is_read: Bools = np.zeros(num_slots, np.bool_)
        self.has_fixed_length: Bools = np.zeros(num_slots, np.bool_)
        self.num_blocks: Int32s = np.zeros(num_slots, np.int32)
        self.block_table: Int32s = np.zeros((num_slots, max_blocks), np.int32)
        self.token_blocks: Int32s = np.zeros((num_blocks, BLOCK_TOKENS), np.int32)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # How to sample: written by `Sampler.admit`.
        self.path = np.zeros(num_slots, np.int8)  # the sampler's cheapest that is enough
        self.is_greedy: Bools = np.zeros(num_slots, np.bool_)
        # logit_bias, min_tokens, no_repeat_ngram_size, allowed_token_ids, bad_words
        self.is_special: Bools = np.zeros(num_slots, np.bool_)
        self.has_penalty: Bools = np.zeros(num_slots, np.bool_)
        self.has_grammar: Bools = np.zeros(num_slots, np.bool_)
        self.numbers = {name: np.zeros(num_slots, np.float32) for name in NUMBERS}
        self.top_k: Int32s = np.zeros(num_slots, np.int32)
        self.seed, self.row_key = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        self.sample_index: Int32s = np.zeros(num_slots, np.int32)
        self.first_free: Int32s = np.zeros(num_slots, np.int32)  # tokens before min_tokens is met
        # What to do with a sampled token: written by `EngineCore`.
        self.ignores_eos: Bools = np.zeros(num_slots, np.bool_)
        self.is_watched: Bools = np.zeros(num_slots, np.bool_)  # stop tokens, strings, siblings
        self.wants_logprobs: Bools = np.zeros(num_slots, np.bool_)

    @property
    def num_live(self) -> int:
        return self.num_slots - len(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def live_slots(self) -> Int64s:
        slots = np.flatnonzero(self.is_live)
        return slots[np.argsort(self.arrival[slots], kind="stable")]

    def waits_for_token(self, slots: Int64s) -> Bools:
        """Which of these sequences are computed, and wait for their next token to be chosen."""
        is_computed: Bools = self.num_computed_tokens[slots] == self.num_tokens[slots]
        return is_computed

    def admit(self, admission: Admission) -> int:
        """Put a sequence into a free slot and return the slot."""
        slot = self._free_slots.pop()
        tokens, blocks, first = admission.tokens, admission.blocks, admission.num_computed_tokens
        assert first < len(tokens) <= len(blocks) * BLOCK_TOKENS
        self.is_live[slot] = True
        self.prompt_tokens[slot] = admission.prompt_tokens
        self.rope_tokens[slot] = admission.rope_tokens
        self.num_tokens[slot] = len(tokens)
        self.num_computed_tokens[slot] = self.num_cached_tokens[slot] = first
        self.max_tokens_total[slot] = admission.max_tokens_total
        self.chunk_end[slot] = NO_END
        self.last_token[slot] = tokens[-1]
        self.arrival[slot] = admission.arrival
        self.logit_begin[slot] = admission.logit_begin
        self.logit_end[slot] = admission.logit_end
        self.is_read[slot] = admission.is_read
        self.has_fixed_length[slot] = admission.has_fixed_length
        self.num_blocks[slot] = len(blocks)
        self.block_table[slot, : len(blocks)] = blocks
        position = np.arange(first, len(tokens))
        self.token_blocks[blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = tokens[
            first:
        ]
        return slot

    def tokens(self, slot: int, first: int = 0) -> Int32s:
        """Known tokens of a slot from position `first` on, copied."""
        known = int(self.num_tokens[slot])
        position = np.arange(first, known - 1)
        out = np.empty(known - first, np.int32)
        blocks = self.block_table[slot, position // BLOCK_TOKENS]
        out[:-1] = self.token_blocks[blocks, position % BLOCK_TOKENS]
        out[-1] = self.last_token[slot]
        return out

    def past_tokens(self, slots: Int64s) -> Int32s | None:
        """The last tokens that each slot has computed; None where no layer reads them."""
        if not self.num_past_tokens:
            return None
        places = np.arange(-self.num_past_tokens, 0)
        positions = self.num_computed_tokens[slots][:, None] + places
        blocks = self.block_table[slots[:, None], np.maximum(positions, 0) // BLOCK_TOKENS]
        found = self.token_blocks[blocks, positions % BLOCK_TOKENS]
        return np.where(positions < 0, NO_TOKEN, found).astype(np.int32)

    def generated(self, slot: int) -> Int32s:
        """Known tokens of a slot that are not the prompt's, copied."""
        return self.tokens(slot)[self.prompt_tokens[slot] :]

    def blocks(self, slot: int) -> Int32s:
        return self.block_table[slot, : self.num_blocks[slot]].copy()

    def add_blocks(self, slots: Int64s, blocks: Int32s) -> None:
        """Give each of these slots one more block."""
        self.block_table[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1

    def remove(self, slot: int) -> Int32s:
        """Free a slot; returns its blocks, which the caller releases."""
        blocks = self.blocks(slot)
        self.is_live[slot] = False
        self._free_slots.append(slot)
        return blocks

    def append(self, slots: Int32s, tokens: Int32s) -> None:
        """Append one sampled token to each of these slots."""
        self.last_token[slots] = tokens
        self.num_tokens[slots] += 1


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The tokens of one step, and who gets its logits.

    Attributes:
        slots: [S] sequences of the step.
        num_scheduled_tokens: [S] int32, tokens of each.
        row_slots: [R] int32, the slot of each row of logits.
        row_positions: [R] int32, position of the token that these logits predict.
        row_is_sample: [R], whether that token is to be sampled; else it is a prompt's, or the
            sequence is only read.
    """

    batch: InputBatch
    slots: Int64s
    num_scheduled_tokens: Int32s
    row_slots: Int32s
    row_positions: Int32s
    row_is_sample: Bools


def choose_scheduled_tokens(table: SequenceTable, slots: Int64s, budget: int, chunk: int) -> Int32s:
    """Tokens that each of these slots gets in a step: one for decode, then chunks of prompts.

    Args:
        slots: Candidates; earlier ones are served first.
        chunk: Most tokens of one sequence.
    """
    computed = table.num_computed_tokens[slots]
    rests, rooms = table.num_tokens[slots] - computed, table.chunk_end[slots] - computed
    return _choose_scheduled_tokens(rests, rooms, budget, chunk)


@compiled
def _choose_scheduled_tokens(rests: Int32s, rooms: Int32s, budget: int, chunk: int) -> Int32s:
    num_scheduled_tokens = np.zeros(len(rests), np.int32)
    for index, rest in enumerate(rests):
        if rest == 1 and budget > 0:
            num_scheduled_tokens[index] = 1
            budget -= 1
    for index, rest in enumerate(rests):
        if rest > 1:
            num_scheduled_tokens[index] = min(rest, rooms[index], chunk, budget)
            budget -= num_scheduled_tokens[index]
    return num_scheduled_tokens


def assemble_step(
    table: SequenceTable,
    slots: Int64s,
    num_scheduled_tokens: Int32s,
    state_copies: tuple[tuple[int, int], ...] = (),
    *,
    window_table: Callable[[Int64s, int], Int32s] | None = None,
) -> SchedulerOutput:
    """Gather the tokens of a step; the blocks for all of them must be there.

    Args:
        window_table: First columns of the blocks of slots in layers with a window, if these have
            blocks of their own.
    """
    slots, num_scheduled_tokens = (
        slots[num_scheduled_tokens > 0],
        num_scheduled_tokens[num_scheduled_tokens > 0],
    )
    num_tokens, num_sequences = int(num_scheduled_tokens.sum()), len(slots)
    context_tokens = (table.num_computed_tokens[slots] + num_scheduled_tokens).astype(np.int32)
    num_columns = blocks_of_tokens(int(context_tokens.max(initial=1)))
    token_ids, positions = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int32)
    query_start = np.zeros(num_sequences + 1, np.int32)
    np.cumsum(num_scheduled_tokens, out=query_start[1:])
    logit_rows, row_slots = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int32)
    row_positions, row_is_sample = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.bool_)
    num_rows = _gather_tokens(
        (
            slots,
            num_scheduled_tokens,
            table.num_tokens,
            table.num_computed_tokens,
            table.prompt_tokens,
        ),
        (table.logit_begin, table.logit_end, table.is_read),
        (table.last_token, table.block_table, table.token_blocks),
        (token_ids, positions, logit_rows, row_slots, row_positions, row_is_sample),
    )
    return SchedulerOutput(
        InputBatch(
            token_ids=token_ids,
            positions=positions,
            sequences=Sequences(
                query_start=query_start,
                context_tokens=context_tokens,
                block_table=np.ascontiguousarray(table.block_table[slots, :num_columns]),
                prompt_tokens=table.rope_tokens[slots],
                slots=slots.astype(np.int32),
                past_tokens=table.past_tokens(slots),
                window_table=None if window_table is None else window_table(slots, num_columns),
            ),
            logit_rows=logit_rows[:num_rows],
            state_copies=state_copies,
        ),
        slots,
        num_scheduled_tokens,
        row_slots[:num_rows],
        row_positions[:num_rows],
        row_is_sample[:num_rows],
    )


@compiled
def _gather_tokens(
    lengths: tuple[Int64s, Int32s, Int32s, Int32s, Int32s],
    wanted: tuple[Int32s, Int32s, Bools],
    contents: tuple[Int32s, Int32s, Int32s],
    out: tuple[Int64s, Int32s, Int64s, Int32s, Int32s, Bools],
) -> int:
    slots, num_scheduled_tokens, num_tokens, num_computed_tokens, prompt_tokens = lengths
    logit_begin, logit_end, is_read = wanted
    last_token, block_table, token_blocks = contents
    token_ids, positions, logit_rows, row_slots, row_positions, row_is_sample = out
    token, row = 0, 0
    for index, slot in enumerate(slots):
        begin = num_computed_tokens[slot]
        for position in range(begin, begin + num_scheduled_tokens[index]):
            block, offset = block_table[slot, position // BLOCK_TOKENS], position % BLOCK_TOKENS
            is_last = position + 1 == num_tokens[slot]
            if is_last:
                token_blocks[block, offset] = last_token[slot]
            token_ids[token] = token_blocks[block, offset]
            positions[token] = position
            is_wanted = logit_begin[slot] <= position < logit_end[slot]
            is_wanted = is_wanted and position + 1 < prompt_tokens[slot]
            if is_last or is_wanted:
                logit_rows[row] = token
                row_slots[row] = slot
                row_positions[row] = position + 1
                row_is_sample[row] = is_last and not is_read[slot]
                row += 1
            token += 1
    return row


DecodeAll = Callable[[Sequence[Sequence[int]]], Sequence[str | Exception]]


def decode_each(
    decode_all: DecodeAll, sequences: Sequence[Sequence[int]]
) -> Sequence[str | Exception]:
    """Decode at once; if that raises, each alone, so that only its own row ends."""
    try:
        texts = decode_all(sequences)
        if len(texts) == len(sequences):
            return texts
        raise ExecutionError(f"{len(sequences)} rows of tokens became {len(texts)} texts")
    except Exception as error:
        if len(sequences) <= 1:
            return [error] * len(sequences)
    return [text for one in sequences for text in decode_each(decode_all, [one])]
