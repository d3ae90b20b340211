"""Models by name: what they hold and cache, as published and as transformers has it."""

import json

import pytest
import transformers

from raymoe.errors import UnknownOptionError, UnsupportedModelError
from raymoe.specs import model as model_module
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.class_defaults import class_defaults
from raymoe.specs.layers import DenseSpec, MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, PRESET_DEFAULTS, model_preset
from tests.unit.specs.config_classes import (
    FAMILY_CONFIGS,
    meta_model,
    num_stored_elements,
    written,
)

NAMES = [
    *("mixtral-8x7b", "mixtral-8x22b", "dbrx", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3"),
    *("kimi-k2", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b"),
    *("glm-4.5-air", "minimax-m2", "qwen3-next-80b-a3b"),
    *("qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "kimi-linear-48b-a3b"),
    *("nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"),
]
# Elements in the safetensors files of the repositories on the hub ("safetensors": {"total"}),
# without layers that predict a second token: of DeepSeek-V3's 684.5e9, 14e9 are in such a layer
# (README_WEIGHTS.md: 671e9 main model weights); GLM-4.5-Air is counted in
# PrimeIntellect/INTELLECT-3, which is the same model without it.
PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    # The repository also has 61 x 56 frequencies of the rope.
    "kimi-k2": 1_026_408_235_864 - 61 * 56,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5-air": 106_852_251_264,
    "minimax-m2": 228_689_764_864,
    "kimi-linear-48b-a3b": 49_122_681_728,
}
# Billions in all and of one token, as their publishers round them, and how many of embedding and
# head they count among the active.
BILLIONS = {
    "mixtral-8x7b": (46.7, 12.9, 2),  # Mistral AI, "Mixtral of experts" (announcement)
    "mixtral-8x22b": (141, 39, 2),  # Mistral AI, "Cheaper, better, faster, stronger"
    "dbrx": (132, 36, 2),  # Databricks, "Introducing DBRX"
    "deepseek-v2": (236, 21, 2),  # arXiv 2405.04434, abstract
    "deepseek-v2-lite": (15.7, 2.4, 1),  # arXiv 2405.04434, appendix B.1
    "deepseek-v3": (671, 37, 1),  # arXiv 2412.19437, abstract; README_WEIGHTS.md
    "kimi-k2": (1026, 32, 1),  # model card: 1T, 32B
    "qwen3-30b-a3b": (30.5, 3.3, 2),  # model card
    "qwen3-235b-a22b": (235, 22, 2),  # model card
    "gpt-oss-20b": (20.91, 3.61, 1),  # arXiv 2508.10925, table 1
    "gpt-oss-120b": (116.83, 5.13, 1),  # arXiv 2508.10925, table 1
    "glm-4.5-air": (107, 12, 0),  # arXiv 2508.06471, table 1 (106, with other conventions)
    "minimax-m2": (229, 10, 0),  # model card: 230B, 10B
    "qwen3-next-80b-a3b": (79.7, 3.9, 2),  # model card: 80B, 3B without embeddings
    "qwen3.5-35b-a3b": (34.7, 2.9, 1),  # in their names, here and below
    "qwen3.5-122b-a10b": (122, 10, 2),
    "qwen3.5-397b-a17b": (396, 17, 2),
    "kimi-linear-48b-a3b": (49.1, 3.1, 1),
    "nemotron-3-nano-30b-a3b": (31.58, 3.58, 2),
    "nemotron-3-super-120b-a12b": (120.6, 12.2, 1),
}
# Bytes of KV of one token with 16 bits each.
KV_BYTES = {
    "mixtral-8x7b": 131_072,  # 32 layers x 2 x 8 heads x 128
    "mixtral-8x22b": 229_376,  # 56 x 2 x 8 x 128
    "dbrx": 163_840,  # 40 x 2 x 8 x 128
    "deepseek-v2": 2 * 34_560,  # arXiv 2405.04434, table 9: 34.6K elements
    "deepseek-v2-lite": 2 * 15_552,  # the same: 15.6K elements
    "deepseek-v3": 70_272,  # arXiv 2505.09343, table 1: 70.272 KB
    "kimi-k2": 70_272,  # the same latent in as many layers
    "qwen3-30b-a3b": 98_304,  # 48 x 2 x 4 x 128
    "qwen3-235b-a22b": 192_512,  # 94 x 2 x 4 x 128
    "gpt-oss-20b": 49_152,  # 24 x 2 x 8 x 64
    "gpt-oss-120b": 73_728,  # 36 x 2 x 8 x 64
    "glm-4.5-air": 188_416,  # 46 x 2 x 8 x 128
    "minimax-m2": 253_952,  # 62 x 2 x 8 x 128
    # A quarter of the layers x 2 x 2 x 256; the others keep states.
    "qwen3-next-80b-a3b": 24_576,
    "qwen3.5-35b-a3b": 20_480,
    "qwen3.5-122b-a10b": 24_576,
    "qwen3.5-397b-a17b": 30_720,
    "kimi-linear-48b-a3b": 8_064,  # 7 x (512 + 64)
    "nemotron-3-nano-30b-a3b": 6_144,  # 6 x 2 x 2 x 128
    "nemotron-3-super-120b-a12b": 8_192,  # 8 x 2 x 2 x 128
}
# "total_size" of model.safetensors.index.json, or the sum over the headers of all files.
STORED_BYTES = {
    "mixtral-8x7b": 93_405_585_408,
    "qwen3-30b-a3b": 61_064_245_248,
    "gpt-oss-20b": 13_761_264_768,
    "gpt-oss-120b": 65_248_815_744,
    # Biases of the choice are stored in 32 bits, frequencies of the rope in 16.
    "kimi-k2": 1_029_173_256_720 - 60 * 384 * 2 - 61 * 56 * 2,
}


def test_the_documented_names_exist() -> None:
    assert sorted(MODEL_PRESETS) == sorted(NAMES)
    assert sorted(BILLIONS) == sorted(KV_BYTES) == sorted(NAMES)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_its_published_number_of_elements(name: str) -> None:
    assert model_preset(name).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_its_published_billions(name: str) -> None:
    model = model_preset(name)
    total, active, num_counted = BILLIONS[name]
    uncounted = (2 - num_counted) * model.vocab_size * model.hidden_size
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.004)
    assert (model.num_active_parameters - uncounted) / 1e9 == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_caches_its_published_bytes(name: str) -> None:
    assert model_preset(name).kv_bytes_per_token(2) == KV_BYTES[name]


@pytest.mark.parametrize("name", STORED_BYTES)
def test_a_checkpoint_has_its_published_bytes(name: str) -> None:
    assert model_preset(name).stored_bytes == STORED_BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_builds_a_model_with_as_many_elements(name: str) -> None:
    model, config = model_preset(name), dict(MODEL_PRESETS[name])
    config.pop("quantization_config", None)
    config.pop("model_type")
    config_class = getattr(transformers, FAMILY_CONFIGS[model.model_type])
    assert num_stored_elements(meta_model(config_class(**config))) == model.num_parameters


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dbrx"])
def test_what_transformers_makes_of_a_preset_is_the_same_model(name: str) -> None:
    config = dict(MODEL_PRESETS[name])
    quantization = config.pop("quantization_config", None)
    model_type = model_preset(name).model_type
    config.pop("model_type")
    again = written(getattr(transformers, FAMILY_CONFIGS[model_type])(**config))
    if quantization is not None:
        again["quantization_config"] = quantization
    assert ModelSpec.from_config(json.loads(json.dumps(again)), name=name) == model_preset(name)


def test_the_rope_of_dbrx_is_the_one_it_was_trained_with() -> None:
    """transformers 5.23 does not look for the base in attn_config, and writes 10000 beside it."""
    model = model_preset("dbrx")
    assert model.ropes[0].theta == 500_000.0
    config = written(transformers.DbrxConfig(**MODEL_PRESETS["dbrx"]))
    with pytest.raises(UnsupportedModelError, match=r"rope_theta is 500000, but 10000\.0"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_asks_no_library_and_is_what_transformers_says(name: str, monkeypatch) -> None:
    whole = ModelSpec.from_config(MODEL_PRESETS[name], name=name)
    monkeypatch.setattr(model_module, "class_defaults", lambda *_: pytest.fail("asked"))
    assert model_preset(name) == whole


@pytest.mark.parametrize("model_type", PRESET_DEFAULTS)
def test_defaults_of_presets_are_those_of_the_class(model_type: str) -> None:
    ours, theirs = PRESET_DEFAULTS[model_type], class_defaults(model_type)
    assert ours.values.items() <= theirs.values.items()
    assert ours.aliases.items() <= theirs.aliases.items()


def test_latent_attention_of_deepseek() -> None:
    attention = model_preset("deepseek-v3").layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    assert (attention.num_heads, attention.q_lora_rank, attention.cache_width) == (128, 1536, 576)
    # arXiv 2309.00071, section 3.4, squared: queries and keys are both stretched.
    mscale = 0.1 * 1.0 * 3.688879454113936 + 1.0  # log(40)
    assert attention.scale == pytest.approx(192**-0.5 * mscale**2)
    lite = model_preset("deepseek-v2-lite").layers[0].attention
    assert isinstance(lite, LatentAttentionSpec)
    assert lite.q_lora_rank is None
    assert lite.scale == pytest.approx(192**-0.5 * (0.0707 * 3.688879454113936 + 1.0) ** 2)


@pytest.mark.parametrize(
    ("name", "num_dense", "num_groups", "top_groups", "scale"),
    [
        ("deepseek-v2", 1, 8, 3, 16.0),
        ("deepseek-v2-lite", 1, 1, 1, 1.0),
        ("deepseek-v3", 3, 8, 4, 2.5),
        ("kimi-k2", 1, 1, 1, 2.827),
        ("glm-4.5-air", 1, 1, 1, 1.0),
        ("minimax-m2", 0, 1, 1, 1.0),
        ("mixtral-8x7b", 0, 1, 1, 1.0),
    ],
)
def test_routers_and_dense_layers(
    name: str, num_dense: int, num_groups: int, top_groups: int, scale: float
) -> None:
    model = model_preset(name)
    kinds = [type(layer.ffn) for layer in model.layers]
    assert kinds == [DenseSpec] * num_dense + [MoeSpec] * (model.num_layers - num_dense)
    moe = model.layers[-1].ffn
    assert isinstance(moe, MoeSpec)
    assert (moe.router.num_groups, moe.router.top_groups) == (num_groups, top_groups)
    assert moe.router.scale == scale
    assert (moe.router.group_score is None) == (num_groups == 1)


def test_gpt_oss_slides_on_every_other_layer_and_has_sinks_and_biases() -> None:
    model = model_preset("gpt-oss-20b")
    attentions = [layer.attention for layer in model.layers]
    assert all(isinstance(attention, AttentionSpec) for attention in attentions)
    assert [attention.sliding_window for attention in attentions] == [128, None] * 12
    assert all(attention.has_sinks and attention.qkv_bias for attention in attentions)
    moe = model.layers[0].ffn
    assert isinstance(moe, MoeSpec)
    assert moe.has_bias
    assert moe.router.has_bias
    assert moe.clamp is not None
    assert (moe.clamp.gain, moe.clamp.limit) == (1.702, 7.0)


@pytest.mark.parametrize(("name", "rotated"), [("glm-4.5-air", 64), ("minimax-m2", 64)])
def test_half_of_each_head_is_rotated(name: str, rotated: int) -> None:
    assert model_preset(name).ropes[0].rotary_dim == rotated


def test_case_of_letters_does_not_matter() -> None:
    assert model_preset("Mixtral-8x7B") == model_preset("mixtral-8x7b")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'mixtral-8x7b'"):
        model_preset("mixtral-8x7")
