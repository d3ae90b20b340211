"""Calls that come one after another: said once, with the argument that changes it."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from raymoe.data.serial_calls import CallerThread, SerialCalls


def engine(slots=8):
    return SimpleNamespace(expected_calls=None, policy=SimpleNamespace(max_num_seqs=slots))


def run(calls, numbers, target):
    for num_rows in numbers:
        with calls.count(num_rows, target):
            pass


def test_few_rows_in_calls_one_after_another_are_said_once(caplog):
    calls, target = SerialCalls(None), engine()
    run(calls, [2, 2], target)
    assert not caplog.records
    run(calls, [2, 2, 2], target)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("rows come 2 at a time, one call after another, while this engine")
    assert "batch_size=32" in message
    assert "max_concurrent_calls_per_actor=16" in message
    assert "raymoe.map_batches_kwargs(model)" in message
    assert target.expected_calls == 1


@pytest.mark.parametrize(
    ("expected", "numbers"), [(None, [8, 8, 8]), (4, [1, 1, 1]), (None, [1, 1])]
)
def test_nothing_is_said_of_full_batches_few_calls_and_where_more_come(caplog, expected, numbers):
    run(SerialCalls(expected), numbers, engine())
    assert not caplog.records


def test_nothing_is_said_once_calls_have_come_together(caplog):
    calls, target = SerialCalls(None), engine()
    with calls.count(1, target), calls.count(1, target):
        pass
    run(calls, [1] * 5, target)
    assert not caplog.records
    assert target.expected_calls is None


def test_a_caller_s_thread_runs_what_is_submitted_and_keeps_its_error():
    future = CallerThread().submit(divmod, 7, 2)
    assert future.result() == (3, 1)
    failed = CallerThread().submit(divmod, 7, 0)
    with contextlib.suppress(ZeroDivisionError):
        failed.result()
        raise AssertionError("the error is lost")
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert not isinstance(CallerThread(), ThreadPoolExecutor)
