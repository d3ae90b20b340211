"""Who is to blame when a helper process ends, and whether it ends when it should."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from raymoe.engine.workers import process
from raymoe.engine.workers.process import Turns, WorkerProcess
from raymoe.errors import ConfigError, ExecutionError, WorkerProcessError

ROLE = """
import os, pathlib, signal, time

def start(settings, blob):
    if settings["refuses"]:
        raise ValueError("cannot load this")
    for flag in settings["flags"]:  # each ends one process
        if pathlib.Path(flag).exists():
            pathlib.Path(flag).unlink()
            os.kill(os.getpid(), getattr(signal, settings["signal"]))

    def answer(message, data):
        kind = message["kind"]
        while kind == "spin":
            pass
        if kind == "abort":
            os.abort()
        if kind == "memory":
            bytearray(1 << 40)
        if kind == "sleep":
            time.sleep(1000)
        if kind == "raise":
            raise BaseException("a panic")
        if kind in ("killed", "killed once"):
            flag = pathlib.Path(message["flag"])
            if kind == "killed" or not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return message, data

    return ({"pid": os.getpid()}, blob), answer
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "FIRST_PAUSE_S", 0.001)
    (tmp_path / "role.py").write_text(ROLE)
    workers = []

    def make_one(*, refuses=False, num_ends=0, signal="SIGKILL") -> WorkerProcess:
        flags = [tmp_path / f"end-{number}" for number in range(num_ends)]
        for flag in flags:
            flag.touch()
        workers.append(
            WorkerProcess(
                tmp_path / "role.py",
                {"refuses": refuses, "flags": [*map(str, flags)], "signal": signal},
                b"settings",
                what="the test",
                load_cpu_s=20.0,
                memory_bytes=1 << 28,
            )
        )
        return workers[-1]

    yield make_one
    for worker in workers:
        worker.close()


def ask(worker, kind, *, data=b"", cpu_s=10.0, num_tries=2, **message):
    return worker.ask({"kind": kind, **message}, data, cpu_s=cpu_s, num_tries=num_tries)


def pid_of(worker) -> int:
    assert worker._process is not None
    return worker._process.pid


def start_now(monkeypatch) -> None:
    """Lose patience soon with a process that is stopped."""
    monkeypatch.setattr(process, "POLL_S", 0.05)
    monkeypatch.setattr(process, "MAX_IDLE_POLLS", 4)


def test_messages_and_raw_bytes_go_there_and_back_whatever_their_size(make):
    worker = make()
    facts, blob = worker.load()
    assert (facts["pid"], blob) == (pid_of(worker), b"settings")
    for size in (0, 1, 3_000_000):
        message, data = ask(worker, "echo", data=b"x" * size, text="é\ud800" * size)
        assert (len(data), len(message["text"])) == (size, 2 * size)
    assert pid_of(worker) == facts["pid"]


@pytest.mark.parametrize("kind", ["raise", "memory"])
def test_what_a_request_raises_is_its_error_and_the_process_goes_on(make, kind):
    worker = make()
    pid = worker.load()[0]["pid"]
    with pytest.raises(ConfigError, match=r"the test failed: (BaseException: a panic|needs more)"):
        ask(worker, kind)
    ask(worker, "echo")
    assert pid_of(worker) == pid


def test_a_request_that_uses_up_its_cpu_time_is_at_fault_at_once(make):
    worker = make()
    with pytest.raises(ConfigError, match=r"the test took more than 0.2 s of CPU time") as caught:
        ask(worker, "spin", cpu_s=0.2)
    assert type(caught.value) is ConfigError
    ask(worker, "echo")


def test_a_request_that_makes_the_process_abort_twice_is_at_fault(make):
    worker = make()
    with pytest.raises(ConfigError, match=r"was ended by SIGABRT.*it may have 256 MiB"):
        ask(worker, "abort")
    ask(worker, "echo")


def test_a_process_that_is_killed_once_is_nobodys_fault(make, tmp_path):
    worker = make()
    assert ask(worker, "killed once", data=b"1", flag=str(tmp_path / "flag"))[1] == b"1"


def test_a_process_that_is_killed_again_and_again_is_not_the_rows_fault(make, tmp_path):
    with pytest.raises(WorkerProcessError, match="was ended by SIGKILL; try the row again"):
        ask(make(), "killed", flag=str(tmp_path / "flag"))


def test_a_process_that_was_killed_while_idle_costs_no_try(make):
    worker = make()
    worker.load()
    os.kill(pid_of(worker), signal.SIGKILL)
    worker._process.wait()
    assert ask(worker, "echo", data=b"2", num_tries=1)[1] == b"2"


@pytest.mark.parametrize("is_ready", [False, True], ids=["the first", "a later one"])
def test_processes_that_are_killed_while_they_start_cost_no_try(make, tmp_path, is_ready):
    num_ends = process.MAX_STARTS - 1
    worker = make(num_ends=0 if is_ready else num_ends)
    if is_ready:
        worker._settings[0]["flags"] = [str(tmp_path / f"end-{n}") for n in range(num_ends)]
        worker.load()
        for flag in worker._settings[0]["flags"]:
            Path(flag).touch()
        os.kill(pid_of(worker), signal.SIGKILL)
        worker._process.wait()
    assert ask(worker, "echo", data=b"1", num_tries=1)[1] == b"1"
    assert not [*tmp_path.glob("end-*")]


def test_a_process_that_never_starts_says_so_and_a_later_request_may_succeed(make, tmp_path):
    worker = make(num_ends=process.MAX_STARTS)
    said = "was ended by SIGKILL while it started, as were 5 in a row.*is memory short"
    with pytest.raises(WorkerProcessError, match=said):
        ask(worker, "echo")
    assert not [*tmp_path.glob("end-*")]
    assert ask(worker, "echo", data=b"1")[1] == b"1"


def test_a_process_that_crashes_twice_while_it_starts_is_not_started_for_ever(make, tmp_path):
    with pytest.raises(ConfigError, match="was ended by SIGABRT, perhaps for lack of memory"):
        ask(make(num_ends=4, signal="SIGABRT"), "echo")
    assert len([*tmp_path.glob("end-*")]) == 2


def test_a_stopped_process_is_replaced(make, monkeypatch):
    start_now(monkeypatch)
    worker = make()
    pid = worker.load()[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    data = b"x" * 3_000_000  # more than the socket takes while nobody reads
    assert ask(worker, "echo", data=data)[1] == data
    assert pid_of(worker) != pid


def test_a_process_that_waits_for_ever_is_ended_and_the_row_may_be_tried_again(make, monkeypatch):
    start_now(monkeypatch)
    with pytest.raises(WorkerProcessError, match=r"did nothing for 0.2 s and was ended"):
        ask(make(), "sleep")


def test_a_process_that_cannot_be_loaded_says_why_each_time(make):
    worker = make(refuses=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="the test failed: ValueError: cannot load this"):
            ask(worker, "echo")


def test_closing_ends_a_request_that_computes(make):
    worker = make()
    worker.load()
    closer = threading.Timer(0.2, worker.close)
    closer.start()
    with pytest.raises(ExecutionError, match="the test is closed"):
        ask(worker, "spin", cpu_s=60.0)
    closer.join()
    with pytest.raises(ExecutionError, match="the test is closed"):
        ask(worker, "echo")


def test_turns_are_given_in_order_of_arrival():
    turns, order = Turns(), []

    def enter(name) -> None:
        with turns:
            order.append(name)

    threads = [threading.Thread(target=enter, args=(name,)) for name in range(5)]
    with turns:
        for count, thread in enumerate(threads, 2):
            thread.start()
            while len(turns._queue) < count:
                time.sleep(0.001)
    enter("again")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "again"]


def test_the_process_ends_with_its_parent(make, tmp_path):
    make()
    script = f"""
import pathlib, time
from raymoe.engine.workers.process import WorkerProcess
worker = WorkerProcess(
    pathlib.Path({str(tmp_path)!r}) / "role.py", {{"refuses": False, "flags": []}},
    what="it", load_cpu_s=20.0, memory_bytes=1 << 28,
)
print(worker.load()[0]["pid"], flush=True)
time.sleep(60)
"""
    root = Path(process.__file__).parents[2]
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone
