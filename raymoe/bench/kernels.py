"""How near the kernels come to what the machine can do: bytes at its read rate, FLOPs at its peak.

Machines change from second to second (other tenants, where the hypervisor puts the cores), so the
limits are measured before and after each repetition, and each repetition is held against its own.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raymoe.measure.limits import Limits, mean_limits, measure_limits
from raymoe.measure.timing import KernelJob, seconds_per_call

LIMITS_SECONDS = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """Medians over the repetitions.

    Attributes:
        share_of_limit: Time of a call if it read its bytes at the measured bandwidth, or did its
            operations at the measured bfloat16 peak if that takes longer, over the time it took.
    """

    kernel: str
    case: str
    bytes_per_s: float
    flop_per_s: float
    is_memory_bound: bool
    share_of_limit: float
    limits: Limits


def measure_kernels(
    makers: Sequence[Callable[[], KernelJob]], *, num_threads: int, repetitions: int
) -> Iterator[KernelRate]:
    """Yield the rate of each kernel; its data is made just before and gone after."""
    for make in makers:
        yield _measure(make(), num_threads, repetitions)


def _measure(job: KernelJob, num_threads: int, repetitions: int) -> KernelRate:
    seconds_per_call(job)  # first touch, clocks
    runs = []
    before = measure_limits(num_threads, LIMITS_SECONDS)
    for _ in range(repetitions):
        seconds = seconds_per_call(job)
        after = measure_limits(num_threads, LIMITS_SECONDS)
        runs.append((seconds, mean_limits([before, after])))
        before = after
    median_s = statistics.median(seconds for seconds, _ in runs)
    limits = mean_limits([limits for _, limits in runs])
    return KernelRate(
        kernel=job.kernel,
        case=job.case,
        bytes_per_s=job.bytes_per_call / median_s,
        flop_per_s=job.flop_per_call / median_s,
        is_memory_bound=_read_s(job, limits) >= _arithmetic_s(job, limits),
        share_of_limit=statistics.median(
            max(_read_s(job, limits), _arithmetic_s(job, limits)) / seconds
            for seconds, limits in runs
        ),
        limits=limits,
    )


def _read_s(job: KernelJob, limits: Limits) -> float:
    return job.bytes_per_call / limits.bytes_per_s


def _arithmetic_s(job: KernelJob, limits: Limits) -> float:
    return job.flop_per_call / limits.flop_per_s
