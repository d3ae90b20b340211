"""The parts of a layer hold each of its weights once, projections side by side."""

import pytest

from raymoe.specs.layer_weights import layer_parts, layer_weights
from raymoe.specs.model import LayerSpec, ModelSpec
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS

FIRST = {c.family: c.name for c in reversed(CONFIGURATIONS)}
BIASED = [c.name for c in CONFIGURATIONS if c.family in ("qwen2_moe", "llama")]


def layers_of(name: str) -> tuple[int, tuple[LayerSpec, ...]]:
    spec = ModelSpec.from_directory(get_case(name).directory)
    return spec.hidden_size, spec.layers


@pytest.mark.parametrize("name", FIRST.values())
def test_every_weight_is_in_one_part(name: str) -> None:
    hidden, layers = layers_of(name)
    for layer in layers:
        parts = layer_parts(layer, hidden)
        held = [weight for part in parts for weight in part.shapes]
        assert sorted(held) == sorted(layer_weights(layer, hidden))
        names = [part.name for part in parts]
        experts = [part for part in names if part not in ("attention", "common")]
        assert names == ["attention", *["common"] * ("common" in names), *experts]
        assert experts == [f"expert {expert}" for expert in range(len(experts))]
        assert "mlp.gate.weight" in parts[0].shapes or not experts


@pytest.mark.parametrize("name", [*FIRST.values(), *BIASED])
def test_queries_keys_and_values_are_neighbours(name: str) -> None:
    hidden, layers = layers_of(name)
    weights = list(layer_parts(layers[0], hidden)[0].shapes)
    for kind in ("weight", "bias"):
        wanted = [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
        if wanted[0] in weights:
            begin = weights.index(wanted[0])
            assert weights[begin : begin + 3] == wanted
