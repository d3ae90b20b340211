"""Gates of the results of attention and of recurrent layers; native kernels on cores, else torch.

T tokens, X columns, V columns of a head, A heads.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.kernels.elementwise import native_reads, rms_norm, weigh_norm
from raymoe.specs.attention.kind import GateActivation

AnyActivation = GateActivation | Literal["silu"]

_ACTIVATIONS: Mapping[AnyActivation, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "silu": functional.silu,
}


def gate_values(values_TX: Tensor, gates_TA: Tensor, activation: AnyActivation) -> Tensor:
    """Multiply heads by their gates, one for each head or for each column, [T, X].

    A gate is computed in float32 and rounded before it multiplies.
    """
    if activation != "softplus" and native_reads(values_TX) and native_reads(gates_TA):
        out_TX = values_TX.new_empty(values_TX.shape)
        _native.gate_values(values_TX, gates_TA, activation, out_TX)
        return out_TX
    factors_TA = _ACTIVATIONS[activation](gates_TA.float()).to(values_TX.dtype)
    heads_TAV = values_TX.view(*gates_TA.shape, values_TX.shape[1] // gates_TA.shape[1])
    return (heads_TAV * factors_TA[..., None]).flatten(1)


def norm_and_gate(
    values_TX: Tensor,
    weight_V: Tensor,
    gates_TX: Tensor,
    eps: float,
    *,
    activation: AnyActivation,
    rounds_norm: bool,
) -> Tensor:
    """Multiply the RMS norm of each head by float32 gates, [T, X].

    Args:
        rounds_norm: The norm is rounded as `rms_norm` does; otherwise the product alone.
    """
    if native_reads(values_TX, weight_V) and native_reads(gates_TX) and activation != "softplus":
        out_TX = values_TX.new_empty(values_TX.shape)
        _native.norm_and_gate(values_TX, weight_V, gates_TX, eps, rounds_norm, activation, out_TX)
        return out_TX
    values_NV = values_TX.reshape(-1, len(weight_V))
    if not rounds_norm:
        values_NV, weight_V = values_NV.float(), weight_V.float()
    normed_TX = rms_norm(values_NV, weight_V, eps).view_as(values_TX)
    return (normed_TX * _ACTIVATIONS[activation](gates_TX.float())).to(values_TX.dtype)


def gate_and_norm(
    values_TX: Tensor, weight_X: Tensor, gates_TX: Tensor, *, num_groups: int, eps: float
) -> Tensor:
    """Return the RMS norm of each group of columns times the SiLU of its gates, [T, X]."""
    is_native = native_reads(values_TX, weight_X) and native_reads(gates_TX)
    if is_native and len(weight_X) // num_groups <= _native.MAX_GROUP_WIDTH:
        out_TX = values_TX.new_empty(values_TX.shape)
        _native.gate_and_norm(values_TX, weight_X, gates_TX, num_groups, eps, out_TX)
        return out_TX
    gated_TX = values_TX * functional.silu(gates_TX.float())
    gated_TGX = gated_TX.view(len(gated_TX), num_groups, len(weight_X) // num_groups)
    mean_TG1 = gated_TGX.square().mean(-1, keepdim=True)
    normed_TX = (gated_TGX * torch.rsqrt(mean_TG1 + eps)).flatten(1)
    return weigh_norm(normed_TX, weight_X, None, values_TX.dtype)
