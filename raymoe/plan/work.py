"""The work of a model in numbers: operations and bytes of each layer, for bounds and costs.

Assumptions:
- Biases and norms are left out. A quantised matrix takes its stored bytes wherever it is read.
- Latent attention decodes in the absorbed form: queries are carried into the latent space before
  attention and results out of it behind, so that attention reads nothing but the cache. Prompts
  take the plain form; its products with the same matrices are as many.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Self

from raymoe.specs.layer_weights import (
    EMBEDDING,
    HEAD,
    KV_UP,
    OUTPUT,
    ROUTER,
    Shape,
    attention_weights,
    common_weights,
    expert_weights,
    num_elements,
)
from raymoe.specs.layers import AttentionSpec, LatentAttentionSpec, LayerSpec, MoeSpec
from raymoe.specs.model import ModelSpec

Weights = Iterable[tuple[str, Shape]]

_READERS = ((OUTPUT, "post"), (ROUTER, "router"), (KV_UP, "unfold"))


class Matrices(NamedTuple):
    """Matrices that are read together.

    Attributes:
        parameters: Elements.
        num_bytes: Bytes, scales included.
    """

    parameters: int = 0
    num_bytes: int = 0

    def plus(self, other: "Matrices") -> "Matrices":
        """Both together."""
        return Matrices(self.parameters + other.parameters, self.num_bytes + other.num_bytes)

    def share(self, part: int, whole: int) -> "Matrices":
        """The share of so many outputs of each head."""
        return Matrices(self.parameters * part // whole, self.num_bytes * part // whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer.

    Attributes:
        pre: Projections before attention.
        post: Projections behind it, without the router.
        router: Empty in a dense layer.
        expert: Of one expert; empty in a dense layer.
        common: Of the dense network or the shared expert.
        pair_flop: Of one pair of a token that decodes and a context token, all heads.
        prefill_pair_flop: The same of a prompt token.
        kv_token_bytes: KV of one token.
        query_width: Elements of the queries of a token that decodes.
        output_width: Elements of its result.
        window: Tokens that a token sees at most; None for all.
    """

    pre: Matrices
    post: Matrices
    router: Matrices
    expert: Matrices
    common: Matrices
    num_experts: int
    top_k: int
    pair_flop: int
    prefill_pair_flop: int
    kv_token_bytes: int
    query_width: int
    output_width: int
    window: int | None = None

    @classmethod
    def of(cls, model: ModelSpec, i: int, bytes_per_element: int, kv_element_bytes: int) -> Self:
        """Count layer `i` of a model; see `ModelWork.of`."""
        layer, hidden = model.layers[i], model.hidden_size

        def count(weights: Weights) -> Matrices:
            matrices = [(name, shape) for name, shape in weights if len(shape) > 1]
            num_bytes = model.bytes_of(matrices, bytes_per_element, i)
            return Matrices(num_elements(matrices), num_bytes)

        parts = {part: count(weights) for part, weights in _by_reader(layer, hidden).items()}
        attention, moe = layer.attention, layer.ffn if isinstance(layer.ffn, MoeSpec) else None
        if isinstance(attention, LatentAttentionSpec):
            keys, values = attention.nope_head_dim, attention.value_head_dim
            parts["pre"] = parts["pre"].plus(parts["unfold"].share(keys, keys + values))
            parts["post"] = parts["post"].plus(parts["unfold"].share(values, keys + values))
        return cls(
            pre=parts["pre"],
            post=parts["post"],
            router=parts["router"],
            expert=count(expert_weights(moe, hidden)) if moe else Matrices(),
            common=count(common_weights(layer, hidden)),
            num_experts=moe.num_experts if moe else 0,
            top_k=moe.top_k if moe else 0,
            pair_flop=2 * (attention.query_width + attention.output_width),
            prefill_pair_flop=2 * attention.prompt_width,
            kv_token_bytes=attention.cache_width * kv_element_bytes,
            query_width=attention.query_width,
            output_width=attention.output_width,
            window=_window(attention),
        )

    @property
    def attention_parameters(self) -> int:
        """Elements of all projections around attention."""
        return self.pre.parameters + self.post.parameters

    @property
    def router_parameters(self) -> int:
        """Elements of the router."""
        return self.router.parameters

    @property
    def ffn_token_flop(self) -> int:
        """Feed-forward operations of one token, router left out."""
        return 2 * (self.common.parameters + self.top_k * self.expert.parameters)

    def touched_experts(self, tokens: float) -> float:
        """Expected number of distinct experts that some token chooses, choices independent."""
        if not self.num_experts:
            return 0.0
        missed: float = (1.0 - self.top_k / self.num_experts) ** tokens
        return self.num_experts * (1.0 - missed)

    def weight_bytes(self, num_experts: float) -> float:
        """Bytes of the layer with so many of its experts."""
        always = self.pre.num_bytes + self.post.num_bytes + self.router.num_bytes
        return always + self.common.num_bytes + num_experts * self.expert.num_bytes


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """All layers and the head.

    Attributes:
        bytes_per_element: Of activations, and of weights that are not quantised.
        num_ranks: Ranks that add up their parts of the hidden state, twice in each layer.
    """

    layers: tuple[LayerWork, ...]
    hidden_size: int
    head: Matrices
    bytes_per_element: int
    num_ranks: int = 1

    @classmethod
    def of(
        cls, model: ModelSpec, bytes_per_element: int, *, kv_element_bytes: int | None = None
    ) -> Self:
        """Count a model.

        Args:
            model: The model.
            bytes_per_element: Of activations, and of weights that are not quantised.
            kv_element_bytes: Of the KV cache; as activations by default.
        """
        kv_bytes = kv_element_bytes or bytes_per_element
        shape = (model.vocab_size, model.hidden_size)
        head = EMBEDDING if model.tie_word_embeddings else HEAD
        return cls(
            layers=tuple(
                LayerWork.of(model, i, bytes_per_element, kv_bytes) for i in range(model.num_layers)
            ),
            hidden_size=model.hidden_size,
            head=Matrices(prod(shape), model.bytes_of([(head, shape)], bytes_per_element)),
            bytes_per_element=bytes_per_element,
            num_ranks=model.num_shards,
        )

    @cached_property
    def kinds(self) -> tuple[LayerWork, ...]:
        """Of the layers that are alike, one."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def head_parameters(self) -> int:
        """Elements of the head."""
        return self.head.parameters

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
        return 2 * self.head.parameters

    @property
    def pair_flop(self) -> int:
        """Operations of one pair of a token that decodes and a context token, all layers."""
        return sum(layer.pair_flop for layer in self.layers)

    @property
    def prefill_pair_flop(self) -> int:
        """Operations of one pair of a prompt token and a context token, all layers."""
        return sum(layer.prefill_pair_flop for layer in self.layers)

    @cached_property
    def kv_token_bytes(self) -> int:
        """KV of one token, all layers."""
        return sum(layer.kv_token_bytes for layer in self.layers)

    @property
    def all_weight_bytes(self) -> float:
        """Weights that a large pass reads."""
        layers = sum(layer.weight_bytes(layer.num_experts) for layer in self.layers)
        return layers + self.head.num_bytes

    def touched_weight_bytes(self, tokens: float) -> float:
        """Expected weights that a pass of this many tokens reads."""
        layers = sum(layer.weight_bytes(layer.touched_experts(tokens)) for layer in self.layers)
        return layers + self.head.num_bytes


def _window(attention: AttentionSpec | LatentAttentionSpec) -> int | None:
    return attention.sliding_window if isinstance(attention, AttentionSpec) else None


def _by_reader(layer: LayerSpec, hidden_size: int) -> dict[str, list[tuple[str, Shape]]]:
    """The attention part of a layer by who reads it; what unfolds a latent has two readers."""
    parts: dict[str, list[tuple[str, Shape]]] = {"pre": [], "post": [], "router": [], "unfold": []}
    for name, shape in attention_weights(layer, hidden_size):
        reader = next((part for prefix, part in _READERS if name.startswith(prefix)), "pre")
        parts[reader].append((name, shape))
    return parts
