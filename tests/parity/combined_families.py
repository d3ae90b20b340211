"""Odd configurations of the families that combine the parts of others in another way."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, LINEAR, LLAMA3, YARN, longrope
from tests.parity.hybrid_families import AS_PUBLISHED, FULL, SLIDING
from tests.parity.sigmoid_families import GROUPS

_THETA = {"rope_theta": 10_000.0}
_ROUTED = BASE | {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
}
_WINDOWED = _ROUTED | {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 20}
_KOLIBRI = {name: value for name, value in _WINDOWED.items() if name != "intermediate_size"}
_KOLIBRI |= {"shared_expert_intermediate_size": 24}
_GRANITE = BASE | {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "sliding_window": 20,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.7,
}
_SIGMOID = BASE | {
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
}
_SARVAM_PUBLISHED = {
    "num_experts": 6,
    "num_shared_experts": 1,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "norm_head": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "router_dtype": "fp32",
    "rope_theta": 8_000_000,
    "rope_scaling": None,
}
_LATENT = BASE | {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_MLA = _LATENT | {
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "n_group": 1,
    "topk_group": 1,
}
_ODD_SIZES = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "hidden_size": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 16,
    "v_head_dim": 11,
}
# A latent so narrow that most prompts are attended to in plain form.
_NARROW = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
_WIDE_VALUES = {"kv_lora_rank": 40, "qk_nope_head_dim": 12, "v_head_dim": 32}
_STRETCHED = YARN | _THETA | {"mscale": 1.0, "mscale_all_dim": 1.0}
_SARVAM_MLA_PUBLISHED = {
    "num_experts": 6,
    "num_shared_experts": 1,
    "head_dim": 40,
    "q_head_dim": 24,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "deepseek_yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

COMBINED_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "kolibri1": (
        _KOLIBRI,
        {
            "plain": {},
            "renormalised, window of 7, one KV head": {
                "norm_topk_prob": True,
                "sliding_window": 7,
                "num_key_value_heads": 1,
            },
            "every fifth layer full, top-1": {
                "layer_types": None,
                "num_hidden_layers": 5,
                "num_experts_per_tok": 1,
            },
            "no layer rotated, tied": {"layer_types": [FULL] * 3, "tie_word_embeddings": True},
            "all layers slide, longrope, top-3 of 7": {
                "layer_types": [SLIDING] * 3,
                "rope_parameters": longrope(16),
                "num_experts": 7,
                "num_experts_per_tok": 3,
            },
            "wide heads, yarn, wide shared, vocabulary 201": {
                "head_dim": 24,
                "rope_parameters": YARN | _THETA,
                "shared_expert_intermediate_size": 72,
                "vocab_size": 201,
            },
        },
    ),
    "mellum": (
        _WINDOWED,
        {
            "plain": {},
            "no window, biases, top-1": {
                "layer_types": None,
                "attention_bias": True,
                "num_experts_per_tok": 1,
            },
            "dense layers between, yarn in full layers": {
                "mlp_layer_types": ["dense", "sparse", "dense"],
                "rope_parameters": {
                    FULL: YARN | _THETA | {"attention_factor": 1.2},
                    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
                },
            },
            "not renormalised, window of 2, tied": {
                "norm_topk_prob": False,
                "sliding_window": 2,
                "tie_word_embeddings": True,
            },
            "all layers slide, one KV head, top-3 of 7": {
                "layer_types": [SLIDING] * 3,
                "num_key_value_heads": 1,
                "num_experts": 7,
                "num_experts_per_tok": 3,
            },
            "wide heads, gelu, vocabulary 201": {
                "head_dim": 24,
                "hidden_act": "gelu",
                "vocab_size": 201,
            },
        },
    ),
    "flint": (
        _WINDOWED | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 24},
        {
            "plain": {},
            "layers as they come, biases": {
                "layer_types": None,
                "mlp_only_layers": None,
                "num_hidden_layers": 6,
                "attention_bias": True,
            },
            "every second layer sparse, not renormalised": {
                "mlp_only_layers": [],
                "decoder_sparse_step": 2,
                "norm_topk_prob": False,
            },
            "no layer slides, top-1, tied": {
                "layer_types": [FULL] * 3,
                "num_experts_per_tok": 1,
                "tie_word_embeddings": True,
            },
            "window of 7, one KV head, linear rope": {
                "sliding_window": 7,
                "num_key_value_heads": 1,
                "rope_parameters": LINEAR | _THETA,
            },
            "wide heads, all sparse, top-3 of 7, vocabulary 201": {
                "head_dim": 24,
                "mlp_only_layers": [],
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "vocab_size": 201,
            },
        },
    ),
    "granitemoe_swa": (
        _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "plain": {},
            "a base for each layer, one not rotated, shared network": {
                "layer_rope_theta": [10_000.0, 500.0, 0],
                "shared_intermediate_size": 40,
            },
            "every fourth layer full, biases, top-1": {
                "layer_types": None,
                "num_hidden_layers": 5,
                "attention_bias": True,
                "num_experts_per_tok": 1,
            },
            "no layer rotated, tied, 7 experts": {
                "layer_rope_theta": [0, 0.0, 0],
                "tie_word_embeddings": True,
                "num_local_experts": 7,
            },
            "large factors, one KV head, window of 2": {
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.05,
                "logits_scaling": 6.0,
                "num_key_value_heads": 1,
                "sliding_window": 2,
            },
            "llama3 rope, two bases, gelu, vocabulary 77": {
                "rope_parameters": LLAMA3 | _THETA,
                "layer_rope_theta": [500.0, 10_000.0, 500.0],
                "hidden_act": "gelu",
                "vocab_size": 77,
            },
        },
    ),
    "granite_swa": (
        _GRANITE,
        {
            "plain": {},
            "a base for each layer, one not rotated, biases": {
                "layer_rope_theta": [0, 500.0, 10_000.0],
                "attention_bias": True,
                "mlp_bias": True,
            },
            "every fourth layer full, not tied": {
                "layer_types": None,
                "num_hidden_layers": 5,
                "tie_word_embeddings": False,
            },
            "large factors, MHA, window of 2": {
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.05,
                "logits_scaling": 6.0,
                "num_key_value_heads": 6,
                "sliding_window": 2,
            },
            "yarn, two bases": {
                "rope_parameters": YARN | _THETA,
                "layer_rope_theta": [500.0, 10_000.0, 0],
            },
            "dynamic rope, gelu, vocabulary 77": {
                "rope_parameters": DYNAMIC | _THETA,
                "max_position_embeddings": 48,
                "hidden_act": "gelu",
                "vocab_size": 77,
            },
        },
    ),
    "sarvam_moe": (
        _SIGMOID,
        {
            "plain": {},
            "groups, 2 dense layers, biases": {
                **GROUPS,
                "first_k_dense_replace": 2,
                "attention_bias": True,
            },
            "no norm of queries, not renormalised": {
                "use_qk_norm": False,
                "norm_topk_prob": False,
            },
            "no dense layer, 2 shared, top-1": {
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
                "num_experts_per_tok": 1,
            },
            "wide heads, half rotated, tied": {
                "head_dim": 24,
                "partial_rotary_factor": 0.5,
                "tie_word_embeddings": True,
            },
            "yarn, one KV head, vocabulary 201": {
                "rope_parameters": YARN | _THETA,
                "num_key_value_heads": 1,
                "vocab_size": 201,
            },
            AS_PUBLISHED: _SARVAM_PUBLISHED,
        },
    ),
    "sarvam_mla": (
        _MLA | {"q_lora_rank": None, "first_k_dense_replace": 1},
        {
            "plain": {},
            "groups, 2 dense layers, scaled": {
                **GROUPS,
                "first_k_dense_replace": 2,
                "routed_scaling_factor": 1.2,
            },
            "a latent of queries, biases, not renormalised": {
                "q_lora_rank": 24,
                "attention_bias": True,
                "norm_topk_prob": False,
            },
            "odd sizes, no dense layer": {**_ODD_SIZES, "first_k_dense_replace": 0},
            "narrow latent, pairs apart, tied": {
                **_NARROW,
                "rope_interleave": False,
                "tie_word_embeddings": True,
            },
            "wide values, 2 shared, top-1": {
                **_WIDE_VALUES,
                "n_shared_experts": 2,
                "num_experts_per_tok": 1,
            },
            AS_PUBLISHED: _SARVAM_MLA_PUBLISHED,
        },
    ),
    "axk1": (
        _MLA | {"q_lora_rank": 24},
        {
            "plain": {},
            "groups, all sparse, scaled": {
                **GROUPS,
                "mlp_layer_types": ["sparse"] * 3,
                "routed_scaling_factor": 1.2,
            },
            "odd sizes, dense layers between": {
                **_ODD_SIZES,
                "mlp_layer_types": ["dense", "sparse", "dense"],
            },
            "yarn, biases, not renormalised": {
                "rope_parameters": _STRETCHED,
                "attention_bias": True,
                "norm_topk_prob": False,
            },
            "narrow latent, pairs apart, tied": {
                **_NARROW,
                "rope_interleave": False,
                "tie_word_embeddings": True,
            },
            "wide values, 2 shared, top-1, vocabulary 201": {
                **_WIDE_VALUES,
                "n_shared_experts": 2,
                "num_experts_per_tok": 1,
                "vocab_size": 201,
            },
        },
    ),
    "youtu": (
        _LATENT,
        {
            "plain": {},
            "direct queries, biases, not tied": {
                "q_lora_rank": None,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
            "odd sizes, pairs apart": {**_ODD_SIZES, "rope_interleave": False},
            "yarn, narrow latent": {**_NARROW, "rope_parameters": _STRETCHED},
            "wide values, linear rope, vocabulary 201": {
                **_WIDE_VALUES,
                "rope_parameters": LINEAR | _THETA,
                "vocab_size": 201,
            },
            "gelu, 3 layers": {"hidden_act": "gelu", "num_hidden_layers": 3},
        },
    ),
}
