"""Dense projections on the CPU: packed bfloat16 weights where the ISA has vectors.

T tokens, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.codecs import StoredMatrix, Weight, as_tensor, row_blocks
from raymoe.kernels.packing import packing_for, packing_of
from raymoe.specs.weight_format import WeightFormat

Allocate = Callable[[int], Tensor]  # bytes -> uint8 [bytes], 64-byte aligned, kept by the caller


class Linear(Protocol):
    """A projection that owns (or views) its weights."""

    in_features: int
    out_features: int

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """Project [T, I] to [T, O] in the type of the input.

        Args:
            input_TI: Rows may be any distance apart.
            out: Where the result goes; a new tensor without it. Rows may be any distance apart. One
                of float32 takes the sums of a bfloat16 projection as exactly as it has them.
        """


class PlainLinear:
    """oneDNN or MKL through torch; the weights stay where they are. Also the reference."""

    def __init__(self, weight_OI: Weight, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        result_TO = multiply(input_TI, self._weight_OI, self._bias_O)
        return result_TO if out is None else out.copy_(result_TO)


class PackedLinear:
    """bfloat16 weights or codes in panels of 32 outputs, our own kernel.

    Sums are float32 in a fixed order: the bits of a row do not depend on the batch or the number
    of threads. The error against exact arithmetic is that of one rounding to bfloat16.
    """

    def __init__(self, weight_OI: Weight, bias_O: Tensor | None, allocate: Allocate) -> None:
        self.out_features, self.in_features = weight_OI.shape
        packing = packing_of(weight_OI)
        self._packed = allocate(packing.linear_bytes(self.out_features, self.in_features))
        self._bias_O = None if bias_O is None else bias_O.detach().clone()
        self._format = packing.format
        packing.pack_linear(weight_OI, self._packed)

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if out is None:
            out = torch.empty(len(input_TI), self.out_features, dtype=torch.bfloat16)
        if input_TI.stride(1) != 1:
            input_TI = input_TI.contiguous()
        _native.packed_linear(input_TI, self._packed, self._bias_O, out, self._format)
        return out


class SideBySide:
    """Projections of the same input, each of which writes columns of its own."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if out is None:
            out = input_TI.new_empty(len(input_TI), self.out_features)
        begin = 0
        for part in self._parts:
            part(input_TI, out=out[:, begin : begin + part.out_features])
            begin += part.out_features
        return out


def multiply(input_TI: Tensor, weight_OI: Weight, bias_O: Tensor | None = None) -> Tensor:
    """The projection of PlainLinear; a quantised weight is decoded, in pieces where it is large."""
    if not isinstance(weight_OI, StoredMatrix):
        return functional.linear(input_TI, weight_OI, bias_O)
    out_TO = input_TI.new_empty(len(input_TI), weight_OI.shape[0])
    for rows, block in row_blocks(weight_OI):
        block_bias = None if bias_O is None else bias_O[rows]
        decoded_OI = as_tensor(block, input_TI.dtype)
        out_TO[:, rows] = functional.linear(input_TI, decoded_OI, block_bias)
    return out_TO


def make_linear(
    weight_OI: Weight,
    bias_O: Tensor | None,
    allocate: Allocate,
    dtype: torch.dtype | None = None,
) -> Linear:
    """The fastest projection for these weights on this machine.

    Args:
        weight_OI: May be a view of the checkpoint; a packed projection copies it into `allocate`
            and keeps no reference, a plain one keeps the view.
        bias_O: Optional bias, in the type to compute in.
        allocate: Where packed weights go: `packed_linear_bytes` of them.
        dtype: Type to compute in, which a quantised weight needs.
    """
    if packed_linear_is_used(compute_dtype(weight_OI, dtype)):
        return PackedLinear(weight_OI, bias_O, allocate)
    return PlainLinear(weight_OI, bias_O)


def compute_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    """The type to compute in: that of the weight, unless it is quantised or `dtype` says so."""
    if dtype is not None:
        return dtype
    assert isinstance(weight, Tensor), "a quantised weight does not say what to compute in"
    return weight.dtype


def packed_linear_is_used(dtype: torch.dtype) -> bool:
    """Whether `make_linear` copies weights of this type into packed form on this machine."""
    return dtype == torch.bfloat16 and _native.active_isa() != "scalar"


def packed_linear_bytes(
    out_features: int, in_features: int, stored: WeightFormat | None = None
) -> int:
    """Bytes that a packed projection takes from `allocate`; `stored` of a quantised one."""
    return packing_for(stored, out_features, in_features).linear_bytes(out_features, in_features)
