"""Rows of CSV, of which a damaged one costs itself only.

A quote that is never closed would take all lines up to the next quote, or to the end of the file,
into its cell. Such a row is given up after its first line, and reading goes on with the next one.
"""

import codecs
import csv
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from raymoe.data.json_lines import MAX_COLUMNS, MAX_LINE_BYTES, Line
from raymoe.data.rows import shown
from raymoe.errors import ConfigError

MAX_ROW_BYTES, MAX_ROW_LINES = 16 << 20, 1 << 17  # more than that is a quote that is not closed
SEPARATORS = (",", ";", "\t")


class CsvRow(NamedTuple):
    """A row, or a line without one.

    Attributes:
        cells: Empty for a blank line, and for one that cannot be read.
        error: Why it cannot be read, or "".
        line: The first of its lines, from 1.
    """

    cells: list[str]
    error: str
    line: int
    num_lines: int
    num_bytes: int

    @property
    def has_content(self) -> bool:
        return bool(self.cells or self.error)


class _State(Enum):
    ROW, OPEN, ERROR = "a whole row", "a quote is not closed", "no row"


class CsvRows:
    """Reads rows from lines, each of which is parsed three times at most.

    Args:
        line: Number of the first line.
    """

    def __init__(self, lines: Iterable[Line], separator: str, line: int = 1) -> None:
        self._lines, self._separator, self._line = iter(lines), separator, line
        self._back: deque[Line] = deque()  # lines that were read and belong to later rows
        # The first of them leave a quote open that is open before them; the next one does not:
        # it ends the row, or nothing can. What a line does to an open quote does not depend on
        # where it began, so that a row need not look at what an earlier one has seen.
        self._num_open = self._open_bytes = 0
        self._end: _State | None = None
        # Python's own limit is 128 KiB, for all readers of the process.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES + MAX_LINE_BYTES))

    def __iter__(self) -> Iterator[CsvRow]:
        while (first := self._next()) is not None:
            row = [first]
            cells, error = ([], first.problem) if first.problem else self._read(row)
            yield CsvRow(cells, error, self._line, len(row), sum(one.num_bytes for one in row))
            self._line += len(row)

    def _read(self, row: list[Line]) -> tuple[list[str], str]:
        """Read the row that begins with a line, to which its others are added."""
        state, cells = self._parse(map(_text, row))
        if state is _State.OPEN and self._find_end(row[0]) is _State.ROW:
            while self._end is not None and (line := self._next()) is not None:
                row.append(line)
            state, cells = self._parse(map(_text, row))
        if state is not _State.ROW:
            # The same words wherever the input is cut: a resumed run knows the row by them.
            text = shown(row[0].data.decode(errors="replace").rstrip("\r\n"))
            return [], f"a quote is not closed, or text follows a closed one, in {text}"
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            kept = [cell.encode("utf-8", "surrogateescape").decode(errors="replace") for cell in cells]  # fmt: skip # noqa: E501
            return kept, "the row is not UTF-8"
        return cells, ""

    def _find_end(self, first: Line) -> _State | None:
        """Look for the end of a row whose first line leaves a quote open; None if it is too far."""

        def is_near() -> bool:
            size = first.num_bytes + self._open_bytes
            return size <= MAX_ROW_BYTES and self._num_open < MAX_ROW_LINES

        while self._end is None and is_near():
            state, line = _State.ERROR, next(self._lines, None)
            if line is not None:
                self._back.append(line)
                if not line.problem:
                    state, _ = self._parse(['"', _text(line)])
            if line is not None and state is _State.OPEN:
                self._num_open += 1
                self._open_bytes += line.num_bytes
            else:
                self._end = state
        return self._end if is_near() else None

    def _parse(self, texts: Iterable[str]) -> tuple[_State, list[str]]:
        """Read the row that texts are; a reader asks for more while a quote is open."""
        is_over = False

        def given() -> Iterator[str]:
            nonlocal is_over
            yield from texts
            is_over = True

        try:
            cells = next(csv.reader(given(), delimiter=self._separator, strict=True))
        except csv.Error:
            return _State.OPEN if is_over else _State.ERROR, []
        return _State.ROW, cells

    def _next(self) -> Line | None:
        if not self._back:
            return next(self._lines, None)
        line = self._back.popleft()
        if self._num_open:
            self._num_open -= 1
            self._open_bytes -= line.num_bytes
        else:
            self._end = None
        return line


def _text(line: Line) -> str:
    return line.data.decode("utf-8", "surrogateescape")


class CsvHeader(NamedTuple):
    """The first row of a file.

    Attributes:
        num_bytes: Where the rows begin.
        line: The number of their first line.
    """

    names: tuple[str, ...]
    separator: str
    num_bytes: int
    line: int


def read_header(lines: Iterable[Line], separator: str, *, where: object) -> CsvHeader | None:
    """Read the names of the columns; None if there is no line with any.

    Args:
        separator: "," stands for another one where the first line has none.

    Raises:
        ConfigError: It cannot be read, or names are not unique.
    """
    skipped = num_lines = 0
    for line in lines:
        if not line.has_content:
            skipped, num_lines = skipped + line.num_bytes, num_lines + 1
            continue
        found = separator
        if separator == ",":
            found = next((one for one in SEPARATORS if one.encode() in line.data), separator)
        data = line.data.removeprefix(codecs.BOM_UTF8)
        row = next(iter(CsvRows([line if line.problem else Line(data, len(data))], found)))
        if row.error:
            raise ConfigError(f"the header of {where} cannot be read: {row.error}")
        if len(row.cells) > MAX_COLUMNS:
            raise ConfigError(f"the header of {where} has {len(row.cells):,} columns; at most "
                              f"{MAX_COLUMNS:,} are read")  # fmt: skip
        names = tuple(name.strip() or f"column_{index + 1}" for index, name in enumerate(row.cells))
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        if repeated:
            raise ConfigError(f"the header of {where} has {repeated[0]!r} more than once; the "
                              "first line names the columns")  # fmt: skip
        return CsvHeader(names, found, skipped + line.num_bytes, num_lines + 2)
    return None
