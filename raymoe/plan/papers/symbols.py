"""A model as the papers count it: equal layers, experts, what is not an expert, 16-bit numbers.

Assumptions:
- Weights, KV and hidden states take two bytes each.
- Layers that differ are replaced by their mean: leading dense layers, windows.
- Shared experts and dense networks count as what is not an expert, like the projections. Routers,
  norms, embeddings and the head are left out, as in the code of MoE-Lightning.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Self

from raymoe.errors import ConfigError
from raymoe.plan.work import ModelWork
from raymoe.specs.model import ModelSpec

BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """One model in the symbols that the papers share.

    Source: MoE-Lightning, table 1; MoE-Lens, section 5.1; MoE-Gen, table 2.

    Attributes:
        num_layers: l.
        hidden_size: h1 of MoE-Lightning, h of MoE-Lens.
        expert_hidden: h2, h_i.
        num_experts: n_e, N_e: of a layer that has experts.
        top_k: k, N_k.
        num_heads: n_q: query heads.
        query_width: n_q times the size of a head.
        kv_token_bytes: KV of one token in one layer.
        pair_flop: Operations of a query and a context token, all heads, both products.
        expert_bytes: One expert.
        layer_expert_bytes: All experts of a layer.
        layer_dense_bytes: What is not an expert, of a layer.
    """

    num_layers: int
    hidden_size: int
    expert_hidden: int
    num_experts: int
    top_k: int
    num_heads: int
    query_width: float
    kv_token_bytes: float
    pair_flop: float
    expert_bytes: int
    layer_expert_bytes: float
    layer_dense_bytes: float

    @classmethod
    def of(cls, model: ModelSpec) -> Self:
        """Count a model.

        Raises:
            ConfigError: No layer has experts.
        """
        work = ModelWork.of(model, BYTES_PER_ELEMENT)
        sparse = [layer for layer in work.layers if layer.num_experts]
        if not sparse:
            raise ConfigError(f"{model.name} has no experts; the papers model what streams experts")
        expert = max(layer.expert.parameters for layer in sparse)
        layers = work.layers
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            expert_hidden=expert // (3 * model.hidden_size),
            num_experts=max(layer.num_experts for layer in sparse),
            top_k=max(layer.top_k for layer in sparse),
            num_heads=max(layer.attention.num_heads for layer in model.layers),
            query_width=fmean(layer.query_width for layer in layers),
            kv_token_bytes=fmean(layer.kv_token_bytes for layer in layers),
            pair_flop=fmean(layer.pair_flop for layer in layers),
            expert_bytes=BYTES_PER_ELEMENT * expert,
            layer_expert_bytes=BYTES_PER_ELEMENT
            * fmean(layer.num_experts * layer.expert.parameters for layer in layers),
            layer_dense_bytes=BYTES_PER_ELEMENT
            * fmean(layer.attention_parameters + layer.common.parameters for layer in layers),
        )

    @property
    def expert_bytes_all(self) -> float:
        """All experts of all layers."""
        return self.num_layers * self.layer_expert_bytes

    @property
    def dense_bytes_all(self) -> float:
        """What is not an expert, of all layers."""
        return self.num_layers * self.layer_dense_bytes

    @property
    def weight_bytes(self) -> float:
        """All layers."""
        return self.expert_bytes_all + self.dense_bytes_all

    @property
    def kv_token_bytes_all(self) -> float:
        """KV of one token in all layers."""
        return self.num_layers * self.kv_token_bytes

    def expert_flop(self, tokens: float) -> float:
        """Operations of the experts of one layer: two for each weight that a token meets."""
        visited = tokens * self.top_k * self.layer_expert_bytes / self.num_experts
        return 2 * visited / BYTES_PER_ELEMENT
