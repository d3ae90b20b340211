"""Rows to requests: what is accepted, and what each bad row says."""

import json

import pyarrow as pa
import pytest

from raymoe.config import SamplingParams
from raymoe.data.rows import RowReader, row_key
from raymoe.errors import ConfigError

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.0)


def read(**columns):
    return RowReader(defaults=DEFAULTS).read(pa.table(columns))


def invalid_utf8(*cells):
    offsets = [0]
    for cell in cells:
        offsets.append(offsets[-1] + len(cell))
    buffers = [None, pa.py_buffer(pa.array(offsets, pa.int32()).buffers()[1]), b"".join(cells)]
    buffers[2] = pa.py_buffer(buffers[2])
    return pa.Array.from_buffers(pa.string(), len(cells), buffers)


def user(content="hi"):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a"], pa.string()),
        pa.array(["a"], pa.large_string()),
        pa.array(["a"], pa.string_view()),
        pa.array([b"a"], pa.binary()),
        pa.array(["a"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_text_of_every_arrow_type_is_a_prompt(array):
    (request,) = read(prompt=array)
    assert (request.prompt, request.error) == ("a", "")
    assert request.sampling_params == DEFAULTS


def test_token_ids_are_a_prompt():
    (request,) = read(prompt=pa.array([[5, 6]], pa.list_(pa.int64())))
    assert request.prompt == [5, 6]


@pytest.mark.parametrize(
    ("cell", "arrow_type", "reason"),
    [
        (None, pa.string(), "ValueError: column 'prompt' is null"),
        ("", pa.string(), "ValueError: column 'prompt' is empty"),
        ([], pa.list_(pa.int64()), "ValueError: column 'prompt' is empty"),
        (3.5, pa.float64(), "TypeError: column 'prompt' is 3.5 (float)"),
        (True, pa.bool_(), "TypeError: column 'prompt' is True (bool)"),
        ([1, -2], pa.list_(pa.int64()), "has -2 at position 1"),
        ([1, None], pa.list_(pa.int64()), "has None at position 1"),
        ([1.5], pa.list_(pa.float64()), "has 1.5 at position 0"),
        ({"a": 1}, pa.struct([("a", pa.int64())]), "(dict); it takes text or a list of token ids"),
        (b"\xff", pa.binary(), "UnicodeDecodeError: column 'prompt' is not UTF-8"),
    ],
)
def test_a_bad_prompt_names_its_column_and_the_reason(cell, arrow_type, reason):
    (request,) = read(prompt=pa.array([cell], arrow_type))
    assert request.prompt is None
    assert reason in request.error


def test_invalid_utf8_hurts_only_its_own_row():
    requests = read(prompt=invalid_utf8(b"good", b"\xc3(bad", b"fine"))
    assert [request.prompt for request in requests] == ["good", None, "fine"]
    expected = (
        "UnicodeDecodeError: column 'prompt' is not UTF-8: invalid continuation byte at byte 0"
    )
    assert requests[1].error == expected


def test_a_row_takes_a_prompt_or_messages_and_not_both():
    requests = read(
        prompt=pa.array(["a", None, "c", None]),
        messages=pa.array([None, [user()], [user()], None]),
    )
    assert [bool(request.error) for request in requests] == [False, False, True, True]
    assert requests[1].prompt == [user()]
    assert requests[1].column == "messages"
    assert "has a prompt and column 'messages' has messages" in requests[2].error
    assert "set prompt_column or messages_column" in requests[2].error
    assert "is null and column 'messages' has no messages" in requests[3].error


def test_a_column_that_is_named_for_messages_is_not_the_prompt():
    """TRL's conversational tables have their messages in `prompt`."""
    table = pa.table({"prompt": pa.array([[user()], None])})
    (request, _) = RowReader(defaults=DEFAULTS).read(table)
    assert "if they are messages, name it by messages_column" in request.error
    for make in (lambda one: one, lambda one: one.to_pandas()):
        reader = RowReader(defaults=DEFAULTS, messages_column="prompt")
        reader.check_schema(table.schema)
        request, null = reader.read(make(table))
        assert (request.prompt, request.column, request.error) == ([user()], "prompt", "")
        assert null.error == "ValueError: column 'prompt' is null"


def test_messages_may_be_json_text():
    (request,) = read(messages=[json.dumps([user(), {"role": "assistant", "content": "x"}])])
    assert request.prompt == [user(), {"role": "assistant", "content": "x"}]


def test_keys_that_arrow_added_to_messages_are_dropped():
    tool_call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    thought = {"role": "assistant", "reasoning_content": "why"}
    requests = read(messages=[[user()], [tool_call], [thought]])
    assert [request.prompt for request in requests] == [[user()], [tool_call], [thought]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "is empty"),
        ("{}", "it takes a list of messages"),
        ("[1]", "message 0 is 1; it takes an object"),
        ('[{"content": "a"}]', "message 0 has the role None"),
        ('[{"role": 3, "content": "a"}]', "message 0 has the role 3"),
        ('[{"role": "user"}]', "message 0 has no content"),
        ('[{"role": "user", "content": 4}]', "message 0 has the content 4"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "only text parts"),
        ('[{"role": "user", "content": "\\ud800"}]', "lone surrogate"),
        ('[{"role": "user"', "is not JSON"),
        ("[" * 100_000, "is nested more than 128 levels deep"),
    ],
)
def test_broken_messages_name_the_message_and_the_reason(text, reason):
    (request,) = read(messages=[text])
    assert request.prompt is None
    assert request.error.split(": ", 1)[1].startswith("column 'messages' ")
    assert reason in request.error
    assert len(request.error) < 300


def params(*cells, arrow_type=None, defaults=DEFAULTS):
    table = pa.table({"prompt": ["a"] * len(cells), "sampling_params": pa.array(cells, arrow_type)})
    return RowReader(defaults=defaults).read(table)


def test_struct_keys_override_the_defaults_and_nulls_are_not_given():
    requests = params({"temperature": 0.3}, {"max_tokens": 5, "stop": ["x"]}, None)
    assert [request.error for request in requests] == ["", "", ""]
    first, second, third = (request.sampling_params for request in requests)
    assert (first.temperature, first.max_tokens) == (0.3, 7)
    assert (second.temperature, second.max_tokens, second.stop) == (0.0, 5, ("x",))
    assert type(second.max_tokens) is int
    assert third == DEFAULTS


def test_whole_numbers_that_pandas_made_floats_are_whole_again():
    struct = pa.struct([("max_tokens", pa.float64())])
    (request,) = params({"max_tokens": 5.0}, arrow_type=struct)
    assert request.sampling_params.max_tokens == 5


def test_json_text_maps_and_blank_text_are_parameters():
    requests = params('{"max_tokens": 3}', " ")
    assert [request.sampling_params.max_tokens for request in requests] == [3, 7]
    (request,) = params({"top_p": 0.5}, arrow_type=pa.map_(pa.string(), pa.float64()))
    assert request.sampling_params.top_p == 0.5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"max_token": 3}', "unknown sampling parameter 'max_token'; did you mean 'max_tokens'?"),
        ('{"max_tokens": "many"}', "max_tokens is 'many' (str)"),
        ('{"max_tokens": -1}', "max_tokens is -1"),
        ('{"max_tokens": 1e30}', "max_tokens is 1e+30"),
        ('{"max_tokens": 1%s}' % ("0" * 40), "max_tokens is 1000"),
        ('{"max_tokens": 1%s}' % ("0" * 5000), "is not JSON"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": -0.5}', "temperature is -0.5"),
        ('{"top_k": true}', "top_k is True (bool)"),
        ('{"stop": 3}', "stop"),
        ('{"n": 2}', "asks for n 2, but the output has no column for it"),
        ('{"logprobs": 2}', "asks for logprobs, but the output has no column for it"),
        ("[1, 2]", "it takes an object"),
        ("{", "is not JSON"),
    ],
)
def test_bad_parameters_name_the_key_and_the_reason(text, reason):
    bad, good = params(text, '{"max_tokens": 2}')
    assert bad.prompt is None
    assert bad.error.split(": ", 1)[1].startswith("column 'sampling_params' ")
    assert reason in bad.error
    assert (good.error, good.sampling_params.max_tokens) == ("", 2)


def test_parameters_of_a_wrong_arrow_type_are_an_error():
    (request,) = params(4, arrow_type=pa.int64())
    assert "is 4 (int); it takes a struct or JSON text" in request.error


def test_a_row_may_change_the_samples_and_logprobs_that_the_operator_turned_on():
    defaults = SamplingParams(n=2, logprobs=1)
    (request,) = params('{"n": 3, "logprobs": 2}', defaults=defaults)
    assert (request.error, request.sampling_params.n) == ("", 3)


def test_row_keys_depend_on_value_and_type_and_nothing_else():
    assert row_key("a") == row_key("a")
    assert len({row_key("1"), row_key(1), row_key(1.5), row_key("a")}) == 4
    assert row_key(None) is None
    assert all(0 <= row_key(i) < 2**63 for i in range(1000))


def test_rows_that_were_already_bad_keep_their_reason():
    reader = RowReader(defaults=DEFAULTS, error_column="why")
    requests = reader.read(pa.table({"prompt": ["a", "b", "c"], "why": ["", "line 4 broke", None]}))
    assert [request.prompt for request in requests] == ["a", None, "c"]
    assert requests[1].error == "ValueError: line 4 broke"


@pytest.mark.parametrize("kind", ["WorkerProcessError", "CapacityError"])
def test_an_error_that_may_pass_keeps_its_kind(kind):
    """Resumed runs try such rows again, and know them by it."""
    reader = RowReader(defaults=DEFAULTS, error_column="why")
    (request,) = reader.read(pa.table({"prompt": ["a"], "why": [f"{kind}: it was killed"]}))
    assert request.error == f"{kind}: it was killed"


def test_the_place_behind_an_error_is_whole_however_long_its_path():
    reader = RowReader(defaults=DEFAULTS, error_column="why")
    places = [f"({'d' * 4096}, line {number})" for number in (1, 2)]
    table = pa.table({"prompt": [None] * 2, "why": [f"{'x' * 500} {place}" for place in places]})
    assert [request.error[-4106:] for request in reader.read(table)] == places


def test_a_table_without_the_columns_is_refused_with_those_it_has():
    reader = RowReader(defaults=DEFAULTS, id_column="id")
    with pytest.raises(ConfigError, match=r"neither column 'prompt' nor 'messages'.*'question'"):
        reader.check_schema(pa.schema([("question", pa.string())]))
    with pytest.raises(ConfigError, match=r"id_column 'id' does not exist.*'prompt'"):
        reader.check_schema(pa.schema([("prompt", pa.string())]))
    assert reader.read(pa.table({"prompt": pa.array([], pa.string())})) == []


def test_a_column_overrides_arguments_of_the_chat_template():
    reader = RowReader(
        defaults=SamplingParams(), chat_template_kwargs={"enable_thinking": False, "a": 1}
    )
    chat = [{"role": "user", "content": "x"}]
    table = pa.table(
        {
            "messages": [chat] * 4,
            "chat_template_kwargs": [None, '{"enable_thinking": true}', "[1]", '{"b": null}'],
        }
    )
    read = reader.read(table)
    assert [one.prompt and one.prompt.template_kwargs for one in read] == [
        {"enable_thinking": False, "a": 1},
        {"enable_thinking": True, "a": 1},
        None,
        {"enable_thinking": False, "a": 1, "b": None},
    ]
    assert read[2].error == "TypeError: column 'chat_template_kwargs' is [1]; it takes an object"
    plain = RowReader(defaults=SamplingParams()).read(table.select(["messages"]))
    assert plain[0].prompt == chat
