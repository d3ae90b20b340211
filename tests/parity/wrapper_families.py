"""Odd configurations of models whose text part runs; the other parts are as small as can be."""

from typing import Any

from tests.parity.dense_families import DENSE_FAMILIES, SCALED
from tests.parity.fields import BASE, DYNAMIC, LLAMA3, YARN
from tests.parity.hybrid_families import AS_PUBLISHED, FULL, HYBRID_FAMILIES, SLIDING
from tests.parity.latent_families import HY_V4, HY_V4_VARIANTS
from tests.parity.norm_families import NORM_FAMILIES
from tests.parity.state_families import STATE_FAMILIES

_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1}
_DEEP = _SMALL | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]}
_DEEP |= {"num_position_embeddings": 16}
_AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32}
_AUDIO |= {"output_dim": 48, "downsample_hidden_size": 8, "num_mel_bins": 16}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
_LLAVA = {"hidden_size": 32, "intermediate_size": 32, **_LAYERS}

_EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
_QWEN = BASE | _EXPERTS | {"num_experts": 6, "head_dim": 16}
_GLM = BASE | _EXPERTS | {"head_dim": 16, "n_routed_experts": 6, "num_hidden_layers": 3}
_GLM |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_LATENT = BASE | _EXPERTS
_LATENT |= {"num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 16}
_LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 6, "n_group": 1}
_LATENT |= {"topk_group": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1}
_WIDE = {"head_dim": 24, "vocab_size": 201}


_STEP = BASE | _EXPERTS | {"n_routed_experts": 6, "num_hidden_layers": 3, "head_dim": 16}
_STEP |= {"layer_types": [FULL, SLIDING, SLIDING], "mlp_layer_types": ["dense", "sparse", "sparse"]}
_STEP |= {
    "pad_token_id": 1,
    "num_sliding_attention_heads": 4,
    "sliding_window": 20,
    "share_expert_dim": 24,
}
_STEP_PUBLISHED = {
    "mlp_layer_types": None,
    "num_sliding_attention_heads": None,
    "num_nextn_predict_layers": 1,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
    "moe_layers_enum": "1,2",
    "num_attention_groups": 2,
    "attention_other_setting": {
        "attention_type": SLIDING,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "rope_theta": [500.0, 1e4, 1e4, 1e4],
    "rope_scaling": LLAMA3,
    "yarn_only_types": [FULL],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
    "swiglu_limits": [0.0, 0.0, 0.5, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.3, 0.0],
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "use_moe": True,
    "att_impl_type": "GQA",
    "max_seq_len": 256,
}


def _sections(*sections: int, **rope: Any) -> dict[str, Any]:
    """Rope parameters whose frequencies are divided among three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e4} | rope
    return {"rope_parameters": rope | {"mrope_section": list(sections), "mrope_interleaved": True}}


def _wrapped(
    text: dict[str, Any], variants: dict[str, dict[str, Any]], **outer: Any
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Variants of the text part; `tie_word_embeddings` is the whole's too."""
    common = {"tie_word_embeddings": False, "initializer_range": 0.3, **outer}
    wholes = {
        name: {
            "text_config": text | {"tie_word_embeddings": False} | differences,
            "tie_word_embeddings": differences.get("tie_word_embeddings", False),
        }
        for name, differences in variants.items()
    }
    return common, wholes


def _axes(fields: dict[str, Any]) -> dict[str, Any]:
    """The rope of these fields, whose class wants frequencies divided among three axes."""
    half = fields.get("qk_rope_head_dim", 8) // 2
    rope = fields.get("rope_parameters", {"rope_type": "default"})
    axes = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_parameters": {"rope_theta": 1e4, **rope, "mrope_section": axes}}


_INDEXED, _STATES = "indexed_attention", "linear_attention"
_STREAMS = BASE | _EXPERTS | {"num_key_value_heads": 6, "num_hidden_layers": 4}
_STREAMS |= {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
_STREAMS |= {"n_routed_experts": 6, "linear_num_heads": 4, "linear_head_dim": 16, "hc_mult": 4}
# With few index heads many scores would be zero, and what is chosen a tie.
_STREAMS |= {"index_topk": 16, "index_kpool": 4, "index_head_dim": 24, "index_n_heads": 16}
_STREAMS |= {"layer_types": [_STATES, _STATES, _STATES, _INDEXED]}
_STREAMS |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_STREAMS_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two streams, attention first and twice, biases, all sparse": {
        "hc_mult": 2,
        "num_hidden_layers": 3,
        "layer_types": [_INDEXED, _INDEXED, _STATES],
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["sparse"] * 3,
        "attention_bias": True,
    },
    "three streams divided once, large epsilon, decay without a bound": {
        "hc_mult": 3,
        "hc_sinkhorn_iters": 1,
        "hc_eps": 0.01,
        "rms_norm_eps": 0.1,
        "linear_lower_bound": None,
        "index_topk": 64,
        "index_kpool": 8,
    },
    "groups, scaled, low limits, 2 shared, top-3": {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 0.7,
        "swiglu_limit": 0.3,
        "linear_lower_bound": -0.5,
    },
    "odd sizes, wide convolution, pools of 16, kinds of the class": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "v_head_dim": 11,
        "linear_num_heads": 9,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 6,
        "index_kpool": 16,
        "index_topk": 16,
        "layer_types": None,
        "mlp_layer_types": None,
        "num_hidden_layers": 5,
    },
    "five streams, narrow latent, wide values, not renormalised, tied": {
        "hc_mult": 5,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 32,
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
        "index_kpool": 1,
        "index_topk": 19,
    },
    AS_PUBLISHED: {
        "layer_types": [_STATES, "deepseek_sparse_attention", _STATES, _STATES],
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 24,
            "short_conv_kernel_size": 2,
            "gate_lower_bound": -5.0,
            "kda_layers": [0, 2, 3],
            "full_attn_layers": [1],
        },
        "indexer_types": ["full"] * 4,
        "first_k_dense_replace": 1,
        "head_dim": 0,
        "qk_head_dim": 16,
        "qk_rope_head_dim": 0,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "mhc": True,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-5,
    },
}

_HY_V4_VARIANTS = {
    name: differences | _axes(differences) for name, differences in HY_V4_VARIANTS.items()
}
_QWEN_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": _sections(3, 3, 2),
    "dense first layer, sparse step 2": {
        "num_hidden_layers": 4,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
    },
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "wide heads, one KV head, vocabulary 201": {
        **_WIDE,
        **_sections(4, 4, 4),
        "num_key_value_heads": 1,
    },
    "5 experts, top-3, gelu": {"num_experts": 5, "num_experts_per_tok": 3, "hidden_act": "gelu"},
    "yarn, top-1": {"num_experts_per_tok": 1, **_sections(4, 2, 2, **YARN)},
}

WRAPPER_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "kimi_k25": _wrapped(
        _LATENT | {"model_type": "deepseek_v3"},
        {
            "plain": {},
            "groups, 2 dense layers": {
                "n_routed_experts": 12,
                "n_group": 4,
                "topk_group": 2,
                "first_k_dense_replace": 2,
            },
            "direct queries, tied": {"q_lora_rank": None, "tie_word_embeddings": True},
            "yarn, biases": {
                "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
                "attention_bias": True,
            },
            "no dense layer, top-1": {"first_k_dense_replace": 0, "num_experts_per_tok": 1},
            "narrow latent, vocabulary 77": {
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "vocab_size": 77,
            },
        },
        vision_config=_LLAVA | {"pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=32,
    ),
    "mistral3": _wrapped(
        BASE | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": SCALED},
        {
            "plain": {},
            "Mistral, window of 13": {
                "model_type": "mistral",
                "sliding_window": 13,
                "rope_parameters": None,
            },
            "Mistral-4": {
                **_LATENT,
                "model_type": "mistral4",
                "rope_parameters": SCALED,
                "head_dim": 24,
            },
            "Mistral-4, tied, top-1": {
                **_LATENT,
                "model_type": "mistral4",
                "rope_parameters": SCALED | {"original_max_position_embeddings": 7},
                "head_dim": 24,
                "num_experts_per_tok": 1,
                "tie_word_embeddings": True,
            },
            "tied, one KV head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
            "wide heads, vocabulary 201": _WIDE,
        },
        vision_config=_LLAVA | {"model_type": "pixtral", "image_size": 28, "patch_size": 14},
        image_token_index=500,  # prompts are random tokens of the vocabulary
    ),
    "minimax_m3_vl": _wrapped(
        *HYBRID_FAMILIES["minimax_m3_vl_text"],
        vision_config=_LLAVA | {"image_size": 28, "patch_size": 14},
        projector_hidden_size=32,
    ),
    "step3p7": _wrapped(
        _STEP,
        {
            "plain": {},
            "limits by layer, no window": {
                "layer_types": [FULL] * 3,
                "swiglu_limits": [None, 0.3, 0.5],
                "swiglu_limits_shared": [0.4, 0.0, 0.2],
            },
            "as many heads everywhere, all sparse, another scale": {
                "num_sliding_attention_heads": None,
                "mlp_layer_types": ["sparse"] * 3,
                "query_pre_attn_scalar": 40,
            },
            "ropes by layer, biases, scaled": {
                "rope_parameters": {
                    FULL: {
                        "rope_type": "default",
                        "rope_theta": 500.0,
                        "partial_rotary_factor": 0.5,
                    },
                    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                },
                "attention_bias": True,
                "moe_router_scaling_factor": 2.5,
            },
            "tied, one KV head, window of 2": {
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
                "sliding_window": 2,
            },
            "wide heads, vocabulary 201, top-1": {**_WIDE, "num_experts_per_tok": 1},
            AS_PUBLISHED: _STEP_PUBLISHED,
        },
        vision_config={"width": 32, "layers": 1, "heads": 2, "image_size": 56, "patch_size": 14},
    ),
    "glm5_next": _wrapped(
        _STREAMS, _STREAMS_VARIANTS, vision_config=_SMALL | {"out_hidden_size": 48}
    ),
    "hy_v4_vl": _wrapped(
        HY_V4,
        _HY_V4_VARIANTS,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "max_image_size": 16,
            "out_hidden_size": 48,
            "patch_size": 4,
            **_LAYERS,
        },
    ),
    "qwen3_vl_moe": _wrapped(_QWEN, _QWEN_VARIANTS, vision_config=_DEEP),
    "qwen3_5_moe": _wrapped(*STATE_FAMILIES["qwen3_5_moe_text"], vision_config=_DEEP),
    "qwen4_exp": _wrapped(*STATE_FAMILIES["qwen4_exp_text"], vision_config=_DEEP),
    "qwen3_omni_moe_thinker": _wrapped(
        _QWEN | {"norm_topk_prob": False},
        _QWEN_VARIANTS
        | {
            "dynamic rope, renormalised": {
                "norm_topk_prob": True,
                "max_position_embeddings": 48,
                **_sections(3, 3, 2, **DYNAMIC),
            }
        },
        vision_config=_DEEP,
        audio_config=_AUDIO,
        vision_start_token_id=151652,
    ),
    "glm4v_moe": _wrapped(
        _GLM,
        {
            "plain": {},
            "groups, 2 dense layers, no bias": {
                "n_routed_experts": 12,
                "n_group": 4,
                "topk_group": 2,
                "first_k_dense_replace": 2,
                "attention_bias": False,
            },
            "all rotated, not renormalised": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                    "mrope_section": [2, 3, 3],
                },
                "norm_topk_prob": False,
            },
            "no dense layer, 2 shared, top-1": {
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
                "num_experts_per_tok": 1,
            },
            "tied, vocabulary 77": {"tie_word_embeddings": True, "vocab_size": 77},
            "scaled, one KV head": {"routed_scaling_factor": 2.5, "num_key_value_heads": 1},
        },
        vision_config=_SMALL | {"out_hidden_size": 48, "image_size": 28},
    ),
    "gemma3": _wrapped(
        NORM_FAMILIES["gemma3_text"][0] | {"model_type": "gemma3_text"},
        NORM_FAMILIES["gemma3_text"][1],
        vision_config=_LLAVA | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
    "llama4": _wrapped(
        *HYBRID_FAMILIES["llama4_text"],
        vision_config=_LLAVA
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"image_size": 28, "patch_size": 14},
    ),
    "gemma4": _wrapped(
        NORM_FAMILIES["gemma4_text"][0] | {"model_type": "gemma4_text", "pad_token_id": 0},
        NORM_FAMILIES["gemma4_text"][1],
        vision_config=None,
        audio_config=None,
    ),
    "qwen3_5": _wrapped(*STATE_FAMILIES["qwen3_5_text"], vision_config=_DEEP),
    "exaone4_5": _wrapped(
        DENSE_FAMILIES["exaone4"][0] | {"model_type": "exaone4"},
        DENSE_FAMILIES["exaone4"][1],
        vision_config=_SMALL | {"num_key_value_heads": 1, "out_hidden_size": 48},
        image_token_id=997,  # beyond the vocabulary
        video_token_id=998,
    ),
    "cohere_compass": _wrapped(*DENSE_FAMILIES["cohere_compass_text"], vision_config=_DEEP),
    "nemotron_h_omni": _wrapped(
        STATE_FAMILIES["nemotron_h"][0] | {"model_type": "nemotron_h"},
        STATE_FAMILIES["nemotron_h"][1],
        vision_config=_LLAVA | {"image_size": 28, "patch_size": 14, "video_temporal_patch_size": 2},
        vision_hidden_size=32,
        projector_hidden_size=32,
    ),
}
