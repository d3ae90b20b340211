"""CacheForecast: whether the sequences of a job on paper will ever overflow the KV cache."""

import sys
from bisect import insort
from dataclasses import dataclass

NEVER = sys.maxsize  # a step that no job reaches


@dataclass(slots=True)
class GrowingRows:
    """Sequences that grow by a token a step.

    Attributes:
        count: How many.
        offset: Sum of the tokens they would have had at step 0.
    """

    count: int = 0
    offset: float = 0.0

    def tokens(self, step: int) -> float:
        """Their tokens at a step."""
        return self.offset + self.count * step

    def add(self, count: int, offset: float) -> None:
        """Some more; or fewer."""
        self.count += count
        self.offset += offset


class CacheForecast:
    """Who holds tokens of the KV cache, and until when."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._ending: dict[int, GrowingRows] = {}  # by their last step
        self._steps: list[int] = []  # those last steps, in order
        self._all = GrowingRows()
        self._most = 0.0  # what all would hold if each had grown to its end
        self._full_step = NEVER  # the one that overflowed last time, and who runs that long
        self._at_full = GrowingRows()

    def hold(self, last: int, count: int, offset: float) -> None:
        """Sequences with this last step; a negative count takes them out."""
        if last not in self._ending:
            self._ending[last] = GrowingRows()
            insort(self._steps, last)
        self._ending[last].add(count, offset)
        self._all.add(count, offset)
        self._most += offset + count * last
        if last >= self._full_step:
            self._at_full.add(count, offset)

    def end(self, step: int) -> GrowingRows:
        """Take out those whose last step this is, none of which is earlier."""
        if step not in self._ending:
            return GrowingRows()
        self._steps.remove(step)
        ended = self._ending.pop(step)
        self._all.add(-ended.count, -ended.offset)
        self._most -= ended.tokens(step)
        if step == self._full_step:
            self._full_step, self._at_full = NEVER, GrowingRows()
        return ended

    @property
    def fits(self) -> bool:
        """Whether it never overflows: as sequences end, those that run longer have grown.

        Asks where it overflowed last time, and then looks ahead until all that are left would fit
        if each had grown to its end.
        """
        if self._at_full.tokens(self._full_step) > self._capacity:
            return False
        count, offset, most = self._all.count, self._all.offset, self._most
        for step in self._steps:
            if most <= self._capacity:
                return True
            if offset + count * step > self._capacity:
                self._full_step, self._at_full = step, GrowingRows(count, offset)
                return False
            ending = self._ending[step]
            count -= ending.count
            offset -= ending.offset
            most -= ending.tokens(step)
        return True
