"""Triton kernels of norms, rotary embeddings, routers and sampling: launches of one each.

`elementwise` has the references of the same names. A kernel rounds where its reference does;
sums are float32, in an order that depends on the shapes of the model alone. No constant depends on
a step, and tensors that are cut by token may begin at any address: no step compiles a kernel again.

T tokens, H hidden size. N heads of a tile, D dimensions of a head, R pairs of rotated dimensions, E
experts in G groups of X, K experts per token.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.gpu_common import (
    MINUS_INFINITY,
    Launch,
    gumbel,
    kernel_constants,
    philox,
    round_to,
)
from raymoe.kernels.triton_support import power_of_two

if TYPE_CHECKING:
    from raymoe.kernels.elementwise import Steps

_TILE_ELEMENTS = 2048  # of heads in one program


@triton.jit
def _inverse_rms(squares: tl.tensor, SIZE: tl.constexpr, EPS: tl.constexpr) -> tl.tensor:
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, SIZE * 1.0) + EPS))


@triton.jit
def _weighted(
    normed: tl.tensor,
    weight: tl.tensor,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Multiply a norm by its weight, with the roundings of `elementwise.rms_norm`."""
    if HAS_OFFSET:
        normed = normed * (weight + OFFSET)
    else:
        normed = weight * round_to(normed, TYPE)
    return round_to(normed, TYPE)


@triton.jit
def rms_norm_kernel(
    hidden_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    delta_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
) -> None:
    """Norm one row [H], after adding a row of delta to it in place if `ADDS`."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns_H = tl.arange(0, COLUMNS)
    is_column_H = columns_H < SIZE
    row_ptr = hidden_ptr + token * hidden_stride + columns_H
    x_H = tl.load(row_ptr, mask=is_column_H, other=0).to(tl.float32)
    if ADDS:
        delta_H = tl.load(delta_ptr + token * delta_stride + columns_H, mask=is_column_H, other=0)
        x_H = round_to(x_H + delta_H.to(tl.float32), TYPE)
        tl.store(row_ptr, x_H, mask=is_column_H)
    normed_H = x_H * _inverse_rms(tl.sum(x_H * x_H, 0), SIZE, EPS)
    if HAS_WEIGHT:
        weight_H = tl.load(weight_ptr + columns_H, mask=is_column_H, other=0).to(tl.float32)
        normed_H = _weighted(normed_H, weight_H, HAS_OFFSET, OFFSET, TYPE)
    else:
        normed_H = round_to(normed_H, TYPE)
    tl.store(out_ptr + token * out_stride + columns_H, normed_H, mask=is_column_H)


def rms_norm(
    hidden_TH: Tensor,
    delta_TH: Tensor | None,
    weight_H: Tensor | None,
    eps: float,
    offset: float | None,
    out_TH: Tensor,
) -> Launch:
    """Norm the rows of `hidden_TH`, to which `delta_TH` is added in place before."""
    num_tokens, size = hidden_TH.shape
    added_TH = hidden_TH if delta_TH is None else delta_TH
    columns = power_of_two(size)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(num_tokens,),
        arguments={
            "hidden_ptr": hidden_TH,
            "delta_ptr": added_TH,
            "weight_ptr": hidden_TH if weight_H is None else weight_H,
            "out_ptr": out_TH,
            "hidden_stride": hidden_TH.stride(0),
            "delta_stride": added_TH.stride(0),
            "out_stride": out_TH.stride(0),
        },
        constants={
            "SIZE": size,
            "COLUMNS": columns,
            "EPS": eps,
            "HAS_OFFSET": offset is not None,
            "OFFSET": float(offset or 0.0),
            "ADDS": delta_TH is not None,
            "HAS_WEIGHT": weight_H is not None,
        },
        options={"num_warps": min(max(columns // 512, 1), 16)},
    )


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries, keys or values of a token as compile-time constants, made by `heads_of` alone.

    Attributes:
        begin: Their first column in a row.
        first: The first of the 2 R rotated dimensions.
        norm: Before the rotation "head" (one per head), "plain" (without a weight), "all" (one over
            all heads) or "latent" (over the dimensions before `first`); "after" it, one per head;
            or "none".
        offset: `offset` of `elementwise.rms_norm`.
        padded: Dimensions, as a power of two.
        tile: Heads of one program.
        padded_all: Columns of all heads, as a power of two.
    """

    count: tl.constexpr
    dim: tl.constexpr
    begin: tl.constexpr
    first: tl.constexpr
    half: tl.constexpr
    is_interleaved: tl.constexpr
    norm: tl.constexpr
    eps: tl.constexpr
    has_offset: tl.constexpr
    offset: tl.constexpr
    clips: tl.constexpr
    clip: tl.constexpr
    padded: tl.constexpr
    tile: tl.constexpr
    tiles: tl.constexpr
    padded_all: tl.constexpr


@cache
def heads_of(
    count: int,
    dim: int,
    begin: int = 0,
    norm: str = "none",
    half: int = 0,
    is_interleaved: bool = False,
    eps: float = 0.0,
    offset: float | None = None,
    clip: float = math.inf,
    first: int = 0,
) -> Heads:
    """Return the one object of these constants, so that a launch compares them by identity."""
    padded = power_of_two(dim)
    tile = min(max(_TILE_ELEMENTS // padded, 1), power_of_two(count))
    heads: Heads = kernel_constants(
        Heads,
        count=count,
        dim=dim,
        begin=begin,
        first=first,
        half=half,
        is_interleaved=is_interleaved,
        norm=norm,
        eps=eps,
        has_offset=offset is not None,
        offset=float(offset or 0.0),
        clips=clip < math.inf,
        clip=float(clip),
        padded=padded,
        tile=tile,
        tiles=-(-count // tile) if dim else 0,
        padded_all=power_of_two(count * dim),
    )
    return heads


@triton.jit
def _load_normed(
    heads_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    heads_N1: tl.tensor,
    columns_1D: tl.tensor,
    inside_ND: tl.tensor,
    scale_N1: tl.tensor,
    P: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Load some columns of heads, normed and clipped; NaN stays NaN."""
    x_ND = tl.load(heads_ptr + heads_N1 * P.dim + columns_1D, mask=inside_ND, other=0)
    x_ND = x_ND.to(tl.float32)
    if P.norm == "plain":
        x_ND = round_to(x_ND * scale_N1, TYPE)
    elif P.norm == "head" or P.norm == "all" or P.norm == "latent":
        if P.norm == "latent":
            inside_ND = inside_ND & (columns_1D < P.first)
        places_ND = heads_N1 * (P.dim if P.norm == "all" else 0) + columns_1D
        weight_ND = tl.load(weight_ptr + places_ND, mask=inside_ND, other=0).to(tl.float32)
        normed_ND = _weighted(x_ND * scale_N1, weight_ND, P.has_offset, P.offset, TYPE)
        x_ND = tl.where(inside_ND, normed_ND, x_ND)
    if P.clips:
        limit = round_to(tl.full([1, 1], P.clip, tl.float32), TYPE)
        x_ND = tl.where(x_ND > limit, limit, tl.where(x_ND < -limit, -limit, x_ND))
    return x_ND


@triton.jit
def _scales(
    heads_ptr: tl.tensor,
    heads_N1: tl.tensor,
    columns_1D: tl.tensor,
    P: tl.constexpr,
) -> tl.tensor:
    """Return what the norm before the rotation multiplies each head by, [N, 1]."""
    scale_N1 = heads_N1 * 0.0
    if P.norm == "all":
        all_X = tl.arange(0, P.padded_all)
        x_X = tl.load(heads_ptr + all_X, mask=all_X < P.count * P.dim, other=0).to(tl.float32)
        scale_N1 += _inverse_rms(tl.sum(x_X * x_X, 0), P.count * P.dim, P.eps)
    elif P.norm == "head" or P.norm == "plain" or P.norm == "latent":
        size: tl.constexpr = P.first if P.norm == "latent" else P.dim
        is_normed_ND = (heads_N1 < P.count) & (columns_1D < size)
        places_ND = heads_N1 * P.dim + columns_1D
        x_ND = tl.load(heads_ptr + places_ND, mask=is_normed_ND, other=0).to(tl.float32)
        scale_N1 += _inverse_rms(tl.sum(x_ND * x_ND, 1), size, P.eps)[:, None]
    return scale_N1


@triton.jit
def _norm_and_rotate(
    row_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cosine_ptr: tl.tensor,
    sine_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile: tl.tensor,
    P: tl.constexpr,
) -> None:
    """Norm, clip and rotate a tile of the heads of one token; all pointers are the token's.

    A rotated column is made of its own column and of the other one of its pair.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    heads_ptr = row_ptr + P.begin
    heads_N1 = (tile * P.tile + tl.arange(0, P.tile))[:, None]
    columns_1D = tl.arange(0, P.padded)[None, :]
    inside_ND = (heads_N1 < P.count) & (columns_1D < P.dim)
    places_1D = columns_1D - P.first
    is_rotated_1D = (places_1D >= 0) & (places_1D < 2 * P.half)
    is_second_1D = places_1D >= P.half
    pair_1D = tl.where(is_second_1D, places_1D - P.half, places_1D)
    own_1D, other_1D = columns_1D, P.first + pair_1D + tl.where(is_second_1D, 0, P.half)
    if P.is_interleaved:
        own_1D = P.first + 2 * pair_1D + tl.where(is_second_1D, 1, 0)
        other_1D = P.first + 2 * pair_1D + tl.where(is_second_1D, 0, 1)
        own_1D = tl.where(is_rotated_1D, own_1D, columns_1D)
    scale_N1 = _scales(heads_ptr, heads_N1, columns_1D, P)
    x_ND = _load_normed(heads_ptr, weight_ptr, heads_N1, own_1D, inside_ND, scale_N1, P, TYPE)
    if P.half > 0:
        y_ND = _load_normed(
            heads_ptr, weight_ptr, heads_N1, other_1D, inside_ND & is_rotated_1D, scale_N1, P, TYPE
        )  # fmt: skip
        cosine_1D = round_to(tl.load(cosine_ptr + pair_1D, mask=is_rotated_1D, other=0), TYPE)
        sine_1D = round_to(tl.load(sine_ptr + pair_1D, mask=is_rotated_1D, other=0), TYPE)
        y_ND = round_to(tl.where(is_second_1D, y_ND, -y_ND) * sine_1D, TYPE)
        turned_ND = round_to(round_to(x_ND * cosine_1D, TYPE) + y_ND, TYPE)
        x_ND = tl.where(is_rotated_1D, turned_ND, x_ND)
    if P.norm == "after":
        squares_N = tl.sum(tl.where(inside_ND, x_ND * x_ND, 0.0), 1)
        weight_1D = tl.load(weight_ptr + columns_1D, mask=columns_1D < P.dim, other=0)
        x_ND = x_ND * _inverse_rms(squares_N, P.dim, P.eps)[:, None]
        x_ND = _weighted(x_ND, weight_1D.to(tl.float32), P.has_offset, P.offset, TYPE)
    tl.store(out_ptr + heads_N1 * P.dim + columns_1D, x_ND, mask=inside_ND)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def project_kernel(
    queries_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cosine_ptr: tl.tensor,
    sine_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    queries_stride: tl.tensor,
    rows_stride: tl.tensor,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
) -> None:
    """Norm and rotate a tile of the queries, keys or values of one token.

    Queries are read from rows at `queries_ptr`, keys and values from rows at `rows_ptr`; the tables
    are [P, R], the outputs contiguous.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = tl.load(positions_ptr + token).to(tl.int64) * K.half
    cosine_ptr += angles
    sine_ptr += angles
    row_ptr = rows_ptr + token * rows_stride
    if tile < Q.tiles:
        row_ptr = queries_ptr + token * queries_stride
        out_ptr = query_ptr + token * (Q.count * Q.dim)
        _norm_and_rotate(row_ptr, query_weight_ptr, cosine_ptr, sine_ptr, out_ptr, tile, Q)
    elif tile < Q.tiles + K.tiles:
        out_ptr, tile = key_ptr + token * (K.count * K.dim), tile - Q.tiles
        _norm_and_rotate(row_ptr, key_weight_ptr, cosine_ptr, sine_ptr, out_ptr, tile, K)
    elif V.tiles > 0:
        out_ptr, tile = value_ptr + token * (V.count * V.dim), tile - Q.tiles - K.tiles
        _norm_and_rotate(row_ptr, key_weight_ptr, cosine_ptr, sine_ptr, out_ptr, tile, V)


def project(
    inputs: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
    out: tuple[Tensor, Tensor, Tensor],
    heads: tuple[Heads, Heads, Heads],
) -> Launch:
    """Norm and rotate queries, keys and values.

    Args:
        inputs: Rows with queries, and rows with keys and values; of one type, as `weights`.
        angles: int32 rows of the tables, cosines and sines.
        weights: Of the norms of queries and keys.
        out: Contiguous queries [T, H, D], keys [T, G, D] and values [T, G, V].
        heads: How queries, keys and values lie in the rows and what happens to them.
    """
    queries_TX, rows_TX = inputs
    query_weight, key_weight = (queries_TX if w is None else w for w in weights)
    return Launch(
        kernel=project_kernel,
        grid=(len(queries_TX), sum(int(part.tiles) for part in heads)),
        arguments={
            "queries_ptr": queries_TX,
            "rows_ptr": rows_TX,
            "positions_ptr": angles[0],
            "cosine_ptr": angles[1],
            "sine_ptr": angles[2],
            "query_weight_ptr": query_weight,
            "key_weight_ptr": key_weight,
            "query_ptr": out[0],
            "key_ptr": out[1],
            "value_ptr": out[2],
            "queries_stride": queries_TX.stride(0),
            "rows_stride": rows_TX.stride(0),
        },
        constants=dict(zip("QKV", heads, strict=True)),
        options={"num_warps": 4},
    )


def qkv_rope(
    qkv_TX: Tensor,
    angles: tuple[Tensor, Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    out: tuple[Tensor, Tensor, Tensor],
    *,
    sizes: tuple[int, int, int, int],
    steps: "Steps",
) -> Launch:
    """Launch what `elementwise.qkv_rope` computes; its sizes are (H, G, D, V)."""
    num_heads, num_kv_heads, dim, value_dim = sizes
    rotation = (angles[1].shape[1], steps.is_interleaved, steps.eps, steps.norm_offset, steps.clip)
    key_begin = num_heads * dim
    value_begin = key_begin + (0 if steps.values_are_keys else num_kv_heads * dim)
    places = zip(((num_heads, 0), (num_kv_heads, key_begin)), norms, strict=True)
    query, key = (
        heads_of(count, dim, begin, _kind(norm, count * dim, steps), *rotation)
        for (count, begin), norm in places
    )
    value_norm = "plain" if steps.norms_values else "none"
    value = heads_of(
        num_kv_heads, value_dim, value_begin, value_norm, eps=steps.eps, clip=steps.clip
    )
    return project((qkv_TX, qkv_TX), angles, norms, out, (query, key, value))


def _kind(weight: Tensor | None, width: int, steps: "Steps") -> str:
    if weight is None:
        return "none"
    if steps.is_norm_after_rope:
        return "after"
    return "all" if weight.numel() == width else "head"


def latent_rope(
    query_TAD: Tensor,
    row_TW: Tensor,
    angles: tuple[Tensor, Tensor, Tensor],
    row_norm: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    eps: float,
    is_interleaved: bool,
) -> Launch:
    """Launch what `elementwise.latent_rope` computes."""
    (_, num_heads, dim), width, rank = query_TAD.shape, row_TW.shape[1], len(row_norm)
    rotation = {"half": angles[1].shape[1], "is_interleaved": is_interleaved}
    query = heads_of(num_heads, dim, first=dim - (width - rank), **rotation)
    row = heads_of(1, width, norm="latent", eps=eps, first=rank, **rotation)
    inputs = (query_TAD.flatten(1), row_TW)
    return project(inputs, angles, (None, row_norm), out, (query, row, heads_of(1, 0)))


NAN_KEY = tl.constexpr(0x7FFFFFFF)
TAKEN = tl.constexpr(-(2**63))
LAST_ID = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _ordered(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return int64 that order values as `sort(descending, stable)`: ties by the lower id.

    Both zeros are equal, and NaN is the largest.
    """
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(values == values, bits ^ ((bits >> 31) & NAN_KEY), NAN_KEY)
    return (keys.to(tl.int64) << 32) | (ids.to(tl.int64) ^ LAST_ID)


@triton.jit
def _value_of(ordered: tl.tensor) -> tl.tensor:
    keys = (ordered >> 32).to(tl.int32)
    return (keys ^ ((keys >> 31) & NAN_KEY)).to(tl.float32, bitcast=True)


@triton.jit
def _without_other_groups(
    choice_GX: tl.tensor,
    ids_GX: tl.tensor,
    is_expert_GX: tl.tensor,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Set experts of groups that are not among the best to minus infinity."""
    ordered_GX = tl.where(is_expert_GX, _ordered(choice_GX, ids_GX), TAKEN)
    best_G = tl.max(ordered_GX, 1)
    score_G = _value_of(best_G)
    if SUMS_TWO:
        ordered_GX = tl.where(ordered_GX == best_G[:, None], TAKEN, ordered_GX)
        score_G += _value_of(tl.max(ordered_GX, 1))
    groups_G = tl.arange(0, PADDED_GROUPS)
    ordered_G = tl.where(groups_G < GROUPS, _ordered(score_G, groups_G), TAKEN)
    kept_G = groups_G < 0
    for _ in range(TOP_GROUPS):
        is_best_G = ordered_G == tl.max(ordered_G, 0)
        kept_G = kept_G | is_best_G
        ordered_G = tl.where(is_best_G, TAKEN, ordered_G)
    return tl.where(kept_G[:, None], choice_GX, MINUS_INFINITY)


@triton.jit
def _sum_all(values_GX: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(values_GX, 1), 0)


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """max(x, 0) + log(1 + exp(-|x|)); a quotient undoes the rounding of that sum (Kahan)."""
    power = tl.exp(-tl.abs(x))
    rounded_sum = 1.0 + power
    excess = tl.where(rounded_sum == 1.0, 1.0, rounded_sum - 1.0)
    logarithm = tl.where(rounded_sum == 1.0, power, tl.log(rounded_sum) * power / excess)
    return tl.maximum(x, 0.0) + logarithm


@triton.jit(do_not_specialize_on_alignment=["logits_ptr", "bias_ptr", "ids_ptr", "weights_ptr"])
def route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_stride: tl.tensor,
    ids_stride: tl.tensor,
    weights_stride: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    BY_SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    MIN_SUM: tl.constexpr,
    ADDED_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
) -> None:
    """Choose the experts of one token, by logits unless `BY_SCORES`."""
    token = tl.program_id(0).to(tl.int64)
    groups_G1, within_1X = tl.arange(0, PADDED_GROUPS)[:, None], tl.arange(0, PADDED_SIZE)[None, :]
    ids_GX = groups_G1 * GROUP_SIZE + within_1X
    is_expert_GX = (groups_G1 < GROUPS) & (within_1X < GROUP_SIZE)
    logits_GX = tl.load(logits_ptr + token * logits_stride + ids_GX, mask=is_expert_GX, other=0)
    logits_GX = tl.where(is_expert_GX, logits_GX.to(tl.float32), MINUS_INFINITY)
    if SCORING == "sigmoid":
        scores_GX = tl.div_rn(1.0, 1.0 + tl.exp(-logits_GX))
    elif SCORING == "sqrtsoftplus":
        scores_GX = tl.sqrt_rn(_softplus(tl.where(is_expert_GX, logits_GX, 0.0)))
    else:
        largest = tl.max(tl.max(logits_GX, 1), 0)
        powers_GX = tl.where(is_expert_GX, tl.exp(logits_GX - largest), 0.0)
        scores_GX = tl.div_rn(powers_GX, _sum_all(powers_GX) + tl.zeros_like(powers_GX))
    choice_GX = scores_GX if BY_SCORES else logits_GX
    if HAS_BIAS:
        choice_GX += tl.load(bias_ptr + ids_GX, mask=is_expert_GX, other=0)
    if TOP_GROUPS < GROUPS:
        choice_GX = _without_other_groups(
            choice_GX, ids_GX, is_expert_GX, GROUPS, TOP_GROUPS, SUMS_TWO, PADDED_GROUPS
        )
    ordered_GX = tl.where(is_expert_GX, _ordered(choice_GX, ids_GX), TAKEN)
    slots_K, weights_K, total = tl.arange(0, PADDED_K), tl.full([PADDED_K], 0.0, tl.float32), 0.0
    for k in range(TOP_K):
        best = tl.max(tl.max(ordered_GX, 1), 0)
        weight = _sum_all(tl.where(ordered_GX == best, scores_GX, 0.0))
        ordered_GX = tl.where(ordered_GX == best, TAKEN, ordered_GX)
        weights_K = tl.where(slots_K == k, weight, weights_K)
        total += weight
        tl.store(ids_ptr + token * ids_stride + k, ((best ^ LAST_ID) & LAST_ID).to(tl.int32))
    if RENORMALIZES:
        total = tl.where(total < MIN_SUM, MIN_SUM, total) + ADDED_SUM
        weights_K = tl.div_rn(weights_K, total + tl.zeros_like(weights_K))
    weights_ptr += token * weights_stride
    tl.store(weights_ptr + slots_K, weights_K * SCALE, mask=slots_K < TOP_K)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    scoring: str = "softmax",
    chooses_by_logits: bool = False,
    renormalizes: bool = True,
    min_sum: float = 0.0,
    added_sum: float = 0.0,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    sums_two: bool = False,
) -> Launch:
    """Choose the experts of each token from its logits, as `model.feed_forward.choose_experts`.

    Args:
        bias_E: float32, added for the choice alone: to the scores, or to the logits.
        ids_TK: int32; receives the ids, and `weights_TK`, float32, the weights.
        groups: How many there are and how many remain.
        sums_two: Whether the score of a group is the sum of its two best instead of its best.
    """
    (num_tokens, num_experts), top_k = logits_TE.shape, ids_TK.shape[1]
    group_size, has_sum = num_experts // groups[0], min_sum + added_sum > 0
    # Scores have the order of logits, but are equal for more of them.
    needs_scores = bias_E is not None or groups[0] > 1 or (has_sum and scoring == "softmax")
    return Launch(
        kernel=route_kernel,
        grid=(num_tokens,),
        arguments={
            "logits_ptr": logits_TE,
            "bias_ptr": weights_TK if bias_E is None else bias_E,
            "ids_ptr": ids_TK,
            "weights_ptr": weights_TK,
            "logits_stride": logits_TE.stride(0),
            "ids_stride": ids_TK.stride(0),
            "weights_stride": weights_TK.stride(0),
        },
        constants={
            "GROUPS": groups[0],
            "GROUP_SIZE": group_size,
            "TOP_GROUPS": groups[1],
            "SUMS_TWO": sums_two,
            "TOP_K": top_k,
            "SCORING": scoring,
            "BY_SCORES": needs_scores and not chooses_by_logits,
            "HAS_BIAS": bias_E is not None,
            "RENORMALIZES": renormalizes,
            "MIN_SUM": float(min_sum),
            "ADDED_SUM": float(added_sum),
            "SCALE": float(scale),
            "PADDED_GROUPS": power_of_two(groups[0]),
            "PADDED_SIZE": power_of_two(group_size),
            "PADDED_K": power_of_two(top_k),
        },
        options={"num_warps": 1 if num_experts <= 256 else 4},
    )


LARGEST_GUMBEL = tl.constexpr(23.0)  # -log(2^-33) is 22.87
_DRAWN_GROUPS = 32  # of 64 tokens in one step of a program


@triton.jit
def _stream(row_ptr: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return the counter words and the key of a row, [1, 1] each."""
    words = row_ptr + tl.full([1, 1], 0, tl.int32)
    seed, row_key, place = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    zero = tl.full([1, 1], 0, tl.uint32)
    key0, key1, extra, _ = philox(
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
        row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32), zero, zero,
    )  # fmt: skip
    return (place >> 32).to(tl.uint32), place.to(tl.uint32), extra, key0, key1


@triton.jit
def _best_of(
    values: tl.tuple, ids: tl.tensor, best: tl.tensor, best_id: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the larger of the best so far and the first largest of four parts of a block."""
    for part in tl.static_range(4):
        largest = tl.max(tl.max(values[part], 1), 0)
        found = tl.where(values[part] == largest, ids + part * 16, 0x7FFFFFFF)
        found = tl.min(tl.min(found, 1), 0)
        is_better = (largest > best) | ((largest == best) & (found < best_id))
        best_id = tl.where(is_better, found, best_id)
        best = tl.where(is_better, largest, best)
    return best, best_id


@triton.jit
def choose_kernel(
    logits_ptr: tl.tensor,
    draws_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Choose the token of one row: the largest logit, or the largest after scale and noise.

    Args:
        draws_ptr: int64 [R, 4] as `elementwise.pack_draws` makes them.
        ids_ptr: int32 [R]; -1 if the row has a NaN or no logit above -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    draw_ptr = draws_ptr + row * 4
    bits = tl.load(draw_ptr + 3).to(tl.int32)
    is_drawn = bits != 0
    scale = tl.where(is_drawn, bits, 0x3F800000).to(tl.float32, bitcast=True)
    reach = tl.where(is_drawn, LARGEST_GUMBEL, 0.0)
    position, sample, extra, key0, key1 = _stream(draw_ptr)
    groups_G1, counters_1C = tl.arange(0, GROUPS)[:, None], tl.arange(0, 16)[None, :]
    best, best_id, num_nans = tl.full([], MINUS_INFINITY, tl.float32), tl.full([], -1, tl.int32), 0
    for first in range(0, SIZE, GROUPS * 64):
        ids_GC = first + groups_G1 * 64 + counters_1C
        logits: tl.tuple = ()
        largest = tl.full([], MINUS_INFINITY, tl.float32)
        for part in tl.static_range(4):
            places_GC = ids_GC + part * 16
            x_GC = tl.load(logits_ptr + row * stride + places_GC, mask=places_GC < SIZE, other=0)
            x_GC = tl.where(places_GC < SIZE, x_GC.to(tl.float32) * scale, MINUS_INFINITY)
            num_nans += _sum_all((x_GC != x_GC).to(tl.int32))
            x_GC = tl.where(x_GC == x_GC, x_GC, MINUS_INFINITY)
            largest = tl.maximum(largest, tl.max(tl.max(x_GC, 1), 0))
            logits = logits + (x_GC,)  # noqa: RUF005
        if largest > best - reach:  # otherwise no noise lifts any of them over the best
            counter_GC = ((first // 64 + groups_G1) * 16 + counters_1C).to(tl.uint32)
            zero_GC = counter_GC * 0
            words = philox(
                counter_GC, position + zero_GC, sample + zero_GC, extra + zero_GC, key0, key1
            )
            values: tl.tuple = ()
            for part in tl.static_range(4):
                noise_GC = tl.where(is_drawn, gumbel(words[part]), 0.0)
                values = values + (logits[part] + noise_GC,)  # noqa: RUF005
            best, best_id = _best_of(values, ids_GC, best, best_id)
    tl.store(ids_ptr + row, tl.where((num_nans > 0) | (best == MINUS_INFINITY), -1, best_id))


def choose(logits_RV: Tensor, draws_R4: Tensor, ids_R: Tensor) -> Launch:
    """Launch what `elementwise.choose` computes; on the host, `_native` has the same bits."""
    num_rows, size = logits_RV.shape
    return Launch(
        kernel=choose_kernel,
        grid=(num_rows,),
        arguments={
            "logits_ptr": logits_RV,
            "draws_ptr": draws_R4,
            "ids_ptr": ids_R,
            "stride": logits_RV.stride(0),
        },
        constants={"SIZE": size, "GROUPS": min(_DRAWN_GROUPS, power_of_two(-(-size // 64)))},
        options={"num_warps": 8},
    )
