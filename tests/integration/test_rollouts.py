"""Several calls of the model for each row: what they give, and what one row costs the others."""

import asyncio
import contextlib
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from raymoe.data import rollouts
from raymoe.data.generator import MoEGenerator
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import Chat
from raymoe.errors import ConfigError, ExecutionError
from raymoe.plan.policy import Policy
from tests.tiny import make_checkpoint

POLICY = Policy(
    max_num_seqs=16, max_num_batched_tokens=256, max_prefill_chunk_tokens=128, num_kv_blocks=256
)
CONFIG = {"dtype": "float32", "device": "cpu", "policy": POLICY, "linger_s": 0.0}
PARAMS = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
FIXED = {
    "num_calls": pa.int32(),
    "num_input_tokens": pa.int32(),
    "num_cached_tokens": pa.int32(),
    "num_generated_tokens": pa.int32(),
    "__inference_error__": pa.string(),
}
NUM_TURNS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def generator(model, rollout, **options):
    made = MoEGenerator(
        model, **{"sampling_params": PARAMS, "engine_config": CONFIG, **options}, rollout=rollout
    )
    with contextlib.closing(made):
        yield made


def table_of(num_rows):
    return pa.table({"id": range(num_rows), "question": [f"row {i % 5}" for i in range(num_rows)]})


def without_counts(table):
    """What does not depend on the rows beside each."""
    return table.drop_columns(["num_cached_tokens"]).to_pylist()


async def converse(row, generate):
    text, tokens = row["question"], []
    for turn in range(NUM_TURNS):
        answer = await generate(text)
        tokens.append(answer.token_ids)
        text += f"{answer.text}\n{turn}: "
    votes = await asyncio.gather(*(generate(text, max_tokens=3) for _ in range(4)))
    return {"text": text, "tokens": tokens, "votes": [vote.token_ids for vote in votes]}


def test_rows_give_alone_what_they_give_among_others(model):
    table = table_of(12)
    with generator(model, converse) as together:
        whole = without_counts(together(table))
    with generator(model, converse) as alone, ThreadPoolExecutor(3) as threads:
        parts = [table.slice(i, 1) for i in reversed(range(12))]
        found = [row for part in threads.map(alone, parts) for row in without_counts(part)]
    assert found[::-1] == whole
    assert len({tuple(map(tuple, row["tokens"])) for row in whole}) == 12
    assert all(len({*map(tuple, row["votes"])}) > 1 for row in whole)
    assert {row["num_calls"] for row in whole} == {NUM_TURNS + 4}


def test_a_call_gives_what_the_same_call_gives_outside_of_a_rollout(model):
    async def ask(row, generate):
        first = await generate(row["question"], temperature=0.0, logprobs=1)
        chat = [{"role": "user", "content": first.text}]
        second = await generate(chat, temperature=0.0, max_tokens=4)
        third = await generate([5, 6, 7], temperature=0.0, n=2)
        return {
            "tokens": [first.token_ids, second.token_ids, *(one.token_ids for one in third.outputs)]
        }

    with generator(model, ask) as made:
        (row,) = made(table_of(1)).to_pylist()
        engine, greedy = made._engine, {**PARAMS, "temperature": 0.0}
        (first,) = engine.generate(["row 0"], greedy)
        chat = [{"role": "user", "content": first.text}]
        (second,) = engine.generate([chat], {**greedy, "max_tokens": 4})
        (third,) = engine.generate([[5, 6, 7]], greedy)
    assert row["tokens"] == [list(o.token_ids) for o in (first, second, third, third)]
    assert row["num_generated_tokens"] == 6 + 4 + 2 * 6
    assert row["num_input_tokens"] == sum(o.num_input_tokens for o in (first, second, third))


def test_calls_of_all_rows_share_steps(model):
    with generator(model, converse) as made:
        made(table_of(16))
        num_steps = made._engine.stats().num_steps
    # Three turns of six tokens and one of three, each with a step of its own for prompts, and
    # some more where rows come one after the other; 16 rows alone take 16 * 21.
    assert num_steps < 16 * 21 / 4


def test_prefixes_of_earlier_turns_are_found_again(model):
    async def talk(row, generate):
        text = row["question"] * 12  # two blocks
        for _ in range(3):
            text += (await generate(text, max_tokens=40)).text
        return {"text": text}

    with generator(model, talk) as made:
        (row,) = made(table_of(1)).to_pylist()
    assert row["num_cached_tokens"] > 0.4 * row["num_input_tokens"]


async def ask(row, generate):
    return {"answer": (await generate("a")).text, "score": 1}


async def ask_wrongly(row, generate):
    with contextlib.suppress(ConfigError):
        await generate("a", max_token=1)
    return {"answer": "caught", "score": 0.5}


async def ask_for_ever(row, generate):
    while True:
        with contextlib.suppress(Exception):
            await generate("a")


async def ask_for_much(row, generate):
    for _ in range(4):
        await generate("b", max_tokens=30)


async def ask_too_long(row, generate):
    await generate("x" * 600)


async def ask_a_message(row, generate):
    await generate({"role": "user", "content": "a"})


async def fail(row=None, generate=None):
    raise KeyError("price")


async def fail_beside_a_call(row, generate):
    await asyncio.gather(generate("a", max_tokens=400), asyncio.sleep(0), fail())


async def fail_in_a_group(row, generate):
    async with asyncio.TaskGroup() as group:
        group.create_task(generate("a", max_tokens=400))
        group.create_task(generate("x" * 600))


async def leave_python(row, generate):
    raise SystemExit(3)


async def cancel_itself(row, generate):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def wait_for_ever(row, generate):
    await asyncio.sleep(3600)


def returns(value):
    async def plain(row, generate):
        return value

    return plain


CASES = [
    (ask, ""),
    (fail, r"KeyError: while running turns at .*s\.py:\d+, after 0 calls of generate: 'price'"),
    (returns([1]), r"TypeError: turns returned \[1\]; it takes a dict of columns by name"),
    (returns({"question": 1}), "ValueError: turns returned 'question', which the row or its outp"),
    (returns({"answer": b"a"}), r"TypeError: .* column 'answer' that cannot be kept: .*bytes is "),
    (returns({"answer": [1]}), "TypeError: what the rollout returned does not fit columns .*answ"),
    (ask_for_ever, "RolloutLimitError: .* the row has made 5 calls of at most 5 and asks for mor"),
    (ask_too_long, "ConfigError: while .*, after 1 calls of generate: the prompt has 601 tokens"),
    (ask_wrongly, ""),
    (wait_for_ever, r"RolloutLimitError: .* waited for 0\.3 s besides its 0 calls of the model"),
    (fail_beside_a_call, r"KeyError: while running turns at .*, after 1 calls .*: 'price'"),
    (fail_in_a_group, "ConfigError: while .* turns, after 2 calls .*: the prompt has 601 to"),
    (leave_python, "SystemExit: while running .*: 3"),
    (cancel_itself, "CancelledError: .*the function cancelled itself"),
    (ask_for_much, "RolloutLimitError: .* the row has generated 90 tokens of at most 80"),
    (returns({"num_calls": 3}), "ValueError: .*returned 'num_calls', which"),
    (ask_a_message, "TypeError: .*generate takes a text, token ids or a list of messages, not d"),
    (returns({}), ""),
]


async def turns(row, generate):
    return await CASES[row["id"]][0](row, generate)


def test_what_a_function_does_costs_its_own_row_only(model):
    limits = {"calls": 5, "tokens": 80, "seconds": 0.3}
    with generator(model, turns, rollout_limits=limits) as made:
        out = made(table_of(len(CASES)))
        again = made(table_of(2).slice(1))  # an error row alone
        num_live = made._engine.stats().num_live_sequences
    for error, (_, expected) in zip(out["__inference_error__"].to_pylist(), CASES, strict=True):
        assert re.match(expected, error) if expected else not error, error
    assert out.schema == again.schema
    assert {name: out.schema.field(name).type for name in FIXED} == FIXED
    assert out.schema.field("score").type == pa.float64()
    assert [one for one in out["score"].to_pylist() if one is not None] == [1.0, 0.5]
    assert num_live == 0  # of calls that were left behind


def test_a_row_may_call_tools_in_threads_and_cancel_calls(model):
    async def wait(row, generate):
        await asyncio.to_thread(time.sleep, 0.01)
        try:
            await asyncio.wait_for(generate("a", max_tokens=500), 0.01)
        except TimeoutError:
            return {"state": "late", "text": (await generate("a")).text}

    with generator(model, wait, rollout_limits={"seconds": 30}) as made:
        rows = made(table_of(3)).to_pylist()
        stats = made._engine.stats()
    assert [row["state"] for row in rows] == ["late"] * 3
    assert stats.num_live_sequences == 0


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAYS = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "It is 1."]


def test_calls_of_tools_come_apart_from_the_text(model, monkeypatch):
    asked = []

    async def say(prompts, params, *, row_keys):
        asked.extend(prompts)
        return [Generation(text=SAYS[len(asked) - 1], prompt_end="assistant: ")]

    async def use_tool(row, generate):
        messages = [{"role": "user", "content": "1 + 0"}]
        first = await generate(messages, tools=[TOOL])
        (call,) = first.tool_calls
        messages.append({"role": "tool", "content": call.arguments})
        return {"call": call.name, "answer": (await generate(messages)).text, "text": first.text}

    with generator(model, use_tool, tool_call_parser="hermes") as made:
        monkeypatch.setattr(made._engine, "agenerate", say)
        (row,) = made(table_of(1)).to_pylist()
    assert row["__inference_error__"] == ""
    assert (row["call"], row["answer"], row["text"]) == ("add", "It is 1.", "")
    question = {"role": "user", "content": "1 + 0"}
    assert asked[0] == Chat([question], [TOOL])
    assert asked[1] == [question, {"role": "tool", "content": '{"a": 1}'}]


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "closed"])
def test_an_engine_that_ends_makes_no_row_whatever_the_function_catches(model, fails):
    has_begun = threading.Event()

    async def catch(row, generate):
        while True:
            try:
                has_begun.set()
                await generate("a", max_tokens=500)
            except Exception:
                return {"state": "caught"}

    made = MoEGenerator(model, sampling_params=PARAMS, engine_config=CONFIG, rollout=catch)
    with contextlib.closing(made), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(made, table_of(100))  # more than are submitted at once
        has_begun.wait()
        if fails:
            made._engine._give_up(1.0)
        else:
            made.close()
        with pytest.raises(ExecutionError, match="stuck" if fails else "generator was closed"):
            answer.result()


def test_a_function_that_holds_the_loop_is_named_once(model, monkeypatch, caplog):
    monkeypatch.setattr(rollouts, "BLOCKED_AFTER_S", 0.05)

    async def hold(row, generate):
        time.sleep(0.5)
        return {}

    with caplog.at_level(logging.WARNING, "raymoe.data.rollouts"), generator(model, hold) as made:
        made(table_of(2))
    (record,) = [one for one in caplog.records if one.name == "raymoe.data.rollouts"]
    assert "await asyncio.to_thread" in record.getMessage()
    assert "time.sleep(0.5)" in record.getMessage()


def test_a_journal_keeps_finished_rows_and_tries_others_again(model, tmp_path):
    called, broken = [], {2, 5}

    async def once(row, generate):
        called.append(row["id"])
        if row["id"] in broken:
            raise OSError("no connection")
        answers = [await generate(row["question"]) for _ in range(2)]
        return {"texts": [answer.text for answer in answers], "score": row["id"] / 2}

    options = {"id_column": "id", "journal_dir": tmp_path / "journal"}
    with generator(model, once, **options) as made:
        first = made(table_of(8)).to_pylist()
    broken.clear()
    called.clear()
    reordered = table_of(9).select(["question", "id"])
    with generator(model, once, **options) as made:
        second = made(reordered).to_pylist()
    assert sorted(called) == [2, 5, 8]
    assert [{**row} for row in second if row["id"] not in called] == [
        {**row} for row in first if row["id"] not in {2, 5}
    ]
    assert {row["__inference_error__"] for row in second} == {""}

    with pytest.raises(ConfigError, match=r"rollout was 'test_a_.*, is 'converse'"):
        MoEGenerator(model, sampling_params=PARAMS, rollout=converse, **options)
