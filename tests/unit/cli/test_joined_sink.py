"""JSON lines where files cannot grow: every row once, wherever the run is killed."""

import json

import pyarrow as pa
import pytest

from raymoe.cli import writers
from raymoe.cli.writers import JoinedWriter
from raymoe.errors import ConfigError
from tests.unit.cli.places import remote


class KilledError(Exception):
    """The process ends here."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(writers, "ROWS_PER_PART", 2)


@pytest.fixture
def output(tmp_path):
    return remote(tmp_path, "out.jsonl")


def rows(*ids):
    return pa.table({"id": pa.array(ids, pa.int64()), "__inference_error__": [""] * len(ids)})


def run(output, *ids, resume=False, overwrite=False):
    """Write the rows that are not there yet; return which were."""
    writer = JoinedWriter(location=output)
    writer.prepare(resume=resume, overwrite=overwrite)
    written = [row_id for row_id, *_ in writer.read_written("id")]
    for row_id in ids:
        if row_id not in written:
            writer.write(rows(row_id))
    writer.close()
    return written


def ids_in(output):
    return [json.loads(line)["id"] for line in output.read_bytes().splitlines()]


def names(output):
    return [one.name for one in output.at("bucket").entries()]


def test_rows_are_one_file_in_their_order_and_nothing_else_stays(output):
    assert run(output, *range(7)) == []
    assert ids_in(output) == list(range(7))
    assert names(output) == ["out.jsonl"]
    assert run(output, *range(9), resume=True) == list(range(7))
    assert ids_in(output) == list(range(9))
    assert names(output) == ["out.jsonl"]


def test_an_output_without_rows_is_an_empty_file(output):
    run(output)
    assert output.read_bytes() == b""


def test_rows_are_refused_or_given_up_as_told(output):
    run(output, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"already has rows; add --resume .*--overwrite"):
        run(output, 4)
    run(output, 4, overwrite=True)
    assert ids_in(output) == [4]
    writer = JoinedWriter(location=output)
    writer.prepare(resume=True, overwrite=False)
    writer.write(rows(5, 6))
    with pytest.raises(ConfigError, match=r"part-000000\.jsonl already has rows"):
        run(output, 7)
    run(output, 7, overwrite=True)
    assert ids_in(output) == [7]


@pytest.mark.parametrize("has_former_rows", [False, True])
def test_wherever_a_run_is_killed_the_next_one_has_each_row_once(
    output, monkeypatch, has_former_rows
):
    for num_steps in range(100):
        if output.at("bucket").exists():
            output.at("bucket").delete_dir()
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
    assert num_steps >= 7  # writes, the file, and two deletes


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

    for name in ("write", "delete", "delete_dir"):
        patch.setattr(writers.Location, name, counted(getattr(writers.Location, name)))


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
