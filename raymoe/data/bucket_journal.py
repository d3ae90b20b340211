"""A journal in a bucket: what a process finishes is put into objects of its own.

    magic, number of rows, checksum    of the index
    half a key, place                  of each row; zeros up to byte 65,536
    records                            as in the files of other journals

Of each object a process that opens the journal reads the index, by one request. So that there are
as many objects as the answers need, and not one for every few seconds of every process, an object
is put again, with what came since, until it is full; its records keep their places. Answers are
read when they are asked for, by ranges.

Nothing is appended to or locked, so that put, list and read are enough; the driver's lease
(`raymoe.data.bucket_lease`) needs a put that fails where there is an object already.
"""

import contextlib
import functools
import io
import logging
import struct
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePath, PurePosixPath
from typing import Any, cast

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
    Row,
    check_interval,
    has_error,
    pack_record,
    read_records_from,
)
from raymoe.units import KIB, MIB, format_bytes

MAGIC = b"raymoeo1"
HEAD_BYTES = 64 * KIB
PUT_BYTES = 4 * MIB  # are put before their time has come, and are the last of their object
MAX_WAITING_BYTES = 256 * MIB  # of a store that is away; what comes then is not recorded
RETRY_AFTER_S, RETRY_LAST_AFTER_S = 1.0, (1.0, 4.0, 15.0)
NUM_READERS = 16  # each object takes a round trip
BLOCK_BYTES = 256 * KIB  # which a request for answers reads, as the next rows are near
NUM_BLOCKS = 256  # are kept

_HEAD = struct.Struct(f"<{len(MAGIC)}sII")
_ENTRY = struct.Struct(f"<{HALF_BYTES}sQ")
_ENTRIES = np.dtype([("half", "<u8"), ("offset", "<u8")])
MAX_ROWS = (HEAD_BYTES - _HEAD.size) // _ENTRY.size  # of an object

logger = logging.getLogger(__name__)


class RowObject:
    """An object that grows.

    Attributes:
        places: What it has more than the bucket.
        num_bytes: Of its records.
    """

    def __init__(self, name: str) -> None:
        self.name, self.places = name, list[Place]()
        self._index, self._records = bytearray(), bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self._records)

    def has_room(self, num_rows: int) -> bool:
        num_entries = len(self._index) // _ENTRY.size
        return num_entries + num_rows <= MAX_ROWS and self.num_bytes < PUT_BYTES

    def append(self, data: bytes) -> int:
        """Add records; return where they begin."""
        begin = HEAD_BYTES + len(self._records)
        self._records += data
        return begin

    def add(self, places: Sequence[Place]) -> None:
        """Have rows found whose records were appended."""
        self.places += places
        for key, offset in places:
            self._index += _ENTRY.pack(key[:HALF_BYTES], offset)

    def as_bytes(self) -> bytes:
        num_rows = len(self._index) // _ENTRY.size
        head = _HEAD.pack(MAGIC, num_rows, zlib.crc32(self._index)) + self._index
        return head.ljust(HEAD_BYTES, b"\0") + self._records


def read_index(head: bytes) -> npt.NDArray[np.void]:
    """Return the entries of an object's head: half a key, and where the record is.

    Raises:
        DamagedRecordError: It is of something else.
    """
    if len(head) < HEAD_BYTES or not head.startswith(MAGIC):
        raise DamagedRecordError("it does not begin as an object of a journal does")
    _, num_rows, checksum = _HEAD.unpack_from(head)
    index = head[_HEAD.size : _HEAD.size + num_rows * _ENTRY.size]
    if num_rows > MAX_ROWS or zlib.crc32(index) != checksum:
        raise DamagedRecordError("its index is damaged")
    return np.frombuffer(index, _ENTRIES)


class ObjectWriter(JournalWriter):
    """Puts an object when it is full or old enough. One that is refused is put again, with more."""

    def __init__(self, bucket: Bucket, *, sync_every_s: float, on_written: OnWritten) -> None:
        self._bucket, self._prefix = bucket, PREFIX + uuid.uuid4().hex
        self._num_objects = 0
        self._objects: list[RowObject] = []  # full ones that wait for the store, and the last
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

    def _write(self, rows: Sequence[Row]) -> None:
        for begin in range(0, len(rows), MAX_ROWS):
            some = rows[begin : begin + MAX_ROWS]
            if not (self._objects and self._objects[-1].has_room(len(some))):
                name = f"{self._prefix}-{self._num_objects:06d}{SUFFIX}"
                self._objects.append(RowObject(name))
                self._num_objects += 1
            super()._write(some)

    def _append_bytes(self, data: bytes) -> int:
        waiting = sum(one.num_bytes for one in self._objects)
        if waiting + len(data) > MAX_WAITING_BYTES and self._is_failing:
            raise OSError(f"{format_bytes(waiting)} wait for the store, and no more are kept")
        return self._objects[-1].append(data)

    def _publish(self, places: Sequence[Place]) -> None:
        self._objects[-1].add(places)
        if not (self._objects[-1].has_room(1) or self._is_failing):
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
        while self._objects:
            first = self._objects[0]
            if first.places:
                self._bucket.put(first.name, first.as_bytes())
                self._on_written(PurePosixPath(first.name), first.places)
                first.places = []
            if len(self._objects) == 1 and first.has_room(1):
                break
            self._objects.pop(0)
        self._unsynced_since_s = None
        self._note_success()

    def _note_success(self) -> None:
        if not self._num_waiting:  # what is appended is in memory and not safe yet
            super()._note_success()

    @property
    def _num_waiting(self) -> int:
        return sum(len(one.places) for one in self._objects)

    def _finish(self) -> None:
        for delay_s in (*RETRY_LAST_AFTER_S, 0.0):
            self._sync()
            if not self._num_waiting:
                return
            time.sleep(delay_s)
        self.num_lost_rows += self._num_waiting


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
        self._kept: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
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
                halves.append(index["half"])
                places.append(index["offset"] + np.uint64(number << OFFSET_BITS))
        if halves:
            self._index.add_all(np.concatenate(halves), np.concatenate(places))
        self.contents.num_files = len(sizes)
        self.contents.num_rows = sum(map(len, halves))

    def _try_read_index(self, name: str) -> npt.NDArray[np.void] | Exception:
        try:
            return read_index(self.bucket.read(name, 0, HEAD_BYTES))
        except (OSError, DamagedRecordError) as error:
            return error

    def _open(self, path: PurePath) -> io.BufferedReader:
        return io.BufferedReader(_Blocks(functools.partial(self._read_block, path.name)))

    def _add_places(self, path: PurePath, places: Sequence[Place]) -> None:
        with self._guard:  # the object has grown
            for key in [key for key in self._kept if key[0] == path.name]:
                del self._kept[key]
        super()._add_places(path, places)

    def _read_block(self, name: str, number: int) -> bytes:
        """Return a block of an object; several calls that need it at once read it once."""
        key = name, number
        with self._guard:
            future = self._kept.get(key)
            is_first = future is None
            if future is None:
                future = self._kept[key] = Future()
                if len(self._kept) > NUM_BLOCKS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if not is_first:
            return future.result()
        begin = number * BLOCK_BYTES
        try:
            data = self.bucket.read(name, begin, begin + BLOCK_BYTES)
        except BaseException as error:
            with self._guard:
                if self._kept.get(key) is future:
                    del self._kept[key]
            future.set_exception(error)
            raise
        future.set_result(data)
        return data


class _Blocks(io.RawIOBase):
    """A file whose blocks are read where they are needed."""

    def __init__(self, read_block: Callable[[int], bytes]) -> None:
        self._read_block, self._at = read_block, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, begin = divmod(self._at, BLOCK_BYTES)
        part = self._read_block(number)[begin : begin + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


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
        num_failed, written = 0, RowObject(name)
        raw = cast("io.RawIOBase", io.BytesIO(bucket.read(name)))
        file: io.BufferedReader = io.BufferedReader(raw)
        with contextlib.suppress(DamagedRecordError):  # what follows damage is ignored by all
            for record in read_records_from(file, HEAD_BYTES):
                is_failed = record.key != NOBODY and has_error(record.payload)
                num_failed += is_failed
                key = NOBODY if is_failed else record.key
                written.add([(key, written.append(pack_record(key, record.payload)))])
        if num_failed:
            bucket.put(name, written.as_bytes())
        num_forgotten += num_failed
    return num_forgotten
