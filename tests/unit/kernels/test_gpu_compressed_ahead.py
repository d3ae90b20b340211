"""Attention to compressed entries compiles for every GPU with tensor cores, and fits on it."""

from pathlib import Path

import pytest

from tests.unit.kernels.ahead import PRODUCTS, SHARED_BYTES, fitting_kernels, products

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [each for each in SHARED_BYTES if each >= 80])
def test_every_kernel_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        found = fitting_kernels("compile_compressed", capability, tmp_path)
    for kernel in found:
        # A product of 16 rows is too small for the instruction of Hopper.
        expected = (PRODUCTS[capability], "mma.sync")
        assert any(one.startswith(expected) for one in products(kernel)), kernel
        assert kernel["copies"], kernel
