"""The executor with lanes: the serial result, the first error, interruption, dead buffers."""

import itertools
import signal
from collections.abc import Iterator, Mapping
from threading import Barrier, Event, Timer, current_thread, main_thread

import pytest

from raymoe.device.lane import Mark, ThreadLane
from raymoe.errors import ConfigError, ExecutionError, ScheduleError
from raymoe.runtime.executor import Bindings, Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from tests.unit.runtime.random_schedules import (
    OP_OF,
    POISON,
    Memory,
    Pauses,
    bindings,
    new_memory,
    random_schedule,
    serial_result,
)
from tests.unit.runtime.scripted_lanes import Script

Lanes = Mapping[Resource, ThreadLane]
X, Y = Buffer("x"), Buffer("y")


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = {resource: ThreadLane(resource) for resource in Resource}
    yield lanes
    for lane in lanes.values():
        lane.close()


def task(
    resource: Resource,
    layer: int,
    reads: tuple[Buffer, ...] = (),
    writes: tuple[Buffer, ...] = (),
) -> Task:
    return Task(
        op=OP_OF[resource], layer=layer, part=0, resource=resource, reads=reads, writes=writes
    )


def schedule_of(*tasks: Task) -> Schedule:
    return Schedule("hand-made", tasks, frozenset({X, Y}))


# Two independent tasks on each of two lanes.
FOUR = schedule_of(
    task(Resource.CPU, 0), task(Resource.HTOD, 0), task(Resource.CPU, 1), task(Resource.HTOD, 1)
)


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_threads_give_the_serial_result_run_after_run(seed: int, lanes: Lanes) -> None:
    for number in range(seed, seed + 10):
        schedule = random_schedule(number)
        executor = Executor(schedule, bindings(Pauses(number)), lanes)
        for _ in range(2):
            memory = new_memory(schedule)
            executor.run(memory)
            assert memory == serial_result(schedule)


def test_spans_respect_dependencies_and_lanes(lanes: Lanes) -> None:
    schedule = random_schedule(1)
    timeline = Executor(schedule, bindings(Pauses(1)), lanes).run(new_memory(schedule))
    assert [span.task for span in timeline.spans] == list(schedule.tasks)
    for span, waits in zip(timeline.spans, schedule.dependencies, strict=True):
        assert 0 <= span.start_s <= span.end_s
        assert all(timeline.spans[wait].end_s <= span.start_s for wait in waits)
    for resource in schedule.resources:
        spans = timeline.of(resource)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_a_schedule_without_tasks_gives_an_empty_timeline(lanes: Lanes) -> None:
    assert Executor(schedule_of(), bindings(), lanes).run(Memory({})).spans == ()


def test_a_failed_task_is_named_with_its_lane_and_the_others_do_not_start(lanes: Lanes) -> None:
    both_run, has_failed, calls = Barrier(2), Event(), []

    def run(task: Task, _state: None) -> None:
        calls.append(str(task))
        both_run.wait(10)
        if task.op is Op.ATTN:
            has_failed.set()
            raise ZeroDivisionError("by zero")
        assert has_failed.wait(10)
        lanes[Resource.CPU].submit(task, lambda: None, ()).wait()  # the failure is known by then

    executor = Executor(FOUR, dict.fromkeys(Op, run), lanes)
    with pytest.raises(ExecutionError, match=r"attn\[0,0\] on lane cpu .*by zero") as caught:
        executor.run(None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert sorted(calls) == ["attn[0,0]", "w[0,0]"]


def test_the_first_of_two_errors_is_raised(lanes: Lanes) -> None:
    both_run, has_failed = Barrier(2), Event()

    def run(task: Task, _state: None) -> None:
        both_run.wait(10)
        if task.op is Op.W:
            has_failed.set()
            raise KeyError("first")
        assert has_failed.wait(10)
        lanes[Resource.HTOD].submit(task, lambda: None, ()).wait()
        raise ValueError("second")

    with pytest.raises(ExecutionError, match=r"w\[0,0\] on lane htod .*first"):
        Executor(FOUR, dict.fromkeys(Op, run), lanes).run(None)


def test_tasks_that_wait_for_a_failed_one_are_not_run(lanes: Lanes) -> None:
    calls = []

    def run(task: Task, _state: None) -> None:
        calls.append(str(task))
        if task.op is Op.W:
            raise ValueError("broken")

    schedule = schedule_of(
        task(Resource.HTOD, 0, writes=(X,)),
        task(Resource.GPU, 0, reads=(X,), writes=(Y,)),
        task(Resource.DTOH, 0, reads=(Y,)),
    )
    with pytest.raises(ExecutionError, match=r"w\[0,0\] on lane htod"):
        Executor(schedule, dict.fromkeys(Op, run), lanes).run(None)
    assert calls == ["w[0,0]"]


def test_lanes_serve_the_next_run_after_a_failure(lanes: Lanes) -> None:
    def fail(_task: Task, _state: object) -> None:
        raise ValueError("broken")

    schedule = random_schedule(2)
    with pytest.raises(ExecutionError):
        Executor(schedule, dict.fromkeys(Op, fail), lanes).run(None)
    memory = new_memory(schedule)
    Executor(schedule, bindings(), lanes).run(memory)
    assert memory == serial_result(schedule)


class WatchedMark:
    """Says when the main thread waits for it again after an interruption."""

    def __init__(self, mark: Mark, is_interrupted: Event, is_waiting_again: Event) -> None:
        self._mark = mark
        self._is_interrupted, self._is_waiting_again = is_interrupted, is_waiting_again

    def wait(self) -> None:
        if self._is_interrupted.is_set() and current_thread() is main_thread():
            self._is_waiting_again.set()
        self._mark.wait()


def test_an_interrupt_waits_for_running_tasks_and_starts_no_other(lanes: Lanes) -> None:
    calls, ended = [], []
    both_run, is_interrupted, is_waiting_again = Barrier(2), Event(), Event()

    class WatchedLane(ThreadLane):
        def submit(self, task, call, after):  # type: ignore[no-untyped-def]
            mark = super().submit(task, call, after)
            return WatchedMark(mark, is_interrupted, is_waiting_again)

    def interrupt(*_: object) -> None:
        if not is_interrupted.is_set():
            is_interrupted.set()
            raise KeyboardInterrupt

    def run(task: Task, _state: None) -> None:
        calls.append(str(task))
        both_run.wait(10)
        if task.op is Op.ATTN:
            # A signal just before a thread blocks is noticed when the thread wakes: send another.
            while not is_interrupted.wait(0.1):
                signal.pthread_kill(main_thread().ident, signal.SIGINT)
        assert is_waiting_again.wait(10)
        ended.append(str(task))

    watched = {resource: WatchedLane(resource) for resource in FOUR.resources}
    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Executor(FOUR, dict.fromkeys(Op, run), watched).run(None)
        assert sorted(calls) == sorted(ended) == ["attn[0,0]", "w[0,0]"]
    finally:
        signal.signal(signal.SIGINT, usual)
        for lane in watched.values():
            lane.close()


def test_an_operation_without_a_binding_is_refused(lanes: Lanes) -> None:
    with pytest.raises(ScheduleError, match="no binding for"):
        Executor(FOUR, {Op.W: lambda _task, _state: None}, lanes)


def test_a_resource_without_a_lane_is_refused(lanes: Lanes) -> None:
    with pytest.raises(ScheduleError, match=r"needs lanes for.*htod"):
        Executor(FOUR, bindings(), {Resource.CPU: lanes[Resource.CPU]})


def test_a_closed_lane_ends_the_run_with_an_error(lanes: Lanes) -> None:
    lanes[Resource.HTOD].close()
    with pytest.raises(ExecutionError, match="raymoe-lane-htod is closed"):
        Executor(FOUR, bindings(), lanes).run(Memory({}))


def test_a_task_is_given_at_most_one_mark_of_each_other_lane() -> None:
    schedule = random_schedule(3, num_tasks=60)
    num_marks = []

    class Counting(Script):
        def submit(self, resource, call, after):  # type: ignore[no-untyped-def]
            num_marks.append(len(after))
            return super().submit(resource, call, after)

    Executor(schedule, bindings(), Counting(range(60)).lanes).run(new_memory(schedule))
    assert max(num_marks) <= len(Resource) - 1
    assert max(map(len, schedule.dependencies)) > len(Resource) - 1


def record_dead(schedule: Schedule, lanes: Lanes) -> list[str]:
    events: list[str] = []
    run: Bindings[None] = dict.fromkeys(Op, lambda task, _state: events.append(str(task)))
    Executor(
        schedule, run, lanes, on_dead=lambda buffer, _state: events.append(f"dead {buffer}")
    ).run(None)
    return events


def test_a_buffer_is_dead_after_its_last_reader_and_before_the_next_writer(lanes: Lanes) -> None:
    schedule = schedule_of(
        task(Resource.CPU, 0, reads=(X,)),
        task(Resource.CPU, 1, reads=(X,)),
        task(Resource.CPU, 2, writes=(X,)),
        task(Resource.CPU, 3, reads=(X,)),
    )
    assert record_dead(schedule, lanes) == [
        "attn[0,0]", "attn[1,0]", "dead x", "attn[2,0]", "attn[3,0]", "dead x",
    ]  # fmt: skip


def test_a_buffer_that_nobody_reads_or_that_is_updated_in_place_does_not_die(lanes: Lanes) -> None:
    schedule = schedule_of(
        task(Resource.CPU, 0, reads=(X,)),
        task(Resource.CPU, 1, reads=(X,), writes=(X, Y)),
        task(Resource.CPU, 2, writes=(Y,)),
    )
    assert record_dead(schedule, lanes) == ["attn[0,0]", "attn[1,0]", "attn[2,0]"]


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_dead_buffers_may_be_overwritten_at_once(seed: int, lanes: Lanes) -> None:
    dead: list[Buffer] = []

    def poison(buffer: Buffer, memory: Memory) -> None:
        dead.append(buffer)
        memory.buffers[buffer] = POISON

    for number in range(seed, seed + 10):
        schedule = random_schedule(number)
        memory = new_memory(schedule)
        executor = Executor(schedule, bindings(Pauses(number)), lanes, on_dead=poison)
        executor.run(memory)
        assert memory.results == serial_result(schedule).results
    assert len(dead) > 10


def test_dead_buffers_need_lanes_that_know_when_their_work_is_done(lanes: Lanes) -> None:
    class Ahead(ThreadLane):
        is_synchronous = False

    ahead = Ahead(Resource.HTOD)
    try:
        with pytest.raises(ConfigError, match="on_dead needs lanes"):
            Executor(FOUR, bindings(), {**lanes, Resource.HTOD: ahead}, on_dead=lambda *_: None)
    finally:
        ahead.close()


def head_after(*before: Task) -> Schedule:
    head = Task(op=Op.HEAD, layer=-1, part=0, resource=Resource.CPU, reads=(X,), writes=())
    return schedule_of(*before, head, task(Resource.HTOD, 7))


def test_a_run_may_be_used_when_its_head_is_done_and_others_still_run(lanes: Lanes) -> None:
    may_end, ended = Event(), []

    def run(task: Task, _state: None) -> None:
        assert task.layer != 7 or may_end.wait(10)
        ended.append(task.op)

    schedule = head_after(task(Resource.HTOD, 0, writes=(X,)))
    started = Executor(schedule, dict.fromkeys(Op, run), lanes).start(None, until=Op.HEAD)
    assert ended == [Op.W, Op.HEAD]
    may_end.set()
    timeline = started.finish(logits_s=9.0)
    assert [span.task for span in timeline.spans] == list(schedule.tasks)
    assert timeline.spans[1].duration_s == pytest.approx(9.0)
    assert timeline.spans[2].duration_s < 9.0


@pytest.mark.parametrize("failing", [Op.W, Op.HEAD])
def test_a_run_that_fails_before_or_in_its_head_ends(failing: Op, lanes: Lanes) -> None:
    def run(task: Task, _state: None) -> None:
        if task.op is failing:
            raise ZeroDivisionError("by zero")

    schedule = head_after(task(Resource.HTOD, 0, writes=(X,)))
    executor = Executor(schedule, dict.fromkeys(Op, run), lanes)
    with pytest.raises(ExecutionError, match="by zero"):
        executor.start(None, until=Op.HEAD)
    with pytest.raises(ExecutionError, match="by zero"):
        executor.run(None)


def test_a_cancelled_run_leaves_nothing_running(lanes: Lanes) -> None:
    is_running, may_end, calls = Event(), Event(), []

    def run(task: Task, _state: None) -> None:
        calls.append(str(task))
        is_running.set()
        assert may_end.wait(10)

    executor = Executor(FOUR, dict.fromkeys(Op, run), {**lanes, Resource.HTOD: lanes[Resource.CPU]})
    started = executor.start(None)
    assert is_running.wait(10)
    ending = Timer(0.05, may_end.set)
    ending.start()
    started.cancel()
    assert may_end.is_set()
    assert calls == ["attn[0,0]"]
    ending.join()
