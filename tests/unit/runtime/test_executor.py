"""The serial executor: order, measured spans, errors."""

import pytest

from raymoe.errors import ExecutionError, ScheduleError
from raymoe.runtime import executor
from raymoe.runtime.executor import Bindings, SerialExecutor
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.graph import Op, Task

SCHEDULE = build_in_place(3)


def recording() -> Bindings[list[str]]:
    def record(task: Task, state: list[str]) -> None:
        state.append(str(task))

    return dict.fromkeys(Op, record)


def test_tasks_run_once_in_issue_order() -> None:
    calls: list[str] = []
    SerialExecutor(SCHEDULE, recording()).run(calls)
    assert calls == [str(task) for task in SCHEDULE.tasks]


def test_spans_follow_each_other() -> None:
    timeline = SerialExecutor(SCHEDULE, recording()).run([])
    assert [span.task for span in timeline.spans] == list(SCHEDULE.tasks)
    for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert before.start_s <= before.end_s == after.start_s


def test_an_operation_without_a_binding_is_refused_before_the_run() -> None:
    bindings = {op: call for op, call in recording().items() if op is not Op.HEAD}
    with pytest.raises(ScheduleError, match="no binding for"):
        SerialExecutor(SCHEDULE, bindings)


def test_a_failed_task_is_named_and_its_error_kept() -> None:
    def fail(task: Task, state: list[str]) -> None:
        raise ZeroDivisionError("by zero")

    bindings = {**recording(), Op.POST: fail}
    with pytest.raises(ExecutionError, match=r"post\[0,0\].*ZeroDivisionError: by zero") as caught:
        SerialExecutor(SCHEDULE, bindings).run([])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_clock_stands_still_while_the_caller_uses_an_output(monkeypatch) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr(executor.time, "perf_counter", lambda: float(next(now_s)))
    bindings = {**recording(), Op.HEAD: lambda _task, _state: iter("ab")}
    run = SerialExecutor(build_in_place(1), bindings).stream([])
    taken = []
    while True:
        try:
            taken.append(next(run))
        except StopIteration as end:
            timeline = end.value
            break
        for _ in range(100):
            next(now_s)
    assert taken == ["a", "b"]
    # Two readings around each output and one after each task, a second apart.
    assert timeline.makespan_s == len(timeline.spans) + 2
