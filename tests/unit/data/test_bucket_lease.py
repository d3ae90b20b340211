"""One driver at a time has the journal in a bucket; what ended drivers leave is taken over."""

import dataclasses
import json
import subprocess
import sys
import threading

import pytest

from raymoe.data import bucket_lease
from raymoe.data.bucket_lease import BucketLease
from raymoe.data.holder import Holder
from raymoe.data.journal_place import BucketPlace
from raymoe.errors import ConfigError, ExecutionError
from tests.unit.data.buckets import make_bucket

ELSEWHERE = Holder(run="0ld", host="elsewhere", pid=1, process_start="1", began="then", beat=3)


@pytest.fixture
def bucket():
    return make_bucket()


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch):
    monkeypatch.setattr(bucket_lease, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(bucket_lease, "STALE_S", 0.6)


def leave(bucket, holder, *, number=1, has_ended=False):
    """A lease of a driver that was cut off."""
    content = {"holder": dataclasses.asdict(holder), "has_ended": has_ended}
    bucket.put(f"leases/{number:06d}.json", json.dumps(content).encode())


def test_a_second_driver_is_refused_until_the_first_has_ended(bucket):
    first, second = BucketLease(bucket), BucketLease(bucket)
    first.take()
    with pytest.raises(ConfigError, match=r"journal_dir s3://.*: run \w+ of process .* uses it"):
        second.take()
    with pytest.raises(ConfigError, match="uses it"):
        BucketPlace(bucket).remove()
    first.check()
    second.release()
    first.release()
    second = BucketLease(bucket)
    second.take()
    second.release()
    assert list(bucket.sizes()) == ["leases/000001.json", "leases/000002.json"]
    BucketPlace(bucket).remove()
    assert bucket.sizes() == {}


def test_of_drivers_that_begin_at_once_one_gets_it(bucket, monkeypatch):
    leases, got = [BucketLease(bucket) for _ in range(8)], []
    all_have_looked, look = threading.Barrier(8), BucketLease._wait_for_end

    def look_with_others(lease):
        number = look(lease)
        all_have_looked.wait(60)
        return number

    monkeypatch.setattr(BucketLease, "_wait_for_end", look_with_others)

    def take(lease):
        try:
            lease.take()
        except ConfigError:
            return
        got.append(lease)

    threads = [threading.Thread(target=take, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


def test_a_driver_elsewhere_is_alive_while_its_counter_grows(bucket):
    leave(bucket, ELSEWHERE)
    beats, stop = iter(range(4, 10_000)), threading.Event()

    def beat():
        while not stop.wait(0.05):
            leave(bucket, dataclasses.replace(ELSEWHERE, beat=next(beats)))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="run 0ld of process 1 on elsewhere"):
            BucketLease(bucket).take()
    finally:
        stop.set()
        thread.join()


def test_what_a_driver_elsewhere_left_is_taken_over_and_it_stops_when_it_comes_back(bucket):
    leave(bucket, ELSEWHERE)
    old = BucketLease(bucket)
    old._number = 1
    lease = BucketLease(bucket)
    lease.take()
    old._renew()
    with pytest.raises(ExecutionError, match="is another run's by now"):
        old.check()
    lease.check()
    lease.release()


def test_a_run_that_comes_back_after_all_leases_are_removed_stops(bucket):
    leave(bucket, ELSEWHERE)
    old, lease = BucketLease(bucket), BucketLease(bucket)
    old._number = 1
    lease.take()
    lease.release(removes=True)
    assert bucket.sizes() == {}
    old._renew()
    with pytest.raises(ExecutionError, match="is another run's by now"):
        old.check()
    again = BucketLease(bucket)  # has the old one's number
    again.take()
    old._is_lost = False
    old._renew()
    with pytest.raises(ExecutionError, match="is another run's by now"):
        old.check()
    again.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"holder": 1}'])
def test_a_lease_that_says_nothing_is_nobodys(bucket, content):
    bucket.put("leases/000004.json", content)
    lease = BucketLease(bucket)
    lease.take()
    lease.release()
    assert "leases/000005.json" in bucket.sizes()


def test_a_killed_driver_of_this_machine_does_not_block_the_next(bucket, monkeypatch):
    monkeypatch.setattr(bucket_lease, "STALE_S", 600.0)
    code = (
        "import json, os, signal, sys\n"
        "from dataclasses import asdict\n"
        "from raymoe.data.holder import Holder\n"
        "print(json.dumps(asdict(Holder.here('k1lled'))), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    leave(bucket, Holder(**json.loads(done.stdout)))
    lease = BucketLease(bucket)
    lease.take()
    lease.release()


def test_a_put_that_came_twice_is_the_drivers_own(bucket, monkeypatch):
    put = bucket.filesystem.pipe_file

    def put_twice(path, value, mode="overwrite", **kwargs):
        put(path, value, mode=mode)
        put(path, value, mode=mode)

    monkeypatch.setattr(bucket.filesystem, "pipe_file", put_twice)
    lease = BucketLease(bucket)
    lease.take()
    lease.release()


def test_a_store_that_is_away_for_some_beats_costs_no_lease(bucket, caplog):
    lease = BucketLease(bucket)
    lease.take()
    bucket.filesystem.failures["put"] = 2
    while bucket.filesystem.failures["put"]:
        lease._ends.wait(0.01)
    lease.check()
    lease.release()
    assert "cannot be renewed" in caplog.text


def test_a_bucket_that_cannot_be_used_is_refused_with_what_it_needs(bucket):
    bucket.filesystem.failures["list"] = 1
    with pytest.raises(ConfigError, match=r"its lease cannot be taken: .*\(If-None-Match\)"):
        BucketLease(bucket).take()
