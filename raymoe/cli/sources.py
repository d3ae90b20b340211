"""Input of a job: parquet, JSON lines, CSV and Arrow, as files, directories, globs or URIs."""

import codecs
import contextlib
import functools
import io
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import ray.data

from raymoe.cli.csv_rows import CsvHeader, CsvRow, CsvRows, read_header
from raymoe.cli.one_schema import check_id_type, conform, unify
from raymoe.cli.storage import (
    BUFFER_BYTES,
    COMPRESSIONS,
    HUB,
    NUM_READERS,
    Location,
    find_dataset,
)
from raymoe.data.json_lines import MAX_COLUMNS, MAX_KEYS, Line, parse_line, read_lines
from raymoe.data.prompt_template import INPUT_ERROR_COLUMN, PromptTemplate
from raymoe.data.rows import shown
from raymoe.download.datasets import HubDataset, is_dataset
from raymoe.errors import CheckpointError, ConfigError
from raymoe.openai.batch import (
    BATCH_COLUMNS,
    ID_COLUMN,
    ROW_COLUMNS,
    TEXT_COLUMNS,
    read_requests,
)
from raymoe.specs.files import parse_json_object
from raymoe.units import MAX_EXACT_FLOAT, MAX_INT64

PARQUET, JSON_LINES, CSV, ARROW = "parquet", "JSON lines", "CSV", "Arrow"
COMPRESSED, ARROW_MAGIC = tuple(COMPRESSIONS), b"ARROW1"
SUFFIXES = {
    PARQUET: (".parquet", ".pq"),
    JSON_LINES: (".jsonl", ".ndjson"),
    CSV: (".csv", ".tsv"),
    ARROW: (".arrow",),
}
# JSON lines too, if nothing else is in a directory: others put facts about their files there.
JSON = ".json"


def find_files(pattern: str) -> tuple[Location, ...]:
    """Return the input files of one format, sorted by name.

    Those of a directory that `save_to_disk` of the library `datasets` wrote are the ones that it
    lists: others there are caches, or left from before.

    Raises:
        ConfigError: There are none, or of two formats, or the file system refuses.
    """
    dataset = find_dataset(pattern) if is_dataset(pattern) else None
    root = Location.parse(pattern) if dataset is None else Location.of_hub(dataset)
    found = _saved_dataset(root) or _find(root)
    files = [one for one in found if kind_of(one)]
    is_dir = root.is_dir()
    if dataset is not None:
        dataset.uri.check_is_directory(is_directory=is_dir)
    if is_dir:
        files = _rows_of(files) if dataset is None else _chosen_files(dataset, root, files)
    if not files:
        known = ", ".join([*(one for suffixes in SUFFIXES.values() for one in suffixes), JSON])
        others = f"{len(found):,} files, but" if found else "nothing is there, or"
        raise ConfigError(
            f"--input {root}: {others} no file that ends in {known}, or for text in one of these "
            f"and {', '.join(COMPRESSED)}"
        )
    kinds = [kind for kind in SUFFIXES if kind in {kind_of(file) for file in files}]
    if len(kinds) > 1:
        raise ConfigError(f"--input {root}: both {' and '.join(kinds)}; name one kind by a glob")
    return tuple(sorted(files, key=lambda one: one.path))


def _rows_of(files: list[Location]) -> list[Location]:
    return [one for one in files if not _is_json(one)] or files


def _chosen_files(dataset: HubDataset, root: Location, files: Sequence[Location]) -> list[Location]:
    paths = [one.path for one in files]
    chosen = dataset.choose(paths, lambda name: _is_json(root.at(name)))
    return [root.at(path) for path in chosen]


def kind_of(file: Location) -> str:
    """Return the key of `SUFFIXES` by the file's name; "" for other files."""
    name = _plain_name(file)
    if name.endswith(JSON):
        return JSON_LINES
    kind = next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), "")
    return kind if kind in (JSON_LINES, CSV) or not _is_compressed(file) else ""


def _is_json(file: Location) -> bool:
    return _plain_name(file).endswith(JSON)


def _plain_name(file: Location) -> str:
    """Return the name in small letters, without the end that says how it is compressed."""
    name = file.name.lower()
    return PurePosixPath(name).stem if name.endswith(COMPRESSED) else name


def _find(root: Location) -> list[Location]:
    if root.is_file():
        return [root]
    if root.is_dir():
        return root.files()
    found = root.glob()
    # An object store says why there is nothing only when it is asked to list it.
    is_known = root.is_local or root.scheme == HUB or set(root.path) & set("*?[")
    return found if found or is_known else root.files()


def _saved_dataset(root: Location) -> list[Location]:
    """Return the files of a directory that `save_to_disk` wrote; [] for others.

    Raises:
        ConfigError: It holds several datasets, or lists files in a way that is not known.
    """
    if not root.is_dir():
        return []
    if root.child("dataset_dict.json").is_file():
        found = _read_object(root.child("dataset_dict.json")).get("splits")
        names = [str(name) for name in found] if isinstance(found, list) else []
        splits = ", ".join(names) or "no split"
        raise ConfigError(f"--input {root} is a DatasetDict with {splits}; name one split, such as "
                          f"--input {root}/{names[0] if names else 'train'}")  # fmt: skip
    state_file = root.child("state.json")
    if not (state_file.is_file() and root.child("dataset_info.json").is_file()):
        return []
    state = _read_object(state_file)
    listed = state.get("_data_files")
    if listed == []:
        raise ConfigError(f"--input {root} is a dataset without rows")
    files = listed if isinstance(listed, list) else []
    listed_names: list[Any] = [one.get("filename") for one in files if isinstance(one, dict)]
    plain = [name for name in listed_names if name == PurePosixPath(str(name)).name]
    if not plain or len(plain) != len(files) or state.get("_indices_data_files"):
        raise ConfigError(f"{state_file} lists no files as save_to_disk does today; load the "
                          "dataset with load_from_disk and save it again")  # fmt: skip
    return [root.child(name) for name in plain]


def _read_object(file: Location) -> dict[str, Any]:
    with file.explained("read"):
        data = file.read_bytes()
    try:
        return parse_json_object(data, where=str(file))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


MAX_REASON = 500  # characters of what is wrong with a row
SPLIT_BYTES = 4 << 20
SPLIT_ROWS = 4096
WHOLE = -1  # as the size of a split: up to the end of the file


_MARKS = (
    ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), 32),
    ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), 16),
)
# Places of zeros in the first four bytes, of which two characters at least are ASCII.
_WIDTH_OF_ZEROS = {(1, 3): 16, (0, 2): 16, (1, 2, 3): 32, (0, 1, 2): 32}


class Split(NamedTuple):
    """Some rows of one file; the unit that a Ray task reads.

    Attributes:
        offset: Where they begin: a byte of text, a record batch of Arrow, a row group of parquet.
        size: How many bytes, record batches or row groups there are.
        num_rows: How many rows of them count.
        line: Number of the first line of text.
    """

    path: str
    offset: int
    size: int
    num_rows: int
    line: int = 1


class Piece(NamedTuple):
    """The smallest part of a file between which a split may end: a row of text, or more."""

    size: int
    num_rows: int
    num_lines: int = 0


class Cutter:
    """Cuts files into splits while their rows are counted.

    Attributes:
        limit: Rows that count; None is all.
    """

    def __init__(self, limit: int | None) -> None:
        self.splits: list[Split] = []
        self.num_rows, self._limit = 0, limit

    @property
    def is_full(self) -> bool:
        return self._limit is not None and self.num_rows >= self._limit

    def cut(
        self,
        file: Location,
        pieces: Iterable[Piece],
        *,
        offset: int = 0,
        line: int = 1,
        is_whole: bool = False,
    ) -> None:
        """Cut one file.

        Args:
            offset: Where the first piece begins.
            is_whole: The file can only be read from its start.
        """
        size = rows = lines = 0
        for piece in pieces:
            size, rows = size + piece.size, rows + piece.num_rows
            lines, self.num_rows = lines + piece.num_lines, self.num_rows + piece.num_rows
            if self.is_full:
                break
            if not is_whole and (size >= SPLIT_BYTES or rows >= SPLIT_ROWS):
                self.splits.append(Split(file.path, offset, size, rows, line))
                offset, line = offset + size, line + lines
                size = rows = lines = 0
        if self._limit is not None and self.num_rows > self._limit:
            rows, self.num_rows = rows - (self.num_rows - self._limit), self._limit
        if rows:
            size = WHOLE if is_whole else size
            self.splits.append(Split(file.path, offset, size, rows, line))


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFormat:
    """The columns of a set of files.

    Attributes:
        schema: One type for each key.
        json_columns: String columns whose cells are JSON text, because the values are nested or of
            several types.
        prompt_columns: String columns as soon as one prompt is text: prompts that are not are
            errors of their rows.
        is_full: Lines whose keys are no columns are errors, because there would be too many.
    """

    schema: pa.Schema
    json_columns: frozenset[str]
    prompt_columns: frozenset[str] = frozenset()
    text_columns: frozenset[str] = frozenset()
    is_full: bool = False


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


def _check_encoding(file: Location, start: bytes) -> None:
    """Refuse a file whose first line is in UTF-16 or UTF-32, by its mark or by its zeros."""
    zeros = tuple(place for place, byte in enumerate(start[:4]) if byte == 0)
    width = next((width for marks, width in _MARKS if start.startswith(marks)), None)
    width = width or _WIDTH_OF_ZEROS.get(zeros)
    if width:
        raise ConfigError(
            f"{file} is text in UTF-{width}; convert it to UTF-8, for example with: iconv -f "
            f"UTF-{width} -t UTF-8"
        )


BEGIN_BYTES = 4096


def _check_is_lines(file: Location, line: bytes) -> None:
    """Refuse JSON that has several lines for a row, or all rows in one, by its first line."""
    begin = b"".join(line[:BEGIN_BYTES].removeprefix(codecs.BOM_UTF8).split())[:2]
    if begin in (b"[", b"{", b"[{"):
        raise ConfigError(
            f"{file} is JSON, but not JSON lines, which have one object on each line; convert it, "
            f"for example with: jq -c '{'.[]' if begin.startswith(b'[') else '.'}'"
        )


def scan(
    files: Sequence[Location],
    prompt_columns: Collection[str],
    id_column: str | None,
    limit: int | None = None,
) -> JsonlScan:
    """Read JSON lines once, to find columns, ids and splits.

    Args:
        limit: Lines after so many rows are not read.
    """
    kinds: dict[str, set[str]] = {}
    ids: list[Any] = []
    cutter, is_full = Cutter(limit), False

    def pieces(file: Location) -> Iterator[Piece]:
        nonlocal is_full
        is_first = True
        for number, line in enumerate(_lines(file)):
            if number == 0:
                _check_encoding(file, line.data)
            if line.has_content and is_first:
                is_first = False
                _check_is_lines(file, line.data)
            record, error = parse_line(line) if line.has_content else (None, "")
            is_full |= not _add_kinds(kinds, record or {})
            if id_column is not None and record is not None:
                # A broken line may have lost its id, and is known by its error.
                is_lost = bool(error) and record.get(id_column) is None
                ids.extend(one for one in (record.get(id_column),) if _encodes(one) and not is_lost)
            yield Piece(line.num_bytes, line.has_content, 1)

    for file in files:
        if not cutter.is_full:
            cutter.cut(file, pieces(file), is_whole=_is_compressed(file))
    if not kinds:
        few = f" of at most {MAX_KEYS:,} keys" if is_full else ""
        raise ConfigError(f"no JSON object{few} in {', '.join(map(str, files[:3]))}")
    layout = replace(_choose_format(kinds, prompt_columns), is_full=is_full)
    splits = tuple(cutter.splits)
    return JsonlScan(layout=layout, splits=splits, num_rows=cutter.num_rows, ids=ids)


def _add_kinds(kinds: dict[str, set[str]], record: Mapping[str, Any]) -> bool:
    """Note what the values of a line are; False if it would make too many columns."""
    if len(record) > MAX_KEYS or len(kinds.keys() | record.keys()) > MAX_COLUMNS:
        return False
    for key, value in record.items():
        kinds.setdefault(key, set()).add(_kind(value))
    return True


def read_jsonl(split: Split, *, layout: JsonlFormat, root: Location) -> Iterator[pa.Table]:
    """Yield the rows of a split, with a column of what is wrong with their lines."""
    location = root.at(split.path)
    numbered = enumerate(_lines_of(split, location), split.line)
    rows = ((number, line) for number, line in numbered if line.has_content)
    for some in _in_tables(rows, split):
        yield _jsonl_table(some, layout, location)


def _jsonl_table(
    lines: Iterable[tuple[int, Line]], layout: JsonlFormat, location: Location
) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in layout.schema.names}
    errors = []
    for number, line in lines:
        record, error = parse_line(line)
        others = sorted((record or {}).keys() - columns) if layout.is_full else []
        if others:
            error = error or (f"the key {shown(others[0])} is no column: the lines before have as "
                              f"many keys as are read, {MAX_COLUMNS:,}")  # fmt: skip
        for field in layout.schema:
            try:
                cell = _cell((record or {}).get(field.name), field, layout)
            except ValueError as problem:
                error = error or f"column {field.name!r} {problem}"
                cell = None
            columns[field.name].append(cell)
        errors.append(_at(error, location, number))
    arrays = {field.name: pa.array(columns[field.name], field.type) for field in layout.schema}
    return pa.table({**arrays, INPUT_ERROR_COLUMN: pa.array(errors, pa.string())})


def _at(error: str, location: Location, line: int) -> str:
    # The place makes the text unique: a resumed run knows lines without an id by it.
    return f"{shown(error, MAX_REASON)} ({location}, line {line})" if error else ""


def _in_tables(rows: Iterable[Any], split: Split) -> Iterator[list[Any]]:
    """Yield the rows of a split, as many at once as a table gets."""
    left = itertools.islice(rows, split.num_rows)
    while some := list(itertools.islice(left, SPLIT_ROWS)):
        yield some


def _lines_of(split: Split, location: Location) -> Iterator[Line]:
    if split.size == WHOLE:
        with location.open_lines() as file:
            left = split.offset
            while left and (skipped := file.read(min(left, BUFFER_BYTES))):
                left -= len(skipped)
            yield from read_lines(file)
        return
    buffer_bytes = min(split.size, BUFFER_BYTES)
    with io.BufferedReader(location.open_file(), buffer_bytes) as file:
        file.seek(split.offset)
        left = split.size
        for line in read_lines(file):
            yield line
            left -= line.num_bytes
            if left <= 0:
                return


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
        return "int" if abs(value) <= MAX_EXACT_FLOAT else "big"
    if isinstance(value, float):
        return "float"
    return "str" if isinstance(value, str) else "nested"


def _lines(location: Location) -> Iterator[Line]:
    with location.explained("read"), location.open_lines() as file:
        yield from read_lines(file)


def _is_compressed(file: Location) -> bool:
    return file.name.lower().endswith(COMPRESSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFormat:
    """The columns of a set of CSV files; all are text, and null where a cell is empty."""

    schema: pa.Schema
    headers: Mapping[str, CsvHeader]


def read_csv(split: Split, *, layout: CsvFormat, root: Location) -> Iterator[pa.Table]:
    """Yield the rows of a split, with a column of what is wrong with them."""
    location, header = root.at(split.path), layout.headers[split.path]
    rows = CsvRows(_lines_of(split, location), header.separator, split.line)
    for some in _in_tables((row for row in rows if row.has_content), split):
        yield _csv_table(some, header, layout, location)


def _csv_table(
    rows: Iterable[CsvRow], header: CsvHeader, layout: CsvFormat, location: Location
) -> pa.Table:
    columns: dict[str, list[str | None]] = {name: [] for name in layout.schema.names}
    errors = []
    for row in rows:
        cells = _csv_cells(row, header)
        error = row.error
        if not cells and not error:
            text = shown(header.separator.join(row.cells))
            error = f"the row has {len(row.cells)} cells, the header {len(header.names)}: {text}"
        for name, column in columns.items():
            column.append(cells.get(name) or None)
        errors.append(_at(error, location, row.line))
    arrays = {name: pa.array(cells, pa.string()) for name, cells in columns.items()}
    return pa.table({**arrays, INPUT_ERROR_COLUMN: pa.array(errors, pa.string())})


def _csv_cells(row: CsvRow, header: CsvHeader) -> dict[str, str]:
    """Return the cells by name; none of a row that has not one for each column."""
    is_whole = len(row.cells) == len(header.names)
    return dict(zip(header.names, row.cells, strict=True)) if is_whole else {}


# What a task reads of a split; sent to Ray's workers, so it holds no ids.
Reader = Callable[[Split], Iterator[pa.Table]]
Flags = npt.NDArray[np.bool_]
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
    def dataset(self, is_written: Flags | None = None) -> ray.data.Dataset:
        """Return the rows as a dataset; Ray must be running.

        Args:
            is_written: Of all rows, in the order of `tables`: those that are left out.
        """


@dataclass(frozen=True, kw_only=True)
class SplitSource(Source):
    """Files that our own readers read: one bad row of text is one error row."""

    splits: tuple[Split, ...]
    read: Reader

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for split in self.splits:
            for table in self.read(split):
                yield table.select([name for name in columns if name in table.column_names])

    def dataset(self, is_written: Flags | None = None) -> ray.data.Dataset:
        splits = [split._asdict() for split in self.splits]
        if is_written is not None:
            splits = _with_flags(self.splits, is_written)
        listed = ray.data.from_items(splits, override_num_blocks=max(1, len(splits)))
        read = functools.partial(_read_listed, read=self.read)
        return listed.map_batches(read, batch_size=1, batch_format="pyarrow")


@dataclass(frozen=True, kw_only=True)
class TableSource(SplitSource):
    """Files with types of their own, whose columns can be read one by one."""

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        read: Any = self.read
        for split in self.splits:
            yield from read(split, columns=tuple(columns))


FLAGS = "is_written"


def _with_flags(splits: Sequence[Split], is_written: Flags) -> list[dict[str, Any]]:
    """Return the splits that have rows to read, each with a bit for each of its rows."""
    listed, begin = [], 0
    for split in splits:
        flags = is_written[begin : begin + split.num_rows]
        begin += split.num_rows
        if not flags.all():
            listed.append({**split._asdict(), FLAGS: np.packbits(flags).tobytes()})
    return listed


def _read_listed(listed: pa.Table, *, read: Reader) -> Iterator[pa.Table]:
    for row in listed.to_pylist():
        bits = row.pop(FLAGS, None)
        tables = read(Split(**row))
        yield from tables if bits is None else _unwritten(tables, bits)


def _unwritten(tables: Iterable[pa.Table], bits: bytes) -> Iterator[pa.Table]:
    is_written, begin = np.unpackbits(np.frombuffer(bits, np.uint8)).astype(bool), 0
    for table in tables:
        end = begin + table.num_rows
        yield table.filter(pa.array(~is_written[begin:end]))
        begin = end


@dataclass(frozen=True, kw_only=True)
class TemplatedSource(Source):
    """Rows of another source, with the prompts that a template makes of them."""

    base: Source
    template: PromptTemplate

    @classmethod
    def of(cls, base: Source, template: PromptTemplate) -> "TemplatedSource":
        """Return the rows of `base` with one more column.

        Raises:
            ConfigError: The template does not fit the columns.
        """
        template = replace(template, json_columns=base.json_columns)
        template.check(base.schema.names)
        column = template.output_column
        is_json = column == template.operator_columns["messages_column"]
        return cls(
            files=base.files,
            schema=base.schema.append(pa.field(column, pa.string())),
            num_rows=base.num_rows,
            ids=base.ids,
            json_columns=base.json_columns | ({column} if is_json else set()),
            error_column=INPUT_ERROR_COLUMN,
            base=base,
            template=template,
        )

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        needed = {*self.template.columns(self.base.schema.names), *columns, INPUT_ERROR_COLUMN}
        for table in self.base.tables([*needed]):
            made = self.template.apply(table)
            yield made.select([name for name in columns if name in made.column_names])

    def dataset(self, is_written: Flags | None = None) -> ray.data.Dataset:
        apply = self.template.apply
        return self.base.dataset(is_written).map_batches(
            apply, batch_size=None, batch_format="pyarrow"
        )


def open_source(
    pattern: str,
    *,
    text_columns: Collection[str] = ("prompt",),
    id_column: str | None,
    form: str = "auto",
    limit: int | None = None,
) -> Source:
    """Find the files of a path, directory or glob, and read their columns and ids.

    Args:
        pattern: The path, directory or glob, or the URI of one.
        text_columns: Those with text or token ids: prompts, and what is scored after them.
        form: One of `FORMS`: what JSON lines are; "auto" looks at their keys.
        limit: Only the first rows count, in the order of the files' names; None is all.

    Raises:
        ConfigError: Nothing is there, two formats are mixed, or ids are missing or not unique.
    """
    if form not in FORMS:
        raise ConfigError(f"--format is {form!r}; it must be one of {', '.join(FORMS)}")
    files = find_files(pattern)
    kind = kind_of(files[0])
    if form == "openai-batch" and kind != JSON_LINES:
        raise ConfigError(f"--format openai-batch takes JSON lines, not {kind}")
    is_batch = form == "openai-batch"
    if kind == JSON_LINES and (is_batch or (form == "auto" and _has_requests(files))):
        return _open_batch(files, limit)
    if kind == JSON_LINES:
        source: Source = _open_jsonl(files, text_columns, id_column, limit)
    elif kind == CSV:
        source = _open_csv(files, id_column, limit)
    else:
        source = _open_tables(files, id_column, limit)
    if id_column is not None:
        check_ids(source.ids, id_column)
    return source


def _open_csv(files: Sequence[Location], id_column: str | None, limit: int | None) -> SplitSource:
    cutter, ids = Cutter(limit), []
    headers: dict[str, CsvHeader] = {}

    def pieces(rows: CsvRows, header: CsvHeader) -> Iterator[Piece]:
        for row in rows:
            cells = _csv_cells(row, header)
            if id_column in cells:
                ids.append(cells[id_column] or None)
            yield Piece(row.num_bytes, row.has_content, row.num_lines)

    for file in files:
        if cutter.is_full:
            break
        separator = "\t" if ".tsv" in file.name.lower() else ","
        with file.explained("read"), file.open_lines() as opened:
            _check_encoding(file, opened.peek(4)[:4])
            lines = read_lines(opened)
            header = read_header(lines, separator, where=file)
            if header is not None:
                headers[file.path] = header
                rows = CsvRows(lines, header.separator, header.line)
                cutter.cut(file, pieces(rows, header), offset=header.num_bytes, line=header.line,
                           is_whole=_is_compressed(file))  # fmt: skip
    names = dict.fromkeys(name for header in headers.values() for name in header.names)
    if not names:
        raise ConfigError(f"{files[0]} is empty; the first line of CSV names the columns")
    if id_column is not None and id_column not in names:
        raise ConfigError(f"no header has {id_column!r} (--id-column); it has {', '.join(names)}")
    layout = CsvFormat(schema=pa.schema([(name, pa.string()) for name in names]), headers=headers)
    return SplitSource(
        files=tuple(files), schema=layout.schema, num_rows=cutter.num_rows,
        ids=pa.array(ids, pa.string()), error_column=INPUT_ERROR_COLUMN,
        splits=tuple(cutter.splits), read=functools.partial(read_csv, layout=layout, root=files[0]),
    )  # fmt: skip


def _open_tables(
    files: Sequence[Location], id_column: str | None, limit: int | None
) -> TableSource:
    """Open files of parquet or Arrow: their columns together, even if few rows count."""
    is_parquet = kind_of(files[0]) == PARQUET
    read_head = _row_groups if is_parquet else _record_batches
    with ThreadPoolExecutor(NUM_READERS) as pool:
        heads = list(pool.map(functools.partial(_read_head, read_head=read_head), files))
    cutter = Cutter(limit)
    for file, head in zip(files, heads, strict=True):
        if not cutter.is_full:
            with file.explained(f"read as {kind_of(file)}"):
                cutter.cut(file, head.pieces, is_whole=not (is_parquet or file.is_local))
    schema = unify({str(file): head.schema for file, head in zip(files, heads, strict=True)})
    read = read_row_groups if is_parquet else read_arrow
    source = TableSource(
        files=tuple(files), schema=schema, num_rows=cutter.num_rows, ids=pa.array([], pa.null()),
        splits=tuple(cutter.splits), read=functools.partial(read, schema=schema, root=files[0]),
    )  # fmt: skip
    return source if id_column is None else replace(source, ids=_read_ids(source, heads, id_column))


class _Head(NamedTuple):
    schema: pa.Schema
    pieces: Iterable[Piece]


def _read_head(
    file: Location, *, read_head: Callable[[Location], tuple[pa.Schema, Iterable[Piece]]]
) -> _Head:
    with file.explained(f"read as {kind_of(file)}"):
        return _Head(*read_head(file))


def _read_ids(source: TableSource, heads: Sequence[_Head], id_column: str) -> pa.Array:
    for file, head in zip(source.files, heads, strict=True):
        if id_column not in head.schema.names:
            raise _no_ids(file, id_column, head.schema.names)
    kind = source.schema.field(id_column).type
    check_id_type(kind, id_column, source.files)

    def read(split: Split) -> list[pa.Array]:
        tables = replace(source, splits=(split,)).tables([id_column])
        return [chunk for table in tables for chunk in table.column(id_column).chunks]

    with ThreadPoolExecutor(NUM_READERS) as pool:
        chunks = [chunk for some in pool.map(read, source.splits) for chunk in some]
    return _combine(pa.chunked_array(chunks, kind))


def _row_groups(file: Location) -> tuple[pa.Schema, list[Piece]]:
    with file.open_file() as opened, pq.ParquetFile(opened) as parquet:
        counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        schema = parquet.schema_arrow
    for name in _partitions(file.path):
        if name not in schema.names:
            schema = schema.append(pa.field(name, pa.string()))
    return schema, [Piece(1, count) for count in counts]


NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # what Hive, Spark and Arrow write for null


def _partitions(path: str) -> dict[str, str | None]:
    """Return the columns that the directories of a file name, as `KEY=VALUE`."""
    pairs = [part.partition("=") for part in PurePosixPath(path).parts[:-1]]
    named = {unquote(key): unquote(value) for key, equals, value in pairs if key and equals}
    return {key: None if value == NO_PARTITION else value for key, value in named.items()}


def read_row_groups(
    split: Split, *, schema: pa.Schema, root: Location, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the first rows of some row groups of a parquet file, with the columns of all files."""
    left, location = split.num_rows, root.at(split.path)
    schema = _chosen(schema, columns)
    partitions = _partitions(split.path)
    with location.open_file() as opened, pq.ParquetFile(opened) as file:
        groups = [*range(split.offset, split.offset + split.size)]
        own = file.schema_arrow.names
        names = [name for name in schema.names if name in own]
        for batch in file.iter_batches(SPLIT_ROWS, row_groups=groups, columns=names):
            if left > 0:
                table = pa.table(batch.slice(0, left))
                for name, value in partitions.items():
                    if name in schema.names and name not in own:
                        table = table.append_column(name, _repeated(value, table.num_rows))
                yield _conformed(table, schema, location)
            left -= batch.num_rows


def _repeated(value: str | None, num_rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.string()), num_rows)


def _chosen(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if columns is None:
        return schema
    return pa.schema([schema.field(name) for name in columns if name in schema.names])


def _conformed(table: pa.Table, schema: pa.Schema, location: Location) -> pa.Table:
    try:
        return conform(table, schema)
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from error


def _record_batches(file: Location) -> tuple[pa.Schema, Iterator[Piece]]:
    with _open_arrow(file) as reader:
        schema = reader.schema

    def pieces() -> Iterator[Piece]:
        with _open_arrow(file) as reader:
            for batch in _batches(reader):
                yield Piece(1, batch.num_rows)

    return schema, pieces()


def read_arrow(
    split: Split, *, schema: pa.Schema, root: Location, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the first rows of some record batches of a file or stream of Arrow."""
    left, end = split.num_rows, None if split.size == WHOLE else split.offset + split.size
    location, schema = root.at(split.path), _chosen(schema, columns)
    with _open_arrow(location) as reader:
        for batch in itertools.islice(_batches(reader), split.offset, end):
            for begin in range(0, min(batch.num_rows, left), SPLIT_ROWS):
                rows = batch.slice(begin, min(SPLIT_ROWS, left - begin))
                yield _conformed(pa.table(rows), schema, location)
            left -= min(batch.num_rows, left)


@contextlib.contextmanager
def _open_arrow(file: Location) -> Iterator[Any]:
    file.check_regular()
    opened = pa.memory_map(file.path) if file.is_local else file.open_file()
    with opened:
        magic = opened.read(len(ARROW_MAGIC))
        opened.seek(0)
        is_file = magic == ARROW_MAGIC
        with pa.ipc.open_file(opened) if is_file else pa.ipc.open_stream(opened) as reader:
            yield reader


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from reader


def _no_ids(file: Location, id_column: str, names: Sequence[str]) -> ConfigError:
    have = ", ".join(names)
    return ConfigError(f"{file} has no column {id_column!r} (--id-column); it has {have}")


def _combine(chunks: pa.ChunkedArray) -> pa.Array:
    combined = chunks.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _open_jsonl(
    files: Sequence[Location],
    text_columns: Collection[str],
    id_column: str | None,
    limit: int | None,
) -> SplitSource:
    scanned = scan(files, text_columns, id_column, limit)
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
    return SplitSource(
        files=tuple(files),
        schema=layout.schema,
        num_rows=scanned.num_rows,
        ids=ids,
        json_columns=layout.json_columns,
        error_column=INPUT_ERROR_COLUMN,
        splits=scanned.splits,
        read=functools.partial(read_jsonl, layout=layout, root=files[0]),
    )


def _has_requests(files: Sequence[Location]) -> bool:
    records = (parse_line(line)[0] for line in _lines(files[0]))
    first = next((record for record in records if record), {})
    return set(BATCH_COLUMNS) <= first.keys()


def _open_batch(files: Sequence[Location], limit: int | None) -> SplitSource:
    layout = JsonlFormat(
        schema=pa.schema([(name, pa.string()) for name in BATCH_COLUMNS]),
        json_columns=frozenset({"body"}),
        text_columns=frozenset(TEXT_COLUMNS),
    )
    scanned = scan(files, (), ID_COLUMN, limit)
    # Lines without an id become error rows.
    ids = [row_id for row_id in scanned.ids if isinstance(row_id, str)]
    source = SplitSource(
        files=tuple(files),
        schema=pa.schema([(name, pa.string()) for name in ROW_COLUMNS]),
        num_rows=scanned.num_rows,
        ids=pa.array(ids, pa.string()),
        error_column=INPUT_ERROR_COLUMN,
        is_batch=True,
        splits=scanned.splits,
        read=functools.partial(_read_requests, layout=layout, root=files[0]),
    )
    check_ids(source.ids, ID_COLUMN)
    return source


def _read_requests(split: Split, *, layout: JsonlFormat, root: Location) -> Iterator[pa.Table]:
    for table in read_jsonl(split, layout=layout, root=root):
        yield read_requests(table, error_column=INPUT_ERROR_COLUMN)


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
