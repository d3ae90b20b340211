"""Families that choose the tokens of long contexts: their indexers, and what these keep."""

import math

import pytest

from raymoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.layers import DenseSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import locate_weights, model_weights

# What the published configurations of GLM-5.2 and DeepSeek-V3.2 say, but for the quantisation.
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 3 + ["shared"] * 75,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.15.0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
DEEPSEEK = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(("config", "total"), [(GLM, 743e9), (DEEPSEEK, 671e9)])
def test_published_configurations_keep_index_keys_and_run_up_to_their_positions(
    config, total
) -> None:
    spec = ModelSpec.from_config(config)
    assert spec.max_model_len == config["max_position_embeddings"]
    own = 61 if config is DEEPSEEK else 3
    assert spec.kv_bytes_per_token(2) == (len(spec.layers) * (512 + 64) + own * 128) * 2
    assert [isinstance(layer.ffn, DenseSpec) for layer in spec.layers[:4]] == [True] * 3 + [False]
    # Model cards say 744e9 and 671e9.
    assert spec.num_parameters == pytest.approx(total, rel=0.005)


# What is known of the configuration of tencent/Hy4-preview: documents and tests that quote it.
HY4 = {
    "architectures": ["HYV4ForCausalLM"],
    "dtype": "bfloat16",
    "enable_ihc": True,
    "enable_lm_head_fp32": True,
    "first_k_dense_replace": 1,
    "gated_mla": True,
    "gating_type": "elementwise",
    "hc_eps": 1e-6,
    "hc_magnitude": 2.0,
    "hc_mult": 4,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_types": ["shared" if i % 4 != 1 and i else "full" for i in range(78)],
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "layer_types": ["deepseek_sparse_attention"] * 78,
    "learnable_sink": True,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] + ["sparse"] * 77,
    "model_type": "hy_v4",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 120832,
}


def test_hy4_has_the_streams_sinks_and_sizes_of_its_documents() -> None:
    spec = ModelSpec.from_config(HY4)
    assert spec == ModelSpec.from_config(
        {name: value for name, value in HY4.items() if name != "indexer_types"}
    )
    assert spec.num_parameters == pytest.approx(770e9, rel=0.01)
    assert spec.num_active_parameters == pytest.approx(49e9, rel=0.02)
    # 156 mixers of 196,618 numbers and the last sum: what its index has in all.
    mixers = [shape for name, shape in model_weights(spec).items() if "mixer" in name]
    assert sum(map(math.prod, mixers)) == 30_770_717
    full = [i for i, one in enumerate(indexers(HY4)) if not one.is_shared]
    assert full == [0, *range(1, 78, 4)]
    streams = spec.streams
    assert (streams.count, streams.num_factors, streams.merge) == (4, 8, "weighted")
    assert all(layer.attention.has_sinks for layer in spec.layers)
    assert [ffn.clamp is None for ffn in (spec.layers[0].ffn, spec.layers[1].ffn.shared)] == [
        True,
        True,
    ]
    assert spec.layers[1].ffn.clamp.limit == 10.0
    assert spec.has_float_head


def test_hy4_names_its_gate_where_modules_are_excluded() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fp8 |= {"modules_to_not_convert": ["linear_gate", "lm_head"]}
    spec = ModelSpec.from_config(HY4 | {"quantization_config": fp8})
    attention = "model.layers.3.self_attn."
    assert spec.format_of(f"{attention}g_proj.weight", (64, 64)) is None
    assert spec.format_of(f"{attention}o_proj.weight", (64, 64)) is not None
    for mixer in ("attention_mixer", "ffn_mixer"):
        assert spec.format_of(f"model.layers.3.{mixer}.weight", (64, 64)) is None
    assert spec.format_of("model.merge_mixer.weight", (64, 64)) is None


def indexers(config, **changes):
    attentions = [layer.attention for layer in ModelSpec.from_config(config | changes).layers]
    assert all(isinstance(attention, LatentAttentionSpec) for attention in attentions)
    return [attention.indexer for attention in attentions]


def test_indexers_are_those_of_the_configuration() -> None:
    deepseek, glm = indexers(DEEPSEEK), indexers(GLM)
    assert len(set(deepseek)) == 1
    assert (deepseek[0].num_heads, deepseek[0].head_dim, deepseek[0].top_k) == (64, 128, 2048)
    assert (deepseek[0].is_interleaved, glm[0].is_interleaved) == (False, True)
    assert [each.is_shared for each in glm] == [False] * 3 + [True] * 75


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, "FFFSSSFSS"),  # every fourth from the third on, counted from 0
        ({"index_topk_freq": 1}, "F" * 9),
        ({"index_skip_topk_offset": 1}, "FSSSFSSSF"),
        ({"index_topk_pattern": "FSFSFSFSF"}, "FSFSFSFSF"),
        ({"indexer_types": ["full", "shared"] + ["full"] * 7}, "FSFFFFFFF"),
    ],
)
def test_what_layers_share_is_listed_or_follows_a_pattern(changes, kinds) -> None:
    small = GLM | {"num_hidden_layers": 9, "mlp_layer_types": ["dense"] * 9, "indexer_types": None}
    shared = [each.is_shared for each in indexers(small, **changes)]
    assert shared == [kind == "S" for kind in kinds]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared"] * 78}, "full for the first"),
        ({"indexer_types": ["full"] * 77}, "each of 78 layers"),
        ({"indexer_types": None, "index_topk_pattern": "FX" * 39}, "'X'"),
        ({"index_head_dim": 60}, "multiples of 8"),
        ({"index_head_dim": 32}, "at least the 64 dimensions"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ],
)
def test_other_indexers_are_refused(changes, message) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_config(GLM | changes)


def test_models_of_short_sequences_have_no_indexers() -> None:
    spec = ModelSpec.from_config(DEEPSEEK)
    short = spec.within(2048)
    assert short.kv_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert not any("indexer" in name for name in model_weights(short))
    assert spec.within(2049) is spec
    assert spec.within(None) is spec
    few = ModelSpec.from_config(GLM | {"max_position_embeddings": 1024})
    assert few.within(None).layers[0].attention.indexer is None


def test_indexers_that_are_not_needed_are_stored_and_not_read() -> None:
    spec = ModelSpec.from_config(
        GLM
        | {"num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3}
        | {"indexer_types": ["full"] * 3}
    )
    stored = {
        name.replace("mlp.shared_expert.", "mlp.shared_experts."): shape
        for name, shape in model_weights(spec).items()
    }
    indexer = "model.layers.2.self_attn.indexer.wk.weight"
    assert stored[indexer] == (128, 6144)
    files = dict.fromkeys(stored, "model.safetensors")
    short = spec.within(2048)
    assert locate_weights(short, stored, files).keys() == model_weights(short).keys()
    assert locate_weights(spec, stored, files).keys() == model_weights(spec).keys()
    other = indexer.replace("indexer", "selector")
    with pytest.raises(CheckpointError, match="selector"):
        locate_weights(spec, stored | {other: (128, 6144)}, files | {other: "x"})


POOLED = {"model_type": "glm5_next_text", "max_position_embeddings": 4096}


def test_pools_of_tokens_are_all_seen_while_as_many_as_are_selected_are_whole() -> None:
    spec = ModelSpec.from_config(POOLED | {"index_kpool": 4})
    assert spec.max_model_len == 4096
    assert spec.layers[3].attention.indexer.num_seen == 2048 + 3
    assert spec.within(2051).layers[3].attention.indexer is None
    assert spec.within(2052) is spec
    # Keys of entries of 4 tokens, and the tokens of an open one in each block.
    assert spec.layers[3].attention.cache_width == 512 + 128 * (8 + 8) // 32
    (of_class,) = {layer.attention.indexer for layer in ModelSpec.from_config(POOLED).layers[3:4]}
    assert (of_class.pool, of_class.num_seen) == (16, 2048 + 15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False"),
        ({"index_kpool": 3}, "index_kpool is 3; supported: divisors of 32"),
        ({"index_kpool": 16, "index_topk": 24}, r"of index_topk \(24\)"),
    ],
)
def test_other_pools_are_refused(changes, message) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_config(POOLED | changes)


BLOCKS = {"model_type": "minimax_m3_vl_text", "layer_types": ["minimax_m3_sparse"] * 60}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_n_heads": 2}, r"as many as KV heads \(4\)"),
        ({"index_block_size": 48}, "index_block_size is 48; supported: multiples of 32"),
        ({"index_local_blocks": 0}, "index_local_blocks is 0; supported: 1 to"),
        ({"index_local_blocks": 17}, "index_local_blocks is 17; supported: 1 to"),
        ({"index_head_dim": 60}, "index_head_dim is 60"),
    ],
)
def test_other_blocks_are_refused(changes, message) -> None:
    assert ModelSpec.from_config(BLOCKS).layers[0].attention.blocks.num_seen == 2048
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_config(BLOCKS | changes)


QSA = {
    "model_type": "qwen4_exp_text",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    },
}


def test_pooled_blocks_are_all_seen_up_to_the_last_token_before_one_more() -> None:
    spec = ModelSpec.from_config(QSA)
    indexed = spec.layers[3].attention
    assert spec.max_model_len == 4096
    assert (indexed.blocks.top_k, indexed.blocks.num_seen) == (512, 2051)
    # Keys of blocks of 4 tokens, and the tokens of an open one in each block of the cache.
    assert indexed.cache_width == 2 * 2 * 256 + 128 * (8 + 4) // 32
    assert spec.within(2051).layers[3].attention.blocks is None
    assert spec.within(2052) is spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_compress_ratio": 1}, "indexer_compress_ratio is 1; supported: divisors of 32"),
        ({"indexer_compress_ratio": 6}, "indexer_compress_ratio is 6"),
        ({"indexer_budget": 2046}, r"multiple of indexer_compress_ratio \(4\)"),
        ({"indexer_head_dim": 60}, "indexer_head_dim is 60; supported: multiples of 8"),
        ({"indexer_head_dim": 48}, "64 dimensions of queries are rotated; index keys have 48"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2; supported: 1"),
        ({"indexer_budget": None}, "indexer_budget"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.25,
                }
            },
            "rope 'dynamic' depends on the length",
        ),
    ],
)
def test_other_pooled_blocks_are_refused(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(QSA | changes)


def test_entries_are_all_seen_up_to_the_last_token_before_one_more() -> None:
    spec = ModelSpec.from_config(
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "max_position_embeddings": 8192,
        }
    )
    assert [layer.attention.num_seen for layer in spec.layers] == [None, 2051, None]
    assert spec.max_model_len == 8192
    assert spec.within(2051).layers[1].attention.indexer is None
    assert spec.within(2052) is spec
