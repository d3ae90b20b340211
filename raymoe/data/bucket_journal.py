"""A journal in a bucket: what a process finishes is put into objects of its own.

An object begins with an index, so that a process that opens the journal reads no answers. It is
put again, with what came since, until it is full: then a job of days has thousands of objects and
not millions, each of which costs whoever opens the journal a round trip. Records keep their places.

    magic, number of rows, checksum    of the index
    half a key, place                  of each row; places are bytes behind the index
    records                            as in the files of other journals

Nothing is appended to or locked, so that put, list and read are enough; the driver's lease
(`raymoe.data.bucket_lease`) needs a put that fails where there is an object already.
"""

import contextlib
import io
import logging
import struct
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePath, PurePosixPath
from typing import cast

import numpy as np
import numpy.typing as npt

from raymoe.data.bucket import Bucket
from raymoe.data.journal import (
    HALF_BYTES,
    NOBODY,
    OFFSET_BITS,
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
    read_records_from,
)
from raymoe.units import KIB, MIB, format_bytes

MAGIC = b"raymoeo1"
PUT_BYTES = 4 * MIB  # are put before their time has come, and are the last of their object
MAX_WAITING_BYTES = 256 * MIB  # of a store that is away; what comes then is not recorded
RETRY_AFTER_S, RETRY_LAST_AFTER_S = 1.0, (1.0, 4.0, 15.0)
NUM_READERS = 16  # each object takes a round trip
FIRST_BYTES = 64 * KIB  # hold the index of most objects
KEPT_BYTES = 64 * MIB  # of objects that rows were looked up in: the next rows are near

_HEAD = struct.Struct(f"<{len(MAGIC)}sII")
_ENTRY = struct.Struct(f"<{HALF_BYTES}sI")
_ENTRIES = np.dtype([("half", "<u8"), ("offset", "<u4")])

logger = logging.getLogger(__name__)


def _pack_object(index: bytearray, records: bytearray) -> bytes:
    return _HEAD.pack(MAGIC, len(index) // _ENTRY.size, zlib.crc32(index)) + index + records


def _index_bytes(data: bytes) -> int:
    """Return how long an object is up to the end of its index; raises `DamagedRecordError`."""
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise DamagedRecordError("it does not begin as an object of a journal does")
    _, num_rows, _ = _HEAD.unpack_from(data)
    return _HEAD.size + int(num_rows) * _ENTRY.size


def _read_index(data: bytes) -> npt.NDArray[np.void]:
    """Return the entries of an object's index; raises `DamagedRecordError`."""
    entries = memoryview(data)[_HEAD.size : _index_bytes(data)]
    _, num_rows, checksum = _HEAD.unpack_from(data)
    if len(entries) < num_rows * _ENTRY.size or zlib.crc32(entries) != checksum:
        raise DamagedRecordError("its index is damaged")
    return np.frombuffer(entries, _ENTRIES).copy()  # without the rest of what was read


class ObjectWriter(JournalWriter):
    """Puts an object when it is full or old enough. One that is refused is put again, with more."""

    def __init__(self, bucket: Bucket, *, sync_every_s: float, on_written: OnWritten) -> None:
        self._bucket, self._prefix = bucket, PREFIX + uuid.uuid4().hex
        self._number = 0  # of the object that grows, as do its parts:
        self._index, self._records = bytearray(), bytearray()
        self._places: list[Place] = []  # what of it is not in the bucket yet
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
        if len(self._records) + len(data) > MAX_WAITING_BYTES and self._is_failing:
            raise OSError(
                f"{format_bytes(len(self._records))} wait for the store, and no more are kept"
            )
        begin = len(self._records)
        self._records += data
        return begin

    def _publish(self, places: Sequence[Place]) -> None:
        self._places += places
        for key, offset in places:
            self._index += _ENTRY.pack(key[:HALF_BYTES], offset)
        if len(self._records) >= PUT_BYTES and not self._is_failing:
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
            self._bucket.put(path.name, _pack_object(self._index, self._records))
            self._on_written(path, self._places)
            self._places = []
            if len(self._records) >= PUT_BYTES:
                self._number, self._index, self._records = (
                    self._number + 1,
                    bytearray(),
                    bytearray(),
                )
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
        """Read which rows are there.

        Args:
            sync_every_s: Rows are put this often, and when the journal closes.

        Raises:
            BucketError: Objects cannot be listed.
            ConfigError: The number makes no sense.
        """
        check_interval(sync_every_s)
        super().__init__()
        self.bucket = bucket
        self._guard = threading.Lock()  # of the next line
        self._kept: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._read_indexes(row_objects(bucket))
        logger.info("journal %s: %s", bucket, self.contents)
        self._writer = ObjectWriter(bucket, sync_every_s=sync_every_s, on_written=self._add_places)

    def save(self, timeout_s: float | None = None) -> None:
        self._writer.save(timeout_s)

    def _read_indexes(self, sizes: dict[str, int]) -> None:
        halves, places = [], []
        with ThreadPoolExecutor(NUM_READERS) as pool:
            found = pool.map(self._try_read_index, sizes)
            for number, (name, index) in enumerate(zip(sizes, found, strict=True)):
                self._numbers[PurePosixPath(name)] = number
                if isinstance(index, Exception):
                    self.contents.num_ignored_bytes += sizes[name]
                    self.contents.num_damaged_files += 1
                    logger.warning(
                        "journal object %s: %s; its %s are ignored and their rows generated again",
                        name, index, format_bytes(sizes[name]),
                    )  # fmt: skip
                    continue
                halves.append(index["half"].astype(np.uint64))
                places.append(index["offset"] + np.uint64(number << OFFSET_BITS))
        if halves:
            self._index.add_all(np.concatenate(halves), np.concatenate(places))
        self.contents.num_files = len(sizes)
        self.contents.num_rows = sum(map(len, halves))

    def _try_read_index(self, name: str) -> npt.NDArray[np.void] | Exception:
        try:
            data = self.bucket.read(name, FIRST_BYTES)
            if _index_bytes(data) > len(data):
                data = self.bucket.read(name, _index_bytes(data))
            return _read_index(data)
        except (OSError, DamagedRecordError) as error:
            return error

    def _open(self, path: PurePath) -> io.BufferedReader:
        return _as_file(self._read_records(path.name))

    def _add_places(self, path: PurePath, places: Sequence[Place]) -> None:
        with self._guard:
            self._kept.pop(path.name, None)  # the object has grown
        super()._add_places(path, places)

    def _read_records(self, name: str) -> bytes:
        """Return the records of an object; several calls that need it at once read it once."""
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
            records = data[_index_bytes(data) :]
        except BaseException as error:
            with self._guard:
                if self._kept.get(name) is future:
                    del self._kept[name]
            future.set_exception(error)
            raise
        future.set_result(records)
        self._make_room()
        return records

    def _make_room(self) -> None:
        with self._guard:
            sizes = {name: len(one.result()) for name, one in self._kept.items() if one.done()}
            num_bytes = sum(sizes.values())
            for name in list(sizes)[:-1]:
                if num_bytes <= KEPT_BYTES:
                    break
                num_bytes -= sizes[name]
                del self._kept[name]


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
        num_failed = 0
        index, records = bytearray(), bytearray()
        data = bucket.read(name)
        with contextlib.suppress(DamagedRecordError):  # what follows damage is ignored by all
            for record in read_records_from(_as_file(data[_index_bytes(data) :]), 0):
                is_failed = record.key != NOBODY and has_error(record.payload)
                num_failed += is_failed
                key = NOBODY if is_failed else record.key
                index += _ENTRY.pack(key[:HALF_BYTES], record.offset)
                records += pack_record(key, record.payload)
        if num_failed:
            bucket.put(name, _pack_object(index, records))
        num_forgotten += num_failed
    return num_forgotten
