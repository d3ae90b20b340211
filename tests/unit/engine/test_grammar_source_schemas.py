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
        ({"$ref": "#/$defs/a", "$defs": {"a": {"if": {}, "then": {}}}}, "'if' at #/\\$defs/a"),
        ({"type": "integer", "x-guidance": {"lenient": True}}, "'x-guidance' at #"),
        ({"minimun": 3}, "'minimun' at #.* did you mean 'minimum'"),
        ({"max_length": 3}, "'max_length' at #.* did you mean 'maxLength'"),
        ({"propertyNames": {"maxLength": 3}}, "'propertyNames' at #"),
        ({"unevaluatedProperties": False}, "'unevaluatedProperties' at #"),
        ({"$ref": "http://a/b"}, "http://a/b"),
        ({"$ref": "#/$defs/absent"}, "'#/\\$defs/absent' at #"),
        ({"enum": [{"not": {}}], "$ref": "#/enum/0"}, "'#/enum/0'"),
        ({"$defs": {"a": {"$id": "b", "items": {"$ref": "#"}}}}, "'\\$id' above a .* #/\\$defs/a"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "b"}}}, "ref '#a'"),
        ({"$ref": "#None"}, "ref '#None'"),
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
    for schema in (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"],
         "minProperties": 2},
        {"properties": {"not": {}, "x-guidance": {}}},
        {"oneOf": [{"const": 1}, {"const": 2}], "discriminator": {"propertyName": "k"}},
        {"$ref": "#a", "$defs": {"a": {"$anchor": "a", "$id": "#/properties/a"}}},
        {"propertyNames": {"type": "string", "description": "a key"}, "if": {}, "then_": 1},
        {"unevaluatedProperties": {}, "dependentRequired": {}, "uniqueItems": False},
    ):  # fmt: skip
        exact_schema(json.dumps(schema))


ANNOTATIONS = [
    {"$comment": "c", "title": "t", "description": "d", "default": 10**400, "examples": [1]},
    {"deprecated": True, "readOnly": True, "writeOnly": False, "example": "e"},
    {"contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {"not": {}}},
    {"x-order": 1, "x-enum-varnames": ["a"], "xml": {"name": "a"}, "externalDocs": {"url": "u"}},
    {"propertyOrdering": ["a"], "enumDescriptions": ["b"], "enumNames": ["A"], "nullable": True},
    {"markdownDescription": "m", "errorMessage": "e", "note": "not a keyword", "unit": "s"},
    {"discriminator": {"propertyName": "k"}, "$vocabulary": {}, "id": "i", "order": {"if": {}}},
    {"format": "int64"}, {"format": "double"}, {"format": "password"}, {"format": "uuid4"},
    {"format": "date_time"}, {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base"},
]  # fmt: skip


@pytest.mark.parametrize("more", ANNOTATIONS, ids=lambda more: next(iter(more)))
def test_annotations_constrain_nothing(more):
    for place in ({}, {"type": "string"}, {"enum": ["not", "if"]}):
        wrapped = {"type": "object", "properties": {"a": place | more}} | more
        found = json.loads(exact_schema(json.dumps(wrapped)))
        assert found == {"type": "object", "properties": {"a": place}}


def test_a_known_dialect_is_passed_on():
    for draft in ("draft-07", "draft/2019-09"):
        for scheme in ("http", "https"):
            schema = {"$schema": f"{scheme}://json-schema.org/{draft}/schema#", "items": [True]}
            assert draft in json.loads(exact_schema(json.dumps(schema)))["$schema"]


def test_regexes_are_rewritten_where_they_stand():
    schema = {"type": "string", "pattern": "\\d."}
    found = json.loads(
        exact_schema(json.dumps({"items": schema, "patternProperties": {"\\w": {}}}))
    )
    assert found["items"]["pattern"] == r"[0-9][^\n\r\x{2028}\x{2029}]"
    assert [*found["patternProperties"]] == ["[A-Za-z0-9_]"]


def test_malformed_neighbours_of_a_format_are_left_to_the_compiler():
    for name, value in (("allOf", 3), ("maxLength", "4")):
        schema = {"format": "hostname" if name == "maxLength" else "date", "pattern": "a"}
        assert json.loads(exact_schema(json.dumps(schema | {name: value})))[name] == value
