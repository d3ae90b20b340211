"""What does a line of an output hold? The columns of a row, or a response of an OpenAI batch."""

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from raymoe.data.cells import BadCell, read_cells
from raymoe.data.columns import ERROR_COLUMN
from raymoe.data.openai_batch import read_response, write_responses
from raymoe.data.samples import COUNT_COLUMN, INDEX_COLUMN, explode_samples
from raymoe.errors import ConfigError, RaymoeError


class Lines(Protocol):
    """What a line of an output holds."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        ...

    def read(self, record: dict[str, Any], id_column: str) -> tuple[Any, str]:
        """Return the id and the error of a line."""
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
    """

    json_columns: frozenset[str] = frozenset()
    has_count: bool = False

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        columns = {name: self._cells(table, name) for name in table.column_names}
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))

    def read(self, record: dict[str, Any], id_column: str) -> tuple[Any, str]:
        """Return the id and the error of a line."""
        check_form(record, has_count=self.has_count)
        return record[id_column], record[ERROR_COLUMN]

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
    """A response of OpenAI's batch form."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
        return write_responses(table)

    def read(self, record: dict[str, Any], _id_column: str) -> tuple[Any, str]:
        """Return the id and the error of a line."""
        return read_response(record)

    def ends_row(self, _line: bytes) -> bool:
        """Whether a row is complete with this line: each line is one."""
        return True


@dataclass(frozen=True)
class SampleLines(TableLines):
    """The columns of one sample; a row has as many lines as samples, one after the other."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each sample."""
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
) -> Iterator[tuple[Any, str]]:
    """Yield the id and the error of each line.

    Raises:
        RaymoeError: A line cannot be read; says where it is.
    """
    for number, line in enumerate(file, 1):
        try:
            pair = lines.read(json.loads(line), id_column)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise RaymoeError(
                f"{where} line {number} has no readable {id_column!r}: {error!r}"
            ) from error
        yield pair


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


def as_text(value: Any) -> Any:
    """Return what JSON can hold of a value that it cannot."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
