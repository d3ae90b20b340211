"""Rows of a job's output for its report: prompts and what was answered."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raymoe.cli.storage import Location
from raymoe.data.columns import CHOICES_COLUMN, ERROR_COLUMN, SAMPLES_COLUMN
from raymoe.data.json_lines import MAX_WRITTEN_BYTES, Line, read_lines
from raymoe.data.rows import as_text
from raymoe.data.status import PARTS_SUFFIX, SUFFIX, JobStatus
from raymoe.download.datasets import is_dataset
from raymoe.errors import ConfigError
from raymoe.report import Sample

ID_NAMES = ("id", "custom_id")
TEXT_COLUMN = "generated_text"
# Of the operator's columns, those that are no answer.
COUNTS = frozenset(
    ("generated_tokens", "num_input_tokens", "num_cached_tokens", "num_generated_tokens",
     "finish_reason", "logprobs", "prompt_logprobs", "token_bytes", ERROR_COLUMN)
)  # fmt: skip


def read_samples(status_dir: Path, job: JobStatus | None, count: int) -> list[Sample]:
    """Return rows from all over the output of a job, as far as it is written.

    Raises:
        ConfigError: There is no output to read.
    """
    settings = {} if job is None else dict(job.settings)
    files = _output_files(status_dir, settings)
    if not files:
        raise ConfigError(
            f"no rows of {status_dir.name.removesuffix(SUFFIX)} are written where its status is, "
            "so there are none to show; leave out --samples, or wait"
        )
    step = max(1.0, len(files) / count)
    chosen = [files[int(i * step)] for i in range(min(count, len(files)))]
    per_file = -(-count // len(chosen))
    records = [record for file in chosen for record in _read_some(file, per_file)]
    return [_sample(record, settings) for record in records[:count]]


def _output_files(status_dir: Path, settings: Mapping[str, str]) -> list[Location]:
    name = status_dir.name.removesuffix(SUFFIX)
    output = Location.local(status_dir.with_name(name))
    address = settings.get("output", "")
    if "://" in address and not is_dataset(address):  # whose rows are here
        output = Location.parse(address)
    for place in (output.sibling(output.name + PARTS_SUFFIX), output):
        files = place.entries() if place.is_dir() else [place] * place.is_file()
        found = [file for file in files if file.suffix in (".jsonl", ".parquet")]
        found = [file for file in found if not file.name.startswith(".") and file.info().size]
        if found:
            return found
    return []


def _read_some(file: Location, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows at equal distances; fewer where rows are long."""
    with file.explained("read"):
        if file.suffix == ".parquet":
            yield from _read_table(file, count)
            return
        size = int(file.info().size or 0)
        with io.BufferedReader(file.open_file()) as lines:
            read, end = read_lines(lines, MAX_WRITTEN_BYTES), 0
            for i in range(count):
                start = size * i // count
                if start < end:
                    continue
                if start - end <= size // count:  # lines are longer than the distance
                    start = end
                lines.seek(start)
                if start != end:
                    next(read, None)  # the rest of one
                line = next(read, None)
                end = lines.tell()
                if line is not None and line.has_content:
                    yield _parse(line, file)


def _parse(line: Line, file: Location) -> dict[str, Any]:
    try:
        if line.problem:
            raise ValueError(line.problem)
        return dict(json.loads(line.data))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} has a line that is no row: {error}") from error


def _read_table(file: Location, count: int) -> Iterator[dict[str, Any]]:
    with file.open_file() as opened, pq.ParquetFile(opened) as table:
        group = table.read_row_group(0) if table.num_row_groups else pa.table({})
        step = max(1, group.num_rows // count)
        yield from group.take([*range(0, group.num_rows, step)][:count]).to_pylist()


def _sample(record: Mapping[str, Any], settings: Mapping[str, str]) -> Sample:
    error = record.get(ERROR_COLUMN) or ""
    if "response" in record:  # of an OpenAI batch
        error = error or _text((record.get("error") or {}).get("message") or "")
        body = (record["response"] or {}).get("body") or {}
        choices = body.get("choices") or ()
        answers = [
            _text(one.get("message", {}).get("content") or one.get("text")) for one in choices
        ]
        return Sample(
            name=_name(record), prompt="(in the input)", answers=tuple(answers), error=error
        )
    return Sample(
        name=_name(record), prompt=_prompt(record, settings), answers=_answers(record), error=error
    )


def _name(record: Mapping[str, Any]) -> str:
    return next((_text(record[name]) for name in ID_NAMES if record.get(name) is not None), "")


def _prompt(record: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """The cell that was the prompt; all that is no answer where it has another name."""
    for name in ("messages", "prompt"):
        cell = record.get(settings.get(f"{name}_column", name))
        if cell is None:
            continue
        is_chat = isinstance(cell, Sequence) and all(isinstance(one, Mapping) for one in cell)
        if is_chat and not isinstance(cell, str):
            return "\n\n".join(f"{one.get('role')}: {_text(one.get('content'))}" for one in cell)
        return _text(cell)
    answers = COUNTS | {TEXT_COLUMN, CHOICES_COLUMN, SAMPLES_COLUMN}
    return _text({name: cell for name, cell in record.items() if name not in answers})


def _answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    several = record.get(SAMPLES_COLUMN) or [
        choice.get("text") for choice in record.get(CHOICES_COLUMN) or ()
    ]
    if several:
        return tuple(map(_text, several))
    if TEXT_COLUMN in record:
        return (_text(record[TEXT_COLUMN]),)
    return ()


def _text(cell: object) -> str:
    if isinstance(cell, str):
        return cell
    return json.dumps(cell, ensure_ascii=False, default=as_text)
