"""Predict the timeline of a schedule from the durations of its tasks."""

from typing import Protocol

from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Resource, Task
from raymoe.schedule.timeline import Span, Timeline


class CostModel(Protocol):
    """Knows how long a task takes."""

    def duration_s(self, task: Task) -> float:
        """Duration of a task that runs alone, in seconds; not negative."""


class Instant:
    """A cost model of tasks that take no time: only their order is of interest."""

    def duration_s(self, task: Task) -> float:
        """See `CostModel`."""
        del task
        return 0.0


def simulate(schedule: Schedule, cost: CostModel) -> Timeline:
    """Run a schedule on paper: lanes in issue order, each task after what it waits for."""
    free_s = dict.fromkeys(Resource, 0.0)
    spans: list[Span] = []
    for task, waits in zip(schedule.tasks, schedule.dependencies, strict=True):
        start_s = max([free_s[task.resource], *(spans[wait].end_s for wait in waits)])
        end_s = start_s + cost.duration_s(task)
        free_s[task.resource] = end_s
        spans.append(Span(task, start_s, end_s))
    return Timeline(schedule.name, tuple(spans))
