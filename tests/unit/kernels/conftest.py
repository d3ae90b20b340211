"""What computes on the host: torch, or native kernels."""

from collections.abc import Iterator

import pytest

from raymoe import _native
from raymoe.kernels import gated_streams, gates, streams


@pytest.fixture(params=["torch", *_native.supported_isas()])
def by_each(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams and gates are computed by torch, then by the kernels of each instruction set."""
    before = _native.active_isa()
    if request.param == "torch":
        for module in (streams, gated_streams, gates):
            monkeypatch.setattr(module, "native_reads", lambda *_: False)
        monkeypatch.setattr(gated_streams, "native_mixes", lambda *_: False)
    else:
        _native.set_isa(request.param)
    yield
    _native.set_isa(before)
