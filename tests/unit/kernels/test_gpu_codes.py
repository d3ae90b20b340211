"""The programs that decode codes in pairs give the elements of the reference, to the bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from raymoe.codecs import INT4_ZERO, Codes, StoredMatrix, decode, float_scales, unpack
from raymoe.kernels.gpu_experts_layout import layout_of
from raymoe.specs.weight_format import (
    Fp8Block,
    Fp8Channel,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from tests.quantisers import quantise
from tests.unit.kernels import ptx_model

pytest.importorskip("triton")

OUTPUTS, INPUTS = 256, 256
BF16, FP16 = torch.bfloat16, torch.float16
CASES: dict[str, tuple[WeightFormat, torch.dtype]] = {
    "fp8 block": (Fp8Block(), BF16),
    "fp8 channel": (Fp8Channel(), torch.float32),
    "mxfp8": (Mxfp8(), BF16),
    "mxfp4": (Mxfp4(), BF16),
    "nvfp4": (Nvfp4(), BF16),
    "nvfp4 divided": (Nvfp4(is_divided=True), BF16),
    "int4": (PackedInt4(group_size=32), FP16),
    "int4, bfloat16 scales": (PackedInt4(group_size=32), BF16),
    "int4, act-order": (PackedInt4(group_size=32, has_order=True), FP16),
    "int4, zero points": (PackedInt4(group_size=64, has_zero_points=True), FP16),
    "int4, zero points, bfloat16 scales": (PackedInt4(group_size=64, has_zero_points=True), BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_every_plane_of_random_codes_is_decoded_to_the_bit(name: str) -> None:
    stored, scale_dtype = CASES[name]
    matrix = _random_matrix(stored, scale_dtype, seed=list(CASES).index(name))
    expected_OI = decode(unpack(matrix), BF16)
    got_OI = torch.empty_like(expected_OI)
    layout = layout_of([matrix])
    assert layout is not None
    for plane in range(layout.unit_inputs):
        inputs = slice(plane, None, layout.unit_inputs)
        got_OI[:, inputs] = _decoded(matrix, plane, inputs)
    # Zeros may have another sign, which no sum of products shows.
    assert torch.equal(got_OI, expected_OI)
    assert torch.equal(got_OI.view(torch.int16) & 0x7FFF, expected_OI.view(torch.int16) & 0x7FFF)


def test_scales_at_the_ends_of_their_range_are_decoded_to_the_bit() -> None:
    for stored in (Mxfp4(), Mxfp8()):
        matrix = _random_matrix(stored, BF16, seed=5)
        scales_OG = matrix.pieces["scales"].view(torch.uint8)
        scales_OG[:, 0], scales_OG[:, 1] = 0, 1  # 2^-127, a subnormal number, and 2^-126
        expected_OI = decode(unpack(matrix), BF16)[:, :64]
        layout = layout_of([matrix])
        assert layout is not None
        for plane in range(layout.unit_inputs):
            inputs = slice(plane, 64, layout.unit_inputs)
            got = _decoded(matrix, plane, slice(plane, None, layout.unit_inputs))
            assert torch.equal(got[:, : 64 // layout.unit_inputs], expected_OI[:, inputs])


@pytest.mark.parametrize(
    ("stored", "scale_dtype", "inputs"),
    [
        (Fp8Channel(), BF16, 75),  # odd rows have no aligned words of 16 bits
        (PackedInt4(group_size=32), torch.float32, 64),  # products would not be exact
    ],
    ids=str,
)
def test_what_has_no_program_is_left_to_the_general_way(
    stored: WeightFormat, scale_dtype: torch.dtype, inputs: int
) -> None:
    from raymoe.kernels.gpu_codes import pair_programs  # noqa: PLC0415 - needs Triton

    weight_OI = torch.randn(16, inputs)
    layout = layout_of([quantise(stored, weight_OI, scale_dtype=scale_dtype).matrix])
    assert layout is not None
    assert pair_programs(layout) == ()


def _random_matrix(stored: WeightFormat, scale_dtype: torch.dtype, seed: int) -> StoredMatrix:
    """All codes but NaN, in equal numbers."""
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))
    matrix = quantise(stored, weight_OI, scale_dtype=scale_dtype, seed=seed).matrix
    codes = matrix.pieces["codes"]
    drawn = np.random.default_rng(seed).integers(0, 256, codes.nbytes, dtype=np.uint8)
    if codes.dtype == torch.float8_e4m3fn or isinstance(stored, Mxfp8):
        drawn[drawn & 0x7F == 0x7F] = 0
    codes.view(torch.uint8).copy_(torch.from_numpy(drawn).view(codes.view(torch.uint8).shape))
    return matrix


def _decoded(matrix: StoredMatrix, plane: int, inputs: slice) -> Tensor:
    """One plane [O, U] by its program: two units of a register at a time."""
    from raymoe.kernels.gpu_codes import INT4_BASE, kernel_matrix  # noqa: PLC0415 - needs Triton

    layout = layout_of([matrix])
    assert layout is not None
    constants = kernel_matrix(layout, matrix=0, dtype=BF16, dot=BF16, step=16, alignment=16)
    factors_OI, zeros_OI = _scaling(unpack(matrix))
    factors = (factors_OI[:, inputs] * constants.missing.value).reshape(-1, 2).float().numpy()
    operands = [matrix.pieces["codes"].contiguous().view(torch.uint8).numpy().view(np.uint32)]
    offsets = -(zeros_OI[:, inputs].reshape(-1, 2).numpy() + INT4_BASE.value).astype(np.float32)
    if constants.is_short.value:
        numbers = [factors, offsets] if layout.kind == "int4" else [factors]
        operands += [ptx_model.packed(each) for each in numbers]
    else:
        numbers = [factors, offsets * factors] if layout.kind == "int4" else [factors]
        operands += [each[:, half].copy().view(np.uint32) for each in numbers for half in (0, 1)]
    words = [each.reshape(-1) for each in operands]
    result = ptx_model.halves(ptx_model.run(constants.programs.value[plane], words))
    return torch.from_numpy(result.reshape(len(factors_OI), -1)).bfloat16()


def _scaling(codes: Codes) -> tuple[Tensor, Tensor]:
    """Factor and zero point of each element, float32 [O, I]."""
    scales_BG = float_scales(codes.scales_BG)
    if codes.tensor_scale is not None:
        scale = codes.tensor_scale.reshape(())
        scales_BG = scales_BG / scale if codes.is_divided else scales_BG * scale
    zeros_OG = torch.full((OUTPUTS, 1), float(INT4_ZERO))
    if codes.zeros_OG is not None:
        zeros_OG = codes.zeros_OG.float()
    scales_OG = scales_BG.repeat_interleave(codes.block_rows, 0)[:OUTPUTS]
    return _of_inputs(scales_OG, codes), _of_inputs(zeros_OG, codes)


def _of_inputs(values_OG: Tensor, codes: Codes) -> Tensor:
    if values_OG.shape[1] == 1:
        return values_OG.expand(OUTPUTS, INPUTS)
    if codes.order_I is not None:
        return values_OG[:, codes.order_I.long()]
    return values_OG.repeat_interleave(codes.group_size, 1)[:, :INPUTS]
