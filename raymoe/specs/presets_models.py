"""Model presets for planning without a checkpoint.

Values are from the `config.json` of the publisher's Hugging Face repository, without fields that
change neither computation nor storage. What such a file leaves out stands in `PRESET_DEFAULTS`, so
that a preset says the same with any transformers, and with none.
"""

from collections.abc import Mapping

from raymoe.errors import UnknownOptionError
from raymoe.specs.class_defaults import ClassDefaults
from raymoe.specs.families import MODEL_TYPE_ALIASES
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
_NEMOTRON_3: Config = {
    "model_type": "nemotron_h",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "vocab_size": 131072,
    "torch_dtype": "bfloat16",
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
    "kimi-linear-48b-a3b": {  # moonshotai/Kimi-Linear-48B-A3B-Instruct
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 27) if i % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "model_max_length": 1048576,
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840,
        "torch_dtype": "bfloat16",
    },
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "nemotron-3-nano-30b-a3b": {
        **_NEMOTRON_3,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
    },
    # nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16
    "nemotron-3-super-120b-a12b": {
        **_NEMOTRON_3,
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 128,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
        "routed_scaling_factor": 5.0,
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


_USUAL: Config = {"hidden_act": "silu", "tie_word_embeddings": False}
_NO_BIAS: Config = {"attention_bias": False, "mlp_bias": False}
_DELTA_CLASS: Config = {
    **_USUAL,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
# By model type: what transformers' class says of the fields that the presets of this type leave
# out, where that is not null.
_CLASS_VALUES: Mapping[str, Config] = {
    "mixtral": {**_USUAL, "eos_token_id": 2},
    "dbrx": {"tie_word_embeddings": False},
    "deepseek_v2": {**_USUAL, **_NO_BIAS, "eos_token_id": 2, "rms_norm_eps": 1e-6},
    "deepseek_v3": {**_USUAL, "attention_bias": False, "eos_token_id": 1, "rms_norm_eps": 1e-6},
    "qwen3_moe": {
        **_USUAL,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
    "gpt_oss": _USUAL,
    "glm4_moe": _USUAL,
    "minimax_m2": {**_USUAL, "eos_token_id": 200020, "rms_norm_eps": 1e-6},
    "qwen3_next": _DELTA_CLASS,
    "qwen3_5_moe_text": _DELTA_CLASS,
    "kimi_linear": {**_USUAL, "attention_bias": False, "eos_token_id": 163586},
    "nemotron_h": {
        "eos_token_id": 2,
        "intermediate_size": 21504,
        "mamba_hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_bias": False,
        "use_conv_bias": True,
    },
}
# The other names, in these classes, of fields that the presets have.
_CLASS_ALIASES: Mapping[str, Mapping[str, str]] = {
    "dbrx": {
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    "kimi_linear": {
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
    },
}
PRESET_DEFAULTS: Mapping[str, ClassDefaults] = {
    model_type: ClassDefaults(
        model_type=model_type, values=values, aliases=_CLASS_ALIASES.get(model_type, {})
    )
    for model_type, values in _CLASS_VALUES.items()
}


def model_preset(name: str) -> ModelSpec:
    """The preset of this name, ignoring case; raises UnknownOptionError with suggestions."""
    if name.lower() not in MODEL_PRESETS:
        raise UnknownOptionError(name, MODEL_PRESETS, "model preset")
    config = MODEL_PRESETS[name.lower()]
    model_type = str(config["model_type"])
    defaults = PRESET_DEFAULTS[MODEL_TYPE_ALIASES.get(model_type, model_type)]
    return ModelSpec.from_config(config, name=name.lower(), defaults=defaults)
