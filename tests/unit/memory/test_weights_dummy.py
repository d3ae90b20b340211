"""Weights that are on no disk have the shapes, types and bytes of the model."""

import json
from itertools import pairwise

import pytest
import torch

from raymoe.codecs import StoredMatrix, as_tensor
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.memory.weights import DummyWeights
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FORMATS = {
    "plain": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
}
PROMPTS = [[1, 2, 3], [7] * 20, list(range(50))]


def config(name: str) -> dict[str, object]:
    return MODEL if FORMATS[name] is None else MODEL | {"quantization_config": FORMATS[name]}


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_has_its_shape_and_is_finite(name: str) -> None:
    spec = ModelSpec.from_config(config(name))
    weights = DummyWeights(spec, torch.bfloat16)
    total = 0
    for weight_name, shape in model_weights(spec).items():
        weight = weights(weight_name)
        assert tuple(weight.shape) == shape
        is_stored = isinstance(weight, StoredMatrix)
        assert is_stored == (spec.format_of(weight_name, shape) is not None)
        decoded = as_tensor(weight, torch.float32) if is_stored else weight.float()
        assert decoded.isfinite().all()
        total += weight.num_bytes if is_stored else weight.nbytes
    assert total == spec.weight_bytes(2)


def test_matrices_differ_and_are_the_same_each_time() -> None:
    spec = ModelSpec.from_config(MODEL)
    weights, again = (DummyWeights(spec, torch.bfloat16) for _ in range(2))
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(3) for e in range(6)]
    for name, other in pairwise(names):
        assert not torch.equal(weights(name), weights(other))
        assert torch.equal(weights(name), again(name))


@pytest.mark.parametrize("name", FORMATS)
def test_views_hold_the_numbers_of_copies_and_lie_in_one_place(name: str) -> None:
    spec = ModelSpec.from_config(config(name))
    copies, views = (DummyWeights(spec, torch.bfloat16, are_views=flag) for flag in (False, True))
    pools = set()
    for weight_name in model_weights(spec):
        copy, view = copies(weight_name), views(weight_name)
        if isinstance(view, StoredMatrix):
            assert all(torch.equal(view.pieces[piece], copy.pieces[piece]) for piece in view.pieces)
            pools.add(view.pieces["codes"].untyped_storage().data_ptr())
        else:
            assert torch.equal(view, copy)
            if "mlp.experts" in weight_name:
                pools.add(view.untyped_storage().data_ptr())
    assert len(pools) == 1


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *(
            pytest.param(name, "cpu", marks=[] if name == "plain" else pytest.mark.slow)
            for name in FORMATS
        ),
        pytest.param("plain", "emulated", marks=pytest.mark.slow),
        ("gptq", "emulated"),
    ],
)
def test_an_engine_runs_without_weights_on_disk(name: str, device: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(name)))
    options = EngineConfig(
        device=device, load_format="dummy", dtype="bfloat16", linger_s=0.0, host_memory_bytes=2**32
    )
    with Engine.from_pretrained(tmp_path, options) as engine:
        params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        rows = engine.generate(PROMPTS, params)
    assert [row.error for row in rows] == [""] * len(PROMPTS)
    assert len({row.token_ids for row in rows}) == len(PROMPTS)
