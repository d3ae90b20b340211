"""Experts and gated networks in one launch of our own kernel, on packed weights or codes.

T tokens, H hidden, E experts, K experts per token, F expert hidden.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.codecs import StoredMatrix, Weight
from raymoe.errors import UnsupportedModelError
from raymoe.kernels.cpu_linear import Allocate
from raymoe.kernels.packing import packing_for, packing_of
from raymoe.specs.weight_format import WeightFormat

Matrices = Tensor | Sequence[Weight]  # one matrix for each expert


class Biases(NamedTuple):
    """Of the three projections of one expert."""

    gate_F: Tensor
    up_F: Tensor
    down_H: Tensor


class Clamp(NamedTuple):
    """Limits of a gated product: see `gated_product`."""

    gain: float
    limit: float


class _PackedFfns:
    """Packed weights or codes of silu-gated feed-forwards, one after the other in one piece."""

    def __init__(
        self, gate_EFH: Matrices, up_EFH: Matrices, down_EHF: Matrices, allocate: Allocate
    ) -> None:
        _check_alike(gate_EFH, up_EFH)
        num_experts = len(gate_EFH)
        self.expert_size, hidden_size = gate_EFH[0].shape
        gate_up, down = packing_of(gate_EFH[0]), packing_of(down_EHF[0])
        gate_up_bytes = num_experts * gate_up.gate_up_bytes(self.expert_size, hidden_size)
        down_bytes = num_experts * down.linear_bytes(hidden_size, self.expert_size)
        memory = allocate(gate_up_bytes + down_bytes)
        self.gate_up, self.down = memory[:gate_up_bytes], memory[gate_up_bytes:]
        self.formats = (gate_up.format, down.format)
        gate_ups, downs = self.gate_up.view(num_experts, -1), self.down.view(num_experts, -1)
        for expert in range(num_experts):
            gate_up.pack_gate_up(gate_EFH[expert], up_EFH[expert], gate_ups[expert])
            down.pack_linear(down_EHF[expert], downs[expert])


class PackedExperts:
    """Sort, gather, gate and up, down and combine in one launch of our own kernel, silu only.

    Gate, up and down have float32 sums; the gated product is rounded to bfloat16. The products of a
    token are added in ascending order of expert, in float32, and rounded once: the bits of a token
    do not depend on the batch or the number of threads. Biases are kept in float32.
    """

    def __init__(
        self,
        gate_EFH: Matrices,
        up_EFH: Matrices,
        down_EHF: Matrices,
        allocate: Allocate,
        *,
        biases: Sequence[Biases] | None = None,
        clamp: Clamp | None = None,
    ) -> None:
        self._weights = _PackedFfns(gate_EFH, up_EFH, down_EHF, allocate)
        self._gate_up_bias_EX = self._down_bias_EX = None
        if biases is not None:
            self._gate_up_bias_EX = torch.stack([_pack_gate_up_bias(bias) for bias in biases])
            self._down_bias_EX = torch.stack([_padded(bias.down_H, 32) for bias in biases])
        self._gating = (1.0, math.inf, 0.0) if clamp is None else (*clamp, 1.0)

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """See `Experts`."""
        hidden_TH = _with_contiguous_rows(hidden_TH)
        out_TH = torch.empty(hidden_TH.shape, dtype=torch.bfloat16)
        _native.fused_experts(
            hidden_TH,
            topk_ids_TK.contiguous(),
            topk_weights_TK.contiguous(),
            self._weights.gate_up,
            self._weights.down,
            self._gate_up_bias_EX,
            self._down_bias_EX,
            self._weights.expert_size,
            *self._gating,
            out_TH,
            *self._weights.formats,
        )
        return out_TH


class PackedGatedFfn:
    """The kernel of `PackedExperts` with one expert for all tokens."""

    def __init__(self, gate_FH: Weight, up_FH: Weight, down_HF: Weight, allocate: Allocate) -> None:
        self._weights = _PackedFfns([gate_FH], [up_FH], [down_HF], allocate)

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """See `GatedFfn`."""
        hidden_TH = _with_contiguous_rows(hidden_TH)
        out_TH = torch.empty(hidden_TH.shape, dtype=torch.bfloat16)
        weights = self._weights
        _native.gated_ffn(
            hidden_TH,
            weights.gate_up,
            weights.down,
            weights.expert_size,
            out_TH,
            *weights.formats,
        )
        return out_TH


def packed_experts_bytes(
    num_experts: int,
    hidden_size: int,
    expert_size: int,
    *,
    gate_up: WeightFormat | None = None,
    down: WeightFormat | None = None,
) -> int:
    """Bytes that the packed experts of a layer take from `allocate`, in one piece.

    Args:
        num_experts: Experts.
        hidden_size: Inputs of gate and up.
        expert_size: Outputs of gate and up.
        gate_up: Format of gate and up, where they are quantised.
        down: Format of down, where it is.
    """
    gate_up_packing = packing_for(gate_up, expert_size, hidden_size)
    down_packing = packing_for(down, hidden_size, expert_size)
    expert_bytes = gate_up_packing.gate_up_bytes(expert_size, hidden_size)
    return num_experts * (expert_bytes + down_packing.linear_bytes(hidden_size, expert_size))


def _check_alike(gate_EFH: Matrices, up_EFH: Matrices) -> None:
    """Gate and up of an expert are packed as one matrix, so they must be stored alike."""
    for gate_FH, up_FH in zip(gate_EFH, up_EFH, strict=True):
        forms = [
            weight.format.name if isinstance(weight, StoredMatrix) else "plain"
            for weight in (gate_FH, up_FH)
        ]
        if forms[0] != forms[1]:
            raise UnsupportedModelError(
                f"gate_proj is stored as {forms[0]} and up_proj as {forms[1]}; in bfloat16 both "
                "must be stored alike (float32 takes them as they are)"
            )
        if not (isinstance(gate_FH, StoredMatrix) and isinstance(up_FH, StoredMatrix)):
            continue
        gate_order_H, up_order_H = gate_FH.pieces.get("order"), up_FH.pieces.get("order")
        if gate_order_H is None or up_order_H is None:
            continue
        if not torch.equal(gate_order_H, up_order_H):
            raise UnsupportedModelError(
                f"gate_proj and up_proj ({forms[0]}) have different orders of their inputs; in "
                "bfloat16 they must have the same (float32 takes them as they are)"
            )


def _pack_gate_up_bias(biases: Biases) -> Tensor:
    """16 of the gate and 16 of up in turn, as the outputs of the packed weights; float32."""
    gate_PC, up_PC = (_padded(bias_F, 16).view(-1, 16) for bias_F in (biases.gate_F, biases.up_F))
    return torch.stack([gate_PC, up_PC], dim=1).flatten()


def _padded(bias_O: Tensor, multiple: int) -> Tensor:
    return functional.pad(bias_O.detach().float(), (0, -len(bias_O) % multiple))


def _with_contiguous_rows(hidden_TH: Tensor) -> Tensor:
    return hidden_TH if hidden_TH.stride(1) == 1 else hidden_TH.contiguous()
