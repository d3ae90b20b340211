"""Objects of a bucket: written whole, made where there is none yet, read and listed."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec

from raymoe.download.uris import help_for, reason_of
from raymoe.errors import ConfigError
from raymoe.specs.files import STORE_EXTRAS


class BucketError(OSError):
    """An object cannot be read or written; the message says which one, and why."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The objects whose names begin with a path.

    Credentials, region and endpoint are those that the library of the store finds: for S3 its
    variables (AWS_PROFILE, AWS_ENDPOINT_URL, ...), its files and the role of the machine.

    Attributes:
        filesystem: Of fsspec; lists anew each time.
        path: In the file system, the bucket first.
        uri: As the user gave it.
    """

    filesystem: Any
    path: str
    uri: str

    @classmethod
    def parse(cls, uri: str, option: str) -> "Bucket":
        """Return what a URI names; nothing is asked of the store.

        Args:
            option: The name under which the user gave it.

        Raises:
            ConfigError: It is of no known store, or the library of the store is missing.
        """
        scheme, _, place = uri.partition("://")
        if scheme not in STORE_EXTRAS:
            raise ConfigError(
                f"{option} is {uri!r}; it takes a directory, or a place in a bucket that begins "
                "with s3://, gs:// or abfs://"
            )
        if "?" in place:
            raise ConfigError(
                f"{option} {uri.partition('?')[0]} has options behind a question mark; give them "
                "in the environment of driver and nodes, such as AWS_ENDPOINT_URL and AWS_REGION"
            )
        if "/" not in place.strip("/"):
            raise ConfigError(
                f"{option} is {uri!r}, a whole bucket; name a place in it, such as "
                f"{uri.rstrip('/')}/answers.journal"
            )
        uri = uri.rstrip("/")
        try:
            filesystem, path = fsspec.core.url_to_fs(uri, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                f"{option} {uri} needs a library on the driver and on all nodes: pip install "
                f"'fsspec[{STORE_EXTRAS[scheme]}]' ({error})"
            ) from error
        return cls(filesystem, path, uri)

    def __str__(self) -> str:
        return self.uri

    def put(self, name: str, data: bytes) -> None:
        """Write an object whole; one of this name is replaced.

        Raises:
            BucketError: It may be there or not.
        """
        with self._explained("written", name):
            self.filesystem.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object whole unless there is one of this name; return whether there was none.

        A store that answered too late may have been asked twice: then the object that is there
        already is this one.

        Raises:
            BucketError: It may be there or not.
        """
        try:
            with self._explained("made", name, FileExistsError):
                self.filesystem.pipe_file(self._at(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return an object, or a part of it, which ends with it.

        Args:
            begin: Byte; one that the object does not have is an error.

        Raises:
            FileNotFoundError: There is none.
            BucketError: It cannot be read.
        """
        with self._explained("read", name, FileNotFoundError):
            return bytes(self.filesystem.cat_file(self._at(name), start=begin, end=end))

    def sizes(self, directory: str = "") -> dict[str, int]:
        """Return the bytes of each object by its name, sorted.

        Args:
            directory: Of the names: only those that begin with it and a slash.

        Raises:
            BucketError: They cannot be listed.
        """
        with self._explained("listed", directory):
            found = self.filesystem.find(self._at(directory).rstrip("/"), detail=True)
        begin = len(self.path) + 1
        return {path[begin:]: int(info["size"]) for path, info in sorted(found.items())}

    def delete(self, names: Collection[str]) -> None:
        """Remove objects.

        Raises:
            BucketError: Some may be left.
        """
        if names:
            with self._explained("deleted", ""):
                self.filesystem.rm([self._at(name) for name in names])

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextlib.contextmanager
    def _explained(
        self, what: str, name: str, answer: type[OSError] | tuple[()] = ()
    ) -> Iterator[None]:
        """Turn all errors into ours but the one that is an answer."""
        try:
            yield
        except answer:
            raise
        except Exception as error:  # each library has its own
            where = f"{self.uri}/{name}" if name else self.uri
            raise BucketError(
                f"{where} cannot be {what}: {reason_of(error)}{help_for(error)}"
            ) from error
