"""A resumed run without ids: every row of the input is in the output as often as there."""

import json
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli.resume import count_written
from raymoe.cli.resume_without_ids import find_written_rows, first_of
from raymoe.cli.sources import _read_listed, _with_flags, open_source
from raymoe.cli.writers import open_writer
from raymoe.config import SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.data.prompt_template import INPUT_ERROR_COLUMN
from raymoe.engine.outputs import Generation
from raymoe.errors import WorkerProcessError
from tests.unit.cli.places import PLACES, write_part

COLUMNS = ("prompt", "messages", "sampling_params")
CHAT = [{"role": "user", "content": "é 🙂"}]
RECORDS = [
    {"prompt": "same", "label": "a", "score": 0.1},
    {"prompt": "other", "label": "a", "score": None},
    {"prompt": "same", "label": "b", "score": 2.5},
    {"prompt": "same", "label": "a", "score": 0.1},
    {"messages": CHAT, "label": "b"},
    {"messages": CHAT, "label": "b"},
    {"prompt": "same", "label": "a", "score": 0.1},
    {"prompt": None, "label": None},
]
GOOD = Generation(text="a", token_ids=(1,), num_generated_tokens=1)
SEVERAL = Generation(text="a", token_ids=(1,), others=(GOOD, GOOD))


def write_jsonl(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def write_parquet(path, records):
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    fields = [("prompt", pa.binary()), ("messages", pa.list_(message)), ("label", pa.string()),
              ("score", pa.float32())]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(records, pa.schema(fields)), path, row_group_size=3)


class Job:
    """A job of one file; each call of `run` is a run of it that is killed after some rows."""

    def __init__(self, directory, records, *, write=write_jsonl, name="out.jsonl", place="local",
                 has_samples=False):  # fmt: skip
        self.path = directory / f"in.{'jsonl' if write is write_jsonl else 'parquet'}"
        self.write, self.has_samples = write, has_samples
        self.location = PLACES[place](directory, name)
        self.edit(records)

    def edit(self, records):
        self.write(self.path, records)

    def run(self, *, num_rows=None, is_sampled=False, retries_errors=False, answer=GOOD, seed=0):
        """Write rows that are missing, in any order; return what was found."""
        self.source = open_source(str(self.path), id_column=None)
        writer = open_writer(self.location, self.source, content_columns=COLUMNS, has_ids=False,
                             has_samples=self.has_samples)  # fmt: skip
        writer.prepare(resume=True, overwrite=False)
        found = find_written_rows(
            self.source, writer, COLUMNS, is_sampled=is_sampled, retries_errors=retries_errors
        )
        if found.stale:
            writer.drop(found.stale, None)
        columns = OutputColumns.of(SamplingParams(n=3), has_choices=self.has_samples)
        table = self.missing(found.is_written)
        self.num_missing = table.num_rows
        order = random.Random(seed).sample(range(table.num_rows), k=table.num_rows)[:num_rows]
        if order:
            answered = columns.append(table.take(order), [answer] * len(order))[0]
            write_part(
                writer,
                answered.drop_columns(
                    [self.source.error_column] if self.source.error_column else []
                ),
            )
        if num_rows is None:
            writer.close()
        self.writer = writer
        return found

    def missing(self, is_written):
        listed = _with_flags(self.source.splits, is_written)
        if not listed:
            return self.source.schema.empty_table()
        tables = list(_read_listed(pa.Table.from_pylist(listed), read=self.source.read))
        return pa.concat_tables(tables, promote_options="permissive")

    def cells(self):
        """All cells of the input that the output has, one entry for a row."""
        lines, names = self.writer.lines, self.source.schema.names
        if self.location.name.endswith(".jsonl"):
            records = [json.loads(line) for line in self.location.read_bytes().splitlines()]
        else:
            with_rows = [pq.read_table(part.path, filesystem=part.filesystem)
                         for part in self.writer.shards.find()]  # fmt: skip
            records = [record for table in with_rows for record in lines.of(table)]
        records = [record for record in records if not record.get("sample_index")]
        return Counter(lines.cells_digest({name: one.get(name) for name in names})
                       for one in records)  # fmt: skip

    def wanted(self):
        lines = self.writer.lines
        tables = self.source.tables([*self.source.schema.names])
        return Counter(lines.cells_digest(one) for table in tables for one in lines.of(table))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["out.jsonl", "out"])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_every_row_is_there_as_often_as_in_the_input(tmp_path, write, name, place):
    job = Job(tmp_path, RECORDS, write=write, name=name, place=place)
    job.run(num_rows=3, seed=1)
    assert job.run(num_rows=2, seed=2).num_rows == 3
    assert job.run(seed=3).num_rows == 5
    assert job.cells() == job.wanted()
    found = job.run()
    assert (found.num_rows, job.num_missing, found.num_unknown) == (8, 0, 0)
    assert found.counts.num_rows == 8


def test_rows_that_came_since_are_the_missing_ones(tmp_path):
    job = Job(tmp_path, RECORDS)
    job.run()
    job.edit([RECORDS[0], *RECORDS, {"prompt": "new"}])
    job.run(num_rows=0)
    assert job.num_missing == 2
    job.run()
    assert job.cells() == job.wanted()


def test_equal_rows_that_are_sampled_come_again_as_long_as_one_is_missing(tmp_path):
    job = Job(tmp_path, RECORDS)
    job.edit([RECORDS[0], RECORDS[1], RECORDS[0], RECORDS[3], RECORDS[4]])
    job.run(num_rows=0)
    job.run(num_rows=2, seed=5)
    found = job.run(num_rows=0, is_sampled=True)
    again = found.num_again
    assert (found.num_rows, job.num_missing) == (2 - again, 3 + again)
    assert count_written(job.writer, None).num_rows == 2 - again
    assert again
    job.run(is_sampled=True)
    assert job.cells() == job.wanted()
    assert job.run(is_sampled=True).num_again == 0


def test_rows_with_errors_come_again(tmp_path):
    job = Job(tmp_path, RECORDS)
    job.run(num_rows=4, answer=Generation.from_error(ValueError("too long")))
    job.run(num_rows=2, answer=Generation.from_error(WorkerProcessError("killed")))
    found = job.run(num_rows=0)
    assert (found.num_failed, found.num_rows, job.num_missing) == (2, 4, 4)
    assert job.run(num_rows=0, retries_errors=True).num_failed == 4
    assert job.num_missing == 8
    job.run()
    assert job.cells() == job.wanted()


def test_a_part_that_a_killed_run_wrote_late_is_no_second_answer(tmp_path):
    job = Job(tmp_path, [{"prompt": f"row {number}"} for number in range(8)], name="out")
    job.run(num_rows=3)
    first, *_ = job.writer.shards.find()
    with first.open_file() as file:
        late = pq.read_table(file)
    job.run(num_rows=0)
    write_part(job.writer, late)
    found = job.run(num_rows=0)
    assert (found.num_rows, found.counts.num_rows) == (3, 6)
    job.run()
    assert job.cells() == job.wanted()


def test_what_is_like_no_row_of_the_input_stays_and_is_counted(tmp_path):
    job = Job(tmp_path, RECORDS)
    job.run()
    job.edit([*RECORDS[:1], {"prompt": "edited", "label": "a"}, *RECORDS[2:]])
    found = job.run()
    assert (found.num_unknown, found.num_rows, job.num_missing) == (1, 7, 1)
    assert sum(job.cells().values()) == 9


def test_broken_lines_are_known_by_their_error_and_go_when_they_are_whole(tmp_path):
    job = Job(tmp_path, RECORDS)
    good = job.path.read_text()
    job.path.write_text(good + "{\n" + "[1]\n" + '{"prompt": "x"\n')
    columns, source = OutputColumns.of(SamplingParams()), open_source(str(job.path), id_column=None)
    errors = [f"ValueError: {error}" for table in source.tables([INPUT_ERROR_COLUMN])
              for error in table[INPUT_ERROR_COLUMN].to_pylist()]  # fmt: skip
    found = job.run(num_rows=0)
    assert found.num_rows == 0
    broken = job.missing(found.is_written).slice(8)
    answers = [Generation(error=error, finish_reason="error") for error in errors[8:]]
    table = columns.append(broken.slice(1), answers[1:])[0]
    write_part(job.writer, table.drop_columns([INPUT_ERROR_COLUMN]))
    found = job.run(num_rows=0)
    assert found.is_written.tolist() == [False] * 9 + [True] * 2
    job.path.write_text(good + "{\n" + "[1]\n" + '{"prompt": "x"}\n')
    found = job.run(num_rows=0)
    assert found.is_written.tolist() == [False] * 9 + [True, False]
    job.run()
    assert job.cells() == job.wanted()


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_samples_of_a_row_are_one_row(tmp_path, name):
    job = Job(tmp_path, RECORDS[:4], name=name, has_samples=True)
    job.run(num_rows=3, answer=SEVERAL)
    found = job.run(num_rows=0, is_sampled=True, answer=SEVERAL)
    assert (found.counts.num_rows, found.num_rows) == (3, 3 - found.num_again)
    job.run(is_sampled=True, answer=SEVERAL)
    assert job.cells() == job.wanted()


def test_of_equal_values_as_many_are_found_as_there_are():
    moments = random.Random(0)
    for _ in range(200):
        rows, others = (
            [b"%d" % moments.randrange(6) for _ in range(moments.randrange(12))] for _ in range(2)
        )
        left, expected = Counter(others), []
        for row in rows:
            expected.append(left[row] > 0)
            left[row] -= 1
        found = first_of(np.array(rows, "S24"), np.array(others, "S24"))
        assert found.tolist() == expected
