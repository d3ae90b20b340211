"""Status files appear whole, and whatever is wrong with them costs a line and not the rest."""

import json
import os
import threading

import pytest

from raymoe.data.status import (
    clear_status,
    find_status,
    make_status_directory,
    read_status,
    status_beside,
    write_record,
)
from raymoe.errors import ConfigError
from tests.unit.data.statuses import actor, job, passed, planned, with_plan, write


def test_what_is_written_comes_back_as_it_was(tmp_path):
    plan = planned()
    statuses = [with_plan(actor("node-a-1-abc"), plan), actor("node-b-2-def", engine=None)]
    record = passed(plan)
    write(tmp_path, job=job(), actors=statuses, steps=[record])
    files = read_status(tmp_path)
    assert files.job == job()
    assert files.actors == tuple(statuses)
    assert files.steps == (record,)
    assert files.unreadable == ()
    assert len(files.written_unix_s) == 2


def torn(path):
    path.write_bytes(path.read_bytes()[:100])


def of_another_type(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": "one"}))


def of_another_version(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def binary(path):
    path.write_bytes(b"\xff\xfe\x00" * 50)


def huge(path):
    os.truncate(path, 1 << 30)


def a_link(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def a_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [torn, of_another_type, of_another_version, binary, huge, a_link, a_directory]
)
def test_a_damaged_file_is_named_and_the_others_are_read(tmp_path, damage):
    write(tmp_path, job=job(), actors=[actor("node-a-1-abc"), actor("node-b-2-def")])
    damage(tmp_path / "actor-node-a-1-abc.json")
    files = read_status(tmp_path)
    assert [one.actor for one in files.actors] == ["node-b-2-def"]
    assert files.job == job()
    (line,) = files.unreadable
    assert line.startswith("actor-node-a-1-abc.json: ")


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "actor-node-a-1-abc.json"
    is_over = threading.Event()

    def write_often():
        number = 0
        while not is_over.is_set():
            number += 1
            write_record(path, actor(reason="x" * (number % 5000)))

    write_record(path, actor())
    writer = threading.Thread(target=write_often)
    writer.start()
    try:
        for _ in range(200):
            files = read_status(tmp_path)
            assert files.unreadable == ()
            assert len(files.actors) == 1
    finally:
        is_over.set()
        writer.join()


@pytest.mark.parametrize("name", ["answers", "answers.journal", "answers.status"])
def test_a_job_is_found_by_its_output_its_journal_and_its_status(tmp_path, name):
    (tmp_path / "answers.status").mkdir()
    assert find_status(tmp_path / name) == tmp_path / "answers.status"


def test_the_status_lies_beside_an_output_never_in_it(tmp_path):
    assert status_beside(tmp_path / "a.jsonl") == tmp_path / "a.jsonl.status"
    assert status_beside(tmp_path / "a.jsonl.journal") == tmp_path / "a.jsonl.status"
    with pytest.raises(ConfigError, match=r"no status of a job here or in .*nothing\.status"):
        find_status(tmp_path / "nothing")


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a directory of a file system that the nodes share"):
        make_status_directory("s3://bucket/job")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be made"):
        make_status_directory(tmp_path / "file" / "status")


def test_only_our_own_files_are_cleared(tmp_path):
    write(tmp_path, job=job(), actors=[actor()], steps=[passed(planned())])
    (tmp_path / ".actor-node-a-1-abc.json.tmp").write_text("{")
    (tmp_path / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"holds thesis\.doc, which raymoe did not write"):
        clear_status(tmp_path)
    assert read_status(tmp_path).job is not None
    (tmp_path / "thesis.doc").unlink()
    clear_status(tmp_path)
    assert list(tmp_path.iterdir()) == []
    clear_status(tmp_path / "nowhere")
