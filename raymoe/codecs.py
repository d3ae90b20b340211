"""Decode quantised weights.

A weight is a tensor if stored unquantised, or a `StoredMatrix`, which keeps its bytes until it is
used. `CODECS` has one function per format.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from raymoe.errors import CheckpointError
from raymoe.rotation import input_run, rotated
from raymoe.specs.weight_format import (
    FP8_COLUMNS,
    FP8_ROWS,
    MXFP4_COLUMNS,
    MXFP8_COLUMNS,
    NVFP4_COLUMNS,
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
    Piece,
    WeightFormat,
)

CodeKind = Literal["int4", "e2m1", "e4m3", "int8", "rotated_int8"]

INT4_ZERO = 8  # code of zero, without zero points
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SMALLEST_E8M0 = 0x00400000  # bits of 2^-127, which is subnormal in float32
_FLOAT32_EXPONENT_BIT = 23


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codes:
    """A matrix [O, I] whose elements are (number of the code - zero) * scale.

    E4M3 scales are multiplied by `tensor_scale`, or divided by it if `is_divided`, and rounded to
    float32.
    """

    kind: CodeKind  # the number format of codes
    codes_OI: Tensor  # uint8, one per element, with any strides
    # float16, bfloat16, float32 or E4M3; or uint8, exponents of two plus 127 (E8M0).
    scales_BG: Tensor
    group_size: int  # inputs that share a scale
    block_rows: int = 1  # outputs that share a scale
    zeros_OG: Tensor | None = None  # uint8, for int4 only; None: 8
    # int32, the group of each input; None: neighbours, `group_size` each.
    order_I: Tensor | None = None
    tensor_scale: Tensor | None = None  # float32, one element
    is_divided: bool = False


def decode(codes: Codes, dtype: torch.dtype) -> Tensor:
    """The elements [O, I]: exact products in float32, rounded once to `dtype`."""
    # Transpose the codes while they are bytes, which is fastest.
    numbers_OI = _NUMBERS[codes.kind](codes.codes_OI.contiguous())
    groups_OGS = _by_group(numbers_OI, codes)
    if codes.kind == "int4":
        zeros_OG = codes.zeros_OG
        groups_OGS -= INT4_ZERO if zeros_OG is None else _by_input(zeros_OG, codes)
    scales_BG = float_scales(codes.scales_BG)
    if codes.tensor_scale is not None:
        scale = codes.tensor_scale.reshape(())
        scales_BG = scales_BG / scale if codes.is_divided else scales_BG * scale
    if codes.block_rows > 1:
        scales_BG = scales_BG.repeat_interleave(codes.block_rows, 0)[: len(numbers_OI)]
    groups_OGS *= _by_input(scales_BG, codes)
    if codes.kind == "rotated_int8":
        numbers_OI = rotated(numbers_OI, input_run(numbers_OI.shape[1]))
    return numbers_OI.to(dtype)


def float_scales(scales: Tensor) -> Tensor:
    if scales.dtype != torch.uint8:
        return scales.float()
    bits = (scales.int() << _FLOAT32_EXPONENT_BIT).clamp_min(SMALLEST_E8M0)
    return bits.view(torch.float32)


def nibbles(packed: Tensor) -> Tensor:
    """Halves of bytes as uint8, the lower one first; doubles the last axis."""
    low_high = packed.view(torch.uint8)
    return torch.stack((low_high & 0xF, low_high >> 4), -1).flatten(-2)


def _is_regular(codes: Codes) -> bool:
    return codes.order_I is None and codes.codes_OI.shape[1] % codes.group_size == 0


def _by_group(numbers_OI: Tensor, codes: Codes) -> Tensor:
    if not _is_regular(codes):
        return numbers_OI
    return numbers_OI.view(len(numbers_OI), -1, codes.group_size)


def _by_input(values_OG: Tensor, codes: Codes) -> Tensor:
    if _is_regular(codes):
        return values_OG[..., None]
    if codes.order_I is not None:
        return values_OG[:, codes.order_I.long()]
    num_inputs = codes.codes_OI.shape[1]
    return values_OG.repeat_interleave(codes.group_size, 1)[:, :num_inputs]


def _e2m1(codes_OI: Tensor) -> Tensor:
    table = torch.tensor(
        [*_E2M1, *(-number for number in _E2M1)], dtype=torch.float32, device=codes_OI.device
    )
    return table[codes_OI.int()]


_NUMBERS: Mapping[CodeKind, Callable[[Tensor], Tensor]] = {
    "int4": lambda codes_OI: codes_OI.float(),
    "e2m1": _e2m1,
    "e4m3": lambda codes_OI: codes_OI.view(torch.float8_e4m3fn).float(),
    "int8": lambda codes_OI: codes_OI.view(torch.int8).float(),
    "rotated_int8": lambda codes_OI: codes_OI.view(torch.int8).float(),
}


# By safetensors type name: all types in which weights are stored.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredMatrix:
    """A matrix [O, I] that is decoded where it is used."""

    format: WeightFormat
    shape: tuple[int, int]
    pieces: Mapping[str, Tensor]  # by `Piece.name`; views of a file, of host or of device memory

    @classmethod
    def without_data(cls, stored: WeightFormat, shape: tuple[int, int]) -> Self:
        pieces = {
            piece.name: torch.empty(piece.shape, dtype=TORCH_DTYPES[piece.dtypes[0]], device="meta")
            for piece in stored.pieces(*shape)
        }
        return cls(format=stored, shape=shape, pieces=pieces)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pieces.values())

    def rows(self, begin: int, end: int, step: int = 1) -> "StoredMatrix":
        """A view of every `step`-th output from `begin` to `end`.

        Pieces whose entries hold several outputs must be cut between entries.
        """
        pieces = {
            piece.name: self._cut(piece, piece.row_axis, piece.rows, slice(begin, end, step))
            for piece in self.format.pieces(*self.shape)
        }
        shape = (len(range(begin, end, step)), self.shape[1])
        return replace(self, shape=shape, pieces=pieces)

    def rows_of_groups(self, begin: int, end: int, num_groups: int) -> "StoredMatrix":
        """The outputs from `begin` to `end` of each of these equal groups, copied."""
        size = self.shape[0] // num_groups
        parts = [self.rows(group * size + begin, group * size + end) for group in range(num_groups)]
        pieces = {
            piece.name: parts[0].pieces[piece.name]
            if piece.row_axis is None
            else torch.cat([part.pieces[piece.name] for part in parts], dim=piece.row_axis)
            for piece in self.format.pieces(*self.shape)
        }
        shape = (num_groups * (end - begin), self.shape[1])
        return replace(self, shape=shape, pieces=pieces)

    def columns(self, begin: int, end: int) -> "StoredMatrix":
        """A view of the inputs `begin` to `end`; only the group table is copied.

        Pieces whose entries hold several inputs must be cut between entries, and groups must be in
        order (`is_in_order`).
        """
        pieces = {
            piece.name: self._cut(piece, piece.column_axis, piece.columns, slice(begin, end))
            for piece in self.format.pieces(*self.shape)
        }
        if "order" in pieces:  # groups count from the first remaining one
            pieces["order"] = pieces["order"] - pieces["order"][0]
        return replace(self, shape=(self.shape[0], end - begin), pieces=pieces)

    def _cut(self, piece: Piece, axis: int | None, size: int, cut: slice) -> Tensor:
        """Select the entries of a piece; an entry of `axis` spans `size` outputs or inputs."""
        tensor = self.pieces[piece.name]
        if axis is None:
            return tensor
        step = cut.step or 1
        assert cut.start % size == 0, f"{piece.suffix} cannot be cut at {cut.start}"
        assert step == 1 or size == 1, f"{piece.suffix} cannot be cut in steps"
        entries = slice(cut.start // size, -(-cut.stop // size), step)
        return tensor[(slice(None),) * axis + (entries,)]


__all__ = [
    "BLOCK_ELEMENTS",
    "CODECS",
    "Codes",
    "StoredMatrix",
    "Weight",
    "as_tensor",
    "row_blocks",
    "unpack",
]

Weight = Tensor | StoredMatrix

# About 100 MiB with intermediates; enough for a product at full rate.
BLOCK_ELEMENTS = 8 << 20
_CUT_ROWS = 128  # no block of a scale crosses a multiple of this


def unpack(matrix: StoredMatrix) -> Codes:
    return CODECS[type(matrix.format)](matrix)


def row_blocks(weight: StoredMatrix) -> Iterator[tuple[slice, StoredMatrix]]:
    outputs, inputs = weight.shape
    rows = max(BLOCK_ELEMENTS // inputs // _CUT_ROWS, 1) * _CUT_ROWS
    for begin in range(0, outputs, rows):
        end = min(begin + rows, outputs)
        yield slice(begin, end), weight.rows(begin, end)


def as_tensor(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight in the compute type; quantised ones are decoded."""
    if not isinstance(weight, StoredMatrix):
        return weight.to(dtype)
    device = weight.pieces["codes"].device
    decoded_OI = torch.empty(weight.shape, dtype=dtype, device=device)
    for rows, block in row_blocks(weight):
        decoded_OI[rows] = decode(unpack(block), dtype)
    return decoded_OI


E8M0_NAN, E4M3_NAN, _SIGN = 255, 127, 128


def check_values(matrix: StoredMatrix, describe: Callable[[str], str]) -> None:
    """Check scales, order and stored shape of a matrix, and that no code of 8 bits is NaN.

    Raises CheckpointError if a scale is not finite, a column names a missing group, the shape is
    wrong, or an E4M3 code is NaN; `describe` turns the name of a piece into file and tensor.
    """
    pieces = matrix.pieces
    if isinstance(matrix.format, Fp8Block | Fp8Channel | Fp8Tensor | Mxfp8):
        _check_e4m3(pieces["codes"].view(torch.uint8), describe("codes"))
    scales = pieces["scales"]
    _refuse_any(~_is_finite(scales), scales, describe("scales"), "scales that are not finite")
    if "tensor_scale" in pieces:
        scale = pieces["tensor_scale"].reshape(1)
        is_bad = ~scale.isfinite() | (scale <= 0)
        _refuse_any(is_bad, scale, describe("tensor_scale"), "scales that are not positive")
    if "order" in pieces:
        num_groups, order = _num_groups(matrix), pieces["order"]
        is_bad = (order < 0) | (order >= num_groups)
        _refuse_any(is_bad, order, describe("order"), f"groups other than 0 to {num_groups - 1}")
    if "shape" in pieces and tuple(pieces["shape"].tolist()) != matrix.shape:
        raise CheckpointError(
            f"{describe('shape')} is {pieces['shape'].tolist()}, config.json says "
            f"{list(matrix.shape)}"
        )


def _check_e4m3(codes_OI: Tensor, where: str) -> None:
    """NaN has the bits 0x7F and 0xFF, the highest of signed and of unsigned bytes."""
    if codes_OI.view(torch.int8).amax() == E4M3_NAN or codes_OI.amax() == E4M3_NAN | _SIGN:
        _refuse_any((codes_OI & E4M3_NAN) == E4M3_NAN, codes_OI, where, "codes that are NaN")


def _is_finite(scales: Tensor) -> Tensor:
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scales.view(torch.uint8) != E8M0_NAN
    if scales.dtype == torch.float8_e4m3fn:
        return (scales.view(torch.uint8) & E4M3_NAN) != E4M3_NAN
    return scales.isfinite()


def is_in_order(matrix: StoredMatrix) -> bool:
    """Whether inputs that share a group are neighbours."""
    inputs = matrix.shape[1]
    neighbours = torch.arange(inputs) // (inputs // _num_groups(matrix))
    return torch.equal(matrix.pieces["order"].long(), neighbours)


def _num_groups(matrix: StoredMatrix) -> int:
    scales = next(p for p in matrix.format.pieces(*matrix.shape) if p.name == "scales")
    return scales.shape[1 - (scales.row_axis or 0)]


def _refuse_any(is_bad: Tensor, values: Tensor, where: str, what: str) -> None:
    if is_bad.any():
        place = is_bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{where} has {int(is_bad.sum())} {what}, the first at {place} "
            f"({values[tuple(place)].item()})"
        )


_LOWER_HALF = 0xFFFF


def unpack_awq(matrix: StoredMatrix) -> Codes:
    scales_GO = matrix.pieces["scales"]
    return Codes(
        kind="int4",
        codes_OI=_in_order(matrix.pieces["codes"]).t(),
        scales_BG=scales_GO.t(),
        group_size=matrix.shape[1] // len(scales_GO),
        zeros_OG=_in_order(matrix.pieces["zeros"]).t(),
    )


def _in_order(words: Tensor) -> Tensor:
    """Unpack nibbles to bytes, [n, m] int32 -> [n, 8 * m] uint8.

    The lower half of a word holds outputs 0 2 4 6, the upper 1 3 5 7.
    """
    even, odd = _spread(words & _LOWER_HALF), _spread(words >> 16 & _LOWER_HALF)
    return torch.stack((even.view(torch.uint8), odd.view(torch.uint8)), -1).flatten(1)


def _spread(halves: Tensor) -> Tensor:
    halves |= halves << 8
    halves &= 0x00FF00FF
    halves |= halves << 4
    halves &= 0x0F0F0F0F
    return halves


def unpack_block(matrix: StoredMatrix) -> Codes:
    return Codes(
        kind="e4m3",
        codes_OI=matrix.pieces["codes"].view(torch.uint8),
        scales_BG=matrix.pieces["scales"],
        group_size=FP8_COLUMNS,
        block_rows=FP8_ROWS,
    )


def unpack_channel(matrix: StoredMatrix) -> Codes:
    return Codes(
        kind="e4m3",
        codes_OI=matrix.pieces["codes"].view(torch.uint8),
        scales_BG=matrix.pieces["scales"],
        group_size=matrix.shape[1],
    )


def unpack_int8(matrix: StoredMatrix) -> Codes:
    assert isinstance(matrix.format, Int8Channel)
    return Codes(
        kind="rotated_int8" if matrix.format.is_rotated else "int8",
        codes_OI=matrix.pieces["codes"].view(torch.uint8),
        scales_BG=matrix.pieces["scales"],
        group_size=matrix.shape[1],
    )


_ONE_IN_EACH_NIBBLE = 0x11111111


def unpack_gptq(matrix: StoredMatrix) -> Codes:
    """Codes of `specs.weight_format.Gptq`.

    Zero points are stored minus one; adding one to whole words, carries included, reverses what
    GPTQModel does.
    """
    outputs, inputs = matrix.shape
    pieces = matrix.pieces
    words_JO = pieces["codes"]
    bytes_JBO = words_JO.view(torch.uint8).view(*words_JO.shape, 4).transpose(1, 2)
    codes_IO = torch.stack((bytes_JBO & 0xF, bytes_JBO >> 4), 2).reshape(inputs, outputs)
    scales_GO = pieces["scales"]
    group_size = inputs // len(scales_GO)
    return Codes(
        kind="int4",
        codes_OI=codes_IO.t(),
        scales_BG=scales_GO.t(),
        group_size=group_size,
        zeros_OG=nibbles(pieces["zeros"] + _ONE_IN_EACH_NIBBLE).t(),
        order_I=pieces.get("order"),
    )


def unpack_mxfp4(matrix: StoredMatrix) -> Codes:
    return Codes(
        kind="e2m1",
        codes_OI=nibbles(matrix.pieces["codes"]).flatten(1),
        scales_BG=matrix.pieces["scales"].view(torch.uint8),
        group_size=MXFP4_COLUMNS,
    )


def unpack_mxfp8(matrix: StoredMatrix) -> Codes:
    return Codes(
        kind="e4m3",
        codes_OI=matrix.pieces["codes"].view(torch.uint8),
        scales_BG=matrix.pieces["scales"].view(torch.uint8),
        group_size=MXFP8_COLUMNS,
    )


def unpack_nvfp4(matrix: StoredMatrix) -> Codes:
    assert isinstance(matrix.format, Nvfp4)
    return Codes(
        kind="e2m1",
        codes_OI=nibbles(matrix.pieces["codes"]),
        scales_BG=matrix.pieces["scales"],
        group_size=NVFP4_COLUMNS,
        tensor_scale=matrix.pieces["tensor_scale"],
        is_divided=matrix.format.is_divided,
    )


def unpack_packed_int4(matrix: StoredMatrix) -> Codes:
    outputs, inputs = matrix.shape
    pieces = matrix.pieces
    zeros_OG = None
    if "zeros" in pieces:
        words_WG = pieces["zeros"]
        shifts_8 = 4 * torch.arange(8, dtype=torch.int32, device=words_WG.device)
        zeros_OG = (words_WG[:, None] >> shifts_8[:, None] & 0xF).flatten(0, 1)[:outputs].byte()
    return Codes(
        kind="int4",
        codes_OI=nibbles(pieces["codes"])[:, :inputs],
        scales_BG=pieces["scales"],
        group_size=inputs // pieces["scales"].shape[1],
        zeros_OG=zeros_OG,
        order_I=pieces.get("order"),
    )


CODECS: Mapping[type[WeightFormat], Callable[[StoredMatrix], Codes]] = {
    Fp8Block: unpack_block,
    Fp8Channel: unpack_channel,
    Fp8Tensor: unpack_channel,
    Int8Channel: unpack_int8,
    PackedInt4: unpack_packed_int4,
    Gptq: unpack_gptq,
    Awq: unpack_awq,
    Mxfp4: unpack_mxfp4,
    Mxfp8: unpack_mxfp8,
    Nvfp4: unpack_nvfp4,
}


def on_device(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, StoredMatrix):
        pieces = {name: piece.to(device) for name, piece in weight.pieces.items()}
        return replace(weight, pieces=pieces)
    return weight.to(device)
