"""Rows of CSV, of which a damaged one costs itself only.

A quote that is never closed would take all lines up to the next quote, or to the end of the file,
into its cell. Such a row is given up after its first line, and reading goes on with the next one.
"""

import codecs
import csv
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from raymoe.data.rows import shown
from raymoe.errors import ConfigError

MAX_ROW_BYTES = 16 << 20  # what is longer counts as a quote that is not closed
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


class CsvRows:
    """Reads rows from lines.

    Args:
        line: Number of the first line.
    """

    def __init__(self, lines: Iterable[bytes], separator: str, line: int = 1) -> None:
        self._lines, self._separator, self._line = iter(lines), separator, line
        self._back: deque[bytes] = deque()  # lines that were read and belong to later rows
        self._row: list[bytes] = []
        # Python's own limit is 128 KiB, for all readers of the process.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))

    def __iter__(self) -> Iterator[CsvRow]:
        while (first := self._next()) is not None:
            self._row = [first]
            cells, error = self._read()
            num_lines, num_bytes = len(self._row), sum(map(len, self._row))
            yield CsvRow(cells, error, self._line, num_lines, num_bytes)
            self._line += num_lines

    def _read(self) -> tuple[list[str], str]:
        reader = csv.reader(self._text(), delimiter=self._separator, strict=True)
        try:
            cells = next(reader)
        except csv.Error:
            self._back.extendleft(reversed(self._row[1:]))
            del self._row[1:]
            # The same words wherever the input is cut: a resumed run knows the row by them.
            line = shown(self._row[0].decode(errors="replace").rstrip("\r\n"))
            return [], f"a quote is not closed, or text follows a closed one, in {line}"
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            kept = [cell.encode("utf-8", "surrogateescape").decode(errors="replace") for cell in cells]  # fmt: skip # noqa: E501
            return kept, "the row is not UTF-8"
        return cells, ""

    def _text(self) -> Iterator[str]:
        """Yield the lines of one row: the reader asks for as many as it has."""
        size = len(self._row[0])
        yield self._row[0].decode("utf-8", "surrogateescape")
        while size <= MAX_ROW_BYTES and (line := self._next()) is not None:
            self._row.append(line)
            size += len(line)
            yield line.decode("utf-8", "surrogateescape")

    def _next(self) -> bytes | None:
        return self._back.popleft() if self._back else next(self._lines, None)


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


def read_header(lines: Iterable[bytes], separator: str, *, where: object) -> CsvHeader | None:
    """Read the names of the columns; None if there is no line with any.

    Args:
        separator: "," stands for another one where the first line has none.

    Raises:
        ConfigError: It cannot be read, or names are not unique.
    """
    skipped = num_lines = 0
    for line in lines:
        if not line.strip():
            skipped, num_lines = skipped + len(line), num_lines + 1
            continue
        found = separator
        if separator == ",":
            found = next((one for one in SEPARATORS if one.encode() in line), separator)
        row = next(iter(CsvRows([line.removeprefix(codecs.BOM_UTF8)], found)))
        if row.error:
            raise ConfigError(f"the header of {where} cannot be read: {row.error}")
        names = tuple(name.strip() or f"column_{index + 1}" for index, name in enumerate(row.cells))
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"the header of {where} has {repeated[0]!r} more than once; the "
                              "first line names the columns")  # fmt: skip
        return CsvHeader(names, found, skipped + len(line), num_lines + 2)
    return None
