"""The expert kernels compile for every GPU that we name, fit on it, and keep it busy."""

import sys
from pathlib import Path

import pytest

from tests.unit.kernels.ahead import PRODUCTS, SHARED_BYTES, fitting_kernels, products

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        found = fitting_kernels("compile_experts", capability, tmp_path)
    for kernel in found:
        if kernel["kernel"] in {"gate_up_kernel", "down_kernel"}:
            # One instruction whatever the tile: a token's bits do not depend on its neighbours.
            (product,) = products(kernel)
            assert product.startswith(PRODUCTS[capability]), kernel
            assert kernel["copies"] == (capability >= 80), kernel


# Shares of the tensor cores that issue ports and shared memory leave, by capability.
LEAST_SHARES = {80: 0.9, 86: 0.9, 89: 0.9, 90: 0.8}
# Float32 scales are multiplied in float32; those of NVFP4 are products themselves.
MOST_ALU = {"bfloat16": 2.0, "FP8": 5.7, "NVFP4": 6.6}


@pytest.mark.slow
@pytest.mark.parametrize("capability", LEAST_SHARES)
def test_loops_leave_the_tensor_cores_busy(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        found = fitting_kernels("count_experts", capability, tmp_path)
        for kernel in found:
            sys.stdout.write(
                f"\n  SM{capability} {kernel['shape']:17} {kernel['kernel']:14} "
                f"{kernel['outputs']:3} x {kernel['rows']:3}, {kernel['num_warps']} warps: "
                f"{kernel['alu_per_weight']:4} instructions a weight, clocks of issue, tensor, "
                f"shared {kernel['clocks']}, share {kernel['tensor_share']}"
            )
    assert len(found) == 14
    for kernel in found:
        assert kernel["tensor_share"] >= LEAST_SHARES[capability], kernel
        assert kernel["alu_per_weight"] <= MOST_ALU.get(kernel["shape"], 5.0), kernel
        assert kernel["spilled_in_loop"] <= 2, kernel
