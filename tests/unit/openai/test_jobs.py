"""The process of a batch: that of this user, with this output, and no later one of its id."""

import dataclasses
import os
import subprocess

import pytest

from raymoe.openai.jobs import MAX_LINE_BYTES, Process, check_input
from raymoe.processes import identity_of

SLEEP = ["/bin/sh", "-c", "read line"]


@pytest.fixture
def start(tmp_path):
    started = []

    def run(*arguments, **options):
        started.append(subprocess.Popen([*SLEEP, *arguments], stdin=subprocess.PIPE, **options))
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def test_the_process_of_an_output_is_found(start, tmp_path):
    output = tmp_path / "responses.jsonl"
    assert Process.find(output) is None
    child = start("generate", "--output", str(output))
    assert Process.find(output).pid == child.pid
    child.kill()  # and is a zombie
    while identity_of(child.pid) is not None:
        pass
    assert Process.find(output) is None


def test_a_process_that_only_names_the_output_is_not_it(start, tmp_path):
    output = tmp_path / "responses.jsonl"
    start("generate", "--input", str(output))
    start("generate", "--output", str(output), "--follow")
    assert Process.find(output) is None


def test_a_process_of_another_user_is_not_it(start, tmp_path, monkeypatch):
    output = tmp_path / "responses.jsonl"
    arguments = ("generate", "--output", str(output))
    if os.geteuid() == 0:
        start(*arguments, user=65534)
        assert Process.find(output) is None
    start(*arguments)
    assert Process.find(output) is not None
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert Process.find(output) is None


def test_a_later_process_of_the_same_id_is_neither_waited_for_nor_ended(start, tmp_path):
    output = tmp_path / "responses.jsonl"
    child = start("generate", "--output", str(output))
    found = Process.find(output)
    assert found.is_alive()
    found._identity = dataclasses.replace(found._identity, start_ticks=1)
    assert not found.is_alive()
    found.stop()
    assert child.poll() is None


@pytest.mark.parametrize("depth", [200, 1000, 100_000])
def test_a_request_that_is_nested_too_deeply_is_named_as_its_job_would(tmp_path, depth):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"custom_id": "a", "body": {"x": ' + "[" * depth + "]" * depth + "}}")
    (error,) = check_input(path, "/v1/completions", ["m"], 9).errors
    assert (error.code, error.line) == ("invalid_json_line", 1)
    assert error.message == "the line is nested more than 128 levels deep"


def test_a_line_without_an_end_is_not_read_whole(tmp_path):
    path = tmp_path / "requests.jsonl"
    with path.open("wb") as file:
        file.write(b"{" * (MAX_LINE_BYTES + 2))
    (error,) = check_input(path, "/v1/completions", ["m"], 9).errors
    assert (error.code, error.line) == ("line_too_long", 1)
