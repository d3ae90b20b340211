"""Values of answers: what was not held to the schema is checked in a process with limits."""

import json
import urllib.request

import pytest

from raymoe.config import SamplingParams
from raymoe.engine.answers import AnswerReader
from raymoe.engine.outputs import Generation
from raymoe.engine.workers.schema_worker import make_validator, problem
from raymoe.errors import ExecutionError
from raymoe.output_schema import OutputSchema, generation_params


def of(**properties):
    return {"type": "object", "properties": properties, "required": [*properties]}


AMBIGUOUS = OutputSchema.of(of(a={"type": "string", "pattern": "^(a+)+$"}))
LETTERS = json.dumps({"a": "a" * 40 + "!"})  # 2**40 ways for an expression that goes back
OTHER = SamplingParams(structured_outputs={"json_object": True})


def test_a_row_with_another_constraint_is_checked_within_limits():
    reader = AnswerReader(AMBIGUOUS)
    long = Generation(text=json.dumps({"a": "a" * 400_000}))
    samples = Generation(text='{"a": "aa"}', others=(Generation(text=LETTERS),))
    try:
        first = reader.read(samples, OTHER)
        reader._limit_s = 0.05
        late = reader.read(long, OTHER)
        reader._limit_s = 1.0
        again = reader.read(Generation(text='{"a": "a"}'), SamplingParams())
    finally:
        reader.close()
    assert first.parsed == {"a": "aa"}
    assert first.others[0].parsed is None
    assert first.others[0].parsed_error.startswith("$.a: 'aaaa")
    assert late.parsed is None
    assert late.parsed_error == "$: the check of an answer took more than 0.05 s of CPU time"
    assert again.parsed == {"a": "a"}
    with pytest.raises(ExecutionError):  # no row's fault
        reader.read(again, OTHER)


def test_a_row_that_was_held_to_the_schema_starts_no_process():
    reader = AnswerReader(AMBIGUOUS)
    params = generation_params({"max_tokens": 99}, AMBIGUOUS)
    compact = params.override({"structured_outputs": {
        "json": AMBIGUOUS.text, "disable_any_whitespace": True,
    }})  # fmt: skip
    for one in (params, compact):
        assert reader.read(Generation(text=LETTERS), one).parsed == json.loads(LETTERS)
        cut = Generation(text='{"a": "a', finish_reason="length")
        assert reader.read(cut, one).parsed_error == "cut by max_tokens at $.a"
    assert reader._worker._process is None


ADDRESS = "http://127.0.0.1:9/schema.json"
NAMES_AN_ADDRESS = {
    "if without then": {"if": {"$ref": ADDRESS}},
    "a default": {"default": {"$ref": ADDRESS}},
    "examples": {"examples": [{"$ref": "file:///etc/passwd"}]},
    "an identifier": {"$id": ADDRESS},
}


@pytest.mark.parametrize("name", NAMES_AN_ADDRESS)
def test_a_check_opens_no_connection(name, monkeypatch):
    def opened(*_args, **_options):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    schema = OutputSchema.of({**of(a={"type": "integer"}), **NAMES_AN_ADDRESS[name]})
    validator = make_validator(schema.text)
    assert problem(validator, '{"a": 1}') == ""
    assert problem(validator, '{"a": "x"}') == "$.a: 'x' is not of type 'integer'"


@pytest.mark.parametrize(
    ("pattern", "text", "is_valid"),
    [
        ("b", "abc", True),
        ("^b", "abc", False),
        (r"^\p{Lu}$", "É", True),
        (r"^\d$", "٣", False),  # as in constraints, and not as in Python
        ("^.$", "\n", False),
        (r'^"\\$', '"\\', True),
        ("^[ab]$", "a\n", False),  # Python's $ is also before a last line end
    ],
)
def test_patterns_mean_what_they_mean_in_constraints(pattern, text, is_valid):
    schema = json.dumps(of(a={"type": "string", "pattern": pattern}))
    found = problem(make_validator(schema), json.dumps({"a": text}))
    assert (found == "") == is_valid, found
