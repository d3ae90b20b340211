"""Models whose text part runs: what is read, what stays on disk, and what is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers

from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.families import FAMILIES, MODEL_TYPE_ALIASES, WRAPPERS
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import locate_weights, model_weights
from tests.unit.specs.config_classes import config_of, meta_model, written

TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
THINKER = {"text_config": TEXT, "image_token_id": 90, "audio_token_id": 91}
OMNI = {"model_type": "qwen3_omni_moe", "thinker_config": THINKER, "talker_config": {"x": 1}}
KIMI = {"model_type": "kimi_k25", "media_placeholder_token_id": 7, "text_config": {}}


def test_texts_of_wrappers_are_families() -> None:
    texts = {kind for wrapper in WRAPPERS.values() for kind in wrapper.texts}
    assert texts <= FAMILIES.keys() | MODEL_TYPE_ALIASES.keys()


def test_the_text_part_lies_two_levels_deep_and_other_media_stay_on_disk() -> None:
    spec = ModelSpec.from_config(OMNI)
    assert (spec.model_type, spec.wrapper) == ("qwen3_omni_moe_text", "qwen3_omni_moe")
    stored = {f"thinker.{name}": shape for name, shape in model_weights(spec).items()}
    media = {"talker.model.norm.weight": (3,), "thinker.visual.patch.weight": (2, 2)}
    media |= {"code2wav.decoder.0.weight": (5,), "thinker.audio_tower.conv.weight": (1, 2)}
    files = dict.fromkeys(stored | media, "model.safetensors")
    places = locate_weights(spec, stored | media, files)
    assert places.keys() == model_weights(spec).keys()
    with pytest.raises(CheckpointError, match=r"thinker\.model\.layers\.5\.mlp"):
        locate_weights(
            spec,
            stored | {"thinker.model.layers.5.mlp.weight": (1,)},
            files | {"thinker.model.layers.5.mlp.weight": "model.safetensors"},
        )


def test_fields_of_a_text_without_images_may_lie_in_the_whole() -> None:
    text = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 8}
    text |= {"hc_mult": 2, "eos_token_id": [3], "dtype": "bfloat16"}
    whole = {"model_type": "glm5_next", "image_token_id": 7}
    spec = ModelSpec.from_config(whole | text)
    assert spec == ModelSpec.from_config(whole | {"text_config": text})
    assert spec == ModelSpec.from_config(written(transformers.Glm5NextConfig(**whole, **text)))
    assert dict(spec.media_tokens)[7] == "image_token_id"


def test_what_the_whole_says_counts_where_the_text_part_is_silent() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": []}
    fp8["modules_to_not_convert"] = ["model.language_model.layers.0.self_attn", "model.visual"]
    whole = {"model_type": "qwen3_vl_moe", "text_config": TEXT, "quantization_config": fp8}
    spec = ModelSpec.from_config(whole | {"dtype": "bfloat16", "eos_token_id": [4, 5]})
    assert (spec.dtype, spec.eos_token_ids) == ("bfloat16", (4, 5))
    assert spec.quantization is not None
    assert spec.quantization.format_of("model.layers.0.self_attn.q_proj.weight") is None
    assert spec.quantization.format_of("model.layers.1.self_attn.q_proj.weight") is not None


@pytest.mark.parametrize(
    ("whole", "text", "is_tied"),
    [(None, None, False), (True, None, True), (True, False, False), (False, True, False)],
)
def test_a_head_is_tied_if_no_part_says_otherwise(whole: Any, text: Any, is_tied: bool) -> None:
    config = {"model_type": "qwen3_vl_moe", "text_config": TEXT | {"tie_word_embeddings": text}}
    spec = ModelSpec.from_config(config | {"tie_word_embeddings": whole})
    assert spec.tie_word_embeddings is is_tied


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (KIMI | {"text_config": None}, "text_config is None; expected an object"),
        (KIMI | {"text_config": {"model_type": "llama"}}, r"text_config\.model_type = 'llama'"),
        (KIMI | {"architectures": ["KimiForCausalLM"]}, "supported: Kimi_K25"),
        (KIMI | {"text_config": {"is_causal": False}}, "is_causal = False"),
        (KIMI | {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        (OMNI | {"thinker_config": {"text_config": []}}, r"text_config is \[\]"),
        ({"model_type": "llava", "text_config": {}}, "llava.*supported: .*qwen3_vl_moe"),
    ],
)
def test_what_is_no_text_part_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelSpec.from_config(config)


def test_tokens_of_other_media_are_refused_by_the_name_of_their_field(tmp_path) -> None:
    spec = ModelSpec.from_config(OMNI)
    tokenizer = Tokenizer(tmp_path, spec.vocab_size, spec.media_tokens)
    assert tokenizer.encode([1, 2]).tolist() == np.array([1, 2]).tolist()
    with pytest.raises(ConfigError, match="prompt token 1 is 91, the audio_token_id of this"):
        tokenizer.encode([1, 91])
    kimi = dict(ModelSpec.from_config(KIMI).media_tokens)
    assert kimi[7] == "media_placeholder_token_id"


NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 32,
    "hybrid_override_pattern": "ME*E",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
}


def test_nemotron_omni_is_read_in_the_names_of_its_publisher_and_of_transformers() -> None:
    published = {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "auto_map": {"AutoModel": "modeling.NemotronH_Nano_Omni_Reasoning_V3"},
        "llm_config": NEMOTRON,
        "sound_config": {"model_type": "parakeet"},
        "img_context_token_id": 18,
        "sound_context_token_id": 27,
    }
    spec = ModelSpec.from_config(published)
    assert spec.media_tokens == ((18, "image_token_id"), (27, "audio_token_id"))
    newer = {"model_type": "nemotron_h_omni", "text_config": NEMOTRON, "image_token_id": 18}
    other = ModelSpec.from_config(newer | {"audio_token_id": 27, "llm_config": {}})
    assert replace(other, name=spec.name, wrapper=spec.wrapper) == spec
    inner = meta_model(config_of("nemotron_h", **NEMOTRON))
    stored = {
        f"language_model.{name.replace('model.', 'backbone.', 1)}": tuple(tensor.shape)
        for name, tensor in inner.state_dict().items()
    }
    media = {"mlp1.0.weight": (3,), "vision_model.radio_model.model.pos_embed": (2, 2)}
    media |= {"sound_encoder.encoder.layers.0.norm_out.weight": (5,)}
    files = dict.fromkeys(stored | media, "model.safetensors")
    assert locate_weights(spec, stored | media, files).keys() == model_weights(spec).keys()
