"""Layouts of the cache that attention kernels read: paged keys and values, latent rows, states."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Protocol, Self

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.kernels.elementwise import FLOAT_DTYPES
from raymoe.rotation import rotated
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS

BLOCK_TOKENS = KV_BLOCK_TOKENS
VALUE_COLUMNS = 64
INT8_MAX = 127.0
# Upper bound of what is gathered from blocks in one call; memory is scarce next to weights and KV.
GATHERED_BYTES = 64 << 20


class CacheLayout(Protocol):
    """Shape and type of one layer's cache."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block of one layer."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one layer for each sequence, whatever its length."""


def largest_layout(layouts: Iterable[CacheLayout]) -> CacheLayout:
    return max(layouts, key=lambda layout: layout.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Keys of a block, [D / P, B, P] for each KV head, then its values in tiles of 64 dimensions.

    Numbers of int8 have a float32 factor for each token and head: those of the block's keys are
    behind its values, then those of its values. Keys are `rotated_keys`.

    Attributes:
        value_head_dim: Dimensions of a value; None if it has as many as a key.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.dtype != torch.int8:
            check_cache_dtype(self.dtype)
        for dim in (self.head_dim, self.value_dim):
            if dim < 8 or dim % 8:
                raise ConfigError(f"head_dim is {dim}; the kernels need a multiple of 8")

    @classmethod
    def of(cls, key_TGD: Tensor, value_TGV: Tensor, dtype: torch.dtype) -> Self:
        """The layout of a cache for these keys and values."""
        _, num_kv_heads, head_dim = key_TGD.shape
        return cls(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            value_head_dim=value_TGV.shape[2],
        )

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def key_elements(self) -> int:
        """Elements of a block's keys of one KV head; its values follow."""
        return BLOCK_TOKENS * self.head_dim

    @property
    def pair(self) -> int:
        """Elements that one dot-product step multiplies together (P)."""
        return {torch.bfloat16: 2, torch.int8: 4}.get(self.dtype, 1)

    @property
    def is_scaled(self) -> bool:
        """Whether numbers have factors."""
        return self.dtype == torch.int8

    @property
    def block_shape(self) -> tuple[int, int]:
        scales = 2 * torch.float32.itemsize if self.is_scaled else 0
        return (self.num_kv_heads, self.num_elements + BLOCK_TOKENS * scales)

    @property
    def num_elements(self) -> int:
        """Elements of the keys and values of a block and KV head, without factors."""
        return BLOCK_TOKENS * (self.head_dim + self.value_dim)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype.itemsize

    @property
    def sequence_bytes(self) -> int:
        return 0


def check_cache_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ConfigError(f"KV cache dtype is {dtype}; supported: {FLOAT_DTYPES}")


def block_views(cache: Tensor, layout: KvLayout) -> tuple[Tensor, list[Tensor]]:
    """Return keys [N, G, D / P, B, P] and tiles of values, [N, G, B / P, columns, P] each."""
    num_blocks, num_kv_heads, pair = len(cache), layout.num_kv_heads, layout.pair
    shape = (num_blocks, num_kv_heads, layout.head_dim // pair, BLOCK_TOKENS, pair)
    keys, values, _ = cache.tensor_split([layout.key_elements, layout.num_elements], dim=2)
    tiles = [
        tile.view(num_blocks, num_kv_heads, BLOCK_TOKENS // pair, -1, pair)
        for tile in torch.split(values, BLOCK_TOKENS * VALUE_COLUMNS, dim=2)
    ]
    return keys.view(shape), tiles


def scale_views(cache: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor]:
    """Return the factors of keys and of values of int8, [N, G, B] float32 each."""
    scales_NGX = cache[:, :, layout.num_elements :].view(torch.float32)
    key_NGB, value_NGB = torch.split(scales_NGX, BLOCK_TOKENS, dim=2)
    return key_NGB, value_NGB


def rotated_keys(rows_TGD: Tensor) -> Tensor:
    """Multiply runs of each row by a Hadamard matrix, in float32.

    A run has the largest power of two that divides a row. Keys of int8 are rotated: their few large
    elements would take the steps from the others. Twice it multiplies by the length of a run.
    Source: QuaRot (arXiv 2404.00456), section 4.
    """
    dim = rows_TGD.shape[2]
    return rotated(rows_TGD, dim & -dim)


def unrotated(rows_TGD: Tensor) -> Tensor:
    """Invert `rotated_keys`."""
    dim = rows_TGD.shape[2]
    return rotated_keys(rows_TGD) / (dim & -dim)


def scaled(rows_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """Round to int8: numbers from -127 to 127, [T, G, D], and their factors [T, G] in float32.

    The largest number of a row becomes 127. A row of numbers too small for that is zero; one with a
    number that is not finite has the factor NaN.
    """
    rows_TGD = rows_TGD.float()
    largest_TG = rows_TGD.abs().amax(2)
    is_finite_TG = largest_TG.isfinite()
    is_rounded_TG = is_finite_TG & (largest_TG >= INT8_MAX * torch.finfo(torch.float32).tiny)
    # A number divided by a tensor would be multiplied by its reciprocal, which rounds twice.
    inverse_TG = torch.where(is_rounded_TG, largest_TG.new_tensor(INT8_MAX) / largest_TG, 0)
    scale_TG = torch.where(is_rounded_TG, largest_TG / INT8_MAX, 0)
    numbers_TGD = (rows_TGD * inverse_TG[..., None]).round().where(is_rounded_TG[..., None], 0)
    return numbers_TGD.to(torch.int8), scale_TG.where(is_finite_TG, torch.nan)


def write_rows(
    cache: Tensor,
    places: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    layout: KvLayout,
) -> None:
    """Write keys [T, G, D] and values [T, G, V] to blocks [T] and offsets [T] within them."""
    (blocks_T, offsets_T), (key_TGD, value_TGV), pair = places, rows, layout.pair
    if layout.is_scaled:
        key_NGB, value_NGB = scale_views(cache, layout)
        key_TGD, key_NGB[blocks_T, :, offsets_T] = scaled(rotated_keys(key_TGD))
        value_TGV, value_NGB[blocks_T, :, offsets_T] = scaled(value_TGV)
    keys, tiles = block_views(cache, layout)
    paired = key_TGD.reshape(*key_TGD.shape[:2], layout.head_dim // pair, pair)
    keys[blocks_T, :, :, offsets_T] = paired.to(cache.dtype)
    columns = torch.split(value_TGV, VALUE_COLUMNS, dim=2)
    for tile, value_TGC in zip(tiles, columns, strict=True):
        tile[blocks_T, :, offsets_T // pair, :, offsets_T % pair] = value_TGC.to(cache.dtype)


def rows_of(
    cache: Tensor, blocks_T: Tensor, offsets_T: Tensor, layout: KvLayout
) -> tuple[Tensor, Tensor]:
    """Copy keys [T, G, D] and values [T, G, V] of some positions; those of int8 as float32."""
    keys, tiles = block_views(cache, layout)
    key_TGD = keys[blocks_T, :, :, offsets_T].flatten(2)
    pair = layout.pair
    values = [tile[blocks_T, :, offsets_T // pair, :, offsets_T % pair] for tile in tiles]
    value_TGV = torch.cat(values, dim=2)
    if layout.is_scaled:
        key_NGB, value_NGB = scale_views(cache, layout)
        key_TGD = unrotated(key_TGD * key_NGB[blocks_T, :, offsets_T, None])
        value_TGV = value_TGV * value_NGB[blocks_T, :, offsets_T, None]
    return key_TGD, value_TGV


def gather_runs(cache: Tensor, blocks_NR: Tensor, runs_NR: Tensor, layout: KvLayout) -> Tensor:
    """Copy runs of positions side by side into new blocks, [N, *block_shape].

    Args:
        cache: Blocks of one layer; they may be strided.
        blocks_NR: Where the runs of each new block are; together they fill it.
        runs_NR: Their places in these, in runs.
    """
    num_runs, pair = blocks_NR.shape[1], layout.pair
    run = BLOCK_TOKENS // num_runs
    out = cache.new_empty(len(blocks_NR), *layout.block_shape)
    # A run is contiguous within a dimension of the keys, and within a tile of the values.
    (keys, tiles), (new_keys, new_tiles) = (block_views(each, layout) for each in (cache, out))
    run_NGDRX, new_NGDRX = (
        each.view(*each.shape[:3], num_runs, run * pair) for each in (keys, new_keys)
    )
    new_NGDRX.copy_(run_NGDRX[blocks_NR, :, :, runs_NR].permute(0, 2, 3, 1, 4))
    for tile, new_tile in zip(tiles, new_tiles, strict=True):
        width = run * tile.shape[3]
        run_NGRX, new_NGRX = (
            each.view(*each.shape[:2], num_runs, width) for each in (tile, new_tile)
        )
        new_NGRX.copy_(run_NGRX[blocks_NR, :, runs_NR].transpose(1, 2))
    return out


def unpack_block(block: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor]:
    """Copy keys and values of one block to [B, G, D] and [B, G, V]; for tests."""
    offsets_B = torch.arange(BLOCK_TOKENS, device=block.device)
    return rows_of(block[None], torch.zeros_like(offsets_B), offsets_B, layout)


def pack_block(keys_BGD: Tensor, values_BGV: Tensor, layout: KvLayout) -> Tensor:
    """Invert `unpack_block`; for tests."""
    offsets_B = torch.arange(BLOCK_TOKENS)
    block = torch.zeros(1, *layout.block_shape, dtype=layout.dtype)
    places = (torch.zeros_like(offsets_B), offsets_B)
    write_rows(block, places, (keys_BGD, values_BGV), layout)
    return block[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """Rows of latents, each followed by the rotated key."""

    rank: int
    rope_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_cache_dtype(self.dtype)
        for name, size in (("rank", self.rank), ("rope_dim", self.rope_dim)):
            if size % 8 or not self.rank:
                raise ConfigError(
                    f"{name} of the latent is {size}; the kernels need multiples of 8"
                )

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def block_shape(self) -> tuple[int, int]:
        return (BLOCK_TOKENS, self.width)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.width * self.dtype.itemsize

    @property
    def sequence_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLayout:
    """Blocks of another layout, each followed by the index keys of its tokens, [B, I].

    Index keys may be pooled: [B / P, I] of whole entries, then [P, O] of the tokens of an open one,
    of which a block has at most one.

    Attributes:
        attended: What attention reads.
        index_dim: Elements of an index key (I).
        pool: Tokens of an entry (P), a divisor of those of a block; None: keys are not pooled.
        open_dim: Elements that are kept of a token of an open entry (O).
    """

    attended: KvLayout | LatentLayout
    index_dim: int
    pool: int | None = None
    open_dim: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.attended.dtype

    @property
    def _attended_elements(self) -> int:
        return prod(self.attended.block_shape)

    @property
    def _key_elements(self) -> int:
        return BLOCK_TOKENS // (self.pool or 1) * self.index_dim

    @property
    def _open_elements(self) -> int:
        return 0 if self.pool is None else self.pool * self.open_dim

    @property
    def block_shape(self) -> tuple[int]:
        return (self._attended_elements + self._key_elements + self._open_elements,)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype.itemsize

    @property
    def sequence_bytes(self) -> int:
        return 0

    def attended_blocks(self, cache: Tensor) -> Tensor:
        """The blocks that attention reads, [N, *block_shape of `attended`]; a view."""
        part_NX = cache[:, : self._attended_elements]
        return part_NX.view(len(cache), *self.attended.block_shape)

    def index_keys(self, cache: Tensor) -> Tensor:
        """The index keys, [N, B, I] or [N, B / P, I]; a view."""
        begin = self._attended_elements
        part_NX = cache[:, begin : begin + self._key_elements]
        return part_NX.view(len(cache), -1, self.index_dim)

    def open_tokens(self, cache: Tensor) -> Tensor:
        """The tokens of open entries, [N, P, O]; a view."""
        part_NX = cache[:, self._attended_elements + self._key_elements :]
        return part_NX.view(len(cache), -1, self.open_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """States of the sequences' slots in bytes: all heads, then all last inputs of the convolution.

    Attributes:
        past: Shape of a slot's last inputs, [P, C], in `past_dtype`.
        heads: Shape of a slot's matrices, [H, K, V], in `heads_dtype`; they may be empty.
    """

    past: tuple[int, int]
    heads: tuple[int, int, int]
    past_dtype: torch.dtype
    heads_dtype: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (0,)

    @property
    def block_bytes(self) -> int:
        return 0

    @property
    def head_bytes(self) -> int:
        return prod(self.heads) * self.heads_dtype.itemsize

    @property
    def sequence_bytes(self) -> int:
        return self.head_bytes + prod(self.past) * self.past_dtype.itemsize

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The past inputs [N, P, C] and the matrices [N, H, K, V] of all slots."""
        num_slots = len(cache) // self.sequence_bytes
        end = num_slots * self.head_bytes
        heads = cache[:end].view(self.heads_dtype).view(num_slots, *self.heads)
        return cache[end:].view(self.past_dtype).view(num_slots, *self.past), heads

    def copy(self, cache: Tensor, copies: Iterable[tuple[int, int]]) -> None:
        """Copy states between slots, (from, to), in this order."""
        past_NPC, heads_NHKV = self.views(cache)
        for source, target in copies:
            past_NPC[target] = past_NPC[source]
            heads_NHKV[target] = heads_NHKV[source]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayout:
    """Last rows and sums of open windows in slots, entries of whole windows in blocks.

    Blocks are at the front of a layer's bytes and slots at the back, the first one last: both are
    found without the number of either. Windows that are longer than a block have their entry in the
    block of their last token. A sum is a maximum, a sum of weights and a weighted sum, of each
    dimension.

    Attributes:
        width: Elements of a row and of an entry.
        window: Rows of a slot; that of position p is p modulo this.
        ratio: Tokens of an entry; None if there are none.
        num_sums: Sums of a slot: of the window that is open, then of the one after.
        dtype: Of rows and entries.
        index_dim: Elements of an entry's index key, which follows the entries of its block, as its
            sums follow those of the slot; 0 where entries have none.
    """

    width: int
    window: int
    ratio: int | None
    num_sums: int
    dtype: torch.dtype
    index_dim: int = 0

    def __post_init__(self) -> None:
        check_cache_dtype(self.dtype)
        if self.width < 8 or self.width % 8:
            raise ConfigError(f"head_dim is {self.width}; the kernels need a multiple of 8")
        if self.ratio is not None and self.ratio % BLOCK_TOKENS and BLOCK_TOKENS % self.ratio:
            raise ConfigError(
                f"an entry has {self.ratio} tokens; supported: divisors and multiples of "
                f"{BLOCK_TOKENS}"
            )

    @property
    def block_entries(self) -> int:
        """Entries of a block that holds any."""
        return 0 if self.ratio is None else max(1, BLOCK_TOKENS // self.ratio)

    @property
    def block_step(self) -> int:
        """Every so many blocks of a sequence one holds entries."""
        return max(1, (self.ratio or 0) // BLOCK_TOKENS)

    @property
    def block_shape(self) -> tuple[int, int]:
        return (self.block_entries, self.width + self.index_dim)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype.itemsize

    @property
    def sequence_bytes(self) -> int:
        return self._row_bytes + self._sum_bytes(self.width) + self._sum_bytes(self.index_dim)

    def _sum_bytes(self, width: int) -> int:
        return self.num_sums * 3 * width * torch.float32.itemsize

    @property
    def _row_bytes(self) -> int:
        return self.window * self.width * self.dtype.itemsize

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries [N, E, W], rows [M, R, W] and sums [M, A, 3, W].

        Slot s has index M - 1 - s; the last blocks overlap slots and are no block's.
        """
        slots = self.slots(cache)
        num_slots = len(slots)
        rows = slots[:, : self._row_bytes].view(self.dtype)
        rows_MRW = rows.view(num_slots, self.window, self.width)
        end = self._row_bytes + self._sum_bytes(self.width)
        sums = slots[:, self._row_bytes : end].view(torch.float32)
        sums_MA3W = sums.view(num_slots, self.num_sums, 3, self.width)
        blocks_NX = self.blocks(cache)[:, : self.block_entries * self.width]
        entries_NEW = blocks_NX.view(len(blocks_NX), self.block_entries, self.width)
        return entries_NEW, rows_MRW, sums_MA3W

    def index_views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Index keys of entries [N, E, I], and their sums [M, A, 3, I], as in `views`."""
        slots = self.slots(cache)
        sums = slots[:, self._row_bytes + self._sum_bytes(self.width) :].view(torch.float32)
        blocks_NX = self.blocks(cache)[:, self.block_entries * self.width :]
        return (
            blocks_NX.view(len(blocks_NX), self.block_entries, self.index_dim),
            sums.view(len(slots), self.num_sums, 3, self.index_dim),
        )

    def blocks(self, cache: Tensor) -> Tensor:
        """The blocks, entries and then their index keys, as elements [N, X]."""
        if not self.block_bytes:
            return cache[:0].view(self.dtype).view(0, 0)
        num_blocks = len(cache) // self.block_bytes
        blocks = cache[: num_blocks * self.block_bytes].view(self.dtype)
        return blocks.view(num_blocks, -1)

    def slots(self, cache: Tensor) -> Tensor:
        """The bytes of all slots, [M, bytes]; slot s has index M - 1 - s."""
        return cache[len(cache) % self.sequence_bytes :].view(-1, self.sequence_bytes)

    def copy(self, cache: Tensor, copies: Iterable[tuple[int, int]]) -> None:
        """Copy slots, (from, to), in this order."""
        slots = self.slots(cache)
        for source, target in copies:
            slots[-1 - target] = slots[-1 - source]


ALL_TOKENS = 2**62  # more than any sequence has
