"""The paged KV cache: one tensor of blocks per layer.

A block id refers to the same block in every layer, or in every layer with a sliding window if these
have fewer blocks. Layers have states of slots instead, or both.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.kernels.paged_kv import CacheLayout, CompressedLayout, StateLayout
from raymoe.memory.arena import HostArena, aligned_bytes
from raymoe.units import format_bytes


class KvCache:
    """Blocks of all layers, on huge pages; physical memory is used from the first write.

    Args:
        num_blocks: Of each layer, or of all layers.
        num_slots: States of layers that keep any: of live sequences, and snapshots.
    """

    def __init__(
        self,
        layouts: Sequence[CacheLayout],
        num_blocks: int | Sequence[int],
        new_arena: Callable[[int], HostArena] = HostArena,
        *,
        num_slots: int = 0,
    ) -> None:
        blocks = _of_layers(num_blocks, layouts)
        if not layouts or min(blocks) < 1:
            raise ConfigError(
                f"KV cache of {len(layouts)} layers and {num_blocks} blocks; both must be at "
                "least 1"
            )
        self.layouts, self.num_blocks = tuple(layouts), max(blocks)
        sizes = _sizes(layouts, blocks, num_slots)
        self.num_bytes = sum(sizes)
        self._arena = new_arena(sum(map(aligned_bytes, sizes)))
        self._layers = [
            _shaped(self._arena.allocate(size), layout, count)
            for layout, size, count in zip(layouts, sizes, blocks, strict=True)
        ]

    @property
    def host_memory(self) -> Tensor:
        return self._arena.memory

    @property
    def layers(self) -> Sequence[Tensor]:
        """What `layer` returns, of all layers."""
        return self._layers

    def layer(self, index: int) -> Tensor:
        """Blocks of one layer, [N, *block_shape], or bytes of its states, in its layout."""
        return self._layers[index]

    def touch(self, num_blocks: int, num_threads: int) -> None:
        """Fault in the first blocks of every layer; their contents are lost.

        Otherwise the first write clears each huge page during a step: more than a second per
        gigabyte on a virtual machine. Blocks are allocated in this order.
        """
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(_zero, self._layers, self.layouts, repeat(num_blocks)):
                pass

    def close(self) -> None:
        self._layers = []
        self._arena.close()

    def __repr__(self) -> str:
        return f"KvCache({self.num_blocks} blocks, {format_bytes(self.num_bytes)})"


def device_cache(
    layouts: Sequence[CacheLayout],
    num_blocks: int | Sequence[int],
    allocate: Callable[[int], Tensor],
    *,
    num_slots: int,
) -> list[Tensor]:
    """Memory of a device for all layers, each as `KvCache.layer` returns it."""
    blocks = _of_layers(num_blocks, layouts)
    sizes = _sizes(layouts, blocks, num_slots)
    return [
        _shaped(allocate(size), layout, count)
        for layout, size, count in zip(layouts, sizes, blocks, strict=True)
    ]


def copy_states(
    layers: Sequence[Tensor], layouts: Sequence[CacheLayout], copies: Sequence[tuple[int, int]]
) -> None:
    """Copy states between slots, (from, to), in this order; skips layers that have none here."""
    for layer, layout in zip(layers, layouts, strict=True):
        if isinstance(layout, StateLayout | CompressedLayout) and len(layer):
            layout.copy(layer, copies)


def _of_layers(num_blocks: int | Sequence[int], layouts: Sequence[CacheLayout]) -> Sequence[int]:
    return [num_blocks] * len(layouts) if isinstance(num_blocks, int) else num_blocks


def _sizes(layouts: Sequence[CacheLayout], blocks: Sequence[int], num_slots: int) -> list[int]:
    return [
        count * layout.block_bytes + num_slots * layout.sequence_bytes
        for layout, count in zip(layouts, blocks, strict=True)
    ]


def _shaped(memory: Tensor, layout: CacheLayout, num_blocks: int) -> Tensor:
    if layout.sequence_bytes:
        return memory
    return memory.view(layout.dtype).view(num_blocks, *layout.block_shape)


def _zero(layer: Tensor, layout: CacheLayout, num_blocks: int) -> None:
    (layer if layout.sequence_bytes else layer[:num_blocks]).zero_()
