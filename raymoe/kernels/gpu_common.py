"""Shared parts of the GPU kernels: launches as data, decoding of stored codes, and noise."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from raymoe.codecs import SMALLEST_E8M0 as _SMALLEST_E8M0
from raymoe.errors import CapacityError
from raymoe.kernels.gpu_experts_layout import FIELDS, MatrixLayout

EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    Fused multiply-add is off explicitly, because its default differs between versions of Triton:
    the bits of a result do not depend on the version or on the tile.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, object]
    options: Mapping[str, int]

    def run(self) -> None:
        try:
            self.kernel[self.grid](
                *self.arguments.values(), **self.constants, **self.options, **EXACT
            )
        except OutOfResources as error:
            tile = {name: self.constants.get(name) for name in ("OUTPUTS", "ROWS")}
            raise CapacityError(
                f"{self.kernel.__name__} with {tile | dict(self.options)} does not fit on this "
                f"GPU: {error}; measure its tiles anew, or remove the file they were read from"
            ) from error


TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int32: tl.int32,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.uint8,  # decoded by `_e4m3`: Turing and Ampere do not convert it
}

CODES, SCALES, ZEROS, ORDER, BIAS, TENSOR_SCALE = (tl.constexpr(i) for i in range(len(FIELDS)))
MAGIC_BITS = tl.constexpr(0x4B000000)  # 2^23 as float32: its last bits are integers
MAGIC = tl.constexpr(8388608.0)
GPTQ_ONES = tl.constexpr(0x11111111)
WORD_MASK = tl.constexpr(0xFFFFFFFF)
MINUS_INFINITY = tl.constexpr(float("-inf"))
SMALLEST_E8M0 = tl.constexpr(_SMALLEST_E8M0)
_MISSING_POWERS = {"e4m3": 2.0**8, "e2m1": 2.0**14}
E4M3_MISSING = tl.constexpr(_MISSING_POWERS["e4m3"])


Constants = TypeVar("Constants")


@functools.lru_cache(maxsize=None, typed=True)
def kernel_constants(kind: type[Constants], /, **values: object) -> Constants:
    """Return the one object of a kind with these values as compile-time constants.

    Triton looks a kernel up by its constants at each launch. These compare by identity, because
    hashing and comparing their fields took most of the time of a launch.
    """
    return kind(**{name: tl.constexpr(value) for name, value in values.items()})


@dataclass(frozen=True, eq=False)
class KernelMatrix:
    """A `MatrixLayout` as compile-time constants; made by `kernel_constants`.

    Attributes:
        field: Index of the first of its addresses in a row of the address table.
        dtype: Type that decoded elements are rounded to.
        dot: Type of the products; float32 for bfloat16 where the GPU has no bfloat16 product.
        step: Units that one step of a kernel reads.
        is_even: Whether the inputs are a multiple of a step.
        alignment: Bytes of which all addresses of codes are multiples.
        groups: "step" if a step lies in one quantisation group, "unit" if the units of all planes
            lie in the same group, "plane" otherwise.
        missing: Power of two that the bits of a code lack.
        has_e4m3_scales: Whether scales are E4M3; those of type uint8 are E8M0 otherwise.
    """

    field: tl.constexpr
    kind: tl.constexpr
    outputs: tl.constexpr
    inputs: tl.constexpr
    dtype: tl.constexpr
    dtype_bytes: tl.constexpr
    dot: tl.constexpr
    unit: tl.constexpr
    unit_inputs: tl.constexpr
    unit_outputs: tl.constexpr
    output_stride: tl.constexpr
    unit_stride: tl.constexpr
    num_units: tl.constexpr
    step: tl.constexpr
    num_steps: tl.constexpr
    is_even: tl.constexpr
    alignment: tl.constexpr
    scale: tl.constexpr
    scale_bytes: tl.constexpr
    scale_output_stride: tl.constexpr
    scale_group_stride: tl.constexpr
    has_e4m3_scales: tl.constexpr
    tensor_scale: tl.constexpr
    group_size: tl.constexpr
    num_groups: tl.constexpr
    block_rows: tl.constexpr
    groups: tl.constexpr
    missing: tl.constexpr
    zeros: tl.constexpr
    zero_output_stride: tl.constexpr
    zero_group_stride: tl.constexpr
    has_order: tl.constexpr


def kernel_matrix(
    layout: MatrixLayout,
    *,
    matrix: int,
    dtype: torch.dtype,
    dot: torch.dtype,
    step: int,
    alignment: int,
) -> KernelMatrix:
    outputs, inputs = layout.shape
    group_size = layout.group_size or inputs
    scale = layout.scales or torch.float32
    values = {
        "field": matrix * len(FIELDS),
        "kind": layout.kind,
        "outputs": outputs,
        "inputs": inputs,
        "dtype": TRITON_TYPES[dtype],
        "dtype_bytes": dtype.itemsize,
        "dot": TRITON_TYPES[dot],
        "unit": TRITON_TYPES[layout.unit],
        "unit_inputs": layout.unit_inputs,
        "unit_outputs": layout.unit_outputs,
        "output_stride": layout.code_strides[0],
        "unit_stride": layout.code_strides[1],
        "num_units": layout.num_units,
        "step": step,
        "num_steps": -(-layout.num_units // step),
        "is_even": layout.num_units % step == 0,
        "alignment": alignment,
        "scale": TRITON_TYPES[scale],
        "scale_bytes": scale.itemsize,
        "scale_output_stride": layout.scale_strides[0],
        "scale_group_stride": layout.scale_strides[1],
        "has_e4m3_scales": scale == torch.float8_e4m3fn,
        "tensor_scale": layout.tensor_scale,
        "group_size": group_size,
        "num_groups": -(-inputs // group_size),
        "block_rows": layout.block_rows,
        "groups": _groups(layout, group_size, step),
        "missing": _MISSING_POWERS.get(layout.kind, 1.0),
        "zeros": layout.zeros,
        "zero_output_stride": layout.zero_strides[0],
        "zero_group_stride": layout.zero_strides[1],
        "has_order": layout.has_order,
    }
    constants: KernelMatrix = kernel_constants(KernelMatrix, **values)
    return constants


def _groups(layout: MatrixLayout, group_size: int, step: int) -> str:
    if layout.has_order:
        return "plane"
    if group_size % (step * layout.unit_inputs) == 0 or group_size >= layout.shape[1]:
        return "step"
    return "unit" if group_size % layout.unit_inputs == 0 else "plane"


@triton.jit
def pointer(
    row_ptr: tl.tensor, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr
) -> tl.tensor:
    """Return the address of a tensor of an expert; `row_ptr` is the expert's row of the table."""
    address = tl.load(row_ptr + FIELD)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGNMENT)


@triton.jit
def rounded(value: tl.tensor, TYPE: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Round a float32 value to `TYPE` and return it as type `DOT`."""
    if TYPE == DOT:
        result = value.to(DOT)
    else:
        # Round to nearest even by hand, because Triton's interpreter truncates bfloat16.
        bits = value.to(tl.uint32, bitcast=True)
        up = (bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000
        result = tl.where(value == value, up.to(tl.float32, bitcast=True), value)
    return result


@triton.jit
def round_to(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Round float32 values to `TYPE` and return them as float32."""
    if tl.bfloat16 == TYPE:
        values = rounded(values, TYPE, tl.float32)
    else:
        values = values.to(TYPE).to(tl.float32)
    return values


@triton.jit
def load_units(
    row_ptr: tl.tensor, outputs_O: tl.tensor, units_U: tl.tensor, M: tl.constexpr
) -> tl.tensor:
    """Load units of codes [O, U] as they are stored; 0 outside of the matrix."""
    codes_ptr = pointer(row_ptr, M.field + CODES, M.unit, M.alignment)
    rows_O = outputs_O // M.unit_outputs * M.output_stride
    places_OU = rows_O[:, None] + (units_U * M.unit_stride)[None, :]
    inside_OU = (outputs_O < M.outputs)[:, None]
    if not M.is_even:
        inside_OU = inside_OU & (units_U < M.num_units)[None, :]
    return tl.load(codes_ptr + places_OU, mask=inside_OU, other=0)


@triton.jit
def load_scaling(
    row_ptr: tl.tensor,
    outputs_O: tl.tensor,
    units_U: tl.tensor,
    step: tl.tensor,
    PLANE: tl.constexpr,
    M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load factors and zero points of one plane, float32 that broadcast to [O, U]."""
    if M.groups == "step":
        groups_1U = tl.full([1, 1], step * (M.step * M.unit_inputs) // M.group_size, tl.int32)
    elif M.has_order:
        columns_U = units_U * M.unit_inputs + PLANE
        order_ptr = pointer(row_ptr, M.field + ORDER, tl.int32, 4)
        groups_1U = tl.load(order_ptr + columns_U, mask=columns_U < M.inputs, other=0)[None, :]
    else:
        groups_1U = ((units_U * M.unit_inputs + PLANE) // M.group_size)[None, :]
    inside_OU = (outputs_O < M.outputs)[:, None] & (groups_1U < M.num_groups)
    scales_ptr = pointer(row_ptr, M.field + SCALES, M.scale, M.scale_bytes)
    blocks_O1 = (outputs_O // M.block_rows)[:, None]
    places_OU = blocks_O1 * M.scale_output_stride + groups_1U * M.scale_group_stride
    stored_OU = tl.load(scales_ptr + places_OU, mask=inside_OU, other=0)
    if M.has_e4m3_scales:
        factors_OU = _micro_scales(row_ptr, stored_OU, M) * M.missing
    elif M.scale == tl.uint8:
        bits_OU = stored_OU.to(tl.int32) << 23
        bits_OU = tl.maximum(bits_OU, SMALLEST_E8M0)
        factors_OU = bits_OU.to(tl.float32, bitcast=True) * M.missing
    else:
        factors_OU = stored_OU.to(tl.float32) * M.missing
    if M.zeros == "none":
        zeros_OU = tl.full([1, 1], 8.0, tl.float32)
    else:
        zeros_OU = _load_zeros(row_ptr, outputs_O, groups_1U, inside_OU, M)
    return factors_OU, zeros_OU


@triton.jit
def _micro_scales(row_ptr: tl.tensor, stored_OU: tl.tensor, M: tl.constexpr) -> tl.tensor:
    """Decode E4M3 scales and apply the scale of the matrix, rounded to float32."""
    scales_OU = _e4m3(stored_OU.to(tl.int32)) * E4M3_MISSING
    scale = tl.load(pointer(row_ptr, M.field + TENSOR_SCALE, tl.float32, 4))
    if M.tensor_scale == "divides":  # noqa: SIM108 - Triton would compute both
        scales_OU = tl.div_rn(scales_OU, scale)
    else:
        scales_OU = scales_OU * scale
    return scales_OU


@triton.jit
def _load_zeros(
    row_ptr: tl.tensor,
    outputs_O: tl.tensor,
    groups_1U: tl.tensor,
    inside_OU: tl.tensor,
    M: tl.constexpr,
) -> tl.tensor:
    """Load zero points. GPTQ stores each less one, with borrows across the nibbles of a word."""
    zeros_ptr = pointer(row_ptr, M.field + ZEROS, tl.int32, 4)
    words_O1 = (outputs_O // 8)[:, None] * M.zero_output_stride
    words_OU = tl.load(
        zeros_ptr + (words_O1 + groups_1U * M.zero_group_stride), mask=inside_OU, other=0
    )
    if M.zeros == "gptq":
        words_OU = ((words_OU.to(tl.int64) & WORD_MASK) + GPTQ_ONES) & WORD_MASK
    if M.zeros == "awq":  # noqa: SIM108 - Triton would compute both
        shifts_O1 = awq_shifts(outputs_O)[:, None]
    else:
        shifts_O1 = (outputs_O % 8 * 4)[:, None]
    return ((words_OU >> shifts_O1) & 0xF).to(tl.float32)


@triton.jit
def awq_shifts(outputs_O: tl.tensor) -> tl.tensor:
    """Return the bit offset of an output in a word of AWQ, which holds outputs 0 2 4 6 1 3 5 7."""
    return (outputs_O % 2 * 4 + outputs_O % 8 // 2) * 4


@triton.jit
def decoded(
    units_OU: tl.tensor,
    factors_OU: tl.tensor,
    zeros_OU: tl.tensor,
    outputs_O: tl.tensor,
    PLANE: tl.constexpr,
    M: tl.constexpr,
) -> tl.tensor:
    """Decode one plane of units and round the elements to the compute type."""
    if M.kind == "plain":
        elements_OU = units_OU.to(M.dot)
    else:
        if M.kind == "e4m3":
            numbers_OU = _e4m3(units_OU.to(tl.int32))
        else:
            if M.unit_outputs == 1:
                nibbles_OU = (units_OU.to(tl.int32) >> (4 * PLANE)) & 0xF
            else:
                nibbles_OU = (units_OU >> awq_shifts(outputs_O)[:, None]) & 0xF
            if M.kind == "e2m1":
                numbers_OU = _e2m1(nibbles_OU)
            else:
                # Exact, and faster than a conversion: (2^23 + code) - (2^23 + zero).
                magic_OU = (nibbles_OU | MAGIC_BITS).to(tl.float32, bitcast=True)
                numbers_OU = magic_OU - (zeros_OU + MAGIC)
        elements_OU = rounded(numbers_OU * factors_OU, M.dtype, M.dot)
    return elements_OU


@triton.jit
def _e4m3(codes: tl.tensor) -> tl.tensor:
    magnitudes = codes & 0x7F
    bits = tl.where(magnitudes == 0x7F, 0x7E00, magnitudes << 7) | ((codes & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(codes: tl.tensor) -> tl.tensor:
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def philox(
    c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, key0: tl.tensor, key1: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Compute `elementwise.philox4x32` on uint32 blocks of one shape."""
    factor0 = tl.full([1, 1], 0xD2511F53, tl.uint32) + c0 * 0
    factor1 = tl.full([1, 1], 0xCD9E8D57, tl.uint32) + c0 * 0
    step0, step1 = tl.full([1, 1], 0x9E3779B9, tl.uint32), tl.full([1, 1], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, factor0), c0 * factor0
        high1, low1 = tl.umulhi(c2, factor1), c2 * factor1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = key0 + step0, key1 + step1
    return c0, c1, c2, c3


@triton.jit
def _log(exponent: tl.tensor, f: tl.tensor) -> tl.tensor:
    """Compute log(2^exponent * (1 + f)) by the polynomial of Cephes' logf, as `_native` does."""
    square = f * f
    p = f * 7.0376836292e-2 + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    e = exponent.to(tl.float32)
    p = p * f * square + e * -2.12194440e-4 - square * 0.5
    return f + p + e * 0.693359375


@triton.jit
def _reduced(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return exponent and f with x = 2^exponent * (1 + f), f around 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # sqrt(1/2)
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def gumbel(word: tl.tensor) -> tl.tensor:
    """Return -log(-log1p(-v)), v = (word + 1/2) / 2^32, with every rounding of `_native`'s."""
    word = word.to(tl.int32, bitcast=True)
    tail = ((word ^ (word >> 31)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, f = _reduced(tl.where(word < 0, tail, 1.0 - tail))
    f = tl.where((word < 0) | (exponent < 0), f, 0.0 - tail)
    exponent, f = _reduced(0.0 - _log(exponent, f))
    return 0.0 - _log(exponent, f)
