"""Families of today: random models as transformers builds them, and what is refused."""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.attention.grouped import AttentionSpec, BlockIndexerSpec
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.layers import DenseSpec, MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from tests.unit.specs.config_classes import config_of, meta_model, num_stored_elements, written
from tests.unit.specs.published_configs import NOISE, published

random_seeds = given(seed=st.integers(0, 2**32))


def _grouped(rng: random.Random) -> dict[str, Any]:
    kv_heads = rng.choice((1, 2, 3))
    return {
        "vocab_size": rng.randrange(50, 200),
        "hidden_size": 8 * rng.randrange(2, 9),
        "intermediate_size": rng.randrange(9, 70),
        "num_hidden_layers": rng.randrange(2, 6),
        "num_attention_heads": kv_heads * rng.choice((1, 2, 5)),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((8, 16, 24)),
        "tie_word_embeddings": rng.choice((True, False)),
    }


def _moe(rng: random.Random) -> dict[str, Any]:
    groups = rng.choice((1, 2, 4))
    return {
        "moe_intermediate_size": rng.randrange(5, 40),
        "n_routed_experts": groups * rng.randrange(2, 5),
        "num_experts_per_tok": 2,
        "n_shared_experts": rng.randrange(1, 3),
        "n_group": groups,
        "topk_group": rng.randrange(1, groups + 1),
        "first_k_dense_replace": rng.randrange(0, 3),
        "norm_topk_prob": rng.choice((True, False)),
        "attention_bias": rng.choice((True, False)),
        "routed_scaling_factor": rng.uniform(0.5, 3.0),
    }


def _latent(rng: random.Random) -> dict[str, Any]:
    heads = rng.randrange(1, 6)
    return _moe(rng) | {
        "vocab_size": rng.randrange(50, 200),
        "hidden_size": 4 * heads * rng.randrange(1, 5),
        "intermediate_size": rng.randrange(9, 70),
        "num_hidden_layers": rng.randrange(2, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice((None, 12)),
        "kv_lora_rank": rng.randrange(4, 30),
        "qk_nope_head_dim": rng.randrange(2, 20),
        "qk_rope_head_dim": 2 * rng.randrange(1, 9),
        "v_head_dim": rng.randrange(2, 20),
    }


def _dbrx(rng: random.Random) -> dict[str, Any]:
    heads = 2 * rng.randrange(1, 4)
    return {
        "d_model": heads * 8 * rng.randrange(1, 3),
        "n_heads": heads,
        "n_layers": rng.randrange(1, 4),
        "vocab_size": rng.randrange(50, 200),
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": rng.randrange(5, 50), "moe_num_experts": 3},
    }


def _v2(rng: random.Random) -> dict[str, Any]:
    fields = _latent(rng) | {"norm_topk_prob": False, "mlp_bias": rng.choice((True, False))}
    return fields | {"topk_method": rng.choice(("greedy", "group_limited_greedy"))}


def _lite(rng: random.Random) -> dict[str, Any]:
    fields = _latent(rng)
    del fields["first_k_dense_replace"]
    count = fields["num_hidden_layers"]
    kinds = [rng.choice(("dense", "sparse")) for _ in range(count)]
    return fields | {"mlp_layer_types": rng.choice((None, kinds))}


def _axk1(rng: random.Random) -> dict[str, Any]:
    return _lite(rng) | {"q_lora_rank": 12}


def _indexed(rng: random.Random) -> dict[str, Any]:
    kinds = _lite(rng)["mlp_layer_types"]
    fields = _latent(rng) | {"q_lora_rank": 12, "index_topk": 64, "index_n_heads": 2}
    count = len(kinds) if kinds else fields["num_hidden_layers"]
    return fields | {"num_hidden_layers": count, "mlp_layer_types": kinds}


def _ernie(rng: random.Random) -> dict[str, Any]:
    fields = _grouped(rng) | {"use_bias": rng.choice((True, False))}
    return fields | {
        "moe_intermediate_size": rng.randrange(5, 40),
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": rng.randrange(0, 3),
        "moe_layer_start_index": rng.randrange(0, 2),
        "moe_layer_end_index": rng.choice((-1, 1)),
        "moe_layer_interval": rng.randrange(1, 3),
    }


def _with(*differences: str, **fixed: Any) -> Any:
    """A grouped-query family whose switches are drawn and whose numbers are these."""

    def fields(rng: random.Random) -> dict[str, Any]:
        return _grouped(rng) | {name: rng.choice((True, False)) for name in differences} | fixed

    return fields


def _sigmoid(*differences: str) -> Any:
    def fields(rng: random.Random) -> dict[str, Any]:
        return _with(*differences)(rng) | _moe(rng)

    return fields


def _hybrid(**fixed: Any) -> Any:
    """A family whose layers differ; the list of types makes the windows."""

    def fields(rng: random.Random) -> dict[str, Any]:
        drawn = _with(num_experts_per_tok=2, **fixed)(rng)
        kinds = ("full_attention", "sliding_attention")
        if "num_local_experts" in fixed:
            kinds = ("full_attention", "minimax_m3_sparse")
            drawn["index_n_heads"] = drawn["num_key_value_heads"]
        types = [rng.choice(kinds) for _ in range(drawn["num_hidden_layers"])]
        heads = 2 * drawn["num_attention_heads"]  # sliding layers may have twice the KV heads
        return drawn | {"layer_types": types, "num_attention_heads": heads}

    return fields


FAMILIES = {
    "dbrx": _dbrx,
    "phimoe": _with("attention_bias", "lm_head_bias", num_local_experts=5),
    "gpt_oss": _with("attention_bias", num_local_experts=5, num_experts_per_tok=2),
    "ernie4_5_moe": _ernie,
    "hunyuan_v1_moe": _with("attention_bias", num_experts=5, moe_topk=2),
    "granitemoe": _with("attention_bias", num_local_experts=5, attention_multiplier=0.3),
    "granitemoehybrid": _with(
        "attention_bias",
        "mamba_proj_bias",
        "mamba_conv_bias",
        num_local_experts=5,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        hidden_size=48,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=24,
    ),
    "deepseek_v2": _v2,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _lite,
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _indexed,
    "hy_v4": lambda rng: _indexed(rng) | {"pad_token_id": None},
    "glm4_moe": _sigmoid("use_qk_norm"),
    "dots1": _sigmoid(),
    "minimax_m2": _with(num_local_experts=5, num_experts_per_tok=2),
    "mimo_v2_flash": _hybrid(
        n_routed_experts=5, moe_intermediate_size=20, head_dim=24, v_head_dim=16
    ),
    "exaone_moe": _hybrid(num_experts=5, moe_intermediate_size=20, num_shared_experts=2),
    "minimax_m3_vl_text": _hybrid(num_local_experts=5, dense_intermediate_size=33),
    "afmoe": _hybrid(num_experts=5, moe_intermediate_size=20),
    "laguna": _hybrid(num_experts=5, moe_intermediate_size=20, gating="per-element"),
    "cohere2_moe": _hybrid(num_experts=5, num_shared_experts=2, first_k_dense_replace=1),
    "kolibri1": _hybrid(num_experts=5, moe_intermediate_size=20),
    "mellum": _hybrid(num_experts=5, moe_intermediate_size=20),
    "flint": _hybrid(num_experts=5, moe_intermediate_size=20, mlp_only_layers=[1]),
    "granitemoe_swa": _with("attention_bias", num_local_experts=5, shared_intermediate_size=20),
    "sarvam_moe": _sigmoid("use_qk_norm"),
    "sarvam_mla": _latent,
    "axk1": _axk1,
}


@settings(max_examples=4)
@random_seeds
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_have_as_many_elements_as_in_transformers(family: str, seed: int) -> None:
    config = config_of(family, **FAMILIES[family](random.Random(f"{family} {seed}")))
    model = meta_model(config)
    spec = ModelSpec.from_config(written(config))
    assert spec.num_parameters == num_stored_elements(model)
    dense = [layer for layer in spec.layers if isinstance(layer.ffn, DenseSpec)]
    routed = [name for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    if family != "dbrx":  # whose experts have names of their own
        assert len(routed) == spec.num_layers - len(dense)


@settings(max_examples=4)
@random_seeds
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
        *("sarvam_mla", "axk1", "hy_v4"),
    ],
)
def test_scores_of_latent_attention_are_scaled_as_in_transformers(family: str, seed: int) -> None:
    rng = random.Random(f"scale {family} {seed}")
    rope = {"rope_type": "yarn", "factor": rng.uniform(1, 40), "rope_theta": 10_000.0}
    rope |= {"mscale_all_dim": rng.choice((0.0, 0.707, 1.0)), "mscale": 1.0}
    rope |= {"original_max_position_embeddings": 64}
    config = config_of(family, **FAMILIES[family](rng), rope_parameters=rope)
    attention = ModelSpec.from_config(written(config)).layers[0].attention
    assert attention.scale == pytest.approx(meta_model(config).model.layers[0].self_attn.scaling)


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "hy_v4")


@pytest.mark.parametrize("family", [*LATENT, "sarvam_mla", "axk1"])
def test_sizes_of_heads_that_classes_derive_may_be_left_out(family: str) -> None:
    fields = FAMILIES[family](random.Random(1)) | {"qk_rope_head_dim": 6}
    whole = ModelSpec.from_config(written(config_of(family, **fields)))
    del fields["num_key_value_heads"]
    assert ModelSpec.from_config({"model_type": family} | fields) == whole


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_norms_of_latents_have_the_epsilon_of_transformers(family: str) -> None:
    config = config_of(family, **FAMILIES[family](random.Random(0)), rms_norm_eps=1e-3)
    spec = ModelSpec.from_config(written(config))
    attention, theirs = spec.layers[0].attention, meta_model(config).model.layers[0]
    assert isinstance(attention, LatentAttentionSpec)
    assert attention.norm_eps == theirs.self_attn.kv_a_layernorm.variance_epsilon
    assert spec.norm_eps == theirs.input_layernorm.variance_epsilon


def test_norms_of_dbrx_have_the_epsilon_of_transformers() -> None:
    config = config_of("dbrx", **_dbrx(random.Random(0)))
    spec, theirs = ModelSpec.from_config(written(config)), meta_model(config).transformer
    assert (spec.norm, spec.norm_eps) == ("layer", theirs.norm_f.eps)
    assert theirs.norm_f.bias is None


def test_phimoe_has_its_published_sizes() -> None:
    """Model card of microsoft/Phi-3.5-MoE-instruct: 41.9B (files), 6.6B active parameters."""
    factors = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64}
    mscales = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
    spec = ModelSpec.from_config(
        {
            "architectures": ["PhiMoEForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_phimoe.PhiMoEConfig",
                "AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM",
            },
            "model_type": "phimoe",
            "attention_bias": True,
            "lm_head_bias": True,
            "hidden_dropout": 0.0,
            "input_jitter_noise": 0.01,
            "router_jitter_noise": 0.01,
            "original_max_position_embeddings": 4096,
            "sliding_window": 131072,
            "rope_scaling": factors
            | mscales
            | {"type": "longrope", "original_max_position_embeddings": 4096},
        }
    )
    assert round(spec.num_parameters / 1e9, 1) == 41.9
    assert round(spec.num_active_parameters / 1e9, 1) == 6.6
    assert spec.max_model_len == 131072


def test_norms_of_phimoe_have_biases() -> None:
    config = config_of("phimoe", **FAMILIES["phimoe"](random.Random(0)), rms_norm_eps=1e-3)
    spec, theirs = ModelSpec.from_config(written(config)), meta_model(config).model
    assert (spec.norm, spec.norm_eps) == ("layer", theirs.norm.eps)
    assert spec.has_norm_bias
    assert theirs.norm.bias is not None


@pytest.mark.parametrize("family", ["gpt_oss", "dots1"])
def test_windows_are_those_of_transformers(family: str) -> None:
    fields = FAMILIES[family](random.Random(3)) | {"num_hidden_layers": 5, "sliding_window": 7}
    if family == "dots1":
        fields |= {"max_window_layers": 2}
    config = config_of(family, **fields)
    attentions = [layer.attention for layer in ModelSpec.from_config(written(config)).layers]
    theirs = [layer.self_attn.sliding_window for layer in meta_model(config).model.layers]
    assert [attention.sliding_window for attention in attentions] == theirs
    assert set(theirs) == {None, 7}


def test_hunyuan_stretches_the_base_of_its_rope_once_and_for_all() -> None:
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10_000.0}
    config = config_of("hunyuan_v1_moe", head_dim=16, num_attention_heads=2, rope_parameters=rope)
    spec = ModelSpec.from_config(written(config))
    assert (spec.ropes[0].kind, spec.ropes[0].depends_on_length) == ("default", False)
    theirs = type(meta_model(config).model.rotary_emb).compute_ntk_alpha_rope_parameters(config)
    last = spec.ropes[0].theta ** -(14 / 16)
    assert float(theirs[0][-1]) == pytest.approx(last, rel=1e-5)
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    assert attention.is_norm_after_rope


def test_granite_multiplies() -> None:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}
    spec = ModelSpec.from_config({"model_type": "granitemoe", **factors})
    assert (spec.embedding_multiplier, spec.residual_multiplier) == (12.0, 0.22)
    assert spec.logits_divisor == 6.0
    scaled = ModelSpec.from_config({"model_type": "granitemoe", "attention_multiplier": 0.0156})
    assert scaled.layers[0].attention.scale == 0.0156


@pytest.mark.parametrize("name", NOISE)
def test_published_configurations_are_read_whole(name: str) -> None:
    model = ModelSpec.from_config(published(name), name=name)
    eos = model.eos_token_ids
    assert dataclasses.replace(model_preset(name), eos_token_ids=eos) == model


def test_minimax_m3_is_read_in_its_published_form() -> None:
    marks = [0, 0, 0] + [1] * 57
    sparse = {"use_sparse_attention": True, "sparse_topk_blocks": 16, "sparse_block_size": 128}
    sparse |= {"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_init_block": 0}
    sparse |= {"sparse_local_block": 1, "sparse_score_type": "max"}
    sparse |= {"sparse_attention_freq": marks, "sparse_disable_index_value": marks}
    switches = {"use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True}
    text = switches | {
        "hidden_act": "swigluoai",
        "moe_layer_freq": marks,
        "n_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rope_theta": 5_000_000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "sparse_attention_config": sparse,
    }
    architectures = ["MiniMaxM3SparseForConditionalGeneration"]
    whole = {"model_type": "minimax_m3_vl", "architectures": architectures, "text_config": text}
    spec = ModelSpec.from_config(whole)
    assert isinstance(spec.layers[2].ffn, DenseSpec)
    assert isinstance(spec.layers[3].ffn, MoeSpec)
    assert (spec.max_model_len, spec.ropes[0].rotary_dim) == (524288, 64)
    blocks = [layer.attention.blocks for layer in spec.layers]
    assert blocks[:3] == [None] * 3
    assert set(blocks[3:]) == {
        BlockIndexerSpec(num_heads=4, head_dim=128, block_tokens=128, top_k=16, num_local=1)
    }
    assert all(layer.attention.blocks is None for layer in spec.within(2048).layers)
    with pytest.raises(ConfigError, match="use_gemma_norm"):
        ModelSpec.from_config(whole | {"text_config": text | {"use_gemma_norm": False}})


def test_experts_per_layer_must_agree() -> None:
    config = {"model_type": "hunyuan_v1_moe", "num_experts": 8}
    moe = ModelSpec.from_config(config | {"moe_topk": [2] * 32}).layers[0].ffn
    assert isinstance(moe, MoeSpec)
    assert moe.top_k == 2
    with pytest.raises(ConfigError, match="moe_topk"):
        ModelSpec.from_config(config | {"moe_topk": [2, 3] * 16})


YARN = published("deepseek-v3")["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*group_limited"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek-v2", {"n_group": 7}, "n_group is 7"),
        ("deepseek-v2", {"topk_group": 9}, "topk_group 9"),
        ("deepseek-v2", {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ("deepseek-v2", {"kv_lora_rank": None}, "kv_lora_rank is None"),
        ("deepseek-v2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("deepseek-v2", {"hidden_act": "relu2"}, "relu2"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek-v3", {"scoring_func": "sqrtsoftplus"}, "scoring_func"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek-v3", {"n_group": None}, "n_group is None"),
        ("deepseek-v3", {"n_group": 256}, "groups of at least 2"),
        ("deepseek-v3", {"topk_group": 1, "n_group": 64}, "4 experts to choose from"),
        ("deepseek-v3", {"head_dim": 128}, "head_dim is 128.*must be 64"),
        ("deepseek-v3", {"qk_head_dim": 128}, "qk_head_dim is 128.*must be 192"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "63 of 63 dimensions"),
        ("deepseek-v3", {"rope_interleave": "yes"}, "rope_interleave is 'yes'"),
        ("deepseek-v3", {"rope_scaling": YARN | {"alpha": 2.0}}, "alpha"),
        ("deepseek-v3", {"rope_scaling": YARN | {"mscale_all_dim": "1"}}, "mscale_all_dim"),
        ("deepseek-v3", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ("deepseek-v3", {"auto_map": {"AutoModel": "modeling_x.OtherModel"}}, "auto_map"),
        ("deepseek-v3", {"auto_map": "modeling_deepseek.Other"}, "auto_map"),
        ("deepseek-v3", {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32"),
        ("deepseek-v3", {"model_type": "deepseek_v41"}, "deepseek_v41.*supported: .*dbrx"),
        ("kimi-k2", {"model_type": "kimi_k3"}, "kimi_k3"),
        ("kimi-k2", {"chunk_size_feed_forward": 8}, "chunk_size_feed_forward"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "clamped experts"),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window is None"),
        ("gpt-oss-20b", {"experts_per_token": 8}, "experts_per_token is 8"),
        ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "each of 24 layers"),
        ("gpt-oss-20b", {"swiglu_limit": None}, "swiglu_limit"),
        ("gpt-oss-20b", {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "ntk"),
        ("glm-4.5-air", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm-4.5-air", {"n_shared_experts": None}, "n_shared_experts is None"),
        ("glm-4.5-air", {"use_qk_norm": None}, "use_qk_norm is None"),
        ("glm-4.5-air", {"partial_rotary_factor": 1.5}, "192 of 128"),
        ("glm-4.5-air", {"model_type": "glm4_moe_lite"}, "Glm4MoeForCausalLM"),
        ("minimax-m2", {"attn_type_list": [1, 0] * 31}, "attn_type_list"),
        ("minimax-m2", {"shared_intermediate_size": 512}, "shared_intermediate_size = 512"),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias = False"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("minimax-m2", {"rotary_dim": 65}, "65 of 128"),
        ("dbrx", {"attn_config": {"kv_n_heads": 7}}, "not a multiple of num_key_value_heads"),
        ("dbrx", {"attn_config": {"kv_n_heads": 8, "softcap": 30}}, "attn_config.softcap"),
        ("dbrx", {"attn_config": [8]}, "attn_config is"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "moe_normalize_expert"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}, "moe_normalize_expert"),
        ("dbrx", {"ffn_config": {"uniform_expert_assignment": True}}, "uniform_expert"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("dbrx", {"hidden_act": "gelu"}, "hidden_act"),
        ("dbrx", {"rope_theta": 10000.0}, "rope_theta is 10000.0"),
    ],
)
def test_perturbed_configurations_are_refused(
    name: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelSpec.from_config(published(name) | fields)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index"),
        ("ernie4_5_moe", {"moe_gate": "top2_fused"}, "moe_gate"),
        ("ernie4_5_moe", {"moe_norm_min": -1}, "moe_norm_min"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("deepseek_v32", {"index_topk": None}, "index_topk is None"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 61}, "one of indexed_attention"),
        ("glm_moe_dsa", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16'"),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("hy_v4", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0; expected a positive number"),
        ("hy_v4", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0"),
        ("hy_v4", {"swiglu_limit": None}, "swiglu_limit is None"),
        ("hy_v4", {"hidden_act": "gelu"}, "clamped experts"),
        ("hy_v4", {"enable_ihc": False}, "enable_ihc = False"),
        ("hy_v4", {"gating_type": "headwise"}, "gating_type = 'headwise'"),
        ("hy_v4", {"learnable_sink": False}, "learnable_sink = False"),
        ("hy_v4", {"index_topk_freq": 2}, "index_topk_freq = 2"),
        ("hy_v4", {"indexer_types": ["shared"] * 34}, "full for the first"),
        ("hy_v4", {"hc_mult": 9}, "hc_mult is 9"),
        ("hy_v4_vl_text", {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("mixtral", {"rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 2.0}}, "alpha"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
        ("phimoe", {"architectures": ["Phi4MoEForCausalLM"]}, "supported: PhimoeForCausalLM"),
        ("phimoe", {"router_jitter_noise": 0}, "router_jitter_noise is 0"),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "default, longrope"),
    ],
)
def test_perturbed_families_are_refused(family: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelSpec.from_config({"model_type": family} | fields)


def test_what_is_not_understood_is_unsupported_and_what_is_wrong_is_not() -> None:
    with pytest.raises(UnsupportedModelError):
        ModelSpec.from_config(published("deepseek-v3") | {"attention_chunk_size": 2048})
    with pytest.raises(ConfigError) as caught:
        ModelSpec.from_config(published("deepseek-v3") | {"v_head_dim": 0})
    assert not isinstance(caught.value, UnsupportedModelError)
