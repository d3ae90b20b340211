"""What the machine can do right now, to set results beside."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.device.threads import peak_flop_per_s, read_bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """bfloat16 operations from registers and bytes read from memory, per second."""

    flop_per_s: float
    bytes_per_s: float


def measure_limits(num_threads: int, seconds: float = 2.0) -> Limits:
    """Arithmetic for a quarter of the time, memory for the rest."""
    return Limits(
        flop_per_s=peak_flop_per_s(num_threads, "bfloat16", seconds / 4),
        bytes_per_s=read_bandwidth_bytes_per_s(num_threads, 3 * seconds / 4),
    )


def mean_limits(limits: Sequence[Limits]) -> Limits:
    """Mean of each figure."""
    return Limits(
        flop_per_s=statistics.fmean(each.flop_per_s for each in limits),
        bytes_per_s=statistics.fmean(each.bytes_per_s for each in limits),
    )
