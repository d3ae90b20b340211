"""Norms, rotations and routers in Triton against references: in its interpreter, or on a GPU."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raymoe.kernels import elementwise
from raymoe.kernels.cpu_experts import SIGMOID_GATES, gated_product
from raymoe.kernels.elementwise import (
    FLOAT_DTYPES,
    Projected,
    Steps,
    add_rms_norm_,
    latent_rope,
    qkv_rope,
    qkv_rope_reference,
    rms_norm,
    rms_norm_reference,
)
from raymoe.model import feed_forward, loading
from raymoe.model.feed_forward import choose_experts
from raymoe.specs.layers import MoeSpec, RouterSpec
from tests.kinds import covering
from tests.triton_mode import DEVICES
from tests.unit.kernels.ahead import SHARED_BYTES, fitting_kernels

pytest.importorskip("triton")

UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory takes the way of the device too: the interpreter works on it."""
    for module in (elementwise, feed_forward):
        monkeypatch.setattr(module, "triton_runs_on", lambda _device: True)
    for name in ("native_reads", "_rope_is_native"):
        monkeypatch.setattr(elementwise, name, lambda *_: False)


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape).to(dtype).to(device)


def assert_equal_but_for_the_order_of_sums(got: Tensor, want: Tensor) -> None:
    """float32 within 4 units; of 16-bit types at most 1 in 100 values differ, by 2 units.

    A rotation adds two of them, so that cancellation makes the error absolute.
    """
    assert got.dtype == want.dtype
    unit = UNIT[got.dtype]
    largest = float(want.float().abs().nan_to_num().max()) if want.numel() else 0.0
    factor = 4 if got.dtype == torch.float32 else 2
    torch.testing.assert_close(
        got, want, rtol=factor * unit, atol=unit * largest / 2, equal_nan=True
    )
    if got.dtype != torch.float32:
        differ = (got != want) & ~(got.isnan() & want.isnan())
        assert int(differ.sum()) <= max(2, got.numel() // 100)


@device
@covering(offset=[None, 0.0, 1.0], dtype=FLOAT_DTYPES)
def test_norms_equal_the_reference(offset: float | None, dtype: torch.dtype, device: str) -> None:
    for num_tokens, size in ((3, 1), (2, 64), (5, 129), (0, 8)):
        hidden_TH, delta_TH = (
            random(num_tokens, size, dtype=dtype, device=device) for _ in range(2)
        )
        weight_H = random(size, dtype=dtype, device=device)
        for weight in (weight_H, None):
            want_TH = rms_norm_reference(hidden_TH, weight, 1e-5, offset)
            got_TH = rms_norm(hidden_TH, weight, 1e-5, offset)
            assert_equal_but_for_the_order_of_sums(got_TH, want_TH)
            summed_TH, want_TH = hidden_TH.clone(), hidden_TH + delta_TH
            got_TH = add_rms_norm_(summed_TH, delta_TH, weight, 1e-5, offset=offset)
            assert torch.equal(summed_TH, want_TH)
            want_TH = rms_norm_reference(want_TH, weight, 1e-5, offset)
            assert_equal_but_for_the_order_of_sums(got_TH, want_TH)


@device
@dtypes
def test_a_norm_rounds_where_the_reference_rounds(dtype: torch.dtype, device: str) -> None:
    """Sums of squares of small integers are exact in any order, so every bit is the same."""
    hidden_TH = torch.randint(-8, 9, (40, 64)).to(dtype).to(device)
    weight_H = random(64, dtype=dtype, device=device)
    for offset in (None, 0.0, 1.0):
        got_TH = rms_norm(hidden_TH, weight_H, 1e-6, offset)
        assert torch.equal(got_TH, rms_norm_reference(hidden_TH, weight_H, 1e-6, offset))


@device
def test_norms_read_and_write_strided_rows(device: str) -> None:
    wide, memory = (random(4, 101, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight_H = random(100, dtype=torch.bfloat16, device=device)
    kept = memory[:, 0].clone()
    rms_norm(wide[:, 1:], weight_H, 1e-6, out=memory[:, 1:])
    want_TH = rms_norm_reference(wide[:, 1:], weight_H, 1e-6)
    assert_equal_but_for_the_order_of_sums(memory[:, 1:], want_TH)
    assert torch.equal(memory[:, 0], kept)


# heads, KV heads, dimensions, rotated pairs, dimensions of a value
SIZES = [(4, 2, 64, 32, 64), (3, 1, 24, 6, 8), (5, 5, 40, 20, 40), (2, 1, 16, 0, 16)]
STEPS = {
    "plain": (None, Steps()),
    "interleaved": (None, Steps(is_interleaved=True)),
    "norm per head, clip": ("head", Steps(eps=1e-5, clip=0.75)),
    "norm over all heads": ("all", Steps(norm_offset=1.0)),
    "norm per head, interleaved": ("head", Steps(is_interleaved=True, norm_offset=0.0)),
    "norm after": ("head", Steps(is_norm_after_rope=True, clip=2.0)),
    "values are normed keys": ("head", Steps(norms_values=True, values_are_keys=True, clip=1.0)),
}


def check_rope(
    sizes: tuple[int, ...], norm: str | None, steps: Steps, dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, dim, half, value_dim = sizes
    value_dim = dim if steps.values_are_keys else value_dim
    width = (heads + kv_heads) * dim + (0 if steps.values_are_keys else kv_heads * value_dim)
    qkv_TX = random(5, width, dtype=dtype, device=device)
    tables = tuple(torch.randn(50, half).to(device) for _ in range(2))
    positions_T = torch.randint(0, 50, (5,), dtype=torch.int32).to(device)
    counts = {"all": (heads, kv_heads), "head": (1, 1)}.get(norm or "")
    norms = (None, None)
    if counts is not None:
        norms = tuple(random(count * dim, dtype=dtype, device=device) for count in counts)
    got = qkv_rope(
        qkv_TX,
        positions_T,
        *tables,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_dim=value_dim,
        q_norm=norms[0],
        k_norm=norms[1],
        steps=steps,
    )
    want = qkv_rope_reference(
        qkv_TX,
        positions_T,
        tables,
        sizes=(heads, kv_heads, dim, value_dim),
        norms=norms,
        steps=steps,
    )
    for mine, theirs in zip(got, want, strict=True):
        assert mine.is_contiguous()
        if norm is None:
            assert torch.equal(mine, theirs)
        else:
            assert_equal_but_for_the_order_of_sums(mine, theirs)


@device
@pytest.mark.parametrize("name", STEPS)
def test_rotations_equal_the_reference(name: str, device: str) -> None:
    check_rope(SIZES[1], *STEPS[name], torch.bfloat16, device)


@device
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rotations_equal_the_reference_for_every_shape(sizes: tuple[int, ...], device: str) -> None:
    check_rope(sizes, None, Steps(), torch.float16, device)


@device
@pytest.mark.slow
@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_rotations_equal_the_reference_in_every_way(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    check_rope(sizes, *STEPS[name], dtype, device)


@device
@covering(dtype=FLOAT_DTYPES, half=[4, 0], rope=[8, 0], is_interleaved=[False, True])
def test_latent_rows_and_queries_equal_the_reference(
    half: int,
    rope: int,
    is_interleaved: bool,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, nope, rank, half = 3, 12, 24, min(half, rope // 2)
    query_TAD = random(4, heads, nope + rope, dtype=dtype, device=device)
    row_TW = random(4, rank + rope, dtype=dtype, device=device)
    angles = (
        torch.randint(0, 9, (4,), dtype=torch.int32).to(device),
        *(torch.randn(9, half).to(device) for _ in range(2)),
    )
    options = {
        "row_norm": random(rank, dtype=dtype, device=device),
        "eps": 1e-5,
        "is_interleaved": is_interleaved,
    }
    out = Projected(
        torch.full_like(query_TAD, math.nan),
        torch.full_like(row_TW, math.nan)[:, None],
        row_TW[:, None, :0],
    )
    got = latent_rope(query_TAD, row_TW, angles, **options, out=out)
    assert got is out
    monkeypatch.setattr(elementwise, "triton_runs_on", lambda _device: False)
    want = latent_rope(query_TAD.clone(), row_TW, angles, **options)
    assert torch.equal(got.query_THD, want.query_THD)
    assert torch.equal(got.key_TGD[..., rank:], want.key_TGD[..., rank:])
    assert_equal_but_for_the_order_of_sums(got.key_TGD, want.key_TGD)
    assert got.value_TGV.numel() == 0


@device
@covering(dtype=FLOAT_DTYPES, activation=[*SIGMOID_GATES])
def test_gated_products_equal_the_reference(
    activation: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_TF, up_TF = (3 * random(37, 41, dtype=dtype, device=device) for _ in range(2))
    gate_TF[0, 0] = -200.0
    monkeypatch.setattr(loading, "triton_runs_on", lambda _device: True)
    got_TF = loading._device_product(gate_TF.clone(), up_TF, activation, None)
    want_TF = gated_product(gate_TF, up_TF, activation)
    if activation == "silu":
        assert_equal_but_for_the_order_of_sums(got_TF, want_TF)
    else:  # torch's 1 + tanh loses what is left of large negative gates
        torch.testing.assert_close(got_TF, want_TF, rtol=2 * UNIT[dtype], atol=1e-5)


ROUTERS = {
    "softmax": RouterSpec(),
    "scaled softmax": RouterSpec(renormalize=False, scale=2.5),
    "softmax in groups by their best": RouterSpec(
        renormalize=False, num_groups=4, top_groups=2, group_score="max"
    ),
    "sigmoid in groups by two": RouterSpec(
        scoring="sigmoid", scale=1.7, num_groups=3, top_groups=2, group_score="top2_sum"
    ),
    "sigmoid as it is": RouterSpec(scoring="sigmoid", renormalize=False),
    "softmax with a floor": RouterSpec(min_weight_sum=0.4),
    "sigmoid with a larger sum": RouterSpec(scoring="sigmoid", added_weight_sum=0.3),
    "sigmoid chosen by logits": RouterSpec(scoring="sigmoid", chooses_by_logits=True),
    "root of softplus": RouterSpec(scoring="sqrtsoftplus", added_weight_sum=1e-20, scale=1.5),
}


def check_router(
    router: RouterSpec,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
    top_k: int = 3,
) -> None:
    moe = MoeSpec(
        num_experts=logits_TE.shape[1],
        top_k=top_k,
        expert_hidden=8,
        activation="silu",
        router=router,
    )
    got = choose_experts(logits_TE, moe, bias_E)
    with monkeypatch.context() as patch:
        patch.setattr(feed_forward, "triton_runs_on", lambda _device: False)
        want = choose_experts(logits_TE, moe, bias_E)
    assert torch.equal(got.topk_ids_TK, want.topk_ids_TK)
    torch.testing.assert_close(
        got.topk_weights_TK, want.topk_weights_TK, rtol=2e-6, atol=1e-12, equal_nan=True
    )


@device
@covering(name=[*ROUTERS], has_bias=[False, True])
def test_routers_equal_the_reference(
    name: str, has_bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias_E = torch.randn(12).to(device) / 4 if has_bias else None
    for dtype in FLOAT_DTYPES:
        logits_TE = random(7, 12, dtype=dtype, device=device)
        check_router(ROUTERS[name], logits_TE, bias_E, monkeypatch)
    check_router(ROUTERS["softmax"], random(0, 12, dtype=dtype, device=device), None, monkeypatch)


@device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy subtracts infinities
@pytest.mark.parametrize("name", ROUTERS)
def test_ties_nan_and_infinities_are_ordered_as_in_the_reference(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_TE = torch.zeros(8, 12)
    logits_TE[1, 11] = logits_TE[2, 5] = logits_TE[2, 9] = 1
    logits_TE[3, 3] = -0.0
    logits_TE[4], logits_TE[5, 7], logits_TE[6, :9] = math.nan, math.nan, -math.inf
    logits_TE[7] = -math.inf
    check_router(ROUTERS[name], logits_TE.to(device), None, monkeypatch)


@device
def test_many_experts_and_strided_results(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TE = random(3, 300, dtype=torch.float32, device=device)
    for router in (RouterSpec(), replace(RouterSpec(), scoring="sigmoid")):
        check_router(router, logits_TE, None, monkeypatch, top_k=11)
    moe = MoeSpec(num_experts=300, top_k=2, expert_hidden=8, activation="silu", router=RouterSpec())
    ids, weights = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, 5)
    out = elementwise.Routing(ids.to(device)[:, 1:3], weights.to(device)[:, 2:4])
    want = choose_experts(logits_TE, moe)
    got = choose_experts(logits_TE, moe, out=out)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
    assert got.topk_ids_TK.data_ptr() == out.topk_ids_TK.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        found = fitting_kernels("compile_elementwise", capability, tmp_path)
    assert all(kernel["spilled_bytes"] == 0 for kernel in found)
