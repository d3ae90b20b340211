"""What a former run left of an output, and the lease that lets one run at a time write it.

    answers.lease    JSON: run, host, process, when it began, a counter that grows while it lives

A run refuses an output whose lease is alive, and takes over one whose run has ended: at once if the
kernel of this machine says so (a lock on the local file is free and the process is gone), else when
the counter has not moved for `STALE_S`, by this machine's clock alone. A run that finds another's
lease in the place of its own stops before it writes again.

In an object store the lease is one of `raymoe.data.bucket_lease`, if fsspec's library of the store
is here. Without it, and where files are remote otherwise, nothing compares and writes in one step:
two runs that begin within `READ_BACK_S` of each other may both see their own lease for as long as a
heartbeat. Their parts have different names, so that even then none replaces another's.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from raymoe.cli.sources import Source
from raymoe.cli.storage import Location
from raymoe.cli.writers import Stale, TableLines, Writer, WrittenRow
from raymoe.data import manifest as manifests
from raymoe.data.bucket import Bucket
from raymoe.data.bucket_lease import BucketLease
from raymoe.data.error_groups import ErrorGroups
from raymoe.data.holder import Holder
from raymoe.data.journal_place import JournalPlace, place_of
from raymoe.data.manifest import Manifest
from raymoe.data.prompt_template import INPUT_ERROR_COLUMN
from raymoe.data.rows import own_error
from raymoe.data.status import (
    NO_RUNS,
    FormerRuns,
    check_status,
    clear_status,
    report_beside,
    status_beside,
)
from raymoe.download.uris import without_secrets
from raymoe.errors import (
    TEMPORARY_ERRORS,
    CheckpointError,
    ConfigError,
    ExecutionError,
    RaymoeError,
)
from raymoe.openai.batch import request_digest
from raymoe.report import is_report
from raymoe.specs.files import from_plain, is_in_bucket, open_regular
from raymoe.status_view import UNKNOWN_RUNS, former_runs
from raymoe.units import format_bytes

HEARTBEAT_S, STALE_S, READ_BACK_S = 10.0, 60.0, 1.0

logger = logging.getLogger(__name__)


class Lease:
    """The right to write an output; a context manager.

    Attributes:
        run: Id of this run, in the names of its parts.
    """

    def __init__(self, output: Location, bucket: Bucket | None = None) -> None:
        """Make one that is not taken.

        Args:
            bucket: Where it is in the output's store; see `lease_bucket`.
        """
        self.run = uuid.uuid4().hex[:8]
        self._in_bucket = (
            None if bucket is None else BucketLease(bucket, f"--output {output}", run=self.run)
        )
        self._output = output
        self._file = output.sibling(f"{output.name}.lease")
        self._lock: int | None = None
        self._is_lost = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="raymoe-lease", daemon=True)
        self._mine = Holder.here(self.run)

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            ConfigError: Another run writes the output, or nothing can be written there.
        """
        if self._in_bucket is not None:
            if self._file.is_file():  # of a run without the store's library
                self._wait_for_end()
                self._file.delete()
            self._in_bucket.take()
            return self
        if self._output.is_local:
            self._file.local_path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_file(self._file.local_path)
        try:
            self._wait_for_end()
            self._write(self._mine)
            if not self._output.is_local:
                time.sleep(READ_BACK_S)
            found = self._read()
            if found is None or found.run != self.run:
                raise self._refusal(found)
        except BaseException:
            self._unlock()
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._in_bucket is not None:
            self._in_bucket.release(removes=True)
            return
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(RaymoeError):  # then it becomes stale
            found = self._read()
            if found is not None and found.run == self.run:
                self._file.delete()
        self._unlock()

    def check(self) -> None:
        """Make sure that nothing is written any more once another run has the lease.

        Raises:
            ExecutionError: It has.
        """
        if self._in_bucket is not None:
            self._in_bucket.check()
        if self._is_lost:
            raise ExecutionError(
                f"{self._file} is another run's by now: this run was paused or cut off for longer "
                f"than {STALE_S:g} s; it writes nothing more. What is missing comes with --resume"
            )

    def _lock_file(self, path: Path) -> int:
        try:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT, mode=0o644)
        except (OSError, CheckpointError) as error:
            raise ConfigError(f"the lease of --output cannot be taken: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise self._refusal(self._read()) from None
        except OSError as error:  # a file system without locks: the counter tells
            logger.info("%s cannot be locked (%s)", path, error)
        if not os.path.samestat(os.fstat(lock), path.stat()):  # a run that ended has removed it
            os.close(lock)
            return self._lock_file(path)
        return lock

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _wait_for_end(self) -> None:
        """Return when no other run is alive.

        Raises:
            ConfigError: One is.
        """
        first = self._read()
        if first is None or first.has_ended:
            return
        logger.warning("waiting up to %g s: is the run of %s alive?", STALE_S, self._file)
        deadline_s = time.monotonic() + STALE_S
        while time.monotonic() < deadline_s:
            time.sleep(min(1.0, HEARTBEAT_S / 4))
            now = self._read()
            if now is None:
                return
            if now != first:
                raise self._refusal(now)

    def _renew(self) -> None:
        beat = 0
        while not self._ends.wait(HEARTBEAT_S):
            try:
                found = self._read()
                if found is not None and found.run != self.run:
                    self._is_lost = True
                    return
                beat += 1
                self._write(Holder(**asdict(self._mine) | {"beat": beat}))
            except (RaymoeError, OSError) as error:  # away for a while; the next beat may succeed
                logger.warning("%s cannot be renewed: %s", self._file, error)

    def _read(self) -> Holder | None:
        kind = self._file.info().type
        if kind == fs.FileType.NotFound:
            return None
        if kind == fs.FileType.Directory:
            raise ConfigError(
                f"{self._file} is of a run that has fsspec's library of the store; install it here "
                "too (pip install 'fsspec[s3]', [gcs] or [abfs]), or remove what that run has left"
            )
        with self._file.explained("read"):
            data = self._file.read_bytes()
        try:
            return from_plain(Holder, json.loads(data), where=str(self._file))
        except (ValueError, RecursionError):  # torn, or of another raymoe
            return None

    def _write(self, holder: Holder) -> None:
        data = json.dumps(asdict(holder)).encode()
        if self._lock is not None:  # in place: the lock is on this file
            os.pwrite(self._lock, data.ljust(os.fstat(self._lock).st_size), 0)
        else:
            with self._file.replacing(retry_after_s=()) as file:
                file.write(data)

    def _refusal(self, holder: Holder | None) -> ConfigError:
        who = "another run" if holder is None else str(holder)
        return ConfigError(
            f"--output {self._output}: {who} writes it; wait for its end or end it, then --resume "
            f"(what is left of a run that was killed is free after {STALE_S:g} s), or choose "
            "another --output"
        )


def lease_bucket(output: Location, uri: str) -> Bucket | None:
    """Return where the lease of an output in an object store is; None where it cannot be there.

    Args:
        uri: The output as the user gave it: what it says to Arrow alone, fsspec does not know.
    """
    if not is_in_bucket(uri) or without_secrets(uri) != uri:
        return None
    try:
        return Bucket.parse(f"{output}.lease", "--output")
    except ConfigError as error:
        logger.info("two runs that begin at once may not notice each other: %s", error)
        return None


@dataclass(frozen=True, kw_only=True)
class ResumeState:
    """The files beside an output.

    Attributes:
        output: Directory or file of the rows.
        journal: Where the rows are that have finished; None where nobody said.
    """

    output: Location
    journal: Path | Bucket | None

    @classmethod
    def of(cls, output: Location, journal_dir: str | None = None) -> "ResumeState":
        """Return what is beside an output.

        Args:
            output: Directory or file of the rows.
            journal_dir: Where its journal is; None is beside a local output, else nowhere.

        Raises:
            ConfigError: The journal would be among the rows, or where none can be.
        """
        if journal_dir is None:
            beside = output.sibling(f"{output.name}.journal")
            return cls(output=output, journal=beside.local_path if output.is_local else None)
        if "://" in journal_dir and not journal_dir.startswith("file://"):
            bucket = Bucket.parse(journal_dir, "--journal")
            if f"{bucket}/".startswith(f"{output}/"):
                raise ConfigError(f"--journal {bucket} is in the output; choose another place")
            return cls(output=output, journal=bucket)
        journal = Location.parse(journal_dir)
        if output.is_local and journal.local_path.is_relative_to(output.local_path):
            raise ConfigError(f"--journal {journal} is in the output; choose another directory")
        return cls(output=output, journal=journal.local_path)

    @property
    def manifest(self) -> Location:
        return self.output.sibling(f"{self.output.name}.manifest.json")

    @property
    def status(self) -> Path | None:
        """Directory of what actors and driver say of the latest run; None where there can be none.

        Beside a local output, else beside the journal.
        """
        if self.output.is_local:
            return status_beside(self.output.local_path)
        return status_beside(self.journal) if isinstance(self.journal, Path) else None

    def former_runs(self) -> FormerRuns:
        """Return what the runs so far took; see `raymoe.status_view.former_runs`."""
        return UNKNOWN_RUNS if self.status is None else former_runs(self.status)

    @property
    def report(self) -> Path | None:
        return None if self.status is None else report_beside(self.status)

    @property
    def journal_bytes(self) -> int:
        return 0 if self._place is None else self._place.row_bytes()

    @property
    def _place(self) -> JournalPlace | None:
        return None if self.journal is None else place_of(self.journal)

    def check(self, manifest: Manifest | None, *, resume: bool, overwrite: bool) -> None:
        """Refuse to lose what a former run did, or to mix it with something else.

        Args:
            manifest: Of this run; None where the model is not on this machine: the actors will
                compare then.

        Raises:
            ConfigError: A run was not finished and nothing says what to do with it; or this run
                cannot continue it, with each difference; or files of others are in the way.
        """
        self._check_ours()
        if resume and manifest is not None:
            if self.manifest.exists():
                manifests.compare(self._read_manifest(), manifest, where=self.manifest)
            if self._place is not None and self._place.read_manifest() is not None:
                self._place.check(manifest)
        if not (resume or overwrite) and self.journal_bytes:
            raise ConfigError(
                f"{self.journal} holds {format_bytes(self.journal_bytes)} of rows of a run that "
                "was not finished; add --resume to go on with it or --overwrite to start anew"
            )

    def prepare(self, manifest: Manifest | None, *, resume: bool, has_journal: bool = True) -> None:
        """Write the manifest beside the output and into the journal, or compare with what is there.

        Raises:
            ConfigError: The journal's directory cannot be made, or belongs to another job; or
                nothing can be written where the output shall be.
        """
        if self.status is not None:
            clear_status(self.status)
        if not resume:
            self._remove_journal()
            if self.manifest.exists():
                self.manifest.delete()
        if self.manifest.exists():
            found = self._read_manifest()
            manifest = manifest or found
            manifests.compare(found, manifest, where=self.manifest)
        elif manifest is not None:
            self._write_manifest(manifest)
        self.output.check_writable()
        if has_journal and self._place is not None:
            self._place.prepare()
            if manifest is not None:
                self._place.claim(manifest)

    def forget_errors(self) -> None:
        """Have rows generated again whose recorded answer is an error, and those that ended actors.

        What is in the output is not looked at; see `find_written`.
        """
        if self._place is not None:
            self._place.forget_errors()

    def finish(self) -> None:
        """Keep the manifest and remove the journal: all its rows are in the output."""
        in_journal = None if self._place is None else self._place.read_manifest()
        if in_journal is not None and not self.manifest.exists():
            self._write_manifest(in_journal)
        self._remove_journal()

    def _read_manifest(self) -> Manifest:
        with self.manifest.explained("read"):
            data = self.manifest.read_bytes()
        return manifests.parse(data, where=self.manifest)

    def _write_manifest(self, manifest: Manifest) -> None:
        # The first file of a job: what cannot be written now is wrong, not away.
        with self.manifest.replacing(retry_after_s=(), is_private=True) as file:
            file.write(manifests.as_bytes(manifest))

    def _check_ours(self) -> None:
        if self._place is not None:
            self._place.check_only_ours()
        if self.status is not None:
            check_status(self.status)
        if self.report is not None and self.report.exists() and not is_report(self.report):
            raise ConfigError(f"{self.report} is no report of raymoe; move it away")
        if self.manifest.exists():
            is_file = self.manifest.is_file()
            if not is_file or not manifests.is_manifest(self.manifest.read_bytes()):
                raise ConfigError(f"{self.manifest} is no manifest of raymoe; move it away")

    def _remove_journal(self) -> None:
        if self._place is not None:
            self._place.remove()


LINE_ERROR = "ValueError: "


class Counts:
    """Rows of an output, their tokens and their errors."""

    def __init__(self) -> None:
        self.num_rows = self.num_error_rows = 0
        self.num_input_tokens = self.num_generated_tokens = 0
        self.error_groups = ErrorGroups()

    def see(self, writer: Writer, id_column: str | None) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of every row, and count it; samples are one row."""
        before: tuple[Any, str] | None = None
        for row in writer.read_written(id_column):
            self.num_generated_tokens += row.num_generated_tokens
            key = row.id, row.file
            if key != before if row.id is not None else not (writer.has_samples and row.sample):
                self.num_rows += 1
                self.num_input_tokens += row.num_input_tokens
                if row.error:
                    self.num_error_rows += 1
                    self.error_groups.add([row.error])
            before = key
            yield row

    def added_to(self, former: FormerRuns) -> FormerRuns:
        """Return what former runs took, with what is left of what they wrote."""
        if not (self.num_rows or former.num_runs):
            return NO_RUNS
        return dataclasses.replace(
            former,
            num_runs=max(1, former.num_runs),
            num_rows=self.num_rows,
            num_error_rows=self.num_error_rows,
            num_input_tokens=self.num_input_tokens,
            num_generated_tokens=self.num_generated_tokens,
            error_groups=self.error_groups.groups(),
        )


def count_written(writer: Writer, id_column: str | None) -> Counts:
    """Read the output of former runs, and count its rows."""
    counts = Counts()
    for _ in counts.see(writer, id_column):
        pass
    return counts


@dataclass(frozen=True, kw_only=True)
class Written:
    """Rows of the input that are already in the output.

    Attributes:
        ids: Of those that have one, and whose answer is still that of the input.
        changed: Ids of those that have been edited since.
        failed: Ids of those that ended by something outside of them.
        errors: What was said of lines so broken that they have no id.
        stale: Rows of the output that have to go: all that are to be generated again, and those of
            broken lines that are not there any more.
        counts: Of all rows of the output, stale ones too.
    """

    ids: pa.Array
    changed: pa.Array
    failed: pa.Array
    errors: pa.Array
    stale: Stale
    counts: Counts

    @property
    def num_rows(self) -> int:
        return len(self.ids) + len(self.errors)


def find_written(
    source: Source,
    writer: Writer,
    columns: Sequence[str],
    id_column: str,
    *,
    retries_errors: bool = False,
) -> Written:
    """Read the output of a former run, and find the rows of the input that have changed since.

    Args:
        columns: What the answer of a row depends on.
        retries_errors: Rows with any error count as failed.

    Raises:
        ConfigError: Its ids are of another type than those of the input.
    """
    counts = Counts()
    temporary = "" if retries_errors else TEMPORARY_ERRORS
    rows = counts.see(writer, id_column)
    digests, errors, failed, repeated = _read_output(rows, temporary)
    changed, broken = [], set()
    for now in _input_rows(source, columns, id_column):
        if now.id is None:
            broken.add(now.error)
        elif now.error.startswith(TEMPORARY_ERRORS):
            continue  # what its prompt is, a later run may see
        elif digests.get(now.id, now.digest) != now.digest:
            changed.append(now.id)
    try:
        known = pa.array(list(digests), source.ids.type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ConfigError(
            f"the ids in {writer.location} are not of the input's type {source.ids.type}: {error}"
        ) from error
    once = errors - repeated
    twice = [row_id for row_id in repeated if row_id in digests]
    again = [pa.array(ids, source.ids.type) for ids in (changed, failed, twice)]
    is_right = pc.and_not(
        pc.is_in(source.ids, value_set=known),
        pc.is_in(source.ids, value_set=pa.concat_arrays(again)),
    )
    return Written(
        ids=source.ids.filter(is_right),
        changed=again[0],
        failed=again[1],
        errors=pa.array([e.removeprefix(LINE_ERROR) for e in once & broken], pa.string()),
        stale=Stale(frozenset([*changed, *failed, *twice]), frozenset(errors - (once & broken))),
        counts=counts,
    )


def _read_output(
    rows_of_output: Iterable[WrittenRow], temporary: str | tuple[str, ...]
) -> tuple[dict[Any, str], set[str], list[Any], set[Any]]:
    """Return digests by id, errors of rows without one, ids that failed, and what is in two parts.

    A task of a run that was killed may have written its part after the next run began.
    """
    digests: dict[Any, str] = {}
    errors: set[str] = set()
    repeated: set[Any] = set()
    failed = []
    for _, rows in itertools.groupby(rows_of_output, lambda row: row.file):
        in_part = set()
        for row in rows:
            key = row.error if row.id is None else row.id
            if key in (errors if row.id is None else digests) and key not in in_part:
                repeated.add(key)
            in_part.add(key)
            if row.id is None:
                errors.add(row.error)
                continue
            digests[row.id] = row.digest
            if row.error and row.error.startswith(temporary):
                failed.append(row.id)
    return digests, errors, failed, repeated


def _input_rows(source: Source, columns: Sequence[str], id_column: str) -> Iterator[WrittenRow]:
    """Yield the rows of the input as they would be written; the errors are of broken lines."""
    lines = TableLines(source.json_columns, content_columns=tuple(columns))
    for table in source.tables([id_column, *columns, INPUT_ERROR_COLUMN]):
        for record in lines.of(table):
            digest = request_digest(record) if source.is_batch else lines.digest(record)
            error = own_error(record.get(INPUT_ERROR_COLUMN) or "")
            yield WrittenRow(record[id_column], error, digest)
