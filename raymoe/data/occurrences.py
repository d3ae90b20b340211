"""Equal rows without an id: each is an occurrence of its own, counted over the whole job.

What a row samples depends on its prompt, its parameters and, where several rows are equal, on its
occurrence: k equal rows are the occurrences 0 to k - 1, in the order in which actors ask. So they
get k samples, which are the same ones in every run, whatever the batches, the actors and the rows
around them; which of the equal rows gets which sample may change.

The actors of a pipeline ask one counter, which lives beside the driver: what it has given out
survives the end of an actor. A task that Ray runs again gets what it got before.
"""

import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from raymoe.data.journal import RowIndex
from raymoe.data.tracing import current_task

KEY = "raymoe_occurrences"  # in the arguments of a task of Ray Data: the counter, and the stage

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """A call of a generator by a task of Ray Data; the same if the task runs again.

    Attributes:
        number: Of the task's calls: a task has one for each batch.
    """

    task: int
    number: int


class Occurrences:
    """Counts rows by key. Thread-safe; 16 bytes for each key that was seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all following attributes
        self._counts = RowIndex()
        self._given: dict[Call, tuple[int, Sequence[int]]] = {}

    def claim(self, keys: Sequence[bytes], call: Call | None = None) -> list[int]:
        """Return the occurrence of each row; no two rows of a key get the same one.

        Args:
            call: Gets the same occurrences when it asks for the same keys again.
        """
        content = hash(tuple(keys))
        with self._lock:
            if call is not None and call in self._given:
                known, given = self._given[call]
                if known == content:
                    return list(given) or [0] * len(keys)
            claimed = [self._next(key) for key in keys]
            if call is not None:
                self._given[call] = content, tuple(claimed) if any(claimed) else ()
            return claimed

    def _next(self, key: bytes) -> int:
        place = self._counts.find(key)
        number = 0 if place is None else place[1]
        self._counts.add(key, 0, number + 1)
        return number


class JobOccurrences:
    """The counter of a pipeline: a Ray actor that its generators ask, each for its own stage."""

    def __init__(self) -> None:
        self._stages: defaultdict[int, Occurrences] = defaultdict(Occurrences)

    def claim(self, stage: int, keys: Sequence[bytes], call: Call) -> list[int]:
        return self._stages[stage].claim(keys, call)


class RowNumbers:
    """Asks for the occurrences of one generator's rows. Thread-safe.

    Outside of Ray Data, and in a pipeline without a counter, it counts its own rows.
    """

    def __init__(self) -> None:
        self._own = Occurrences()
        self._here = threading.local()
        self._has_warned = False

    def claim(self, keys: Sequence[bytes]) -> list[int]:
        """Return the occurrence of each row of one call, which has these keys."""
        task = current_task()
        if task is None or not keys:
            return self._own.claim(keys)
        call = Call(task.task_idx, self._number_of_call(task))
        counter, stage = task.kwargs.get(KEY, (None, 0))
        if counter is not None:
            ray = sys.modules["ray"]  # which runs this task
            try:
                return list(ray.get(counter.claim.remote(stage, list(keys), call)))
            except ray.exceptions.RayActorError as error:
                self._warn(f"the counter of equal rows is gone ({error})")
        numbers = self._own.claim(keys, call)
        if counter is None and any(numbers):
            self._warn("the pipeline has no counter of equal rows, as its Dataset was not given to "
                       "map_batches_kwargs(ds=...) or raymoe.configure_data_context")  # fmt: skip
        return numbers

    def _number_of_call(self, task: Any) -> int:
        here = self._here
        is_next = getattr(here, "task", None) is task
        here.task, here.number = task, here.number + 1 if is_next else 0
        return int(here.number)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            logger.warning(
                "%s: rows without an id that are equal and run in different actors may get equal "
                "samples; give them ids",
                reason,
            )
        self._has_warned = True
