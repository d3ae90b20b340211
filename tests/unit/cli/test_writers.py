"""Outputs: whole files, no input overwritten, and what a resumed run finds."""

import json
import os
import tempfile
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from raymoe.cli.storage import Location
from raymoe.cli.writers import (
    BatchLines,
    JsonlWriter,
    ParquetWriter,
    TableLines,
    check_apart,
    open_writer,
    write_lines,
)
from raymoe.config import SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.engine.outputs import Generation
from raymoe.errors import ConfigError, RaymoeError
from raymoe.openai import batch
from tests.unit.cli.places import PLACES, remote, write_part

TABLE = SimpleNamespace(schema=pa.schema([]), json_columns=frozenset(), is_batch=False)


def rows(*ids, error=""):
    table = pa.table({"id": pa.array(ids, pa.int64()), "text": [f"t{one}" for one in ids]})
    return table.append_column("__inference_error__", pa.array([error] * len(ids), pa.string()))


def finish(writer, *tables, **how):
    writer.prepare(**{"resume": False, "overwrite": False, **how})
    for table in tables:
        write_part(writer, table)
    writer.close()


def ids_in(writer):
    return [row_id for row_id, *_ in writer.read_written("id")]


@pytest.fixture(params=[(place, name) for place in PLACES for name in ("out.jsonl", "out")])
def writer(request, tmp_path):
    place, name = request.param
    return open_writer(PLACES[place](tmp_path, name), TABLE)


def again(writer):
    return open_writer(writer.location, TABLE)


def test_the_name_decides_the_format(tmp_path):
    assert isinstance(open_writer(Location.local(tmp_path / "a.jsonl"), TABLE), JsonlWriter)
    assert isinstance(open_writer(Location.local(tmp_path / "a.parquet"), TABLE), ParquetWriter)


def test_an_output_with_rows_is_refused_unless_told_otherwise(writer):
    finish(writer, rows(1, 2))
    with pytest.raises(ConfigError, match=r"already has .*--resume .*--overwrite"):
        finish(again(writer), rows(3))
    finish(again(writer), rows(3), overwrite=True)
    last = again(writer)
    last.prepare(resume=True, overwrite=False)
    assert ids_in(last) == [3]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.partial"])
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / name).symlink_to(victim)
    for how in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(ConfigError, match=f"{name} is a link to .*victim"):
            finish(JsonlWriter(location=Location.local(tmp_path / "out.jsonl")), rows(1), **how)
    assert victim.read_text() == "kept"
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=r"is not a (regular file|directory)"):
        finish(
            JsonlWriter(location=Location.local(tmp_path / "out.jsonl")), rows(1), overwrite=True
        )


def test_a_directory_of_parquet_that_is_a_link_is_refused(tmp_path):
    place, link = tmp_path / "place", tmp_path / "out"
    link.symlink_to(place)
    for is_there in (False, True):
        if is_there:
            finish(ParquetWriter(location=Location.local(place)), rows(1))
        for how in ({"overwrite": True}, {"resume": True}, {}):
            with pytest.raises(ConfigError, match=r"out is a link to .*place; name a directory"):
                finish(ParquetWriter(location=Location.local(link)), rows(2), **how)
        assert place.exists() == is_there
    assert ids_in(ParquetWriter(location=Location.local(place))) == [1]


def test_parts_of_parquet_are_not_written_through_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("part-000000.parquet", ".part-000000.parquet.tmp", ".part-000001.parquet.tmp"):
        (out / name).symlink_to(victim)
    finish(ParquetWriter(location=Location.local(out)), rows(1), overwrite=True)
    assert victim.read_text() == "kept"
    assert ids_in(ParquetWriter(location=Location.local(out))) == [1]


def test_a_resumed_output_keeps_its_rows_and_adds_to_them(writer):
    finish(writer, rows(1), rows(2))
    second = again(writer)
    second.prepare(resume=True, overwrite=False)
    assert ids_in(second) == [1, 2]
    write_part(second, rows(3))
    second.close()
    third = again(writer)
    third.prepare(resume=True, overwrite=False)
    assert ids_in(third) == [1, 2, 3]


def test_parts_that_do_not_count_are_not_in_the_output(writer):
    writer.prepare(resume=False, overwrite=False)
    write_part(writer, rows(1))
    writer.shards.write(writer.next_name(), [rows(2)])  # of a task that nobody waited for
    second = again(writer)
    second.prepare(resume=True, overwrite=False)
    assert ids_in(second) == [1, 2]
    writer.close()
    last = again(writer)
    last.prepare(resume=True, overwrite=False)
    assert ids_in(last) == [1]


def test_a_part_that_is_written_again_is_there_once(writer):
    writer.prepare(resume=False, overwrite=False)
    name = writer.next_name()
    for _ in range(2):  # Ray runs a task again whose process was killed
        writer.shards.write(name, [rows(1, 2)])
    writer.commit(name)
    writer.close()
    last = again(writer)
    last.prepare(resume=True, overwrite=False)
    assert ids_in(last) == [1, 2]


def test_half_a_part_is_removed_and_its_rows_are_not_there(writer):
    writer.prepare(resume=False, overwrite=False)
    write_part(writer, rows(1))
    torn = writer.shards.directory.child(f".{writer.next_name()}.tmp")
    with torn.filesystem.open_output_stream(torn.path) as stream:
        stream.write(b'{"id": 3')
    second = again(writer)
    second.prepare(resume=True, overwrite=False)
    assert not torn.exists()
    assert ids_in(second) == [1]


def test_a_json_lines_file_has_its_name_only_when_complete(tmp_path):
    writer = JsonlWriter(location=Location.local(tmp_path / "a.jsonl"))
    writer.prepare(resume=False, overwrite=False)
    write_part(writer, rows(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.partial"]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def samples(row_id, count):
    """A row as the operator returns it, with so many samples."""
    params = SamplingParams(n=count)
    table = pa.table({"id": pa.array([row_id], pa.int64())})
    others = tuple(Generation(text=f"{row_id}.{one}") for one in range(1, count))
    generation = Generation(text=f"{row_id}.0", others=others)
    return OutputColumns.of(params, has_choices=True).append(table, [generation])[0]


def texts_in(writer):
    if writer.location.suffix == ".jsonl":
        lines = writer.location.read_bytes().splitlines()
        return [json.loads(line)["generated_text"] for line in lines]
    with tempfile.TemporaryDirectory() as copy:
        fs.copy_files(writer.location.path, copy, source_filesystem=writer.location.filesystem)
        return pq.read_table(copy).column("generated_text").to_pylist()


def test_samples_are_rows_and_a_row_is_there_with_all_of_them(writer):
    first = open_writer(writer.location, TABLE, has_samples=True)
    finish(first, samples(1, 3), samples(2, 1), samples(3, 2))
    again = open_writer(writer.location, TABLE, has_samples=True)
    again.prepare(resume=True, overwrite=False)
    assert ids_in(again) == [1, 1, 1, 2, 3, 3]
    write_part(again, samples(4, 2))
    again.close()
    assert texts_in(writer) == ["1.0", "1.1", "1.2", "2.0", "3.0", "3.1", "4.0", "4.1"]


@pytest.mark.parametrize("has_samples", [True, False])
def test_samples_do_not_go_on_where_there_are_rows_nor_rows_where_there_are_samples(
    writer, has_samples
):
    finish(open_writer(writer.location, TABLE, has_samples=has_samples), samples(1, 2))
    other = open_writer(writer.location, TABLE, has_samples=not has_samples)
    other.prepare(resume=True, overwrite=False)
    with pytest.raises(ConfigError, match=r"written with(out)? --samples-as-rows and this run"):
        ids_in(other)


def test_rows_that_came_as_samples_are_rows_like_others(tmp_path):
    source = SimpleNamespace(schema=pa.schema([("num_samples", pa.int32())]), is_batch=False)
    source.json_columns = frozenset()
    writer = open_writer(Location.local(tmp_path / "a.jsonl"), source)
    table = rows(1).append_column("num_samples", pa.array([2], pa.int32()))
    finish(writer, table)
    writer.prepare(resume=True, overwrite=False)
    assert ids_in(writer) == [1]


def test_json_columns_come_back_as_values_and_bad_text_is_marked(tmp_path):
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")]
    )
    table = pa.table({"text": text, "nested": ['{"a": [1]}']})
    writer = JsonlWriter(
        location=Location.local(tmp_path / "a.jsonl"), lines=TableLines(frozenset({"nested"}))
    )
    finish(writer, table)
    assert json.loads(writer.location.local_path.read_text()) == {
        "text": "a\ufffd",
        "nested": {"a": [1]},
    }


def test_parts_are_numbered_on(tmp_path):
    writer = ParquetWriter(location=Location.local(tmp_path / "out"))
    finish(writer, rows(1, 2), rows(3))
    finish(ParquetWriter(location=writer.location), rows(6), resume=True)
    parts = sorted(writer.location.local_path.iterdir())
    assert [path.name for path in parts] == [f"part-{n:06d}.parquet" for n in range(3)]
    assert [pq.read_metadata(path).num_rows for path in parts] == [2, 1, 1]


def test_a_directory_with_files_of_others_is_refused_even_to_overwrite(tmp_path):
    (tmp_path / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.doc, which raymoe did not write"):
        ParquetWriter(location=Location.local(tmp_path)).prepare(resume=False, overwrite=True)
    assert (tmp_path / "thesis.doc").exists()


def test_a_damaged_part_is_named(tmp_path):
    (tmp_path / "part-000000.parquet").write_bytes(b"PAR1")
    writer = ParquetWriter(location=Location.local(tmp_path))
    writer.prepare(resume=True, overwrite=False)
    with pytest.raises(RaymoeError, match=r"part-000000\.parquet has no readable column 'id'"):
        ids_in(writer)


def test_a_bucket_is_no_output():
    with pytest.raises(ConfigError, match=r"s3://jobs is a bucket; name a place in it"):
        open_writer(Location.parse("s3://jobs?region=us-east-1"), TABLE)


def test_on_a_store_too_an_output_is_neither_the_input_nor_in_it(tmp_path):
    source = remote(tmp_path, "in/a.parquet")
    root = remote(tmp_path, "in")
    root.make_dir()
    for output in ("in/a.parquet", "in"):
        with pytest.raises(ConfigError, match="is or holds the input"):
            check_apart(remote(tmp_path, output), [source], source)
    for output in ("in", "in/out"):
        with pytest.raises(ConfigError, match="lies in the input directory"):
            check_apart(remote(tmp_path, output), [source], root)
    check_apart(remote(tmp_path, "input"), [source], root)
    check_apart(Location.local(tmp_path / "in"), [source], root)


def apart(output, source, root):
    check_apart(Location.local(output), [Location.local(source)], Location.local(root))


def make_links(tmp_path):
    source = tmp_path / "in" / "a.jsonl"
    source.parent.mkdir()
    source.write_text("{}\n")
    (tmp_path / "soft.jsonl").symlink_to(source)
    os.link(source, tmp_path / "hard.jsonl")
    (tmp_path / "dir").symlink_to(source.parent)
    return source


@pytest.mark.parametrize(
    "name", ["in/a.jsonl", "soft.jsonl", "hard.jsonl", "dir/a.jsonl", "in", "dir"]
)
def test_an_output_that_is_or_holds_the_input_is_refused(tmp_path, name):
    source = make_links(tmp_path)
    with pytest.raises(ConfigError, match="is or holds the input"):
        apart(tmp_path / name, source, source)
    apart(tmp_path / "in" / "b.jsonl", source, source)


def test_an_output_inside_an_input_directory_is_refused(tmp_path):
    source = make_links(tmp_path)
    with pytest.raises(ConfigError, match="lies in the input directory"):
        apart(tmp_path / "dir" / "out", source, source.parent)


def test_a_line_that_cannot_be_written_is_an_error_row_and_the_others_stay(tmp_path):
    source = SimpleNamespace(
        schema=pa.schema([]), json_columns=frozenset({"extra"}), is_batch=False
    )
    writer = open_writer(Location.local(tmp_path / "a.jsonl"), source)
    cells = ['{"a": 1}', "no JSON", '{"a": "\\ud800"}', None]
    finish(writer, rows(1, 2, 3, 4).append_column("extra", pa.array(cells)))
    good, bad, surrogate, empty = map(json.loads, writer.location.read_bytes().splitlines())
    assert bad.pop("__inference_error__").startswith("JSONDecodeError: while writing the row: ")
    assert bad == {"id": 2, "text": "t2", "extra": None}
    assert good["extra"] == {"a": 1}
    assert surrogate["extra"] == {"a": "\ud800"}  # as JSON holds it: by its escape
    assert empty["extra"] is None
    assert [row["__inference_error__"] for row in (good, surrogate, empty)] == [""] * 3
    writer.prepare(resume=True, overwrite=False)
    assert ids_in(writer) == [1, 2, 3, 4]


def test_an_answer_that_cannot_become_a_response_is_an_error_response(monkeypatch):
    ids = ["a", "b", "c"]
    columns = {"custom_id": ids, "url": ["/v1/completions"] * 3, "model": ["m"] * 3}
    generations = [Generation(text=name) for name in ids]
    table, _ = OutputColumns.of(SamplingParams(), has_choices=True).append(
        pa.table(columns), generations
    )
    make = batch._text_choice
    monkeypatch.setattr(
        batch, "_text_choice", lambda one, *more: make(one, *more) if one["text"] != "b" else 1 / 0
    )
    first, second, third = map(json.loads, write_lines(BatchLines(), table))
    assert [line["custom_id"] for line in (first, second, third)] == ids
    assert second["error"]["code"] == "ZeroDivisionError"
    assert "while writing the row" in second["error"]["message"]
    assert first["response"]["body"]["choices"][0]["text"] == "a"
    assert third["error"] is None
