"""Rows that reason: schemas, grammars and stop strings see the answer alone."""

import dataclasses
import json

import pytest
import torch

from raymoe.chat.reasoning import HARMONY, find_answer, start_of_text
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.engine.reasoning_state import ReasoningState
from raymoe.engine.tokenizer import Chat
from tests.unit.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeRunner,
    fake_parts,
    small_policy,
    write_byte_tokenizer,
)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
# The thoughts end, and what has to be in the answer comes in no order that a schema knows.
SAID = "7;{</think>\n\n6;x"


class Speaker(FakeRunner):
    """A model that says `SAID` after a prompt; where it may not, whatever comes first."""

    def _logits(self, context) -> torch.Tensor:
        tokens = context[[0 <= token < 256 for token in context]]
        after = bytes(tokens.tolist()).rpartition(b"^")[2].decode(errors="replace")
        logits = -torch.arange(VOCAB_SIZE) / VOCAB_SIZE
        said = SAID.partition("</think>")[2] if "</think>" in after else SAID
        after = after.rpartition("</think>")[2].removeprefix("<think>\n")
        wanted = said[len(after) :] if said.startswith(after) else ""
        logits[ord(wanted[0]) if wanted else EOS] = 5
        return logits


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    directory = write_byte_tokenizer(tmp_path_factory.mktemp("reasoning"))
    path = directory / "tokenizer_config.json"
    template = "{{ messages[0].content }}^{{ start }}{# <think> </think> #}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    engines = []

    def make(**sizes):
        policy = small_policy(**sizes)
        parts = fake_parts(Speaker(policy.num_kv_blocks), policy, directory=directory)
        engines.append(Engine(dataclasses.replace(parts), EngineConfig(linger_s=0.0)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


def chat(start):
    return Chat([{"role": "user", "content": "hi"}], (), {"start": start})


@pytest.mark.parametrize(
    "form", [[], [" ", "<|constrain|>", "json"], ["<|constrain|>", "json"], [" json"]]
)
def test_the_answer_of_gpt_oss_begins_after_its_header_whatever_that_says(form):
    state = ReasoningState(start_of_text(HARMONY, "<|start|>assistant"))
    thoughts = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "final",
        "<|end|>",
        "<|start|>",
        "assistant",
    ]
    header, seen = ["<|channel|>", "final", *form, "<|message|>"], []
    for number, text in enumerate([*thoughts, *header]):
        state.push(number)
        state.find("", text)
        seen.append(state.is_open)
    assert seen == [True] * (len(seen) - 1) + [False]
    text = "".join([*thoughts, *header])
    assert find_answer(HARMONY, text + "{;}", is_open=None, stop=[";"]) == len(text)
    assert find_answer(HARMONY, text[:-1], is_open=None, stop=[";"]) is None


STARTS = {"opened": "<think>\n", "closed": "<think>\n\n</think>\n\n", "said by the model": ""}


@pytest.mark.parametrize("start", STARTS)
def test_the_value_is_that_of_the_answer(engine, start):
    params = {"max_tokens": 60, "temperature": 0.0}
    params["structured_outputs"] = {"disable_any_whitespace": True}
    (generation,) = engine.generate([chat(STARTS[start])], params, output_schema=SCHEMA)
    assert generation.parsed == json.loads(generation.text)
    assert generation.parsed_error == ""
    assert generation.reasoning == ("7;{" if start == "opened" else None)


def test_the_limit_within_the_reasoning_is_named(engine):
    (generation,) = engine.generate(
        [chat("<think>\n")], {"max_tokens": 2, "temperature": 0.0}, output_schema=SCHEMA
    )
    assert (generation.reasoning, generation.text, generation.parsed) == ("7;", "", None)
    assert generation.parsed_error.startswith("cut by max_tokens within the reasoning")


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [
        ("<think>\n", ";", "7;{</think>\n\n6"),
        ("<think>\n", "\n\n", SAID),
        ("<think>\n", "</think>", "7;{"),  # who stops there wants the reasoning alone
        ("", ";", "7"),
        ("</think>", ";", "\n\n6"),
    ],
)
def test_stop_strings_are_those_of_the_answer(engine, start, stop, text):
    params = {"max_tokens": 60, "temperature": 0.0, "stop": [stop]}
    (generation,) = engine.generate([chat(start)], params)
    assert (generation.text, generation.finish_reason) == (text, "stop")


def test_stop_tokens_count_within_the_reasoning(engine):
    params = {"max_tokens": 60, "temperature": 0.0, "stop_token_ids": [ord("{")], "stop": ["x"]}
    (generation,) = engine.generate([chat("<think>\n")], params)
    assert (generation.text, generation.finish_reason) == ("7;", "stop")


def test_rows_that_lose_their_place_go_on_where_they_were(make_engine, engine):
    params = [
        {"max_tokens": 60, "temperature": 0.0, "structured_outputs": {"regex": "[0-9]{24}"}, "n": n}
        for n in (1, 2, 3, 1, 2, 3)
    ]
    prompts = [chat("<think>\n") for _ in params]
    alone = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    crowded = make_engine(num_kv_blocks=8, max_num_seqs=6)
    crowded.generate([[1]] * 20, {"max_tokens": 2})  # it now expects short rows
    together = crowded.generate(prompts, params)
    assert crowded.stats().num_preemptions > 0
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for generation in together:
        for sample in generation.outputs:
            thoughts, _, answer = sample.text.partition("</think>")
            assert (thoughts, len(answer), answer.isdecimal()) == ("7;{", 24, True)
