"""Quarantine of poison rows: keeps rows in flight on disk and attributes crashes to them.

A row that was in flight in several crashes is a suspect: suspects run in ever smaller groups, at
last alone. A row that ends processes alone is poison.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from raymoe.condition import Condition
from raymoe.data.journal import NOBODY, ROW_KEY_BYTES, close_file, open_private
from raymoe.engine.outputs import Generation
from raymoe.errors import CheckpointError, ExecutionError
from raymoe.specs.files import open_regular
from raymoe.units import MIB

MAGIC = b"raymoei1"
IN_FLIGHT, DEATH, SUFFIX = "inside-", "death-", ".rows"
ENTERED, ALONE, LEFT = b"E", b"A", b"L"
REWRITE_BYTES = MIB  # a file of this size is rewritten with only the rows in flight
_RECORD_BYTES = 1 + ROW_KEY_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What a process left behind.

    Attributes:
        inside: Keys of the rows in flight.
        was_alone: Whether a suspect ran alone.
        when_ns: Time of the latest write, by the clock of the file system.
    """

    inside: frozenset[bytes]
    was_alone: bool
    has_finished: bool
    when_ns: int


class InFlightFile:
    """The rows in flight in this process, on disk. Thread-safe.

    A failed write loses crash attribution, but never fails the job.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # guards all following attributes
        self._path, self._file, self._size = directory, -1, 0
        self._in_flight: Counter[bytes] = Counter()
        self._has_finished = False
        self._is_failing = False

    @property
    def name(self) -> str:
        return self._path.name

    def record(
        self, *, entered: Sequence[bytes] = (), left: Sequence[bytes] = (), alone: bool = False
    ) -> None:
        """Record that rows enter, before they do, and that rows that had entered are finished."""
        with self._lock:
            self._in_flight.subtract(left)
            self._in_flight += Counter()  # drops zero counts
            self._has_finished |= bool(left)
            try:
                if self._file < 0 or (entered and self._size > REWRITE_BYTES):
                    self._open_file()
                else:
                    self._append(_pack(LEFT, left))
                self._append(_pack(ALONE if alone else ENTERED, entered))
            except OSError as error:
                self._give_up(error)
            self._in_flight.update(entered)

    def close(self) -> None:
        """Release the lock; remove the file if no row is in flight."""
        with self._lock:
            has_deaths = any(self._directory.glob(f"{DEATH}*{SUFFIX}"))
            if self._file >= 0 and not self._in_flight and not (self._has_finished and has_deaths):
                with contextlib.suppress(OSError):  # it says that no row is in flight
                    self._path.unlink(missing_ok=True)
            self._close_file()

    def _open_file(self) -> None:
        temporary = self._directory / f".{IN_FLIGHT}{uuid.uuid4().hex}.tmp"
        if self._file < 0:
            self._path = self._directory / f"{IN_FLIGHT}{uuid.uuid4().hex}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        file = open_private(temporary, flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            told = _pack(LEFT, [NOBODY] if self._has_finished else [])
            told += _pack(ENTERED, self._in_flight.elements())
            _write_all(file, MAGIC + told)
            # Other processes see the file only now: locked, and whole.
            temporary.replace(self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            os.close(file)
            raise
        self._close_file()
        self._file, self._size = file, len(MAGIC) + len(told)

    def _append(self, data: bytes) -> None:
        _write_all(self._file, data)
        self._size += len(data)
        if self._is_failing:
            self._is_failing = False
            logger.warning("the rows in flight can be written to %s again", self._directory)

    def _give_up(self, error: OSError) -> None:
        if not self._is_failing:
            logger.warning(
                "the rows in flight cannot be written to %s (%s): should one of them crash this "
                "process, the next one cannot know which",
                self._directory,
                error,
            )
        self._is_failing = True
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            close_file(file, self._path)


def read_death(path: Path) -> Death:
    """Read what a process left, ignoring a torn end.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: It is no regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        when_ns = os.fstat(file.fileno()).st_mtime_ns
        data = file.read()
    inside: Counter[bytes] = Counter()
    alone: set[bytes] = set()
    has_finished = False
    records = data[len(MAGIC) :] if data.startswith(MAGIC) else b""
    for begin in range(0, len(records) - _RECORD_BYTES + 1, _RECORD_BYTES):
        tag, key = records[begin : begin + 1], records[begin + 1 : begin + _RECORD_BYTES]
        if tag == LEFT:
            has_finished = True
            inside[key] -= 1
        else:
            inside[key] += 1
            (alone.add if tag == ALONE else alone.discard)(key)
    kept = frozenset(key for key, count in inside.items() if count > 0)
    return Death(
        inside=kept,
        was_alone=len(kept) == 1 and kept <= alone,
        has_finished=has_finished,
        when_ns=when_ns,
    )


def keep_deaths(directory: Path, own_name: str) -> None:
    """Rename files of ended processes to `death-*`; remove those without rows in flight."""
    for path in directory.glob(f"{IN_FLIGHT}*{SUFFIX}"):
        if path.name != own_name:
            # Another process was faster, or it is no file of ours.
            with contextlib.suppress(FileNotFoundError, CheckpointError):
                _keep_if_dead(path)


def in_flight_files(directory: Path) -> list[Path]:
    patterns = (f"{IN_FLIGHT}*{SUFFIX}", f"{DEATH}*{SUFFIX}", f".{IN_FLIGHT}*.tmp")
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


def _keep_if_dead(path: Path) -> None:
    file = open_regular(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return  # the process is alive
            raise
        if not os.path.samestat(os.fstat(file), path.lstat()):
            return  # the process has recreated its file
        death = read_death(path)
        if death.inside or death.has_finished:
            path.rename(path.with_name(DEATH + path.name.removeprefix(IN_FLIGHT)))
        else:
            path.unlink()
    finally:
        os.close(file)


def _pack(tag: bytes, keys: Iterable[bytes]) -> bytes:
    return b"".join(tag + key for key in keys)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


MAX_CRASHES = 2  # crashes alone that make a row poison
SUSPECT_AFTER = 2  # unattributed crashes
DIVISOR = 8
MAX_POISON_IN_A_ROW = 3
LOOK_EVERY_S = 1.0


class CrashCounts:
    """The crashes of a job, from all its processes and runs. Thread-safe.

    `directory` is that of the journal; removing `death-*` from it clears all rows.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # guards all following attributes
        self._deaths: dict[str, Death] = {}
        self._num_crashes: Counter[bytes] = Counter()
        self._num_deaths: Counter[bytes] = Counter()  # unattributed
        self._max_in_flight = 0
        self._next_look_s = 0.0

    def look(self, own_name: str) -> None:
        """Look for processes that have ended since; at most once a second."""
        with self._lock:
            if time.monotonic() < self._next_look_s:
                return
            self._next_look_s = time.monotonic() + LOOK_EVERY_S
            try:
                keep_deaths(self._directory, own_name)
            except (OSError, CheckpointError) as error:
                logger.warning(
                    "%s cannot be searched for crashes of other processes: %s",
                    self._directory,
                    error,
                )
            self._read()

    def num_deaths(self, key: bytes) -> int:
        with self._lock:
            return self._num_deaths[key]

    def is_poison(self, key: bytes) -> bool:
        """Whether a row has ended its process too often, alone."""
        with self._lock:
            return self._num_crashes[key] >= MAX_CRASHES

    def max_at_once(self, num_deaths: int) -> int | None:
        """Return how many rows with at least `num_deaths` unattributed crashes may run at once."""
        if num_deaths < SUSPECT_AFTER:
            return None
        with self._lock:
            divisor: int = DIVISOR ** (num_deaths - SUSPECT_AFTER + 1)
            return max(1, self._max_in_flight // divisor)

    def check_engine(self) -> None:
        """Raise if the crashes are the fault of the engine.

        Raises:
            ExecutionError: Several rows in turn were poison, and none finished in between.
        """
        with self._lock:
            deaths = self._deaths.values()
            last_s = max((death.when_ns for death in deaths if death.has_finished), default=0)
            since = [death for death in deaths if death.when_ns > last_s and death.was_alone]
            keys = {key for death in since for key in death.inside}
            poison = [key for key in keys if self._num_crashes[key] >= MAX_CRASHES]
        if len(poison) >= MAX_POISON_IN_A_ROW:
            raise ExecutionError(
                f"{len(poison)} rows in turn, each alone, crashed their process {MAX_CRASHES} "
                "times, and no row finished in between: the cause is the engine or its machine and "
                "not the rows. Find it in the logs of the actors, remove "
                f"{self._directory / DEATH}*, and start again"
            )

    def _read(self) -> None:
        found = {path.name: path for path in self._directory.glob(f"{DEATH}*{SUFFIX}")}
        if found.keys() == self._deaths.keys():
            return
        known = {name: self._deaths[name] for name in found if name in self._deaths}
        for name in found.keys() - known.keys():
            try:
                known[name] = read_death(found[name])
            except (OSError, CheckpointError) as error:
                logger.warning("%s cannot be read: %s", found[name], error)
        self._deaths = known
        self._num_crashes = Counter(
            key for death in known.values() if death.was_alone for key in death.inside
        )
        poison = {key for key, count in self._num_crashes.items() if count >= MAX_CRASHES}
        unexplained = [death for death in known.values() if not death.inside & poison]
        self._num_deaths = Counter(key for death in unexplained for key in death.inside)
        self._max_in_flight = max((len(death.inside) for death in unexplained), default=0)
        logger.info(
            "%s: %d processes have crashed, %d of them for an unknown reason; %d rows crash their "
            "process and are not tried again",
            self._directory,
            len(known),
            len(unexplained),
            len(poison),
        )


class Group(NamedTuple):
    positions: list[int]
    num_deaths: int


class Admission:
    """Admits rows to the engine of this process, and records them on disk. Thread-safe.

    Rows that are not suspects enter at once, all of a call together. A suspect that must run alone
    enters when all others have left, and no other row enters before it has left. No row enters a
    broken engine: waiting rows were not in flight when it broke.
    """

    def __init__(self, directory: Path) -> None:
        self._crash_counts = CrashCounts(directory)
        self._file = InFlightFile(directory)
        # Guards all following attributes; notified when rows leave.
        self._changed = Condition()
        self._num_in_flight = 0
        self._quarantined: Counter[int] = Counter()  # in flight, by unattributed crashes
        self._is_alone = False  # the only row in flight is a suspect that must run alone
        self._num_waiting_alone = 0
        self._is_broken = False
        self._left: list[bytes] = []  # not written yet
        self._has_finished = False
        self._crash_counts.look(self._file.name)

    def verdict(self, key: bytes) -> Generation | None:
        """Return the answer of a poison row, None for others.

        Raises:
            ExecutionError: The engine causes the crashes; see `CrashCounts.check_engine`.
        """
        if not self._crash_counts.is_poison(key):
            return None
        if not self._has_finished:
            self._crash_counts.check_engine()
        error = ExecutionError(
            f"this row crashed the process {MAX_CRASHES} times while it ran alone, so it "
            "is not tried again; the logs of the actors may say why"
        )
        return Generation.from_error(error)

    def admit(self, keys: Sequence[bytes]) -> Iterator[Group]:
        """Yield groups of rows that may enter, waiting for those that may not enter yet.

        The caller submits each group before it asks for the next, and calls `leave` for its rows.

        Raises:
            ExecutionError: The engine is broken.
        """
        self._crash_counts.look(self._file.name)
        deaths = [self._crash_counts.num_deaths(key) for key in keys]
        free = [i for i, count in enumerate(deaths) if self._max_at_once(count) is None]
        if free:
            yield self._enter(Group(free, 0), keys)
        quarantined = sorted(set(range(len(keys))) - set(free), key=lambda i: -deaths[i])
        for i in quarantined:
            yield self._enter(Group([i], deaths[i]), keys)

    def leave(self, key: bytes, num_deaths: int, *, is_finished: bool) -> None:
        """Record that a row has left, without waiting for the disk.

        With `is_finished` False (the engine broke), later processes count the row as in flight.
        """
        with self._changed:
            self._num_in_flight -= 1
            self._quarantined[num_deaths] -= 1
            if not self._num_in_flight:
                self._is_alone = False
            if is_finished:
                self._left.append(key)
                self._has_finished = True
            else:
                self._is_broken = True
            self._changed.notify_all()

    def flush(self) -> None:
        left = self._take_left()
        if left:
            self._file.record(left=left)

    def close(self) -> None:
        """Record that no row is in flight, if so; idempotent."""
        self.flush()
        self._file.close()

    def _enter(self, group: Group, keys: Sequence[bytes]) -> Group:
        alone = self._max_at_once(group.num_deaths) == 1
        with self._changed:
            if alone:
                self._num_waiting_alone += 1
                self._changed.wait_for(lambda: not self._num_in_flight or self._is_broken)
                self._num_waiting_alone -= 1
            else:
                self._changed.wait_for(lambda: self._has_room(group.num_deaths) or self._is_broken)
            if self._is_broken:
                raise ExecutionError("the engine is broken, so that it takes no more rows")
            self._is_alone = alone
            self._num_in_flight += len(group.positions)
            self._quarantined[group.num_deaths] += len(group.positions)
        entered = [keys[i] for i in group.positions]
        self._file.record(entered=entered, left=self._take_left(), alone=alone)
        return group

    def _has_room(self, num_deaths: int) -> bool:
        if self._is_alone or self._num_waiting_alone:
            return False
        for level in range(SUSPECT_AFTER, num_deaths + 1):
            inside = sum(count for deaths, count in self._quarantined.items() if deaths >= level)
            limit = self._max_at_once(level)
            if limit is not None and inside >= limit:
                return False
        return True

    def _max_at_once(self, num_deaths: int) -> int | None:
        return self._crash_counts.max_at_once(num_deaths)

    def _take_left(self) -> list[bytes]:
        with self._changed:
            left, self._left = self._left, []
        return left
