"""JSON lines where files cannot grow: every row once, wherever the run is killed."""

import json

import pyarrow as pa
import pytest

from raymoe.cli import writers
from raymoe.cli.storage import Location
from raymoe.cli.writers import JsonlWriter, Stale
from raymoe.errors import ConfigError, RaymoeError
from tests.unit.cli.places import PLACES, remote, write_part


class KilledError(Exception):
    """The process ends here."""


@pytest.fixture
def output(tmp_path):
    return remote(tmp_path, "out.jsonl")


@pytest.fixture(params=PLACES)
def any_output(request, tmp_path):
    (tmp_path / "bucket").mkdir()
    name = "bucket/out.jsonl" if request.param == "local" else "out.jsonl"
    return PLACES[request.param](tmp_path, name)


def rows(*ids):
    return pa.table({"id": pa.array(ids, pa.int64()), "__inference_error__": [""] * len(ids)})


def run(output, *ids, resume=False, overwrite=False):
    """Write the rows that are not there yet; return which were."""
    writer = JsonlWriter(location=output)
    writer.prepare(resume=resume, overwrite=overwrite)
    written = [row_id for row_id, *_ in writer.read_written("id")]
    new = [row_id for row_id in ids if row_id not in written]
    for begin in range(0, len(new), 2):
        write_part(writer, *map(rows, new[begin : begin + 2]))
    writer.close()
    return written


def ids_in(output):
    return [json.loads(line)["id"] for line in output.read_bytes().split(b"\n") if line]


def names(output):
    return [one.name for one in directory_of(output).entries()]


def directory_of(output):
    return output.at(output.path.rpartition("/")[0])


def test_rows_are_one_file_in_their_order_and_nothing_else_stays(output):
    assert run(output, *range(7)) == []
    assert ids_in(output) == list(range(7))
    assert names(output) == ["out.jsonl"]
    assert run(output, *range(9), resume=True) == list(range(7))
    assert ids_in(output) == list(range(9))
    assert names(output) == ["out.jsonl"]


def change(output, edit):
    data = edit(output.read_bytes())
    with output.filesystem.open_output_stream(output.path) as file:
        file.write(data)


@pytest.mark.parametrize("is_killed", [False, True])
def test_rows_come_whole_behind_a_last_line_without_its_end(any_output, is_killed):
    run(any_output, 1, 2)
    change(any_output, lambda data: b"\n" + data.removesuffix(b"\n"))  # as editors leave it
    if is_killed:  # it is then the first of the parts
        killed = JsonlWriter(location=any_output)
        killed.prepare(resume=True, overwrite=False)
        killed.next_name()
    assert run(any_output, 1, 2, 3, 4, resume=True) == [1, 2]
    assert ids_in(any_output) == [1, 2, 3, 4]
    change(any_output, lambda data: data.removesuffix(b"\n"))
    writer = JsonlWriter(location=any_output)
    writer.prepare(resume=True, overwrite=False)
    writer.drop(Stale(frozenset([2])), "id")
    write_part(writer, rows(5))
    writer.close()
    assert ids_in(any_output) == [1, 3, 4, 5]


@pytest.mark.parametrize("cell", ["[" * 1100 + "]" * 1100, "1" * 100])
def test_a_line_of_the_output_that_cannot_be_read_is_named(output, monkeypatch, cell):
    monkeypatch.setattr(writers, "MAX_WRITTEN_BYTES", 100)
    run(output, 1)
    change(output, lambda data: data + b'{"id": %b}\n' % cell.encode())
    with pytest.raises(RaymoeError, match=r"out\.jsonl line 2 has no readable 'id': .*delete the"):
        run(output, 2, resume=True)


def test_an_output_without_rows_is_an_empty_file(output):
    run(output)
    assert output.read_bytes() == b""


def test_rows_are_refused_or_given_up_as_told(output):
    run(output, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"already has rows; add --resume .*--overwrite"):
        run(output, 4)
    run(output, 4, overwrite=True)
    assert ids_in(output) == [4]
    writer = JsonlWriter(location=output)
    writer.prepare(resume=True, overwrite=False)
    write_part(writer, rows(5, 6))
    with pytest.raises(ConfigError, match=r"part-000000\.jsonl already has rows"):
        run(output, 7)
    run(output, 7, overwrite=True)
    assert ids_in(output) == [7]


@pytest.mark.parametrize("has_former_rows", [False, True])
def test_wherever_a_run_is_killed_the_next_one_has_each_row_once(
    any_output, monkeypatch, has_former_rows
):
    output = any_output
    for num_steps in range(100):
        if directory_of(output).exists():
            directory_of(output).delete_dir()
        directory_of(output).make_dir()
        former = run(output, *range(4)) or list(range(4)) if has_former_rows else []
        try:
            with monkeypatch.context() as patch:
                kill_after(num_steps, patch)
                run(output, *range(9), resume=True)
        except KilledError:
            kept = run(output, *range(9), resume=True)
            assert set(former) <= set(kept)
            assert sorted(ids_in(output)) == list(range(9))
            assert names(output) == ["out.jsonl"]
        else:
            break
    assert num_steps >= 6  # three parts at least, the file, and two deletes


def kill_after(num_steps, patch):
    """End the process before the write or delete after so many."""
    left = [num_steps]

    def counted(change):
        def do(*arguments, **options):
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return change(*arguments, **options)

        return do

    for name in ("write", "replacing", "delete", "delete_dir"):
        patch.setattr(Location, name, counted(getattr(Location, name)))


def test_parts_that_a_finished_run_could_not_delete_are_not_rows(output):
    run(output, *range(4))
    directory = output.sibling("out.jsonl.partial")
    directory.make_dir()
    with directory.child("part-000001.jsonl").replacing() as file:
        file.write(b'{"id": 2, "__inference_error__": ""}\n')
    assert run(output, *range(5), resume=True) == list(range(4))
    assert ids_in(output) == list(range(5))


def test_files_of_others_among_the_parts_are_left_alone(output):
    directory = output.sibling("out.jsonl.partial")
    directory.make_dir()
    with directory.child("thesis.doc").replacing() as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"thesis\.doc, which raymoe did not write"):
        run(output, 1, overwrite=True)
    assert directory.child("thesis.doc").exists()
