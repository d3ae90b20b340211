"""The executor runs the tasks of a schedule, on lanes or here and now, and records when."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar

from raymoe._native import CancelToken
from raymoe.device.lane import Cancelled, Lane, Mark
from raymoe.device.mover import Copies
from raymoe.errors import ConfigError, ExecutionError, ScheduleError
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import LinkUse, Span, Timeline


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The *versions* of each buffer: what one task wrote, or what was there before the first.

    Versions that nobody reads are not listed: results of the schedule, or data for the next one.
    Nor are versions that a reader itself replaces (an update in place): the memory lives on.

    Attributes:
        buffers: The buffer of each version.
        num_readers: How many tasks read each version.
        versions_of_task: For each task in issue order, the versions that it reads.
    """

    buffers: tuple[Buffer, ...]
    num_readers: tuple[int, ...]
    versions_of_task: tuple[tuple[int, ...], ...]


def find_lifetimes(schedule: Schedule) -> Lifetimes:
    """Find the versions of all buffers of a schedule and who reads them."""
    writer: dict[Buffer, int] = {}
    readers: dict[tuple[Buffer, int], list[int]] = {}
    updated: set[tuple[Buffer, int]] = set()
    for index, task in enumerate(schedule.tasks):
        for buffer in dict.fromkeys(task.reads):
            readers.setdefault((buffer, writer.get(buffer, -1)), []).append(index)
        for buffer in task.writes:
            if buffer in task.reads:
                updated.add((buffer, writer.get(buffer, -1)))
            writer[buffer] = index
    listed = [(version, tasks) for version, tasks in readers.items() if version not in updated]
    versions_of_task: list[list[int]] = [[] for _ in schedule.tasks]
    for number, (_, tasks) in enumerate(listed):
        for index in tasks:
            versions_of_task[index].append(number)
    return Lifetimes(
        buffers=tuple(buffer for (buffer, _), _ in listed),
        num_readers=tuple(len(tasks) for _, tasks in listed),
        versions_of_task=tuple(map(tuple, versions_of_task)),
    )


State = TypeVar("State")
Lanes = Mapping[Resource | Op, Lane]
NO_LANES: Lanes = MappingProxyType({})
NONE_STARTED: Mapping[int, Mark] = MappingProxyType({})
# Copies return what to copy, the others None.
Binding = Callable[[Task, State], Copies | None]
Bindings = Mapping[Op, Binding[State]]
OnDead = Callable[[Buffer, State], None]


class Executor(Generic[State]):
    """Runs each task on the lane of its resource, after the tasks that it waits for.

    Without lanes, tasks run one after another in issue order, in the calling thread. That is a
    topological order, so it is always a correct run: that of the device `cpu`, whose kernels use
    all cores by themselves, and the oracle of the others.

    The lanes belong to whoever made them and serve any number of executors, one run at a time:
    two runs at once could queue behind each other in different orders on different lanes.
    """

    def __init__(
        self,
        schedule: Schedule,
        bindings: Bindings[State],
        lanes: Lanes = NO_LANES,
        *,
        on_dead: OnDead[State] | None = None,
        traffic: Callable[[], Mapping[Resource, LinkUse]] = dict,
    ) -> None:
        """Prepare the runs of one schedule.

        Args:
            bindings: What each operation does; called in the threads of the lanes.
            lanes: Those of all of the schedule's resources, or none; an operation may have its own.
            on_dead: Called with a buffer and the state when the last reader of a version of the
                buffer has read it, before anyone can write the next version; see `Lifetimes`.
            traffic: What has crossed the link so far, for the timeline.

        Raises:
            ScheduleError: An operation has no binding, or a resource no lane.
            ConfigError: `on_dead` is given, and a lane does not know when its work is done.
        """
        unbound = {task.op for task in schedule.tasks} - set(bindings)
        if unbound:
            raise ScheduleError(f"schedule {schedule.name!r}: no binding for {sorted(unbound)}")
        missing = sorted(set(schedule.resources) - set(lanes)) if lanes else []
        if missing:
            raise ScheduleError(
                f"schedule {schedule.name!r} needs lanes for {missing}; the device has "
                f"{sorted(lanes)}"
            )
        keys = [task.lane if task.lane in lanes else task.resource for task in schedule.tasks]
        are_synchronous = bool(lanes) and all(lanes[key].is_synchronous for key in set(keys))
        if on_dead is not None and not are_synchronous:
            raise ConfigError("on_dead needs lanes whose calls return when their work is done")
        self.schedule = schedule
        self.calls = [(task, bindings[task.op]) for task in schedule.tasks]
        self.places: dict[Op, list[int]] = {}  # of the tasks of each operation, in issue order
        for index, task in enumerate(schedule.tasks):
            self.places.setdefault(task.op, []).append(index)
        self.on_dead, self.traffic = on_dead, traffic
        self.lifetimes = None if on_dead is None else find_lifetimes(schedule)
        self.submits = [lanes[key].submit for key in keys] if lanes else []
        self.waits = _lane_waits(schedule, keys)
        self.last_of_lane = tuple({key: index for index, key in enumerate(keys)}.values())

    def run(self, state: State) -> Timeline:
        """Run all tasks on `state`; returns the measured timeline.

        Raises:
            ExecutionError: A task failed; names it and its lane, and `__cause__` is its error.
                Tasks that had not started were not run.
        """
        run = self.start(state)
        try:
            return run.finish()
        except BaseException:
            run.cancel()
            raise

    def start(
        self,
        state: State,
        started: Mapping[int, Mark] = NONE_STARTED,
        *,
        until: Op | None = None,
    ) -> "Run[State]":
        """Give all tasks to their lanes; without lanes, run them.

        Args:
            started: Marks of tasks that were started before, by their place in issue order. Nothing
                that they wait for is in this schedule, and they are the first of their lane.
            until: Return when the tasks of this operation are done; None waits for none.

        Raises:
            ExecutionError: As `run`, for tasks that were waited for.
        """
        run = Run(self, state)
        if self.submits:
            run.submit_all(started, until)
            return run
        end_s = 0.0
        for task, call in self.calls:
            start_s = end_s
            try:
                call(task, state)
            except Exception as error:
                raise _failed(self.schedule, task, error) from error
            end_s = time.perf_counter() - run.origin_s
            run.spans.append(Span(task, start_s, end_s))
        return run


class Run(Generic[State]):
    """One run of a schedule; whoever has one calls `finish`, and `cancel` if that fails.

    Attributes:
        marks: Of all tasks, in issue order.
        spans: Of all tasks, in issue order, once they are done.
    """

    def __init__(self, executor: Executor[State], state: State) -> None:
        self._executor, self._state = executor, state
        self._calls, self._on_dead = executor.calls, executor.on_dead
        lifetimes = executor.lifetimes
        self._num_readers = [] if lifetimes is None else list(lifetimes.num_readers)
        self.marks: list[Mark] = []
        self.spans: list[Span] = []
        self._lock = threading.Lock()
        self._token = CancelToken()
        self._failure: tuple[Task, BaseException] | None = None
        self._before = executor.traffic()
        self.origin_s = time.perf_counter()

    def finish(self, logits_s: float = 0.0) -> Timeline:
        """Wait for all tasks; returns the measured timeline, of the type that `simulate` predicts.

        Time zero is the start of the run; what ran before is cut off.

        Args:
            logits_s: What logits took. `head` lasts as long, on an emulated device by its cost.

        Raises:
            ExecutionError: A task failed; see `Executor.run`.
        """
        executor = self._executor
        if executor.submits:
            self._wait_for_all()
        for index in executor.places.get(Op.HEAD, ()):
            head = self.spans[index]
            end_s = max(head.end_s, head.start_s + logits_s)
            self.spans[index] = Span(head.task, head.start_s, end_s)
        links = dict(self._before)
        if links:
            crossed = executor.traffic()
            links = {lane: crossed[lane].plus(use, -1) for lane, use in links.items()}
        return Timeline(executor.schedule.name, tuple(self.spans), links)

    def _wait_for_all(self) -> None:
        # One wait per lane: a wake-up per task would take the interpreter from the lanes.
        for index in self._executor.last_of_lane:
            _outcome(self.marks[index])
        self._check()
        origin_s, tasks = self.origin_s, self._executor.schedule.tasks
        self.spans = [
            Span(task, max(0.0, mark.start_s - origin_s), max(0.0, mark.end_s - origin_s))
            for task, mark in zip(tasks, self.marks, strict=True)
        ]

    def cancel(self) -> None:
        """Start no other task, and wait for those that run."""
        self._token.cancel()
        for mark in self.marks:
            _outcome(mark)

    def submit_all(self, started: Mapping[int, Mark], until: Op | None) -> None:
        """Give all tasks to their lanes, and wait for those of an operation."""
        marks, waits, calls = self.marks, self._executor.waits, self._calls
        try:
            for index, submit in enumerate(self._executor.submits):
                mark = started.get(index)
                if mark is None:
                    after = [marks[wait] for wait in waits[index]]
                    mark = submit(calls[index][0], partial(self._perform, index), after)
                marks.append(mark)
            if until is None:
                return
            outcomes = [_outcome(marks[index]) for index in self._executor.places[until]]
            if outcomes.count(None) < len(outcomes):
                self.finish()  # raises what failed
        except BaseException:  # interrupted, or a closed lane: leave nothing running behind
            self.cancel()
            raise

    def _perform(self, index: int) -> Copies | None:
        """In the thread of a lane."""
        task, call = self._calls[index]
        if self._token.is_cancelled:
            raise Cancelled("the run was cancelled")
        try:
            copies = call(task, self._state)
            if isinstance(copies, Copies):
                copies.token = self._token
                if self._on_dead is not None:
                    copies.on_done = partial(self._copied, index, copies)
            elif self._on_dead is not None:
                self._count(index, self._on_dead)
        except BaseException as error:
            self._fail(task, error)
            raise
        return copies

    def _copied(self, index: int, copies: Copies) -> None:
        """In the thread of a mover, before the task counts as done."""
        assert self._on_dead is not None
        try:
            if copies.record is not None:
                copies.record()
            self._count(index, self._on_dead)
        except BaseException as error:
            self._fail(self._calls[index][0], error)
            raise

    def _count(self, index: int, on_dead: OnDead[State]) -> None:
        """Say that a task has read; tell of the buffers that no other task will read."""
        lifetimes, dead = self._executor.lifetimes, []
        assert lifetimes is not None
        with self._lock:
            for version in lifetimes.versions_of_task[index]:
                self._num_readers[version] -= 1
                if self._num_readers[version] == 0:
                    dead.append(lifetimes.buffers[version])
        for buffer in dead:
            on_dead(buffer, self._state)

    def _fail(self, task: Task, error: BaseException) -> None:
        with self._lock:
            self._token.cancel()
            self._failure = self._failure or (task, error)

    def _check(self) -> None:
        schedule = self._executor.schedule
        failures: list[tuple[Task, BaseException]] = []
        for task, mark in zip(schedule.tasks, self.marks, strict=True):
            error = _outcome(mark)  # a device may report an error only to those who wait
            if error is not None:
                failures.append((task, error))
        if failures:
            # What a failure cancels says nothing; its cause does.
            task, error = next((f for f in failures if f[1].__cause__ is not None), failures[0])
            if self._failure is not None:
                task, error = self._failure
            elif isinstance(error, Cancelled) and error.__cause__ is not None:
                error = error.__cause__
            raise _failed(schedule, task, error) from error


def _lane_waits(schedule: Schedule, keys: Sequence[Resource | Op]) -> list[tuple[int, ...]]:
    reduced = []
    for key, waits in zip(keys, schedule.dependencies, strict=True):
        latest: dict[Resource | Op, int] = {}
        for wait in sorted(waits):
            latest[keys[wait]] = wait
        latest.pop(key, None)
        reduced.append(tuple(latest.values()))
    return reduced


def _outcome(mark: Mark) -> BaseException | None:
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
