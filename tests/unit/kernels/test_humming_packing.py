"""Packing for humming-kernels: as its own kernel and transforms, and back."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raymoe.codecs import Codes, StoredMatrix, decode, unpack
from raymoe.kernels.humming.packing import (
    _pack_codes,
    pack_matrices,
    unpacked,
    unpacked_bias,
    why_not_matrix,
)
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from tests.quantisers import quantise
from tests.unit.kernels.humming_repack import Repack

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FORMATS: dict[str, WeightFormat] = {
    "fp8": Fp8Block(),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "nvfp4 divided": Nvfp4(is_divided=True),
    "int4": PackedInt4(group_size=32),
    "int4 zeros": PackedInt4(group_size=64, has_zero_points=True),
    "gptq": Gptq(group_size=128),
    "awq": Awq(group_size=32),
}
SHAPES = [(128, 128), (200, 256), (256, 384)]
needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("humming") is None,
    reason="humming-kernels is not installed: pip install 'raymoe[cuda]'",
)


def matrix_of(
    name: str, shape: tuple[int, int], seed: int, scale_dtype: torch.dtype = FP16
) -> StoredMatrix:
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return quantise(FORMATS[name], weight_OI, scale_dtype=scale_dtype, seed=2 * seed).matrix


@needs_the_package
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_packed_as_by_the_kernel_of_the_package(bits: int, tmp_path: Path) -> None:
    theirs = Repack(bits, tmp_path)
    for seed, (outputs, inputs) in enumerate([(64, 64), (128, 320), (320, 128)]):
        random = torch.Generator().manual_seed(seed)
        codes_OI = torch.randint(2**bits, (outputs, inputs), generator=random, dtype=torch.uint8)
        assert torch.equal(_pack_codes(codes_OI, bits), theirs(codes_OI))


@needs_the_package
def test_scales_zeros_and_biases_are_packed_as_by_the_transforms_of_the_package() -> None:
    """Their functions ask for a device, so they are read from the source and not called."""
    order = torch.tensor([8 * j + i for i in range(8) for j in range(8)])
    packed = pack_matrices([matrix_of("awq", (128, 128), 0)], [torch.arange(128.0)], FP16)
    stored = unpack(matrix_of("awq", (128, 128), 0))
    scales_GO = stored.scales_BG.t().reshape(-1, 64)[:, order].reshape(4, 128)
    assert torch.equal(packed.scales[0], scales_GO)
    zeros_GO = stored.zeros_OG.t().reshape(-1, 64)[:, order].reshape(4, 128)
    words = (zeros_GO[:, 1::2] * 16 + zeros_GO[:, ::2]).contiguous().view(torch.int32)
    assert torch.equal(packed.zeros[0], words)
    lanes = torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])
    on_results = torch.cat([lanes + 2 * i for i in range(4)])
    bias_O = torch.arange(128.0).view(4, 32)[:, on_results].reshape(-1)
    assert torch.equal(packed.bias_EP[0], bias_O.half())


def same(got: Codes, stored: Codes, dtype: torch.dtype) -> bool:
    scales_BG = stored.scales_BG.to(dtype) if stored.kind == "int4" else stored.scales_BG
    expected = (stored.codes_OI, scales_BG, stored.zeros_OG)
    found = (got.codes_OI, got.scales_BG, got.zeros_OG)
    return all(_equal(*pair) for pair in zip(found, expected, strict=True)) and (
        (got.kind, got.group_size, got.block_rows)
        == (stored.kind, stored.group_size, stored.block_rows)
    )


def _equal(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    if expected.dtype.itemsize == 1:  # E8M0 may be named or bytes; E4M3 is compared as bytes
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    return got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_packing_is_reversed(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = [matrix_of(name, shape, seed) for seed in range(3)]
    biases = [torch.randn(shape[0]) for _ in matrices]
    assert all(why_not_matrix(each, dtype) is None for each in matrices)
    packed = pack_matrices(matrices, biases, dtype)
    for expert, matrix in enumerate(matrices):
        stored, got = unpack(matrix), unpacked(packed, expert)
        assert same(got, replace(stored, order_I=None), dtype)
        assert torch.equal(unpacked_bias(packed, expert), biases[expert].to(dtype))
        if stored.tensor_scale is not None:
            torch.testing.assert_close(decode(got, FP32), decode(stored, FP32), rtol=3e-7, atol=0)


def test_what_the_kernels_do_not_take_is_named() -> None:
    weight_OI = torch.randn(128, 128)
    made = {
        each: quantise(each, weight_OI, scale_dtype=FP16, seed=0).matrix
        for each in (Fp8Channel(), Mxfp8(), PackedInt4(group_size=0), Mxfp4(), Fp8Block())
    }
    reasons = {each.name: why_not_matrix(matrix, BF16) for each, matrix in made.items()}
    assert reasons["fp8_channel"] == "one scale for 1 outputs and 128 inputs"
    assert reasons["mxfp8"] == "one scale for 1 outputs and 32 inputs"
    assert reasons["mxfp4"] is reasons["fp8_block"] is None
    assert "float16 or bfloat16" in str(why_not_matrix(made[Mxfp4()], FP32))
    narrow = quantise(Mxfp4(), torch.randn(128, 96), scale_dtype=FP16, seed=0).matrix
    assert "128 outputs and 96 inputs" in str(why_not_matrix(narrow, BF16))


@pytest.mark.parametrize(("stored", "size"), [(Mxfp4(), 2.0**-20), (Fp8Block(), 2.0**-18)], ids=str)
def test_scales_beyond_float16_are_taken_in_bfloat16_only(
    stored: WeightFormat, size: float
) -> None:
    weight_OI = torch.randn(128, 128) * size
    matrix = quantise(stored, weight_OI, scale_dtype=FP16, seed=0).matrix
    assert why_not_matrix(matrix, BF16) is None
    assert "float16" in str(why_not_matrix(matrix, FP16))
