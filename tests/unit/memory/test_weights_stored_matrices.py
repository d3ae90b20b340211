"""What is wrong with a quantised checkpoint is said by file, tensor, value and what is expected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raymoe.codecs import StoredMatrix, as_tensor
from raymoe.errors import CheckpointError, UnsupportedModelError
from raymoe.memory.weights import WeightStore
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from tests.quantised_checkpoints import CASES, checkpoints

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


def read_all(directory: Path) -> None:
    spec = ModelSpec.from_directory(directory)
    store = WeightStore.open(spec, directory)
    for name in model_weights(spec):
        store(name)


def damaged(name: str, tmp_path: Path, damage: Callable[[Tensors], object]) -> Path:
    """A copy of the checkpoint of a case, its tensors changed."""
    shutil.copytree(checkpoints(name).quantised, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / FILE)
    damage(tensors)
    save_file(tensors, tmp_path / "copy" / FILE)
    return tmp_path / "copy"


def find(tensors: Tensors, end: str) -> str:
    return min(name for name in tensors if name.endswith(end))


def without(end: str) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        del tensors[find(tensors, end)]

    return damage


def changed(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        name = find(tensors, end)
        tensors[name] = change(tensors[name]).contiguous()

    return damage


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.flatten()[0] = value
        return tensor

    return change


def set_byte(value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8).flatten()[0] = value
        return tensor

    return change


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_matrices_are_read_as_they_are_stored(name: str) -> None:
    directory = checkpoints(name).quantised
    spec = ModelSpec.from_directory(directory)
    store = WeightStore.open(spec, directory)
    for weight, shape in model_weights(spec).items():
        found = store(weight)
        assert tuple(found.shape) == shape
        assert isinstance(found, StoredMatrix) == (spec.format_of(weight, shape) is not None)


FP8, GPTQ, PACKED, MXFP4, MXFP8, NVFP4 = (
    "fp8 blocks, odd sizes",
    "gptq, act-order, zero points",
    "packed int4, zero points, order",
    "mxfp4",
    "mxfp8 of compressed-tensors",
    "nvfp4 of modelopt",
)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (FP8, without("q_proj.weight_scale_inv"), r"q_proj.weight_scale_inv'.*missing.*fp8_block"),
        (GPTQ, without("q_proj.qzeros"), r"q_proj.qzeros' of shape .* missing.*'.*q_proj.scales'"),
        (GPTQ, without("q_proj.g_idx"), r"q_proj.g_idx'.*missing"),
        (PACKED, without("weight_shape"), r"weight_shape'.*missing.*int4_packed"),
        (MXFP4, without("_scales"), r"_scales'.*missing.*mxfp4"),
        (FP8, changed("scale_inv", lambda t: t[:, :1]), r"scale_inv' has shape .*config.json says"),
        (GPTQ, changed(".scales", lambda t: t.t()), r"scales' has shape .*config.json says"),
        (MXFP4, changed("_blocks", lambda t: t[:, :-1]), r"_blocks' has shape"),
        (FP8, changed("_proj.weight", lambda t: t.float()), r"type F32; supported: F8_E4M3"),
        (FP8, changed("scale_inv", lambda t: t.int()), r"type I32; supported: F32, F16, BF16"),
        (GPTQ, changed(".scales", lambda t: t.float()), r"type F32; supported: F16, BF16"),
        (GPTQ, changed(".qweight", lambda t: t.long()), r"type I64; supported: I32"),
        (FP8, changed("scale_inv", first(float("nan"))), r"scale_inv' has 1 scales.*\[0, 0\].*nan"),
        (GPTQ, changed(".scales", first(float("inf"))), r"scales' has 1 scales.*finite.*inf"),
        (MXFP4, changed("_scales", first(255)), r"_scales' has 1 scales.*finite.*255"),
        (MXFP8, changed(".weight_scale", set_byte(255)), r"_scale' has 1 scales.*finite.*nan"),
        (NVFP4, changed(".weight_scale", set_byte(127)), r"_scale' has 1 scales.*finite.*nan"),
        (NVFP4, changed(".weight_scale", set_byte(255)), r"_scale' has 1 scales.*finite.*nan"),
        (NVFP4, changed("scale_2", first(float("inf"))), r"scale_2' has 1 scales.*positive.*inf"),
        (NVFP4, changed("scale_2", first(0.0)), r"scale_2' has 1 scales.*positive.*0.0"),
        (NVFP4, without("_scale_2"), r"weight_scale_2' of shape \[1\] is missing.*nvfp4"),
        (NVFP4, changed("_scale_2", lambda t: t.expand(2)), r"scale_2' has shape \[2\]"),
        (NVFP4, changed("up_proj.weight", lambda t: t.int()), r"type I32; supported: U8"),
        (GPTQ, changed("g_idx", first(-1)), r"g_idx' has 1 groups other than 0 to.*\(-1\)"),
        (PACKED, changed("g_idx", first(99)), r"g_idx' has 1 groups other than 0 to.*\(99\)"),
        (PACKED, changed("weight_shape", first(7)), r"weight_shape' is \[7, .*config.json says"),
        (FP8, lambda tensors: tensors.update(other=torch.ones(2)), r"'other' belongs to nothing"),
    ],
)
def test_damage_is_named(name: str, damage, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as refusal:
        read_all(damaged(name, tmp_path, damage))
    assert FILE in str(refusal.value) or "missing" in said


def test_groups_that_do_not_divide_are_refused_by_tensor(tmp_path: Path) -> None:
    directory = damaged(GPTQ, tmp_path, dict)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["group_size"] = 24
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"tensor '.*_proj.*': .*groups of 24 do not"):
        read_all(directory)


def test_a_plain_matrix_where_a_quantised_one_is_meant_is_refused(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        name = find(tensors, "q_proj.qweight")
        for suffix in (".qweight", ".qzeros", ".scales", ".g_idx"):
            del tensors[name.replace(".qweight", suffix)]
        tensors[name.replace(".qweight", ".weight")] = torch.zeros(96, 64)

    with pytest.raises(CheckpointError, match=r"q_proj.qweight'.*is missing"):
        read_all(damaged(GPTQ, tmp_path, damage))


@pytest.mark.parametrize("shape", [(-1, 1, 1), (-1,), (-1, 2, 1), (1,)], ids=str)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_experts_in_one_tensor_have_a_scale_each(
    shape: tuple[int, ...], suffix: str, tmp_path: Path
) -> None:
    """As Mistral-Small-4 stores them ([experts, 1, 1]), and as transformers 5.24 holds them."""
    expected: Tensors = {}

    def fuse(tensors: Tensors) -> None:
        for layer in ("model.layers.0.mlp.experts.", "model.layers.1.mlp.experts."):
            for stored, parts in {"gate_up": ("gate", "up"), "down": ("down",)}.items():
                codes, scales = _taken(tensors, layer, parts)
                has_halves = shape == (-1, 2, 1) and len(parts) == 2
                scales = scales if has_halves else scales[:, :1].expand_as(scales)
                scales = scales[:1].expand_as(scales) if shape == (1,) else scales
                for part, name in enumerate(parts):
                    for i, code in enumerate(codes):
                        rows = code.chunk(len(parts))[part]
                        weight = rows.float() * scales[i, part].float()
                        expected[f"{layer}{i}.{name}_proj.weight"] = weight
                kept = scales[..., None] if has_halves else scales[:, 0].reshape(-1, 1, 1)
                if len(shape) == 1:
                    kept = kept.flatten()[: shape[0] if shape[0] > 0 else None]
                tensors[f"{layer}{stored}_proj"] = codes
                tensors[f"{layer}{stored}_proj{suffix}"] = kept.contiguous()
                tensors[f"{layer}{stored}_proj_activation_scale"] = torch.ones(len(codes))
        for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
            tensors[name.removesuffix("_scale_inv") + suffix] = tensors.pop(name)

    directory = damaged(ONE_SCALE, tmp_path, fuse)
    store = WeightStore.open(ModelSpec.from_directory(directory), directory)
    for name, weight in expected.items():
        assert torch.equal(as_tensor(store(name), torch.float32), weight), name


ONE_SCALE = "fp8 matrices of transformers, static"


def _taken(tensors: Tensors, layer: str, parts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Codes and scales of the experts of a layer, which are removed from the tensors."""
    codes, scales = [], []
    for i in range(6):
        names = [f"{layer}{i}.{part}_proj." for part in parts]
        codes.append(torch.cat([tensors.pop(f"{name}weight") for name in names]))
        scales.append(torch.stack([tensors.pop(f"{name}weight_scale_inv") for name in names]))
        for name in names:
            del tensors[f"{name}activation_scale"]
    return torch.stack(codes), torch.stack(scales)
