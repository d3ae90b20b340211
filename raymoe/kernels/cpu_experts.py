"""MoE experts and gated FFNs on the CPU: fused kernels on packed weights, and torch.

T tokens, H hidden size, E experts, K experts per token, F intermediate size of an expert.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.codecs import StoredMatrix, Weight, as_tensor
from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.kernels.cpu_linear import (
    Allocate,
    compute_dtype,
    multiply,
    packed_linear_is_used,
    packing_for,
    packing_of,
)
from raymoe.specs.weight_format import WeightFormat

Matrices = Tensor | Sequence[Weight]  # one matrix per expert
TopK = tuple[Tensor, Tensor]  # expert ids int32 and weights float32 of each token, [T, K] each


class ExpertGroup(NamedTuple):
    """Neighbouring experts, and float32 [T, H] to which their weighted outputs are added."""

    experts: range
    sum_TH: Tensor


class Biases(NamedTuple):
    gate_F: Tensor
    up_F: Tensor
    down_H: Tensor


class Clamp(NamedTuple):
    """As `specs.layers.ClampSpec`."""

    gain: float
    limit: float
    gate_limit: float
    offset: float = 1.0


# Activations x * sigmoid(gain * x * (1 + cubic * x^2)), by gain and cubic: those of the fused
# kernels. The tanh form of gelu is one because (1 + tanh(x)) / 2 = sigmoid(2 x), and relu because
# the sigmoid of a large gain is a step: it is exact where |x| is above 1e-28.
SIGMOID_GATES = {
    "silu": (1.0, 0.0),
    "gelu_pytorch_tanh": (math.sqrt(8 / math.pi), 0.044715),
    "relu2": (1e30, 0.0),
}
# Of these, the ones whose gate is the up projection itself: its products are computed once.
SQUARES = {"relu2"}


class _PackedFfns:
    def __init__(
        self, gate_EFH: Matrices, up_EFH: Matrices, down_EHF: Matrices, allocate: Allocate
    ) -> None:
        _check_stored_the_same(gate_EFH, up_EFH)
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
    """Sort, gather, gate and up, down and combine in one fused kernel, for `SIGMOID_GATES`.

    Squares would be packed with their projection twice, and use `RowMajorExperts` instead.

    Gate, up and down accumulate in float32; the gated product is rounded to bfloat16. Expert
    outputs of a token are added in ascending order of expert, in float32, and rounded once: the
    bits of a token do not depend on the batch or the number of threads. Biases are kept in float32.
    """

    def __init__(
        self,
        gate_EFH: Matrices,
        up_EFH: Matrices,
        down_EHF: Matrices,
        allocate: Allocate,
        *,
        activation: str = "silu",
        biases: Sequence[Biases] | None = None,
        clamp: Clamp | None = None,
    ) -> None:
        self._weights = _PackedFfns(gate_EFH, up_EFH, down_EHF, allocate)
        self._gate_up_bias_EX = self._down_bias_EX = None
        if biases is not None:
            self._gate_up_bias_EX = torch.stack([_pack_gate_up_bias(bias) for bias in biases])
            self._down_bias_EX = torch.stack([_padded(bias.down_H, 32) for bias in biases])
        self._gating = _gating(activation, clamp)

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
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


def _gating(activation: str, clamp: Clamp | None) -> tuple[float, float, float, float, float]:
    if clamp is not None:
        return clamp.gain, 0.0, clamp.limit, clamp.offset, clamp.gate_limit
    return (*SIGMOID_GATES[activation], math.inf, 0.0, math.inf)


class PackedGatedFfn:
    """The kernel of `PackedExperts` with one expert for all tokens."""

    def __init__(
        self,
        gate_FH: Weight,
        up_FH: Weight,
        down_HF: Weight,
        allocate: Allocate,
        *,
        activation: str = "silu",
    ) -> None:
        self._weights = _PackedFfns([gate_FH], [up_FH], [down_HF], allocate)
        self._gating = SIGMOID_GATES[activation]

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        hidden_TH = _with_contiguous_rows(hidden_TH)
        out_TH = torch.empty(hidden_TH.shape, dtype=torch.bfloat16)
        weights = self._weights
        _native.gated_ffn(
            hidden_TH,
            weights.gate_up,
            weights.down,
            weights.expert_size,
            *self._gating,
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
    """Return the bytes that packed experts request from `allocate` in one piece."""
    gate_up_packing = packing_for(gate_up, expert_size, hidden_size)
    down_packing = packing_for(down, hidden_size, expert_size)
    expert_bytes = gate_up_packing.gate_up_bytes(expert_size, hidden_size)
    return num_experts * (expert_bytes + down_packing.linear_bytes(hidden_size, expert_size))


def _check_stored_the_same(gate_EFH: Matrices, up_EFH: Matrices) -> None:
    for gate_FH, up_FH in zip(gate_EFH, up_EFH, strict=True):
        forms = [
            weight.format.name if isinstance(weight, StoredMatrix) else "plain"
            for weight in (gate_FH, up_FH)
        ]
        if forms[0] != forms[1]:
            raise UnsupportedModelError(
                f"gate_proj is stored as {forms[0]} and up_proj as {forms[1]}; in bfloat16 both "
                "must be stored the same (float32 takes them as they are)"
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
    """Interleave the biases in blocks of 16 like the outputs of the packed weights; float32."""
    gate_PC, up_PC = (_padded(bias_F, 16).view(-1, 16) for bias_F in (biases.gate_F, biases.up_F))
    return torch.stack([gate_PC, up_PC], dim=1).flatten()


def _padded(bias_O: Tensor, multiple: int) -> Tensor:
    return functional.pad(bias_O.detach().float(), (0, -len(bias_O) % multiple))


def _with_contiguous_rows(hidden_TH: Tensor) -> Tensor:
    return hidden_TH if hidden_TH.stride(1) == 1 else hidden_TH.contiguous()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": functional.relu,  # of a gate that is the up projection itself
}


def gated_product(
    gate_TF: Tensor, up_TF: Tensor, activation: str, clamp: Clamp | None = None
) -> Tensor:
    """Return activation(gate) * up, or the product of `specs.layers.ClampSpec`.

    Source: OpenAI, gpt-oss-120b & gpt-oss-20b model card (2025), section 2.2.
    """
    if clamp is None:
        return ACTIVATIONS[activation](gate_TF) * up_TF
    gate_TF = gate_TF.clamp(max=clamp.gate_limit)
    up_TF = up_TF.clamp(-clamp.limit, clamp.limit)
    return (up_TF + clamp.offset) * gate_TF * torch.sigmoid(clamp.gain * gate_TF)


GatedProduct = Callable[[Tensor, Tensor, str, Clamp | None], Tensor]


class Experts(Protocol):
    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of expert outputs over the K experts of each token, [T, H].

        The expert ids of a token are int32 and distinct.
        """


@runtime_checkable
class ExpertsInGroups(Experts, Protocol):
    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        """Add the weighted outputs of a group of experts to the sums of the tokens.

        Groups in ascending order, from zero to all experts, give the sums that `__call__` rounds:
        bits do not depend on the groups.
        """


class GatedFfn(Protocol):
    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """Return down(activation(gate(hidden)) * up(hidden)), [T, H]."""


class PlainExperts:
    """Reference: loops over the experts that have tokens; torch (oneDNN or MKL) multiplies.

    Expert outputs of a token are added in ascending order of expert, in float32.
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
        return one_by_one(self._ffns, hidden_TH, topk_ids_TK, topk_weights_TK)

    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        add_one_by_one(self._ffns, hidden_TH, routing, group)


class RowMajorExperts:
    """Experts on matrices as they lie in memory, for `SIGMOID_GATES` and the clamped product.

    Products accumulate in float32; the gated product is rounded to the type of the hidden states.
    Outputs of a token are added to its float32 sum in ascending order of expert: its bits do not
    depend on the batch or the number of threads. Quantised matrices are decoded expert by expert.
    """

    def __init__(
        self,
        gate_EFH: Matrices,
        up_EFH: Matrices,
        down_EHF: Matrices,
        *,
        activation: str = "silu",
        biases: Sequence[Biases] | None = None,
        clamp: Clamp | None = None,
    ) -> None:
        """Keep the weights; plain ones are contiguous and have the type of the hidden states."""
        self._weights = list(zip(gate_EFH, up_EFH, down_EHF, strict=True))
        self._expert_size, _ = gate_EFH[0].shape
        plain = [
            [weight for weight in each if isinstance(weight, Tensor)] for each in self._weights
        ]
        self.are_decoded = any(len(each) < 3 for each in plain)
        self._matrices_E3 = torch.zeros(len(plain), 3, dtype=torch.int64)
        if not self.are_decoded:
            for expert, each in enumerate(plain):
                self._set(expert, each)
        self._biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if biases is not None:
            gate_EF, up_EF, down_EH = (
                torch.stack(each).float() for each in zip(*biases, strict=True)
            )
            self._biases = gate_EF, up_EF, down_EH
        self._gating = _gating(activation, clamp)

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        sum_TH = torch.zeros(hidden_TH.shape)
        everything = ExpertGroup(range(len(self._weights)), sum_TH)
        self.add(hidden_TH, (topk_ids_TK, topk_weights_TK), everything)
        return sum_TH.to(hidden_TH.dtype)

    def add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        """Add the weighted outputs of a group of experts to the sums of the tokens."""
        hidden_TH = _with_contiguous_rows(hidden_TH)
        routing = routing[0].contiguous(), routing[1].contiguous()
        if not self.are_decoded:
            self._add(hidden_TH, routing, group)
            return
        counts = torch.bincount(routing[0].flatten(), minlength=len(self._weights)).tolist()
        for expert in group.experts:
            if counts[expert]:
                decoded = [as_tensor(each, hidden_TH.dtype) for each in self._weights[expert]]
                decoded = [each.contiguous() for each in decoded]
                self._set(expert, decoded)
                self._add(hidden_TH, routing, group._replace(experts=range(expert, expert + 1)))

    def _set(self, expert: int, weights: Sequence[Tensor]) -> None:
        assert all(weight.is_contiguous() for weight in weights)
        addresses = [weight.data_ptr() for weight in weights]
        self._matrices_E3[expert] = torch.tensor(addresses, dtype=torch.int64)

    def _add(self, hidden_TH: Tensor, routing: TopK, group: ExpertGroup) -> None:
        _native.add_row_experts(
            hidden_TH,
            *routing,
            self._matrices_E3,
            self._expert_size,
            group.experts.start,
            group.experts.stop,
            *self._biases,
            *self._gating,
            group.sum_TH,
        )


def row_major_experts_are_used(activation: str, clamp: Clamp | None) -> bool:
    """Whether cores compute experts by `RowMajorExperts` on this machine."""
    is_known = activation in SIGMOID_GATES or clamp is not None
    return is_known and _native.active_isa() != "scalar"


def one_by_one(
    ffns: Sequence[GatedFfn], hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
) -> Tensor:
    """Return the weighted sums of all experts, [T, H]."""
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    sum_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=dtype)
    everything = ExpertGroup(range(len(ffns)), sum_TH)
    add_one_by_one(ffns, hidden_TH, (topk_ids_TK, topk_weights_TK), everything)
    return sum_TH.to(hidden_TH.dtype)


def add_one_by_one(
    ffns: Sequence[GatedFfn], hidden_TH: Tensor, routing: TopK, group: ExpertGroup
) -> None:
    """Add what a group of experts gives; loops over the FFNs of those that have tokens."""
    topk_ids_TK, topk_weights_TK = routing
    experts, sum_TH = group
    slots_R, weights_R1 = topk_ids_TK.reshape(-1).long(), topk_weights_TK.reshape(-1, 1)
    order_R = slots_R.argsort(stable=True)
    counts = torch.bincount(slots_R, minlength=len(ffns)).tolist()
    begin = sum(counts[: experts.start])
    for expert in experts:
        rows = order_R[begin : begin + counts[expert]]
        begin += counts[expert]
        if len(rows):
            tokens = rows // topk_ids_TK.shape[1]
            weighted_RH = ffns[expert](hidden_TH[tokens]) * weights_R1[rows]
            sum_TH[tokens] = weighted_RH.add_(sum_TH[tokens])


class PlainGatedFfn:
    """Reference: three products through torch, each rounded to the type of the input."""

    def __init__(
        self,
        gate_FH: Weight,
        up_FH: Weight,
        down_HF: Weight,
        *,
        activation: str,
        biases: Biases | None = None,
        clamp: Clamp | None = None,
        product: GatedProduct = gated_product,
    ) -> None:
        check_activation(activation)
        self._gate_FH, self._up_FH, self._down_HF = gate_FH, up_FH, down_HF
        self._product = product
        self._biases = (None, None, None) if biases is None else biases
        self._activation, self._clamp = activation, clamp

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        gate_F, up_F, down_H = self._biases
        up_TF = gate_TF = multiply(hidden_TH, self._up_FH, up_F)
        if self._gate_FH is not self._up_FH:
            gate_TF = multiply(hidden_TH, self._gate_FH, gate_F)
        product_TF = self._product(gate_TF, up_TF, self._activation, self._clamp)
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
    """Return the fastest experts for these weights on this machine.

    Weights may be lists of per-expert views: anything that indexes to [F, H], [F, H] and [H, F],
    with any strides. Packed experts copy them into `allocate` (`packed_experts_bytes` in one piece)
    and keep no reference. `dtype` is the compute type; quantised weights need it.
    """
    compute = compute_dtype(gate_EFH[0], dtype)
    if packed_experts_are_used(compute, activation):
        return PackedExperts(
            gate_EFH, up_EFH, down_EHF, allocate, activation=activation, biases=biases, clamp=clamp
        )
    if activation in SQUARES and packed_linear_is_used(compute):
        return RowMajorExperts(
            gate_EFH, up_EFH, down_EHF, activation=activation, biases=biases, clamp=clamp
        )
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
    """Return the fastest gated FFN for these weights on this machine, as `make_experts` does.

    A packed FFN requests `packed_experts_bytes` of one expert from `allocate`.
    """
    if packed_experts_are_used(compute_dtype(gate_FH, dtype), activation):
        return PackedGatedFfn(gate_FH, up_FH, down_HF, allocate, activation=activation)
    return PlainGatedFfn(gate_FH, up_FH, down_HF, activation=activation)


def packed_experts_are_used(dtype: torch.dtype, activation: str) -> bool:
    return activation in SIGMOID_GATES.keys() - SQUARES and packed_linear_is_used(dtype)


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
