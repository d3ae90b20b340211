"""Mixture-of-experts feed-forward on the CPU: tokens grouped by expert, combined in fixed order.

T tokens, H hidden, E experts, K experts per token, F expert hidden.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.codecs import Weight
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_linear import (
    Allocate,
    compute_dtype,
    multiply,
    packed_linear_is_used,
)
from raymoe.kernels.packed_experts import (
    Biases,
    Clamp,
    Matrices,
    PackedExperts,
    PackedGatedFfn,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def gated_product(
    gate_TF: Tensor, up_TF: Tensor, activation: str, clamp: Clamp | None = None
) -> Tensor:
    """activation(gate) * up; with a clamp, (up + 1) * gate * sigmoid(gain * gate) within limits.

    Source: OpenAI, gpt-oss-120b & gpt-oss-20b model card (2025), section 2.2.
    """
    if clamp is None:
        return ACTIVATIONS[activation](gate_TF) * up_TF
    gate_TF = gate_TF.clamp(max=clamp.limit)
    up_TF = up_TF.clamp(-clamp.limit, clamp.limit)
    return (up_TF + 1) * gate_TF * torch.sigmoid(clamp.gain * gate_TF)


class Experts(Protocol):
    """The expert weights of one layer."""

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Sum of weight times expert output over the K experts of each token, [T, H].

        Args:
            hidden_TH: Input, float32, float16 or bfloat16.
            topk_ids_TK: int32 expert indices; distinct within a token.
            topk_weights_TK: float32 weights.
        """


class GatedFfn(Protocol):
    """A dense gated feed-forward: of a dense layer, or a shared expert."""

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """down(activation(gate(hidden)) * up(hidden)), [T, H]."""


class PlainExperts:
    """A loop over the experts that have tokens, oneDNN or MKL through torch. Also the reference.

    The products of a token are added in the order of its K slots, in float32.
    """

    def __init__(
        self,
        gate_EFH: Matrices,
        up_EFH: Matrices,
        down_EHF: Matrices,
        *,
        activation: str,
        biases: Sequence[Biases] | None = None,
        clamp: Clamp | None = None,
    ) -> None:
        check_activation(activation)
        self._ffns = [
            PlainGatedFfn(
                gate_EFH[expert],
                up_EFH[expert],
                down_EHF[expert],
                activation=activation,
                biases=None if biases is None else biases[expert],
                clamp=clamp,
            )
            for expert in range(len(gate_EFH))
        ]

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """See `Experts`."""
        return one_by_one(self._ffns, hidden_TH, topk_ids_TK, topk_weights_TK)


def one_by_one(
    ffns: Sequence[GatedFfn], hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
) -> Tensor:
    """As `Experts`, by the networks of those that have tokens; a token's sum in order of slots."""
    num_tokens, top_k = topk_ids_TK.shape
    slots_R = topk_ids_TK.reshape(-1).long()
    order_R = slots_R.argsort(stable=True)
    counts = torch.bincount(slots_R, minlength=len(ffns)).tolist()
    out_RH = hidden_TH.new_empty(num_tokens * top_k, hidden_TH.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        rows = order_R[begin : begin + count]
        begin += count
        if count:
            out_RH[rows] = ffns[expert](hidden_TH[rows // top_k])
    weighted_TKH = out_RH.view(num_tokens, top_k, hidden_TH.shape[1]) * topk_weights_TK[..., None]
    return weighted_TKH.sum(1).to(hidden_TH.dtype)


class PlainGatedFfn:
    """Three products through torch, each rounded to the type of the input. Also the reference."""

    def __init__(
        self,
        gate_FH: Weight,
        up_FH: Weight,
        down_HF: Weight,
        *,
        activation: str,
        biases: Biases | None = None,
        clamp: Clamp | None = None,
    ) -> None:
        check_activation(activation)
        self._gate_FH, self._up_FH, self._down_HF = gate_FH, up_FH, down_HF
        self._biases = (None, None, None) if biases is None else biases
        self._activation, self._clamp = activation, clamp

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """See `GatedFfn`."""
        gate_F, up_F, down_H = self._biases
        gate_TF = multiply(hidden_TH, self._gate_FH, gate_F)
        up_TF = multiply(hidden_TH, self._up_FH, up_F)
        product_TF = gated_product(gate_TF, up_TF, self._activation, self._clamp)
        return multiply(product_TF, self._down_HF, down_H)


def make_experts(
    gate_EFH: Matrices,
    up_EFH: Matrices,
    down_EHF: Matrices,
    *,
    activation: str,
    allocate: Allocate,
    biases: Sequence[Biases] | None = None,
    clamp: Clamp | None = None,
    dtype: torch.dtype | None = None,
) -> Experts:
    """The fastest experts for these weights on this machine.

    Weights may be lists of per-expert views: anything that indexes to [F, H], [F, H] and [H, F],
    with any strides. A packed form copies them into `allocate` (`packed_experts_bytes` in one
    piece) and keeps no reference. `dtype` is the type to compute in, which quantised weights need.
    """
    if packed_experts_are_used(compute_dtype(gate_EFH[0], dtype), activation):
        return PackedExperts(gate_EFH, up_EFH, down_EHF, allocate, biases=biases, clamp=clamp)
    return PlainExperts(
        gate_EFH, up_EFH, down_EHF, activation=activation, biases=biases, clamp=clamp
    )


def make_gated_ffn(
    gate_FH: Weight,
    up_FH: Weight,
    down_HF: Weight,
    *,
    activation: str,
    allocate: Allocate,
    dtype: torch.dtype | None = None,
) -> GatedFfn:
    """The fastest dense feed-forward for these weights on this machine; see `make_experts`.

    A packed form takes `packed_experts_bytes` of one expert from `allocate`.
    """
    if packed_experts_are_used(compute_dtype(gate_FH, dtype), activation):
        return PackedGatedFfn(gate_FH, up_FH, down_HF, allocate)
    return PlainGatedFfn(gate_FH, up_FH, down_HF, activation=activation)


def packed_experts_are_used(dtype: torch.dtype, activation: str) -> bool:
    """Whether `make_experts` and `make_gated_ffn` copy such weights into packed form here."""
    return activation == "silu" and packed_linear_is_used(dtype)


def check_activation(activation: str) -> None:
    """Raise `ConfigError` for an activation that no kernel knows."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
