"""Options of `structured_outputs`: one form each, checked before anything is compiled."""

import json

import pytest

from raymoe.config import SamplingParams
from raymoe.errors import ConfigError
from raymoe.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}


def test_a_schema_may_be_a_mapping_or_text_and_the_options_too():
    forms = [
        StructuredOutputs.of({"json": SCHEMA}),
        StructuredOutputs.of({"json": json.dumps(SCHEMA), "regex": None, "json_object": False}),
        StructuredOutputs.of(json.dumps({"json": SCHEMA})),
        SamplingParams(structured_outputs={"json": SCHEMA}).structured_outputs_params,
    ]
    assert len({form.digest for form in forms}) == 1
    assert json.loads(forms[0].json) == SCHEMA
    assert forms[0].kind == "json"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "structured_outputs is a int"),
        ({}, "has none; it takes one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice"),
        ({"schema": {}}, "unknown structured_outputs option 'schema'"),
        ({"json": [1]}, "json is a list"),
        ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"grammar": "x" * 300_000}, "has 300000 characters"),
        ({"choice": "yes"}, "it takes a list of texts"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", 1]}, "entry is 1"),
        ({"json_object": 1}, "json_object is 1"),
        ({"json": {}, "disable_any_whitespace": "no"}, "disable_any_whitespace is 'no'"),
        ("{", "structured_outputs is not JSON"),
    ],
)
def test_what_cannot_be_used_is_named(value, message):
    with pytest.raises(ConfigError, match=message):
        StructuredOutputs.of(value)


@pytest.mark.parametrize("other", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_form_ends_the_text_and_nothing_else_does(other):
    with pytest.raises(ConfigError, match="leave out min_tokens and ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, **other)
