"""Executors run the tasks of a schedule and record when."""

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from raymoe.errors import ExecutionError, ScheduleError
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Op, Task
from raymoe.schedule.timeline import Span, Timeline

State = TypeVar("State")
Bindings = Mapping[Op, Callable[[Task, State], None]]


class SerialExecutor(Generic[State]):
    """Runs the tasks one after another in issue order, in the calling thread.

    Issue order is a topological order, so this is always a correct run; it is the executor of the
    device `cpu`, whose kernels use all cores by themselves, and the oracle of the others.
    """

    def __init__(self, schedule: Schedule, bindings: Bindings[State]) -> None:
        missing = {task.op for task in schedule.tasks} - set(bindings)
        if missing:
            raise ScheduleError(f"schedule {schedule.name!r}: no binding for {sorted(missing)}")
        self._schedule = schedule
        self._calls = [(task, bindings[task.op]) for task in schedule.tasks]

    def run(self, state: State) -> Timeline:
        """Run all tasks on `state`; returns the measured timeline.

        Raises:
            ExecutionError: A task failed; names it, and `__cause__` is its error.
        """
        spans: list[Span] = []
        origin_s = time.perf_counter()
        start_s = 0.0
        for task, call in self._calls:
            try:
                call(task, state)
            except Exception as error:
                raise ExecutionError(
                    f"task {task} of schedule {self._schedule.name!r} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            end_s = time.perf_counter() - origin_s
            spans.append(Span(task, start_s, end_s))
            start_s = end_s
        return Timeline(self._schedule.name, tuple(spans))
