"""Linear layers on the CPU, with weights in packed panels of bfloat16, of stored codes or of int8.

O outputs, I inputs, F intermediate size of an expert, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.codecs import Codes, StoredMatrix, Weight, as_tensor, float_scales, row_blocks, unpack
from raymoe.rotation import input_run
from raymoe.specs.weight_format import Int8Channel, WeightFormat

_KINDS = {
    ("int4", torch.float16): "int4_float16",
    ("int4", torch.bfloat16): "int4_bfloat16",
    ("e2m1", torch.uint8): "e2m1",
    ("e2m1", torch.float8_e4m3fn): "e2m1_e4m3",
    ("e4m3", torch.uint8): "e4m3_e8m0",
}
_FLOAT_SCALED = ("e4m3", "int8", "rotated_int8")  # scales that are not powers of two become float32


class Packing(Protocol):
    @property
    def format(self) -> _native.CodeFormat | None:
        """Format of the codes; None for bfloat16."""

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a packed matrix [O, I]."""

    def gate_up_bytes(self, expert_size: int, hidden_size: int) -> int:
        """Bytes of gate and up [F, H] of one expert together."""

    def pack_linear(self, weight_OI: Weight, out: Tensor) -> None:
        """Pack a matrix into `linear_bytes` of memory, aligned to 64."""

    def pack_gate_up(self, gate_FH: Weight, up_FH: Weight, out: Tensor) -> None:
        """Pack gate and up together into `gate_up_bytes` of memory."""


class BFloat16Packing:
    format: _native.CodeFormat | None = None

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        return _native.packed_bytes(out_features, in_features)

    def gate_up_bytes(self, expert_size: int, hidden_size: int) -> int:
        return _native.packed_gate_up_bytes(expert_size, hidden_size)

    def pack_linear(self, weight_OI: Weight, out: Tensor) -> None:
        assert isinstance(weight_OI, Tensor)
        _native.pack_linear(weight_OI.detach(), out)

    def pack_gate_up(self, gate_FH: Weight, up_FH: Weight, out: Tensor) -> None:
        assert isinstance(gate_FH, Tensor)
        assert isinstance(up_FH, Tensor)
        _native.pack_gate_up(gate_FH.detach(), up_FH.detach(), out)


class CodePacking:
    """Codes, scales and zero points in as many bits as they are stored.

    With AVX512-BF16, kernels look numbers up in registers and scale sums of products with them in
    float32. Other instruction sets, and matrices whose inputs name their groups, decode a block of
    a panel before they multiply it: elements are rounded to bfloat16, subnormal ones are zero.
    int8 is not decoded: inputs are quantised instead (`quantise_rows`), and sums are exact.
    """

    def __init__(self, codes: Codes) -> None:
        self.format = _native.CodeFormat(
            _kind(codes),
            codes.group_size,
            codes.block_rows > 1,
            codes.zeros_OG is not None,
            codes.order_I is not None,
        )

    def linear_bytes(self, out_features: int, in_features: int) -> int:
        return self.format.packed_bytes(out_features, in_features)

    def gate_up_bytes(self, expert_size: int, hidden_size: int) -> int:
        return self.format.packed_gate_up_bytes(expert_size, hidden_size)

    def pack_linear(self, weight_OI: Weight, out: Tensor) -> None:
        _native.pack_codes(self.format, _tensors(weight_OI), out)

    def pack_gate_up(self, gate_FH: Weight, up_FH: Weight, out: Tensor) -> None:
        _native.pack_gate_up_codes(self.format, _tensors(gate_FH), _tensors(up_FH), out)


def packing_of(weight: Weight) -> Packing:
    return CodePacking(unpack(weight)) if isinstance(weight, StoredMatrix) else BFloat16Packing()


@lru_cache
def packing_for(stored: WeightFormat | None, out_features: int, in_features: int) -> Packing:
    """Return the packing for a matrix that is not loaded yet; `stored` is None if not quantised."""
    if stored is None:
        return BFloat16Packing()
    shape = (out_features, in_features)
    return CodePacking(unpack(StoredMatrix.without_data(stored, shape)))


def _kind(codes: Codes) -> str:
    dtype = codes.scales_BG.dtype
    if codes.kind in _FLOAT_SCALED and dtype != torch.uint8:
        return codes.kind
    return _KINDS[codes.kind, dtype]


def _tensors(
    weight: Weight,
) -> tuple[Tensor, Tensor, int, Tensor | None, Tensor | None, float, float]:
    assert isinstance(weight, StoredMatrix)
    codes = unpack(weight)
    scales_BG = codes.scales_BG
    if _kind(codes) in _FLOAT_SCALED:
        scales_BG = float_scales(scales_BG)
    elif scales_BG.dtype == torch.float8_e4m3fn:
        scales_BG = scales_BG.view(torch.uint8)
    scale = 1.0 if codes.tensor_scale is None else float(codes.tensor_scale)
    factors = (1.0, scale) if codes.is_divided else (scale, 1.0)
    return codes.codes_OI, scales_BG, codes.block_rows, codes.zeros_OG, codes.order_I, *factors


def quantise_rows(input_TI: Tensor, *, run: int = 1) -> tuple[Tensor, Tensor]:
    """Round rows to int8 as products of int8 do, and matrices for such products.

    Args:
        run: Inputs that are rotated together before.

    Returns:
        round(x / scale), int8 [T, I], and the scales, float32 [T]: the largest |x| of a row / 127;
        NaN where one is not finite.
    """
    input_TI = input_TI.detach().to(torch.bfloat16).contiguous()
    codes_TI = torch.empty(input_TI.shape, dtype=torch.int8)
    scales_T = torch.empty(len(input_TI))
    _native.quantise_rows(input_TI, run, codes_TI, scales_T)
    return codes_TI, scales_T


def quantise_matrix(weight_OI: Tensor, *, is_rotated: bool = False) -> StoredMatrix:
    """Return a matrix in int8, with a scale for each output.

    Rotation makes a few large inputs many of middling size, which share the scale of a row without
    loss. It changes no product, since inputs are rotated too. Source: QuaRot (arXiv 2404.00456).
    """
    outputs, inputs = weight_OI.shape
    run = input_run(inputs) if is_rotated else 1
    codes_OI, scales_O = quantise_rows(weight_OI, run=run)
    # Rotating both multiplies products by the length of a run.
    pieces = {"codes": codes_OI, "scales": scales_O[:, None] / run}
    stored = Int8Channel(is_rotated=is_rotated)
    return StoredMatrix(format=stored, shape=(outputs, inputs), pieces=pieces)


def joined_int8(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Return matrices of one format of int8 as one, whose outputs are theirs in turn."""
    pieces = {
        "codes": torch.cat([part.pieces["codes"].view(torch.uint8) for part in parts]),
        "scales": torch.cat([float_scales(part.pieces["scales"]) for part in parts]),
    }
    outputs = sum(part.shape[0] for part in parts)
    return StoredMatrix(format=parts[0].format, shape=(outputs, parts[0].shape[1]), pieces=pieces)


Allocate = Callable[[int], Tensor]  # bytes -> uint8 [bytes], 64-byte aligned, kept by the caller


class Linear(Protocol):
    in_features: int
    out_features: int

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        """Project [T, I] to [T, O] in the type of the input; rows of both may be strided.

        Args:
            out: Receives the result. If it is float32, it receives the unrounded sums of a
                projection of 16 bits.
        """


class PlainLinear:
    """Reference: torch (oneDNN or MKL) multiplies; weights are not copied."""

    def __init__(self, weight_OI: Weight, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None and out.dtype == torch.float32 != input_TI.dtype:
            return multiply_unrounded(input_TI, self._weight_OI, self._bias_O, out)
        result_TO = multiply(input_TI, self._weight_OI, self._bias_O)
        return result_TO if out is None else out.copy_(result_TO)


class PackedLinear:
    """Our kernel on bfloat16 weights or codes in panels of 32 outputs.

    Sums are float32 in a fixed order: the bits of a row do not depend on the batch or the number of
    threads. The error against exact arithmetic is that of one rounding to bfloat16; with weights of
    int8, of arithmetic on the quantised inputs.
    """

    def __init__(self, weight_OI: Weight, bias_O: Tensor | None, allocate: Allocate) -> None:
        self.out_features, self.in_features = weight_OI.shape
        packing = packing_of(weight_OI)
        self._packed = allocate(packing.linear_bytes(self.out_features, self.in_features))
        self._bias_O = None if bias_O is None else bias_O.detach().clone()
        self._format = packing.format
        packing.pack_linear(weight_OI, self._packed)

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(input_TI), self.out_features, dtype=torch.bfloat16)
        if input_TI.stride(1) != 1:
            input_TI = input_TI.contiguous()
        _native.packed_linear(input_TI, self._packed, self._bias_O, out, self._format)
        return out


class SideBySide:
    """Projections of the same input whose outputs are concatenated."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, input_TI: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = input_TI.new_empty(len(input_TI), self.out_features)
        begin = 0
        for part in self._parts:
            part(input_TI, out=out[:, begin : begin + part.out_features])
            begin += part.out_features
        return out


class PackedGroups:
    """Our kernel on one bfloat16 matrix [O, I] for each of G groups of inputs and outputs.

    Args:
        packed_GX: One packed matrix per group; they follow one another.
    """

    def __init__(self, packed_GX: Tensor, out_features: int) -> None:
        self.num_groups, self._out_features = len(packed_GX), out_features
        self._packed_GX = packed_GX

    @classmethod
    def pack(cls, weight_GOI: Tensor, allocate: Allocate) -> Self:
        num_groups, outputs, inputs = weight_GOI.shape
        memory = allocate(packed_groups_bytes(num_groups, outputs, inputs))
        packed_GX = memory.view(num_groups, -1)
        for weight_OI, packed in zip(weight_GOI, packed_GX, strict=True):
            _native.pack_linear(weight_OI.detach(), packed)
        return cls(packed_GX, outputs)

    def some(self, groups: slice) -> "PackedGroups":
        """Return some groups, without a copy of their weights."""
        return PackedGroups(self._packed_GX[groups], self._out_features)

    def __call__(self, input_TGI: Tensor, out: Tensor | None = None) -> Tensor:
        """Project [T, G, I] to [T, G, O]; groups and tokens of both may be any distance apart.

        The bits of a row do not depend on the batch, as those of `PackedLinear`.
        """
        if out is None:
            out = input_TGI.new_empty(len(input_TGI), self.num_groups, self._out_features)
        _native.packed_grouped_linear(input_TGI, self._packed_GX.flatten(), out)
        return out


def multiply_groups(input_TGI: Tensor, weight_GOI: Tensor) -> Tensor:
    """Project [T, G, I] to [T, G, O] with torch."""
    return torch.bmm(input_TGI.transpose(0, 1), weight_GOI.transpose(1, 2)).transpose(0, 1)


def packed_groups_bytes(num_groups: int, out_features: int, in_features: int) -> int:
    return num_groups * _native.packed_bytes(out_features, in_features)


def multiply(input_TI: Tensor, weight_OI: Weight, bias_O: Tensor | None = None) -> Tensor:
    """Compute x W^T + b with torch; a quantised weight is decoded, in pieces if it is large."""
    if not isinstance(weight_OI, StoredMatrix):
        return functional.linear(input_TI, weight_OI, bias_O)
    out_TO = input_TI.new_empty(len(input_TI), weight_OI.shape[0])
    for rows, block in row_blocks(weight_OI):
        block_bias = None if bias_O is None else bias_O[rows]
        decoded_OI = as_tensor(block, input_TI.dtype)
        out_TO[:, rows] = functional.linear(input_TI, decoded_OI, block_bias)
    return out_TO


_WIDENED_ELEMENTS = 1 << 24  # of a matrix, in float32 at once


def multiply_unrounded(
    input_TI: Tensor, weight_OI: Weight, bias_O: Tensor | None, out: Tensor
) -> Tensor:
    """Compute x W^T + b in float32, of which `out` is, for pieces of the matrix at a time."""
    outputs, inputs = weight_OI.shape
    wide_TI = input_TI.float()
    pieces: Iterator[tuple[slice, Weight]]
    if isinstance(weight_OI, StoredMatrix):
        pieces = iter(row_blocks(weight_OI))
    else:
        at_once = max(1, _WIDENED_ELEMENTS // inputs)
        ranges = (slice(first, first + at_once) for first in range(0, outputs, at_once))
        pieces = ((rows, weight_OI[rows]) for rows in ranges)
    for rows, piece in pieces:
        bias = None if bias_O is None else bias_O[rows].float()
        wide_OI = as_tensor(piece, input_TI.dtype).float()
        out[:, rows] = functional.linear(wide_TI, wide_OI, bias)
    return out


def make_linear(
    weight_OI: Weight,
    bias_O: Tensor | None,
    allocate: Allocate,
    dtype: torch.dtype | None = None,
) -> Linear:
    """Return the fastest projection for these weights on this machine.

    Args:
        weight_OI: May be a view of the checkpoint. A packed projection copies it into `allocate`
            (`packed_linear_bytes`) and keeps no reference; a plain one keeps the view.
        bias_O: In the compute type.
        dtype: Compute type; quantised weights need it.
    """
    if packed_linear_is_used(compute_dtype(weight_OI, dtype)):
        return PackedLinear(weight_OI, bias_O, allocate)
    return PlainLinear(weight_OI, bias_O)


def compute_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    assert isinstance(weight, Tensor), "a quantised weight does not say what to compute in"
    return weight.dtype


def packed_linear_is_used(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and _native.active_isa() != "scalar"


def packed_linear_bytes(
    out_features: int, in_features: int, stored: WeightFormat | None = None
) -> int:
    return packing_for(stored, out_features, in_features).linear_bytes(out_features, in_features)
