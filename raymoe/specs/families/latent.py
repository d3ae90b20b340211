"""Families with latent attention (MLA), by `model_type`."""

import dataclasses
from collections.abc import Mapping

from raymoe.specs.families.rules import (
    NOAUX_TC,
    SHARED,
    SIGMOID,
    SIGMOID_EXPERTS,
    TRAINING_FIELDS,
    ClampRule,
    Family,
    IndexerRule,
    MoeRule,
    RouterRule,
    SharingRule,
    StreamsRule,
    mistral_yarn,
)
from raymoe.specs.layers import NormLayout
from raymoe.specs.rope import RopeRule

# Hy4. The class takes head_dim from the rotated part and a KV head for each head, whatever is said.
_HY_V4 = Family(
    architecture="HYV4ForCausalLM",
    ignored=TRAINING_FIELDS
    | {"first_k_dense_replace", "head_dim", "learnable_sink_init", "num_key_value_heads"},
    fixed=NOAUX_TC
    | {
        "enable_ihc": (True,),
        "enable_lm_head_fp32": (True,),
        "gated_mla": (True,),
        "gating_type": ("elementwise",),
        "index_skip_topk_offset": (None,),
        "index_topk_freq": (None,),
        "index_topk_pattern": (None,),
        "learnable_sink": (True,),
    },
    rope=RopeRule(is_interleaved=True),
    is_latent=True,
    latent_norm_eps="rms_norm_eps",
    indexer=IndexerRule(
        is_interleaved=True,
        rotates_end=True,
        key_norm_eps="rms_norm_eps",
        sharing=SharingRule(),
    ),
    full_layer_types=("indexed_attention", "deepseek_sparse_attention"),
    qkv_bias="attention_bias",
    sinks="all",
    gate="sigmoid",
    streams=StreamsRule(sinkhorn_iterations=None, magnitude="hc_magnitude", merge="weighted"),
    has_float_head=True,
    module_names=(("self_attn.g_proj", "self_attn.linear_gate"),),
    moe=dataclasses.replace(
        SIGMOID_EXPERTS,
        sparse_layers="listed",
        clamp=ClampRule(limit="swiglu_limit", offset=0.0),
    ),
)

LATENT_FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed={
            "moe_layer_freq": (1,),
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax",),
        },
        rope=RopeRule(is_interleaved=True),
        is_latent=True,
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        moe=MoeRule(
            num_experts="n_routed_experts",
            expert_hidden="moe_intermediate_size",
            router=RouterRule(
                renormalize=False,
                scale="routed_scaling_factor",
                group_score="max",
                groups_switch="topk_method",
            ),
            shared=SHARED,
            sparse_layers="after_leading",
        ),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC,
        rope=RopeRule(is_interleaved=True),
        rope_fields=("rope_interleave",),
        is_latent=True,
        qkv_bias="attention_bias",
        moe=SIGMOID_EXPERTS,
    ),
    "mistral4": Family(
        architecture="Mistral4ForCausalLM",
        ignored=TRAINING_FIELDS,
        fixed={"moe_layer_freq": (1,)},
        rope=RopeRule(
            is_interleaved=True,
            is_part_of_head=True,
            kinds=("yarn",),
            has_query_scale=True,
            parameters=mistral_yarn(10_000.0, 128.0, 8192),
        ),
        rope_fields=("rope_interleave",),
        is_latent=True,
        qkv_bias="attention_bias",
        moe=dataclasses.replace(
            SIGMOID_EXPERTS,
            router=dataclasses.replace(SIGMOID, scoring="softmax", has_selection_bias=False),
        ),
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC | {"first_k_dense_replace": (1,)},
        rope=RopeRule(is_interleaved=True),
        rope_fields=("rope_interleave",),
        is_latent=True,
        qkv_bias="attention_bias",
        moe=dataclasses.replace(SIGMOID_EXPERTS, sparse_layers="listed"),
    ),
    "deepseek_v32": Family(
        architecture="DeepseekV32ForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC | {"rope_interleave": (True,)},
        rope=RopeRule(is_interleaved=True),
        is_latent=True,
        indexer=IndexerRule(is_interleaved=False),
        full_layer_types=("indexed_attention", "deepseek_sparse_attention"),
        qkv_bias="attention_bias",
        moe=dataclasses.replace(SIGMOID_EXPERTS, sparse_layers="listed"),
    ),
    "glm_moe_dsa": Family(
        architecture="GlmMoeDsaForCausalLM",
        aliases={"num_experts": "n_routed_experts"},
        # GLM-5 was published with the head_dim of its unrotated part, which nothing reads.
        ignored=TRAINING_FIELDS | {"head_dim", "index_share_for_mtp_iteration"},
        fixed=NOAUX_TC
        | {
            "indexer_rope_interleave": (True,),
            "moe_router_dtype": ("float32",),
            "rope_interleave": (True,),
        },
        defaults={"index_topk_freq": 1, "index_skip_topk_offset": 2},
        rope=RopeRule(is_interleaved=True),
        is_latent=True,
        indexer=IndexerRule(is_interleaved=True, sharing=SharingRule()),
        full_layer_types=("indexed_attention", "deepseek_sparse_attention"),
        qkv_bias="attention_bias",
        moe=dataclasses.replace(SIGMOID_EXPERTS, sparse_layers="listed"),
    ),
    "sarvam_mla": Family(
        architecture="DeepseekV3ForCausalLM",
        was_published_with_code=True,
        published_architectures=("SarvamMLAForCausalLM",),
        # The published head_dim is the width of the cache; nothing reads it, nor q_head_dim.
        ignored=TRAINING_FIELDS | {"head_dim", "q_head_dim"},
        fixed=NOAUX_TC | {"moe_router_enable_expert_bias": (True,), "score_function": ("sigmoid",)},
        rope=RopeRule(is_interleaved=True),
        rope_fields=("rope_interleave",),
        is_latent=True,
        qkv_bias="attention_bias",
        moe=SIGMOID_EXPERTS,
    ),
    "axk1": Family(
        architecture="AXK1ForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC,
        rope=RopeRule(is_interleaved=True),
        rope_fields=("rope_interleave",),
        sparse_norms=NormLayout(after_ffn=True),
        is_latent=True,
        qkv_bias="attention_bias",
        moe=dataclasses.replace(SIGMOID_EXPERTS, sparse_layers="listed"),
    ),
    "hy_v4": _HY_V4,
    "hy_v4_vl_text": dataclasses.replace(
        _HY_V4,
        architecture="HYV4VLForConditionalGeneration",
        rope=RopeRule(is_interleaved=True, has_sections=True),
    ),
    "youtu": Family(
        architecture="YoutuForCausalLM",
        was_published_with_code=True,
        ignored=frozenset({"embedding_initializer_range"}),
        rope=RopeRule(is_interleaved=True),
        rope_fields=("rope_interleave",),
        is_latent=True,
        qkv_bias="attention_bias",
    ),
}
