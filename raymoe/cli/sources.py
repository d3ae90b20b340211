"""Input of a job: parquet and JSON lines, as files, directories, globs or URIs."""

import codecs
import dataclasses
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import ray.data

from raymoe.cli.storage import NUM_READERS, Location, help_for, reason_of
from raymoe.data.rows import shown
from raymoe.errors import ConfigError
from raymoe.openai.batch import (
    BATCH_COLUMNS,
    ID_COLUMN,
    ROW_COLUMNS,
    TEXT_COLUMNS,
    read_requests,
)

PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


def find_files(pattern: str) -> tuple[Location, ...]:
    """Return the input files of one format, sorted by name.

    Raises:
        ConfigError: There are none, or of two formats, or the file system refuses.
    """
    root = Location.parse(pattern)
    found = _find(root)
    known = (*PARQUET_SUFFIXES, *JSONL_SUFFIXES)
    files = tuple(sorted((one for one in found if one.suffix in known), key=lambda one: one.path))
    if not files:
        kinds = ", ".join(known)
        found_some = f" ({len(found)} files of other kinds)" if found else ""
        raise ConfigError(f"--input {root}: no file that ends in {kinds}{found_some}")
    if len({file.suffix in JSONL_SUFFIXES for file in files}) > 1:
        raise ConfigError(f"--input {root}: both parquet and JSON lines; name one kind by a glob")
    return files


def _find(root: Location) -> list[Location]:
    if root.is_file():
        return [root]
    if root.is_dir():
        return root.files()
    found = root.glob()
    # An object store says why there is nothing only when it is asked to list it.
    return found if found or root.is_local or set(root.path) & set("*?[") else root.files()


INPUT_ERROR_COLUMN = "__input_error__"
SPLIT_BYTES = 4 << 20
SPLIT_ROWS = 4096
MAX_INT64 = 2**63 - 1
MAX_EXACT_DOUBLE = 2**53


_MARKS = (
    ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), 32),
    ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), 16),
)
# Places of zeros in the first four bytes, of which two characters at least are ASCII.
_WIDTH_OF_ZEROS = {(1, 3): 16, (0, 2): 16, (1, 2, 3): 32, (0, 1, 2): 32}


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
        prompt_columns: String columns as soon as one prompt is text: prompts that are not are
            errors of their rows.
    """

    schema: pa.Schema
    json_columns: frozenset[str]
    prompt_columns: frozenset[str] = frozenset()
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
    line = line.removeprefix(codecs.BOM_UTF8)  # which some editors and Windows write
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


def _has_content(line: bytes) -> bool:
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def _check_encoding(file: Location, line: bytes) -> None:
    """Refuse a file whose first line is in UTF-16 or UTF-32, by its mark or by its zeros."""
    zeros = tuple(place for place, byte in enumerate(line[:4]) if byte == 0)
    width = next((width for marks, width in _MARKS if line.startswith(marks)), None)
    width = width or _WIDTH_OF_ZEROS.get(zeros)
    if width:
        raise ConfigError(
            f"{file} is text in UTF-{width}; convert it to UTF-8, for example with: iconv -f "
            f"UTF-{width} -t UTF-8"
        )


def scan(
    files: Sequence[Location], prompt_columns: Collection[str], id_column: str | None
) -> JsonlScan:
    kinds: dict[str, set[str]] = {}
    splits: list[Split] = []
    ids: list[Any] = []
    num_rows = 0
    for file in files:
        begin = size = rows = 0
        for line in _lines(file):
            if begin == size == 0:
                _check_encoding(file, line)
            size += len(line)
            if _has_content(line):
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
    layout = _choose_format(kinds, prompt_columns)
    return JsonlScan(layout=layout, splits=tuple(splits), num_rows=num_rows, ids=ids)


def read_split(table: pa.Table, *, layout: JsonlFormat, root: Location) -> pa.Table:
    """Return the rows of the splits that the table lists.

    Args:
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
        if not _has_content(line):
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
    if field.name in layout.text_columns and not isinstance(value, str):
        raise ValueError(f"is {shown(value)}; it takes text")
    if value is None:
        return None
    if field.name in layout.prompt_columns and not _fits_prompt(value, field.type):
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


def _choose_format(kinds: Mapping[str, set[str]], prompt_columns: Collection[str]) -> JsonlFormat:
    fields, json_columns = [], set()
    for name, found in kinds.items():
        arrow_type = _choose_type(found - {"null"})
        if name in prompt_columns and arrow_type is None:
            # Mixed prompts: text wins; those that are not become error rows.
            arrow_type = pa.string() if "str" in found else pa.list_(pa.int64())
        if arrow_type is None:
            json_columns.add(name)
        fields.append(pa.field(name, arrow_type or pa.string()))
    return JsonlFormat(
        schema=pa.schema(fields),
        json_columns=frozenset(json_columns),
        prompt_columns=frozenset(prompt_columns),
    )


def _choose_type(found: set[str]) -> pa.DataType | None:
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


FORMS = ("auto", "table", "openai-batch")


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A table of prompts in files.

    Attributes:
        files: At least one, all of one file system.
        ids: The id column, without lines that cannot be read; empty when none was named.
        json_columns: String columns whose cells are JSON text of the input's values.
        error_column: Added by the reader; the reasons of rows that it could not read.
        is_batch: The lines are requests of OpenAI's batch form.
    """

    files: tuple[Location, ...]
    schema: pa.Schema
    num_rows: int
    ids: pa.Array
    json_columns: frozenset[str] = frozenset()
    error_column: str | None = None
    is_batch: bool = False

    @abstractmethod
    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows here, without Ray, with those of these columns that there are."""

    @abstractmethod
    def dataset(self) -> ray.data.Dataset:
        """Return the rows as a dataset; Ray must be running."""


@dataclass(frozen=True, kw_only=True)
class ParquetSource(Source):
    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for location in self.files:
            with location.open_file() as opened, pq.ParquetFile(opened) as file:
                names = [name for name in columns if name in file.schema_arrow.names]
                for batch in file.iter_batches(columns=names):
                    yield pa.table(batch)

    def dataset(self) -> ray.data.Dataset:
        paths = [file.path for file in self.files]
        return ray.data.read_parquet(paths, filesystem=self.files[0].filesystem)


@dataclass(frozen=True, kw_only=True)
class JsonlSource(Source):
    """JSON lines, read by our own reader: one bad line is one bad row."""

    scanned: JsonlScan
    error_column: str | None = INPUT_ERROR_COLUMN

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for split in self.scanned.splits:
            listed = pa.Table.from_pylist([split._asdict()])
            table = read_split(listed, layout=self.scanned.layout, root=self.files[0])
            if self.is_batch:
                table = read_requests(table, error_column=INPUT_ERROR_COLUMN)
            yield table.select([name for name in columns if name in table.column_names])

    def dataset(self) -> ray.data.Dataset:
        lines = self._lines()
        if not self.is_batch:
            return lines
        read = functools.partial(read_requests, error_column=INPUT_ERROR_COLUMN)
        return lines.map_batches(read, batch_size=None, batch_format="pyarrow")

    def _lines(self) -> ray.data.Dataset:
        splits = [split._asdict() for split in self.scanned.splits]
        listed = ray.data.from_items(splits, override_num_blocks=max(1, len(splits)))
        read = functools.partial(read_split, layout=self.scanned.layout, root=self.files[0])
        return listed.map_batches(read, batch_size=1, batch_format="pyarrow")


def open_source(
    pattern: str,
    *,
    text_columns: Collection[str] = ("prompt",),
    id_column: str | None,
    form: str = "auto",
) -> Source:
    """Find the files of a path, directory or glob, and read their columns and ids.

    Args:
        pattern: The path, directory or glob, or the URI of one.
        text_columns: Those with text or token ids: prompts, and what is scored after them.
        form: One of `FORMS`: what JSON lines are; "auto" looks at their keys.

    Raises:
        ConfigError: Nothing is there, two formats are mixed, or ids are missing or not unique.
    """
    if form not in FORMS:
        raise ConfigError(f"--format is {form!r}; it must be one of {', '.join(FORMS)}")
    files = find_files(pattern)
    is_jsonl = files[0].suffix in JSONL_SUFFIXES
    if form == "openai-batch" and not is_jsonl:
        raise ConfigError("--format openai-batch takes JSON lines, not parquet")
    if is_jsonl and form != "table" and (form == "openai-batch" or _has_requests(files)):
        return _open_batch(files)
    if is_jsonl:
        source: Source = _open_jsonl(files, text_columns, id_column)
    else:
        source = _open_parquet(files, id_column)
    if id_column is not None:
        check_ids(source.ids, id_column)
    return source


def _open_parquet(files: Sequence[Location], id_column: str | None) -> ParquetSource:
    with ThreadPoolExecutor(NUM_READERS) as pool:
        heads = list(pool.map(lambda file: _read_head(file, id_column), files))
    schema = pa.unify_schemas([head.schema for head in heads], promote_options="permissive")
    ids = pa.chunked_array([head.ids for head in heads])
    num_rows = sum(head.num_rows for head in heads)
    return ParquetSource(files=tuple(files), schema=schema, num_rows=num_rows, ids=_combine(ids))


class _Head(NamedTuple):
    schema: pa.Schema
    num_rows: int
    ids: pa.Array


def _read_head(location: Location, id_column: str | None) -> _Head:
    try:
        with location.open_file() as opened, pq.ParquetFile(opened) as file:
            ids = pa.array([], pa.null())
            if id_column is not None:
                ids = _read_ids(file, location, id_column)
            return _Head(file.schema_arrow, file.metadata.num_rows, ids)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{location} cannot be read as parquet: {reason_of(error)}{help_for(error)}"
        ) from error


def _read_ids(file: pq.ParquetFile, location: Location, id_column: str) -> pa.Array:
    if id_column not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise ConfigError(f"{location} has no column {id_column!r} (--id-column); it has {names}")
    return _combine(file.read(columns=[id_column]).column(id_column))


def _combine(chunks: pa.ChunkedArray) -> pa.Array:
    combined = chunks.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _open_jsonl(
    files: Sequence[Location], text_columns: Collection[str], id_column: str | None
) -> JsonlSource:
    scanned = scan(files, text_columns, id_column)
    layout = scanned.layout
    ids = pa.array([], pa.null())
    if id_column is not None:
        if id_column not in layout.schema.names:
            names = ", ".join(layout.schema.names)
            raise ConfigError(f"no line has the key {id_column!r} (--id-column); keys: {names}")
        id_type = layout.schema.field(id_column).type
        if id_column in layout.json_columns or pa.types.is_floating(id_type):
            raise ConfigError(f"the values of {id_column!r} are not all text or all whole numbers")
        ids = pa.array(scanned.ids, id_type)
    return JsonlSource(
        files=tuple(files),
        schema=layout.schema,
        num_rows=scanned.num_rows,
        ids=ids,
        json_columns=layout.json_columns,
        scanned=scanned,
    )


def _has_requests(files: Sequence[Location]) -> bool:
    with files[0].explained("read"), files[0].open_lines() as file:
        records = (parse_line(line)[0] for line in file)
        first = next((record for record in records if record), {})
    return set(BATCH_COLUMNS) <= first.keys()


def _open_batch(files: Sequence[Location]) -> JsonlSource:
    layout = JsonlFormat(
        schema=pa.schema([(name, pa.string()) for name in BATCH_COLUMNS]),
        json_columns=frozenset({"body"}),
        text_columns=frozenset(TEXT_COLUMNS),
    )
    scanned = dataclasses.replace(scan(files, (), ID_COLUMN), layout=layout)
    # Lines without an id become error rows.
    ids = [row_id for row_id in scanned.ids if isinstance(row_id, str)]
    source = JsonlSource(
        files=tuple(files),
        schema=pa.schema([(name, pa.string()) for name in ROW_COLUMNS]),
        num_rows=scanned.num_rows,
        ids=pa.array(ids, pa.string()),
        scanned=scanned,
        is_batch=True,
    )
    check_ids(source.ids, ID_COLUMN)
    return source


def check_ids(ids: pa.Array, id_column: str) -> None:
    """Refuse ids that cannot identify a row.

    Raises:
        ConfigError: Some are null, or occur more than once.
    """
    if ids.null_count:
        row = pc.index(ids.is_null(), value=True).as_py()
        raise ConfigError(
            f"column {id_column!r} has no id in {ids.null_count} rows, the first is row {row}; "
            "every row needs its own"
        )
    if len(ids) == len(ids.unique()):
        return
    counts = ids.value_counts()
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    example: Any = repeated.field("values")[0].as_py()
    raise ConfigError(
        f"column {id_column!r} has {len(repeated)} ids that occur more than once, such as "
        f"{example!r}; every row needs its own"
    )


def without_written(
    dataset: ray.data.Dataset, id_column: str, ids: pa.Array, errors: pa.Array
) -> ray.data.Dataset:
    """Return the rows that are not written yet.

    Args:
        errors: What the reader said of written rows that have no id because their lines are broken.
    """
    drop = functools.partial(
        _drop_rows, id_column=id_column, ids=ray.put(ids), errors=ray.put(errors)
    )
    return dataset.map_batches(drop, batch_size=None, batch_format="pyarrow")


def _drop_rows(
    table: pa.Table, *, id_column: str, ids: ray.ObjectRef, errors: ray.ObjectRef
) -> pa.Table:
    is_written = pc.is_in(table.column(id_column), value_set=ray.get(ids))
    if INPUT_ERROR_COLUMN in table.column_names:
        has_no_id = table.column(id_column).is_null()
        is_known = pc.is_in(table.column(INPUT_ERROR_COLUMN), value_set=ray.get(errors))
        is_written = pc.or_(is_written, pc.and_(has_no_id, is_known))
    return table.filter(pc.invert(is_written))
