"""Where do the rows come from? Files, directories and globs of parquet or JSON lines."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import ray.data

from raymoe.cli.input_files import JSONL_SUFFIXES, find_files
from raymoe.cli.jsonl import (
    INPUT_ERROR_COLUMN,
    JsonlFormat,
    JsonlScan,
    parse_line,
    read_split,
    scan,
)
from raymoe.cli.storage import NUM_READERS, Location
from raymoe.cli.storage_errors import help_for, reason_of
from raymoe.data.openai_batch import (
    BATCH_COLUMNS,
    ID_COLUMN,
    ROW_COLUMNS,
    TEXT_COLUMNS,
    read_requests,
)
from raymoe.errors import ConfigError

FORMS = ("auto", "table", "openai-batch")


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A table of prompts in files.

    Attributes:
        files: At least one, all of one file system.
        schema: Their columns.
        num_rows: Rows in all files.
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
    """Parquet files, read by Ray Data."""

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows with these columns."""
        for location in self.files:
            with location.open_file() as opened, pq.ParquetFile(opened) as file:
                names = [name for name in columns if name in file.schema_arrow.names]
                for batch in file.iter_batches(columns=names):
                    yield pa.table(batch)

    def dataset(self) -> ray.data.Dataset:
        """Return the rows as a dataset."""
        paths = [file.path for file in self.files]
        return ray.data.read_parquet(paths, filesystem=self.files[0].filesystem)


@dataclass(frozen=True, kw_only=True)
class JsonlSource(Source):
    """JSON lines, read by our own reader: one bad line is one bad row."""

    scanned: JsonlScan
    error_column: str | None = INPUT_ERROR_COLUMN

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows with these columns."""
        for split in self.scanned.splits:
            listed = pa.Table.from_pylist([split._asdict()])
            table = read_split(listed, layout=self.scanned.layout, root=self.files[0])
            if self.is_batch:
                table = read_requests(table, error_column=INPUT_ERROR_COLUMN)
            yield table.select([name for name in columns if name in table.column_names])

    def dataset(self) -> ray.data.Dataset:
        """Return the rows as a dataset."""
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
    pattern: str, *, prompt_column: str, id_column: str | None, form: str = "auto"
) -> Source:
    """Find the files of a path, directory or glob, and read their columns and ids.

    Args:
        pattern: The path, directory or glob, or the URI of one.
        prompt_column: Of prompts.
        id_column: Of ids; None for none.
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
        source: Source = _open_jsonl(files, prompt_column, id_column)
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
    files: Sequence[Location], prompt_column: str, id_column: str | None
) -> JsonlSource:
    scanned = scan(files, prompt_column, id_column)
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
    """Whether the first line that can be read is a request of OpenAI's batch form."""
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
    scanned = dataclasses.replace(scan(files, "", ID_COLUMN), layout=layout)
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
        dataset: All rows.
        id_column: Where their ids are.
        ids: Of the rows that are written.
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
