"""The journal: rows that are finished, on disk, shared by the processes of a job.

Its files hold text of rows, so they are made for this user alone.
"""

import contextlib
import dataclasses
import json
import logging
import os
import struct
import threading
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raymoe.condition import Condition
from raymoe.engine.outputs import Generation, TokenLogprob
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.specs.files import PRIVATE_DIRECTORY, PRIVATE_FILE, expanded, open_regular
from raymoe.units import MIB, format_bytes


def open_private(path: str | Path, flags: int) -> int:
    """Open a file that only this user may read, if the flags make one; fits `opener`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def make_directory(directory: str | Path, option: str, *, access: int = os.W_OK | os.X_OK) -> Path:
    """Make a directory where it is missing; return its absolute path.

    Args:
        option: The name under which the user gave it.
        access: What this user must be allowed there.

    Raises:
        ConfigError: It cannot be made or written, or is no path of a file system.
    """
    if "://" in str(directory):
        raise ConfigError(
            f"{option} is {str(directory)!r}; files there grow, which object stores cannot do: "
            "give a directory of a file system that the nodes share"
        )
    path = expanded(directory)
    try:
        path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be made: {error}") from error
    if not os.access(path, access):
        raise ConfigError(f"{option} {path} cannot be written by this user")
    return path


MAGIC = b"raymoej1"
ROW_KEY_BYTES = 16
NOBODY = bytes(ROW_KEY_BYTES)
MAX_PAYLOAD_BYTES = 256 * MIB  # a damaged length must not make a reader take all memory

_HEADER = struct.Struct(f"<II{ROW_KEY_BYTES}s")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<I")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Generation)}


class DamagedRecordError(Exception):
    """Bytes that are no whole record; says why. The reader ignores them and what follows."""


class UnfinishedRecordError(DamagedRecordError):
    """The file ends inside of a record: its writer was killed, or is still writing."""


class Record(NamedTuple):
    key: bytes
    offset: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + HEADER_BYTES + len(self.payload)


def pack_record(key: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), _checksum(key, payload), key) + payload


def read_record(file: BufferedReader, offset: int) -> Record:
    """Read the record that begins at `offset`.

    Raises:
        DamagedRecordError: There is none.
    """
    file.seek(offset)
    return _read_next(file, offset)


def read_records(file: BufferedReader) -> Iterator[Record]:
    """Yield the records of a file from its begin to its end, one in memory at a time.

    Raises:
        DamagedRecordError: After the last whole record, if anything follows it.
    """
    file.seek(0)
    magic = file.read(len(MAGIC))
    if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
        raise UnfinishedRecordError("it has no record yet")
    if magic != MAGIC:
        raise DamagedRecordError("it does not begin as a journal does")
    yield from read_records_from(file, len(MAGIC))


def read_records_from(file: BufferedReader, offset: int) -> Iterator[Record]:
    """Yield the records of a file from `offset` to its end; raises as `read_records`."""
    file.seek(offset)
    while file.peek(1):
        record = _read_next(file, offset)
        yield record
        offset = record.end


def _read_next(file: BufferedReader, offset: int) -> Record:
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise UnfinishedRecordError(f"it ends inside of the record at byte {offset}")
    length, checksum, key = _HEADER.unpack(header)
    if not 0 < length <= MAX_PAYLOAD_BYTES:
        raise DamagedRecordError(f"the record at byte {offset} is damaged")
    payload = file.read(length)
    if len(payload) < length:
        raise UnfinishedRecordError(f"it ends inside of the record at byte {offset}")
    if checksum != _checksum(key, payload):
        raise DamagedRecordError(f"the record at byte {offset} is damaged")
    return Record(key, offset, payload)


def _checksum(key: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(key, zlib.crc32(_LENGTH.pack(len(payload)))))


def encode_generation(generation: Generation) -> bytes:
    """Return everything that a generation holds; what is as by default is left out."""
    plain = _plain(generation)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"), default=_as_list).encode(
        "utf-8", "surrogatepass"
    )


def _as_list(value: object) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def decode_generation(payload: bytes) -> Generation:
    """Return the generation that `encode_generation` was given, equal in every field.

    Raises:
        DamagedRecordError: The payload is of something else.
    """
    try:
        return _generation(json.loads(payload.decode("utf-8", "surrogatepass")))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedRecordError(f"a record holds no finished row ({error})"[:300]) from error


def _plain(generation: Generation) -> dict[str, Any]:
    plain = {name: getattr(generation, name) for name in _DEFAULTS}
    changed = {name: value for name, value in plain.items() if value != _DEFAULTS[name]}
    for name in ("logprobs", "prompt_logprobs"):
        if changed.get(name) is not None:
            changed[name] = [_plain_logprob(entry) for entry in changed[name]]
    if "others" in changed:
        changed["others"] = [_plain(other) for other in generation.others]
    return changed


def _plain_logprob(entry: TokenLogprob | None) -> list[Any] | None:
    return None if entry is None else [entry.token_id, entry.logprob, entry.top]


def _generation(plain: dict[str, Any]) -> Generation:
    fields = dict(plain)
    if "token_ids" in fields:
        fields["token_ids"] = tuple(fields["token_ids"])
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = tuple(_logprob(entry) for entry in fields[name])
    if "others" in fields:
        fields["others"] = tuple(_generation(other) for other in fields["others"])
    for name, value in fields.items():
        default = _DEFAULTS.get(name)
        if isinstance(default, str | int) and type(value) is not type(default):
            raise TypeError(f"{name} is a {type(value).__name__}")
    return Generation(**fields)


def _logprob(entry: list[Any] | None) -> TokenLogprob | None:
    if entry is None:
        return None
    token_id, logprob, top = entry
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))


OFFSET_BITS = 40  # files of up to 1 TiB, 16 million of them
MIN_RECENT = 1 << 14
RECENT_PER_SORTED = 8
HALF_BYTES = ROW_KEY_BYTES // 2

UInt64s = npt.NDArray[np.uint64]


class RowIndex:
    """Half a key -> file and offset of its latest record. Not thread-safe.

    The whole key is in the record itself: who finds a place compares it there. Two rows whose keys
    agree in the half that is kept cost one of them its place, so that it is generated again.

    Entries are sorted arrays, and a dict of the latest that is merged into them when it has grown
    to an eighth of theirs: then a dict's 150 bytes for each are never needed for all.
    """

    def __init__(self) -> None:
        self._halves: UInt64s = np.empty(0, np.uint64)
        self._places: UInt64s = np.empty(0, np.uint64)
        self._recent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._halves) + len(self._recent)

    @property
    def num_bytes(self) -> int:
        return self._halves.nbytes + self._places.nbytes

    def add(self, key: bytes, file_number: int, offset: int) -> None:
        """Remember where the record of a key begins."""
        self._recent[_half(key)] = file_number << OFFSET_BITS | offset
        if len(self._recent) >= max(MIN_RECENT, len(self._halves) // RECENT_PER_SORTED):
            self._merge()

    def add_all(self, halves: UInt64s, places: UInt64s) -> None:
        """Remember many, of equal ones the first.

        Args:
            halves: The first `HALF_BYTES` of each key, as a little-endian number.
            places: File numbers, shifted left by `OFFSET_BITS`, and offsets.
        """
        halves = np.concatenate([halves, self._halves])
        places = np.concatenate([places, self._places])
        self._halves, first = np.unique(halves, return_index=True)
        self._places = places[first]

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return file number and offset of what may be the record of a key."""
        half = _half(key)
        place = self._recent.get(half)
        if place is None:
            at = int(np.searchsorted(self._halves, np.uint64(half)))
            if at == len(self._halves) or int(self._halves[at]) != half:
                return None
            place = int(self._places[at])
        return place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)

    def _merge(self) -> None:
        count = len(self._recent)
        halves = np.fromiter(self._recent.keys(), np.uint64, count)
        places = np.fromiter(self._recent.values(), np.uint64, count)
        self._recent.clear()
        self.add_all(halves, places)


def _half(key: bytes) -> int:
    return int.from_bytes(key[:HALF_BYTES], "little")


PREFIX, SUFFIX = "rows-", ".journal"

logger = logging.getLogger(__name__)

Row = tuple[bytes, Generation]
Place = tuple[bytes, int]  # key, offset of its record
OnWritten = Callable[[PurePath, Sequence[Place]], None]


class JournalWriter(ABC):
    """Appends rows to what is this process's alone. Thread-safe; one thread writes.

    Rows that come while others are being written make up the next write. A place that refuses one
    is no reason to stop: its rows are not in the journal, and a warning says so.

    Attributes:
        num_lost_rows: Rows that could not be written.
    """

    def __init__(self, place: object, *, sync_every_s: float, on_written: OnWritten) -> None:
        """Start the thread.

        Args:
            place: Where the journal is, for messages.
            sync_every_s: What was appended is made safe this often, and by `close`.
            on_written: Called with the file and the rows that can be found in it from now on.
        """
        self._place, self._sync_every_s = place, sync_every_s
        self._on_written = on_written
        self.num_lost_rows = 0
        # Guards the next lines; notified when rows come, rows are written, or it ends.
        self._changed = Condition()
        self._pending: list[Row] = []
        self._num_appended = self._num_handled = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        # The thread's own.
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
            self._wait_for(self._num_appended, timeout_s)

    def _wait_for(self, num_rows: int, timeout_s: float | None) -> None:
        self._changed.wait_for(
            lambda: self._num_handled >= num_rows or self._failure is not None, timeout_s
        )
        if self._failure is not None:
            raise ExecutionError(
                f"the journal in {self._place} failed: {self._failure!r}"
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
        with self._changed:
            self._changed.wait_for(self._has_work, self._sync_due_s())
            rows, self._pending = self._pending, []
            is_over = self._is_closing and not rows
        if rows:
            self._write(rows)
            with self._changed:
                self._num_handled += len(rows)
                self._changed.notify_all()
        if is_over:
            self._finish()
        elif self._sync_due_s() == 0.0:
            self._sync()
        return not is_over

    def _has_work(self) -> bool:
        return bool(self._pending) or self._is_closing

    def _sync_due_s(self) -> float | None:
        if self._unsynced_since_s is None:
            return None
        return max(0.0, self._unsynced_since_s + self._sync_every_s - time.monotonic())

    def _write(self, rows: Sequence[Row]) -> None:
        records, places = self._pack(rows)
        try:
            begin = self._append_bytes(b"".join(records))
        except OSError as error:
            self._lose(len(places), error)
            return
        self._note_success()
        if self._unsynced_since_s is None:
            self._unsynced_since_s = time.monotonic()
        self._publish([(key, begin + offset) for key, offset in places])

    def _pack(self, rows: Sequence[Row]) -> tuple[list[bytes], list[Place]]:
        """Return the records of rows, and where each is among them."""
        places, records, size = [], [], 0
        for key, generation in rows:
            try:
                payload = encode_generation(generation)
            except Exception:
                self.num_lost_rows += 1
                logger.exception(
                    "a finished row cannot be written to the journal; a resumed job generates it "
                    "again"
                )
                continue
            if len(payload) > MAX_PAYLOAD_BYTES:
                self.num_lost_rows += 1
                size_text = format_bytes(len(payload))
                logger.warning(
                    "a finished row of %s is larger than the %s that the journal takes; a resumed "
                    "job generates it again",
                    size_text,
                    format_bytes(MAX_PAYLOAD_BYTES),
                )
                continue
            places.append((key, size))
            records.append(pack_record(key, payload))
            size += HEADER_BYTES + len(payload)
        return records, places

    def _lose(self, num_rows: int, error: OSError) -> None:
        self.num_lost_rows += num_rows
        if not self._is_failing:
            logger.warning(
                "the journal in %s cannot be written (%s): rows that finish now are generated "
                "again if this process dies; make room, or give another journal_dir",
                self._place,
                error,
            )
        self._is_failing = True

    def _note_success(self) -> None:
        if self._is_failing:
            self._is_failing = False
            logger.warning("the journal in %s can be written again", self._place)

    @abstractmethod
    def _append_bytes(self, data: bytes) -> int:
        """Append records; return where they begin."""

    @abstractmethod
    def _publish(self, places: Sequence[Place]) -> None:
        """Have rows found that were appended, as soon as they can be."""

    @abstractmethod
    def _sync(self) -> None:
        """Make safe what was appended."""

    @abstractmethod
    def _finish(self) -> None:
        """Make safe what was appended, for the last time."""


class FileWriter(JournalWriter):
    """Appends to a file, made with the first row.

    After a failure the next rows go to a new file: nothing behind a torn record would be read.
    """

    def __init__(self, directory: Path, *, sync_every_s: float, on_written: OnWritten) -> None:
        self._directory = self._path = directory
        self._file, self._end = -1, 0
        super().__init__(directory, sync_every_s=sync_every_s, on_written=on_written)

    def _append_bytes(self, data: bytes) -> int:
        if self._file < 0:
            self._open_file()
        begin = self._end
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._end += len(data)
        return begin

    def _publish(self, places: Sequence[Place]) -> None:
        self._on_written(self._path, places)

    def _open_file(self) -> None:
        self._path = self._directory / f"{PREFIX}{uuid.uuid4().hex}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._end = 0
        self._file = open_private(self._path, flags)
        sync_directory(self._directory)
        if os.write(self._file, MAGIC) < len(MAGIC):
            raise OSError(f"{self._path}: the file system writes no bytes; is it full?")
        self._end = len(MAGIC)

    def _sync(self) -> None:
        self._unsynced_since_s = None
        if self._file < 0:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            self._lose(0, error)

    def _finish(self) -> None:
        self._sync()
        self._close_file()

    def _lose(self, num_rows: int, error: OSError) -> None:
        super()._lose(num_rows, error)
        has_records = self._end > len(MAGIC)
        if self._file >= 0 and not has_records:
            with contextlib.suppress(OSError):  # an empty file harms nobody
                self._path.unlink(missing_ok=True)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            close_file(file, self._path)


def close_file(file: int, path: Path) -> None:
    """Close a file to which all was written that can be; some file systems refuse even that."""
    try:
        os.close(file)
    except OSError as error:
        logger.warning("%s could not be closed: %s", path, error)


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to disk: syncing a file does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse it for directories; there it is the server's business.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


SYNC_EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class Contents:
    """What the files of a journal held when it was opened.

    Attributes:
        num_ignored_bytes: Behind the last whole record of each file.
        num_damaged_files: Of those with ignored bytes, the ones that do not just end early, as a
            killed process leaves them, or cannot be read at all.
    """

    num_files: int = 0
    num_rows: int = 0
    num_ignored_bytes: int = 0
    num_damaged_files: int = 0


class Journal(ABC):
    """Finished rows: found by key, appended in the background. Thread-safe.

    Every process appends to files of its own; on opening, the files of all are read once. What
    stays in memory is an index of 16 bytes for each row.

    Attributes:
        contents: What was there when it was opened.
    """

    _writer: JournalWriter

    def __init__(self) -> None:
        self.contents = Contents()
        self._lock = threading.Lock()  # guards the two below
        self._numbers: dict[PurePath, int] = {}
        self._index = RowIndex()

    @property
    def num_lost_rows(self) -> int:
        return self._writer.num_lost_rows

    def find(self, keys: Sequence[bytes]) -> list[Generation | None]:
        """Return the generation of each key that was finished, None for the others."""
        by_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
        with self._lock:
            for position, key in enumerate(keys):
                place = self._index.find(key)
                if place is not None:
                    by_file[place[0]].append((place[1], position))
            paths = list(self._numbers) if by_file else []
        found: list[Generation | None] = [None] * len(keys)
        for number, wanted in by_file.items():
            for position, generation in self._read_places(paths[number], sorted(wanted), keys):
                found[position] = generation
        return found

    def append(self, key: bytes, generation: Generation) -> None:
        self._writer.append(key, generation)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until what was appended before is written; see `JournalWriter.flush`."""
        self._writer.flush(timeout_s)

    def save(self, timeout_s: float | None = None) -> None:
        """Make sure that what was appended before outlives this process; arguments as above."""
        self.flush(timeout_s)

    def close(self) -> None:
        """Write and sync what is left; more than once is fine."""
        self._writer.close()

    @abstractmethod
    def _open(self, path: PurePath) -> BufferedReader: ...

    def _add_places(self, path: PurePath, places: Sequence[Place]) -> None:
        with self._lock:
            number = self._numbers.setdefault(path, len(self._numbers))
            for key, offset in places:
                self._index.add(key, number, offset)

    def _read_file(self, path: PurePath) -> None:
        contents = self.contents
        number = self._numbers.setdefault(path, len(self._numbers))
        size = end = 0
        contents.num_files += 1
        try:
            with self._open(path) as file:
                size = file.seek(0, os.SEEK_END)
                for record in read_records(file):
                    self._index.add(record.key, number, record.offset)
                    contents.num_rows, end = contents.num_rows + 1, record.end
        except UnfinishedRecordError as error:
            contents.num_ignored_bytes += size - end
            logger.info(
                "journal file %s: %s; its last %s are ignored",
                path,
                error,
                format_bytes(size - end),
            )
        except (DamagedRecordError, OSError, CheckpointError) as error:
            contents.num_ignored_bytes += size - end
            contents.num_damaged_files += 1
            logger.warning(
                "journal file %s: %s; the %s from there on are ignored and their rows generated "
                "again",
                path,
                error,
                format_bytes(size - end),
            )

    def _read_places(
        self, path: PurePath, wanted: Sequence[tuple[int, int]], keys: Sequence[bytes]
    ) -> Iterator[tuple[int, Generation]]:
        try:
            with self._open(path) as file:
                for offset, position in wanted:
                    record = read_record(file, offset)
                    if record.key != keys[position]:
                        continue
                    try:
                        generation = decode_generation(record.payload)
                    except Exception as error:  # whole, but of another version, say
                        logger.warning(
                            "%s: the row at byte %d cannot be read (%r) and is generated again",
                            path, offset, error,
                        )  # fmt: skip
                        continue
                    yield position, generation
        except (DamagedRecordError, OSError, CheckpointError) as error:
            logger.warning("%s has changed (%s); its rows are generated again", path, error)


class RowJournal(Journal):
    """A journal in a directory."""

    def __init__(self, directory: str | Path, *, sync_every_s: float = SYNC_EVERY_S) -> None:
        """Read what is there.

        Args:
            directory: Made when missing. The nodes of a cluster must share its file system for one
                to find what another has finished.
            sync_every_s: Written rows are forced to disk this often, and when the journal closes.

        Raises:
            ConfigError: The directory cannot be used, or the number makes no sense.
        """
        check_interval(sync_every_s)
        super().__init__()
        self.directory = make_journal_directory(directory)
        for path in journal_files(self.directory):
            self._read_file(path)
        logger.info("journal %s: %s", self.directory, self.contents)
        self._writer = FileWriter(
            self.directory, sync_every_s=sync_every_s, on_written=self._add_places
        )

    def _open(self, path: PurePath) -> BufferedReader:
        return _open(Path(path))


def check_interval(sync_every_s: float) -> None:
    if not sync_every_s >= 0:
        raise ConfigError(f"journal_sync_s is {sync_every_s!r}; it must be 0 or more seconds")


def forget_errors(directory: Path) -> int:
    """Forget the rows that ended with an error, so that they are generated again.

    Their records stay, under a key that no row has. No process may be writing there.

    Returns:
        How many there were.
    """
    num_forgotten = 0
    for path in journal_files(directory):
        failed: list[Record] = []
        # What follows damage is ignored by all.
        with _open(path) as file, contextlib.suppress(DamagedRecordError):
            known = (one for one in read_records(file) if one.key != NOBODY)
            failed.extend(one for one in known if has_error(one.payload))
        with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as written:
            for record in failed:
                written.seek(record.offset)
                written.write(pack_record(NOBODY, record.payload))
        num_forgotten += len(failed)
    return num_forgotten


def has_error(payload: bytes) -> bool:
    """Whether a record is of a row that ended with an error."""
    if b'"error"' not in payload:  # which most rows are spared to be decoded for
        return False
    with contextlib.suppress(DamagedRecordError):
        return bool(decode_generation(payload).error)
    return False


def journal_files(directory: Path) -> list[Path]:
    """Return the files of finished rows in a directory, in the order of their names."""
    return sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))


def num_recorded_rows(directory: Path) -> int:
    """Return the distinct rows of a journal, by the heads of its whole records."""
    keys = bytearray()
    for path in journal_files(directory):
        with contextlib.suppress(OSError, CheckpointError), _open(path) as file:
            size, begin = os.fstat(file.fileno()).st_size, len(MAGIC)
            while begin + HEADER_BYTES < size:
                file.seek(begin)
                length, _, key = _HEADER.unpack(file.read(HEADER_BYTES))
                begin += HEADER_BYTES + length
                if not 0 < length <= MAX_PAYLOAD_BYTES or begin > size:
                    break
                keys += key
    return len(np.unique(np.frombuffer(keys, [("high", np.uint64), ("low", np.uint64)])))


def make_journal_directory(directory: str | Path) -> Path:
    """Make a journal's directory where it is missing; return its absolute path.

    Raises:
        ConfigError: As for `make_directory`.
    """
    return make_directory(directory, "journal_dir", access=os.R_OK | os.W_OK | os.X_OK)


def _open(path: Path) -> BufferedReader:
    return os.fdopen(open_regular(path), "rb")
