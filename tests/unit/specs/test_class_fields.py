"""Fields that transformers neither declares nor reads are ignored, and those that it reads not."""

import json
import logging
from pathlib import Path

import pytest
import transformers

from raymoe.errors import UnsupportedModelError
from raymoe.specs import config as config_module
from raymoe.specs.class_defaults import ClassDefaults, class_defaults
from raymoe.specs.class_fields import is_read
from raymoe.specs.families import FAMILIES
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from tests.unit.specs.config_classes import FAMILY_CONFIGS, config_of, written

MIXTRAL = {"model_type": "mixtral"}
DATA = Path(__file__).parents[2] / "data" / "reuploads.json"
REUPLOADS = json.loads(DATA.read_text())
# What converters, trainers and other classes leave in a config.json.
CONVERTERS = {
    "unk_token_id": 0,
    "_model_name_or_path": "base",
    "_sliding_window_pattern": 6,
    "transformers.js_config": {"dtype": "q4"},
    "mlp_only_layers": [],
    "qk_layernorm": False,
    "residual_multiplier": 0.5,
    "clip_qkv": 8.0,
    "mlp_bias": True,
    "model_max_length": 4096,
    "pretraining_tp": 4,
}


@pytest.fixture(autouse=True)
def forget_logged() -> None:
    config_module.log_unread.cache_clear()


def test_fields_that_nothing_reads_are_ignored_and_named_in_one_line(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        spec = ModelSpec.from_config(MIXTRAL | CONVERTERS, name="mine")
        assert ModelSpec.from_config(MIXTRAL | CONVERTERS, name="mine") == spec
    assert spec == ModelSpec.from_config(MIXTRAL, name="mine")
    (line,) = caplog.messages
    assert line.startswith("mine: ")
    assert set(CONVERTERS) - {"pretraining_tp"} == {
        name for name in CONVERTERS if repr(name) in line
    }


def test_a_file_full_of_fields_makes_a_short_line(caplog) -> None:
    names = {f"field_{i}\n{'x' * 999}": i for i in range(2_000)}
    ModelSpec.from_config(MIXTRAL | names)
    (line,) = caplog.messages
    assert len(line) < 10_000
    assert "\n" not in line
    assert line.endswith("and 1,900 more")


def test_fields_of_the_whole_do_not_concern_its_text_part() -> None:
    """A text part that was saved alone may keep them."""
    directory = class_defaults("gemma3_text").directory
    assert directory is not None
    for model_type, expected in {"gemma3_text": False, "gemma3": True}.items():
        assert is_read("mm_tokens_per_image", model_type, directory) is expected
    assert is_read("query_pre_attn_scalar", "gemma3_text", directory)


@pytest.mark.parametrize("entry", REUPLOADS, ids=lambda entry: entry["name"])
def test_what_others_have_made_of_models_is_read_or_refused_by_name(entry: dict) -> None:
    """By published values; the rest is that of the model that they were made of."""
    base = MODEL_PRESETS[entry["base"]] if entry["base"] else {}
    config = {**base, **entry["fields"]}
    if " = " in entry["result"]:
        with pytest.raises(UnsupportedModelError, match=entry["result"]):
            ModelSpec.from_config(config)
        return
    found = ModelSpec.from_config(config).quantization
    assert (found.name if found else "plain") == entry["result"]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"attention_chunk_size": 8}),  # read by all caches
        ("mixtral", {"chunk_size_feed_forward": 2}),  # of the base class
        ("mixtral", {"is_causal": False}),  # read by all masks
        ("qwen3_moe", {"per_layer_config": {"0": {"head_dim": 8}}}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_what_transformers_reads_and_this_does_not_is_refused(family: str, fields: dict) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(fields))):
        ModelSpec.from_config({"model_type": family} | fields)


def test_without_transformers_no_unknown_field_is_ignored() -> None:
    found = class_defaults("mixtral")
    defaults = ClassDefaults(model_type="mixtral", values=found.values, aliases=found.aliases)
    assert ModelSpec.from_config(MIXTRAL, defaults=defaults).num_layers == 32
    with pytest.raises(UnsupportedModelError, match=r"unk_token_id.*cannot be asked"):
        ModelSpec.from_config(MIXTRAL | {"unk_token_id": 0}, defaults=defaults)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_a_class_writes_is_one_that_is_read(family: str) -> None:
    directory = class_defaults(family).directory
    assert directory is not None
    fields = written(config_of(family)).keys() - {"transformers_version"}
    assert not {name for name in fields if not is_read(name, family, directory)}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma3_text", "deepseek_v3"])
def test_an_ignored_field_changes_nothing_in_transformers(family: str) -> None:
    """It is set as an attribute, or dropped; no other attribute differs."""
    kind = getattr(transformers, FAMILY_CONFIGS[family])
    directory = class_defaults(family).directory
    assert directory is not None
    unread = {
        name: value for name, value in CONVERTERS.items() if not is_read(name, family, directory)
    }
    plain, more = kind().to_dict(), kind(**json.loads(json.dumps(unread))).to_dict()
    assert {name: more[name] for name in plain} == plain
