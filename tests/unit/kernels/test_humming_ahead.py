"""Products of humming-kernels compile for every GPU that we name, and decode fast enough."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kernels.ahead import ROOT, SHARED_BYTES

# Instructions for each weight that are neither products nor memory.
MAX_ALU = {"fp8": 4.3, "mxfp4": 4.3, "nvfp4": 4.4, "int4": 3.1, "int4 zeros": 4.2}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("humming") is None,
    reason="needs humming-kernels: pip install 'raymoe[slow]'",
)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_product_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {**os.environ, "HUMMING_CACHE_DIR": str(tmp_path), "HUMMING_TMP_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_humming", str(capability)]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["format"] for each in found] == [name for name in MAX_ALU for _ in range(3)]
    with capsys.disabled():
        for kernel in found:
            sys.stdout.write(f"\n  SM{capability} {kernel}")
    for kernel in found:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["local"] == 0, kernel
        assert kernel["alu_per_weight"] <= MAX_ALU[kernel["format"]], kernel
    for kernel in found[2::3]:  # with many rows the tensor cores bind
        busiest = max(kernel["issue_clocks"], kernel["shared_clocks"])
        assert busiest <= kernel["tensor_clocks"], kernel
