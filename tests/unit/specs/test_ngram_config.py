"""Layers of n-grams of a configuration: the published tables, formats, and refusals."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from raymoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from raymoe.specs.attention.ngrams import NGRAM_SCALE, NgramLayerSpec
from raymoe.specs.layer_weights import layer_prefix
from raymoe.specs.model import ModelSpec
from raymoe.specs.streams import GatedStreamsSpec
from raymoe.specs.tensor_shards import shard_model
from raymoe.specs.weight_format import Fp8Block
from raymoe.specs.weight_names import locate_weights, model_weights

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_models.json").read_text())
(CONFIG,) = (one["config"] for one in PUBLISHED if one["name"] == "Qwen/Qwen3.8-Flash-Next")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def make(quantization: dict[str, Any] | None = None, **fields: Any) -> ModelSpec:
    config = copy.deepcopy(CONFIG)
    config["text_config"] |= fields
    if quantization is not None:
        config["quantization_config"] = quantization
    return ModelSpec.from_config(config)


def test_the_published_table_has_its_rows_hashes_and_bytes() -> None:
    spec = make()
    assert spec.num_layers == 49
    attention = spec.layers[1].attention
    assert isinstance(attention, NgramLayerSpec)
    ngrams = attention.ngrams
    assert (attention.conv_width, attention.width) == (10, 10_240)
    assert (ngrams.num_rows, ngrams.row_width) == (320_001_536, 160)
    assert ngrams.tensor_rows == (2_500_012,) * 128
    # As the published checkpoint stores them.
    assert ngrams.multipliers == (23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071)
    assert ngrams.sizes[:3] == (20_000_003, 20_000_023, 20_000_033)
    assert ngrams.offsets[-1] == 300_001_275
    assert ngrams.separator == 248_044
    assert spec.table_bytes == 2 * 320_001_536 * 160
    assert make(FP8).table_bytes == 320_001_536 * 160
    assert make(FP8).with_table_dtype("bfloat16").table_bytes == spec.table_bytes
    assert spec.stored_bytes - spec.table_bytes == spec.weight_bytes(2)
    assert spec.max_model_len == 262_144
    assert spec.streams == GatedStreamsSpec(count=4, latent_width=320, norm_eps=1e-6)


def test_formats_of_layers_go_by_their_stored_numbers() -> None:
    plain = ["model.language_model.layers.1.ple.key_proj", "model.language_model.layers.3"]
    spec = make(FP8 | {"modules_to_not_convert": plain})
    block, shape = Fp8Block(), (2560, 2560)
    names = {
        "1.ngrams.k_proj": None,
        "1.ngrams.v_proj": block,
        "1.ngrams.table.5": None,
        "2.linear_attn.o_proj": block,
        "3.linear_attn.o_proj": block,
        "4.self_attn.o_proj": None,
        "4.mlp.experts.9.up_proj": None,
        "5.mlp.experts.9.up_proj": block,
        "5.attention_mixer.up": None,
    }
    found = {name: spec.format_of(f"model.layers.{name}.weight", shape) for name in names}
    assert found == names


GATED, CONV = 48 * 128, 2 * 16 * 128 + 48 * 128
FULL: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (2 * 24 * 256, 2560),
    "self_attn.k_proj.weight": (512, 2560),
    "self_attn.v_proj.weight": (512, 2560),
    "self_attn.o_proj.weight": (2560, 24 * 256),
    "self_attn.q_norm.weight": (256,),
    "self_attn.k_norm.weight": (256,),
    "self_attn.indexer.index_qk_proj.weight": (640, 2560),
    "self_attn.indexer.q_layernorm.weight": (128,),
    "self_attn.indexer.k_layernorm.weight": (128,),
}
LINEAR: dict[str, tuple[int, ...]] = {
    "linear_attn.in_proj_qkv.weight": (CONV, 2560),
    "linear_attn.in_proj_z.weight": (GATED, 2560),
    "linear_attn.in_proj_a.weight": (48, 2560),
    "linear_attn.in_proj_b.weight": (48, 2560),
    "linear_attn.conv1d.weight": (CONV, 1, 4),
    "linear_attn.A_log": (48,),
    "linear_attn.dt_bias": (48,),
    "linear_attn.norm.weight": (128,),
    "linear_attn.out_proj.weight": (2560, GATED),
}


def stored_of(*, has_scale: bool) -> dict[str, tuple[int, ...]]:
    """Tensors of four layers as the published files name them, experts one by one."""
    text = CONFIG["text_config"]
    width = 4 * text["hidden_size"]
    prefix, hashes = "model.language_model.", "ple.ple_embedding."
    mixer = {
        "hc_norm.weight": (width,),
        "input_mix_weight_down.weight": (320, width),
        "input_mix_weight_up.weight": (width, 320),
    }
    stored: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (248_320, 2560),
        f"{prefix}embed_tokens.weight": (248_320, 2560),
        **{f"{prefix}hyper_connection_mixer.{name}": shape for name, shape in mixer.items()},
        "mtp.fc.weight": (1,),
        "model.visual.blocks.0.attn.proj.weight": (1,),
    }
    mixer["block_inject_weight.weight"] = (4, width)
    mlp = {"gate_proj": (640, 2560), "up_proj": (640, 2560), "down_proj": (2560, 640)}
    for i in range(4):
        layer = f"{prefix}layers.{i}."
        for module in ("attn", "mlp"):
            stored |= {f"{layer}{module}_hyper_connection.{n}": s for n, s in mixer.items()}
        own: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (512, 2560),
            "mlp.shared_expert_gate.weight": (1, 2560),
        }
        for module in ("shared_expert", *(f"experts.{e}" for e in range(512))):
            own |= {f"mlp.{module}.{n}.weight": s for n, s in mlp.items()}
        own |= FULL if i == 3 else LINEAR
        if i == 1:
            table = f"{hashes}ngram_embedding.shard_"
            own |= {
                "ple.key_proj.weight": (width, 2560),
                "ple.value_proj.weight": (2560, 2560),
                "ple.norm_key.weight": (width,),
                "ple.norm_query.weight": (width,),
                "ple.norm_conv.weight": (width,),
                "ple.conv1d.weight": (width, 1, 4),
                f"{hashes}layer_multipliers": (3,),
                f"{hashes}ngram_heads_vocab_sizes": (16,),
                f"{hashes}ngram_heads_offsets": (16,),
                **{f"{table}{number}.weight": (2_500_012, 160) for number in range(128)},
            }
        stored |= {layer + name: shape for name, shape in own.items()}
    if has_scale:
        stored[f"{prefix}layers.1.{hashes}ngram_embedding.weight_scale"] = (1,)
    return stored


@pytest.mark.parametrize("has_scale", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_name_of_the_published_index_has_its_place(has_scale: bool) -> None:
    spec = make(num_hidden_layers=4, layer_types=CONFIG["text_config"]["layer_types"][:4])
    stored = stored_of(has_scale=has_scale)
    places = locate_weights(spec, stored, dict.fromkeys(stored, "model.safetensors"))
    assert places.keys() == model_weights(spec).keys()
    scale = places[layer_prefix(1) + NGRAM_SCALE]
    assert (scale.constant is None) == has_scale
    used = {name for place in places.values() for name in place.tensor_names()}
    unread = stored.keys() - used
    assert not {name for name in unread if not name.startswith(("mtp.", "model.visual."))}
    del stored["model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_77.weight"]
    with pytest.raises(CheckpointError, match="shard_77"):
        locate_weights(spec, stored, dict.fromkeys(stored, "model.safetensors"))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"ple_layer_ids": [49]}, ConfigError, "there are 48 layers"),
        ({"ple_layer_ids": [4]}, UnsupportedModelError, "layers of type linear_attention"),
        ({"eos_token_id": None}, ConfigError, "eos_token_id, which ends n-grams"),
        ({"ple_embed_dim": 2561}, ConfigError, "not a multiple of 16 hashes"),
        ({"ple_conv_kernel_size": 7}, UnsupportedModelError, "convolutions of 2 to 16"),
        ({"ngram_size": 1}, UnsupportedModelError, "n-grams of at least 2"),
        ({"output_gate_type": "gelu"}, UnsupportedModelError, "supported: sigmoid, silu"),
        ({"hc_count": 1}, UnsupportedModelError, "hc_count is 1; supported: 2 to 8"),
        ({"split_ngram_parts": 513}, ConfigError, "split_ngram_parts"),
    ],
)
def test_what_no_kernel_or_table_can_be_is_refused(fields, error, message) -> None:
    with pytest.raises(error, match=message):
        make(**fields)


def test_a_model_with_tables_is_not_divided_between_ranks() -> None:
    with pytest.raises(ConfigError, match="keep states, which are not divided"):
        shard_model(make(), 2)
