"""The cores alone are a candidate of every plan, and are chosen where they are faster."""

from dataclasses import replace

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB

MIXTRAL = model_preset("mixtral-8x7b")
L4 = hardware_preset("l4")
FEW = Workload(num_rows=8, prompt_tokens=64, generated_tokens=128)


def test_few_rows_leave_the_gpu_idle() -> None:
    """Quantised experts, which the cores read faster in their packed form than as they stream."""
    model = model_preset("gpt-oss-120b")
    plan = find_plan(model, L4, FEW, max_model_len=1024)
    alone = find_plan(model, L4.without_gpu(), FEW, max_model_len=1024)
    streamed = find_plan(model, L4, FEW, max_model_len=1024, may_leave_gpu_idle=False)
    assert (plan.schedule, plan.policy) == ("in_place", alone.policy)
    assert not plan.hardware.has_gpu
    assert plan.job == alone.job
    assert plan.job.seconds < streamed.job.seconds
    assert streamed.policy.device is not None
    note = plan.describe().split("the GPU stays idle: with it ")[1]
    assert float(note.split(" tokens/s")[0]) == pytest.approx(streamed.tokens_per_s, rel=0.01)


@pytest.mark.parametrize(
    "num_rows", [*(pytest.param(n, marks=pytest.mark.slow) for n in (8, 500)), 64]
)
def test_cores_that_compute_experts_beside_the_gpu_beat_both_alone(num_rows: int) -> None:
    workload = replace(FEW, num_rows=num_rows)
    plan = find_plan(MIXTRAL, L4, workload, max_model_len=1024)
    device = plan.policy.device
    assert device is not None
    assert device.cpu_experts_fraction > 0
    assert "of streamed experts on the CPU" in plan.describe()
    alone = find_plan(MIXTRAL, L4, workload, schedule="in_place", max_model_len=1024)
    policy = replace(plan.policy, device=replace(device, cpu_experts_fraction=0.0))
    streamed = find_plan(MIXTRAL, L4, workload, policy=policy, max_model_len=1024)
    assert plan.tokens_per_s >= max(alone.tokens_per_s, 1.3 * streamed.tokens_per_s)


def test_many_rows_use_the_gpu() -> None:
    many = replace(FEW, num_rows=1000)
    plan = find_plan(MIXTRAL, L4, many, max_model_len=1024)
    alone = find_plan(MIXTRAL, L4, many, schedule="in_place", max_model_len=1024)
    assert plan.schedule == "micro_batches"
    assert plan.note == alone.note == ""
    assert plan.job.seconds < alone.job.seconds


def test_a_named_schedule_is_obeyed() -> None:
    plan = find_plan(MIXTRAL, L4, FEW, schedule="cgopipe", max_model_len=1024)
    assert (plan.schedule, plan.note) == ("cgopipe", "")


@pytest.mark.slow
def test_a_gpu_too_small_for_a_slot_stays_idle() -> None:
    node = replace(L4, gpu_memory_bytes=GIB)
    plan = find_plan(MIXTRAL, node, replace(FEW, num_rows=5000), max_model_len=1024)
    assert plan.schedule == "in_place"
    assert "the GPU stays idle: mixtral-8x7b with one sequence needs" in plan.note


def test_what_fits_neither_way_is_refused_for_the_gpu() -> None:
    node = replace(L4, host_memory_bytes=64 * GIB)
    with pytest.raises(InfeasiblePlanError, match=r"of host memory, 64\.00 GiB may be used"):
        find_plan(MIXTRAL, node, FEW, max_model_len=1024)
