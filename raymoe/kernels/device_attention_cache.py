"""How keys and values lie on a GPU, for our attention kernels: read some, append some.

Needs Triton: imported only where a kernel runs. Elements that lie in pairs (`paged_kv`) are read as
words of two and multiplied in P *planes*: the first elements of all pairs, then the second.

C positions of a step. U units: words or elements. V dimensions of a value, padded to a power of
two. T tokens, G KV heads, N blocks of B tokens, D head dimension.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from raymoe.kernels.device_experts_decode import rounded
from raymoe.kernels.paged_kv import BLOCK_TOKENS as _BLOCK_TOKENS
from raymoe.kernels.paged_kv import VALUE_COLUMNS as _VALUE_COLUMNS

BLOCK_TOKENS = tl.constexpr(_BLOCK_TOKENS)
VALUE_COLUMNS = tl.constexpr(_VALUE_COLUMNS)


@dataclass(frozen=True)
class KernelCache:
    """How keys and values lie, as kernels read it: compile-time constants.

    Attributes:
        is_blocked: Whether the layout is that of `paged_kv`; otherwise keys and values are rows.
        is_paged: Whether a table gives the block of each position; otherwise it gives the first row
            of each sequence.
        pair: Elements of a word (P).
        key_dim: Dimensions of queries and keys.
        value_dim: Dimensions of a value.
        padded_values: V.
        num_kv_heads: How many there are.
        key_row: Elements from the key of a position to that of the next; rows only.
        key_head: From one KV head to the next.
        value_row: As `key_row`.
        value_head: As `key_head`.
        dot: Type that everything is multiplied in.
        step: Units of queries and keys in one product.
        num_steps: Products.
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
    dot: tl.constexpr
    step: tl.constexpr
    num_steps: tl.constexpr


@triton.jit
def plane_of(word: tl.tensor, PLANE: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """One bfloat16 of each int32 word of two, as type `DOT`."""
    if DOT == tl.bfloat16:
        half = (word >> (16 * PLANE)).to(tl.int16)
        result = half.to(tl.bfloat16, bitcast=True)
    else:
        bits = word << 16 if PLANE == 0 else word & -65536
        result = bits.to(tl.float32, bitcast=True).to(DOT)
    return result


@triton.jit
def _value_places(columns: tl.tensor, offset: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Places of values in a block of `paged_kv`, in units from its first value.

    `offset` is that of the token in the block, in units.
    """
    tile = columns // VALUE_COLUMNS * VALUE_COLUMNS
    width = tl.minimum(VALUE_COLUMNS, C.value_dim - tile)
    return tile * (BLOCK_TOKENS // C.pair) + columns - tile + offset * width


@triton.jit
def as_type(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Values rounded to a type."""
    if TYPE == tl.bfloat16 and values.dtype == tl.float32:
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
    """Keys and values of one token and KV head to their block of `paged_kv`.

    Args:
        key_ptr: [T, G, D], contiguous within a token.
        value_ptr: [T, G, D], contiguous within a token.
        slots_ptr: int64 [T].
        cache_ptr: [N, G, 2, B * D].
        key_stride: From one token to the next.
        value_stride: From one token to the next.
        C: `KernelCache`.
        COLUMNS: At least D, a power of two.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns_D = tl.arange(0, COLUMNS)
    is_column_D = columns_D < C.key_dim
    slot = tl.load(slots_ptr + token)
    offset = slot % BLOCK_TOKENS
    base = (slot // BLOCK_TOKENS * C.num_kv_heads + head) * (2 * BLOCK_TOKENS * C.key_dim)
    key_D = tl.load(key_ptr + token * key_stride + head * C.key_dim + columns_D, mask=is_column_D)
    pair = columns_D // C.pair
    keys_D = base + pair * (BLOCK_TOKENS * C.pair) + offset * C.pair + columns_D % C.pair
    tl.store(cache_ptr + keys_D, as_type(key_D, cache_ptr.dtype.element_ty), mask=is_column_D)
    value_D = tl.load(
        value_ptr + token * value_stride + head * C.key_dim + columns_D, mask=is_column_D
    )
    units_D = _value_places(columns_D, offset // C.pair, C)
    values_D = base + BLOCK_TOKENS * C.key_dim + units_D * C.pair + offset % C.pair
    tl.store(cache_ptr + values_D, as_type(value_D, cache_ptr.dtype.element_ty), mask=is_column_D)


@triton.jit
def load_keys(
    key_ptr: tl.tensor,
    places_C: tl.tensor,
    is_there_C: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """One step of the keys, in units: [U, C]."""
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
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Where the rows of some positions begin; in blocks, where the block of each begins.

    In units, of one KV head.
    """
    if C.is_paged:
        blocks = tl.load(table_ptr + positions // BLOCK_TOKENS, mask=is_there, other=0)
        blocks = blocks.to(tl.int64)
        if C.is_blocked:
            size: tl.constexpr = 2 * BLOCK_TOKENS * C.key_dim // C.pair
            places = (blocks * C.num_kv_heads + kv_head) * size
        else:
            places = (blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS) * ROW + kv_head * HEAD
    else:
        first = tl.load(table_ptr).to(tl.int64)
        places = (first + positions) * ROW + kv_head * HEAD
    return places


@triton.jit
def load_values(
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    C: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> tl.tensor:
    """Values of the positions of a step, in units: [C / P, V]."""
    first_U = start + tl.arange(0, POSITIONS // C.pair) * C.pair
    columns_V = tl.arange(0, C.padded_values)
    is_there_U = first_U < end
    places_U = places_of(table_ptr, first_U, is_there_U, kv_head, C.value_row, C.value_head, C)
    if C.is_blocked:
        offset_U1 = (first_U % BLOCK_TOKENS // C.pair)[:, None]
        within_UV = _value_places(columns_V[None, :], offset_U1, C)
        places_UV = places_U[:, None] + BLOCK_TOKENS * C.key_dim // C.pair + within_UV
    else:
        places_UV = places_U[:, None] + columns_V[None, :]
    inside_UV = is_there_U[:, None] & (columns_V < C.value_dim)[None, :]
    return tl.load(value_ptr + places_UV, mask=inside_UV, other=0)
