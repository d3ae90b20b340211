"""Schemas that no generation can be held to are refused by keyword and place."""

import json

import pytest

from raymoe.engine.json_schema import check_schema
from raymoe.errors import ConfigError


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "with 'not' at #"),
        ({"type": "array", "items": {"uniqueItems": True}}, "'uniqueItems' at #/items"),
        ({"anyOf": [{"type": "integer", "multipleOf": 2}]}, "'multipleOf' at #/anyOf/0"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"if": {}}}}, "'if' at #/\\$defs/a"),
        ({"$ref": "http://a/b"}, "http://a/b"),
        ({"$ref": "#/$defs/a", "minimum": 3}, "'minimum' without type 'number'"),
        ({"$ref": "#/$defs/a", "type": "integer"}, "'\\$ref' beside 'type'"),
        ({"enum": [1], "anyOf": []}, "'anyOf' beside 'enum'"),
        ({"minItems": 2}, "'minItems' without type 'array'"),
        ({"type": "string", "format": "colour"}, "format 'colour'"),
        ({"type": "object", "required": ["a"]}, "required 'a'"),
        ({"type": "string", "pattern": "a\\\\b"}, "a pattern with a backslash"),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {"a": {}}},
            "patternProperties",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(schema, message):
    with pytest.raises(ConfigError, match=message):
        check_schema(json.dumps(schema))


def test_what_users_write_passes():
    address = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^\\d{5}$"}}}
    check_schema(
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
