"""Files and batches of the server: records in a directory, each in a file that appears whole.

server.lock            held by the server that uses the directory
files/ID.json, .jsonl  a record, and the content
batches/ID.json, ID/   a record, and what its job keeps while it runs
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from raymoe.condition import Condition
from raymoe.data.journal import make_directory, open_private, sync_directory
from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.files import from_plain, open_regular, read_json_object

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
MAX_NAME_CHARACTERS = 255
VALIDATING, IN_PROGRESS, FINALIZING, COMPLETED = (
    "validating", "in_progress", "finalizing", "completed",
)  # fmt: skip
FAILED, CANCELLING, CANCELLED = "failed", "cancelling", "cancelled"
ENDED = frozenset((COMPLETED, FAILED, CANCELLED))
STATUSES = ENDED | {VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING}
INPUT, OUTPUT = "batch", "batch_output"


class ApiError(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def as_plain(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of requests or responses."""

    id: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str

    def as_plain(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        plain["bytes"] = plain.pop("num_bytes")
        return plain | {"object": "file", "status": "processed", "expires_at": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why a batch failed; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch, with the fields of OpenAI's; times are Unix seconds."""

    id: str
    created_at: int
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str = VALIDATING
    metadata: tuple[tuple[str, str], ...] | None = None
    model: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: tuple[LineError, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        counts = {name: plain.pop(f"num_{name}") for name in ("total", "completed", "failed")}
        errors = list(plain.pop("errors"))
        return plain | {
            "object": "batch",
            "metadata": None if self.metadata is None else dict(self.metadata),
            "request_counts": counts,
            "errors": {"object": "list", "data": errors} if errors else None,
            "expires_at": None,
            "expired_at": None,
        }


Record = TypeVar("Record", FileRecord, BatchRecord)


class Store:
    """The files and batches of one server; any thread may use it.

    Attributes:
        changed: Notified when a batch is new or changes its status.
    """

    def __init__(self, directory: str | Path) -> None:
        """Take the directory, and read what is in it.

        Raises:
            ConfigError: It cannot be written, another server uses it, or a record is damaged.
            CheckpointError: A record is no JSON.
        """
        self.changed = Condition()
        root = make_directory(directory, "--directory")
        self._files_dir = make_directory(root / "files", "--directory")
        self._batches_dir = make_directory(root / "batches", "--directory")
        self._lock = _take_lock(root / "server.lock")
        try:
            self._files = _read_all(FileRecord, self._files_dir, FILE_ID)
            self._batches = _read_all(BatchRecord, self._batches_dir, BATCH_ID)
            self._remove_leftovers()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another server use the directory."""
        os.close(self._lock)

    def _remove_leftovers(self) -> None:
        for path in self._files_dir.glob("*.jsonl*"):
            if path.name.removesuffix(".jsonl") not in self._files:
                path.unlink()
        for batch in self._batches.values():
            if batch.status in ENDED - {FAILED}:
                self.remove_work(batch.id)

    def files(self, purpose: str | None = None) -> list[FileRecord]:
        """Return all files, or those of a purpose; the oldest first."""
        with self.changed:
            found = [one for one in self._files.values() if purpose in (None, one.purpose)]
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def file(self, file_id: str, param: str = "file_id") -> FileRecord:
        found = self._files.get(file_id)
        if found is None:
            raise ApiError(404, f"no file has the id {file_id:.80}", param=param)
        return found

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content; only ids of records become paths."""
        return self._files_dir / f"{self.file(file_id).id}.jsonl"

    def add_file(self, content: IO[bytes], filename: str) -> FileRecord:
        """Keep the content of a new file."""
        file_id = new_id("file-")
        path = self._files_dir / f"{file_id}.jsonl.tmp"
        try:
            with open(path, "xb", opener=open_private) as file:
                shutil.copyfileobj(content, file, 1 << 20)
            return self.adopt_file(file_id, path, filename, INPUT)
        finally:
            path.unlink(missing_ok=True)

    def adopt_file(self, file_id: str, path: Path, filename: str, purpose: str) -> FileRecord:
        """Move a file that is complete into the store, in place of an earlier one of this id."""
        with os.fdopen(open_regular(path), "rb") as file:
            os.fsync(file.fileno())
        record = FileRecord(
            id=file_id, num_bytes=path.stat().st_size, created_at=int(time.time()),
            filename=filename[:MAX_NAME_CHARACTERS], purpose=purpose,
        )  # fmt: skip
        path.replace(self._files_dir / f"{file_id}.jsonl")
        with self.changed:
            self._save(self._files_dir, record)
            self._files[file_id] = record
        return record

    def delete_file(self, file_id: str) -> None:
        with self.changed:
            record = self.file(file_id)
            for batch in self._batches.values():
                if batch.input_file_id == file_id and batch.status not in ENDED:
                    raise ApiError(400, f"{file_id} is the input of {batch.id}, which is "
                                   f"{batch.status}; cancel it first")  # fmt: skip
            path = self.content(file_id)
            del self._files[record.id]
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def batches(self) -> list[BatchRecord]:
        """Return all batches, the oldest first."""
        with self.changed:
            return [self._batches[batch_id] for batch_id in sorted(self._batches)]

    def batch(self, batch_id: str) -> BatchRecord:
        found = self._batches.get(batch_id)
        if found is None:
            raise ApiError(404, f"no batch has the id {batch_id:.80}", param="batch_id")
        return found

    def work_dir(self, batch_id: str) -> Path:
        """Return where the job of a batch keeps its files."""
        return self._batches_dir / self.batch(batch_id).id

    def remove_work(self, batch_id: str) -> None:
        shutil.rmtree(self.work_dir(batch_id), ignore_errors=True)

    def add_batch(self, **fields: Any) -> BatchRecord:
        record = BatchRecord(id=new_id("batch_"), created_at=int(time.time()), **fields)
        with self.changed:
            self.file(record.input_file_id, "input_file_id")  # still
            self._put(record)
        return record

    def advance(self, batch_id: str, source: Iterable[str], target: str, **changes: Any) -> bool:
        """Change the status of a batch; False if it was none of `source` any more."""
        with self.changed:
            batch = self.batch(batch_id)
            if batch.status not in source:
                return False
            changes[f"{target}_at"] = int(time.time())
            self._put(dataclasses.replace(batch, status=target, **changes))
        return True

    def count(self, batch_id: str, *, num_completed: int, num_failed: int) -> None:
        """Note how far a batch is; it is not written, a later server counts again."""
        with self.changed:
            self._batches[batch_id] = dataclasses.replace(
                self.batch(batch_id), num_completed=num_completed, num_failed=num_failed
            )

    def _put(self, record: BatchRecord) -> None:
        self._save(self._batches_dir, record)
        self._batches[record.id] = record
        self.changed.notify_all()

    def _save(self, directory: Path, record: FileRecord | BatchRecord) -> None:
        path = directory / f"{record.id}.json"
        temporary = path.with_suffix(".json.tmp")
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8", opener=open_private) as file:
            json.dump(dataclasses.asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(directory)


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess; later ids sort after earlier ones."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


def page(
    records: list[Any], query: Mapping[str, str], *, default: int, maximum: int
) -> dict[str, Any]:
    """Return the part of a list that ``limit`` and ``after`` ask for."""
    text = query.get("limit", str(default))
    if not re.fullmatch(r"[0-9]{1,6}", text, re.ASCII) or not 1 <= int(text) <= maximum:
        raise ApiError(400, f"limit is {text:.20}; it takes 1 to {maximum}", param="limit")
    after, begin = query.get("after"), 0
    if after is not None:
        places = [index for index, record in enumerate(records) if record.id == after]
        if not places:
            raise ApiError(400, f"after is {after:.80}, which is not in the list", param="after")
        begin = places[0] + 1
    found = records[begin : begin + int(text)]
    return {
        "object": "list",
        "data": [record.as_plain() for record in found],
        "first_id": found[0].id if found else None,
        "last_id": found[-1].id if found else None,
        "has_more": begin + len(found) < len(records),
    }


def _take_lock(path: Path) -> int:
    try:
        lock = open_regular(path, os.O_RDWR | os.O_CREAT)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"--directory {path.parent} cannot be locked: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"--directory {path.parent} is used by another server; end it, or choose another"
        ) from None
    return lock


def _read_all(kind: type[Record], directory: Path, pattern: re.Pattern[str]) -> dict[str, Record]:
    found = {}
    for path in sorted(directory.glob("*.json")):
        if pattern.fullmatch(path.stem):
            plain = read_json_object(directory, path.name)
            record = from_plain(kind, plain, where=str(path))
            if record.id != path.stem:  # it becomes a path
                raise ConfigError(f"{path}: id is {record.id!r:.100}; it is the file's name")
            status = getattr(record, "status", VALIDATING)
            if status not in STATUSES:
                raise ConfigError(f"{path}: status is {status!r:.100}; there are "
                                  f"{', '.join(sorted(STATUSES))}")  # fmt: skip
            found[path.stem] = record
    for path in directory.glob("*.json.tmp"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return found
