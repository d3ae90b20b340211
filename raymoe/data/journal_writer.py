"""A file of finished rows that grows in the background: appended at once, synced now and then."""

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from raymoe.data.directories import open_private
from raymoe.data.records import (
    HEADER_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    encode_generation,
    pack_record,
)
from raymoe.engine.generation import Generation
from raymoe.errors import ExecutionError
from raymoe.units import format_bytes

PREFIX, SUFFIX = "rows-", ".journal"

logger = logging.getLogger(__name__)

Row = tuple[bytes, Generation]
Place = tuple[bytes, int]  # key, offset of its record


class JournalWriter:
    """Appends rows to a file that is this process's alone. Thread-safe; one thread writes.

    Rows that come while others are being written make up the next write. A disk that refuses one
    is no reason to stop: its rows are not in the journal, a warning says so, and the next ones go
    to a new file, because nothing behind a torn record would be read.

    Attributes:
        num_lost_rows: Rows that could not be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sync_every_s: float,
        on_written: Callable[[Path, Sequence[Place]], None],
    ) -> None:
        """Start the thread; the file is made with the first row.

        Args:
            directory: There already.
            sync_every_s: Written rows are forced to disk this often, and by `close`.
            on_written: Called with the file and what was appended to it.
        """
        self._directory, self._sync_every_s = directory, sync_every_s
        self._on_written = on_written
        self.num_lost_rows = 0
        # Guards the next lines; notified when rows come, rows are written, or it ends.
        self._changed = threading.Condition()
        self._pending: list[Row] = []
        self._num_appended = self._num_handled = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        # The thread's own.
        self._path, self._file, self._end = directory, -1, 0
        self._is_failing = False
        self._unsynced_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="raymoe-journal", daemon=True)
        self._thread.start()

    def append(self, key: bytes, generation: Generation) -> None:
        """Take a finished row; never waits for a disk and never raises.

        What comes after `close` is dropped: then the engine is gone, and nobody gets the row.
        """
        with self._changed:
            if self._is_closing or self._failure is not None:
                return
            self._pending.append((key, generation))
            self._num_appended += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until what was appended before is written, so that it outlives this process.

        Args:
            timeout_s: Wait no longer, for one who cannot wait for a slow disk.

        Raises:
            ExecutionError: The thread has failed; a disk that refuses a write is no such failure.
        """
        with self._changed:
            target = self._num_appended
            self._changed.wait_for(
                lambda: self._num_handled >= target or self._failure is not None, timeout_s
            )
            if self._failure is not None:
                raise ExecutionError(
                    f"the journal in {self._directory} failed: {self._failure!r}"
                ) from self._failure

    def close(self) -> None:
        """Write and sync what is left; more than once is fine."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except BaseException as error:
            logger.exception("the journal failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _write_next(self) -> bool:
        """Write what is pending and sync when it is time; False ends the thread."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._pending) or self._is_closing, self._sync_due_s()
            )
            rows, self._pending = self._pending, []
            is_over = self._is_closing and not rows
        if rows:
            self._write(rows)
            with self._changed:
                self._num_handled += len(rows)
                self._changed.notify_all()
        if is_over or self._sync_due_s() == 0.0:
            self._sync()
        if is_over:
            self._close_file()
        return not is_over

    def _sync_due_s(self) -> float | None:
        """Seconds until written rows must be synced; None when there are none."""
        if self._unsynced_since_s is None:
            return None
        return max(0.0, self._unsynced_since_s + self._sync_every_s - time.monotonic())

    def _write(self, rows: Sequence[Row]) -> None:
        places, records, size = [], [], 0
        for key, generation in rows:
            payload = encode_generation(generation)
            if len(payload) > MAX_PAYLOAD_BYTES:
                self.num_lost_rows += 1
                size_text = format_bytes(len(payload))
                logger.warning("a finished row of %s is too long for the journal", size_text)
                continue
            places.append((key, size))
            records.append(pack_record(key, payload))
            size += HEADER_BYTES + len(payload)
        try:
            begin = self._append_bytes(b"".join(records))
        except OSError as error:
            self.num_lost_rows += len(places)
            self._give_up_file(error)
            return
        if self._is_failing:
            self._is_failing = False
            logger.warning("the journal in %s is written again", self._directory)
        self._on_written(self._path, [(key, begin + offset) for key, offset in places])

    def _append_bytes(self, data: bytes) -> int:
        """Return the offset at which the data begins."""
        if self._file < 0:
            self._open_file()
        begin = self._end
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._end += len(data)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = time.monotonic()
        return begin

    def _open_file(self) -> None:
        self._path = self._directory / f"{PREFIX}{uuid.uuid4().hex}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._end = 0
        self._file = open_private(self._path, flags)
        sync_directory(self._directory)
        if os.write(self._file, MAGIC) < len(MAGIC):
            raise OSError(f"{self._path} takes no bytes")
        self._end = len(MAGIC)

    def _sync(self) -> None:
        self._unsynced_since_s = None
        if self._file < 0:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            self._give_up_file(error)

    def _give_up_file(self, error: OSError) -> None:
        if not self._is_failing:
            logger.warning(
                "the journal in %s cannot be written (%s): rows that finish now are generated "
                "again if this process dies; make room, or give another journal_dir",
                self._directory,
                error,
            )
        self._is_failing = True
        has_records = self._end > len(MAGIC)
        if self._file >= 0 and not has_records:
            self._path.unlink(missing_ok=True)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk: syncing a file does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse it for directories; there it is the server's business.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
