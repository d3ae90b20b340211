"""Configurations as publishers ship them, fields that do not matter included."""

from typing import Any

from raymoe.specs.presets_models import MODEL_PRESETS

_DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def _auto_map(module: str, name: str) -> dict[str, str]:
    return {
        "AutoConfig": f"configuration_{module}.{name}Config",
        "AutoModel": f"modeling_{module}.{name}Model",
        "AutoModelForCausalLM": f"modeling_{module}.{name}ForCausalLM",
    }


# Name of a preset -> what its config.json says beyond it.
NOISE: dict[str, dict[str, Any]] = {
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "attn_config": {
            **MODEL_PRESETS["dbrx"]["attn_config"],
            "attn_pdrop": 0,
            "chunk_size_feed_forward": 0,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
            "is_decoder": False,
            "max_length": 20,
            "model_type": "",
            "return_dict": True,
            "tie_word_embeddings": True,
            "top_k": 50,
            "torch_dtype": None,
        },
        "emb_pdrop": 0.0,
        "ffn_config": {
            **MODEL_PRESETS["dbrx"]["ffn_config"],
            "ffn_act_fn": {"name": "silu"},
            "model_type": "",
            "moe_jitter_eps": 0,
            "moe_loss_weight": 0.05,
            "moe_normalize_expert_weights": 1,
            "return_dict": True,
            "tie_word_embeddings": True,
            "uniform_expert_assignment": False,
        },
        "initializer_range": 0.02,
        "output_router_logits": False,
        "resid_pdrop": 0.0,
        "router_aux_loss_coef": 0.05,
        "tie_word_embeddings": False,
        "transformers_version": "4.39.2",
        "use_cache": True,
    },
    "deepseek-v2": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": _auto_map("deepseek", "DeepseekV2"),
        "bos_token_id": 100000,
        "scoring_func": "softmax",
        "eos_token_id": 100001,
        "transformers_version": "4.39.3",
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": _auto_map("deepseek", "DeepseekV3"),
        "bos_token_id": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "eos_token_id": 1,
        "num_nextn_predict_layers": 1,
        "transformers_version": "4.33.1",
    },
    "kimi-k2": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": _auto_map("deepseek", "DeepseekV3"),
        "bos_token_id": 163584,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "eos_token_id": 163585,
        "num_nextn_predict_layers": 0,
        "transformers_version": "4.48.3",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "router_aux_loss_coef": 0.9,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.54.0",
        "use_cache": True,
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 62,
        "auto_map": {
            "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
            "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
        },
        "eos_token_id": 200020,
        "hidden_act": "silu",
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "transformers_version": "4.46.1",
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
}


def published(name: str) -> dict[str, Any]:
    """The whole configuration of a preset."""
    return {**MODEL_PRESETS[name], **NOISE[name]}
