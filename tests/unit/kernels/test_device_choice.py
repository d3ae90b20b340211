"""Tokens chosen in Triton are those that the host's kernel draws, bit for bit."""

import math

import pytest
import torch

from raymoe.kernels import elementwise
from raymoe.kernels.elementwise import (
    FLOAT_DTYPES,
    RandomKeys,
    argmax,
    choose,
    choose_reference,
    gumbel_argmax,
    pack_draws,
)
from tests.native.test_cpu_sampling import GOLDEN_DRAWS, random_keys
from tests.triton_mode import DEVICES

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
gumbel = pytest.importorskip("raymoe.kernels.gpu_common").gumbel

device = pytest.mark.parametrize("device", DEVICES)


@triton.jit
def noise_kernel(words_ptr, out_ptr):
    places = tl.arange(0, 256)
    tl.store(out_ptr + places, gumbel(tl.load(words_ptr + places).to(tl.uint32)))


@pytest.fixture(autouse=True)
def _kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "triton_runs_on", lambda _device: True)


@device
@pytest.mark.parametrize(
    ("num_rows", "size", "dtype"),
    [
        (4, 700, torch.bfloat16),
        *(
            pytest.param(12, size, dtype, marks=pytest.mark.slow)
            for size in (1, 65, 2000, 32_003)
            for dtype in FLOAT_DTYPES
        ),
    ],
)
def test_tokens_equal_those_of_the_host(
    num_rows: int, size: int, dtype: torch.dtype, device: str
) -> None:
    logits_RV = (3 * torch.randn(num_rows, size)).to(dtype)
    keys = random_keys(num_rows, seed=int(torch.randint(0, 2**31, ())))
    scale_R, is_greedy_R = torch.rand(num_rows) * 3, torch.arange(num_rows) % 4 == 0
    draws_R4 = pack_draws(keys, scale_R, is_greedy_R)
    got_R = choose(logits_RV.to(device), draws_R4.to(device)).cpu()
    assert got_R.dtype == torch.int32
    host_R = torch.where(is_greedy_R, argmax(logits_RV), gumbel_argmax(logits_RV, keys, scale_R))
    assert torch.equal(got_R, host_R.int())
    assert torch.equal(got_R, choose_reference(logits_RV, draws_R4))


@device
@pytest.mark.slow
def test_noise_has_the_bits_of_the_host_even_where_it_decides_alone(device: str) -> None:
    logits_RV, keys = torch.zeros(40, 2100), random_keys(40)
    draws_R4 = pack_draws(keys, torch.ones(40), torch.zeros(40, dtype=torch.bool))
    got_R = choose(logits_RV.to(device), draws_R4.to(device)).cpu()
    assert torch.equal(got_R.long(), gumbel_argmax(logits_RV, keys))
    rows = torch.arange(6)
    keys = RandomKeys(seed=rows * 3 + 1, row_key=-rows - 1, sample=rows.int(), position=rows.int())
    draws_R4 = pack_draws(keys, torch.ones(6), torch.zeros(6, dtype=torch.bool))
    assert choose(torch.zeros(6, 1000).to(device), draws_R4.to(device)).tolist() == GOLDEN_DRAWS


@device
def test_ties_nan_and_infinities(device: str) -> None:
    logits_RV = torch.zeros(10, 300)
    logits_RV[2:4, 299], logits_RV[4:6], logits_RV[6:8, 200] = math.nan, -math.inf, math.inf
    logits_RV[8:10, [70, 260]] = 1e30
    is_greedy_R = torch.arange(10) % 2 == 0
    draws_R4 = pack_draws(random_keys(10), torch.ones(10), is_greedy_R)
    got_R = choose(logits_RV.to(device), draws_R4.to(device)).cpu()
    assert torch.equal(got_R, choose_reference(logits_RV, draws_R4))
    assert got_R[2:].tolist() == [-1, -1, -1, -1, 200, 200, 70, 70]


@device
def test_noise_is_that_of_the_formula_at_both_ends_too(device: str) -> None:
    words = torch.randint(0, 2**32, (256,))
    words[:6] = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    got = torch.empty(256, device=device)
    noise_kernel[(1,)](words.to(device), got, enable_fp_fusion=False)
    want = -torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
    torch.testing.assert_close(got.double().cpu(), want, rtol=1e-6, atol=3e-7)
