"""What the decoder cannot compute is refused by name, and all of what it can is let through."""

import pytest

from raymoe.errors import UnsupportedModelError
from raymoe.model.support import check_supported
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from tests.parity.configurations import CONFIGURATIONS
from tests.unit.specs.config_classes import config_of, written

RUNS = {
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "glm-4.5-air",
    "dbrx",
    "deepseek-v2",
    "deepseek-v2-lite",
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_what_is_tested_against_transformers_is_supported(configuration) -> None:
    check_supported(
        ModelSpec.from_config(written(config_of(configuration.family, **configuration.fields)))
    )


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_models_run_or_are_refused(name: str) -> None:
    if name in RUNS:
        check_supported(model_preset(name))
    else:
        with pytest.raises(UnsupportedModelError, match=name):
            check_supported(model_preset(name))


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (MODEL_PRESETS["deepseek-v3"], r"\(deepseek_v3\) needs quantised weights"),
        (MODEL_PRESETS["gpt-oss-20b"], "needs quantised weights"),
        (
            MODEL_PRESETS["mixtral-8x7b"]
            | {"quantization_config": MODEL_PRESETS["deepseek-v3"]["quantization_config"]},
            "needs quantised weights, which",
        ),
    ],
)
def test_everything_that_is_missing_is_named(config, missing: str) -> None:
    with pytest.raises(UnsupportedModelError, match=missing):
        check_supported(ModelSpec.from_config(config))
