"""Who may be inside together? Rows enter in company, suspects in little, the worst alone."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from raymoe.data.inside import InsideFile
from raymoe.data.strikes import STRIKES, SUSPECT_AFTER, Strikes
from raymoe.engine.generation import Generation
from raymoe.errors import ExecutionError


class Group(NamedTuple):
    """Rows that enter together: their positions, and the unexplained deaths of each."""

    positions: list[int]
    num_deaths: int


class Admission:
    """Lets rows into the engine of this process, and keeps on disk who is inside. Thread-safe.

    Rows without suspicion enter at once, all of a call together, unless a suspect must be alone:
    then nobody enters before it has been, and it enters when all others have left. Once the engine
    is broken nobody enters: those who waited were not inside when it broke.

    Args:
        directory: Of the journal.
    """

    def __init__(self, directory: Path) -> None:
        self._strikes = Strikes(directory)
        self._file = InsideFile(directory)
        # Guards everything below; notified when rows leave.
        self._changed = threading.Condition()
        self._num_inside = 0
        self._suspects: Counter[int] = Counter()  # inside, by unexplained deaths
        self._is_alone = False  # the one row that is inside must be alone
        self._num_waiting_alone = 0
        self._is_broken = False
        self._left: list[bytes] = []  # not written yet
        self._has_finished = False
        self._strikes.look(self._file.name)

    def verdict(self, key: bytes) -> Generation | None:
        """Return the answer of a row that is guilty, None for the others.

        Raises:
            ExecutionError: It is not the rows that end processes; see `Strikes.check_engine`.
        """
        if not self._strikes.is_guilty(key):
            return None
        if not self._has_finished:
            self._strikes.check_engine()
        error = ExecutionError(
            f"this row ended the process {STRIKES} times while nothing else was in it, so it is "
            "not tried again; the logs of the actors may say how"
        )
        return Generation.from_error(error)

    def admit(self, keys: Sequence[bytes]) -> Iterator[Group]:
        """Yield the rows that may enter now, waiting for those that may not yet.

        The caller submits each group before it asks for the next, and says when its rows have left.

        Raises:
            ExecutionError: The engine is broken.
        """
        self._strikes.look(self._file.name)
        deaths = [self._strikes.num_deaths(key) for key in keys]
        free = [i for i, count in enumerate(deaths) if self._most_at_once(count) is None]
        if free:
            yield self._enter(Group(free, 0), keys)
        suspects = sorted(set(range(len(keys))) - set(free), key=lambda i: -deaths[i])
        for i in suspects:
            yield self._enter(Group([i], deaths[i]), keys)

    def leave(self, key: bytes, num_deaths: int, *, is_finished: bool) -> None:
        """Note that a row has left; never waits for a disk.

        Args:
            key: Of the row.
            num_deaths: Of its group.
            is_finished: False where the engine broke: for the next process it is still inside.
        """
        with self._changed:
            self._num_inside -= 1
            self._suspects[num_deaths] -= 1
            if not self._num_inside:
                self._is_alone = False
            if is_finished:
                self._left.append(key)
                self._has_finished = True
            else:
                self._is_broken = True
            self._changed.notify_all()

    def flush(self) -> None:
        """Write down who has left."""
        left = self._take_left()
        if left:
            self._file.record(left=left)

    def close(self) -> None:
        """Tell those who come later that nobody is inside, if it is so; may be called again."""
        self.flush()
        self._file.close()

    def _enter(self, group: Group, keys: Sequence[bytes]) -> Group:
        """Wait until the group may enter, and write it down."""
        alone = self._most_at_once(group.num_deaths) == 1
        with self._changed:
            if alone:
                self._num_waiting_alone += 1
                self._changed.wait_for(lambda: not self._num_inside or self._is_broken)
                self._num_waiting_alone -= 1
            else:
                self._changed.wait_for(lambda: self._has_room(group.num_deaths) or self._is_broken)
            if self._is_broken:
                raise ExecutionError("the engine is broken, so that no more rows enter")
            self._is_alone = alone
            self._num_inside += len(group.positions)
            self._suspects[group.num_deaths] += len(group.positions)
        entered = [keys[i] for i in group.positions]
        self._file.record(entered=entered, left=self._take_left(), alone=alone)
        return group

    def _has_room(self, num_deaths: int) -> bool:
        """Whether one more row with so many deaths may enter; each limit counts all worse ones."""
        if self._is_alone or self._num_waiting_alone:
            return False
        for level in range(SUSPECT_AFTER, num_deaths + 1):
            inside = sum(count for deaths, count in self._suspects.items() if deaths >= level)
            limit = self._most_at_once(level)
            if limit is not None and inside >= limit:
                return False
        return True

    def _most_at_once(self, num_deaths: int) -> int | None:
        return self._strikes.most_at_once(num_deaths)

    def _take_left(self) -> list[bytes]:
        with self._changed:
            left, self._left = self._left, []
        return left
