"""The expert kernels compile for every GPU that we name, and fit on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
KIB = 1024
# Shared memory that one program may take, and the instruction that multiplies: CUDA C++
# Programming Guide, tables of compute capabilities.
SHARED_BYTES = {75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB}
PRODUCTS = {75: "fma", 80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma"}
SPILLED_BYTES = 64  # a handful of addresses, outside of the loop


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_experts", str(capability)]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    with capsys.disabled():
        for kernel in found:
            sys.stdout.write(f"\n  SM{capability} {_in_words(kernel)}")
    for kernel in found:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["spilled_bytes"] <= SPILLED_BYTES, kernel
        if kernel["kernel"] in {"gate_up_kernel", "down_kernel"}:
            # One instruction whatever the tile: a token's bits do not depend on its neighbours.
            (product,) = {name.split(".aligned")[0] for name in kernel["products"]}
            assert product.startswith(PRODUCTS[capability]), kernel
            assert kernel["copies"] == (capability >= 80), kernel


def _in_words(kernel: dict[str, object]) -> str:
    return (
        f"{kernel['shape']:18} {kernel['kernel']:14} {kernel['rows']:3} rows, "
        f"{kernel['num_warps']} warps: {kernel['registers']:3} registers, "
        f"{kernel['spilled_bytes']:2} bytes spilled, {kernel['shared_bytes']:6} bytes shared"
    )
