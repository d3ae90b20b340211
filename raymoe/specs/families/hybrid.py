"""Families whose layers differ in attention: windows, ropes, heads, sinks, gates, states."""

import dataclasses
from collections.abc import Mapping

from raymoe.specs.families.rules import (
    NOAUX_TC,
    SIGMOID_EXPERTS,
    TRAINING_FIELDS,
    ClampRule,
    Family,
    MoeRule,
    RecurrentRule,
    RouterRule,
    SharedRule,
)
from raymoe.specs.layers import NormLayout
from raymoe.specs.rope import RopeRule


def _ropes(full: tuple[float, float], sliding: tuple[float, float]) -> Mapping[str, object]:
    """Rope parameters by type of layer: base, and rotated part of a head."""
    return {
        f"{kind}_attention": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": part,
        }
        for kind, (theta, part) in (("full", full), ("sliding", sliding))
    }


_AFTER_SILU = ClampRule(limit="swiglu_limits", offset=0.0, is_after_activation=True)
_OAI_SWIGLU = ClampRule(gain="swiglu_alpha", limit="swiglu_limit")

_GATED_DELTA = Family(
    architecture="Qwen3NextForCausalLM",
    fixed={"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)},
    ignored=TRAINING_FIELDS | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
    rope=RopeRule(is_partial=True, partial_factor=0.25),
    norm="rms_plus_one",
    qk_norm="head",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    gate="sigmoid",
    gate_bias="attention_bias",
    has_layer_types=True,
    recurrent=RecurrentRule(
        kind="gated_delta",
        layer_type="linear_attention",
        num_key_heads="linear_num_key_heads",
        num_heads="linear_num_value_heads",
        key_dim="linear_key_head_dim",
        value_dim="linear_value_head_dim",
        conv_width="linear_conv_kernel_dim",
    ),
    moe=MoeRule(
        num_experts="num_experts",
        expert_hidden="moe_intermediate_size",
        router=RouterRule(renormalize="norm_topk_prob"),
        shared=SharedRule(hidden="shared_expert_intermediate_size", is_gated=True),
        sparse_layers="stepped",
    ),
)
assert _GATED_DELTA.moe is not None, "for the next family"
HYBRID_FAMILIES: Mapping[str, Family] = {
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_moe_text": dataclasses.replace(
        _GATED_DELTA,
        architecture="Qwen3_5MoeForCausalLM",
        fixed={**_GATED_DELTA.fixed, "mlp_only_layers": ([],)},
        rope=RopeRule(is_partial=True, partial_factor=0.25, has_sections=True),
        moe=dataclasses.replace(_GATED_DELTA.moe, router=RouterRule(), sparse_layers="all"),
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        ignored=frozenset({"init_method", "mamba_chunk_size"}),
        fixed={"normalization_function": ("rmsnorm",)},
        rope=RopeRule(rotates_full_layers="position_embedding_type"),
        scale="attention_multiplier",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_layer_types=True,
        recurrent=RecurrentRule(
            kind="mamba2",
            layer_type="linear_attention",
            num_key_heads="mamba_n_groups",
            num_heads="mamba_n_heads",
            key_dim="mamba_d_state",
            value_dim="mamba_d_head",
            conv_width="mamba_d_conv",
            conv_bias="mamba_conv_bias",
            bias="mamba_proj_bias",
        ),
        dense_hidden="shared_intermediate_size",
        module_names=(("linear_attn.", "mamba."),),
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            shared=SharedRule(hidden="shared_intermediate_size"),
        ),
        multipliers=("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM",
        was_published_with_code=True,
        aliases={"layers_block_type": "layer_types"},  # the class has the opposite
        # Only the forward pass of prompts in transformers has the bound time_step_min; training
        # and the published code have none.
        ignored=TRAINING_FIELDS
        | {"chunk_size", "expand", "mamba_proj_bias", "moe_shared_expert_overlap", "norm_eps"}
        | {"mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_logits_to_keep"}
        | {"rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min"}
        | {"use_mamba_kernels"},
        fixed={
            "mamba_ssm_cache_dtype": ("float32",),
            "mlp_hidden_act": ("relu2",),
            "moe_latent_size": (None,),
            "n_shared_experts": (1,),
            "residual_in_fp32": (False,),
            "tie_word_embeddings": (False,),
        },
        activation="relu2",
        rope=RopeRule(rotates_full_layers=False),
        norm="rms_float32",
        norm_eps="layer_norm_epsilon",
        has_layer_types=True,
        layers_without_network="layers_without_network",
        recurrent=RecurrentRule(
            kind="mamba2",
            layer_type="linear_attention",
            num_key_heads="n_groups",
            num_heads="mamba_num_heads",
            key_dim="ssm_state_size",
            value_dim="mamba_head_dim",
            conv_width="conv_kernel",
            conv_bias="use_conv_bias",
            bias="use_bias",
            activation="mamba_hidden_act",
        ),
        moe=dataclasses.replace(
            SIGMOID_EXPERTS,
            shared=SharedRule(hidden="moe_shared_expert_intermediate_size"),
            sparse_layers="listed",
        ),
    ),
    "mimo_v2_flash": Family(
        architecture="MiMoV2FlashForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS | {"attention_chunk_size"},
        fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        rope=RopeRule(
            is_by_layer_type=True,
            is_partial=True,
            partial_factor=0.334,
            parameters=_ropes((5_000_000.0, 0.334), (10_000.0, 0.334)),
        ),
        qkv_bias="attention_bias",
        sinks="windowed",
        value_head_dim="v_head_dim",
        value_scale="attention_value_scale",
        windowed_kv_factor=2,
        windowed_layers="all_but_nth",
        window_step=6,
        starts_with_full_layer=True,
        has_layer_types=True,
        moe=dataclasses.replace(SIGMOID_EXPERTS, shared=None, sparse_layers="listed"),
    ),
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        defaults={"mlp_layer_types": None, "sliding_window": None},
        ignored=frozenset({"cache_implementation", "for_llm_compressor"}),
        fixed={"num_experts_per_tok": (1,)},
        rope=RopeRule(is_interleaved=True, rotates_full_layers=False, kinds=("default", "llama3")),
        qk_norm="unit",
        qk_norm_switch="use_qk_norm",
        norms_full_layers=False,
        is_norm_after_rope=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="named",
        has_layer_types=True,
        context_limit=("max_position_embeddings",),
        dense_hidden="intermediate_size_mlp",
        module_names=(("mlp.", "feed_forward."),),
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            router=RouterRule(scoring="sigmoid", renormalize=False, scales_input=True),
            shared=SharedRule(hidden="intermediate_size"),
            sparse_layers="listed",
        ),
    ),
    "exaone_moe": Family(
        architecture="ExaoneMoeForCausalLM",
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC,
        rope=RopeRule(rotates_full_layers=False),
        qk_norm="head",
        windowed_layers="all_but_nth",
        window_step="sliding_window_pattern",
        has_layer_types=True,
        moe=dataclasses.replace(
            SIGMOID_EXPERTS,
            num_experts="num_experts",
            shared=SharedRule(hidden="moe_intermediate_size", count="num_shared_experts"),
            sparse_layers="listed",
        ),
    ),
    "minimax_m3_vl_text": Family(
        architecture="MiniMaxM3VLForCausalLM",
        was_published_with_code=True,
        published_architectures=("MiniMaxM3SparseForCausalLM", "MiniMaxM3ForCausalLM"),
        nested=("sparse_attention_config",),
        aliases={
            "moe_intermediate_size": "intermediate_size",
            "sparse_attention_config.sparse_attention_freq": "sparse_attention_freq",
            "sparse_attention_config.sparse_block_size": "index_block_size",
            "sparse_attention_config.sparse_topk_blocks": "index_topk_blocks",
        },
        # The fields of the indexer that do not say how many tokens it selects; transformers does
        # not read rotary_dim.
        ignored=TRAINING_FIELDS
        | frozenset(
            {
                "index_head_dim",
                "index_local_blocks",
                "index_n_heads",
                "num_mtp_modules",
                "rotary_dim",
                "sparse_attention_config.sparse_disable_index_value",
                "sparse_attention_config.sparse_index_dim",
                "sparse_attention_config.sparse_init_block",
                "sparse_attention_config.sparse_local_block",
                "sparse_attention_config.sparse_num_index_heads",
                "sparse_attention_config.sparse_score_type",
            }
        ),
        fixed={
            "attention_output_gate": (False,),
            "n_shared_experts": (1,),
            "qk_norm_type": ("per_head",),
            "scoring_func": ("sigmoid",),
            "sparse_attention_config.use_sparse_attention": (True,),
            "use_gemma_norm": (True,),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
        activation="silu",
        defaults={"first_k_dense_replace": 0},
        rope=RopeRule(is_partial=True),
        norm="rms_plus_one",
        qk_norm="head",
        full_layer_types=("full_attention", "minimax_m3_sparse"),
        has_layer_types=True,
        context_limit=("index_topk_blocks", "index_block_size"),
        limited_layer_type="minimax_m3_sparse",
        limited_layers="sparse_attention_freq",
        clamp=_OAI_SWIGLU,
        dense_hidden="dense_intermediate_size",
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            router=RouterRule(
                scoring="sigmoid", scale="routed_scaling_factor", has_selection_bias=True
            ),
            shared=SharedRule(hidden="shared_intermediate_size"),
            sparse_layers="listed",
            sparse_list="moe_layer_freq",
            clamp=_OAI_SWIGLU,
        ),
    ),
    "step3p5": Family(
        architecture="Step3p5ForCausalLM",
        was_published_with_code=True,
        # per_layer_config repeats num_sliding_attention_heads, max_seq_len the context.
        ignored=TRAINING_FIELDS
        | {"mtp_base_layer_idx", "mtp_layer_types", "mtp_mlp_layer_types"}
        | {"max_seq_len", "need_fp32_gate", "per_layer_config"},
        fixed={
            "att_impl_type": ("GQA",),
            "moe_every_n_layer": (1,),
            "moe_layer_offset": (0,),
            "moe_router_activation": ("sigmoid",),
            "norm_expert_weight": (True,),
            "sink": (False,),
            "use_bidirectional_attention": (False,),
            "use_head_wise_attn_gate": (True,),
            "use_moe": (True,),
            "use_moe_router_bias": (True,),
            "use_qk_norm": (True,),
            "use_rope_layers": (True, []),
            "yarn_only_types": ("full_attention",),
            "zero_centered": (True,),
        },
        activation="silu",
        defaults={"first_k_dense_replace": 3},
        rope=RopeRule(
            is_by_layer_type=True,
            is_partial=True,
            parameters=_ropes((10_000.0, 1.0), (10_000.0, 1.0)),
        ),
        norm="rms_plus_one",
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        scale_divisor="query_pre_attn_scalar",
        gate="sigmoid",
        gate_granularity="gating",
        windowed_heads="num_sliding_attention_heads",
        windowed_layers="named",
        has_layer_types=True,
        clamp=dataclasses.replace(_AFTER_SILU, limit="swiglu_limits_shared"),
        moe=MoeRule(
            num_experts="n_routed_experts",
            expert_hidden="moe_intermediate_size",
            router=RouterRule(
                scoring="sigmoid", scale="moe_router_scaling_factor", has_selection_bias=True
            ),
            shared=SharedRule(hidden="share_expert_dim"),
            sparse_layers="listed",
            clamp=_AFTER_SILU,
        ),
    ),
    "afmoe": Family(
        architecture="AfmoeForCausalLM",
        was_published_with_code=True,
        aliases={"num_dense_layers": "first_k_dense_replace"},
        ignored=TRAINING_FIELDS,
        rope=RopeRule(rotates_full_layers=False),
        norm="rms_float32",
        norms=NormLayout(after_attention=True, after_ffn=True),
        scales_embedding="mup_enabled",
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        gate="sigmoid",
        windowed_layers="all_but_nth",
        window_step="global_attn_every_n_layers",
        has_layer_types=True,
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            router=RouterRule(
                scoring="sigmoid",
                min_weight_sum=1e-20,
                scale="route_scale",
                has_selection_bias=True,
            ),
            shared=SharedRule(hidden="moe_intermediate_size", count="num_shared_experts"),
            sparse_layers="after_leading",
        ),
    ),
    "laguna": Family(
        architecture="LagunaForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed={"moe_apply_router_weight_on_input": (False,)},
        rope=RopeRule(
            is_by_layer_type=True,
            is_partial=True,
            parameters=_ropes((500_000.0, 0.5), (10_000.0, 1.0)),
        ),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        gate="softplus",
        gate_granularity="gating",
        heads_by_layer="num_attention_heads_per_layer",
        windowed_layers="named",
        has_layer_types=True,
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            router=RouterRule(
                scoring="sigmoid",
                logit_softcap="moe_router_logit_softcapping",
                scale="moe_routed_scaling_factor",
                has_selection_bias=True,
            ),
            shared=SharedRule(hidden="shared_expert_intermediate_size"),
            sparse_layers="listed",
        ),
    ),
    "cohere2_moe": Family(
        architecture="Cohere2MoeForCausalLM",
        defaults={"first_k_dense_replace": 0},
        rope=RopeRule(
            is_interleaved=True,
            rotates_full_layers=False,
            rotates_dense_layers="prefix_dense_sliding_window_pattern",
        ),
        norm="layer",
        norm_eps="layer_norm_eps",
        rms_norm_eps="rms_norm_eps",
        norms=NormLayout(before_ffn=False),
        is_parallel=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="all_but_nth",
        window_step="sliding_window_pattern",
        dense_window_step="prefix_dense_sliding_window_pattern",
        has_layer_types=True,
        logit_scale="logit_scale",
        dense_hidden="prefix_dense_intermediate_size",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="intermediate_size",
            router=RouterRule(scoring_field="expert_selection_fn", renormalize="norm_topk_prob"),
            shared=SharedRule(
                hidden="intermediate_size",
                count="num_shared_experts",
                combination="shared_expert_combination_strategy",
            ),
            sparse_layers="listed",
        ),
    ),
}
