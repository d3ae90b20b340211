"""Odd configurations of the families whose routers have a sigmoid, a bias or shared experts."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, LINEAR, LLAMA3, YARN, longrope

_ROUTED = BASE | {
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_MINIMAX = BASE | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
_ERNIE = BASE | {
    "moe_intermediate_size": 40,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "use_bias": True,
}
_HUNYUAN = BASE | {"head_dim": 16, "num_experts": 5, "moe_topk": 2}
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}

_SOLAR = {name: _ROUTED[name] for name in _ROUTED.keys() - {"first_k_dense_replace"}}
_HY = BASE | {
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "router_scaling_factor": 1.5,
}

SIGMOID_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "solar_open": (
        _SOLAR,
        {
            "plain": {},
            "groups, biases": {**GROUPS, "attention_bias": True},
            "dynamic rope, not renormalised": {
                "rope_parameters": DYNAMIC | {"rope_theta": 1e4},
                "max_position_embeddings": 48,
                "norm_topk_prob": False,
            },
            "2 shared, top-1, 1 layer": {
                "n_shared_experts": 2,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 1,
            },
            "wide heads, tied, vocabulary 201": {
                "head_dim": 24,
                "tie_word_embeddings": True,
                "vocab_size": 201,
            },
            "yarn, one KV head": {"rope_parameters": YARN, "num_key_value_heads": 1},
        },
    ),
    "hy_v3": (
        _HY,
        {
            "plain": {},
            "biases, 2 shared, sums in the model's type": {
                "attention_bias": True,
                "mlp_bias": True,
                "num_shared_experts": 2,
                "enable_moe_fp32_combine": False,
            },
            "listed layers, top-3 of 7": {
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "num_experts": 7,
                "num_experts_per_tok": 3,
            },
            "no dense layer, top-1": {
                "mlp_layer_types": ["sparse"] * 3,
                "num_experts_per_tok": 1,
                "router_scaling_factor": 2.826,
            },
            "wide heads, tied, vocabulary 201": {
                "head_dim": 24,
                "tie_word_embeddings": True,
                "vocab_size": 201,
            },
            "dynamic rope, one KV head": {
                "rope_parameters": DYNAMIC | {"rope_theta": 1e4},
                "max_position_embeddings": 48,
                "num_key_value_heads": 1,
            },
        },
    ),
    "glm4_moe": (
        _ROUTED,
        {
            "plain": {"use_qk_norm": True},
            "groups, 2 dense layers, biases": {
                **GROUPS,
                "first_k_dense_replace": 2,
                "attention_bias": True,
            },
            "a quarter rotated, not renormalised": {
                "partial_rotary_factor": 0.25,
                "norm_topk_prob": False,
            },
            "no dense layer, 2 shared, top-1": {
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
                "num_experts_per_tok": 1,
                "use_qk_norm": True,
            },
            "wide heads, tied, vocabulary 201": {
                "head_dim": 24,
                "tie_word_embeddings": True,
                "vocab_size": 201,
            },
            "yarn, one KV head": {"rope_parameters": YARN, "num_key_value_heads": 1},
        },
    ),
    "dots1": (
        _ROUTED,
        {
            "plain": {"sliding_window": None},
            "groups, windows from layer 1": {
                **GROUPS,
                "sliding_window": 9,
                "max_window_layers": 1,
            },
            "layer types, biases, 2 dense layers": {
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "attention_bias": True,
                "first_k_dense_replace": 2,
            },
            "longrope, MHA": {
                "sliding_window": None,
                "rope_parameters": longrope(16),
                "num_key_value_heads": 6,
            },
            "llama3 rope, 5 experts, top-3": {
                "sliding_window": None,
                "rope_parameters": LLAMA3,
                "n_routed_experts": 5,
                "num_experts_per_tok": 3,
            },
            "tied, not renormalised, heads of 8": {
                "sliding_window": None,
                "tie_word_embeddings": True,
                "norm_topk_prob": False,
                "head_dim": 8,
            },
        },
    ),
    "minimax_m2": (
        _MINIMAX,
        {
            "plain": {},
            "half rotated, top-3": {"rotary_dim": 8, "num_experts_per_tok": 3},
            "MHA, top-1, tied": {
                "num_key_value_heads": 6,
                "num_experts_per_tok": 1,
                "tie_word_embeddings": True,
            },
            "heads of 24, 8 rotated, one KV head": {
                "head_dim": 24,
                "rotary_dim": 8,
                "num_key_value_heads": 1,
            },
            "linear rope, 9 experts, 3 layers": {
                "rope_parameters": LINEAR,
                "num_local_experts": 9,
                "num_hidden_layers": 3,
            },
            "dynamic rope, vocabulary 77": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "vocab_size": 77,
            },
        },
    ),
    "ernie4_5_moe": (
        _ERNIE,
        {
            "plain": {},
            "no dense layer, top-1, tied": {
                "moe_layer_start_index": 0,
                "moe_k": 1,
                "use_bias": False,
            },
            "every second layer, 2 shared": {
                "num_hidden_layers": 4,
                "moe_layer_interval": 2,
                "moe_num_shared_experts": 2,
            },
            "experts in the middle, a high floor": {
                "num_hidden_layers": 4,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": 2,
                "moe_norm_min": 0.7,
                "tie_word_embeddings": False,
            },
            "MHA of 8, none shared, linear rope": {
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "moe_num_shared_experts": 0,
                "rope_parameters": LINEAR,
            },
            "no biases, not tied": {"use_bias": False, "tie_word_embeddings": False},
            "5 experts, top-3, vocabulary 123": {
                "moe_num_experts": 5,
                "moe_k": 3,
                "vocab_size": 123,
            },
        },
    ),
    "hunyuan_v1_moe": (
        _HUNYUAN,
        {
            "plain": {},
            "attention bias, top-1": {"attention_bias": True, "moe_topk": 1},
            "alpha, heads of 24": {
                "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
                "head_dim": 24,
            },
            "tied, 3 layers, top-3": {
                "tie_word_embeddings": True,
                "num_hidden_layers": 3,
                "moe_topk": 3,
            },
            "linear rope, one KV head": {"rope_parameters": LINEAR, "num_key_value_heads": 1},
            "MHA, 7 experts, vocabulary 123": {
                "num_key_value_heads": 6,
                "num_experts": 7,
                "vocab_size": 123,
            },
        },
    ),
}
