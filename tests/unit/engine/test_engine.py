"""The engine around a fake model: rows, threads, failures, closing."""

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raymoe.config import EngineConfig, SamplingParams
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError, ExecutionError, UnknownOptionError
from tests.unit.engine.fakes import (
    BOS,
    QUICK,
    FakeRunner,
    expected_tokens,
    fake_parts,
    small_policy,
)

GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture
def make_engine(tokenizer_directory):
    """Engines that are closed at the end of the test."""
    engines = []

    def make(config=QUICK, policy=None, before=lambda _inputs: None, **parts) -> Engine:
        policy = policy or small_policy()
        runner = FakeRunner(policy.num_kv_blocks, before)
        engines.append(
            Engine(fake_parts(runner, policy, directory=tokenizer_directory, **parts), config)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Gate:
    """Holds steps until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, inputs) -> None:
        self.entered.set()
        assert self.opened.wait(30)


def test_every_prompt_has_its_generation_in_order(make_engine):
    prompts = [[i, i + 1] for i in range(30)]
    generations = make_engine().generate(prompts, GREEDY)
    assert [list(g.token_ids) for g in generations] == [expected_tokens(p, 4) for p in prompts]
    assert {g.finish_reason for g in generations} == {"length"}
    assert {(g.num_input_tokens, g.num_generated_tokens) for g in generations} == {(2, 4)}


def test_text_gets_bos_and_decodes_to_text(make_engine):
    (generation,) = make_engine().generate(["hi"], GREEDY)
    expected = expected_tokens([BOS, *b"hi"], 4)
    assert list(generation.token_ids) == expected
    assert generation.text == bytes(expected).decode(errors="replace")


def test_chat_messages_go_through_the_template_without_a_second_bos(make_engine):
    (generation,) = make_engine().generate([[{"role": "user", "content": "x"}]], GREEDY)
    prompt = [BOS, *b"<user>x\n<assistant>"]
    assert list(generation.token_ids) == expected_tokens(prompt, 4)


def test_each_row_has_its_own_parameters(make_engine):
    params = [{"max_tokens": 1, "temperature": 0}, SamplingParams(max_tokens=3, temperature=0)]
    generations = make_engine().generate([[1], [2]], params)
    assert [g.num_generated_tokens for g in generations] == [1, 3]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (None, None, "the prompt is null"),
        ("", None, "the prompt is empty"),
        ([], None, "the prompt is empty"),
        (5, None, "the prompt is a int"),
        (b"x", None, "the prompt is a bytes"),
        ([1, 258], None, "prompt token 1 is 258; the vocabulary has ids 0 to 257"),
        ([1, -1], None, "prompt token 1 is -1"),
        ([1, True], None, "prompt token 1 is True"),
        ([1.0], None, "prompt token 0 is 1.0"),
        ("a\ud800", None, "not valid Unicode"),
        ([1] * 600, None, "the prompt has 600 tokens; at most 511 fit"),
        ([{"role": "user"}], None, "has content None"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            None,
            "part of type 'image'; only text",
        ),
        ([1], {"max_token": 3}, "did you mean 'max_tokens'"),
        ([1], {"temperature": -1}, "temperature is -1"),
        ([1], 7, "sampling_params is a int"),
        ([1], {"logit_bias": {258: 1.0}}, "logit_bias has token 258"),
        ([1], {"structured_outputs": {"jsen": {}}}, "did you mean 'json'"),
    ],
)
def test_a_bad_row_is_an_error_row_and_disturbs_no_other(make_engine, prompt, params, message):
    good, bad, other = make_engine().generate([[1, 2], prompt, [3]], [GREEDY, params, GREEDY])
    assert bad.finish_reason == "error"
    assert message in bad.error
    assert bad.error.split(":")[0] in ("ConfigError", "UnknownOptionError")
    assert list(good.token_ids) == expected_tokens([1, 2], 4)
    assert list(other.token_ids) == expected_tokens([3], 4)


BAD_FOR_ALL = [
    ({"max_token": 3}, "did you mean 'max_tokens'"),
    (7, "sampling_params is a int"),
    ({"logit_bias": {258: 1.0}}, "logit_bias has token 258"),
    ({"structured_outputs": {"jsen": {}}}, "did you mean 'json'"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs has a regex"),
]


@pytest.mark.parametrize(("params", "message"), BAD_FOR_ALL)
def test_bad_parameters_of_all_prompts_raise_and_the_engine_goes_on(make_engine, params, message):
    engine = make_engine()
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine.generate([[1, 2], [3]], params)
    (bad,) = engine.generate([[1]], [params])
    assert message in bad.error
    (good,) = engine.generate([[1, 2]], GREEDY)
    assert list(good.token_ids) == expected_tokens([1, 2], 4)


def test_equal_prompts_of_a_call_get_samples_of_their_own_which_are_the_same_again(make_engine):
    engine, params = make_engine(), {"max_tokens": 8, "temperature": 1.0}
    rows = [row.token_ids for row in engine.generate([[1, 2]] * 8 + [[3]], params)]
    assert len(set(rows)) == 9
    assert [row.token_ids for row in engine.generate([[3]] + [[1, 2]] * 8, params)] == [
        rows[8],
        *rows[:8],
    ]


def test_a_row_that_cannot_fit_the_cache_says_how_many_blocks_it_needs(make_engine):
    engine = make_engine(policy=small_policy(num_kv_blocks=4))
    (generation,) = engine.generate([[1] * 100], {"max_tokens": 60})
    assert "needs" in generation.error or "need 160 tokens" in generation.error
    assert "5 KV blocks of 32 tokens; the cache has 4" in generation.error


def test_generation_ends_at_the_context_of_the_model(make_engine):
    engine = make_engine(max_model_len=10)
    (generation,) = engine.generate([[1] * 7], {"max_tokens": 50, "temperature": 0})
    assert (generation.num_generated_tokens, generation.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("on_too_long", "kept"), [("truncate_left", slice(2, 10)), ("truncate_right", slice(8))]
)
def test_long_prompts_are_cut_to_leave_room_for_what_is_generated(make_engine, on_too_long, kept):
    config = EngineConfig(linger_s=0.0, on_too_long=on_too_long)
    prompt = list(range(10))
    (generation,) = make_engine(config, max_model_len=12).generate([prompt], GREEDY)
    assert generation.num_input_tokens == 8
    assert list(generation.token_ids) == expected_tokens(prompt[kept], 4)


def test_one_prompt_that_is_not_in_a_list_is_a_mistake_of_the_caller(make_engine):
    with pytest.raises(ConfigError, match="it takes a list of prompts"):
        make_engine().generate("hello")


@pytest.mark.parametrize("call", [
    lambda engine: engine.classify([[1]], labels="yes"),
    lambda engine: engine.classify([[1]], labels=5),
    lambda engine: engine.classify("hello", ["yes", "no"]),
    lambda engine: engine.score("hello", ["a"] * 5),
    lambda engine: engine.embed("hello"),
])  # fmt: skip
def test_a_text_is_no_list_of_its_letters(make_engine, call):
    with pytest.raises(ConfigError, match="it takes a list of"):
        call(make_engine())


def test_messages_that_are_not_in_a_list_are_one_chat(make_engine):
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match=r"list of 2 messages, which are one chat.*\[messages\]"):
        make_engine().generate(chat)


def test_sampling_parameters_may_be_keywords(make_engine):
    engine = make_engine()
    prompts = [[1, 2], [3]]
    for params in (None, {"max_tokens": 9}, SamplingParams(max_tokens=9), [None, {"n": 1}]):
        found = engine.generate(prompts, params, max_tokens=3, temperature=0)
        for prompt, one in zip(prompts, found, strict=True):
            assert list(one.token_ids) == expected_tokens(prompt, 3)
    with pytest.raises(ConfigError, match="sampling_params is a int"):
        engine.generate(prompts, 5, max_tokens=3)
    with pytest.raises(UnknownOptionError, match="did you mean 'max_tokens'"):
        engine.generate(prompts, max_new_tokens=3)
    with pytest.raises(UnknownOptionError, match="an adapter is an option of the engine"):
        engine.generate(prompts, lora_request="a")


def test_ways_of_others_to_make_and_call_an_engine_are_named(make_engine, tmp_path):
    with pytest.raises(ConfigError, match=r"loads no model: use Engine\.from_pretrained"):
        Engine(tmp_path)
    with pytest.raises(ConfigError, match="engine_config is 'float32'; it takes an EngineConfig"):
        Engine.from_pretrained(tmp_path, "float32")
    for options in ({"config": {"devise": "cpu"}}, {"devise": "cpu"}):
        with pytest.raises(UnknownOptionError, match="did you mean 'device'"):
            Engine.from_pretrained(tmp_path, **options)
    with pytest.raises(AttributeError, match=r"'Engine' object has no attribute 'chat'; chats are"):
        make_engine().chat([])
    assert not hasattr(make_engine(), "absent")


def test_lists_of_different_lengths_are_a_mistake_of_the_caller(make_engine):
    with pytest.raises(ConfigError, match="sampling_params has 1 entries for 2 prompts"):
        make_engine().generate([[1], [2]], [None])


def test_many_threads_submit_at_once_and_each_gets_its_own_rows(make_engine):
    engine = make_engine(EngineConfig(linger_s=0.0, max_queued_rows=7))

    def call(thread: int):
        prompts = [[thread, row] for row in range(20)]
        futures = engine.submit(prompts, GREEDY)
        return [list(f.result(60).token_ids) == expected_tokens(p, 4)
                for p, f in zip(prompts, futures, strict=True)]  # fmt: skip

    with ThreadPoolExecutor(16) as pool:
        assert all(all(rows) for rows in pool.map(call, range(16)))
    assert engine.stats().num_finished_rows == 320


def test_submit_blocks_while_the_queue_is_full(make_engine):
    gate = Gate()
    policy = small_policy(max_num_seqs=2)
    engine = make_engine(EngineConfig(linger_s=0.0, max_queued_rows=3), policy, gate)
    first = engine.submit([[1], [2]], GREEDY)
    assert gate.entered.wait(30)
    done = threading.Event()
    rest = []

    def submit() -> None:
        rest.extend(engine.submit([[row] for row in range(10)], GREEDY))
        done.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not done.wait(0.3)
    assert engine.stats().num_queued_rows <= 4
    gate.opened.set()
    thread.join(30)
    assert done.is_set()
    assert all(not future.result(30).error for future in (*first, *rest))


def test_a_callback_of_a_future_may_submit_more_even_when_the_queue_is_full(make_engine):
    engine = make_engine(
        EngineConfig(linger_s=0.0, max_queued_rows=1), small_policy(max_num_seqs=1)
    )
    more = []
    seen = threading.Event()

    def submit_more(_future) -> None:
        more.extend(engine.submit([[7], [8], [9]], GREEDY))
        seen.set()

    (future,) = engine.submit([[1]], GREEDY)
    future.add_done_callback(submit_more)
    assert seen.wait(30)
    assert all(not row.result(30).error for row in more)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, ValueError])
def test_what_a_callback_of_a_future_raises_does_not_end_the_engine(make_engine, caplog, error):
    def leave(_future) -> None:
        raise error

    gate = Gate()
    engine = make_engine(before=gate)
    futures = engine.submit([[row] for row in range(4)], GREEDY)
    futures[1].add_done_callback(leave)
    gate.opened.set()
    assert [list(f.result(30).token_ids) for f in futures] == [
        expected_tokens([row], 4) for row in range(4)
    ]
    assert list(engine.generate([[7]], GREEDY)[0].token_ids) == expected_tokens([7], 4)
    assert error.__name__ in caplog.text


def test_what_a_callback_of_a_future_raises_does_not_keep_other_rows_from_failing(make_engine):
    def leave(_future) -> None:
        raise SystemExit

    gate = Gate()
    engine = make_engine(before=gate)
    futures = engine.submit([[row] for row in range(4)], GREEDY)
    for future in futures[:2]:
        future.add_done_callback(leave)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._is_closing:
        time.sleep(0.001)
    gate.opened.set()
    closing.join(30)
    for future in futures:
        with pytest.raises(ExecutionError, match="closed"):
            future.result(0)


def test_a_failed_pass_fails_pending_and_later_rows_with_its_cause(make_engine):
    def fail(inputs) -> None:
        raise RuntimeError("kernel exploded")

    engine = make_engine(before=fail)
    (future,) = engine.submit([[1]], GREEDY)
    with pytest.raises(ExecutionError, match="RuntimeError: kernel exploded") as caught:
        future.result(30)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ExecutionError, match="kernel exploded"):
        engine.generate([[2]], GREEDY)
    engine.close()  # by another call, while this one was on its way
    with pytest.raises(ExecutionError, match="RuntimeError: kernel exploded"):
        engine.submit([[1]], GREEDY)


def test_a_stuck_pass_fails_all_rows(make_engine):
    gate = Gate()
    engine = make_engine(EngineConfig(linger_s=0.0, watchdog_s=0.2), before=gate)
    futures = engine.submit([[1], [2]], GREEDY)
    for future in futures:
        with pytest.raises(ExecutionError, match="counts as stuck; raise watchdog_s"):
            future.result(30)
    with pytest.raises(ExecutionError, match="counts as stuck"):
        engine.generate([[3]], GREEDY)
    gate.opened.set()


def test_a_stuck_engine_closes_without_waiting_for_ever(make_engine, caplog):
    gate = Gate()
    engine = make_engine(EngineConfig(linger_s=0.0, watchdog_s=0.05), before=gate)
    with pytest.raises(ExecutionError):
        engine.generate([[1]], GREEDY)
    engine.close()
    assert "stuck; all threads:" in caplog.text
    assert "test_a_stuck_engine_closes_without_waiting_for_ever" in caplog.text
    gate.opened.set()


def test_closing_while_rows_run_fails_them_and_joins_all_threads(make_engine):
    gate = Gate()
    before = set(threading.enumerate())
    engine = make_engine(before=gate)
    futures = engine.submit([[row] for row in range(20)], GREEDY)
    assert gate.entered.wait(30)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.opened.set()
    closer.join(30)
    for future in futures[1:]:
        with pytest.raises(ExecutionError, match="closed before this row was finished"):
            future.result(30)
    assert set(threading.enumerate()) <= before


def test_closing_frees_a_submit_that_waits_for_a_place(make_engine):
    gate = Gate()
    config = EngineConfig(linger_s=0.0, max_queued_rows=1)
    engine = make_engine(config, small_policy(max_num_seqs=1), gate)
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(engine.submit, [[row] for row in range(9)], GREEDY)
        assert gate.entered.wait(30)
        closer = threading.Thread(target=engine.close)
        closer.start()
        gate.opened.set()
        futures = submitted.result(30)
        closer.join(30)
    with pytest.raises(ExecutionError, match="closed"):
        futures[-1].result(30)


def test_submitting_to_a_closed_engine_fails_the_rows(make_engine):
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(ExecutionError, match="closed"):
        engine.generate([[1]], GREEDY)


def test_an_idle_engine_starts_at_once_when_all_callers_are_inside(make_engine):
    engine = make_engine(EngineConfig(linger_s=1000.0, expected_calls=2))
    engine.enter_call()
    (first,) = engine.submit([[1]], GREEDY)
    time.sleep(0.1)
    assert not first.done()
    engine.enter_call()
    assert first.result(30).num_generated_tokens == 4
    engine.leave_call()
    (second,) = engine.submit([[2]], GREEDY)
    time.sleep(0.1)
    assert not second.done()
    engine.expected_calls = 1
    second.result(30)


def test_an_idle_engine_starts_when_the_pool_is_full(make_engine):
    engine = make_engine(EngineConfig(linger_s=1000.0), small_policy(max_num_seqs=3))
    futures = engine.submit([[1], [2]], GREEDY)
    time.sleep(0.1)
    assert not any(future.done() for future in futures)
    futures += engine.submit([[3]], GREEDY)
    assert all(future.result(30).num_generated_tokens == 4 for future in futures)


def test_statistics_count_rows_tokens_and_passes(make_engine):
    engine = make_engine()
    engine.generate([[1, 2, 3], None], GREEDY)
    stats = engine.stats()
    assert (stats.num_finished_rows, stats.num_error_rows) == (2, 1)
    assert (stats.num_generated_tokens, stats.num_computed_tokens) == (4, 6)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (3, 0)
    assert (stats.num_slots, stats.num_kv_blocks) == (
        engine.policy.max_num_seqs,
        engine.policy.num_kv_blocks,
    )
    assert (stats.num_steps, stats.num_live_sequences, stats.num_queued_rows) == (4, 0, 0)
    assert stats.num_free_blocks == engine.policy.num_kv_blocks


def test_an_engine_that_nobody_closed_is_closed_when_the_interpreter_ends(tmp_path):
    script = f"""
import pathlib
from tests.unit.engine.fakes import FakeRunner, fake_parts, small_policy, write_byte_tokenizer
from raymoe.engine.engine import Engine
directory = write_byte_tokenizer(pathlib.Path({str(tmp_path)!r}))
runner = FakeRunner(64)
runner.close = lambda: print("released")
engine = Engine(fake_parts(runner, small_policy(), directory=directory))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "released\n"


def test_a_closed_engine_lets_go_of_its_model_whatever_a_notebook_keeps(make_engine):
    gc.disable()  # a notebook that runs nothing collects nothing
    try:
        for fails in (False, True):

            def fail(inputs, fails=fails) -> None:
                if fails and len(inputs.token_ids) > 2:
                    raise RuntimeError("kernel exploded")

            engine = make_engine(before=fail)
            runner = weakref.ref(engine._parts.runner)
            (kept,) = engine.generate([[1]], GREEDY | {"n": 2, "logprobs": 1})
            futures = engine.submit([[1, 2, 3]], GREEDY)
            error = futures[0].exception(30)  # as sys.last_value has it
            assert (error is not None) == fails
            del fail
            engine.close()
            assert runner() is None
            assert kept.outputs[1].token_ids
            assert engine.stats().num_finished_rows == 2 - fails
            assert engine.policy.max_num_seqs == 8
            assert "closed" in repr(engine)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate([[1]], GREEDY),
        lambda engine: engine.submit([[1]], GREEDY),
        lambda engine: engine.score([None], [[1, 2]]),
        lambda engine: asyncio.run(engine.agenerate([[1]], GREEDY)),
        lambda engine: engine.decode([[1]]),
        lambda engine: engine.token_bytes([1]),
        lambda engine: engine.reset_prefix_cache(),
    ],
)
def test_a_closed_engine_says_that_it_is(make_engine, use):
    engine = make_engine()
    engine.close()
    with pytest.raises(ExecutionError, match="closed and its model is no longer in memory; load"):
        use(engine)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperatur": 0}, "did you mean 'temperature'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop_token_ids": [100_000]}, "the vocabulary has ids"),
        (7, "sampling_params is a int"),
    ],
)
def test_parameters_of_a_whole_call_that_cannot_be_used_raise(make_engine, params, message):
    engine = make_engine()
    with pytest.raises(ConfigError, match=message):
        engine.generate([[1], [2]], params)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(engine.agenerate([[1]], params))
    good, bad = engine.generate([[1], [2]], [None, params])
    assert (good.error, good.finish_reason) == ("", "length")
    assert re.search(message, bad.error)


def test_the_samples_of_a_row_are_its_outputs(make_engine):
    (one,) = make_engine().generate([[1, 2]], GREEDY | {"n": 3, "logprobs": 0})
    assert [output.token_ids for output in one.outputs] == [tuple(expected_tokens([1, 2], 4))] * 3
    assert [len(output.logprobs) for output in one.outputs] == [4] * 3
    assert {output.finish_reason for output in one.outputs} == {"length"}
    assert one.outputs[0] is one


def test_calls_that_are_awaited_at_the_same_time_share_steps(make_engine):
    engine = make_engine(EngineConfig(linger_s=1000.0))
    prompts = [[i, i + 1] for i in range(8)]

    async def ask():
        return await asyncio.gather(*(engine.agenerate([one], GREEDY) for one in prompts))

    answers = asyncio.run(ask())
    assert [list(one.token_ids) for (one,) in answers] == [expected_tokens(p, 4) for p in prompts]
    assert engine.stats().num_steps == 4
    assert asyncio.run(engine.agenerate([], GREEDY)) == []


@pytest.mark.parametrize("num_rows", [5, 300])  # more than fit: the call still submits
def test_cancelling_an_awaited_call_drops_its_rows(make_engine, num_rows):
    gate = Gate()
    config = EngineConfig(linger_s=0.0, max_queued_rows=16)
    engine = make_engine(config, before=gate)

    async def ask():
        call = asyncio.create_task(engine.agenerate([[1, 2]] * num_rows, GREEDY))
        await asyncio.to_thread(gate.entered.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.opened.set()
        return await engine.agenerate([[7]], GREEDY)

    (other,) = asyncio.run(ask())
    assert list(other.token_ids) == expected_tokens([7], 4)
    stats = engine.stats()
    assert (stats.num_queued_rows, stats.num_live_sequences, stats.num_finished_rows) == (0, 0, 1)
    assert stats.num_free_blocks == stats.num_kv_blocks


def test_an_engine_that_fails_or_closes_fails_awaited_calls(make_engine):
    def fail(inputs) -> None:
        raise RuntimeError("kernel exploded")

    with pytest.raises(ExecutionError, match="kernel exploded"):
        asyncio.run(make_engine(before=fail).agenerate([[1], [2]], GREEDY))
    gate = Gate()
    engine = make_engine(before=gate)

    async def ask():
        call = asyncio.create_task(engine.agenerate([[1]] * 20, GREEDY))
        await asyncio.to_thread(gate.entered.wait, 30)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.05)
        gate.opened.set()
        with pytest.raises(ExecutionError, match="closed"):
            await call
        await closing

    asyncio.run(ask())
