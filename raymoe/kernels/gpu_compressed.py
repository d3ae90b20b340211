"""Attention to last rows and compressed entries on a GPU; imported only where a kernel runs.

T tokens, S sequences, H heads, W width of a row, of an entry and of a query, R rows of a slot, M
rows of a tile: heads of one token. C rows or entries of a step, K entries that a token chose.
"""

from dataclasses import dataclass
from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.gpu_attention_batch import (
    COMPRESSED_FIELDS,
    AttentionCompute,
    CompressedTokens,
)
from raymoe.kernels.gpu_attention_kernels import LOG2_E, as_type
from raymoe.kernels.gpu_common import MINUS_INFINITY, TRITON_TYPES, Launch, kernel_constants
from raymoe.kernels.paged_kv import CompressedLayout
from raymoe.kernels.triton_support import power_of_two

FIELDS = tl.constexpr(COMPRESSED_FIELDS)


@dataclass(frozen=True, eq=False)
class KernelRows:
    """The layout of rows and entries, and the tile, as compile-time constants.

    Attributes:
        padded: Width of a row as a power of two.
        ratio: Tokens of an entry; 0 if there are none.
        block_entries: Entries of a block that has any.
        block_step: Every so many blocks of a sequence one has entries.
        num_chosen: Entries that a token may choose; 0 if it attends to all.
        slot_size: Elements from one slot to the next.
        scale: Factor of the scores, times log2(e).
        rows: Heads of a tile.
        positions: Rows or entries of a step.
        dot: Type of the products.
    """

    num_heads: tl.constexpr
    width: tl.constexpr
    padded: tl.constexpr
    window: tl.constexpr
    ratio: tl.constexpr
    block_entries: tl.constexpr
    block_step: tl.constexpr
    num_chosen: tl.constexpr
    slot_size: tl.constexpr
    scale: tl.constexpr
    rows: tl.constexpr
    positions: tl.constexpr
    dot: tl.constexpr


@triton.jit
def _add(
    query_MW: tl.tensor,
    rows_ptr: tl.tensor,
    places_C: tl.tensor,
    is_seen_C: tl.tensor,
    sum_MW: tl.tensor,
    total_M: tl.tensor,
    peak_M: tl.tensor,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to some rows, which are keys and values: sums of values and weights, base 2."""
    columns_W = tl.arange(0, K.padded)
    inside_CW = is_seen_C[:, None] & (columns_W < K.width)[None, :]
    rows_CW = tl.load(rows_ptr + places_C[:, None] + columns_W[None, :], mask=inside_CW, other=0)
    rows_CW = rows_CW.to(K.dot)
    scores_MC = tl.dot(query_MW, tl.trans(rows_CW), input_precision="ieee") * K.scale
    scores_MC = tl.where(is_seen_C[None, :], scores_MC, MINUS_INFINITY)
    next_M = tl.maximum(peak_M, tl.max(scores_MC, 1))
    base_M = tl.where(next_M == MINUS_INFINITY, 0.0, next_M)
    weights_MC = tl.exp2(scores_MC - base_M[:, None])
    factor_M = tl.exp2(peak_M - base_M)
    total_M = total_M * factor_M + tl.sum(weights_MC, 1)
    sum_MW = tl.dot(
        weights_MC.to(K.dot), rows_CW, sum_MW * factor_M[:, None], input_precision="ieee"
    )
    return sum_MW, total_M, next_M


@triton.jit
def _entries(
    table_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return where entries of a step begin, and whether there are any; chosen ones or all."""
    index_C = start + tl.arange(0, K.positions)
    is_seen_C = index_C < end
    if K.num_chosen > 0:
        index_C = tl.load(chosen_ptr + index_C, mask=is_seen_C, other=-1)
        is_seen_C = index_C >= 0
    column_C = index_C // K.block_entries * K.block_step + K.block_step - 1
    block_C = tl.load(table_ptr + column_C, mask=is_seen_C, other=0).to(tl.int64)
    return (block_C * K.block_entries + index_C % K.block_entries) * K.width, is_seen_C


@triton.jit
def _add_entries(
    query_MW: tl.tensor,
    entries_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    end: tl.tensor,
    sum_MW: tl.tensor,
    total_M: tl.tensor,
    peak_M: tl.tensor,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the first entries, or to those that the token chose."""
    for start in range(0, end, K.positions):
        places_C, is_seen_C = _entries(table_ptr, chosen_ptr, start, end, K)
        sum_MW, total_M, peak_M = _add(
            query_MW, entries_ptr, places_C, is_seen_C, sum_MW, total_M, peak_M, K
        )
    return sum_MW, total_M, peak_M


@triton.jit
def _factors(total_M: tl.tensor, peak_M: tl.tensor, sinks_M: tl.tensor) -> tl.tensor:
    """Return what sums of values are multiplied by: one over all weights, the sinks' included."""
    highest_M = tl.maximum(peak_M, sinks_M)
    factor_M = tl.exp2(peak_M - highest_M)
    return factor_M / (total_M * factor_M + tl.exp2(sinks_M - highest_M))


@triton.jit(do_not_specialize=["table_stride", "num_slots"])
def attend_compressed_kernel(
    query_ptr: tl.tensor,
    row_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_slots: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Attend from some heads of one token; the program ids are the token and its heads.

    First to rows [slots, R, W] before this step, then to the new ones [T, W], then to entries.
    `attend_launch` says the rest.
    """
    token, token_ptr = tl.program_id(0), tokens_ptr + tl.program_id(0) * FIELDS
    position, first = tl.load(token_ptr + 2), tl.load(token_ptr + 3)
    heads_M = tl.program_id(1) * K.rows + tl.arange(0, K.rows)
    columns_W = tl.arange(0, K.padded)
    inside_MW = (heads_M < K.num_heads)[:, None] & (columns_W < K.width)[None, :]
    places_M = (token.to(tl.int64) * K.num_heads + heads_M) * K.width
    query_MW = tl.load(
        query_ptr + places_M[:, None] + columns_W[None, :], mask=inside_MW, other=0
    ).to(K.dot)
    peak_M = tl.full([K.rows], MINUS_INFINITY, tl.float32)
    total_M = tl.full([K.rows], 0.0, tl.float32)
    sum_MW = tl.full([K.rows, K.padded], 0.0, tl.float32)
    begin = tl.maximum(position - K.window + 1, 0)
    slot = (num_slots + tl.load(token_ptr + 1)).to(tl.int64)
    for start in range(begin, first, K.positions):
        position_C = start + tl.arange(0, K.positions)
        places_C = position_C % K.window * K.width
        sum_MW, total_M, peak_M = _add(
            query_MW, slots_ptr + slot * K.slot_size, places_C, position_C < first, sum_MW,
            total_M, peak_M, K,
        )  # fmt: skip
    for start in range(tl.maximum(begin, first), position + 1, K.positions):
        position_C = start + tl.arange(0, K.positions)
        places_C = (token - position + position_C).to(tl.int64) * K.width
        sum_MW, total_M, peak_M = _add(
            query_MW, row_ptr, places_C, position_C <= position, sum_MW, total_M, peak_M, K
        )
    if K.ratio > 0:
        end = (position + 1) // K.ratio
        if K.num_chosen > 0:
            end = tl.minimum(end, K.num_chosen)
        own_ptr = table_ptr + tl.load(token_ptr).to(tl.int64) * table_stride
        own_chosen_ptr = chosen_ptr + token.to(tl.int64) * K.num_chosen
        sum_MW, total_M, peak_M = _add_entries(
            query_MW, entries_ptr, own_ptr, own_chosen_ptr, end, sum_MW, total_M, peak_M, K
        )
    sinks_M = tl.load(sinks_ptr + heads_M, mask=heads_M < K.num_heads, other=0) * LOG2_E
    factor_M = _factors(total_M, peak_M, sinks_M)
    out_MW = as_type(sum_MW * factor_M[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + places_M[:, None] + columns_W[None, :], out_MW, mask=inside_MW)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTile:
    rows: int
    positions: int
    warps: int
    stages: int


def compressed_tile(compute: AttentionCompute, num_heads: int, width: int) -> CompressedTile:
    """The tile for heads of such rows; sums of 64 heads of 512 take half of the registers."""
    max_rows = 32 if compute.has_small_shared_memory else 64
    rows = max(16, min(power_of_two(num_heads), max_rows))
    return CompressedTile(
        rows=rows,
        positions=16 if rows == 64 else 32,
        warps=8 if width > 128 and rows > 16 else 4,
        stages=2,
    )


def attend_launch(
    query_THW: Tensor,
    row_TW: Tensor,
    views: tuple[Tensor, Tensor],
    tokens: CompressedTokens,
    out_THW: Tensor,
    *,
    layout: CompressedLayout,
    scale: float,
    sinks_H: Tensor,
    chosen_TK: Tensor | None = None,
) -> Launch:
    """Attend as `compressed.append_and_attend_compressed` does, without rotating back.

    Args:
        query_THW: Contiguous.
        row_TW: New rows in the type of the cache, contiguous.
        views: Entries [N, E, W], those of this step included, and rows [slots, R, W] before it.
        out_THW: Contiguous.
        chosen_TK: int32, the entries that each token attends to, ascending, then -1; None for all.
    """
    num_tokens, num_heads, width = query_THW.shape
    entries_NEW, rows_MRW = views
    tile = compressed_tile(tokens.compute, num_heads, width)
    values = {
        "num_heads": num_heads,
        "width": width,
        "padded": max(16, power_of_two(width)),
        "window": layout.window,
        "ratio": layout.ratio or 0,
        "block_entries": max(1, layout.block_entries),
        "block_step": layout.block_step,
        "num_chosen": 0 if chosen_TK is None else chosen_TK.shape[1],
        "slot_size": rows_MRW.stride(0),
        "scale": scale * log2(e),
        "rows": tile.rows,
        "positions": tile.positions,
        "dot": TRITON_TYPES[tokens.compute.dot],
    }
    return Launch(
        kernel=attend_compressed_kernel,
        grid=(num_tokens, -(-num_heads // tile.rows)),
        arguments={
            "query_ptr": query_THW,
            "row_ptr": row_TW,
            "slots_ptr": rows_MRW,
            "entries_ptr": entries_NEW if len(entries_NEW) else rows_MRW,
            "tokens_ptr": tokens.tokens_TF,
            "table_ptr": tokens.table_SM,
            "chosen_ptr": tokens.tokens_TF if chosen_TK is None else chosen_TK,
            "sinks_ptr": sinks_H,
            "out_ptr": out_THW,
            "table_stride": tokens.table_SM.stride(0),
            "num_slots": len(rows_MRW),
        },
        constants={"K": kernel_constants(KernelRows, **values)},
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
