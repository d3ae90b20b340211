"""The serial executor: order, measured spans, errors."""

import pytest

from raymoe.errors import ExecutionError, ScheduleError
from raymoe.runtime import executor
from raymoe.runtime.executor import Bindings, Executor
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.graph import Op, Task

SCHEDULE = build_in_place(3)


def recording() -> Bindings[list[str]]:
    def record(task: Task, state: list[str]) -> None:
        state.append(str(task))

    return dict.fromkeys(Op, record)


def test_tasks_run_once_in_issue_order() -> None:
    calls: list[str] = []
    Executor(SCHEDULE, recording()).run(calls)
    assert calls == [str(task) for task in SCHEDULE.tasks]


def test_spans_follow_each_other() -> None:
    timeline = Executor(SCHEDULE, recording()).run([])
    assert [span.task for span in timeline.spans] == list(SCHEDULE.tasks)
    for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert before.start_s <= before.end_s == after.start_s


def test_an_operation_without_a_binding_is_refused_before_the_run() -> None:
    bindings = {op: call for op, call in recording().items() if op is not Op.HEAD}
    with pytest.raises(ScheduleError, match="no binding for"):
        Executor(SCHEDULE, bindings)


def test_a_failed_task_is_named_and_its_error_kept() -> None:
    def fail(task: Task, state: list[str]) -> None:
        raise ZeroDivisionError("by zero")

    bindings = {**recording(), Op.POST: fail}
    with pytest.raises(ExecutionError, match=r"post\[0,0\].*ZeroDivisionError: by zero") as caught:
        Executor(SCHEDULE, bindings).run([])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_head_lasts_as_long_as_the_logits(monkeypatch) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr(executor.time, "perf_counter", lambda: float(next(now_s)))
    run = Executor(build_in_place(1), recording()).start([])
    head = run.finish(logits_s=5.0).spans[-1]
    assert head.task.op is Op.HEAD
    assert (head.start_s, head.end_s) == (len(run.spans) - 1, len(run.spans) + 4)
