"""A decoder layer as pure data: router, experts, norms and streams around its attention."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from raymoe.specs.attention.kind import AttentionKind
from raymoe.specs.attention.ngrams import NgramLayerSpec, NgramSpec
from raymoe.specs.rope import RopeSpec
from raymoe.specs.streams import AnyStreamsSpec

# Kinds of norms. All but "layer" are RMS norms: "rms" rounds the normed value to its type before it
# is multiplied by the weight, "rms_float32" after it, and "rms_plus_one" multiplies by 1 + weight.
NormKind = Literal["rms", "rms_float32", "rms_plus_one", "layer"]
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token chooses its experts and weights them.

    Logits become scores, and the selection bias is added; only the best groups remain; the best
    `top_k` of `MoeSpec` are chosen, and weighted by their scores without that bias. A softmax over
    the chosen logits alone equals a renormalised softmax over all.

    A table may name the experts of each token id instead: scores then only weigh them.

    The sparse mixer has no scores: it takes the largest logit, weights it by a softmax over the
    logits near it, and repeats this with the rest. Only `jitter` applies to it.
    """

    scoring: Scoring = "softmax"
    # Token ids whose experts a table names; 0: they are chosen by scores.
    num_token_ids: int = 0
    logit_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    renormalize: bool = True  # whether the chosen weights are scaled to sum to 1
    min_weight_sum: float = 0.0  # lower bound of the divisor when renormalising
    added_weight_sum: float = 0.0  # added to that divisor
    scale: float = 1.0  # final factor of the weights
    has_bias: bool = False  # a bias of the logits
    has_selection_bias: bool = False  # a bias of the scores that affects only the choice
    chooses_by_logits: bool = False  # whether that bias is added to the logits instead
    num_groups: int = 1
    top_groups: int = 1  # groups that remain
    # Score of a group: its best expert, or the sum of its two best; None with one group.
    group_score: GroupScore | None = None
    # Sparse mixer: logits are near if they differ by at most twice this fraction.
    jitter: float = 0.0
    # Whether it reads the hidden state by an RMS norm of its own, times hidden size ** -0.5,
    # instead of the input of the experts.
    has_input_norm: bool = False
    has_expert_scales: bool = False  # learned factors of the final weights, one for each expert
    # Whether the weight of the one chosen expert multiplies its input instead of its output.
    scales_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampSpec:
    """A gated product with limits, in place of `activation(gate) * up`.

    `gate` is clamped from above at `gate_limit`, `up` to +-`limit`; the product is (up + offset) *
    gate * sigmoid(gain * gate). Source: OpenAI, gpt-oss-120b & gpt-oss-20b model card (2025),
    section 2.2.
    """

    gain: float
    limit: float
    gate_limit: float
    offset: float


def projections_of(activation: str) -> tuple[str, str, str]:
    """The projections that stand for gate, up and down.

    The square of a relu is relu(x) * x: a product whose gate is the up projection.
    """
    return ("up" if activation == "relu2" else "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    hidden: int  # 0: the layer has no network
    activation: str
    has_bias: bool = False
    clamp: ClampSpec | None = None

    @property
    def common_hidden(self) -> int:
        """Outputs of the first projections of what every token visits."""
        return self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """The expert that every token uses; `is_gated` scales it by its own sigmoid.

    Several shared experts that are summed equal one of their total width.
    """

    hidden: int
    is_gated: bool
    has_bias: bool = False
    scale: float = 1.0  # factor of its output
    clamp: ClampSpec | None = None

    def network(self, activation: str) -> DenseSpec:
        return DenseSpec(
            hidden=self.hidden,
            activation=activation,
            has_bias=self.has_bias,
            clamp=self.clamp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A router with top-k choice and gated feed-forward experts."""

    num_experts: int
    top_k: int
    expert_hidden: int
    activation: str
    router: RouterSpec
    has_bias: bool = False  # biases of the three projections of every expert
    clamp: ClampSpec | None = None  # limits of the gated product of the experts
    shared: SharedSpec | None = None
    # Whether experts and shared expert each norm their result before it is added to the other's;
    # the experts then norm their own input, and the layer's norm is that of the shared expert.
    has_branch_norms: bool = False
    # Width of the latent that the experts read and write, between a projection of their input and
    # one of the sum of their results (NVIDIA's LatentMoE); None: they read the hidden state.
    latent_size: int | None = None

    @property
    def common_hidden(self) -> int:
        """As in `DenseSpec`: those of the shared expert; 0 without one."""
        return 0 if self.shared is None else self.shared.hidden

    def input_size(self, hidden_size: int) -> int:
        """Width of what an expert reads and writes."""
        return self.latent_size or hidden_size


MAX_TILE_ROWS = 128  # of a tile of our GPU kernels; rows computed at once are a multiple of it
GROUP_UNEVENNESS = 2


def rows_at_once(num_rows: int, share: float) -> int:
    """Rows of a group of experts, of `num_rows` of all, whose intermediates a GPU keeps at once.

    Tokens choose experts unevenly, so that a group may have any number of rows. Room for all is
    much memory and for its share too little: there is room for twice that, and what is beyond it is
    computed afterwards.

    Args:
        share: Of the layer's experts, those in the group.
    """
    expected = GROUP_UNEVENNESS * share * num_rows
    return min(num_rows, MAX_TILE_ROWS * max(1, ceil(expected / MAX_TILE_ROWS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayout:
    """Whether a layer norms the inputs of attention and feed-forward network, and their results.

    Results are normed before they are added to the hidden state.
    """

    before_attention: bool = True
    after_attention: bool = False
    before_ffn: bool = True
    after_ffn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: attention, residual, feed-forward network, residual, and norms."""

    attention: AttentionKind
    ffn: DenseSpec | MoeSpec
    rope: RopeSpec | None  # None: attention does not depend on positions
    norms: NormLayout = NormLayout()
    # Whether the feed-forward network reads the norm that attention reads.
    is_parallel: bool = False
    has_norm_bias: bool = False
    has_scalar: bool = False  # whether a learned number multiplies the hidden state at the end
    streams: AnyStreamsSpec | None = None  # None: the hidden state is one stream

    @property
    def mixed_streams(self) -> AnyStreamsSpec | None:
        """The streams that blocks of the layer read mixed; None where there is one, or all."""
        return None if self.ngrams is not None else self.streams

    @property
    def ngrams(self) -> NgramSpec | None:
        return self.attention.ngrams if isinstance(self.attention, NgramLayerSpec) else None

    @property
    def moe(self) -> MoeSpec | None:
        """The experts; None in a layer with a dense network or none."""
        return self.ffn if isinstance(self.ffn, MoeSpec) else None

    @property
    def has_network(self) -> bool:
        return not isinstance(self.ffn, DenseSpec) or self.ffn.hidden > 0
