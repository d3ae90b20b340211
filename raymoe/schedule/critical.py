"""What to look at in a timeline: what determined its length, and how far it is from predicted."""

import math

from raymoe.errors import ScheduleError
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Resource
from raymoe.schedule.timeline import Span, Timeline


def critical_path(schedule: Schedule, timeline: Timeline) -> tuple[Span, ...]:
    """The chain of tasks that determines the makespan, first to last.

    Begins at the task that ends last and goes back, each time to what held the task up: of those
    that it waits for and the one before it on its lane, the one that ended last. In a predicted
    timeline the chain has no gaps and is as long as the makespan; the gaps of a measured one are
    the time from the end of a task to the start of what waited for it.

    Raises:
        ScheduleError: The timeline is not one of this schedule.
    """
    spans = timeline.spans
    if tuple(span.task for span in spans) != schedule.tasks:
        raise ScheduleError(
            f"timeline {timeline.name!r} with {len(spans)} tasks is not one of schedule "
            f"{schedule.name!r} with {len(schedule.tasks)}"
        )
    held_by = _holders(schedule, timeline)
    path: list[Span] = []
    at = max(range(len(spans)), key=lambda index: spans[index].end_s, default=None)
    while at is not None:
        path.append(spans[at])
        at = held_by[at]
    return tuple(reversed(path))


def bound_by(schedule: Schedule, timeline: Timeline) -> Resource:
    """The resource on which the critical path spends most of its time: more of it helps most.

    Raises:
        ScheduleError: The timeline is not one of this schedule, or nothing ran.
    """
    seconds = dict.fromkeys(timeline.resources, 0.0)
    for span in critical_path(schedule, timeline):
        seconds[span.task.resource] += span.duration_s
    if not seconds:
        raise ScheduleError(f"timeline {timeline.name!r} is empty; nothing bounds it")
    return max(seconds, key=seconds.__getitem__)


def gap(predicted: Timeline, measured: Timeline) -> float:
    """How much longer it took than predicted, as a fraction; negative where it was shorter."""
    if not predicted.makespan_s:
        return math.inf if measured.makespan_s else 0.0
    return measured.makespan_s / predicted.makespan_s - 1


def compare(predicted: Timeline, measured: Timeline) -> str:
    """The line of a report; the link is the direction from host to device."""
    busy = measured.utilization(Resource.HTOD)
    return report_line(predicted.makespan_s, measured.makespan_s, busy)


def report_line(predicted_s: float, measured_s: float, link_busy: float) -> str:
    """The line of a report of one timeline or of many.

    Args:
        predicted_s: Predicted seconds.
        measured_s: Measured seconds.
        link_busy: Busy share of the link from host to device, 0..1.
    """
    difference = measured_s / predicted_s - 1 if predicted_s else math.inf
    return (
        f"predicted {predicted_s:.3g} s, measured {measured_s:.3g} s, "
        f"gap {100 * difference:+.1f} %, link busy {100 * link_busy:.0f} %"
    )


def _holders(schedule: Schedule, timeline: Timeline) -> list[int | None]:
    """For each task the one that held it up; None for one that started for itself."""
    spans = timeline.spans
    last_on: dict[Resource, int] = {}
    holders: list[int | None] = []
    for index, (task, waits) in enumerate(zip(schedule.tasks, schedule.dependencies, strict=True)):
        before = (*waits, last_on[task.resource]) if task.resource in last_on else waits
        holders.append(max(before, key=lambda other: spans[other].end_s, default=None))
        last_on[task.resource] = index
    return holders
