"""Odd configurations of the families with attention to compressed entries."""

from typing import Any

from tests.parity.fields import BASE, YARN
from tests.parity.hybrid_families import AS_PUBLISHED

SLIDING = "sliding_attention"
OVERLAPPING, LONG = "compressed_sparse_attention", "heavily_compressed_attention"
BY_TOKEN, SCORED = "hash_moe", "moe"


def _rates(overlapping: int, long: int) -> dict[str, int]:
    return {OVERLAPPING: overlapping, LONG: long}


_V4: dict[str, Any] = {
    **{name: value for name, value in BASE.items() if name != "intermediate_size"},
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    # With few index heads many scores would be zero, and what is chosen a tie.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 20,
    "layer_types": [SLIDING, OVERLAPPING, LONG, OVERLAPPING],
    "mlp_layer_types": [BY_TOKEN, SCORED, SCORED, BY_TOKEN],
    # Rows of the tests have several entries of each kind, and open windows of all lengths.
    "compress_rates": _rates(4, 32),
    "compress_rope_theta": 1000.0,
    "rope_parameters": YARN,
}
_PUBLISHED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "layer_types": None,
    "mlp_layer_types": None,
    "compress_rates": None,
    "partial_rotary_factor": None,
    "rope_parameters": None,
    "compress_ratios": [0, 4, 128, 4, 0],  # the last one of a layer that is not read
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 8,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}

COMPRESSED_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "deepseek_v4": (
        _V4,
        {
            "plain": {},
            f"windows of 128 tokens, {AS_PUBLISHED}": _PUBLISHED,
            "windows of 8 and 64 tokens, one expert": {
                "compress_rates": _rates(8, 64),
                "num_experts_per_tok": 1,
                "sliding_window": 5,
                "index_topk": 7,
                "index_head_dim": 24,
            },
            "one group of heads, all of a head rotated, low limit": {
                "o_groups": 1,
                "partial_rotary_factor": 1.0,
                "swiglu_limit": 0.5,
                "q_lora_rank": 8,
            },
            "two streams, experts by token ids in all layers, tied": {
                "hc_mult": 2,
                "hc_sinkhorn_iters": 3,
                "mlp_layer_types": [BY_TOKEN] * 4,
                "tie_word_embeddings": True,
            },
            "long windows first, none by token ids, two tokens as they are": {
                "layer_types": [LONG, LONG, OVERLAPPING],
                "mlp_layer_types": [SCORED] * 3,
                "num_hidden_layers": 3,
                "compress_rates": _rates(2, 16),
                "index_topk": 10,
                "sliding_window": 2,
                "routed_scaling_factor": 0.7,
            },
            "kinds of layers by default, no scaling of positions": {
                "layer_types": None,
                "mlp_layer_types": None,
                "rope_parameters": None,
                "rope_theta": 500.0,
                "num_hidden_layers": 5,
            },
        },
    ),
}
