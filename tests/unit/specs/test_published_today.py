"""Models of 2026 as their publishers configure them: sizes, names of tensors, and plans.

`published_models.json` holds the fields of each config.json that decide what the model computes,
where it was read, and what its publisher calls its size, in billions of parameters.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.search import find_plan
from raymoe.specs.families import MODEL_TYPE_ALIASES
from raymoe.specs.families.wrappers import MEDIA_TENSORS
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Nvfp4
from raymoe.specs.weight_names import locate_weights, model_weights
from raymoe.specs.workload import Workload
from raymoe.units import GIB
from tests.parity.configurations import model_class

MODELS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "published_models.json").read_text()
)
# transformers has no class of MiMo-V2.6.
IN_TRANSFORMERS = [model for model in MODELS if model["config"]["model_type"] != "mimo_v2"]
NODES = ("l4", "a5000", "l40s", "h100")
WORKLOAD = Workload(num_rows=10_000, prompt_tokens=418, generated_tokens=128)


def each(models: list[dict[str, Any]] = MODELS) -> Any:
    return pytest.mark.parametrize("model", models, ids=[model["name"] for model in models])


def unquantised(model: dict[str, Any]) -> dict[str, Any]:
    """A published configuration without its formats, of a type that transformers knows.

    Nor with what it does not read (`specs.differences`); its classes want numbers with a point.
    """
    unread = ("quant", "swiglu_limit_list")
    config = {
        name: float(value) if name == "kda_lower_bound" else value
        for name, value in model["config"].items()
        if not any(part in name for part in unread)
    }
    model_type = config["model_type"]
    config["model_type"] = MODEL_TYPE_ALIASES.get(model_type, model_type)
    return copy.deepcopy(config)


def last_digit(number: float) -> float:
    return 10.0 ** -len(f"{number:g}".partition(".")[2])


def test_there_are_at_least_25() -> None:
    assert len({model["name"] for model in MODELS}) >= 25


@each()
def test_a_model_has_its_published_parameters(model: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(model["config"])
    assert spec.num_parameters / 1e9 == pytest.approx(model["total"], rel=0.01)
    # Publishers count the embeddings, the head, both or neither as active.
    outer = spec.vocab_size * spec.hidden_size
    counts = [(spec.num_active_parameters - part * outer) / 1e9 for part in range(3)]
    nearest = min(counts, key=lambda count: abs(count - model["active"]))
    tolerance = max(0.01 * model["active"], last_digit(model["active"]))
    assert nearest == pytest.approx(model["active"], abs=tolerance)
    assert any(isinstance(layer.ffn, MoeSpec) for layer in spec.layers) == (
        model["total"] != model["active"]
    )


@each(IN_TRANSFORMERS)
def test_transformers_makes_the_same_model_of_a_configuration(model: dict[str, Any]) -> None:
    config = unquantised(model)
    theirs = own_fields(AutoConfig.for_model(**config))
    ours, back = ModelSpec.from_config(config), ModelSpec.from_config(theirs)
    # The classes have other tokens of end and other types where a configuration names none.
    assert replace(back, name=ours.name, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids) == ours


def own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What the class writes of itself, without the published fields that it only keeps."""
    known = type(config)().to_dict().keys() | {"head_dim"}  # read where it is no field
    return {
        name: own_fields(getattr(config, name)) if name in config.sub_configs and value else value
        for name, value in config.to_dict().items()
        if name in known
    }


def test_patterns_for_networks_do_not_exclude_the_experts_of_gemma4() -> None:
    (model,) = (model for model in MODELS if model["name"] == "nvidia/Gemma-4-26B-A4B-NVFP4")
    spec, layer = ModelSpec.from_config(model["config"]), "model.layers.3."
    plain = ("mlp.shared_expert.up_proj", "self_attn.q_proj", "mlp.gate")
    assert [spec.format_of(f"{layer}{name}.weight", (64, 64)) for name in plain] == [None] * 3
    assert spec.format_of(f"{layer}mlp.experts.5.up_proj.weight", (64, 64)) == Nvfp4()


@pytest.mark.slow
@each(IN_TRANSFORMERS)
def test_every_tensor_of_transformers_has_its_place(model: dict[str, Any]) -> None:
    """The model that transformers builds of the configuration, with shapes and no weights."""
    config = unquantised(model)
    if config["model_type"] == "step3p5":  # no class runs it alone
        config = {"model_type": "step3p7", "text_config": config}
    theirs = AutoConfig.for_model(**config)
    with torch.device("meta"):
        built = model_class(theirs)._from_config(theirs)
    stored = {
        # Modules hold the bias next to the router, checkpoints call it the router's.
        name.replace("mlp.e_score", "mlp.gate.e_score"): tuple(tensor.shape)
        for name, tensor in built.state_dict().items()
        if not any(part in name for part in MEDIA_TENSORS)
    }
    spec = ModelSpec.from_config(config)
    places = locate_weights(spec, stored, dict.fromkeys(stored, "model.safetensors"))
    assert places.keys() == model_weights(spec).keys()
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    sizes = [torch.Size(shape).numel() for name, shape in stored.items() if name not in tied]
    assert spec.num_parameters == sum(sizes)


@pytest.mark.slow
@each()
def test_each_is_planned_or_refused_with_numbers(
    model: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    spec = ModelSpec.from_config(model["config"], name=model["name"])
    for name in NODES:
        node = replace(hardware_preset(name), host_memory_bytes=512 * GIB)
        try:
            rate = find_plan(spec, node, WORKLOAD).tokens_per_s
        except InfeasiblePlanError as refusal:
            found = str(refusal).splitlines()[0]
            if not re.search(r"\d (GB|GiB|tokens)", str(refusal)):
                pytest.fail(f"no numbers: {refusal}")
        else:
            assert rate > 0
            found = f"{rate:,.1f} tokens/s"
        record_property(name, found)
