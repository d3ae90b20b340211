"""Rows as JSON lines in a local file, which grows under another name until it is complete."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pyarrow as pa

from raymoe.cli.lines import (
    Lines,
    Stale,
    TableLines,
    WrittenRow,
    drop_lines,
    read_lines,
    write_lines,
)
from raymoe.cli.storage import Location, not_empty
from raymoe.errors import ConfigError

ROWS_PER_FLUSH = 8192
TAIL_BYTES = 1 << 20


@dataclass(kw_only=True)
class JsonlSink:
    """One file of JSON lines; ``<name>.partial`` until it is complete."""

    location: Location
    lines: Lines = field(default_factory=TableLines)
    _lines: list[str] = field(default_factory=list)

    @property
    def partial(self) -> Path:
        """The file that grows."""
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
        """Remove rows."""
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
        """Append the collected lines."""
        with self.partial.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
            file.flush()
            os.fsync(file.fileno())
        self._lines.clear()

    def close(self) -> None:
        """Give the file its name."""
        self.flush()
        self.partial.replace(self._path)


def _check_plain_file(path: Path) -> None:
    """Refuse links, which somebody else may have put there, pipes and devices."""
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
    """Return the place behind the last line end before `end`, 0 where there is none."""
    while end:
        begin = max(0, end - TAIL_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
