"""Derive the layers of a model from its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import exp
from typing import TypeVar

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.attention.grouped import AttentionSpec, PooledIndexerSpec
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS, AttentionKind, OutputGate, Temperature
from raymoe.specs.attention.latent import IndexerSpec, LatentAttentionSpec
from raymoe.specs.attention.recurrent import RecurrentSpec
from raymoe.specs.compressed_config import parse_compressed, router_of_layer
from raymoe.specs.config import ConfigFields
from raymoe.specs.families.published import DENSE, SPARSE
from raymoe.specs.families.rules import (
    ClampRule,
    Family,
    GatedStreamsRule,
    MoeRule,
    RouterRule,
    SparseLayers,
)
from raymoe.specs.files import MAX_LAYERS, MAX_NUMBER, integer
from raymoe.specs.indexer_config import block_indexers, check_pooled_rope, layer_indexers
from raymoe.specs.layers import (
    ClampSpec,
    DenseSpec,
    LayerSpec,
    MoeSpec,
    NormLayout,
    RouterSpec,
    SharedSpec,
)
from raymoe.specs.rope import SLIDING, RopeSpec
from raymoe.specs.streams import AnyStreamsSpec, GatedStreamsSpec, StreamsSpec

# By the type of a layer, and its attention.
ParseRope = Callable[[str, AttentionKind], RopeSpec]
_T = TypeVar("_T")


def layer_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer; raises UnsupportedModelError if `layer_types` contradicts."""
    window = _window(fields)
    has_own = fields.family.has_layer_types and fields.layer_types is not None
    slides = [] if has_own else _sliding_layers(fields, num_layers)
    if fields.layer_types is not None:
        slides = _named_layers(fields, num_layers, slides if window else [False] * num_layers)
        if any(slides) and window is None:
            raise UnsupportedModelError(
                "layer_types has sliding_attention layers, but the sliding window is off"
            )
    if fields.family.ends_with_full_layer:
        slides = [*slides[:-1], False]
    return tuple(window if is_sliding else None for is_sliding in slides)


def sparse_layers(fields: ConfigFields, rule: SparseLayers, num_layers: int) -> list[bool]:
    return _SPARSE[rule](fields, num_layers)


def _window(fields: ConfigFields) -> int | None:
    family = fields.family
    if family.windowed_layers == "none":
        return None
    if family.is_window_switched and not fields.boolean("use_sliding_window"):
        return None
    if family.windowed_layers in {"even", "all_but_nth"}:
        return fields.positive("sliding_window")  # transformers fails without it
    return fields.positive_or_none("sliding_window")


def _sliding_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    rule = fields.family.windowed_layers
    if rule in {"none", "all", "named"}:
        return [rule == "all"] * num_layers
    if rule == "even":
        return [i % 2 == 0 for i in range(num_layers)]
    if rule == "all_but_nth":
        step = fields.family.window_step
        step = fields.positive(step) if isinstance(step, str) else step
        prefix = fields.family.dense_window_step
        if prefix is None:
            slides = _all_but_nth(step, num_layers)
            return [False, *slides[1:]] if fields.family.starts_with_full_layer else slides
        leading = min(fields.natural("first_k_dense_replace"), num_layers)
        before = _all_but_nth(fields.positive(prefix), leading)
        return before + _all_but_nth(step, num_layers - leading)
    border = fields.natural("max_window_layers")
    if rule == "from_max":
        return [i >= border for i in range(num_layers)]
    return [i % 2 == 0 and i < border for i in range(num_layers)]


def _all_but_nth(step: int, num_layers: int) -> list[bool]:
    return [(i + 1) % step != 0 for i in range(num_layers)]


def _named_layers(fields: ConfigFields, num_layers: int, slides: list[bool]) -> list[bool]:
    recurrent = fields.family.recurrent
    states = () if recurrent is None else (recurrent.layer_type,)
    kinds = (*fields.family.full_layer_types, *states, SLIDING)
    named = _kinds(fields.layer_types, "layer_types", kinds, num_layers)
    if not fields.family.has_layer_types and named != slides:
        raise UnsupportedModelError(
            f"layer_types = {fields.layer_types!r} disagrees with the sliding window of this "
            "model_type, for which transformers does not read layer_types"
        )
    return named


def _kinds(value: object, name: str, kinds: tuple[str, ...], num_layers: int) -> list[bool]:
    """Whether each layer is of the last of these kinds."""
    if (
        not isinstance(value, list | tuple)
        or len(value) != num_layers
        or not all(kind in kinds for kind in value)
    ):
        raise UnsupportedModelError(
            f"{name} = {value!r} is not supported; "
            f"supported: one of {', '.join(kinds)} for each of {num_layers} layers"
        )
    return [kind == kinds[-1] for kind in value]


def _stepped(fields: ConfigFields, num_layers: int) -> list[bool]:
    step, dense = fields.positive("decoder_sparse_step"), fields.integers("mlp_only_layers")
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def _after_leading(fields: ConfigFields, num_layers: int) -> list[bool]:
    leading = fields.natural("first_k_dense_replace")
    return [i >= leading for i in range(num_layers)]


def _listed(fields: ConfigFields, num_layers: int) -> list[bool]:
    rule = fields.family.moe
    if not fields.has("mlp_layer_types") and rule is not None and rule.sparse_list is not None:
        marks = fields.by_layer(rule.sparse_list)
        if marks is not None:
            return [mark == 1 for mark in marks]
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
MAX_STREAMS = 8  # twice the largest published value
MAX_SINKHORN_ITERATIONS = 100  # five times the largest published value
MAX_EXPERTS = 4096  # ten times the largest published value
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17  # five times the largest published value
# Epsilon of the latents' norms in most transformers classes with latent attention: the default of
# their RMSNorm, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def parse_layers(
    fields: ConfigFields, attention: AttentionSpec | LatentAttentionSpec, parse_rope: ParseRope
) -> tuple[LayerSpec, ...]:
    num_layers = fields.positive("num_hidden_layers", maximum=MAX_LAYERS)
    states = _recurrent_layers(fields, num_layers)
    compressed = parse_compressed(fields, num_layers, parse_rope)
    windows = (None,) * num_layers if compressed else layer_windows(fields, num_layers)
    recurrent = _recurrent(fields)
    heads, ropes = _heads_by_layer(fields, num_layers), _Ropes(fields, parse_rope)
    indexers: tuple[IndexerSpec | None, ...] = (None,) * num_layers
    if isinstance(attention, LatentAttentionSpec):
        indexers = layer_indexers(fields, attention, num_layers)
    blocks = block_indexers(fields, attention, num_layers)
    moe = _moe(fields)
    sparse = _checked_sparse_layers(fields, moe, num_layers)
    dense, streams = None if all(sparse) else _dense(fields), parse_streams(fields)
    name, family = fields.family.layers_without_network, fields.family
    bare = frozenset() if name is None else fields.integers(name)
    layers = []
    for i, (window, is_sparse, num_heads) in enumerate(zip(windows, sparse, heads, strict=True)):
        own: AttentionKind = attention
        rope = None
        if states is not None and states[i]:
            assert recurrent is not None, "its family has such layers"
            own = recurrent
        elif compressed is not None:
            own, rope = compressed[i]
        else:
            if isinstance(attention, AttentionSpec):
                own = _in_layer(fields, attention, i, window=window, num_heads=num_heads)
                own = replace(own, blocks=blocks[i])
            rope = ropes.of(i, window, own, is_sparse=is_sparse)
            if isinstance(own, AttentionSpec) and isinstance(own.blocks, PooledIndexerSpec):
                check_pooled_rope(own.blocks, rope)
            if isinstance(own, LatentAttentionSpec):
                own = replace(_with_rope(own, window, rope), indexer=indexers[i])
        ffn = _clamped(fields, moe if is_sparse else dense, i)
        if isinstance(ffn, MoeSpec):
            ffn = replace(ffn, router=router_of_layer(fields, ffn.router, i))
        if i in bare:
            ffn = DenseSpec(hidden=0, activation=_activation(fields))
        layers.append(
            LayerSpec(
                attention=own,
                ffn=ffn,
                rope=rope,
                norms=_norms(family, is_sparse=is_sparse, is_bare=i in bare),
                is_parallel=family.is_parallel,
                has_norm_bias=family.has_norm_bias,
                has_scalar=family.has_layer_scalars,
                streams=streams,
            )
        )
    return tuple(layers)


def _checked_sparse_layers(
    fields: ConfigFields, moe: MoeSpec | None, num_layers: int
) -> list[bool]:
    """Which layers have experts."""
    rule = fields.family.moe
    if moe is None or rule is None:
        return [False] * num_layers
    sparse = sparse_layers(fields, rule.sparse_layers, num_layers)
    num_experts = sum(sparse) * moe.num_experts
    if num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
        raise ConfigError(
            f"{sum(sparse)} layers with {moe.num_experts} experts are {num_experts} experts; "
            f"at most {MAX_EXPERTS_OF_ALL_LAYERS} are supported"
        )
    return sparse


def _norms(family: Family, *, is_sparse: bool, is_bare: bool) -> NormLayout:
    if is_bare:
        return replace(family.norms, before_ffn=False)
    return family.sparse_norms if is_sparse and family.sparse_norms else family.norms


def _recurrent_layers(fields: ConfigFields, num_layers: int) -> list[bool] | None:
    """Which layers keep a state; None if no layer of the family does."""
    rule = fields.family.recurrent
    if rule is None:
        return None
    windowed = () if fields.family.windowed_layers == "none" else (SLIDING,)
    kinds = (*fields.family.full_layer_types, *windowed, rule.layer_type)
    states = _kinds(fields.layer_types, "layer_types", kinds, num_layers)
    if all(states):
        raise UnsupportedModelError(
            f"layer_types has only layers of type {rule.layer_type}; supported: at least one layer "
            "with attention, as in transformers"
        )
    return states


def _recurrent(fields: ConfigFields) -> RecurrentSpec | None:
    rule = fields.family.recurrent
    if rule is None:
        return None
    names = (rule.num_key_heads, rule.num_heads, rule.key_dim, rule.value_dim, rule.conv_width)
    num_key_heads, num_heads, key_dim, value_dim, conv_width = (
        fields.positive(name) if isinstance(name, str) else name for name in names
    )
    if num_heads % num_key_heads:
        raise ConfigError(
            f"{rule.num_heads} is {num_heads}, not a multiple of {rule.num_key_heads} "
            f"({num_key_heads})"
        )
    has_matrices = rule.kind != "short_conv"
    for name, dim in ((rule.key_dim, key_dim), (rule.value_dim, value_dim)):
        if has_matrices:
            _check_head_dim(str(name), dim)
    if not has_matrices and conv_width == 1:
        raise UnsupportedModelError(
            f"{rule.conv_width} is 1: such a convolution keeps no state; supported: at least 2"
        )
    if has_matrices and ACTIVATIONS.get(str(fields.get(rule.activation))) != "silu":
        raise UnsupportedModelError(
            f"{rule.activation} = {fields.get(rule.activation)!r} is not supported for layers of "
            f"type {rule.layer_type}; supported: silu"
        )
    return RecurrentSpec(
        kind=rule.kind,
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
        norm_eps=fields.number_or(fields.family.norm_eps),
        has_conv_bias=fields.switch(rule.conv_bias),
        has_bias=fields.switch(rule.bias),
        latent_width=None if rule.latent_width is None else fields.positive(rule.latent_width),
        decay_bound=_decay_bound(fields, rule.decay_bound),
        has_sigmoid_gate=_has_sigmoid_gate(fields, rule.gate),
    )


def _has_sigmoid_gate(fields: ConfigFields, name: str | None) -> bool:
    if name is None or not fields.get(name):
        return False
    return _choice(fields, name, {"sigmoid": True, "silu": False})


def _decay_bound(fields: ConfigFields, name: str | None) -> float | None:
    value = None if name is None else fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_NUMBER < value < 0:
        raise ConfigError(f"config.json: {name} is {value!r}; expected a negative number, or null")
    return float(value)


def parse_streams(fields: ConfigFields) -> AnyStreamsSpec | None:
    rule = fields.family.streams
    if rule is None:
        return None
    count = fields.positive(rule.count)
    if not 2 <= count <= MAX_STREAMS:
        raise UnsupportedModelError(f"{rule.count} is {count}; supported: 2 to {MAX_STREAMS}")
    if isinstance(rule, GatedStreamsRule):
        return GatedStreamsSpec(
            count=count,
            latent_width=fields.positive(rule.latent_width),
            norm_eps=fields.number_or(fields.family.norm_eps),
        )
    iterations = None
    if rule.sinkhorn_iterations is not None:
        name = rule.sinkhorn_iterations
        iterations = fields.positive(name, maximum=MAX_SINKHORN_ITERATIONS)
    return StreamsSpec(
        count=count,
        eps=fields.number(rule.eps),
        norm_eps=fields.number_or(fields.family.norm_eps),
        sinkhorn_iterations=iterations,
        magnitude=fields.number_or(rule.magnitude),
        merge=rule.merge,
    )


def parse_attention(fields: ConfigFields) -> AttentionSpec:
    family = fields.family
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive_or_none("num_key_value_heads") or num_heads
    hidden_size = fields.positive("hidden_size")
    head_dim = fields.positive_or_none("head_dim") or hidden_size // num_heads
    value_head_dim = None
    if family.value_head_dim is not None:
        value_head_dim = fields.positive(family.value_head_dim)
    _check_heads(num_heads, num_kv_heads)
    _check_head_dim("head_dim", head_dim)
    if value_head_dim is not None:
        _check_head_dim(family.value_head_dim, value_head_dim)
    if family.needs_full_width and num_heads * head_dim != hidden_size:
        raise UnsupportedModelError(
            f"head_dim {head_dim} x {num_heads} heads is not hidden_size {hidden_size}: "
            "the norm over the full width of this family needs them equal"
        )
    scale = (fields.number_or_none(family.scale_divisor) or head_dim) ** -0.5
    if family.scale is not None:
        scale = fields.number_or(family.scale)
    has_norm = family.qk_norm_switch is None or fields.boolean(family.qk_norm_switch)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        qkv_bias=fields.switch(family.qkv_bias),
        output_bias=fields.switch(family.output_bias),
        qk_norm=family.qk_norm if has_norm else "none",
        is_norm_after_rope=family.is_norm_after_rope,
        norms_values=family.norms_values,
        clip_qkv=fields.number_or_none(family.clip),
        has_sinks=family.sinks == "all",
        value_head_dim=value_head_dim,
        value_scale=fields.number_or_none(family.value_scale) or 1.0,
        gate=_gate(fields),
    )


def _check_head_dim(name: str | None, dim: int) -> None:
    if dim % HEAD_DIM_MULTIPLE or dim < HEAD_DIM_MULTIPLE:
        raise UnsupportedModelError(f"{name} is {dim}; supported: multiples of {HEAD_DIM_MULTIPLE}")


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )


GATES: Mapping[object, bool] = {True: True, "per-head": True, "per-element": False}


def _gate(fields: ConfigFields) -> OutputGate | None:
    activation, rule = fields.family.gate, fields.family.gate_granularity
    if activation is None:
        return None
    is_per_head = rule if isinstance(rule, bool) else _is_gate_per_head(fields, rule)
    has_bias = fields.switch(fields.family.gate_bias)
    return OutputGate(activation=activation, is_per_head=is_per_head, has_bias=has_bias)


def _is_gate_per_head(fields: ConfigFields, name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, str | bool) or value not in GATES:
        raise UnsupportedModelError(
            f"{name} = {value!r} is not supported; supported: {', '.join(map(repr, GATES))}"
        )
    return GATES[value]


def _heads_by_layer(fields: ConfigFields, num_layers: int) -> list[int]:
    name, num_heads = fields.family.heads_by_layer, fields.positive("num_attention_heads")
    counts = None if name is None else fields.by_layer(name)
    if counts is None:
        return [num_heads] * num_layers
    return [integer(f"an entry of {name}", count, minimum=1) for count in counts]


def parse_latent_attention(fields: ConfigFields) -> LatentAttentionSpec:
    num_heads = fields.positive("num_attention_heads")
    nope, rope = fields.positive("qk_nope_head_dim"), fields.natural("qk_rope_head_dim")
    # Fields that transformers derives from others and writes as well.
    head_dim = nope + rope if fields.family.rope.is_part_of_head else rope
    eps = fields.family.latent_norm_eps
    derived = {"num_key_value_heads": num_heads, "head_dim": head_dim, "qk_head_dim": nope + rope}
    for name, value in derived.items():
        # Classes overwrite their own defaults: only what the file says can contradict.
        if name in fields.family.ignored or name not in fields.config:
            continue
        if fields.has(name) and fields.natural(name) != value:
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
        norm_eps=LATENT_NORM_EPS if eps is None else fields.number(eps),
        has_bias=fields.switch(fields.family.qkv_bias),
        gate=_gate(fields),
        has_sinks=fields.family.sinks == "all",
    )


def _with_rope(
    attention: LatentAttentionSpec, window: int | None, rope: RopeSpec | None
) -> LatentAttentionSpec:
    assert window is None, "no family with latent attention has windows"
    factor = 1.0 if rope is None else rope.scale_factor
    return replace(attention, scale=attention.scale * factor)


def _in_layer(
    fields: ConfigFields, attention: AttentionSpec, i: int, *, window: int | None, num_heads: int
) -> AttentionSpec:
    head_dim, num_kv_heads = _own_sizes(fields, attention, i, is_full=window is None)
    if window is not None:
        if fields.family.windowed_kv_heads is not None:
            num_kv_heads = fields.positive(fields.family.windowed_kv_heads)
        if fields.family.windowed_heads is not None:
            num_heads = fields.positive_or_none(fields.family.windowed_heads) or num_heads
    _check_heads(num_heads, num_kv_heads)
    has_chunks = fields.family.has_chunks
    if has_chunks and window is not None and window % KV_BLOCK_TOKENS:
        raise UnsupportedModelError(
            f"attention_chunk_size is {window}; supported: multiples of {KV_BLOCK_TOKENS}"
        )
    return replace(
        attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qk_norm=attention.qk_norm if window or fields.family.norms_full_layers else "none",
        values_are_keys=window is None and fields.switch(fields.family.full_values_are_keys),
        sliding_window=None if has_chunks else window,
        chunk_tokens=window if has_chunks else None,
        temperature=_temperature(fields) if window is None else None,
        has_sinks=attention.has_sinks or (window is not None and fields.family.sinks == "windowed"),
    )


def _temperature(fields: ConfigFields) -> Temperature | None:
    rule = fields.family.temperature
    if rule is None or not fields.has(rule.beta):
        return None
    return Temperature(beta=fields.number(rule.beta), period=fields.positive(rule.period))


def _own_sizes(
    fields: ConfigFields, attention: AttentionSpec, i: int, *, is_full: bool
) -> tuple[int, int]:
    """Dimensions of a head and KV heads of layer `i`, as transformers' `per_layer_config`."""
    family, sizes = fields.family, (attention.head_dim, attention.num_kv_heads)
    names = (family.full_head_dim, family.full_kv_heads)
    own: Mapping[str, object] = {}
    if fields.has("per_layer_config"):
        own = _own_fields(fields.get("per_layer_config"), i)
        names = ("head_dim", "num_key_value_heads")
    elif is_full:
        own = {name: fields.get(name) for name in names if name is not None}
        if not fields.switch(family.full_values_are_keys):
            names = (names[0], None)
    head_dim, num_kv_heads = (
        size if name is None or own.get(name) is None else integer(name, own[name], minimum=1)
        for name, size in zip(names, sizes, strict=True)
    )
    _check_head_dim(names[0] or "head_dim", head_dim)
    return head_dim, num_kv_heads


def _own_fields(by_layer: object, i: int) -> Mapping[str, object]:
    found: Mapping[str, object] = {}
    known = {"head_dim", "num_key_value_heads"}
    for layer, own in by_layer.items() if isinstance(by_layer, Mapping) else [("", None)]:
        if not str(layer).isdigit() or not isinstance(own, Mapping) or own.keys() - known:
            raise UnsupportedModelError(
                f"per_layer_config = {by_layer!r:.200} is not supported; supported: head_dim and "
                "num_key_value_heads by the number of a layer"
            )
        if int(layer) == i:
            found = own
    return found


class _Ropes:
    def __init__(self, fields: ConfigFields, parse: ParseRope) -> None:
        self._fields, self._rule = fields, fields.family.rope
        self._of_type = cache(parse)
        rotated, thetas = self._rule.rotated_layers, self._rule.thetas_by_layer
        self._rotated = None if rotated is None else fields.by_layer(rotated)
        self._thetas = None if thetas is None else fields.by_layer(thetas)

    def of(
        self,
        i: int,
        window: int | None,
        attention: AttentionKind,
        *,
        is_sparse: bool,
    ) -> RopeSpec | None:
        if self._rotated is not None and not self._rotated[i]:
            return None
        rope = self._common(window, attention, is_sparse=is_sparse)
        if self._thetas is None or rope is None:
            return rope
        theta = self._thetas[i]
        if isinstance(theta, int | float) and not isinstance(theta, bool) and theta < MAX_NUMBER:
            if theta == 0:
                return None
            if theta > 0:
                return replace(rope, theta=float(theta))
        raise ConfigError(
            f"config.json: {self._rule.thetas_by_layer}[{i}] is {theta!r}; expected a positive "
            "number, or 0 for no rotation"
        )

    def _common(
        self, window: int | None, attention: AttentionKind, *, is_sparse: bool
    ) -> RopeSpec | None:
        if window is not None:
            return self._of_type(SLIDING, attention)
        rotates_full = self._fields.switch(self._rule.rotates_full_layers)
        if rotates_full or (not is_sparse and self._rotates_dense_layers):
            return self._of_type(self._fields.family.full_layer_types[0], attention)
        return None

    @property
    def _rotates_dense_layers(self) -> bool:
        name = self._rule.rotates_dense_layers
        return name is not None and self._fields.get(name) == 1


def _dense(fields: ConfigFields) -> DenseSpec:
    return DenseSpec(
        hidden=fields.positive_or_none(fields.family.dense_hidden)
        or fields.positive("intermediate_size"),
        activation=_activation(fields),
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _moe(fields: ConfigFields) -> MoeSpec | None:
    rule = fields.family.moe
    if rule is None or (rule.switch is not None and not fields.boolean(rule.switch)):
        return None
    num_experts = fields.natural(rule.num_experts, maximum=MAX_EXPERTS)
    if num_experts == 0:
        return None
    top_k = fields.uniform(rule.top_k)
    router, shared = _router(fields, rule.router, num_experts), _shared(fields, rule)
    if shared is not None:
        router = replace(router, scale=router.scale * shared.scale)
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
        has_branch_norms=rule.has_branch_norms,
        shared=shared,
        latent_size=None if rule.latent_size is None else fields.positive_or_none(rule.latent_size),
    )


def _router(fields: ConfigFields, rule: RouterRule, num_experts: int) -> RouterSpec:
    scoring = rule.scoring
    if rule.scoring_field is not None:
        scoring = _choice(fields, rule.scoring_field, {"softmax": "softmax", "sigmoid": "sigmoid"})
    is_of_chosen = rule.scoring_field is not None and scoring == "softmax"
    router = RouterSpec(
        scoring=scoring,
        logit_softcap=_softcap(fields, rule.logit_softcap),
        renormalize=is_of_chosen or fields.switch(rule.renormalize),
        min_weight_sum=fields.number_or(rule.min_weight_sum),
        added_weight_sum=rule.added_weight_sum,
        scale=fields.number_or(rule.scale),
        has_bias=rule.has_bias,
        has_selection_bias=fields.switch(rule.has_selection_bias),
        chooses_by_logits=rule.chooses_by_logits,
        jitter=fields.number_or(rule.jitter),
        has_input_norm=rule.has_input_norm,
        scales_input=rule.scales_input,
        has_expert_scales=rule.has_expert_scales,
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


def _choice(fields: ConfigFields, name: str, choices: Mapping[str, _T]) -> _T:
    value = fields.get(name)
    if not isinstance(value, str) or value not in choices:
        raise UnsupportedModelError(
            f"{name} = {value!r} is not supported; supported: {', '.join(choices)}"
        )
    return choices[value]


def _softcap(fields: ConfigFields, name: str | None) -> float | None:
    if name is None or not fields.get(name):
        return None
    return fields.number(name)


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
        scale=1.0
        if rule.shared.combination is None
        else _choice(fields, rule.shared.combination, {"sum": 1.0, "average": 0.5}),
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _clamped(fields: ConfigFields, ffn: DenseSpec | MoeSpec | None, i: int) -> DenseSpec | MoeSpec:
    """The network of layer `i` with its limits."""
    assert ffn is not None, "read where a layer has it"
    common = _clamp(fields, fields.family.clamp, i)
    if isinstance(ffn, DenseSpec):
        return replace(ffn, clamp=common)
    shared = None if ffn.shared is None else replace(ffn.shared, clamp=common)
    rule = fields.family.moe
    assert rule is not None, "it has experts"
    return replace(ffn, clamp=_clamp(fields, rule.clamp, i), shared=shared)


def _clamp(fields: ConfigFields, rule: ClampRule | None, i: int) -> ClampSpec | None:
    if rule is None:
        return None
    if _activation(fields) != "silu":
        raise UnsupportedModelError(
            f"hidden_act = {fields.get('hidden_act')!r} is not supported for clamped experts; "
            "supported: silu"
        )
    gain = fields.number_or(rule.gain)
    if not rule.is_after_activation:
        limit = fields.number(rule.limit)
        return ClampSpec(gain=gain, limit=limit, gate_limit=limit, offset=rule.offset)
    listed = fields.by_layer(rule.limit)
    value = None if listed is None else listed[i]
    if not value:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
        raise ConfigError(
            f"config.json: {rule.limit}[{i}] is {value!r}; expected a positive number or null"
        )
    gate_limit = _inverse_silu(float(value))
    return ClampSpec(gain=gain, limit=float(value), gate_limit=gate_limit, offset=rule.offset)


def _inverse_silu(result: float) -> float:
    """The positive argument of this result: a fixed point of x = result * (1 + exp(-x))."""
    x = result
    for _ in range(200):
        x = (x + result * (1.0 + exp(-x))) / 2
    return x


def _activation(fields: ConfigFields) -> str:
    if fields.family.activation is not None:
        return fields.family.activation
    name = fields.get("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act = {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
