"""Where do the rows go? Files that appear whole, and can be continued after a crash."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from raymoe.cli.lines import BatchLines, Lines, TableLines, as_text
from raymoe.data.columns import ERROR_COLUMN
from raymoe.errors import ConfigError, RaymoeError

ROWS_PER_PART = 8192
TAIL_BYTES = 1 << 20
PART_GLOB = "part-*.parquet"


class Sink(Protocol):
    """A place for finished rows."""

    path: Path

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the place ready; refuse one that is not empty unless told how to treat it."""
        ...

    def read_written(self, id_column: str) -> Iterator[tuple[Any, str]]:
        """Yield the id and the error of every row that is already there."""
        ...

    def write(self, table: pa.Table) -> None:
        """Take some rows; they are safe after the next `flush`."""
        ...

    def flush(self) -> None:
        """Put the rows on disk."""
        ...

    def close(self) -> None:
        """Flush and finish the output."""
        ...


def open_sink(path: Path, json_columns: frozenset[str], *, is_batch: bool = False) -> Sink:
    """Return a file of JSON lines when the path ends in .jsonl, else a directory of parquet.

    Args:
        path: Of the output.
        json_columns: String columns whose cells are JSON text.
        is_batch: Lines are responses of OpenAI's batch form.

    Raises:
        ConfigError: Responses are to be written as parquet.
    """
    if path.suffix == ".jsonl":
        return JsonlSink(path=path, lines=BatchLines() if is_batch else TableLines(json_columns))
    if is_batch:
        raise ConfigError(f"--output {path}: responses of an OpenAI batch are JSON lines; give a "
                          "file that ends in .jsonl, or --format table")  # fmt: skip
    return ParquetSink(path=path)


def check_apart(output: Path, inputs: Iterable[Path], pattern: str) -> None:
    """Refuse an output that is the input, holds it, or lies in the input's directory.

    Raises:
        ConfigError: With both paths; links are followed.
    """
    target = output.resolve()
    root = Path(pattern)
    if root.is_dir() and (target == root.resolve() or root.resolve() in target.parents):
        raise ConfigError(
            f"--output {output} lies in the input directory {pattern}; choose another"
        )
    for path in inputs:
        source = path.resolve()
        is_same = output.exists() and output.samefile(path)
        if is_same or target == source or target in source.parents:
            raise ConfigError(f"--output {output} is or holds the input {path}; choose another")


@dataclass(kw_only=True)
class ParquetSink:
    """A directory of part files; each appears under its name when it is complete."""

    path: Path
    _tables: list[pa.Table] = field(default_factory=list)
    _next_part: int = 0

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the directory; with `overwrite`, remove the parts that are there."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--output {self.path} is a file; a directory is needed for parquet")
        self.path.mkdir(parents=True, exist_ok=True)
        for stale in self.path.glob(".part-*.parquet.tmp"):
            stale.unlink()
        others = sorted(set(self.path.iterdir()) - set(self._parts()))
        if others:
            raise ConfigError(
                f"--output {self.path} holds {others[0].name}, which raymoe did not write; "
                "choose another directory"
            )
        parts = self._parts()
        if parts and not (resume or overwrite):
            raise ConfigError(_not_empty(self.path, f"{len(parts)} parts"))
        if overwrite:
            for part in parts:
                part.unlink()
            parts = []
        self._next_part = 1 + int(parts[-1].stem.removeprefix("part-")) if parts else 0

    def _parts(self) -> list[Path]:
        names = self.path.glob(PART_GLOB)
        return sorted(path for path in names if path.stem.removeprefix("part-").isdigit())

    def read_written(self, id_column: str) -> Iterator[tuple[Any, str]]:
        """Yield the id and the error of the rows of all parts."""
        columns = [id_column, ERROR_COLUMN]
        for part in self._parts():
            try:
                table = pq.read_table(part, columns=columns)
                pairs = zip(*(table.column(name).to_pylist() for name in columns), strict=True)
            except (pa.ArrowException, OSError, KeyError) as error:
                raise RaymoeError(
                    f"{part} has no readable column {id_column!r}: {error}; delete the file and "
                    "resume again to generate its rows anew"
                ) from error
            yield from pairs

    def write(self, table: pa.Table) -> None:
        """Collect rows; write a part when there are enough for one."""
        self._tables.append(table)
        if sum(table.num_rows for table in self._tables) >= ROWS_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows as one part."""
        tables = [table for table in self._tables if table.num_rows]
        if not tables:
            return
        name = f"part-{self._next_part:06d}.parquet"
        temporary = self.path / f".{name}.tmp"
        with temporary.open("wb") as file:
            pq.write_table(pa.concat_tables(tables, promote_options="permissive"), file)
            os.fsync(file.fileno())
        temporary.replace(self.path / name)
        self._next_part += 1
        self._tables.clear()

    def close(self) -> None:
        """Write what is left."""
        self.flush()


@dataclass(kw_only=True)
class JsonlSink:
    """One file of JSON lines; ``<name>.partial`` until it is complete."""

    path: Path
    lines: Lines = field(default_factory=TableLines)
    _lines: list[str] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        """The file that grows."""
        return self.path.with_name(f"{self.path.name}.partial")

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Start the growing file, or cut it after its last whole line and continue it."""
        if self.path.is_dir():
            raise ConfigError(f"--output {self.path} is a directory; a file is needed for .jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.path, self.partial):
            _check_plain_file(file)
            if file.exists() and file.stat().st_size and not (resume or overwrite):
                raise ConfigError(_not_empty(file, "rows"))
        if not resume:
            self.partial.write_bytes(b"")
            return
        if self.path.exists() and not self.partial.exists():
            self.path.rename(self.partial)
        self.partial.touch()
        _cut_torn_line(self.partial)

    def read_written(self, id_column: str) -> Iterator[tuple[Any, str]]:
        """Yield the id and the error of all whole lines."""
        with self.partial.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    pair = self.lines.read(json.loads(line), id_column)
                except (ValueError, KeyError, TypeError) as error:
                    raise RaymoeError(
                        f"{self.partial} line {number} has no readable {id_column!r}: {error!r}"
                    ) from error
                yield pair

    def write(self, table: pa.Table) -> None:
        """Collect rows; write them when there are enough."""
        for record in self.lines.of(table):
            self._lines.append(json.dumps(record, ensure_ascii=False, default=as_text))
        if len(self._lines) >= ROWS_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Append the collected lines."""
        with self.partial.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._lines)
            file.flush()
            os.fsync(file.fileno())
        self._lines.clear()

    def close(self) -> None:
        """Give the file its name."""
        self.flush()
        self.partial.replace(self.path)


def _check_plain_file(path: Path) -> None:
    """Refuse links, which somebody else may have put there, pipes and devices."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = f"a link to {path.readlink()}" if path.is_symlink() else "not a regular file"
        raise ConfigError(f"--output: {path} is {kind}; name a file, or a path that is free")


def _not_empty(path: Path, what: str) -> str:
    return (
        f"--output {path} already has {what}; add --resume to generate what is missing or "
        "--overwrite to start anew"
    )


def _cut_torn_line(path: Path) -> None:
    """Drop what follows the last line end: a crash may leave half a row."""
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - TAIL_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(end)
