"""Which matrices a `quantization_config` means, and which configurations are refused."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import is_match, match_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.quantizers.quantizers_utils import should_convert_module

from raymoe.errors import UnsupportedModelError
from raymoe.specs.layer_weights import EMBEDDING, HEAD
from raymoe.specs.model import ModelSpec
from raymoe.specs.module_patterns import (
    is_any,
    name_or_expression,
    prefix_or_suffix,
    spellings_of,
    wildcard,
)
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.specs.quantization import Quantization, parse_quantization
from raymoe.specs.weight_format import (
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
)

FP8 = MODEL_PRESETS["deepseek-v3"]["quantization_config"]
MINIMAX = MODEL_PRESETS["minimax-m2"]["quantization_config"]
MXFP4_CONFIG = MODEL_PRESETS["gpt-oss-20b"]["quantization_config"]
# Qwen/Qwen3-30B-A3B-FP8: the router and norms of each layer by name.
QWEN_FP8 = FP8 | {
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in range(48)),
        *(f"model.layers.{i}.input_layernorm" for i in range(48)),
    ]
}
GROUP = {
    "input_activations": None,
    "output_activations": None,
    "targets": ["Linear"],
    "weights": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    },
}
# moonshotai/Kimi-K2-Thinking
KIMI_INT4 = {
    "config_groups": {"group_0": GROUP},
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "true_sequential": True,
    "dynamic": {"-:.*shared_expert.*": {}},
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["gate", "model.layers.0"],
}


def floats(**weights: Any) -> dict[str, Any]:
    """FP8 of compressed-tensors."""
    arguments = {"num_bits": 8, "type": "float", "symmetric": True} | weights
    activations = {"dynamic": True, "num_bits": 8, "type": "float"}
    group = GROUP | {"input_activations": activations, "weights": arguments}
    return KIMI_INT4 | {"format": "float-quantized", "config_groups": {"group_0": group}}


CHANNELS = floats(strategy="channel")


def int8(activations: Any = (), **weights: Any) -> dict[str, Any]:
    """W8A8 as llm-compressor writes it: RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8."""
    common = {
        "actorder": None, "block_structure": None, "group_size": None, "num_bits": 8,
        "observer_kwargs": {}, "symmetric": True, "type": "int",
    }  # fmt: skip
    of_tokens = common | {"dynamic": True, "observer": None, "strategy": "token"}
    of_rows = common | {"dynamic": False, "observer": "minmax", "strategy": "channel"} | weights
    found = None if activations is None else of_tokens | dict(activations)
    group = GROUP | {"input_activations": found, "output_activations": None, "weights": of_rows}
    return {
        "config_groups": {"group_0": group},
        "format": "int-quantized",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


BLOCKS = floats(strategy="block", block_structure=[128, 128])

# RedHatAI/Qwen3-30B-A3B-NVFP4
NVFP4_GROUP = GROUP | {
    "format": "nvfp4-pack-quantized",
    "input_activations": {"dynamic": "local", "group_size": 16, "num_bits": 4, "type": "float"},
    "weights": GROUP["weights"]
    | {
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "type": "float",
        "zp_dtype": "torch.float8_e4m3fn",
    },
}
NVFP4 = KIMI_INT4 | {
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": NVFP4_GROUP},
    "ignore": ["lm_head", r"re:.*mlp.gate$"],
}
# What modelopt writes to config.json, and to hf_quant_config.json.
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16,
            },
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.layers.*.mlp.gate", "model.layers.3.self_attn*"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}  # fmt: skip
MODELOPT_MXFP8 = {
    "producer": {"name": "modelopt", "version": "0.41.0"},
    "quantization": {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": "FP8",
        "group_size": 32,
        "exclude_modules": ["lm_head"],
    },
    "quant_method": "modelopt",
}
# MiniMaxAI/MiniMax-M3-MXFP8
MXFP8 = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [1, 32],
    "ignored_layers": [
        "language_model.lm_head",
        "vision_tower",
        "language_model.model.layers.3.block_sparse_moe.gate",
    ],
}


def mixed(layers: dict[str, Any]) -> dict[str, Any]:
    """Several formats of modelopt, each module named."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "exclude_modules": ["lm_head"],
        "quantized_layers": layers,
    }


def tensors(*groups: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
    """Several groups of compressed-tensors, each with its targets."""
    found = {f"group_{i}": group | {"targets": names} for i, (group, names) in enumerate(groups)}
    return KIMI_INT4 | {"format": "mixed-precision", "config_groups": found, "ignore": []}


NVFP4_LAYER = {"quant_algo": "NVFP4", "group_size": 16}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "autoround_version": "0.10.2",
    "iters": 0,
    "model_free": True,
}
FP8_ROWS_GROUP = CHANNELS["config_groups"]["group_0"] | {"format": "float-quantized"}
ATTENTION = "model.layers.3.self_attn.q_proj.weight"
LATENT = "model.layers.3.self_attn.kv_b_proj.weight"
ROUTER = "model.layers.3.mlp.gate.weight"
SHARED = "model.layers.3.mlp.shared_expert.up_proj.weight"
EXPERT = "model.layers.3.mlp.experts.7.down_proj.weight"
DENSE = "model.layers.0.mlp.gate_proj.weight"


def read(config: Any) -> Quantization:
    quantization = parse_quantization(config)
    assert quantization is not None
    return quantization


@pytest.mark.parametrize(
    ("config", "stored", "meant"),
    [
        (FP8, Fp8Block(), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (MINIMAX, Fp8Block(), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (QWEN_FP8, Fp8Block(), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (MXFP4_CONFIG, Mxfp4(), {EXPERT}),
        (FP8 | {"scale_fmt": "ue8m0"}, Fp8Block(), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (BLOCKS, Fp8Block(scales_suffix=".weight_scale"), {EXPERT}),
        (KIMI_INT4, PackedInt4(32), {EXPERT}),
        (NVFP4, Nvfp4(is_divided=True), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (MODELOPT, Nvfp4(), {SHARED, EXPERT, DENSE}),
        (MODELOPT_MXFP8, Mxfp8(), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (MXFP8, Mxfp8(".weight_scale_inv"), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (
            FP8 | {"weight_block_size": [1, 32]},
            Mxfp8(".weight_scale_inv"),
            {ATTENTION, LATENT, SHARED, EXPERT, DENSE},
        ),
        (CHANNELS, Fp8Channel(), {EXPERT}),
        (int8(), Int8Channel(), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (
            GPTQ,
            Gptq(128),
            {ATTENTION, LATENT, EXPERT, DENSE},
        ),
        (AWQ, Awq(128), {ATTENTION, LATENT, SHARED, EXPERT}),
        (AUTO_ROUND, Gptq(128, has_order=False), {ATTENTION, LATENT, SHARED, EXPERT, DENSE}),
        (  # atbender/Qwen3-REAP-15B-A3B-W4A16 and others: blocks, and modules of their own
            AUTO_ROUND
            | {
                "packing_format": "auto_round:auto_awq",
                "block_name_to_quantize": "model.layers,other.blocks",
                "extra_config": {
                    "lm_head": {"bits": 4, "group_size": 128},
                    "model.layers.3.self_attn.q_proj": {"bits": 16, "data_type": "float"},
                    r"model.layers.\d+.mlp.shared_expert.*": {"bits": 16},
                },
            },
            Awq(128),
            {LATENT, EXPERT, DENSE, HEAD},
        ),
        (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.3.mlp"]},
            Fp8Channel(),
            {ATTENTION, LATENT, DENSE, HEAD},
        ),
    ],
)
def test_matrices_are_stored_as_the_configuration_says(config, stored, meant) -> None:
    quantization = read(config)
    names = {EMBEDDING, HEAD, ATTENTION, LATENT, ROUTER, SHARED, EXPERT, DENSE}
    assert {name for name in names if quantization.format_of(name) is not None} == meant
    assert {quantization.format_of(name) for name in meant} == {stored}


@pytest.mark.parametrize(
    ("config", "experts", "others"),
    [
        (  # MiniMaxAI/MiniMax-M3.1
            MXFP8 | {"moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"},
            Nvfp4(is_divided=True),
            Mxfp8(".weight_scale_inv"),
        ),
        (FP8 | {"moe_quant_algo": "NVFP4"}, Nvfp4(), Fp8Block()),  # nvidia/DeepSeek-V4-Pro-NVFP4
        (FP8 | {"moe_quant_algo": "NVFP4", "expert_dtype": "fp4"}, Nvfp4(), Fp8Block()),
        (FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, Mxfp4(".scale"), Fp8Block()),
        (  # inclusionAI/Ling-3.0-flash-fp4
            FP8 | {"routed_experts_quant_method": "mxfp4", "routed_experts_group_size": 32},
            Mxfp4(".weight_scale_inv"),
            Fp8Block(),
        ),
        (  # XiaomiMiMo/MiMo-V2.6-Flash-RL
            FP8 | {"store_dtype": "mxfp4", "mxfp4_block_size": 32},
            Mxfp4(".weight_scale"),
            Fp8Block(),
        ),
    ],
)
def test_experts_may_have_a_format_of_their_own(config, experts, others) -> None:
    quantization = read(config)
    assert quantization.format_of(EXPERT) == experts
    assert {quantization.format_of(name) for name in (ATTENTION, SHARED, DENSE)} == {others}
    assert quantization.format_of(ROUTER) is None
    assert quantization.name == f"{others.name}, experts {experts.name}"


@pytest.mark.parametrize(
    ("config", "formats"),
    [
        (  # Nemotron: sparse, a module that is not named is plain
            mixed(
                {
                    "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                }
            ),
            {ATTENTION: Fp8Tensor(), EXPERT: Nvfp4(), LATENT: None, SHARED: None, DENSE: None},
        ),
        (  # MiniMax-M3: experts named one by one, by the names of its class
            mixed(
                {
                    "language_model.model.layers.3.self_attn.q_proj": {"quant_algo": "MXFP8"},
                    **{
                        f"language_model.model.layers.3.block_sparse_moe.experts.{i}.w2": {
                            "quant_algo": "NVFP4"
                        }
                        for i in range(9)
                    },
                }
            ),
            {ATTENTION: Mxfp8(), EXPERT: Nvfp4(), SHARED: None},
        ),
        (  # expressions that overlap: the first group has the module
            tensors(
                (FP8_ROWS_GROUP, [r"re:.*self_attn\.(q|k|v|o)_proj$", "re:.*layers.0.mlp.*"]),
                (NVFP4_GROUP, [r"re:.*mlp\..*(gate|up|down)_proj$"]),
            ),
            {
                ATTENTION: Fp8Channel(),
                DENSE: Fp8Channel(),
                EXPERT: Nvfp4(is_divided=True),
                "lm_head.weight": None,
            },
        ),
        (  # a module before those around it
            mixed(
                {
                    "model.layers.3.mlp": {"quant_algo": "FP8"},
                    "model.layers.3.mlp.experts": NVFP4_LAYER,
                    "model.layers.3.self_attn": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
                    "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8_PB_WO"},
                }
            ),
            {
                ATTENTION: Fp8Block(".weight_scale"),
                LATENT: Fp8Channel(),
                EXPERT: Nvfp4(),
                SHARED: Fp8Tensor(),
                DENSE: None,
            },
        ),
        (  # names are those of matrices, not of modules around them
            tensors(
                (FP8_ROWS_GROUP, ["model.layers.3.self_attn", "model.layers.3.mlp.experts.7"]),
                (NVFP4_GROUP, ["re:.*layers.0.*"]),
            ),
            {ATTENTION: None, EXPERT: None, DENSE: Nvfp4(is_divided=True)},
        ),
        (  # a name, an expression and the class of all, against their order
            tensors(
                (NVFP4_GROUP, ["Linear"]),
                (GROUP | {"format": "pack-quantized"}, ["re:.*layers.3.*"]),
                (FP8_ROWS_GROUP, ["model.layers.3.self_attn.q_proj", "lm_head"]),
            ),
            {
                ATTENTION: Fp8Channel(),
                "lm_head.weight": Fp8Channel(),
                EXPERT: PackedInt4(32),
                DENSE: Nvfp4(is_divided=True),
            },
        ),
    ],
)
def test_modules_have_the_format_of_their_group(config, formats) -> None:
    quantization = read(config)
    assert {name: quantization.format_of(name) for name in formats} == formats
    assert all(each.name in quantization.name for each in quantization.formats)


TARGETS = [
    "Linear", "lm_head", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp",
    "re:.*self_attn.*", "re:.*q_proj$", r"re:model\.layers\.3\.mlp.*", "re:.*layers.0.*",
    r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", "re:model.*",
]  # fmt: skip
GROUPS = [GROUP | {"format": "pack-quantized"}, FP8_ROWS_GROUP, NVFP4_GROUP]


@given(st.lists(st.sets(st.sampled_from(TARGETS), min_size=1), min_size=3, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_groups_come_one_before_the_other_as_in_compressed_tensors(
    targets: list[set[str]], data: st.DataObject
) -> None:
    """Names, expressions by alphabet, "Linear"; of a target in two groups, the last."""
    ignored = data.draw(st.sets(st.sampled_from(TARGETS[1:])))
    config = tensors(*zip(GROUPS, map(sorted, targets), strict=True)) | {"ignore": sorted(ignored)}
    ours, formats = read(config), (PackedInt4(32), Fp8Channel(), Nvfp4(is_divided=True))
    of_target = {name: form for form, names in zip(formats, targets, strict=True) for name in names}
    matrix = torch.nn.Linear(1, 1)
    for name in (ATTENTION, LATENT, SHARED, EXPERT.replace("7", "0"), DENSE, HEAD):
        module = name.removesuffix(".weight")
        found = match_targets(module, matrix, of_target)
        is_ignored = is_match(module, matrix, ignored) if ignored else False
        expected = of_target[found[0]] if found and not is_ignored else None
        assert ours.format_of(name) == expected, (name, found)


def test_the_type_of_experts_may_be_said_beside_what_says_that_there_are_codes() -> None:
    config = MODEL_PRESETS["deepseek-v3"]
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    for outer, stored in (("fp4", Mxfp4(".scale")), ("fp8", Fp8Block())):
        found = ModelSpec.from_config(config | {"expert_dtype": outer}).quantization
        assert found is not None
        assert found.format_of(EXPERT) == stored
        assert found.format_of(ATTENTION) == Fp8Block()
        assert ModelSpec.from_config(plain | {"expert_dtype": outer}).quantization is None
    with pytest.raises(UnsupportedModelError, match="expert_dtype = 'int4'"):
        ModelSpec.from_config(config | {"expert_dtype": "int4"})


def test_the_head_is_stored_plainly_unless_it_is_said_otherwise() -> None:
    assert read(GPTQ | {"lm_head": True}).format_of(HEAD) is not None
    assert read(KIMI_INT4 | {"ignore": []}).format_of(HEAD) is not None
    assert read(GPTQ | {"lm_head": False}).format_of(HEAD) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "gate",
        "lm_head",
        "model.layers.1",
        "model.layers.*.self_attn",
        "model.layers.1.mlp.gate",
        "mlp.gate",
        "self_attn",
        "model.layers.[12].mlp",
        r"model.layers.\d+.self_attn.(q|k)_proj",
        "proj",
    ],
)
def test_patterns_match_as_in_transformers(pattern: str) -> None:
    parts = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.experts.3.gate_proj"]
    names = [f"model.layers.{i}.{part}" for i in (1, 2, 11) for part in parts]
    for name in (*names, "lm_head", "model.embed_tokens"):
        expected = not should_convert_module(name, [pattern])
        assert (prefix_or_suffix(pattern).match(name) is not None) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "re:" + "(?:a|a)" * 40, "re:" + ".*a" * 6, "re:(.*a|b)(.*a|b)(.*c|d)(.*e|f)(.*g|h)",
        "re:" + "(" * 5000 + ")" * 5000, "re:" + "a" * 200_000, "re:[a-z]+[a-z]+[a-z]+[a-z]+$",
    ],
)  # fmt: skip
def test_patterns_that_may_take_exponential_time_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match="module pattern") as raised:
        name_or_expression(pattern)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*\.layers\.(" + "|".join(map(str, range(92))) + r")\.mlp\..*_proj$",
        r"re:.*self_attn.*|.*router.*|.*mlp.gate$|.*lm_head|.*vision_tower.*|.*norm.*",
        r"re:model\.layers\.\d+\.mlp\.experts\..*", "re:.*experts.*(gate|up|down)_proj.*",
    ],
)  # fmt: skip
def test_patterns_of_published_kinds_are_linear_on_long_names(pattern: str) -> None:
    compiled = name_or_expression(pattern)
    begin = time.process_time()
    for part in ("model.layers.1.mlp.", "self_attn.", "a", ".", "experts."):
        compiled.match(part * 40)
    assert time.process_time() - begin < 2.0  # CPU time; a hostile pattern takes hours


def test_wildcards_match_as_in_modelopt() -> None:
    """`fnmatch` on names of modules; a name means what is inside of it too."""
    names = ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.self_attn.q_proj"]
    for pattern, meant in (
        ("lm_head", names[:1]),
        ("model.layers.1*", names[1:]),
        ("model.layers.1.self_attn", names[2:]),
        ("model.layers.1.self_attn.*", names[2:]),
        ("*.q_proj", names[2:]),
        ("model.layers.*.mlp.gate", names[1:2]),
        ("model.layers.1.mlp.gat", []),
        ("layers.1.mlp", []),
        ("mtp*", []),
    ):
        assert [name for name in names if wildcard(pattern).match(name)] == meant


def test_modules_are_known_by_the_names_of_models_that_wrap_theirs() -> None:
    for pattern, module in (
        ("language_model.lm_head", "lm_head"),
        ("model.language_model.layers.1.mlp", "model.layers.1.mlp.gate_proj"),
        ("language_model.model.layers.1.mlp.*", "model.layers.1.mlp.gate_proj"),
        ("language_model*", "model.layers.2.mlp.gate_proj"),
    ):
        assert is_any([wildcard(pattern)], spellings_of(module))
        assert not is_any([wildcard(pattern)], spellings_of("visual.blocks.0.mlp"))


def test_modules_are_known_by_the_names_of_their_family() -> None:
    for pattern, module in (
        ("model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.experts.0.up_proj"),
        ("w2", "model.layers.1.mlp.experts.0.down_proj"),
        ("model.layers.1.mlp.shared_mlp", "model.layers.1.mlp.shared_expert.up_proj"),
    ):
        assert is_any([prefix_or_suffix(pattern)], spellings_of(module))
        others = spellings_of("model.layers.1.self_attn.q_proj")
        assert not is_any([prefix_or_suffix(pattern)], others)


def test_modules_are_known_by_the_names_under_which_their_family_stores_them() -> None:
    """unsloth/Qwen3.6-35B-A3B-NVFP4-Fast, and names that RedHatAI's writes into "ignore"."""
    states = "model.language_model.layers.0.linear_attn."
    groups = (FP8_ROWS_GROUP, [r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"])
    ignore = [f"{states}in_proj_a", f"{states}in_proj_b"]
    for config, others in (
        (tensors(groups), None),
        (tensors((FP8_ROWS_GROUP, ["Linear"])) | {"ignore": ignore}, None),
        (tensors((FP8_ROWS_GROUP, ["Linear"])), Fp8Channel()),
        (mixed({f"{states}in_proj_qkv": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}), None),
    ):
        spec = replace(model_preset("qwen3.5-35b-a3b"), quantization=read(config))
        found = {
            part: spec.format_of(f"model.layers.0.linear_attn.{part}_proj.weight", (64, 64))
            for part in "qkvgoab"
        }
        assert {found[part] for part in "qkv"} == {Fp8Channel()}
        assert {found[part] for part in "ab"} == {others}
        if config.get("quant_algo") is None:
            assert {found[part] for part in "go"} == {Fp8Channel()}


def test_a_file_of_its_own_names_the_quantisation_where_config_json_does_not(
    tmp_path: Path,
) -> None:
    config = {**MODEL_PRESETS["mixtral-8x7b"]}
    for name, content in (("config.json", config), ("hf_quant_config.json", MODELOPT_MXFP8)):
        (tmp_path / name).write_text(json.dumps(content))
    found = ModelSpec.from_directory(tmp_path).quantization
    assert found is not None
    assert found.format == Mxfp8()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": MODELOPT}))
    found = ModelSpec.from_directory(tmp_path).quantization
    assert found is not None
    assert found.format == Nvfp4()


def test_a_published_checkpoint_of_int4_has_its_published_bytes() -> None:
    """All headers of moonshotai/Kimi-K2-Thinking: 594,205,920,512 bytes.

    Its shapes are two 32-bit integers where the library writes 64 bits, its biases of the choice
    and its 61 x 64 frequencies of the rope have 32 bits.
    """
    config = {**MODEL_PRESETS["kimi-k2"], "quantization_config": KIMI_INT4}
    matrices, biases, frequencies = 60 * 384 * 3, 60 * 384, 61 * 64
    expected = 594_205_920_512 + 8 * matrices - 2 * biases - 4 * frequencies
    assert ModelSpec.from_config(config).stored_bytes == expected


def test_quantised_matrices_keep_their_bytes_whatever_the_kernels_read() -> None:
    model = model_preset("gpt-oss-20b")
    plain = ModelSpec.from_config(
        {k: v for k, v in MODEL_PRESETS["gpt-oss-20b"].items() if k != "quantization_config"}
    )
    experts = 24 * 32 * 3 * 2880 * 2880
    assert plain.weight_bytes(4) - model.weight_bytes(4) == experts * 4 - experts * 17 // 32
    assert model.weight_bytes(4) - model.weight_bytes(2) == 2 * (model.num_parameters - experts)


def weights(**fields: Any) -> dict[str, Any]:
    return {"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | fields}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([], "expected an object"),
        ({}, "quant_method = None.*'fp8'"),
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'"),
        (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size"),
        (FP8 | {"activation_scheme": "block"}, "activation_scheme = 'block'"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt = 'e4m3'"),
        (FP8 | {"expert_dtype": "bf16"}, "expert_dtype = 'bf16'"),
        (FP8 | {"routed_experts_quant_method": "nvfp4"}, "routed_experts_quant_method = 'nvfp4'"),
        (FP8 | {"routed_experts_group_size": 16}, "routed_experts_group_size = 16"),
        (FP8 | {"store_dtype": "nvfp4"}, "store_dtype = 'nvfp4'"),
        (FP8 | {"mxfp4_block_size": 16}, "mxfp4_block_size = 16"),
        (FP8 | {"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (FP8 | {"modules_to_not_convert": ["(a+)+$"]}, "not understood"),
        (FP8 | {"modules_to_not_convert": [".*a" * 4]}, "more than 2000000 ways"),
        (FP8 | {"modules_to_not_convert": ["model.(layers"]}, "model.*layers"),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.mlp.experts.5"]}, "one expert"),
        (FP8 | {"rotation": "hadamard"}, "rotation = 'hadamard'"),
        (MXFP4_CONFIG | {"dequantize": True}, "dequantize = True"),
        (GPTQ | {"bits": 8}, "bits = 8"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "gptq_v2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"group_size": 0}, "group_size = 0"),
        (GPTQ | {"group_size": None}, "group_size = None"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"modules_in_block_to_quantize": [[4]]}, "modules_in_block_to_quantize"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        (KIMI_INT4 | {"format": "mxfp4-pack-quantized"}, "type = 'int'.*'float'"),
        (KIMI_INT4 | {"format": "nvfp4-pack-quantized"}, "group_size = 32.*16"),
        (NVFP4 | {"format": "pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ'.*'NVFP4'"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        (MODELOPT | {"group_size": 32}, "group_size = 32.*16"),
        (MODELOPT | {"quantized_layers": {"lm_head": {}}}, "quantized_layers"),
        (MODELOPT | {"ignore": ["model.layers.0.mlp.experts.5*"]}, "one expert"),
        (MODELOPT | {"pre_quant_scale": True}, "pre_quant_scale"),
        (MXFP8 | {"weight_block_size": [128, 128]}, "weight_block_size"),
        (MXFP8 | {"moe_quant_algo": "MXFP4"}, "moe_quant_algo = 'MXFP4'.*'NVFP4'"),
        (MXFP8 | {"moe_quant_format": "pack-quantized"}, "moe_quant_format"),
        (KIMI_INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (KIMI_INT4 | {"config_groups": {}}, "config_groups"),
        (KIMI_INT4 | {"config_groups": {"a": GROUP | {"targets": []}}}, "targets"),
        (KIMI_INT4 | {"format": "mixed-precision"}, "config_groups.format"),
        (mixed({}), "quantized_layers"),
        (mixed({"model.layers.0.mlp": {"quant_algo": "W4A8_AWQ"}}), "W4A8_AWQ"),
        (
            FP8 | {"moe_quant_algo": "NVFP4", "quantized_layers": {"layers.0.attn": NVFP4_LAYER}},
            "quantized_layers = 'layers.0.attn'",
        ),
        (
            FP8
            | {
                "moe_quant_algo": "NVFP4",
                "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "FP8"}},
            },
            "quantized_layers = 'layers.0.ffn.experts'",
        ),
        (FP8 | {"quantized_layers": {"layers.0.ffn.experts": NVFP4_LAYER}}, "no such field"),
        (AUTO_ROUND | {"bits": 8}, "bits = 8"),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        (
            AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
            "extra_config.model.layers.0.mlp.up_proj.bits = 8",
        ),
        (
            mixed(
                {
                    "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
                    "model.layers.0.mlp.experts.1.up_proj": {"quant_algo": "FP8"},
                }
            ),
            "same format",
        ),
        (KIMI_INT4 | {"config_groups": {"a": GROUP | {"weights": None}}}, "groups with weights"),
        (
            KIMI_INT4 | {"config_groups": {"a": GROUP, "b": GROUP | {"targets": ["Conv2d"]}}},
            "targets = 'Conv2d'.*'Linear'",
        ),
        (
            KIMI_INT4 | {"config_groups": {"a": GROUP | {"targets": ["Embedding", "Linear"]}}},
            "targets = 'Embedding'",
        ),
        (KIMI_INT4 | weights(num_bits=8), "num_bits = 8"),
        (KIMI_INT4 | weights(type="float"), "type = 'float'"),
        (KIMI_INT4 | weights(strategy="tensor"), "strategy = 'tensor'"),
        (KIMI_INT4 | weights(scale_dtype="torch.float8_e4m3fn"), "scale_dtype"),
        (KIMI_INT4 | weights(block_structure=[128, 128]), "block_structure"),
        (floats(strategy="block", block_structure=[64, 128]), r"block_structure = \[64, 128\]"),
        (floats(strategy="block"), "block_structure = None"),
        (floats(strategy="attn_head"), "strategy = 'attn_head'"),
        (int8(None), "input_activations = None.*int8 for each token"),
        (int8({"dynamic": False}), "dynamic = False"),
        (int8({"strategy": "tensor"}), "strategy = 'tensor'"),
        (int8({"symmetric": False}), "symmetric = False"),
        (int8({"num_bits": 4}), "num_bits = 4"),
        (int8(symmetric=False), "symmetric = False"),
        (int8(strategy="tensor"), "strategy = 'tensor'"),
        (int8(num_bits=4), "num_bits = 4"),
        (AWQ | {"backend": "llm-awq"}, "backend = 'llm-awq'"),
        (GPTQ | {"data_type": "fp"}, "data_type = 'fp'"),
    ],
)
def test_what_is_not_known_is_refused_by_field_and_value(config, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse_quantization(config)


def test_act_order_stores_the_group_of_each_column() -> None:
    ordered = read(KIMI_INT4 | weights(actorder="group")).format
    plain = read(KIMI_INT4).format
    assert ordered.matrix_bytes(64, 320) - plain.matrix_bytes(64, 320) == 4 * 320


def test_asymmetric_groups_store_zero_points() -> None:
    stored = read(KIMI_INT4 | weights(symmetric=False)).format
    assert stored == PackedInt4(32, has_zero_points=True)


TENSOR = Fp8Tensor()
# Facts of published configurations, and what of them is said in which way.
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
LOADERS = {
    "batch_size": 1,
    "block_name_to_quantize": "model.layers",
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": "c4",
    "disable_exllama": True,
    "exllama_config": {"version": 2},
    "max_input_length": 4096,
    "meta": {"quantizer": ["gptqmodel:1.4.0"], "mse": 0.0},
    "model_seqlen": 4096,
    "module_name_preceding_first_block": ["model.embed_tokens"],
    "modules_to_fuse": {"attention": ["q_proj"]},
    "do_fuse": True,
    "fuse_max_seq_len": 512,
    "pad_token_id": 0,
    "static_groups": True,
    "tokenizer": "x/y",
    "true_sequential": True,
    "use_cuda_fp16": True,
    "use_exllama": True,
    # AutoRound
    "amp": True,
    "autoround_version": "0.4.5",
    "data_type": "int",
    "iters": 200,
    "low_gpu_mem_usage": True,
    "lr": 0.005,
    "nsamples": 128,
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
    "train_bs": 8,
}


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (STATIC | {"dequantize": False, "weight_block_size": None}, Fp8Tensor(".weight_scale_inv")),
        (STATIC | {"ignored_layers": ["lm_head"]}, Fp8Tensor(".weight_scale_inv")),
        (STATIC | {"activation_scheme": "dynamic"}, Fp8Tensor(".weight_scale_inv")),
        (floats(strategy="tensor") | {"kv_cache_scheme": {"num_bits": 8}}, TENSOR),
        (floats(strategy="tensor") | {"format": "naive-quantized"}, TENSOR),
        (floats(strategy="channel") | {"format": "naive-quantized"}, Fp8Channel()),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {}}, TENSOR),
        (FP8 | {"activation_scheme": "static"}, Fp8Block()),
        (GPTQ | LOADERS, Gptq(GPTQ["group_size"])),
        (AWQ | LOADERS, Awq(AWQ["group_size"])),
        (GPTQ | {"modules_in_block_to_quantize": None}, Gptq(GPTQ["group_size"])),
    ],
)
def test_what_concerns_loaders_and_activations_changes_no_format(config, stored) -> None:
    found = parse_quantization(config)
    assert found is not None
    assert found.format == stored
    assert found.format_of("model.layers.3.mlp.experts.0.up_proj.weight") == stored


def test_lists_of_modules_say_what_is_quantised() -> None:
    experts = [f"mlp.experts.{i}.{part}_proj" for i in range(64) for part in ("gate", "up")]
    lists = [["self_attn.k_proj"], experts]
    found = parse_quantization(GPTQ | {"modules_in_block_to_quantize": lists})
    assert found is not None
    is_quantised = {
        "self_attn.k_proj": True,
        "self_attn.q_proj": False,
        "mlp.experts.7.up_proj": True,
        "mlp.experts.7.down_proj": False,
        "mlp.shared_expert.up_proj": False,
    }
    for name, expected in is_quantised.items():
        assert (found.format_of(f"model.layers.3.{name}.weight") is not None) is expected, name
    of_mixtral = [["block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.1.w1"]]
    found = parse_quantization(GPTQ | {"modules_in_block_to_quantize": of_mixtral})
    assert found is not None
    assert found.format_of("model.layers.0.mlp.experts.1.gate_proj.weight") is not None
    assert found.format_of("model.layers.0.mlp.experts.1.up_proj.weight") is None
