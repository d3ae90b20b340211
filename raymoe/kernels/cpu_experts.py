"""Mixture-of-experts feed-forward on the CPU: tokens grouped by expert, combined in fixed order.

T tokens, H hidden, E experts, K experts per token, F expert hidden.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.errors import ConfigError
from raymoe.kernels.cpu_linear import Allocate

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Experts(Protocol):
    """The expert weights of one layer."""

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Sum of weight times expert output over the K experts of each token, [T, H].

        Args:
            hidden_TH: Input, float32, float16 or bfloat16.
            topk_ids_TK: int32 expert indices; distinct within a token.
            topk_weights_TK: float32 weights.
        """


class PlainExperts:
    """A loop over the experts that have tokens, oneDNN or MKL through torch. Also the reference.

    The products of a token are added in the order of its K slots, in float32.
    """

    def __init__(
        self, gate_EFH: Tensor, up_EFH: Tensor, down_EHF: Tensor, *, activation: str
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
        self._gate_EFH, self._up_EFH, self._down_EHF = gate_EFH, up_EFH, down_EHF
        self._activate = ACTIVATIONS[activation]

    def __call__(self, hidden_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """See `Experts`."""
        num_tokens, top_k = topk_ids_TK.shape
        slots_R = topk_ids_TK.reshape(-1).long()
        order_R = slots_R.argsort(stable=True)
        counts = torch.bincount(slots_R, minlength=len(self._gate_EFH)).tolist()
        out_RH = torch.empty(num_tokens * top_k, hidden_TH.shape[1], dtype=hidden_TH.dtype)
        begin = 0
        for expert, count in enumerate(counts):
            rows = order_R[begin : begin + count]
            begin += count
            if count:
                out_RH[rows] = self._expert(expert, hidden_TH[rows // top_k])
        weighted_TKH = out_RH.view(num_tokens, top_k, -1) * topk_weights_TK[..., None]
        return weighted_TKH.sum(1).to(hidden_TH.dtype)

    def _expert(self, expert: int, hidden_RH: Tensor) -> Tensor:
        gate_RF = functional.linear(hidden_RH, self._gate_EFH[expert])
        up_RF = functional.linear(hidden_RH, self._up_EFH[expert])
        return functional.linear(self._activate(gate_RF) * up_RF, self._down_EHF[expert])


def make_experts(
    gate_EFH: Tensor, up_EFH: Tensor, down_EHF: Tensor, *, activation: str, allocate: Allocate
) -> Experts:
    """The fastest experts for these weights on this machine.

    Weights may be lists of per-expert views: anything that indexes to [F, H], [F, H] and [H, F].
    A packed form copies them into `allocate` and keeps no reference.
    """
    del allocate
    return PlainExperts(gate_EFH, up_EFH, down_EHF, activation=activation)
