"""Reasoning and tool calls in columns of their own: from operator and journal alike."""

import json

import pyarrow as pa
import pytest

from raymoe.chat.parser import ChatParser
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.generator import MoEGenerator
from raymoe.data.manifest import FILE_NAME, Manifest, as_bytes
from raymoe.data.rows import RowReader
from raymoe.engine.answers import split_generation
from raymoe.engine.identity import ModelIdentity
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import Chat
from raymoe.errors import ConfigError
from raymoe.output_schema import generation_params
from tests.tiny import CHAT_TEMPLATE, make_checkpoint

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("chat") / "model")
    template = CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    (directory / "chat_template.jinja").write_text(template + "{# <tool_call> #}")
    return directory


def table() -> pa.Table:
    return pa.table({
        "prompt": [None, "text"],
        "messages": [json.dumps(MESSAGES), None],
    })  # fmt: skip


@pytest.mark.slow
def test_columns_are_the_same_from_the_journal_and_off_by_choice(model, tmp_path):
    options = {"sampling_params": {"max_tokens": 6, "temperature": 0.0}, "has_choices": True}
    answers = []
    for _ in range(2):
        generator = MoEGenerator(model, **options, journal_dir=tmp_path / "journal")
        answers.append(generator(table()).to_pylist())
        generator.close()
    assert answers[0] == answers[1]
    chat, plain = answers[0]
    off = MoEGenerator(model, **options, reasoning_parser="none")
    whole = off(table())
    off.close()
    assert "reasoning_text" not in whole.column_names
    first, second = whole["generated_text"].to_pylist()
    # The prompt has opened the reasoning, and nothing has ended it.
    assert (chat["reasoning_text"], chat["generated_text"]) == (first.strip("\n"), "")
    assert chat["choices"][0]["reasoning_text"] == chat["reasoning_text"]
    assert (plain["reasoning_text"], plain["generated_text"]) == (None, second)
    assert chat["num_generated_tokens"] == len(chat["generated_tokens"]) == 6


@pytest.mark.parametrize(("before", "now"), [("auto", "none"), ("mistral", "think")])
def test_a_journal_of_another_parser_is_refused(model, tmp_path, before, now):
    params, config = generation_params({"max_tokens": 6}, None), EngineConfig()
    manifest = Manifest.of(ModelIdentity.of(model), params, config, reasoning_parser=before)
    (tmp_path / FILE_NAME).write_bytes(as_bytes(manifest))
    is_now = {"think": "auto"}.get(now, now)  # the template leads to it
    with pytest.raises(ConfigError, match=f"reasoning_parser was '{before}', is '{is_now}'"):
        MoEGenerator(
            model, sampling_params=params, engine_config=config, reasoning_parser=now,
            journal_dir=tmp_path,
        )  # fmt: skip


def test_marks_that_are_special_tokens_are_decoded_and_cut():
    parser = ChatParser(reasoning="mistral", tool_calls="mistral")
    texts = {
        (): "",
        (1, 2, 3): "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}",
        (1, 2, 3, 4): "late</s>",
    }
    generation = Generation(text="abf{}", token_ids=(1, 2, 3, 4), prompt_end="[/INST]")
    request = RowReader(defaults=SamplingParams()).read(
        pa.table({"messages": [json.dumps(MESSAGES)]})
    )[0]
    request = type(request)(
        prompt=Chat(MESSAGES, TOOLS), sampling_params=request.sampling_params, column="messages"
    )
    done = split_generation(
        parser, generation, request.prompt, request.sampling_params,
        decode=lambda each: [texts[tuple(one)] for one in each],
    )  # fmt: skip
    assert (done.reasoning, done.text) == ("a", "b")
    assert [(call.name, call.arguments) for call in done.tool_calls] == [("f", "{}")]


def test_marked_text_is_cut_at_the_stop_string_that_ended_the_row():
    parser = ChatParser(reasoning="mistral")
    texts = {
        (): "",
        (1,): "[THINK]a;",
        (1, 2): "[THINK]a;[/THINK]b",
        (1, 2, 3): "[THINK]a;[/THINK]b;c",
    }
    generation = Generation(text="", token_ids=(1, 2, 3), prompt_end="[/INST]")
    reader = RowReader(defaults=SamplingParams(max_tokens=9, min_tokens=1, stop=";"))
    (request,) = reader.read(pa.table({"messages": [json.dumps(MESSAGES)]}))
    done = split_generation(
        parser, generation, request.prompt, request.sampling_params,
        decode=lambda each: [texts[tuple(one)] for one in each],
    )  # fmt: skip
    assert (done.reasoning, done.text) == ("a;", "b")
