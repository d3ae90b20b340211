"""Families without experts."""

from collections.abc import Mapping

from raymoe.specs.family import Family, common_fields

DENSE_FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=common_fields(
            intermediate_size=11008,
            max_position_embeddings=2048,
            eos_token_id=2,
            attention_bias=False,
            mlp_bias=False,
        ),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=common_fields(
            vocab_size=151936,
            intermediate_size=22016,
            num_key_value_heads=32,
            head_dim=128,
            attention_bias=False,
            max_window_layers=28,
            layer_types=None,
            use_sliding_window=False,
            sliding_window=4096,
        ),
        qk_norm="head",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windowed_layers="from_max",
        is_window_switched=True,
        has_layer_types=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults=common_fields(
            num_key_value_heads=8,
            max_position_embeddings=131072,
            eos_token_id=2,
            sliding_window=4096,
        ),
        windowed_layers="all",
    ),
}
