"""Read the rotary position embedding from a configuration."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from raymoe.errors import UnsupportedModelError
from raymoe.specs.files import MAX_INTEGER, MAX_NUMBER

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    # Whether each type of layer (`layer_types`) has rope parameters of its own.
    is_by_layer_type: bool = False
    # With such parameters: whether a configuration may give one set, as before transformers 5.
    # Layers with a window then have the default rope, with the base of the field `windowed_theta`.
    has_old_form: bool = False
    windowed_theta: str | None = None
    rotates_full_layers: bool | str = True  # whether layers without a window are; or a field
    # Field that says, by being 1, that dense layers are rotated nevertheless.
    rotates_dense_layers: str | None = None
    # Field with a number for each layer, which is 0 for layers that are not rotated.
    rotated_layers: str | None = None
    is_partial: bool = False  # whether the configuration may rotate only a part of a head
    partial_factor: float = 1.0
    is_interleaved: bool = False  # as in `RopeSpec`; the field `rope_interleave` takes precedence
    has_alpha: bool = False  # whether a `dynamic` scaling may have the fixed factor `alpha`
    kinds: tuple[str, ...] = ROPE_TYPES  # accepted scalings
    # Whether a `longrope` gives factors of cosine and sine for short and long sequences.
    has_mscale: bool = False
    # Whether transformers computes all keys again when a row outgrows the short factors.
    restarts: bool = False
    # Whether queries are scaled by position, as in Llama-4.
    has_query_scale: bool = False
    # Whether frequencies are divided among three axes (M-RoPE), whose positions are equal for text.
    has_sections: bool = False
    # Whether a partial factor says which part of a query is rotated in latent attention.
    is_part_of_head: bool = False
    # Field with a list of the base of each layer, 0 where it is not rotated; null: as elsewhere.
    thetas_by_layer: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotation of queries and keys, all values resolved."""

    kind: str
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    # Proportional: rotated pairs among them; the others have a frequency of zero.
    num_frequencies: int = 0
    max_position_embeddings: int  # length from which `dynamic` scales the base
    factor: float = 1.0  # scaling of positions (linear, dynamic, yarn, llama3)
    original_max_tokens: int = 0  # context of the pre-training (yarn, longrope, llama3)
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # Yarn: rotations above which nothing is interpolated
    beta_slow: float = 1.0  # Yarn: rotations below which everything is interpolated
    truncate: bool = True  # Yarn: round both bounds to whole dimensions
    low_freq_factor: float = 1.0  # Llama3: bound of the long wavelengths
    high_freq_factor: float = 4.0  # Llama3: bound of the short wavelengths
    # Longrope: divisor per frequency up to `original_max_tokens`.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()  # Longrope: divisor per frequency beyond it
    # Factor of the scores of latent attention, included in `LatentAttentionSpec.scale`.
    scale_factor: float = 1.0
    # Longrope: whether a row that grows beyond `original_max_tokens` starts again, so that all its
    # keys are rotated with the long factors.
    restarts: bool = False
    # Queries are scaled by 1 + `query_beta` * log(1 + floor(position / `query_period`)).
    query_beta: float = 0.0
    query_period: int = 0
    # Whether pairs are neighbouring dimensions, instead of half of `rotary_dim` apart.
    is_interleaved: bool = False

    @property
    def depends_on_length(self) -> bool:
        return self.kind in {"dynamic", "longrope"}

    def variant(self, prompt_tokens: int) -> int:
        """A number that differs between lengths of prompts whose tokens are rotated differently."""
        if self.kind == "longrope":
            return int(prompt_tokens > self.original_max_tokens)
        if self.kind == "dynamic" and prompt_tokens > self.max_position_embeddings:
            return prompt_tokens
        return 0

    @property
    def restart_length(self) -> int | None:
        return self.original_max_tokens if self.restarts and self.kind == "longrope" else None

    @property
    def max_model_len(self) -> int:
        if self.kind in {"linear", "dynamic"}:
            return int(self.max_position_embeddings * max(self.factor, 1.0))
        if self.kind == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_tokens * self.factor))
        return self.max_position_embeddings


SLIDING = "sliding_attention"
NTK_ALPHA = "dynamic with alpha"
MSCALE = "longrope with mscale"

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_QUERY_SCALE = {
    "llama_4_scaling_beta",
    "max_position_embeddings",  # repeats a field of the model
    "original_max_position_embeddings",
}
_SECTIONS = {"interleaved", "mrope_interleaved", "mrope_section"}
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
    "proportional": {"factor"},
    # Phi-3.5-MoE.
    MSCALE: {
        "factor",
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
    },
    # Hunyuan: `alpha` scales the base once; transformers reads nothing else.
    NTK_ALPHA: {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
}


def parse_rope(
    config: Mapping[str, object],
    *,
    head_dim: int,
    max_position_embeddings: int,
    rule: RopeRule,
    default_theta: object = 10_000.0,
    layer_type: str = "full_attention",
) -> RopeSpec:
    """Read the rope fields of a configuration, as transformers 4 or 5 writes them.

    `head_dim` is the part of a head that may be rotated, `layer_type` matters to families with
    parameters for each. Raises UnsupportedModelError if the
    scaling or one of its fields is unknown, or a value is invalid.
    """
    fields = _merge(config, head_dim, rule, layer_type)
    kind = _kind(fields, rule)
    if kind == "dynamic" and rule.has_alpha and fields.get("alpha") is not None:
        kind = NTK_ALPHA
    if rule.has_mscale and kind != "default":
        kind = MSCALE
    _check_fields(fields, kind, max_position_embeddings, rule)
    # Where layer types have their own parameters, only the default rope has the family's factor.
    has_factor = kind == "default" or not rule.is_by_layer_type
    partial = _number(fields, "partial_rotary_factor", rule.partial_factor if has_factor else 1.0)
    if partial != 1.0 and not rule.is_partial and kind != "proportional":
        raise UnsupportedModelError(
            f"partial_rotary_factor = {partial} is not supported for this model_type: transformers "
            "ignores it for the default rope of this family and fails for every other"
        )
    if fields.get("rope_theta") is None:
        if isinstance(default_theta, Mapping):  # as Gemma-3 names them
            default_theta = default_theta["local" if layer_type == SLIDING else "global"]
        fields["rope_theta"] = default_theta
    interleave = config.get("rope_interleave")
    spec = RopeSpec(
        kind=kind,
        theta=_number(fields, "rope_theta", None),
        rotary_dim=head_dim if kind == "proportional" else _rotary_dim(head_dim, partial),
        num_frequencies=int(partial * head_dim // 2) if kind == "proportional" else 0,
        max_position_embeddings=max_position_embeddings,
        is_interleaved=rule.is_interleaved
        if interleave is None
        else _boolean(config, "rope_interleave"),
    )
    if "original_max_position_embeddings" in _FIELDS[kind]:
        spec = replace(spec, original_max_tokens=_original(config, fields, max_position_embeddings))
    if rule.has_query_scale:
        spec = replace(
            spec,
            query_beta=_number(fields, "llama_4_scaling_beta", None),
            query_period=_original({}, fields, 0),
        )
    return _SCALINGS[kind](replace(spec, restarts=rule.restarts), fields)


def _check_fields(
    fields: Mapping[str, object], kind: str, max_position_embeddings: int, rule: RopeRule
) -> None:
    known = _COMMON | _FIELDS[kind] | (_QUERY_SCALE if rule.has_query_scale else set())
    known |= _SECTIONS if rule.has_sections else set()
    unknown = fields.keys() - _WITHOUT_EFFECT - known
    unknown -= {name for name in unknown if fields[name] is None}
    if kind == "dynamic" and fields.get("original_max_position_embeddings") == (
        max_position_embeddings
    ):
        unknown.discard("original_max_position_embeddings")
    if unknown:
        name = sorted(unknown)[0]
        raise UnsupportedModelError(
            f"rope parameter {name} = {fields[name]!r} is not known for rope_type {kind!r}; known: "
            f"{', '.join(sorted(known))}"
        )


def _merge(
    config: Mapping[str, object], head_dim: int, rule: RopeRule, layer_type: str
) -> dict[str, object]:
    parameters = config.get("rope_scaling") or config.get("rope_parameters")
    is_by_layer_type = rule.is_by_layer_type
    if rule.has_old_form and config.get("rope_parameters") is None:
        if layer_type == SLIDING:
            return {"rope_theta": config.get(rule.windowed_theta or "")}
        parameters, is_by_layer_type = config.get("rope_scaling") or {}, False
    if parameters is None:
        parameters = rule.parameters
    if is_by_layer_type and isinstance(parameters, Mapping):
        parameters = parameters.get(layer_type)
    if not isinstance(parameters, Mapping):
        where = f" of {layer_type}" if is_by_layer_type else ""
        raise UnsupportedModelError(
            f"rope parameters{where} are {parameters!r}; expected an object"
        )
    fields = dict(parameters)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"rope parameters per layer type ({name!r}) are not supported"
            )
    _add_outer(fields, config, head_dim)
    return fields


def _add_outer(fields: dict[str, object], config: Mapping[str, object], head_dim: int) -> None:
    theta = config.get("rope_theta")
    if theta is not None and fields.setdefault("rope_theta", theta) != theta:
        raise UnsupportedModelError(
            f"rope_theta is {theta!r}, but {fields['rope_theta']!r} among the rope parameters; "
            "keep one"
        )
    if config.get("partial_rotary_factor") is not None:
        fields.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("rotary_dim") is not None:
        rotary_dim = _number(config, "rotary_dim", None)
        fields.setdefault("partial_rotary_factor", rotary_dim / head_dim)


def _kind(fields: Mapping[str, object], rule: RopeRule) -> str:
    new, old = fields.get("rope_type"), fields.get("type")
    kind = new if new is not None else old if old is not None else "default"
    if kind == "mrope" and rule.has_sections:
        kind = "default"
    if kind == "su" and rule.restarts:  # the first checkpoints of Phi-3
        kind = "longrope"
    if kind not in rule.kinds:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported; supported: {', '.join(rule.kinds)}"
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
    if type(original) is not int or not 2 <= original <= MAX_INTEGER:
        raise UnsupportedModelError(
            f"original_max_position_embeddings is {original!r}; expected an integer above 1"
        )
    return original


def _stretched(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    return replace(spec, factor=_number(fields, "factor", None))


def _yarn(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    factor = _number(fields, "factor", spec.max_position_embeddings / spec.original_max_tokens)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = _number(fields, "mscale", 0.0), _number(fields, "mscale_all_dim", 0.0)
    attention = mscale(above) / mscale(below) if above and below else mscale(1.0)
    return replace(
        spec,
        factor=factor,
        attention_factor=_number(fields, "attention_factor", attention),
        beta_fast=_number(fields, "beta_fast", 0.0) or spec.beta_fast,
        beta_slow=_number(fields, "beta_slow", 0.0) or spec.beta_slow,
        truncate=_boolean(fields, "truncate") if "truncate" in fields else True,
        scale_factor=mscale(below) ** 2 if below else 1.0,
    )


def _longrope(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
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


def _mscale(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    """Compute factors as `PhimoeForCausalLM` of transformers 5.23 does.

    It asks for frequencies without a length and gets those of short sequences. It chooses the
    factor by sequence length, anew for all tokens of a row; equal factors need no choice.
    """
    short, long = (_number(fields, f"{name}_mscale", None) for name in ("short", "long"))
    if short != long:
        raise UnsupportedModelError(
            f"rope parameters short_mscale = {short} and long_mscale = {long} differ, which is not "
            "supported: a row that grows beyond original_max_position_embeddings would have to be "
            "computed again"
        )
    num_frequencies = spec.rotary_dim // 2
    _numbers(fields, "long_factor", num_frequencies)
    factors = _numbers(fields, "short_factor", num_frequencies)
    return replace(
        spec,
        kind="longrope",
        attention_factor=short,
        short_factor=factors,
        long_factor=factors,
    )


def _llama3(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    return replace(
        spec,
        factor=_number(fields, "factor", None),
        low_freq_factor=_number(fields, "low_freq_factor", None),
        high_freq_factor=_number(fields, "high_freq_factor", None),
    )


def _ntk_alpha(spec: RopeSpec, fields: Mapping[str, object]) -> RopeSpec:
    dim, alpha = spec.rotary_dim, _number(fields, "alpha", None)
    if dim == 2:
        raise UnsupportedModelError("rope parameter alpha needs more than 2 rotated dimensions")
    return replace(spec, kind="default", theta=spec.theta * alpha ** (dim / (dim - 2)))


_SCALINGS: dict[str, Callable[[RopeSpec, Mapping[str, object]], RopeSpec]] = {
    "default": lambda spec, _: spec,
    "linear": _stretched,
    "dynamic": _stretched,
    "yarn": _yarn,
    "longrope": _longrope,
    MSCALE: _mscale,
    "llama3": _llama3,
    "proportional": lambda spec, fields: replace(spec, factor=_number(fields, "factor", 1.0)),
    NTK_ALPHA: _ntk_alpha,
}


def _boolean(fields: Mapping[str, object], name: str) -> bool:
    value = fields[name]
    if isinstance(value, bool):
        return value
    raise UnsupportedModelError(f"rope parameter {name} is {value!r}; expected a boolean")


def _number(fields: Mapping[str, object], name: str, default: float | None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_positive = value > 0 or (value == 0 and default == 0)
        if is_positive and value < MAX_NUMBER:
            return float(value)
    raise UnsupportedModelError(f"rope parameter {name} is {value!r}; expected a positive number")


def _numbers(fields: Mapping[str, object], name: str, length: int) -> tuple[float, ...]:
    values = fields.get(name)
    if isinstance(values, list | tuple) and len(values) == length:
        return tuple(_number({name: value}, name, None) for value in values)
    raise UnsupportedModelError(
        f"rope parameter {name} must hold {length} positive numbers, one per frequency"
    )
