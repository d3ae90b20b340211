"""Small checkpoints in the spelling and formats of published files: tokens of transformers.

Matrices are drawn as codes and scales, so that what transformers loads, decoded, is exactly what
the files say.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from raymoe.device.threads import set_num_threads
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from tests.parity.driver import generate, load_decoder
from tests.parity.fields import BASE

NUM_TOKENS = 12
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


@pytest.fixture(autouse=True)
def _quiet() -> None:
    set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Files:
    """Tensors as they are published, and their values."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.stored: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def _exponents(self, rows: int, columns: int) -> Tensor:
        """Powers of two as E8M0."""
        drawn = torch.randint(-4, -1, (rows, columns), generator=self._random)
        return (drawn + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

    def plain(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, std: float = 0.3
    ) -> None:
        drawn = torch.randn(shape, generator=self._random) * std
        self.stored[name] = drawn.to(dtype)
        self.values[name] = self.stored[name].float()

    def fp8(self, module: str, shape: tuple[int, int], suffix: str) -> None:
        """E4M3, and a scale for 128 x 128 elements."""
        codes = torch.randn(shape, generator=self._random).to(torch.float8_e4m3fn)
        scales = self._exponents(*(-(-size // 128) for size in shape))
        wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.stored |= {f"{module}.weight": codes, module + suffix: scales}
        self.values[f"{module}.weight"] = codes.float() * wide[: shape[0], : shape[1]]

    def fp4(self, module: str, shape: tuple[int, int], suffix: str, dtype: torch.dtype) -> None:
        """E2M1, two neighbours in a byte, and a scale for 32 elements of a row."""
        rows, columns = shape
        codes = torch.randint(16, shape, generator=self._random)
        packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        scales = self._exponents(rows, columns // 32)
        if dtype == torch.uint8:
            scales = scales.view(torch.uint8)
        self.stored |= {f"{module}.weight": packed.view(dtype), module + suffix: scales}
        wide = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
        self.values[f"{module}.weight"] = E2M1[codes] * wide


V4 = {
    **{name: value for name, value in BASE.items() if name != "intermediate_size"},
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 136,
    "o_groups": 2,
    "o_lora_rank": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "index_n_heads": 16,  # with few, many scores would be zero, and what is chosen a tie
    "index_head_dim": 16,
    "index_topk": 12,  # entries of 4 tokens: the longer prompts choose
    "sliding_window": 20,
    "compress_ratios": [0, 4, 128, 4, 0],  # the last one of a layer that is not read
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def deepseek_v4(directory: Path) -> dict[str, Tensor]:
    """Write files as those of DeepSeek-V4-Flash; return their values."""
    config = V4 | {"expert_dtype": "fp4", "quantization_config": FP8}
    (directory / "config.json").write_text(json.dumps(config))
    files, hidden = Files(1), 160
    files.plain("embed.weight", (199, hidden), torch.bfloat16, 1.0)
    files.plain("head.weight", (199, hidden), torch.bfloat16)
    files.plain("norm.weight", (hidden,), torch.float32, 1.0)
    files.plain("hc_head_fn", (4, 4 * hidden), torch.float32, 0.1)
    files.plain("hc_head_base", (4,), torch.float32)
    files.plain("hc_head_scale", (1,), torch.float32)
    for layer, ratio in enumerate(V4["compress_ratios"][:4]):
        _v4_layer(files, f"layers.{layer}.", ratio, is_by_token=layer == 0)
    unread = Files(2)
    _v4_layer(unread, "mtp.0.", 0, is_by_token=False)
    save_file(files.stored | unread.stored, directory / "model.safetensors")
    return files.values


def _v4_layer(files: Files, prefix: str, ratio: int, *, is_by_token: bool) -> None:
    hidden, rank, width, experts = 160, 136, 32, 6
    for name in ("attn_norm", "ffn_norm"):
        files.plain(f"{prefix}{name}.weight", (hidden,), torch.float32, 1.0)
    for block in ("attn", "ffn"):
        files.plain(f"{prefix}hc_{block}_fn", (24, 4 * hidden), torch.float32, 0.1)
        files.plain(f"{prefix}hc_{block}_base", (24,), torch.float32)
        files.plain(f"{prefix}hc_{block}_scale", (3,), torch.float32)
    matrices = {
        "wq_a": (rank, hidden),
        "wq_b": (6 * width, rank),
        "wkv": (width, hidden),
        "wo_a": (2 * 24, 3 * width),
        "wo_b": (hidden, 2 * 24),
    }
    for name, shape in matrices.items():
        files.fp8(f"{prefix}attn.{name}", shape, ".scale")
    files.plain(f"{prefix}attn.q_norm.weight", (rank,), torch.float32, 1.0)
    files.plain(f"{prefix}attn.kv_norm.weight", (width,), torch.float32, 1.0)
    files.plain(f"{prefix}attn.attn_sink", (6,), torch.float32, 1.0)
    if ratio:
        _v4_compressor(files, f"{prefix}attn.compressor.", ratio, width)
    if ratio == 4:
        index_heads, index_width = V4["index_n_heads"], V4["index_head_dim"]
        files.fp8(f"{prefix}attn.indexer.wq_b", (index_heads * index_width, rank), ".scale")
        name = f"{prefix}attn.indexer.weights_proj.weight"
        files.plain(name, (index_heads, hidden), torch.bfloat16)
        _v4_compressor(files, f"{prefix}attn.indexer.compressor.", ratio, index_width)
    files.plain(f"{prefix}ffn.gate.weight", (experts, hidden), torch.bfloat16)
    if is_by_token:
        order = torch.rand(199, experts, generator=torch.Generator().manual_seed(3)).argsort(1)
        name = f"{prefix}ffn.gate.tid2eid"
        files.stored[name] = files.values[name] = order[:, :2].clone()
    else:
        files.plain(f"{prefix}ffn.gate.bias", (experts,), torch.float32)
    for part, shape in (("w1", (96, hidden)), ("w2", (hidden, 96)), ("w3", (96, hidden))):
        files.fp8(f"{prefix}ffn.shared_experts.{part}", shape, ".scale")
        for expert in range(experts):
            module = f"{prefix}ffn.experts.{expert}.{part}"
            files.fp4(module, shape, ".scale", torch.int8)


def _v4_compressor(files: Files, prefix: str, ratio: int, width: int) -> None:
    pooled = width * (2 if ratio == 4 else 1)
    for part in ("wkv", "wgate"):
        files.plain(f"{prefix}{part}.weight", (pooled, V4["hidden_size"]), torch.bfloat16)
    files.plain(f"{prefix}ape", (ratio, pooled), torch.float32)
    files.plain(f"{prefix}norm.weight", (width,), torch.float32, 1.0)


MIMO = {
    **{name: value for name, value in BASE.items() if name != "rms_norm_eps"},
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "attention_projection_layout": "fused_qkv",
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "v_head_dim": 32,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 48,
    "swa_v_head_dim": 32,
    "hybrid_layer_pattern": [0, 1, 0],
    "hybrid_block_size": None,
    "moe_layer_freq": [0, 1, 1],
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "bfloat16",
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "rope_parameters": {
        "partial_rotary_factor": 0.334,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    },
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "sliding_window": 19,
    "sliding_window_size": 19,
    "layernorm_epsilon": 1e-6,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 2},
    "torch_dtype": "bfloat16",
}
MIMO_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "store_dtype": "mxfp4",
    "mxfp4_block_size": 32,
    "ignored_layers": [
        *(f"model.layers.{i}.self_attn.o_proj" for i in range(3)),
        "model.decoder.self_attn.o_proj",
    ],
}


def mimo_v2(directory: Path, windowed_kv_heads: int = 4) -> dict[str, Tensor]:
    """Write files as those of MiMo-V2.6-Flash; return values by the names of transformers.

    Its class of MiMo-V2-Flash has twice the KV heads in layers with a window, whatever the files
    say: of fewer, each is there several times, one beside the other.
    """
    heads = {"swa_num_key_value_heads": windowed_kv_heads}
    config = MIMO | heads | {"quantization_config": MIMO_FP8}
    (directory / "config.json").write_text(json.dumps(config))
    files, hidden = Files(5), 160
    files.plain("model.embed_tokens.weight", (199, hidden), torch.bfloat16, 1.0)
    files.plain("lm_head.weight", (199, hidden), torch.bfloat16)
    files.plain("model.norm.weight", (hidden,), torch.bfloat16, 1.0)
    for layer in range(3):
        is_windowed = MIMO["hybrid_layer_pattern"][layer] == 1
        kv_heads = windowed_kv_heads if is_windowed else MIMO["num_key_value_heads"]
        _mimo_layer(files, f"model.layers.{layer}.", layer, kv_heads=kv_heads)
        for part in "kv" if is_windowed else "":
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            heads_NXH = files.values[name].unflatten(0, (kv_heads, -1))
            repeated = heads_NXH.repeat_interleave(4 // kv_heads, 0)
            files.values[name] = repeated.flatten(0, 1)
    unread = Files(6)
    unread.fp8("model.mtp.layers.0.eh_proj", (hidden, 2 * hidden), ".weight_scale_inv")
    unread.plain("visual.patch_embed.weight", (8, 8), torch.bfloat16)
    unread.plain("audio_encoder.proj.weight", (8, 8), torch.bfloat16)
    unread.plain("speech_embeddings.0.weight", (8, 8), torch.bfloat16)
    save_file(files.stored | unread.stored, directory / "model.safetensors")
    return files.values


def _mimo_layer(files: Files, prefix: str, layer: int, *, kv_heads: int) -> None:
    hidden, experts = MIMO["hidden_size"], MIMO["n_routed_experts"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        files.plain(f"{prefix}{name}.weight", (hidden,), torch.bfloat16, 1.0)
    _mimo_attention(files, f"{prefix}self_attn.", kv_heads=kv_heads)
    if MIMO["hybrid_layer_pattern"][layer]:
        files.plain(f"{prefix}self_attn.attention_sink_bias", (8,), torch.bfloat16, 1.0)
    if not MIMO["moe_layer_freq"][layer]:
        for part, shape in (
            ("gate", (192, hidden)),
            ("up", (192, hidden)),
            ("down", (hidden, 192)),
        ):
            files.fp8(f"{prefix}mlp.{part}_proj", shape, ".weight_scale_inv")
        return
    files.plain(f"{prefix}mlp.gate.weight", (experts, hidden), torch.bfloat16)
    files.plain(f"{prefix}mlp.gate.e_score_correction_bias", (experts,), torch.float32)
    for expert in range(experts):
        for part, shape in (("gate", (96, hidden)), ("up", (96, hidden)), ("down", (hidden, 96))):
            module = f"{prefix}mlp.experts.{expert}.{part}_proj"
            files.fp4(module, shape, ".weight_scale", torch.uint8)


def _mimo_attention(files: Files, prefix: str, *, kv_heads: int) -> None:
    """Queries, keys and values of as many devices as full layers have KV heads, one by one."""
    hidden, num_devices = MIMO["hidden_size"], MIMO["num_key_value_heads"]
    heads, kv_heads = MIMO["num_attention_heads"] // num_devices, kv_heads // num_devices
    rows = {"q": heads * 48, "k": kv_heads * 48, "v": kv_heads * 32}
    total = sum(rows.values())
    assert rows["q"] % 128 or total % 128, "blocks of scales end within parts and devices"
    stored: dict[str, list[Tensor]] = {"weight": [], "weight_scale_inv": []}
    parts: dict[str, list[Tensor]] = {part: [] for part in rows}
    for device in range(num_devices):
        files.fp8(f"device{device}", (total, hidden), ".weight_scale_inv")
        stored["weight"].append(files.stored.pop(f"device{device}.weight"))
        scales = files.stored.pop(f"device{device}.weight_scale_inv")
        stored["weight_scale_inv"].append(scales.float())
        values = files.values.pop(f"device{device}.weight").split(list(rows.values()))
        for part, value in zip(rows, values, strict=True):
            parts[part].append(value)
    for suffix, tensors in stored.items():
        files.stored[f"{prefix}qkv_proj.{suffix}"] = torch.cat(tensors)
    for part, tensors in parts.items():
        files.values[f"{prefix}{part}_proj.weight"] = torch.cat(tensors)
    files.plain(f"{prefix}o_proj.weight", (hidden, 8 * 32), torch.bfloat16)


# What transformers' class of MiMo-V2-Flash has for it.
MIMO_IN_CLASS = {
    **{
        name: value
        for name, value in MIMO.items()
        if not name.startswith(("swa_", "add_", "hybrid_", "moe_layer", "vision_", "attention_p"))
        and name not in {"layernorm_epsilon", "rope_theta", "partial_rotary_factor"}
    },
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        f"{kind}_attention": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": 0.334,
        }
        for kind, theta in (("full", 10_000_000.0), ("sliding", 10_000.0))
    },
}


@pytest.mark.parametrize("windowed_kv_heads", [4, 2], ids=["twice as many", "as many"])
def test_mimo_v2_has_the_tokens_of_its_decoded_weights(
    windowed_kv_heads: int, tmp_path: Path
) -> None:
    values = mimo_v2(tmp_path, windowed_kv_heads)
    model = of_transformers(MIMO_IN_CLASS, values, tmp_path / "decoded")
    expected = [greedy(model, prompt) for prompt in prompts()]
    assert generate(load_decoder(tmp_path), prompts(), NUM_TOKENS) == expected
    assert len({tuple(row) for row in expected}) == len(expected)


def test_queries_keys_and_values_of_mimo_v2_are_decoded_and_experts_are_not(tmp_path: Path) -> None:
    mimo_v2(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    found = {
        re.sub(r"\d+", "N", name): getattr(spec.format_of(name, shape), "name", None)
        for name, shape in model_weights(spec).items()
    }
    parts = ("gate", "up", "down")
    assert {name: form for name, form in found.items() if form is not None} == {
        **{f"model.layers.N.mlp.experts.N.{part}_proj.weight": "mxfp4" for part in parts},
        **{f"model.layers.N.mlp.{part}_proj.weight": "fp8_block" for part in parts},
    }
    assert [layer.attention.num_kv_heads for layer in spec.layers] == [2, 4, 2]
    assert spec.layers[1].attention.sliding_window == 20


def of_transformers(
    config: dict[str, Any], values: dict[str, Tensor], directory: Path
) -> transformers.PreTrainedModel:
    """The model whose weights have these values, in float32."""
    directory.mkdir()
    unquantised = {
        name: value
        for name, value in config.items()
        if name not in {"expert_dtype", "quantization_config", "torch_dtype"}
    }
    (directory / "config.json").write_text(json.dumps(unquantised))
    save_file({name: value.contiguous() for name, value in values.items()},
              directory / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True)
    return model.eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(199, (n,), generator=generator).tolist() for n in (1, 9, 33, 70, 140)]


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()


def test_deepseek_v4_has_the_tokens_of_its_decoded_weights(tmp_path: Path) -> None:
    values = deepseek_v4(tmp_path)
    model = of_transformers(V4, values, tmp_path / "decoded")
    expected = [greedy(model, prompt) for prompt in prompts()]
    assert generate(load_decoder(tmp_path), prompts(), NUM_TOKENS) == expected
    assert len({tuple(row) for row in expected}) == len(expected)


def test_formats_of_deepseek_v4_are_those_of_its_files(tmp_path: Path) -> None:
    deepseek_v4(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    found = {
        re.sub(r"\d+", "N", name): getattr(spec.format_of(name, shape), "name", None)
        for name, shape in model_weights(spec).items()
    }
    assert {name for name, form in found.items() if form == "mxfp4"} == {
        f"model.layers.N.mlp.experts.N.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    attention = ("q_a", "q_b", "kv", "o_a", "o")
    assert {name for name, form in found.items() if form == "fp8_block"} == {
        *(f"model.layers.N.self_attn.{part}_proj.weight" for part in attention),
        "model.layers.N.self_attn.indexer.wq_b.weight",
        *(
            f"model.layers.N.mlp.shared_expert.{part}_proj.weight"
            for part in ("gate", "up", "down")
        ),
    }
