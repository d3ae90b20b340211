"""The attention kernels compile for every GPU that we name, and fit on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kernels.test_device_experts_ahead import PRODUCTS, SHARED_BYTES, SPILLED_BYTES

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_attention", str(capability)]
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
        if kernel["kernel"] == "attend_kernel":
            has_tensor_cores = capability >= 80 and kernel["dtype"] != "float32"
            expected = PRODUCTS[capability] if has_tensor_cores else "fma"
            products = {name.split(".aligned")[0] for name in kernel["products"]}
            # A product of 16 rows is too small for the instruction of Hopper.
            assert any(name.startswith((expected, "mma.sync")) for name in products), kernel
            assert kernel["copies"] == has_tensor_cores, kernel


def _in_words(kernel: dict[str, object]) -> str:
    return (
        f"{kernel['shape']:19} {kernel['kernel']:13} {kernel['dtype']:8} {kernel['rows']:2} rows, "
        f"{kernel['num_warps']} warps: {kernel['registers']:3} registers, "
        f"{kernel['spilled_bytes']:2} bytes spilled, {kernel['shared_bytes']:6} bytes shared"
    )
