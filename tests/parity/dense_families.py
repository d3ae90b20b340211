"""Odd configurations of families without experts, for small judges and filters."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, LINEAR, LLAMA3, YARN, longrope

# Queries are scaled anew every 40 positions.
SCALED = YARN | {"original_max_position_embeddings": 40, "llama_4_scaling_beta": 0.3}
SCALED |= {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}
_GRANITE = BASE | {"attention_multiplier": 0.3, "logits_scaling": 2.0}
_PHI = BASE | {"original_max_position_embeddings": 256}
_COHERE = BASE | {"logit_scale": 0.25}
_COMPASS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

DENSE_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "qwen2": (
        BASE,
        {
            "plain": {},
            "tied, one KV head, 3 layers": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
            "windows from layer 1": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
                "num_hidden_layers": 3,
            },
            "layer types": {
                "use_sliding_window": True,
                "sliding_window": 17,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "yarn, gelu": {"rope_parameters": YARN, "hidden_act": "gelu"},
            "dynamic rope, wide heads": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "head_dim": 24,
                "vocab_size": 77,
            },
        },
    ),
    "phi3": (
        _PHI,
        {
            "plain": {},
            "tied, one KV head, vocabulary 77": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "vocab_size": 77,
            },
            "window of 11, 3 layers": {"sliding_window": 11, "num_hidden_layers": 3},
            "half rotated, gelu": {
                "hidden_size": 96,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                },
                "hidden_act": "gelu",
            },
            "rows that outgrow the short factors": {
                "rope_parameters": longrope(8),
                "original_max_position_embeddings": 40,
            },
            "the same, half rotated, a window of 30": {
                "hidden_size": 96,
                "rope_parameters": longrope(8) | {"partial_rotary_factor": 0.5},
                "original_max_position_embeddings": 40,
                "sliding_window": 30,
            },
        },
    ),
    "granite": (
        _GRANITE,
        {
            "plain": {},
            "all multipliers, biases": {
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.6,
                "attention_bias": True,
                "mlp_bias": True,
            },
            "tied, large logits divisor": {"tie_word_embeddings": True, "logits_scaling": 4.0},
            "wide heads, one KV head, 3 layers": {
                "head_dim": 24,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
            "yarn, small scale": {"rope_parameters": YARN, "attention_multiplier": 0.05},
            "linear rope, gelu, vocabulary 77": {
                "rope_parameters": LINEAR,
                "hidden_act": "gelu",
                "vocab_size": 77,
            },
        },
    ),
    "ministral3": (
        BASE | {"head_dim": 16, "rope_parameters": SCALED},
        {
            "plain": {},
            "queries scaled every 7 positions": {
                "rope_parameters": SCALED | {"original_max_position_embeddings": 7}
            },
            "scaled queries without yarn": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 20,
                    "llama_4_scaling_beta": 0.5,
                }
            },
            "window of 13, tied": {"sliding_window": 13, "tie_word_embeddings": True},
            "wide heads, one KV head, 3 layers": {
                "head_dim": 24,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
            "llama3 rope, gelu, vocabulary 77": {
                "rope_parameters": LLAMA3 | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.2},
                "hidden_act": "gelu",
                "vocab_size": 77,
            },
        },
    ),
    "glm4": (
        BASE | {"head_dim": 16},
        {
            "plain": {},
            "whole heads rotated, no biases, tied": {
                "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0},
                "attention_bias": False,
                "tie_word_embeddings": True,
            },
            "yarn, one KV head, wide heads, 3 layers": {
                "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
                "num_key_value_heads": 1,
                "head_dim": 24,
                "num_hidden_layers": 3,
            },
        },
    ),
    "olmo2": (
        BASE,
        {
            "plain": {},
            "as many KV heads as heads, biases, large epsilon": {
                "num_key_value_heads": None,
                "attention_bias": True,
                "rms_norm_eps": 1e-2,
            },
            "llama3 rope, tied, wide heads, one KV head, 3 layers": {
                "rope_parameters": LLAMA3,
                "tie_word_embeddings": True,
                "head_dim": 24,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
        },
    ),
    "smollm3": (
        BASE | {"num_hidden_layers": 4},
        {
            "plain": {"tie_word_embeddings": False},
            "rotated layers as listed, yarn, biases": {
                "no_rope_layers": [0, 1, 0, 1, 1],
                "rope_parameters": YARN,
                "attention_bias": True,
                "mlp_bias": True,
            },
            "windows in layers without rotation, 3 of 5": {
                "no_rope_layer_interval": 3,
                "num_hidden_layers": 5,
                "use_sliding_window": True,
                "sliding_window": 9,
            },
            "windows in rotated layers": {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "no_rope_layers": [1, 0, 1, 1],
                "use_sliding_window": True,
                "sliding_window": 17,
                "num_key_value_heads": 1,
            },
        },
    ),
    "seed_oss": (
        BASE | {"head_dim": 16},
        {
            "plain": {},
            "all biases, tied": {
                "attention_out_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
            "no biases, dynamic rope, one KV head": {
                "attention_bias": False,
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "num_key_value_heads": 1,
            },
        },
    ),
    "ernie4_5": (
        BASE | {"head_dim": 16},
        {
            "plain": {},
            "biases, untied, narrow heads": {
                "use_bias": True,
                "tie_word_embeddings": False,
                "head_dim": 8,
            },
            "linear rope, one KV head, 3 layers": {
                "rope_parameters": LINEAR,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
        },
    ),
    "exaone4": (
        BASE | {"num_hidden_layers": 4, "sliding_window": 9},
        {
            "plain": {},
            "no windows, all rotated, tied": {
                "sliding_window": None,
                "layer_types": ["full_attention"] * 3,
                "num_hidden_layers": 3,
                "tie_word_embeddings": True,
            },
            "layer types, llama3 rope, wide heads, one KV head": {
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "num_hidden_layers": 3,
                "sliding_window_pattern": "GLG",
                "rope_parameters": LLAMA3,
                "head_dim": 24,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-2,
            },
        },
    ),
    "hunyuan_v1_dense": (
        BASE | {"head_dim": 16},
        {
            "plain": {},
            "fixed alpha, biases, tied": {
                "rope_parameters": {"rope_type": "dynamic", "alpha": 40.0, "factor": 1.0},
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "dynamic rope, one KV head, 3 layers": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
        },
    ),
    "internlm3": (
        BASE | {"head_dim": 16},
        {
            "plain": {},
            "dynamic rope, one KV head, tied": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            "narrow heads, vocabulary 77, 3 layers": {
                "head_dim": 8,
                "vocab_size": 77,
                "num_hidden_layers": 3,
            },
        },
    ),
    "iquestcoder": (
        BASE | {"head_dim": 16},
        {
            "plain": {},
            "yarn, one KV head, tied": {
                "rope_parameters": YARN,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            "biases, wide heads, large base, vocabulary 77, 3 layers": {
                "attention_bias": True,
                "mlp_bias": True,
                "head_dim": 24,
                "vocab_size": 77,
                "num_hidden_layers": 3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "cohere": (
        _COHERE,
        {
            "plain": {},
            "dynamic rope, biases, untied, as many KV heads as heads": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "num_key_value_heads": None,
            },
            "wide heads, one KV head, large epsilon, 3 layers": {
                "head_dim": 24,
                "num_key_value_heads": 1,
                "layer_norm_eps": 1e-2,
                "num_hidden_layers": 3,
            },
            "norms of queries and keys, large epsilon": {
                "use_qk_norm": True,
                "layer_norm_eps": 1e-2,
            },
        },
    ),
    "cohere2": (
        _COHERE | {"sliding_window": 9, "num_hidden_layers": 5},
        {
            "plain": {},
            "every second layer full, biases, untied": {
                "sliding_window_pattern": 2,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
            "layer types, linear rope, a long window, one KV head": {
                "layer_types": ["full_attention", "sliding_attention"],
                "num_hidden_layers": 2,
                "rope_parameters": LINEAR,
                "sliding_window": 40,
                "num_key_value_heads": 1,
            },
        },
    ),
    "cohere_compass_text": (
        _COHERE
        | {
            "sliding_window": 9,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"sliding_attention": _COMPASS, "full_attention": None},
        },
        {
            "plain": {},
            "all layers rotated, no scale, untied, biases": {
                "rope_parameters": {
                    "sliding_attention": _COMPASS,
                    "full_attention": YARN | {"rope_theta": 5e5},
                },
                "logit_scale": None,
                "tie_word_embeddings": False,
                "attention_bias": True,
            },
            "only full layers, none rotated, one KV head": {
                "layer_types": None,
                "rope_parameters": {"full_attention": None},
                "num_key_value_heads": 1,
            },
        },
    ),
}
