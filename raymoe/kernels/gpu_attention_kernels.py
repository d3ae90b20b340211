"""Triton kernels of attention; imported only where a kernel runs.

Elements stored in pairs (`paged_kv`) are read as words of two and multiplied in P *planes*: the
first elements of all pairs, then the second ones.

C positions of a step. U units: words or elements. V dimensions of a value, padded to a power of
two. T tokens, G KV heads, N blocks of B tokens, D dimensions of a key.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from raymoe.kernels.gpu_attention_batch import TILE_FIELDS as _TILE_FIELDS
from raymoe.kernels.gpu_common import MINUS_INFINITY, rounded
from raymoe.kernels.paged_kv import BLOCK_TOKENS as _BLOCK_TOKENS
from raymoe.kernels.paged_kv import VALUE_COLUMNS as _VALUE_COLUMNS

BLOCK_TOKENS = tl.constexpr(_BLOCK_TOKENS)
VALUE_COLUMNS = tl.constexpr(_VALUE_COLUMNS)


@dataclass(frozen=True, eq=False)
class KernelCache:
    """The layout of keys and values as compile-time constants.

    Attributes:
        is_blocked: Whether the layout is that of `paged_kv`; otherwise keys and values are rows.
        is_paged: Whether a block table locates positions; otherwise a table gives the first row of
            each sequence.
        pair: Elements of a word (P).
        key_dim: Dimensions of queries and keys.
        key_row: Stride between the keys of two positions in a paged cache, in elements. Rows that
            are not paged have `row_heads` heads, an argument of the kernel: how many are made at
            once depends on the step.
        key_head: Stride between KV heads.
        block_tokens: Rows that lie one after another for each entry of the block table. If they are
            fewer than a block of `paged_kv` has, an entry counts runs of so many rows in blocks.
        block_size: Units from one block of a paged cache to the next.
        dot: Type of the products.
        step: Units of queries and keys in one product.
    """

    is_blocked: tl.constexpr
    is_paged: tl.constexpr
    pair: tl.constexpr
    key_dim: tl.constexpr
    value_dim: tl.constexpr
    padded_values: tl.constexpr
    num_kv_heads: tl.constexpr
    key_row: tl.constexpr
    key_head: tl.constexpr
    value_row: tl.constexpr
    value_head: tl.constexpr
    block_tokens: tl.constexpr
    block_size: tl.constexpr
    dot: tl.constexpr
    step: tl.constexpr
    num_steps: tl.constexpr


@triton.jit
def plane_of(word: tl.tensor, PLANE: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Return one bfloat16 of each int32 word of two, as type `DOT`."""
    if tl.bfloat16 == DOT:
        half = (word >> (16 * PLANE)).to(tl.int16)
        result = half.to(tl.bfloat16, bitcast=True)
    else:
        bits = word << 16 if PLANE == 0 else word & -65536
        result = bits.to(tl.float32, bitcast=True).to(DOT)
    return result


@triton.jit
def _value_places(columns: tl.tensor, offset: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Return offsets of values in a block of `paged_kv`, in units from its first value.

    `offset` is that of the token in the block, in units.
    """
    tile = columns // VALUE_COLUMNS * VALUE_COLUMNS
    # Triton 3.8's interpreter takes no difference whose first part is a constant.
    width = tl.minimum(VALUE_COLUMNS, -tile + C.value_dim)
    return tile * (BLOCK_TOKENS // C.pair) + columns - tile + offset * width


@triton.jit
def as_type(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    if tl.bfloat16 == TYPE and values.dtype == tl.float32:
        values = rounded(values, tl.bfloat16, tl.float32)
    return values.to(TYPE)


@triton.jit
def append_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the key and value of one token and KV head to their block of `paged_kv`.

    Keys [T, G, D] and values [T, G, V] are contiguous within a token; their strides are between
    tokens. `cache_ptr` is [N, G, B * (D + V)]; its blocks may be
    strided. `COLUMNS` is a power of two of at least D and V.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns_D = tl.arange(0, COLUMNS)
    is_column_D = columns_D < C.key_dim
    slot = tl.load(slots_ptr + token)
    offset = slot % BLOCK_TOKENS
    size: tl.constexpr = BLOCK_TOKENS * (C.key_dim + C.value_dim)
    base = slot // BLOCK_TOKENS * (C.block_size * C.pair) + head * size
    key_D = tl.load(key_ptr + token * key_stride + head * C.key_dim + columns_D, mask=is_column_D)
    pair = columns_D // C.pair
    keys_D = base + pair * (BLOCK_TOKENS * C.pair) + offset * C.pair + columns_D % C.pair
    tl.store(cache_ptr + keys_D, as_type(key_D, cache_ptr.dtype.element_ty), mask=is_column_D)
    is_column_V = columns_D < C.value_dim
    value_V = tl.load(
        value_ptr + token * value_stride + head * C.value_dim + columns_D, mask=is_column_V
    )
    units_V = _value_places(columns_D, offset // C.pair, C)
    values_V = base + BLOCK_TOKENS * C.key_dim + units_V * C.pair + offset % C.pair
    tl.store(cache_ptr + values_V, as_type(value_V, cache_ptr.dtype.element_ty), mask=is_column_V)


@triton.jit
def load_keys(
    key_ptr: tl.tensor,
    places_C: tl.tensor,
    is_there_C: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Load one step of the keys, in units: [U, C]."""
    units_U = STEP * C.step + tl.arange(0, C.step)
    is_unit_U = units_U < C.key_dim // C.pair
    if C.is_blocked:
        places_UC = places_C[None, :] + (units_U * BLOCK_TOKENS)[:, None]
        keys_UC = tl.load(
            key_ptr + places_UC, mask=is_there_C[None, :] & is_unit_U[:, None], other=0
        )
    else:
        places_CU = places_C[:, None] + units_U[None, :]
        keys_CU = tl.load(
            key_ptr + places_CU, mask=is_there_C[:, None] & is_unit_U[None, :], other=0
        )
        keys_UC = tl.trans(keys_CU)
    return keys_UC


@triton.jit
def places_of(
    table_ptr: tl.tensor,
    positions: tl.tensor,
    is_there: tl.tensor,
    kv_head: tl.tensor,
    row_heads: tl.tensor,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Return where the rows of some positions begin, in units of one KV head.

    In a blocked cache, return where the block of each position begins.
    """
    if C.is_paged:
        blocks = tl.load(table_ptr + positions // C.block_tokens, mask=is_there, other=0)
        blocks = blocks.to(tl.int64)
        if C.is_blocked:
            size: tl.constexpr = BLOCK_TOKENS * (C.key_dim + C.value_dim) // C.pair
            runs: tl.constexpr = BLOCK_TOKENS // C.block_tokens
            places = blocks // runs * C.block_size + kv_head * size
        else:
            places = blocks * C.block_size + positions % C.block_tokens * ROW + kv_head * HEAD
    else:
        first = tl.load(table_ptr).to(tl.int64)
        places = (first + positions) * (row_heads * HEAD) + kv_head * HEAD
    return places


@triton.jit
def offsets_of(
    table_ptr: tl.tensor, positions: tl.tensor, is_there: tl.tensor, C: tl.constexpr
) -> tl.tensor:
    """Return where some positions of a blocked cache are in their blocks, in tokens."""
    offsets = positions % C.block_tokens
    if C.block_tokens < BLOCK_TOKENS:
        runs: tl.constexpr = BLOCK_TOKENS // C.block_tokens
        entries = tl.load(table_ptr + positions // C.block_tokens, mask=is_there, other=0)
        offsets += entries % runs * C.block_tokens
    return offsets


@triton.jit
def load_values(
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    row_heads: tl.tensor,
    C: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> tl.tensor:
    """Load the values of the positions of a step, in units: [C / P, V]."""
    first_U = start + tl.arange(0, POSITIONS // C.pair) * C.pair
    columns_V = tl.arange(0, C.padded_values)
    is_there_U = first_U < end
    places_U = places_of(
        table_ptr, first_U, is_there_U, kv_head, row_heads, C.value_row, C.value_head, C
    )
    if C.is_blocked:
        offset_U1 = (offsets_of(table_ptr, first_U, is_there_U, C) // C.pair)[:, None]
        within_UV = _value_places(columns_V[None, :], offset_U1, C)
        places_UV = places_U[:, None] + BLOCK_TOKENS * C.key_dim // C.pair + within_UV
    else:
        places_UV = places_U[:, None] + columns_V[None, :]
    inside_UV = is_there_U[:, None] & (columns_V < C.value_dim)[None, :]
    return tl.load(value_ptr + places_UV, mask=inside_UV, other=0)


TILE_FIELDS = tl.constexpr(_TILE_FIELDS)
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, eq=False)
class KernelQueries:
    """Queries, outputs and masks as compile-time constants.

    Attributes:
        group: Query heads of a KV head.
        query_head: Stride between the heads of a query, in elements.
        out_head: Stride between the heads of a result.
        scale: Factor of the scores, times log2(e).
        window: Positions that a token sees; 0 for all.
        has_sinks: Whether each head has a score without a value.
        split: Positions of a part of the context; 0 if the context is not split.
        heads: Query heads of a tile.
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
    """Load one plane of one step of the queries, [M, U]."""
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
    if C.pair == 1:
        weights = weights_MC.to(C.dot)
        sum_MV = tl.dot(weights, values_UV.to(C.dot), sum_MV, input_precision="ieee")
    else:
        pairs_MU2 = tl.reshape(weights_MC.to(C.dot), [Q.rows, Q.positions // 2, 2])
        even_MU, odd_MU = tl.split(pairs_MU2)
        even_UV = plane_of(values_UV, 0, C.dot)
        sum_MV = tl.dot(even_MU, even_UV, sum_MV, input_precision="ieee")
        # The second half of the last word may never have been written.
        is_odd_U = start + tl.arange(0, Q.positions // 2) * 2 + 1 < end
        odd_UV = tl.where(is_odd_U[:, None], plane_of(values_UV, 1, C.dot), 0.0)
        sum_MV = tl.dot(odd_MU, odd_UV.to(C.dot), sum_MV, input_precision="ieee")
    return sum_MV


@triton.jit
def _context(
    position: tl.tensor, count: tl.tensor, part: tl.tensor, Q: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the range of positions that the tokens of a tile see in a part; the end is exclusive.

    Part 0 is the first part of which the tile sees a position.
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
    """Divide the sums by the total weights, the sink of each head included; scores are base 2."""
    if Q.has_sinks:
        sinks_M = tl.load(sinks_ptr + heads_M, mask=is_row_M, other=0) * LOG2_E
        highest_M = tl.maximum(peak_M, sinks_M)
        factor_M = tl.exp2(peak_M - highest_M)
        total_M = total_M * factor_M + tl.exp2(sinks_M - highest_M)
        sum_MV = sum_MV * factor_M[:, None]
    return sum_MV / tl.where(total_M == 0, 1.0, total_M)[:, None]


@triton.jit
def _load_all_queries(rows_ptr: tl.tensor, is_row_M: tl.tensor, C: tl.constexpr) -> tl.tuple:
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
    """Compute the scores of all rows for the keys of a step, [M, C]."""
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
    row_heads: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return sums of weighted values [M, V], of weights [M], and the largest scores [M], base 2."""
    peak_M = tl.full([Q.rows], MINUS_INFINITY, tl.float32)
    total_M = tl.full([Q.rows], 0.0, tl.float32)
    sum_MV = tl.full([Q.rows, C.padded_values], 0.0, tl.float32)
    # Steps begin at multiples of their size, wherever the context begins.
    for start in range(begin // Q.positions * Q.positions, end, Q.positions):
        position_C = start + tl.arange(0, Q.positions)
        is_read_C = position_C < end
        if C.is_blocked:
            # Whole blocks are loaded, so that a load of several keys has one mask; the scores of
            # positions beyond the end are not used.
            is_read_C = position_C // BLOCK_TOKENS * BLOCK_TOKENS < end
        places_C = places_of(
            table_ptr, position_C, is_read_C, kv_head, row_heads, C.key_row, C.key_head, C
        )
        if C.is_blocked:
            places_C += offsets_of(table_ptr, position_C, is_read_C, C)
        scores_MC = _scores(queries, key_ptr, places_C, is_read_C, C, Q)
        is_seen_MC = (position_C[None, :] <= position_M[:, None]) & (position_C < end)[None, :]
        if Q.window > 0:
            is_seen_MC = is_seen_MC & (position_C[None, :] > position_M[:, None] - Q.window)
        scores_MC = tl.where(is_seen_MC, scores_MC * Q.scale, MINUS_INFINITY)
        next_M = tl.maximum(peak_M, tl.max(scores_MC, 1))
        # Rows that have seen no position yet stay unchanged.
        base_M = tl.where(next_M == MINUS_INFINITY, 0.0, next_M)
        weights_MC = tl.exp2(scores_MC - base_M[:, None])
        factor_M = tl.exp2(peak_M - base_M)
        total_M = total_M * factor_M + tl.sum(weights_MC, 1)
        values_UV = load_values(
            value_ptr, table_ptr, start, end, kv_head, row_heads, C, Q.positions
        )
        sum_MV = _weigh(sum_MV * factor_M[:, None], weights_MC, values_UV, start, end, C, Q)
        peak_M = next_M
    return sum_MV, total_M, peak_M


@triton.jit
def _rows(count: tl.tensor, Q: tl.constexpr) -> tl.tuple:
    """Return KV head, query head, token in the tile, and validity of each row."""
    head_tiles: tl.constexpr = (Q.group + Q.heads - 1) // Q.heads
    kv_head, rows_M = tl.program_id(1) // head_tiles, tl.arange(0, Q.rows)
    within_M = tl.program_id(1) % head_tiles * Q.heads + rows_M % Q.heads
    token_M = rows_M // Q.heads
    is_row_M = (token_M < count) & (within_M < Q.group)
    return kv_head, kv_head * Q.group + within_M, token_M, is_row_M


@triton.jit
def _parts(heads_M: tl.tensor, C: tl.constexpr, Q: tl.constexpr) -> tl.tensor:
    """Return the indices of the parts that this program computes, one per head."""
    row_M = tl.program_id(0).to(tl.int64) * (Q.group * C.num_kv_heads) + heads_M
    return row_M * tl.num_programs(2) + tl.program_id(2)


@triton.jit(do_not_specialize=["table_stride", "row_heads"])
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
    row_heads: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Attend from the rows of one tile to their context or a part of it.

    The program ids are the tile, the KV head with some of its query heads, and the part. Strides
    are between tokens, and between the sequences of the table.

    Args:
        key_ptr: In units; `C` describes the layout.
        out_ptr: [T, H, V]; for parts float32 [N, H, parts, V], not divided yet.
        totals_ptr: For parts, float32 [N, H, parts, 2]: the sum of the weights, the largest score.
    """
    tile_ptr = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    count, position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    begin, end = _context(position, count, tl.program_id(2), Q)
    if begin >= end:
        return
    kv_head, heads_M, token_M, is_row_M = _rows(count, Q)
    rows_of_step_M = (tl.load(tile_ptr + 1) + token_M).to(tl.int64)
    query_rows_ptr = query_ptr + rows_of_step_M * query_stride + heads_M * Q.query_head
    queries = _load_all_queries(query_rows_ptr, is_row_M, C)
    row_ptr = table_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride
    sum_MV, total_M, peak_M = _attended(
        queries, key_ptr, value_ptr, row_ptr, position + token_M, kv_head, row_heads, begin, end,
        C, Q,
    )  # fmt: skip
    columns_V = tl.arange(0, C.padded_values)
    inside_MV = is_row_M[:, None] & (columns_V < C.value_dim)[None, :]
    if Q.split == 0:
        out_MV = _finished(sum_MV, total_M, peak_M, sinks_ptr, heads_M, is_row_M, Q)
        out_M = rows_of_step_M * out_stride + heads_M * Q.out_head
        out_MV = as_type(out_MV, out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_M[:, None] + columns_V[None, :], out_MV, mask=inside_MV)
    else:
        part_M = _parts(heads_M, C, Q)
        tl.store(totals_ptr + part_M * 2, total_M, mask=is_row_M)
        tl.store(totals_ptr + part_M * 2 + 1, peak_M, mask=is_row_M)
        part_MV = part_M[:, None] * C.value_dim + columns_V[None, :]
        tl.store(out_ptr + part_MV, sum_MV, mask=inside_MV)


@triton.jit(do_not_specialize=["max_parts"])
def merge_kernel(
    parts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_stride: tl.tensor,
    max_parts: tl.tensor,
    C: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Merge the parts of one token and query head in the order of the context.

    `parts_ptr` [N, H, parts, V] and `totals_ptr` are what `attend_kernel` writes.
    """
    tile_ptr = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    token, position = tl.load(tile_ptr + 1).to(tl.int64), tl.load(tile_ptr + 3)
    heads_M, columns_V = tl.program_id(1) + tl.arange(0, 1), tl.arange(0, C.padded_values)
    is_row_M, is_column_V = heads_M >= 0, columns_V < C.value_dim
    row_M = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + heads_M
    begin = tl.maximum(position - Q.window + 1, 0) if Q.window > 0 else position * 0
    num_parts = position // Q.split - begin // Q.split + 1
    peak_M = tl.full([1], MINUS_INFINITY, tl.float32)
    total_M = tl.full([1], 0.0, tl.float32)
    sum_MV = tl.full([1, C.padded_values], 0.0, tl.float32)
    for part in range(num_parts):
        part_M = row_M * max_parts + part
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
