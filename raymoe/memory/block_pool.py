"""BlockPool: reference counts of KV blocks, and the computed prefixes that are found in them."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from raymoe.errors import CapacityError

BlockIds = npt.NDArray[np.int32]


class BlockPool:
    """Which blocks are free, and which hold prefixes that other sequences can take over.

    A block is free while no sequence refers to it. A free block with a prefix keeps it, so that
    it is found again by its key, until its memory is needed: empty blocks are allocated first,
    then those whose prefixes were left longest ago. A prefix that more than one sequence used
    counts as left `num_blocks` allocated blocks later, so it outlives a whole cache of prefixes
    that were used once, but not more. Of the blocks that a sequence leaves, the last is reused
    first: no block is found without those before it (as in vLLM's prefix cache).

    Not thread-safe: the engine thread owns the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, np.int32)
        # A stack: a block that was just freed may still be in the CPU cache and is used next.
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[bytes, int] = {}  # by key
        self._keys: dict[int, bytes] = {}
        self._num_allocated = 0  # in all, the clock by which prefixes age
        # Free blocks with prefixes and the time at which they were left, ascending.
        self._used_once: dict[int, int] = {}
        self._used_often: dict[int, int] = {}
        self._is_used_often = np.zeros(num_blocks, np.bool_)
        self.num_evicted = 0
        self.num_changes = 0  # of the prefixes that are found

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._empty) + self.num_kept

    @property
    def num_kept(self) -> int:
        """Free blocks with prefixes."""
        return len(self._used_once) + len(self._used_often)

    def allocate(self, num_blocks: int) -> tuple[BlockIds, list[bytes]]:
        """Take free blocks, each with one reference.

        Returns:
            The blocks, and the keys of prefixes that are lost for them.

        Raises:
            CapacityError: Fewer are free; nothing was taken.
        """
        if not 0 <= num_blocks <= self.num_free:
            raise CapacityError(
                f"{num_blocks} KV blocks asked, {self.num_free} of {self.num_blocks} are free; "
                "compare with num_free before allocating"
            )
        num_empty = min(num_blocks, len(self._empty))
        taken = [self._empty.pop() for _ in range(num_empty)]
        lost = []
        for _ in range(num_blocks - num_empty):
            block, key = self._evict()
            taken.append(block)
            lost.append(key)
        self._num_allocated += num_blocks
        blocks = np.array(taken, np.int32)
        self._references[blocks] = 1
        return blocks, lost

    def retain(self, blocks: BlockIds) -> None:
        """Take over blocks with prefixes, as `find` returns them, for one more sequence."""
        for block in blocks[self._references[blocks] == 0].tolist():
            del (self._used_often if self._is_used_often[block] else self._used_once)[block]
        self._references[blocks] += 1
        self._is_used_often[blocks] = True

    def release(self, blocks: BlockIds) -> None:
        """Drop the reference of a sequence to each of its blocks, which are in its order."""
        self._references[blocks] -= 1
        assert (self._references[blocks] >= 0).all(), "released a free block"
        for block in blocks[self._references[blocks] == 0].tolist()[::-1]:
            if block not in self._keys:
                self._empty.append(block)
            elif self._is_used_often[block]:
                self._used_often[block] = self._num_allocated
            else:
                self._used_once[block] = self._num_allocated

    def references(self, blocks: BlockIds) -> npt.NDArray[np.int32]:
        """Count the sequences that refer to each of these blocks."""
        counts: npt.NDArray[np.int32] = self._references[blocks]
        return counts

    def share(self, keys: Iterable[bytes], blocks: Iterable[int]) -> None:
        """Let computed blocks be found by their keys; of several with the same key, the first."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._blocks:
                self._blocks[key], self._keys[block] = block, key
                self.num_changes += 1

    def num_found(self, keys: Sequence[bytes]) -> int:
        """The length in blocks of the longest of these prefixes that is in the cache."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def find(self, keys: Sequence[bytes]) -> BlockIds:
        """Blocks of a prefix, all of them in the cache."""
        return np.array([self._blocks[key] for key in keys], np.int32)

    def drop_kept(self) -> list[bytes]:
        """Lose the prefixes that no sequence refers to; return their keys."""
        lost = [self._forget(block) for block in (*self._used_once, *self._used_often)]
        self._empty += [*self._used_once, *self._used_often]
        self._used_once.clear()
        self._used_often.clear()
        return lost

    def _evict(self) -> tuple[int, bytes]:
        once, often = self._used_once, self._used_often
        is_once = not often or (bool(once) and _oldest(once) <= _oldest(often) + self.num_blocks)
        queue = once if is_once else often
        block = next(iter(queue))
        del queue[block]
        self.num_evicted += 1
        return block, self._forget(block)

    def _forget(self, block: int) -> bytes:
        key = self._keys.pop(block)
        del self._blocks[key]
        self._is_used_often[block] = False
        self.num_changes += 1
        return key


def _oldest(queue: dict[int, int]) -> int:
    return next(iter(queue.values()))
