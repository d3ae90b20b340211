"""Where do the rows go? Files that appear whole, and can be continued after a crash."""

from collections.abc import Iterable, Iterator
from pathlib import PurePath, PurePosixPath
from typing import Protocol

import pyarrow as pa

from raymoe.cli.joined_sink import JoinedSink
from raymoe.cli.jsonl_sink import JsonlSink
from raymoe.cli.lines import BatchLines, SampleLines, Stale, TableLines, WrittenRow
from raymoe.cli.parquet_sink import ParquetSink
from raymoe.cli.sources import Source
from raymoe.cli.storage import Location
from raymoe.data.samples import COUNT_COLUMN
from raymoe.errors import ConfigError


class Sink(Protocol):
    """A place for finished rows."""

    location: Location

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Make the place ready; refuse one that is not empty unless told how to treat it."""
        ...

    def read_written(self, id_column: str) -> Iterator[WrittenRow]:
        """Yield what a resumed run must know of every row that is already there."""
        ...

    def drop(self, stale: Stale, id_column: str) -> None:
        """Remove rows."""
        ...

    def write(self, table: pa.Table) -> None:
        """Take some rows; they are safe after the next `flush`."""
        ...

    def flush(self) -> None:
        """Put the rows where they outlive this process."""
        ...

    def close(self) -> None:
        """Flush and finish the output."""
        ...


def open_sink(
    location: Location,
    source: Source,
    *,
    has_samples: bool = False,
    content_columns: tuple[str, ...] = (),
    run: str = "",
) -> Sink:
    """Return a file of JSON lines when the name ends in .jsonl, else a directory of parquet.

    Args:
        location: Of the output.
        source: Where the rows come from; requests of OpenAI's batch form become responses.
        has_samples: Each sample becomes a row.
        content_columns: What the answer of a row depends on.
        run: Id of the run, in the names of its parts.

    Raises:
        ConfigError: Responses are to be written as parquet, or the output is a whole bucket.
    """
    if location.is_bucket:
        raise ConfigError(f"--output {location} is a bucket; name a place in it, such as "
                          f"{location}/answers")  # fmt: skip
    has_count = has_samples or COUNT_COLUMN in source.schema.names
    columns = (source.json_columns, has_count, content_columns)
    if location.suffix == ".jsonl":
        kind_of_lines = SampleLines if has_samples else TableLines
        lines = BatchLines() if source.is_batch else kind_of_lines(*columns)
        if location.is_local:
            return JsonlSink(location=location, lines=lines)
        return JoinedSink(location=location, lines=lines, run=run)
    if source.is_batch:
        raise ConfigError(f"--output {location}: responses of an OpenAI batch are JSON lines; give "
                          "a file that ends in .jsonl, or --format table")  # fmt: skip
    lines = TableLines(*columns)
    return ParquetSink(location=location, has_samples=has_samples, lines=lines, run=run)


def check_apart(output: Location, inputs: Iterable[Location], root: Location) -> None:
    """Refuse an output that is the input, holds it, or lies in the input's directory.

    Args:
        output: Where rows are written.
        inputs: The files that are read.
        root: What the user named: one of them, their directory or a glob.

    Raises:
        ConfigError: With both; links of local files are followed.
    """
    target = _place(output)
    if _is_same_kind(output, root) and root.is_dir():
        directory = _place(root)
        if target == directory or target.is_relative_to(directory):
            raise ConfigError(
                f"--output {output} lies in the input directory {root}; choose another"
            )
    for one in inputs:
        if not _is_same_kind(output, one):
            continue
        if _place(one).is_relative_to(target) or _is_linked(output, one):
            raise ConfigError(f"--output {output} is or holds the input {one}; choose another")


def _is_same_kind(one: Location, other: Location) -> bool:
    return bool(one.filesystem.type_name == other.filesystem.type_name)


def _place(location: Location) -> PurePath:
    return location.local_path.resolve() if location.is_local else PurePosixPath(location.path)


def _is_linked(output: Location, one: Location) -> bool:
    """Whether two local names are of the same file."""
    is_there = output.is_local and output.local_path.exists()
    return is_there and output.local_path.samefile(one.local_path)
