"""How many cores other programs take while this one measures.

Assumes that /proc/stat counts the machine's processor time; where it cannot be read, the load
average of the last minute stands for it.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from raymoe.processes import TICKS_PER_S

CROWDED_SHARE = 0.25  # of the threads that measure, without a core of their own
IDLE_FIELDS = (3, 4)  # idle, and waiting for a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPrograms:
    """What other programs took while something was measured.

    Attributes:
        busy_cores: Cores' worth of processor time, in the mean.
        num_cores: Cores that this process may run on.
    """

    busy_cores: float
    num_cores: int

    def crowds(self, num_threads: int) -> bool:
        """Whether so many threads that measure had to wait for a core."""
        return self.num_cores - self.busy_cores < (1 - CROWDED_SHARE) * num_threads

    def __str__(self) -> str:
        return (
            f"other programs took {self.busy_cores:.1f} of the {self.num_cores} cores while this "
            "machine was measured"
        )


class CoreWatch:
    """Counts the processor time of other programs, from its creation on."""

    def __init__(self, root: Path = Path("/"), cpus: frozenset[int] | None = None) -> None:
        self._path = root / "proc/stat"
        self._cpus = frozenset(os.sched_getaffinity(0)) if cpus is None else cpus
        self.begin()

    def begin(self) -> Self:
        """Count from now on."""
        self._began_s, self._own_s, self._busy_s = self._read()
        return self

    def read(self) -> OtherPrograms:
        """Return what others took since the beginning."""
        now_s, own_s, busy_s = self._read()
        elapsed_s, count = now_s - self._began_s, len(self._cpus)
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            busy_cores = os.getloadavg()[0]
        else:
            busy_cores = (busy_s - self._busy_s - (own_s - self._own_s)) / elapsed_s
        return OtherPrograms(busy_cores=min(max(0.0, busy_cores), float(count)), num_cores=count)

    def _read(self) -> tuple[float, float, float | None]:
        return time.perf_counter(), time.process_time(), self._busy_seconds()

    def _busy_seconds(self) -> float | None:
        """Seconds that the cores of this process were busy since the machine started."""
        try:
            rows = [line.split() for line in self._path.read_text().splitlines()]
        except OSError:
            return None
        ticks = [
            sum(int(ticks) for index, ticks in enumerate(row[1:9]) if index not in IDLE_FIELDS)
            for row in rows
            if row and row[0].removeprefix("cpu").isdigit() and int(row[0][3:]) in self._cpus
        ]
        return sum(ticks) / TICKS_PER_S if ticks else None
