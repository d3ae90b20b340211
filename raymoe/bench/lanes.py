"""How long lanes take from the end of one task to the start of the task that waits for it."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.device.lane import ThreadLane
from raymoe.runtime.executor import Bindings, LaneExecutor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import Timeline

TARGET_S = 40e-6  # a task of a decode step takes at least some hundred microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLatency:
    """Seconds between dependent tasks that themselves do nothing.

    Attributes:
        same_lane_s: The next task is on the same lane: median.
        other_lane_s: It is on another lane, whose thread sleeps until then: median.
        other_lane_p99_s: The same, 99th of 100.
    """

    same_lane_s: float
    other_lane_s: float
    other_lane_p99_s: float

    def __str__(self) -> str:
        return (
            f"from the end of a task to the start of the next: same lane "
            f"{self.same_lane_s * 1e6:.1f} us, other lane {self.other_lane_s * 1e6:.1f} us "
            f"(99 %: {self.other_lane_p99_s * 1e6:.1f} us), target {TARGET_S * 1e6:.0f} us"
        )


def measure_lanes(num_tasks: int = 2000) -> LaneLatency:
    """Measure with `num_tasks` tasks in a chain, on one lane and on two in turn."""
    same = _gaps_s(_run(_chain([Op.ATTN], num_tasks)))
    other = _gaps_s(_run(_chain([Op.ATTN, Op.W], num_tasks)))
    return LaneLatency(
        same_lane_s=statistics.median(same),
        other_lane_s=statistics.median(other),
        other_lane_p99_s=statistics.quantiles(other, n=100)[-1],
    )


def _chain(ops: Sequence[Op], num_tasks: int) -> Schedule:
    """Tasks that each read what the one before wrote; `attn` on the CPU's lane, `w` on HTOD."""
    lanes = {Op.ATTN: Resource.CPU, Op.W: Resource.HTOD}
    link = Buffer("link")
    tasks = [
        Task(op=op, layer=index, part=0, resource=lanes[op], reads=(link,), writes=(link,))
        for index, op in ((index, ops[index % len(ops)]) for index in range(num_tasks))
    ]
    return Schedule("chain", tuple(tasks), frozenset({link}))


def _run(schedule: Schedule) -> Timeline:
    def nothing(_task: Task, _state: None) -> None:
        """Do nothing."""

    bindings: Bindings[None] = dict.fromkeys(Op, nothing)
    lanes = {resource: ThreadLane(resource) for resource in schedule.resources}
    try:
        return LaneExecutor(schedule, bindings, lanes).run(None)
    finally:
        for lane in lanes.values():
            lane.close()


def _gaps_s(timeline: Timeline) -> list[float]:
    """Gaps of the second half: in the first, tasks are still being submitted."""
    spans = timeline.spans[len(timeline.spans) // 2 :]
    return [later.start_s - earlier.end_s for earlier, later in itertools.pairwise(spans)]
