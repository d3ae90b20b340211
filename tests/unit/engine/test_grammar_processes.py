"""Processes for grammars that are killed or paused from outside: no row is blamed for it."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from raymoe.bench.hostile_forms import exploding_outputs
from raymoe.data.job_rows import is_final
from raymoe.engine.engine import Engine
from raymoe.engine.grammar_server import GrammarServer
from raymoe.engine.grammars import NUM_SLOW, CompileLimits, Grammars
from raymoe.engine.token_masks import MAX_RETRIES, MatchLimits, TokenMasks
from raymoe.errors import CapacityError, ConfigError, WorkerProcessError
from raymoe.processes import usage_of
from raymoe.structured import StructuredOutputs
from tests.unit.engine.fakes import EOS, QUICK, VOCAB_SIZE, FakeRunner, fake_parts, small_policy
from tests.unit.engine.kills import signal_forked

SMALL = StructuredOutputs.of({"choice": ["abc", "abd"]})
OTHER = StructuredOutputs.of({"choice": ["xyz"]})
# Takes longer than a first try may, so that two processes compile it.
LARGE = StructuredOutputs.of({"choice": [f"{number:08}" for number in range(12000)]})
EXPLODING = [StructuredOutputs.of(exploding_outputs(variant)[2]) for variant in range(16)]


@pytest.fixture(scope="module")
def server(tokenizer_directory):
    server = GrammarServer(tokenizer_directory, VOCAB_SIZE, (EOS,))
    yield server
    server.close()


@pytest.fixture
def grammars(server):
    grammars = Grammars(server, lambda: False, CompileLimits(limit_s=5.0))
    yield grammars
    grammars.close()


@pytest.fixture
def masks(server):
    masks = TokenMasks(server, 4, VOCAB_SIZE, MatchLimits.of(VOCAB_SIZE))
    yield masks
    masks.close()


def compiled(grammars, outputs):
    return grammars.get(outputs).result(300)


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


@pytest.mark.parametrize(
    ("outputs", "killed", "num_begun"),
    [(SMALL, 0, 2), (LARGE, 0, 3), (LARGE, 1, 3)],
    ids=["a quick one", "the first try of a slow one", "the second try of a slow one"],
)
def test_a_compiling_process_that_is_killed_is_replaced(
    grammars, monkeypatch, outputs, killed, num_begun
):
    pids = signal_forked(monkeypatch, b"compile", {killed})
    assert compiled(grammars, outputs).data
    assert len(pids) == num_begun


def test_what_was_not_compiled_because_of_kills_is_compiled_when_there_are_none(
    grammars, monkeypatch
):
    with monkeypatch.context() as patched:
        pids = signal_forked(patched, b"compile")
        with pytest.raises(WorkerProcessError, match=r"ended by signal 9.*no fault of this row"):
            compiled(grammars, SMALL)
    assert len(pids) == 2
    assert compiled(grammars, SMALL).data


def test_a_compiling_process_that_is_paused_goes_on(grammars, monkeypatch):
    pids = signal_forked(monkeypatch, b"compile", {1}, signal.SIGSTOP)
    future = grammars.get(LARGE)
    while len(pids) < 2:
        time.sleep(0.01)
    resume_later(pids[1]).join()
    assert future.result(300).data
    assert len(pids) == 2


def test_processes_that_are_paused_for_ever_are_replaced(server, grammars, masks, monkeypatch):
    monkeypatch.setattr("raymoe.engine.grammar_server.STALL_S", 0.5)
    monkeypatch.setattr("raymoe.engine.grammar_server.CHECK_S", 0.05)
    matching = signal_forked(monkeypatch, b"match", ())
    compiling = signal_forked(monkeypatch, b"compile", {2}, signal.SIGSTOP)
    masks.begin(0, compiled(grammars, SMALL), b"a")
    assert allowed(masks, 0) == {ord("b")}
    first, future = server._process, grammars.get(LARGE)
    while len(compiling) < 3:
        time.sleep(0.01)
    for pid in (matching[0], first.pid):
        os.kill(pid, signal.SIGSTOP)
    accept(masks, 0, "b")
    masks.synchronize()  # does not wait
    assert masks.pending() == {0}
    assert compiled(grammars, OTHER).data
    assert future.result(300).data
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    assert server._process is not first


def test_the_process_that_forks_is_replaced_also_while_it_starts(
    server, grammars, masks, monkeypatch
):
    pids = signal_forked(monkeypatch, b"match", ())
    masks.begin(0, compiled(grammars, SMALL), b"a")
    assert allowed(masks, 0) == {ord("b")}
    first = server._process
    first.kill()
    first.wait()
    future = grammars.get(OTHER)
    while server._process in (first, None):
        time.sleep(0.01)
    server._process.kill()
    assert future.result(300).data
    accept(masks, 0, "b")
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    assert len(pids) == 2  # what it forked ended with it


def test_a_row_in_work_is_not_blamed_for_a_kill(grammars, masks, monkeypatch):
    pids = signal_forked(monkeypatch, b"match", ())
    masks.begin(0, compiled(grammars, SMALL), b"")
    masks.begin(1, compiled(grammars, OTHER), b"x")
    assert allowed(masks, 0) == {ord("a")}
    monkeypatch.setattr(masks, "_slot_in_work", lambda: 0)
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
    grammars, masks, monkeypatch, in_work, lost
):
    with monkeypatch.context() as patched:
        pids = signal_forked(patched, b"match", range(1 + MAX_RETRIES))
        patched.setattr(masks, "_slot_in_work", lambda: in_work)
        for slot in range(2):
            masks.begin(slot, compiled(grammars, SMALL), b"a")
        masks.synchronize(None)
        assert {slot for slot in range(2) if masks.error(slot)} == lost
    assert all(isinstance(masks.error(slot), WorkerProcessError) for slot in lost)
    assert len(pids) == 1 + MAX_RETRIES + (lost == {1})
    for slot in lost:
        masks.end(slot)
    masks.begin(1, compiled(grammars, OTHER), b"")
    assert allowed(masks, 1) == {ord("x")}
    assert allowed(masks, 0) == (set() if 0 in lost else {ord("b")})


def test_a_matching_process_that_is_paused_goes_on(grammars, masks, monkeypatch):
    pids = signal_forked(monkeypatch, b"match", ())
    masks.begin(0, compiled(grammars, SMALL), b"a")
    assert allowed(masks, 0) == {ord("b")}
    os.kill(pids[0], signal.SIGSTOP)
    accept(masks, 0, "b")
    thread = resume_later(pids[0])
    assert allowed(masks, 0) == {ord("c"), ord("d")}
    thread.join()
    assert len(pids) == 1


def test_slow_grammars_take_no_more_than_their_budget_and_no_other_is_refused(server):
    limit_s, computed_s = 0.2, 0.0
    grammars = Grammars(server, lambda: False, CompileLimits(limit_s=limit_s), lambda: computed_s)
    futures = [grammars.get(outputs) for outputs in EXPLODING]
    assert compiled(grammars, SMALL).data
    errors = [future.exception(300) for future in futures]
    kinds = [type(error) for error in errors]
    assert 1 <= kinds.count(ConfigError) <= NUM_SLOW + 1
    assert kinds.count(CapacityError) == len(EXPLODING) - kinds.count(ConfigError)
    assert NUM_SLOW * limit_s <= grammars.slow_s < (NUM_SLOW + 1.5) * limit_s  # in ticks of 10 ms
    (refusal,) = {str(error) for error in errors if isinstance(error, CapacityError)}
    assert "at most 0.4 s" in refusal
    assert "smaller maxLength" in refusal
    refused = kinds.index(CapacityError)
    assert grammars.get(EXPLODING[refused]) is futures[refused]  # not even tried
    assert compiled(grammars, OTHER).data
    computed_s = 1000.0  # the longer a job is, the more of them
    assert isinstance(grammars.get(EXPLODING[refused]).exception(300), ConfigError)
    grammars.close()


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
    pids = signal_forked(monkeypatch, b"match", ())
    os.kill(engine._masks._process.pid, signal.SIGKILL)
    futures = engine.submit(prompts, params)
    for num_killed in range(1, 4):
        num_steps = engine.stats().num_steps
        while engine.stats().num_steps < num_steps + 10:
            time.sleep(0.001)
        assert len(pids) == num_killed
        os.kill(pids[-1], signal.SIGKILL)
    assert [future.result().error for future in futures] == [""] * 8
    assert [future.result().token_ids for future in futures] == [g.token_ids for g in undisturbed]


@pytest.mark.parametrize("role", [b"compile", b"match"])
def test_a_row_that_kills_have_cost_is_not_final_and_its_neighbours_are_well(
    engine, monkeypatch, role
):
    params = [{"temperature": 0, "max_tokens": 4}, {"structured_outputs": {"choice": ["abc"]}}]
    with monkeypatch.context() as patched:
        signal_forked(patched, role)
        if role == b"match":
            os.kill(engine._masks._process.pid, signal.SIGKILL)
        good, lost = engine.generate([[1, 2], [3]], params)
    assert lost.error.startswith("WorkerProcessError: structured_outputs")
    assert not is_final(lost)
    again, found = engine.generate([[1, 2], [3]], params)
    assert found.text == "abc"
    assert good.token_ids == again.token_ids
