"""Outlines take as long as their schedules, and have little left of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.graph import Task
from raymoe.schedule.timeline import Outline, simulate
from tests.unit.schedule.costs import TaskCost
from tests.unit.schedule.forms import BUILDER_NAMES, step_forms, uniform_form

IN_THE_DEFAULT_RUN = ("micro_batches", "vslpipe")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_THE_DEFAULT_RUN else pytest.mark.slow)
        for name in BUILDER_NAMES
    ],
)
@given(data=st.data())
@settings(max_examples=30)
def test_an_outline_takes_as_long_as_its_schedule(name: str, data: st.DataObject) -> None:
    schedule = STREAMING_BUILDERS[name](data.draw(step_forms(name)))
    cost = TaskCost(data)
    expected_s = simulate(schedule, cost).makespan_s
    outline = Outline.of(schedule, kind_of=str)
    assert outline.makespan_s(list(map(cost.duration_s, outline.kinds))) == expected_s


def test_tasks_of_a_kind_are_asked_for_once() -> None:
    schedule = STREAMING_BUILDERS["micro_batches"](uniform_form(num_layers=3, num_micro_batches=4))
    dice = random.Random(1)
    seconds = {task.op: dice.random() for task in schedule.tasks}

    class ByOp:
        def duration_s(self, task: Task) -> float:
            return seconds[task.op]

    outline = Outline.of(schedule, kind_of=lambda task: task.op)
    assert len(outline.kinds) == len(seconds)
    makespan_s = outline.makespan_s([seconds[task.op] for task in outline.kinds])
    assert makespan_s == pytest.approx(simulate(schedule, ByOp()).makespan_s)
