"""Configurations as publishers write them, in the fields of transformers' classes.

Each function does what transformers' class does when it is made of such a configuration. Fields
that the class does not read may say only what it computes anyway.
"""

import re
from collections.abc import Callable, Mapping

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.class_defaults import ClassDefaults
from raymoe.specs.files import MAX_LAYERS, integer
from raymoe.specs.rope import SLIDING

FULL, LINEAR = "full_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
OVERLAPPING, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
BY_TOKEN, SCORED = "hash_moe", "moe"


def in_class_fields(
    config: Mapping[str, object], model_type: str, defaults: ClassDefaults
) -> dict[str, object]:
    """Raises UnsupportedModelError or ConfigError for fields that transformers does not follow."""
    form = _FORMS.get(model_type)
    return dict(config) if form is None else form(dict(config), {**defaults.values, **config})


def _mimo_v2_flash(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    if config.get("model_type") == "mimo_v2":
        return _with_window(_mimo_v2(config, values))
    num_layers = _num_layers(values)
    kinds = config.get("layer_types") or [
        FULL if i == 0 or i % 6 == 5 else SLIDING for i in range(num_layers)
    ]
    networks = config.get("mlp_layer_types") or [DENSE, *[SPARSE] * (num_layers - 1)]
    num_kv_heads = values.get("num_key_value_heads")
    computed: dict[str, object] = {
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
    }
    if config.get("rope_parameters") is not None:  # which take precedence
        computed = {name: config.get(name) for name in computed}
    computed |= {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": _marks(kinds, SLIDING),
        "layernorm_epsilon": values.get("rms_norm_eps"),
        "moe_layer_freq": _marks(networks, SPARSE),
        "swa_head_dim": values.get("head_dim"),
        "swa_num_attention_heads": values.get("num_attention_heads"),
        "swa_num_key_value_heads": 2 * num_kv_heads if isinstance(num_kv_heads, int) else None,
        "swa_v_head_dim": values.get("v_head_dim"),
    }
    _remove(config, computed, "model_type 'mimo_v2_flash'")
    config["swa_num_key_value_heads"] = computed["swa_num_key_value_heads"]
    return _with_window(config)


# Other media, and kinds of numbers in which other engines compute.
_MIMO_UNUSED = (
    *("audio_config", "audio_token_id", "image_token_id", "moe_router_dtype", "processor_config"),
    *("video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id"),
)


def _mimo_v2(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """MiMo-V2.5 and V2.6, of which transformers has no class: kinds of layers are marked."""
    num_layers = _num_layers(values)
    for name in _MIMO_UNUSED:
        config.pop(name, None)
    kinds = _marked(config, "hybrid_layer_pattern", num_layers, (FULL, SLIDING))
    networks = _marked(config, "moe_layer_freq", num_layers, (DENSE, SPARSE))
    names = ("rope_theta", "swa_rope_theta", "partial_rotary_factor")
    rope = {name: config.pop(name, None) for name in names}
    part = rope["partial_rotary_factor"]
    thetas = {FULL: rope["rope_theta"], SLIDING: rope["swa_rope_theta"]}
    missing = [name for name, value in rope.items() if value is None]
    if missing:
        raise ConfigError(f"config.json does not say what {missing[0]} of this mimo_v2 is")
    common = {"rope_type": "default", "type": "default", **rope}
    _check_all(_object(config.pop("rope_parameters", None)), common)
    config["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
        for kind, theta in thetas.items()
    }
    config["rms_norm_eps"] = config.pop("layernorm_epsilon", values.get("rms_norm_eps"))
    computed: dict[str, object] = {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_block_size": None,
        "swa_head_dim": values.get("head_dim"),
        "swa_num_attention_heads": values.get("num_attention_heads"),
        "swa_v_head_dim": values.get("v_head_dim"),
    }
    _remove(config, computed, "model_type 'mimo_v2'")
    if config.get("swa_num_key_value_heads") is None:
        config["swa_num_key_value_heads"] = values.get("num_key_value_heads")
    layout = config.pop("attention_projection_layout", None)
    if layout not in ("fused_qkv", "split", None):
        raise UnsupportedModelError(
            f"attention_projection_layout = {layout!r:.100} is not supported; supported: fused_qkv "
            "or split"
        )
    if layout == "fused_qkv":
        config["attention_projection_layout"] = layout
    return config | {"layer_types": kinds, "mlp_layer_types": networks}


def _check_all(rope: Mapping[str, object], common: Mapping[str, object]) -> None:
    """Check that an object says of a rope only what the fields beside it do."""
    for name, value in rope.items():
        if name not in common or common[name] != value:
            raise UnsupportedModelError(
                f"rope_parameters: {name} = {value!r:.100} is not supported in model_type "
                f"'mimo_v2'; supported: {common}"
            )


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"config.json: {value!r:.100} is not an object")
    return dict(value or {})


def _marked(
    config: dict[str, object], name: str, num_layers: int, kinds: tuple[str, str]
) -> list[str]:
    """The kind of each layer: a list of their indices; none is the first kind for all."""
    found = config.pop(name, None)
    marks = [0] * num_layers if found is None else found
    are_marks = isinstance(marks, list) and all(mark in (0, 1) for mark in marks)
    if not isinstance(marks, list) or not are_marks or len(marks) != num_layers:
        raise UnsupportedModelError(
            f"{name} = {found!r:.100} is not supported; supported: 0 or 1 for each of "
            f"{num_layers} layers"
        )
    return [kinds[int(mark)] for mark in marks]


def _with_window(config: dict[str, object]) -> dict[str, object]:
    if config.get("routed_scaling_factor") is None:
        config["routed_scaling_factor"] = 1.0
    before = config.pop("sliding_window_size", None)
    if before is not None:  # the tokens before the query
        config["sliding_window"] = 1 + integer("sliding_window_size", before, minimum=1)
    return config


def _step3p5(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    num_layers = _num_layers(values)
    predictors = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    padded = num_layers + integer("num_nextn_predict_layers", predictors, minimum=0)
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        found = config.get(name)
        is_padded = isinstance(found, list) and len(found) == padded
        if isinstance(found, list) and (is_padded or name.startswith("swiglu")):
            config[name] = found[:num_layers]
    listed = config.pop("moe_layers_enum", None)
    if listed is not None and config.get("mlp_layer_types") is None:
        sparse = _numbers(listed, padded)
        config["mlp_layer_types"] = [SPARSE if i in sparse else DENSE for i in range(num_layers)]
    other = config.pop("attention_other_setting", None) or {}
    if not isinstance(other, Mapping):
        raise ConfigError(f"attention_other_setting is {other!r:.100}; expected an object")
    setting = dict(other)
    num_heads = setting.pop("num_attention_heads", None)
    if num_heads is not None and config.get("num_sliding_attention_heads") is None:
        config["num_sliding_attention_heads"] = num_heads
    groups = config.get("num_attention_groups", values.get("num_key_value_heads"))
    sizes = dict.fromkeys(("head_dim", "true_head_dim"), values.get("head_dim"))
    computed = {"attention_type": SLIDING, "num_attention_groups": groups, **sizes}
    _remove(setting, computed, "attention_other_setting")
    _remove(setting, dict.fromkeys(setting), "attention_other_setting")
    outer = {name: config.pop(name, None) for name in _ROPE_FIELDS}
    if config.get("rope_parameters") is None:
        config["rope_parameters"] = _ropes_by_type(outer, config.get("layer_types"), num_layers)
    return config


def _llama4_text(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Layers with rotation attend within chunks, and the others have a temperature."""
    num_layers = _num_layers(values)
    step, chunk = (
        integer(name, values.get(name), minimum=1)
        for name in ("interleave_moe_layer_step", "attention_chunk_size")
    )
    rotated = _rotated_layers(values, num_layers)
    sparse = values.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list):
        raise ConfigError(f"moe_layers is {sparse!r:.100}; expected a list of layers")
    kinds = [CHUNKED if is_rotated else FULL for is_rotated in rotated]
    if config.get("layer_types") not in (None, kinds):
        raise UnsupportedModelError(
            f"layer_types = {config['layer_types']!r:.100} is not supported with no_rope_layers = "
            f"{rotated!r:.100}; supported: {CHUNKED} in the layers with rotation"
        )
    config["layer_types"] = [SLIDING if kind == CHUNKED else kind for kind in kinds]
    config["mlp_layer_types"] = [SPARSE if i in sparse else DENSE for i in range(num_layers)]
    config["sliding_window"] = chunk
    has_temperature = values.get("attn_temperature_tuning")
    for name in ("attn_scale", "floor_scale"):
        config[name] = values.get(name) if has_temperature else None
    for name in _LLAMA4_FIELDS:
        config.pop(name, None)
    return config


def _rotated_layers(values: Mapping[str, object], num_layers: int) -> list[object]:
    """Whether each layer is rotated, as listed; all but every n-th where nothing is listed."""
    interval = integer("no_rope_layer_interval", values.get("no_rope_layer_interval"), minimum=1)
    rotated = values.get("no_rope_layers") or [
        int((i + 1) % interval > 0) for i in range(num_layers)
    ]
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise ConfigError(
            f"no_rope_layers is {rotated!r:.100}; expected a list with a number for each of "
            f"{num_layers} layers"
        )
    return rotated[:num_layers]


def _smollm3(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Layers that are not rotated are those that have a window, where windows are on."""
    rotated = _rotated_layers(values, _num_layers(values))
    has_windows = values.get("use_sliding_window") and values.get("sliding_window") is not None
    config.pop("no_rope_layer_interval", None)
    config["no_rope_layers"] = rotated
    if config.get("layer_types") is None:
        config["layer_types"] = [FULL if one or not has_windows else SLIDING for one in rotated]
    return config


def _exaone4(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Layers without a window are rotated only in models that have no windows at all."""
    pattern = config.pop("sliding_window_pattern", values.get("sliding_window_pattern"))
    if config.get("layer_types") is None:
        step = integer("sliding_window_pattern", pattern, minimum=1)
        config["layer_types"] = _all_but_nth(step, _num_layers(values), FULL, SLIDING)
    config["rotates_full_layers"] = values.get("sliding_window") is None
    return config


def _cohere(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    return config | {"use_qk_norm": values.get("use_qk_norm") or False}  # null is none


def _cohere2(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    hidden_size, num_heads = (
        integer(name, values.get(name), minimum=1)
        for name in ("hidden_size", "num_attention_heads")
    )
    _remove(config, {"head_dim": hidden_size // num_heads}, "this model_type")
    return config


def _cohere_compass(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Layers of a type whose rope parameters are null are not rotated."""
    if config.get("layer_types") is None:
        config["layer_types"] = [FULL] * _num_layers(values)
    ropes = config.get("rope_parameters")
    config["rotates_full_layers"] = (
        not isinstance(ropes, Mapping) or ropes.get(FULL, ()) is not None
    )
    if config.get("logit_scale") is None:
        config["logit_scale"] = 1.0
    return _cohere2(config, values)


def _lfm2(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Compute the width of networks and the kinds of layers as the class and its model do."""
    adjusts, multiplier, multiple = (values.get(name) for name in _LFM2_ADJUSTMENTS)
    written = config.get("block_ff_dim", values.get("intermediate_size"))
    width = integer("intermediate_size", written, minimum=1)
    if adjusts:
        width = 2 * width // 3
        if multiplier is not None:
            if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
                raise ConfigError(f"block_ffn_dim_multiplier is {multiplier!r:.100}")
            multiple = integer("block_multiple_of", multiple, minimum=1)
            width = -(-int(multiplier * width) // multiple) * multiple
    config["intermediate_size"] = width
    layers = range(_num_layers(values))
    full = values.get("full_attn_idxs")
    if config.get("layer_types") is None:
        full = layers if full is None else full
        if not isinstance(full, list | range):
            raise ConfigError(f"full_attn_idxs is {full!r:.100}; expected a list of layers")
        config["layer_types"] = [FULL if i in full else CONV for i in layers]
    for name in ("block_ff_dim", "full_attn_idxs", *_LFM2_ADJUSTMENTS):
        config.pop(name, None)
    return config


CONV = "conv"
_LFM2_ADJUSTMENTS = (
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
)


def _lfm3(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    if config.get("layer_types") is None:
        kinds = (SLIDING, CONV, FULL, CONV)
        config["layer_types"] = [kinds[i % 4] if i else CONV for i in range(_num_layers(values))]
    return config


CHUNKED = "chunked_attention"
_LLAMA4_FIELDS = (
    *("attention_chunk_size", "attn_temperature_tuning"),
    *("interleave_moe_layer_step", "moe_layers", "no_rope_layer_interval", "no_rope_layers"),
)
_ROPE_FIELDS = ("rope_theta", "partial_rotary_factors", "rope_scaling")


def _ropes_by_type(
    outer: Mapping[str, object], layer_types: object, num_layers: int
) -> dict[str, object]:
    """Rope parameters of each type of layer, from lists with an entry for each layer."""
    kinds = layer_types if isinstance(layer_types, list) else [FULL] * num_layers
    ropes: dict[str, object] = {}
    for kind in (FULL, SLIDING):
        members = [i for i, name in enumerate(kinds[:num_layers]) if name == kind]
        if not members:
            continue
        theta = _common("rope_theta", outer["rope_theta"], members)
        rope = {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta}
        factor = _common("partial_rotary_factors", outer["partial_rotary_factors"], members)
        if factor is not None:
            rope["partial_rotary_factor"] = factor
        scaling = outer["rope_scaling"]
        if isinstance(scaling, Mapping) and kind == FULL:
            rope |= scaling
        ropes[kind] = rope
    return ropes


def _common(name: str, value: object, layers: list[int]) -> object:
    """What a list says for all these layers; a number is that of each."""
    if not isinstance(value, list):
        return value
    found = [value[i] for i in layers if i < len(value)]
    if len(found) < len(layers) or any(one != found[0] for one in found):
        raise UnsupportedModelError(
            f"{name} = {value!r:.100} is not supported; supported: a number for each layer, equal "
            "in all layers of a type"
        )
    return found[0]


def _gated_delta(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    step = config.pop("full_attention_interval", None)
    if config.get("layer_types") is None:
        step = 4 if step is None else integer("full_attention_interval", step, minimum=1)
        config["layer_types"] = _all_but_nth(step, _num_layers(values), FULL, LINEAR)
    return config


def _all_but_nth(step: int, num_layers: int, kind: str, others: str) -> list[str]:
    return [kind if (i + 1) % step == 0 else others for i in range(num_layers)]


def _granitemoehybrid(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    _rename_layers(config, values, "layer_types")
    num_heads, expand, hidden_size = (
        integer(name, values.get(name), minimum=1)
        for name in ("mamba_n_heads", "mamba_expand", "hidden_size")
    )
    width, value_dim = expand * hidden_size, values.get("mamba_d_head")
    value_dim = width // num_heads if value_dim in ("auto", None) else value_dim
    if not isinstance(value_dim, int) or num_heads * value_dim != width:
        raise ConfigError(
            f"mamba_n_heads is {num_heads} and mamba_d_head {value_dim!r}; their product must be "
            f"mamba_expand x hidden_size ({width})"
        )
    kind = config.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        raise UnsupportedModelError(
            f"position_embedding_type = {kind!r} is not supported; supported: rope, nope, null"
        )
    config |= {"mamba_d_head": value_dim, "position_embedding_type": kind == "rope"}
    config.pop("mamba_expand", None)
    _remove_step_limit(config)
    return config


def _nemotron_h(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Pair each layer of attention or state with the network that may follow it."""
    if config.get("quantization_config") is not None:
        raise UnsupportedModelError(
            "quantization_config is not supported for model_type 'nemotron_h', whose modules are "
            "numbered in another way; use the checkpoint in bfloat16"
        )
    pattern = config.pop("hybrid_override_pattern", None)
    if config.get("layers_block_type") is None and config.get("layer_types") is None:
        marks = pattern if isinstance(pattern, str) else "ME*-"
        config["layers_block_type"] = [_PATTERN.get(mark, mark) for mark in marks]
    _rename_layers(config, values, "layer_types")
    found = config["layer_types"]
    mixers: list[str] = []
    networks: dict[int, str] = {}
    for kind in found if isinstance(found, list) else [found]:
        if kind in (LINEAR, FULL):
            mixers.append(kind)
        elif kind in [*_NETWORKS] and mixers and len(mixers) - 1 not in networks:
            networks[len(mixers) - 1] = _NETWORKS[kind]
        else:
            raise UnsupportedModelError(
                f"layers_block_type = {found!r:.200} is not supported; supported: {LINEAR} and "
                f"{FULL}, each followed by at most one of {', '.join(_NETWORKS)}"
            )
    layers = range(len(mixers))
    config |= {
        "layer_types": mixers,
        "num_hidden_layers": len(mixers),
        "mlp_layer_types": [networks.get(i, DENSE) for i in layers],
        "layers_without_network": [i for i in layers if i not in networks],
    }
    _remove_step_limit(config)
    return config


def _kimi_linear(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Take the sizes of linear attention, and the kinds of layers, out of an object of their own.

    Its lists count layers from 1. The class reads them if it has no `layer_types`.
    """
    nested, num_layers = config.pop("linear_attn_config", None) or {}, _num_layers(values)
    if not isinstance(nested, Mapping):
        raise ConfigError(f"linear_attn_config is {nested!r:.100}; expected an object")
    sizes = {name: nested[name] for name in _KIMI_SIZES.keys() & nested.keys()}
    config |= {_KIMI_SIZES[name]: value for name, value in sizes.items()}
    listed = {kind: nested.get(name) for name, kind in _KIMI_LISTS.items()}
    unknown = nested.keys() - _KIMI_SIZES.keys() - _KIMI_LISTS.keys()
    if unknown or (any(listed.values()) and None in listed.values()):
        raise UnsupportedModelError(
            f"linear_attn_config = {nested!r:.200} is not supported; supported: "
            f"{', '.join(_KIMI_SIZES)}, and {' with '.join(_KIMI_LISTS)}"
        )
    kinds: list[object] = [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    if any(listed.values()):
        kinds = [None] * num_layers
        for kind, layers in listed.items():
            for layer in layers if isinstance(layers, list) else [layers]:
                number = integer(f"a layer of {kind}", layer, minimum=1, maximum=num_layers)
                kinds[number - 1] = kind
        if config.get("layer_types") not in (None, kinds):
            raise UnsupportedModelError(
                f"layer_types = {config['layer_types']!r:.100} is not supported with the lists "
                "of layers in linear_attn_config, which say otherwise"
            )
    if config.get("layer_types") is None:
        config["layer_types"] = kinds
    return config


def _flint(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Full attention in the first two layers, every fourth and the last, where none is named."""
    last = _num_layers(values) - 1
    if config.get("layer_types") is None:
        config["layer_types"] = [
            FULL if i < 2 or i % 4 == 1 or i == last else SLIDING for i in range(last + 1)
        ]
    if config.get("mlp_only_layers") is None:
        config["mlp_only_layers"] = [0, 1]
    return config


def _granite_swa(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    if config.get("layer_types") is None:
        config["layer_types"] = [SLIDING if i % 4 else FULL for i in range(_num_layers(values))]
    return config


def _sarvam_mla(config: dict[str, object], _: Mapping[str, object]) -> dict[str, object]:
    """The name `deepseek_yarn` stands for yarn; such a scaling takes precedence."""
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and "deepseek_yarn" in (
        scaling.get("type"),
        scaling.get("rope_type"),
    ):
        del config["rope_scaling"]
        plain = {name: value for name, value in scaling.items() if name != "type"}
        config["rope_parameters"] = plain | {"rope_type": "yarn"}
    return config


def _bailing_hybrid(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Compute the kinds of layers, and the sizes of linear attention, from the publisher's fields.

    `head_dim` is that of linear attention. Saved again it is that of the rope, beside
    `linear_head_dim`.
    """
    _refuse_lightning_attention(config)
    num_layers, size = _num_layers(values), values.get("moe_intermediate_size")
    step = integer("layer_group_size", values.get("layer_group_size"), minimum=1)
    if config.get("layer_types") is None:
        config["layer_types"] = _all_but_nth(step, num_layers, FULL, LINEAR)
    if config.get("linear_head_dim") is None:
        config["linear_head_dim"] = values.get("head_dim")
        config["head_dim"] = values.get("qk_rope_head_dim")
    sizes = {
        "linear_num_heads": "num_attention_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    config |= {name: config.get(name) or values.get(other) for name, other in sizes.items()}
    if values.get("kda_safe_gate") is False:
        config["kda_lower_bound"] = None
    elif values.get("kda_lower_bound") is None:
        raise ConfigError("kda_lower_bound is null, and kda_safe_gate says that there is a bound")
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        limits = config.get(name)
        config[name] = limits[:num_layers] if isinstance(limits, list) else limits
    for name in ("kda_safe_gate", "layer_group_size", "short_conv_kernel_size"):
        config.pop(name, None)
    num_shared = next(
        (config[name] for name in ("num_shared_experts", "n_shared_experts") if name in config), 1
    )
    whole = size * num_shared if isinstance(size, int) and isinstance(num_shared, int) else None
    _remove(config, {"moe_shared_expert_intermediate_size": whole}, "model_type 'bailing_hybrid'")
    ropes = config.get("rope_parameters")
    config["rope_theta"] = values.get("rope_theta")
    if isinstance(ropes, Mapping) and "rope_theta" in ropes:  # which takes precedence
        config["rope_theta"] = None
    return _without_part_of_default_rope(_with_bounded_names(config))


def _refuse_lightning_attention(config: Mapping[str, object]) -> None:
    of_ling3 = ("kda_lower_bound", "kda_safe_gate", "no_kda_lora", "short_conv_kernel_size")
    of_ling2 = ("group_norm_size", "linear_silu", "use_qk_norm")
    if any(name in config for name in of_ling2) and not any(name in config for name in of_ling3):
        raise UnsupportedModelError(
            "model_type 'bailing_hybrid' without fields of Kimi Delta Attention "
            f"({', '.join(of_ling3)}) is Ling-2.6, whose lightning attention is not supported; "
            "supported: Ling-3.0"
        )


def _without_part_of_default_rope(config: dict[str, object]) -> dict[str, object]:
    """Remove the share of a head that is rotated: the class rotates `qk_rope_head_dim` whole."""
    ropes = {name: config.get(name) for name in ("rope_parameters", "rope_scaling")}
    for name, rope in ropes.items():
        if not isinstance(rope, Mapping):
            continue
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            return config  # scaled for that share, which is refused
        config[name] = {key: rope[key] for key in rope if key != "partial_rotary_factor"}
    config.pop("partial_rotary_factor", None)
    return config


def _with_bounded_names(config: dict[str, object]) -> dict[str, object]:
    """Have "b_proj" in a list of FP8 mean a whole name, not the end of "kv_b_proj" too."""
    found = config.get("quantization_config")
    listed = found.get("modules_to_not_convert") if isinstance(found, Mapping) else None
    if isinstance(found, Mapping) and isinstance(listed, list):
        names = [
            rf"re:.*\.{name}$" if isinstance(name, str) and _PROJECTION.fullmatch(name) else name
            for name in listed
        ]
        config["quantization_config"] = {**found, "modules_to_not_convert": names}
    return config


_PROJECTION = re.compile(r"\w+_proj")


def _glm5_next(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Take the sizes of linear attention out of an object of their own, as Kimi-Linear has one.

    The class reads no lists of layers in it, which count from 0, and gives a bound of the decay
    that is null its default, unless `safe_gate` says no.
    """
    nested, num_layers = config.pop("linear_attn_config", None), _num_layers(values)
    found = config.get("layer_types") or _all_but_nth(4, num_layers, FULL, LINEAR)
    config["layer_types"] = found
    if config.get("mlp_layer_types") is None:
        config["mlp_layer_types"] = ([DENSE] * 3 + [SPARSE] * num_layers)[:num_layers]
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise ConfigError(f"linear_attn_config is {nested!r:.100}; expected an object")
    own = dict(nested)
    sizes = _KIMI_SIZES | {"gate_lower_bound": "linear_lower_bound"}
    config |= {sizes[name]: own.pop(name) for name in sizes.keys() & own.keys()}
    bound = config.get("linear_lower_bound", values.get("linear_lower_bound"))
    if own.pop("safe_gate", True) and bound is None:
        config["linear_lower_bound"] = -5.0
    states = [
        i for i, kind in enumerate(found if isinstance(found, list) else ()) if kind == LINEAR
    ]
    others = [i for i in range(num_layers) if i not in states]
    _remove(own, {"kda_layers": states, "full_attn_layers": others}, "linear_attn_config")
    _remove(own, dict.fromkeys(own), "linear_attn_config")
    return config


def _hy_v4(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Every fourth layer after the first chooses positions, where no list says which.

    The first is dense where no list says so, whatever `first_k_dense_replace` is.
    """
    num_layers = _num_layers(values)
    if config.get("indexer_types") is None:
        full = {0, *range(1, num_layers, 4)}
        config["indexer_types"] = ["full" if i in full else "shared" for i in range(num_layers)]
    if config.get("mlp_layer_types") is None:
        config["mlp_layer_types"] = [SPARSE if i else DENSE for i in range(num_layers)]
    return config


def _deepseek_v4(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Take kinds of layers from ratios, and parameters of both rotations from one set.

    Ratios of layers after the last are those of layers that predict a second token.
    """
    num_layers = _num_layers(values)
    ratios = config.pop("compress_ratios", None)
    if config.get("layer_types") is None:
        if ratios is None:
            half = [OVERLAPPING if i % 2 else COMPRESSED for i in range(num_layers)]
            config["layer_types"] = [COMPRESSED, COMPRESSED, *half][:num_layers]
        elif isinstance(ratios, list) and all(ratio in _KINDS_OF_RATIOS for ratio in ratios):
            config["layer_types"] = [_KINDS_OF_RATIOS[ratio] for ratio in ratios][:num_layers]
        else:
            raise UnsupportedModelError(
                f"compress_ratios = {ratios!r:.200} is not supported; supported: a list of "
                f"{', '.join(map(str, _KINDS_OF_RATIOS))}"
            )
    num_by_token = config.pop("num_hash_layers", None)
    if config.get("mlp_layer_types") is None:
        count = integer("num_hash_layers", 3 if num_by_token is None else num_by_token, minimum=0)
        kinds = [BY_TOKEN] * count + [SCORED] * num_layers
        config["mlp_layer_types"] = kinds[:num_layers]
    if config.get("compress_rates") is None:
        config["compress_rates"] = {kind: rate for rate, kind in _KINDS_OF_RATIOS.items() if rate}
    return _with_two_ropes(config, values)


_KINDS_OF_RATIOS = {0: SLIDING, 4: OVERLAPPING, 128: COMPRESSED}


def _with_two_ropes(config: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Give layers without entries the plain rotation, and the others the scaled one."""
    head_dim = integer("head_dim", values.get("head_dim"), minimum=1)
    part, size = values.get("partial_rotary_factor"), config.get("qk_rope_head_dim")
    if part is None:
        part = 64 / 512
        if size is not None:
            part = integer("qk_rope_head_dim", size, minimum=2) / head_dim
    if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
        raise ConfigError(f"partial_rotary_factor is {part!r}; expected a part of a head")
    config.pop("partial_rotary_factor", None)
    config["qk_rope_head_dim"] = int(head_dim * part)
    theta, compressed_theta = values.get("rope_theta"), values.get("compress_rope_theta")
    config.pop("rope_theta", None)
    config.pop("compress_rope_theta", None)
    found = config.pop("rope_scaling", None) or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"rope_parameters is {found!r:.100}; expected an object")
    main, compressed = found.get("main"), found.get("compress")
    if not isinstance(main, Mapping) or not isinstance(compressed, Mapping):
        scaled = {name: value for name, value in found.items() if name not in ("main", "compress")}
        main = {"rope_type": "default", "rope_theta": theta}
        compressed = {**scaled, "rope_theta": compressed_theta}
        if "yarn" in (compressed.get("rope_type"), compressed.get("type")):
            compressed.setdefault("attention_factor", 1.0)
    own = {"main": dict(main), "compress": dict(compressed)}
    for kind, parameters in own.items():
        if parameters.pop("partial_rotary_factor", part) != part:
            raise UnsupportedModelError(
                f"rope_parameters of {kind} rotate another part of a head than the "
                f"partial_rotary_factor {part} of the model; supported: the same part"
            )
    config["rope_parameters"] = own
    return config


_KIMI_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_KIMI_LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}
_NETWORKS = {"moe": SPARSE, "mlp": DENSE}
_PATTERN = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
_RENAMED = {"mamba": LINEAR, "attention": FULL}


def _rename_layers(config: dict[str, object], values: Mapping[str, object], name: str) -> None:
    """Put the names of transformers 5 in `name`, in place of earlier ones."""
    found = config.pop("layer_types", None) or config.pop("layers_block_type", None)
    if found is None:
        found = [LINEAR] * _num_layers(values)
    if isinstance(found, list):
        found = [_RENAMED.get(kind, kind) if isinstance(kind, str) else kind for kind in found]
    config[name] = found


def _remove_step_limit(config: dict[str, object]) -> None:
    """Remove the bounds of the steps of time in Mamba-2, which must bound nothing."""
    found = config.pop("time_step_limit", None)
    limits = list(found) if isinstance(found, list | tuple) else found
    infinities = (float("inf"), "Infinity", {"__float__": "Infinity"})
    if isinstance(limits, list) and len(limits) == 2 and isinstance(limits[1], float):
        limits[1] = float("inf") if limits[1] > _LARGEST_FLOAT32 else limits[1]
    if limits is not None and limits not in [[0.0, one] for one in infinities]:
        raise UnsupportedModelError(
            f"time_step_limit = {found!r:.100} is not supported; supported: 0 to infinity"
        )


_LARGEST_FLOAT32 = 3.5e38  # and more


def _num_layers(values: Mapping[str, object]) -> int:
    found = values.get("num_hidden_layers")
    return integer("num_hidden_layers", found, minimum=1, maximum=MAX_LAYERS)


def _marks(kinds: object, marked: str) -> object:
    return [int(kind == marked) for kind in kinds] if isinstance(kinds, list) else None


def _numbers(listed: object, end: int) -> set[int]:
    items = listed.split(",") if isinstance(listed, str) else listed
    names = [str(item).strip() for item in items] if isinstance(items, list | tuple) else ["?"]
    if not all(name.isdecimal() and len(name) < 5 and int(name) < end for name in names if name):
        raise ConfigError(f"moe_layers_enum is {listed!r:.100}; expected numbers of layers")
    return {int(name) for name in names if name}


def _remove(config: dict[str, object], computed: Mapping[str, object], where: str) -> None:
    """Remove these fields, which must be null or say what is computed in any case."""
    for name, value in computed.items():
        found = config.pop(name, None)
        if found is not None and found != value:
            raise UnsupportedModelError(
                f"{name} = {found!r:.100} is not supported in {where}: transformers does not read "
                f"it, and computes {value!r:.100}"
            )


_FORMS: Mapping[str, Callable[[dict[str, object], Mapping[str, object]], dict[str, object]]] = {
    "bailing_hybrid": _bailing_hybrid,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "cohere_compass_text": _cohere_compass,
    "deepseek_v4": _deepseek_v4,
    "exaone4": _exaone4,
    "flint": _flint,
    "glm5_next_text": _glm5_next,
    "hy_v4": _hy_v4,
    "hy_v4_vl_text": _hy_v4,
    "granite_swa": _granite_swa,
    "granitemoe_swa": _granite_swa,
    "granitemoehybrid": _granitemoehybrid,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm3": _lfm3,
    "llama4_text": _llama4_text,
    "mimo_v2_flash": _mimo_v2_flash,
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "qwen4_exp_text": _gated_delta,
    "sarvam_mla": _sarvam_mla,
    "smollm3": _smollm3,
    "step3p5": _step3p5,
}
