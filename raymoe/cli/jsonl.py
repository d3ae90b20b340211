"""JSON lines in: typed columns, and a reason for every line that cannot be read.

The files are read twice: once here, to choose one type for each column, and once in Ray, split by
split. Arrow's own reader refuses a whole file for one bad line, so lines are parsed one by one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from raymoe.cli.storage import Location
from raymoe.data.cells import shown
from raymoe.errors import ConfigError

INPUT_ERROR_COLUMN = "__input_error__"
SPLIT_BYTES = 4 << 20
SPLIT_ROWS = 4096
MAX_INT64 = 2**63 - 1
MAX_EXACT_DOUBLE = 2**53


class Split(NamedTuple):
    """Some lines of one file; the unit that a Ray task reads."""

    path: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFormat:
    """The columns of a set of files.

    Attributes:
        schema: One type for each key.
        json_columns: String columns whose cells are JSON text, because the values are nested or of
            several types.
        prompt_column: A string column as soon as one prompt is text: prompts that are not are
            errors of their rows.
        text_columns: Of which every line must have text.
    """

    schema: pa.Schema
    json_columns: frozenset[str]
    prompt_column: str = ""
    text_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlScan:
    """What the first reading found.

    Attributes:
        ids: Of the lines that could be read; one that is no text for Arrow makes an error row.
    """

    layout: JsonlFormat
    splits: tuple[Split, ...]
    num_rows: int
    ids: list[Any]


def parse_line(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the object of a line if it has one, and "" or what is wrong with the line."""
    error = ""
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        error = f"the line is not UTF-8: {problem.reason} at byte {problem.start}"
        text = line.decode(errors="replace")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as problem:
        return None, error or f"the line is not JSON: {problem} in {shown(text)}"
    if not isinstance(record, dict):
        return None, error or f"the line is not a JSON object: {shown(record)}"
    return record, error


def scan(files: Sequence[Location], prompt_column: str, id_column: str | None) -> JsonlScan:
    """Read all lines once: types, splits, ids."""
    kinds: dict[str, set[str]] = {}
    splits: list[Split] = []
    ids: list[Any] = []
    num_rows = 0
    for file in files:
        begin = size = rows = 0
        for line in _lines(file):
            size += len(line)
            if line.strip():
                record, _ = parse_line(line)
                for key, value in (record or {}).items():
                    kinds.setdefault(key, set()).add(_kind(value))
                if id_column is not None and record is not None:
                    ids += [one for one in (record.get(id_column),) if _encodes(one)]
                rows += 1
            if size >= SPLIT_BYTES or rows >= SPLIT_ROWS:
                splits.append(Split(file.path, begin, size))
                begin, num_rows, size, rows = begin + size, num_rows + rows, 0, 0
        if rows:
            splits.append(Split(file.path, begin, size))
            num_rows += rows
    if not kinds:
        raise ConfigError(f"no JSON object in {', '.join(map(str, files[:3]))}")
    layout = _choose_format(kinds, prompt_column)
    return JsonlScan(layout=layout, splits=tuple(splits), num_rows=num_rows, ids=ids)


def read_split(table: pa.Table, *, layout: JsonlFormat, root: Location) -> pa.Table:
    """Return the rows of the splits that the table lists.

    Args:
        table: One split a row.
        layout: The columns.
        root: Anything of the file system that has the files.
    """
    splits = [Split(**row) for row in table.to_pylist()]
    return pa.concat_tables([_read_one(one, layout, root.at(one.path)) for one in splits])


def _read_one(split: Split, layout: JsonlFormat, location: Location) -> pa.Table:
    with location.open_file() as file:
        lines = file.read_at(split.num_bytes, split.offset).splitlines(keepends=True)
    columns: dict[str, list[Any]] = {name: [] for name in layout.schema.names}
    errors = []
    offset = split.offset
    for line in lines:
        begin, offset = offset, offset + len(line)
        if not line.strip():
            continue
        record, error = parse_line(line)
        for field in layout.schema:
            try:
                cell = _cell((record or {}).get(field.name), field, layout)
            except ValueError as problem:
                error = error or f"column {field.name!r} {problem}"
                cell = None
            columns[field.name].append(cell)
        # The place makes the text unique: a resumed run knows lines without an id by it.
        errors.append(f"{error} ({location}, byte {begin})" if error else "")
    arrays = {field.name: pa.array(columns[field.name], field.type) for field in layout.schema}
    return pa.table({**arrays, INPUT_ERROR_COLUMN: pa.array(errors, pa.string())})


def _cell(value: Any, field: pa.Field, layout: JsonlFormat) -> Any:
    """Return the value as its column holds it; a ValueError says why it cannot."""
    if field.name in layout.text_columns and not isinstance(value, str):
        raise ValueError(f"is {shown(value)}; it takes text")
    if value is None:
        return None
    if field.name == layout.prompt_column and not _fits_prompt(value, field.type):
        raise ValueError(f"is {shown(value)} ({type(value).__name__}), others are {field.type}")
    if field.name in layout.json_columns:
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            raise ValueError(f"has a lone surrogate at character {problem.start}") from problem
    return value


def _encodes(value: Any) -> bool:
    try:
        return not isinstance(value, str) or value.encode() is not None
    except UnicodeEncodeError:
        return False


def _fits_prompt(value: Any, arrow_type: pa.DataType) -> bool:
    if pa.types.is_string(arrow_type):
        return isinstance(value, str)
    if pa.types.is_list(arrow_type):
        return isinstance(value, list) and all(_kind(token) == "int" for token in value)
    return True


def _choose_format(kinds: Mapping[str, set[str]], prompt_column: str) -> JsonlFormat:
    fields, json_columns = [], set()
    for name, found in kinds.items():
        arrow_type = _choose_type(found - {"null"})
        if name == prompt_column and arrow_type is None:
            # Mixed prompts: text wins; those that are not become error rows.
            arrow_type = pa.string() if "str" in found else pa.list_(pa.int64())
        if arrow_type is None:
            json_columns.add(name)
        fields.append(pa.field(name, arrow_type or pa.string()))
    return JsonlFormat(
        schema=pa.schema(fields), json_columns=frozenset(json_columns), prompt_column=prompt_column
    )


def _choose_type(found: set[str]) -> pa.DataType | None:
    """Return the type that holds all values, None for JSON text."""
    if found <= {"str"}:
        return pa.string()
    if found <= {"bool"}:
        return pa.bool_()
    if found <= {"int", "big"}:
        return pa.int64()
    return pa.float64() if found <= {"int", "float"} else None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if abs(value) > MAX_INT64:
            return "nested"
        return "int" if abs(value) <= MAX_EXACT_DOUBLE else "big"
    if isinstance(value, float):
        return "float"
    return "str" if isinstance(value, str) else "nested"


def _lines(location: Location) -> Iterator[bytes]:
    with location.explained("read"), location.open_lines() as file:
        yield from file
