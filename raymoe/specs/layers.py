"""What one layer of a model computes, as pure data: attention, router, experts, networks."""

from dataclasses import dataclass
from typing import Literal

from raymoe.specs.attention import AttentionSpec, LatentAttentionSpec, QkNorm, TokenShapes

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
        scoring: From logits to scores.
        renormalize: Whether the chosen weights are scaled to sum to 1.
        min_weight_sum: The sum of the chosen weights counts as at least this, where renormalised.
        scale: Factor of the weights, at last.
        has_bias: A bias of the logits.
        has_selection_bias: A bias of the scores that counts for the choice alone.
        num_groups: Groups of neighbouring experts.
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

    @property
    def is_plain_softmax(self) -> bool:
        """Whether the weights are those of a softmax, renormalised or not, times `scale`."""
        return self.scoring == "softmax" and self.min_weight_sum == 0


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
    """Gated feed-forward network: down(activation(gate(x)) * up(x))."""

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
