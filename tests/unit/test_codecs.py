"""Codecs give what the libraries that define the formats give, bit for bit."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
)
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raymoe.codecs import CODECS, StoredMatrix, as_tensor, check_values
from raymoe.errors import CheckpointError
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gptq,
    Int8Channel,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from tests.quantisers import AWQ_ORDER, E2M1, Quantised, quantise

NUM_SIZES = 6
random_seeds = given(seed=st.integers(0, 2**16))
SCALE_BYTES = {"U8": (255, torch.uint8), "F8_E4M3": (127, torch.float8_e4m3fn)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [
    Fp8Block(),
    Fp8Channel(),
    Fp8Tensor(),
    Int8Channel(),
    PackedInt4(32),
    PackedInt4(0),
    PackedInt4(16, has_zero_points=True),
    PackedInt4(16, has_zero_points=True, has_order=True),
    Gptq(32),
    Gptq(0),
    Gptq(32, has_order=False),
    Awq(32),
    Awq(0),
    Mxfp4(),
    Mxfp4(".scale"),
    Mxfp8(),
    Nvfp4(),
    Nvfp4(is_divided=True),
]


def has_order(stored: WeightFormat) -> bool:
    """Whether inputs may be in groups of others than their neighbours."""
    return isinstance(stored, PackedInt4) and stored.has_order


def random_matrix(seed: int) -> torch.Tensor:
    """Rows and columns that every format takes; values of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    size = seed % NUM_SIZES
    rows, columns = 8 * (1 + 7 * size), 32 * (1 + 3 * size)
    weight = torch.randn(rows, columns, generator=generator)
    return weight * torch.exp(2 * torch.randn(rows, 1, generator=generator))


def few_rows(seed: int) -> tuple[int, int]:
    """Rows, and columns in whole groups."""
    size = seed % NUM_SIZES
    return 8 + size, 64 * (size + 1)


def make(stored: WeightFormat, seed: int, scale_dtype: torch.dtype = torch.float16) -> Quantised:
    return quantise(stored, random_matrix(seed), scale_dtype=scale_dtype, seed=seed)


def scrambled(stored: WeightFormat, rows: int, columns: int, seed: int) -> StoredMatrix:
    """Any bits at all as codes and zero points; scales that are numbers."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(piece) -> torch.Tensor:
        if piece.name == "order":
            return torch.randint(0, 2, piece.shape, generator=generator).int()
        if piece.name == "tensor_scale":
            return torch.rand(piece.shape, generator=generator) + 2.0**-20
        if piece.name == "scales" and piece.dtypes[0] in SCALE_BYTES:
            nan, dtype = SCALE_BYTES[piece.dtypes[0]]
            return torch.randint(0, nan, piece.shape, generator=generator).byte().view(dtype)
        if piece.name == "scales":
            return torch.randn(piece.shape, generator=generator).half()
        if piece.name == "shape":
            return torch.tensor([rows, columns])
        size = (*piece.shape[:-1], piece.shape[-1] * piece.item_bytes)
        bits = torch.randint(0, 256, size, generator=generator).byte()
        types = {
            "I32": torch.int32,
            "U8": torch.uint8,
            "I8": torch.int8,
            "F8_E4M3": torch.float8_e4m3fn,
        }
        return bits.view(types[piece.dtypes[0]])

    return StoredMatrix(
        format=stored,
        shape=(rows, columns),
        pieces={piece.name: tensor(piece) for piece in stored.pieces(rows, columns)},
    )


@settings(max_examples=8)
@random_seeds
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_decoded_is_what_was_stored(stored: WeightFormat, seed: int) -> None:
    """To float32 rounded twice at most where a scale has 24 bits, else once."""
    quantised = make(stored, seed)
    for dtype in DTYPES:
        expected = quantised.exact.float().to(dtype)
        assert torch.equal(as_tensor(quantised.matrix, dtype), expected)


@settings(max_examples=8)
@random_seeds
def test_fp8_blocks_are_those_of_transformers(seed: int) -> None:
    quantised = make(Fp8Block(), seed)
    matrix, scales = quantised.matrix, quantised.tensors[".weight_scale_inv"]
    codes = quantised.tensors[".weight"]
    by_backward = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    assert torch.equal(as_tensor(matrix, torch.float32), by_backward)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_whole_fp8_blocks_are_those_of_transformers(scale_dtype: torch.dtype) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(7))
    quantised = quantise(Fp8Block(), weight, scale_dtype=scale_dtype)
    codes, scales = (quantised.tensors[name] for name in (".weight", ".weight_scale_inv"))
    for dtype in DTYPES:
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
        assert torch.equal(as_tensor(quantised.matrix, dtype), theirs)


def test_every_fp8_code_has_its_value() -> None:
    matrix = scrambled(Fp8Channel(), 64, 256, 0)
    matrix.pieces["codes"][0] = torch.arange(256).byte().view(torch.float8_e4m3fn)
    expected = matrix.pieces["codes"].float() * matrix.pieces["scales"].float()
    torch.testing.assert_close(
        as_tensor(matrix, torch.float32), expected, rtol=0, atol=0, equal_nan=True
    )
    assert as_tensor(matrix, torch.float32)[0].isnan().sum() == 2


@settings(max_examples=8)
@random_seeds
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_channels_are_those_of_compressed_tensors(scale_dtype: torch.dtype, seed: int) -> None:
    quantised = make(Fp8Channel(), seed, scale_dtype)
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    state = {
        "weight": quantised.tensors[".weight"],
        "weight_scale": quantised.tensors[".weight_scale"],
    }
    theirs = decompressed(FloatQuantizationCompressor, state, arguments)
    assert torch.equal(as_tensor(quantised.matrix, scale_dtype), theirs)


@settings(max_examples=8)
@random_seeds
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_int8_channels_are_those_of_compressed_tensors(scale_dtype: torch.dtype, seed: int) -> None:
    quantised = make(Int8Channel(), seed, scale_dtype)
    arguments = QuantizationArgs(num_bits=8, type="int", strategy="channel")
    state = {
        "weight": quantised.tensors[".weight"],
        "weight_scale": quantised.tensors[".weight_scale"],
    }
    theirs = decompressed(IntQuantizationCompressor, state, arguments)
    assert torch.equal(as_tensor(quantised.matrix, scale_dtype), theirs)


@settings(max_examples=8)
@random_seeds
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_those_of_compressed_tensors(scale_dtype: torch.dtype, seed: int) -> None:
    quantised = make(Fp8Block(scales_suffix=".weight_scale"), seed, scale_dtype)
    arguments = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    )
    state = {
        "weight": quantised.tensors[".weight"],
        "weight_scale": quantised.tensors[".weight_scale"],
    }
    theirs = decompressed(FloatQuantizationCompressor, state, arguments)
    assert torch.equal(as_tensor(quantised.matrix, scale_dtype), theirs)


@settings(max_examples=8)
@random_seeds
@pytest.mark.parametrize(
    "stored",
    [PackedInt4(32), PackedInt4(0), PackedInt4(16, has_zero_points=True)],
    ids=str,
)
def test_packed_int4_is_that_of_compressed_tensors(stored: PackedInt4, seed: int) -> None:
    arguments = QuantizationArgs(
        num_bits=4,
        strategy="group" if stored.group_size else "channel",
        group_size=stored.group_size or None,
        symmetric=not stored.has_zero_points,
    )
    for scale_dtype in (torch.bfloat16, torch.float16):
        quantised = make(stored, seed, scale_dtype)
        state = {name.removeprefix("."): tensor for name, tensor in quantised.tensors.items()}
        theirs = decompressed(PackedQuantizationCompressor, state, arguments)
        assert torch.equal(as_tensor(quantised.matrix, scale_dtype), theirs)


def decompressed(compressor, state: dict, arguments: QuantizationArgs) -> torch.Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    return compressor.decompress(state, scheme)["weight"]


@settings(max_examples=8)
@random_seeds
def test_mxfp4_is_that_of_transformers(seed: int) -> None:
    matrix = scrambled(Mxfp4(), *few_rows(seed), seed)
    blocks, scales = matrix.pieces["codes"], matrix.pieces["scales"]
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
        assert torch.equal(as_tensor(matrix, dtype), theirs)


@settings(max_examples=8)
@random_seeds
def test_mxfp8_is_that_of_compressed_tensors_and_transformers(seed: int) -> None:
    matrix = scrambled(Mxfp8(), *few_rows(seed), seed)
    codes, scales = matrix.pieces["codes"], matrix.pieces["scales"]
    arguments = QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    state = {"weight": codes, "weight_scale": scales}
    theirs = decompressed(MXFP8QuantizationCompressor, state, arguments)
    ours = as_tensor(matrix, torch.bfloat16)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for dtype in DTYPES:
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
        ours = as_tensor(matrix, dtype)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=8)
@random_seeds
def test_mxfp4_is_that_of_compressed_tensors(seed: int) -> None:
    matrix = scrambled(Mxfp4(".weight_scale", ".weight_packed"), *few_rows(seed), seed)
    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    state = {
        "weight_packed": matrix.pieces["codes"],
        "weight_scale": matrix.pieces["scales"].view(torch.uint8),
    }
    theirs = decompressed(MXFP4PackedCompressor, state, arguments)
    ours = as_tensor(matrix, theirs.dtype)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=8)
@random_seeds
def test_nvfp4_is_that_of_compressed_tensors(seed: int) -> None:
    matrix = scrambled(Nvfp4(is_divided=True), *few_rows(seed), seed)
    pieces = matrix.pieces
    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    )
    state = {
        "weight_packed": pieces["codes"],
        "weight_scale": pieces["scales"],
        "weight_global_scale": pieces["tensor_scale"],
    }
    theirs = decompressed(NVFP4PackedCompressor, state, arguments)
    assert torch.equal(as_tensor(matrix, theirs.dtype), theirs)


@settings(max_examples=8)
@random_seeds
def test_nvfp4_of_modelopt_multiplies_both_scales_first(seed: int) -> None:
    """`NVFP4QTensor.dequantize` of modelopt 0.47: number * (block scale * scale of the matrix)."""
    matrix = scrambled(Nvfp4(), *few_rows(seed), seed)
    codes, scales = matrix.pieces["codes"].numpy(), matrix.pieces["scales"].float().numpy()
    exact = np.zeros(matrix.shape, np.float32)
    for (o, byte), pair in np.ndenumerate(codes):
        scale = scales[o, byte // 8] * matrix.pieces["tensor_scale"].numpy()[0]
        exact[o, 2 * byte] = np.float32(E2M1[pair & 15]) * scale
        exact[o, 2 * byte + 1] = np.float32(E2M1[pair >> 4]) * scale
    assert np.array_equal(as_tensor(matrix, torch.float32).numpy(), exact)


@settings(max_examples=8)
@random_seeds
def test_gptq_is_unpacked_as_it_is_packed(seed: int) -> None:
    """GPTQModel 7.7: words of zero points count up by one, then nibbles; (code - zero) * scale."""
    matrix = scrambled(Gptq(32), 8 * (seed % NUM_SIZES + 1), 64, seed)
    qweight, scales, qzeros, order = (
        matrix.pieces[name].numpy() for name in ("codes", "scales", "zeros", "order")
    )
    words = qzeros.view(np.uint32) + np.uint32(0x11111111)
    exact = np.zeros(matrix.shape, np.float32)
    for o in range(matrix.shape[0]):
        for i in range(matrix.shape[1]):
            group = order[i]
            code = qweight.view(np.uint32)[i // 8, o] >> np.uint32(4 * (i % 8)) & np.uint32(15)
            zero = words[group, o // 8] >> np.uint32(4 * (o % 8)) & np.uint32(15)
            exact[o, i] = (int(code) - int(zero)) * np.float32(scales[group, o])
    assert np.array_equal(as_tensor(matrix, torch.float32).numpy(), exact)


@settings(max_examples=8)
@random_seeds
def test_awq_is_unpacked_as_it_is_packed(seed: int) -> None:
    """AutoAWQ 0.2.9: nibble n of a word is output AWQ_ORDER[n] of eight."""
    matrix = scrambled(Awq(32), 8 * (seed % NUM_SIZES + 1), 64, seed)
    qweight, scales, qzeros = (matrix.pieces[name].numpy() for name in ("codes", "scales", "zeros"))
    exact = np.zeros(matrix.shape, np.float32)
    for o in range(matrix.shape[0]):
        shift = np.uint32(4 * AWQ_ORDER.index(o % 8))
        for i in range(matrix.shape[1]):
            code = qweight.view(np.uint32)[i, o // 8] >> shift & np.uint32(15)
            zero = qzeros.view(np.uint32)[i // 32, o // 8] >> shift & np.uint32(15)
            exact[o, i] = (int(code) - int(zero)) * np.float32(scales[i // 32, o])
    assert np.array_equal(as_tensor(matrix, torch.float32).numpy(), exact)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_rows_of_a_matrix_are_rows_of_its_numbers(stored: WeightFormat) -> None:
    weight = torch.randn(264, 64, generator=torch.Generator().manual_seed(1))
    matrix = quantise(stored, weight, seed=1).matrix
    whole = as_tensor(matrix, torch.float32)
    for begin, end in ((0, 128), (128, 264), (128, 256)):
        part = matrix.rows(begin, end)
        assert part.shape == (end - begin, 64)
        assert torch.equal(as_tensor(part, torch.float32), whole[begin:end])


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_rows_of_groups_are_rows_of_each_of_them(stored: WeightFormat) -> None:
    matrix = quantise(stored, torch.randn(768, 64), seed=1).matrix
    whole = as_tensor(matrix, torch.float32).view(3, 256, 64)
    for rows in (slice(0, 128), slice(128, 256)):
        part = matrix.rows_of_groups(rows.start, rows.stop, 3)
        assert part.shape == (384, 64)
        assert torch.equal(as_tensor(part, torch.float32), whole[:, rows].flatten(0, 1))


@pytest.mark.parametrize("stored", [stored for stored in FORMATS if not has_order(stored)])
def test_columns_of_a_matrix_are_columns_of_its_numbers(stored: WeightFormat) -> None:
    matrix = quantise(stored, torch.randn(136, 384), seed=2).matrix
    whole = as_tensor(matrix, torch.float32)
    for begin, end in ((0, 128), (128, 256), (256, 384), (128, 384)):
        cut = matrix.columns(begin, end)
        assert cut.shape == (136, end - begin)
        assert torch.equal(as_tensor(cut, torch.float32), whole[:, begin:end])
        shapes = {piece.name: piece.shape for piece in stored.pieces(*cut.shape)}
        assert {name: tuple(piece.shape) for name, piece in cut.pieces.items()} == shapes


def test_columns_are_not_cut_within_a_group() -> None:
    matrix = quantise(PackedInt4(32), torch.randn(8, 64)).matrix
    with pytest.raises(AssertionError, match="weight_scale cannot be cut at 16"):
        matrix.columns(16, 48)


def test_every_other_row_of_what_has_a_scale_of_its_own() -> None:
    matrix = make(Mxfp4(), 2).matrix
    odd = matrix.rows(1, matrix.shape[0], 2)
    assert torch.equal(as_tensor(odd, torch.bfloat16), as_tensor(matrix, torch.bfloat16)[1::2])


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_a_stored_matrix_has_the_bytes_of_its_format(stored: WeightFormat) -> None:
    matrix = scrambled(stored, 64, 128, 0)
    widened = sum(
        tensor.numel() * 2
        for name, tensor in matrix.pieces.items()
        if name == "scales" and isinstance(stored, Fp8Block | Fp8Channel | Fp8Tensor | Int8Channel)
    )  # made here with 16 bits, kept with 32
    assert matrix.num_bytes + widened == stored.matrix_bytes(64, 128)


def test_every_format_has_a_codec() -> None:
    assert {type(stored) for stored in FORMATS} == set(CODECS)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_is_refused_with_its_place(code: int) -> None:
    matrix = quantise(Fp8Block(), torch.randn(130, 140)).matrix
    check_values(matrix, lambda piece: piece)
    matrix.pieces["codes"].view(torch.uint8)[129, 7] = code
    message = rf"model, codes has 1 codes that are NaN, the first at \[129, 7\] \({code}\)"
    with pytest.raises(CheckpointError, match=message):
        check_values(matrix, lambda piece: f"model, {piece}")
