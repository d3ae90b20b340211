"""InputBatch: the tokens of one step and whose they are, in numpy until bindings need tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def blocks_of_tokens(num_tokens: int) -> int:
    """KV blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which tokens of a batch belong to which sequence, and where its KV is; all int32.

    Attributes:
        query_start: [S + 1], index of each sequence's first token; the last entry is T.
        context_tokens: [S], cached tokens after this step; the new tokens take the last positions.
        block_table: [S, M], blocks of each sequence; entries beyond its context are ignored.
        prompt_tokens: [S], length for which each prompt is rotated: its own, or that at which the
            row started again.
        slots: [S], where each sequence has its state; None where no layer keeps one.
        past_tokens: [S, P], the last tokens of each before those of the step, the oldest first, and
            `NO_TOKEN` before its beginning; None where no layer reads them.
        window_table: [S, M], blocks of each sequence in layers with a sliding window, for the same
            tokens; those behind the window repeat its first. None where they are the same blocks.
    """

    query_start: Int32s
    context_tokens: Int32s
    block_table: Int32s
    prompt_tokens: Int32s
    slots: Int32s | None = None
    past_tokens: Int32s | None = None
    window_table: Int32s | None = None

    def __len__(self) -> int:
        return len(self.context_tokens)

    @property
    def num_scheduled_tokens(self) -> Int64s:
        """Tokens of each in this step, [S] int64."""
        return np.diff(self.query_start).astype(np.int64)

    def select(self, chosen: Int64s) -> "Sequences":
        """These sequences in this order, with their tokens one after the other."""
        ends = np.cumsum(np.diff(self.query_start)[chosen], dtype=np.int32)
        return Sequences(
            query_start=np.concatenate([np.zeros(1, np.int32), ends]),
            context_tokens=self.context_tokens[chosen],
            block_table=self.block_table[chosen],
            prompt_tokens=self.prompt_tokens[chosen],
            slots=None if self.slots is None else self.slots[chosen],
            past_tokens=None if self.past_tokens is None else self.past_tokens[chosen],
            window_table=None if self.window_table is None else self.window_table[chosen],
        )

    def between(self, begin: int, end: int) -> "Sequences":
        """The sequences from `begin` to `end`, exclusive, whose first token is 0; shares memory."""
        starts = self.query_start[begin : end + 1]
        return Sequences(
            query_start=starts - starts[0],
            context_tokens=self.context_tokens[begin:end],
            block_table=self.block_table[begin:end],
            prompt_tokens=self.prompt_tokens[begin:end],
            slots=None if self.slots is None else self.slots[begin:end],
            past_tokens=None if self.past_tokens is None else self.past_tokens[begin:end],
            window_table=None if self.window_table is None else self.window_table[begin:end],
        )

    def to_tensors(self) -> AttentionBatch:
        """The same as kernels take it; shares memory."""
        batch = AttentionBatch(
            query_start=torch.from_numpy(self.query_start),
            context_tokens=torch.from_numpy(self.context_tokens),
            block_table=torch.from_numpy(self.block_table),
            prompt_tokens=torch.from_numpy(self.prompt_tokens),
            slots=None if self.slots is None else torch.from_numpy(self.slots),
        )
        if self.window_table is None:
            return batch
        windowed = replace(batch, block_table=torch.from_numpy(self.window_table))
        return replace(batch, windowed=windowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """The tokens of one step, ragged over sequences.

    Attributes:
        token_ids: int64 [T].
        positions: int32 [T], position of each token in its sequence.
        logit_rows: int64 [R], tokens of the step whose logits are wanted, in the order of these.
        state_copies: (from, to) slots whose states are copied first, in this order.
    """

    token_ids: Int64s
    positions: Int32s
    sequences: Sequences
    logit_rows: Int64s
    state_copies: Sequence[tuple[int, int]] = ()

    @property
    def num_positions(self) -> int:
        """All tokens of the step have smaller positions."""
        return int(self.sequences.context_tokens.max(initial=0))

    @property
    def prompt_tokens(self) -> Int32s:
        """The prompt length of each token's sequence, int32 [T]."""
        return np.repeat(self.sequences.prompt_tokens, np.diff(self.sequences.query_start))
