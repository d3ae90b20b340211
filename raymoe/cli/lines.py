"""What does a line of an output hold? The columns of a row, or a response of an OpenAI batch."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from raymoe.data.cells import BadCell, read_cells
from raymoe.data.columns import ERROR_COLUMN
from raymoe.data.openai_batch import read_response, write_responses
from raymoe.errors import RaymoeError


class Lines(Protocol):
    """What a line of an output holds."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        ...

    def read(self, record: dict[str, Any], id_column: str) -> tuple[Any, str]:
        """Return the id and the error of a line."""
        ...


@dataclass(frozen=True)
class TableLines:
    """The columns of the row.

    Attributes:
        json_columns: String columns whose cells are JSON text.
    """

    json_columns: frozenset[str] = frozenset()

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        columns = {name: self._cells(table, name) for name in table.column_names}
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))

    def read(self, record: dict[str, Any], id_column: str) -> tuple[Any, str]:
        """Return the id and the error of a line."""
        return record[id_column], record[ERROR_COLUMN]

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
    """A response of OpenAI's batch form."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        return write_responses(table)

    def read(self, record: dict[str, Any], _id_column: str) -> tuple[Any, str]:
        """Return the id and the error of a line."""
        return read_response(record)


def write_lines(lines: Lines, table: pa.Table) -> Iterator[str]:
    """Yield the text of each row, with its line end."""
    for record in lines.of(table):
        yield json.dumps(record, ensure_ascii=False, default=as_text) + "\n"


def read_lines(
    lines: Lines, file: Iterable[bytes], id_column: str, *, where: str
) -> Iterator[tuple[Any, str]]:
    """Yield the id and the error of each line.

    Raises:
        RaymoeError: A line cannot be read; says where it is.
    """
    for number, line in enumerate(file, 1):
        try:
            pair = lines.read(json.loads(line), id_column)
        except (ValueError, KeyError, TypeError) as error:
            raise RaymoeError(
                f"{where} line {number} has no readable {id_column!r}: {error!r}"
            ) from error
        yield pair


def as_text(value: Any) -> Any:
    """Return what JSON can hold of a value that it cannot."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
