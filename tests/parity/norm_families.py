"""Odd configurations of the families that norm the results of attention and networks."""

from typing import Any

from tests.parity.fields import BASE, DYNAMIC, YARN

_FLEX = BASE | {"num_experts": 5, "num_experts_per_tok": 2}

NORM_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "flex_olmo": (
        _FLEX,
        {
            "plain": {},
            "attention bias, top-1, MHA": {
                "attention_bias": True,
                "num_experts_per_tok": 1,
                "num_key_value_heads": 6,
            },
            "renormalised, 7 experts, top-5, tied": {
                "norm_topk_prob": True,
                "num_experts": 7,
                "num_experts_per_tok": 5,
                "tie_word_embeddings": True,
            },
            "yarn, one KV head": {"rope_parameters": YARN, "num_key_value_heads": 1},
            "dynamic rope, wide heads": {
                "rope_parameters": DYNAMIC,
                "max_position_embeddings": 48,
                "head_dim": 24,
            },
            "gelu, vocabulary 77, 4 layers, large epsilon": {
                "hidden_act": "gelu_pytorch_tanh",
                "vocab_size": 77,
                "num_hidden_layers": 4,
                "rms_norm_eps": 1e-2,
            },
        },
    ),
}
