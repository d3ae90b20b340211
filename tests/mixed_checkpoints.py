"""Published configurations with several formats, and small checkpoints of the same kind.

Names of modules, fields and formats are those of the `config.json` (or `hf_quant_config.json`) that
each case is named after; layers, experts and sizes are few.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from raymoe.specs.weight_format import (
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    WeightFormat,
)
from tests.parity.compressed_families import COMPRESSED_FAMILIES
from tests.parity.fields import BASE
from tests.parity.hybrid_families import HYBRID_FAMILIES
from tests.parity.state_families import STATE_FAMILIES
from tests.parity.wrapper_families import WRAPPER_FAMILIES
from tests.quantised_checkpoints import QuantisedCase

# What a module has that is quantised as a whole.
ATTENTION = r"self_attn\.[qkvo]_proj$"
EXPERTS = r"experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])$"
SHARED = r"shared_expert\.\w+_proj$"
STATES = r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"
TEXT, MINIMAX = "model.language_model.layers.", "language_model.model.layers."
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
_NETWORKS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
FP8, NVFP4 = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16}


def _qwen(**fields: Any) -> dict[str, Any]:
    """Qwen3.6: three layers with states, one with attention, shared experts, and images."""
    found = copy.deepcopy(WRAPPER_FAMILIES["qwen3_5_moe"][0])
    found |= copy.deepcopy(WRAPPER_FAMILIES["qwen3_5_moe"][1]["plain"])
    found["text_config"] |= _SIZES | _NETWORKS | {"linear_value_head_dim": 16} | fields
    return found


def _text(family: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return copy.deepcopy(family) | _SIZES | fields


def _modelopt(
    layers: dict[str, Any], ignore: Iterable[str] = ("lm_head", "mtp*")
) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "modelopt", "version": "0.44.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": list(ignore),
        "quantized_layers": layers,
    }


def _tensors(*groups: dict[str, Any], ignore: Iterable[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignore),
    }


def _group(form: str, targets: Iterable[str], **weights: Any) -> dict[str, Any]:
    arguments = {"type": "float", "symmetric": True, "dynamic": False, **weights}
    return {"format": form, "weights": arguments, "targets": list(targets)}


def _fp8(targets: Iterable[str], strategy: str = "channel") -> dict[str, Any]:
    return _group("float-quantized", targets, num_bits=8, strategy=strategy, group_size=None)


def _nvfp4(targets: Iterable[str]) -> dict[str, Any]:
    return _group(
        "nvfp4-pack-quantized", targets, num_bits=4, strategy="tensor_group", group_size=16,
        scale_dtype="torch.float8_e4m3fn",
    )  # fmt: skip


def _case(
    name: str,
    family: str,
    config: dict[str, Any],
    modules: dict[str, WeightFormat],
    fields: dict[str, Any],
    **others: Any,
) -> QuantisedCase:
    others = {"scale_dtype": torch.float32, **others}
    return QuantisedCase(
        name=name, family=family, stored=next(iter(modules.values())), config=config,
        modules=modules, fields=fields, **others,
    )  # fmt: skip


_QWEN_GATES = [f"{TEXT}{i}.mlp.{gate}" for i in range(4) for gate in ("gate", "shared_expert_gate")]
_NEMOTRON = STATE_FAMILIES["nemotron_h"][0] | {"n_shared_experts": 1}
CASES = [
    _case(
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        "qwen3_5_moe",
        _modelopt(
            {
                **{f"{TEXT}3.self_attn.{part}_proj": FP8 for part in "qkvo"},
                **{
                    f"{TEXT}{i}.linear_attn.{part}": FP8
                    for i in range(3)
                    for part in ("in_proj_qkv", "in_proj_z", "out_proj")
                },
                **{
                    f"{TEXT}{i}.mlp.{part}": NVFP4 | {"quant_algo": "W4A16_NVFP4"}
                    for i in range(4)
                    for part in (
                        "experts",
                        *(f"shared_expert.{x}_proj" for x in ("gate", "up", "down")),
                    )
                },
                "lm_head": NVFP4 | {"quant_algo": "W4A16_NVFP4"},
            },
            ignore=["mtp*", "mtp.layers.0*"],
        ),
        {f"{ATTENTION}|{STATES}": Fp8Tensor(), f"{EXPERTS}|{SHARED}|^lm_head$": Nvfp4()},
        _qwen(),
        extra=(".input_scale",),
    ),
    _case(
        "unsloth/Qwen3.6-35B-A3B-NVFP4-Fast",
        "qwen3_5_moe",
        _tensors(
            _fp8(
                [
                    r"re:.*self_attn\.(q|k|v|o)_proj$",
                    r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
                    "re:.*lm_head",
                    # The last layers of its dense sibling: before the next group by alphabet.
                    r"re:.*layers\.3\.mlp\.shared_expert\.(gate|up|down)_proj$",
                ]
            ),
            _nvfp4(
                [
                    r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$",
                    r"re:.*shared_expert\.(gate|up|down)_proj$",
                ]
            ),
            ignore=[f"{TEXT}0.linear_attn", f"{TEXT}0.linear_attn.norm", *_QWEN_GATES],
        ),
        {
            rf"{ATTENTION}|{STATES}|^lm_head$|layers\.3\.mlp\.{SHARED}": Fp8Channel(),
            f"{EXPERTS}|{SHARED}": Nvfp4(is_divided=True),
        },
        _qwen(),
        extra=(".input_global_scale",),
    ),
    _case(
        "primitive-ai/Ornith-1.5-35B-A3B-mixed-NVFP4-FP8",
        "qwen3_5_moe",
        _tensors(
            _fp8(
                [
                    r"re:.*\.self_attn\.(q_proj|k_proj|v_proj|o_proj)$",
                    r"re:.*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
                    r"re:.*\.mlp\.shared_expert\.(gate_proj|up_proj|down_proj)$",
                ],
                "tensor",
            ),
            _nvfp4([r"re:.*\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"]),
            # Modules around matrices, single experts among them, are named without effect.
            ignore=[
                "lm_head",
                f"{TEXT}0.linear_attn",
                *_QWEN_GATES,
                *(f"{TEXT}{i}.mlp.experts.{expert}" for i in range(4) for expert in range(6)),
            ],
        ),
        {f"{ATTENTION}|{STATES}|{SHARED}": Fp8Tensor(), EXPERTS: Nvfp4(is_divided=True)},
        _qwen(),
        extra=(".input_scale",),
    ),
    _case(
        "nvidia/MiniMax-M3-NVFP4",
        "minimax_m3_vl_text",
        _modelopt(
            {
                **{
                    f"{MINIMAX}{i}.self_attn.{part}_proj": {"quant_algo": "MXFP8"}
                    for i in range(3)
                    for part in "qkvo"
                },
                **{
                    f"{MINIMAX}{i}.block_sparse_moe.experts.{expert}.{part}": NVFP4
                    for i in (1, 2)
                    for expert in range(6)
                    for part in ("w1", "w2", "w3")
                },
            },
            ignore=["lm_head", "*block_sparse_moe.gate*", "*vision_tower*"],
        ),
        {ATTENTION: Mxfp8(), EXPERTS: Nvfp4()},
        _text(HYBRID_FAMILIES["minimax_m3_vl_text"][0]),
        extra=(".input_scale",),
    ),
    _case(
        "lukealonso/MiMo-V2.5-NVFP4",
        "mimo_v2_flash",
        _modelopt(
            {
                **{
                    f"model.layers.{i}.self_attn.{part}_proj": {"quant_algo": "MXFP8"}
                    for i in range(3)
                    for part in "qkv"
                },
                **{
                    f"model.layers.0.mlp.{part}_proj": {"quant_algo": "MXFP8"}
                    for part in ("gate", "up", "down")
                },
                **{
                    f"model.layers.{i}.mlp.experts.{expert}.{part}_proj": NVFP4
                    for i in (1, 2)
                    for expert in range(6)
                    for part in ("gate", "up", "down")
                },
            },
            ignore=["lm_head", "model.mtp*", "*.o_proj"],
        ),
        {r"self_attn\.[qkv]_proj$|layers\.0\.mlp\.\w+_proj$": Mxfp8(), EXPERTS: Nvfp4()},
        _text(
            HYBRID_FAMILIES["mimo_v2_flash"][0],
            moe_intermediate_size=32,
            head_dim=32,
            v_head_dim=24,
        ),
    ),
    _case(
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        "nemotron_h",
        _modelopt(
            {
                **{
                    f"backbone.layers.{i}.mixer.{part}_proj": FP8
                    for i in (0, 2, 5)
                    for part in ("in", "out")
                },
                **{
                    f"backbone.layers.1.mixer.shared_experts.{part}_proj": FP8
                    for part in ("up", "down")
                },
                **{f"backbone.layers.1.mixer.fc{i}_latent_proj": FP8 for i in (1, 2)},
                **{
                    f"backbone.layers.{i}.mixer.experts.{expert}.{part}_proj": NVFP4
                    for i in (1, 4)
                    for expert in range(6)
                    for part in ("up", "down")
                },
            },
            ignore=["lm_head", "backbone.layers.3.mixer.q_proj", "mtp*"],
        ),
        {
            r"layers\.[025]\.mixer\.(in|out)_proj$|layers\.1\.mixer\.(shared_|fc)": Fp8Tensor(),
            r"mixer\.experts\.\d+\.": Nvfp4(),
        },
        _NEMOTRON
        | {"hidden_size": 64, "moe_intermediate_size": 32, "moe_latent_size": 32}
        | {"moe_shared_expert_intermediate_size": 32},
        extra=(".input_scale",),
    ),
    _case(
        "nvidia/DeepSeek-V4-Flash-NVFP4",
        "deepseek_v4",
        {
            "quant_method": "fp8",
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "activation_scheme": "dynamic",
            "expert_dtype": "fp4",
            "group_size": 16,
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "kv_cache_quant_algo": None,
            "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
            "producer": {"name": "modelopt", "version": "0.44.0"},
            "quantized_layers": {f"layers.{i}.ffn.experts": NVFP4 for i in range(4)},
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
                }
            },
        },
        {
            r"\.attn\.(indexer\.)?(wq_a|wq_b|wkv|wo_a|wo_b)$|shared_experts\.w[123]$": Fp8Block(
                ".scale"
            ),
            EXPERTS: Nvfp4(),
        },
        _text(COMPRESSED_FAMILIES["deepseek_v4"][0], moe_intermediate_size=32),
        scale_dtype=torch.float8_e8m0fnu,
    ),
    _case(
        "RedHatAI/GLM-5.3-Flash-NVFP4",
        "glm5_next",
        _tensors(
            _nvfp4([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]),
            _fp8([r"re:.*layers\.4\..*(proj|head)$"], "channel"),  # the layer of a second token
            ignore=["lm_head", "re:.*visual.*"],
        ),
        {EXPERTS: Nvfp4(is_divided=True)},
        copy.deepcopy(WRAPPER_FAMILIES["glm5_next"][0])
        | {
            "text_config": copy.deepcopy(WRAPPER_FAMILIES["glm5_next"][1]["plain"]["text_config"])
            | {"moe_intermediate_size": 32}
        },
        extra=(".input_global_scale",),
    ),
    _case(
        "MXFP4 and MXFP8 of llm-compressor, for GLM-5.2",
        "qwen3_moe",
        _tensors(
            _group(
                "mxfp8-quantized",
                [r"re:.*self_attn.*_proj$"],
                num_bits=8,
                strategy="group",
                group_size=32,
                scale_dtype="torch.uint8",
            ),
            _group(
                "mxfp4-pack-quantized",
                [r"re:.*mlp\.experts.*_proj$"],
                num_bits=4,
                strategy="group",
                group_size=32,
                scale_dtype="torch.uint8",
            ),
            ignore=["lm_head"],
        ),
        {ATTENTION: Mxfp8(), EXPERTS: Mxfp4(".weight_scale", ".weight_packed")},
        BASE | _SIZES | {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    _case(
        "lovedheart/Qwen3.8-Flash-Next-NVFP4-FP8",
        "qwen3_moe",
        _modelopt(
            {
                **{
                    f"model.layers.{i}.self_attn.{part}_proj": {
                        "quant_algo": "FP8_PB_WO",
                        "group_size": 128,
                    }
                    for i in range(2)
                    for part in "qkvo"
                },
                **{f"model.layers.{i}.mlp.experts": NVFP4 for i in range(2)},
                "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128},
            }
        ),
        {ATTENTION: Fp8Block(".weight_scale"), EXPERTS: Nvfp4()},
        BASE | _SIZES | {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2},
    ),
]
