"""Which rows are inside of a process? A file that outlives it, so that the next one knows.

Each process appends to a file of its own and holds a lock on it while it lives: whoever gets the
lock knows that it has ended, cleanly or not, and keeps what the file says as a *death*. Writing
costs one call for each batch and nothing is forced to disk: the operating system keeps what a
killed process wrote. A machine that goes down may take the latest rows with it, which then count as
never inside.

    magic     8 bytes
    records   tag (1 byte) and key (16 bytes) each: entered, entered alone, left, or left some time
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from raymoe.data.directories import open_private
from raymoe.data.records import KEY_BYTES
from raymoe.specs.files import open_regular
from raymoe.units import MIB

MAGIC = b"raymoei1"
INSIDE, DEATH, SUFFIX = "inside-", "death-", ".rows"
ENTERED, ALONE, LEFT = b"E", b"A", b"L"
REWRITE_BYTES = MIB  # a file that has grown so long is replaced by what is inside now
_RECORD_BYTES = 1 + KEY_BYTES
_NOBODY = bytes(KEY_BYTES)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What a process left behind.

    Attributes:
        inside: Keys of the rows that had entered and not left.
        was_alone: One of them, and nothing else, was let in alone.
        has_finished: Rows had left before.
        when_ns: Latest write, by the clock of the file system.
    """

    inside: frozenset[bytes]
    was_alone: bool
    has_finished: bool
    when_ns: int


class InsideFile:
    """Rows that are inside of this process, on disk. Thread-safe.

    A disk that refuses a write costs what is known of the rows inside, and never the job.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # guards everything below
        self._path, self._file, self._size = directory, -1, 0
        self._inside: Counter[bytes] = Counter()
        self._has_finished = False
        self._is_failing = False

    @property
    def name(self) -> str:
        """Of the file, once there is one."""
        return self._path.name

    def record(
        self, *, entered: Sequence[bytes] = (), left: Sequence[bytes] = (), alone: bool = False
    ) -> None:
        """Write that rows enter, before they do, and that others have left.

        Args:
            entered: Keys.
            left: Keys of rows that entered before and are finished.
            alone: Nothing else is inside.
        """
        with self._lock:
            self._inside.subtract(left)
            self._inside += Counter()  # drops those that are 0
            self._has_finished |= bool(left)
            try:
                if self._file < 0 or (entered and self._size > REWRITE_BYTES):
                    self._open_file()
                else:
                    self._append(_pack(LEFT, left))
                self._append(_pack(ALONE if alone else ENTERED, entered))
            except OSError as error:
                self._give_up(error)
            self._inside.update(entered)

    def close(self) -> None:
        """Give the lock back; a file that tells nothing goes."""
        with self._lock:
            has_deaths = any(self._directory.glob(f"{DEATH}*{SUFFIX}"))
            if self._file >= 0 and not self._inside and not (self._has_finished and has_deaths):
                self._path.unlink(missing_ok=True)
            self._close_file()

    def _open_file(self) -> None:
        """Begin a file, or the one that has grown anew, with what it has to tell."""
        temporary = self._directory / f".{INSIDE}{uuid.uuid4().hex}.tmp"
        if self._file < 0:
            self._path = self._directory / f"{INSIDE}{uuid.uuid4().hex}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        file = open_private(temporary, flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            told = _pack(LEFT, [_NOBODY] if self._has_finished else [])
            told += _pack(ENTERED, self._inside.elements())
            _write_all(file, MAGIC + told)
            # Only now others see it: locked, and whole.
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
            logger.warning("which rows are inside is written to %s again", self._directory)

    def _give_up(self, error: OSError) -> None:
        """Remove a file that may be torn; the next rows that enter begin another."""
        if not self._is_failing:
            logger.warning(
                "which rows are inside cannot be written to %s (%s): a row that ends this process "
                "is not found by the next one",
                self._directory,
                error,
            )
        self._is_failing = True
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def read_death(path: Path) -> Death:
    """Read what a process left; a torn end is ignored.

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
    """Turn the files of processes that have ended into deaths; those that tell nothing go.

    Args:
        directory: Of the files.
        own_name: File of this process.
    """
    for path in directory.glob(f"{INSIDE}*{SUFFIX}"):
        if path.name != own_name:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                _keep_if_dead(path)


def inside_files(directory: Path) -> list[Path]:
    """Return all files of this kind in a directory, in the order of their names."""
    patterns = (f"{INSIDE}*{SUFFIX}", f"{DEATH}*{SUFFIX}", f".{INSIDE}*.tmp")
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


def _keep_if_dead(path: Path) -> None:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return  # it lives
            raise
        if not os.path.samestat(os.fstat(file), path.lstat()):
            return  # its process has begun it again
        death = read_death(path)
        if death.inside or death.has_finished:
            path.rename(path.with_name(DEATH + path.name.removeprefix(INSIDE)))
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
