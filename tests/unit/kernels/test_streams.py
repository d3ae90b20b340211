"""Hidden states of several streams against plain formulas: by torch, and in Triton."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raymoe.kernels import streams
from raymoe.kernels.cpu_linear import make_linear
from raymoe.kernels.elementwise import FLOAT_DTYPES
from raymoe.kernels.streams import (
    MixerWeights,
    add_to_streams_,
    mixing_matrix,
    read_streams,
    stream_logits,
)
from raymoe.specs.streams import StreamsSpec
from tests.kinds import covering
from tests.triton_mode import DEVICES
from tests.unit.kernels.ahead import SHARED_BYTES, fitting_kernels

SPEC = StreamsSpec(count=4, eps=1e-3, norm_eps=1e-5, sinkhorn_iterations=20)
UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def plain_factors(hidden_TX: Tensor, weights: MixerWeights, spec: StreamsSpec) -> list[Tensor]:
    """`pre`, `post` and matrix of each token in float64, token by token."""
    count, found = spec.count, ([], [], [])
    for row_X in hidden_TX.double():
        normed_X = row_X / (row_X.square().mean() + spec.norm_eps).sqrt()
        logits_F = weights.matrix.double() @ normed_X * weights.scale_F + weights.base_F
        found[0].append(logits_F[:count].sigmoid() + spec.eps)
        post_S = spec.magnitude * logits_F[count : 2 * count].sigmoid()
        if spec.sinkhorn_iterations is None:
            found[1].append(post_S + spec.eps)
            found[2].append(torch.eye(count, dtype=torch.float64))
            continue
        found[1].append(post_S)
        matrix = logits_F[2 * count :].view(count, count).softmax(1) + spec.eps
        for step in range(2 * spec.sinkhorn_iterations - 1):
            sums = matrix.sum(step % 2)  # of columns at first, then of rows
            matrix = matrix / ((sums[None] if step % 2 == 0 else sums[:, None]) + spec.eps)
        found[2].append(matrix)
    return [torch.stack(each) for each in found]


def draw(spec: StreamsSpec, hidden: int, tokens: int, dtype: torch.dtype, device: str = "cpu"):
    hidden_TX = torch.randn(tokens, spec.count * hidden).to(dtype).to(device)
    weights = MixerWeights(
        (torch.randn(spec.num_factors, spec.count * hidden) / hidden**0.5).to(dtype).to(device),
        torch.rand(spec.num_factors, device=device) + 0.5,
        torch.randn(spec.num_factors, device=device),
    )
    delta_TH = torch.randn(tokens, hidden).to(dtype).to(device)
    return hidden_TX, weights, delta_TH


def check(spec: StreamsSpec, hidden: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    hidden_TX, weights, delta_TH = draw(spec, hidden, tokens, dtype, device)
    pre_TS, post_TS, matrix_TSS = plain_factors(hidden_TX, weights, spec) if tokens else [None] * 3
    logits_TF = stream_logits(hidden_TX, weights, spec)
    assert logits_TF.shape == (tokens, spec.num_factors)
    read_TH = read_streams(hidden_TX, logits_TF, spec)
    assert read_TH.dtype == dtype
    before_TSH = hidden_TX.double().unflatten(1, (spec.count, hidden))
    add_to_streams_(hidden_TX, delta_TH, logits_TF, spec)
    if not tokens:
        return
    if spec.is_mixed:
        torch.testing.assert_close(
            mixing_matrix(logits_TF, spec).double(), matrix_TSS, rtol=1e-4, atol=1e-5
        )
    want_TH = (pre_TS[..., None] * before_TSH).sum(1)
    unit = UNIT[dtype]
    torch.testing.assert_close(read_TH.double(), want_TH, rtol=unit, atol=2e-5 + unit / 8)
    want_TSH = post_TS[..., None] * delta_TH.double()[:, None]
    want_TSH = want_TSH + torch.einsum("tjk,tjh->tkh", matrix_TSS, before_TSH)
    got_TSH = hidden_TX.double().view_as(want_TSH)
    torch.testing.assert_close(got_TSH, want_TSH, rtol=3 * unit, atol=6 * unit + 2e-5)


SPECS = {
    "4": SPEC,
    "2": replace(SPEC, count=2, eps=1e-6),
    "3, once": replace(SPEC, count=3, sinkhorn_iterations=1),
    "5, thrice": replace(SPEC, count=5, sinkhorn_iterations=3, norm_eps=0.5),
    "4, no matrix": replace(SPEC, sinkhorn_iterations=None, eps=0.02, magnitude=1.3),
    "3, no matrix": replace(SPEC, count=3, sinkhorn_iterations=None),
}


@pytest.mark.usefixtures("by_each")
@covering(spec=SPECS, dtype=FLOAT_DTYPES)
def test_cores_compute_the_formulas(spec: StreamsSpec, dtype: torch.dtype) -> None:
    for hidden, tokens in ((24, 3), (40, 150), (8, 0)):
        check(spec, hidden, tokens, dtype, "cpu")


def test_cores_mix_more_streams_than_the_kernels_do() -> None:
    check(replace(SPEC, count=9, sinkhorn_iterations=3), 16, 5, torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@covering(spec=SPECS, dtype=FLOAT_DTYPES)
def test_kernels_compute_the_formulas(
    spec: StreamsSpec, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(streams, "triton_runs_on", lambda _device: True)
    for hidden, tokens in ((24, 3), (300, 18)):
        check(spec, hidden, tokens, dtype, device)


@pytest.mark.parametrize("device", ["native", *DEVICES])
def test_kernels_read_and_change_strided_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_native, device = device == "native", "cpu" if device == "native" else device
    hidden_TX, weights, delta_TH = draw(SPEC, 24, 5, torch.float32, device)
    wide, deltas = (torch.zeros(5, 101, device=device) for _ in range(2))
    wide[:, 3:99], deltas[:, 1:25] = hidden_TX, delta_TH
    want_TX = hidden_TX.clone()
    add_to_streams_(want_TX, delta_TH, stream_logits(want_TX, weights, SPEC), SPEC)
    if not is_native:
        pytest.importorskip("triton")
        monkeypatch.setattr(streams, "triton_runs_on", lambda _device: True)
    part_TX = wide[:, 3:99]
    add_to_streams_(part_TX, deltas[:, 1:25], stream_logits(part_TX, weights, SPEC), SPEC)
    torch.testing.assert_close(part_TX, want_TX)
    assert not wide[:, :3].any()
    assert not wide[:, 99:].any()


@pytest.mark.parametrize("device", ["native", *DEVICES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_matrix_only_the_sum_is_rounded(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, sinkhorn_iterations=None)
    if device != "native":
        pytest.importorskip("triton")
        monkeypatch.setattr(streams, "triton_runs_on", lambda _device: True)
    hidden_TX, weights, delta_TH = draw(spec, 24, 9, dtype, "cpu" if device == "native" else device)
    logits_TF = stream_logits(hidden_TX, weights, spec)
    post_TS = 2 * logits_TF[:, 4:].double().sigmoid() + spec.eps
    exact_TSH = post_TS[..., None] * delta_TH.double()[:, None] + hidden_TX.double().view(9, 4, 24)
    add_to_streams_(hidden_TX, delta_TH, logits_TF, spec)
    wrong = (hidden_TX.view(9, 4, 24) != exact_TSH.to(dtype)).float().mean()
    assert wrong < 0.01  # where float32 is not exact enough, at the border of two results


def test_a_packed_projection_gives_the_logits_of_the_matrix() -> None:
    hidden_TX, weights, _ = draw(SPEC, 32, 70, torch.bfloat16)
    packed = make_linear(weights.matrix, None, lambda size: torch.empty(size, dtype=torch.uint8))
    got_TF = stream_logits(hidden_TX, weights._replace(matrix=packed), SPEC)
    torch.testing.assert_close(
        got_TF, stream_logits(hidden_TX, weights, SPEC), rtol=1e-4, atol=1e-5
    )


def test_rows_and_columns_of_the_matrix_add_up_to_one() -> None:
    spec = replace(SPEC, eps=1e-6)
    matrix_TSS = mixing_matrix(torch.randn(9, spec.num_factors), spec)
    for axis in (1, 2):
        torch.testing.assert_close(matrix_TSS.sum(axis), torch.ones(9, 4), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_kernels_fit_every_gpu(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    fitting_kernels("compile_streams", capability, tmp_path)
