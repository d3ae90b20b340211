"""Where rows go: lines of an output, and files that appear whole and can be continued."""

import functools
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from raymoe.cli.sources import Flags, Source
from raymoe.cli.storage import NUM_READERS, Location, not_empty
from raymoe.data.columns import COUNT_COLUMN, ERROR_COLUMN, INDEX_COLUMN, explode_samples
from raymoe.data.error_groups import ErrorGroups
from raymoe.data.json_lines import MAX_WRITTEN_BYTES, read_lines
from raymoe.data.rows import BadCell, as_text, content_digest, read_cells
from raymoe.data.status import GENERATE, PARTS_SUFFIX
from raymoe.errors import ConfigError, RaymoeError, describe, in_step
from raymoe.openai.batch import read_response, write_responses

TOKEN_COLUMNS = ("num_input_tokens", "num_generated_tokens")

logger = logging.getLogger(__name__)


class WrittenRow(NamedTuple):
    """A row of an output: its id, its error, and a digest of what its answer depends on.

    Attributes:
        file: Name of the file that it is in.
        num_generated_tokens: Of all samples, or of one where each is a row.
        cells: Digest of all cells that the input has, of rows without ids.
        sample: Number of the sample where each is a row.
    """

    id: Any
    error: str
    digest: str
    file: str = ""
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    cells: str = ""
    sample: int = 0


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


class StaleInOrder:
    """Rows of an output that no longer belong to the input, by their place; can be used once.

    They are asked for in the order of `Writer.read_written`.
    """

    def __init__(self, is_stale: Flags) -> None:
        self._has_any = bool(is_stale.any())
        self._is_stale = iter(is_stale)

    def __bool__(self) -> bool:
        return self._has_any

    def holds(self, _row: WrittenRow) -> bool:
        return bool(next(self._is_stale))


class Lines(Protocol):
    """What a line of an output holds."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        ...

    def failed(self, row: pa.Table, problem: str) -> dict[str, Any]:
        """Return the object of a row that cannot be written."""
        ...

    def read(self, record: dict[str, Any], id_column: str | None) -> WrittenRow:
        """Return what a resumed run must know of a line."""
        ...


@dataclass(frozen=True)
class TableLines:
    """The columns of the row.

    Attributes:
        json_columns: String columns whose cells are JSON text.
        has_count: Whether rows have a column of how many samples there are.
        content_columns: What the answer of a row depends on.
        cell_columns: All of the input, where rows have no ids.
    """

    json_columns: frozenset[str] = frozenset()
    has_count: bool = False
    content_columns: tuple[str, ...] = ()
    cell_columns: tuple[str, ...] = ()

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        columns = {name: self._cells(table, name) for name in table.column_names}
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))

    def failed(self, row: pa.Table, problem: str) -> dict[str, Any]:
        """Return the cells that can be written, and null for the others."""
        record: dict[str, Any] = {}
        for name in row.column_names:
            try:
                (record[name],) = self._cells(row, name)
                json.dumps(record[name], default=as_text)
            except Exception:
                record[name] = None
        return record | {ERROR_COLUMN: problem}

    def read(self, record: dict[str, Any], id_column: str | None) -> WrittenRow:
        """Return what a resumed run must know of a line."""
        check_form(record, has_count=self.has_count)
        num_read, num_generated = (record.get(name) or 0 for name in TOKEN_COLUMNS)
        row = WrittenRow(
            None if id_column is None else record[id_column],
            record[ERROR_COLUMN],
            self.digest(record),
            num_input_tokens=num_read,
            num_generated_tokens=num_generated,
        )
        if not self.cell_columns:
            return row
        sample = record.get(INDEX_COLUMN) or 0 if self.has_count else 0
        return row._replace(cells=self.cells_digest(record), sample=sample)

    def digest(self, record: Mapping[str, Any]) -> str:
        """Digest of what the answer of a row depends on."""
        return content_digest(record.get(name) for name in self.content_columns)

    def cells_digest(self, record: Mapping[str, Any]) -> str:
        """Digest of all that the input has of a row."""
        return content_digest(record.get(name) for name in self.cell_columns)

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

    def failed(self, row: pa.Table, problem: str) -> dict[str, Any]:
        """Return the response to a request whose answer cannot be written."""
        place = row.column_names.index(ERROR_COLUMN)
        errors = pa.array([problem], pa.string())
        (record,) = write_responses(row.set_column(place, ERROR_COLUMN, errors))
        return record

    def read(self, record: dict[str, Any], _id_column: str | None) -> WrittenRow:
        """Return what a resumed run must know of a line."""
        row_id, error, digest, num_read, num_generated = read_response(record)
        return WrittenRow(row_id, error, digest, "", num_read, num_generated)


def write_lines(lines: Lines, table: pa.Table) -> Iterator[bytes]:
    """Yield the line of each row, with its end.

    A row that cannot be written becomes an error row of what can be written of it.
    """
    try:
        yield from [_line(record) for record in lines.of(table)]
    except Exception:
        for number in range(table.num_rows):
            yield _line_of_row(lines, table.slice(number, 1))


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, default=as_text)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # lone surrogates, which JSON holds as escapes only
        return json.dumps(record, default=as_text).encode() + b"\n"


def _line_of_row(lines: Lines, row: pa.Table) -> bytes:
    try:
        with in_step("writing the row"):
            (record,) = lines.of(row)
            return _line(record)
    except Exception as error:
        logger.exception("a row cannot be written; its line says so")
        return _line(lines.failed(row, describe(error)))


def read_rows(
    lines: Lines, file: IO[bytes], id_column: str | None, *, where: Location
) -> Iterator[tuple[bytes, WrittenRow]]:
    """Yield each line, and what a resumed run must know of it.

    Raises:
        RaymoeError: A line cannot be read; says where it is.
    """
    for number, line in enumerate(read_lines(file, MAX_WRITTEN_BYTES), 1):
        if not line.has_content:
            continue
        try:
            if line.problem:
                raise ValueError(line.problem)
            row = lines.read(json.loads(line.data), id_column)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RaymoeError(
                f"{where} line {number} has no readable {id_column or ERROR_COLUMN!r}: {error!r}; "
                "delete the line and resume again to generate its row anew"
            ) from error
        yield line.data, row._replace(file=where.name)


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


PREFIX = "part-"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The parts of an output, which Ray's workers write; a part that is there is complete.

    Attributes:
        directory: Where they are, and nothing else.
        has_samples: Each sample is a row; those of one row of the input are in the same part.
        run: Ends the names of new parts, so that no run replaces another's.
    """

    directory: Location
    suffix: str
    lines: Lines
    has_samples: bool = False
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

    def name(self, number: int) -> str:
        run = f"-{self.run}" if self.run else ""
        return f"{PREFIX}{number:06d}{run}{self.suffix}"

    def write(self, name: str, tables: Sequence[pa.Table]) -> None:
        """Write rows as a part; once more with the same rows changes nothing."""
        if self.has_samples:
            tables = [explode_samples(table) for table in tables]
        with self.directory.child(name).replacing() as file:
            if self.suffix == ".parquet":
                pq.write_table(pa.concat_tables(tables, promote_options="permissive"), file)
                return
            for table in tables:
                file.writelines(write_lines(self.lines, table))

    def _is_part(self, name: str) -> bool:
        return self._match(name) is not None

    def _match(self, name: str) -> re.Match[str] | None:
        suffix = re.escape(self.suffix)
        return re.fullmatch(rf"{PREFIX}(?P<number>\d+)(-[0-9a-f]+)?{suffix}", name)


@dataclass(kw_only=True)
class RunStats:
    """What a run has written.

    Attributes:
        num_cut: Rows whose answer reached its limit of tokens.
        num_generated_tokens: Of all samples of the rows.
    """

    total_rows: int
    task: str = GENERATE
    num_rows: int = 0
    num_errors: int = 0
    num_cut: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    error_groups: ErrorGroups = field(default_factory=ErrorGroups)
    started_s: float = field(default_factory=time.monotonic)
    finished_s: float | None = None

    def add(self, table: pa.Table) -> None:
        self.num_rows += table.num_rows
        num_input_tokens, num_generated_tokens = (_sum(table, name) for name in TOKEN_COLUMNS)
        self.num_input_tokens += num_input_tokens
        self.num_generated_tokens += num_generated_tokens
        if "finish_reason" in table.column_names:
            self.num_cut += pc.sum(pc.equal(table.column("finish_reason"), "length")).as_py() or 0
        errors = [error for error in table.column(ERROR_COLUMN).to_pylist() if error]
        self.num_errors += len(errors)
        self.error_groups.add(errors)

    def merge(self, part: "RunStats") -> None:
        """Add what was counted elsewhere."""
        self.num_rows += part.num_rows
        self.num_errors += part.num_errors
        self.num_cut += part.num_cut
        self.num_input_tokens += part.num_input_tokens
        self.num_generated_tokens += part.num_generated_tokens
        self.error_groups.update(part.error_groups.groups())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, up to the end if there was one."""
        return (self.finished_s or time.monotonic()) - self.started_s


def _sum(table: pa.Table, name: str) -> int:
    """Return the sum of a column; 0 for a task that does not have it."""
    return pc.sum(table.column(name)).as_py() or 0 if name in table.column_names else 0


def write_part(shards: Shards, name: str, hidden: str | None, blocks: list[Any]) -> RunStats:
    """Write blocks of the operator as a part, in a task of Ray; return what they hold.

    Args:
        hidden: A column that is not written.
        blocks: References in a list: as arguments of the task they would keep the operator's actors
            alive for half a minute after the end.
    """
    tables = [
        table.drop_columns([hidden] if hidden in table.column_names else [])
        for table in ray.get(blocks)
    ]
    stats = RunStats(total_rows=0)
    for table in tables:
        stats.add(table)
    shards.write(name, tables)
    return stats


@dataclass(kw_only=True)
class Writer(ABC):
    """A place for finished rows.

    Rows are written in parts, by whoever has them: `next_name` names a part, `Shards.write` writes
    it and `commit` makes it count. What a task of a killed run writes later does not.
    """

    location: Location
    lines: Lines = field(default_factory=TableLines)
    has_samples: bool = False
    run: str = ""
    _names: set[str] = field(default_factory=set)
    _next_part: int = 0

    @property
    @abstractmethod
    def shards(self) -> Shards: ...

    @abstractmethod
    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the place ready; refuse one that is not empty unless told how to treat it."""

    @abstractmethod
    def read_written(self, id_column: str | None) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of every row that is already there, by file."""

    @abstractmethod
    def drop(self, stale: Stale | StaleInOrder, id_column: str | None) -> None:
        """Remove rows that are there."""

    @abstractmethod
    def close(self) -> None:
        """Finish the output of all parts that count."""

    def next_name(self) -> str:
        """Return the name of a new part, after all others in the order."""
        self._next_part += 1
        return self.shards.name(self._next_part - 1)

    def commit(self, name: str) -> None:
        """Count a part that is complete."""
        self._names.add(name)

    def _find_parts(self) -> None:
        self._names = {part.name for part in self.shards.find()}
        self._next_part = self.shards.next_number()


@dataclass(kw_only=True)
class JsonlWriter(Writer):
    """One file of JSON lines; ``<name>.partial/`` until it is complete.

    As long as the first part is there, the rows are those of the parts, and the file itself is
    nothing, or old, or was being written when a run was killed. The first part is the first to be
    written, and the first to be deleted after the file has been written: without it, the rows are
    those of the file.
    """

    @property
    def shards(self) -> Shards:
        return Shards(
            directory=self.location.sibling(f"{self.location.name}{PARTS_SUFFIX}"),
            suffix=".jsonl",
            lines=self.lines,
            has_samples=self.has_samples,
            run=self.run,
        )

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse rows that are there, keep them or delete them."""
        if self.location.is_dir():
            raise ConfigError(
                f"--output {self.location} is a directory; a file is needed for .jsonl"
            )
        directory = self.shards.directory
        if self.location.is_local:
            _check_plain(self.location.local_path, Path.is_file, "regular file")
            _check_plain(directory.local_path, Path.is_dir, "directory")
        self.shards.check_only_ours()
        parts = self.shards.find()
        has_rows = bool(parts) or self._file_bytes() > 0
        if has_rows and not (resume or overwrite):
            raise ConfigError(not_empty(parts[0] if parts else self.location, "rows"))
        if overwrite or not self._holds_rows(parts):
            self._delete_parts()
        if overwrite and self.location.exists():
            self.location.delete()
        directory.make_dir()
        self._find_parts()

    def read_written(self, id_column: str | None) -> Iterator[WrittenRow]:
        for one in self._files():
            with one.open_lines() as file:
                for _, row in read_rows(self.lines, file, id_column, where=one):
                    yield row

    def drop(self, stale: Stale | StaleInOrder, id_column: str | None) -> None:
        for one in self._files():
            with one.open_lines() as opened, one.replacing() as file:
                rows = read_rows(self.lines, opened, id_column, where=one)
                file.writelines(line for line, row in rows if not stale.holds(row))

    def next_name(self) -> str:
        """Return the name of a new part; the first part has the rows of a run that was finished."""
        if self._next_part == 0:
            name = super().next_name()
            first = self.shards.directory.child(name)
            if self.location.is_local and self.location.exists():
                self.location.local_path.replace(first.local_path)
            else:
                with first.replacing() as file:
                    file.writelines(self.location.chunks() if self._file_bytes() else ())
            self.commit(name)
        return super().next_name()

    def close(self) -> None:
        """Join the parts to the file, and delete them."""
        parts = [part for part in self.shards.find() if part.name in self._names]
        if parts or not self.location.exists():
            if self.location.is_local:
                with self.location.replacing() as file:
                    file.writelines(_join(parts))
            else:
                self.location.write(lambda: _join(parts))
        self._delete_parts()

    def _files(self) -> list[Location]:
        return self.shards.find() or [self.location] * self.location.exists()

    def _file_bytes(self) -> int:
        return int(self.location.info().size or 0)

    def _holds_rows(self, parts: list[Location]) -> bool:
        return bool(parts) and self.shards.number(parts[0]) == 0

    def _delete_parts(self) -> None:
        parts = self.shards.find()
        if self._holds_rows(parts):
            parts[0].delete()
        if self.shards.directory.exists():
            self.shards.directory.delete_dir()


def _join(parts: Iterable[Location]) -> Iterator[bytes]:
    """Yield the content of all parts; what lost its last line end, as in an editor, gets one."""
    for part in parts:
        end = b"\n"
        for chunk in part.chunks():
            yield chunk
            end = chunk[-1:]
        if end != b"\n":
            yield b"\n"


def _check_plain(path: Path, is_kind: Callable[[Path], bool], kind: str) -> None:
    if path.is_symlink() or (path.exists() and not is_kind(path)):
        is_what = f"a link to {path.readlink()}" if path.is_symlink() else f"not a {kind}"
        raise ConfigError(f"--output: {path} is {is_what}; name a {kind}, or a path that is free")


@dataclass(kw_only=True)
class ParquetWriter(Writer):
    """A directory of part files, local or of an object store."""

    @property
    def shards(self) -> Shards:
        return Shards(
            directory=self.location,
            suffix=".parquet",
            lines=self.lines,
            has_samples=self.has_samples,
            run=self.run,
        )

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the directory; with `overwrite`, remove the parts that are there."""
        if self.location.is_file():
            raise ConfigError(
                f"--output {self.location} is a file; a directory is needed for parquet"
            )
        if self.location.is_local:
            _check_plain(self.location.local_path, Path.is_dir, "directory")
        self.location.make_dir()
        self.shards.check_only_ours()
        parts = self.shards.find()
        if parts and not (resume or overwrite):
            raise ConfigError(not_empty(self.location, f"{len(parts)} parts"))
        if overwrite:
            for part in parts:
                part.delete()
        self._find_parts()

    def read_written(self, id_column: str | None) -> Iterator[WrittenRow]:
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for rows in pool.map(self._reader(id_column), self.shards.find()):
                yield from rows

    def drop(self, stale: Stale | StaleInOrder, id_column: str | None) -> None:
        read = self._reader(id_column)
        for part in self.shards.find():
            rows = read(part)
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

    def close(self) -> None:
        """Remove the parts that do not count."""
        for part in self.shards.find():
            if part.name not in self._names:
                part.delete()

    def _reader(self, id_column: str | None) -> Callable[[Location], list[WrittenRow]]:
        assert isinstance(self.lines, TableLines)
        return functools.partial(_read_rows, id_column=id_column, lines=self.lines)


def _read_rows(part: Location, *, id_column: str | None, lines: TableLines) -> list[WrittenRow]:
    try:
        with part.open_file() as opened, pq.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            check_form(names, has_count=lines.has_count)
            columns = {
                id_column,
                ERROR_COLUMN,
                COUNT_COLUMN,
                INDEX_COLUMN,
                *TOKEN_COLUMNS,
                *lines.content_columns,
                *lines.cell_columns,
            }
            table = file.read(columns=[name for name in names if name in columns])
        return [
            lines.read(record, id_column)._replace(file=part.name) for record in lines.of(table)
        ]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise RaymoeError(
            f"{part} has no readable column {id_column or ERROR_COLUMN!r}: {error}; delete the "
            "file and resume again to generate its rows anew"
        ) from error


def open_writer(
    location: Location,
    source: Source,
    *,
    has_samples: bool = False,
    content_columns: tuple[str, ...] = (),
    has_ids: bool = True,
    run: str = "",
) -> Writer:
    """Return a file of JSON lines when the name ends in .jsonl, else a directory of parquet.

    Args:
        source: Where the rows come from; requests of OpenAI's batch form become responses.
        has_samples: Each sample becomes a row.
        content_columns: What the answer of a row depends on.
        has_ids: Whether a column tells rows apart; else all their cells do.
        run: Id of the run, in the names of its parts.

    Raises:
        ConfigError: Responses are to be written as parquet, or the output is a whole bucket.
    """
    if location.is_bucket:
        raise ConfigError(f"--output {location} is a bucket; name a place in it, such as "
                          f"{location}/answers")  # fmt: skip
    has_count = has_samples or COUNT_COLUMN in source.schema.names
    cells = () if has_ids else tuple(source.schema.names)
    lines = TableLines(source.json_columns, has_count, content_columns, cells)
    if location.suffix == ".jsonl":
        return JsonlWriter(
            location=location,
            lines=BatchLines() if source.is_batch else lines,
            has_samples=has_samples,
            run=run,
        )
    if source.is_batch:
        raise ConfigError(f"--output {location}: responses of an OpenAI batch are JSON lines; give "
                          "a file that ends in .jsonl, or --format table")  # fmt: skip
    return ParquetWriter(location=location, lines=lines, has_samples=has_samples, run=run)


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
