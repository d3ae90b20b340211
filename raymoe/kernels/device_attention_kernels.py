"""The kernels of attention on a GPU: attend over a cache as it lies, and merge parts.

Needs Triton: imported only where a kernel runs. One kernel attends for single tokens and for
neighbours, over whatever `device_attention_cache` reads. A program takes the rows of one tile (see
`device_attention_batch`) and some query heads of one KV head, and reads the context once, with the
softmax of what it has seen (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., FlashAttention,
arXiv 2205.14135). The context of a token that comes alone is cut at fixed positions, each part has
its program, and a second kernel merges the parts (Dao et al., Flash-Decoding, 2023). Scores and
sums are float32.

M rows: tokens times heads. C positions of a step. P planes, U units and V as in
`device_attention_cache`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from raymoe.kernels.device_attention_batch import TILE_FIELDS as _TILE_FIELDS
from raymoe.kernels.device_attention_cache import (
    BLOCK_TOKENS,
    as_type,
    load_keys,
    load_values,
    places_of,
    plane_of,
)

TILE_FIELDS = tl.constexpr(_TILE_FIELDS)
HIDDEN = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class KernelQueries:
    """Who attends to what, as kernels read it: compile-time constants.

    Attributes:
        group: Query heads of a KV head.
        query_head: Elements from one head of a query to the next.
        out_head: From one head of a result to the next.
        scale: Factor of the scores, times the logarithm of e to the base 2.
        window: Positions that a token sees; 0 for all.
        has_sinks: Whether each head has a score without a value.
        split: Positions of a part of the context; 0 where it is not cut.
        heads: Query heads of a tile.
        rows: M.
        positions: C.
    """

    group: tl.constexpr
    query_head: tl.constexpr
    out_head: tl.constexpr
    scale: tl.constexpr
    window: tl.constexpr
    has_sinks: tl.constexpr
    split: tl.constexpr
    heads: tl.constexpr
    rows: tl.constexpr
    positions: tl.constexpr


@triton.jit
def _load_queries(
    rows_ptr: tl.tensor,
    is_row_M: tl.tensor,
    STEP: tl.constexpr,
    PLANE: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """One plane of one step of the queries, [M, U]."""
    columns_U = (STEP * C.step + tl.arange(0, C.step)) * C.pair + PLANE
    inside_MU = is_row_M[:, None] & (columns_U < C.key_dim)[None, :]
    return tl.load(rows_ptr[:, None] + columns_U[None, :], mask=inside_MU, other=0).to(C.dot)


@triton.jit
def _weigh(
    sum_MV: tl.tensor,
    weights_MC: tl.tensor,
    values_UV: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> tl.tensor:
    """Add the weighted values of a step to the sums."""
    if C.pair == 1:
        weights = weights_MC.to(C.dot)
        sum_MV = tl.dot(weights, values_UV.to(C.dot), sum_MV, input_precision="ieee")
    else:
        pairs_MU2 = tl.reshape(weights_MC.to(C.dot), [Q.rows, Q.positions // 2, 2])
        even_MU, odd_MU = tl.split(pairs_MU2)
        even_UV = plane_of(values_UV, 0, C.dot)
        sum_MV = tl.dot(even_MU, even_UV, sum_MV, input_precision="ieee")
        # The other half of the last word may never have been written.
        is_odd_U = start + tl.arange(0, Q.positions // 2) * 2 + 1 < end
        odd_UV = tl.where(is_odd_U[:, None], plane_of(values_UV, 1, C.dot), 0.0)
        sum_MV = tl.dot(odd_MU, odd_UV.to(C.dot), sum_MV, input_precision="ieee")
    return sum_MV


@triton.jit
def _context(
    position: tl.tensor, count: tl.tensor, part: tl.tensor, Q: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first position that the tokens of a tile see in a part, and the one behind the last.

    Parts are counted from the first that the tile sees anything of.
    """
    begin = tl.maximum(position - Q.window + 1, 0) if Q.window > 0 else position * 0
    end = position + count
    if Q.split > 0:
        first = (begin // Q.split + part) * Q.split
        begin = tl.maximum(begin, first)
        end = tl.minimum(end, first + Q.split)
    return begin, end


@triton.jit
def _finished(
    sum_MV: tl.tensor,
    total_M: tl.tensor,
    peak_M: tl.tensor,
    sinks_ptr: tl.tensor,
    heads_M: tl.tensor,
    is_row_M: tl.tensor,
    Q: tl.constexpr,
) -> tl.tensor:
    """The sums divided by those of the weights, with the sink of each head; scores in base 2."""
    if Q.has_sinks:
        sinks_M = tl.load(sinks_ptr + heads_M, mask=is_row_M, other=0) * LOG2_E
        highest_M = tl.maximum(peak_M, sinks_M)
        factor_M = tl.exp2(peak_M - highest_M)
        total_M = total_M * factor_M + tl.exp2(sinks_M - highest_M)
        sum_MV = sum_MV * factor_M[:, None]
    # Rows behind the last token have seen nothing.
    return sum_MV / tl.where(total_M == 0, 1.0, total_M)[:, None]


@triton.jit
def _load_all_queries(rows_ptr: tl.tensor, is_row_M: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """All planes of all steps."""
    queries: tl.tuple = ()
    for step in tl.static_range(C.num_steps):
        for plane in tl.static_range(C.pair):
            queries = queries + (_load_queries(rows_ptr, is_row_M, step, plane, C),)  # noqa: RUF005
    return queries


@triton.jit
def _scores(
    queries: tl.tuple,
    key_ptr: tl.tensor,
    places_C: tl.tensor,
    is_there_C: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> tl.tensor:
    """Products of all rows with the keys of a step, [M, C]."""
    scores_MC = tl.full([Q.rows, Q.positions], 0.0, tl.float32)
    for step in tl.static_range(C.num_steps):
        keys_UC = load_keys(key_ptr, places_C, is_there_C, step, C)
        for plane in tl.static_range(C.pair):
            if C.pair == 1:
                key_UC = keys_UC.to(C.dot)
            else:
                key_UC = plane_of(keys_UC, plane, C.dot)
            query_MU = queries[step * C.pair + plane]
            scores_MC = tl.dot(query_MU, key_UC, scores_MC, input_precision="ieee")
    return scores_MC


@triton.jit
def _attended(
    queries: tl.tuple,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position_M: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Sums of weighted values [M, V], of weights [M], and the largest score [M], in base 2."""
    peak_M = tl.full([Q.rows], HIDDEN, tl.float32)
    total_M = tl.full([Q.rows], 0.0, tl.float32)
    sum_MV = tl.full([Q.rows, C.padded_values], 0.0, tl.float32)
    # Steps begin at multiples of their size, wherever the context begins.
    for start in range(begin // Q.positions * Q.positions, end, Q.positions):
        position_C = start + tl.arange(0, Q.positions)
        is_read_C = position_C < end
        if C.is_blocked:
            # All of a block: so a load of several keys has one mask. Their scores are not used.
            is_read_C = position_C // BLOCK_TOKENS * BLOCK_TOKENS < end
        places_C = places_of(table_ptr, position_C, is_read_C, kv_head, C.key_row, C.key_head, C)
        if C.is_blocked:
            places_C += position_C % BLOCK_TOKENS
        scores_MC = _scores(queries, key_ptr, places_C, is_read_C, C, Q)
        is_seen_MC = (position_C[None, :] <= position_M[:, None]) & (position_C < end)[None, :]
        if Q.window > 0:
            is_seen_MC = is_seen_MC & (position_C[None, :] > position_M[:, None] - Q.window)
        scores_MC = tl.where(is_seen_MC, scores_MC * Q.scale, HIDDEN)
        next_M = tl.maximum(peak_M, tl.max(scores_MC, 1))
        # A row that has seen nothing so far stays as it is.
        base_M = tl.where(next_M == HIDDEN, 0.0, next_M)
        weights_MC = tl.exp2(scores_MC - base_M[:, None])
        factor_M = tl.exp2(peak_M - base_M)
        total_M = total_M * factor_M + tl.sum(weights_MC, 1)
        values_UV = load_values(value_ptr, table_ptr, start, end, kv_head, C, Q.positions)
        sum_MV = _weigh(sum_MV * factor_M[:, None], weights_MC, values_UV, start, end, C, Q)
        peak_M = next_M
    return sum_MV, total_M, peak_M


@triton.jit
def _rows(count: tl.tensor, Q: tl.constexpr) -> tl.tuple:
    """KV head, query head and token in the tile of each row, and whether it is a row at all."""
    head_tiles: tl.constexpr = (Q.group + Q.heads - 1) // Q.heads
    kv_head, rows_M = tl.program_id(1) // head_tiles, tl.arange(0, Q.rows)
    within_M = tl.program_id(1) % head_tiles * Q.heads + rows_M % Q.heads
    token_M = rows_M // Q.heads
    is_row_M = (token_M < count) & (within_M < Q.group)
    return kv_head, kv_head * Q.group + within_M, token_M, is_row_M


@triton.jit
def _parts(heads_M: tl.tensor, C: tl.constexpr, Q: tl.constexpr) -> tl.tensor:
    """Numbers of the parts that this program computes, one for each head."""
    row_M = tl.program_id(0).to(tl.int64) * (Q.group * C.num_kv_heads) + heads_M
    return row_M * tl.num_programs(2) + tl.program_id(2)


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    table_stride: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Attention of the rows of one tile over their context or a part of it.

    The program ids are the tile, the KV head and some of its query heads, and the part.

    Args:
        query_ptr: [T, H, D].
        key_ptr: As `C` says, in units.
        value_ptr: The same.
        table_ptr: int32 [S, M].
        tiles_ptr: int32 [N, 4].
        sinks_ptr: float32 [H].
        out_ptr: [T, H, V]; of parts float32 [N, H, parts, V], not divided yet.
        totals_ptr: Of parts, float32 [N, H, parts, 2]: the sum of the weights, the largest score.
        query_stride: From one token to the next.
        out_stride: From one token to the next.
        table_stride: From one sequence to the next.
        C: `KernelCache`.
        Q: `KernelQueries`.
    """
    tile_ptr = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    count, position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    begin, end = _context(position, count, tl.program_id(2), Q)
    if begin >= end:
        return
    kv_head, heads_M, token_M, is_row_M = _rows(count, Q)
    rows_of_pass_M = (tl.load(tile_ptr + 1) + token_M).to(tl.int64)
    query_rows_ptr = query_ptr + rows_of_pass_M * query_stride + heads_M * Q.query_head
    queries = _load_all_queries(query_rows_ptr, is_row_M, C)
    row_ptr = table_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride
    sum_MV, total_M, peak_M = _attended(
        queries, key_ptr, value_ptr, row_ptr, position + token_M, kv_head, begin, end, C, Q
    )
    columns_V = tl.arange(0, C.padded_values)
    inside_MV = is_row_M[:, None] & (columns_V < C.value_dim)[None, :]
    if Q.split == 0:
        out_MV = _finished(sum_MV, total_M, peak_M, sinks_ptr, heads_M, is_row_M, Q)
        out_M = rows_of_pass_M * out_stride + heads_M * Q.out_head
        out_MV = as_type(out_MV, out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_M[:, None] + columns_V[None, :], out_MV, mask=inside_MV)
    else:
        part_M = _parts(heads_M, C, Q)
        tl.store(totals_ptr + part_M * 2, total_M, mask=is_row_M)
        tl.store(totals_ptr + part_M * 2 + 1, peak_M, mask=is_row_M)
        part_MV = part_M[:, None] * C.value_dim + columns_V[None, :]
        tl.store(out_ptr + part_MV, sum_MV, mask=inside_MV)


@triton.jit(do_not_specialize=["most_parts"])
def merge_kernel(
    parts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    most_parts: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """One token and query head: its parts in the order of the context, merged.

    Args:
        parts_ptr: float32 [N, H, parts, V], as `attend_kernel` leaves them.
        totals_ptr: float32 [N, H, parts, 2].
        tiles_ptr: int32 [N, 4].
        sinks_ptr: float32 [H].
        out_ptr: [T, H, V].
        out_stride: From one token to the next.
        most_parts: Of any token.
        C: `KernelCache`.
        Q: `KernelQueries`, with a size of the parts.
    """
    tile_ptr = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    token, position = tl.load(tile_ptr + 1).to(tl.int64), tl.load(tile_ptr + 3)
    heads_M, columns_V = tl.program_id(1) + tl.arange(0, 1), tl.arange(0, C.padded_values)
    is_row_M, is_column_V = heads_M >= 0, columns_V < C.value_dim
    row_M = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + heads_M
    begin = tl.maximum(position - Q.window + 1, 0) if Q.window > 0 else position * 0
    num_parts = position // Q.split - begin // Q.split + 1
    peak_M = tl.full([1], HIDDEN, tl.float32)
    total_M = tl.full([1], 0.0, tl.float32)
    sum_MV = tl.full([1, C.padded_values], 0.0, tl.float32)
    for part in range(num_parts):
        part_M = row_M * most_parts + part
        peak_of_part_M = tl.load(totals_ptr + part_M * 2 + 1)
        part_ptr = parts_ptr + part_M[:, None] * C.value_dim + columns_V[None, :]
        part_MV = tl.load(part_ptr, mask=is_column_V[None, :], other=0)
        next_M = tl.maximum(peak_M, peak_of_part_M)
        factor_M, of_part_M = tl.exp2(peak_M - next_M), tl.exp2(peak_of_part_M - next_M)
        total_M = total_M * factor_M + tl.load(totals_ptr + part_M * 2) * of_part_M
        sum_MV = sum_MV * factor_M[:, None] + part_MV * of_part_M[:, None]
        peak_M = next_M
    out_MV = _finished(sum_MV, total_M, peak_M, sinks_ptr, heads_M, is_row_M, Q)
    out_M = token * out_stride + heads_M * Q.out_head
    out_MV = as_type(out_MV, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_M[:, None] + columns_V[None, :], out_MV, mask=is_column_V[None, :])
