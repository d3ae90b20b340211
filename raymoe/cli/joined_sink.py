"""Rows as JSON lines where files cannot grow: parts beside the output, joined at its end."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

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
from raymoe.cli.parts import Parts
from raymoe.cli.storage import Location, not_empty
from raymoe.errors import ConfigError

ROWS_PER_PART = 8192


@dataclass(kw_only=True)
class JoinedSink:
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
    def parts(self) -> Parts:
        """The rows until the file is complete."""
        directory = self.location.sibling(f"{self.location.name}.partial")
        return Parts(directory=directory, suffix=".jsonl", run=self.run)

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
        """Remove rows."""
        for one in self._files():
            with one.open_lines() as lines, one.replacing() as file:
                file.writelines(drop_lines(self.lines, lines, stale, id_column))

    def _files(self) -> list[Location]:
        """Where the rows are."""
        return self.parts.find() or [self.location] * self.location.exists()

    def write(self, table: pa.Table) -> None:
        """Collect rows; write a part when there are enough for one."""
        self._lines.extend(write_lines(self.lines, table))
        if len(self._lines) >= ROWS_PER_PART:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows as one part."""
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
