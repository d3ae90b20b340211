"""The doctor's formulas agree with our kernels, on the CPU and in Triton's interpreter."""

import pytest
import torch

from raymoe.doctor import kernels
from raymoe.doctor.examine import Status, Target
from raymoe.doctor.kernels import BFLOAT16, BOUNDS, CPU, FLOAT16, FLOAT32, FORMATS
from raymoe.kernels.gpu_attention_batch import AttentionCompute
from raymoe.kernels.gpu_experts_layout import Compute, ExpertMatrices, TileTable
from raymoe.kernels.gpu_state import scan
from tests.kinds import covering
from tests.triton_mode import HAS_GPU

CASES = {"attention": kernels.attention, "latent": kernels.latent_attention}
interpreted = pytest.mark.skipif(HAS_GPU, reason="on a GPU, kernels are compiled")


def test_every_check_of_the_cpu_passes() -> None:
    checks = kernels.checks(Target(device="cpu"))
    assert len(checks) == 18 + len(FORMATS)
    assert {check.name: check.run().status for check in checks} == {
        check.name: Status.OK for check in checks
    }


@interpreted
@pytest.mark.parametrize("case", [kernels.attention, kernels.latent_attention])
@pytest.mark.parametrize("dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.slow)])
def test_triton_attends_as_the_formula(
    case: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "CONTEXTS", (1, 33))
    compute = AttentionCompute(dtype=dtype, dot=FLOAT32)
    found = kernels.compare(lambda: case(dtype, CPU, compute), BOUNDS[dtype])
    assert found.status == Status.OK, found.value


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["triton", "torch"])
def test_states_of_a_device_are_those_of_the_formula(
    way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CPU", torch.device("meta"))
    if way == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(scan, "triton_runs_on", lambda _device: True)
        monkeypatch.setattr(kernels, "STATE_CONTEXTS", (1, 20))
    found = kernels.compare(lambda: kernels.states(dtype, CPU), BOUNDS[dtype])
    assert found.status == Status.OK, found.value


def grouped(matrices: ExpertMatrices, dtype: torch.dtype) -> object:
    from raymoe.kernels.gpu_experts import GroupedExperts  # noqa: PLC0415 - needs Triton

    compute = Compute(dtype=dtype, dot=FLOAT32, tiles=TileTable(capability=(8, 0)))
    return GroupedExperts(matrices, compute=compute)


@interpreted
@pytest.mark.parametrize(
    "stored", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in FORMATS)], ids=str
)
def test_triton_computes_experts_as_the_formula(
    stored: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "TOKENS", (3,))
    case = lambda: kernels.experts(stored, BFLOAT16, CPU, grouped)  # noqa: E731
    found = kernels.compare(case, BOUNDS[BFLOAT16])
    assert found.status == Status.OK, found.value


@covering(dtype=[FLOAT32, FLOAT16, BFLOAT16], case=CASES)
def test_torch_attends_as_the_formula_where_triton_does_not(
    case: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CPU", torch.device("meta"))
    found = kernels.compare(lambda: case(dtype, torch.device("cpu")), BOUNDS[dtype])
    assert found.status == Status.OK, found.value


@pytest.mark.parametrize("wrong", ["slot", "nan"])
def test_a_wrong_kernel_fails(wrong: str) -> None:
    def make(matrices: ExpertMatrices, dtype: torch.dtype) -> object:
        right = kernels.make(matrices, dtype)

        def experts(hidden, ids, weights):
            got = right(hidden, ids, weights)
            return right(hidden, ids.flip(1), weights) if wrong == "slot" else got / 0 * 0

        return experts

    found = kernels.compare(lambda: kernels.experts(None, BFLOAT16, CPU, make), BOUNDS[BFLOAT16])
    assert found.status == Status.FAILED
