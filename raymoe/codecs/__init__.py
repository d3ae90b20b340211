"""Codecs: from the bytes of a checkpoint to the numbers they mean.

A weight is a tensor where it is stored as it is, or a `StoredMatrix`, which keeps its bytes until
it is used. `CODECS` has one function for each format.
"""

from collections.abc import Callable, Mapping

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

__all__ = ["CODECS", "Codes", "StoredMatrix", "Weight", "as_tensor", "unpack"]

Weight = Tensor | StoredMatrix

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


def as_tensor(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight in the type to compute in; decoded if it is not stored as it is.

    A decoded element is the exact product of number and scale in float32, rounded to `dtype`.
    """
    return decode(unpack(weight), dtype) if isinstance(weight, StoredMatrix) else weight.to(dtype)
