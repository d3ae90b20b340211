"""Rotary position embeddings of a configuration: which scaling, with which numbers.

Assumptions, all as in transformers 5.23 (`modeling_rope_utils.py`):

- `rope_scaling`, where given, replaces `rope_parameters`; `rope_theta` stands inside or apart.
- A top-level `original_max_position_embeddings` wins over the one inside the scaling.
- Every length-dependent scaling refers to `max_position_embeddings`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from raymoe.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Written by training scripts; no effect on the angles.
_WITHOUT_EFFECT = {"finetuned"}
_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
}


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


def parse_rope(
    config: Mapping[str, object],
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float,
    is_partial_supported: bool,
) -> RopeSpec:
    """Read the rope fields of a configuration, as transformers 4 or 5 writes them.

    Args:
        config: The whole `config.json`.
        head_dim: Dimensions of one head.
        max_position_embeddings: Of the same configuration.
        default_theta: Base where the configuration names none.
        is_partial_supported: Whether the family rotates a part of a head when asked to.

    Raises:
        UnsupportedModelError: An unknown scaling, a field that the scaling does not have, or a
            value without meaning.
    """
    fields = _merge(config, default_theta)
    kind = _kind(fields)
    unknown = fields.keys() - _COMMON - _WITHOUT_EFFECT - _FIELDS[kind]
    unknown -= {name for name in unknown if fields[name] is None}
    if kind == "dynamic" and fields.get("original_max_position_embeddings") == (
        max_position_embeddings
    ):
        unknown.discard("original_max_position_embeddings")
    if unknown:
        name = sorted(unknown)[0]
        raise UnsupportedModelError(
            f"rope parameter {name} = {fields[name]!r} is not known for rope_type {kind!r}; known: "
            f"{', '.join(sorted(_COMMON | _FIELDS[kind]))}"
        )
    partial = _number(fields, "partial_rotary_factor", 1.0)
    if partial != 1.0 and not is_partial_supported:
        raise UnsupportedModelError(
            f"partial_rotary_factor = {partial} is not supported for this model_type: transformers "
            "ignores it for the default rope of this family and fails for every other"
        )
    spec = RopeSpec(
        kind=kind,
        theta=_number(fields, "rope_theta", default_theta),
        rotary_dim=_rotary_dim(head_dim, partial),
        max_position_embeddings=max_position_embeddings,
    )
    if "original_max_position_embeddings" in _FIELDS[kind]:
        spec = replace(spec, original_max_tokens=_original(config, fields, max_position_embeddings))
    return _SCALINGS[kind](spec, fields)


def _merge(config: Mapping[str, object], default_theta: float) -> dict[str, object]:
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise UnsupportedModelError(f"rope parameters are {parameters!r}; expected an object")
    fields = dict(parameters)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"rope parameters per layer type ({name!r}) are not supported"
            )
    theta = config.get("rope_theta")
    fields.setdefault("rope_theta", default_theta if theta is None else theta)
    if config.get("partial_rotary_factor") is not None:
        fields.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return fields


def _kind(fields: Mapping[str, object]) -> str:
    new, old = fields.get("rope_type"), fields.get("type")
    kind = new if new is not None else old if old is not None else "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if new is not None and old is not None and new != old:
        raise UnsupportedModelError(f"rope_type is {new!r} but type is {old!r}; keep one")
    return str(kind)


def _rotary_dim(head_dim: int, partial: float) -> int:
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise UnsupportedModelError(
            f"{rotary_dim} of {head_dim} dimensions of a head are rotated; expected an even number"
        )
    return rotary_dim


def _original(
    config: Mapping[str, object], fields: Mapping[str, object], max_position_embeddings: int
) -> int:
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = fields.get("original_max_position_embeddings", max_position_embeddings)
    if not isinstance(original, int) or isinstance(original, bool) or original < 2:
        raise UnsupportedModelError(
            f"original_max_position_embeddings is {original!r}; expected an integer above 1"
        )
    return original


def _stretched(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    return replace(spec, factor=_number(fields, "factor", None))


def _yarn(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    """Source: YaRN (arXiv 2309.00071), section 3.4; mscale as in DeepSeek-V3."""
    factor = _number(fields, "factor", spec.max_position_embeddings / spec.original_max_tokens)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = _number(fields, "mscale", 0.0), _number(fields, "mscale_all_dim", 0.0)
    attention = mscale(above) / mscale(below) if above and below else mscale(1.0)
    truncate = fields.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedModelError(f"rope parameter truncate is {truncate!r}; expected a boolean")
    return replace(
        spec,
        factor=factor,
        attention_factor=_number(fields, "attention_factor", attention),
        beta_fast=_number(fields, "beta_fast", 0.0) or spec.beta_fast,
        beta_slow=_number(fields, "beta_slow", 0.0) or spec.beta_slow,
        truncate=truncate,
    )


def _longrope(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    """Source: LongRoPE (arXiv 2402.13753); the attention factor is that of Phi-3."""
    original = spec.original_max_tokens
    factor = _number(fields, "factor", spec.max_position_embeddings / original)
    attention = 1.0
    if factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    num_frequencies = spec.rotary_dim // 2
    return replace(
        spec,
        factor=factor,
        attention_factor=_number(fields, "attention_factor", attention),
        short_factor=_numbers(fields, "short_factor", num_frequencies),
        long_factor=_numbers(fields, "long_factor", num_frequencies),
    )


def _llama3(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    return replace(
        spec,
        factor=_number(fields, "factor", None),
        low_freq_factor=_number(fields, "low_freq_factor", None),
        high_freq_factor=_number(fields, "high_freq_factor", None),
    )


_SCALINGS: dict[str, Callable[[RopeSpec, Mapping[str, object]], RopeSpec]] = {
    "default": lambda spec, _: spec,
    "linear": _stretched,
    "dynamic": _stretched,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


def _number(fields: Mapping[str, object], name: str, default: float | None) -> float:
    """A positive number; zero only where the default is zero (an optional weight)."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_positive = value > 0 or (value == 0 and default == 0)
        if is_positive and math.isfinite(value):
            return float(value)
    raise UnsupportedModelError(f"rope parameter {name} is {value!r}; expected a positive number")


def _numbers(fields: Mapping[str, object], name: str, length: int) -> tuple[float, ...]:
    values = fields.get(name)
    if isinstance(values, list | tuple) and len(values) == length:
        return tuple(_number({name: value}, name, None) for value in values)
    raise UnsupportedModelError(
        f"rope parameter {name} must hold {length} positive numbers, one per frequency"
    )
