"""Marks of a finished run -> measured Timeline."""

from collections.abc import Iterable

from raymoe.device.lane import Mark
from raymoe.schedule.graph import Schedule
from raymoe.schedule.timeline import Span, Timeline


def record(schedule: Schedule, marks: Iterable[Mark], origin_s: float) -> Timeline:
    """Measured timeline of a run; the same type as `simulate` predicts.

    Args:
        schedule: What ran.
        marks: One per task, in issue order, all done.
        origin_s: Time zero of the timeline, in seconds of `time.perf_counter`.
    """
    spans = [
        Span(task, mark.start_s - origin_s, mark.end_s - origin_s)
        for task, mark in zip(schedule.tasks, marks, strict=True)
    ]
    return Timeline(schedule.name, tuple(spans))
