"""Codecs: from the bytes of a checkpoint to the numbers they mean.

A weight is a tensor where it is stored as it is, or a `StoredMatrix`, which keeps its bytes until
it is used. `CODECS` has one function for each format.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from raymoe.codecs import awq, fp8, gptq, mxfp4, packed_int4
from raymoe.codecs.codes import Codes, decode
from raymoe.codecs.stored import StoredMatrix
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Gptq,
    Mxfp4,
    PackedInt4,
    WeightFormat,
)

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

# With everything on the way to them, about 100 MiB; enough for a product at full rate.
BLOCK_ELEMENTS = 8 << 20
_CUT_ROWS = 128  # between these no format shares a scale

CODECS: Mapping[type[WeightFormat], Callable[[StoredMatrix], Codes]] = {
    Fp8Block: fp8.unpack_block,
    Fp8Channel: fp8.unpack_channel,
    PackedInt4: packed_int4.unpack,
    Gptq: gptq.unpack,
    Awq: awq.unpack,
    Mxfp4: mxfp4.unpack,
}


def unpack(matrix: StoredMatrix) -> Codes:
    """Codes, scales and zero points of a matrix."""
    return CODECS[type(matrix.format)](matrix)


def row_blocks(weight: StoredMatrix) -> Iterator[tuple[slice, StoredMatrix]]:
    """The rows of a matrix in blocks that are small enough to be decoded at once."""
    outputs, inputs = weight.shape
    rows = max(BLOCK_ELEMENTS // inputs // _CUT_ROWS, 1) * _CUT_ROWS
    for begin in range(0, outputs, rows):
        end = min(begin + rows, outputs)
        yield slice(begin, end), weight.rows(begin, end)


def as_tensor(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight in the type to compute in; decoded if it is not stored as it is.

    A decoded element is the exact product of number and scale in float32, rounded to `dtype`.
    """
    if not isinstance(weight, StoredMatrix):
        return weight.to(dtype)
    device = weight.pieces["codes"].device
    decoded_OI = torch.empty(weight.shape, dtype=dtype, device=device)
    for rows, block in row_blocks(weight):
        decoded_OI[rows] = decode(unpack(block), dtype)
    return decoded_OI
