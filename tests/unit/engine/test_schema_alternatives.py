"""Alternatives that exclude each other are proved to; nothing else is."""

import itertools

import jsonschema
import pytest

from raymoe.engine.schema_alternatives import Alternatives

CAT = {"type": "object", "required": ["k"], "properties": {"k": {"const": "cat"}}}
DOG = {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["dog", "wolf"]}}}
TARGETS = {"#/$defs/cat": CAT, "#/$defs/dog": DOG, "#/$defs/self": {"$ref": "#/$defs/self"}}


def proved(*options):
    return Alternatives(TARGETS).exclude_each_other(list(options))


@pytest.mark.parametrize(
    "options",
    [
        ({"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}),
        ({"type": "null"}, {"$ref": "#/$defs/cat"}),
        ({"type": "integer"}, {"type": ["string", "array"]}),
        ({"const": 1}, {"const": "1"}, {"enum": [2, None]}),
        ({"anyOf": [CAT, {"type": "null"}]}, DOG),
        ({"type": "string"}, False),
    ],
)
def test_what_excludes_each_other(options):
    assert proved(*options)


@pytest.mark.parametrize(
    "options",
    [
        ({"type": "number"}, {"type": "integer"}),
        ({"const": 1}, {"enum": [1.0, 2]}),
        ({"const": {"a": 1, "b": 2}}, {"const": {"b": 2.0, "a": 1}}),
        ({"properties": CAT["properties"], "required": ["k"]}, DOG | {"type": ["object", "null"]}),
        (CAT | {"required": []}, DOG | {"required": []}),
        ({"type": "string"}, {"type": "string", "maxLength": 3}),
        ({"$ref": "#/$defs/self"}, {"$ref": "#/$defs/self"}),
        ({"$ref": "#/$defs/cat", "type": "string"}, CAT),
        (True, {"type": "null"}),
        ({"type": 3}, {"type": "null"}),
    ],
)
def test_what_may_hold_at_once(options):
    assert not proved(*options)


def test_no_value_is_valid_for_two_alternatives_that_exclude_each_other():
    parts = [
        {"type": "integer"}, {"type": "number"}, {"type": ["string", "null"]}, {"const": 1},
        {"const": True}, {"enum": [0, "a", None]}, CAT, DOG, CAT | {"type": ["object", "null"]},
        {"properties": {"k": {"type": "integer"}}, "required": ["k"]}, {"type": "array"},
        {"anyOf": [{"type": "null"}, CAT]}, {},
    ]  # fmt: skip
    values = [1, 1.0, 0, False, 0.5, True, None, "a", "b", [], {}, {"k": "cat"}, {"k": "dog"},
              {"k": 1}]  # fmt: skip
    count = 0
    for left, right in itertools.combinations(parts, 2):
        if proved(left, right):
            count += 1
            for value in values:
                assert not (is_valid(value, left) and is_valid(value, right)), (left, right, value)
    assert count >= 20


def is_valid(value, schema):
    return jsonschema.Draft202012Validator(schema).is_valid(value)
