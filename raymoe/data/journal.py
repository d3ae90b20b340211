"""Which rows are finished already? Files of many processes, read by those that come after them.

A process that is killed leaves what it had written: the operating system keeps it. A machine that
goes down leaves what was synced before, at most `sync_every_s` seconds earlier. Damage costs rows,
which are generated again, and never the job.
"""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from raymoe.data.directories import make_directory
from raymoe.data.journal_writer import PREFIX, SUFFIX, JournalWriter, Place
from raymoe.data.records import (
    DamagedRecordError,
    UnfinishedRecordError,
    decode_generation,
    read_record,
    read_records,
)
from raymoe.data.row_index import RowIndex
from raymoe.engine.generation import Generation
from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.files import open_regular
from raymoe.units import format_bytes

SYNC_EVERY_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Contents:
    """What the files of a journal held when it was opened.

    Attributes:
        num_rows: Whole records.
        num_ignored_bytes: Behind the last whole record of each file.
        num_damaged_files: Of those with ignored bytes, the ones that do not just end early, as a
            killed process leaves them, or cannot be read at all.
    """

    num_files: int = 0
    num_rows: int = 0
    num_ignored_bytes: int = 0
    num_damaged_files: int = 0


class RowJournal:
    """Finished rows on disk: found by key, appended in the background. Thread-safe.

    Every process appends to a file of its own; on opening, the files of all are read once. What
    stays in memory is an index of 16 bytes for each row.

    Attributes:
        contents: What was there when it was opened.
    """

    def __init__(self, directory: str | Path, *, sync_every_s: float = SYNC_EVERY_S) -> None:
        """Read what is there.

        Args:
            directory: Made when missing. The nodes of a cluster must share its file system for one
                to find what another has finished.
            sync_every_s: Written rows are forced to disk this often, and when the journal closes.

        Raises:
            ConfigError: The directory cannot be used, or the number makes no sense.
        """
        if not sync_every_s >= 0:
            raise ConfigError(f"journal_sync_s is {sync_every_s!r}; it must be 0 or more seconds")
        self.directory = make_journal_directory(directory)
        self.contents = Contents()
        self._lock = threading.Lock()  # guards the two below
        self._numbers: dict[Path, int] = {}
        self._index = RowIndex()
        for path in journal_files(self.directory):
            self._read_file(path)
        logger.info("journal %s: %s", self.directory, self.contents)
        self._writer = JournalWriter(
            self.directory, sync_every_s=sync_every_s, on_written=self._add_places
        )

    @property
    def num_lost_rows(self) -> int:
        """Rows that could not be written."""
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
            for position, generation in _read_places(paths[number], sorted(wanted), keys):
                found[position] = generation
        return found

    def append(self, key: bytes, generation: Generation) -> None:
        """Take a finished row; see `JournalWriter.append`."""
        self._writer.append(key, generation)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until what was appended before is written; see `JournalWriter.flush`."""
        self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write and sync what is left; more than once is fine."""
        self._writer.close()

    def _add_places(self, path: Path, places: Sequence[Place]) -> None:
        with self._lock:
            number = self._numbers.setdefault(path, len(self._numbers))
            for key, offset in places:
                self._index.add(key, number, offset)

    def _read_file(self, path: Path) -> None:
        """Index the records of a file up to the first that is not whole."""
        contents = self.contents
        number = self._numbers.setdefault(path, len(self._numbers))
        size = end = 0
        contents.num_files += 1
        try:
            with _open(path) as file:
                size = os.fstat(file.fileno()).st_size
                for record in read_records(file):
                    self._index.add(record.key, number, record.offset)
                    contents.num_rows, end = contents.num_rows + 1, record.end
        except UnfinishedRecordError as error:
            contents.num_ignored_bytes += size - end
            logger.info("%s: %s; %s ignored", path, error, format_bytes(size - end))
        except (DamagedRecordError, OSError, CheckpointError) as error:
            contents.num_ignored_bytes += size - end
            contents.num_damaged_files += 1
            logger.warning(
                "%s: %s; the %s from there on are ignored and their rows generated again",
                path,
                error,
                format_bytes(size - end),
            )


def journal_files(directory: Path) -> list[Path]:
    """Return the files of finished rows in a directory, in the order of their names."""
    return sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))


def make_journal_directory(directory: str | Path) -> Path:
    """Make a journal's directory where it is missing; return its absolute path.

    Raises:
        ConfigError: As for `make_directory`.
    """
    return make_directory(directory, "journal_dir", access=os.R_OK | os.W_OK | os.X_OK)


def _read_places(
    path: Path, wanted: Sequence[tuple[int, int]], keys: Sequence[bytes]
) -> Iterator[tuple[int, Generation]]:
    """Yield position in `keys` and generation, for offsets in one file and their positions."""
    try:
        with _open(path) as file:
            for offset, position in wanted:
                record = read_record(file, offset)
                if record.key == keys[position]:
                    yield position, decode_generation(record.payload)
    except (DamagedRecordError, OSError, CheckpointError) as error:
        logger.warning("%s has changed (%s); its rows are generated again", path, error)


def _open(path: Path) -> BufferedReader:
    return os.fdopen(open_regular(path), "rb")
