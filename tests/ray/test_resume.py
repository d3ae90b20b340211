"""Killed and resumed: each row once, none generated again, the same bytes as undisturbed."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import ray.data

import raymoe
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data import manifest as manifests
from raymoe.data.job_rows import FinishedRows
from raymoe.data.journal import RowJournal
from raymoe.data.rows import RowReader
from raymoe.data.sizing import map_batches_kwargs
from tests.ray.logged import LOG_VARIABLE, ROWS_IN_FLIGHT, LoggedGenerator, read_log

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]

NUM_ROWS = 2000
NUM_KILLS = 5
COMMAND = [sys.executable, "-c", "from tests.ray.logged import main; main()", "generate"]
PARAMS = SamplingParams(max_tokens=16, temperature=1.0)
LONGEST_RUN_S = 300


def make_rows():
    """Rows of different lengths; one in a hundred is too long for the model."""
    lengths = random.Random(0)
    return [
        {
            "id": f"row-{index}",
            "prompt": "x" * 600 if index % 100 == 7 else f"prompt {index % 50}",
            "sampling_params": {"max_tokens": lengths.randint(1, 16)},
        }
        for index in range(NUM_ROWS)
    ]


ROWS = make_rows()
IDS = [row["id"] for row in ROWS]
NUM_GOOD = sum(len(row["prompt"]) < 600 for row in ROWS)


class Command:
    """`raymoe generate` of the same rows, in a process of its own."""

    def __init__(self, model, place, rows=ROWS, ids=("--id-column", "id")):
        self.model, self.place, self.ids = model, place, ids
        self.input, self.log = place / "in.jsonl", place / "generated.log"
        self.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys([*map(str, paths), *filter(None, given)])
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            LOG_VARIABLE: str(self.log),
        }
        self.environment.pop("RAY_ADDRESS", None)

    def start(self, output, *options):
        arguments = ["--model", self.model, "--input", self.input, "--output", output]
        arguments += [*self.ids, "--max-tokens", 16, "--batch-size", 16]
        if "--temperature" not in options:
            arguments += ["--temperature", 1]
        return self.run([*arguments, *options])

    def run(self, arguments):
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env=self.environment,
            cwd=self.place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, output, *options):
        process = self.start(output, *options)
        shown, _ = process.communicate(timeout=LONGEST_RUN_S)
        return process.returncode, shown

    def kill_after(self, num_logged, output, *options, with_actors=False):
        """SIGKILL the driver once so many rows are in the log; return when its actors are gone."""
        process = self.start(output, *options)
        while self.num_logged() < num_logged:
            with pytest.raises(subprocess.TimeoutExpired):  # else it ended too early
                process.wait(0.01)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        if with_actors:  # else they go on for a second, and what they finish counts too
            kill_all(started)
        process.communicate()
        _, alive = psutil.wait_procs(started, timeout=5)
        kill_all(alive)  # agents of Ray, which wait for half a minute
        psutil.wait_procs(alive, timeout=30)

    def num_logged(self):
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def logged(self):
        return read_log(self.log, IDS)


def kill_all(processes):
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def recorded_ids(journal_dir, rows):
    """The ids in a journal, as the next process will find them."""
    manifest = manifests.read(journal_dir / manifests.FILE_NAME)
    journal = RowJournal(journal_dir)
    try:
        reader = RowReader(defaults=PARAMS, id_column="id")
        finished = FinishedRows(journal, manifest)
        found = finished.look_up(finished.keys(reader.read(pa.Table.from_pylist(rows))))
        return {row["id"] for row, one in zip(rows, found, strict=True) if one is not None}
    finally:
        journal.close()


def test_a_driver_that_is_killed_five_times_generates_nothing_twice(tiny_model, tmp_path):
    command = Command(tiny_model, tmp_path)
    undisturbed, output = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    journal_dir = tmp_path / "out.jsonl.journal"
    code, shown = command.finish(undisturbed, "--no-journal")
    assert code == 0, shown
    command.log.unlink()

    moments = sorted(random.Random(7).sample(range(1, NUM_GOOD), NUM_KILLS))
    finished = set()
    for number, moment in enumerate(moments):
        before = len(command.logged())
        at_least = before + max(1, moment - len(finished))
        options = ["--resume"] if number else []
        command.kill_after(at_least, output, *options, with_actors=number % 2 == 1)
        fresh = command.logged()[before:]
        assert len(fresh) == len(set(fresh))
        assert not finished & set(fresh), "a row that was in the journal was generated again"
        finished = recorded_ids(journal_dir, ROWS)
        unrecorded = set(command.logged()) - finished
        assert len(unrecorded) <= ROWS_IN_FLIGHT

    check_refusals(command, output, journal_dir)
    before = len(command.logged())
    code, shown = command.finish(output, "--resume")
    assert code == 0, shown
    fresh = command.logged()[before:]
    assert not finished & set(fresh)
    assert len(command.logged()) <= NUM_GOOD + NUM_KILLS * ROWS_IN_FLIGHT
    assert set(command.logged()) >= {row["id"] for row in ROWS if len(row["prompt"]) < 600}
    lines = output.read_bytes().splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == sorted(IDS)
    assert sorted(lines) == sorted(undisturbed.read_bytes().splitlines())
    assert not journal_dir.exists()


def check_refusals(command, output, journal_dir):
    """Another job may not go on here, and the same one not by accident."""
    before = {path: path.read_bytes() for path in journal_dir.iterdir()}
    code, shown = command.finish(output, "--resume", "--temperature", "0.5", "--seed", 3)
    assert code == 2
    assert "sampling_params.temperature was 1.0, is 0.5" in shown
    assert "seed was 0, is 3" in shown
    code, shown = command.finish(output)
    assert code == 2
    assert "of a run that was not finished; add --resume" in shown
    assert {path: path.read_bytes() for path in journal_dir.iterdir()} == before


def test_a_killed_actor_does_not_generate_again_what_it_had_finished(
    local_ray, tiny_model, tmp_path
):
    rows = ROWS[:1000]
    log, journal_dir = tmp_path / "generated.log", tmp_path / "journal"
    arguments = map_batches_kwargs(
        tiny_model,
        batch_size=16,
        rows_in_flight=ROWS_IN_FLIGHT,
        sampling_params=PARAMS,
        id_column="id",
        engine_config=EngineConfig(host_memory_bytes=3 * 2**30, num_threads=1),
        journal_dir=journal_dir,
        log=str(log),
    )
    dataset = ray.data.from_items(rows, override_num_blocks=16)
    dataset = dataset.map_batches(LoggedGenerator, **arguments)
    came, finished, before = [], set(), 0
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        came += table.column("id").to_pylist()
        if not before and len(came) > 200:
            (actor,) = actors()
            actor.kill()
            actor.wait()
            before = len(read_log(log, IDS))
            finished = recorded_ids(journal_dir, rows)
    again = read_log(log, IDS)[before:]
    assert before
    assert len(finished) > 200
    assert not finished & set(again)
    assert sorted(came) == sorted(row["id"] for row in rows)


@pytest.fixture
def short_path():
    """Ray's sockets do not fit the path that pytest gives."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_says_what_is_safe_and_goes_on(
    tiny_model, tmp_path, short_path, number
):
    command = Command(tiny_model, tmp_path)
    command.environment["RAY_TMPDIR"] = str(short_path)
    output = tmp_path / "out.jsonl"
    process = command.start(output, "--max-tokens", 64)
    while command.num_logged() < 200:
        with pytest.raises(subprocess.TimeoutExpired):  # else it ended too early
            process.wait(0.01)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=LONGEST_RUN_S)
    assert process.returncode == 128 + number, shown
    assert "Traceback" not in shown
    assert f"stopped by {number.name}:" in shown
    assert int(re.search(r"([\d,]+) of 2,000 rows are safe", shown)[1].replace(",", "")) >= 100
    assert len([*(short_path / "ray").glob("session_2*")]) == 1, "another Ray was started"
    job = json.loads((tmp_path / "out.jsonl.status" / "job.json").read_text())
    assert (job["state"], job["reason"]) == ("stopped", f"stopped by {number.name}")

    (line,) = [line for line in shown.splitlines() if line.startswith("to go on: raymoe generate")]
    assert line.endswith(" --resume")
    process = command.run(shlex.split(line)[5:])
    shown, _ = process.communicate(timeout=LONGEST_RUN_S)
    assert process.returncode == 0, shown
    ids = [json.loads(line)["id"] for line in output.read_bytes().splitlines()]
    assert sorted(ids) == sorted(IDS)


def actors():
    """The processes of the operator's actors."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if any("LoggedGenerator" in part for part in one.cmdline())]
