"""Odd configurations of the families whose layers differ in attention."""

from typing import Any

from tests.parity.fields import BASE, LINEAR, LLAMA3, YARN

# Variants whose config.json is written in the fields of the model's publisher.
AS_PUBLISHED = "as published"
FULL, SLIDING = "full_attention", "sliding_attention"
SPARSE = "minimax_m3_sparse"


def _ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters by type of layer."""
    default = {"rope_type": "default"}
    return {FULL: default | full, SLIDING: default | sliding}


_THETA = {"rope_theta": 10_000.0}
_ROUTED = BASE | {
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "layer_types": [FULL, SLIDING, SLIDING],
    "sliding_window": 20,
}
_GROUPED = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
_MIMO = _ROUTED | {
    "n_routed_experts": 6,
    "v_head_dim": 8,
    "num_key_value_heads": 1,
    "rope_parameters": _ropes(
        {"rope_theta": 100_000.0, "partial_rotary_factor": 0.5},
        {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    ),
}
_MIMO_PUBLISHED = {
    "head_dim": 24,
    "v_head_dim": 16,
    "layer_types": None,
    "rope_parameters": None,
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "sliding_window": 19,
    "sliding_window_size": 19,
    "attention_chunk_size": 19,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "layernorm_epsilon": 1e-5,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": None,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_LLAMA4 = BASE | {
    "head_dim": 16,
    "intermediate_size_mlp": 72,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 3,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 32,
    "floor_scale": 20,
}
_EXAONE = _ROUTED | {"num_experts": 6, "layer_types": [SLIDING, SLIDING, FULL]}
_MINIMAX = BASE | {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": [FULL, SPARSE, SPARSE],
    "dense_intermediate_size": 72,
    "shared_intermediate_size": 24,
    # Rows of the tests have up to three blocks.
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 32,
    "index_topk_blocks": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
    "swiglu_limit": 1.5,
}
_MINIMAX_PUBLISHED = {
    "layer_types": None,
    "mlp_layer_types": None,
    "rope_parameters": None,
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [0, 1, 1],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 16,
        "sparse_block_size": 32,
        "sparse_topk_blocks": 2,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
    },
    "rope_theta": 10000,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "attention_output_gate": False,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "n_shared_experts": 1,
    "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1,
}
_AFMOE = _ROUTED | {"num_experts": 6, "layer_types": [SLIDING, SLIDING, FULL], "mup_enabled": True}
_LAGUNA = _ROUTED | {
    "num_experts": 6,
    "shared_expert_intermediate_size": 24,
    "num_attention_heads_per_layer": [6, 2, 4],
}
_COHERE = BASE | {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "sliding_window": 20,
    "logit_scale": 0.25,
    "tie_word_embeddings": False,
}

HYBRID_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "mimo_v2_flash": (
        _MIMO,
        {
            "plain": {},
            "groups, values wider than keys, biases": {
                **_GROUPED,
                "n_routed_experts": 12,
                "v_head_dim": 24,
                "attention_bias": True,
            },
            "all layers slide, no scale of values": {
                "layer_types": [SLIDING] * 3,
                "attention_value_scale": None,
            },
            "no layer slides, all sparse": {
                "layer_types": [FULL] * 3,
                "mlp_layer_types": ["sparse"] * 3,
                "routed_scaling_factor": 2.5,
            },
            "yarn in full layers, 2 KV heads, tied": {
                "rope_parameters": _ropes(
                    YARN | _THETA, {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
                ),
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
            "window of 2, wide values, not renormalised": {
                "sliding_window": 2,
                "v_head_dim": 72,
                "norm_topk_prob": False,
                "attention_value_scale": 1.5,
            },
            AS_PUBLISHED: _MIMO_PUBLISHED,
        },
    ),
    "llama4_text": (
        _LLAMA4,
        {
            "plain": {},
            "a dense layer between, no norm of queries": {
                "interleave_moe_layer_step": 2,
                "use_qk_norm": False,
            },
            "listed layers, llama3 rope, biases, chunks of 64": {
                "attention_chunk_size": 64,
                "floor_scale": 7,
                "attn_scale": 0.5,
                "moe_layers": [2],
                "no_rope_layers": [0, 1, 1],
                "rope_parameters": LLAMA3 | _THETA,
                "attention_bias": True,
            },
            "no temperature, every second layer rotated": {
                "attn_temperature_tuning": False,
                "floor_scale": 16,
                "no_rope_layer_interval": 2,
            },
            "tied, one KV head, all rotated": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "no_rope_layer_interval": 4,
            },
            "wide heads, vocabulary 201, 5 experts": {
                "head_dim": 24,
                "vocab_size": 201,
                "num_local_experts": 5,
            },
            AS_PUBLISHED: {
                "no_rope_layers": [],
                "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0},
                "rope_theta": 10000.0,
                "output_router_logits": False,
                "router_aux_loss_coef": 0.001,
                "for_llm_compressor": False,
            },
        },
    ),
    "exaone_moe": (
        _EXAONE,
        {
            "plain": {},
            "groups, 2 dense layers, window of 7": {
                **_GROUPED,
                "num_experts": 12,
                "first_k_dense_replace": 2,
                "sliding_window": 7,
            },
            "pattern of 2, no dense layer, 2 shared": {
                "layer_types": None,
                "sliding_window_pattern": 2,
                "first_k_dense_replace": 0,
                "num_shared_experts": 2,
            },
            "no layer rotated, not renormalised": {
                "layer_types": [FULL] * 3,
                "norm_topk_prob": False,
            },
            "dense layers between, llama3 rope, tied": {
                "mlp_layer_types": ["dense", "sparse", "dense"],
                "rope_parameters": LLAMA3 | _THETA,
                "tie_word_embeddings": True,
            },
            "one KV head, linear rope, top-1": {
                "num_key_value_heads": 1,
                "head_dim": 24,
                "rope_parameters": LINEAR | _THETA,
                "num_experts_per_tok": 1,
                "routed_scaling_factor": 0.8,
            },
        },
    ),
    "minimax_m3_vl_text": (
        _MINIMAX,
        {
            "plain": {},
            "no indexer, all sparse": {"layer_types": None, "mlp_layer_types": None},
            "dense layers between, tied, one KV head": {
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "index_n_heads": 1,
            },
            "a tight limit, another gain, own block alone": {
                "swiglu_limit": 0.3,
                "swiglu_alpha": 1.1,
                "index_topk_blocks": 1,
            },
            "whole heads rotated, top-1": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                "num_experts_per_tok": 1,
                "routed_scaling_factor": 0.8,
            },
            "wide heads, yarn, 2 dense layers": {
                "head_dim": 24,
                "index_head_dim": 24,
                "rope_parameters": YARN | _THETA | {"partial_rotary_factor": 0.5},
                "mlp_layer_types": ["dense", "dense", "sparse"],
            },
            AS_PUBLISHED: _MINIMAX_PUBLISHED,
        },
    ),
    "afmoe": (
        _AFMOE,
        {
            "plain": {},
            "plain embeddings, no dense layer, one shared": {
                "mup_enabled": False,
                "num_dense_layers": 0,
                "num_shared_experts": 1,
            },
            "pattern of 2, window of 7, biases": {
                "layer_types": None,
                "global_attn_every_n_layers": 2,
                "sliding_window": 7,
                "attention_bias": True,
            },
            "2 dense layers, tied, top-1": {
                "num_dense_layers": 2,
                "tie_word_embeddings": True,
                "num_experts_per_tok": 1,
            },
            "no layer slides, scaled": {"layer_types": [FULL] * 3, "route_scale": 2.5},
            "all layers slide, wide heads, linear rope": {
                "layer_types": [SLIDING] * 3,
                "head_dim": 24,
                "num_key_value_heads": 3,
                "rope_parameters": LINEAR | _THETA,
            },
        },
    ),
    "laguna": (
        _LAGUNA,
        {
            "plain": {},
            "gates per element, biases": {"gating": "per-element", "attention_bias": True},
            "capped logits of the router, all sparse": {
                "moe_router_logit_softcapping": 1.5,
                "mlp_layer_types": ["sparse"] * 3,
            },
            "yarn in full layers, one KV head": {
                "rope_parameters": _ropes(
                    YARN | _THETA | {"partial_rotary_factor": 0.5},
                    {"rope_theta": 500.0},
                ),
                "num_key_value_heads": 1,
                "num_attention_heads_per_layer": [3, 5, 1],
            },
            "as many heads everywhere, tied, scaled": {
                "num_attention_heads_per_layer": None,
                "gating": "per-head",
                "tie_word_embeddings": True,
                "moe_routed_scaling_factor": 2.5,
            },
            "wide heads, window of 2, top-1": {
                "head_dim": 40,
                "sliding_window": 2,
                "num_experts_per_tok": 1,
                "layer_types": [SLIDING, FULL, SLIDING],
            },
        },
    ),
    "cohere2_moe": (
        _COHERE,
        {
            "plain": {},
            "sigmoid, averaged with 2 shared": {
                "expert_selection_fn": "sigmoid",
                "num_shared_experts": 2,
            },
            "sigmoid, not renormalised, added to a shared expert": {
                "expert_selection_fn": "sigmoid",
                "norm_topk_prob": False,
                "num_shared_experts": 1,
                "shared_expert_combination_strategy": "sum",
            },
            "a dense layer of another size, pattern of 2": {
                "layer_types": None,
                "first_k_dense_replace": 1,
                "sliding_window_pattern": 2,
                "prefix_dense_intermediate_size": 72,
            },
            "rms norms, biases, tied": {
                "rms_norm_eps": 1e-5,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "dense layers slide, one KV head, top-1": {
                "layer_types": None,
                "num_hidden_layers": 4,
                "first_k_dense_replace": 3,
                "prefix_dense_sliding_window_pattern": 2,
                "num_key_value_heads": 1,
                "num_experts_per_tok": 1,
                "rope_theta": 500.0,
            },
        },
    ),
}
