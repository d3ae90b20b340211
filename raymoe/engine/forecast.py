"""How long will sequences become, and how full does the KV cache get?

Admission asks for the highest future use of the cache if nothing more were admitted: at the time
a sequence ends, those that run longer have grown by as much as it did, and shorter ones are gone.
Admitting while that peak fits keeps the cache full at a steady rate and rarely preempts
(MoE-Lens, section 6.2, with the lengths observed instead of assumed).
"""

import numpy as np

from raymoe.engine.jit import compiled
from raymoe.engine.sequence import Bools, Int32s, Int64s

HISTORY = 1024  # finished rows that are remembered
MIN_HISTORY = 16  # with fewer, every row counts as long as it may become
PREEMPTION_STEP = 0.25  # how much of the way to the worst case one preemption moves the estimate
FINISH_DECAY = 0.98


class LengthForecast:
    """Expected number of tokens that a sequence still generates.

    The mean of what finished rows generated beyond the same point, moved towards the limit of
    the row by `pessimism`, which grows with each preemption and fades with each finished row.
    """

    def __init__(self) -> None:
        self._lengths = np.zeros(HISTORY, np.int64)
        self._num_finished = 0
        self._is_dirty = True
        self._sorted, self._suffix_sums = self._lengths[:0], np.zeros(1, np.int64)
        self.pessimism = 0.0

    def record_finished(self, num_generated: int) -> None:
        """Learn from a row that ended by itself or by its limit."""
        self._lengths[self._num_finished % HISTORY] = num_generated
        self._num_finished += 1
        self._is_dirty = True
        self.pessimism *= FINISH_DECAY

    def record_preemption(self) -> None:
        """Learn that the estimate was too low."""
        self.pessimism += (1.0 - self.pessimism) * PREEMPTION_STEP

    def remaining(
        self, generated: Int32s | Int64s, limit: Int32s | Int64s, is_fixed: Bools
    ) -> Int64s:
        """Expected tokens still to come of sequences.

        Args:
            generated: How many each has.
            limit: How many it may have.
            is_fixed: Whether nothing else ends it.
        """
        worst = (limit - generated).astype(np.int64)
        if self._num_finished < MIN_HISTORY:
            return worst
        if self._is_dirty:
            self._summarise()
        index = np.searchsorted(self._sorted, generated, side="right")
        num_longer = len(self._sorted) - index
        mean = self._suffix_sums[index] / np.maximum(num_longer, 1) - generated
        is_known = (num_longer > 0) & ~is_fixed
        expected = np.where(is_known, np.minimum(np.ceil(mean), worst), worst)
        estimate: Int64s = np.ceil(expected + self.pessimism * (worst - expected)).astype(np.int64)
        return estimate

    def _summarise(self) -> None:
        self._sorted = np.sort(self._lengths[: min(self._num_finished, HISTORY)])
        self._suffix_sums = np.zeros(len(self._sorted) + 1, np.int64)
        self._suffix_sums[:-1] = np.cumsum(self._sorted[::-1])[::-1]
        self._is_dirty = False


def count_admissible(
    live: tuple[Int64s, Int64s], waiting: tuple[Int64s, Int64s], capacity_tokens: int
) -> int:
    """How many of the waiting sequences, in order, join before the peak exceeds the capacity.

    Args:
        live: (tokens, remaining) of the sequences in the cache: what each has now, and how many
            it will still append, one in each pass.
        waiting: The same of those that wait.
        capacity_tokens: Of the cache.
    """
    order = np.argsort(-live[1], kind="stable")
    return _count_admissible((live[0][order], live[1][order]), waiting, capacity_tokens)


@compiled
def _count_admissible(
    live: tuple[Int64s, Int64s], waiting: tuple[Int64s, Int64s], capacity_tokens: int
) -> int:
    num_live, num_waiting = len(live[0]), len(waiting[0])
    tokens, remaining = (
        np.zeros(num_live + num_waiting, np.int64),
        np.zeros(num_live + num_waiting, np.int64),
    )
    tokens[:num_live], remaining[:num_live] = live[0], live[1]
    for index in range(num_waiting):
        size = num_live + index
        place = size  # insertion sort by remaining, longest first
        while place > 0 and remaining[place - 1] < waiting[1][index]:
            tokens[place], remaining[place] = tokens[place - 1], remaining[place - 1]
            place -= 1
        tokens[place], remaining[place] = waiting[0][index], waiting[1][index]
        total = 0
        for rank in range(size + 1):
            total += tokens[rank]
            if total + remaining[rank] * (rank + 1) > capacity_tokens:
                return index
    return num_waiting
