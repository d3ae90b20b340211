"""Rows as parquet: a directory of parts, each of which appears when it is complete."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raymoe.cli.lines import check_form
from raymoe.cli.parts import Parts
from raymoe.cli.storage import NUM_READERS, Location, not_empty
from raymoe.data.columns import ERROR_COLUMN
from raymoe.data.samples import explode_samples
from raymoe.errors import ConfigError, RaymoeError

ROWS_PER_PART = 8192


@dataclass(kw_only=True)
class ParquetSink:
    """A directory of part files, local or of an object store.

    Attributes:
        location: The directory.
        has_samples: Each sample is a row; those of one row of the input are in the same part.
        has_count: Whether rows have a column of how many samples there are.
    """

    location: Location
    has_samples: bool = False
    has_count: bool = False
    _tables: list[pa.Table] = field(default_factory=list)
    _next_part: int = 0

    @property
    def parts(self) -> Parts:
        """The files of the rows."""
        return Parts(directory=self.location, suffix=".parquet")

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

    def read_written(self, id_column: str) -> Iterator[tuple[Any, str]]:
        """Yield the id and the error of the rows of all parts."""
        with ThreadPoolExecutor(NUM_READERS) as pool:
            read = functools.partial(_read_pairs, id_column=id_column, has_count=self.has_count)
            for pairs in pool.map(read, self.parts.find()):
                yield from pairs

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


def _read_pairs(part: Location, *, id_column: str, has_count: bool) -> list[tuple[Any, str]]:
    columns = [id_column, ERROR_COLUMN]
    try:
        with part.open_file() as opened, pq.ParquetFile(opened) as file:
            check_form(file.schema_arrow.names, has_count=has_count)
            table = file.read(columns=columns)
        return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise RaymoeError(
            f"{part} has no readable column {id_column!r}: {error}; delete the file and "
            "resume again to generate its rows anew"
        ) from error
