"""Odd configurations of the families with latent attention.

Prompts of `oracle.ROWS` lie on both sides of the length from which on the plain form is used.
"""

from typing import Any

from tests.parity.dense_families import SCALED
from tests.parity.fields import BASE, LINEAR, YARN

_LATENT = BASE | {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
_V2 = _LATENT | {"n_shared_experts": 2, "routed_scaling_factor": 1.0}
_V3 = _LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_GLM = {name: value for name, value in _V3.items() if name != "first_k_dense_replace"}
# With few index heads many scores would be zero, and what is chosen a tie.
_INDEXED = _V3 | {"index_topk": 19, "index_head_dim": 24, "index_n_heads": 16}
_EXPERTS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
_ODD = {
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
_STRETCHED = YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}
_DUPLICATE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
# Streams are four where nothing else is said; sinks are random in every model.
HY_V4 = {name: value for name, value in _INDEXED.items() if name != "first_k_dense_replace"}
HY_V4_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd sizes, 3 streams, chooses from 33 on": {
        **_ODD,
        "hc_mult": 3,
        "index_topk": 33,
        "index_head_dim": 24,
        "index_n_heads": 13,
    },
    "groups, shared indexers, magnitude 1.3": {
        **_EXPERTS,
        "hc_magnitude": 1.3,
        "indexer_types": ["full", "shared", "shared"],
    },
    "yarn, biases, tight limits": {
        "rope_parameters": _DUPLICATE,
        "attention_bias": True,
        "swiglu_limit": 0.4,
    },
    "narrow latent, all sparse, large epsilons, chooses from 40 on": {
        **_NARROW,
        "mlp_layer_types": ["sparse"] * 3,
        "hc_eps": 0.03,
        "rms_norm_eps": 1e-2,
        "index_topk": 40,
    },
    "wide values, top-1, not renormalised, tied": {
        **_WIDE_VALUES,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.7,
        "tie_word_embeddings": True,
    },
    "2 streams, 6 layers, 2 shared experts, linear rope": {
        "hc_mult": 2,
        "num_hidden_layers": 6,
        "n_shared_experts": 2,
        "rope_parameters": LINEAR,
        "index_topk": 64,
    },
}
LATENT_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "deepseek_v2": (
        _V2,
        {
            "plain": {},
            "direct queries, 2 dense layers": {"q_lora_rank": None, "first_k_dense_replace": 2},
            "groups, scaled": {
                **_EXPERTS,
                "topk_method": "group_limited_greedy",
                "routed_scaling_factor": 1.7,
            },
            "odd sizes, no dense layer": {**_ODD, "first_k_dense_replace": 0},
            "stretched yarn, biases": {
                "rope_parameters": _STRETCHED,
                "attention_bias": True,
                "mlp_bias": True,
            },
            "narrow latent, direct queries, tied": {
                **_NARROW,
                "q_lora_rank": None,
                "tie_word_embeddings": True,
            },
        },
    ),
    "deepseek_v3": (
        _V3,
        {
            "plain": {},
            "groups, 2 dense layers, scaled": {
                **_EXPERTS,
                "first_k_dense_replace": 2,
                "routed_scaling_factor": 2.5,
            },
            "odd sizes, direct queries": {**_ODD, "q_lora_rank": None},
            "yarn, biases, not renormalised": {
                "rope_parameters": _DUPLICATE,
                "attention_bias": True,
                "norm_topk_prob": False,
            },
            "narrow latent, pairs apart, no dense layer": {
                **_NARROW,
                "rope_interleave": False,
                "first_k_dense_replace": 0,
            },
            "wide values, 2 shared, linear rope": {
                **_WIDE_VALUES,
                "n_shared_experts": 2,
                "rope_parameters": LINEAR,
            },
        },
    ),
    "mistral4": (
        _V3 | {"rope_parameters": SCALED},
        {
            "plain": {},
            "groups, 2 dense layers, scaled": {
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 2,
                "routed_scaling_factor": 2.5,
            },
            "odd sizes, direct queries": {**_ODD, "q_lora_rank": None},
            "queries scaled every 7 positions, biases": {
                "rope_parameters": SCALED | {"original_max_position_embeddings": 7},
                "attention_bias": True,
            },
            "narrow latent, not renormalised, no dense layer": {
                **_NARROW,
                "norm_topk_prob": False,
                "first_k_dense_replace": 0,
            },
            "wide values, top-1, 2 shared": {
                **_WIDE_VALUES,
                "num_experts_per_tok": 1,
                "n_shared_experts": 2,
            },
            "halves rotated, tied": {"rope_interleave": False, "tie_word_embeddings": True},
        },
    ),
    "glm4_moe_lite": (
        _GLM,
        {
            "plain": {},
            "direct queries, all sparse": {
                "q_lora_rank": None,
                "mlp_layer_types": ["sparse"] * 3,
            },
            "groups, dense layers between": {
                **_EXPERTS,
                "mlp_layer_types": ["dense", "sparse", "dense"],
            },
            "odd sizes, tied, top-1": {
                **_ODD,
                "tie_word_embeddings": True,
                "num_experts_per_tok": 1,
            },
            "narrow latent, biases, scaled": {
                **_NARROW,
                "attention_bias": True,
                "routed_scaling_factor": 0.8,
            },
            "wide values, pairs apart, vocabulary 201": {
                **_WIDE_VALUES,
                "rope_interleave": False,
                "vocab_size": 201,
            },
        },
    ),
    "deepseek_v32": (
        _INDEXED,
        {
            "plain": {},
            "groups, 2 dense layers, chooses from 64 on": {
                **_EXPERTS,
                "first_k_dense_replace": 2,
                "index_topk": 64,
            },
            "odd sizes, tied, odd indexer": {
                **_ODD,
                "tie_word_embeddings": True,
                "index_head_dim": 16,
                "index_n_heads": 13,
                "index_topk": 33,
            },
            "yarn, biases, chooses nothing": {
                "rope_parameters": _DUPLICATE,
                "attention_bias": True,
                "index_topk": 128,
            },
            "narrow latent, listed layers, chooses from 40 on": {
                **_NARROW,
                "index_topk": 40,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
            },
            "wide values, no dense layer": {**_WIDE_VALUES, "first_k_dense_replace": 0},
        },
    ),
    "glm_moe_dsa": (
        _INDEXED,
        {
            "plain": {},
            "groups, shared indexers": {**_EXPERTS, "indexer_types": ["full", "shared", "shared"]},
            "odd sizes, 2 dense layers": {**_ODD, "first_k_dense_replace": 2, "index_topk": 64},
            "not renormalised, biases, every other indexer": {
                "norm_topk_prob": False,
                "attention_bias": True,
                "index_topk_freq": 2,
            },
            "narrow latent, all sparse, pattern": {
                **_NARROW,
                "mlp_layer_types": ["sparse"] * 3,
                "index_topk": 32,
                "index_topk_pattern": "FSF",
            },
            "wide values, top-1, scaled": {
                **_WIDE_VALUES,
                "num_experts_per_tok": 1,
                "routed_scaling_factor": 0.7,
            },
        },
    ),
    "hy_v4": (HY_V4, HY_V4_VARIANTS),
}
