"""Every test of this folder that asks for `isa` runs once for each instruction set present."""

from collections.abc import Iterator

import pytest
import torch

from raymoe import _native


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """References run on one thread: those of torch spin and would fight the worker pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=_native.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.active_isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
