"""The expert kernels compile for every GPU that we name, and fit on it."""

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
