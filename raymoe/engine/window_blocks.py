"""WindowBlocks: KV blocks of layers with a sliding window, which are freed behind it."""

from collections.abc import Sequence

import numpy as np

from raymoe.engine.outputs import Int32s
from raymoe.engine.sequence import Int64s
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.block_pool import BlockPool
from raymoe.plan.policy import window_blocks


class WindowBlocks:
    """Blocks of live sequences in layers that keep no more than a window of each.

    Column i of the table is for the same tokens as in the table of other layers. Columns behind a
    window repeat its first block: kernels read whole tiles and ignore what is behind, which must be
    finite. Blocks are allocated for the tokens of a step, before it, and freed after it.

    No sequence needs more than `window_blocks` of them for its next token. What the pool has beyond
    those of the live sequences is for the other tokens of a step, so it never runs out.

    Args:
        window: Tokens that a query sees, itself included; at least 2.
        num_blocks: At least `window_blocks` for each slot, and one.
        shape: Of the table: slots, and most blocks of a sequence.
    """

    def __init__(self, window: int, num_blocks: int, shape: tuple[int, int]) -> None:
        num_slots, _ = shape
        self._window, self._of_row = window, window_blocks(window)
        assert window > 1, "a sequence keeps its last block"
        assert num_blocks > num_slots * self._of_row, "each step computes at least a token of each"
        self.pool = BlockPool(num_blocks)
        self._table: Int32s = np.zeros(shape, np.int32)
        self._first: Int64s = np.zeros(num_slots, np.int64)  # columns [first, end) have blocks
        self._end: Int64s = np.zeros(num_slots, np.int64)

    def num_shared(self, keys: Sequence[bytes]) -> int:
        """The length in blocks of the longest of these prefixes with its window in the cache."""
        run = 0
        for index in range(len(keys) - 1, -1, -1):
            run = run + 1 if self.pool.num_found(keys[index : index + 1]) else 0
            if run == self._of_row - 1:
                return index + run
        return run

    def enter(self, slot: int, prefix: Sequence[bytes]) -> None:
        """Let a sequence begin in a slot after a prefix, as long as `num_shared` allows."""
        blocks = self.pool.find(prefix[max(0, len(prefix) - self._of_row + 1) :])
        self.pool.retain(blocks)
        self._end[slot], self._first[slot] = len(prefix), len(prefix) - len(blocks)
        self._table[slot, : len(prefix)] = blocks[0] if len(blocks) else 0
        self._table[slot, self._first[slot] : len(prefix)] = blocks

    def fit(self, slots: Int64s, computed: Int32s, num_scheduled_tokens: Int32s) -> Int32s:
        """Fewer tokens of later prompts, if there are not blocks for all; of each at least one.

        Args:
            slots: Those of all live sequences, in the order in which prompts get tokens.
            computed: [S], tokens that each of these slots has.
            num_scheduled_tokens: [S], how many it is to compute.
        """
        room = self.pool.num_blocks - len(slots) * self._of_row
        own_end = self._first[slots] + self._of_row
        more = np.maximum(_blocks_of(computed + num_scheduled_tokens) - own_end, 0)
        if more.sum() <= room:
            return num_scheduled_tokens
        more = np.diff(np.minimum(np.cumsum(more), room), prepend=0)
        fitting: Int32s = np.minimum(
            num_scheduled_tokens, (own_end + more) * BLOCK_TOKENS - computed
        ).astype(np.int32)
        return fitting

    def extend(self, slots: Int64s, tokens: Int32s) -> None:
        """Allocate the blocks of a step, after which each of these slots has so many tokens."""
        begin, end = self._end[slots], _blocks_of(tokens)
        counts = end - begin
        if not counts.any():
            return
        blocks, _ = self.pool.allocate(int(counts.sum()))
        columns = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
        self._table[np.repeat(slots, counts), columns] = blocks
        self._end[slots] = end

    def table(self, slots: Int64s, num_columns: int) -> Int32s:
        """Blocks of these slots, [S, M], copied."""
        return np.ascontiguousarray(self._table[slots, :num_columns])

    def share(self, slot: int, keys: Sequence[bytes], begin: int) -> None:
        """Let computed blocks be found by their keys, from column `begin` on."""
        self.pool.share(keys, self._table[slot, begin : begin + len(keys)].tolist())

    def free_behind(self, slots: Int64s, computed: Int32s) -> None:
        """Free the blocks that no token after the computed ones sees."""
        first = np.maximum(computed.astype(np.int64) - self._window + 1, 0) // BLOCK_TOKENS
        for index in np.flatnonzero(first > self._first[slots]).tolist():
            slot, end = int(slots[index]), int(first[index])
            self.pool.release(self._table[slot, self._first[slot] : end].copy())
            self._table[slot, :end] = self._table[slot, end]
            self._first[slot] = end

    def leave(self, slot: int) -> None:
        """Free what the sequence of a slot has."""
        self.pool.release(self._table[slot, self._first[slot] : self._end[slot]].copy())
        self._first[slot] = self._end[slot] = 0


def _blocks_of(tokens: Int32s) -> Int64s:
    return -(-tokens.astype(np.int64) // BLOCK_TOKENS)
