"""Files of an output, local or on an object store: paths, reading, writing whole, plain errors."""

import contextlib
import glob
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # its HTTP library's
from pyarrow import fs

from raymoe.data.journal import open_private, sync_directory
from raymoe.download.datasets import HubDataset, is_dataset
from raymoe.download.uris import help_for, open_uri, reason_of, without_secrets
from raymoe.errors import CheckpointError, ConfigError, ExecutionError
from raymoe.specs.files import kind_problem

CHUNK_BYTES = 16 << 20
# A job of days must outlive a store that is busy or away for a minute.
RETRY_AFTER_S = (1.0, 4.0, 15.0, 40.0)

Chunks = Callable[[], Iterable[bytes]]

logger = logging.getLogger(__name__)


def upload(
    filesystem: fs.FileSystem,
    path: str,
    chunks: Chunks,
    *,
    explain: Callable[[Exception], str],
    retry_after_s: Sequence[float] = RETRY_AFTER_S,
) -> None:
    """Write a file; try again when that fails.

    Args:
        chunks: Gives the content, from its start, each time it is called.
        explain: Turns the error of the file system into a message.
        retry_after_s: How long to wait before each further try.

    Raises:
        ExecutionError: All tries failed.
    """
    for delay_s in (*retry_after_s, None):
        try:
            _send(filesystem, path, chunks())
        except (pa.ArrowException, OSError) as error:
            if delay_s is None:
                raise ExecutionError(explain(error)) from error
            logger.warning("%s; trying again in %g s", explain(error), delay_s)
            time.sleep(delay_s)
        else:
            return


def chunks_of(file: IO[bytes] | Any) -> Iterator[bytes]:
    """Yield the rest of an open file piece by piece."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _send(filesystem: fs.FileSystem, path: str, chunks: Iterable[bytes]) -> None:
    stream = filesystem.open_output_stream(path)
    try:
        for chunk in chunks:
            stream.write(chunk)
    except BaseException:
        # Closing makes a file of what was sent so far, and so would forgetting to.
        with contextlib.suppress(pa.ArrowException, OSError):
            stream.close()
        with contextlib.suppress(pa.ArrowException, OSError):
            filesystem.delete_file(path)
        raise
    stream.close()


# A file of these appears when it is complete, under its own name; they have no directories.
OBJECT_STORES = frozenset({"s3", "gcs", "abfs"})
HUB = "hf"  # the scheme of data sets on the Hugging Face hub
HUB_HELP = "; check the network, and the access token (HF_TOKEN) on every node"
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # of text, by the end of its name
NUM_READERS = 16  # files that are read at once where there are many: each takes a round trip
BUFFER_BYTES = 8 << 20  # of lines that are read: each buffer is a request
SPOOL_BYTES = 64 << 20  # what waits to be sent is kept in memory up to this size


def find_dataset(uri: str) -> HubDataset:
    """Ask the hub for a data set; raises `ConfigError` where it has none for this user."""
    try:
        return HubDataset.find(uri)
    except CheckpointError as error:
        raise ConfigError(f"{uri} cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class Location:
    """A file or directory.

    Attributes:
        filesystem: Where it is; can be sent to Ray's workers.
        path: In the file system; of an object store, the bucket comes first.
    """

    filesystem: fs.FileSystem
    path: str
    scheme: str = ""

    @classmethod
    def local(cls, path: str | Path) -> "Location":
        return cls(fs.LocalFileSystem(), str(Path(path).absolute()))

    @classmethod
    def parse(cls, text: str) -> "Location":
        """Return what a path or URI names; nothing need be there.

        Raises:
            ConfigError: The URI is of an unknown kind, or its bucket cannot be found.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{text} cannot be used: its name is not UTF-8; rename it, or a "
                              "directory that it is in") from error  # fmt: skip
        scheme, is_uri, _ = text.partition("://")
        if not is_uri:
            return cls.local(text)
        if is_dataset(text):
            return cls.of_hub(find_dataset(text))
        try:
            filesystem, path = open_uri(text)
        except (pa.ArrowException, OSError) as error:
            shown = without_secrets(text)
            raise ConfigError(
                f"{shown} cannot be used: {reason_of(error)}{help_for(error)}"
            ) from None
        if isinstance(filesystem, fs.LocalFileSystem):
            return cls.local(path)
        return cls(filesystem, path.rstrip("/"), scheme)

    @classmethod
    def of_hub(cls, dataset: HubDataset) -> "Location":
        return cls(dataset.filesystem(), dataset.path, HUB)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else self.path

    @property
    def is_local(self) -> bool:
        """Whether it is a file of this machine: it can grow, and be forced to disk."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def local_path(self) -> Path:
        assert self.is_local
        return Path(self.path)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on."""
        return PurePosixPath(self.path).suffix

    @property
    def is_bucket(self) -> bool:
        """Whether it is a whole bucket, beside which nothing can be."""
        return self.filesystem.type_name in OBJECT_STORES and "/" not in self.path

    def at(self, path: str) -> "Location":
        """Return another file of the same file system."""
        return Location(self.filesystem, path, self.scheme)

    def child(self, name: str) -> "Location":
        return self.at(f"{self.path}/{name}")

    def sibling(self, name: str) -> "Location":
        return self.at(str(PurePosixPath(self.path).with_name(name)))

    def info(self) -> fs.FileInfo:
        """Return whether it is there, as what, and its size in bytes."""
        with self.explained("looked at"):
            return self.filesystem.get_file_info(self.path)

    def exists(self) -> bool:
        """Whether there is a file or a directory."""
        return bool(self.info().type != fs.FileType.NotFound)

    def is_file(self) -> bool:
        return bool(self.info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Whether it is a directory, or what other names begin with."""
        return bool(self.info().type == fs.FileType.Directory)

    def entries(self) -> list["Location"]:
        """Return what is in this directory, sorted; [] where there is none."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        with self.explained("listed"):
            infos = self.filesystem.get_file_info(selector)
        return [self.at(path) for path in sorted(info.path for info in infos)]

    def files(self) -> list["Location"]:
        """Return the files in this directory and those below it, without hidden ones."""
        if self.is_local:  # unlike Arrow, Python follows no links to directories
            paths = [str(path) for path in self.local_path.rglob("*") if path.is_file()]
        else:
            with self.explained("listed"):
                infos = self.filesystem.get_file_info(fs.FileSelector(self.path, recursive=True))
            paths = [info.path for info in infos if info.type == fs.FileType.File]
        return [self.at(path) for path in paths if not self._is_hidden(path)]

    def glob(self) -> list["Location"]:
        """Return the files that match this path with its ``*``, ``?``, ``[...]`` and ``**``."""
        if self.is_local:
            names = glob.glob(self.path, recursive=True)  # noqa: PTH207 - Path's needs no root
        else:
            with self.explained("listed"):
                names = ArrowFSWrapper(self.filesystem).glob(self.path)
        found = [self.at(name) for name in names]
        return [one for one in found if one.is_file()]

    def open_file(self) -> Any:
        """Open for reading at any place: an Arrow file."""
        self.check_regular()
        return self.filesystem.open_input_file(self.path)

    def open_lines(self) -> io.BufferedReader:
        self.check_regular()
        compression = COMPRESSIONS.get(self.suffix.lower())
        stream = self.filesystem.open_input_stream(self.path, compression=compression)
        return io.BufferedReader(stream, BUFFER_BYTES)

    def read_bytes(self) -> bytes:
        with self.open_file() as file:
            return cast("bytes", file.readall())

    def check_regular(self) -> None:
        """Refuse pipes and the like; raises `ConfigError`."""
        # Arrow would wait for the other end of a pipe.
        problem = kind_problem(self.local_path, follows_links=True) if self.is_local else ""
        if problem:
            raise ConfigError(f"{self} {problem}").at(path=self)

    def delete(self) -> None:
        with self.explained("deleted"):
            self.filesystem.delete_file(self.path)

    def delete_dir(self) -> None:
        """Remove the directory with what is in it."""
        with self.explained("deleted"):
            self.filesystem.delete_dir(self.path)

    def make_dir(self) -> None:
        """Make a directory here where file systems have any."""
        if self.filesystem.type_name not in OBJECT_STORES:
            with self.explained("made"):
                self.filesystem.create_dir(self.path, recursive=True)

    @contextlib.contextmanager
    def replacing(
        self, retry_after_s: Sequence[float] = RETRY_AFTER_S, *, is_private: bool = False
    ) -> Iterator[IO[bytes]]:
        """Yield a file to write: its content is here, whole and safe, when the block has ended.

        Nothing changes here when the block raises.

        Args:
            retry_after_s: Of a store that is away, how long to wait before each further try.
            is_private: A local file is for its user alone.

        Raises:
            ExecutionError: The content cannot be sent.
        """
        if self.is_local:
            with _replacing_local(self.local_path, is_private=is_private) as file:
                yield file
            return
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            yield cast("IO[bytes]", spool)
            self.write(lambda: _from_start(cast("IO[bytes]", spool)), retry_after_s)

    def write(self, chunks: Chunks, retry_after_s: Sequence[float] = RETRY_AFTER_S) -> None:
        """Write a file that appears whole; not for local files, see `replacing`.

        Args:
            chunks: Gives the content, from its start, each time it is called.

        Raises:
            ExecutionError: It cannot be sent, with what may help.
        """
        is_at_once = self.filesystem.type_name in OBJECT_STORES
        path = self.path if is_at_once else self.sibling(f".{self.name}.tmp").path
        upload(
            self.filesystem,
            path,
            chunks,
            explain=lambda error: self._said("written", error),
            retry_after_s=retry_after_s,
        )
        if not is_at_once:
            with self.explained("written"):
                self.filesystem.move(path, self.path)

    def chunks(self) -> Iterator[bytes]:
        with self.open_file() as file:
            yield from chunks_of(file)

    def check_writable(self) -> None:
        """Write and delete something beside it, before anything depends on it.

        Raises:
            ConfigError: It cannot be written or not be deleted, with what may help.
        """
        if self.is_local:
            return
        test = self.sibling(f"{self.name}.write-test")
        with test.explained("written and deleted"):
            with self.filesystem.open_output_stream(test.path) as stream:
                stream.write(b"may be deleted\n")
            self.filesystem.delete_file(test.path)

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn an error of the file system into one that names the file and what may help."""
        try:
            yield
        except (pa.ArrowException, OSError, NotImplementedError, HTTPError) as error:
            raise ConfigError(self._said(what, error)) from error

    def _said(self, what: str, error: Exception) -> str:
        help_ = HUB_HELP if self.scheme == HUB else help_for(error)
        return f"{self} cannot be {what}: {reason_of(error)}{help_}"

    def _is_hidden(self, path: str) -> bool:
        parts = PurePosixPath(path).relative_to(self.path).parts
        return any(part.startswith((".", "_")) for part in parts)


def not_empty(output: object, what: str) -> str:
    """Return what to say of an output that is there already."""
    return (
        f"--output {output} already has {what}; add --resume to generate what is missing or "
        "--overwrite to start anew"
    )


def _from_start(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    return chunks_of(file)


@contextlib.contextmanager
def _replacing_local(path: Path, *, is_private: bool) -> Iterator[IO[bytes]]:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # "x": not through a link that somebody put there.
        with open(temporary, "xb", opener=open_private if is_private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
