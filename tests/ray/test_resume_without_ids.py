"""Actors and drivers killed at random, rows without ids: each row once, with the tokens it gets.

The journal is a directory or a bucket: a server of S3's API on this machine.
"""

import contextlib
import json
import random
import time
from collections import Counter

import psutil
import pytest

from tests.integration.test_cli_storage import bucket, endpoint, names  # noqa: F401 - fixtures
from tests.ray.test_resume import LONGEST_RUN_S, Command, kill_all

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]

NUM_ROWS, EQUAL_SHARE, NUM_KILLS = 1500, 0.3, 3


def make_rows():
    """Three in ten rows are equal to others, some of them in the columns that go along too."""
    moments = random.Random(0)
    equal = int(NUM_ROWS * EQUAL_SHARE)
    rows = [{"prompt": f"prompt {index}", "label": index} for index in range(NUM_ROWS - equal)]
    rows += [{"prompt": f"again {index % 90}", "label": index % 2} for index in range(equal)]
    moments.shuffle(rows)
    return rows


def read(text):
    return [json.loads(line) for line in text.splitlines()]


def told(rows):
    return Counter((row["prompt"], row["generated_text"]) for row in rows)


@pytest.fixture(params=["files", "bucket"])
def place(request, tmp_path):
    """The output, the options of its journal, and how the output is read."""
    if request.param == "files":
        output = tmp_path / "out.jsonl"
        return output, (), output.read_text
    store = request.getfixturevalue("bucket")

    def read_object():
        with store.open_input_file("out.jsonl") as file:
            return file.readall().decode()

    return "s3://jobs/out.jsonl", ("--journal", "s3://jobs/out.journal"), read_object


def test_actors_and_drivers_are_killed_at_random(place, tiny_model, tmp_path):
    output, journal, read_output = place
    rows, moments = make_rows(), random.Random(11)
    command = Command(tiny_model, tmp_path, rows, ids=())
    undisturbed = tmp_path / "undisturbed.jsonl"
    code, shown = command.finish(undisturbed, "--no-journal")
    assert code == 0, shown
    command.log.unlink()
    for number in range(NUM_KILLS):
        resume = ["--resume"] if number else []
        limit = command.num_logged() + moments.randint(30, NUM_ROWS // 8)
        kill_after(command, limit, output, *journal, *resume, actors_first=number % 2)
    code, shown = command.finish(output, *journal, "--resume")
    assert code == 0, shown
    assert "no --id-column: rows are known by their cells" in shown
    found = read(read_output())
    cells = Counter((row["prompt"], row["label"]) for row in found)
    assert cells == Counter((row["prompt"], row["label"]) for row in rows)
    assert told(found) == told(read(undisturbed.read_text()))


def kill_after(command, num_logged, output, *options, actors_first):
    """Kill the driver once so many rows were finished, and an actor of it at half of that."""
    process = command.start(output, *options)
    if actors_first:
        wait_for(command, process, command.num_logged() + (num_logged - command.num_logged()) // 2)
        kill_all(actors_of(process))
    wait_for(command, process, num_logged)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    kill_all(started)
    process.communicate(timeout=LONGEST_RUN_S)
    psutil.wait_procs(started, timeout=30)


def wait_for(command, process, num_logged):
    while command.num_logged() < num_logged:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def actors_of(process):
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("LoggedGenerator" in part for part in one.cmdline()):
                found.append(one)
    return found


def test_a_second_driver_on_a_journal_is_refused(bucket, tiny_model, tmp_path):  # noqa: F811
    rows = make_rows()
    command = Command(tiny_model, tmp_path, rows, ids=())
    journal = ("--journal", "s3://jobs/out.journal")
    process = command.start("s3://jobs/first.jsonl", *journal, "--max-tokens", 64)
    wait_for(command, process, 50)
    code, shown = command.finish("s3://jobs/second.jsonl", *journal, "--resume", "--max-tokens", 64)
    assert code == 2, shown
    assert "journal_dir s3://jobs/out.journal: run " in shown
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    kill_all(started)
    process.communicate(timeout=LONGEST_RUN_S)
    assert [name for name in names(bucket, "out.journal") if "/rows-" in name]
    code, shown = command.finish("s3://jobs/second.jsonl", *journal, "--resume", "--max-tokens", 64)
    assert code == 0, shown
    assert not [name for name in names(bucket, "") if name.startswith("out.journal")]
