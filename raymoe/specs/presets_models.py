"""Model presets for planning without a checkpoint.

Values are from the `config.json` of the publisher's Hugging Face repository, without fields that
change neither computation nor storage.
"""

from collections.abc import Mapping

from raymoe.errors import UnknownOptionError
from raymoe.specs.model import ModelSpec

Config = Mapping[str, object]

_FP8: Config = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_MXFP4: Config = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def _yarn(factor: float, **differences: object) -> Config:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | differences


_MIXTRAL: Config = {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
_QWEN3_MOE: Config = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK_V2: Config = {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "vocab_size": 102400,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK_V3: Config = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
    "quantization_config": _FP8,
}
_GPT_OSS: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "torch_dtype": "bfloat16",
    "quantization_config": _MXFP4,
}

_GATED_DELTA: Config = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
    "vocab_size": 248320,
    "torch_dtype": "bfloat16",
}
_WIDE_DELTA: Config = {
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
MODEL_PRESETS: Mapping[str, Config] = {
    "mixtral-8x7b": {  # mistralai/Mixtral-8x7B-v0.1
        **_MIXTRAL,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x22b": {  # mistralai/Mixtral-8x22B-v0.1
        **_MIXTRAL,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_attention_heads": 48,
        "num_hidden_layers": 56,
        "max_position_embeddings": 65536,
    },
    "dbrx": {  # databricks/dbrx-instruct
        "model_type": "dbrx",
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32768,
        "vocab_size": 100352,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "moe_num_experts": 16,
            "moe_top_k": 4,
            "moe_normalize_expert_weights": 1.0,
        },
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2": {  # deepseek-ai/DeepSeek-V2
        **_DEEPSEEK_V2,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_routed_experts": 160,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
        "rope_scaling": _yarn(40),
    },
    "deepseek-v2-lite": {  # deepseek-ai/DeepSeek-V2-Lite
        **_DEEPSEEK_V2,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": _yarn(40, mscale=0.707, mscale_all_dim=0.707),
    },
    "deepseek-v3": {  # deepseek-ai/DeepSeek-V3
        **_DEEPSEEK_V3,
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": _yarn(40),
        "vocab_size": 129280,
    },
    "kimi-k2": {  # moonshotai/Kimi-K2-Instruct
        **_DEEPSEEK_V3,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(32.0, beta_fast=1.0, beta_slow=1.0),
        "vocab_size": 163840,
    },
    "qwen3-30b-a3b": {  # Qwen/Qwen3-30B-A3B
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
    },
    "qwen3-235b-a22b": {  # Qwen/Qwen3-235B-A22B
        **_QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
    # openai/gpt-oss-20b, openai/gpt-oss-120b
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "glm-4.5-air": {  # zai-org/GLM-4.5-Air
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-5,
        "vocab_size": 151552,
        "torch_dtype": "bfloat16",
    },
    "minimax-m2": {  # MiniMaxAI/MiniMax-M2
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000,
        "vocab_size": 200064,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            **_FP8,
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
    "qwen3-next-80b-a3b": {  # Qwen/Qwen3-Next-80B-A3B-Instruct
        **_GATED_DELTA,
        "model_type": "qwen3_next",
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "qwen3.5-35b-a3b": _GATED_DELTA,  # Qwen/Qwen3.5-35B-A3B, and 3.6
    "qwen3.5-122b-a10b": {  # Qwen/Qwen3.5-122B-A10B
        **_GATED_DELTA,
        **_WIDE_DELTA,
        "hidden_size": 3072,
        "num_hidden_layers": 48,
    },
    "qwen3.5-397b-a17b": {  # Qwen/Qwen3.5-397B-A17B
        **_GATED_DELTA,
        **_WIDE_DELTA,
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
}


def model_preset(name: str) -> ModelSpec:
    """The preset of this name, ignoring case; raises UnknownOptionError with suggestions."""
    if name.lower() not in MODEL_PRESETS:
        raise UnknownOptionError(name, MODEL_PRESETS, "model preset")
    return ModelSpec.from_config(MODEL_PRESETS[name.lower()], name=name.lower())
