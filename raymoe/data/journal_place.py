"""Where a journal is: a directory, or a place in a bucket; its rows, its manifest, its crashes."""

import contextlib
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from raymoe.config import Settings
from raymoe.data import manifest as manifests
from raymoe.data.bucket import Bucket, BucketError
from raymoe.data.bucket_journal import BucketJournal, forget_errors_in, row_objects
from raymoe.data.bucket_lease import BucketLease, is_lease
from raymoe.data.journal import (
    Journal,
    RowJournal,
    forget_errors,
    journal_files,
    make_journal_directory,
)
from raymoe.data.manifest import FILE_NAME, Manifest
from raymoe.data.quarantine import in_flight_files
from raymoe.errors import ConfigError
from raymoe.specs.files import PRIVATE_DIRECTORY, expanded

logger = logging.getLogger(__name__)


class JournalPlace(ABC):
    """A place for the journal of one job."""

    @property
    @abstractmethod
    def crash_directory(self) -> Path:
        """Where processes of this node record the rows in flight."""

    @abstractmethod
    def open(self, *, sync_every_s: float) -> Journal:
        """Open the journal, and read what is there."""

    @abstractmethod
    def prepare(self) -> None:
        """Make what must be there before a journal is; raises as `check`."""

    @abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Refuse a place that cannot be used, or belongs to another job.

        Raises:
            ConfigError: With what differs, or why it cannot be used.
        """

    @abstractmethod
    def claim(self, manifest: Manifest) -> None:
        """Write the manifest, or compare it with the one that is there; raises as `check`."""

    @abstractmethod
    def read_manifest(self) -> Manifest | None:
        """Return the manifest; None if there is none."""

    @abstractmethod
    def row_bytes(self) -> int:
        """Return the bytes of recorded rows."""

    @abstractmethod
    def check_only_ours(self) -> None:
        """Refuse a place that holds what raymoe did not write."""

    @abstractmethod
    def forget_errors(self) -> None:
        """Have rows generated again whose answer is an error, and those that ended processes."""

    @abstractmethod
    def remove(self) -> None:
        """Remove what raymoe wrote there, unless another run uses it."""

    def _forget_crashes(self) -> None:
        for path in in_flight_files(self.crash_directory):
            path.unlink(missing_ok=True)


def place_of(journal_dir: str | Path | Bucket) -> JournalPlace:
    """Return the place that a user named.

    Raises:
        ConfigError: It is neither a directory nor in a bucket of a known store.
    """
    if isinstance(journal_dir, Bucket):
        return BucketPlace(journal_dir)
    if "://" in str(journal_dir):
        return BucketPlace(Bucket.parse(str(journal_dir), "journal_dir"))
    return DirectoryPlace(expanded(journal_dir))


class DirectoryPlace(JournalPlace):
    """A directory; the nodes of a cluster must share its file system."""

    def __init__(self, path: Path) -> None:
        self._path, self._manifest = path, path / FILE_NAME

    @property
    def crash_directory(self) -> Path:
        return self._path

    def open(self, *, sync_every_s: float) -> Journal:
        return RowJournal(self._path, sync_every_s=sync_every_s)

    def prepare(self) -> None:
        make_journal_directory(self._path)

    def check(self, manifest: Manifest) -> None:
        self.prepare()
        if self._manifest.exists():
            manifests.check(self._manifest, manifest)

    def claim(self, manifest: Manifest) -> None:
        self.prepare()
        manifests.claim(self._manifest, manifest)

    def read_manifest(self) -> Manifest | None:
        return manifests.read(self._manifest) if self._manifest.exists() else None

    def row_bytes(self) -> int:
        return sum(path.stat().st_size for path in journal_files(self._path))

    def check_only_ours(self) -> None:
        path = self._path
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise ConfigError(f"{path} is not a directory; move it away")
        others = sorted(set(path.glob("*")) - set(self._files()))
        if others:
            raise ConfigError(
                f"{path} holds {others[0].name}, which raymoe did not write; move it away"
            )

    def forget_errors(self) -> None:
        if self._path.is_dir():
            forget_errors(self._path)
            self._forget_crashes()

    def remove(self) -> None:
        for path in self._files():
            path.unlink()
        if self._path.is_dir() and not any(self._path.iterdir()):
            self._path.rmdir()

    def _files(self) -> list[Path]:
        unfinished = self._path.glob(f".{FILE_NAME}.*.tmp")
        known = [*journal_files(self._path), *in_flight_files(self._path)]
        known += [self._manifest, *unfinished]
        return [path for path in known if path.exists()]


class BucketPlace(JournalPlace):
    """A place in a bucket, of which one driver has the lease.

    Crashes are recorded on each node, as nothing can be locked in a bucket.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @property
    def crash_directory(self) -> Path:
        name = hashlib.blake2b(self._bucket.uri.encode(), digest_size=8).hexdigest()
        path = Settings.from_environment().cache_directory / "crashes" / name
        with contextlib.suppress(OSError):  # then no crash is attributed, which is said there
            path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        return path

    def open(self, *, sync_every_s: float) -> Journal:
        with _explained():
            if not BucketLease(self._bucket).is_held():
                logger.warning(
                    "no driver has the lease of the journal in %s, so a second job at the same "
                    "time would not be noticed: call raymoe.configure_data_context("
                    "context=ds.context), or raymoe.generate", self._bucket,
                )  # fmt: skip
            return BucketJournal(self._bucket, sync_every_s=sync_every_s)

    def prepare(self) -> None:
        """There are no directories in buckets."""

    def check(self, manifest: Manifest) -> None:
        found = self.read_manifest()
        if found is not None:
            manifests.compare(found, manifest, where=self._where)

    def claim(self, manifest: Manifest) -> None:
        with _explained():
            if self.read_manifest() is None:
                self._bucket.create(FILE_NAME, manifests.as_bytes(manifest))
        self.check(manifest)

    def read_manifest(self) -> Manifest | None:
        with _explained():
            try:
                data = self._bucket.read(FILE_NAME)
            except FileNotFoundError:
                return None
        return manifests.parse(data, where=self._where)

    def row_bytes(self) -> int:
        with _explained():
            return sum(row_objects(self._bucket).values())

    def check_only_ours(self) -> None:
        with _explained():
            rows = row_objects(self._bucket)
            for name in self._bucket.sizes():
                if name not in rows and name != FILE_NAME and not is_lease(name):
                    raise ConfigError(
                        f"{self._bucket}/{name} was not written by raymoe; move it away"
                    )

    def forget_errors(self) -> None:
        BucketLease(self._bucket).check_free()
        with _explained():
            forget_errors_in(self._bucket)
        self._forget_crashes()

    def remove(self) -> None:
        BucketLease(self._bucket).check_free()
        with _explained():
            rows = row_objects(self._bucket)
            others = [name for name in self._bucket.sizes() if name == FILE_NAME or is_lease(name)]
            # What is left when this breaks off is still a journal of this job.
            self._bucket.delete(rows)
            self._bucket.delete(others)
        self._forget_crashes()

    @property
    def _where(self) -> str:
        return f"{self._bucket}/{FILE_NAME}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BucketError as error:
        raise ConfigError(
            f"{error}; the journal needs a bucket in which this user may list, read and write"
        ) from error
