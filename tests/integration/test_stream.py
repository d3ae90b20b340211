"""Results as they finish: which rows are read, returned and dropped."""

import asyncio
import itertools
import resource
import time

import pytest

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError
from raymoe.plan.policy import Policy
from tests.tiny import make_checkpoint

POLICY = Policy(
    max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk_tokens=64, num_kv_blocks=48
)
SHORT = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = EngineConfig(dtype="float32", device="cpu", policy=POLICY, linger_s=0.0)
    with Engine.from_pretrained(make_checkpoint(tmp_path_factory.mktemp("model")), config) as one:
        yield one


def wait_until_idle(engine):
    """Rows that were dropped leave after the step that they are in."""
    while engine.stats().num_live_sequences or engine.stats().num_queued_rows:
        time.sleep(0.001)


def count_up(read):
    for number in itertools.count():
        read.append(number)
        yield f"row {number}"


def test_rows_come_as_they_finish_and_are_those_of_generate(engine):
    prompts = [f"row {i}" for i in range(20)]
    found = dict(engine.stream(iter(prompts), SHORT, max_rows=6))
    whole = engine.generate(prompts, SHORT)
    assert [found[i].token_ids for i in range(20)] == [one.token_ids for one in whole]
    long = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}
    waiting = engine.submit(["a long row"], long)
    assert next(engine.stream(["a"], SHORT))[0] == 0
    assert not waiting[0].done()
    waiting[0].result()


def test_an_iterable_without_an_end_is_read_as_far_as_rows_are_taken(engine):
    read = []
    rows = engine.stream(count_up(read), SHORT, max_rows=6)
    for num_taken, (index, generation) in enumerate(itertools.islice(rows, 30), 1):
        assert len(generation.token_ids) <= 4
        assert index < len(read) <= num_taken + 6 + 1  # one more waits for room
    rows.close()
    wait_until_idle(engine)
    assert engine.generate(["a"], SHORT)[0].token_ids


def test_what_the_iterable_raises_comes_after_the_rows_before(engine):
    def broken():
        yield "a"
        yield ""  # an error row
        yield "b"
        raise OSError("the file ended")

    rows, found = engine.stream(broken(), SHORT), {}
    with pytest.raises(OSError, match="the file ended"):
        found.update(rows)
    assert {i: bool(row.error) for i, row in found.items()} == {0: False, 1: True, 2: False}


def test_coroutines_take_rows_and_drop_them(engine):
    async def take(num_rows):
        found = []
        async for index, generation in engine.astream(count_up([]), SHORT, max_rows=4):
            found.append((index, generation.text))
            if len(found) == num_rows:
                break
        return found

    found = dict(asyncio.run(take(9)))
    assert found[0] == engine.generate(["row 0"], SHORT)[0].text
    wait_until_idle(engine)

    async def cancelled():
        stream = engine.astream(iter(count_up([])), {"max_tokens": 400, "ignore_eos": True})
        await asyncio.wait_for(anext(stream), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert engine.generate(["a"], SHORT)[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("text", {}, "prompts is a str"),
        (["a"], {"max_rows": 0}, "max_rows is 0"),
        (["a"], {"sampling_params": [{}]}, "for all prompts"),
        (["a"], {"max_token": 3}, "did you mean 'max_tokens'"),
        (["a"], {"temperature": -1.0}, "temperature is -1"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_row_is_read(engine, prompts, options, message):
    for stream in (engine.stream, engine.astream):
        with pytest.raises(ConfigError, match=message):
            stream(prompts, **options)


@pytest.mark.slow
def test_the_memory_of_many_rows_is_bounded(engine):
    rows = engine.stream(("a" * 200 for _ in range(10_000)), SHORT)
    kept, grown = [], []
    for num_taken, _ in enumerate(rows, 1):
        kept.append(len(rows.gi_frame.f_locals["rows"]._read))
        if num_taken in (1000, 10_000):
            grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert max(kept) <= 2 * POLICY.max_num_seqs
    assert grown[1] - grown[0] < 20_000  # KiB
