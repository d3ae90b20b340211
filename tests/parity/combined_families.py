"""Odd configurations of the families that combine the parts of others in another way."""

from typing import Any

from tests.parity.fields import BASE, YARN, longrope
from tests.parity.hybrid_families import FULL, SLIDING

_THETA = {"rope_theta": 10_000.0}
_ROUTED = BASE | {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
}
_WINDOWED = _ROUTED | {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 20}
_KOLIBRI = {name: value for name, value in _WINDOWED.items() if name != "intermediate_size"}
_KOLIBRI |= {"shared_expert_intermediate_size": 24}

COMBINED_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "kolibri1": (
        _KOLIBRI,
        {
            "plain": {},
            "renormalised, window of 7, one KV head": {
                "norm_topk_prob": True,
                "sliding_window": 7,
                "num_key_value_heads": 1,
            },
            "every fifth layer full, top-1": {
                "layer_types": None,
                "num_hidden_layers": 5,
                "num_experts_per_tok": 1,
            },
            "no layer rotated, tied": {"layer_types": [FULL] * 3, "tie_word_embeddings": True},
            "all layers slide, longrope, top-3 of 7": {
                "layer_types": [SLIDING] * 3,
                "rope_parameters": longrope(16),
                "num_experts": 7,
                "num_experts_per_tok": 3,
            },
            "wide heads, yarn, wide shared, vocabulary 201": {
                "head_dim": 24,
                "rope_parameters": YARN | _THETA,
                "shared_expert_intermediate_size": 72,
                "vocab_size": 201,
            },
        },
    ),
}
