"""The parts of a layer hold each of its weights once, projections side by side."""

import pytest

from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.layer_weights import layer_parts, layer_weights, ngram_tables, token_tables
from raymoe.specs.model import LayerSpec, ModelSpec
from raymoe.specs.weights import shapes
from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.oracle import make_config
from tests.unit.specs.config_classes import written

FIRST = list({c.family: c for c in reversed(CONFIGURATIONS)}.values())
BIASED = [c for c in CONFIGURATIONS if c.family in ("qwen2_moe", "llama") and c not in FIRST]


def layers_of(configuration: Configuration) -> tuple[int, tuple[LayerSpec, ...]]:
    spec = ModelSpec.from_config(written(make_config(configuration)))
    return spec.hidden_size, spec.layers


@pytest.mark.parametrize("configuration", FIRST, ids=lambda c: c.name)
def test_every_weight_is_in_one_part(configuration: Configuration) -> None:
    hidden, layers = layers_of(configuration)
    for layer in layers:
        parts = layer_parts(layer, hidden)
        held = [weight for part in parts for weight in part.shapes]
        read_by_host = shapes(token_tables(layer)) | shapes(ngram_tables(layer))
        assert sorted([*held, *read_by_host]) == sorted(layer_weights(layer, hidden))
        names = [part.name for part in parts]
        experts = [part for part in names if part not in ("attention", "common")]
        assert names == ["attention", *["common"] * ("common" in names), *experts]
        assert experts == [f"expert {expert}" for expert in range(len(experts))]
        assert "mlp.gate.weight" in parts[0].shapes or not experts


@pytest.mark.parametrize("configuration", [*FIRST, *BIASED], ids=lambda c: c.name)
def test_queries_keys_and_values_are_neighbours(configuration: Configuration) -> None:
    hidden, layers = layers_of(configuration)
    weights = list(layer_parts(layers[0], hidden)[0].shapes)
    for kind in ("weight", "bias"):
        wanted = [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
        if isinstance(layers[0].attention, AttentionSpec) and wanted[0] in weights:
            begin = weights.index(wanted[0])
            assert weights[begin : begin + 3] == wanted
