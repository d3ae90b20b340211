"""Workers for grammars that are killed or paused from outside: no row is blamed for it."""

import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from raymoe.data.job_rows import is_final
from raymoe.engine.engine import Engine
from raymoe.engine.grammars import MAX_RETRIES, MAX_STARTS, GrammarServer, TokenBitmasks
from raymoe.errors import WorkerProcessError
from raymoe.processes import usage_of
from raymoe.structured import StructuredOutputs
from tests.unit.engine.fakes import EOS, QUICK, VOCAB_SIZE, FakeRunner, fake_parts, small_policy
from tests.unit.engine.kills import signal_forked

SMALL = StructuredOutputs.of({"choice": ["abc", "abd"]})
OTHER = StructuredOutputs.of({"choice": ["xyz"]})


@pytest.fixture(scope="module")
def server(tokenizer_directory):
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    yield server
    server.close()


@pytest.fixture
def masks(server):
    masks = TokenBitmasks(server, 4, VOCAB_SIZE)
    yield masks
    masks.close()


def allowed(masks, slot):
    """The tokens that may come next in a slot."""
    masks.synchronize(None)
    words = np.zeros((1, masks._num_words), np.int32)
    masks.copy_masks(words, np.array([slot], np.int32))
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def accept(masks, slot, token):
    masks.accept(np.array([slot], np.int32), np.array([ord(token)], np.int32))


def resume_later(pid):
    """Resume a process once it has been seen to stand still."""

    def wait():
        before = usage_of(pid)
        time.sleep(0.5)
        assert usage_of(pid) == before
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_worker_that_is_paused_for_ever_is_replaced(server, masks, monkeypatch):
    monkeypatch.setattr("raymoe.engine.grammars.STALL_S", 0.5)
    monkeypatch.setattr("raymoe.engine.grammars.CHECK_S", 0.05)
    pids = signal_forked(monkeypatch, ())
    masks.begin(0, SMALL, b"a")
    assert allowed(masks, 0) == {ord("b")}
    first = server._process
    for pid in (pids[0], first.pid):
        os.kill(pid, signal.SIGSTOP)
    accept(masks, 0, "b")
    masks.synchronize()  # does not wait
    assert masks.pending() == {0}
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    assert server._process is not first


def test_the_server_is_replaced_also_while_it_starts(server, masks, monkeypatch):
    pids = signal_forked(monkeypatch, ())
    masks.begin(0, SMALL, b"a")
    assert allowed(masks, 0) == {ord("b")}
    first = server._process
    first.kill()
    first.wait()
    accept(masks, 0, "b")
    while server._process is first:
        masks.synchronize()
        time.sleep(0.01)
    server._process.kill()
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    assert len(pids) == 2  # what it forked ended with it


@pytest.mark.parametrize(
    "num_kills", [MAX_STARTS - 1, pytest.param(MAX_STARTS, marks=pytest.mark.slow)]
)
def test_a_server_that_is_killed_while_it_starts_costs_no_row_its_try(
    tokenizer_directory, monkeypatch, num_kills
):
    monkeypatch.setattr("raymoe.engine.grammars.FIRST_PAUSE_S", 0.001)
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    masks = TokenBitmasks(server, 4, VOCAB_SIZE)
    popen, started = subprocess.Popen, []

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        if len(started) <= num_kills:
            started[-1].kill()
        return started[-1]

    monkeypatch.setattr("raymoe.engine.grammars.subprocess.Popen", start)
    masks.begin(0, SMALL, b"a")
    if num_kills < MAX_STARTS:
        assert allowed(masks, 0) == {ord("b")}
    else:
        masks.synchronize(None)
        assert isinstance(masks.error(0), WorkerProcessError)
        assert "while it started, as were 5 in a row" in str(masks.error(0))
        masks.end(0)
        masks.begin(0, SMALL, b"a")
        assert allowed(masks, 0) == {ord("b")}
    masks.close()
    server.close()


def test_a_row_in_work_is_not_blamed_for_a_kill(masks, monkeypatch):
    pids = signal_forked(monkeypatch, ())
    masks.begin(0, SMALL, b"")
    masks.begin(1, OTHER, b"x")
    assert allowed(masks, 0) == {ord("a")}
    monkeypatch.setattr(masks, "_in_work", lambda: (0, False))
    for text in ("a", "b"):
        os.kill(pids[-1], signal.SIGKILL)
        accept(masks, 0, text)
        masks.synchronize(None)
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    assert allowed(masks, 1) == {ord("y")}
    assert len(pids) == 3


@pytest.mark.parametrize(
    ("in_work", "lost"), [(-1, {0, 1}), (1, {1})], ids=["between rows", "always in one row"]
)
def test_rows_whose_process_is_killed_again_and_again_may_be_tried_again(
    masks, monkeypatch, in_work, lost
):
    with monkeypatch.context() as patched:
        pids = signal_forked(patched, range(1 + MAX_RETRIES))
        patched.setattr(masks, "_in_work", lambda: (in_work, False))
        for slot in range(2):
            masks.begin(slot, SMALL, b"a")
        masks.synchronize(None)
        assert {slot for slot in range(2) if masks.error(slot)} == lost
    assert all(isinstance(masks.error(slot), WorkerProcessError) for slot in lost)
    assert len(pids) == 1 + MAX_RETRIES + (lost == {1})
    for slot in lost:
        masks.end(slot)
    masks.begin(1, OTHER, b"")
    assert allowed(masks, 1) == {ord("x")}
    assert allowed(masks, 0) == (set() if 0 in lost else {ord("b")})


def test_a_matching_process_that_is_paused_goes_on(masks, monkeypatch):
    pids = signal_forked(monkeypatch, ())
    masks.begin(0, SMALL, b"a")
    assert allowed(masks, 0) == {ord("b")}
    os.kill(pids[0], signal.SIGSTOP)
    accept(masks, 0, "b")
    thread = resume_later(pids[0])
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    thread.join()
    assert len(pids) == 1


@pytest.fixture(scope="module")
def engine(tokenizer_directory):
    policy = small_policy()
    parts = fake_parts(FakeRunner(policy.num_kv_blocks), policy, directory=tokenizer_directory)
    with Engine(parts, QUICK) as engine:
        yield engine


def test_rows_have_the_same_tokens_when_their_process_is_killed(engine, monkeypatch):
    prompts = [[index] for index in range(8)]
    params = {"max_tokens": 90, "structured_outputs": {"regex": "[a-z]{3} [0-9]{60}"}}
    undisturbed = engine.generate(prompts, params)
    pids = signal_forked(monkeypatch, ())
    os.kill(engine._masks._worker.pid, signal.SIGKILL)
    futures = engine.submit(prompts, params)
    for num_killed in range(1, 4):
        num_steps = engine.stats().num_steps
        while engine.stats().num_steps < num_steps + 10:
            time.sleep(0.001)
        assert len(pids) == num_killed
        os.kill(pids[-1], signal.SIGKILL)
    assert [future.result().error for future in futures] == [""] * 8
    assert [future.result().token_ids for future in futures] == [g.token_ids for g in undisturbed]


def test_a_row_that_kills_have_cost_is_not_final_and_its_neighbours_are_well(engine, monkeypatch):
    params = [{"temperature": 0, "max_tokens": 4}, {"structured_outputs": {"choice": ["abc"]}}]
    with monkeypatch.context() as patched:
        signal_forked(patched)
        if engine._masks._worker is not None:
            os.kill(engine._masks._worker.pid, signal.SIGKILL)
        good, lost = engine.generate([[1, 2], [3]], params)
    assert lost.error.startswith("WorkerProcessError: structured_outputs")
    assert not is_final(lost)
    again, found = engine.generate([[1, 2], [3]], params)
    assert found.text == "abc"
    assert good.token_ids == again.token_ids
