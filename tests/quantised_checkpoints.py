"""Tiny quantised checkpoints, each beside the plain one of the numbers that it stands for."""

import atexit
import copy
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from tests.parity.configurations import Configuration
from tests.parity.fields import BASE
from tests.parity.oracle import make_model
from tests.parity.wrapper_families import WRAPPER_FAMILIES
from tests.quantisers import quantise

_PROJECTION = re.compile(r"(_proj|_mqa|\.dense|\.w[123])\.weight$")
_FUSED_EXPERTS = re.compile(r"experts\.(gate_up|down)_proj$")  # [experts, inputs, outputs]
_STACKED_EXPERTS = re.compile(r"experts\.(gate_up_proj|up_proj|down_proj)$")
_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class QuantisedCase:
    """A random model and how it is stored.

    Attributes:
        config: The `quantization_config`; or, with "quantization" in it, `hf_quant_config.json`.
        outer: Further fields of `config.json` where quantised.
        excluded: Parts of the names of projections that are not quantised.
        experts: How the experts are stored, if it is another way.
        modules: Expressions for names of modules -> how they are stored, the first counts, and
            others are not quantised; experts have names of their own. Empty: by the fields above.
        extra: Ends of names of scales that are stored with each matrix, and not read.
        unread: Parts of names of other tensors that are not read.
        seed: Of weights, orders and zero points.
    """

    name: str
    family: str
    stored: WeightFormat
    config: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    experts: WeightFormat | None = None
    modules: dict[str, WeightFormat] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    scale_dtype: torch.dtype = torch.float16
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Directories of the same model."""

    quantised: Path
    plain: Path


def _group(strategy: str = "group", **weights: Any) -> dict[str, Any]:
    arguments = {"num_bits": 4, "type": "int", "strategy": strategy, "symmetric": True} | weights
    return {"group_0": {"targets": ["Linear"], "weights": arguments}}


_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_QWEN3 = BASE | _SIZES | {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2}
_MIXTRAL = BASE | _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
_BLOCKS = {"strategy": "block", "block_structure": [128, 128], "num_bits": 8, "type": "float"}
_LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_DEEPSEEK = {
    **BASE,
    "hidden_size": 72,
    "intermediate_size": 144,
    "moe_intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    **_LATENT,
}
_LING = {
    **BASE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    **_LATENT,
}
_PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

_PARTS = ("gate", "up", "down")
_GLM_WITH_IMAGES = copy.deepcopy(WRAPPER_FAMILIES["glm5_next"][0])
_GLM_WITH_IMAGES |= copy.deepcopy(WRAPPER_FAMILIES["glm5_next"][1]["plain"])
_GLM_WITH_IMAGES["text_config"] |= {"moe_intermediate_size": 48}
CASES = [
    QuantisedCase(
        name="fp8 blocks, odd sizes",
        family="qwen3_moe",
        stored=Fp8Block(),
        config=_FP8,
        fields=_QWEN3 | {"hidden_size": 136, "moe_intermediate_size": 150},
    ),
    QuantisedCase(
        name="fp8 blocks, bfloat16 scales, some plain",
        family="qwen3_moe",
        stored=Fp8Block(),
        config=_FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0", "k_proj"]},
        fields=_QWEN3,
        excluded=("layers.0", "k_proj"),
        scale_dtype=torch.bfloat16,
    ),
    QuantisedCase(
        name="fp8 blocks, powers of two",
        family="qwen3_moe",
        stored=Fp8Block(),
        config=_FP8 | {"scale_fmt": "ue8m0"},
        fields=_QWEN3 | {"moe_intermediate_size": 150},
        scale_dtype=torch.float8_e8m0fnu,
    ),
    QuantisedCase(
        name="fp8 blocks of compressed-tensors",
        family="mixtral",
        stored=Fp8Block(scales_suffix=".weight_scale"),
        config=_PACKED
        | {
            "format": "float-quantized",
            "config_groups": _group(**_BLOCKS),
            "ignore": ["lm_head"],
        },
        fields=_MIXTRAL | {"intermediate_size": 136},
        scale_dtype=torch.bfloat16,
    ),
    QuantisedCase(
        name="fp8 matrices of transformers, static",
        family="qwen3_moe",
        stored=Fp8Tensor(".weight_scale_inv"),
        config=_FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        fields=_QWEN3,
        extra=(".activation_scale",),
        scale_dtype=torch.bfloat16,
    ),
    QuantisedCase(
        name="fp8 matrices of vLLM, static",
        family="mixtral",
        stored=Fp8Tensor(),
        config={
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "re:.*block_sparse_moe.gate"],
        },
        fields=_MIXTRAL,
        extra=(".input_scale",),
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="fp8 matrices of compressed-tensors",
        family="mixtral",
        stored=Fp8Tensor(),
        config=_PACKED
        | {
            "format": "float-quantized",
            "config_groups": _group("tensor", num_bits=8, type="float"),
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
        fields=_MIXTRAL,
        extra=(".input_scale",),
        scale_dtype=torch.bfloat16,
    ),
    QuantisedCase(
        name="fp8 matrices of modelopt",
        family="qwen3_moe",
        stored=Fp8Tensor(),
        config={
            "producer": {"name": "modelopt", "version": "0.33.1"},
            "quantization": {
                "quant_algo": "FP8",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
            },
        },
        fields=_QWEN3,
        extra=(".input_scale",),
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="fp8 channels",
        family="mixtral",
        stored=Fp8Channel(),
        config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        fields=_MIXTRAL,
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="gptq",
        family="qwen2_moe",
        stored=Gptq(16),
        config=_GPTQ,
        fields={k: v for k, v in _QWEN3.items() if k != "head_dim"}
        | {"shared_expert_intermediate_size": 80, "num_attention_heads": 4},
    ),
    QuantisedCase(
        name="gptq, act-order, zero points",
        family="mixtral",
        stored=Gptq(32),
        config=_GPTQ | {"group_size": 32, "desc_act": True, "sym": False},
        fields=_MIXTRAL,
        seed=1,
    ),
    QuantisedCase(
        name="int4 of AutoRound, some plain",
        family="qwen3_moe",
        stored=Gptq(16, has_order=False),
        config={
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 16,
            "sym": True,
            "data_type": "int",
            "iters": 0,
            "block_name_to_quantize": "model.layers",
            "extra_config": {
                "model.layers.0.self_attn.k_proj": {"bits": 16, "data_type": "float"},
                r"model\.layers\.\d+\.self_attn\.o_proj": {"bits": 16},
                "model.layers.1.mlp.experts.5.up_proj": {"bits": 4},
            },
        },
        fields=_QWEN3,
        excluded=("layers.0.self_attn.k_proj", "o_proj"),
    ),
    QuantisedCase(
        name="awq",
        family="qwen3_moe",
        stored=Awq(32),
        config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
        fields=_QWEN3,
    ),
    QuantisedCase(
        name="packed int4, experts alone",
        family="qwen3_moe",
        stored=PackedInt4(32),
        config=_PACKED
        | {"config_groups": _group(group_size=32), "ignore": ["lm_head", "re:.*self_attn.*"]},
        fields=_QWEN3,
        excluded=("self_attn",),
        scale_dtype=torch.bfloat16,
    ),
    QuantisedCase(
        name="packed int4, zero points, order",
        family="mixtral",
        stored=PackedInt4(16, has_zero_points=True, has_order=True),
        config=_PACKED
        | {
            "config_groups": _group(group_size=16, symmetric=False, actorder="group"),
            "ignore": ["lm_head"],
        },
        fields=_MIXTRAL,
    ),
    QuantisedCase(
        name="mxfp4",
        family="gpt_oss",
        stored=Mxfp4(),
        config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        fields=_MIXTRAL | {"sliding_window": 20},
        excluded=("self_attn",),
    ),
    QuantisedCase(
        name="mxfp8 of MiniMax-M3",
        family="minimax_m2",
        stored=Mxfp8(".weight_scale_inv"),
        config={
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": [
                "lm_head",
                "model.embed_tokens",
                "model.layers.0.block_sparse_moe.gate",
            ],
        },
        fields=_MIXTRAL,
    ),
    QuantisedCase(
        name="mxfp8, experts nvfp4, of MiniMax-M3.1",
        family="minimax_m2",
        stored=Mxfp8(".weight_scale_inv"),
        experts=Nvfp4(is_divided=True),
        config={
            "quant_method": "mxfp8",
            "moe_quant_algo": "NVFP4",
            "moe_quant_format": "nvfp4-pack-quantized",
            "ignored_layers": ["lm_head"],
        },
        fields=_MIXTRAL,
    ),
    QuantisedCase(
        name="mxfp8 of compressed-tensors",
        family="qwen3_moe",
        stored=Mxfp8(),
        config=_PACKED
        | {
            "format": "mxfp8-quantized",
            "config_groups": _group(
                group_size=32, num_bits=8, type="float", scale_dtype="torch.uint8"
            ),
            "ignore": ["lm_head", "re:.*self_attn.*"],
        },
        fields=_QWEN3,
        excluded=("self_attn",),
        seed=1,  # scales of the type of torch
    ),
    QuantisedCase(
        name="nvfp4 of modelopt",
        family="qwen3_moe",
        stored=Nvfp4(),
        config={
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": ["model.layers.0.self_attn*", "*.mlp.gate", "lm_head"],
            },
        },
        fields=_QWEN3,
        excluded=("layers.0.self_attn",),
        extra=(".input_scale", ".k_scale", ".v_scale"),
    ),
    QuantisedCase(
        name="nvfp4 of compressed-tensors",
        family="mixtral",
        stored=Nvfp4(is_divided=True),
        config=_PACKED
        | {
            "format": "nvfp4-pack-quantized",
            "config_groups": _group(
                "tensor_group", group_size=16, type="float", scale_dtype="torch.float8_e4m3fn"
            ),
            "ignore": ["lm_head", "re:.*block_sparse_moe.gate"],
        },
        fields=_MIXTRAL,
        extra=(".input_global_scale",),
    ),
    QuantisedCase(  # RedHatAI/GLM-5.3-Flash-NVFP4, with names of the whole model
        name="nvfp4 of compressed-tensors, within a model with images",
        family="glm5_next",
        stored=Nvfp4(is_divided=True),
        config=_PACKED
        | {
            "format": "nvfp4-pack-quantized",
            "config_groups": _group(
                "tensor_group", group_size=16, type="float", scale_dtype="torch.float8_e4m3fn"
            ),
            "ignore": [
                *("lm_head", "re:.*visual.*", "re:.*self_attn.*", "re:.*mlp.gate$"),
                *(f"model.language_model.layers.0.mlp.{part}_proj" for part in _PARTS),
                *(
                    f"model.language_model.layers.{i}.mlp.shared_experts.{part}_proj"
                    for i in (1, 2, 3)
                    for part in _PARTS
                ),
            ],
        },
        fields=_GLM_WITH_IMAGES,
        excluded=("visual", "self_attn", "layers.0.", "shared_experts"),
        unread=("visual.",),
        extra=(".input_global_scale",),
    ),
    QuantisedCase(
        name="fp8 blocks of MiniMax-M2",
        family="minimax_m2",
        stored=Fp8Block(),
        config=_FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        fields=_MIXTRAL | {"intermediate_size": 136},
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="fp8 blocks of DeepSeek-V3",
        family="deepseek_v3",
        stored=Fp8Block(),
        config=_FP8,
        fields=_DEEPSEEK,
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="fp8 blocks, experts mxfp4, of DeepSeek-V4",
        family="deepseek_v3",
        stored=Fp8Block(".scale"),
        experts=Mxfp4(".scale"),
        config=_FP8 | {"fmt": "e4m3", "scale_fmt": "ue8m0"},
        outer={"expert_dtype": "fp4"},
        fields=_DEEPSEEK | {"hidden_size": 64, "moe_intermediate_size": 96},
        scale_dtype=torch.float8_e8m0fnu,
        seed=1,  # codes in signed bytes, scales of the type of torch
    ),
    QuantisedCase(
        name="fp8 blocks, experts mxfp4, of Ling-3.0",
        family="bailing_hybrid",
        stored=Fp8Block(),
        experts=Mxfp4(".weight_scale_inv"),
        config=_FP8
        | {
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": ["lm_head", "b_proj"],
            "routed_experts_quant_method": "mxfp4",
            "routed_experts_group_size": 32,
        },
        fields=_LING,
        excluded=("attention.b_proj",),
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="fp8 blocks, experts mxfp4, of MiMo-V2.6",
        family="mimo_v2_flash",
        stored=Fp8Block(),
        experts=Mxfp4(".weight_scale"),
        config=_FP8
        | {
            "store_dtype": "mxfp4",
            "mxfp4_block_size": 32,
            "ignored_layers": [
                *(f"model.layers.{i}.self_attn.o_proj" for i in range(3)),
                "model.decoder.self_attn.o_proj",
                "lm_head",
            ],
        },
        fields=BASE
        | {
            "hidden_size": 64,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 24,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 20,
        },
        excluded=("o_proj",),
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="fp8 matrices, experts nvfp4, of modelopt",
        family="qwen3_moe",
        stored=Fp8Tensor(),
        experts=Nvfp4(),
        config={
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "exclude_modules": ["lm_head", "*mlp.gate"],
                "quantized_layers": {
                    f"model.layers.{i}.{module}": {"quant_algo": algorithm}
                    for i in range(_QWEN3["num_hidden_layers"])
                    for module, algorithm in (
                        *((f"self_attn.{part}_proj", "FP8") for part in "qkvo"),
                        ("mlp.experts", "NVFP4"),
                    )
                },
            },
        },
        fields=_QWEN3,
        extra=(".input_scale",),
    ),
    QuantisedCase(
        name="fp8 rows, experts nvfp4, of compressed-tensors",
        family="qwen3_moe",
        stored=Fp8Channel(),
        experts=Nvfp4(is_divided=True),
        config={
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {
                    **_group("channel", num_bits=8, type="float")["group_0"],
                    "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
                    "format": "float-quantized",
                },
                "group_1": {
                    **_group("tensor_group", type="float", group_size=16)["group_0"],
                    "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"],
                    "format": "nvfp4-pack-quantized",
                },
            },
            "ignore": ["lm_head"],
        },
        fields=_QWEN3,
        scale_dtype=torch.float32,
    ),
    QuantisedCase(
        name="packed int4 of Ling-3.0",
        family="bailing_hybrid",
        stored=PackedInt4(32),
        config=_PACKED
        | {
            "config_groups": _group(group_size=32),
            "ignore": [
                *("lm_head", "re:.*attention.*", "re:.*shared_experts.*"),
                r"re:.*mlp\.(gate|up|gate_up|down|eh)_proj.*",
            ],
        },
        fields=_LING,
        excluded=("attention", "shared_experts", "layers.0."),
        scale_dtype=torch.bfloat16,
    ),
    QuantisedCase(
        name="packed int4 of Kimi-K2",
        family="deepseek_v3",
        stored=PackedInt4(32),
        config=_PACKED
        | {
            "config_groups": _group(group_size=32),
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*layers.0.*"],
        },
        fields={
            **BASE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "num_attention_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 48,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            **_LATENT,
        },
        excluded=("self_attn", "shared_experts", "layers.0."),
        scale_dtype=torch.bfloat16,
    ),
]


@functools.cache
def checkpoints(name: str) -> Checkpoints:
    """The checkpoints of the case of this name; they live as long as the process."""
    return make_checkpoints(next(case for case in CASES if case.name == name))


def make_checkpoints(case: QuantisedCase) -> Checkpoints:
    """The checkpoints of a case; they live as long as the process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    root = Path(tempfile.mkdtemp(prefix="raymoe-quantised-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    configuration = Configuration(
        name=case.name, family=case.family, fields=case.fields, seed=case.seed
    )
    plain, quantised = root / "plain", root / "quantised"
    make_model(configuration).save_pretrained(plain)
    shutil.copytree(plain, quantised)
    quantised_of = _mixed if case.modules else _quantised
    tensors, numbers = quantised_of(case, load_file(plain / _FILE))
    save_file(tensors, quantised / _FILE)
    save_file(numbers, plain / _FILE)
    if "quantization" in case.config:
        (quantised / "hf_quant_config.json").write_text(json.dumps(case.config))
    else:
        config = json.loads((quantised / "config.json").read_text())
        config |= {"quantization_config": case.config, **case.outer}
        (quantised / "config.json").write_text(json.dumps(config))
    return Checkpoints(quantised=quantised, plain=plain)


def _quantised(
    case: QuantisedCase, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is stored, and the numbers of the plain checkpoint."""
    tensors: dict[str, Tensor] = {}
    numbers = dict(weights)
    for name, weight in weights.items():
        is_excluded = any(part in name for part in case.excluded)
        if _FUSED_EXPERTS.search(name):
            found = [quantise(case.stored, expert.t()) for expert in weight]
            for suffix in found[0].tensors:
                tensors[name + suffix] = torch.stack([each.tensors[suffix] for each in found])
            numbers[name] = torch.stack([each.exact.float().t() for each in found]).contiguous()
            continue
        if is_excluded or not _PROJECTION.search(name):
            tensors[name] = weight
            continue
        stored = case.experts if case.experts and ".experts." in name else case.stored
        found = quantise(stored, weight, scale_dtype=case.scale_dtype, seed=case.seed)
        module = name.removesuffix(".weight")
        tensors |= {module + suffix: tensor for suffix, tensor in found.tensors.items()}
        tensors |= {module + suffix: torch.rand(()) for suffix in case.extra}
        numbers[name] = found.exact.float()
    return tensors, numbers


def _mixed(
    case: QuantisedCase, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As `_quantised`, by the expressions of the case, and with a matrix for each expert."""
    tensors, numbers = {}, {}
    for name, weight in weights.items():
        parts = dict(_matrices(name, weight))
        for part, matrix in parts.items():
            module = part.removesuffix(".weight")
            found = (
                form for expression, form in case.modules.items() if re.search(expression, module)
            )
            stored = next(found, None) if matrix.dim() == 2 else None
            if stored is None:
                tensors[part] = matrix
                continue
            made = quantise(stored, matrix, scale_dtype=case.scale_dtype, seed=case.seed)
            tensors |= {module + suffix: tensor for suffix, tensor in made.tensors.items()}
            tensors |= {module + suffix: torch.rand(()) for suffix in case.extra}
            parts[part] = made.exact.float()
        numbers[name] = torch.cat([*parts.values()]).view(weight.shape).contiguous()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, numbers


def _matrices(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the matrices of experts in it: rows of gate before those of up."""
    fused = _STACKED_EXPERTS.search(name)
    if fused is None or weight.dim() != 3:
        yield name, weight
        return
    for expert, matrix in enumerate(weight):
        projections = fused[1].split("_")[:-1]
        for part, rows in zip(projections, matrix.chunk(len(projections)), strict=True):
            yield f"{name[: fused.start(1)]}{expert}.{part}_proj.weight", rows
