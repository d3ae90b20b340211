"""The overhead of a task is what a step takes beyond its kernels, shared by its tasks."""

import dataclasses
import random

import pytest
import torch

from raymoe.measure.host import (
    MIN_S,
    MODEL,
    NARROW_MODEL,
    STEPS,
    TOKENS,
    NarrowModel,
    step_jobs,
    step_shape,
    task_overhead,
)
from raymoe.plan.cost import StepCost
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.timeline import simulate
from raymoe.specs.hardware import Curve, HardwareSpec
from raymoe.specs.model import ModelSpec
from tests.unit.plan.test_cost_host import CURVES, NODE


def predicted_s(node: HardwareSpec, shape: MicroBatchShape, model: ModelSpec = MODEL) -> float:
    cost = StepCost(ModelWork.of(model, 2), node, (shape,))
    return simulate(build_in_place(MODEL.num_layers), cost).makespan_s


def test_a_pass_is_predicted_to_take_what_it_took() -> None:
    taken = [random.uniform(1.0, 2.0) for _ in TOKENS]
    curves = dataclasses.replace(CURVES, task_overhead_s=task_overhead(NODE, taken))
    node = dataclasses.replace(NODE, host_curves=curves)
    assert [predicted_s(node, step_shape(*each)) for each in STEPS] == pytest.approx(taken)


def test_a_node_without_a_profile_has_the_overhead_of_a_narrow_model() -> None:
    bare = dataclasses.replace(NODE, host_curves=None)
    taken = [random.uniform(1.0, 2.0) for _ in TOKENS]
    node = dataclasses.replace(bare, task_overhead_s=task_overhead(bare, taken, NARROW_MODEL))
    steps = [predicted_s(node, step_shape(*each), NARROW_MODEL) for each in STEPS]
    assert steps == pytest.approx(taken)
    num_threads = torch.get_num_threads()
    narrow = NarrowModel(2)
    narrow.run(0.0)
    assert [size for size, _ in narrow.overhead(bare).points] == list(TOKENS)
    assert torch.get_num_threads() == num_threads


def test_kernels_that_ran_faster_than_their_rates_leave_nearly_nothing() -> None:
    assert {overhead for _, overhead in task_overhead(NODE, [0.0] * len(TOKENS)).points} == {MIN_S}


@torch.inference_mode()
def test_passes_run_all_layers_with_all_tokens() -> None:
    for tokens, job in zip(TOKENS, step_jobs(), strict=True):
        timeline = job.calls[0]()
        assert len(timeline.spans) == len(build_in_place(MODEL.num_layers).tasks)
        assert job.case == f"{tokens} tokens"


def test_rows_of_larger_steps_than_measured_take_what_the_last_of_them_took() -> None:
    curves = dataclasses.replace(CURVES, task_overhead_s=Curve(((1.0, 1e-4), (512.0, 8e-4))))
    node = dataclasses.replace(NODE, host_curves=curves)
    shape = MicroBatchShape.prefill(32, 48, is_on_host=True)
    cost = StepCost(ModelWork.of(MODEL, 2), node, (shape,))
    task = build_in_place(MODEL.num_layers).tasks[0]
    assert cost.duration_s(task) - cost.kernel_s(task) == pytest.approx(
        8e-4 + 7e-4 / 511 * (32 * 48 - 512)
    )
