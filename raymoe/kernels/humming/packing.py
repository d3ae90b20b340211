"""Packing of coded matrices for humming-kernels, and its inverse.

Codes lie as its `weight_repack_nk` writes them for inputs of 16 bits (include/humming/kernel/
process.cuh of 0.1.19), scales, zero points and biases as its transform.py does.

E experts, O outputs, P outputs with padding, I inputs, G groups of inputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.codecs import CodeKind, Codes, StoredMatrix, Weight, nibbles, unpack
from raymoe.kernels.gpu_experts_layout import ExpertMatrices
from raymoe.specs.weight_format import FP8_COLUMNS, FP8_ROWS

BITS = {"int4": 4, "e2m1": 4, "e4m3": 8}
OUTPUTS = 128  # outputs are padded to a multiple of the smallest block of a tile
INPUTS = 64  # a multiple of the inputs of each tile
_TILE = 64  # outputs whose scales are permuted among themselves
_STORE_BYTES = 16  # what a thread writes of a row at once

_HALVES = (torch.float16, torch.bfloat16)
_INT4_GROUPS = (32, 64, 128)
_E8M0_BIAS, _FLOAT16_BIAS, _FLOAT16_EXPONENTS = 127, 15, (-14, 15)
# Smaller float16 scales are subnormal and keep fewer bits than in bfloat16; larger ones overflow.
_FLOAT16_SCALES = (2.0**-17, 65504.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """What kernels assume of a packed matrix [O, I].

    Attributes:
        scales: Type of the scales; uint8 for exponents of two.
        group_size: Inputs that share a scale.
        block_rows: Outputs that share a scale.
        has_tensor_scale: Whether results are multiplied by a float32 of the whole matrix.
    """

    kind: CodeKind
    shape: tuple[int, int]
    dtype: torch.dtype
    scales: torch.dtype
    group_size: int
    block_rows: int
    has_zeros: bool
    has_tensor_scale: bool
    has_bias: bool

    @property
    def padded_outputs(self) -> int:
        return -(-self.shape[0] // OUTPUTS) * OUTPUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrices:
    """One matrix of each expert.

    Attributes:
        codes: int32 [E, I / 16, P * bits / 2].
        scales: [E, G, P], or float32 [E, G, P / 128] for blocks of outputs.
        zeros: int32 [E, G, P / 8].
        tensor_scale_E: float32.
        bias_EP: In the type of the inputs.
    """

    layout: PackedLayout
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    tensor_scale_E: Tensor | None = None
    bias_EP: Tensor | None = None


def why_not_packed(matrices: ExpertMatrices, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not take the experts of a layer, or None; reads their scales.

    Args:
        dtype: Type of the inputs of the products.
    """
    layouts = matrices.layouts()
    if layouts is None:
        return "experts, or their gates and ups, are stored differently"
    if any(layout.has_order for layout in layouts):
        return "inputs that share a scale are not neighbours (act-order)"
    for weight in chain(*matrices[:3]):
        if not isinstance(weight, StoredMatrix):
            return "16-bit weights are no codes"
        reason = why_not_matrix(weight, dtype)
        if reason is not None:
            return reason
    return None


def why_not_matrix(matrix: StoredMatrix, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not take a matrix whose groups are in order, or None."""
    codes = unpack(matrix)
    outputs, inputs = matrix.shape
    if dtype not in _HALVES:
        return f"inputs are float16 or bfloat16, not {dtype}"
    if inputs % INPUTS or outputs % (_STORE_BYTES // dtype.itemsize):
        return f"{outputs} outputs and {inputs} inputs, which are no multiples of 8 and {INPUTS}"
    if not _has_known_groups(codes):
        return f"one scale for {codes.block_rows} outputs and {codes.group_size} inputs"
    return _why_not_in_float16(codes) if dtype == torch.float16 else None


def _has_known_groups(codes: Codes) -> bool:
    sizes = (codes.block_rows, codes.group_size)
    if codes.kind == "e4m3":
        return sizes == (FP8_ROWS, FP8_COLUMNS) and codes.scales_BG.dtype == torch.float32
    return sizes[0] == 1 and (codes.kind == "e2m1" or sizes[1] in _INT4_GROUPS)


def _why_not_in_float16(codes: Codes) -> str | None:
    if codes.scales_BG.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = codes.scales_BG.view(torch.uint8).int() - _E8M0_BIAS
        first, last = int(exponents.min()), int(exponents.max())
        if first < _FLOAT16_EXPONENTS[0] or last > _FLOAT16_EXPONENTS[1]:
            return f"scales of 2^{first} to 2^{last}, and 2^-14 to 2^15 fit float16"
    if codes.scales_BG.dtype == torch.float32:
        sizes = codes.scales_BG.abs()
        is_outside = (sizes > 0) & (sizes < _FLOAT16_SCALES[0]) | (sizes > _FLOAT16_SCALES[1])
        if is_outside.any():
            return f"a scale of {sizes[is_outside][0]:.3g}, too small or too large for float16"
    return None


def pack_matrices(
    matrices: Sequence[Weight], biases_O: Sequence[Tensor] | None, dtype: torch.dtype
) -> PackedMatrices:
    """Pack a matrix of each expert, all stored the same, where they lie.

    Codes, E4M3 scales, exponents and float32 scales are kept; 16-bit scales are rounded to `dtype`.
    `why_not_matrix` is None for each, and groups are in order.
    """
    stacked = _stack((_pack(_stored(matrix), dtype) for matrix in matrices), len(matrices))
    if biases_O is None:
        return stacked
    bias_EP = torch.stack([_pack_bias(bias_O.to(dtype)) for bias_O in biases_O])
    return replace(stacked, layout=replace(stacked.layout, has_bias=True), bias_EP=bias_EP)


def _stored(matrix: Weight) -> Codes:
    assert isinstance(matrix, StoredMatrix), "only matrices of codes are packed"
    return unpack(matrix)


def _stack(packed: Iterable[PackedMatrices], num_experts: int) -> PackedMatrices:
    """Put the matrices of experts behind one another, one at a time, to hold each once."""
    whole: PackedMatrices | None = None
    for expert, one in enumerate(packed):
        if whole is None:
            whole = PackedMatrices(
                layout=one.layout,
                **{
                    name: tensor.new_empty(num_experts, *tensor.shape[1:])
                    for name, tensor in _tensors(one).items()
                },
            )
        assert one.layout == whole.layout, "the matrices of a layer's experts are stored the same"
        for name, tensor in _tensors(one).items():
            _tensors(whole)[name][expert] = tensor[0]
    assert whole is not None, "a layer has experts"
    return whole


def _tensors(packed: PackedMatrices) -> dict[str, Tensor]:
    names = ("codes", "scales", "zeros", "tensor_scale_E", "bias_EP")
    found = {name: getattr(packed, name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _pack(codes: Codes, dtype: torch.dtype) -> PackedMatrices:
    outputs, inputs = codes.codes_OI.shape
    scales_BG = codes.scales_BG
    if scales_BG.dtype == torch.float8_e8m0fnu:
        scales_BG = scales_BG.view(torch.uint8)
    elif codes.kind == "int4":
        scales_BG = scales_BG.to(dtype)
    layout = PackedLayout(
        kind=codes.kind,
        shape=(outputs, inputs),
        dtype=dtype,
        scales=scales_BG.dtype,
        group_size=codes.group_size,
        block_rows=codes.block_rows,
        has_zeros=codes.zeros_OG is not None,
        has_tensor_scale=codes.tensor_scale is not None,
        has_bias=False,
    )
    padding = layout.padded_outputs - outputs
    codes_PI = functional.pad(codes.codes_OI, (0, 0, 0, padding))
    return PackedMatrices(
        layout=layout,
        codes=_pack_codes(codes_PI, BITS[codes.kind])[None],
        scales=_pack_scales(scales_BG, layout)[None],
        zeros=None if codes.zeros_OG is None else _pack_zeros(codes.zeros_OG, padding)[None],
        tensor_scale_E=_multiplier(codes),
    )


# Sizes of the axes below: 4 tiles of 16 outputs, 2 halves of 8, 8 rows of lanes; 2 halves of 8
# inputs, 4 columns of lanes, 2 neighbours.
_OUTPUT_AXES, _INPUT_AXES = (4, 2, 8), (2, 4, 2)
# Of [P / 64, *_OUTPUT_AXES, I / 16, *_INPUT_AXES]: inputs, blocks of outputs and lanes first, then
# what a lane reads. One of two neighbours is in the lower half of a word, the other in the upper.
_ORDER = {4: (4, 0, 3, 6, 1, 7, 2, 5), 8: (4, 0, 3, 6, 1, 2, 7, 5)}


def _pack_codes(codes_PI: Tensor, bits: int) -> Tensor:
    outputs, inputs = codes_PI.shape
    axes = (outputs // _TILE, *_OUTPUT_AXES, inputs // 16, *_INPUT_AXES)
    ordered = codes_PI.reshape(axes).permute(_ORDER[bits]).reshape(inputs // 16, outputs * 16)
    if bits == BITS["int4"]:
        ordered = _in_pairs(ordered)
    return ordered.view(torch.int32)


def _unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Inverse of `_pack_codes`: uint8 [P, I]."""
    inputs, outputs = 16 * len(words), words.shape[1] * 2 // bits
    ordered = nibbles(words) if bits == BITS["int4"] else words.view(torch.uint8)
    axes = (outputs // _TILE, *_OUTPUT_AXES, inputs // 16, *_INPUT_AXES)
    order = torch.tensor(_ORDER[bits])
    in_order = ordered.view([axes[axis] for axis in order]).permute(*order.argsort())
    return in_order.reshape(outputs, inputs)


def _in_pairs(codes: Tensor) -> Tensor:
    """Codes of four bits in bytes, the first of two in the lower half; halves the last axis."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _pack_scales(scales_BG: Tensor, layout: PackedLayout) -> Tensor:
    blocks = layout.padded_outputs // layout.block_rows
    if scales_BG.dtype == torch.uint8 and layout.dtype == torch.float16:
        # Their exponents are those of float16, in the upper five bits.
        scales_BG = scales_BG - (_E8M0_BIAS - _FLOAT16_BIAS) << 3
    as_bytes = scales_BG.view(torch.uint8) if scales_BG.dtype.itemsize == 1 else scales_BG
    padded_BG = functional.pad(as_bytes, (0, 0, 0, blocks - len(scales_BG)))
    scales_GP = padded_BG.t() if layout.block_rows > 1 else _transposed_tiles(padded_BG.t())
    return scales_GP.contiguous().view(scales_BG.dtype)


def _unpack_scales(scales_GP: Tensor, layout: PackedLayout) -> Tensor:
    blocks = -(-layout.shape[0] // layout.block_rows)
    as_bytes = scales_GP.view(torch.uint8) if scales_GP.dtype.itemsize == 1 else scales_GP
    ordered = as_bytes if layout.block_rows > 1 else _transposed_tiles(as_bytes)
    scales_BG = ordered.t()[:blocks].contiguous().view(scales_GP.dtype)
    if scales_BG.dtype == torch.uint8 and layout.dtype == torch.float16:
        return (scales_BG >> 3) + (_E8M0_BIAS - _FLOAT16_BIAS)
    return scales_BG


def _transposed_tiles(values_GP: Tensor) -> Tensor:
    """Transpose each 64 values as a square of 8; its own inverse."""
    groups, outputs = values_GP.shape
    squares = values_GP.reshape(groups, outputs // _TILE, 8, 8)
    return squares.transpose(2, 3).reshape(groups, outputs)


def _pack_zeros(zeros_OG: Tensor, padding: int) -> Tensor:
    padded_PG = functional.pad(zeros_OG, (0, 0, 0, padding))
    return _in_pairs(_transposed_tiles(padded_PG.t())).view(torch.int32)


def _multiplier(codes: Codes) -> Tensor | None:
    if codes.tensor_scale is None:
        return None
    scale_1 = codes.tensor_scale.reshape(1)
    return 1 / scale_1 if codes.is_divided else scale_1


_BIAS_AXES = (4, 4, 2)  # of 32 outputs, as the lanes of a product write them


def _pack_bias(bias_O: Tensor) -> Tensor:
    padded_P = functional.pad(bias_O, (0, -len(bias_O) % OUTPUTS))
    return padded_P.view(-1, *_BIAS_AXES).transpose(1, 2).reshape(-1)


def unpacked(packed: PackedMatrices, expert: int) -> Codes:
    """Return the codes of an expert, with scales and zero points; the inverse of packing.

    A matrix that was divided by a float32 is multiplied by its inverse.
    """
    layout = packed.layout
    outputs, _ = layout.shape
    zeros_OG = None
    if packed.zeros is not None:
        zeros_OG = _transposed_tiles(nibbles(packed.zeros[expert])).t()[:outputs]
    scale_E = packed.tensor_scale_E
    return Codes(
        kind=layout.kind,
        codes_OI=_unpack_codes(packed.codes[expert], BITS[layout.kind])[:outputs],
        scales_BG=_unpack_scales(packed.scales[expert], layout),
        group_size=layout.group_size,
        block_rows=layout.block_rows,
        zeros_OG=zeros_OG,
        tensor_scale=None if scale_E is None else scale_E[expert],
    )


def unpacked_bias(packed: PackedMatrices, expert: int) -> Tensor | None:
    if packed.bias_EP is None:
        return None
    bias_P = packed.bias_EP[expert].view(-1, *_BIAS_AXES).transpose(1, 2).reshape(-1)
    return bias_P[: packed.layout.shape[0]]
