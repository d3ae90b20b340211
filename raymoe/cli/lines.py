"""What does a line of an output hold? The columns of a row, or a response of an OpenAI batch."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

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
        ids: Of those that have one.
        errors: Of those that have none, because their lines could not be read.
    """

    ids: frozenset[Any] = frozenset()
    errors: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ids or self.errors)

    def holds(self, row: WrittenRow) -> bool:
        """Whether a row is one of them."""
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
        """Yield the object of each row."""
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
    """A response of OpenAI's batch form."""

    def of(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the object of each row."""
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
