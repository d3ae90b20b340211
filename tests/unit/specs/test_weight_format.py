"""Bytes of stored matrices: those of the tensors that each library writes."""

import random

import pytest
import torch
from transformers.integrations.finegrained_fp8 import FP8Linear

from raymoe.errors import UnsupportedModelError
from raymoe.specs.weight_format import (
    PLAIN_FORMATS,
    Awq,
    Fp8Block,
    Fp8Channel,
    Gptq,
    Int8Channel,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
)

SEEDS = range(8)


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", PLAIN_FORMATS)
def test_plain_matrices_take_their_elements(name: str) -> None:
    matrix = torch.empty(7, 13, dtype=getattr(torch, name))
    assert PLAIN_FORMATS[name].matrix_bytes(7, 13) == num_bytes(matrix)


@pytest.mark.parametrize("seed", SEEDS)
def test_fp8_blocks_take_what_a_layer_of_transformers_takes(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randrange(1, 700), rng.randrange(1, 700)
    layer = FP8Linear(columns, rows, block_size=(128, 128))
    assert Fp8Block().matrix_bytes(rows, columns) == num_bytes(*layer.parameters())


@pytest.mark.parametrize("seed", SEEDS)
def test_fp8_channels_take_a_scale_for_each_row(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randrange(1, 700), rng.randrange(1, 700)
    weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    kept = num_bytes(weight, torch.empty(rows, 1, dtype=torch.float32))
    assert Fp8Channel().matrix_bytes(rows, columns) == kept


@pytest.mark.parametrize("seed", SEEDS)
def test_int8_takes_a_byte_for_each_element_and_a_scale_for_each_row(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randrange(1, 700), rng.randrange(1, 700)
    weight = torch.empty(rows, columns, dtype=torch.int8)
    assert Int8Channel().matrix_bytes(rows, columns) == num_bytes(weight, torch.empty(rows, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_mxfp4_takes_blocks_and_scales(seed: int) -> None:
    """As in gpt-oss: `gate_up_proj_blocks` [rows, groups, 16] and `gate_up_proj_scales`."""
    rng = random.Random(seed)
    rows, groups = rng.randrange(1, 500), rng.randrange(1, 90)
    blocks = torch.empty(rows, groups, 16, dtype=torch.uint8)
    scales = torch.empty(rows, groups, dtype=torch.uint8)
    for stored in (Mxfp4(), Mxfp4(".scale")):
        assert stored.matrix_bytes(rows, 32 * groups) == num_bytes(blocks, scales)


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_formats_take_codes_and_scales(seed: int) -> None:
    """As `NVFP4QTensor` and `MXFP8QTensor` of modelopt 0.47 hold them."""
    rng = random.Random(seed)
    rows, columns = rng.randrange(1, 500), 32 * rng.randrange(1, 90)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn)
    assert Nvfp4().matrix_bytes(rows, columns) == num_bytes(codes, scales, torch.empty(()))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns // 32, dtype=torch.uint8)
    assert Mxfp8().matrix_bytes(rows, columns) == num_bytes(codes, scales)


@pytest.mark.parametrize("seed", SEEDS)
def test_packed_groups_take_words_scales_and_shape(seed: int) -> None:
    """As `PackedQuantizationCompressor` of compressed-tensors 0.20 writes them."""
    rng = random.Random(seed)
    size, rows, groups = rng.choice((32, 64, 128)), rng.randrange(1, 300), rng.randrange(1, 20)
    packed = torch.empty(rows, size * groups // 8, dtype=torch.int32)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16)
    shape = torch.tensor([rows, size * groups])
    zeros = torch.empty(-(-rows // 8), groups, dtype=torch.int32)
    plain = PackedInt4(size)
    assert plain.matrix_bytes(rows, size * groups) == num_bytes(packed, scales, shape)
    shifted = PackedInt4(size, has_zero_points=True)
    stored = num_bytes(packed, scales, shape, zeros)
    assert shifted.matrix_bytes(rows, size * groups) == stored


@pytest.mark.parametrize("seed", SEEDS)
def test_gptq_and_awq_take_their_tensors(seed: int) -> None:
    """qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out], g_idx [in] of GPTQ."""
    rng = random.Random(seed)
    size, rows, groups = rng.choice((32, 64, 128)), 8 * rng.randrange(1, 60), rng.randrange(1, 20)
    columns = size * groups
    qweight = torch.empty(columns // 8, rows, dtype=torch.int32)
    qzeros = torch.empty(groups, rows // 8, dtype=torch.int32)
    scales = torch.empty(groups, rows, dtype=torch.float16)
    g_idx = torch.empty(columns, dtype=torch.int32)
    assert Awq(size).matrix_bytes(rows, columns) == num_bytes(qweight, qzeros, scales)
    assert Gptq(size).matrix_bytes(rows, columns) == num_bytes(qweight, qzeros, scales, g_idx)


def test_a_group_of_whole_rows_is_one_scale_each() -> None:
    assert PackedInt4(0).matrix_bytes(10, 48) == 10 * 24 + 10 * 2 + 16


@pytest.mark.parametrize("stored", [Mxfp4(), Mxfp8(), PackedInt4(32), Gptq(32), Awq(32)])
def test_groups_that_do_not_divide_are_refused(stored) -> None:
    with pytest.raises(UnsupportedModelError, match="groups of 32 do not divide 40 columns"):
        stored.matrix_bytes(8, 40)


def test_groups_of_nvfp4_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="groups of 16 do not divide 40 columns"):
        Nvfp4().matrix_bytes(8, 40)


@pytest.mark.parametrize(("stored", "rows", "columns"), [(Gptq(0), 12, 64), (Awq(0), 12, 64)])
def test_words_that_do_not_divide_are_refused(stored, rows: int, columns: int) -> None:
    with pytest.raises(UnsupportedModelError, match="words of 8 do not divide 12 rows"):
        stored.matrix_bytes(rows, columns)
