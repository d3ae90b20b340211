"""Time jobs in turns, so that a disturbance affects all of them.

Machine speed changes from second to second (other tenants, placement of virtual cores). A job timed
in one go measures that second; the median over turns does not.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raymoe.device.threads import (
    peak_flop_per_s,
    read_bandwidth_bytes_per_s,
    update_bandwidth_bytes_per_s,
)

NUM_TURNS = 7  # turns that the time allows, unless single calls are long

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelJob:
    """Calls of one kernel, each on separate data so that caches are cold."""

    kernel: str
    case: str
    calls: Sequence[Callable[[], object]]
    bytes_per_call: float  # bytes that a call must read at least once
    flop_per_call: float  # two per multiply-add
    updates: bool = False  # memory is read and written back; bytes are those of both

    @property
    def intensity_flop_per_byte(self) -> float:
        return self.flop_per_call / self.bytes_per_call


def seconds_per_call(job: KernelJob, clock: Clock = time.perf_counter) -> float:
    """Mean over all calls of a job, each made once."""
    begin_s = clock()
    for call in job.calls:
        call()
    return (clock() - begin_s) / len(job.calls)


def measure_in_turns(
    jobs: Sequence[KernelJob], seconds: float, clock: Clock = time.perf_counter
) -> list[float]:
    """Seconds per call of each job: the median over its turns, in `seconds` for all jobs.

    Every job gets at least one turn, whatever its length; turns repeat until the time is up. The
    first call of a job is not counted unless it takes a whole turn.
    """
    deadline_s = clock() + seconds
    turn_s = seconds / max(1, NUM_TURNS * len(jobs))
    calls = [itertools.cycle(job.calls) for job in jobs]
    samples = [_first_turn(each, turn_s, clock) for each in calls]
    while clock() < deadline_s:
        for each, taken in zip(calls, samples, strict=True):
            if clock() >= deadline_s:
                break
            taken.append(_turn(each, turn_s, clock))
    return [statistics.median(taken) for taken in samples]


def _first_turn(calls: Iterator[Callable[[], object]], turn_s: float, clock: Clock) -> list[float]:
    first_s = _turn(calls, 0.0, clock)
    return [first_s if first_s >= turn_s else _turn(calls, turn_s, clock)]


def _turn(calls: Iterator[Callable[[], object]], turn_s: float, clock: Clock) -> float:
    begin_s = clock()
    for count, call in enumerate(calls, 1):
        call()
        elapsed_s = clock() - begin_s
        if elapsed_s >= turn_s:
            return elapsed_s / count
    raise AssertionError("calls never end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """bfloat16 operations from registers and bytes of memory (read, or updated), per second."""

    flop_per_s: float
    bytes_per_s: float


def measure_limits(num_threads: int, seconds: float = 2.0, *, updates: bool = False) -> Limits:
    """Measure arithmetic for a quarter of the time, memory (`KernelJob.updates`) for the rest."""
    measure_memory = update_bandwidth_bytes_per_s if updates else read_bandwidth_bytes_per_s
    return Limits(
        flop_per_s=peak_flop_per_s(num_threads, "bfloat16", seconds / 4),
        bytes_per_s=measure_memory(num_threads, 3 * seconds / 4),
    )


def mean_limits(limits: Sequence[Limits]) -> Limits:
    return Limits(
        flop_per_s=statistics.fmean(each.flop_per_s for each in limits),
        bytes_per_s=statistics.fmean(each.bytes_per_s for each in limits),
    )
