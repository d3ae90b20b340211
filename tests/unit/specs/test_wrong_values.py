"""Values of wrong types and sizes in every field of a `config.json`: refused by name, never raw."""

import copy
import functools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.class_defaults import class_defaults
from raymoe.specs.config import ConfigFields
from raymoe.specs.families import FAMILIES
from raymoe.specs.families.rules import used_fields
from raymoe.specs.model import ModelSpec
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.hybrid_families import AS_PUBLISHED
from tests.quantised_checkpoints import CASES
from tests.unit.specs.config_classes import NEEDED

VALUES = (
    *([], {}, None, "x", "", -1, 0, 1, 1.5, 1e9, 1e300, math.nan, math.inf, True, False),
    *(2**40, 2**100, 10**400, [[]], [{}], [None], ["x"], [-1], {"x": 1}, {"a": {"b": []}}),
    {"rope_type": []},
)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "attention_factor": 1.0,
    "truncate": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [1.0] * 64,
    "short_mscale": 1.0,
    "long_mscale": 1.0,
    "original_max_position_embeddings": 4096,
}
OF_ALL_FAMILIES = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "eos_token_id", "layer_types"),
    *("original_max_position_embeddings", "partial_rotary_factor", "pruned_heads"),
    *("quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim"),
    *("sliding_window", "torch_dtype", "unknown"),
)
MIXTRAL = {"model_type": "mixtral"}
ROPES = [
    {"rope_scaling": YARN},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LONGROPE},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
]


def config_of(family):
    """A configuration with every field that the family uses."""
    config, rules = {"model_type": family}, FAMILIES[family]
    fixed, fields = rules.fixed, ConfigFields({}, rules, class_defaults(family, rules.nested))
    for name in sorted(used_fields(rules)):
        *outer, last = name.split(".")
        place = config
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = fixed[name][0] if name in fixed else fields.get(name)
    return config


def places(config, outer=()):
    for name, value in config.items():
        yield (*outer, name)
        if isinstance(value, dict):
            yield from places(value, (*outer, name))


def check_place(config, place, value):
    """Read the configuration with a wrong value at a place."""
    *outer, last = place
    inner = wrong = copy.deepcopy(config)
    for name in outer:
        inner = inner[name]
    inner[last] = value
    try:
        ModelSpec.from_config(wrong)
    except ConfigError:  # UnsupportedModelError is one
        pass
    except Exception as error:
        error.add_note(f"{'.'.join(place)} = {value!r}")
        raise


def check_each_place(config, changed=None):
    """Read the configuration with every wrong value at each place, or those of `changed`."""
    for place in places(config if changed is None else changed):
        for value in VALUES:
            check_place(config, place, value)


@functools.cache
def right(family):
    config = config_of(family) | NEEDED.get(family, {})
    ModelSpec.from_config(config)  # what is wrong in a test is the one value
    return config


@functools.cache
def published_form(family):
    own = (c for c in CONFIGURATIONS if c.family == family and c.name.endswith(AS_PUBLISHED))
    config = next(own).fields | {"model_type": family}
    ModelSpec.from_config(config)
    return config


PUBLISHED = ("mimo_v2_flash", "step3p7", "minimax_m3_vl_text")
families = st.sampled_from(sorted(FAMILIES))


@st.composite
def configurations(draw):
    """One, and what of it may be wrong."""
    form = draw(st.sampled_from(("fields", "fields of others", "ropes", "published", "quantised")))
    if form == "published":
        config = published_form(draw(st.sampled_from(PUBLISHED)))
        return config, config
    if form == "quantised":
        quantised = {"quantization_config": draw(st.sampled_from(CASES)).config}
        return MIXTRAL | quantised, quantised
    config = right(draw(families))
    if form == "ropes":
        ropes = draw(st.sampled_from(ROPES))
        return config | ropes, ropes
    return config, config if form == "fields" else dict.fromkeys(OF_ALL_FAMILIES)


@settings(max_examples=600)
@given(configurations(), st.data())
def test_no_value_of_any_field_raises_anything_but_its_own_error(configuration, data):
    config, changed = configuration
    place = data.draw(st.sampled_from(list(places(changed))))
    check_place(config, place, data.draw(st.sampled_from(VALUES)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_a_field_raises_anything_but_its_own_error(family):
    config = right(family)
    check_each_place(config)
    check_each_place(config, dict.fromkeys(OF_ALL_FAMILIES))
    for ropes in ROPES:
        check_each_place(config | ropes, ropes)


@pytest.mark.slow
@pytest.mark.parametrize("family", PUBLISHED)
def test_no_value_of_a_published_form_raises_anything_but_its_own_error(family):
    check_each_place(published_form(family))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_value_of_a_quantisation_raises_anything_but_its_own_error(case):
    quantised = {"quantization_config": case.config}
    check_each_place(MIXTRAL | quantised, quantised)


@pytest.mark.parametrize("value", ["[" * 900 + "]" * 900, "1" + "0" * 5000, '{"a": 1, "a": 2}'])
def test_values_that_python_cannot_work_with_are_refused_when_they_are_read(tmp_path, value):
    config = json.dumps(MIXTRAL)[:-1] + f', "hidden_act": {value}}}'
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        ModelSpec.from_directory(tmp_path)


@pytest.mark.parametrize("value", [2**31, -1, "2", [2, None]])
def test_tokens_that_no_vocabulary_has_end_no_text(value):
    with pytest.raises(ConfigError, match="eos_token_id is"):
        ModelSpec.from_config(MIXTRAL | {"eos_token_id": value})
