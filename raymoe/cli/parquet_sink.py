"""Rows as parquet: a directory of parts, each of which appears when it is complete."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from raymoe.cli.lines import Stale, TableLines, WrittenRow, check_form
from raymoe.cli.parts import Parts
from raymoe.cli.storage import NUM_READERS, Location, not_empty
from raymoe.data.columns import ERROR_COLUMN
from raymoe.data.samples import COUNT_COLUMN, explode_samples
from raymoe.errors import ConfigError, RaymoeError

ROWS_PER_PART = 8192


@dataclass(kw_only=True)
class ParquetSink:
    """A directory of part files, local or of an object store.

    Attributes:
        location: The directory.
        has_samples: Each sample is a row; those of one row of the input are in the same part.
        lines: What a row of the output holds.
        run: Id of this run.
    """

    location: Location
    has_samples: bool = False
    lines: TableLines = field(default_factory=TableLines)
    run: str = ""
    _tables: list[pa.Table] = field(default_factory=list)
    _next_part: int = 0

    @property
    def parts(self) -> Parts:
        """The files of the rows."""
        return Parts(directory=self.location, suffix=".parquet", run=self.run)

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the directory; with `overwrite`, remove the parts that are there."""
        if self.location.is_file():
            raise ConfigError(
                f"--output {self.location} is a file; a directory is needed for parquet"
            )
        self.location.make_dir()
        self.parts.check_only_ours()
        parts = self.parts.find()
        if parts and not (resume or overwrite):
            raise ConfigError(not_empty(self.location, f"{len(parts)} parts"))
        if overwrite:
            for part in parts:
                part.delete()
        self._next_part = self.parts.next_number()

    def read_written(self, id_column: str) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of the rows of all parts."""
        with ThreadPoolExecutor(NUM_READERS) as pool:
            read = functools.partial(_read_rows, id_column=id_column, lines=self.lines)
            for rows in pool.map(read, self.parts.find()):
                yield from rows

    def drop(self, stale: Stale, id_column: str) -> None:
        """Remove rows."""
        for part in self.parts.find():
            rows = _read_rows(part, id_column=id_column, lines=self.lines)
            with part.open_file() as opened:
                table = pq.read_table(opened)
            kept = table.filter(pa.array([not stale.holds(row) for row in rows], pa.bool_()))
            if kept.num_rows == table.num_rows:
                continue
            if kept.num_rows == 0:
                part.delete()
                continue
            with part.replacing() as file:
                pq.write_table(kept, file)

    def write(self, table: pa.Table) -> None:
        """Collect rows; write a part when there are enough for one."""
        self._tables.append(explode_samples(table) if self.has_samples else table)
        if sum(table.num_rows for table in self._tables) >= ROWS_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows as one part."""
        tables = [table for table in self._tables if table.num_rows]
        if not tables:
            return
        with self.parts.writing(self._next_part) as file:
            pq.write_table(pa.concat_tables(tables, promote_options="permissive"), file)
        self._next_part += 1
        self._tables.clear()

    def close(self) -> None:
        """Write what is left."""
        self.flush()


def _read_rows(part: Location, *, id_column: str, lines: TableLines) -> list[WrittenRow]:
    try:
        with part.open_file() as opened, pq.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            check_form(names, has_count=lines.has_count)
            columns = {id_column, ERROR_COLUMN, COUNT_COLUMN, *lines.content_columns}
            table = file.read(columns=[name for name in names if name in columns])
        return [lines.read(record, id_column) for record in lines.of(table)]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise RaymoeError(
            f"{part} has no readable column {id_column!r}: {error}; delete the file and "
            "resume again to generate its rows anew"
        ) from error
