"""The second half of a decoder layer: a dense network, or a router, its experts and a shared one.

T tokens, H hidden, F hidden of a network, E experts, K experts per token.
"""

from typing import Protocol

import torch
from torch import Tensor

from raymoe.kernels.cpu_experts import GatedFfn, gated_product
from raymoe.kernels.cpu_router import Routing, add_gated_
from raymoe.model.loading import Loader
from raymoe.model.router import choose_experts
from raymoe.specs.model import DenseSpec, MoeSpec


class FeedForward(Protocol):
    """What follows the attention of a layer."""

    def route(self, normed_TH: Tensor) -> Routing | None:
        """The experts of each token; None where there are none to choose."""

    def __call__(self, normed_TH: Tensor, routing: Routing | None) -> Tensor:
        """What the network adds to the hidden state, [T, H]."""


class BiasedFfn:
    """A gated network whose three projections have biases."""

    def __init__(self, loader: Loader, prefix: str, activation: str) -> None:
        self._gate, self._up, self._down = (
            loader.linear([f"{prefix}{part}_proj"], has_bias=True)
            for part in ("gate", "up", "down")
        )
        self._activation = activation

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """down(activation(gate(hidden)) * up(hidden)), [T, H]."""
        gate_TF, up_TF = self._gate(hidden_TH), self._up(hidden_TH)
        return self._down(gated_product(gate_TF, up_TF, self._activation))


def load_network(spec: DenseSpec, loader: Loader, prefix: str) -> GatedFfn:
    """A dense network, with biases or without."""
    if spec.has_bias:
        return BiasedFfn(loader, prefix, spec.activation)
    return loader.gated_ffn(prefix, spec.activation)


class Dense:
    """Gated network that every token visits."""

    def __init__(self, spec: DenseSpec, loader: Loader, prefix: str) -> None:
        self._ffn = load_network(spec, loader, prefix)

    def route(self, normed_TH: Tensor) -> None:
        """See `FeedForward`."""

    def __call__(self, normed_TH: Tensor, routing: Routing | None) -> Tensor:
        """See `FeedForward`."""
        del routing
        return self._ffn(normed_TH)


class MoE:
    """Router and experts, and the expert that every token visits where the model has one."""

    def __init__(self, spec: MoeSpec, loader: Loader, prefix: str) -> None:
        self._spec = spec
        self._router = loader.linear([f"{prefix}gate"], has_bias=spec.router.has_bias)
        self._selection_bias_E = None
        if spec.router.has_selection_bias:
            # Trained in steps of 0.001 (DeepSeek-V3, section 4.2): finer than bfloat16 is near 1.
            self._selection_bias_E = loader.score_vector(f"{prefix}gate.e_score_correction_bias")
        self._experts = loader.experts(f"{prefix}experts.", spec)
        self._shared = self._shared_gate = None
        if spec.shared is not None:
            network = spec.shared.network(spec.activation)
            self._shared = load_network(network, loader, f"{prefix}shared_expert.")
            if spec.shared.is_gated:
                self._shared_gate = loader.linear([f"{prefix}shared_expert_gate"])

    def route(self, normed_TH: Tensor) -> Routing:
        """See `FeedForward`."""
        size = (len(normed_TH), self._spec.num_experts)
        logits_TE = torch.empty(size, dtype=torch.float32, device=normed_TH.device)
        return choose_experts(
            self._router(normed_TH, logits_TE), self._spec, self._selection_bias_E
        )

    def __call__(self, normed_TH: Tensor, routing: Routing | None) -> Tensor:
        """See `FeedForward`."""
        assert routing is not None, "the experts of a layer need the routing of its router"
        out_TH = self._experts(normed_TH, *routing)
        if self._shared is None:
            return out_TH
        shared_TH = self._shared(normed_TH)
        if self._shared_gate is None:
            return out_TH.add_(shared_TH)
        return add_gated_(out_TH, shared_TH, self._shared_gate(normed_TH))
