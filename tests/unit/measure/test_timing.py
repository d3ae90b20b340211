"""Turns: who is measured when, for how long, and what comes out, on a clock of the test."""

from collections.abc import Callable

import pytest

from raymoe.measure.timing import NUM_TURNS, KernelJob, measure_in_turns


class Machine:
    """A clock that only calls move, by seconds that may depend on the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def call(self, name: str, seconds: Callable[[float], float]) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now_s += seconds(self.now_s)

        return run

    def job(self, name: str, *seconds: float) -> KernelJob:
        calls = [self.call(name, lambda _now, each=each: each) for each in seconds]
        return self.job_of(name, *calls)

    @staticmethod
    def job_of(name: str, *calls: Callable[[], None]) -> KernelJob:
        return KernelJob(kernel=name, case="", calls=calls, bytes_per_call=1.0, flop_per_call=2.0)


def test_jobs_take_turns_until_the_time_is_up() -> None:
    machine = Machine()
    jobs = [machine.job("a", 0.001), machine.job("b", 0.002)]
    assert measure_in_turns(jobs, 1.4, machine.clock) == pytest.approx([0.001, 0.002])
    assert 1.4 <= machine.now_s < 1.4 + 0.12
    changes = sum(left != right for left, right in zip(machine.log, machine.log[1:], strict=False))
    assert 2 * NUM_TURNS - 2 <= changes <= 2 * NUM_TURNS + 2


def test_a_disturbance_that_lasts_less_than_half_of_the_time_does_not_show() -> None:
    machine = Machine()

    def seconds(now: float) -> float:
        return 0.05 if 2.0 < now < 3.5 else 0.01

    jobs = [machine.job_of(name, machine.call(name, seconds)) for name in "ab"]
    assert measure_in_turns(jobs, 7.0, machine.clock) == pytest.approx([0.01, 0.01])


def test_every_call_of_a_job_has_its_turn() -> None:
    machine = Machine()
    (seconds,) = measure_in_turns([machine.job("a", 0.01, 0.03, 0.02)], 14.0, machine.clock)
    assert seconds == pytest.approx(0.02, rel=0.05)


def test_the_first_call_is_not_counted() -> None:
    machine, first = Machine(), iter([0.9])
    cold = machine.job_of("cold", machine.call("cold", lambda _now: next(first, 0.01)))
    measured = measure_in_turns([cold, machine.job("long", 100.0)], 2 * NUM_TURNS, machine.clock)
    assert measured == pytest.approx([0.01, 100.0])


def test_long_calls_are_made_once_even_if_the_time_is_up() -> None:
    machine = Machine()
    jobs = [machine.job("a", 3.0), machine.job("b", 5.0)]
    assert measure_in_turns(jobs, 1.0, machine.clock) == [3.0, 5.0]
    assert machine.log == ["a", "b"]
