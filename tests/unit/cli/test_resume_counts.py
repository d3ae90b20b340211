"""A resumed run counts what former runs wrote as those runs counted it."""

import dataclasses
import json

import pytest

from raymoe.cli.resume import count_written, find_written
from raymoe.cli.sources import open_source
from raymoe.cli.writers import RunStats, open_writer
from raymoe.config import SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.data.status import NO_RUNS, FormerRuns
from raymoe.engine.outputs import Generation
from raymoe.openai.batch import CONTENT_COLUMNS
from tests.unit.cli.places import PLACES, write_part

BAD = Generation.from_error(ValueError("17 is odd"))
GOOD = Generation(text="a", num_input_tokens=5, num_generated_tokens=3)
SEVERAL = dataclasses.replace(GOOD, others=(GOOD, GOOD))


def rows(number):
    return {"id": number, "prompt": f"row {number}"}


def requests(number):
    body = {"model": "m", "prompt": f"row {number}"}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def written(tmp_path, name, make, *, has_samples=False):
    """Write answers in two parts; return the source, a writer that goes on, and their counts."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(make(number)) + "\n" for number in range(6)))
    source = open_source(str(path), id_column=None if make is requests else "id")
    location = PLACES["local"](tmp_path, name)
    options = {"has_samples": has_samples, "content_columns": ("prompt",)}
    writer, stats = open_writer(location, source, **options), RunStats(total_rows=6)
    writer.prepare(resume=False, overwrite=False)
    columns = OutputColumns.of(SamplingParams(n=3), has_choices=has_samples or source.is_batch)
    for table in source.tables([*source.schema.names]):
        answers = [BAD, *[SEVERAL] * (table.num_rows - 1)]
        done = columns.append(table, answers)[0]
        stats.add(done)
        write_part(writer, done.slice(0, 4))
        write_part(writer, done.slice(4))
    again = open_writer(location, source, **options)
    again.prepare(resume=True, overwrite=False)
    return source, again, stats


@pytest.mark.parametrize(
    ("name", "make", "has_samples"),
    [
        ("out.jsonl", rows, False), ("out.jsonl", rows, True), ("out", rows, False),
        ("out", rows, True), ("out.jsonl", requests, False),
    ],
)  # fmt: skip
def test_rows_samples_and_errors_of_an_output_are_counted(tmp_path, name, make, has_samples):
    source, writer, stats = written(tmp_path, name, make, has_samples=has_samples)
    columns, id_column = (CONTENT_COLUMNS, "custom_id") if make is requests else (("prompt",), "id")
    found = find_written(source, writer, columns, id_column)
    counts = found.counts
    assert len(found.ids) == 6  # samples are no repeated rows
    assert (counts.num_rows, counts.num_error_rows) == (6, 1)
    assert (counts.num_input_tokens, counts.num_generated_tokens) == (25, 5 * 9)
    assert counts.num_generated_tokens == stats.num_generated_tokens
    assert counts.error_groups.groups() == stats.error_groups.groups()


def test_rows_that_are_dropped_do_not_count(tmp_path):
    source, writer, _ = written(tmp_path, "out.jsonl", rows)
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().replace("row 3", "edited"))
    source = open_source(str(path), id_column="id")
    found = find_written(source, writer, ("prompt",), "id")
    assert found.counts.num_rows == 6
    writer.drop(found.stale, "id")
    counts = count_written(writer, "id")
    assert (counts.num_rows, counts.num_generated_tokens) == (5, 4 * 9)
    former = counts.added_to(FormerRuns(num_runs=2, elapsed_s=7.0))
    assert (former.num_runs, former.num_rows, former.elapsed_s) == (2, 5, 7.0)


def test_an_output_without_rows_and_status_is_of_no_run(tmp_path):
    _, writer, _ = written(tmp_path, "out.jsonl", rows)
    writer.prepare(resume=False, overwrite=True)
    assert count_written(writer, "id").added_to(FormerRuns(elapsed_s=None)) == NO_RUNS
