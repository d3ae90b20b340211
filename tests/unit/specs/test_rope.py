import pytest

from raymoe.errors import UnsupportedModelError
from raymoe.specs.rope import RopeRule, RopeSpec, parse_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def parse(config: dict, **rule) -> RopeSpec:
    return parse_rope(
        config,
        head_dim=16,
        max_position_embeddings=2048,
        rule=RopeRule(**{"is_partial": True, **rule}),
    )


def test_without_fields_the_rope_is_plain() -> None:
    spec = parse({})
    assert (spec.kind, spec.theta, spec.rotary_dim) == ("default", 10_000.0, 16)
    assert spec.max_model_len == 2048


def test_partial_factor_rotates_the_leading_dimensions() -> None:
    assert parse({"partial_rotary_factor": 0.5}).rotary_dim == 8
    assert parse({"rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_dim == 4


def test_partial_factor_is_refused_where_transformers_does_not_honour_it() -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        parse({"partial_rotary_factor": 0.5}, is_partial=False)
    assert parse({"partial_rotary_factor": 1.0}, is_partial=False).rotary_dim == 16


def test_scaling_wins_over_parameters() -> None:
    config = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 8.0},
    }
    assert parse(config).factor == 2.0


def test_contexts_of_stretched_ropes() -> None:
    assert parse({"rope_scaling": {"type": "linear", "factor": 2.0}}).max_model_len == 4096
    assert parse({"rope_scaling": YARN}).max_model_len == 4096
    assert parse({"rope_scaling": YARN | {"factor": 1.5}}).max_model_len == 2048


def test_top_level_original_length_wins() -> None:
    config = {"rope_scaling": YARN, "original_max_position_embeddings": 512}
    assert parse(config).original_max_tokens == 512


PHI = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 512,
}


def test_named_factors_of_cosine_and_sine_come_with_short_wavelengths() -> None:
    spec = parse({"rope_scaling": PHI}, has_mscale=True)
    assert (spec.kind, spec.attention_factor) == ("longrope", 1.25)
    assert spec.short_factor == spec.long_factor == (1.0,) * 8


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"long_mscale": 1.5}, "short_mscale = 1.25 and long_mscale = 1.5 differ"),
        ({"short_mscale": None}, "short_mscale"),
        ({"long_factor": [2.0] * 7}, "long_factor"),
        ({"attention_factor": 1.0}, "attention_factor"),
        ({"type": "yarn"}, "yarn.*supported: default, longrope"),
    ],
)
def test_other_named_factors_are_refused(fields: dict, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse({"rope_scaling": PHI | fields}, has_mscale=True, kinds=("default", "longrope"))


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "su"}, "su"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 1000}, "alpha"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "keep one"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}, "orig"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, "short"),
        (YARN | {"truncate": 1}, "truncate"),
        (YARN | {"original_max_position_embeddings": "1024"}, "original"),
        ({"full_attention": {"rope_type": "default"}}, "per layer"),
        ({"partial_rotary_factor": 1.5}, "24 of 16"),
        ([1], "object"),
    ],
)
def test_unknown_or_senseless_fields_are_refused(scaling, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse({"rope_scaling": scaling})
