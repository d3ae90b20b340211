"""Triton kernels of hidden states of several streams: launches of one each.

`streams` has the references of the same names. A kernel rounds where its reference does; sums are
float32, in an order that depends on the shapes of the model alone. No constant depends on a step.

R tokens of a tile, S streams as a power of two, K columns of a step, F factors as a power of two, B
columns of a block.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.gpu_common import MINUS_INFINITY, TRITON_TYPES, Launch, round_to
from raymoe.kernels.triton_support import power_of_two

if TYPE_CHECKING:
    from raymoe.kernels.streams import MixerWeights
    from raymoe.specs.streams import StreamsSpec

_ROWS, _COLUMNS = 16, 64  # of a tile of logits
_FLOAT_COLUMNS = 32  # where products take more registers
_BLOCK = 256


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["logits_ptr"])
def stream_logits_kernel(
    hidden_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    base_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    num_tokens: tl.tensor,
    hidden_stride: tl.tensor,
    SIZE: tl.constexpr,
    FACTORS: tl.constexpr,
    PADDED: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Compute the logits of a tile of tokens."""
    tokens_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    factors_F = tl.arange(0, PADDED)
    is_token_R1, is_factor_F = (tokens_R < num_tokens)[:, None], factors_F < FACTORS
    sums_RF = tl.zeros([ROWS, PADDED], tl.float32)
    squares_R = tl.zeros([ROWS], tl.float32)
    for begin in range(0, SIZE, COLUMNS):
        columns_1K = begin + tl.arange(0, COLUMNS)[None, :]
        inside_1K = columns_1K < SIZE
        x_RK = tl.load(
            hidden_ptr + tokens_R[:, None] * hidden_stride + columns_1K,
            mask=is_token_R1 & inside_1K,
            other=0,
        )
        weight_FK = tl.load(
            matrix_ptr + factors_F[:, None] * SIZE + columns_1K,
            mask=is_factor_F[:, None] & inside_1K,
            other=0,
        )
        sums_RF += tl.dot(x_RK.to(DOT), tl.trans(weight_FK.to(DOT)), input_precision="ieee")
        wide_RK = x_RK.to(tl.float32)
        squares_R += tl.sum(wide_RK * wide_RK, 1)
    inverse_R = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares_R, SIZE * 1.0) + EPS))
    scale_F = tl.load(scale_ptr + factors_F, mask=is_factor_F, other=0)
    base_F = tl.load(base_ptr + factors_F, mask=is_factor_F, other=0)
    logits_RF = sums_RF * inverse_R[:, None] * scale_F[None, :] + base_F[None, :]
    places_RF = tokens_R[:, None] * FACTORS + factors_F[None, :]
    tl.store(logits_ptr + places_RF, logits_RF, mask=is_token_R1 & is_factor_F[None, :])


def stream_logits(
    hidden_TX: Tensor, matrix_FX: Tensor, weights: "MixerWeights", logits_TF: Tensor, eps: float
) -> Launch:
    """Launch what `streams.stream_logits` computes; rows of the hidden state may be strided."""
    num_tokens, size = hidden_TX.shape
    factors = logits_TF.shape[1]
    # Without tensor cores for its type, a product is one of float32.
    is_float = hidden_TX.dtype == torch.float32 or not hidden_TX.is_cuda
    return Launch(
        kernel=stream_logits_kernel,
        grid=(-(-num_tokens // _ROWS),),
        arguments={
            "hidden_ptr": hidden_TX,
            "matrix_ptr": matrix_FX,
            "scale_ptr": weights.scale_F,
            "base_ptr": weights.base_F,
            "logits_ptr": logits_TF,
            "num_tokens": num_tokens,
            "hidden_stride": hidden_TX.stride(0),
        },
        constants={
            "SIZE": size,
            "FACTORS": factors,
            "PADDED": max(16, power_of_two(factors)),
            "EPS": eps,
            "ROWS": _ROWS,
            "COLUMNS": _FLOAT_COLUMNS if hidden_TX.dtype == torch.float32 else _COLUMNS,
            "DOT": tl.float32 if is_float else TRITON_TYPES[hidden_TX.dtype],
        },
        options={"num_warps": 4, "num_stages": 3},
    )


@triton.jit(do_not_specialize_on_alignment=["logits_ptr"])
def read_streams_kernel(
    hidden_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    logits_stride: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum a block of columns of the streams of one token, weighted."""
    token = tl.program_id(0).to(tl.int64)
    streams_S = tl.arange(0, PADDED)
    is_stream_S = streams_S < COUNT
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_B = columns_B < HIDDEN
    logits_S = tl.load(logits_ptr + token * logits_stride + streams_S, mask=is_stream_S, other=0)
    pre_S = _sigmoid(logits_S) + EPS
    x_SB = tl.load(
        hidden_ptr + token * hidden_stride + streams_S[:, None] * HIDDEN + columns_B[None, :],
        mask=is_stream_S[:, None] & is_column_B[None, :],
        other=0,
    )
    sum_B = round_to(tl.sum(pre_S[:, None] * x_SB.to(tl.float32), 0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + columns_B, sum_B, mask=is_column_B)


def read_streams(
    hidden_TX: Tensor, logits_TF: Tensor, out_TH: Tensor, spec: "StreamsSpec"
) -> Launch:
    """Launch what `streams.read_streams` computes; `out_TH` is contiguous."""
    num_tokens, hidden_size = out_TH.shape
    block = min(4 * _BLOCK, power_of_two(hidden_size))
    return Launch(
        kernel=read_streams_kernel,
        grid=(num_tokens, -(-hidden_size // block)),
        arguments={
            "hidden_ptr": hidden_TX,
            "logits_ptr": logits_TF,
            "out_ptr": out_TH,
            "hidden_stride": hidden_TX.stride(0),
            "logits_stride": logits_TF.stride(0),
        },
        constants={
            "COUNT": spec.count,
            "PADDED": power_of_two(spec.count),
            "HIDDEN": hidden_size,
            "EPS": spec.eps,
            "BLOCK": block,
        },
        options={"num_warps": 4},
    )


@triton.jit
def _mixing_matrix(
    logits_ptr: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    EPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
) -> tl.tensor:
    """Compute `streams.mixing_matrix` of one token; zero beyond its streams."""
    rows_S1, columns_1S = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    inside_SS = (rows_S1 < COUNT) & (columns_1S < COUNT)
    places_SS = rows_S1 * COUNT + columns_1S
    x_SS = tl.load(logits_ptr + places_SS, mask=inside_SS, other=MINUS_INFINITY)
    x_SS = tl.where(rows_S1 < COUNT, x_SS, 0.0)  # rows that are not there divide by no zero
    x_SS = tl.exp(x_SS - tl.max(x_SS, 1)[:, None])
    x_SS = tl.div_rn(x_SS, tl.sum(x_SS, 1)[:, None] + tl.zeros([PADDED, PADDED], tl.float32))
    x_SS = tl.where(inside_SS, x_SS + EPS, 0.0)
    x_SS = tl.div_rn(x_SS, x_SS * 0 + (tl.sum(x_SS, 0) + EPS)[None, :])
    for _ in range(ITERATIONS - 1):
        x_SS = tl.div_rn(x_SS, x_SS * 0 + (tl.sum(x_SS, 1) + EPS)[:, None])
        x_SS = tl.div_rn(x_SS, x_SS * 0 + (tl.sum(x_SS, 0) + EPS)[None, :])
    return x_SS


@triton.jit(do_not_specialize_on_alignment=["logits_ptr"])
def add_to_streams_kernel(
    hidden_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    delta_stride: tl.tensor,
    logits_stride: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Mix the streams of one token and add the result of the block to each.

    With 0 iterations there is no matrix.
    """
    TYPE: tl.constexpr = hidden_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * logits_stride
    streams_S = tl.arange(0, PADDED)
    is_stream_S = streams_S < COUNT
    logits_S = tl.load(row_ptr + COUNT + streams_S, mask=is_stream_S, other=0)
    post_S = MAGNITUDE * _sigmoid(logits_S)
    if ITERATIONS > 0:
        post_S1 = round_to(post_S, TYPE)[:, None]
        matrix_SS = _mixing_matrix(row_ptr + 2 * COUNT, COUNT, PADDED, EPS, ITERATIONS)
        matrix_SS1 = round_to(matrix_SS, TYPE)[:, :, None]
    else:
        post_S1 = (post_S + EPS)[:, None]
    for begin in range(0, HIDDEN, BLOCK):
        columns_B = begin + tl.arange(0, BLOCK)
        is_column_B = columns_B < HIDDEN
        inside_SB = is_stream_S[:, None] & is_column_B[None, :]
        places_SB = streams_S[:, None] * HIDDEN + columns_B[None, :]
        streams_ptr = hidden_ptr + token * hidden_stride + places_SB
        x_SB = tl.load(streams_ptr, mask=inside_SB, other=0).to(tl.float32)
        delta_B = tl.load(delta_ptr + token * delta_stride + columns_B, mask=is_column_B, other=0)
        added_SB = post_S1 * delta_B.to(tl.float32)[None, :]
        if ITERATIONS > 0:
            x_SB = round_to(tl.sum(matrix_SS1 * x_SB[:, None, :], 0), TYPE)
            added_SB = round_to(added_SB, TYPE)
        tl.store(streams_ptr, round_to(added_SB + x_SB, TYPE), mask=inside_SB)


def add_to_streams(
    hidden_TX: Tensor, delta_TH: Tensor, logits_TF: Tensor, spec: "StreamsSpec"
) -> Launch:
    """Launch what `streams.add_to_streams_` computes, in place."""
    num_tokens, hidden_size = delta_TH.shape
    return Launch(
        kernel=add_to_streams_kernel,
        grid=(num_tokens,),
        arguments={
            "hidden_ptr": hidden_TX,
            "delta_ptr": delta_TH,
            "logits_ptr": logits_TF,
            "hidden_stride": hidden_TX.stride(0),
            "delta_stride": delta_TH.stride(0),
            "logits_stride": logits_TF.stride(0),
        },
        constants={
            "COUNT": spec.count,
            "PADDED": power_of_two(spec.count),
            "HIDDEN": hidden_size,
            "EPS": spec.eps,
            "ITERATIONS": spec.sinkhorn_iterations or 0,
            "MAGNITUDE": spec.magnitude,
            "BLOCK": min(_BLOCK, power_of_two(hidden_size)),
        },
        options={"num_warps": 4},
    )
