"""Streams read by gates of each channel, against plain formulas: by torch, and in Triton."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels import gated_streams
from raymoe.kernels.elementwise import FLOAT_DTYPES
from raymoe.kernels.gated_streams import add_gated_, norm_streams, read_gated
from tests.kinds import covering
from tests.triton_mode import DEVICES

UNIT = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}
EPS = 1e-3


def check(count: int, hidden: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    """Rows of the hidden state, of results and of logits are strided."""

    def draw(width: int, stride: int = 0) -> Tensor:
        return torch.randn(tokens, width + stride).to(dtype).to(device)[:, stride:]

    hidden_TX, gates_TX, delta_TH = draw(count * hidden, 5), draw(count * hidden), draw(hidden, 3)
    weight_X = torch.rand(count * hidden).to(dtype).to(device)
    logits_TF = 4 * torch.randn(tokens, count + 7, device=device)
    before_TSH = hidden_TX.double().unflatten(1, (count, hidden))
    unit = UNIT[dtype]

    normed_TX = norm_streams(hidden_TX, weight_X, count, EPS)
    root_TS1 = (before_TSH.square().mean(-1, keepdim=True) + EPS).sqrt()
    want_TSH = before_TSH / root_TS1 * (1 + weight_X.double().view(count, hidden))
    torch.testing.assert_close(normed_TX.double(), want_TSH.flatten(1), rtol=unit, atol=1e-6)

    read_TH = read_gated(normed_TX, gates_TX, count)
    assert read_TH.dtype == dtype
    product_TX = gates_TX.double().sigmoid() * normed_TX.double()
    want_TH = product_TX.unflatten(1, (count, hidden)).mean(1)
    torch.testing.assert_close(read_TH.double(), want_TH, rtol=unit, atol=1e-6)

    add_gated_(hidden_TX, delta_TH, logits_TF, count)
    factors_TS1 = 2 * (logits_TF[:, :count].double() / count).sigmoid()[..., None]
    want_TSH = before_TSH + factors_TS1 * delta_TH.double()[:, None]
    torch.testing.assert_close(hidden_TX.double(), want_TSH.flatten(1), rtol=unit, atol=4e-6)


@pytest.mark.usefixtures("by_each")
@covering(count=(2, 3, 4, 9), dtype=FLOAT_DTYPES)
def test_cores_compute_the_formulas(count: int, dtype: torch.dtype) -> None:
    for hidden, tokens in ((24, 3), (40, 150), (8, 0)):
        check(count, hidden, tokens, dtype, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@covering(count=(2, 3, 4), dtype=FLOAT_DTYPES)
def test_kernels_compute_the_formulas(
    count: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(gated_streams, "triton_runs_on", lambda _device: True)
    for hidden, tokens in ((24, 3), (600, 5)):
        check(count, hidden, tokens, dtype, device)
