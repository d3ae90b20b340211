"""RopeSpec: which rotary position embedding, with which numbers; RopeRule: that of a family."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    """The rope of a family, where its configuration is silent.

    Attributes:
        theta: Base of the wavelengths.
        is_partial: Whether a part of a head is rotated when the configuration asks for it.
        partial_factor: That part.
        is_interleaved: See `RopeSpec`; the field `rope_interleave` wins in families that have it.
        has_alpha: Whether a `dynamic` scaling may have the fixed factor `alpha`.
        has_mscale: Whether a `longrope` names the factors of cosine and sine of short and of long
            sequences; nothing else may be scaled then.
        parameters: Scaling.
    """

    theta: float = 10_000.0
    is_partial: bool = False
    partial_factor: float = 1.0
    is_interleaved: bool = False
    has_alpha: bool = False
    has_mscale: bool = False
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotation of queries and keys; every number resolved.

    Attributes:
        kind: One of `ROPE_TYPES`.
        theta: Base of the wavelengths.
        rotary_dim: Leading dimensions of a head that are rotated.
        max_position_embeddings: Length from which `dynamic` stretches the base.
        factor: Stretching of positions (linear, dynamic, yarn, llama3).
        original_max_tokens: Context of the pre-training (yarn, longrope, llama3).
        attention_factor: Multiplies cosine and sine.
        beta_fast: Yarn: rotations above which nothing is interpolated.
        beta_slow: Yarn: rotations below which everything is interpolated.
        truncate: Yarn: round the two borders to whole dimensions.
        low_freq_factor: Llama3: border of the long wavelengths.
        high_freq_factor: Llama3: border of the short wavelengths.
        short_factor: Longrope: divisor per frequency up to `original_max_tokens`.
        long_factor: Longrope: divisor per frequency beyond it.
        scale_factor: Factor of the scores of latent attention; `LatentAttentionSpec.scale` has it.
        is_interleaved: Whether neighbouring dimensions form a pair, instead of dimensions half of
            the rotated ones apart.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    factor: float = 1.0
    original_max_tokens: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    scale_factor: float = 1.0
    is_interleaved: bool = False

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a position also depends on how long the sequence is."""
        return self.kind in {"dynamic", "longrope"}

    @property
    def max_context_tokens(self) -> int:
        """Context that the scaling was made for."""
        if self.kind in {"linear", "dynamic"}:
            return int(self.max_position_embeddings * max(self.factor, 1.0))
        if self.kind == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_tokens * self.factor))
        return self.max_position_embeddings
