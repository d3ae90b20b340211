"""Matrices decoded by our kernel for torch's products, as Turing takes them."""

from dataclasses import replace

import pytest
import torch

from raymoe.codecs import as_tensor
from raymoe.kernels.gpu_experts_kernels import in_planes
from raymoe.kernels.gpu_experts_layout import Compute, TileTable
from raymoe.model import device_experts as choice
from raymoe.model.device_experts import (
    MAX_SMALL_BATCH_TOKENS,
    DispatchByBatchSize,
    make_device_experts,
)
from tests.triton_mode import DEVICES
from tests.unit.kernels.expert_cases import CLAMP, ExpertCase
from tests.unit.kernels.test_gpu_experts import FORMATS, error_of

pytest.importorskip("triton")

TURING = TileTable(capability=(7, 5))
STORED = [name for name, (stored, _) in FORMATS.items() if stored is not None]
SLOW_TYPES = [
    pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float32)
]
device = pytest.mark.parametrize("device", DEVICES)


def experts_of(case: ExpertCase):
    from raymoe.kernels.gpu_experts import DecodedExperts  # noqa: PLC0415 - needs Triton

    compute = Compute.on(TURING, case.dtype)
    return DecodedExperts(case.matrices, compute=compute, activation="silu", clamp=case.clamp)


@device
@pytest.mark.parametrize("dtype", [torch.float16, *SLOW_TYPES], ids=str)
@pytest.mark.parametrize("name", STORED)
def test_elements_are_those_of_the_codec_bit_by_bit(
    name: str, dtype: torch.dtype, device: str
) -> None:
    stored, sizes = FORMATS[name]
    case = ExpertCase(stored=stored, dtype=dtype, num_experts=2, device=device, **sizes)
    experts = experts_of(case)
    for ffn, gate, down in zip(
        experts.ffns, case.matrices.gate_EFH, case.matrices.down_EHF, strict=True
    ):
        for ours, weight in ((ffn.gate, gate), (ffn.down, down)):
            want_OX = in_planes(as_tensor(weight, dtype), ours._layout.unit_inputs)
            assert torch.equal(ours.decode(0, weight.shape[0]), want_OX)


@device
@pytest.mark.parametrize("clamp", [None, CLAMP], ids=["silu", "clamp"])
@pytest.mark.parametrize("name", ["int4 packed, rows, odd", "mxfp4"])
def test_equals_the_reference(name: str, clamp: object, device: str) -> None:
    stored, sizes = FORMATS[name][0], {"hidden": 32, "wide": 32}
    case = ExpertCase(
        stored=stored, has_bias=True, clamp=clamp, num_experts=2, device=device, **sizes
    )
    exact_TH = case.exact()
    plain = error_of(case.plain()(*case.inputs), exact_TH)
    assert error_of(experts_of(case)(*case.inputs), exact_TH) <= 2 * plain


@device
def test_large_matrices_are_decoded_in_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from raymoe.kernels import gpu_experts as decoded  # noqa: PLC0415 - needs Triton

    case = ExpertCase(
        stored=FORMATS["fp8 block"][0], has_bias=True, num_experts=2, hidden=16, wide=150,
        device=device,
    )  # fmt: skip
    whole_TH = experts_of(case)(*case.inputs)
    monkeypatch.setattr(decoded, "DECODED_BYTES", 64 * case.hidden * 2)
    torch.testing.assert_close(experts_of(case)(*case.inputs), whole_TH)


@pytest.mark.parametrize("name", ["plain", "mxfp4"])
def test_turing_in_float16_takes_our_kernels_for_few_tokens_and_torch_for_many(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "grouped_experts_are_used", lambda *_: True)
    stored, sizes = FORMATS[name]
    case = ExpertCase(stored=stored, **sizes)
    made = make_device_experts(case.matrices, activation="silu", dtype=case.dtype, tiles=TURING)
    assert isinstance(made, DispatchByBatchSize)
    assert type(made._small_batch).__name__ == "GroupedExperts"
    assert type(made._large_batch).__name__ == (
        "PlainExperts" if name == "plain" else "DecodedExperts"
    )
    ampere = replace(TURING, capability=(8, 0))
    made = make_device_experts(case.matrices, activation="silu", dtype=case.dtype, tiles=ampere)
    assert type(made).__name__ == "GroupedExperts"


def test_few_is_as_many_tokens_as_a_tile_has_rows() -> None:
    calls = []
    made = DispatchByBatchSize(
        lambda *_: calls.append("few"), lambda *_: calls.append("many"), num_experts=4
    )
    for num_rows in (1, 4 * MAX_SMALL_BATCH_TOKENS, 4 * MAX_SMALL_BATCH_TOKENS + 1):
        made(torch.zeros(num_rows, 8), torch.zeros(num_rows, 1), torch.zeros(num_rows, 1))
    assert calls == ["few", "few", "many"]
