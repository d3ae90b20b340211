"""Read `quantization_config`; its module patterns are checked before they are compiled.

An accepted pattern consists of names, `.*`, `.+`, digits, character classes and groups without
repetition, and there are few ways to match a name with it, so no module name makes matching slow.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from raymoe.errors import UnknownOptionError, UnsupportedModelError
from raymoe.specs.layer_weights import COMPRESSOR, EXPERTS, HEAD, INDEXER, MERGE, MIXERS, ROUTER
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

MAX_WAYS, MAX_PATTERN_CHARACTERS = 2_000_000, 100_000
NAME_CHARACTERS = 100  # of a module, about
WEIGHTS = ("bf16", "fp8", "int4", "mxfp4", "mxfp8", "nvfp4")  # `quantization_of`
_UNDERSTOOD = re.compile(
    r"(?: [\w\-/ ] | \.[*+]? | \\\. | \\d\+? | \[[\w\-]+\]\+? | \(\?: | [()|^$] )*", re.VERBOSE
)
_ONE_EXPERT = re.compile(r"experts\\?\.[\d\[]")
_OTHER_EXPERT = re.compile(r"experts\.[1-9]")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
# Other names of canonical modules (`specs.layer_weights`) in checkpoints and in transformers.
_SPELLINGS = (
    ("model.", ("language_model.model.", "model.language_model.", "thinker.model.")),
    ("lm_head", ("language_model.lm_head", "thinker.lm_head")),
    ("mlp.shared_expert.", ("mlp.shared_experts.", "mlp.shared_mlp.")),
    ("mlp.", ("block_sparse_moe.",)),
    ("gate_proj", ("w1",)),
    ("up_proj", ("w3",)),
    ("down_proj", ("w2",)),
)
# Prefixes of names in models that wrap a language model.
_WRAPPERS = (
    ("model.", "model.language_model."),
    ("model.layers.", "language_model.model.layers."),
    (HEAD.removesuffix(".weight"), "language_model.lm_head"),
)


def prefix_or_suffix(pattern: str) -> re.Pattern[str]:
    """Match a module prefix or a literal suffix (`should_convert_module`, transformers 5.23)."""
    return _compiled(pattern, rf"(?:{pattern}){_BOUNDARY}|.*{re.escape(pattern)}$")


def name_or_expression(pattern: str) -> re.Pattern[str]:
    """Match a name, or a prefix after "re:" (`match_name` of compressed-tensors 0.20)."""
    expression = pattern.removeprefix("re:")
    is_expression = expression != pattern
    return _compiled(expression, expression if is_expression else re.escape(pattern) + "$")


def wildcard(pattern: str) -> re.Pattern[str]:
    """Match a name with "*" for any part of it, or modules inside it (modelopt 0.47)."""
    expression = pattern.replace(".", r"\.").replace("*", ".*")
    return _compiled(expression, rf"(?:{expression})(?:\..*)?$")


def is_matched(module: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    names = _spellings(module)
    return any(pattern.match(name) for pattern in patterns for name in names)


def _spellings(module: str) -> set[str]:
    """The names that a module may have in checkpoints and in transformers."""
    names = {module}
    for ours, theirs in _SPELLINGS:
        names |= {name.replace(ours, other) for name in names for other in theirs}
    for inner, outer in _WRAPPERS:
        names |= {outer + name.removeprefix(inner) for name in names if name.startswith(inner)}
    return names


def _with_parents(module: str) -> Iterable[str]:
    """The name of a module, and those of the modules around it."""
    return accumulate(module.split("."), "{}.{}".format)


def checked_expression(pattern: str, expression: str) -> re.Pattern[str]:
    """Compile an expression that holds a pattern for names of modules.

    Raises:
        UnsupportedModelError: It is not understood, or may take long to match.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS or not _UNDERSTOOD.fullmatch(pattern):
        raise UnsupportedModelError(
            f"module pattern {pattern!r:.200} is not understood; supported: names with '.*', '.+', "
            f"digits, classes and groups, of at most {MAX_PATTERN_CHARACTERS} characters"
        )
    if _num_ways(pattern) > MAX_WAYS:
        raise UnsupportedModelError(
            f"module pattern {pattern!r:.200} may match a name in more than {MAX_WAYS} ways, which "
            "takes too long; use at most three '.*', and fewer alternatives one after another"
        )
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(f"module pattern {pattern!r:.200}: {error}") from error


def _compiled(pattern: str, expression: str) -> re.Pattern[str]:
    compiled = checked_expression(pattern, expression)
    if _ONE_EXPERT.search(pattern):
        raise UnsupportedModelError(
            f"module pattern {pattern!r:.200} names one expert; the experts of a layer must be "
            "stored in the same format"
        )
    return compiled


_TOKEN = re.compile(r"\\d\+?|\\.|\.[*+]|\[[\w\-]+\]\+?|\(\?:|.", re.DOTALL)


def _num_ways(pattern: str) -> int:
    """Return about how often `re` may have to try: it goes back over what repeats or has choices.

    What follows one another multiplies, alternatives add up. A repetition at the end is not tried
    again.
    """
    levels = [(0, 1)]  # of groups: the alternatives before, and the present one
    for token in _TOKEN.findall(pattern.removesuffix(".*")):
        others, ways = levels[-1]
        if token in ("(", "(?:"):
            levels.append((0, 1))
            continue
        if token == "|":
            levels[-1] = (others + ways, 1)
        elif token == ")" and len(levels) > 1:
            levels.pop()
            before, product = levels[-1]
            levels[-1] = (before, min(product * (others + ways), MAX_WAYS + 1))
        elif token.endswith(("*", "+")):
            repeats = len("100") if token.startswith("\\d") else NAME_CHARACTERS
            levels[-1] = (others, min(ways * repeats, MAX_WAYS + 1))
    return max(others + ways for others, ways in levels)


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
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_to_fuse mse nsamples pad_token_id producer quantization_status quantizer scale_dtype
    seqlen static_groups tokenizer train_bs true_sequential use_cuda_fp16 use_exllama version
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
}
# "config_groups" repeats "quant_algo".
_MODELOPT_FIELDS = frozenset({"quant_algo", "exclude_modules", "ignore", "config_groups"})
_MIXED, _LAYERS = "MIXED_PRECISION", "quantized_layers"
_LINEAR = "Linear"  # the class of all matrices, as a target of compressed-tensors
_NAMED_EXPERT = re.compile(r"(?<=experts\.)\d+")
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
    """Modules that are stored in one format, where a checkpoint has several."""

    format: WeightFormat
    names: frozenset[str] = frozenset()  # of modules, or of modules around them
    patterns: tuple[re.Pattern[str], ...] = ()
    has_all_others: bool = False  # those that no group names

    def is_named(self, module: str) -> bool:
        parents = {parent for name in _spellings(module) for parent in _with_parents(name)}
        return not parents.isdisjoint(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    method: str
    format: WeightFormat  # with `groups`, that of the first
    # Modules by format: one that no group has is stored plainly. Empty: `format` for all.
    groups: tuple[ModuleGroup, ...] = ()
    excluded: tuple[re.Pattern[str], ...] = ()  # modules that are not quantised
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
        return tuple(group.format for group in self.groups) or (self.format, *others)

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

    def format_of(self, name: str) -> WeightFormat | None:
        """The stored format of a matrix by canonical name, or None; one for a layer's experts."""
        name = _EXPERT_NUMBER.sub("0", name, count=1)
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> WeightFormat | None:
        is_matrix = name.endswith(".weight")  # instead of what is added to rows
        if not is_matrix or any(plain in name for plain in _ALWAYS_PLAIN):
            return None
        if (name == HEAD and self.is_head_plain) or (self.is_experts_only and EXPERTS not in name):
            return None
        module = name.removesuffix(".weight")
        renamed = next((pair for pair in self.module_names if pair[0] in module), ("", ""))
        module = module.replace(*renamed, 1)
        is_excluded = is_matched(module, self.excluded)
        if self.included is not None:
            is_excluded |= not is_matched(module, self.included)
        if is_excluded:
            return None
        if self.groups:
            return self._format_of_group(module)
        return self.experts if self.experts is not None and EXPERTS in name else self.format

    def _format_of_group(self, module: str) -> WeightFormat | None:
        """A name comes before an expression, and the group that is written first before others."""
        for group in self.groups:
            if group.is_named(module):
                return group.format
        for group in self.groups:
            if is_matched(module, group.patterns):
                return group.format
        return next((group.format for group in self.groups if group.has_all_others), None)


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
    _check(config, accepted, {"modules_to_not_convert", "ignored_layers"})
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
    return _groups_of_names(formats)


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
    groups = tuple(_tensors_group(group, config.get("format")) for group in found.values())
    has_one_format = len(groups) == 1 and groups[0].has_all_others
    return Quantization(
        method="compressed-tensors",
        format=groups[0].format,
        groups=() if has_one_format else groups,
        excluded=tuple(map(name_or_expression, _names(config, "ignore"))),
        is_head_plain=False,
        unread=_ACTIVATION_SCALES,
    )


def _tensors_group(group: object, layout: object) -> ModuleGroup:
    """A group of compressed-tensors, whose "format" comes before that of all groups."""
    if not isinstance(group, Mapping):
        raise _refusal("config_groups", group, ("objects",))
    layouts = tuple(_LAYOUTS) if layout == "mixed-precision" else (layout,)
    own = layout if group.get("format") is None else group.get("format")
    if own not in layouts:
        raise _refusal("config_groups.format", own, layouts)
    used = {"weights", "input_activations", "targets", "format"}
    _check(group, {"output_activations": (None,)}, used)
    if own == "int-quantized":
        _check_int8_activations(group.get("input_activations"))
    stored = _weights_format(group.get("weights"), str(own))
    targets = _names(group, "targets")
    if not targets:
        raise _refusal("config_groups.targets", targets, ("names of modules", "'Linear'"))
    names: dict[str, WeightFormat] = {}
    for target in targets:
        if not target.startswith("re:") and target != _LINEAR:
            _add_name(names, target, stored)
    return ModuleGroup(
        format=stored,
        names=frozenset(names),
        patterns=tuple(name_or_expression(each) for each in targets if each.startswith("re:")),
        has_all_others=_LINEAR in targets,
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
        "FP4 (e2m1), a scale for 16 elements (NVFP4); FP8, a scale for 32 elements (MXFP8) or a "
        "matrix (FP8)",
        _modelopt,
    ),
    "gptq": Method("INT4 with a scale and a zero point for each group, in any order", _gptq),
    "awq": Method("INT4 with a scale and a zero point for each group", _awq),
    "compressed-tensors": Method(
        "INT4 by groups or rows (pack-quantized), FP8 by blocks, rows or matrices "
        "(float-quantized) or 32 elements (mxfp8-quantized), FP4 by 16 elements "
        "(nvfp4-pack-quantized), int8 by rows with inputs of int8 (int-quantized, W8A8)",
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
