"""Compiles kernels for a GPU that is not there, in a process of its own; looks at what fits."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
KIB = 1024
# Shared memory that one program may take, and the instruction that multiplies: CUDA C++
# Programming Guide, tables of compute capabilities.
SHARED_BYTES = {75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB}
PRODUCTS = {75: "fma", 80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma"}
SPILLED_BYTES = 64  # a handful of addresses, outside of the loop


def fitting_kernels(module: str, capability: int, cache: Path) -> list[dict[str, Any]]:
    """Compile all kernels of a program beside this one and print them; each must fit the GPU.

    Args:
        module: `compile_experts`, `compile_attention` and so on.
        capability: 75 is Turing, 90 Hopper.
        cache: Of Triton, so that nothing is compiled already.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", f"tests.unit.kernels.{module}", str(capability)]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    for kernel in found:
        sys.stdout.write(f"\n  SM{capability} {_in_words(kernel)}")
    for kernel in found:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["spilled_bytes"] <= SPILLED_BYTES, kernel
    return found


def products(kernel: Mapping[str, Any]) -> set[str]:
    """Instructions that multiply, without their operands."""
    return {name.split(".aligned")[0] for name in kernel["products"]}


def _in_words(kernel: Mapping[str, Any]) -> str:
    return (
        f"{kernel['shape']:19} {kernel['kernel']:14} {kernel.get('dtype', ''):8} "
        f"{kernel['rows']:3} rows, {kernel['num_warps']} warps: {kernel['registers']:3} registers, "
        f"{kernel['spilled_bytes']:2} bytes spilled, {kernel['shared_bytes']:6} bytes shared"
    )
