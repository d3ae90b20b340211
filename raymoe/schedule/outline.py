"""Outline: a schedule reduced to what its length depends on, for planners that ask for it often.

Lanes run in order, so a task that waits for the last of several tasks of a lane has waited for all
of them, and whatever they waited for. What is left of the waits is few; tasks that nothing but
their lane holds up, and for whose forerunner nobody waits, run on without a gap and count as one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Resource, Task

_LANES = {resource: lane for lane, resource in enumerate(Resource)}


@dataclass(slots=True)
class _Run:
    """Tasks of one lane that follow each other without a gap; waits are runs of other lanes."""

    lane: int
    waits: tuple[int, ...]
    kinds: list[int]


@dataclass(frozen=True, slots=True)
class Outline:
    """What the length of a schedule depends on.

    Attributes:
        kinds: Of each kind of tasks, one.
    """

    kinds: tuple[Task, ...]
    _runs: tuple[_Run, ...]

    @classmethod
    def of(cls, schedule: Schedule, kind_of: Callable[[Task], Hashable]) -> "Outline":
        """Reduce a schedule.

        Args:
            schedule: The schedule.
            kind_of: Equal for tasks that take equally long.
        """
        lanes = [_LANES[task.resource] for task in schedule.tasks]
        waits = _needed_waits(lanes, schedule.dependencies)
        awaited = {wait for task_waits in waits for wait in task_waits}
        kinds: dict[Hashable, tuple[int, Task]] = {}
        runs: list[_Run] = []
        run_of: list[int] = []
        last_on: dict[int, int] = {}
        for index, (task, lane) in enumerate(zip(schedule.tasks, lanes, strict=True)):
            before = last_on.get(lane)
            if before is None or waits[index] or before in awaited:
                run_of.append(len(runs))
                runs.append(_Run(lane, tuple(run_of[wait] for wait in waits[index]), []))
            else:
                run_of.append(run_of[before])
            kind, _ = kinds.setdefault(kind_of(task), (len(kinds), task))
            runs[run_of[index]].kinds.append(kind)
            last_on[lane] = index
        return cls(tuple(task for _, task in kinds.values()), tuple(runs))

    def makespan_s(self, durations_s: Sequence[float]) -> float:
        """Length of the schedule, as `simulate` has it.

        Args:
            durations_s: Seconds of each of `kinds`, not negative.
        """
        free_s = [0.0] * len(_LANES)
        ends_s: list[float] = []
        for run in self._runs:
            now_s = free_s[run.lane]
            for wait in run.waits:
                if ends_s[wait] > now_s:  # noqa: PLR1730 - the innermost loop of planning
                    now_s = ends_s[wait]
            for kind in run.kinds:
                now_s += durations_s[kind]
            free_s[run.lane] = now_s
            ends_s.append(now_s)
        return max(free_s)


def _needed_waits(
    lanes: Sequence[int], dependencies: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """For each task the waits that do not follow from its others or from its lane."""
    needed: list[tuple[int, ...]] = []
    # Of each task, the last task of each lane that has ended when it ends.
    reached: list[list[int]] = []
    last_on = [-1] * len(_LANES)
    for index, (lane, waits) in enumerate(zip(lanes, dependencies, strict=True)):
        before = last_on[lane]
        known = list(reached[before]) if before >= 0 else [-1] * len(_LANES)
        kept = []
        for wait in reversed(waits):  # the latest first, as it may imply earlier ones
            if wait > known[lanes[wait]]:
                kept.append(wait)
                known = list(map(max, known, reached[wait]))
        known[lane] = index
        needed.append(tuple(kept))
        reached.append(known)
        last_on[lane] = index
    return needed
