"""One run writes an output at a time; what ended runs leave is taken over."""

import json
import re
import subprocess
import sys
import threading

import pyarrow as pa
import pytest
from pyarrow import fs

from raymoe.cli import resume as leases
from raymoe.cli.resume import Lease, lease_bucket
from raymoe.cli.storage import Location
from raymoe.cli.writers import Shards, TableLines
from raymoe.data import bucket_lease
from raymoe.data.bucket import Bucket
from raymoe.data.bucket_lease import BucketLease
from raymoe.errors import ConfigError, ExecutionError
from tests.unit.cli.places import PLACES
from tests.unit.data.buckets import make_bucket


@pytest.fixture(params=PLACES)
def output(request, tmp_path):
    return PLACES[request.param](tmp_path, "answers")


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(leases, "STALE_S", 0.6)
    monkeypatch.setattr(leases, "READ_BACK_S", 0.0)


def lease_file(output):
    return output.sibling(f"{output.name}.lease")


def leave(output, **changes):
    """A lease of a run that was cut off."""
    fields = {"run": "0ld", "host": "elsewhere", "pid": 1, "process_start": "1", "began": "then"}
    with lease_file(output).replacing() as file:
        file.write(json.dumps(fields | {"beat": 3} | changes).encode())


def test_a_second_run_is_refused_until_the_first_has_ended(output):
    with Lease(output) as first:
        with (
            pytest.raises(ConfigError, match=f"run {first.run} of process .* writes it"),
            Lease(output),
        ):
            pass
        first.check()
    assert not lease_file(output).exists()
    with Lease(output) as second:
        assert second.run != first.run


def test_in_a_store_of_two_runs_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    output, bucket = PLACES["remote"](tmp_path, "answers"), make_bucket()
    monkeypatch.setattr(bucket_lease, "HEARTBEAT_S", 0.05)
    both_have_looked, look = threading.Barrier(2), BucketLease._wait_for_end
    monkeypatch.setattr(
        BucketLease, "_wait_for_end", lambda one: (look(one), both_have_looked.wait(60))[0]
    )
    leases_, errors, got = [Lease(output, bucket) for _ in range(2)], [], []

    def take(lease):
        try:
            got.append(lease.__enter__())
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=take, args=(lease,)) for lease in leases_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lease,), (error,) = got, errors
    assert re.search(rf"--output .*answers: run {lease.run} of process .* uses it", error)
    lease.check()
    lease.__exit__(None, None, None)
    assert bucket.sizes() == {}
    lease_file(output).make_dir()  # as objects are seen by a run without the store's library
    with pytest.raises(ConfigError, match="install it here too"), Lease(output):
        pass


def test_the_lease_is_in_the_bucket_where_fsspec_knows_what_arrow_does(monkeypatch):
    output = Location(fs.LocalFileSystem(), "jobs/out", "s3")
    monkeypatch.setattr(Bucket, "parse", lambda uri, _option: uri)
    assert lease_bucket(output, "s3://jobs/out/") == "s3://jobs/out.lease"
    for uri in ("s3://jobs/out?region=x", "s3://key:secret@jobs/out", "hdfs://a/b", "out"):
        assert lease_bucket(output, uri) is None

    def refuse(uri, _option):
        raise ConfigError(f"{uri} needs a library")

    monkeypatch.setattr(Bucket, "parse", refuse)
    assert lease_bucket(output, "s3://jobs/out") is None


def test_a_run_elsewhere_is_alive_while_its_counter_grows(output):
    leave(output)
    beats = iter(range(4, 10_000))
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            leave(output, beat=next(beats))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="run 0ld of process 1 on elsewhere"), Lease(output):
            pass
    finally:
        stop.set()
        thread.join()


def test_what_a_run_elsewhere_left_is_taken_over(output):
    leave(output)
    with Lease(output) as lease:
        assert json.loads(lease_file(output).read_bytes())["run"] == lease.run
    assert not lease_file(output).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"run": 1}'])
def test_a_lease_that_says_nothing_is_nobodys(output, content):
    with lease_file(output).replacing() as file:
        file.write(content)
    with Lease(output):
        pass


def test_a_killed_run_of_this_machine_does_not_block_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "STALE_S", 600.0)
    code = (
        "import os, signal, sys\n"
        "from raymoe.cli.resume import Lease\n"
        "from raymoe.cli.storage import Location\n"
        "Lease(Location.local(sys.argv[1])).__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "answers")], check=False)
    assert (tmp_path / "answers.lease").exists()
    with Lease(PLACES["local"](tmp_path, "answers")):
        pass


def test_a_run_that_lost_its_lease_writes_nothing_more(output):
    lost = threading.Event()
    with Lease(output) as lease:
        leave(output, run="n3w")
        for _ in range(200):
            if lease._is_lost or lost.wait(0.05):
                break
        with pytest.raises(ExecutionError, match="is another run's by now"):
            lease.check()
    assert json.loads(lease_file(output).read_bytes())["run"] == "n3w"


def test_parts_of_two_runs_have_different_names(output):
    one, other = (
        Shards(directory=output, suffix=".jsonl", lines=TableLines(), run=run)
        for run in ("aa", "bb")
    )
    output.make_dir()
    for parts in (one, other):
        parts.write(parts.name(0), [pa.table({"run": [parts.run]})])
    lines = [json.loads(part.read_bytes())["run"] for part in one.find()]
    assert sorted(lines) == ["aa", "bb"]
    assert one.next_number() == 1
