"""Families with grouped-query attention, by `model_type`."""

import dataclasses
from collections.abc import Mapping

from raymoe.specs.families.rules import (
    NOAUX_TC,
    SIGMOID_EXPERTS,
    TRAINING_FIELDS,
    ClampRule,
    Family,
    MoeRule,
    RouterRule,
    SharedRule,
    mistral_yarn,
)
from raymoe.specs.layers import NormLayout
from raymoe.specs.rope import RopeRule

RESULTS_ONLY = NormLayout(
    before_attention=False, after_attention=True, before_ffn=False, after_ffn=True
)
_GRANITE = ("embedding_multiplier", "residual_multiplier", "logits_scaling")

INPUTS_AND_RESULTS = NormLayout(after_attention=True, after_ffn=True)

DENSE_FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="from_max",
        is_window_switched=True,
        has_layer_types=True,
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        rope=RopeRule(
            is_by_layer_type=True,
            has_old_form=True,
            parameters={f"{kind}_attention": {} for kind in ("full", "sliding")},
        ),
        norm="rms_float32",
        norms=RESULTS_ONLY,
        qk_norm="full",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="all_but_nth",
        window_step=4,
        has_layer_types=True,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        aliases={"hidden_activation": "hidden_act"},
        defaults={"sliding_window_pattern": 6},
        ignored=frozenset({"_sliding_window_pattern", "cache_implementation"}),
        fixed={
            "attn_logit_softcapping": (None,),  # transformers does not apply it
            "use_bidirectional_attention": (False, None),
        },
        rope=RopeRule(
            is_by_layer_type=True, has_old_form=True, windowed_theta="rope_local_base_freq"
        ),
        norm="rms_plus_one",
        norms=INPUTS_AND_RESULTS,
        qk_norm="head",
        scale_divisor="query_pre_attn_scalar",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="all_but_nth",
        window_step="sliding_window_pattern",
        has_layer_types=True,
        scales_embedding=True,
        rounds_embedding_scale=True,
        logit_softcap="final_logit_softcapping",
    ),
    "mistral": Family(architecture="MistralForCausalLM", windowed_layers="all"),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        windowed_layers="from_max",
        is_window_switched=True,
        has_layer_types=True,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        was_published_with_code=True,
        rope=RopeRule(is_partial=True, kinds=("default", "longrope"), restarts=True),
        windowed_layers="all",
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        scale="attention_multiplier",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        multipliers=_GRANITE,
    ),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        rope=RopeRule(has_query_scale=True, parameters=mistral_yarn(1_000_000.0, 16.0, 16384)),
        windowed_layers="all",
    ),
}


_OPTIONAL_RENORMALIZE = RouterRule(renormalize="norm_topk_prob")

MOE_FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        moe=MoeRule(num_experts="num_local_experts", expert_hidden="intermediate_size"),
        windowed_layers="all",
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            router=_OPTIONAL_RENORMALIZE,
            shared=SharedRule(hidden="shared_expert_intermediate_size", is_gated=True),
            sparse_layers="stepped",
        ),
        windowed_layers="even_below_max",
        is_window_switched=True,
        has_layer_types=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fixed={"shared_expert_intermediate_size": (0,), "use_qk_norm": (True,)},
        ignored=frozenset({"max_window_layers"}),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            router=_OPTIONAL_RENORMALIZE,
            sparse_layers="stepped",
        ),
        windowed_layers="all",
        is_window_switched=True,
    ),
    "qwen3_vl_moe_text": Family(
        architecture="Qwen3VLMoeTextForCausalLM",
        fixed={"norm_topk_prob": (True,)},
        rope=RopeRule(has_sections=True),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            sparse_layers="stepped",
        ),
    ),
    "qwen3_omni_moe_text": Family(
        architecture="Qwen3OmniMoeTextForCausalLM",
        fixed={"shared_expert_intermediate_size": (0, None)},
        rope=RopeRule(has_sections=True),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            router=_OPTIONAL_RENORMALIZE,
            sparse_layers="stepped",
        ),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        clip="clip_qkv",
        qk_norm="full",
        needs_full_width=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="intermediate_size",
            router=_OPTIONAL_RENORMALIZE,
        ),
    ),
    "flex_olmo": Family(
        architecture="FlexOlmoForCausalLM",
        norm="rms_float32",
        norms=RESULTS_ONLY,
        qk_norm="full",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="intermediate_size",
            router=_OPTIONAL_RENORMALIZE,
        ),
    ),
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        aliases={"hidden_activation": "hidden_act"},
        defaults={"global_head_dim": 512, "num_global_key_value_heads": None},
        # Fields of layers that share keys and values, of embeddings for each layer, and of images.
        ignored=frozenset({"use_double_wide_mlp", "vocab_size_per_layer_input"}),
        fixed={
            "hidden_size_per_layer_input": (0, None),
            "num_kv_shared_layers": (0, None),
            "use_bidirectional_attention": (None, False, "vision"),
        },
        rope=RopeRule(
            is_by_layer_type=True,
            parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
        ),
        norm="rms_float32",
        norms=INPUTS_AND_RESULTS,
        qk_norm="head",
        norms_values=True,
        scale=1.0,
        full_head_dim="global_head_dim",
        full_kv_heads="num_global_key_value_heads",
        full_values_are_keys="attention_k_eq_v",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="all_but_nth",
        window_step=6,
        ends_with_full_layer=True,
        has_layer_types=True,
        scales_embedding=True,
        rounds_embedding_scale=True,
        has_layer_scalars=True,
        logit_softcap="final_logit_softcapping",
        module_names=(("mlp.experts.", "experts."), ("mlp.shared_expert.", "mlp.")),
        moe=MoeRule(
            num_experts="num_experts",
            switch="enable_moe_block",
            expert_hidden="moe_intermediate_size",
            top_k="top_k_experts",
            router=RouterRule(has_input_norm=True, has_expert_scales=True),
            shared=SharedRule(hidden="intermediate_size"),
            has_branch_norms=True,
        ),
    ),
    "dbrx": Family(
        architecture="DbrxForCausalLM",
        was_published_with_code=True,
        nested=("attn_config", "ffn_config"),
        aliases={
            "attn_config.kv_n_heads": "num_key_value_heads",
            "attn_config.clip_qkv": "clip_qkv",
            "attn_config.rope_theta": "rope_theta",
            "ffn_config.ffn_hidden_size": "intermediate_size",
            "ffn_config.moe_num_experts": "num_local_experts",
            "ffn_config.moe_top_k": "num_experts_per_tok",
        },
        defaults={"hidden_act": "silu"},
        # transformers overwrites ffn_config.hidden_size; the others concern training, or repeat
        # fields of the model in nested configurations.
        ignored=frozenset(
            {
                "attn_config.tie_word_embeddings",
                "ffn_config.hidden_size",
                "ffn_config.moe_jitter_eps",
                "ffn_config.moe_loss_weight",
                "ffn_config.tie_word_embeddings",
            }
        ),
        fixed={
            "ffn_config.ffn_act_fn": ({"name": "silu"}, None),
            "ffn_config.moe_normalize_expert_weights": (1,),
            "ffn_config.uniform_expert_assignment": (False,),
            "head_dim": (None,),
            "hidden_act": ("silu",),
            "rms_norm_eps": (1e-5,),
            "tie_word_embeddings": (False,),
        },
        clip="clip_qkv",
        norm="layer",
        norm_eps=1e-5,
        moe=MoeRule(num_experts="num_local_experts", expert_hidden="intermediate_size"),
    ),
    "phimoe": Family(
        architecture="PhimoeForCausalLM",
        was_published_with_code=True,
        published_architectures=("PhiMoEForCausalLM",),
        ignored=frozenset({"input_jitter_noise"}),  # training only
        fixed={"num_experts_per_tok": (2,)},
        rope=RopeRule(has_mscale=True, kinds=("default", "longrope")),
        norm="layer",
        has_norm_bias=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_bias="lm_head_bias",
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            router=RouterRule(scoring="sparsemixer", jitter="router_jitter_noise"),
        ),
        windowed_layers="all",
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        aliases={"experts_per_token": "num_experts_per_tok"},
        # Constants of the model code before transformers 5.18.
        defaults={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        ignored=frozenset({"initial_context_length"}),  # repeats a rope field
        rope=RopeRule(
            parameters={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        sinks="all",
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            router=RouterRule(has_bias=True),
            has_bias=True,
            clamp=ClampRule(gain="swiglu_alpha", limit="swiglu_limit"),
        ),
        windowed_layers="even",
        has_layer_types=True,
    ),
    "hunyuan_v1_moe": Family(
        architecture="HunYuanMoEV1ForCausalLM",
        ignored=frozenset({"eod_token_id"}),
        rope=RopeRule(has_alpha=True),
        qk_norm="head",
        is_norm_after_rope=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_experts",
            top_k="moe_topk",
            expert_hidden="intermediate_size",
            shared=SharedRule(hidden="intermediate_size"),
        ),
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        scale="attention_multiplier",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(num_experts="num_local_experts", expert_hidden="intermediate_size"),
        multipliers=_GRANITE,
    ),
    "granitemoeshared": Family(
        architecture="GraniteMoeSharedForCausalLM",
        scale="attention_multiplier",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            shared=SharedRule(hidden="shared_intermediate_size"),
        ),
        multipliers=_GRANITE,
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC,
        rope=RopeRule(is_partial=True, partial_factor=0.5),
        qk_norm="head",
        qk_norm_switch="use_qk_norm",
        qkv_bias="attention_bias",
        moe=SIGMOID_EXPERTS,
    ),
    "glm4v_moe_text": Family(
        architecture="Glm4vMoeTextForCausalLM",
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC | {"use_qk_norm": (False,)},
        rope=RopeRule(is_partial=True, partial_factor=0.5, has_sections=True),
        qkv_bias="attention_bias",
        moe=SIGMOID_EXPERTS,
    ),
    "solar_open": Family(
        architecture="SolarOpenForCausalLM",
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC,
        qkv_bias="attention_bias",
        moe=dataclasses.replace(SIGMOID_EXPERTS, sparse_layers="all"),
    ),
    "hy_v3": Family(
        architecture="HYV3ForCausalLM",
        aliases={"expert_hidden_dim": "moe_intermediate_size"},
        # Where sums are rounded, which transformers reads or leaves to the type of the model.
        ignored=TRAINING_FIELDS
        | {"enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"}
        | {"eod_token_id", "use_grouped_mm"},
        fixed={
            "first_k_dense_replace": (1,),
            "moe_router_enable_expert_bias": (True,),
            "moe_router_use_sigmoid": (True,),
            "qk_norm": (True,),
            "route_norm": (True,),
        },
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        moe=MoeRule(
            num_experts="num_experts",
            expert_hidden="moe_intermediate_size",
            router=RouterRule(
                scoring="sigmoid",
                min_weight_sum=1e-20,
                scale="router_scaling_factor",
                has_selection_bias=True,
            ),
            shared=SharedRule(hidden="moe_intermediate_size", count="num_shared_experts"),
            sparse_layers="listed",
        ),
    ),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        was_published_with_code=True,
        ignored=TRAINING_FIELDS,
        fixed=NOAUX_TC,
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        moe=SIGMOID_EXPERTS,
        windowed_layers="from_max",
        has_layer_types=True,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        was_published_with_code=True,
        ignored=frozenset({"mtp_transformer_layers", "num_mtp_modules", "use_mtp"}),
        fixed={
            "attn_type_list": (1,),  # 0 is linear attention
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
        rope=RopeRule(is_partial=True),
        rope_fields=("rotary_dim",),
        qk_norm="full",
        moe=MoeRule(
            num_experts="num_local_experts",
            expert_hidden="intermediate_size",
            router=RouterRule(scoring="sigmoid", has_selection_bias=True),
        ),
    ),
    "ernie4_5_moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        was_published_with_code=True,
        ignored=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
        fixed={"moe_gate": ("topk",), "moe_use_aux_free": (True,)},
        rope=RopeRule(is_interleaved=True),
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        moe=MoeRule(
            num_experts="moe_num_experts",
            top_k="moe_k",
            expert_hidden="moe_intermediate_size",
            router=RouterRule(has_selection_bias=True, min_weight_sum="moe_norm_min"),
            shared=SharedRule(hidden="moe_intermediate_size", count="moe_num_shared_experts"),
            sparse_layers="ranged",
        ),
    ),
}
