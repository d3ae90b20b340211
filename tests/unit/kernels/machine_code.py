"""Counts the machine code of a kernel's loops, with the disassembler of Triton's wheel.

What it counts are bounds: how often each part of a multiprocessor is busy in one iteration. No card
is needed, and none will be faster.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
ISSUE_PORTS = 4  # of a multiprocessor: one instruction of a warp each, per clock
LANES = 32
TURING = 75
# Multiply-adds of a tensor core product with 16-bit operands and float32 sums, per clock and
# multiprocessor: white papers of Turing, Ampere, Ada and Hopper.
MULTIPLY_ADDS = {TURING: 512, 80: 1024, 86: 512, 89: 512, 90: 2048}
FLOAT32_LANES = 64  # of a multiprocessor of Turing

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+|\.L_\d+):")
_TARGET = re.compile(r"\.L_x_\d+|\.L_\d+")
_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)")
_SHARED_BYTES_PER_CLOCK = 128
_GROUP_WARPS = 4  # that make one product of Hopper together
# Multiply-adds of a warp by instruction: rows x outputs x inputs.
_PRODUCTS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}
# Instructions that are no arithmetic: memory, barriers, branches and waits.
_OTHERS = (
    *("LD", "ST", "UBLKCP", "UTMA", "ATOM", "RED", "ULDC", "CCTL", "MEMBAR", "FENCE"),
    *("BAR", "BRA", "BSSY", "BSYNC", "DEPBAR", "EXIT", "NOP", "SYNCS", "WARP", "YIELD"),
)


class Instruction(NamedTuple):
    name: str  # with its modifiers, as HMMA.16816.F32.BF16
    operands: str


class Loop(NamedTuple):
    """One iteration of a loop of one warp.

    Attributes:
        issued: Instructions.
        multiply_adds: Of its products.
        alu: Instructions that are neither products, memory nor control.
        shared_clocks: Of the shared memory of the multiprocessor; no conflicts of banks.
        barriers: Waits for other warps.
        local: Accesses of local memory, where registers are spilled.
    """

    issued: int
    multiply_adds: float
    alu: int
    shared_clocks: float
    barriers: int
    local: int

    def busy_clocks(self, num_warps: int, rate: int) -> tuple[float, float, float]:
        """Clocks of issue ports, tensor cores and shared memory for all warps of a program."""
        return (
            self.issued * num_warps / ISSUE_PORTS,
            self.multiply_adds * num_warps / rate,
            self.shared_clocks * num_warps,
        )


def main_loop(cubin: Path, *, has_tensor_cores: bool = True) -> Loop:
    """The innermost loop with the most products."""
    products = ("HMMA", "HGMMA") if has_tensor_cores else ("FFMA",)
    return max(loops(cubin, products), key=lambda loop: (loop.multiply_adds, -loop.issued))


def loops(cubin: Path, products: tuple[str, ...] = ("HMMA", "HGMMA")) -> Iterator[Loop]:
    """All loops with products, inner ones first."""
    code, labels = _disassembled(cubin)
    found = set()
    for end, each in enumerate(code):
        target = _TARGET.search(each.operands) if each.name.startswith("BRA") else None
        if target and labels.get(target[0], end + 1) <= end:
            found.add((labels[target[0]], end))
    for begin, end in sorted(found, key=lambda each: each[1] - each[0]):
        body = code[begin : end + 1]
        if any(each.name.startswith(products) for each in body):
            yield _counted(body, products)


def _disassembled(cubin: Path) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions in order, and the place that each label stands for."""
    command = [str(DISASSEMBLER), "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(Instruction(found[1], found[2]))
    return code, labels


def _counted(body: list[Instruction], products: tuple[str, ...]) -> Loop:
    names = [each.name for each in body]
    return Loop(
        issued=len(body),
        multiply_adds=sum(_multiply_adds(*each) for each in body if each.name.startswith(products)),
        alu=sum(not name.startswith((*_OTHERS, *products)) for name in names),
        shared_clocks=sum(_shared_clocks(*each) for each in body),
        barriers=sum(name.startswith(("BAR", "WARPSYNC")) for name in names),
        local=sum(name.startswith(("LDL", "STL")) for name in names),
    )


def _multiply_adds(name: str, operands: str) -> float:
    if name.startswith("HGMMA"):
        outputs, rows, inputs = _sizes(name + operands)
        return outputs * rows * inputs / _GROUP_WARPS
    return LANES if name.startswith("FFMA") else _PRODUCTS[name.split(".")[1]]


def _sizes(instruction: str) -> tuple[int, int, int]:
    """Outputs, rows and inputs of a product of four warps together."""
    found = _SIZES.search(instruction)
    assert found, instruction
    outputs, rows, inputs = map(int, found.groups())
    return outputs, rows, inputs


def _shared_clocks(name: str, operands: str) -> float:
    if name.startswith("HGMMA"):  # reads the rows, for four warps
        _, rows, inputs = _sizes(name + operands)
        return rows * inputs * 2 / _SHARED_BYTES_PER_CLOCK / _GROUP_WARPS
    parts = name.split(".")
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1].isdigit() else 1
    if parts[0] not in ("LDS", "STS", "LDGSTS"):
        return 0
    return 4 if "128" in parts else 2 if "64" in parts else 1
