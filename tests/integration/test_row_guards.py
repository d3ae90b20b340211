"""Whatever raises after generation costs its own row only: an error row that names the step."""

import json
import logging

import pyarrow as pa
import pytest

from raymoe.chat import parser as chat_parser
from raymoe.data import columns, journal
from raymoe.data.generator import MoEGenerator
from raymoe.engine import engine as engine_module
from raymoe.engine.answers import AnswerReader
from raymoe.engine.request import Request
from raymoe.engine.tokenizer import Tokenizer
from raymoe.output_schema import OutputSchema
from tests.tiny import CHAT_TEMPLATE, make_checkpoint

CONFIG = {"host_memory_bytes": 3 * 2**30, "dtype": "float32"}
PARAMS = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ERROR = "__inference_error__"
BAD = 2  # the row of each batch in whose work something raises


@pytest.fixture(autouse=True)
def no_logs(caplog):
    """Keep tracebacks with lone surrogates out of test reports, which pytest-xdist cannot send."""
    caplog.set_level(logging.CRITICAL + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("guards") / "model")
    marks = "{% if tools %}{{ tools }}{% endif %}{# </think> <tool_call> #}"
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE + marks)
    return directory


def make(model, **options):
    config = {"sampling_params": PARAMS, "engine_config": CONFIG, "has_choices": True}
    return MoEGenerator(model, **config, tools_column="tools", id_column="id", **options)


@pytest.fixture(scope="module")
def generator(model):
    generator = make(model)
    yield generator
    generator.close()


def batch() -> pa.Table:
    chats = [json.dumps([{"role": "user", "content": word}]) for word in "abcd"]
    return pa.table({"id": range(4), "messages": chats, "tools": [json.dumps(TOOLS)] * 4})


@pytest.fixture(scope="module")
def good(generator):
    rows = generator(batch()).to_pylist()
    assert not any(row[ERROR] for row in rows)
    assert len({row["generated_text"] for row in rows}) == 4
    return rows


def raise_for(monkeypatch, owner, name, is_bad) -> None:
    """Let a function raise where it is given the bad row, alone or among others."""
    original = getattr(owner, name)

    def broken(*args, **kwargs):
        if is_bad(*args, **kwargs):
            raise RuntimeError(f"{name} broke with \ud800")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def tokens_of(table: pa.Table) -> list:
    """Without log probabilities, which depend on the batch to the last digit."""
    return table.select(["id", "generated_text", "generated_tokens", ERROR]).to_pylist()


def assert_only_the_bad_row_is_lost(rows, good, words) -> None:
    assert rows[:BAD] + rows[BAD + 1 :] == good[:BAD] + good[BAD + 1 :]
    bad = rows[BAD]
    assert (bad["id"], bad["finish_reason"]) == (BAD, "error")
    assert bad[ERROR].startswith("RuntimeError: ")
    assert words in bad[ERROR]
    assert len(bad["choices"]) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reasoning.opens_reasoning", "while splitting off the reasoning"),
        ("reasoning.split_reasoning", "while splitting off the reasoning"),
        ("tool_calls.split_tool_calls", "while finding tool calls"),
    ],
)
def test_splitting_an_answer(generator, good, monkeypatch, name, words):
    module, function = name.split(".")
    calls = iter(range(100))
    raise_for(
        monkeypatch, getattr(chat_parser, module), function, lambda *_, **__: next(calls) == BAD
    )
    assert_only_the_bad_row_is_lost(generator(batch()).to_pylist(), good, words)


def test_reading_the_value_of_an_answer(generator, good, monkeypatch):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    monkeypatch.setattr(generator, "_answers", AnswerReader(OutputSchema.of(schema)))
    calls = iter(range(100))
    raise_for(monkeypatch, OutputSchema, "parse", lambda *_: next(calls) == BAD)
    rows = generator(batch()).to_pylist()
    assert_only_the_bad_row_is_lost(rows, good, "while reading an answer: parse broke")
    monkeypatch.setattr(
        engine_module, "_read_schema", lambda *args: (OutputSchema.of(schema), *args[1:])
    )
    calls = iter(range(100))
    answers = generator._engine.generate(["a"] * 4, PARAMS, output_schema=schema)
    assert [bool(one.error) for one in answers] == [i == BAD for i in range(4)]


def test_decoding_an_answer(generator, good, monkeypatch):
    tokens = good[BAD]["generated_tokens"]
    raise_for(
        monkeypatch, Tokenizer, "_decode_batch",
        lambda _, sequences, *__, **___: any(list(one) == tokens for one in sequences),
    )  # fmt: skip
    rows = generator(batch()).to_pylist()
    assert_only_the_bad_row_is_lost(rows, good, "_decode_batch broke")


def test_decoding_for_stop_strings(generator, good, monkeypatch):
    tokens = good[BAD]["generated_tokens"]
    raise_for(
        monkeypatch, Tokenizer, "_decode_batch",
        lambda _, sequences, *__, **___: any(list(one) == tokens[:3] for one in sequences),
    )  # fmt: skip
    table = batch().append_column("sampling_params", [['{"stop": ["never seen"]}'] * 4])
    rows = tokens_of(generator(table))
    assert "_decode_batch broke" in rows.pop(BAD)[ERROR]
    assert rows == tokens_of(pa.Table.from_pylist(good[:BAD] + good[BAD + 1 :]))


def test_joining_the_samples_of_a_row(generator, good, monkeypatch):
    original = Request.generation.fget

    def broken(request):
        generation = original(request)
        if list(generation.token_ids) == good[BAD]["generated_tokens"]:
            raise RuntimeError("joining broke")
        return generation

    monkeypatch.setattr(Request, "generation", property(broken))
    assert_only_the_bad_row_is_lost(generator(batch()).to_pylist(), good, "joining broke")


@pytest.mark.parametrize("name", sorted(columns._CELLS.keys() - {columns.ERROR_COLUMN}))
def test_filling_a_column(generator, good, monkeypatch, name):
    if name not in generator(batch().slice(0, 0)).column_names:
        return  # `generated_texts` needs more samples
    original, tokens = columns._CELLS[name], good[BAD]["generated_tokens"]

    def broken(generation):
        if list(generation.token_ids) == tokens:
            raise RuntimeError("no cell")
        return original(generation)

    monkeypatch.setitem(columns._CELLS, name, broken)
    rows = generator(batch()).to_pylist()
    assert_only_the_bad_row_is_lost(rows, good, f"while filling the column {name!r}: no cell")


@pytest.mark.parametrize("name", ["text", "reasoning", "tool_calls"])
def test_a_text_that_utf_8_cannot_hold(generator, good, monkeypatch, name):
    split = chat_parser.ChatParser.split
    calls = iter(range(100))

    def splits(self, text, **kwargs):
        parts = split(self, text, **kwargs)
        value = (chat_parser.ToolCall("f", "\ud800"),) if name == "tool_calls" else "\ud800"
        return parts._replace(**{name: value}) if next(calls) == BAD else parts

    monkeypatch.setattr(chat_parser.ChatParser, "split", splits)
    rows = generator(batch()).to_pylist()
    assert rows[BAD][ERROR].startswith("UnicodeEncodeError: while filling the column")
    assert [row for row in rows if not row[ERROR]] == good[:BAD] + good[BAD + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encode_generation", "decode_generation", "append"])
def test_the_journal_loses_no_row(model, good, monkeypatch, tmp_path, name):
    tokens = tuple(good[BAD]["generated_tokens"])
    owner = journal.RowJournal if name == "append" else journal
    with monkeypatch.context() as patch:
        raise_for(
            patch, owner, name,
            lambda *args: args[-1].token_ids == tokens if name != "decode_generation" else True,
        )  # fmt: skip
        for _ in range(2):
            generator = make(model, journal_dir=tmp_path)
            assert tokens_of(generator(batch())) == tokens_of(pa.Table.from_pylist(good))
            generator.close()
    generator = make(model, journal_dir=tmp_path)
    assert tokens_of(generator(batch())) == tokens_of(pa.Table.from_pylist(good))
    found = generator._counts.counts().num_found_rows
    generator.close()
    assert found == (3 if name in ("encode_generation", "append") else 4)
