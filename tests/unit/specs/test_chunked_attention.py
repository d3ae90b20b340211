"""Llama-4: layers with rotation attend within chunks, the others scale their queries."""

import pytest

from raymoe.errors import UnsupportedModelError
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.kind import Temperature
from raymoe.specs.model import ModelSpec

LLAMA4 = {"model_type": "llama4_text", "max_position_embeddings": 1 << 20}


def attentions(**changes: object) -> list[AttentionSpec]:
    layers = ModelSpec.from_config(LLAMA4 | changes).layers
    assert all(isinstance(layer.attention, AttentionSpec) for layer in layers)
    return [layer.attention for layer in layers]  # type: ignore[misc]


def test_contexts_are_as_long_as_the_positions() -> None:
    spec = ModelSpec.from_config(LLAMA4)
    assert spec.max_model_len == 1 << 20
    assert [layer.rope is None for layer in spec.layers[:4]] == [False, False, False, True]


def test_chunks_and_temperatures_take_turns() -> None:
    found = [(each.chunk_tokens, each.temperature) for each in attentions()[:4]]
    assert found == [(8192, None)] * 3 + [(None, Temperature(beta=0.1, period=8192))]
    assert all(each.sliding_window is None for each in attentions())
    changed = attentions(attention_chunk_size=256, attn_scale=0.3, floor_scale=16)
    assert changed[0].chunk_tokens == 256
    assert changed[3].temperature == Temperature(beta=0.3, period=16)
    assert all(each.temperature is None for each in attentions(attn_temperature_tuning=False))


def test_chunks_of_broken_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="attention_chunk_size is 100; supported"):
        attentions(attention_chunk_size=100)
