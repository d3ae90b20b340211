"""Where rows go: lines of an output, and files that appear whole and can be continued."""

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from raymoe.cli.sources import Source
from raymoe.cli.storage import NUM_READERS, Location, not_empty
from raymoe.data.columns import COUNT_COLUMN, ERROR_COLUMN, INDEX_COLUMN, explode_samples
from raymoe.data.openai_batch import read_response, write_responses
from raymoe.data.rows import BadCell, as_text, content_digest, read_cells
from raymoe.errors import ConfigError, RaymoeError


class WrittenRow(NamedTuple):
    """A row of an output: its id, its error, and a digest of what its answer depends on."""

    id: Any
    error: str
    digest: str


@dataclass(frozen=True, slots=True)
class Stale:
    """Rows of an output that no longer belong to the input.

    Attributes:
        errors: Of those that have none, because their lines could not be read.
    """

    ids: frozenset[Any] = frozenset()
    errors: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ids or self.errors)

    def holds(self, row: WrittenRow) -> bool:
        return row.error in self.errors if row.id is None else row.id in self.ids


class Lines(Protocol):
    """What a line of an output holds."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        ...

    def read(self, record: dict[str, Any], id_column: str) -> WrittenRow:
        """Return what a resumed run must know of a line."""
        ...

    def ends_row(self, line: bytes) -> bool:
        """Whether a row is complete with this line."""
        ...


@dataclass(frozen=True)
class TableLines:
    """The columns of the row.

    Attributes:
        json_columns: String columns whose cells are JSON text.
        has_count: Whether rows have a column of how many samples there are.
        content_columns: What the answer of a row depends on.
    """

    json_columns: frozenset[str] = frozenset()
    has_count: bool = False
    content_columns: tuple[str, ...] = ()

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        columns = {name: self._cells(table, name) for name in table.column_names}
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))

    def read(self, record: dict[str, Any], id_column: str) -> WrittenRow:
        """Return what a resumed run must know of a line."""
        check_form(record, has_count=self.has_count)
        return WrittenRow(record[id_column], record[ERROR_COLUMN], self.digest(record))

    def digest(self, record: Mapping[str, Any]) -> str:
        """Digest of what the answer of a row depends on."""
        return content_digest(record.get(name) for name in self.content_columns)

    def ends_row(self, _line: bytes) -> bool:
        """Whether a row is complete with this line: each line is one."""
        return True

    def _cells(self, table: pa.Table, name: str) -> list[Any]:
        cells = read_cells(table, name)
        if name in self.json_columns:
            return [None if cell is None else json.loads(cell) for cell in cells]
        if not any(isinstance(cell, BadCell) for cell in cells):
            return cells
        if pa.types.is_string(table.schema.field(name).type):
            return [as_text(cell) for cell in table.column(name).cast(pa.binary()).to_pylist()]
        return [None if isinstance(cell, BadCell) else cell for cell in cells]


class BatchLines:
    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        return write_responses(table)

    def read(self, record: dict[str, Any], _id_column: str) -> WrittenRow:
        """Return what a resumed run must know of a line."""
        return WrittenRow(*read_response(record))

    def ends_row(self, _line: bytes) -> bool:
        """Whether a row is complete with this line: each line is one."""
        return True


@dataclass(frozen=True)
class SampleLines(TableLines):
    """The columns of one sample; a row has as many lines as samples, one after the other."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        return super().of(explode_samples(table))

    def ends_row(self, line: bytes) -> bool:
        """Whether a row is complete with this line: it has its last sample."""
        try:
            record = json.loads(line)
            return bool(record[INDEX_COLUMN] == record[COUNT_COLUMN] - 1)
        except (ValueError, KeyError, TypeError):
            return True  # whoever reads the rows says what is wrong with it


def write_lines(lines: Lines, table: pa.Table) -> Iterator[str]:
    """Yield the text of each row, with its line end."""
    for record in lines.of(table):
        yield json.dumps(record, ensure_ascii=False, default=as_text) + "\n"


def read_lines(
    lines: Lines, file: Iterable[bytes], id_column: str, *, where: str
) -> Iterator[WrittenRow]:
    """Yield what a resumed run must know of each line.

    Raises:
        RaymoeError: A line cannot be read; says where it is.
    """
    for number, line in enumerate(file, 1):
        try:
            row = lines.read(json.loads(line), id_column)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise RaymoeError(
                f"{where} line {number} has no readable {id_column!r}: {error!r}"
            ) from error
        yield row


def check_form(names: Container[str], *, has_count: bool) -> None:
    """Refuse to go on with rows for samples where there are others, or the other way round.

    Raises:
        ConfigError: The rows that are there were written the other way.
    """
    if (COUNT_COLUMN in names) != has_count:
        was, now = ("without", "with") if has_count else ("with", "without")
        raise ConfigError(
            f"the output was written {was} --samples-as-rows and this run is {now} it; resume it "
            "the way it was started, or start anew with --overwrite"
        )


def drop_lines(
    lines: Lines, file: Iterable[bytes], stale: "Stale", id_column: str
) -> Iterator[bytes]:
    """Yield the lines of the rows that are not stale."""
    for line in file:
        if not stale.holds(lines.read(json.loads(line), id_column)):
            yield line


PREFIX = "part-"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The parts of an output.

    Attributes:
        directory: Where they are, and nothing else.
        run: Ends the names of new parts, so that no run replaces another's.
    """

    directory: Location
    suffix: str
    run: str = ""

    def find(self) -> list[Location]:
        """Return the parts that are there, in order."""
        return [one for one in self.directory.entries() if self._is_part(one.name)]

    def check_only_ours(self) -> None:
        """Remove what a crash left half written.

        Raises:
            ConfigError: There is something that raymoe did not write.
        """
        for one in self.directory.entries():
            if one.name.startswith(f".{PREFIX}") and one.name.endswith(f"{self.suffix}.tmp"):
                one.delete()
            elif not self._is_part(one.name):
                raise ConfigError(
                    f"--output: {self.directory} holds {one.name}, which raymoe did not write; "
                    "choose another directory"
                )

    def number(self, part: Location) -> int:
        """Return the place of a part in the order."""
        match = self._match(part.name)
        assert match is not None
        return int(match["number"])

    def next_number(self) -> int:
        """Return the number after that of the last part, from 0."""
        parts = self.find()
        return 1 + self.number(parts[-1]) if parts else 0

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator[IO[bytes]]:
        """Yield the file of a part; the part is there when the block has ended."""
        run = f"-{self.run}" if self.run else ""
        with self.directory.child(f"{PREFIX}{number:06d}{run}{self.suffix}").replacing() as file:
            yield file

    def _is_part(self, name: str) -> bool:
        return self._match(name) is not None

    def _match(self, name: str) -> re.Match[str] | None:
        suffix = re.escape(self.suffix)
        return re.fullmatch(rf"{PREFIX}(?P<number>\d+)(-[0-9a-f]+)?{suffix}", name)


ROWS_PER_PART = 8192


@dataclass(kw_only=True)
class JoinedWriter:
    """One file of JSON lines on an object store; ``<name>.partial/`` until it is complete.

    As long as the first part is there, the rows are those of the parts, and the file itself is
    nothing, or old, or was being written when a run was killed. The first part is the first to be
    deleted, after the file has been written: without it, the rows are those of the file.
    """

    location: Location
    lines: Lines = field(default_factory=TableLines)
    run: str = ""
    _lines: list[str] = field(default_factory=list)
    _next_part: int = 0

    @property
    def parts(self) -> Shards:
        directory = self.location.sibling(f"{self.location.name}.partial")
        return Shards(directory=directory, suffix=".jsonl", run=self.run)

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse rows that are there, keep them or delete them."""
        if self.location.is_dir():
            raise ConfigError(
                f"--output {self.location} is a directory; a file is needed for .jsonl"
            )
        self.parts.check_only_ours()
        parts = self.parts.find()
        has_rows = bool(parts) or self._file_bytes() > 0
        if has_rows and not (resume or overwrite):
            raise ConfigError(not_empty(parts[0] if parts else self.location, "rows"))
        if overwrite or not self._holds_rows(parts):
            self._delete_parts()
        if overwrite and self.location.exists():
            self.location.delete()
        self.parts.directory.make_dir()
        self._next_part = self.parts.next_number()

    def read_written(self, id_column: str) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of all rows."""
        for one in self._files():
            with one.open_lines() as file:
                yield from read_lines(self.lines, file, id_column, where=str(one))

    def drop(self, stale: Stale, id_column: str) -> None:
        for one in self._files():
            with one.open_lines() as lines, one.replacing() as file:
                file.writelines(drop_lines(self.lines, lines, stale, id_column))

    def _files(self) -> list[Location]:
        return self.parts.find() or [self.location] * self.location.exists()

    def write(self, table: pa.Table) -> None:
        """Collect rows; write a part when there are enough for one."""
        self._lines.extend(write_lines(self.lines, table))
        if len(self._lines) >= ROWS_PER_PART:
            self.flush()

    def flush(self) -> None:
        if not self._lines:
            return
        if self._next_part == 0 and self._file_bytes() > 0:
            self._write_part(self.location.chunks())  # the rows of a run that was finished
        self._write_part(line.encode() for line in self._lines)
        self._lines.clear()

    def close(self) -> None:
        """Join the parts to the file, and delete them."""
        self.flush()
        parts = self.parts.find()
        if parts or not self.location.exists():
            self.location.write(lambda: itertools.chain.from_iterable(p.chunks() for p in parts))
        self._delete_parts()

    def _write_part(self, chunks: Iterator[bytes]) -> None:
        with self.parts.writing(self._next_part) as file:
            file.writelines(chunks)
        self._next_part += 1

    def _file_bytes(self) -> int:
        return int(self.location.info().size or 0)

    def _holds_rows(self, parts: list[Location]) -> bool:
        return bool(parts) and self.parts.number(parts[0]) == 0

    def _delete_parts(self) -> None:
        parts = self.parts.find()
        if self._holds_rows(parts):
            parts[0].delete()
        if self.parts.directory.exists():
            self.parts.directory.delete_dir()


ROWS_PER_FLUSH = 8192
TAIL_BYTES = 1 << 20


@dataclass(kw_only=True)
class JsonlWriter:
    """One file of JSON lines; ``<name>.partial`` until it is complete."""

    location: Location
    lines: Lines = field(default_factory=TableLines)
    _lines: list[str] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        return self._path.with_name(f"{self._path.name}.partial")

    @property
    def _path(self) -> Path:
        return self.location.local_path

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Start the growing file, or cut it after its last whole line and continue it."""
        if self._path.is_dir():
            raise ConfigError(f"--output {self._path} is a directory; a file is needed for .jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for file in (self._path, self.partial):
            _check_plain_file(file)
            if file.exists() and file.stat().st_size and not (resume or overwrite):
                raise ConfigError(not_empty(file, "rows"))
        if not resume:
            self.partial.write_bytes(b"")
            return
        if self._path.exists() and not self.partial.exists():
            self._path.rename(self.partial)
        self.partial.touch()
        _cut_torn_row(self.partial, self.lines)

    def read_written(self, id_column: str) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of all whole lines."""
        with self.partial.open("rb") as file:
            yield from read_lines(self.lines, file, id_column, where=str(self.partial))

    def drop(self, stale: Stale, id_column: str) -> None:
        with (
            self.partial.open("rb") as lines,
            self.location.at(str(self.partial)).replacing() as file,
        ):
            file.writelines(drop_lines(self.lines, lines, stale, id_column))

    def write(self, table: pa.Table) -> None:
        """Collect rows; write them when there are enough."""
        self._lines.extend(write_lines(self.lines, table))
        if len(self._lines) >= ROWS_PER_FLUSH:
            self.flush()

    def flush(self) -> None:
        with self.partial.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
            file.flush()
            os.fsync(file.fileno())
        self._lines.clear()

    def close(self) -> None:
        self.flush()
        self.partial.replace(self._path)


def _check_plain_file(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = f"a link to {path.readlink()}" if path.is_symlink() else "not a regular file"
        raise ConfigError(f"--output: {path} is {kind}; name a file, or a path that is free")


def _cut_torn_row(path: Path, lines: Lines) -> None:
    """Drop what follows the last row: a crash may leave half a line, or some lines of a row."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _after_newline(file, size)
        while end:
            begin = _after_newline(file, end - 1)
            file.seek(begin)
            if lines.ends_row(file.read(end - begin)):
                break
            end = begin
        if end < size:
            file.truncate(end)


def _after_newline(file: IO[bytes], end: int) -> int:
    while end:
        begin = max(0, end - TAIL_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


@dataclass(kw_only=True)
class ParquetWriter:
    """A directory of part files, local or of an object store.

    Attributes:
        has_samples: Each sample is a row; those of one row of the input are in the same part.
        lines: What a row of the output holds.
    """

    location: Location
    has_samples: bool = False
    lines: TableLines = field(default_factory=TableLines)
    run: str = ""
    _tables: list[pa.Table] = field(default_factory=list)
    _next_part: int = 0

    @property
    def parts(self) -> Shards:
        return Shards(directory=self.location, suffix=".parquet", run=self.run)

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
        tables = [table for table in self._tables if table.num_rows]
        if not tables:
            return
        with self.parts.writing(self._next_part) as file:
            pq.write_table(pa.concat_tables(tables, promote_options="permissive"), file)
        self._next_part += 1
        self._tables.clear()

    def close(self) -> None:
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


class Writer(Protocol):
    """A place for finished rows."""

    location: Location

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the place ready; refuse one that is not empty unless told how to treat it."""
        ...

    def read_written(self, id_column: str) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of every row that is already there."""
        ...

    def drop(self, stale: Stale, id_column: str) -> None: ...

    def write(self, table: pa.Table) -> None:
        """Take some rows; they are safe after the next `flush`."""
        ...

    def flush(self) -> None:
        """Put the rows where they outlive this process."""
        ...

    def close(self) -> None:
        """Flush and finish the output."""
        ...


def open_writer(
    location: Location,
    source: Source,
    *,
    has_samples: bool = False,
    content_columns: tuple[str, ...] = (),
    run: str = "",
) -> Writer:
    """Return a file of JSON lines when the name ends in .jsonl, else a directory of parquet.

    Args:
        source: Where the rows come from; requests of OpenAI's batch form become responses.
        has_samples: Each sample becomes a row.
        content_columns: What the answer of a row depends on.
        run: Id of the run, in the names of its parts.

    Raises:
        ConfigError: Responses are to be written as parquet, or the output is a whole bucket.
    """
    if location.is_bucket:
        raise ConfigError(f"--output {location} is a bucket; name a place in it, such as "
                          f"{location}/answers")  # fmt: skip
    has_count = has_samples or COUNT_COLUMN in source.schema.names
    columns = (source.json_columns, has_count, content_columns)
    if location.suffix == ".jsonl":
        kind_of_lines = SampleLines if has_samples else TableLines
        lines = BatchLines() if source.is_batch else kind_of_lines(*columns)
        if location.is_local:
            return JsonlWriter(location=location, lines=lines)
        return JoinedWriter(location=location, lines=lines, run=run)
    if source.is_batch:
        raise ConfigError(f"--output {location}: responses of an OpenAI batch are JSON lines; give "
                          "a file that ends in .jsonl, or --format table")  # fmt: skip
    lines = TableLines(*columns)
    return ParquetWriter(location=location, has_samples=has_samples, lines=lines, run=run)


def check_apart(output: Location, inputs: Iterable[Location], root: Location) -> None:
    """Refuse an output that is the input, holds it, or lies in the input's directory.

    Args:
        inputs: The files that are read.
        root: What the user named: one of them, their directory or a glob.

    Raises:
        ConfigError: With both; links of local files are followed.
    """
    target = _place(output)
    if _is_same_kind(output, root) and root.is_dir():
        directory = _place(root)
        if target == directory or target.is_relative_to(directory):
            raise ConfigError(
                f"--output {output} lies in the input directory {root}; choose another"
            )
    for one in inputs:
        if not _is_same_kind(output, one):
            continue
        if _place(one).is_relative_to(target) or _is_linked(output, one):
            raise ConfigError(f"--output {output} is or holds the input {one}; choose another")


def _is_same_kind(one: Location, other: Location) -> bool:
    return bool(one.filesystem.type_name == other.filesystem.type_name)


def _place(location: Location) -> PurePath:
    return location.local_path.resolve() if location.is_local else PurePosixPath(location.path)


def _is_linked(output: Location, one: Location) -> bool:
    is_there = output.is_local and output.local_path.exists()
    return is_there and output.local_path.samefile(one.local_path)
