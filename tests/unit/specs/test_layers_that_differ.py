"""Gemma and OLMo-3: layers of two types, configurations of both formats, and what is refused."""

from typing import Any

import pytest
import transformers

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.layers import LayerSpec, MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import locate_weights, model_weights
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.hybrid_families import AS_PUBLISHED, FULL, SLIDING
from tests.unit.specs.config_classes import written

# google/gemma-3-1b-it, as transformers 4.50 wrote it.
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# The text part of google/gemma-4-26B-A4B.
GEMMA4_26B: dict[str, Any] = {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
}
OLMO3: dict[str, Any] = {
    "model_type": "olmo3",
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
}


def attention_of(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.attention, AttentionSpec)
    return layer.attention


def test_gemma3_has_its_published_size_and_two_ropes() -> None:
    spec = ModelSpec.from_config(GEMMA3_1B)
    assert spec.num_parameters == 999_885_952
    local, full = spec.layers[4], spec.layers[5]
    assert local.rope is not None
    assert full.rope is not None
    assert (local.rope.theta, attention_of(local).sliding_window) == (1e4, 512)
    assert (full.rope.theta, attention_of(full).sliding_window) == (1e6, None)


def test_gemma4_has_its_published_sizes_and_two_kinds_of_layers() -> None:
    spec = ModelSpec.from_config(GEMMA4_26B)
    assert spec.num_parameters == pytest.approx(25.2e9, rel=0.01)
    assert spec.num_active_parameters == pytest.approx(3.8e9, rel=0.01)
    local, full = spec.layers[4], spec.layers[5]
    assert attention_of(local).token_shapes.key == (8, 256)
    assert attention_of(full).token_shapes.key == attention_of(full).token_shapes.value == (2, 512)
    assert attention_of(full).projections == {"q": 16 * 512, "k": 2 * 512}
    assert full.rope is not None
    assert (full.rope.rotary_dim, full.rope.num_frequencies) == (512, 64)
    assert isinstance(full.ffn, MoeSpec)
    assert full.ffn.has_branch_norms


@pytest.mark.parametrize(
    ("config", "config_class"),
    [
        (GEMMA3_1B, transformers.Gemma3TextConfig),
        (GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, None),
        (GEMMA4_26B, transformers.Gemma4TextConfig),
        (GEMMA4_26B | {"attention_k_eq_v": False}, transformers.Gemma4TextConfig),
        (OLMO3, transformers.Olmo3Config),
        (OLMO3 | {"rope_scaling": None}, transformers.Olmo3Config),
    ],
    ids=["gemma3", "gemma3 scaled", "gemma4", "gemma4 with values", "olmo3", "olmo3 unscaled"],
)
def test_what_transformers_writes_of_an_older_configuration_is_the_same_model(
    config: dict[str, Any], config_class: Any
) -> None:
    config_class = config_class or transformers.Gemma3TextConfig
    fields = {name: value for name, value in config.items() if name != "model_type"}
    rewritten = ModelSpec.from_config(written(config_class(**fields)))
    assert rewritten.layers == ModelSpec.from_config(config).layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GEMMA4_26B | {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256"),
        (
            {k: v for k, v in GEMMA4_26B.items() if k != "hidden_size_per_layer_input"},
            "hidden_size_per_layer_input = 256",  # the default of the class
        ),
        (GEMMA4_26B | {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
        (GEMMA4_26B | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4_26B | {"per_layer_config": {"3": {"hidden_size": 8}}}, "per_layer_config"),
        (GEMMA4_26B | {"global_head_dim": 12}, "global_head_dim is 12"),
        (GEMMA3_1B | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelSpec.from_config(config)


PUBLISHED = {
    c.family: {"model_type": c.family, **c.fields.get("text_config", c.fields)}
    for c in CONFIGURATIONS
    if c.name.endswith(AS_PUBLISHED)
}
MIMO = PUBLISHED["mimo_v2_flash"]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MIMO_26 = {
    "model_type": "mimo_v2",
    "architectures": ["MiMoV2ForCausalLM"],
    "attention_projection_layout": "fused_qkv",
    "hybrid_layer_pattern": [0, 1],
    "num_hidden_layers": 2,
    "moe_layer_freq": [0, 1],
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-6,
    "sliding_window_size": 128,
}


@pytest.mark.parametrize(
    ("heads", "groups", "rows", "scales"),
    [((64, 4, 8), 4, (13568, 14848), (108, 116)), ((128, 8, 8), 8, (27136, 27136), (216, 216))],
    ids=["flash", "pro"],
)
def test_groups_of_mimo_v2_have_blocks_of_their_own(heads, groups, rows, scales) -> None:
    num_heads, num_kv_heads, windowed = heads
    sizes = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "swa_num_key_value_heads": windowed,
    }
    config = MIMO_26 | sizes | {"quantization_config": FP8 | {"ignored_layers": ["o_proj"]}}
    spec = ModelSpec.from_config(config)
    full, sliding = spec.layers
    assert (full.rope.theta, sliding.rope.theta, sliding.attention.sliding_window) == (
        1e7,
        1e4,
        129,
    )
    assert (full.attention.num_kv_heads, sliding.attention.num_kv_heads) == (num_kv_heads, windowed)
    assert (spec.norm_eps, sliding.attention.has_sinks) == (1e-6, True)
    plain = {name: shape for name, shape in model_weights(spec).items() if "qkv" not in name}
    stored = {
        name.replace("sinks", "attention_sink_bias"): shape
        for name, shape in plain.items()
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    for name, shape in list(stored.items()):
        if spec.format_of(name, shape) is not None:
            grid = tuple(-(-size // 128) for size in shape)
            stored[f"{name}_scale_inv"] = grid
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        stored |= {name: (rows[layer], 4096), f"{name}_scale_inv": (scales[layer], 32)}
    places = locate_weights(spec, stored, dict.fromkeys(stored, "model.safetensors"))
    for part in "qkv":
        weight = f"model.layers.0.self_attn.{part}_proj.weight"
        assert places[weight].num_groups == groups
        assert spec.format_of(weight, (1, 1)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern = .* 0 or 1 for each of 2 layers"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq"),
        ({"attention_projection_layout": "other"}, "fused_qkv or split"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta = 5.0"),
        ({"rope_parameters": {"factor": 2.0}}, "factor = 2.0"),
        ({"swa_rope_theta": None}, "what swa_rope_theta of this mimo_v2 is"),
        ({"hybrid_block_size": 6}, "hybrid_block_size = 6"),
    ],
)
def test_other_forms_of_mimo_v2_are_refused(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(MIMO_26 | changes)


def test_heads_of_mimo_v2_that_are_no_equal_groups_are_refused() -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "swa_num_key_value_heads": 3}
    spec = ModelSpec.from_config(MIMO_26 | heads)
    names = dict.fromkeys(model_weights(spec), (1,))
    with pytest.raises(UnsupportedModelError, match="no 3 equal groups"):
        locate_weights(spec, names, dict.fromkeys(names, "model.safetensors"))


STEP = PUBLISHED["step3p7"] | {"model_type": "step3p5"}
OTHER = STEP["attention_other_setting"]
GRANITE = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 16}
NEMOTRON = {"model_type": "nemotron_h"}
KIMI = PUBLISHED["kimi_linear"]
DELTA = KIMI["linear_attn_config"]
LING = PUBLISHED["bailing_hybrid"]
LING2 = {  # what Ling-2.6 has and lacks
    name: value
    for name, value in LING.items()
    if name not in {"no_kda_lora", "use_kda_lora", "short_conv_kernel_size", "mtp_use_kda"}
    and not name.startswith("kda_")
}
GLM = {"model_type": "glm5_next_text", "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIMO | {"hybrid_layer_pattern": [0, 1, 0]}, "hybrid_layer_pattern = .* computes"),
        (MIMO | {"moe_layer_freq": [1, 1, 1]}, "moe_layer_freq"),
        (MIMO | {"swa_rope_theta": 5000}, "swa_rope_theta = 5000"),
        (MIMO | {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads = 4 .* computes 2"),
        (MIMO | {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        (STEP | {"moe_layers_enum": "1,9"}, "moe_layers_enum"),
        (STEP | {"rope_theta": [500.0, 1e4, 1e5, 1e4]}, "rope_theta = .* equal"),
        (STEP | {"attention_other_setting": OTHER | {"head_dim": 24}}, "head_dim = 24 .* 16"),
        (STEP | {"attention_other_setting": OTHER | {"gqa_v_norm": True}}, "gqa_v_norm = True"),
        (STEP | {"yarn_only_types": [FULL, SLIDING]}, "yarn_only_types"),
        (STEP | {"zero_centered": False}, "zero_centered = False"),
        (STEP | {"layer_types": [FULL, SLIDING]}, "layer_types"),
        (GRANITE | {"time_step_limit": [0.1, float("inf")]}, "time_step_limit = .* 0 to infinity"),
        (GRANITE | {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        (GRANITE | {"mamba_d_head": 24}, r"mamba_d_head 24; .* \(8192\)"),
        (GRANITE | {"mamba_n_groups": 3}, "not a multiple of mamba_n_groups"),
        (GRANITE | {"layer_types": ["mamba", "mlp"]}, "layer_types"),
        (NEMOTRON | {"hybrid_override_pattern": "MEE*"}, "layers_block_type .* at most one of moe"),
        (NEMOTRON | {"hybrid_override_pattern": "-M*"}, "layers_block_type"),
        (NEMOTRON | {"moe_latent_size": -1}, "moe_latent_size"),
        (NEMOTRON | {"mamba_hidden_act": "relu"}, "mamba_hidden_act = 'relu'"),
        (KIMI | {"mla_use_nope": False}, "mla_use_nope = False"),
        (KIMI | {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        (KIMI | {"hidden_act": "situ"}, "hidden_act = 'situ'"),
        (KIMI | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI | {"linear_attn_config": DELTA | {"full_attn_layers": [4]}}, "layer_types"),
        (KIMI | {"linear_attn_config": DELTA | {"kda_layers": [0]}}, "linear_attention is 0"),
        (KIMI | {"linear_attn_config": DELTA | {"kda_layers": None}}, "full_attn_layers with kda"),
        (KIMI | {"linear_attn_config": DELTA | {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
        (KIMI | {"linear_attn_config": [4]}, "expected an object"),
        (LING2 | {"architectures": None}, "Ling-2.6, whose lightning attention .* Ling-3.0"),
        (LING | {"architectures": ["BailingMoeV2_5ForCausalLM"]}, "BailingMoeV3ForCausalLM"),
        (LING | {"group_norm_size": 4}, "group_norm_size = 4"),
        (LING | {"no_kda_lora": False}, "no_kda_lora = False"),
        (LING | {"use_mla_nope": True}, "use_mla_nope = True"),
        (LING | {"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise'"),
        (LING | {"kda_lower_bound": None}, "kda_lower_bound is null"),
        (LING | {"kda_lower_bound": 5}, "kda_lower_bound is 5; expected a negative number"),
        (LING | {"moe_shared_expert_intermediate_size": 24}, "= 24 .* computes 40"),
        (LING | {"expert_swiglu_limit_list": [0, 4]}, "expected a list of 4 entries"),
        (LING | {"head_dim": 16, "linear_head_dim": 16}, "head_dim is 16; .* must be 8"),
        (LING | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope"),
        (KIMI | {"layer_types": [FULL, "linear_attention"] * 2}, "say otherwise"),
        (GLM | {"linear_attn_config": {"kda_layers": [1, 2, 3]}}, r"kda_layers = .* \[0, 1, 2, 4"),
        (GLM | {"linear_attn_config": {"full_attn_layers": [4, 8]}}, r"full_attn_layers .*\[3, 7"),
        (GLM | {"linear_attn_config": {"gate": 1}}, "gate = 1"),
        (GLM | {"linear_attn_config": [4]}, "expected an object"),
        (GLM | {"linear_lower_bound": 5.0}, "linear_lower_bound is 5.0"),
        (GLM | {"qk_rope_head_dim": 64, "head_dim": 64}, "qk_rope_head_dim = 64"),
        (GLM | {"mhc": False}, "mhc = False"),
        (GLM | {"mla_use_nope": False}, "mla_use_nope = False"),
        (GLM | {"hc_mult": 1}, "hc_mult is 1; supported: 2 to 8"),
        (GLM | {"hc_mult": 9}, "hc_mult is 9; supported: 2 to 8"),
        (GLM | {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        (GLM | {"hc_eps": -1.0}, "hc_eps"),
        (GLM | {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
    ],
)
def test_what_transformers_does_not_follow_is_refused_by_name(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(config)


def test_networks_of_nemotron_belong_to_the_layer_before() -> None:
    spec = ModelSpec.from_config(NEMOTRON | {"hybrid_override_pattern": "MEM*-"})
    assert [layer.has_network for layer in spec.layers] == [True, False, True]
    assert [isinstance(layer.ffn, MoeSpec) for layer in spec.layers] == [True, False, False]
    assert [isinstance(layer.attention, AttentionSpec) for layer in spec.layers] == [
        False,
        False,
        True,
    ]
    names = ModelSpec.from_config(
        NEMOTRON | {"layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"]}
    )
    assert names == spec


GRANITE: dict[str, Any] = {
    "model_type": "granite_swa",
    "num_hidden_layers": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def test_each_layer_may_have_a_base_of_its_own() -> None:
    spec = ModelSpec.from_config(GRANITE | {"layer_rope_theta": [500, 0, 10_000.0]})
    assert [layer.rope and layer.rope.theta for layer in spec.layers] == [500.0, None, 10_000.0]
    one = ModelSpec.from_config(GRANITE | {"layer_rope_theta": None})
    assert [layer.rope.theta for layer in one.layers if layer.rope] == [10_000.0] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GRANITE | {"layer_rope_theta": [500, -1, 0]}, r"layer_rope_theta\[1\] is -1"),
        (GRANITE | {"layer_rope_theta": [500, 0, True]}, r"layer_rope_theta\[2\] is True"),
        (GRANITE | {"layer_rope_theta": [float("nan"), 0, 0]}, r"layer_rope_theta\[0\] is nan"),
        (GRANITE | {"layer_rope_theta": [500, 0]}, "expected a list of 3 entries"),
        ({"model_type": "kolibri1", "sliding_window": None}, "sliding_window is None"),
        ({"model_type": "kolibri1", "use_sliding_window": False}, "use_sliding_window = False"),
        ({"model_type": "sarvam_moe", "score_function": "softmax"}, "score_function = 'softmax'"),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(config)


def test_flint_attends_to_all_in_its_first_layers_every_fourth_and_the_last() -> None:
    spec = ModelSpec.from_config({"model_type": "flint", "num_hidden_layers": 12})
    full = [i for i, layer in enumerate(spec.layers) if layer.rope is None]
    assert full == [0, 1, 5, 9, 11]
    assert [i for i, one in enumerate(spec.layers) if not isinstance(one.ffn, MoeSpec)] == [0, 1]
