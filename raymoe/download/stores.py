"""Models in object stores: read by ranges into a copy on this node, once for all its processes.

The copy has the model's files under their names. Beside them, in a directory of its own, is what is
known of each object (bytes and etag), and how far one is read: an object that has changed is read
anew, and one that was broken off is read on.
"""

import contextlib
import functools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa
from pyarrow import fs

from raymoe.download.copies import copy_directory, find_copy
from raymoe.download.files import (
    Check,
    UnreachableError,
    first_file,
    is_complete,
    is_small,
    problem_of,
    weight_names,
)
from raymoe.download.node import once_a_node, progress_in_log
from raymoe.download.uris import help_for, is_refusal, open_uri, reason_of, without_secrets
from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.files import MAX_JSON_BYTES, PRIVATE_DIRECTORY, write_file
from raymoe.units import MIB, ceil_div, format_bytes

CHUNK_BYTES = 16 * MIB  # of a request
NUM_READERS = 16
RETRY_AFTER_S = (1.0, 4.0, 15.0, 40.0)  # of a store that is busy or away for a minute
STATE = ".raymoe"
TEMPLATES = "additional_chat_templates"

T = TypeVar("T")
Item = TypeVar("Item")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """What tells one content of an object from another.

    Attributes:
        etag: Where the store has none, when it was written.
    """

    num_bytes: int
    etag: str

    @classmethod
    def of(cls, filesystem: fs.FileSystem, path: str, file: Any) -> "Version":
        """Return that of an object that is open for reading."""
        known = {key.lower(): value for key, value in (file.metadata() or {}).items()}
        etag = known.get("etag")
        if etag is None:
            return cls(file.size(), str(filesystem.get_file_info(path).mtime_ns))
        return cls(file.size(), etag.decode(errors="replace"))

    def as_text(self) -> str:
        return json.dumps([self.num_bytes, self.etag])


@dataclass(frozen=True, slots=True)
class StoreModel:
    """A model whose files are objects with a common prefix.

    Attributes:
        uri: Such as "s3://bucket/models/Mixtral-8x7B".
    """

    uri: str

    def __str__(self) -> str:
        return without_secrets(self.uri)

    @property
    def directory(self) -> Path:
        """Where its copy is, or will be."""
        return copy_directory(self.uri)

    def find(self) -> Path | None:
        """Return the copy with the whole model; None without one."""
        return self.directory if is_complete(self.directory) else None

    def find_files(self) -> Path | None:
        """Return the copy with its configuration; None without one."""
        return find_copy(self.uri)

    def fetch_files(self, check: Check) -> tuple[Path, int]:
        """Copy all but the weights: see `RemoteModel`."""
        with self._explained():
            objects = self._copy_small(check)
        missing = [name for name in objects.weight_names() if not (self.directory / name).exists()]
        return self.directory, sum(objects.infos[name].size for name in missing)

    def download(self) -> Path:
        """Copy the whole model into the cache of raymoe: see `RemoteModel`.

        What is there already is compared with the store. Without an answer of it, a whole copy is
        used as it is.

        Raises:
            CheckpointError: Also where the disk is too small.
        """
        with once_a_node(self.directory.parent / "lock", str(self)):
            try:
                with self._explained():
                    self._copy_small(_accept, RETRY_AFTER_S).copy_weights(str(self))
            except UnreachableError as error:
                if self.find() is None:
                    raise
                logger.warning("using the copy in %s as it is: %s", self.directory, error)
        return self.directory

    def _copy_small(self, check: Check, retry_after_s: Sequence[float] = ()) -> "_Objects":
        objects = _Objects.at(self.uri, self.directory, retry_after_s)
        problem = problem_of(objects.infos)
        if problem:
            raise CheckpointError(f"{self} has {problem}")
        objects.copy_small([first_file(objects.infos)])
        check(self.directory)
        objects.copy_small(objects.small_names())
        objects.drop_changed_weights()
        return objects

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an error of the store into one that says whose fault it is."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            text = f"the model {self} cannot be read: {reason_of(error)}{help_for(error)}"
            if "Unrecognized filesystem type" in str(error):
                raise ConfigError(text) from None
            kind = CheckpointError if is_refusal(error) else UnreachableError
            raise kind(text) from error


def _accept(_: Path) -> None:
    """Take a configuration as it is: whoever loads the model looks at it."""


@dataclass(frozen=True, slots=True)
class _Objects:
    """The objects of a model, and the directory of their copies.

    Attributes:
        infos: By names in the directory; hidden ones are left out.
        retry_after_s: Of a store that does not answer, how long to wait before each further try.
    """

    filesystem: fs.FileSystem
    infos: Mapping[str, fs.FileInfo]
    directory: Path
    retry_after_s: Sequence[float]

    @classmethod
    def at(cls, uri: str, directory: Path, retry_after_s: Sequence[float]) -> "_Objects":
        filesystem, path = retried(lambda: open_uri(uri), retry_after_s)
        path = path.rstrip("/")

        def entries(of: str) -> list[fs.FileInfo]:
            return retried(lambda: filesystem.get_file_info(fs.FileSelector(of)), retry_after_s)

        found = entries(path)
        if any(info.base_name == TEMPLATES for info in found):
            found += entries(f"{path}/{TEMPLATES}")
        named = {info.path[len(path) + 1 :]: info for info in found if info.is_file}
        infos = {name: info for name, info in named.items() if not f"/{name}".count("/.")}
        _make_directory(directory / STATE)
        return cls(filesystem, infos, directory, retry_after_s)

    def small_names(self) -> Sequence[str]:
        return [
            name
            for name, info in self.infos.items()
            if is_small(name) and info.size <= MAX_JSON_BYTES
        ]

    def copy_small(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(NUM_READERS, "raymoe-store") as pool:
            run_all(pool, self._copy_small, names)

    def _copy_small(self, name: str) -> None:
        with self._open(name) as file:
            version = self._version_of(name, file)
            if not self._is_current(name, version):
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, file.readall())
                self._note(name, version)

    def drop_changed_weights(self) -> None:
        """Remove copies of objects that have changed: a copy with all its files is whole."""
        here = [name for name in self.weight_names() if (self.directory / name).exists()]
        for name, version in self._versions(here).items():
            if not self._is_current(name, version):
                (self.directory / name).unlink()

    def copy_weights(self, what: str) -> None:
        """Read what is missing of the weights by ranges, several at a time.

        Args:
            what: They are of, for people.
        """
        names = self.weight_names()
        missing = [name for name in names if not (self.directory / name).exists()]
        if not missing:
            return
        parts = {
            name: _Part.open(self.directory / STATE / name, version)
            for name, version in self._versions(missing).items()
        }
        self._check_disk(parts)
        num_bytes = sum(int(self.infos[name].size) for name in names)
        num_here = num_bytes - sum(part.version.num_bytes for part in parts.values())

        def num_done() -> int:
            return num_here + sum(part.num_done for part in parts.values())

        with (
            progress_in_log(what, num_done, num_bytes),
            ThreadPoolExecutor(NUM_READERS, "raymoe-store") as pool,
        ):
            for name, part in parts.items():
                self._copy_by_ranges(name, part, pool)

    def weight_names(self) -> Sequence[str]:
        return weight_names(self.directory, self.infos)

    def _check_disk(self, parts: Mapping[str, "_Part"]) -> None:
        needed = sum(part.version.num_bytes - part.num_done for part in parts.values())
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise CheckpointError(
                f"{self.directory}: {format_bytes(needed)} of weights are still to be copied, and "
                f"{format_bytes(free)} are free; make room, or set RAYMOE_CACHE to a directory on "
                "a larger disk"
            )

    def _copy_by_ranges(self, name: str, part: "_Part", pool: ThreadPoolExecutor) -> None:
        with part, self._open(name) as file:
            run_all(pool, functools.partial(part.copy, file), part.missing())
            if self._version(name) != part.version:
                part.remove()
                raise UnreachableError(
                    f"{self.infos[name].path}: has changed while it was read; load the model again"
                )
            part.finish(self.directory / name)
            self._note(name, part.version)

    def _versions(self, names: Sequence[str]) -> dict[str, Version]:
        with ThreadPoolExecutor(NUM_READERS, "raymoe-store") as pool:
            return dict(zip(names, pool.map(self._version, names), strict=True))

    def _version(self, name: str) -> Version:
        with self._open(name) as file:
            return self._version_of(name, file)

    def _version_of(self, name: str, file: Any) -> Version:
        return Version.of(self.filesystem, self.infos[name].path, file)

    def _open(self, name: str) -> Any:
        path = self.infos[name].path
        return retried(lambda: self.filesystem.open_input_file(path), self.retry_after_s)

    def _is_current(self, name: str, version: Version) -> bool:
        path, note = self.directory / name, self._note_of(name)
        if not (path.is_file() and note.is_file()):
            return False
        return path.stat().st_size == version.num_bytes and note.read_text() == version.as_text()

    def _note(self, name: str, version: Version) -> None:
        write_file(self._note_of(name), version.as_text())

    def _note_of(self, name: str) -> Path:
        return self.directory / STATE / f"{name.replace('/', '-')}.version"


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: the copy of a model cannot be kept here ({error.strerror}); set "
            "RAYMOE_CACHE to a directory that can be written"
        ).at(path=directory) from error


def run_all(
    pool: ThreadPoolExecutor, call: Callable[[Item], object], items: Sequence[Item]
) -> None:
    """Call a function with each item, in threads; when one call fails, no other runs any more."""
    futures = [pool.submit(call, item) for item in items]
    try:
        for future in as_completed(futures):
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def retried(call: Callable[[], T], retry_after_s: Sequence[float]) -> T:
    """Return what a call to a store returns; try again where the store does not answer."""
    for delay_s in retry_after_s:
        try:
            return call()
        except (pa.ArrowException, OSError) as error:
            if is_refusal(error):
                raise
            logger.warning("%s; trying again in %g s", reason_of(error), delay_s)
            time.sleep(delay_s)
    return call()


class _Part:
    """An object that is read by ranges into a file, and the record of the ranges that are there.

    Each is forced to disk before it is recorded, so that the record is true after a crash.
    """

    def __init__(self, path: Path, record: Path, version: Version, done: set[int]) -> None:
        self.version, self._path, self._record, self._done = version, path, record, done
        self._lock = threading.Lock()

    @classmethod
    def open(cls, place: Path, version: Version) -> "_Part":
        """Go on where a former process broke off, unless the object has changed since.

        Args:
            place: Path without an ending.
        """
        path, record = (place.with_name(f"{place.name}.{end}") for end in ("part", "ranges"))
        head = f"{version.as_text()} {CHUNK_BYTES}\n"
        lines = record.read_text().splitlines(keepends=True) if record.is_file() else []
        done: set[int] = set()
        if lines[:1] == [head] and path.is_file():
            done = {int(line) for line in lines[1:] if line.endswith("\n")}  # the last may be torn
        else:
            path.unlink(missing_ok=True)
        write_file(record, head + "".join(f"{number}\n" for number in sorted(done)))
        return cls(path, record, version, done)

    @property
    def num_done(self) -> int:
        """Bytes that are there; at most a range too many."""
        return min(self.version.num_bytes, len(self._done) * CHUNK_BYTES)

    def missing(self) -> list[int]:
        """Return the ranges to read, by number."""
        num_ranges = ceil_div(self.version.num_bytes, CHUNK_BYTES)
        return [number for number in range(num_ranges) if number not in self._done]

    def __enter__(self) -> "_Part":
        self._file = self._path.open("r+b" if self._path.exists() else "x+b", buffering=0)
        os.truncate(self._file.fileno(), self.version.num_bytes)
        self._ranges = self._record.open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._ranges.close()

    def copy(self, file: Any, number: int) -> None:
        """Read a range of the object, whose file may be read by several threads."""
        begin = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, self.version.num_bytes - begin)
        data = memoryview(retried(lambda: _read(file, length, begin), RETRY_AFTER_S))
        while data:
            count = os.pwrite(self._file.fileno(), data, begin)
            data, begin = data[count:], begin + count
        os.fdatasync(self._file.fileno())
        with self._lock:
            self._ranges.write(f"{number}\n".encode())
            self._done.add(number)

    def finish(self, path: Path) -> None:
        """Give the file its name."""
        self._path.replace(path)
        self._record.unlink()

    def remove(self) -> None:
        self._path.unlink()
        self._record.unlink()


def _read(file: Any, num_bytes: int, begin: int) -> bytes:
    data = cast("bytes", file.read_at(num_bytes, begin))
    if len(data) != num_bytes:
        raise OSError(f"{len(data)} bytes of {num_bytes} from byte {begin}")
    return data
