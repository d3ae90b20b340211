"""The paged KV cache: one tensor of blocks for each layer, and the reference counts of the blocks.

A block id means the same block in every layer. Who owns which block is the business of the
engine; what is in a block that of the attention kernels.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from torch import Tensor

from raymoe.errors import CapacityError, ConfigError
from raymoe.kernels.paged_kv import BLOCK_TOKENS, CacheLayout
from raymoe.memory.arena import HostArena, aligned_bytes
from raymoe.units import ceil_div, format_bytes

BlockIds = npt.NDArray[np.int32]


def blocks_of_tokens(num_tokens: int) -> int:
    """Blocks that hold this many tokens of one sequence."""
    return ceil_div(num_tokens, BLOCK_TOKENS)


class KvCache:
    """Blocks of all layers, on huge pages; physical memory is taken when a block is first used."""

    def __init__(self, layout: CacheLayout, num_layers: int, num_blocks: int) -> None:
        if num_layers < 1 or num_blocks < 1:
            raise ConfigError(
                f"KV cache of {num_layers} layers and {num_blocks} blocks; both must be at least 1"
            )
        self.layout, self.num_blocks = layout, num_blocks
        self.num_bytes = num_layers * num_blocks * layout.block_bytes
        layer_bytes = aligned_bytes(num_blocks * layout.block_bytes)
        self._arena = HostArena(num_layers * layer_bytes)
        shape = (num_blocks, *layout.block_shape)
        self._layers = [
            self._arena.allocate(num_blocks * layout.block_bytes).view(layout.dtype).view(shape)
            for _ in range(num_layers)
        ]

    @property
    def host_memory(self) -> Tensor:
        return self._arena.memory

    def layer(self, index: int) -> Tensor:
        """Blocks of one layer, [N, *block_shape], as `kernels.paged_kv` or `paged_latent` say."""
        return self._layers[index]

    def touch(self, num_blocks: int, num_threads: int) -> None:
        """Have the operating system provide the first blocks of every layer now.

        Otherwise it clears a huge page whenever a step is the first to write into one: on a virtual
        machine more than a second for a gigabyte. Blocks are handed out in this order.

        Args:
            num_blocks: At most as many as there are; what they held is lost.
        """
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(lambda layer: layer[:num_blocks].zero_(), self._layers):
                pass

    def close(self) -> None:
        """Let go of the blocks; their memory returns when no tensor uses them any more."""
        self._layers = []
        self._arena.close()

    def __repr__(self) -> str:
        return f"KvCache({self.num_blocks} blocks, {format_bytes(self.num_bytes)})"


class BlockPool:
    """Which blocks are free, and how many sequences share each of the others.

    Invariant: a block is in the free list exactly if its reference count is 0. Not thread-safe:
    the engine thread owns it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = np.zeros(num_blocks, np.int32)
        # A stack, so that a block that was just freed and is still in the cache is used next.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    def allocate(self, num_blocks: int) -> BlockIds:
        """Take blocks, each with one reference.

        Raises:
            CapacityError: Fewer are free; nothing was taken.
        """
        if not 0 <= num_blocks <= self.num_free:
            raise CapacityError(
                f"{num_blocks} KV blocks asked, {self.num_free} of {self.num_blocks} are free; "
                "compare with num_free before allocating"
            )
        self.num_free -= num_blocks
        blocks = self._free[self.num_free : self.num_free + num_blocks].copy()
        self._references[blocks] = 1
        return blocks

    def retain(self, blocks: BlockIds) -> None:
        """Add a reference to each of these blocks, which must be in use."""
        assert (self._references[blocks] > 0).all(), "retained a free block"
        np.add.at(self._references, blocks, 1)

    def release(self, blocks: BlockIds) -> BlockIds:
        """Drop a reference to each of these blocks; returns those that became free."""
        np.subtract.at(self._references, blocks, 1)
        freed = np.unique(blocks[self._references[blocks] <= 0])
        assert (self._references[freed] == 0).all(), "released a free block"
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)
        return freed

    def references(self, block: int) -> int:
        return int(self._references[block])
