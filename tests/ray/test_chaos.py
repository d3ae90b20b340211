"""Hostile rows and everything that a machine can do to a job at once: every id comes out once.

Rows next to a hostile one, and those of a killed actor, have the answer of an undisturbed run.
"""

import contextlib
import fcntl
import json
import os
import random
import shlex
import subprocess
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow.compute as pc
import pytest

from raymoe.config import SamplingParams
from raymoe.data.generator import MoEGenerator
from raymoe.memory.shared_file import DIRECTORY, SharedFile
from tests.hostile_rows import MAY_ANSWER, SLOW, WITHOUT_ID, answers, as_tables, random_rows
from tests.ray.matrix import (
    CONFIG,
    ROWS_PER_BLOCK,
    HeldBack,
    Job,
    allow,
    make_rows,
    small_cluster,
)
from tests.ray.matrix import undisturbed as as_before
from tests.ray.test_kill_matrix import SHARING, mount
from tests.ray.test_resume import Command

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's cluster for tests
]

NUM_ROWS, HOSTILE_SHARE = 8000, 0.03
NUM_KILLS, STOPPED_S = 10, 60
ROWS_BEHIND, ALL_ROWS = 400, 10**9
LONGEST_S = 1200
PARAMS = SamplingParams(max_tokens=24, logprobs=1)
MARK = "RAYMOE_TEST_MARK"  # a variable of all processes of a job, and of what they start
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")


def test_kills_and_a_stopped_actor_among_hostile_rows(tiny_model, tmp_path):
    moments = random.Random(5)
    tables = whole_tables(random_rows(moments, NUM_ROWS + 200, HOSTILE_SHARE))
    mark = uuid.uuid4().hex
    with small_cluster(1, num_gpus=2, environment={MARK: mark}):
        allow(tmp_path, 0)
        options = {"num_actors": 2, "tables": tables, "sampling_params": PARAMS}
        job = Job(tiny_model, [], tmp_path, HeldBack, **options)
        # By the rows that are done, and never more: a fast machine must not end the job before.
        for number in range(NUM_KILLS):
            part = (number + moments.random()) / (NUM_KILLS + 2)
            wait_for_rows(job, int(part * NUM_ROWS))
            assert marked(mark)
            kill_one(job, moments)
        wait_for_rows(job, job.num_logged() + 50)
        stop_oldest(job)
        job.finish(LONGEST_S)
    check(tables, [one for table in job.tables for one in answers(table)], tiny_model)
    check_nothing_is_left(tmp_path / "journal", mark)


def whole_tables(rows):
    """Those of as many rows as a call has: Ray joins smaller ones, which takes common types."""
    tables = [table for table in as_tables(rows, ROWS_PER_BLOCK) if len(table) == ROWS_PER_BLOCK]
    assert sum(map(len, tables)) >= NUM_ROWS
    return tables


def wait_for_rows(job, num_rows):
    """Until they are done, with others behind them."""
    job.allow(num_rows + ROWS_BEHIND)
    job.wait_for_rows(num_rows)


def kill_one(job, moments):
    found = wait_for_actors(job)
    with contextlib.suppress(psutil.NoSuchProcess):
        moments.choice(found).kill()


def stop_oldest(job):
    """For long; it has rows, so the job waits for it while the other one does the rest."""
    one = min(wait_for_actors(job), key=psutil.Process.create_time)
    one.suspend()
    job.allow(ALL_ROWS)
    try:
        time.sleep(STOPPED_S)
        assert job.is_running, f"the job ended without a stopped actor: {job.error}"
    finally:
        one.resume()


def wait_for_actors(job):
    limit_s = time.monotonic() + 120
    while time.monotonic() < limit_s:
        found = job.actors()
        if found:
            return found
        assert job.is_running, f"the job ended too early: {job.error}"
        time.sleep(0.05)
    raise AssertionError("Ray started no actor")


def check(tables, found, model):
    """Every id as often as it was given; hostile rows are errors, plain ones undisturbed."""
    assert Counter(key for key, _ in found) == Counter(key for one in tables for key in keys(one))
    got = [(key, answer) for key, answer in found if key[1] and key[1] not in MAY_ANSWER]
    assert [key for key, answer in got if not answer["__inference_error__"]] == []
    expected = undisturbed(model, tables)
    plain = {key: told(answer) for key, answer in found if not key[1]}
    assert {key for key, answer in expected.items() if plain[key] != told(answer)} == set()


def told(answer):
    """An answer without what depends on the rows beside it.

    Log probabilities are rounded by the size of the batch.
    """
    return {k: value for k, value in answer.items() if k not in {"logprobs", "num_cached_tokens"}}


def keys(table):
    return [key for key, _ in answers(table)]


def undisturbed(model, tables):
    """What the plain rows give in one process, without Ray and without hostile ones."""
    plain = [table.filter(pc.equal(table.column("kind"), "")) for table in tables]
    operator = MoEGenerator(model, sampling_params=PARAMS, id_column="id", engine_config=CONFIG)
    with contextlib.closing(operator), ThreadPoolExecutor(16) as threads:
        return dict(one for table in threads.map(operator, plain) for one in answers(table))


def check_nothing_is_left(journal, mark):
    """No process of the job, no half-written file, and no lock on what it wrote."""
    _, alive = psutil.wait_procs(marked(mark), timeout=60)
    assert [one.cmdline() for one in alive] == []
    assert [path.name for path in journal.iterdir() if path.suffix == ".tmp"] == []
    for path in journal.iterdir():
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def marked(mark):
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(MARK) == mark:
                found.append(one)
    return found


@only_root
def test_memory_for_shared_weights_that_is_full(tiny_model, tmp_path):
    """In a mount namespace of its own: what is full there is not full for anybody else."""
    arguments = f"{str(tiny_model)!r}, {str(tmp_path)!r}"
    code = f"from tests.ray.test_chaos import with_full_memory as run; run({arguments})"
    python = shlex.join([sys.executable, "-c", code])
    script = f"mount -t tmpfs -o size=32m tmpfs {DIRECTORY} && exec {python}"
    python_path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        check=False,
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def with_full_memory(model, place):
    """Two jobs of actors that share weights; the memory is full at the start, and in the middle."""
    place, rows, full = Path(place), make_rows(1024), DIRECTORY / "full"
    expected = as_before(model, rows)
    with small_cluster(1, num_gpus=2):
        fill(full)
        (place / "refused").mkdir()
        refused = Job(model, rows, place / "refused", num_actors=2, engine_config=SHARING)
        with pytest.raises(Exception, match=r"/dev/shm has .* free.*make it larger"):
            refused.finish()
        full.unlink()
        job = Job(model, rows, place, num_actors=2, engine_config=SHARING)
        job.wait_for_rows(200)
        fill(full)
        for _ in range(2):
            kill_one(job, random.Random(0))
            job.wait_for_rows(job.num_logged() + 1)
        assert job.rows() == expected
    SharedFile.open("0").close()  # what Ray killed at the end is removed by whoever comes next
    assert list(DIRECTORY.glob("raymoe-*")) == []


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@only_root
def test_an_output_that_may_not_be_written_and_then_is_full(tiny_model, tmp_path):
    rows = random_rows(random.Random(6), 2000, HOSTILE_SHARE, without=WITHOUT_ID)
    rows = [row for row in rows if is_text(row)]
    command, disk = Command(tiny_model, tmp_path, rows), tmp_path / "disk"
    undisturbed, output = tmp_path / "undisturbed.jsonl", disk / "out.jsonl"
    options = ["--num-actors", 2, "--journal", tmp_path / "journal"]
    code, shown = command.finish(undisturbed, "--no-journal")
    assert code == 0, shown
    command.log.unlink()
    disk.mkdir()
    size = undisturbed.stat().st_size
    mount("-t", "tmpfs", "-o", f"size={4 * size}", "tmpfs", disk)
    try:
        process = command.start(output, *options)
        while command.num_logged() < len(rows) // 5:
            with pytest.raises(subprocess.TimeoutExpired):  # else it ended too early
                process.wait(0.01)
        with read_only(disk):
            shown, _ = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 1, shown
        assert "Read-only file system" in shown
        mount("-o", f"remount,size={size // 2}", disk)
        code, shown = command.finish(output, *options, "--resume")
        assert code == 1, shown
        assert "No space left on device" in shown
        mount("-o", f"remount,size={4 * size}", disk)
        code, shown = command.finish(output, *options, "--resume")
        assert code == 0, shown
        lines = output.read_bytes().splitlines()
    finally:
        unmount(disk)
    assert by_id(lines) == by_id(undisturbed.read_bytes().splitlines())
    assert not (tmp_path / "journal").exists()


def by_id(lines):
    """Each row by its id; errors of slow forms have seconds in them."""
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row["kind"] in SLOW:
            del row["__inference_error__"]
    # Rows whose id is no text have none, and are told apart by all the rest.
    assert len({row["id"] for row in rows if row["id"] is not None}) >= len(rows) - 10
    return sorted(json.dumps(row) for row in rows)


def is_text(row):
    return all(isinstance(cell, str | None) for cell in row.values())


@contextlib.contextmanager
def read_only(disk):
    """What is opened there from now on; whoever writes to an open file may go on."""
    mount("--bind", disk, disk)
    try:
        mount("-o", "remount,bind,ro", disk)
        yield
    finally:
        unmount(disk)


def unmount(disk):
    # Lazily: processes of Ray may end a moment after the command.
    subprocess.run(["umount", "-l", disk], check=True, timeout=30)
