import dataclasses
import json
from functools import partial

import pytest
import transformers

from raymoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from raymoe.specs import model
from raymoe.specs.class_defaults import ClassDefaults, class_defaults
from raymoe.specs.families import FAMILIES
from raymoe.specs.families.rules import used_fields
from raymoe.specs.families.stored_names import NAMINGS
from raymoe.specs.model import DenseSpec, ModelSpec, MoeSpec
from raymoe.specs.presets_models import model_preset
from tests.parity.configurations import CONFIGURATIONS, FAMILY_CONFIGS, TEXT_CONFIGS
from tests.parity.oracle import make_model
from tests.unit.specs.config_classes import (
    NEEDED,
    config_of,
    meta_model,
    num_stored_elements,
    written,
)

MIXTRAL = {"model_type": "mixtral"}
TINY = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_fields_take_the_defaults_of_transformers(family: str) -> None:
    config = config_of(family)
    full = ModelSpec.from_config(written(config), name="x")
    silent = {"model_type": family} | NEEDED.get(family, {})
    assert ModelSpec.from_config(silent, name="x") == full
    assert full.hidden_size == config.hidden_size
    num_layers = full.num_layers
    if any(naming.numbers_networks for naming in NAMINGS.get(family, ())):
        num_layers += sum(layer.has_network for layer in full.layers)
    num_layers -= sum(layer.ngrams is not None for layer in full.layers)  # parts of the next ones
    assert num_layers == config.num_hidden_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_used_fields_are_those_of_the_configuration_class(family: str) -> None:
    config, rules = config_of(family), FAMILIES[family]
    names = set(vars(config)) | config.attribute_map.keys() | set(config.attribute_map.values())
    names |= {
        "head_dim",
        "rotary_dim",
        *NEEDED.get(family, {}),
    }  # read with getattr where not a field
    # What classes take as arguments alone.
    names |= {"per_layer_config", *rules.defaults, rules.rope.windowed_theta}
    names |= {name for name in used_fields(rules) - names if hasattr(config, name)}  # not annotated
    for outer in filter(partial(hasattr, config), rules.nested):
        names |= {f"{outer}.{name}" for name in vars(getattr(config, outer))}
    names |= {name for alias, name in rules.aliases.items() if alias in names}
    implied = {"intermediate_size", "max_window_layers", "first_k_dense_replace", *rules.fixed}
    implied |= {"moe_layer_freq", "sparse_attention_freq"}  # which MiniMax-M3's class takes out
    # Fields that transformers does not read (`specs.differences`).
    implied |= {"expert_swiglu_limit_list", "share_expert_swiglu_limit_list"}
    implied |= {"layers_without_network", "mlp_layer_types"}  # made of the layers of Nemotron-H
    implied |= {"index_topk_pattern"}  # an argument of GLM-5's class, not one of its fields
    implied |= {"rotates_full_layers"}  # made of the window of EXAONE-4.0
    # Of MiMo-V2.6, of which transformers has no class.
    implied |= {"attention_projection_layout", "swa_num_key_value_heads"}
    implied |= set() if rules.activation is None else {"hidden_act"}
    assert used_fields(rules) - implied <= names


def test_sources_of_configuration_classes_are_read_as_python_reads_them() -> None:
    for model_type in FAMILY_CONFIGS | TEXT_CONFIGS:
        defaults, theirs = class_defaults(model_type), type(config_of(model_type))
        fields = {one.name: one.default for one in dataclasses.fields(theirs)}
        for field in defaults.values.keys() & fields.keys():
            assert defaults.get(field) == fields[field], (model_type, field)
        assert defaults.aliases == theirs.attribute_map
        assert defaults.theta == theirs.default_theta


def test_a_missing_field_of_a_class_that_is_not_installed_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(model, "class_defaults", lambda name, _: ClassDefaults(model_type=name))
    whole = {name: value for name, value in written(config_of("mixtral")).items() if value != {}}
    assert ModelSpec.from_config(whole).num_layers == 32
    del whole["num_hidden_layers"]
    with pytest.raises(ConfigError, match=r"num_hidden_layers.*model_type 'mixtral'"):
        ModelSpec.from_config(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_configuration_class_is_known(family: str) -> None:
    ModelSpec.from_config(written(config_of(family)))


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(c, id=c.name, marks=() if c in CONFIGURATIONS[::6] else pytest.mark.slow)
        for c in CONFIGURATIONS
    ],
)
def test_parameters_are_those_of_the_model_in_transformers(configuration) -> None:
    config = getattr(transformers, FAMILY_CONFIGS[configuration.family])(**configuration.fields)
    spec = ModelSpec.from_config(written(config))
    assert spec.num_parameters == num_stored_elements(meta_model(config))


def test_known_models_have_their_published_sizes() -> None:
    mixtral = ModelSpec.from_config(MIXTRAL)
    assert round(mixtral.num_parameters / 1e9, 1) == 46.7
    assert round(mixtral.num_active_parameters / 1e9, 1) == 12.9
    assert mixtral.weight_bytes(2) == 2 * mixtral.num_parameters
    assert mixtral.kv_bytes_per_token(2) == 32 * 2 * 8 * 128 * 2


def test_older_names_of_rope_and_type_are_read() -> None:
    old = ModelSpec.from_config(
        {
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        }
    )
    new = ModelSpec.from_config(
        {
            "model_type": "llama",
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
        }
    )
    assert old == new
    assert old.dtype == "bfloat16"
    assert (old.ropes[0].kind, old.ropes[0].factor, old.ropes[0].theta) == ("linear", 4.0, 500000.0)


def test_window_of_mixtral_is_on_every_layer() -> None:
    assert windows(ModelSpec.from_config(MIXTRAL | {"sliding_window": 9}))[::31] == [9, 9]
    assert windows(ModelSpec.from_config(MIXTRAL))[0] is None


def test_windows_of_qwen_follow_their_switch_and_border() -> None:
    qwen2 = {"model_type": "qwen2_moe", "num_hidden_layers": 5, "sliding_window": 8}
    assert windows(ModelSpec.from_config(qwen2)) == [None] * 5
    on = qwen2 | {"use_sliding_window": True, "max_window_layers": 3}
    assert windows(ModelSpec.from_config(on)) == [8, None, 8, None, None]
    assert windows(ModelSpec.from_config(on | {"model_type": "qwen3"})) == [None] * 3 + [8, 8]


def test_layer_types_decide_where_transformers_reads_them() -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert windows(ModelSpec.from_config(config)) == [8, None]
    with pytest.raises(UnsupportedModelError, match="window is off"):
        ModelSpec.from_config(config | {"use_sliding_window": False})
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        ModelSpec.from_config(config | {"layer_types": ["linear_attention", "full_attention"]})
    with pytest.raises(UnsupportedModelError, match="disagrees"):
        ModelSpec.from_config(config | {"model_type": "qwen3_moe"})


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-linear-48b-a3b"])
def test_latents_are_no_int8(name: str) -> None:
    model_preset("gpt-oss-20b").check_int8_kv()
    model_preset("qwen3.5-35b-a3b").check_int8_kv()  # states have no KV
    with pytest.raises(ConfigError, match=r"layer \d+ keeps latents, index keys or entries"):
        model_preset(name).check_int8_kv()


def test_dense_layers_among_experts() -> None:
    spec = ModelSpec.from_config(TINY | {"mlp_only_layers": [1], "decoder_sparse_step": 2})
    kinds = [type(layer.ffn) for layer in spec.layers]
    assert kinds == [DenseSpec, DenseSpec, DenseSpec, MoeSpec]
    assert isinstance(ModelSpec.from_config(TINY | {"num_experts": 0}).layers[0].ffn, DenseSpec)


def test_biases_follow_the_family() -> None:
    def biases(config):
        attention = ModelSpec.from_config(config).layers[0].attention
        return attention.qkv_bias, attention.output_bias

    assert biases({"model_type": "qwen2_moe"}) == (True, False)
    assert biases({"model_type": "llama", "attention_bias": True}) == (True, True)
    assert biases({"model_type": "mistral"}) == (False, False)


def test_eos_may_be_one_token_several_or_none() -> None:
    assert ModelSpec.from_config(TINY | {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert ModelSpec.from_config(TINY | {"eos_token_id": 3}).eos_token_ids == (3,)
    assert ModelSpec.from_config(TINY | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2.*supported: .*llama"),
        ({"model_type": None}, "None"),
        ({"model_type": "my_model", "auto_map": {"AutoModel": "x.Y"}}, "never run"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
        ({"architectures": ["MyForCausalLM"]}, "MyForCausalLM"),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"attention_chunk_size": 8}, "attention_chunk_size = 8"),
        ({"is_causal": False}, "is_causal = False.*supported: True"),
        ({"hidden_act": "relu2"}, "relu2.*supported: silu"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
        ({"head_dim": 12}, "multiples of 8"),
        ({"use_cache": True, "_experts": 1, "chunk_size_feed_forward": 3}, "chunk_size_feed_f"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, "mrope"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(fields: dict, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelSpec.from_config(TINY | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "large"},
        {"hidden_size": 0},
        {"hidden_size": True},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"num_experts": 10**9},
        {"num_experts": 4096, "num_hidden_layers": 1024},
        {"vocab_size": 1.5},
        {"num_key_value_heads": 3},
        {"num_experts_per_tok": 9},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "yes"},
        {"mlp_only_layers": "0"},
        {"eos_token_id": "</s>"},
        {"num_experts": 4, "num_local_experts": 5},
    ],
)
def test_values_of_wrong_type_or_size_are_refused(fields: dict) -> None:
    with pytest.raises(ConfigError):
        ModelSpec.from_config(TINY | fields)


def test_fields_of_training_and_generation_are_ignored() -> None:
    harmless = {
        "router_aux_loss_coef": 0.1,
        "use_cache": False,
        "attention_dropout": 0.1,
        "temperature": 0.7,
        "transformers_version": "4.51.0",
        "quantization_config": None,
        "unknown_but_null": None,
        "auto_map": {"AutoTokenizer": ["x", None]},
    }
    assert ModelSpec.from_config(TINY | harmless) == ModelSpec.from_config(TINY)


def test_full_width_norm_needs_heads_as_wide_as_the_model() -> None:
    with pytest.raises(UnsupportedModelError, match="full width"):
        ModelSpec.from_config({"model_type": "olmoe", "head_dim": 64})


def test_from_directory_reads_what_transformers_wrote(tmp_path) -> None:
    configuration = CONFIGURATIONS[0]
    make_model(configuration).config.save_pretrained(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    assert spec.name == tmp_path.name
    assert spec.vocab_size == configuration.vocab_size


def test_snapshots_of_the_hub_cache_are_called_by_their_hub_name(tmp_path) -> None:
    snapshot = tmp_path / "models--org--some-name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MIXTRAL))
    assert ModelSpec.from_directory(snapshot).name == "org/some-name"


def test_from_directory_without_config_names_the_file(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelSpec.from_directory(tmp_path)
