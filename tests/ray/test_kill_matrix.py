"""Whatever is killed, and whenever: every id once, and the bytes of an undisturbed run.

Each test prints how often something was killed and how many rows were generated again.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import time

import psutil
import pytest

from raymoe.memory.shared_file import DIRECTORY, PREFIX, SharedFile
from raymoe.plan.policy import DevicePolicy, Policy
from tests.ray import matrix
from tests.ray.matrix import CONFIG, NODE, POISON, Job, make_rows, small_cluster, undisturbed
from tests.ray.test_resume import ROWS as DRIVER_ROWS
from tests.ray.test_resume import Command

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's cluster for tests
]

NUM_KILLS = 20
# Not "auto": the sizes of this small job would lie resident and nothing would be shared.
SHARING = dataclasses.replace(
    CONFIG,
    device="emulated",
    schedule="cgopipe",
    shared_weights=True,
    policy=Policy(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_prefill_chunk_tokens=256,
        num_kv_blocks=256,
        device=DevicePolicy(num_micro_batches=2),
    ),
)


@pytest.fixture(scope="module")
def cases(tiny_model):
    """Rows and what they give undisturbed; made once for each number and length."""
    known = {}

    def case(num_rows, **options):
        key = (num_rows, *sorted(options.items()))
        if key not in known:
            rows = make_rows(num_rows, **options)
            known[key] = rows, undisturbed(tiny_model, rows)
        return known[key]

    return case


def report(what, num_kills, job):
    print(  # noqa: T201 - what the run is read for
        f"\n{what}: {num_kills} kills, {job.num_regenerated()} of {len(job.ids)} rows again"
    )


def test_an_actor_that_is_killed_at_twenty_random_moments(cases, tiny_model, tmp_path):
    rows, expected = cases(8000, max_tokens=48)
    moments = random.Random(11)
    with small_cluster(1):
        job, num_kills, last = Job(tiny_model, rows, tmp_path), 0, None
        while num_kills < NUM_KILLS:
            (actor,) = next_actor(job, last)
            if num_kills % 3:  # else it may be killed while it loads
                job.wait_for_rows(job.num_logged() + moments.randint(1, 300))
            time.sleep(moments.uniform(0.0, 1.0))
            assert job.is_running, f"the job ended after {num_kills} kills: {job.error}"
            actor.kill()
            actor.wait()
            num_kills, last = num_kills + 1, actor.pid
        found = job.rows()
    report("actor", num_kills, job)
    assert found == expected


def test_an_actor_that_is_killed_three_times_while_it_loads(cases, tiny_model, tmp_path):
    rows, expected = cases(320)
    with small_cluster(2):
        job = Job(tiny_model, rows, tmp_path, matrix.LoadsSlowly)
        for number in range(3):
            os.kill(process_that_loads(tmp_path, number), signal.SIGKILL)
        assert job.rows() == expected
    assert matrix.num_lines(tmp_path / matrix.LOADS) == 4


@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_node_that_is_taken_away_while_an_actor_loads_on_it(
    cases, tiny_model, tmp_path, num_actors
):
    """The other node has room for its actor, or has one that does all rows."""
    rows, expected = cases(320)
    with small_cluster(2) as (cluster, nodes):
        job = Job(tiny_model, rows, tmp_path, matrix.LoadsSlowly, num_actors=num_actors)
        parents = {one.pid for one in psutil.Process(process_that_loads(tmp_path, 0)).parents()}
        (node,) = (one for one in nodes if raylet_of(one) in parents)
        cluster.remove_node(node, allow_graceful=False)
        assert job.rows() == expected
    assert matrix.num_lines(tmp_path / matrix.LOADS) == 2


def process_that_loads(place, number):
    """The process that begins to load after so many others."""
    loads, limit_s = place / matrix.LOADS, time.monotonic() + 120
    while matrix.num_lines(loads) <= number:
        assert time.monotonic() < limit_s, "nothing loads"
        time.sleep(0.1)
    return int(loads.read_text().split()[number])


def raylet_of(node):
    (info,) = node.all_processes["raylet"]
    return info.process.pid


@pytest.mark.parametrize("num_killed", [1, 2])
def test_nodes_that_are_taken_away_and_replaced(cases, tiny_model, tmp_path, num_killed):
    rows, expected = cases(4000, max_tokens=48)
    moments = random.Random(num_killed)
    with small_cluster(num_killed + 1) as (cluster, nodes):
        job = Job(tiny_model, rows, tmp_path, num_actors=len(nodes))
        for node in nodes[:num_killed]:
            job.wait_for_rows(job.num_logged() + moments.randint(100, 700))
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(**NODE)
        found = job.rows()
    report("nodes", num_killed, job)
    assert found == expected


def test_actors_of_a_node_share_weights_and_one_is_killed(cases, tiny_model, tmp_path):
    rows, expected = cases(2048)
    before = set(shared_files())
    with small_cluster(1, num_gpus=2):
        job = Job(tiny_model, rows, tmp_path, num_actors=2, engine_config=SHARING)
        job.wait_for_rows(300)
        (path,) = set(shared_files()) - before
        first = job.actors()[0]
        first.kill()
        first.wait()
        job.wait_for_rows(job.num_logged() + 1)
        assert path.exists()
        found = job.rows()
    report("an actor of two that share", 1, job)
    print(f"left behind: {set(shared_files()) - before}")  # noqa: T201 - as above
    assert found == expected
    # What Ray killed at the end is removed by whoever shares weights next.
    SharedFile.open("0").close()
    assert not path.exists()


def shared_files():
    return DIRECTORY.glob(f"{PREFIX}{os.geteuid()}-*")


def test_a_driver_that_is_killed_and_resumed(tiny_model, tmp_path):
    command = Command(tiny_model, tmp_path)
    undisturbed, output = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    code, shown = command.finish(undisturbed, "--no-journal")
    assert code == 0, shown
    command.log.unlink()
    moments = random.Random(3)
    for number in range(3):
        rows = command.num_logged() + moments.randint(1, len(DRIVER_ROWS) // 4)
        command.kill_after(rows, output, *["--resume"] * bool(number), with_actors=bool(number % 2))
    code, shown = command.finish(output, "--resume")
    assert code == 0, shown
    report_command("driver", 3, command)
    assert sorted(output.read_bytes().splitlines()) == sorted(undisturbed.read_bytes().splitlines())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_is_full_and_made_larger(tiny_model, tmp_path):
    command = Command(tiny_model, tmp_path)
    undisturbed, disk = tmp_path / "undisturbed.jsonl", tmp_path / "disk"
    code, shown = command.finish(undisturbed, "--no-journal")
    assert code == 0, shown
    command.log.unlink()
    disk.mkdir()
    output, size = disk / "out.jsonl", undisturbed.stat().st_size
    mount("-t", "tmpfs", "-o", f"size={size // 3}", "tmpfs", disk)
    try:
        code, shown = command.finish(output)
        assert code == 1
        assert "No space left on device" in shown
        mount("-o", f"remount,size={4 * size}", disk)
        code, shown = command.finish(output, "--resume")
        assert code == 0, shown
        lines = output.read_bytes().splitlines()
    finally:
        # Lazily: processes of Ray may end a moment after the command.
        subprocess.run(["umount", "-l", disk], check=True, timeout=30)
    report_command("disk", 0, command)
    assert sorted(lines) == sorted(undisturbed.read_bytes().splitlines())


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True, timeout=30)


@pytest.mark.parametrize(("operator", "watchdog_s"), [("RaisesOnce", None), ("StuckOnce", 10.0)])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_pass_that_fails_or_never_ends(cases, tiny_model, tmp_path, operator, watchdog_s, device):
    rows, expected = cases(1024)
    config = dataclasses.replace(CONFIG, watchdog_s=watchdog_s, device=device)
    with small_cluster(1):
        mark, kind = tmp_path / "mark", getattr(matrix, operator)
        job = Job(tiny_model, rows, tmp_path, kind, engine_config=config, mark=mark)
        found = job.rows()
    assert mark.exists()
    assert job.num_deaths() == 1
    report(f"{operator} on {device}", 1, job)
    assert found == expected


@pytest.mark.parametrize("operator", ["Poisoned", "PoisonedEngine"])
def test_a_row_that_ends_every_process_it_is_in(cases, tiny_model, tmp_path, operator):
    rows, expected = cases(1024)
    poison = 300
    rows = [*rows]
    rows[poison] = {**rows[poison], "prompt": POISON}
    with small_cluster(1):
        kind = getattr(matrix, operator)
        job = Job(tiny_model, rows, tmp_path, kind, rows_in_flight=512)
        found = job.rows()
    report(operator, job.num_deaths(), job)
    assert 4 <= job.num_deaths() <= 6
    row_id = rows[poison]["id"]
    bad = json.loads(found.pop(row_id))
    assert "this row crashed the process 2 times" in bad["__inference_error__"]
    assert bad["finish_reason"] == "error"
    assert found == {one: line for one, line in expected.items() if one != row_id}


def next_actor(job, last):
    """The actor's process, once it is another than the one that was killed last."""
    limit_s = time.monotonic() + 120
    while time.monotonic() < limit_s:
        found = [one for one in job.actors() if one.pid != last]
        if found:
            return found
        assert job.is_running, f"the job ended too early: {job.error}"
        time.sleep(0.05)
    raise AssertionError("Ray started no actor")


def report_command(what, num_kills, command):
    logged = command.logged()
    num_again = len(logged) - len(set(logged))
    print(  # noqa: T201 - as above
        f"\n{what}: {num_kills} kills, {num_again} of {len(DRIVER_ROWS)} rows again"
    )
