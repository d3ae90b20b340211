"""Machine code of NVIDIA GPUs, disassembled, and what the main loop of a product has of it."""

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DISASSEMBLER = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/nvdisasm"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+|\.L_\d+):")
_TARGET = re.compile(r"\.L_x_\d+|\.L_\d+")
# Multiply-adds of a warp by instruction: rows x outputs x inputs.
_PRODUCTS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}
_MEMORY = ("LD", "ST", "UBLKCP", "UTMA", "ATOM", "RED")
_CONTROL = ("BAR", "BRA", "BSSY", "BSYNC", "DEPBAR", "NOP", "SYNCS", "WARPGROUP", "WARPSYNC")
# Clocks that shared memory takes for an access of a warp, at 128 bytes each.
_SHARED = {"LDSM": 4, "128": 4, "64": 2}

Instruction = tuple[str, str]  # name with its suffixes, operands


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One iteration of a loop of a warp.

    Attributes:
        multiply_adds: Of its tensor-core instructions.
        alu: Instructions that are neither products, memory nor control.
        shared_clocks: Of the shared memory of the whole SM; copies into it by TMA are not counted.
        local: Accesses of local memory, where registers are spilled.
    """

    issued: int
    multiply_adds: float
    alu: int
    shared_clocks: float
    local: int


def loops(cubin: Path) -> Iterator[Loop]:
    """All loops with tensor-core products, inner ones first."""
    code, labels = _disassembled(cubin)
    found = set()
    for end, (name, operands) in enumerate(code):
        target = _TARGET.search(operands) if name.startswith("BRA") else None
        if target and labels.get(target[0], end + 1) <= end:
            found.add((labels[target[0]], end))
    for begin, end in sorted(found, key=lambda each: each[1] - each[0]):
        body = code[begin : end + 1]
        if any("MMA" in name for name, _ in body):
            yield _counted(body)


def _disassembled(cubin: Path) -> tuple[list[Instruction], dict[str, int]]:
    command = [str(DISASSEMBLER), "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, instruction = _LABEL.match(line.strip()), _INSTRUCTION.search(line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append((instruction[1], instruction[2]))
    return code, labels


def _counted(body: list[Instruction]) -> Loop:
    names = [name for name, _ in body]
    others = (*_MEMORY, *_CONTROL, "HMMA", "HGMMA")
    return Loop(
        issued=len(body),
        multiply_adds=sum(_multiply_adds(*each) for each in body if "MMA" in each[0]),
        alu=sum(not name.startswith(others) for name in names),
        shared_clocks=sum(_shared_clocks(*each) for each in body),
        local=sum(name.startswith(("LDL", "STL")) for name in names),
    )


def _multiply_adds(name: str, operands: str) -> float:
    if name.startswith("HGMMA"):
        outputs, rows, inputs = _sizes(name + operands)
        return outputs * rows * inputs / 4
    return _PRODUCTS[name.split(".")[1]]


def _sizes(instruction: str) -> tuple[int, int, int]:
    """Outputs, rows and inputs of a product of four warps together."""
    outputs, rows, inputs = map(int, re.search(r"(\d+)x(\d+)x(\d+)", instruction).groups())
    return outputs, rows, inputs


def _shared_clocks(name: str, operands: str) -> float:
    if name.startswith("HGMMA"):  # reads the rows, for four warps
        _, rows, inputs = _sizes(name + operands)
        return rows * inputs * 2 / 128 / 4
    if not name.startswith(("LDS", "STS", "LDGSTS")):
        return 0
    parts = name.split(".")
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1].isdigit() else 1
    return max(_SHARED.get(part, 1) for part in parts)
