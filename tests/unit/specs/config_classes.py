"""The configuration class of each family in transformers, and models of it without memory."""

import json
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from raymoe.specs.families.wrappers import MEDIA_TENSORS
from tests.parity.configurations import FAMILY_CONFIGS, TEXT_CONFIGS, model_class

# Fields without which the defaults of a class make no model.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": None}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen3_omni_moe_text": {"head_dim": 128, "tie_word_embeddings": False},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "eos_token_id": 248044,
    },
}


def config_of(family: str, **fields: Any) -> PreTrainedConfig:
    """A configuration with the defaults of its class, but for these fields."""
    kind = getattr(transformers, (FAMILY_CONFIGS | TEXT_CONFIGS)[family])
    return kind(**NEEDED.get(family, {}) | fields)


def written(config: PreTrainedConfig) -> dict[str, Any]:
    """What `save_pretrained` would write, defaults included."""
    return json.loads(config.to_json_string(use_diff=False))


def meta_model(config: PreTrainedConfig) -> nn.Module:
    """The model of a configuration, with shapes and no weights."""
    with torch.device("meta"):
        return model_class(config)._from_config(config)


def num_stored_elements(model: nn.Module) -> int:
    """Elements of what a checkpoint holds: parameters, tied ones once, and persistent buffers.

    Other media are left out.
    """
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    named = (*model.named_parameters(), *buffers)
    return sum(
        tensor.numel() for name, tensor in named if not any(part in name for part in MEDIA_TENSORS)
    )
