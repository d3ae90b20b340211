"""Configurations and tensors of the products of humming-kernels; nothing of it is imported."""

import os
import re
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from raymoe.kernels.humming import products
from raymoe.kernels.humming.packing import PackedMatrices, pack_matrices
from raymoe.specs.weight_format import Awq, Fp8Block, Mxfp4, Nvfp4, WeightFormat
from tests.quantisers import quantise
from tests.unit.kernels.ahead import ROOT

BF16 = torch.bfloat16
OUTPUTS, INPUTS, NUM_EXPERTS, NUM_ROWS = 200, 256, 3, 7


def packed(stored: WeightFormat) -> PackedMatrices:
    matrices = [
        quantise(stored, torch.randn(OUTPUTS, INPUTS), scale_dtype=torch.float16, seed=seed).matrix
        for seed in range(NUM_EXPERTS)
    ]
    return pack_matrices(matrices, [torch.randn(OUTPUTS)] * NUM_EXPERTS, BF16)


def rows() -> dict[str, Any]:
    return {
        "input_RI": torch.zeros(NUM_ROWS, INPUTS, dtype=BF16),
        "offsets_E1": torch.zeros(NUM_EXPERTS + 1, dtype=torch.int32),
        "out_RO": torch.zeros(NUM_ROWS, OUTPUTS, dtype=BF16),
    }


SIZES = {
    "fp8": (Fp8Block(), (3, 16, 1024), (3, 2, 2), torch.float32),
    "mxfp4": (Mxfp4(), (3, 16, 512), (3, 8, 256), torch.float8_e8m0fnu),
    "nvfp4": (Nvfp4(), (3, 16, 512), (3, 16, 256), torch.float8_e4m3fn),
    "awq": (Awq(group_size=32), (3, 16, 512), (3, 8, 256), BF16),
}


@pytest.mark.parametrize("name", SIZES)
def test_tensors_have_the_sizes_and_types_that_the_launcher_expects(name: str) -> None:
    """Sizes are those of `check_tensor_*` in csrc/launcher/tensor.h of the package."""
    stored, codes, scales, scale_type = SIZES[name]
    found = products.product_arguments(packed(stored), **rows())
    assert (found["weight"].shape, found["weight"].dtype) == (codes, torch.int32)
    assert (found["weight_scale"].shape, found["weight_scale"].dtype) == (scales, scale_type)
    assert found["bias"].shape == (NUM_EXPERTS, 256)
    assert (found["zero_point"] is None) == (name != "awq")
    if name == "awq":
        assert (found["zero_point"].shape, found["zero_point"].dtype) == ((3, 8, 32), torch.int32)
    assert (found["weight_scale_2"] is None) == (name != "nvfp4")
    assert all(each is None or each.data_ptr() % 16 == 0 for each in found.values())


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("input_RI", torch.zeros(NUM_ROWS, INPUTS, dtype=torch.float16), "inputs is torch.float16"),
        ("input_RI", torch.zeros(NUM_ROWS, INPUTS - 64, dtype=BF16), "inputs is \\[7, 192\\]"),
        ("offsets_E1", torch.zeros(NUM_EXPERTS, dtype=torch.int32), "expert_layout is \\[3\\]"),
        ("offsets_E1", torch.zeros(NUM_EXPERTS + 1), "expert_layout is torch.float32"),
        ("out_RO", torch.zeros(OUTPUTS, NUM_ROWS, dtype=BF16).t(), "outputs has strides"),
    ],
)
def test_wrong_rows_are_refused(name: str, tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        products.product_arguments(packed(Mxfp4()), **{**rows(), name: tensor})


def test_wrong_matrices_are_refused() -> None:
    one = packed(Nvfp4())
    with pytest.raises(AssertionError, match="weight_scale_2 is"):
        products.product_arguments(replace(one, tensor_scale_E=torch.zeros(2)), **rows())
    strided = one.codes.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(AssertionError, match="weight has strides"):
        products.product_arguments(replace(one, codes=strided), **rows())


@pytest.mark.parametrize("capability", products.CAPABILITIES)
def test_every_number_of_rows_has_one_tile_that_sums_in_one_order(
    capability: tuple[int, int],
) -> None:
    tiles = products.tile_configs(packed(Fp8Block()).layout, capability)
    found = products.intervals(tiles, num_experts=8)
    assert [each[0] for each in found] == [0, 160, 768]
    assert [each[1] for each in found] == [160, 768, 1 << 30]
    for tile in tiles:
        # A warp has all inputs of a step, and steps follow one another: as many rows, one order.
        assert tile["block_shape"][2] == tile["warp_shape"][2]
        assert tile["use_stream_k"] is False
        assert 256 % tile["block_shape"][1] == 0
        assert tile["raster_group_m"] == 4
    assert len({(tile["mma_type"], tile["block_shape"][2]) for tile in tiles}) == 1


def test_outputs_that_no_block_divides_are_padded() -> None:
    layout = replace(packed(Mxfp4()).layout, shape=(2880, 2880))
    layer = products.layer_config(layout, 8, (8, 0))
    assert (layer["shape_n"], layer["pad_shape_n"]) == (2944, 64)
    assert {tile["block_shape"][1] for tile in products.tile_configs(layout, (8, 0))} == {128}


@pytest.mark.parametrize(
    ("installed", "torch_version", "capability", "dtype", "says"),
    [
        ("0.1.19", "2.13.0+cu130", (9, 0), BF16, None),
        ("0.1.19", "2.11.0", (7, 5), torch.float16, None),
        (None, "2.13.0", (9, 0), BF16, "not installed: pip install 'raymoe\\[cuda\\]'"),
        ("0.1.20", "2.13.0", (9, 0), BF16, "is 0.1.20; this version of raymoe calls 0.1.19"),
        ("0.1.19", "2.10.0+cu128", (9, 0), BF16, "torch is 2.10.0.cu128"),
        ("0.1.19", "2.13.0", (12, 0), BF16, "compute capabilities than \\(12, 0\\)"),
        ("0.1.19", "2.13.0", (7, 5), BF16, "no bfloat16"),
    ],
)
def test_where_products_do_not_run_is_named(
    installed: str | None,
    torch_version: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(products, "version", version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    found = products.why_not_here(capability, dtype)
    assert found is says or re.search(str(says), str(found)), found


def test_the_version_that_is_called_is_the_one_that_is_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(f"{products.PACKAGE}[cu13]=={products.VERSION};" in each for each in extras["cuda"])


def test_a_variable_of_the_compiler_is_set_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    with products._variable("LD_LIBRARY_PATH", "/nvrtc", separator=":"):
        assert os.environ["LD_LIBRARY_PATH"] == "/nvrtc:/before"
    assert os.environ["LD_LIBRARY_PATH"] == "/before"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with products._variable("LD_LIBRARY_PATH", "/nvrtc", separator=":"):
        assert os.environ["LD_LIBRARY_PATH"] == "/nvrtc"
    assert "LD_LIBRARY_PATH" not in os.environ
