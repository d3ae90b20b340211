"""Odd configurations of the families whose layers differ most: norms, factors, sinks, limits."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, LINEAR, LLAMA3, YARN, longrope

_GRANITE = BASE | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.7,
}
_PHI = BASE | {"num_local_experts": 5, "sliding_window": None, "router_jitter_noise": 0.1}
_GPT_OSS = BASE | {
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "rope_parameters": YARN | {"truncate": False},
}


def _mscale(head_dim: int, factor: float) -> dict[str, Any]:
    return longrope(head_dim) | {"short_mscale": factor, "long_mscale": factor}


def _dbrx(attention: dict[str, Any], experts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "vocab_size": 199,
        "d_model": 48,
        "n_heads": 6,
        "n_layers": 2,
        "max_seq_len": 256,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4} | attention,
        "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 4, "moe_top_k": 2} | experts,
    } | fields


ODD_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "granitemoe": (
        _GRANITE,
        {
            "plain": {},
            "attention bias, top-1": {"attention_bias": True, "num_experts_per_tok": 1},
            "tied, 3 layers, 7 experts": {
                "tie_word_embeddings": True,
                "num_hidden_layers": 3,
                "num_local_experts": 7,
            },
            "linear rope, MHA": {"rope_parameters": LINEAR, "num_key_value_heads": 6},
            "large factors, one KV head": {
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.05,
                "logits_scaling": 6.0,
                "num_key_value_heads": 1,
            },
            "llama3 rope, gelu, vocabulary 77": {
                "rope_parameters": LLAMA3,
                "hidden_act": "gelu",
                "vocab_size": 77,
            },
        },
    ),
    "granitemoeshared": (
        _GRANITE | {"shared_intermediate_size": 40},
        {
            "plain": {},
            "attention bias, top-1": {"attention_bias": True, "num_experts_per_tok": 1},
            "no shared network, 7 experts": {
                "shared_intermediate_size": 0,
                "num_local_experts": 7,
            },
            "linear rope, MHA, wide shared": {
                "rope_parameters": LINEAR,
                "num_key_value_heads": 6,
                "shared_intermediate_size": 88,
            },
            "large factors, one KV head": {
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.05,
                "logits_scaling": 6.0,
                "num_key_value_heads": 1,
            },
            "llama3 rope, gelu, vocabulary 77": {
                "rope_parameters": LLAMA3,
                "hidden_act": "gelu",
                "vocab_size": 77,
            },
        },
    ),
    "phimoe": (
        _PHI,
        {
            "plain": {},
            "biases everywhere": {"attention_bias": True, "lm_head_bias": True},
            "longrope": {"rope_parameters": _mscale(8, 1.2)},
            "sliding window, longrope of 16, tied": {
                "sliding_window": 11,
                "hidden_size": 96,
                "rope_parameters": _mscale(16, 1.1),
                "tie_word_embeddings": True,
            },
            "hardly any jitter, 8 experts, MHA": {
                "router_jitter_noise": 0.01,
                "num_local_experts": 8,
                "num_key_value_heads": 6,
            },
            "tied with a bias, vocabulary 123, 3 layers": {
                "tie_word_embeddings": True,
                "lm_head_bias": True,
                "vocab_size": 123,
                "num_hidden_layers": 3,
            },
        },
    ),
    "dbrx": (
        {},
        {
            "plain": _dbrx({}, {}),
            "clipped hard, top-1": _dbrx({"clip_qkv": 0.7}, {"moe_top_k": 1}),
            "MHA, clipped at 2": _dbrx({"kv_n_heads": 6, "clip_qkv": 2.0}, {}),
            "7 experts, top-4, 3 layers": _dbrx(
                {}, {"moe_num_experts": 7, "moe_top_k": 4}, n_layers=3
            ),
            "wide heads, one KV head": _dbrx({"kv_n_heads": 1}, {}, d_model=96, n_heads=4),
            "other base, vocabulary 77": _dbrx(
                {"rope_theta": 5e5},
                {"ffn_hidden_size": 37},
                vocab_size=77,
                rope_parameters={"rope_type": "default", "rope_theta": 5e5},
            ),
        },
    ),
    "gpt_oss": (
        _GPT_OSS,
        {
            "plain": {},
            "tight limits, other gain": {"swiglu_limit": 0.6, "swiglu_alpha": 0.9},
            "layer types, heads of 8, top-1": {
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
                "head_dim": 8,
                "num_experts_per_tok": 1,
            },
            "no attention bias, default rope, tied": {
                "attention_bias": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "tie_word_embeddings": True,
            },
            "dynamic rope, MHA, a long window": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "num_key_value_heads": 6,
                "sliding_window": 40,
            },
            "7 experts, top-4, vocabulary 77, 4 layers": {
                "num_local_experts": 7,
                "num_experts_per_tok": 4,
                "vocab_size": 77,
                "num_hidden_layers": 4,
            },
        },
    ),
}
