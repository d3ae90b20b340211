"""Ctrl-C while an engine generates or scores: the rows go, the engine stays."""

import signal
import threading
import time

import pytest

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from tests.kinds import covering
from tests.tiny import make_checkpoint

LONG = {"max_tokens": 480, "ignore_eos": True, "temperature": 0.0}
SHORT = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(autouse=True)
def interrupts():
    """Signals end calls even where the shell of the tests ignores them, as it does in `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def engine(tmp_path):
    config = EngineConfig(
        dtype="float32", device="cpu", num_threads=1, linger_s=0.0, max_queued_rows=100
    )
    with Engine.from_pretrained(make_checkpoint(tmp_path), config) as engine:
        yield engine


def interrupt_once_several_run(engine):
    def wait() -> None:
        while engine.stats().num_live_sequences < 3:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@covering(num_rows=[20, 4000], task=["score", "generate"])  # more than fit: the call still submits
def test_the_rows_of_an_interrupted_call_are_dropped(engine, task, num_rows):
    expected = engine.generate(["a", "b"], SHORT)
    (other,) = engine.submit(["c"], LONG)  # of another call
    prompts = [f"row {i} " * 40 for i in range(num_rows)]
    sender = interrupt_once_several_run(engine)

    def call() -> None:
        while True:  # a call may end before the signal comes
            if task == "generate":
                engine.generate(prompts, LONG)
            else:
                engine.score([None] * num_rows, prompts)

    with pytest.raises(KeyboardInterrupt):
        call()
    sender.join()
    assert len(other.result().token_ids) == 480
    assert engine.generate(["a", "b"], SHORT) == expected
    stats = engine.stats()
    assert (stats.num_queued_rows, stats.num_live_sequences) == (0, 0)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert task == "score" or stats.num_finished_rows % num_rows == 5


def test_an_interrupt_leaves_nothing_locked(engine):
    def call(timer: threading.Timer) -> None:
        timer.start()
        while True:
            engine.reset_prefix_cache()

    for _ in range(30):
        timer = threading.Timer(
            0.002, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):  # while a lock is taken, as often as not
            call(timer)
        timer.join()
    answers = []
    other = threading.Thread(target=lambda: answers.append(engine.stats()), daemon=True)
    other.start()
    other.join(60)
    assert answers


def test_what_a_notebook_shows_is_short(engine):
    answers = [*engine.generate(["a" * 200], LONG), *engine.score([None], ["abc"])]
    assert all(len(repr(answer)) < 500 for answer in answers)
    assert "finish_reason='length'" in repr(answers[0])
    assert "logprob" in repr(answers[1])
    assert "running" in repr(engine)
    engine.close()
    assert "closed" in repr(engine)
    assert len(repr(engine.plan)) < 200
    assert engine.plan._repr_html_().startswith("<pre>")
