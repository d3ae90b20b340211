"""Odd configurations of the families that norm the results of attention and networks."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, LINEAR, LLAMA3, YARN

_FLEX = BASE | {"num_experts": 5, "num_experts_per_tok": 2}

_OLMO3 = BASE | {"sliding_window": 9, "num_hidden_layers": 4}
_GEMMA3 = BASE | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
}
_GEMMA4 = BASE | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
    "final_logit_softcapping": 20.0,
}


def _ropes(full: dict[str, Any], sliding_theta: float) -> dict[str, Any]:
    return {
        "full_attention": {"rope_theta": 1e5} | full,
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
    }


NORM_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "flex_olmo": (
        _FLEX,
        {
            "plain": {},
            "attention bias, top-1, MHA": {
                "attention_bias": True,
                "num_experts_per_tok": 1,
                "num_key_value_heads": 6,
            },
            "renormalised, 7 experts, top-5, tied": {
                "norm_topk_prob": True,
                "num_experts": 7,
                "num_experts_per_tok": 5,
                "tie_word_embeddings": True,
            },
            "yarn, one KV head": {"rope_parameters": YARN, "num_key_value_heads": 1},
            "dynamic rope, wide heads": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "head_dim": 24,
            },
            "gelu, vocabulary 77, 4 layers, large epsilon": {
                "hidden_act": "gelu_pytorch_tanh",
                "vocab_size": 77,
                "num_hidden_layers": 4,
                "rms_norm_eps": 1e-2,
            },
        },
    ),
    "olmo3": (
        _OLMO3,
        {
            "plain": {},
            "yarn for full attention": {"rope_parameters": _ropes(YARN, 5e5)},
            "layer types, MHA, attention bias": {
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "num_hidden_layers": 3,
                "num_key_value_heads": 6,
                "attention_bias": True,
            },
            "two bases, tied, a long window": {
                "rope_parameters": _ropes({"rope_type": "default"}, 1e3),
                "tie_word_embeddings": True,
                "sliding_window": 40,
            },
            "dynamic rope, wide heads, one KV head": {
                "rope_parameters": _ropes(DYNAMIC, 1e4),
                "max_position_embeddings": 48,
                "hidden_size": 96,
                "num_key_value_heads": 1,
            },
            "gelu, vocabulary 77, 5 layers, large epsilon": {
                "hidden_act": "gelu_pytorch_tanh",
                "vocab_size": 77,
                "num_hidden_layers": 5,
                "rms_norm_eps": 1e-2,
            },
        },
    ),
    "gemma3_text": (
        _GEMMA3,
        {
            "plain": {},
            "final soft cap, untied, attention bias": {
                "final_logit_softcapping": 12.0,
                "tie_word_embeddings": False,
                "attention_bias": True,
            },
            "linear rope for full attention, MHA": {
                "rope_parameters": _ropes(LINEAR, 1e4),
                "num_key_value_heads": 6,
            },
            "6 layers by the pattern of 3": {
                "layer_types": None,
                "sliding_window_pattern": 3,
                "num_hidden_layers": 6,
            },
            "llama3 rope, narrow heads, silu, vocabulary 77": {
                "rope_parameters": _ropes(LLAMA3, 2e3),
                "head_dim": 8,
                "hidden_activation": "silu",
                "vocab_size": 77,
            },
            "only full attention, one KV head, large epsilon": {
                "layer_types": ["full_attention"] * 2,
                "num_hidden_layers": 2,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-2,
            },
        },
    ),
    "gemma4_text": (
        _GEMMA4,
        {
            "plain": {},
            "values of their own, top-1": {
                "attention_k_eq_v": False,
                "num_global_key_value_heads": None,
                "top_k_experts": 1,
            },
            "dense, untied, attention bias, 7 layers by the pattern": {
                "layer_types": None,
                "num_hidden_layers": 7,
                "enable_moe_block": False,
                "num_experts": None,
                "top_k_experts": None,
                "tie_word_embeddings": False,
                "attention_bias": True,
            },
            "7 experts, top-4, no soft cap": {
                "num_experts": 7,
                "top_k_experts": 4,
                "final_logit_softcapping": None,
            },
            "other ropes, wide heads, MHA, vocabulary 77": {
                "rope_parameters": _ropes({"rope_type": "proportional", "factor": 2.0}, 2e3),
                "global_head_dim": 40,
                "num_key_value_heads": 6,
                "num_global_key_value_heads": 3,
                "vocab_size": 77,
            },
            "last layer named sliding, all rotated, silu": {
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "rope_parameters": _ropes({"rope_type": "default"}, 1e4),
                "hidden_activation": "silu",
                "global_head_dim": 16,
                "sliding_window": 40,
            },
        },
    ),
}
