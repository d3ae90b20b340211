"""Triton kernels of hidden states of several streams that are read by gates: launches of one each.

`gated_streams` has the references of the same names; sums are float32 and rounded once. No constant
depends on a step.

S streams as a power of two, B columns of a block.
"""

import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.gpu_common import Launch, round_to
from raymoe.kernels.triton_support import power_of_two

_BLOCK = 512


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def norm_streams_kernel(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    COUNT: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm one stream of one token."""
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * HIDDEN
    columns_B = tl.arange(0, BLOCK)
    is_column_B = columns_B < HIDDEN
    row_ptr = hidden_ptr + token * hidden_stride + begin
    x_B = tl.load(row_ptr + columns_B, mask=is_column_B, other=0).to(tl.float32)
    weight_B = tl.load(weight_ptr + begin + columns_B, mask=is_column_B, other=0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x_B * x_B, 0), HIDDEN * 1.0)
    normed_B = x_B * tl.div_rn(1.0, tl.sqrt_rn(mean + EPS)) * (1.0 + weight_B)
    places_B = token * (COUNT * HIDDEN) + begin + columns_B
    tl.store(out_ptr + places_B, round_to(normed_B, out_ptr.dtype.element_ty), mask=is_column_B)


def norm_streams(
    hidden_TX: Tensor, weight_X: Tensor, out_TX: Tensor, count: int, eps: float
) -> Launch:
    """Launch what `gated_streams.norm_streams` computes; `out_TX` is contiguous."""
    hidden_size = hidden_TX.shape[1] // count
    return Launch(
        kernel=norm_streams_kernel,
        grid=(len(hidden_TX), count),
        arguments={
            "hidden_ptr": hidden_TX,
            "weight_ptr": weight_X,
            "out_ptr": out_TX,
            "hidden_stride": hidden_TX.stride(0),
        },
        constants={
            "COUNT": count,
            "HIDDEN": hidden_size,
            "EPS": eps,
            "BLOCK": power_of_two(hidden_size),
        },
        options={"num_warps": 4},
    )


@triton.jit
def read_gated_kernel(
    normed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Read a block of columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    streams_S = tl.arange(0, PADDED)
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_B = columns_B < HIDDEN
    inside_SB = (streams_S < COUNT)[:, None] & is_column_B[None, :]
    places_SB = token * (COUNT * HIDDEN) + streams_S[:, None] * HIDDEN + columns_B[None, :]
    x_SB = tl.load(normed_ptr + places_SB, mask=inside_SB, other=0).to(tl.float32)
    gate_SB = tl.load(gates_ptr + places_SB, mask=inside_SB, other=0).to(tl.float32)
    sum_B = tl.sum(_sigmoid(gate_SB) * x_SB, 0)
    mean_B = round_to(tl.div_rn(sum_B, sum_B * 0 + COUNT), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + columns_B, mean_B, mask=is_column_B)


def read_gated(normed_TX: Tensor, gates_TX: Tensor, out_TH: Tensor, count: int) -> Launch:
    """Launch what `gated_streams.read_gated` computes; all are contiguous."""
    num_tokens, hidden_size = out_TH.shape
    block = min(_BLOCK, power_of_two(hidden_size))
    return Launch(
        kernel=read_gated_kernel,
        grid=(num_tokens, -(-hidden_size // block)),
        arguments={"normed_ptr": normed_TX, "gates_ptr": gates_TX, "out_ptr": out_TH},
        constants={
            "COUNT": count,
            "PADDED": power_of_two(count),
            "HIDDEN": hidden_size,
            "BLOCK": block,
        },
        options={"num_warps": 4},
    )


@triton.jit(do_not_specialize_on_alignment=["logits_ptr"])
def add_gated_kernel(
    hidden_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    delta_stride: tl.tensor,
    logits_stride: tl.tensor,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a block of columns of one token's result to its streams."""
    token = tl.program_id(0).to(tl.int64)
    streams_S = tl.arange(0, PADDED)
    is_stream_S = streams_S < COUNT
    logits_S = tl.load(logits_ptr + token * logits_stride + streams_S, mask=is_stream_S, other=0)
    factor_S = 2 * _sigmoid(tl.div_rn(logits_S, logits_S * 0 + COUNT))
    columns_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_B = columns_B < HIDDEN
    inside_SB = is_stream_S[:, None] & is_column_B[None, :]
    delta_B = tl.load(delta_ptr + token * delta_stride + columns_B, mask=is_column_B, other=0)
    places_SB = streams_S[:, None] * HIDDEN + columns_B[None, :]
    streams_ptr = hidden_ptr + token * hidden_stride + places_SB
    x_SB = tl.load(streams_ptr, mask=inside_SB, other=0).to(tl.float32)
    sum_SB = x_SB + factor_S[:, None] * delta_B.to(tl.float32)[None, :]
    tl.store(streams_ptr, round_to(sum_SB, hidden_ptr.dtype.element_ty), mask=inside_SB)


def add_gated(hidden_TX: Tensor, delta_TH: Tensor, logits_TF: Tensor, count: int) -> Launch:
    """Launch what `gated_streams.add_gated_` computes, in place."""
    num_tokens, hidden_size = delta_TH.shape
    block = min(_BLOCK, power_of_two(hidden_size))
    return Launch(
        kernel=add_gated_kernel,
        grid=(num_tokens, -(-hidden_size // block)),
        arguments={
            "hidden_ptr": hidden_TX,
            "delta_ptr": delta_TH,
            "logits_ptr": logits_TF,
            "hidden_stride": hidden_TX.stride(0),
            "delta_stride": delta_TH.stride(0),
            "logits_stride": logits_TF.stride(0),
        },
        constants={
            "COUNT": count,
            "PADDED": power_of_two(count),
            "HIDDEN": hidden_size,
            "BLOCK": block,
        },
        options={"num_warps": 4},
    )
