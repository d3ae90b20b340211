"""The attention kernels compile for every GPU that we name, and fit on it."""

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
        found = fitting_kernels("compile_attention", capability, tmp_path)
    for kernel in found:
        if kernel["kernel"] == "attend_kernel":
            has_tensor_cores = capability >= 80 and kernel["dtype"] != "float32"
            expected = PRODUCTS[capability] if has_tensor_cores else "fma"
            # A product of 16 rows is too small for the instruction of Hopper.
            assert any(one.startswith((expected, "mma.sync")) for one in products(kernel)), kernel
            assert kernel["copies"] == has_tensor_cores, kernel
