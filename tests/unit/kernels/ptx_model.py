"""Runs the few instructions of PTX that decode codes, on arrays of registers.

Semantics of the PTX ISA: numbers of 16 bits are halves of a register, the lower one first.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

Registers = np.ndarray  # uint32 [n]

_LOP3_AND_OR = 0xEA  # the table of (a & b) | c


def run(program: str, operands: Sequence[Registers]) -> Registers:
    """Return `$0` for operands `$1`, `$2`, ...; raises KeyError for an unknown instruction."""
    values = {f"${place}": each for place, each in enumerate(operands, start=1)}
    lines = program.strip("{}\n ").splitlines()
    for line in lines:
        name, _, rest = line.rstrip(";").partition(" ")
        if name == ".reg":
            continue
        if rest.startswith("{"):
            targets, source = rest[1:].split("}")
            low, high = (target.strip() for target in targets.split(","))
            whole = values[source.lstrip(", ")]
            values[low], values[high] = whole & 0xFFFF, whole >> 16
            continue
        target, *sources = (each.strip() for each in rest.split(","))
        values[target] = _INSTRUCTIONS[name](*(_value(each, values) for each in sources))
    return values["$0"]


def _value(text: str, values: Mapping[str, Registers]) -> Registers:
    return values[text] if text in values else np.uint32(int(text, 0))


def floats(registers: Registers) -> np.ndarray:
    return np.asarray(registers, np.uint32).view(np.float32)


def halves(registers: Registers) -> np.ndarray:
    """The two bfloat16 numbers of each register as float32, [n, 2]."""
    whole = np.asarray(registers, np.uint32)
    return floats(np.stack((whole << 16, whole & 0xFFFF0000), -1))


def packed(numbers: np.ndarray) -> Registers:
    """Round float32 numbers [n, 2] to bfloat16, to nearest even."""
    rounded = torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16()
    bits = rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << 16


def _lop3(a: Registers, b: Registers, c: Registers, table: Registers) -> Registers:
    assert table == _LOP3_AND_OR
    return a & b | c


def _fma_halves(a: Registers, b: Registers, c: Registers) -> Registers:
    exact = halves(a).astype(np.float64) * halves(b) + halves(c)
    single = exact.astype(np.float32)
    assert (single == exact).all(), "one rounding of two would not be that of the instruction"
    return packed(single)


def _fma(a: Registers, b: Registers, c: Registers) -> Registers:
    exact = floats(a).astype(np.float64) * floats(b) + floats(c)
    return exact.astype(np.float32).view(np.uint32)


def _from_float16(a: Registers) -> Registers:
    return a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


_INSTRUCTIONS: Mapping[str, Callable[..., Registers]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, by: a << by,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_halves,
    "fma.rn.f32": _fma,
    "mul.rn.f32": lambda a, b: (floats(a) * floats(b)).view(np.uint32),
    "cvt.f32.f16": _from_float16,
    # The first source is the upper half.
    "cvt.rn.bf16x2.f32": lambda high, low: packed(np.stack((floats(low), floats(high)), -1)),
}
