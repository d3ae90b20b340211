"""What is in a cell? Arrow values to Python, with a reason for those that cannot be read."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymoe.safe_text import MAX_LEVELS, nesting_problem

MAX_SHOWN_CHARACTERS = 60

# UnicodeDecodeError is a ValueError; TypeError is that of a map with lists as keys.
_UNREADABLE = (ValueError, KeyError, OverflowError, TypeError)


class RowError(Exception):
    """Why one row cannot be generated; `kind` is the name that the error column shows."""

    def __init__(self, kind: str, column: str, reason: str) -> None:
        super().__init__(f"{kind}: column {column!r} {reason}")


@dataclass(frozen=True, slots=True)
class BadCell:
    """A cell that Arrow holds and Python cannot read."""

    kind: str
    reason: str


def read_cells(table: pa.Table, column: str | None) -> list[Any]:
    """Return the cells of a column as Python values; all None when it does not exist."""
    if column is None or column not in table.column_names:
        return [None] * table.num_rows
    array = table.column(column)
    if _is_too_deep(array.type):
        bad = BadCell("ValueError", f"has a type nested more than {MAX_LEVELS} levels deep")
        return [bad if scalar.is_valid else None for scalar in array]
    try:
        return list(array.to_pylist(maps_as_pydicts="strict"))
    except _UNREADABLE:
        return [_cell(scalar) for scalar in array]


def _is_too_deep(kind: pa.DataType) -> bool:
    """Whether Arrow itself may use up the stack for a value: that ends the process."""
    level = [kind]
    for _ in range(MAX_LEVELS + 1):
        inner = [getattr(one, "storage_type", one) for one in level]
        level = [one.field(i).type for one in inner for i in range(one.num_fields)]
        if not level:
            return False
    return True


def _cell(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        kind = type(error).__name__
        return BadCell(kind, f"is not UTF-8: {error.reason} at byte {error.start}")
    except _UNREADABLE as error:
        return BadCell(type(error).__name__, f"cannot be read: {shown(str(error))}")


def refuse_bad_cell(value: Any, column: str) -> None:
    """Raise the reason of a cell that cannot be read, or whose value is too deep to work with."""
    if isinstance(value, BadCell):
        raise RowError(value.kind, column, value.reason)
    problem = nesting_problem(value)
    if problem:
        raise RowError("ValueError", column, problem)


def decode(value: bytes, column: str) -> str:
    """Return bytes as text; a `RowError` says where they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason} at byte {error.start}"
        raise RowError("UnicodeDecodeError", column, reason) from error


def check_encodes(value: str, column: str) -> None:
    """Refuse text that UTF-8 cannot hold; JSON can write it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = f"has a lone surrogate at character {error.start}"
        raise RowError("UnicodeEncodeError", column, reason) from error


def content_digest(cells: Iterable[Any]) -> str:
    """Digest of cells, the same for a row and for what a file of any format holds of it."""
    text = json.dumps([without_nulls(cell) for cell in cells], sort_keys=True, default=as_text)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def as_text(value: Any) -> Any:
    """Return what JSON can hold of a value that it cannot."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def parse_json(text: str, column: str) -> Any:
    """Return the value of JSON text; a `RowError` says where it is broken."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        reason = f"is nested more than {MAX_LEVELS} levels deep: {shown(text)}"
        raise RowError("ValueError", column, reason) from error
    except ValueError as error:
        reason = f"is not JSON: {error} in {shown(text)}"
        raise RowError("ValueError", column, reason) from error
    refuse_bad_cell(value, column)
    return value


def without_nulls(value: Any) -> Any:
    """Drop the keys that Arrow added because another row of the block has them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def shown(value: object, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return a value as an error message shows it, cut to `limit` characters."""
    try:
        text = value if isinstance(value, str) and limit > MAX_SHOWN_CHARACTERS else repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a very long integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."
