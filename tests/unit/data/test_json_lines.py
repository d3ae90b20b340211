"""Lines without an end, a bottom or a measure: bounded, and each the error of itself."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.data import json_lines
from raymoe.data.json_lines import MAX_KEYS, Line, parse_line, read_lines
from raymoe.safe_text import MAX_LEVELS, nesting_problem


def parse(data):
    return parse_line(Line(data, len(data)))


class Endless:
    """A file of one line; notes how much of it was asked for at once."""

    def __init__(self, size):
        self.left, self.most = size, 0

    def readline(self, size):
        self.most = max(self.most, size)
        size = min(size, self.left)
        self.left -= size
        return b"a" * size


def test_of_a_line_that_is_too_long_only_its_begin_is_kept():
    file = Endless(900_000_000)
    (line,) = read_lines(file)
    assert (file.left, file.most) == (0, json_lines.MAX_LINE_BYTES)
    assert (len(line.data), line.num_bytes) == (json_lines.MAX_LINE_BYTES, 900_000_000)
    assert parse_line(line) == (None, "the line has 900,000,000 bytes; at most 33,554,432 are read")


def test_lines_behind_a_long_one_are_read():
    found = [*read_lines(io.BytesIO(b"abc\n\nabcdefgh\nabcd\nabcd"), 4)]
    assert found == [(b"abc\n", 4), (b"\n", 1), (b"abcd", 9), (b"abcd", 5), (b"abcd", 4)]
    assert [bool(line.problem) for line in found] == [False, False, True, True, False]
    assert [line.has_content for line in found] == [True, False, True, True, True]


@pytest.mark.parametrize("depth", [MAX_LEVELS + 2, 880, 1009, 100_000])
def test_a_value_that_is_too_deep_leaves_the_others_of_its_line(depth):
    deep = b"[" * depth + b"]" * depth
    record, error = parse(b'{"id": "[", "a": {"b": %b}, "c": "\\"[", "d": [%b]}' % (deep, deep))
    assert record == {"id": "[", "a": None, "c": '"[', "d": None}
    assert error == f"the line is nested more than {MAX_LEVELS} levels deep"
    for data in (deep, b'{"a": ' + deep[:-1], b'{"a": ' + deep[:depth]):
        assert parse(data) == (None, error)


def test_what_is_said_of_a_deep_line_depends_on_no_stack():
    """A worker of Ray reads it from another depth of calls than the command."""

    def below(levels, data):
        return below(levels - 1, data) if levels else parse(data)

    for depth in (MAX_LEVELS, MAX_LEVELS + 1, 600, 990):
        data = b'{"a": %b%b}' % (b"[" * depth, b"]" * depth)
        assert below(500, data) == parse(data)
        assert bool(parse(data)[1]) == (depth > MAX_LEVELS)


LEAVES = st.none() | st.integers() | st.text(alphabet='[]{}"\\\\a\u2028', max_size=4)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(alphabet='a"[}', max_size=2), VALUES, max_size=4), st.booleans())
def test_values_that_are_too_deep_are_those_that_recursion_would_find(record, is_ascii):
    with pytest.MonkeyPatch.context() as patch:
        for module in ("raymoe.data.json_lines", "raymoe.safe_text"):
            patch.setattr(f"{module}.MAX_LEVELS", 2)
        expected = {key: None if nesting_problem(value) else value for key, value in record.items()}
        found, error = parse(json.dumps(record, ensure_ascii=is_ascii).encode())
    assert found == expected
    assert bool(error) == (expected != record)


def test_keys_that_no_column_can_have_are_left_out():
    record, error = parse(b'{"id": 1, "\\ud800": 2, "a": {"\\udfff": 3}}')
    assert record == {"id": 1, "a": {"\udfff": 3}}
    assert error == "the key '\\ud800' has a lone surrogate at character 0"
    record, error = parse(json.dumps({"id": 1, "k" * 5000: 2}).encode())
    assert (record, error[-44:]) == ({"id": 1}, "has 5,000 characters; at most 1,000 are read")
    record, error = parse(json.dumps(dict.fromkeys(map(str, range(40_000)))).encode())
    assert error == f"the line has 40,000 keys; at most {MAX_KEYS:,} are read"
