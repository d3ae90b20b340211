"""Read a `config.json`: check and type its fields, and derive the layers of a model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.class_defaults import ClassDefaults
from raymoe.specs.families import FAMILIES, MODEL_TYPE_ALIASES, WRAPPERS
from raymoe.specs.families.rules import (
    FIXED,
    IGNORED,
    READ_APART,
    ROPE_FIELDS,
    Family,
    MoeRule,
    RouterRule,
    SparseLayers,
    used_fields,
)
from raymoe.specs.files import MAX_INTEGER, MAX_NUMBER, MAX_TOKEN_ID
from raymoe.specs.layers import (
    AttentionSpec,
    ClampSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoeSpec,
    RouterSpec,
    SharedSpec,
)
from raymoe.specs.rope import RopeSpec


class ConfigFields:
    """The used fields of one configuration, with the defaults of its class for missing ones."""

    def __init__(
        self, config: Mapping[str, object], family: Family, defaults: ClassDefaults
    ) -> None:
        self.family, self._config, self._defaults = family, config, defaults
        self._used = used_fields(family)
        self.layer_types = config.get("layer_types")

    def get(self, name: str) -> object:
        if name not in self._used:
            return None
        return self._config[name] if name in self._config else self._default(name)

    def _default(self, name: str) -> object:
        if name in self.family.defaults:
            return self.family.defaults[name]
        value = self._defaults.get(name)
        others = {**self._defaults.aliases, **self.family.aliases}
        names = [alias for alias, ours in others.items() if ours == name]
        names += [ours for alias, ours in others.items() if alias == name]
        for other in names:
            if value is None and other not in self._used:
                value = self._defaults.get(other)
        return value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def positive(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        return _integer(name, self.get(name), minimum=1, maximum=maximum)

    def natural(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        return _integer(name, self.get(name), minimum=0, maximum=maximum)

    def positive_or_none(self, name: str) -> int | None:
        return _integer(name, self.get(name), minimum=1) if self.has(name) else None

    def number(self, name: str) -> float:
        value = self.get(name)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value < MAX_NUMBER
        ):
            return float(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a positive number")

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if isinstance(value, bool):
            return value
        raise ConfigError(f"config.json: {name} is {value!r}; expected true or false")

    def switch(self, name: str | bool) -> bool:
        """A boolean, or the value of the field of this name."""
        return self.boolean(name) if isinstance(name, str) else name

    def number_or(self, name: str | float) -> float:
        return self.number(name) if isinstance(name, str) else name

    def number_or_none(self, name: str | None) -> float | None:
        return self.number(name) if name is not None and self.has(name) else None

    def uniform(self, name: str) -> int:
        """A positive integer, or a list that repeats one for each layer."""
        value = self.get(name)
        if isinstance(value, list) and value == value[:1] * len(value):
            value = value[0] if value else None
        return _integer(name, value, minimum=1)

    def integers(self, name: str) -> frozenset[int]:
        """A list of integers; empty if null or unknown to the family."""
        value = self.get(name)
        if value is None:
            return frozenset()
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return frozenset(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a list of integers")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in items):
            return tuple(items)
        raise ConfigError(f"config.json: {name} is {value!r}; expected token ids")


def _integer(name: str, value: object, *, minimum: int, maximum: int = MAX_INTEGER) -> int:
    if type(value) is int and minimum <= value <= maximum:
        return value
    bounds = f"at least {minimum}" + (f" and at most {maximum}" if maximum < MAX_INTEGER else "")
    raise ConfigError(f"config.json: {name} is {value!r:.100}; expected an integer of {bounds}")


HeadKind = Literal["lm", "labels", "none"]
_LM = "ForCausalLM"
HEADS: Mapping[str, HeadKind] = {
    _LM: "lm",
    "ForSequenceClassification": "labels",
    "Model": "none",
}


def find_family(config: Mapping[str, object]) -> tuple[str, Family]:
    """Model type and family of a configuration; raises UnsupportedModelError if unknown."""
    written = config.get("model_type")
    model_type = MODEL_TYPE_ALIASES.get(str(written), written)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        custom = "; custom code (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted({*FAMILIES, *WRAPPERS}))}{custom}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    names = (family.architecture, family.published_architecture or family.architecture)
    known = [[name.removesuffix(_LM) + kind] for name in names for kind in HEADS]
    if architectures and architectures not in known:
        raise UnsupportedModelError(
            f"architectures = {architectures!r} is not supported for model_type {model_type!r}; "
            f"supported: {family.architecture}, and that name with "
            f"{' or '.join(kind for kind in HEADS if kind != _LM)} instead of {_LM}"
        )
    return model_type, family


def head_of(config: Mapping[str, object]) -> HeadKind:
    """The head of the class that `architectures` names; that of a language model by default."""
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else _LM
    return next(head for kind, head in HEADS.items() if name.endswith(kind))


def labels_of(config: Mapping[str, object]) -> tuple[str, ...]:
    """Names of classes, in order, as transformers reads them: two where none are written."""
    found = config.get("id2label")
    if found is None:
        count = _integer("num_labels", config.get("num_labels", 2), minimum=1, maximum=1 << 20)
        return tuple(f"LABEL_{index}" for index in range(count))
    names = found if isinstance(found, Mapping) else {}
    labels = [names.get(str(index)) for index in range(len(names))]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ConfigError(
            f"config.json: id2label is {found!r:.100}; expected a name for each number from 0"
        )
    return tuple(map(str, labels))


def canonical_config(
    config: Mapping[str, object], family: Family, defaults: ClassDefaults
) -> dict[str, object]:
    """Flatten nested objects and name fields canonically; raises ConfigError on conflicts."""
    flat = {name: value for name, value in config.items() if name not in family.nested}
    for outer in family.nested:
        content = config.get(outer) or {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"config.json: {outer} is {content!r}; expected an object")
        flat |= {f"{outer}.{name}": value for name, value in content.items()}
    used, others = used_fields(family), {**defaults.aliases, **family.aliases}
    others |= {name: alias for alias, name in defaults.aliases.items() if alias in used}
    for alias, name in others.items():
        if alias in flat and alias not in used:
            value = flat.pop(alias)
            if flat.setdefault(name, value) != value:
                raise ConfigError(f"{name} is {flat[name]!r} but {alias} is {value!r}")
    return flat


def check_fields(config: Mapping[str, object], model_type: str, family: Family) -> None:
    """Raise UnsupportedModelError for fields that are not used, ignored or fixed."""
    used = used_fields(family) | ROPE_FIELDS
    fixed = {name: FIXED[name] for name in FIXED.keys() - used} | dict(family.fixed)
    for name, value in config.items():
        plain = name.rpartition(".")[2]
        if plain in IGNORED or name in family.ignored or name in READ_APART:
            continue
        if name in fixed or plain in fixed:
            _check_fixed(name, value, fixed.get(name) or fixed[plain], model_type)
        elif name == "auto_map":
            _check_auto_map(value, family)
        elif name not in used and value is not None:
            raise UnsupportedModelError(
                f"field {name} = {value!r} is not known for model_type {model_type!r} and might "
                "change what the model computes; remove it from config.json if it does not. "
                f"Fields in use: {', '.join(sorted(used))}"
            )


def _check_fixed(name: str, value: object, accepted: tuple[object, ...], model_type: str) -> None:
    items = value if isinstance(value, list) and value else [value]
    for item in items:
        if not any(item is one or item == one for one in accepted):
            raise UnsupportedModelError(
                f"{name} = {value!r} is not supported for model_type {model_type!r}; "
                f"supported: {', '.join(map(repr, accepted))}"
            )


def _check_auto_map(value: object, family: Family) -> None:
    if not value:
        return
    architecture = family.published_architecture or family.architecture
    name = architecture.removesuffix("ForCausalLM")
    known = {f"{name}{kind}" for kind in ("Config", "Model", "ForCausalLM")}
    classes = value if isinstance(value, Mapping) else {"AutoModel": value}
    for auto, path in classes.items():
        is_known = family.was_published_with_code and str(path).rpartition(".")[2] in known
        if str(auto).startswith(("AutoModel", "AutoConfig")) and not is_known:
            raise UnsupportedModelError(
                f"auto_map = {value!r}: the model brings its own code, which is never run; use a "
                "checkpoint for the architecture in transformers itself"
            )


SLIDING = "sliding_attention"
DENSE, SPARSE = "dense", "sparse"


def layer_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer; raises UnsupportedModelError if `layer_types` contradicts."""
    window, slides = _window(fields), _sliding_layers(fields, num_layers)
    if fields.layer_types is not None:
        slides = _named_layers(fields, num_layers, slides if window else [False] * num_layers)
        if any(slides) and window is None:
            raise UnsupportedModelError(
                "layer_types has sliding_attention layers, but the sliding window is off"
            )
    return tuple(window if is_sliding else None for is_sliding in slides)


def sparse_layers(fields: ConfigFields, rule: SparseLayers, num_layers: int) -> list[bool]:
    return _SPARSE[rule](fields, num_layers)


def _window(fields: ConfigFields) -> int | None:
    family = fields.family
    if family.windowed_layers == "none":
        return None
    if family.is_window_switched and not fields.boolean("use_sliding_window"):
        return None
    if family.windowed_layers == "even":
        return fields.positive("sliding_window")  # transformers fails without it
    return fields.positive_or_none("sliding_window")


def _sliding_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    rule = fields.family.windowed_layers
    if rule in {"none", "all"}:
        return [rule == "all"] * num_layers
    if rule == "even":
        return [i % 2 == 0 for i in range(num_layers)]
    border = fields.natural("max_window_layers")
    if rule == "from_max":
        return [i >= border for i in range(num_layers)]
    return [i % 2 == 0 and i < border for i in range(num_layers)]


def _named_layers(fields: ConfigFields, num_layers: int, slides: list[bool]) -> list[bool]:
    kinds = (fields.family.full_layer_type, SLIDING)
    named = _kinds(fields.layer_types, "layer_types", kinds, num_layers)
    if not fields.family.has_layer_types and named != slides:
        raise UnsupportedModelError(
            f"layer_types = {fields.layer_types!r} disagrees with the sliding window of this "
            "model_type, for which transformers does not read layer_types"
        )
    return named


def _kinds(value: object, name: str, kinds: tuple[str, str], num_layers: int) -> list[bool]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != num_layers
        or not all(kind in kinds for kind in value)
    ):
        raise UnsupportedModelError(
            f"{name} = {value!r} is not supported; "
            f"supported: one of {', '.join(kinds)} for each of {num_layers} layers"
        )
    return [kind == kinds[1] for kind in value]


def _stepped(fields: ConfigFields, num_layers: int) -> list[bool]:
    step, dense = fields.positive("decoder_sparse_step"), fields.integers("mlp_only_layers")
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def _after_leading(fields: ConfigFields, num_layers: int) -> list[bool]:
    leading = fields.natural("first_k_dense_replace")
    return [i >= leading for i in range(num_layers)]


def _listed(fields: ConfigFields, num_layers: int) -> list[bool]:
    if not fields.has("mlp_layer_types"):
        is_counted = fields.has("first_k_dense_replace")
        return _after_leading(fields, num_layers) if is_counted else _after_first(num_layers)
    kinds = fields.get("mlp_layer_types")
    return _kinds(kinds, "mlp_layer_types", (DENSE, SPARSE), num_layers)


def _after_first(num_layers: int) -> list[bool]:
    return [i > 0 for i in range(num_layers)]


def _ranged(fields: ConfigFields, num_layers: int) -> list[bool]:
    first, step = fields.natural("moe_layer_start_index"), fields.positive("moe_layer_interval")
    last = fields.get("moe_layer_end_index")
    if last == -1:
        last = num_layers - 1
    if type(last) is not int or last < 0:
        raise ConfigError(f"config.json: moe_layer_end_index is {last!r}; expected a layer, or -1")
    return [first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)]


_SPARSE: Mapping[SparseLayers, Callable[[ConfigFields, int], list[bool]]] = {
    "all": lambda _, num_layers: [True] * num_layers,
    "stepped": _stepped,
    "after_leading": _after_leading,
    "listed": _listed,
    "ranged": _ranged,
}


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
HEAD_DIM_MULTIPLE = 8
# Ten times the largest published values, because an untrusted configuration must not exhaust
# memory.
MAX_LAYERS, MAX_EXPERTS = 1024, 4096
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17  # five times the largest published value
# Epsilon of the latents' norms in every transformers class with latent attention: the default of
# their RMSNorm, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def parse_layers(
    fields: ConfigFields, attention: AttentionSpec | LatentAttentionSpec, rope: RopeSpec
) -> tuple[LayerSpec, ...]:
    num_layers = fields.positive("num_hidden_layers", maximum=MAX_LAYERS)
    windows = layer_windows(fields, num_layers)
    variants = {window: _with_window(attention, window) for window in set(windows)}
    moe, rule = _moe(fields), fields.family.moe
    sparse = [False] * num_layers
    if moe is not None and rule is not None:
        sparse = sparse_layers(fields, rule.sparse_layers, num_layers)
        num_experts = sum(sparse) * moe.num_experts
        if num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
            raise ConfigError(
                f"{sum(sparse)} layers with {moe.num_experts} experts are {num_experts} experts; "
                f"at most {MAX_EXPERTS_OF_ALL_LAYERS} are supported"
            )
    dense = None if all(sparse) else _dense(fields)
    return tuple(
        LayerSpec(
            attention=variants[window],
            ffn=_network(moe if is_sparse else dense),
            rope=rope,
            norms=fields.family.norms,
            has_norm_bias=fields.family.has_norm_bias,
        )
        for window, is_sparse in zip(windows, sparse, strict=True)
    )


def _network(ffn: MoeSpec | DenseSpec | None) -> MoeSpec | DenseSpec:
    assert ffn is not None, "read where a layer has it"
    return ffn


def parse_attention(fields: ConfigFields) -> AttentionSpec:
    family = fields.family
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive_or_none("num_key_value_heads") or num_heads
    hidden_size = fields.positive("hidden_size")
    head_dim = fields.positive_or_none("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    if head_dim % HEAD_DIM_MULTIPLE or head_dim < HEAD_DIM_MULTIPLE:
        raise UnsupportedModelError(
            f"head_dim is {head_dim}; supported: multiples of {HEAD_DIM_MULTIPLE}"
        )
    if family.needs_full_width and num_heads * head_dim != hidden_size:
        raise UnsupportedModelError(
            f"head_dim {head_dim} x {num_heads} heads is not hidden_size {hidden_size}: "
            "the norm over the full width of this family needs them equal"
        )
    has_norm = family.qk_norm_switch is None or fields.boolean(family.qk_norm_switch)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if family.scale is None else fields.number(family.scale),
        qkv_bias=fields.switch(family.qkv_bias),
        output_bias=fields.switch(family.output_bias),
        qk_norm=family.qk_norm if has_norm else "none",
        is_norm_after_rope=family.is_norm_after_rope,
        clip_qkv=fields.number_or_none(family.clip),
        has_sinks=family.has_sinks,
    )


def parse_latent_attention(fields: ConfigFields) -> LatentAttentionSpec:
    num_heads = fields.positive("num_attention_heads")
    nope, rope = fields.positive("qk_nope_head_dim"), fields.positive("qk_rope_head_dim")
    # Fields that transformers derives from others and writes as well.
    head_dim = nope + rope if fields.family.rope.is_part_of_head else rope
    derived = {"num_key_value_heads": num_heads, "head_dim": head_dim, "qk_head_dim": nope + rope}
    for name, value in derived.items():
        if name in fields.family.ignored:
            continue
        if fields.has(name) and fields.positive(name) != value:
            raise ConfigError(
                f"{name} is {fields.get(name)!r}; with latent attention of this configuration it "
                f"must be {value}"
            )
    return LatentAttentionSpec(
        num_heads=num_heads,
        q_lora_rank=fields.positive_or_none("q_lora_rank"),
        kv_lora_rank=fields.positive("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=fields.positive("v_head_dim"),
        scale=(nope + rope) ** -0.5,
        norm_eps=LATENT_NORM_EPS,
        has_bias=fields.switch(fields.family.qkv_bias),
    )


def _with_window(
    attention: AttentionSpec | LatentAttentionSpec, window: int | None
) -> AttentionSpec | LatentAttentionSpec:
    if isinstance(attention, LatentAttentionSpec):
        assert window is None, "no family with latent attention has windows"
        return attention
    return replace(attention, sliding_window=window)


def _dense(fields: ConfigFields) -> DenseSpec:
    return DenseSpec(
        hidden=fields.positive("intermediate_size"),
        activation=_activation(fields),
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _moe(fields: ConfigFields) -> MoeSpec | None:
    rule = fields.family.moe
    if rule is None:
        return None
    num_experts = fields.natural(rule.num_experts, maximum=MAX_EXPERTS)
    if num_experts == 0:
        return None
    top_k = fields.uniform(rule.top_k)
    router = _router(fields, rule.router, num_experts)
    choice = num_experts // router.num_groups * router.top_groups
    if top_k > choice:
        raise ConfigError(f"{rule.top_k} is {top_k}, but there are {choice} experts to choose from")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden=fields.positive(rule.expert_hidden),
        activation=_activation(fields),
        router=router,
        has_bias=rule.has_bias,
        clamp=_clamp(fields, rule),
        shared=_shared(fields, rule),
    )


def _router(fields: ConfigFields, rule: RouterRule, num_experts: int) -> RouterSpec:
    router = RouterSpec(
        scoring=rule.scoring,
        renormalize=fields.switch(rule.renormalize),
        min_weight_sum=fields.number_or(rule.min_weight_sum),
        scale=fields.number_or(rule.scale),
        has_bias=rule.has_bias,
        has_selection_bias=rule.has_selection_bias,
        jitter=fields.number_or(rule.jitter),
    )
    if rule.group_score is None or not _has_groups(fields, rule):
        return router
    num_groups, top_groups = fields.positive("n_group"), fields.positive("topk_group")
    smallest = 2 if rule.group_score == "top2_sum" else 1
    if num_experts % num_groups or num_experts // num_groups < smallest or top_groups > num_groups:
        raise ConfigError(
            f"n_group is {num_groups} and topk_group {top_groups}; {num_experts} experts cannot be "
            f"divided in groups of at least {smallest} like that"
        )
    if num_groups == 1:
        return router
    return replace(
        router, num_groups=num_groups, top_groups=top_groups, group_score=rule.group_score
    )


def _has_groups(fields: ConfigFields, rule: RouterRule) -> bool:
    if rule.groups_switch is None:
        return True
    value, on, off = fields.get(rule.groups_switch), "group_limited_greedy", "greedy"
    if value not in (on, off):
        raise UnsupportedModelError(
            f"{rule.groups_switch} = {value!r} is not supported; supported: {on}, {off}"
        )
    return value == on


def _shared(fields: ConfigFields, rule: MoeRule) -> SharedSpec | None:
    if rule.shared is None:
        return None
    hidden = fields.natural(rule.shared.hidden)
    if rule.shared.count is not None:
        hidden *= fields.natural(rule.shared.count)
    if hidden == 0:
        return None
    return SharedSpec(
        hidden=hidden,
        is_gated=rule.shared.is_gated,
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _clamp(fields: ConfigFields, rule: MoeRule) -> ClampSpec | None:
    if rule.clamp is None:
        return None
    if _activation(fields) != "silu":
        raise UnsupportedModelError(
            f"hidden_act = {fields.get('hidden_act')!r} is not supported for clamped experts; "
            "supported: silu"
        )
    gain, limit = rule.clamp
    return ClampSpec(gain=fields.number(gain), limit=fields.number(limit))


def _activation(fields: ConfigFields) -> str:
    name = fields.get("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act = {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
