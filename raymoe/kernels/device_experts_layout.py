"""How the matrices of a layer's experts lie in device memory, and at which addresses.

Experts may lie in different buffers (resident ones here, streamed ones in a slot): a kernel takes
the address of each tensor of each expert from a table, and everything else, which is the same for
all of them, from a `MatrixLayout`. E experts, O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight
from raymoe.specs.weight_format import (
    FP8_COLUMNS,
    FP8_ROWS,
    MXFP4_COLUMNS,
    Awq,
    Fp8Block,
    Fp8Channel,
    Gptq,
    Mxfp4,
    PackedInt4,
    WeightFormat,
)

Kind = Literal["plain", "int4", "e2m1", "e4m3"]
Zeros = Literal["none", "packed", "gptq", "awq"]

FIELDS = ("codes", "scales", "zeros", "order", "bias")  # of a matrix in the table of addresses
MAX_ALIGNMENT = 16  # bytes that one thread loads at once
_NIBBLES = 8  # in a word
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayout:
    """Everything about a matrix [O, I] but its addresses.

    Codes come in units: one element, or a word or byte with several neighbours of four bits.

    Attributes:
        kind: What number a code is.
        shape: O and I.
        unit: Type of a unit.
        unit_inputs: Inputs whose codes are in one unit.
        unit_outputs: Outputs whose codes are in one unit; not more than one of both is above 1.
        code_strides: Units between neighbouring (units of) outputs, and of inputs.
        scales: Type of the scales; uint8 for exponents of two; None without scales.
        scale_strides: Elements between neighbouring blocks of outputs, and groups.
        group_size: Inputs that share a scale.
        block_rows: Outputs that share a scale.
        zeros: How zero points are packed: in words along the outputs, of GPTQ less one, of AWQ in
            an order of their own.
        zero_strides: Words between neighbouring words of outputs, and groups.
        has_order: Whether a table names the group of each input.
    """

    kind: Kind
    shape: tuple[int, int]
    unit: torch.dtype
    unit_inputs: int = 1
    unit_outputs: int = 1
    code_strides: tuple[int, int]
    scales: torch.dtype | None = None
    scale_strides: tuple[int, int] = (0, 0)
    group_size: int = 0
    block_rows: int = 1
    zeros: Zeros = "none"
    zero_strides: tuple[int, int] = (0, 0)
    has_order: bool = False

    @property
    def num_units(self) -> int:
        """Units along the inputs."""
        return -(-self.shape[1] // self.unit_inputs)


def layout_of(weights: Sequence[Weight]) -> MatrixLayout | None:
    """The layout that all these matrices have; None where they differ."""
    has_words = all(_has_whole_words(weight) for weight in weights)
    layouts = {_layout(weight, has_words=has_words) for weight in weights}
    return layouts.pop() if len(layouts) == 1 else None


def alignment_of(weights: Sequence[Weight]) -> int:
    """Bytes of which the addresses of all codes are multiples, at most 16."""
    return gcd(MAX_ALIGNMENT, *(_codes(weight).data_ptr() for weight in weights))


def addresses_of(weight: Weight, bias_O: Tensor | None) -> list[int]:
    """Where the tensors of a matrix lie, in the order of `FIELDS`; 0 for what it does not have."""
    tensors: dict[str, Tensor] = {}
    if isinstance(weight, StoredMatrix):
        tensors.update(weight.pieces)
    else:
        tensors["codes"] = weight
    if bias_O is not None:
        tensors["bias"] = bias_O
    return [tensors[name].data_ptr() if name in tensors else 0 for name in FIELDS]


def _codes(weight: Weight) -> Tensor:
    return weight.pieces["codes"] if isinstance(weight, StoredMatrix) else weight


def _has_whole_words(weight: Weight) -> bool:
    """Whether bytes of codes can be read as words."""
    codes = _codes(weight)
    rows_apart = codes.stride(0) * codes.element_size()
    return codes.data_ptr() % _WORD_BYTES == 0 and rows_apart % _WORD_BYTES == 0


def _layout(weight: Weight, *, has_words: bool) -> MatrixLayout:
    if isinstance(weight, StoredMatrix):
        if isinstance(weight.format, Mxfp4):
            return _mxfp4(weight, has_words=has_words)
        return _LAYOUTS[type(weight.format)](weight)
    outputs, inputs = weight.shape
    return MatrixLayout(
        kind="plain", shape=(outputs, inputs), unit=weight.dtype, code_strides=_strides(weight)
    )


def _fp8(matrix: StoredMatrix, *, group_size: int, block_rows: int) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="e4m3",
        shape=matrix.shape,
        unit=torch.uint8,
        code_strides=_strides(pieces["codes"]),
        scales=pieces["scales"].dtype,
        scale_strides=_strides(pieces["scales"]),
        group_size=group_size or matrix.shape[1],
        block_rows=block_rows,
    )


def _packed_int4(matrix: StoredMatrix) -> MatrixLayout:
    pieces = matrix.pieces
    scales_OG, has_zeros = pieces["scales"], "zeros" in pieces
    return MatrixLayout(
        kind="int4",
        shape=matrix.shape,
        unit=torch.int32,
        unit_inputs=_NIBBLES,
        code_strides=_strides(pieces["codes"]),
        scales=scales_OG.dtype,
        scale_strides=_strides(scales_OG),
        group_size=matrix.shape[1] // scales_OG.shape[1],
        zeros="packed" if has_zeros else "none",
        zero_strides=_strides(pieces["zeros"]) if has_zeros else (0, 0),
        has_order="order" in pieces,
    )


def _gptq(matrix: StoredMatrix) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="int4",
        shape=matrix.shape,
        unit=torch.int32,
        unit_inputs=_NIBBLES,
        code_strides=_strides(pieces["codes"])[::-1],
        scales=pieces["scales"].dtype,
        scale_strides=_strides(pieces["scales"])[::-1],
        group_size=matrix.shape[1] // len(pieces["scales"]),
        zeros="gptq",
        zero_strides=_strides(pieces["zeros"])[::-1],
        has_order="order" in pieces,
    )


def _awq(matrix: StoredMatrix) -> MatrixLayout:
    pieces = matrix.pieces
    return MatrixLayout(
        kind="int4",
        shape=matrix.shape,
        unit=torch.int32,
        unit_outputs=_NIBBLES,
        code_strides=_strides(pieces["codes"])[::-1],
        scales=pieces["scales"].dtype,
        scale_strides=_strides(pieces["scales"])[::-1],
        group_size=matrix.shape[1] // len(pieces["scales"]),
        zeros="awq",
        zero_strides=_strides(pieces["zeros"])[::-1],
    )


def _mxfp4(matrix: StoredMatrix, *, has_words: bool) -> MatrixLayout:
    codes_OGB, scales_OG = matrix.pieces["codes"], matrix.pieces["scales"]
    unit = torch.int32 if has_words else torch.uint8
    return MatrixLayout(
        kind="e2m1",
        shape=matrix.shape,
        unit=unit,
        unit_inputs=2 * unit.itemsize,
        code_strides=(codes_OGB.stride(0) // unit.itemsize, 1),
        scales=torch.uint8,
        scale_strides=_strides(scales_OG),
        group_size=MXFP4_COLUMNS,
    )


def _strides(matrix: Tensor) -> tuple[int, int]:
    first, second = matrix.stride()
    return first, second


_LAYOUTS: Mapping[type[WeightFormat], Callable[[StoredMatrix], MatrixLayout]] = {
    Fp8Block: partial(_fp8, group_size=FP8_COLUMNS, block_rows=FP8_ROWS),
    Fp8Channel: partial(_fp8, group_size=0, block_rows=1),
    PackedInt4: _packed_int4,
    Gptq: _gptq,
    Awq: _awq,
}
