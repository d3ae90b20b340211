"""Rows that reason, of every family and by every way: what they ask for is asked of the answer."""

import json

import pyarrow as pa
import pytest

from raymoe.openai.batch import CHAT, ID_COLUMN, TOOLS_COLUMN, read_requests, write_responses
from raymoe.openai.direct import REQUEST_ERROR_COLUMN
from tests.unit.engine.fakes import QUICK
from tests.unit.engine.speakers import (
    FAMILIES,
    THOUGHTS,
    SpeakingGenerator,
    open_engine,
    write_tokenizer,
)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"max_tokens": 120, "temperature": 0.0}
ASKED = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "stop": {"stop": ";"},
    "nothing": {},
}
OF_BATCHES = {
    "id_column": ID_COLUMN, "error_column": REQUEST_ERROR_COLUMN, "tools_column": TOOLS_COLUMN,
    "has_choices": True, "has_token_bytes": True, "engine_config": QUICK,
}  # fmt: skip
families = pytest.mark.parametrize("name", FAMILIES)


def check(asked, reasoning, answer):
    assert reasoning.strip("\n") == THOUGHTS
    if asked == "schema":
        assert json.loads(answer).keys() == {"a"}
    else:
        assert answer == {"stop": "6", "nothing": "6;x"}[asked]


def line(asked):
    body = {"model": "demo", "messages": MESSAGES, **GREEDY, **ASKED[asked]}
    return {ID_COLUMN: asked, "method": "POST", "url": CHAT, "body": json.dumps(body)}


@pytest.mark.slow
@families
def test_lines_of_a_batch_have_their_answers_and_the_reasoning_apart(tmp_path, name):
    family = FAMILIES[name]
    generator = SpeakingGenerator(write_tokenizer(tmp_path, family), family, **OF_BATCHES)
    lines = pa.Table.from_pylist([line(asked) | {REQUEST_ERROR_COLUMN: None} for asked in ASKED])
    try:
        done = generator(read_requests(lines, error_column=REQUEST_ERROR_COLUMN))
    finally:
        generator.close()
    for response in write_responses(done):
        assert response["error"] is None
        (choice,) = response["response"]["body"]["choices"]
        assert choice["finish_reason"] == "stop"
        check(response[ID_COLUMN], choice["message"]["reasoning"], choice["message"]["content"])


@pytest.mark.slow
@families
def test_the_value_of_an_engine_and_of_an_operator_is_that_of_the_answer(tmp_path, name):
    family = FAMILIES[name]
    write_tokenizer(tmp_path, family)
    engine = open_engine(tmp_path, family, QUICK)
    try:
        (generation,) = engine.generate([MESSAGES], GREEDY, output_schema=SCHEMA)
    finally:
        engine.close()
    check("schema", generation.reasoning, generation.text)
    assert generation.parsed == json.loads(generation.text)
    generator = SpeakingGenerator(
        tmp_path, family, sampling_params=GREEDY, output_schema=SCHEMA, engine_config=QUICK
    )
    try:
        (row,) = generator(pa.table({"messages": [json.dumps(MESSAGES)]})).to_pylist()
    finally:
        generator.close()
    check("schema", row["reasoning_text"], row["generated_text"])
    assert (row["parsed"], row["parsed_error"]) == (generation.parsed, None)


def test_a_server_answers_by_the_schema_with_the_reasoning_apart(tmp_path):
    pytest.importorskip("uvicorn")
    from tests.integration.test_serve import Running  # noqa: PLC0415 - needs uvicorn

    family = FAMILIES["gpt-oss"]
    (tmp_path / "model").mkdir()
    model = write_tokenizer(tmp_path / "model", family)
    server = Running(
        tmp_path / "server", generator=lambda: SpeakingGenerator(model, family, **OF_BATCHES)
    )
    try:
        for asked in ASKED:
            status, body = server.call(
                "POST", CHAT, line(asked)["body"].encode(), content_type="application/json"
            )
            assert status == 200, body
            (choice,) = json.loads(body)["choices"]
            check(asked, choice["message"]["reasoning"], choice["message"]["content"])
    finally:
        server.close()
