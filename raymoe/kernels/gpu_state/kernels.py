"""Triton kernels of states: causal convolutions, and scans that keep a state in registers.

Imported only where a kernel runs. All sums are float32, over taps or rows of a state in an order
that depends on the shapes of the model alone: the bits of a token depend neither on the batch nor
on the steps that its sequence was cut into.

T tokens, S sequences, C channels, P past inputs of a channel, N slots. H heads in G groups, K x V
sizes of a state; k of K rows, padded, and v of V columns are in one program.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.gpu_common import TRITON_TYPES, Launch, kernel_constants, round_to

SEQUENCE_FIELDS = 3  # slot, first token, number of tokens
_FIELDS = tl.constexpr(SEQUENCE_FIELDS)
_CHANNELS = 512  # of a program
_STATE_ELEMENTS = 4096  # of a program: 32 registers of each thread
_WARPS = 4


@triton.jit
def _store_rounded(pointers: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    TYPE: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers, round_to(values, TYPE).to(TYPE), mask=mask)


@triton.jit(do_not_specialize=["inputs_stride"])
def causal_conv_kernel(
    inputs_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    past_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    sequence_of_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inputs_stride: tl.tensor,
    out_stride: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
) -> None:
    """Convolve some channels of one token with its inputs and those before it.

    `weight_ptr` is [W, C], `past_ptr` [N, W - 1, C]; `sequences_ptr` [S, 3] has `SEQUENCE_FIELDS`,
    `sequence_of_ptr` [T] the sequence of each token.
    """
    token = tl.program_id(0)
    row_ptr = sequences_ptr + tl.load(sequence_of_ptr + token) * _FIELDS
    slot = tl.load(row_ptr).to(tl.int64)
    offset = token - tl.load(row_ptr + 1)
    token = token.to(tl.int64)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel_C = channels_C < NUM_CHANNELS
    offset_C = channels_C * 0 + offset  # masks of blocks are compared as blocks
    if HAS_BIAS:
        sum_C = tl.load(bias_ptr + channels_C, mask=is_channel_C, other=0.0)
    else:
        sum_C = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        is_new_C = is_channel_C & (offset_C >= back)
        x_C = tl.load(
            inputs_ptr + (token - back) * inputs_stride + channels_C, mask=is_new_C, other=0.0
        ).to(tl.float32)
        past_row = slot * (TAPS - 1) + offset + tap
        is_past_C = is_channel_C & (offset_C < back)
        past_C = tl.load(
            past_ptr + past_row * NUM_CHANNELS + channels_C, mask=is_past_C, other=0.0
        ).to(tl.float32)
        weight_C = tl.load(
            weight_ptr + tap * NUM_CHANNELS + channels_C, mask=is_channel_C, other=0.0
        )
        sum_C += weight_C * (x_C + past_C)
    if IS_SILU:
        sum_C = sum_C / (1.0 + tl.exp(tl.minimum(-sum_C, 88.0)))
    _store_rounded(out_ptr + token * out_stride + channels_C, sum_C, is_channel_C)


@triton.jit(do_not_specialize=["inputs_stride"])
def keep_inputs_kernel(
    inputs_ptr: tl.tensor,
    past_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    inputs_stride: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    PAST: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Move some channels of one sequence's past inputs on by the tokens of the step."""
    row_ptr = sequences_ptr + tl.program_id(0) * _FIELDS
    slot = tl.load(row_ptr).to(tl.int64)
    first, count = tl.load(row_ptr + 1).to(tl.int64), tl.load(row_ptr + 2)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel_C = channels_C < NUM_CHANNELS
    past_ptr += slot * (PAST * NUM_CHANNELS) + channels_C
    for i in tl.static_range(PAST):  # ascending: a row is read before it is overwritten
        source = i + count - PAST  # of the tokens of the step
        source_C = channels_C * 0 + source
        new_C = tl.load(
            inputs_ptr + (first + source) * inputs_stride + channels_C,
            mask=is_channel_C & (source_C >= 0),
            other=0.0,
        )
        old_C = tl.load(
            past_ptr + (i + count) * NUM_CHANNELS, mask=is_channel_C & (source_C < 0), other=0.0
        )
        tl.store(
            past_ptr + i * NUM_CHANNELS, tl.where(source_C >= 0, new_C, old_C), mask=is_channel_C
        )


@dataclass(frozen=True, eq=False)
class KernelStates:
    """The sizes of a model's states and the kind of its scan; made by `kernel_constants`.

    Attributes:
        group: Heads that share queries and keys.
        rows: Rows of a state, as a power of two.
        columns: Columns of a state in one program.
        has_channel_decays: Whether decays are [T, H, K], not [T, H].
    """

    num_heads: tl.constexpr
    group: tl.constexpr
    key_dim: tl.constexpr
    value_dim: tl.constexpr
    rows: tl.constexpr
    columns: tl.constexpr
    scale: tl.constexpr
    has_channel_decays: tl.constexpr
    is_delta: tl.constexpr
    is_normalized: tl.constexpr


@triton.jit
def _load_unit(pointers_k: tl.tensor, is_row_k: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Load a query or a key, divided by its norm if the model does that."""
    x_k = tl.load(pointers_k, mask=is_row_k, other=0.0).to(tl.float32)
    if C.is_normalized:
        x_k = x_k * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x_k * x_k, 0) + 1e-6))
    return x_k


@triton.jit
def _load_decay(decay_ptr: tl.tensor, is_row_k: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Load the factors of a head's rows, [k, 1]; `decay_ptr` is the head's."""
    rows_k = tl.arange(0, C.rows)
    if C.has_channel_decays:
        log_k = tl.load(decay_ptr + rows_k, mask=is_row_k, other=0.0)
    else:
        log_k = rows_k * 0.0 + tl.load(decay_ptr)
    return tl.exp(log_k)[:, None]


@triton.jit
def scan_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    states_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    out_stride: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Update some columns of one head's state by all tokens of one sequence, and read them.

    Decays [T, H] or [T, H, K] and gains [T, H] are contiguous; tokens of the others are strided.
    `states_ptr` is [N, H, K, V], `sequences_ptr` [S, 3] as of `SEQUENCE_FIELDS`.
    """
    row_ptr = sequences_ptr + tl.program_id(0) * _FIELDS
    slot, first = tl.load(row_ptr).to(tl.int64), tl.load(row_ptr + 1).to(tl.int64)
    count, head = tl.load(row_ptr + 2), tl.program_id(1)
    rows_k = tl.arange(0, C.rows)
    columns_v = tl.program_id(2) * C.columns + tl.arange(0, C.columns)
    is_row_k, is_column_v = rows_k < C.key_dim, columns_v < C.value_dim
    is_inside_kv = is_row_k[:, None] & is_column_v[None, :]
    states_ptr += (slot * C.num_heads + head) * (C.key_dim * C.value_dim)
    states_ptr += rows_k[:, None] * C.value_dim + columns_v[None, :]
    state_kv = tl.load(states_ptr, mask=is_inside_kv, other=0.0).to(tl.float32)
    query_ptr += first * query_stride + (head // C.group) * C.key_dim + rows_k
    key_ptr += first * key_stride + (head // C.group) * C.key_dim + rows_k
    value_ptr += first * value_stride + head * C.value_dim + columns_v
    out_ptr += first * out_stride + head * C.value_dim + columns_v
    gain_ptr += first * C.num_heads + head
    decays: tl.constexpr = C.key_dim if C.has_channel_decays else 1
    decay_ptr += (first * C.num_heads + head) * decays
    for _ in range(count):
        key_k1 = _load_unit(key_ptr, is_row_k, C)[:, None]
        query_k1 = _load_unit(query_ptr, is_row_k, C)[:, None] * C.scale
        state_kv = state_kv * _load_decay(decay_ptr, is_row_k, C)
        change_v = tl.load(value_ptr, mask=is_column_v, other=0.0).to(tl.float32)
        if C.is_delta:
            change_v = change_v - tl.sum(state_kv * key_k1, 0)
        change_v = change_v * tl.load(gain_ptr)
        state_kv = state_kv + key_k1 * change_v[None, :]
        _store_rounded(out_ptr, tl.sum(state_kv * query_k1, 0), is_column_v)
        key_ptr += key_stride
        query_ptr += query_stride
        value_ptr += value_stride
        out_ptr += out_stride
        gain_ptr += C.num_heads
        decay_ptr += C.num_heads * decays
    _store_rounded(states_ptr, state_kv, is_inside_kv)


def causal_conv_launches(
    inputs_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    past_NPC: Tensor,
    tables: tuple[Tensor, Tensor],
    out_TC: Tensor,
    *,
    is_silu: bool,
) -> tuple[Launch, ...]:
    """The convolution, then what it leaves for the next step.

    Args:
        weight_CW: float32, the transpose of a contiguous [W, C].
        tables: int32, [S, 3] as of `SEQUENCE_FIELDS` and [T], the sequence of each token.
    """
    sequences_SF, sequence_T = tables
    num_channels, taps = weight_CW.shape
    assert weight_CW.t().is_contiguous(), "taps are read one by one"
    channels = min(_CHANNELS, triton.next_power_of_2(num_channels))
    blocks = triton.cdiv(num_channels, channels)
    convolution = Launch(
        kernel=causal_conv_kernel,
        grid=(len(inputs_TC), blocks),
        arguments={
            "inputs_ptr": inputs_TC,
            "weight_ptr": weight_CW,
            "bias_ptr": weight_CW if bias_C is None else bias_C,
            "past_ptr": past_NPC,
            "sequences_ptr": sequences_SF,
            "sequence_of_ptr": sequence_T,
            "out_ptr": out_TC,
            "inputs_stride": inputs_TC.stride(0),
            "out_stride": out_TC.stride(0),
        },
        constants={
            "NUM_CHANNELS": num_channels,
            "TAPS": taps,
            "CHANNELS": channels,
            "HAS_BIAS": bias_C is not None,
            "IS_SILU": is_silu,
        },
        options={"num_warps": _WARPS},
    )
    if taps == 1:
        return (convolution,)
    keep = Launch(
        kernel=keep_inputs_kernel,
        grid=(len(sequences_SF), blocks),
        arguments={
            "inputs_ptr": inputs_TC,
            "past_ptr": past_NPC,
            "sequences_ptr": sequences_SF,
            "inputs_stride": inputs_TC.stride(0),
        },
        constants={"NUM_CHANNELS": num_channels, "PAST": taps - 1, "CHANNELS": channels},
        options={"num_warps": _WARPS},
    )
    return convolution, keep


def scan_launch(
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    log_decay: Tensor,
    gain_TH: Tensor,
    states_NHKV: Tensor,
    sequences_SF: Tensor,
    out_THV: Tensor,
    *,
    scale: float,
    delta: bool,
    normalize: bool,
) -> Launch:
    """The scan of all tokens of the sequences, int32 [S, 3] as of `SEQUENCE_FIELDS`."""
    _, num_heads, key_dim, value_dim = states_NHKV.shape
    assert states_NHKV.dtype in TRITON_TYPES, "states have a type that the kernel reads"
    rows = max(triton.next_power_of_2(key_dim), 16)
    columns = min(_STATE_ELEMENTS // rows, max(triton.next_power_of_2(value_dim), 16))
    return Launch(
        kernel=scan_kernel,
        grid=(len(sequences_SF), num_heads, triton.cdiv(value_dim, columns)),
        arguments={
            "query_ptr": query_TGK,
            "key_ptr": key_TGK,
            "value_ptr": value_THV,
            "decay_ptr": log_decay.contiguous(),
            "gain_ptr": gain_TH.contiguous(),
            "states_ptr": states_NHKV,
            "sequences_ptr": sequences_SF,
            "out_ptr": out_THV,
            "query_stride": query_TGK.stride(0),
            "key_stride": key_TGK.stride(0),
            "value_stride": value_THV.stride(0),
            "out_stride": out_THV.stride(0),
        },
        constants={
            "C": kernel_constants(
                KernelStates,
                num_heads=num_heads,
                group=num_heads // key_TGK.shape[1],
                key_dim=key_dim,
                value_dim=value_dim,
                rows=rows,
                columns=columns,
                scale=scale,
                has_channel_decays=log_decay.dim() == 3,
                is_delta=delta,
                is_normalized=normalize,
            )
        },
        options={"num_warps": _WARPS},
    )
