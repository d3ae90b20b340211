"""A lane of one thread: order, marks, errors, the end."""

import threading
from contextlib import nullcontext

import pytest
import torch

from raymoe.device.lane import Cancelled, ThreadLane
from raymoe.errors import ExecutionError
from raymoe.schedule.graph import Op, Resource, Task

TASK = Task(op=Op.ATTN, layer=0, part=0, resource=Resource.CPU)
LOAD = Task(op=Op.W, layer=0, part=0, resource=Resource.HTOD)


@pytest.fixture
def cpu():  # type: ignore[no-untyped-def]
    lane = ThreadLane(Resource.CPU)
    yield lane
    lane.close()


@pytest.fixture
def htod():  # type: ignore[no-untyped-def]
    lane = ThreadLane(Resource.HTOD)
    yield lane
    lane.close()


def test_calls_run_in_order_in_one_thread_with_a_name(cpu: ThreadLane) -> None:
    calls = []
    marks = [
        cpu.submit(TASK, lambda k=k: calls.append((k, threading.current_thread().name)), ())
        for k in range(100)
    ]
    marks[-1].wait()
    assert calls == [(k, "raymoe-lane-cpu") for k in range(100)]
    assert all(mark.is_done for mark in marks)


def test_a_task_starts_after_its_marks(cpu: ThreadLane, htod: ThreadLane) -> None:
    may_end, calls = threading.Event(), []

    def load() -> None:
        assert may_end.wait(10)
        calls.append("load")

    loaded = htod.submit(LOAD, load, ())
    used = cpu.submit(TASK, lambda: calls.append("use"), [loaded])
    assert not loaded.is_done
    assert not used.is_done
    may_end.set()
    used.wait()
    assert calls == ["load", "use"]
    assert loaded.start_s <= loaded.end_s <= used.start_s <= used.end_s


def test_many_threads_can_wait_for_one_mark(cpu: ThreadLane) -> None:
    may_end, woken = threading.Event(), []
    mark = cpu.submit(TASK, lambda: may_end.wait(10) and None, ())

    def wait() -> None:
        mark.wait()
        woken.append(mark.is_done)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 8


def test_a_failed_call_cancels_its_mark_and_those_that_wait_for_it(
    cpu: ThreadLane, htod: ThreadLane
) -> None:
    calls = []
    failed = htod.submit(LOAD, lambda: 1 // 0, ())
    waiting = cpu.submit(TASK, lambda: calls.append("waiting"), [failed])
    next_one = cpu.submit(TASK, lambda: calls.append("next"), ())
    with pytest.raises(Cancelled) as caught:
        failed.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(Cancelled):
        waiting.wait()
    next_one.wait()
    assert calls == ["next"]
    assert failed.is_done
    assert waiting.is_done
    assert (waiting.start_s, waiting.end_s) == (0.0, 0.0)


def test_close_finishes_what_was_submitted_and_ends_the_thread() -> None:
    before = threading.active_count()
    lane, calls = ThreadLane(Resource.CPU), []
    for k in range(10):
        lane.submit(TASK, lambda k=k: calls.append(k), ())
    lane.close()
    lane.close()
    assert calls == list(range(10))
    assert threading.active_count() == before
    with pytest.raises(ExecutionError, match="raymoe-lane-cpu is closed"):
        lane.submit(TASK, lambda: None, ())


def test_the_thread_runs_in_its_context() -> None:
    lane, modes = ThreadLane(Resource.CPU, context=torch.inference_mode), []
    lane.submit(TASK, lambda: modes.append(torch.is_inference_mode_enabled()), ())
    lane.close()
    assert modes == [True]
    assert not torch.is_inference_mode_enabled()


def test_a_context_that_cannot_be_entered_is_an_error_of_the_constructor() -> None:
    def broken() -> nullcontext[None]:
        raise OSError("no such device")

    before = threading.active_count()
    with pytest.raises(OSError, match="no such device"):
        ThreadLane(Resource.CPU, context=broken)
    assert threading.active_count() == before


def test_how_a_call_is_performed_counts_as_the_task() -> None:
    performed = []

    def perform(task: Task, call) -> None:  # type: ignore[no-untyped-def]
        performed.append(str(task))
        call()

    lane = ThreadLane(Resource.CPU, perform=perform)
    lane.submit(TASK, lambda: performed.append("call"), ())
    lane.close()
    assert performed == ["attn[0,0]", "call"]
