"""What all quantised formats come down to: a code for each element, a scale for each group.

O outputs, I inputs, G groups of inputs, B blocks of outputs that share a scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CodeKind = Literal["int4", "e2m1", "e4m3"]

INT4_ZERO = 8  # code of zero, where there are no zero points
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SMALLEST_E8M0 = 0x00400000  # bits of 2^-127, which is subnormal in float32
_FLOAT32_EXPONENT_BIT = 23


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codes:
    """A matrix [O, I] whose elements are (number of the code - zero) * scale.

    Attributes:
        kind: What number a code is.
        codes_OI: uint8, one for each element; may have any strides.
        scales_BG: float16, bfloat16 or float32; or uint8, exponents of two plus 127 (E8M0).
        group_size: Inputs that share a scale.
        block_rows: Outputs that share a scale.
        zeros_OG: uint8, of int4 alone; None: 8.
        order_I: int32, the group of each input; None: neighbours, `group_size` each.
    """

    kind: CodeKind
    codes_OI: Tensor
    scales_BG: Tensor
    group_size: int
    block_rows: int = 1
    zeros_OG: Tensor | None = None
    order_I: Tensor | None = None


def decode(codes: Codes, dtype: torch.dtype) -> Tensor:
    """The elements, [O, I]: exact products in float32, rounded once to `dtype`."""
    # Bytes are turned around fastest, where codes lie in the order of the outputs.
    numbers_OI = _NUMBERS[codes.kind](codes.codes_OI.contiguous())
    groups_OGS = _by_group(numbers_OI, codes)
    if codes.kind == "int4":
        zeros_OG = codes.zeros_OG
        groups_OGS -= INT4_ZERO if zeros_OG is None else _by_input(zeros_OG, codes)
    scales_BG = float_scales(codes.scales_BG)
    if codes.block_rows > 1:
        scales_BG = scales_BG.repeat_interleave(codes.block_rows, 0)[: len(numbers_OI)]
    groups_OGS *= _by_input(scales_BG, codes)
    return numbers_OI.to(dtype)


def float_scales(scales: Tensor) -> Tensor:
    """Scales as float32, exactly."""
    if scales.dtype != torch.uint8:
        return scales.float()
    bits = (scales.int() << _FLOAT32_EXPONENT_BIT).clamp_min(_SMALLEST_E8M0)
    return bits.view(torch.float32)


def nibbles(packed: Tensor) -> Tensor:
    """Halves of bytes as uint8, the lower one first; the last axis is twice as long in bytes."""
    low_high = packed.view(torch.uint8)
    return torch.stack((low_high & 0xF, low_high >> 4), -1).flatten(-2)


def _is_regular(codes: Codes) -> bool:
    """Whether groups are neighbours and equally large."""
    return codes.order_I is None and codes.codes_OI.shape[1] % codes.group_size == 0


def _by_group(numbers_OI: Tensor, codes: Codes) -> Tensor:
    """The numbers as [O, G, S], or as they are where groups are not so regular."""
    if not _is_regular(codes):
        return numbers_OI
    return numbers_OI.view(len(numbers_OI), -1, codes.group_size)


def _by_input(values_OG: Tensor, codes: Codes) -> Tensor:
    """Values of groups for each number, in the shape of `_by_group`."""
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
}
