"""Layers whose cache is a state of fixed size for each sequence, on CPUs and GPUs.

A batch that was prepared for a device is left to the kernels of `gpu_state`. Of others they
read `query_start`, `context_tokens` and `slots`, which are distinct where there are new tokens. A
sequence all of whose tokens are new starts from zero, whatever its slot holds.
"""

from typing import Literal

from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.gpu_state.scan import StateBatch, causal_conv_on_device, scan_on_device


def causal_conv(  # noqa: PLR0917 - an operator: its tensors are its arguments
    inputs_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    states_NPC: Tensor,
    batch: AttentionBatch | StateBatch,
    *,
    activation: Literal["silu", "none"],
) -> Tensor:
    """Convolve each channel with its W last inputs, the newest last; returns [T, C].

    A token's result is a float32 sum, rounded once, after the activation. Its bits depend neither
    on the batch, nor on the steps that its sequence was cut into, nor on the number of threads.

    Args:
        inputs_TC: float32, float16 or bfloat16; rows may be strided.
        weight_CW: float32. The transpose of a contiguous [W, C] is used as it is, others are
            copied in every call.
        bias_C: float32.
        states_NPC: The W - 1 last inputs of each sequence, the oldest first, in the type of the
            inputs; changed in place.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    if activation not in {"silu", "none"}:
        raise ConfigError(f"causal_conv: activation is {activation!r}, expected 'silu' or 'none'")
    if isinstance(batch, StateBatch):
        return causal_conv_on_device(
            inputs_TC, weight_CW, bias_C, states_NPC, batch, activation=activation
        )
    out_TC = inputs_TC.new_empty(inputs_TC.shape)
    try:
        _native.causal_conv(
            inputs_TC,
            weight_CW.t().contiguous(),
            bias_C,
            states_NPC,
            batch.query_start,
            batch.context_tokens,
            _slots(batch),
            activation == "silu",
            out_TC,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_TC


def scan(  # noqa: PLR0913, PLR0917 - an operator: its tensors are its arguments
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    log_decay: Tensor,
    gain_TH: Tensor,
    states_NHKV: Tensor,
    batch: AttentionBatch | StateBatch,
    *,
    scale: float,
    delta: bool,
    normalize: bool,
) -> Tensor:
    """Update each sequence's state token by token and read it; returns [T, H, V].

    With the query q and key k of the head's group h // (H // G), for every token in float32:

        state *= exp(log_decay), for each row if [T, H, K]
        state += k u^T, where u = gain * (v - state^T k) if delta, else gain * v
        out = state^T (scale * q), rounded once

    Gated DeltaNet has decays for each head and delta, Kimi Delta Attention decays for each channel
    and delta, Mamba-2 decays for each head and no delta (C is the query, B the key, x the value,
    dt the gain). A token's bits depend neither on the batch, nor on the steps that its sequence was
    cut into, nor on the number of threads. States in bfloat16 are widened when a step begins and
    rounded, to nearest even, after the sequence's last new token: bits then do depend on the steps
    that the sequence was cut into, and still neither on the batch nor on the number of threads.

    Args:
        query_TGK: float32, float16 or bfloat16, as key and value; K and V are multiples of 8, K at
            most 256. Tokens may be strided, so that the three can be views of one tensor.
        log_decay: float32 [T, H] or [T, H, K], at most 0.
        gain_TH: float32.
        states_NHKV: float32 or bfloat16; changed in place.
        normalize: Queries and keys are divided by sqrt(sum of squares + 1e-6) first.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    inputs = (query_TGK, key_TGK, value_THV, log_decay, gain_TH, states_NHKV)
    if isinstance(batch, StateBatch):
        return scan_on_device(*inputs, batch, scale=scale, delta=delta, normalize=normalize)
    out_THV = value_THV.new_empty(value_THV.shape)
    try:
        _native.scan(
            *inputs,
            batch.query_start,
            batch.context_tokens,
            _slots(batch),
            scale,
            delta,
            normalize,
            out_THV,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_THV


def _slots(batch: AttentionBatch) -> Tensor:
    if batch.slots is None:
        raise ConfigError("slots is None; layers that keep states need the slot of each sequence")
    return batch.slots
