"""Paged attention on a GPU: launches of the Triton kernels for grouped-query attention and MLA."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import e, log2
from typing import ClassVar

import torch
from torch import Tensor

from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gpu_attention_batch import (
    SPLIT_POSITIONS,
    AttentionCompute,
    AttentionTile,
    LatentRaggedBatch,
    RaggedBatch,
    Tiles,
    UpProjected,
    attention_tile,
)
from raymoe.kernels.gpu_attention_kernels import (
    KernelCache,
    KernelQueries,
    append_kernel,
    attend_kernel,
    merge_kernel,
)
from raymoe.kernels.gpu_common import TRITON_TYPES, Launch, kernel_constants
from raymoe.kernels.latent_heads import LatentHeads
from raymoe.kernels.paged_kv import (
    BLOCK_TOKENS,
    GATHERED_BYTES,
    KvLayout,
    LatentLayout,
)
from raymoe.kernels.triton_support import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCache:
    """Keys and values on the device, in blocks or in contiguous rows.

    Attributes:
        keys: The whole memory, viewed as elements or as words of two elements.
        table_SM: int32, block table; or [S, 1], the first row of each sequence.
        key_strides: Strides between rows and between heads; rows only.
        block_tokens: Rows of an entry of the block table.
        block_size: Units between its entries; of paged memory only.
    """

    CHOSEN_UNIT: ClassVar[int] = 8  # elements; all rows begin at multiples of it

    keys: Tensor
    values: Tensor
    table_SM: Tensor
    is_blocked: bool
    is_paged: bool
    pair: int
    dims: tuple[int, int]
    num_kv_heads: int
    key_strides: tuple[int, int] = (0, 0)
    value_strides: tuple[int, int] = (0, 0)
    block_tokens: int = BLOCK_TOKENS
    block_size: int = 0

    @classmethod
    def of_blocks(cls, cache: Tensor, layout: KvLayout, table_SM: Tensor) -> "DeviceCache":
        """Wrap the blocks of one layer, [N, G, B * (D + V)] in the layout of `paged_kv`.

        Blocks may be strided.
        """
        units = cache if layout.pair == 1 else cache.view(torch.int32)
        return cls(
            keys=units,
            values=units,
            table_SM=table_SM,
            is_blocked=True,
            is_paged=True,
            pair=layout.pair,
            dims=(layout.head_dim, layout.value_dim),
            num_kv_heads=layout.num_kv_heads,
            block_size=units.stride(0),
        )

    @classmethod
    def of_runs(
        cls, cache: Tensor, layout: KvLayout, runs_LR: Tensor, tokens: int
    ) -> "DeviceCache":
        """Wrap runs of so many positions that each token chose, as if each were a block.

        Args:
            runs_LR: int32, counted in all blocks.
        """
        return replace(cls.of_blocks(cache, layout, runs_LR), block_tokens=tokens)

    @classmethod
    def of_latents(cls, cache: Tensor, layout: LatentLayout, table_SM: Tensor) -> "DeviceCache":
        """Wrap latent blocks of one layer, [N, B, W]; the latents are the values of one head.

        Blocks may be strided.
        """
        return cls(
            keys=cache,
            values=cache,
            table_SM=table_SM,
            is_blocked=False,
            is_paged=True,
            pair=1,
            dims=(layout.width, layout.rank),
            num_kv_heads=1,
            key_strides=(layout.width, 0),
            value_strides=(layout.width, 0),
            block_size=cache.stride(0),
        )

    @classmethod
    def of_chosen(cls, cache: Tensor, layout: LatentLayout, places_LK: Tensor) -> "DeviceCache":
        """Wrap the latent rows that each token chose, as if each were a block of its own.

        Args:
            places_LK: int32, where the rows begin, in units of `CHOSEN_UNIT` elements.
        """
        latents = cls.of_latents(cache, layout, places_LK)
        return replace(latents, block_tokens=1, block_size=cls.CHOSEN_UNIT)

    @classmethod
    def of_rows(cls, keys_CGD: Tensor, values_CGV: Tensor, starts_S1: Tensor) -> "DeviceCache":
        """Wrap keys and values made for some heads; the rows of a position lie side by side."""
        num_heads = keys_CGD.shape[1]
        for made in (keys_CGD, values_CGV):
            assert made.stride(0) == num_heads * made.stride(1), "the stride of rows is computed"
        return cls(
            keys=keys_CGD,
            values=values_CGV,
            table_SM=starts_S1,
            is_blocked=False,
            is_paged=False,
            pair=1,
            dims=(keys_CGD.shape[2], values_CGV.shape[2]),
            num_kv_heads=keys_CGD.shape[1],
            key_strides=(keys_CGD.stride(0), keys_CGD.stride(1)),
            value_strides=(values_CGV.stride(0), values_CGV.stride(1)),
        )

    def constants(self, compute: AttentionCompute, step_dims: int) -> KernelCache:
        step = step_dims // self.pair
        values = {
            "is_blocked": self.is_blocked,
            "is_paged": self.is_paged,
            "pair": self.pair,
            "key_dim": self.dims[0],
            "value_dim": self.dims[1],
            "padded_values": max(power_of_two(self.dims[1]), 16),
            # Of rows, there are some heads at once, as many as memory holds in this step.
            "num_kv_heads": self.num_kv_heads if self.is_paged else 1,
            "key_row": self.key_strides[0] if self.is_paged else 0,
            "key_head": self.key_strides[1],
            "value_row": self.value_strides[0] if self.is_paged else 0,
            "value_head": self.value_strides[1],
            "block_tokens": self.block_tokens,
            "block_size": self.block_size,
            "dot": TRITON_TYPES[compute.dot],
            "step": step,
            "num_steps": -(-self.dims[0] // self.pair // step),
        }
        constants: KernelCache = kernel_constants(KernelCache, **values)
        return constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    scale: float
    sliding_window: int | None = None
    sinks_H: Tensor | None = None


def append_launch(projected: Projected, slots_T: Tensor, cache: Tensor, layout: KvLayout) -> Launch:
    _, key_TGD, value_TGV = projected
    blocks = DeviceCache.of_blocks(cache, layout, slots_T)
    compute = AttentionCompute.on((8, 0), key_TGD.dtype)
    num_tokens, num_kv_heads, head_dim = key_TGD.shape
    return Launch(
        kernel=append_kernel,
        grid=(num_tokens, num_kv_heads),
        arguments={
            "key_ptr": key_TGD,
            "value_ptr": value_TGV,
            "slots_ptr": slots_T,
            "cache_ptr": cache,
            "key_stride": key_TGD.stride(0),
            "value_stride": value_TGV.stride(0),
        },
        constants={
            "C": blocks.constants(compute, head_dim),
            "COLUMNS": power_of_two(max(head_dim, layout.value_dim)),
        },
        options={"num_warps": 1},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """One attention call; the last dimensions of `query_THD` and `out_THV` are contiguous."""

    query_THD: Tensor
    cache: DeviceCache
    out_THV: Tensor
    compute: AttentionCompute
    scoring: Scoring

    def run(self, tiles: Tiles) -> None:
        for launch in self.launches(tiles):
            launch.run()

    def launches(self, tiles: Tiles) -> Iterator[Launch]:
        """Yield the launches of `run` in order; a launch may reuse scratch memory of another."""
        num_tiles = len(tiles.tiles_NF)
        if not num_tiles:
            return
        num_parts = 1 if tiles.tokens > 1 else self._max_parts(tiles)
        if num_parts == 1:
            yield self._attend(tiles, self.out_THV, tiles.tiles_NF, 1)
            return
        part_bytes = (self.cache.dims[1] + 2) * torch.float32.itemsize
        at_once = GATHERED_BYTES // (self._num_heads * num_parts * part_bytes)
        for some in tiles.split(max(1, at_once)):
            sizes = (len(some.tiles_NF), self._num_heads, num_parts)
            parts = self.out_THV.new_empty(*sizes, self.cache.dims[1], dtype=torch.float32)
            totals = self.out_THV.new_empty(*sizes, 2, dtype=torch.float32)
            yield self._attend(some, parts, totals, num_parts)
            yield self._merge(some, parts, totals, num_parts)

    def _attend(self, tiles: Tiles, target: Tensor, totals: Tensor, num_parts: int) -> Launch:
        shape = self._shape(tiles)
        heads = self.cache.num_kv_heads * -(-self._group // shape.heads)
        return Launch(
            kernel=attend_kernel,
            grid=(len(tiles.tiles_NF), heads, num_parts),
            arguments={
                "query_ptr": self.query_THD,
                "key_ptr": self.cache.keys,
                "value_ptr": self.cache.values,
                "table_ptr": self.cache.table_SM,
                "tiles_ptr": tiles.tiles_NF,
                "sinks_ptr": self._sinks(tiles),
                "out_ptr": target,
                "totals_ptr": totals,
                "query_stride": self.query_THD.stride(0),
                "out_stride": self.out_THV.stride(0),
                "table_stride": self.cache.table_SM.stride(0),
                "row_heads": self.cache.num_kv_heads,
            },
            constants=self._constants(shape, num_parts),
            options={"num_warps": shape.warps, "num_stages": shape.stages},
        )

    def _merge(self, tiles: Tiles, parts: Tensor, totals: Tensor, num_parts: int) -> Launch:
        return Launch(
            kernel=merge_kernel,
            grid=(len(tiles.tiles_NF), self._num_heads),
            arguments={
                "parts_ptr": parts,
                "totals_ptr": totals,
                "tiles_ptr": tiles.tiles_NF,
                "sinks_ptr": self._sinks(tiles),
                "out_ptr": self.out_THV,
                "out_stride": self.out_THV.stride(0),
                "max_parts": num_parts,
            },
            constants=self._constants(self._shape(tiles), num_parts),
            options={"num_warps": 1 if self.cache.dims[1] <= 128 else 4},
        )

    @property
    def _num_heads(self) -> int:
        return self.query_THD.shape[1]

    @property
    def _group(self) -> int:
        return self._num_heads // self.cache.num_kv_heads

    def _shape(self, tiles: Tiles) -> AttentionTile:
        return attention_tile(
            self.compute,
            tokens=tiles.tokens,
            group=self._group,
            dims=self.cache.dims,
            pair=self.cache.pair,
        )

    def _sinks(self, tiles: Tiles) -> Tensor:
        return tiles.tiles_NF if self.scoring.sinks_H is None else self.scoring.sinks_H

    def _constants(self, shape: AttentionTile, num_parts: int) -> dict[str, object]:
        queries = {
            "group": self._group,
            "query_head": self.query_THD.stride(1),
            "out_head": self.out_THV.stride(1),
            "scale": self.scoring.scale * log2(e),
            "window": self.scoring.sliding_window or 0,
            "has_sinks": self.scoring.sinks_H is not None,
            "split": SPLIT_POSITIONS if num_parts > 1 else 0,
            "heads": shape.heads,
            "rows": shape.rows,
            "positions": shape.positions,
        }
        cache = self.cache.constants(self.compute, shape.step)
        return {"C": cache, "Q": kernel_constants(KernelQueries, **queries)}

    def _max_parts(self, tiles: Tiles) -> int:
        parts = max(-(-tiles.num_positions // SPLIT_POSITIONS), 1)
        window = self.scoring.sliding_window
        return parts if window is None else min(parts, (window - 2) // SPLIT_POSITIONS + 2)


def append_and_attend_ragged(
    projected: Projected,
    cache: Tensor,
    batch: RaggedBatch,
    scoring: Scoring,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute what `cpu_attention.append_and_attend` does, on a GPU; [T, H * V], in `out`.

    Nothing is gathered or added atomically. On one GPU the bits of a token depend on its own
    sequence and on whether it is its only new token, not on other sequences.

    Args:
        projected: Rotated; queries in the type of `batch.compute`.
        cache: Blocks of one layer, [N, G, B * (D + V)] as in `paged_kv.KvLayout`; changed in place.
    """
    query_THD, key_TGD, value_TGV = projected
    layout = KvLayout.of(key_TGD, value_TGV, cache.dtype)
    out_THV = _rows_of_heads(query_THD, layout.value_dim, out)
    if not len(query_THD):
        return out_THV.flatten(1)
    append_launch(projected, batch.slots_T, cache, layout).run()
    attending = Attending(
        query_THD=query_THD,
        cache=DeviceCache.of_blocks(cache, layout, batch.table_SM),
        out_THV=out_THV,
        compute=batch.compute,
        scoring=scoring,
    )
    attending.run(batch.alone)
    attending.run(batch.together)
    return out_THV.flatten(1)


def append_and_attend_latent_ragged(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: LatentRaggedBatch,
    *,
    heads: LatentHeads,
    scoring: Scoring,
    out: Tensor | None = None,
) -> Tensor:
    """Append the latent rows of the step to the cache in place and attend; [T, H * V], in `out`.

    Tokens in `batch.alone` use the absorbed form, which reads only the cache. The others use the
    plain form, over keys and values that are up-projected for some heads at a time.

    Args:
        cache: Blocks [N, B, W]; they may be strided.
    """
    append_latent_rows(latent_TW, cache, batch.slots_T)
    out_THV = _rows_of_heads(query_THD, heads.value_dim, out)
    if len(batch.tokens_A):
        _attend_absorbed(query_THD, cache, batch, out_THV, heads=heads, scoring=scoring)
    for up_projected in batch.up_projected:
        _attend_plain(
            query_THD,
            cache,
            up_projected,
            out_THV,
            compute=batch.compute,
            heads=heads,
            scoring=scoring,
        )
    return out_THV.flatten(1)


def append_latent_rows(row_TW: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Write rows to their slots of blocks [N, B, W], which may be strided."""
    if cache.is_contiguous():
        cache.view(-1, cache.shape[2])[slots_T] = row_TW.to(cache.dtype)
    else:
        cache[slots_T // BLOCK_TOKENS, slots_T % BLOCK_TOKENS] = row_TW.to(cache.dtype)


def _rows_of_heads(query_THD: Tensor, value_dim: int, out: Tensor | None) -> Tensor:
    num_tokens, num_heads, _ = query_THD.shape
    if out is None:
        return query_THD.new_empty(num_tokens, num_heads, value_dim)
    return out.view(num_tokens, num_heads, value_dim)


def _attend_absorbed(
    query_THD: Tensor,
    cache: Tensor,
    batch: LatentRaggedBatch,
    out_THV: Tensor,
    *,
    heads: LatentHeads,
    scoring: Scoring,
) -> None:
    layout = LatentLayout(rank=heads.rank, rope_dim=heads.rope_dim, dtype=cache.dtype)
    are_all = len(batch.tokens_A) == len(query_THD)  # in order, as `tokens_A` is
    absorbed_AHW = heads.absorb(query_THD if are_all else query_THD[batch.tokens_A])
    result_AHR = absorbed_AHW.new_empty(*absorbed_AHW.shape[:2], layout.rank)
    Attending(
        query_THD=absorbed_AHW,
        cache=DeviceCache.of_latents(cache, layout, batch.table_SM),
        out_THV=result_AHR,
        compute=batch.compute,
        scoring=scoring,
    ).run(batch.alone)
    if are_all:
        heads.up_project(result_AHR, out_THV)
    else:
        out_THV[batch.tokens_A] = heads.up_project(result_AHR)


def _attend_plain(
    query_THD: Tensor,
    cache: Tensor,
    up_projected: UpProjected,
    out_THV: Tensor,
    *,
    compute: AttentionCompute,
    heads: LatentHeads,
    scoring: Scoring,
) -> None:
    rows_C = up_projected.rows_C
    rows_CW = cache[rows_C // BLOCK_TOKENS, rows_C % BLOCK_TOKENS].to(query_THD.dtype)
    up_projected_dim = heads.query_dim + heads.nope_dim + 2 * heads.value_dim
    head_bytes = len(rows_CW) * up_projected_dim * rows_CW.dtype.itemsize
    num_heads = query_THD.shape[1]
    at_once = max(1, GATHERED_BYTES // head_bytes)
    for first in range(0, num_heads, at_once):
        some = slice(first, min(first + at_once, num_heads))
        keys_ChD, values_ChV = heads.keys_and_values(rows_CW, some)
        sinks_H = scoring.sinks_H
        Attending(
            query_THD=query_THD[:, some],
            cache=DeviceCache.of_rows(keys_ChD, values_ChV, up_projected.starts_S1),
            out_THV=out_THV[:, some],
            compute=compute,
            scoring=scoring if sinks_H is None else replace(scoring, sinks_H=sinks_H[some]),
        ).run(up_projected.tiles)
