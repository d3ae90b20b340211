"""Odd configurations of the families in which some layers keep a state instead of KV."""

from typing import Any

from tests.parity.fields import BASE
from tests.parity.hybrid_families import AS_PUBLISHED, SLIDING

FULL, LINEAR = "full_attention", "linear_attention"
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

_DELTA = BASE | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": _MROPE,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "more heads than a head of attention is wide, wide convolution": {
        "linear_num_key_heads": 20,
        "linear_num_value_heads": 20,
        "linear_conv_kernel_dim": 6,
    },
    "one key head, wide values": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "linear_value_head_dim": 40,
    },
    "attention first, tied, biases, top-1": {
        "num_experts_per_tok": 1,
        "layer_types": [FULL, LINEAR, FULL],
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "convolution of 2, one KV head, top-3": {
        "linear_conv_kernel_dim": 2,
        "num_experts_per_tok": 3,
        "linear_key_head_dim": 24,
        "num_key_value_heads": 1,
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    },
    "an interval of 2, whole heads rotated": {
        "layer_types": None,
        "full_attention_interval": 2,
        "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0, "rope_theta": 500.0},
    },
}

_NGRAMS = _DELTA | {
    "hc_count": 3,
    "hc_lowrank": 20,
    "layer_types": [LINEAR, LINEAR, LINEAR, "indexed_attention"],
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 48,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "eos_token_id": 7,
}
_NGRAM_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two tables, the first before all layers, in uneven tensors": {
        "indexer_n_heads": 4,
        "indexer_budget": 80,
        "indexer_compress_ratio": 8,
        "ple_layer_ids": [3, 1],
        "split_ngram_parts": 3,
        "make_ngram_vocab_size_divisible_by": 1,
    },
    "pairs alone, convolution of 6, two streams, silu": {
        "vocab_size": 61,
        "indexer_n_heads": 3,
        "indexer_head_dim": 40,
        "indexer_budget": 32,
        "indexer_compress_ratio": 2,
        "ngram_size": 2,
        "ple_conv_kernel_size": 6,
        "hc_count": 2,
        "output_gate_type": None,
        "norm_topk_prob": False,
    },
    "n-grams of 4, convolution of 2, several ends, another seed": {
        "vocab_size": 23,
        "indexer_n_heads": 9,
        "indexer_budget": 32,
        "indexer_compress_ratio": 32,
        "ngram_size": 4,
        "heads_per_ngram": 2,
        "ple_conv_kernel_size": 2,
        "eos_token_id": [11, 3],
        "seed": 5,
    },
    "wide embeddings, no attention last, tied, one KV head": {
        "ple_embed_dim": 96,
        "indexer_n_heads": 1,
        "indexer_budget": 4,
        "layer_types": [LINEAR, "indexed_attention", LINEAR, LINEAR],
        "ple_layer_ids": [4],
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
    "no n-grams, an interval of 2, top-1": {
        "indexer_budget": 48,
        "indexer_compress_ratio": 16,
        "ple_layer_ids": [],
        "layer_types": None,
        "full_attention_interval": 2,
        "num_experts_per_tok": 1,
    },
    f"one table, four streams, {AS_PUBLISHED}": {
        "hc_count": 4,
        "indexer_n_heads": 4,
        "indexer_budget": 2048,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "split_ngram_parts": 8,
        "mamba_ssm_dtype": "float32",
        "mtp": {"num_hidden_layers": 1},
        "mtp_num_hidden_layers": 1,
        "dtype": "float32",
    },
}

_DENSE_DELTA = {name: value for name, value in _DELTA.items() if "expert" not in name}
_DENSE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention first, tied, biases, wide convolution": {
        "layer_types": [FULL, LINEAR, FULL],
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_conv_kernel_dim": 6,
    },
    "an interval of 2, whole heads rotated, one KV head, odd key heads": {
        "layer_types": None,
        "full_attention_interval": 2,
        "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0, "rope_theta": 500.0},
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
    },
}

MAMBA, ATTENTION = "mamba", "attention"  # names before transformers 5
_GRANITE = BASE | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [MAMBA, MAMBA, ATTENTION, MAMBA],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "shared_intermediate_size": 24,
    "attention_multiplier": 0.3,
    "mamba_n_heads": 6,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
CONV = "conv"
_LFM2 = BASE | {
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "moe_intermediate_size": 40,
    "layer_types": [CONV, CONV, FULL, CONV],
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_LFM2_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide convolution with biases": {"conv_L_cache": 7, "conv_bias": True},
    "convolution of 2, attention first, tied": {
        "conv_L_cache": 2,
        "layer_types": [FULL, CONV, CONV],
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "all experts chosen, no bias of experts, not renormalised": {
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 0.4,
    },
    "top-1, scaled, no dense layer": {
        "num_experts_per_tok": 1,
        "routed_scaling_factor": 2.5,
        "num_dense_layers": 0,
    },
    "hidden size of 52, one KV head, attention last": {
        "hidden_size": 52,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "layer_types": [CONV, CONV, CONV, FULL],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "two layers of attention, all dense but the last": {
        "layer_types": [CONV, FULL, FULL, CONV],
        "num_dense_layers": 3,
        "conv_bias": True,
    },
}

_LFM2_DENSE = {
    name: value
    for name, value in _LFM2.items()
    if "expert" not in name and name != "num_dense_layers"
}
_LFM2_DENSE_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "width as written, wide convolution with biases, tied": {
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 72,
        "conv_L_cache": 7,
        "conv_bias": True,
        "tie_word_embeddings": True,
    },
    "width multiplied, layers by their numbers, one KV head": {
        "block_ffn_dim_multiplier": 1.3,
        "block_multiple_of": 8,
        "layer_types": None,
        "full_attn_idxs": [0, 2],
        "num_key_value_heads": 1,
    },
}
_LFM3 = BASE | {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "sliding_window": 9,
    "tie_word_embeddings": False,
}
_LFM3_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows first, a convolution of 3 with biases, biases, tied": {
        "layer_types": [SLIDING, SLIDING, CONV, FULL],
        "num_hidden_layers": 4,
        "conv_L_cache": 3,
        "conv_bias": True,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "other ropes, wide heads, one KV head, a long window": {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            FULL: {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
        "layer_types": [CONV, FULL, SLIDING],
        "num_hidden_layers": 3,
        "head_dim": 24,
        "num_key_value_heads": 1,
        "sliding_window": 40,
        "norm_eps": 1e-2,
    },
}

_NEMOTRON = {name: value for name, value in BASE.items() if name != "num_hidden_layers"} | {
    "head_dim": 16,
    "hybrid_override_pattern": "MEM*EM-",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "time_step_min": 1e-30,  # a bound that transformers has for prompts alone
}

_LATENT_VARIANTS: dict[str, dict[str, Any]] = {
    "latent experts": {"moe_latent_size": 32},
    "narrow latent, one expert, no bias of the convolution": {
        "moe_latent_size": 8,
        "num_experts_per_tok": 1,
        "use_conv_bias": False,
        "hybrid_override_pattern": "ME*EME",
    },
    "latent wider than the hidden state, groups of experts, scaled, top-3": {
        "moe_latent_size": 72,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
    },
    "latent experts, attention first, biases, not renormalised": {
        "moe_latent_size": 24,
        "hybrid_override_pattern": "*EM*-ME",
        "use_bias": True,
        "norm_topk_prob": False,
    },
    "latent as wide as the hidden state, all experts chosen": {
        "moe_latent_size": 48,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 8,
    },
    "odd latent, odd widths of experts": {
        "moe_latent_size": 20,
        "moe_intermediate_size": 36,
        "moe_shared_expert_intermediate_size": 28,
        "hidden_size": 52,
        "n_groups": 4,
    },
}

_KIMI_DELTA = {
    "kda_layers": [1, 2, 4],
    "full_attn_layers": [3],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_KIMI = BASE | {
    "num_key_value_heads": 6,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 40,
    "linear_attn_config": _KIMI_DELTA,
}
_KIMI_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention first, latent queries, biases, no dense layer": {
        "num_hidden_layers": 3,
        "linear_attn_config": _KIMI_DELTA | {"kda_layers": [2], "full_attn_layers": [1, 3]},
        "q_lora_rank": 24,
        "attention_bias": True,
        "first_k_dense_replace": 0,
    },
    "more heads than attention has, wide convolution, 2 dense layers": {
        "linear_attn_config": _KIMI_DELTA
        | {"num_heads": 9, "head_dim": 8, "short_conv_kernel_size": 6},
        "first_k_dense_replace": 2,
    },
    "wide heads, convolution of 2, one expert, not renormalised": {
        "linear_attn_config": _KIMI_DELTA
        | {"num_heads": 2, "head_dim": 40, "short_conv_kernel_size": 2},
        "num_experts_per_token": 1,
        "moe_renormalize": False,
    },
    "groups of experts, scaled, top-3, two shared": {
        "num_experts": 8,
        "num_expert_group": 4,
        "topk_group": 2,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "routed_scaling_factor": 2.446,
    },
    "layers of the class, sizes without an object, listed networks": {
        "linear_attn_config": {},
        "linear_num_heads": 3,
        "linear_head_dim": 24,
        "num_hidden_layers": 6,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense", "sparse"],
    },
    "one head, odd sizes of attention": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 16,
        "v_head_dim": 11,
        "linear_attn_config": _KIMI_DELTA | {"num_heads": 1, "head_dim": 32},
    },
    AS_PUBLISHED: {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        "first_k_dense_replace": 1,
        "head_dim": 8,  # hidden size by heads, of which nothing is
        "hidden_act": "silu",
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "use_grouped_topk": True,
    },
}

_LING = BASE | {
    "num_key_value_heads": 6,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_group_size": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
_LING_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention first, latent queries, biases, no dense layer": {
        "layer_types": [FULL, LINEAR, FULL],
        "num_hidden_layers": 3,
        "q_lora_rank": 24,
        "attention_bias": True,
        "first_k_dense_replace": 0,
    },
    "wide heads, wide convolution, a near bound, two shared": {
        "head_dim": 40,
        "short_conv_kernel_size": 6,
        "kda_lower_bound": -0.5,
        "num_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    },
    "no bound, convolution of 2, one expert, not renormalised, no groups": {
        "kda_safe_gate": False,
        "short_conv_kernel_size": 2,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
    "odd sizes of attention, scaled, top-3, listed networks": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 24,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 16,
        "v_head_dim": 11,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 0.7,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    },
    "narrow latent, prompts in both forms, yarn": {
        "layer_group_size": 2,
        "kv_lora_rank": 64,
        "v_head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale_all_dim": 1.0,
        },
    },
    AS_PUBLISHED: {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config",
            "AutoModel": "modeling_bailing_moe_v3.BailingMoeV3Model",
            "AutoModelForCausalLM": "modeling_bailing_moe_v3.BailingMoeV3ForCausalLM",
        },
        "embedding_dropout": 0.0,
        "expert_swiglu_limit_list": None,
        "gated_attention_proj_granularity_type": "head_wise",
        "group_norm_size": 1,
        "hidden_act": "silu",
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "linear_silu": True,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 40,
        "mtp_use_kda": False,
        "no_kda_lora": True,
        "num_kv_heads_for_linear_attn": 0,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "pregate_enabled": True,
        "qk_head_dim": 24,
        "rope_interleave": True,
        "rope_parameters": {
            "partial_rotary_factor": 0.5,
            "rope_theta": 6000000,
            "rope_type": "default",
        },
        "rope_theta": 6000000,
        "rotary_dim": 8,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "share_expert_swiglu_limit_list": None,
        "short_conv_kernel_size": 4,
        "topk_method": "noaux_tc",
        "use_kda_lora": False,
        "use_mla_nope": False,
        "use_qk_norm": True,
    },
}

STATE_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "qwen3_next": (
        _DELTA,
        _VARIANTS
        | {
            "dense layers, not renormalised": {
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
            }
        },
    ),
    "qwen3_5_moe_text": (_DELTA, _VARIANTS),
    "qwen4_exp_text": (_NGRAMS, _NGRAM_VARIANTS),
    "nemotron_h": (
        _NEMOTRON,
        {
            "plain": {},
            "one group, wide convolution, no bias of it, states in turn": {
                "hybrid_override_pattern": "MMM*EMM",
                "n_groups": 1,
                "conv_kernel": 6,
                "use_conv_bias": False,
            },
            "attention first, biases, not renormalised": {
                "hybrid_override_pattern": "*EM*-ME",
                "use_bias": True,
                "norm_topk_prob": False,
            },
            "groups of experts, scaled, top-3": {
                "n_routed_experts": 8,
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 3,
                "routed_scaling_factor": 2.5,
            },
            "no experts, wide states, one KV head": {
                "hybrid_override_pattern": "M-M-*-",
                "ssm_state_size": 40,
                "mamba_head_dim": 24,
                "num_key_value_heads": 1,
            },
            "as many groups as heads, convolution of 2, one expert": {
                "hybrid_override_pattern": "ME*EME",
                "n_groups": 4,
                "conv_kernel": 2,
                "num_experts_per_tok": 1,
                "intermediate_size": 72,
            },
        }
        | _LATENT_VARIANTS,
    ),
    "granitemoehybrid": (
        _GRANITE,
        {
            "plain": {},
            "groups of heads, wide convolution, no bias of it": {
                "mamba_n_groups": 3,
                "mamba_d_conv": 6,
                "mamba_conv_bias": False,
            },
            "rope, attention first, biases, tied": {
                "position_embedding_type": "rope",
                "layer_types": [ATTENTION, MAMBA, ATTENTION],
                "num_hidden_layers": 3,
                "attention_bias": True,
                "mamba_proj_bias": True,
                "tie_word_embeddings": True,
            },
            "no experts, wide states": {
                "num_local_experts": 0,
                "mamba_d_state": 40,
                "mamba_n_heads": 2,
                "mamba_n_groups": 2,
            },
            "large factors, one expert, one KV head, convolution of 2": {
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.05,
                "logits_scaling": 6.0,
                "num_experts_per_tok": 1,
                "num_key_value_heads": 1,
                "mamba_d_conv": 2,
            },
            "attention last, expanded by 1, 7 experts": {
                "layer_types": [MAMBA, MAMBA, ATTENTION],
                "num_hidden_layers": 3,
                "mamba_expand": 1,
                "mamba_n_heads": 3,
                "num_local_experts": 7,
            },
        },
    ),
    "lfm2_moe": (_LFM2, _LFM2_VARIANTS),
    "kimi_linear": (_KIMI, _KIMI_VARIANTS),
    "qwen3_5_text": (_DENSE_DELTA, _DENSE_VARIANTS),
    "lfm2": (_LFM2_DENSE, _LFM2_DENSE_VARIANTS),
    "lfm3": (_LFM3, _LFM3_VARIANTS),
    "bailing_hybrid": (_LING, _LING_VARIANTS),
}
