"""Decoding of stored codes in GPU kernels.

O outputs, U units of codes (`MatrixLayout`), G quantisation groups. A unit of P codes is decoded
plane by plane: plane p of a tile [O, U] are the p-th codes of its units.

There are two ways with the same numbers. The general one is Triton's arithmetic, which its
interpreter runs as well. Units of 16 bits, on tensor cores with bfloat16, are decoded in pairs: PTX
takes the same bits of two neighbouring units of a register with one shift and one masked operation,
and works on both halves where 16 bits are exact. That is 2 to 5 instructions a weight instead of 6
to 14, and their operands are read as matrices.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from raymoe.codecs import SMALLEST_E8M0 as _SMALLEST_E8M0
from raymoe.kernels.gpu_common import TRITON_TYPES, kernel_constants, rounded
from raymoe.kernels.gpu_experts_layout import FIELDS, MatrixLayout

CODES, SCALES, ZEROS, ORDER, BIAS, TENSOR_SCALE = (tl.constexpr(i) for i in range(len(FIELDS)))
MAGIC_BITS = tl.constexpr(0x4B000000)  # 2^23 as float32: its last bits are integers
MAGIC = tl.constexpr(8388608.0)
GPTQ_ONES = tl.constexpr(0x11111111)
WORD_MASK = tl.constexpr(0xFFFFFFFF)
SMALLEST_E8M0 = tl.constexpr(_SMALLEST_E8M0)


class FloatCode(NamedTuple):
    """A floating-point number: one bit of sign, then exponent and mantissa."""

    bits: int
    mantissa_bits: int
    bias: int

    def missing(self, wide: "FloatCode") -> float:
        """The power of two that a number with these bits lacks when it is read as a wider one."""
        return 2.0 ** (wide.bias - self.bias)


FLOAT_CODES = {"e2m1": FloatCode(4, 1, 1), "e4m3": FloatCode(8, 3, 7)}
FLOAT16, BFLOAT16 = FloatCode(16, 10, 15), FloatCode(16, 7, 127)
E4M3_MISSING = tl.constexpr(FLOAT_CODES["e4m3"].missing(FLOAT16))


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
        groups: "even" if a step consists of whole quantisation groups, "step" if it lies in one,
            "unit" if the units of all planes lie in the same group, "plane" otherwise.
        step_groups: Groups of a step, if they are "even".
        has_scale_pairs: Whether scales of one byte are read two at a time.
        programs: PTX for each plane, which decodes in pairs; empty for Triton's arithmetic.
        operands: Constraints of its registers: the result, two units, factors and offsets.
        is_short: Whether scales are exact in bfloat16, so that products are rounded in 16 bits.
        missing: Power of two that the bits of a code lack where a scale is applied.
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
    step_groups: tl.constexpr
    has_scale_pairs: tl.constexpr
    has_programs: tl.constexpr
    programs: tl.constexpr
    operands: tl.constexpr
    is_short: tl.constexpr
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
    groups, code = _groups(layout, group_size, step), FLOAT_CODES.get(layout.kind)
    programs = pair_programs(layout) if dtype == dot == torch.bfloat16 else ()
    is_short = bool(programs) and _has_short_scales(layout)
    registers = (2 if layout.kind == "int4" else 1) * (1 if is_short else 2)
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
        "groups": groups,
        "step_groups": step * layout.unit_inputs // group_size if groups == "even" else 0,
        "has_scale_pairs": groups == "even" and layout.has_scale_pairs,
        "has_programs": bool(programs),
        "programs": programs,
        "operands": ",".join(["=r", "r"] + ["r"] * registers),
        "is_short": is_short,
        "missing": 1.0 if is_short or code is None else code.missing(FLOAT16),
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
    inputs = step * layout.unit_inputs
    if inputs % group_size == 0 and group_size % layout.unit_inputs == 0:
        return "even"
    if group_size % inputs == 0 or group_size >= layout.shape[1]:
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
        groups_1G = tl.full([1, 1], step * (M.step * M.unit_inputs) // M.group_size, tl.int32)
    elif M.groups == "even":
        groups_1G = (tl.arange(0, M.step_groups) + step * M.step_groups)[None, :]
    elif M.has_order:
        columns_U = units_U * M.unit_inputs + PLANE
        order_ptr = pointer(row_ptr, M.field + ORDER, tl.int32, 4)
        groups_1G = tl.load(order_ptr + columns_U, mask=columns_U < M.inputs, other=0)[None, :]
    else:
        groups_1G = ((units_U * M.unit_inputs + PLANE) // M.group_size)[None, :]
    inside_OG = (outputs_O < M.outputs)[:, None] & (groups_1G < M.num_groups)
    stored_OG = _load_scales(row_ptr, outputs_O, groups_1G, inside_OG, M)
    if M.has_e4m3_scales:
        factors_OG = _micro_scales(row_ptr, stored_OG, M)
    elif M.scale == tl.uint8:
        bits_OG = stored_OG.to(tl.int32) << 23
        bits_OG = tl.maximum(bits_OG, SMALLEST_E8M0)
        factors_OG = bits_OG.to(tl.float32, bitcast=True) * M.missing
    else:
        factors_OG = stored_OG.to(tl.float32) * M.missing
    if M.zeros == "none":
        zeros_OG = tl.full([1, 1], 8.0, tl.float32)
    else:
        zeros_OG = _of_units(_load_zeros(row_ptr, outputs_O, groups_1G, inside_OG, M), M)
    return _of_units(factors_OG, M), zeros_OG


@triton.jit
def _of_units(values_OG: tl.tensor, M: tl.constexpr) -> tl.tensor:
    """Repeat values of the groups of a step for their units, [O, U]."""
    if M.groups == "even":
        outputs: tl.constexpr = values_OG.shape[0]
        repeated_OGU = tl.broadcast_to(
            tl.expand_dims(values_OG, 2), [outputs, M.step_groups, M.step // M.step_groups]
        )
        values_OG = tl.reshape(repeated_OGU, [outputs, M.step])
    return values_OG


@triton.jit
def _load_scales(
    row_ptr: tl.tensor,
    outputs_O: tl.tensor,
    groups_1G: tl.tensor,
    inside_OG: tl.tensor,
    M: tl.constexpr,
) -> tl.tensor:
    """Load scales as they are stored.

    Scales of one byte are read two at a time, each pair once for either of them. Triton takes the
    layout of a product's operands from the narrowest number that they are computed from: with
    bytes, or a join of two halves, it could not read the inputs as matrices.
    """
    blocks_O1 = (outputs_O // M.block_rows)[:, None]
    if M.has_scale_pairs:
        pairs_ptr = pointer(row_ptr, M.field + SCALES, tl.uint16, 2)
        places_OG = blocks_O1 * (M.scale_output_stride // 2) + groups_1G // 2
        is_low_OG, is_high_OG = inside_OG & (groups_1G % 2 == 0), inside_OG & (groups_1G % 2 == 1)
        low_OG = tl.load(pairs_ptr + places_OG, mask=is_low_OG, other=0).to(tl.int32)
        high_OG = tl.load(pairs_ptr + places_OG, mask=is_high_OG, other=0).to(tl.int32)
        stored_OG = (low_OG & 0xFF) | (high_OG >> 8)
    else:
        scales_ptr = pointer(row_ptr, M.field + SCALES, M.scale, M.scale_bytes)
        places_OG = blocks_O1 * M.scale_output_stride + groups_1G * M.scale_group_stride
        stored_OG = tl.load(scales_ptr + places_OG, mask=inside_OG, other=0)
    return stored_OG


@triton.jit
def _micro_scales(row_ptr: tl.tensor, stored_OG: tl.tensor, M: tl.constexpr) -> tl.tensor:
    """Decode E4M3 scales, apply the scale of the matrix, round to float32; times `M.missing`.

    Scales are finite (`codecs.check_values`). Powers of two change no rounding.
    """
    numbers_OG = _e4m3_bits(stored_OG.to(tl.int32), 0).to(tl.float32)
    # A tensor of one number: Triton moves no layout across the spreading of a scalar.
    scale_ptr = pointer(row_ptr, M.field + TENSOR_SCALE, tl.float32, 4)
    scale_11 = tl.load(scale_ptr + tl.full([1, 1], 0, tl.int32))
    if M.tensor_scale == "divides":
        factors_OG = tl.div_rn(numbers_OG, scale_11 * (1 / (E4M3_MISSING * M.missing)))
    else:
        factors_OG = numbers_OG * (scale_11 * (E4M3_MISSING * M.missing))
    return factors_OG


@triton.jit
def _load_zeros(
    row_ptr: tl.tensor,
    outputs_O: tl.tensor,
    groups_1G: tl.tensor,
    inside_OG: tl.tensor,
    M: tl.constexpr,
) -> tl.tensor:
    """Load zero points. GPTQ stores each less one, with borrows across the nibbles of a word."""
    if M.zeros == "packed":
        zeros_OG = _load_nibbles(row_ptr, outputs_O, groups_1G, inside_OG, M)
    else:
        zeros_ptr = pointer(row_ptr, M.field + ZEROS, tl.int32, 4)
        words_O1 = (outputs_O // 8)[:, None] * M.zero_output_stride
        words_OG = tl.load(
            zeros_ptr + (words_O1 + groups_1G * M.zero_group_stride), mask=inside_OG, other=0
        )
        if M.zeros == "gptq":
            words_OG = ((words_OG.to(tl.int64) & WORD_MASK) + GPTQ_ONES) & WORD_MASK
        if M.zeros == "awq":
            shifts_O1 = awq_shifts(outputs_O)[:, None]
        else:
            shifts_O1 = (outputs_O % 8 * 4)[:, None]
        zeros_OG = (words_OG >> shifts_O1) & 0xF
    return zeros_OG.to(tl.float32)


@triton.jit
def _load_nibbles(
    row_ptr: tl.tensor,
    outputs_O: tl.tensor,
    groups_1G: tl.tensor,
    inside_OG: tl.tensor,
    M: tl.constexpr,
) -> tl.tensor:
    """Load packed zero points, each word of 16 bits once for each of its four outputs.

    A shift that depends on the output would keep the layout of a product's operand from reaching
    the loads, as only loads and constants may begin what it is computed from.
    """
    halves_ptr = pointer(row_ptr, M.field + ZEROS, tl.uint16, 4)
    halves_O1 = (outputs_O // 8 * (2 * M.zero_output_stride) + outputs_O % 8 // 4)[:, None]
    places_OG = halves_O1 + groups_1G * (2 * M.zero_group_stride)
    zeros_OG = tl.full([1, 1], 0, tl.int32)
    for place in tl.static_range(4):
        is_there_OG = inside_OG & (outputs_O % 4 == place)[:, None]
        half_OG = tl.load(halves_ptr + places_OG, mask=is_there_OG, other=0).to(tl.int32)
        zeros_OG = zeros_OG | ((half_OG >> (4 * place)) & 0xF)
    return zeros_OG


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
    elif M.has_programs:
        elements_OU = _decoded_in_pairs(units_OU, factors_OU, zeros_OU, PLANE, M)
    else:
        if M.kind == "e4m3":
            numbers_OU = _e4m3((units_OU.to(tl.int32) >> (8 * PLANE)) & 0xFF)
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
def _decoded_in_pairs(
    units_OU: tl.tensor,
    factors_OU: tl.tensor,
    zeros_OU: tl.tensor,
    PLANE: tl.constexpr,
    M: tl.constexpr,
) -> tl.tensor:
    """Decode one plane of units by the programs of `pair_programs`, bfloat16."""
    TYPE: tl.constexpr = tl.bfloat16 if M.is_short else tl.float32
    if M.kind == "int4":
        offsets_OU = 0.0 - (zeros_OU + INT4_BASE)
        if not M.is_short:
            offsets_OU = offsets_OU * factors_OU
        elements_OU = tl.inline_asm_elementwise(
            M.programs[PLANE],
            M.operands,
            [units_OU, factors_OU.to(TYPE), offsets_OU.to(TYPE)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        elements_OU = tl.inline_asm_elementwise(
            M.programs[PLANE],
            M.operands,
            [units_OU, factors_OU.to(TYPE)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return elements_OU


@triton.jit
def _e4m3(codes: tl.tensor) -> tl.tensor:
    return _e4m3_bits(codes, tl.where((codes & 0x7F) == 0x7F, 0x7E00, 0)).to(tl.float32)


@triton.jit
def _e4m3_bits(codes: tl.tensor, extra: tl.tensor) -> tl.tensor:
    """Return codes as float16, less a power of two, with these bits as well."""
    bits = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8) | extra
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _e2m1(codes: tl.tensor) -> tl.tensor:
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


_INT4_BASE = 128  # in bfloat16, the last four bits of numbers from 128 on are an integer
INT4_BASE = tl.constexpr(float(_INT4_BASE))


def pair_programs(layout: MatrixLayout) -> tuple[str, ...]:
    """Return PTX that decodes each plane of two neighbouring units; nothing if there is none.

    `$0` is the result, two bfloat16 numbers; `$1` holds the two units. Then follow, as a pair of
    bfloat16 numbers if scales are exact in it and as two float32 numbers otherwise: the factors,
    and for integers the offsets, minus zero point and base (times the factor, in float32, where
    the fused product and sum are exact).

    No E4M3 code may be NaN: `codecs.check_values` refuses them.
    """
    if layout.unit != torch.int16 or (layout.kind == "int4" and layout.scales == torch.float32):
        return ()
    planes = range(layout.unit_inputs)
    is_short = _has_short_scales(layout)
    if layout.kind == "int4":
        return tuple(_integer_program(plane, is_short=is_short) for plane in planes)
    code = FLOAT_CODES[layout.kind]
    return tuple(_float_program(code, plane, is_short=is_short) for plane in planes)


def _has_short_scales(layout: MatrixLayout) -> bool:
    return layout.scales in (torch.uint8, torch.bfloat16)


def _integer_program(plane: int, *, is_short: bool) -> str:
    base = _twice(_bfloat16_bits(_INT4_BASE))
    lines = [_shifted("a", -4 * plane), f"lop3.b32 a, a, {_twice(0xF)}, {base}, 0xEA;"]
    if is_short:
        return _program(
            *lines,
            *(f"mov.b32 b, {_twice(_bfloat16_bits(1))};", f"mov.b32 c, {_MINUS_ZEROS};"),
            *("fma.rn.bf16x2 a, a, b, $3;", "fma.rn.bf16x2 $0, a, $2, c;"),
        )
    return _program(
        *lines,
        *("shl.b32 b, a, 16;", "and.b32 a, a, 0xFFFF0000;"),
        *("fma.rn.f32 x, b, $2, $4;", "fma.rn.f32 y, a, $3, $5;"),
        _ROUND,
    )


def _float_program(code: FloatCode, plane: int, *, is_short: bool) -> str:
    wide = BFLOAT16 if is_short else FLOAT16
    first, sign = code.bits * plane, code.bits * (plane + 1) - 1
    mantissa = wide.mantissa_bits - code.mantissa_bits
    magnitude = (1 << (code.bits - 1)) - 1
    lines = [
        *(_shifted("a", mantissa - first), f"and.b32 a, a, {_twice(magnitude << mantissa)};"),
        *(_shifted("b", wide.bits - 1 - sign), f"lop3.b32 a, b, {_twice(0x8000)}, a, 0xEA;"),
    ]
    if is_short:
        missing = _twice(_bfloat16_bits(code.missing(wide)))
        return _program(
            *lines,
            *(f"mov.b32 b, {missing};", f"mov.b32 c, {_MINUS_ZEROS};"),
            *("fma.rn.bf16x2 a, a, b, c;", "fma.rn.bf16x2 $0, a, $2, c;"),
        )
    return _program(
        *lines,
        "mov.b32 {h, k}, a;",
        *("cvt.f32.f16 x, h;", "cvt.f32.f16 y, k;"),
        *("mul.rn.f32 x, x, $2;", "mul.rn.f32 y, y, $3;"),
        _ROUND,
    )


def _program(*lines: str) -> str:
    registers = (".reg .b32 a, b, c;", ".reg .b16 h, k;", ".reg .f32 x, y;")
    return "\n".join(("{", *registers, *lines, "}"))


def _shifted(register: str, left: int) -> str:
    if left == 0:
        return f"mov.b32 {register}, $1;"
    return f"{'shl' if left > 0 else 'shr'}.b32 {register}, $1, {abs(left)};"


def _twice(half: int) -> str:
    return f"{half << 16 | half:#010x}"


def _bfloat16_bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF


_MINUS_ZEROS = _twice(0x8000)  # added to a product, they change nothing, not even a sign
_ROUND = "cvt.rn.bf16x2.f32 $0, y, x;"
