"""Executors run the tasks of a schedule and record when."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from raymoe.device.lane import Cancelled, Lane, Mark
from raymoe.errors import ConfigError, ExecutionError, ScheduleError
from raymoe.runtime.lifetimes import Lifetimes, ReaderCounts, find_lifetimes
from raymoe.runtime.recorder import record
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import Span, Timeline

State = TypeVar("State")
Bindings = Mapping[Op, Callable[[Task, State], None]]
OnDead = Callable[[Buffer, State], None]


class SerialExecutor(Generic[State]):
    """Runs the tasks one after another in issue order, in the calling thread.

    Issue order is a topological order, so this is always a correct run; it is the executor of the
    device `cpu`, whose kernels use all cores by themselves, and the oracle of the others.
    """

    def __init__(self, schedule: Schedule, bindings: Bindings[State]) -> None:
        _check_bindings(schedule, bindings)
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
                raise _failed(self._schedule, task, error) from error
            end_s = time.perf_counter() - origin_s
            spans.append(Span(task, start_s, end_s))
            start_s = end_s
        return Timeline(self._schedule.name, tuple(spans))


class LaneExecutor(Generic[State]):
    """Runs each task on the lane of its resource, after the tasks that it waits for.

    The lanes belong to whoever made them and serve any number of executors, one run at a time:
    two runs at once could queue behind each other in different orders on different lanes.

    Attributes:
        schedule: What it runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        bindings: Bindings[State],
        lanes: Mapping[Resource, Lane],
        *,
        on_dead: OnDead[State] | None = None,
    ) -> None:
        """Prepare the runs of one schedule.

        Args:
            schedule: What to run.
            bindings: What each operation does; called in the threads of the lanes.
            lanes: At least the lanes of the schedule's resources.
            on_dead: Called with a buffer and the state when the last reader of a version of the
                buffer has read it, before anyone can write the next version; see `Lifetimes`.

        Raises:
            ScheduleError: An operation has no binding, or a resource no lane.
            ConfigError: `on_dead` is given, and a lane does not know when its work is done.
        """
        _check_bindings(schedule, bindings)
        missing = sorted(set(schedule.resources) - set(lanes))
        if missing:
            raise ScheduleError(
                f"schedule {schedule.name!r} needs lanes for {missing}; the device has "
                f"{sorted(lanes)}"
            )
        used = [lanes[resource] for resource in schedule.resources]
        if on_dead is not None and not all(lane.is_synchronous for lane in used):
            raise ConfigError("on_dead needs lanes whose calls return when their work is done")
        self.schedule = schedule
        self._calls = [(task, bindings[task.op]) for task in schedule.tasks]
        self._on_dead = on_dead
        self._lifetimes = find_lifetimes(schedule)
        self._steps = [
            (lanes[task.resource].submit, task, waits)
            for task, waits in zip(schedule.tasks, _lane_waits(schedule), strict=True)
        ]
        self._last_of_lane = tuple(
            {task.resource: index for index, task in enumerate(schedule.tasks)}.values()
        )

    def run(self, state: State) -> Timeline:
        """Run all tasks on `state`; returns the measured timeline.

        Returns, or raises, when no task runs any more.

        Raises:
            ExecutionError: A task failed; names it and its lane, and `__cause__` is its error.
                Tasks that had not started were not run.
        """
        run = _Run(self._calls, state, self._lifetimes, self._on_dead)
        marks: list[Mark] = []
        origin_s = time.perf_counter()
        try:
            for index, (submit, task, waits) in enumerate(self._steps):
                after = [marks[wait] for wait in waits]
                marks.append(submit(task, partial(run.perform, index), after))
            # One wait per lane: a wake-up per task would take the interpreter from the lanes.
            for index in self._last_of_lane:
                _outcome(marks[index])
        except BaseException:  # interrupted, or a closed lane: leave nothing running behind
            run.cancel()
            for mark in marks:
                _outcome(mark)
            raise
        self._check(run, marks)
        return record(self.schedule, marks, origin_s)

    def _check(self, run: "_Run[State]", marks: list[Mark]) -> None:
        failures = [] if run.failure is None else [run.failure]
        for task, mark in zip(self.schedule.tasks, marks, strict=True):
            error = _outcome(mark)  # a device may report an error only to those who wait
            if error is not None:
                failures.append((task, error))
        if failures:
            task, error = failures[0]
            raise _failed(self.schedule, task, error) from error


class _Run(Generic[State]):
    """One run: what its tasks share across lanes."""

    def __init__(
        self,
        calls: list[tuple[Task, Callable[[Task, State], None]]],
        state: State,
        lifetimes: Lifetimes,
        on_dead: OnDead[State] | None,
    ) -> None:
        self._calls = calls
        self._state = state
        self._on_dead = on_dead
        self._counts = ReaderCounts(lifetimes)
        self._lock = threading.Lock()
        self._is_cancelled = False
        self.failure: tuple[Task, BaseException] | None = None

    def cancel(self) -> None:
        """Let no further task start."""
        self._is_cancelled = True

    def perform(self, index: int) -> None:
        """Run one task, in the thread of its lane."""
        if self._is_cancelled:
            raise Cancelled("the run was cancelled")
        task, call = self._calls[index]
        try:
            call(task, self._state)
            if self._on_dead is not None:
                for buffer in self._counts.finish(index):
                    self._on_dead(buffer, self._state)
        except BaseException as error:
            with self._lock:
                self._is_cancelled = True
                self.failure = self.failure or (task, error)
            raise


def _check_bindings(schedule: Schedule, bindings: Bindings[State]) -> None:
    missing = {task.op for task in schedule.tasks} - set(bindings)
    if missing:
        raise ScheduleError(f"schedule {schedule.name!r}: no binding for {sorted(missing)}")


def _lane_waits(schedule: Schedule) -> list[tuple[int, ...]]:
    """Dependencies less those that the order of a lane implies: at most one per other lane."""
    reduced = []
    for task, waits in zip(schedule.tasks, schedule.dependencies, strict=True):
        latest: dict[Resource, int] = {}
        for wait in sorted(waits):
            latest[schedule.tasks[wait].resource] = wait
        latest.pop(task.resource, None)
        reduced.append(tuple(latest.values()))
    return reduced


def _outcome(mark: Mark) -> BaseException | None:
    """Wait for a mark; its error, or None if the task was done."""
    try:
        mark.wait()
    except Exception as error:
        return error
    return None


def _failed(schedule: Schedule, task: Task, error: BaseException) -> ExecutionError:
    return ExecutionError(
        f"task {task} on lane {task.resource} of schedule {schedule.name!r} failed: "
        f"{type(error).__name__}: {error}"
    )
