"""A journal in a bucket: what a process finishes in some seconds becomes one object.

The objects have the form of the files of other journals. Nothing is appended to or locked, so that
put, list and read are enough; the driver's lease (`raymoe.data.bucket_lease`) needs a put that
fails where there is an object already.
"""

import contextlib
import io
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import PurePath, PurePosixPath
from typing import cast

from raymoe.data.bucket import Bucket
from raymoe.data.journal import (
    MAGIC,
    NOBODY,
    PREFIX,
    SUFFIX,
    SYNC_EVERY_S,
    DamagedRecordError,
    Journal,
    JournalWriter,
    OnWritten,
    Place,
    check_interval,
    has_error,
    pack_record,
    read_records,
)
from raymoe.units import MIB, format_bytes

PUT_BYTES = 4 * MIB  # are put before their time has come
MAX_WAITING_BYTES = 256 * MIB  # of a store that is away; what comes then is not recorded
RETRY_AFTER_S, RETRY_LAST_AFTER_S = 1.0, (1.0, 4.0, 15.0)
NUM_READERS = 16  # each object takes a round trip
KEPT_BYTES = 64 * MIB  # of objects that rows were looked up in: the next rows are near

logger = logging.getLogger(__name__)


class ObjectWriter(JournalWriter):
    """Puts an object when it is full or old enough. One that is refused is put again, with more."""

    def __init__(self, bucket: Bucket, *, sync_every_s: float, on_written: OnWritten) -> None:
        self._bucket, self._prefix = bucket, PREFIX + uuid.uuid4().hex
        self._number, self._data = 0, bytearray(MAGIC)
        self._places: list[Place] = []
        self._num_asked = self._num_answered = 0  # guarded by `_changed`
        super().__init__(bucket, sync_every_s=sync_every_s, on_written=on_written)

    def save(self, timeout_s: float | None) -> None:
        """Wait until what was appended before was put, or once refused."""
        with self._changed:
            self._wait_for(self._num_appended, timeout_s)
            self._num_asked += 1
            number = self._num_asked
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._num_answered >= number or self._failure is not None, timeout_s
            )

    def _has_work(self) -> bool:
        return super()._has_work() or self._num_asked > self._num_answered

    def _sync_due_s(self) -> float | None:
        return 0.0 if self._num_asked > self._num_answered else super()._sync_due_s()

    def _append_bytes(self, data: bytes) -> int:
        if len(self._data) + len(data) > MAX_WAITING_BYTES and self._is_failing:
            raise OSError(
                f"{format_bytes(len(self._data))} wait for the store, and no more are kept"
            )
        begin = len(self._data)
        self._data += data
        return begin

    def _publish(self, places: Sequence[Place]) -> None:
        self._places += places
        if len(self._data) >= PUT_BYTES and not self._is_failing:
            self._sync()

    def _sync(self) -> None:
        number = self._num_asked
        try:
            self._put()
        except OSError as error:
            self._lose(0, error)
            self._unsynced_since_s = time.monotonic() + RETRY_AFTER_S
        with self._changed:
            self._num_answered = number
            self._changed.notify_all()

    def _put(self) -> None:
        if self._places:
            path = PurePosixPath(f"{self._prefix}-{self._number:06d}{SUFFIX}")
            self._bucket.put(path.name, bytes(self._data))
            self._on_written(path, self._places)
            self._number, self._data, self._places = self._number + 1, bytearray(MAGIC), []
            self._note_success()
        self._unsynced_since_s = None

    def _note_success(self) -> None:
        if not self._places:  # what is appended is in memory and not safe yet
            super()._note_success()

    def _finish(self) -> None:
        for delay_s in (*RETRY_LAST_AFTER_S, 0.0):
            self._sync()
            if not self._places:
                return
            time.sleep(delay_s)
        self.num_lost_rows += len(self._places)


class BucketJournal(Journal):
    """A journal in a bucket."""

    _writer: ObjectWriter

    def __init__(self, bucket: Bucket, *, sync_every_s: float = SYNC_EVERY_S) -> None:
        """Read what is there.

        Args:
            sync_every_s: Rows are put this often, and when the journal closes.

        Raises:
            BucketError: Objects cannot be listed.
            ConfigError: The number makes no sense.
        """
        check_interval(sync_every_s)
        super().__init__()
        self.bucket = bucket
        self._guard = threading.Lock()  # of the two below
        self._kept: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._kept_bytes = 0
        self._read_all(list(row_objects(bucket)))
        logger.info("journal %s: %s", bucket, self.contents)
        self._writer = ObjectWriter(bucket, sync_every_s=sync_every_s, on_written=self._add_places)

    def save(self, timeout_s: float | None = None) -> None:
        self._writer.save(timeout_s)

    def _read_all(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for begin in range(0, len(names), NUM_READERS):  # so that few are in memory at once
                some = names[begin : begin + NUM_READERS]
                wait([pool.submit(self._read_object, name) for name in some])
                for name in some:
                    self._read_file(PurePosixPath(name))

    def _open(self, path: PurePath) -> io.BufferedReader:
        return _as_file(self._read_object(path.name))

    def _read_object(self, name: str) -> bytes:
        """Return an object; several calls that need it at once read it once."""
        with self._guard:
            future = self._kept.get(name)
            is_first = future is None
            if future is None:
                future = self._kept[name] = Future()
            self._kept.move_to_end(name)
        if not is_first:
            return future.result()
        try:
            data = self.bucket.read(name)
        except BaseException as error:
            with self._guard:
                del self._kept[name]
            future.set_exception(error)
            raise
        future.set_result(data)
        self._make_room(len(data))
        return data

    def _make_room(self, num_bytes: int) -> None:
        with self._guard:
            self._kept_bytes += num_bytes
            done = [name for name, future in self._kept.items() if future.done()]
            while self._kept_bytes > KEPT_BYTES and len(done) > 1:
                self._kept_bytes -= len(self._kept.pop(done.pop(0)).result())


def _as_file(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(cast("io.RawIOBase", io.BytesIO(data)))


def row_objects(bucket: Bucket) -> dict[str, int]:
    """Return the bytes of each object with rows, by name."""
    sizes = bucket.sizes()
    return {
        name: sizes[name] for name in sizes if name.startswith(PREFIX) and name.endswith(SUFFIX)
    }


def forget_errors_in(bucket: Bucket) -> int:
    """Forget the rows that ended with an error, as `forget_errors` does in a directory.

    Returns:
        How many there were.
    """
    num_forgotten = 0
    for name in row_objects(bucket):
        records, num_failed = [MAGIC], 0
        with (
            contextlib.suppress(DamagedRecordError),  # what follows damage is ignored by all
            _as_file(bucket.read(name)) as file,
        ):
            for record in read_records(file):
                is_failed = record.key != NOBODY and has_error(record.payload)
                num_failed += is_failed
                records.append(pack_record(NOBODY if is_failed else record.key, record.payload))
        if num_failed:
            bucket.put(name, b"".join(records))
        num_forgotten += num_failed
    return num_forgotten
