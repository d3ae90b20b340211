"""Read `quantization_config`: which matrices a checkpoint has quantised, and in which formats."""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from raymoe.errors import UnknownOptionError, UnsupportedModelError
from raymoe.specs.attention.compressed import COMPRESSOR
from raymoe.specs.attention.kind import INDEXER
from raymoe.specs.layer_weights import EXPERTS, HEAD, MERGE, MIXERS, ROUTER
from raymoe.specs.module_patterns import (
    compiled_pattern,
    is_any,
    name_or_expression,
    prefix_or_suffix,
    spellings_of,
    wildcard,
    with_parents,
)
from raymoe.specs.weight_format import (
    FP8_COLUMNS,
    FP8_ROWS,
    MXFP4_COLUMNS,
    MXFP8_COLUMNS,
    NVFP4_COLUMNS,
    Awq,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gptq,
    Int8Channel,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)

WEIGHTS = ("bf16", "fp8", "int4", "mxfp4", "mxfp8", "nvfp4")  # `quantization_of`
_OTHER_EXPERT = re.compile(r"experts\.[1-9]")
Config = Mapping[str, object]
BLOCKS = ([FP8_ROWS, FP8_COLUMNS], (FP8_ROWS, FP8_COLUMNS))
MICRO_BLOCKS = ([1, MXFP8_COLUMNS], (1, MXFP8_COLUMNS), None)

# Fields that say how numbers were found, how a loader or a kernel works, or how activations and the
# KV cache were scaled: none changes what is stored, or what a stored weight stands for.
_OF_LOADERS = frozenset(
    """
    act_group_aware activation_scale_ub amp autoround_version backend batch_size
    block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
    disable_exllama do_fuse enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    exllama_config fuse_max_seq_len global_compression_ratio gradient_accumulate_steps hyb_act iters
    kv_cache_quant_algo kv_cache_scheme low_gpu_mem_usage lr max_input_length meta minmax_lr
    model_file_base_name model_free model_name_or_path model_seqlen
    module_name_preceding_first_block modules_to_fuse mse nsamples pad_token_id producer
    quantization_status quantizer scale_dtype seqlen static_groups tokenizer train_bs
    true_sequential use_cuda_fp16 use_exllama version
    """.split()  # noqa: SIM905 - sixty names read better as words
)
_GPTQ_FIELDS = frozenset(
    {"group_size", "dynamic", "lm_head", "sym", "desc_act", "modules_in_block_to_quantize"}
)
_AWQ_FIELDS = frozenset({"group_size", "modules_to_not_convert"})
_TENSORS_FIELDS = frozenset({"config_groups", "ignore"})
_WEIGHTS_FIELDS = frozenset(
    {"strategy", "group_size", "block_structure", "symmetric", "observer", "observer_kwargs"}
)

# Formats by "quant_algo" of modelopt, and their group sizes.
_MODELOPT: Mapping[str, tuple[WeightFormat, int]] = {
    "NVFP4": (Nvfp4(), NVFP4_COLUMNS),
    "W4A16_NVFP4": (Nvfp4(), NVFP4_COLUMNS),
    "MXFP8": (Mxfp8(), MXFP8_COLUMNS),
    "FP8": (Fp8Tensor(), 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (Fp8Channel(), 0),
    "FP8_PB_WO": (Fp8Block(".weight_scale"), FP8_COLUMNS),
    "FP8_BLOCK_SCALES": (Fp8Block(), FP8_COLUMNS),
}
# "config_groups" repeats "quant_algo".
_MODELOPT_FIELDS = frozenset({"quant_algo", "exclude_modules", "ignore", "config_groups"})
_MIXED, _LAYERS = "MIXED_PRECISION", "quantized_layers"
_LINEAR = "Linear"  # the class of all matrices, as a target of compressed-tensors
_NAMED_EXPERT = re.compile(r"(?<=experts\.)\d+")
_REGEX_CHARACTERS = frozenset(r"*+?^$()[]{}|\\")
_EXPERT_NUMBER = re.compile(rf"(?<={re.escape(EXPERTS)})\d+")
_OF_NETWORK = re.compile(r"(\.mlp\.(?:\w+\.)?)(?:\d+\.)?(?:gate|up|down)_proj\.weight$")
# Read by row, or so small that no method quantises them.
_ALWAYS_PLAIN = (
    *("model.embed_tokens.", ROUTER, "mlp.shared_expert_gate."),
    *("self_attn.q_norm.", "self_attn.k_norm."),
    *(f"{INDEXER}{part}." for part in ("weights_proj", "kv_proj", "gate_proj", "pool_gate")),
    COMPRESSOR,
    MERGE,
    *MIXERS,
)


# Ends of names of tensors with scales of activations and of the KV cache. Activations stay in the
# type of the computation, as where they would be scaled when a model runs ("dynamic").
_ACTIVATION_SCALES = (
    *(".input_scale", ".act_scale", ".activation_scale", "_activation_scale"),
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale"),
    ".input_global_scale",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """Modules that are stored in one format, where a checkpoint has several.

    Attributes:
        names: Their names; without names and a pattern, the group has all modules.
        has_children: Whether the names are also those of modules around them.
        pattern: An expression for their names.
    """

    format: WeightFormat
    names: frozenset[str] = frozenset()
    has_children: bool = False
    pattern: re.Pattern[str] | None = None

    def has(self, spellings: Set[str]) -> bool:
        """Whether a module with these names is one of them."""
        if self.pattern is not None:
            return is_any((self.pattern,), spellings)
        if self.has_children:
            spellings = {parent for name in spellings for parent in with_parents(name)}
        return not self.names or not self.names.isdisjoint(spellings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    method: str
    format: WeightFormat  # with `groups`, that of the first
    # The first that has a module says its format; one that none has is stored plainly. Empty:
    # `format` for all.
    groups: tuple[ModuleGroup, ...] = ()
    excluded: tuple[re.Pattern[str], ...] = ()  # modules that are not quantised
    excluded_names: frozenset[str] = frozenset()  # and their names
    # The only ones that are quantised; None: all that are not excluded.
    included: tuple[re.Pattern[str], ...] | None = None
    is_head_plain: bool = True  # whether the head is excluded implicitly
    is_experts_only: bool = False  # whether only routed experts are quantised
    experts: WeightFormat | None = None  # format of the routed experts, if they have another one
    # Ends of names of tensors that are not read: scales of activations and of the KV cache.
    unread: tuple[str, ...] = ()
    # Parts of canonical names of modules, and what the family calls them.
    module_names: tuple[tuple[str, str], ...] = ()
    # Ends of canonical names of matrices that are decoded while they are loaded.
    decoded: tuple[str, ...] = ()
    # Networks and other matrices that an adapter changes, by `_network_of`: decoded as well.
    merged: frozenset[str] = frozenset()
    _known: dict[str, WeightFormat | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        if self.groups:
            return ", ".join(dict.fromkeys(group.format.name for group in self.groups))
        return self.format.name + (f", experts {self.experts.name}" if self.experts else "")

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """The formats of its matrices."""
        others = () if self.experts is None else (self.experts,)
        of_groups = dict.fromkeys(group.format for group in self.groups)
        return tuple(of_groups) or (self.format, *others)

    def with_formats(
        self, change: Callable[[WeightFormat], WeightFormat], experts: WeightFormat | None
    ) -> "Quantization":
        """These modules in other formats; `experts` as the field."""
        groups = tuple(replace(group, format=change(group.format)) for group in self.groups)
        return replace(self, format=change(self.format), groups=groups, experts=experts)

    def with_merged(self, names: Iterable[str]) -> "Quantization":
        """These formats, where matrices of these names are decoded while they are loaded."""
        return replace(self, merged=frozenset(map(_network_of, names)))

    def is_decoded(self, name: str) -> bool:
        """Whether a matrix is decoded while it is loaded."""
        is_merged = bool(self.merged) and _network_of(name) in self.merged
        return is_merged or name.endswith(self.decoded)

    def format_of(
        self, name: str, modules: Callable[[str], Iterable[str]] = lambda _name: ()
    ) -> WeightFormat | None:
        """The stored format of a matrix by canonical name, or None; one for a layer's experts.

        Args:
            name: The name.
            modules: Returns names that its module has in this family alone.
        """
        name = _EXPERT_NUMBER.sub("0", name, count=1)
        if name not in self._known:
            self._known[name] = self._find(name, modules)
        return self._known[name]

    def _find(self, name: str, modules: Callable[[str], Iterable[str]]) -> WeightFormat | None:
        is_matrix = name.endswith(".weight")  # instead of what is added to rows
        if not is_matrix or any(plain in name for plain in _ALWAYS_PLAIN):
            return None
        if (name == HEAD and self.is_head_plain) or (self.is_experts_only and EXPERTS not in name):
            return None
        module = name.removesuffix(".weight")
        renamed = next((pair for pair in self.module_names if pair[0] in module), ("", ""))
        module = module.replace(*renamed, 1)
        spellings = set().union(*map(spellings_of, (module, *modules(name))))
        is_excluded = is_any(self.excluded, spellings)
        is_excluded |= not self.excluded_names.isdisjoint(spellings)
        if self.included is not None:
            is_excluded |= not is_any(self.included, spellings)
        if is_excluded:
            return None
        if self.groups:
            return next((group.format for group in self.groups if group.has(spellings)), None)
        return self.experts if self.experts is not None and EXPERTS in name else self.format


def _network_of(name: str) -> str:
    """The network or the experts of a layer that a matrix is of, whose matrices have one format."""
    return _OF_NETWORK.sub(r"\1", name)


def parse_quantization(
    value: object,
    module_names: tuple[tuple[str, str], ...] = (),
    expert_dtype: object = None,
) -> Quantization | None:
    """Read a `quantization_config`; raises UnsupportedModelError for unknown storage.

    Args:
        value: The object; None if nothing is quantised.
        module_names: As in `Quantization`.
        expert_dtype: That field of `config.json`, where DeepSeek-V4 has it.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"quantization_config is {value!r}; expected an object")
    method = value.get("quant_method")
    if method is None and value.get("quant_algo") is not None:  # modelopt before 0.35
        method = "modelopt"
    if not isinstance(method, str) or method not in METHODS:
        raise _refusal("quant_method", method, tuple(METHODS))
    if METHODS[method].read is _fp8 and value.get("expert_dtype") is None:
        value = {**value, "expert_dtype": expert_dtype}
    return replace(METHODS[method].read(value), module_names=module_names)


def quantization_of(weights: str) -> Quantization | None:
    """The format that most checkpoints of this kind have; None for bf16.

    Raises:
        UnknownOptionError: Not one of `WEIGHTS`.
    """
    if weights not in WEIGHTS:
        raise UnknownOptionError(weights, WEIGHTS, "weight format")
    if weights == "int4":
        return Quantization(method="compressed-tensors", format=PackedInt4(group_size=32))
    if weights == "fp8":
        return Quantization(method="fp8", format=Fp8Block())
    if weights == "mxfp4":
        return Quantization(method="mxfp4", format=Mxfp4(), is_experts_only=True)
    if weights == "mxfp8":
        return Quantization(method="mxfp8", format=Mxfp8(".weight_scale_inv"))
    if weights == "nvfp4":
        return Quantization(method="modelopt", format=Nvfp4())
    return None


def _fp8(config: Config) -> Quantization:
    """FP8 of transformers, MiniMax and vLLM; without a size of blocks, a matrix has one scale."""
    blocks = config.get("weight_block_size")
    is_micro = config.get("quant_method") == "mxfp8" or blocks == [1, MXFP8_COLUMNS]
    accepted: dict[str, tuple[object, ...]] = {
        "weight_block_size": MICRO_BLOCKS if is_micro else (*BLOCKS, None),
        "activation_scheme": ("dynamic", "static", None),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8", "fp4", None),
        "dequantize": (False, True, None),
        "modules_to_convert": (None, []),
        "moe_quant_algo": ("NVFP4", None),
        "moe_quant_format": ("nvfp4-pack-quantized", None),
        "routed_experts_quant_method": ("mxfp4", "fp8", None),
        "routed_experts_group_size": (MXFP4_COLUMNS, None),
        "store_dtype": ("mxfp4", "fp8", None),
        "mxfp4_block_size": (MXFP4_COLUMNS, None),
    }
    used = {"modules_to_not_convert", "ignored_layers"}
    if config.get("moe_quant_algo") is not None:  # modelopt says of the experts what it says of all
        accepted |= {"quant_algo": (_MIXED, None), "group_size": (NVFP4_COLUMNS, None)}
        used |= {"config_groups", "ignore", _LAYERS}
        _check_experts(config)
    _check(config, accepted, used)
    one_scale = Fp8Tensor(scales_suffix=".weight_scale_inv")
    of_transformers = _names(config, "modules_to_not_convert")
    names = of_transformers or _names(config, "ignored_layers")
    return Quantization(
        method="mxfp8" if is_micro else "fp8",
        format=Mxfp8(".weight_scale_inv") if is_micro else Fp8Block() if blocks else one_scale,
        experts=_fp4_experts(config),
        unread=_ACTIVATION_SCALES,
        excluded=tuple(map(_name_of_fp8, names)),
        is_head_plain=not of_transformers,  # vLLM, which names the others, has no head of FP8
    )


def _check_experts(config: Config) -> None:
    """Refuse "quantized_layers" with other modules or formats than those of "moe_quant_algo"."""
    layers = config.get(_LAYERS) or {}
    stored, _ = _MODELOPT["NVFP4"]
    for group in _groups_of_layers(layers) if layers else ():
        others = {name for name in group.names if not name.endswith(".experts")}
        if others or group.format != stored:
            raise _refusal(_LAYERS, min(others or group.names), ("NVFP4 of 'experts'",))


def _fp4_experts(config: Config) -> WeightFormat | None:
    """The format of FP4 experts in an FP8 model; None if they are FP8 as well.

    MiniMax-M3.1 has NVFP4 of compressed-tensors, NVIDIA's DeepSeek-V4 that of modelopt. DeepSeek-V4
    itself, Ling-3.0 and MiMo-V2.6 have MXFP4, each with scales of another name.
    """
    if config.get("moe_quant_algo") is not None:
        return Nvfp4(is_divided=config.get("moe_quant_format") is not None)
    if config.get("expert_dtype") == "fp4":
        return Mxfp4(".scale")
    if config.get("routed_experts_quant_method") == "mxfp4":
        return Mxfp4(".weight_scale_inv")
    return Mxfp4(".weight_scale") if config.get("store_dtype") == "mxfp4" else None


def _name_of_fp8(pattern: str) -> re.Pattern[str]:
    """Names as transformers reads them, or as AutoFP8 writes expressions."""
    return (name_or_expression if pattern.startswith("re:") else prefix_or_suffix)(pattern)


def _fbgemm_fp8(config: Config) -> Quantization:
    _check(config, {}, {"modules_to_not_convert"})
    names = _names(config, "modules_to_not_convert")
    return Quantization(
        method="fbgemm_fp8",
        format=Fp8Channel(),
        unread=_ACTIVATION_SCALES,
        excluded=tuple(map(prefix_or_suffix, names)),
        is_head_plain=not names,
    )


def _mxfp4(config: Config) -> Quantization:
    _check(config, {"dequantize": (False, None)}, {"modules_to_not_convert"})
    names = _names(config, "modules_to_not_convert")
    return Quantization(
        method="mxfp4",
        format=Mxfp4(),
        excluded=tuple(map(prefix_or_suffix, names)),
        is_experts_only=True,
    )


def _gptq(config: Config) -> Quantization:
    accepted = {
        "bits": (4,),
        "checkpoint_format": ("gptq", None),
        "format": ("gptq", None),
        "data_type": ("int", None),
        "pack_dtype": ("int32", None),
        "is_marlin_format": (False, None),
    }
    _check(config, accepted, _GPTQ_FIELDS)
    listed = config.get("modules_in_block_to_quantize")
    return Quantization(
        method="gptq",
        format=Gptq(_group_size(config)),
        excluded=tuple(map(name_or_expression, _dynamic_exclusions(config))),
        included=None if listed is None else _modules_of_blocks(listed),
        is_head_plain=config.get("lm_head") is not True,
    )


def _awq(config: Config) -> Quantization:
    accepted = {
        "bits": (4,),
        "version": ("gemm", "GEMM", None),
        "format": ("gemm", None),
        "zero_point": (True,),
        "data_type": ("int", None),
    }
    _check(config, accepted, _AWQ_FIELDS)
    if config.get("backend") == "llm-awq":  # another layout
        raise _refusal("backend", "llm-awq", ("autoawq",))
    names = _names(config, "modules_to_not_convert")
    return Quantization(
        method="awq",
        format=Awq(_group_size(config)),
        excluded=tuple(map(prefix_or_suffix, names)),
    )


_PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")


def _auto_round(config: Config) -> Quantization:
    """The `quantization_config` of AutoRound 0.10, with its "extra_config" of single modules."""
    plain: list[str] = []
    quantised: list[str] = []
    accepted: dict[str, tuple[object, ...]] = {
        "bits": (4,),
        "act_bits": (16, None),
        "data_type": ("int", None),
        "packing_format": (*_PACKINGS, None),
    }
    _check(config, accepted, {"group_size", "sym", "extra_config", "to_quant_block_names"})
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise _refusal("extra_config", extra, ("an object with fields for each module",))
    for name, fields in extra.items():
        is_plain = isinstance(fields, Mapping) and fields.get("bits") in (16, 32)
        if not is_plain:
            _check_same(name, fields, config)
        (plain if is_plain else quantised).append(str(name))
    blocks = _prefixes(config)
    packing, size = str(config.get("packing_format")), _group_size(config)
    expressions = {name for name in plain if _REGEX_CHARACTERS.intersection(name)}
    return Quantization(
        method="auto-round",
        format=Awq(size) if packing.endswith("awq") else Gptq(size, has_order=False),
        excluded=tuple(compiled_pattern(name, f"(?:{name})$") for name in sorted(expressions)),
        excluded_names=_plain_names(set(plain) - expressions),
        included=tuple(re.compile(re.escape(name)) for name in (*blocks, *quantised))
        if blocks
        else None,
        is_head_plain=not any(name.endswith("lm_head") for name in quantised),
    )


def _check_same(name: object, fields: object, config: Config) -> None:
    """Refuse a module that is quantised otherwise than the model."""
    same: dict[str, tuple[object, ...]] = {
        key: (None, config.get(key)) for key in ("bits", "data_type", "group_size", "sym")
    }
    same |= {"act_bits": (16, None)}
    if not isinstance(fields, Mapping):
        raise _refusal(f"extra_config.{name}", fields, ("an object",))
    for key in same.keys() & fields.keys():
        if fields[key] not in same[key]:
            raise _refusal(f"extra_config.{name}.{key}", fields[key], same[key])


def _prefixes(config: Config) -> list[str]:
    """Beginnings of the names of the modules that AutoRound quantised; none for all."""
    found = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or []
    found = found.split(",") if isinstance(found, str) else found
    parts = found if isinstance(found, list) else [found]
    names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in names):
        raise _refusal("block_name_to_quantize", found, ("names of modules",))
    return [str(name).strip() for name in names]


def _modelopt(config: Config) -> Quantization:
    """The `quantization_config` of modelopt 0.47, or what its `hf_quant_config.json` holds."""
    found = config.get("quantization", config)
    if not isinstance(found, Mapping):
        raise _refusal("quantization", found, ("an object",))
    groups: tuple[ModuleGroup, ...] = ()
    if str(found.get("quant_algo")).upper() == _MIXED:
        _check(found, {"group_size": (NVFP4_COLUMNS, None, 0)}, _MODELOPT_FIELDS | {_LAYERS})
        groups = _groups_of_layers(found.get(_LAYERS))
        stored = groups[0].format
    else:
        stored = _modelopt_format(found, (*_MODELOPT, _MIXED))
    names = [*_names(found, "exclude_modules"), *_names(found, "ignore")]
    return Quantization(
        method="modelopt",
        format=stored,
        groups=groups,
        excluded=tuple(map(wildcard, names)),
        is_head_plain=False,
        unread=_ACTIVATION_SCALES,
    )


def _modelopt_format(config: Config, algorithms: tuple[str, ...]) -> WeightFormat:
    algorithm = str(config.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        raise _refusal("quant_algo", config.get("quant_algo"), algorithms)
    stored, group_size = _MODELOPT[algorithm]
    accepted: dict[str, tuple[object, ...]] = {
        "group_size": (group_size, None, 0),
        _LAYERS: (None, {}),
    }
    _check(config, accepted, _MODELOPT_FIELDS)
    return stored


def _groups_of_layers(layers: object) -> tuple[ModuleGroup, ...]:
    """The modules of each format in "quantized_layers", which names modules one by one."""
    if not isinstance(layers, Mapping) or not layers:
        raise _refusal(_LAYERS, layers, ("an object with a format for each module",))
    formats: dict[str, WeightFormat] = {}
    for name, entry in layers.items():
        if not isinstance(entry, Mapping):
            raise _refusal(f"{_LAYERS}.{name}", entry, ("an object",))
        _add_name(formats, str(name), _modelopt_format(entry, tuple(_MODELOPT)))
    depths = {name.count(".") for name in formats}
    return tuple(
        replace(group, has_children=True)
        for depth in sorted(depths, reverse=True)  # a module comes before those around it
        for group in _groups_of_names(
            {name: stored for name, stored in formats.items() if name.count(".") == depth}
        )
    )


def _add_name(formats: dict[str, WeightFormat], name: str, stored: WeightFormat) -> None:
    """Say the format of a module; the experts of a layer have one name, as in `format_of`."""
    name = _NAMED_EXPERT.sub("0", name, count=1)
    if formats.setdefault(name, stored) != stored:
        raise UnsupportedModelError(
            f"quantization_config: {name!r} is {formats[name].name} and {stored.name}; the experts "
            "of a layer must be stored in the same format"
        )


def _groups_of_names(formats: Mapping[str, WeightFormat]) -> tuple[ModuleGroup, ...]:
    return tuple(
        ModuleGroup(
            format=stored, names=frozenset(name for name in formats if formats[name] == stored)
        )
        for stored in dict.fromkeys(formats.values())
    )


def _compressed_tensors(config: Config) -> Quantization:
    accepted: dict[str, tuple[object, ...]] = {
        "format": (*_LAYOUTS, "mixed-precision"),
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    }
    _check(config, accepted, _TENSORS_FIELDS)
    found = config.get("config_groups")
    if not isinstance(found, Mapping) or not found:
        raise _refusal("config_groups", found, ("an object with groups",))
    targets: dict[str, WeightFormat] = {}
    for group in found.values():  # a target in two groups is one of the last
        targets |= _tensors_group(group, config.get("format"))
    if not targets:
        raise _refusal("config_groups", found, ("groups with weights",))
    formats, ignored = set(targets.values()), _names(config, "ignore")
    has_one_format = len(formats) == 1 and _LINEAR in targets
    groups = _groups_of_targets(targets)
    return Quantization(
        method="compressed-tensors",
        format=groups[0].format,
        groups=() if has_one_format else groups,
        excluded=tuple(name_or_expression(name) for name in ignored if _is_expression(name)),
        excluded_names=_plain_names(name for name in ignored if not _is_expression(name)),
        is_head_plain=False,
        unread=_ACTIVATION_SCALES,
    )


def _tensors_group(group: object, layout: object) -> dict[str, WeightFormat]:
    """The targets of a group of compressed-tensors, whose "format" comes before that of all."""
    if not isinstance(group, Mapping):
        raise _refusal("config_groups", group, ("objects",))
    used = {"weights", "input_activations", "targets", "format"}
    _check(group, {"output_activations": (None,)}, used)
    if group.get("weights") is None:  # activations alone, such as those of attention
        return {}
    layouts = tuple(_LAYOUTS) if layout == "mixed-precision" else (layout,)
    own = layout if group.get("format") is None else group.get("format")
    if own not in layouts:
        raise _refusal("config_groups.format", own, layouts)
    if own == "int-quantized":
        _check_int8_activations(group.get("input_activations"))
    stored = _weights_format(group.get("weights"), str(own))
    targets = _names(group, "targets")
    others = [target for target in targets if _is_class(target) and target != _LINEAR]
    if others or not targets:
        raise _refusal(
            "config_groups.targets", next(iter(others), None), (_LINEAR, "names", "re:EXPRESSION")
        )
    return dict.fromkeys(targets, stored)


def _plain_names(names: Iterable[str]) -> frozenset[str]:
    """Names of modules, those of the experts of a layer as one (`format_of`)."""
    return frozenset(_NAMED_EXPERT.sub("0", name, count=1) for name in names)


def _is_expression(name: str) -> bool:
    return name.startswith("re:")


def _is_class(target: str) -> bool:
    """Whether a target means the modules of a class, such as Linear."""
    return target[:1].isupper() and target.isidentifier()


def _groups_of_targets(targets: Mapping[str, WeightFormat]) -> tuple[ModuleGroup, ...]:
    """Names, expressions by alphabet, and Linear (`match_targets` of compressed-tensors 0.20)."""
    names: dict[str, WeightFormat] = {}
    for target, stored in targets.items():
        if target != _LINEAR and not _is_expression(target):
            _add_name(names, target, stored)
    expressions = sorted(filter(_is_expression, targets))
    patterns = ((targets[each], name_or_expression(each)) for each in expressions)
    return (
        *_groups_of_names(names),
        *(ModuleGroup(format=stored, pattern=pattern) for stored, pattern in patterns),
        *(ModuleGroup(format=targets[each]) for each in targets if each == _LINEAR),
    )


class _Layout(NamedTuple):
    """What a "format" of compressed-tensors stores."""

    num_bits: int
    type: str
    strategies: tuple[str, ...]
    scale_dtypes: tuple[str | None, ...] = (None,)
    group_size: int = 0  # the only one; 0 for any


_LAYOUTS: Mapping[str, _Layout] = {
    "pack-quantized": _Layout(4, "int", ("group", "channel")),
    "float-quantized": _Layout(8, "float", ("channel", "block", "tensor")),
    "naive-quantized": _Layout(8, "float", ("channel", "block", "tensor")),
    "int-quantized": _Layout(8, "int", ("channel",)),
    "mxfp8-quantized": _Layout(
        8, "float", ("group",), (None, "torch.uint8", "uint8"), MXFP8_COLUMNS
    ),
    "mxfp4-pack-quantized": _Layout(
        4, "float", ("group",), (None, "torch.uint8", "uint8"), MXFP4_COLUMNS
    ),
    "nvfp4-pack-quantized": _Layout(
        4,
        "float",
        ("tensor_group", "group"),
        (None, "torch.float8_e4m3fn", "float8_e4m3fn"),
        NVFP4_COLUMNS,
    ),
}
_MICRO_FORMATS: Mapping[str, WeightFormat] = {
    "mxfp8-quantized": Mxfp8(),
    "mxfp4-pack-quantized": Mxfp4(".weight_scale", ".weight_packed"),
    "nvfp4-pack-quantized": Nvfp4(is_divided=True),
}


def _weights_format(weights: object, layout: str) -> WeightFormat:
    if not isinstance(weights, Mapping):
        raise _refusal("weights", weights, ("an object",))
    wanted = _LAYOUTS[layout]
    accepted: dict[str, tuple[object, ...]] = {
        "num_bits": (wanted.num_bits,),
        "type": (wanted.type,),
        "strategy": wanted.strategies,
        "dynamic": (False, None),
        "actorder": (None, False, "weight", "static", "group"),
        "scale_dtype": wanted.scale_dtypes,
        "zp_dtype": (None, "torch.int8", *wanted.scale_dtypes),
    }
    if layout in _MICRO_FORMATS:
        accepted |= {"group_size": (wanted.group_size,), "symmetric": (True, None)}
    if layout == "int-quantized":
        accepted["symmetric"] = (True, None)
    _check(weights, accepted, _WEIGHTS_FIELDS)
    strategy = weights.get("strategy")
    if strategy is None:
        raise _refusal("weights.strategy", None, wanted.strategies)
    blocks = weights.get("block_structure")
    if blocks not in (BLOCKS if strategy == "block" else (None,)):
        raise _refusal("weights.block_structure", blocks, BLOCKS[:1])
    if layout in _MICRO_FORMATS:
        return _MICRO_FORMATS[layout]
    if layout == "pack-quantized":
        return PackedInt4(
            _group_size(weights) if strategy == "group" else 0,
            has_zero_points=weights.get("symmetric") is False,
            has_order=weights.get("actorder") == "group",
        )
    if layout == "int-quantized":
        return Int8Channel()
    if strategy == "tensor":
        return Fp8Tensor()
    return Fp8Channel() if strategy == "channel" else Fp8Block(scales_suffix=".weight_scale")


def _check_int8_activations(activations: object) -> None:
    """Accept rows of int8 with scales of their own, as products of int8 have them."""
    if not isinstance(activations, Mapping):
        raise _refusal("input_activations", activations, ("int8 for each token (W8A8)",))
    accepted: dict[str, tuple[object, ...]] = {
        "num_bits": (8,),
        "type": ("int",),
        "strategy": ("token",),
        "dynamic": (True,),
        "symmetric": (True, None),
        "scale_dtype": (None,),
        "zp_dtype": (None, "torch.int8"),
        "actorder": (None,),
    }
    _check(activations, accepted, _WEIGHTS_FIELDS)


class Method(NamedTuple):
    about: str
    read: Callable[[Config], Quantization]


METHODS: Mapping[str, Method] = {
    "fp8": Method(
        "FP8 (e4m3), a scale for 128 x 128 elements or a matrix; experts also FP4 (e2m1)", _fp8
    ),
    "fbgemm_fp8": Method("FP8 (e4m3), a scale for each row", _fbgemm_fp8),
    "mxfp4": Method("FP4 (e2m1) of experts, a scale for 32 elements", _mxfp4),
    "mxfp8": Method("FP8 (e4m3), a scale for 32 elements", _fp8),
    "modelopt": Method(
        "FP4 (e2m1), a scale for 16 elements (NVFP4); FP8, a scale for 32 elements (MXFP8), a "
        "matrix (FP8), a row or 128 x 128 elements",
        _modelopt,
    ),
    "gptq": Method("INT4 with a scale and a zero point for each group, in any order", _gptq),
    "awq": Method("INT4 with a scale and a zero point for each group", _awq),
    "auto-round": Method("INT4 as GPTQ or AWQ store it", _auto_round),
    "compressed-tensors": Method(
        "INT4 by groups or rows (pack-quantized), FP8 by blocks, rows or matrices "
        "(float-quantized) or 32 elements (mxfp8-quantized), FP4 by 16 elements "
        "(nvfp4-pack-quantized) or 32 (mxfp4-pack-quantized), int8 by rows with "
        "inputs of int8 (int-quantized, W8A8)",
        _compressed_tensors,
    ),
}


def _check(config: Config, accepted: Mapping[str, tuple[object, ...]], used: Set[str]) -> None:
    for name, value in config.items():
        if name in accepted:
            if value not in accepted[name]:
                raise _refusal(name, value, accepted[name])
        elif name not in used | _OF_LOADERS | {"quant_method"} and value is not None:
            raise _refusal(name, value, ("no such field",))


def _names(config: Config, field: str) -> list[str]:
    names = config.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(field, names, ("a list of names",))
    return names


def _group_size(config: Config) -> int:
    size = config.get("group_size")
    if type(size) is not int or (size != -1 and size < 1):
        raise _refusal("group_size", size, ("a positive integer", "-1"))
    return max(size, 0)


def _dynamic_exclusions(config: Config) -> list[str]:
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(key, str) and key.startswith("-:") for key in dynamic
    ):
        raise _refusal("dynamic", dynamic, ("expressions that begin with '-:'",))
    return [f"re:{key.removeprefix('-:')}" for key in dynamic]


def _modules_of_blocks(listed: object) -> tuple[re.Pattern[str], ...]:
    """The modules of a layer that lists of lists name, in the order in which they were quantised.

    Experts are stored in one format, so that the first stands for all.
    """
    field = "modules_in_block_to_quantize"
    groups = listed if isinstance(listed, list) else [[]]
    names = {name for one in groups for name in (one if isinstance(one, list) else [one])}
    if not names or not all(isinstance(name, str) for name in names):
        raise _refusal(field, listed, ("lists of names",))
    first = [name for name in names if not _OTHER_EXPERT.search(name)]
    return tuple(re.compile(rf"^(?:.*\.)?{re.escape(name)}$") for name in sorted(first))


def _refusal(field: str, value: object, supported: tuple[object, ...]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config: {field} = {value!r} is not supported; "
        f"supported: {', '.join(map(repr, supported))}"
    )
