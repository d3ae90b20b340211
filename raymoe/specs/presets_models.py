"""Models by name: the numbers of their `config.json`, for planning without a checkpoint."""

from collections.abc import Mapping

from raymoe.errors import UnknownOptionError
from raymoe.specs.model import ModelSpec

_MIXTRAL = {
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
# Fields of mistralai/Mixtral-8x7B-v0.1, mistralai/Mixtral-8x22B-v0.1, Qwen/Qwen3-30B-A3B and
# Qwen/Qwen3-235B-A22B.
MODEL_PRESETS: Mapping[str, Mapping[str, object]] = {
    "mixtral-8x7b": _MIXTRAL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x22b": _MIXTRAL
    | {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_attention_heads": 48,
        "num_hidden_layers": 56,
        "max_position_embeddings": 65536,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
    },
    "qwen3-235b-a22b": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    },
}


def model_preset(name: str) -> ModelSpec:
    """The model of this name, in any case of letters.

    Raises:
        UnknownOptionError: There is none; names the nearest.
    """
    if name.lower() not in MODEL_PRESETS:
        raise UnknownOptionError(name, MODEL_PRESETS, "model preset")
    return ModelSpec.from_config(MODEL_PRESETS[name.lower()], name=name.lower())
