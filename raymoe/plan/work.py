"""The work of a model in numbers: operations and bytes of each layer, for bounds and costs."""

from dataclasses import dataclass
from typing import Self

from raymoe.specs.model import LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer; parameters are matrix elements, biases and norms are left out.

    Attributes:
        attention_parameters: Q, K, V and O projections.
        router_parameters: 0 in a dense layer.
        expert_parameters: Of one expert; 0 in a dense layer.
        common_parameters: Of the dense network or the shared expert.
        pair_flop: Of one pair of a query token and a context token, all heads.
        kv_token_bytes: KV of one token.
        query_width: Outputs of the query projection.
        kv_width: Outputs of the key projection, and of the value projection.
    """

    attention_parameters: int
    router_parameters: int
    expert_parameters: int
    common_parameters: int
    num_experts: int
    top_k: int
    pair_flop: int
    kv_token_bytes: int
    query_width: int
    kv_width: int

    @classmethod
    def of(cls, layer: LayerSpec, hidden: int, bytes_per_element: int) -> Self:
        """Count one layer."""
        attention, ffn = layer.attention, layer.ffn
        common, router, expert, num_experts, top_k = 0, 0, 0, 0, 0
        if isinstance(ffn, MoeSpec):
            num_experts, top_k = ffn.num_experts, ffn.top_k
            router, expert = hidden * num_experts, 3 * hidden * ffn.expert_hidden
            common = 3 * hidden * ffn.shared.hidden if ffn.shared else 0
        else:
            common = 3 * hidden * ffn.hidden
        return cls(
            attention_parameters=2 * hidden * (attention.query_width + attention.kv_width),
            router_parameters=router,
            expert_parameters=expert,
            common_parameters=common,
            num_experts=num_experts,
            top_k=top_k,
            pair_flop=4 * attention.query_width,
            kv_token_bytes=2 * attention.kv_width * bytes_per_element,
            query_width=attention.query_width,
            kv_width=attention.kv_width,
        )

    @property
    def ffn_token_flop(self) -> int:
        """Feed-forward operations of one token, router left out."""
        return 2 * (self.common_parameters + self.top_k * self.expert_parameters)

    def touched_experts(self, tokens: float) -> float:
        """Expected number of distinct experts that some token chooses, choices independent."""
        if not self.num_experts:
            return 0.0
        missed: float = (1.0 - self.top_k / self.num_experts) ** tokens
        return self.num_experts * (1.0 - missed)

    def ffn_parameters_touched(self, tokens: float) -> float:
        """Feed-forward weights that a pass of this many tokens reads."""
        return self.common_parameters + self.touched_experts(tokens) * self.expert_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """All layers and the head."""

    layers: tuple[LayerWork, ...]
    hidden_size: int
    head_parameters: int
    bytes_per_element: int

    @classmethod
    def of(cls, model: ModelSpec, bytes_per_element: int) -> Self:
        """Count a model whose weights and KV take `bytes_per_element` each."""
        layers = tuple(
            LayerWork.of(layer, model.hidden_size, bytes_per_element) for layer in model.layers
        )
        return cls(
            layers=layers,
            hidden_size=model.hidden_size,
            head_parameters=model.vocab_size * model.hidden_size,
            bytes_per_element=bytes_per_element,
        )

    @property
    def token_flop(self) -> int:
        """Operations of one token in all layers, attention scores and head left out."""
        return sum(
            2 * (layer.attention_parameters + layer.router_parameters) + layer.ffn_token_flop
            for layer in self.layers
        )

    @property
    def head_flop(self) -> int:
        """Operations of the logits of one token."""
        return 2 * self.head_parameters

    @property
    def pair_flop(self) -> int:
        """Operations of one pair of a query and a context token, all layers."""
        return sum(layer.pair_flop for layer in self.layers)

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token, all layers."""
        return sum(layer.kv_token_bytes for layer in self.layers)

    @property
    def all_weight_bytes(self) -> int:
        """Weights that a large pass reads."""
        layers = sum(
            layer.attention_parameters
            + layer.common_parameters
            + layer.num_experts * layer.expert_parameters
            for layer in self.layers
        )
        return self.bytes_per_element * (layers + self.head_parameters)

    def touched_weight_bytes(self, tokens: float) -> float:
        """Expected weights that a pass of this many tokens reads."""
        layers = sum(
            layer.attention_parameters + layer.ffn_parameters_touched(tokens)
            for layer in self.layers
        )
        return self.bytes_per_element * (layers + self.head_parameters)
