"""Values nested without end: they end their own row, wherever they stand, and no other."""

import datetime
import json

import pyarrow as pa
import pytest

from raymoe.config import SamplingParams
from raymoe.data.job_rows import FinishedRows
from raymoe.data.rows import RowReader
from raymoe.engine.tokenizer import check_messages
from raymoe.errors import ConfigError
from raymoe.safe_text import MAX_LEVELS, nesting_problem
from tests.unit.data.jobs import made

LEVELS = (MAX_LEVELS + 1, 900, 960, 980, 100_000)


def nested_text(levels, inner="1"):
    return "[" * levels + inner + "]" * levels


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def nested_type(levels):
    kind = pa.int64()
    for _ in range(levels):
        kind = pa.list_(kind)
    return kind


def chat_with(text):
    return f'[{{"role": "user", "content": "hi", "extra": {text}}}]'


def tools_with(text):
    return f'[{{"type": "function", "function": {{"name": "f", "parameters": {text}}}}}]'


@pytest.fixture
def find(tmp_path):
    """What a job with a journal does first with the rows of a batch."""
    finished = FinishedRows.open(tmp_path, made(), sync_every_s=1.0)
    reader = RowReader(
        defaults=SamplingParams(), id_column="id", tools_column="tools", error_column="error"
    )

    def find(**columns):
        count = len(next(iter(columns.values())))
        empty = {name: [None] * count for name in ("id", "tools", "error")}
        requests = reader.read(pa.table({**empty, **columns}))
        finished.look_up(finished.keys([one for one in requests if one.prompt is not None]))
        return requests

    yield find
    finished.close()


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    ("column", "make", "good"),
    [
        ("messages", chat_with, chat_with("1")),
        ("messages", lambda text: f'[{{"role": "user", "content": {text}}}]', chat_with("1")),
        ("tools", tools_with, tools_with("{}")),
        ("sampling_params", lambda text: f'{{"stop": {text}}}', "{}"),
        (
            "sampling_params",
            lambda text: f'{{"structured_outputs": {{"json": {{"enum": {text}}}}}}}',
            "{}",
        ),
    ],
    ids=["messages", "content", "tools", "params", "schema"],
)
def test_deep_json_is_the_error_of_its_row(find, column, make, good, levels):
    others = {} if column == "messages" else {"messages": [chat_with("1")] * 3}
    cells = [good, make(nested_text(levels)), good]
    first, bad, last = find(**others, **{column: cells})
    assert not first.error
    assert not last.error
    assert f"column '{column}'" in bad.error
    assert "nested" in bad.error


class AnyValue(pa.ExtensionScalar):
    """A cell that Python wrote, such as those of Ray's object columns."""

    def as_py(self, **_options):
        return None if self.value is None else nested(int(self.value.as_py()))


class AnyType(pa.ExtensionType):
    def __init__(self):
        super().__init__(pa.int64(), "raymoe.tests.any")

    def __arrow_ext_serialize__(self):
        return b""

    def __arrow_ext_scalar_class__(self):
        return AnyValue


def others_of(column):
    """Columns with which the rows are fine: the middle one has no prompt if it has messages."""
    if column == "prompt":
        return {}
    if column == "tools":
        return {"messages": [chat_with("1")] * 3}
    return {"prompt": ["a", None if column == "messages" else "b", "c"]}


@pytest.mark.parametrize("column", ["prompt", "messages", "sampling_params", "tools", "error"])
def test_deep_arrow_types_are_errors_of_the_rows_that_are_not_null(find, column):
    levels = MAX_LEVELS + 1
    cells = pa.array([None, nested(levels), None], nested_type(levels))
    requests = find(**others_of(column), **{column: cells})
    expected = f"ValueError: column '{column}' has a type nested more than {MAX_LEVELS} levels deep"
    assert requests[1].error == expected
    if column != "prompt":
        assert [one.error for one in requests[::2]] == ["", ""]


@pytest.mark.parametrize(
    "column", ["prompt", "messages", "sampling_params", "id", "tools", "error"]
)
@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 950])
def test_deep_values_of_python_are_errors_of_their_rows(find, column, levels):
    cells = pa.ExtensionArray.from_storage(AnyType(), pa.array([None, levels, None], pa.int64()))
    requests = find(**others_of(column), **{column: cells})
    assert requests[1].error == (
        f"ValueError: column '{column}' is nested more than {MAX_LEVELS} levels deep"
    )
    if column != "prompt":
        assert [one.error for one in requests[::2]] == ["", ""]


def test_what_is_as_deep_as_it_may_be_is_no_error(find):
    levels = MAX_LEVELS - 2  # a list of objects stands around it
    (row,) = find(messages=[chat_with(nested_text(levels))])
    assert not row.error
    assert check_messages(row.prompt)


def test_values_that_share_parts_are_counted_like_copies():
    part = list(range(4000))
    assert "more than 10000000 values" in nesting_problem([part] * 4000)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "extra": nested(900)},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": nested_text(900)}}],
        },
    ],
    ids=["value", "tool arguments"],
)
def test_the_engine_refuses_deep_messages_too(message):
    with pytest.raises(ConfigError, match=f"nested more than {MAX_LEVELS} levels"):
        check_messages([message])


@pytest.mark.parametrize(
    ("column", "around"),
    [("messages", chat_with), ("tools", tools_with)],
    ids=["messages", "tools"],
)
def test_keys_that_json_cannot_hold_are_errors_of_their_rows(find, column, around):
    good = json.loads(around("1"))[0]
    good = {**good, "extra": [(datetime.date(2020, 1, 1), 1)]}
    kind = pa.map_(pa.date32(), pa.int64())
    fields = [pa.field("role", pa.string()), pa.field("content", pa.string())]
    if column == "tools":
        fields = [pa.field("function", pa.struct([("name", pa.string())]))]
        good["function"] = {"name": "f"}
    kind = pa.list_(pa.struct([*fields, pa.field("extra", kind)]))
    cells = pa.array([None, [good], None], kind)
    fine, bad, _ = find(**others_of(column), **{column: cells})
    assert not fine.error
    assert f"column '{column}' cannot be written as JSON: keys" in bad.error


def test_maps_that_python_cannot_hold_are_errors_of_their_rows(find):
    kind = pa.map_(pa.list_(pa.int64()), pa.int64())
    fine, bad = find(prompt=["a", "b"], sampling_params=pa.array([None, [([1], 2)]], kind))
    assert not fine.error
    assert bad.error.startswith("TypeError: column 'sampling_params'")


def test_texts_of_schemas_are_no_deeper_than_values():
    schema = '{"enum": ' + nested_text(900) + "}"
    with pytest.raises(ConfigError, match=r"structured_outputs\.json is nested more than"):
        SamplingParams(structured_outputs={"json": schema})
