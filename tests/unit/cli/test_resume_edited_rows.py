"""A resumed run finds the rows whose input has changed since they were written, and no others."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli.resume import find_written
from raymoe.cli.sources import TemplatedSource, open_source
from raymoe.cli.storage import Location
from raymoe.cli.writers import open_writer
from raymoe.config import SamplingParams
from raymoe.data import prompt_template
from raymoe.data.columns import OutputColumns
from raymoe.data.prompt_template import INPUT_ERROR_COLUMN, PromptTemplate
from raymoe.data.rows import RowReader
from raymoe.engine.outputs import Generation
from raymoe.errors import WorkerProcessError
from raymoe.openai.batch import CONTENT_COLUMNS
from tests.unit.cli.places import PLACES, write_part

COLUMNS = ("prompt", "messages", "sampling_params")
CHAT = [{"role": "user", "content": "é 🙂"}, {"role": "assistant", "content": None, "x": [1.5]}]
RECORDS = [
    {"id": 0, "prompt": "plain", "other": 1},
    {"id": 1, "prompt": "with parameters", "sampling_params": {"max_tokens": 3, "stop": ["x"]}},
    {"id": 2, "messages": CHAT},
    {"id": 3, "prompt": ""},
    {"id": 5, "prompt": "last", "other": 5},
]
EDITS = {
    0: {"prompt": "Plain"},
    1: {"sampling_params": {"max_tokens": 4, "stop": ["x"]}},
    2: {"messages": [*CHAT, {"role": "user", "content": "more"}]},
    3: {"prompt": "x"},
}


def write_jsonl(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def write_parquet(path, records):
    part = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()),
                               ("x", pa.list_(pa.float64()))]))  # fmt: skip
    params = pa.struct([("max_tokens", pa.int8()), ("stop", pa.list_(pa.string()))])
    fields = {"id": pa.int64(), "prompt": pa.binary(), "messages": part, "sampling_params": params}
    schema = pa.schema([*fields.items(), ("other", pa.float32())])
    pq.write_table(pa.Table.from_pylist(records, schema), path)


def answer(source, writer, *, error=""):
    """Write an answer for each row, as the operator would."""
    params = SamplingParams()
    writer.prepare(resume=False, overwrite=False)
    for table in source.tables([*source.schema.names]):
        good = Generation(text="a", token_ids=(1,), num_generated_tokens=1, error=error)
        columns = OutputColumns.of(params, has_choices=source.is_batch)
        write_part(writer, columns.append(table, [good] * table.num_rows)[0])
    writer.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["out.jsonl", "out"])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_edited_rows_are_found_and_dropped(tmp_path, write, name, place):
    path = tmp_path / ("in.jsonl" if write is write_jsonl else "in.parquet")
    write(path, RECORDS)

    def open_both():
        source = open_source(str(path), id_column="id")
        location = PLACES[place](tmp_path, name)
        return source, open_writer(location, source, content_columns=COLUMNS, run="0a1b")

    source, writer = open_both()
    answer(source, writer)
    ids = source.ids.to_pylist()

    source, writer = open_both()
    writer.prepare(resume=True, overwrite=False)
    written = find_written(source, writer, COLUMNS, "id")
    assert (written.changed.to_pylist(), written.ids.to_pylist()) == ([], ids)

    write(path, [record | EDITS.get(record["id"], {"other": 7}) for record in RECORDS])
    source, writer = open_both()
    writer.prepare(resume=True, overwrite=False)
    written = find_written(source, writer, COLUMNS, "id")
    assert sorted(written.changed.to_pylist()) == [row_id for row_id in ids if row_id in EDITS]
    assert written.ids.to_pylist() == [5]
    writer.drop(written.stale, "id")
    writer.close()
    assert [row.id for row in open_again(writer).read_written("id")] == [5]


def open_again(writer):
    writer.prepare(resume=True, overwrite=False)
    return writer


@pytest.mark.parametrize("place", PLACES)
def test_edited_requests_of_a_batch_are_found(tmp_path, place):
    def request(number, content):
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        url = "/v1/chat/completions"
        return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}

    path, location = tmp_path / "in.jsonl", PLACES[place](tmp_path, "out.jsonl")
    write_jsonl(path, [request(number, f"q{number}") for number in range(4)])
    source = open_source(str(path), id_column=None)
    answer(source, open_writer(location, source))
    write_jsonl(path, [request(number, f"q{number}" * (1 + (number == 2))) for number in range(4)])
    source = open_source(str(path), id_column=None)
    writer = open_writer(location, source)
    writer.prepare(resume=True, overwrite=False)
    written = find_written(source, writer, CONTENT_COLUMNS, "custom_id")
    assert written.changed.to_pylist() == ["r2"]
    assert written.ids.to_pylist() == ["r0", "r1", "r3"]


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_rows_whose_error_came_from_outside_are_generated_again(tmp_path, name):
    path = tmp_path / "in.jsonl"
    write_jsonl(path, RECORDS)
    source = open_source(str(path), id_column="id")
    writer = open_writer(PLACES["local"](tmp_path, name), source, content_columns=COLUMNS)
    answer(source, writer, error="WorkerProcessError: the tokenizer's process was killed")
    open_again(writer)
    written = find_written(source, writer, COLUMNS, "id")
    assert written.failed.to_pylist() == source.ids.to_pylist()
    assert (len(written.ids), len(written.changed)) == (0, 0)


class KilledWorker:
    """A process that is killed whenever it is asked to render."""

    def __init__(self, worker):
        self.worker = worker

    def ask(self, message, **options):
        if "rows" in message:
            raise WorkerProcessError("the prompt template's process was killed; try the row again")
        return self.worker.ask(message, **options)


def test_rows_whose_template_was_killed_are_generated_again_and_right_ones_stay(
    tmp_path, monkeypatch
):
    """Through all that a row passes: template, reader of the operator, output, resume."""
    path = tmp_path / "in.jsonl"
    write_jsonl(path, [{"id": number, "text": "a"} for number in range(2)])
    template = PromptTemplate(prompt="{{ text }}")
    source = TemplatedSource.of(open_source(str(path), id_column="id"), template)
    columns = (template.output_column,)
    worker = KilledWorker(prompt_template._worker())
    reader = RowReader.of_options({"error_column": INPUT_ERROR_COLUMN, "id_column": "id"})
    for is_killed in (True, False):
        with monkeypatch.context() as patch:
            if is_killed:
                patch.setattr(prompt_template, "_worker", lambda: worker)
            (table,) = source.tables([*source.schema.names, INPUT_ERROR_COLUMN])
        (error, _) = [request.error for request in reader.read(table)]
        assert error.startswith("WorkerProcessError: ") == is_killed
        location = Location.local(tmp_path / f"{is_killed}.jsonl")
        writer = open_writer(location, source, content_columns=columns)
        answer(source, writer, error=error)
        with monkeypatch.context() as patch:  # again, while a resumed run reads its input
            patch.setattr(prompt_template, "_worker", lambda: worker)
            written = find_written(source, open_again(writer), columns, "id")
        assert written.failed.to_pylist() == [0, 1] * is_killed
        assert written.ids.to_pylist() == [0, 1] * (not is_killed)


def test_broken_lines_of_a_long_path_are_told_apart(tmp_path):
    directory = tmp_path.joinpath(*["d" * 200] * 4)
    directory.mkdir(parents=True)
    path = directory / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n[1]\n[1]\n')
    source = open_source(str(path), id_column="id")
    writer = open_writer(Location.local(tmp_path / "out.jsonl"), source, content_columns=COLUMNS)
    writer.prepare(resume=False, overwrite=False)
    (table,) = source.tables([*source.schema.names, INPUT_ERROR_COLUMN])
    reader = RowReader.of_options({"error_column": INPUT_ERROR_COLUMN})
    rows = [Generation(error=request.error) for request in reader.read(table)]
    columns = OutputColumns.of(SamplingParams())
    write_part(writer, columns.append(table.drop_columns([INPUT_ERROR_COLUMN]), rows)[0])
    writer.close()
    written = find_written(source, open_again(writer), COLUMNS, "id")
    assert sorted(written.errors.to_pylist()) == table[INPUT_ERROR_COLUMN].to_pylist()[1:]
    assert (written.num_rows, bool(written.stale)) == (3, False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_a_row_that_is_in_two_parts_goes_and_is_generated_again(tmp_path, name, place):
    path = tmp_path / "in.jsonl"
    write_jsonl(path, RECORDS)
    source = open_source(str(path), id_column="id")
    location = PLACES[place](tmp_path, name)
    first = open_writer(location, source, content_columns=COLUMNS, run="0a")
    first.prepare(resume=False, overwrite=False)
    (table,) = source.tables([*source.schema.names])
    good = Generation(text="a", token_ids=(1,), num_generated_tokens=1)
    rows, _ = OutputColumns.of(SamplingParams()).append(table, [good] * table.num_rows)
    write_part(first, rows.slice(0, 3))
    second = open_writer(location, source, content_columns=COLUMNS, run="0b")
    second.prepare(resume=True, overwrite=False)
    write_part(second, rows.slice(3))
    first.shards.write(first.next_name(), [rows.slice(2, 2)])  # its task ends late, and nobody saw

    third = open_writer(location, source, content_columns=COLUMNS, run="0c")
    third.prepare(resume=True, overwrite=False)
    written = find_written(source, third, COLUMNS, "id")
    ids = source.ids.to_pylist()
    assert written.ids.to_pylist() == [one for one in ids if one not in ids[2:4]]
    third.drop(written.stale, "id")
    write_part(third, rows.slice(2, 2))
    third.close()
    open_again(third)
    assert sorted(row.id for row in third.read_written("id")) == ids


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
@pytest.mark.parametrize("retries_errors", [False, True])
def test_rows_with_errors_are_kept_unless_they_are_to_be_tried_again(
    tmp_path, name, retries_errors
):
    path = tmp_path / "in.jsonl"
    write_jsonl(path, RECORDS[:3])
    with path.open("a") as file:
        file.write("{broken\n")
    source = open_source(str(path), id_column="id")
    writer = open_writer(PLACES["local"](tmp_path, name), source, content_columns=COLUMNS)
    writer.prepare(resume=False, overwrite=False)
    (table,) = source.tables([*source.schema.names, "__input_error__"])
    broken = f"ValueError: {table.column('__input_error__')[3].as_py()}"
    errors = ["", "ConfigError: too long", "WorkerProcessError: x", broken]
    given = [Generation(error=error) for error in errors]
    columns = OutputColumns.of(SamplingParams())
    write_part(writer, columns.append(table.drop_columns(["__input_error__"]), given)[0])
    writer.close()
    written = find_written(source, writer, COLUMNS, "id", retries_errors=retries_errors)
    assert written.failed.to_pylist() == ([1, 2] if retries_errors else [2])
    assert written.ids.to_pylist() == ([0] if retries_errors else [0, 1])
    assert len(written.errors) == 1
    assert written.stale.ids == {*written.failed.to_pylist()}
