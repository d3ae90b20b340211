"""Lines of an OpenAI batch: each field is honoured or named, each response has its form."""

import json

import pyarrow as pa
import pytest

from raymoe.config import SamplingParams
from raymoe.data.columns import OutputColumns, with_token_bytes
from raymoe.data.generator import add_token_bytes
from raymoe.data.rows import RowReader
from raymoe.engine.outputs import Generation, TokenLogprob
from raymoe.engine.tokenizer import Chat, DecodeError
from raymoe.openai.batch import read_requests, read_response, write_responses

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def line(body=None, **fields):
    body = {"model": "m", "messages": CHAT} if body is None else body
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": json.dumps(body),
        "__error__": "",
    } | fields


def read(*lines):
    """The rows of lines, as the operator reads them."""
    table = read_requests(pa.Table.from_pylist(lines), error_column="__error__")
    reader = RowReader(
        defaults=SamplingParams(max_tokens=9, temperature=0.0),
        id_column="custom_id",
        tools_column="tools",
        error_column="__error__",
        has_choices=True,
    )
    return reader.read(table)


def chat(**fields):
    (request,) = read(line({"model": "m", "messages": CHAT} | fields))
    return request


def test_what_is_not_given_is_the_operators():
    request = chat(stream=False, user="me", temperature=None, tool_choice="auto")
    assert request.error == ""
    assert request.prompt == CHAT
    assert request.sampling_params == SamplingParams(max_tokens=9, temperature=0.0)


def test_all_parameters_of_a_chat_are_honoured():
    given = {
        "max_completion_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"],
        "seed": 7, "presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"5": 1},
        "logprobs": True, "top_logprobs": 2, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
        "stop_token_ids": [3],
    }  # fmt: skip
    request = chat(**given)
    assert request.error == ""
    assert request.sampling_params == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, n=2, stop="x", seed=7, presence_penalty=1.0,
        frequency_penalty=0.5, logit_bias={5: 1.0}, logprobs=2, top_k=4, min_p=0.1,
        repetition_penalty=1.1, stop_token_ids=[3],
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "service_tier": "flex", "safety_identifier": "u", "prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h", "metadata": {"a": "b"}, "stream_options": None},
        {"prediction": {"type": "content", "content": "x"}, "verbosity": "medium"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": "none", "function_call": "none"},
        {"n": 1, "stop": [], "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "seed": None},
        {"logit_bias": {"5": None}, "stop": None, "modalities": ["text"], "best_of": 1},
        {"skip_special_tokens": True, "include_stop_str_in_output": False, "length_penalty": 1.0},
        {"response_format": {"type": "text"}, "reasoning_effort": None, "priority": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_without_effect_here_change_nothing(fields):
    request = chat(**fields)
    assert (request.error, request.prompt) == ("", CHAT)
    assert request.sampling_params == SamplingParams(max_tokens=9, temperature=0.0)


@pytest.mark.parametrize(
    ("response_format", "structured_outputs"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}},
            {"json": {"const": None}},
        ),
    ],
)
def test_response_formats_are_structured_outputs(response_format, structured_outputs):
    expected = SamplingParams(structured_outputs=structured_outputs).structured_outputs_params
    assert (
        chat(response_format=response_format).sampling_params.structured_outputs_params == expected
    )


def test_tools_go_with_the_messages():
    assert chat(tools=[TOOL]).prompt == Chat(CHAT, [TOOL])


def test_completions_take_one_text():
    for prompt in ("once", ["once"]):
        body = {"model": "m", "prompt": prompt, "logprobs": 2, "echo": False}
        (request,) = read(line(body, url="/v1/completions"))
        assert (request.prompt, request.error) == ("once", "")
        assert request.sampling_params.logprobs == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "/v1/embeddings"}, "column 'url' is '/v1/embeddings'; it takes"),
        ({"method": "GET"}, "column 'method' is 'GET'"),
        ({"body": None}, "column 'body' is None"),
        ({"body": "[1]"}, "column 'body' is [1]"),
        ({"body": '{"messages": []}'}, "has model None"),
        ({"body": '{"model": "m"}'}, "has messages None"),
        ({"body": '{"model": "m", "messages": []}'}, "column 'messages' is empty"),
        ({"body": '{"model": "m", "prompt": [1, 2]}', "url": "/v1/completions"}, "has prompt [1"),
        ({"__error__": "the line is broken"}, "ValueError: the line is broken"),
    ],
)
def test_a_bad_line_says_why(fields, message):
    (request,) = read(line() | fields)
    assert request.prompt is None
    assert message in request.error


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"stream": True}, "has stream True; it takes False"),
        ({"tool_choice": "required"}, "has tool_choice 'required'"),
        ({"functions": []}, "has 'functions', not supported here"),
        ({"web_search_options": {}, "audio": {}}, "has 'audio', 'web_search_options', not"),
        ({"verbosity": "low"}, "has verbosity 'low'; it takes 'medium'"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "has parallel_tool_calls False; it"),
        ({"tool_choice": {"type": "function"}}, "has tool_choice {'type'"),
        ({"include_stop_str_in_output": 3}, "include_stop_str_in_output is 3; it takes true or"),
        ({"max_new_tokens": 3}, "has 'max_new_tokens', not supported here; did you mean 'max_t"),
        ({"temprature": 1}, "has 'temprature', not supported here; did you mean 'temperature'?"),
        ({"bad_words": [""]}, "bad_words contains ''; it takes texts"),
        ({"chat_template_kwargs": [1]}, "has chat_template_kwargs [1]; it takes an object"),
        ({"top_logprobs": 3}, "top_logprobs without"),
        ({"response_format": {"type": "xml"}}, "has response_format"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"n": 1000}, "n is 1000"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"name": "add"}]}, "column 'tools' is"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field, message):
    request = chat(**field)
    assert request.prompt is None
    assert message in request.error


def generated(*generations):
    """What the operator returns for requests with these generations."""
    url = "/v1/chat/completions"
    ids = [f"id{index}" for index in range(len(generations))]
    table = pa.table({"custom_id": ids, "url": [url] * len(ids), "model": ["m"] * len(ids)})
    return OutputColumns.of(SamplingParams(), has_choices=True).append(table, generations)[0]


def test_a_response_has_all_samples_and_counts_their_tokens():
    logprobs = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),)
    other = Generation(text="b", token_ids=(1, 2), num_generated_tokens=2, finish_reason="length")
    first = Generation(
        text="a", token_ids=(5,), num_generated_tokens=1, num_input_tokens=4, num_cached_tokens=2,
        logprobs=logprobs, others=(other,),
    )  # fmt: skip
    (response,) = write_responses(generated(first))
    assert response["custom_id"] == "id0"
    assert response["error"] is None
    assert response["response"]["status_code"] == 200
    body = response["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    one, two = body["choices"]
    assert one["message"] == {"role": "assistant", "content": "a", "refusal": None}
    assert (one["finish_reason"], two["finish_reason"]) == ("stop", "length")
    (token,) = one["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("token_id:5", -0.5)
    assert [top["token"] for top in token["top_logprobs"]] == ["token_id:5", "token_id:6"]
    assert (two["index"], two["logprobs"]) == (1, None)


BYTES = {1: b"a", 2: " é".encode(), 3: b" \xf0\x9f", 4: b"\x99\x82", 5: b"a"}
ENTRIES = (
    TokenLogprob(1, -0.5, ((1, -0.5), (5, -1.5), (6, -2.5))),
    TokenLogprob(2, -0.5, ((3, -0.25), (2, -0.5))),
    TokenLogprob(4, -1.0, ((4, -1.0),)),
)


def with_logprobs(url):
    one = with_token_bytes(Generation(text="x", logprobs=ENTRIES), BYTES)
    columns = OutputColumns.of(SamplingParams(), has_choices=True, has_token_bytes=True)
    table = pa.table({"custom_id": ["a"], "url": [url], "model": ["m"]})
    (response,) = write_responses(columns.append(table, [one])[0])
    return response["response"]["body"]["choices"][0]["logprobs"]


def test_log_probabilities_of_a_chat_have_text_and_bytes():
    found = with_logprobs("/v1/chat/completions")["content"]
    assert [(one["token"], bytes(one["bytes"])) for one in found] == [
        ("a", BYTES[1]), (" é", BYTES[2]), (r"\x99\x82", BYTES[4])
    ]  # fmt: skip
    assert found[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "a", "logprob": -1.5, "bytes": [97]},
        {"token": "token_id:6", "logprob": -2.5, "bytes": None},  # of a model without tokenizer
    ]
    assert found[1]["top_logprobs"][0]["token"] == r" \xf0\x9f"


def test_log_probabilities_of_a_completion_have_text_and_offsets():
    found = with_logprobs("/v1/completions")
    assert found["tokens"] == ["a", " é", r"\x99\x82"]
    assert found["text_offset"] == [0, 1, 3]
    assert [*found["top_logprobs"][0].items()] == [("a", -0.5), ("token_id:6", -2.5)]


def test_tokens_whose_bytes_cannot_be_read_make_error_rows_of_their_rows_alone():
    def fail(tokens):
        if 4 in tokens:
            raise DecodeError("no")
        return {7: b"z"}

    other = TokenLogprob(7, -0.5)
    rows = [Generation(text=text, logprobs=(other,)) for text in "xy"]
    rows.insert(1, Generation(text="bad", logprobs=ENTRIES))
    first, bad, last = add_token_bytes(rows, fail)
    assert bad.error == "DecodeError: while finding the bytes of tokens: no"
    assert [first, last] == [with_token_bytes(row, {7: b"z"}) for row in (rows[0], rows[2])]


def test_an_error_has_a_code_and_a_message_and_can_be_read_again():
    (response,) = write_responses(generated(Generation.from_error(ValueError("no: good"))))
    assert response["response"]["status_code"] == 400
    assert response["error"] == {"code": "ValueError", "message": "no: good"}
    assert read_response(response)[:2] == ("id0", "ValueError: no: good")
