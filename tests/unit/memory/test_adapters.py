"""Sums of stored weights and the changes of an adapter, to the bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raymoe.codecs import StoredMatrix, as_tensor
from raymoe.errors import CheckpointError
from raymoe.memory import adapters
from raymoe.memory.adapters import AdaptedWeights, Adapter
from raymoe.memory.weights import WeightStore
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from tests.quantised_checkpoints import checkpoints
from tests.tiny import make_checkpoint

EXPERTS = "mlp.experts"
RANK, SCALE = 4, 2.0


def write_adapter(directory: Path, modules: dict[str, tuple[int, int]], ranks: int = 1) -> Path:
    """An adapter with random factors of these modules of layer 0 (outputs, inputs)."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for module, (outputs, inputs) in modules.items():
        name = f"base_model.model.model.layers.0.{module}"
        for factor, shape in (("A", (ranks * RANK, inputs)), ("B", (outputs, ranks * RANK))):
            drawn = torch.randint(-8, 8, shape, generator=generator) / 16  # exact products
            tensors[f"{name}.lora_{factor}.weight"] = drawn
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK}
    config["target_parameters"] = [f"{EXPERTS}.down_proj"]
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def open_adapted(directory: Path, adapter: Path) -> tuple[AdaptedWeights, WeightStore, ModelSpec]:
    base = ModelSpec.from_directory(directory)
    opened, store = Adapter.open(adapter, base), WeightStore.open(base, directory)
    spec = opened.adapted(base)
    return AdaptedWeights(store, base, opened, spec), store, spec


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"))
    path = directory / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(path).items()}, path)
    return directory


def factors_of(adapter: Path, module: str) -> tuple[Tensor, Tensor]:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = f"base_model.model.model.layers.0.{module}"
    return tuple(tensors[f"{name}.lora_{each}.weight"].double() for each in "AB")


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_sum_is_rounded_once_to_the_type_of_the_base(
    bfloat16_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(adapters, "BLOCK_ELEMENTS", block)
    adapter = write_adapter(tmp_path / "adapter", {"self_attn.q_proj": (64, 64)})
    weights, store, _ = open_adapted(bfloat16_model, adapter)
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = factors_of(adapter, "self_attn.q_proj")
    exact = store(name).double() + SCALE * (b @ a)
    assert weights(name).dtype == torch.bfloat16
    assert torch.equal(weights(name), exact.to(torch.bfloat16))
    other = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(weights(other), store(other))


def test_experts_have_the_rows_of_a_one_by_one_and_the_columns_of_b_in_turn(
    bfloat16_model: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", {EXPERTS: (64, 96)}, ranks=4)
    weights, store, _ = open_adapted(bfloat16_model, adapter)
    a, b = factors_of(adapter, EXPERTS)
    for expert in range(4):
        name = f"model.layers.0.{EXPERTS}.{expert}.down_proj.weight"
        change = b[:, expert::4] @ a[RANK * expert : RANK * (expert + 1)]
        exact = store(name).double() + SCALE * change
        assert torch.equal(weights(name), exact.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["", "fp8 blocks, odd sizes", "gptq, act-order, zero points"])
def test_what_is_planned_for_is_what_a_call_returns(
    bfloat16_model: Path, tmp_path: Path, name: str
) -> None:
    directory = checkpoints(name).quantised if name else bfloat16_model
    shapes = model_weights(ModelSpec.from_directory(directory))
    modules = ["self_attn.q_proj", "mlp.gate"]
    modules = {each: shapes[f"model.layers.0.{each}.weight"] for each in modules}
    if name:
        modules |= {"mlp.experts.1.up_proj": shapes["model.layers.0.mlp.experts.1.up_proj.weight"]}
    weights, store, spec = open_adapted(directory, write_adapter(tmp_path / "adapter", modules))
    for each, shape in shapes.items():
        found, planned = weights(each), weights.unmerged(each)
        if isinstance(found, StoredMatrix):
            assert spec.format_of(each, shape) == found.format
            continue
        assert spec.format_of(each, shape) is None
        assert isinstance(planned, Tensor)
        assert (found.shape, found.dtype) == (planned.shape, planned.dtype) == (shape, found.dtype)
        assert found.is_contiguous() == planned.is_contiguous()
        if name and ".layers.0.mlp.experts.2.down_proj" in each:  # of the same network
            stored = as_tensor(store(each), torch.float32)
            assert torch.equal(found, stored.to(found.dtype))


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("adapter_model.bin", r"no adapter_model\.safetensors; adapter_model\.bin holds pickled"),
        ("README.md", r"no adapter_model\.safetensors; the adapter is not whole"),
    ],
)
def test_an_adapter_without_safetensors_is_refused_by_what_there_is(
    bfloat16_model: Path, tmp_path: Path, file: str, match: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"self_attn.q_proj": (64, 64)})
    (adapter / "adapter_model.safetensors").rename(adapter / file)
    with pytest.raises(CheckpointError, match=match):
        open_adapted(bfloat16_model, adapter)


def test_tensors_of_other_types_are_refused(bfloat16_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"self_attn.q_proj": (64, 64)})
    path = adapter / "adapter_model.safetensors"
    save_file({name: each.to(torch.int8) for name, each in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match="has type I8; supported: F16, BF16, F32"):
        open_adapted(bfloat16_model, adapter)
