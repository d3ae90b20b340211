"""Counts the machine code of a kernel's main loop, with the disassembler of Triton's wheel.

What it counts are bounds: how often each part of a multiprocessor is busy in one iteration. No card
is needed, and none will be faster.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
ISSUE_PORTS = 4  # of a multiprocessor: one instruction of a warp each, per clock
LANES = 32
SHARED_BYTES_PER_CLOCK = 128
# Multiply-adds of 16-bit numbers per clock and multiprocessor: on tensor cores with float32 sums
# (white papers of Ampere, Ada and Hopper), on Turing those of float32 lanes.
MULTIPLY_ADDS = {75: 64, 80: 1024, 86: 512, 89: 512, 90: 2048}

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+|\.L_\d+):")
_TARGET = re.compile(r"\.L_x_\d+|\.L_\d+")
_WGMMA_SHAPE = re.compile(r"64x(\d+)x16")
_TENSOR_PRODUCTS, _LANE_PRODUCTS = ("HMMA", "HGMMA"), ("FFMA",)
_WGMMA_WARPS = 4
# Neither arithmetic nor selection: memory, barriers, branches and waits.
_OTHERS = (
    *("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDGSTS", "LDL", "STL", "LDC", "ULDC", "LDCU"),
    *("LDGDEPBAR", "DEPBAR", "BAR", "WARPSYNC", "WARPGROUP", "BRA", "BSSY", "BSYNC", "EXIT", "NOP"),
    *("WARPGROUP", "SYNCS", "UTMALDG", "UBLKCP", "FENCE", "MEMBAR", "CCTL", "ATOM", "RED", "YIELD"),
)


class Instruction(NamedTuple):
    name: str  # with its modifiers, as HMMA.16816.F32.BF16
    operands: str

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]


class LoopCount(NamedTuple):
    """One iteration of the main loop of one program.

    Attributes:
        issue: Clocks of the four ports that issue instructions.
        tensor: Clocks of the tensor cores, or of the float32 lanes of Turing.
        shared: Clocks of shared memory.
        barriers: Barriers and waits for products.
        alu: Instructions of arithmetic and selection of all warps.
        multiply_adds: Of the products.
        local: Accesses of spilled registers.
    """

    issue: float
    tensor: float
    shared: float
    barriers: int
    alu: int
    multiply_adds: int
    local: int

    @property
    def tensor_share(self) -> float:
        """The most of the tensor cores' rate that the other parts leave."""
        return self.tensor / max(self.issue, self.tensor, self.shared)

    def alu_per_weight(self, tile_rows: int) -> float:
        """Instructions of one lane for a weight: a weight has a multiply-add with each row."""
        return self.alu * LANES * tile_rows / self.multiply_adds


def count_loop(cubin: bytes, capability: int, num_warps: int) -> LoopCount:
    code, labels = _disassembled(cubin)
    products = _TENSOR_PRODUCTS if MULTIPLY_ADDS[capability] > 64 else _LANE_PRODUCTS
    loop = _main_loop(code, labels, products)
    kinds = Counter(each.kind for each in loop)
    multiply_adds = sum(_multiply_adds(each) for each in loop if each.kind in products) * num_warps
    alu = sum(kinds.values()) - sum(kinds[kind] for kind in {*_OTHERS, *products})
    shared = sum(map(_shared_clocks, loop)) * num_warps
    shared += sum(map(_operand_clocks, loop)) * num_warps / _WGMMA_WARPS
    return LoopCount(
        issue=len(loop) * num_warps / ISSUE_PORTS,
        tensor=multiply_adds / MULTIPLY_ADDS[capability],
        shared=shared,
        barriers=kinds["BAR"] + kinds["WARPSYNC"],
        alu=alu * num_warps,
        multiply_adds=int(multiply_adds),
        local=kinds["LDL"] + kinds["STL"],
    )


def _disassembled(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions in order, and the place that each label stands for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run(
            [DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(Instruction(found[1], found[2]))
    return code, labels


def _main_loop(
    code: Sequence[Instruction], labels: dict[str, int], products: Sequence[str]
) -> Sequence[Instruction]:
    """The innermost loop with the most products."""
    loops = []
    for end, each in enumerate(code):
        target = _TARGET.search(each.operands) if each.kind == "BRA" else None
        if target and labels.get(target[0], end + 1) <= end:
            loops.append(code[labels[target[0]] : end + 1])
    assert loops, "the kernel has no loop"
    return max(loops, key=lambda loop: (sum(i.kind in products for i in loop), -len(loop)))


def _multiply_adds(each: Instruction) -> float:
    """Of one warp."""
    if each.kind == "HGMMA":
        return 64 * _columns(each) * 16 / _WGMMA_WARPS
    if each.kind == "HMMA":
        return {"16816": 2048, "1688": 1024}[each.name.split(".")[1]]
    return LANES if each.kind == "FFMA" else 0


def _columns(each: Instruction) -> int:
    found = _WGMMA_SHAPE.search(each.name + each.operands)
    assert found, each
    return int(found[1])


def _shared_clocks(each: Instruction) -> int:
    """Of one warp, without conflicts of banks."""
    parts = each.name.split(".")
    if each.kind == "LDSM":
        return int(parts[-1]) if parts[-1].isdigit() else 1
    if each.kind not in ("LDS", "STS", "LDGSTS"):
        return 0
    return 4 if "128" in parts else 2 if "64" in parts else 1


def _operand_clocks(each: Instruction) -> float:
    """Reads of a group of four warps that a product makes itself: its right operand in 16 bits."""
    if each.kind != "HGMMA":
        return 0
    return _columns(each) * 16 * 2 / SHARED_BYTES_PER_CLOCK
