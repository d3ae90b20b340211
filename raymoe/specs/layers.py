"""What the attention of one layer computes, as pure data."""

from dataclasses import dataclass
from math import prod
from typing import Literal

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShapes:
    """What attention takes and gives for one token.

    Where the weights are, attention is asked in one form; where there is nothing but the cache, in
    the *absorbed* one. Grouped-query attention has the same form for both.

    Attributes:
        query: Heads, and dimensions of each.
        key: What goes into the cache; likewise.
        value: Without dimensions where values are part of the keys.
    """

    query: tuple[int, int]
    absorbed_query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    output: int
    absorbed_output: int

    @property
    def num_elements(self) -> int:
        """Of all of it, in the wider form."""
        query = max(prod(self.query), prod(self.absorbed_query))
        return query + prod(self.key) + prod(self.value) + max(self.output, self.absorbed_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    Attributes:
        sliding_window: Tokens that a query sees, itself included; None sees all.
        qk_norm: RMS norm of queries and keys: none, per head, or full width.
        is_norm_after_rope: Whether that norm follows the rotation, instead of preceding it.
        clip_qkv: Queries, keys and values are clamped to plus and minus this.
        has_sinks: Whether each head has a learned score that takes part in the softmax and has no
            value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = "none"
    is_norm_after_rope: bool = False
    clip_qkv: float | None = None
    has_sinks: bool = False

    @property
    def rotated_head_dim(self) -> int:
        """Dimensions of a head that the rope may rotate."""
        return self.head_dim

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def output_width(self) -> int:
        return self.query_width

    @property
    def kv_width(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def cache_width(self) -> int:
        """Elements of a token in the KV cache."""
        return 2 * self.kv_width

    @property
    def prompt_width(self) -> int:
        """Elements of the queries and the result of a prompt token."""
        return self.query_width + self.output_width

    @property
    def working_width(self) -> int:
        """Elements of a token on a host while it is attended to: as projected, and rotated."""
        return 2 * (self.query_width + self.cache_width)

    @property
    def token_shapes(self) -> TokenShapes:
        """What attention takes and gives for one token."""
        query, cached = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        return TokenShapes(
            query=query,
            absorbed_query=query,
            key=cached,
            value=cached,
            output=self.output_width,
            absorbed_output=self.output_width,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (MLA) of one layer.

    Queries come from a latent of their own, or directly; keys and values of all heads from one
    latent, which is cached beside the one rotated key that all heads share. In the *absorbed* form
    queries are carried into the latent space and results out of it, so that decoding reads nothing
    but the cache; in the plain form keys and values are up-projected per head.

    Attributes:
        q_lora_rank: Width of the latent of queries; None where they are projected directly.
        kv_lora_rank: Width of the latent of keys and values.
        nope_head_dim: Dimensions of a query and a key that are not rotated.
        scale: Factor of the scores, the one of a stretched rope included.
        norm_eps: Of the RMS norms of both latents; not that of the layer.
        has_bias: Biases of the projections into the latents and of the output projection.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    scale: float
    norm_eps: float
    has_bias: bool = False

    @property
    def rotated_head_dim(self) -> int:
        """Dimensions of a head that the rope may rotate."""
        return self.rope_head_dim

    @property
    def query_head_dim(self) -> int:
        """Dimensions of a query and a key in the plain form."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def query_width(self) -> int:
        """Elements of the absorbed queries of a token."""
        return self.num_heads * self.cache_width

    @property
    def output_width(self) -> int:
        """Elements of the result of a token, still in the latent space."""
        return self.num_heads * self.kv_lora_rank

    @property
    def cache_width(self) -> int:
        """Elements of a token in the KV cache: its latent and its rotated key."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def prompt_width(self) -> int:
        """Elements of the queries and the result of a prompt token, in the plain form."""
        return self.num_heads * (self.query_head_dim + self.value_head_dim)

    @property
    def working_width(self) -> int:
        """Elements of a token on a host while it is attended to, in both forms."""
        return 2 * (self.prompt_width + self.cache_width) + self.query_width + self.output_width

    @property
    def token_shapes(self) -> TokenShapes:
        """What attention takes and gives for one token."""
        return TokenShapes(
            query=(self.num_heads, self.query_head_dim),
            absorbed_query=(self.num_heads, self.cache_width),
            key=(1, self.cache_width),
            value=(1, 0),
            output=self.num_heads * self.value_head_dim,
            absorbed_output=self.output_width,
        )


__all__ = [
    "AttentionSpec",
    "ClampSpec",
    "DenseSpec",
    "GroupScore",
    "LatentAttentionSpec",
    "LayerSpec",
    "MoeSpec",
    "QkNorm",
    "RouterSpec",
    "Scoring",
    "SharedSpec",
    "TokenShapes",
]

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token chooses its experts and weighs them.

    The logits become scores; the bias for the choice is added; groups whose score is not among the
    best are left out; the best `top_k` of `MoeSpec` are chosen, and weighed by their scores without
    that bias. A softmax over the logits of the chosen alone is a softmax over all, renormalised.

    The sparse mixer has no scores: it takes the largest logit and weighs it by a softmax over the
    logits near it, then does the same with what is left. None of the other attributes applies.

    Attributes:
        renormalize: Whether the chosen weights are scaled to sum to 1.
        min_weight_sum: The sum of the chosen weights counts as at least this, where renormalised.
        scale: Factor of the weights, at last.
        has_bias: A bias of the logits.
        has_selection_bias: A bias of the scores that counts for the choice alone.
        top_groups: Groups that may be chosen from.
        group_score: Score of a group: that of its best expert, or the sum of its two best; None
            with one group.
        jitter: Sparse mixer: logits are near where they differ by at most twice this part.
    """

    scoring: Scoring = "softmax"
    renormalize: bool = True
    min_weight_sum: float = 0.0
    scale: float = 1.0
    has_bias: bool = False
    has_selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore | None = None
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampSpec:
    """A gated product with limits, in place of `activation(gate) * up`.

    The gate is cut at `limit` from above, `up` at plus and minus `limit`; the product is
    (up + 1) * gate * sigmoid(gain * gate).

    Source: OpenAI, gpt-oss-120b & gpt-oss-20b model card (2025), section 2.2.
    """

    gain: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    hidden: int
    activation: str
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """The expert that every token visits; `is_gated` scales it by a sigmoid of its own.

    Several shared experts that are added up are one of their width together.
    """

    hidden: int
    is_gated: bool
    has_bias: bool = False

    def network(self, activation: str) -> DenseSpec:
        """What it computes before its gate; the activation is that of the experts."""
        return DenseSpec(hidden=self.hidden, activation=activation, has_bias=self.has_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A router over all experts, top-k, gated feed-forward experts.

    Attributes:
        has_bias: Biases of the three projections of every expert.
        clamp: Limits of the gated product of the experts.
    """

    num_experts: int
    top_k: int
    expert_hidden: int
    activation: str
    router: RouterSpec
    has_bias: bool = False
    clamp: ClampSpec | None = None
    shared: SharedSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual, norm, feed-forward, residual.

    Attributes:
        has_norm_bias: Whether both norms have a bias.
    """

    attention: AttentionSpec | LatentAttentionSpec
    ffn: DenseSpec | MoeSpec
    has_norm_bias: bool = False
