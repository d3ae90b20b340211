"""Executors run the tasks of a schedule, give what its last operation computes, and record when."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

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


class ReaderCounts:
    """Counts, during one run, the readers that each version still waits for. Thread-safe."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._num_left = list(lifetimes.num_readers)
        self._lock = threading.Lock()

    def finish(self, index: int) -> tuple[Buffer, ...]:
        """Say that task `index` has read; returns the buffers that no other task will read."""
        dead = []
        with self._lock:
            for version in self._lifetimes.versions_of_task[index]:
                self._num_left[version] -= 1
                if self._num_left[version] == 0:
                    dead.append(self._lifetimes.buffers[version])
        return tuple(dead)


def record(schedule: Schedule, marks: Iterable[Mark], origin_s: float) -> Timeline:
    """Measured timeline of a run; the same type as `simulate` predicts.

    Args:
        marks: One per task, in issue order, all done.
        origin_s: Time zero of the timeline, in seconds of `time.perf_counter`; what ran before is
            cut off.
    """
    spans = [
        Span(task, max(0.0, mark.start_s - origin_s), max(0.0, mark.end_s - origin_s))
        for task, mark in zip(schedule.tasks, marks, strict=True)
    ]
    return Timeline(schedule.name, tuple(spans))


State = TypeVar("State")
NONE_STARTED: Mapping[int, Mark] = MappingProxyType({})
# What Op.HEAD returns is given to the caller of `stream`, item by item; copies return what to copy,
# the others None.
Binding = Callable[[Task, State], Iterable[Any] | Copies | None]
Bindings = Mapping[Op, Binding[State]]
OnDead = Callable[[Buffer, State], None]


def finish(run: Generator[object, None, Timeline]) -> Timeline:
    """The timeline of a run whose outputs nobody needs."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            timeline: Timeline = end.value
            return timeline


def calling(
    run: Generator[Any, None, Timeline], call: Callable[[], None]
) -> Generator[Any, None, Timeline]:
    """Give the outputs of a run, and call before each of them and at the end."""
    try:
        while True:
            try:
                output = next(run)
            except StopIteration as end:
                timeline: Timeline = end.value
                break
            call()
            yield output
    finally:
        run.close()
    call()
    return timeline


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
        """`stream` to its end."""
        return finish(self.stream(state))

    def stream(self, state: State) -> Generator[Any, None, Timeline]:
        """Run all tasks on `state` and yield the outputs; returns the measured timeline.

        The clock stands still while the caller uses an output.

        Raises:
            ExecutionError: A task failed; names it, and `__cause__` is its error.
        """
        spans: list[Span] = []
        origin_s = time.perf_counter()
        start_s = 0.0
        for task, call in self._calls:
            try:
                outputs = call(task, state)
                if task.op is Op.HEAD:
                    for output in _items(outputs):
                        given_s = time.perf_counter()
                        yield output
                        origin_s += time.perf_counter() - given_s
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
    """

    def __init__(
        self,
        schedule: Schedule,
        bindings: Bindings[State],
        lanes: Mapping[Resource | Op, Lane],
        *,
        on_dead: OnDead[State] | None = None,
        traffic: Callable[[], Mapping[Resource, LinkUse]] = dict,
    ) -> None:
        """Prepare the runs of one schedule.

        Args:
            bindings: What each operation does; called in the threads of the lanes.
            lanes: At least the lanes of the schedule's resources; an operation may have its own.
            on_dead: Called with a buffer and the state when the last reader of a version of the
                buffer has read it, before anyone can write the next version; see `Lifetimes`.
            traffic: What has crossed the link so far, for the timeline.

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
        keys = [task.lane if task.lane in lanes else task.resource for task in schedule.tasks]
        if on_dead is not None and not all(lanes[key].is_synchronous for key in set(keys)):
            raise ConfigError("on_dead needs lanes whose calls return when their work is done")
        self.schedule = schedule
        self._calls = [(task, bindings[task.op]) for task in schedule.tasks]
        self._on_dead = on_dead
        self._traffic = traffic
        self._lifetimes = find_lifetimes(schedule)
        self._steps = [
            (lanes[key].submit, task, waits)
            for key, task, waits in zip(
                keys, schedule.tasks, _lane_waits(schedule, keys), strict=True
            )
        ]
        self._last_of_lane = tuple({key: index for index, key in enumerate(keys)}.values())
        self._heads = [i for i, task in enumerate(schedule.tasks) if task.op is Op.HEAD]

    def run(self, state: State) -> Timeline:
        """`stream` to its end."""
        return finish(self.stream(state))

    def start(self, state: State) -> list[Mark]:
        """Submit all tasks on `state` and wait for none; returns their marks in issue order."""
        run = _Run(self._calls, state, self._lifetimes, self._on_dead)
        marks: list[Mark] = []
        self._submit(run, marks, NONE_STARTED)
        return marks

    def _submit(self, run: "_Run[State]", marks: list[Mark], started: Mapping[int, Mark]) -> None:
        for index, (submit, task, waits) in enumerate(self._steps):
            mark = started.get(index)
            if mark is None:
                after = [marks[wait] for wait in waits]
                mark = submit(task, partial(run.perform, index), after)
            marks.append(mark)

    def stream(
        self, state: State, started: Mapping[int, Mark] = NONE_STARTED
    ) -> Generator[Any, None, Timeline]:
        """Run all tasks on `state` and yield the outputs; returns the measured timeline.

        Ends, or raises, when no task runs any more.

        Args:
            started: Marks of tasks that were started before, by their place in issue order. Nothing
                that they wait for is in this schedule, and they are the first of their lane.

        Raises:
            ExecutionError: A task failed; names it and its lane, and `__cause__` is its error.
                Tasks that had not started were not run.
        """
        run = _Run(self._calls, state, self._lifetimes, self._on_dead)
        marks: list[Mark] = []
        before = self._traffic()
        origin_s = time.perf_counter()
        try:
            self._submit(run, marks, started)
            for index in self._heads:
                waits = self._steps[index][2]
                # A lane runs no task of which one that it waits for has failed.
                if all(_outcome(marks[wait]) is None for wait in waits):
                    yield from run.outputs.take()
            # One wait per lane: a wake-up per task would take the interpreter from the lanes.
            for index in self._last_of_lane:
                _outcome(marks[index])
        except BaseException:  # interrupted, or a closed lane: leave nothing running behind
            run.cancel()
            for mark in marks:
                _outcome(mark)
            raise
        self._check(run, marks)
        links = {
            resource: use.plus(before[resource], -1) for resource, use in self._traffic().items()
        }
        return replace(record(self.schedule, marks, origin_s), links=links)

    def _check(self, run: "_Run[State]", marks: list[Mark]) -> None:
        failures: list[tuple[Task, BaseException]] = []
        for task, mark in zip(self.schedule.tasks, marks, strict=True):
            error = _outcome(mark)  # a device may report an error only to those who wait
            if error is not None:
                failures.append((task, error))
        if failures:
            # What a failure cancels says nothing; its cause does.
            task, error = next((f for f in failures if f[1].__cause__ is not None), failures[0])
            if run.failure is not None:
                task, error = run.failure
            elif isinstance(error, Cancelled) and error.__cause__ is not None:
                error = error.__cause__
            raise _failed(self.schedule, task, error) from error


def _items(outputs: Iterable[Any] | Copies | None) -> Iterable[Any]:
    assert not isinstance(outputs, Copies)
    return outputs or ()


class _Outputs:
    """Outputs on their way from a lane to the caller, who may be slower: at most two wait."""

    MAX_WAITING = 2

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._is_closed = False

    def put(self, item: object) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self.MAX_WAITING)
            if self._is_closed:
                raise Cancelled("the run was cancelled")
            self._items.append(item)
            self._changed.notify_all()

    def end(self) -> None:
        """Say that a task gives no more."""
        with self._changed:
            self._items.append(self)
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more; whoever waits to put raises."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self) -> Generator[Any, None, None]:
        """The outputs of the next task."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                item = self._items.popleft()
                self._changed.notify_all()
            if item is self:
                return
            yield item


class _Run(Generic[State]):
    def __init__(
        self,
        calls: list[tuple[Task, Binding[State]]],
        state: State,
        lifetimes: Lifetimes,
        on_dead: OnDead[State] | None,
    ) -> None:
        self._calls = calls
        self._state = state
        self._on_dead = on_dead
        self._counts = ReaderCounts(lifetimes)
        self._lock = threading.Lock()
        self._token = CancelToken()
        self.outputs = _Outputs()
        self.failure: tuple[Task, BaseException] | None = None

    def cancel(self) -> None:
        self._token.cancel()
        self.outputs.close()

    def perform(self, index: int) -> Copies | None:
        task, call = self._calls[index]
        if task.op is not Op.HEAD:
            return self._perform(index, task, call)
        try:
            return self._perform(index, task, call)
        finally:
            self.outputs.end()

    def _perform(self, index: int, task: Task, call: Binding[State]) -> Copies | None:
        if self._token.is_cancelled:
            raise Cancelled("the run was cancelled")
        try:
            outputs = call(task, self._state)
            if isinstance(outputs, Copies):
                outputs.token = self._token
                if self._on_dead is not None:
                    outputs.on_done = partial(self._copied, index, outputs)
                return outputs
            if task.op is Op.HEAD:
                for output in _items(outputs):
                    self.outputs.put(output)
            if self._on_dead is not None:
                self._count(index, self._on_dead)
        except BaseException as error:
            self._fail(task, error)
            raise
        return None

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
        for buffer in self._counts.finish(index):
            on_dead(buffer, self._state)

    def _fail(self, task: Task, error: BaseException) -> None:
        with self._lock:
            self._token.cancel()
            self.failure = self.failure or (task, error)


def _check_bindings(schedule: Schedule, bindings: Bindings[State]) -> None:
    missing = {task.op for task in schedule.tasks} - set(bindings)
    if missing:
        raise ScheduleError(f"schedule {schedule.name!r}: no binding for {sorted(missing)}")


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
