"""Our latent attention kernels against the exact result: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels import gpu_attention_batch
from raymoe.kernels.gpu_attention_batch import LatentRaggedBatch
from raymoe.kernels.latent_heads import PlainLatentHeads
from raymoe.kernels.paged_kv import ALL_TOKENS
from raymoe.kernels.tensors import to_device
from tests.native.attention_cases import BF16, FP16, FP32, STEPS
from tests.native.test_cpu_latent_attention import Case
from tests.triton_mode import DEVICES
from tests.unit.kernels.test_gpu_attention import compute_of
from tests.unit.kernels.test_latent_forms import SHAPES, exact, make, plain_heads

pytest.importorskip("triton")

UNITS = {FP32: 2e-5, FP16: 2**-8, BF16: 3e-2}
FORMS = {"absorbed": ALL_TOKENS, "plain": 1, "both": 3}
device = pytest.mark.parametrize("device", DEVICES)
form = pytest.mark.parametrize("form", FORMS)


def run(
    case: Case, heads: PlainLatentHeads, minimum: int, *, device: str, cache: Tensor | None = None
) -> Tensor:
    # They need Triton.
    from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
        Scoring,
        append_and_attend_latent_ragged,
    )

    batch = LatentRaggedBatch.of(
        case.batch(),
        case.layout,
        compute_of(case.query.dtype, device),
        min_plain_tokens=minimum,
    )
    return append_and_attend_latent_ragged(
        case.query.to(device),
        case.latent.to(device),
        (case.cache.clone() if cache is None else cache).to(device),
        to_device(batch, torch.device(device)),
        heads=plain_heads(heads, heads.weight_HXR.to(device)),
        scoring=Scoring(
            scale=case.scale, sinks_H=None if case.sinks is None else case.sinks.to(device)
        ),
    ).cpu().view(len(case.query), -1, heads.value_dim)  # fmt: skip


def check(case: Case, heads: PlainLatentHeads, minimum: int, *, device: str) -> None:
    got, unit = run(case, heads, minimum, device=device), UNITS[case.query.dtype]
    torch.testing.assert_close(got.double(), exact(case, heads), rtol=unit, atol=unit)


@device
@form
def test_equals_the_exact_result(form: str, device: str) -> None:
    case, heads = make([(33, 1), (1, 1), (36, 4), (5, 2)], SHAPES[0])
    check(case, heads, FORMS[form], device=device)


@device
@form
def test_sinks_take_their_part_of_the_softmax(
    form: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, heads = make([(33, 1), (1, 1), (36, 4), (5, 2)], SHAPES[1])
    case.add_sinks()
    check(case, heads, FORMS[form], device=device)
    # Keys and values are made for some heads at a time.
    monkeypatch.setattr("raymoe.kernels.gpu_attention.GATHERED_BYTES", 2_000)
    check(case, heads, FORMS[form], device=device)


@device
@form
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_exact_result_for_every_shape(
    name: str, shape: tuple[int, int, int, int, int], form: str, device: str
) -> None:
    case, heads = make(STEPS[name], shape)
    check(case, heads, FORMS[form], device=device)


@device
@form
@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (FP32, BF16)], ids=str)
def test_equals_the_exact_result_in_every_type(
    dtypes: tuple[torch.dtype, torch.dtype], form: str, device: str
) -> None:
    case, heads = make(STEPS["mixed"], (6, 32, 16, 32, 64), dtypes)
    check(case, heads, FORMS[form], device=device)


@device
@pytest.mark.slow
def test_equals_the_exact_result_in_the_sizes_of_deepseek(device: str) -> None:
    case, heads = make([(40, 1), (34, 3)], (32, 128, 64, 128, 512))
    check(case, heads, 3, device=device)


@device
def test_what_does_not_fit_at_once_is_done_in_pieces(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels import gpu_attention  # noqa: PLC0415

    case, heads = make([(40, 1), (36, 4), (5, 5), (70, 1)], SHAPES[2])
    whole = run(case, heads, 3, device=device)
    for module in (gpu_attention_batch, gpu_attention, gpu_attention):
        monkeypatch.setattr(module, "GATHERED_BYTES", 1)
    pieces = run(case, heads, 3, device=device)
    # Matrix products of other sizes may add in another order, but no more.
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)
    check(case, heads, 3, device=device)
    monkeypatch.setattr(gpu_attention, "SPLIT_POSITIONS", 32)
    check(case, heads, 3, device=device)


@device
def test_rows_land_in_their_places(device: str) -> None:
    case, heads = make([(37, 5), (33, 1)], SHAPES[2], (FP32, BF16))
    cache = case.cache.clone().to(device)
    run(case, heads, 3, device=device, cache=cache)
    want = case.cache.clone()
    for sequence, context in enumerate(case.contexts):
        begin, end = case.starts[sequence : sequence + 2]
        for token, position in zip(range(begin, end), range(context)[begin - end :], strict=True):
            block = case.table[sequence, position // 32]
            want[block, position % 32] = case.latent[token].to(BF16)
    assert torch.equal(cache.cpu().view(torch.uint8), want.view(torch.uint8))
