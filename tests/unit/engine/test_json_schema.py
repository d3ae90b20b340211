"""Schemas that no generation can be held to are refused by keyword and place."""

import json

import pytest

from raymoe.engine.grammar_source import exact_schema
from raymoe.errors import ConfigError


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "with 'not' at #"),
        ({"type": "array", "items": {"uniqueItems": True}}, "'uniqueItems' at #/items"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"if": {}}}}, "'if' at #/\\$defs/a"),
        ({"type": "integer", "x-guidance": {"lenient": True}}, "'x-guidance' at #"),
        ({"minimun": 3}, "'minimun' at #"),
        ({"contentEncoding": "base64"}, "'contentEncoding'"),
        ({"$ref": "http://a/b"}, "http://a/b"),
        ({"$ref": "#/$defs/absent"}, "'#/\\$defs/absent' at #"),
        ({"enum": [{"not": {}}], "$ref": "#/enum/0"}, "'#/enum/0'"),
        ({"$defs": {"a": {"$id": "b"}}}, "'\\$id' at #/\\$defs/a"),
        ({"type": "string", "format": "colour"}, "format 'colour'"),
        ({"type": "string", "format": ["date"]}, "format \\['date'\\]"),
        ({"additionalItems": False}, "'additionalItems' without a list"),
        ({"properties": {"a\n": {}}}, "property 'a\\\\n'"),
        ({"required": ["a\x7f"]}, "property 'a\\\\x7f'"),
        ({"minProperties": 2}, "minProperties 2 at #"),
        ({"minProperties": 3, "required": ["a", "b", "b"]}, "minProperties 3"),
        ({"maximum": 2**53}, "maximum 9007199254740992"),
        ({"minimum": 0.12345678901234567}, "minimum 0.1234567890123456"),
        ({"multipleOf": 1e-07}, "multipleOf 1e-07"),
        ({"enum": [1, [2**60]]}, "enum with 1152921504606846976"),
        ({"exclusiveMinimum": 0, "maximum": 0.6}, "range of numbers from 0 to 0.6"),
        ({"minimum": -1.6, "exclusiveMaximum": -1}, "range of numbers from -1.6 to -1"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.6}]}, "range of numbers"),
        ({"type": "string", "pattern": "(?=a)b"}, "a regex with '\\(\\?='"),
        ({"patternProperties": {"^\\d": {}, "^[0-9]": {}}}, "patternProperties that are the same"),
        (False, "the value false"),
    ],
)
def test_what_would_be_ignored_is_refused(schema, message):
    with pytest.raises(ConfigError, match=message):
        exact_schema(json.dumps(schema))


def test_what_users_write_passes():
    address = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^\\d{5}$"}}}
    exact_schema(
        json.dumps(
            {
                "title": "Person",
                "properties": {
                    "name": {"type": "string", "maxLength": 9, "description": "first"},
                    "age": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
                    "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
                    "home": {"$ref": "#/$defs/Address", "description": "where"},
                    "tags": {"type": "array", "items": {"const": 1}, "uniqueItems": False},
                },
                "required": ["name"],
                "additionalProperties": False,
                "$defs": {"Address": address},
            }
        )
    )


def test_what_is_not_a_problem_is_not_refused():
    price = {"type": "number", "exclusiveMinimum": 0}
    share = {"type": "number", "minimum": 0, "maximum": 0.5}
    for schema in (
        {"properties": {"price": price, "share": share}},
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"],
         "minProperties": 2},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.6},
        {"properties": {"not": {}, "x-guidance": {}}},
        {"oneOf": [{"const": 1}, {"const": 2}], "discriminator": {"propertyName": "k"}},
    ):  # fmt: skip
        exact_schema(json.dumps(schema))


def test_regexes_are_rewritten_where_they_stand():
    schema = {"type": "string", "pattern": "\\d."}
    found = json.loads(
        exact_schema(json.dumps({"items": schema, "patternProperties": {"\\w": {}}}))
    )
    assert found["items"]["pattern"] == r"[0-9][^\n\r\x{2028}\x{2029}]"
    assert [*found["patternProperties"]] == ["[A-Za-z0-9_]"]
