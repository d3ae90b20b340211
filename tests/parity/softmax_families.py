"""Odd configurations of the families whose routers are a softmax, and of those without experts."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, LINEAR, LLAMA3, YARN, longrope

_MIXTRAL = BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_QWEN2 = BASE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
_QWEN3 = BASE | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 16,
    "norm_topk_prob": True,
}
_OLMOE = BASE | {"num_experts": 6, "num_experts_per_tok": 3}
_DENSE = BASE | {"head_dim": 16}

SOFTMAX_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "mixtral": (
        _MIXTRAL,
        {
            "plain": {},
            "sliding window, 5 experts, top-3": {
                "sliding_window": 11,
                "num_local_experts": 5,
                "num_experts_per_tok": 3,
            },
            "wide heads, tied, vocabulary 201": {
                "head_dim": 24,
                "tie_word_embeddings": True,
                "vocab_size": 201,
            },
            "top-1, yarn": {"num_experts_per_tok": 1, "rope_parameters": YARN},
            "dynamic rope": {"rope_parameters": DYNAMIC, "max_position_embeddings": 48},
            "longrope": {"rope_parameters": longrope(16), "head_dim": 16},
            "gelu, one KV head, 3 layers": {
                "hidden_act": "gelu",
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
            },
        },
    ),
    "qwen2_moe": (
        _QWEN2,
        {
            "plain": {},
            "dense first layer, sparse step 2": {
                "num_hidden_layers": 4,
                "mlp_only_layers": [0],
                "decoder_sparse_step": 2,
            },
            "windows below layer 2, renormalised": {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
                "num_hidden_layers": 3,
                "norm_topk_prob": True,
            },
            "no qkv bias, tied, top-1": {
                "qkv_bias": False,
                "tie_word_embeddings": True,
                "num_experts_per_tok": 1,
            },
            "llama3 rope, 5 experts, top-3": {
                "rope_parameters": LLAMA3,
                "num_experts": 5,
                "num_experts_per_tok": 3,
            },
            "linear rope, wide heads, vocabulary 77": {
                "rope_parameters": LINEAR,
                "head_dim": 32,
                "vocab_size": 77,
            },
            "layer types": {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        },
    ),
    "qwen3_moe": (
        _QWEN3,
        {
            "plain": {},
            "attention bias, 5 experts, top-1": {
                "attention_bias": True,
                "num_experts": 5,
                "num_experts_per_tok": 1,
            },
            "sliding window, not renormalised, top-3": {
                "use_sliding_window": True,
                "sliding_window": 10,
                "norm_topk_prob": False,
                "num_experts_per_tok": 3,
            },
            "dense layers, tied": {
                "mlp_only_layers": [1],
                "num_hidden_layers": 3,
                "tie_word_embeddings": True,
            },
            "yarn, heads of 8": {"rope_parameters": YARN, "head_dim": 8},
            "longrope, MHA": {
                "rope_parameters": longrope(16),
                "num_key_value_heads": 6,
            },
        },
    ),
    "olmoe": (
        _OLMOE,
        {
            "plain": {},
            "clipped qkv, top-1": {"clip_qkv": 0.7, "num_experts_per_tok": 1},
            "GQA, attention bias, renormalised": {
                "num_key_value_heads": 3,
                "attention_bias": True,
                "norm_topk_prob": True,
            },
            "dynamic rope, 5 experts": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 40,
                "num_experts": 5,
            },
            "linear rope, tied": {"rope_parameters": LINEAR, "tie_word_embeddings": True},
            "llama3 rope, vocabulary 123": {"rope_parameters": LLAMA3, "vocab_size": 123},
        },
    ),
    "llama": (
        _DENSE,
        {
            "plain": {},
            "attention and mlp bias": {"attention_bias": True, "mlp_bias": True},
            "llama3 rope, tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
            "linear rope, heads of 40": {"rope_parameters": LINEAR, "head_dim": 40},
            "dynamic rope": {"rope_parameters": DYNAMIC, "max_position_embeddings": 44},
            "yarn, mscale, not truncated": {
                "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}
            },
            "longrope, tanh gelu": {
                "rope_parameters": longrope(16),
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
    ),
    "qwen3": (
        _DENSE,
        {
            "plain": {},
            "windows from layer 1": {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            "attention bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "yarn with attention factor": {"rope_parameters": YARN | {"attention_factor": 1.3}},
            "dynamic rope, one KV head": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "num_key_value_heads": 1,
            },
            "linear rope, vocabulary 151": {"rope_parameters": LINEAR, "vocab_size": 151},
        },
    ),
    "mistral": (
        _DENSE | {"sliding_window": None},
        {
            "plain": {},
            "sliding window": {"sliding_window": 12},
            # Not a window of 1: the cache of transformers then drops nothing (keys[-1 + 1 :]), and
            # its tokens differ from those that it generates without a cache.
            "window of 2, tied": {"sliding_window": 2, "tie_word_embeddings": True},
            "llama3 rope, relu": {"rope_parameters": LLAMA3, "hidden_act": "relu"},
            "longrope, MHA": {"rope_parameters": longrope(16), "num_key_value_heads": 6},
            "heads of 8, window, yarn": {
                "head_dim": 8,
                "sliding_window": 20,
                "rope_parameters": YARN,
            },
        },
    ),
}
