"""Which schemas make columns, what answers become, and what is said where they become nothing."""

import dataclasses
import functools
import itertools
import json
import pickle
import re
from decimal import Decimal
from typing import Annotated

import pytest
from pydantic import BaseModel, Field, field_validator

from raymoe.config import SamplingParams
from raymoe.engine.outputs import Generation
from raymoe.engine.workers.schema_worker import make_validator, problem
from raymoe.errors import ConfigError
from raymoe.output_schema import OutputSchema, ValueType, generation_params
from tests.invoices import Invoice

INVOICE = {
    "number": 7, "currency": "EUR", "customer": None, "paid": True,
    "items": [
        {"name": "pen", "price": 2, "tags": ["new"]},
        {"name": 'a "b"', "price": 0.29, "count": 3.0, "tags": []},
    ],
}  # fmt: skip


def of(**properties):
    """The schema of an object with these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def check(schema, text):
    """Parse an answer of a row whose constraint was not the schema."""
    return schema.parse(text, "stop", functools.partial(problem, make_validator(schema.text)))


def test_a_class_and_its_schema_in_a_file_have_the_same_types(tmp_path):
    path = tmp_path / "invoice.json"
    path.write_text(json.dumps(Invoice.model_json_schema()))
    ours = OutputSchema.of(Invoice)
    assert ours.root == OutputSchema.of(path).root == OutputSchema.of(str(path)).root
    assert OutputSchema.of(ours) is ours
    again = pickle.loads(pickle.dumps(OutputSchema.of(ours.as_dict())))
    assert again == dataclasses.replace(ours, model=None)


TYPES = {
    "a string": ({"type": "string", "format": "date"}, ValueType("string")),
    "an enum": ({"enum": ["a", "b"]}, ValueType("string")),
    "an enum with null": ({"enum": [1, None]}, ValueType("integer", is_nullable=True)),
    "a constant": ({"const": 2.5}, ValueType("number")),
    "names of types": ({"type": ["null", "boolean"]}, ValueType("boolean", is_nullable=True)),
    "both kinds of numbers": ({"type": ["integer", "number"]}, ValueType("number")),
    "oneOf": (
        {"oneOf": [{"type": "null"}, {"type": "integer"}]},
        ValueType("integer", is_nullable=True),
    ),
    "texts of two forms": (
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "string"}]},
        ValueType("string"),
    ),
    "allOf of one": ({"allOf": [{"$ref": "#/$defs/a"}], "title": "A"}, ValueType("integer")),
    "null alone": ({"type": "null"}, ValueType("null", is_nullable=True)),
    "an array": (
        {"type": "array", "items": {"type": ["string", "null"]}},
        ValueType("array", item=ValueType("string", is_nullable=True)),
    ),
}


@pytest.mark.parametrize(("part", "expected"), TYPES.values(), ids=TYPES)
def test_each_part_of_a_schema_has_one_type(part, expected):
    schema = {**of(a=part), "$defs": {"a": {"type": "integer"}}}
    assert OutputSchema.of(schema).root.fields == (("a", expected),)


def test_what_is_not_required_may_be_null_and_objects_have_no_other_properties():
    schema = of(a={"type": "object", "properties": {"b": {"type": "integer"}}})
    found = OutputSchema.of(schema)
    assert found.root.fields[0][1].fields == (("b", ValueType("integer", is_nullable=True)),)
    assert check(found, '{"a": {"c": 1}}').error.startswith("$.a: Additional properties")
    assert "additionalProperties" not in schema


REFUSED = {
    "a union": ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a union of integer and str"),
    "two objects": (
        {"oneOf": [of(b={"type": "integer"}), of(c={"type": "integer"})]},
        "a union of object and object at $.a",
    ),
    "any names": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        "an object with properties of any name at $.a",
    ),
    "recursion": ({"$ref": "#/$defs/tree"}, "#/$defs/tree, which leads back to itself, at $.a.b[]"),
    "no type": ({"title": "A"}, "no type at $.a"),
    "anything": (True, "the schema True at $.a"),
    "a tuple": ({"type": "array", "prefixItems": [{}]}, "an array without one type of items"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, "an allOf of 2 at $.a"),
    "a reference into nothing": ({"$ref": "#/$defs/b"}, "$ref '#/$defs/b' at $.a"),
    "a web address": ({"$ref": "https://example.com/a.json"}, "$ref 'https://example.com/a.json'"),
}


@pytest.mark.parametrize(("part", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_type_of_a_column_is_refused_with_its_place(part, message):
    tree = of(b={"type": "array", "items": {"$ref": "#/$defs/tree"}})
    with pytest.raises(ConfigError, match=re.escape(f"--output-schema has {message}")) as error:
        OutputSchema.of({**of(a=part), "$defs": {"tree": tree}}, what="--output-schema")
    assert "constrain the text alone by structured_outputs" in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "output_schema is a int; it takes a pydantic class, a JSON schema"),
        ({"type": "array", "items": {"type": "integer"}}, "of the type array; it takes an object"),
        ({"type": ["object", "null"], **of(a={"const": 1})}, None),
        ({**of(a={"const": 1}), "type": ["object", "null"]}, "object or null; it takes an object"),
        (
            of(a={"type": "string", "pattern": "(?=a)"}),
            "$.properties.a.pattern: structured_outputs",
        ),
        ({"type": "objekt"}, "output_schema is no JSON schema: $.type: 'objekt' is not valid"),
        ("/no/such/file.json", "output_schema /no/such/file.json"),
    ],
)
def test_a_schema_is_that_of_an_object(value, message):
    if message is None:
        assert OutputSchema.of(value).root.kind == "object"
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        OutputSchema.of(value)


def test_values_have_the_types_of_their_columns():
    schema = OutputSchema.of(OutputSchema.of(Invoice).as_dict())
    text = json.dumps(INVOICE).replace(r"a \"b\"", "ab")
    value, error = schema.parse(text, "length")  # complete, though at its last token
    assert error == ""
    assert value == json.loads(text)
    assert type(value["items"][0]["price"]) is float
    assert type(value["items"][1]["count"]) is int


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "$"),
        ("{", "$"),
        ('{"a', "$"),
        ('{"a":', "$.a"),
        ('{"a":{"b":[', "$.a.b[0]"),
        ('{"a":{"b":[1,', "$.a.b[1]"),
        ('{"a":{"b":[1,{"c":[],"d":"x, {', "$.a.b[1].d"),
        ('{"a":{"b":[1,{"c":[],"d":"x\\"', "$.a.b[1].d"),
        ('{"a":{"b":[1,{"c":[],"d":"x"}', "$.a.b[1]"),
        ('{"a":{"b":[1,{"c":[],"d":"x"}],', "$.a"),
        ('{"a":{"b":[1,{"c":[],"d":"x"}],"e":1.', "$.a.e"),
        ('{"a":{"b":[1,{"c":[],"d":"x"}],"e":1.5}', "$.a"),
    ],
)
def test_an_answer_that_was_cut_says_where(text, where):
    schema = OutputSchema.of(of(a=of(b={"const": "x"})))
    assert schema.parse(text, "length") == (None, f"cut by max_tokens at {where}")
    assert schema.parse(text, "stop").error.startswith(f"{where}: no JSON: ")


SMALL = of(
    a={"type": "integer"}, b={"type": "number", "multipleOf": 0.01}, c={"type": ["string", "null"]}
)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"a": "x"}, "$.a: 'x' is not of type 'integer'"),
        ({"a": 1.0, "b": 0.29}, ""),
        ({"b": 0.295}, "$.b: 0.295 is not a multiple of 0.01"),
        ({"a": 2**63 - 1}, ""),
        ({"a": 2**63}, "$.a: a number that does not fit 64 bits"),
        ({"a": -(2**63) - 1}, "$.a: a number that does not fit 64 bits"),
        ({"b": 10**400}, "$.b: a number that does not fit 64 bits"),
        ({"b": float("inf")}, "$.b: a number that does not fit 64 bits"),
        ({"b": float("nan")}, "$.b: a number that does not fit 64 bits"),
        ({"c": None}, ""),
        ({"c": "\ud800"}, "$.c: half of a surrogate pair, which is no text"),
        ({"c": ["\ud800" * 9]}, r"$.c: ['\ud800\ud800"),
    ],
)
def test_an_answer_that_is_not_valid_or_does_not_fit_says_where(changed, error):
    text = json.dumps({"a": 1, "b": 1, "c": "x", **changed})
    value, found = check(OutputSchema.of(SMALL), text)
    assert found.encode().decode().startswith(error)
    assert bool(found) == bool(error)
    assert (value is None) == bool(error)


def test_texts_that_are_no_json_are_no_values():
    schema = OutputSchema.of(SMALL)
    deep = ['{"b":' * depth + "1" + "}" * depth for depth in range(900, 1000)]
    for text in ("hello", "}{", "]", '{"a": 1} x', "[" * 100_000, "9" * 5000, *deep):
        assert schema.parse(text, "stop").value is None
        assert schema.parse(text, "stop").error.startswith("$")


class Even(BaseModel):
    numbers: list[int]

    @field_validator("numbers")
    @classmethod
    def check(cls, numbers):
        if sum(numbers) % 2:
            raise ValueError("the sum is odd")
        if not numbers:
            raise KeyError("none")
        return numbers


def test_a_class_makes_instances_and_may_refuse_more_than_its_schema():
    schema = OutputSchema.of(Even)
    assert schema.parse('{"numbers": [1, 3]}', "stop") == (Even(numbers=[1, 3]), "")
    assert schema.parse('{"numbers": [1]}', "stop") == (
        None, "$.numbers: Value error, the sum is odd",
    )  # fmt: skip
    assert schema.parse('{"numbers": []}', "stop") == (None, "KeyError: 'none'")
    assert schema.parse('{"numbers": ["1"]}', "stop") == (
        None, "$.numbers[0]: the type is string; it takes integer",
    )  # fmt: skip


class OddError(Exception):
    errors = ("no function",)
    __notes__ = 5

    def __str__(self):
        raise ZeroDivisionError


class Odd(BaseModel):
    a: int

    @field_validator("a")
    @classmethod
    def check(cls, a):
        raise {1: OddError, 2: RecursionError, 3: ExceptionGroup("b", [OddError()])}[a]


def test_an_exception_of_a_class_s_own_is_told_like_any_other():
    schema = OutputSchema.of(Odd)
    assert schema.parse('{"a": 1}', "stop") == (None, "OddError: it has no message")
    assert schema.parse('{"a": 2}', "stop").error.startswith("RecursionError")
    assert schema.parse('{"a": 3}', "stop").error.startswith("ExceptionGroup")
    assert schema.parse('{"a": 4}', "stop").error == "KeyError: 4"


class Amounts(BaseModel):
    price: Annotated[Decimal, Field(decimal_places=2, ge=Decimal("0.05"))] | None
    names: set[str]
    kinds: frozenset[int] = frozenset()


def test_a_decimal_is_a_number_and_a_set_an_array():
    schema = OutputSchema.of(Amounts)
    assert schema.root.fields == (
        ("price", ValueType("number", is_nullable=True)),
        ("names", ValueType("array", item=ValueType("string"))),
        ("kinds", ValueType("array", is_nullable=True, item=ValueType("integer"))),
    )
    value, error = schema.parse('{"price": 0.10, "names": ["a", "b", "a"]}', "stop")
    assert (value, error) == (Amounts(price=Decimal("0.10"), names={"a", "b"}), "")
    again = OutputSchema.of(schema.as_dict())
    assert check(again, '{"price": 0.29, "names": ["a", "a"]}').error == ""
    assert "minimum" in check(again, '{"price": 0.01, "names": []}').error
    assert "multiple" in check(again, '{"price": 0.295, "names": []}').error


class Handle:
    pass


class Opaque(BaseModel, arbitrary_types_allowed=True):
    a: Handle


def test_a_class_without_a_schema_is_refused():
    with pytest.raises(ConfigError, match="output_schema is a class without a JSON schema: Pydant"):
        OutputSchema.of(Opaque)


def chained(count, part):
    """Definitions, each of which is the part with the name of the next one."""
    names = [f"d{i}" for i in range(count + 1)]
    defs = {name: part(f"#/$defs/{after}") for name, after in itertools.pairwise(names)}
    return {**of(a={"$ref": "#/$defs/d0"}), "$defs": {**defs, names[-1]: {"type": "integer"}}}


def test_references_are_counted_while_they_are_followed():
    double = chained(30, lambda after: of(x={"$ref": after}, y={"$ref": after}))
    with pytest.raises(ConfigError, match="more than 10000 parts, references written out, at"):
        OutputSchema.of(double)
    with pytest.raises(ConfigError, match="more than 128 levels, references among them, at"):
        OutputSchema.of(chained(2000, lambda after: {"$ref": after}))
    both = chained(2000, lambda after: {"anyOf": [{"$ref": after}, {"type": "null"}]})
    with pytest.raises(ConfigError, match="more than 128 levels"):
        OutputSchema.of(both)
    assert OutputSchema.of(chained(8, lambda after: of(x={"$ref": after}, y={"$ref": after})))


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "#",
        "#/properties/a",
        "file:///etc/passwd",
        "http://[",
        "#/required/x",
        "#none",
        "a.json",
    ],
)
def test_a_reference_to_nothing_or_to_itself_is_refused_when_it_is_read(reference):
    with pytest.raises(ConfigError, match=re.escape(repr(reference)) + "|leads back to itself"):
        OutputSchema.of(of(a={"$ref": reference}))


def test_samples_have_values_of_their_own_and_error_rows_their_error():
    schema = OutputSchema.of(of(a={"type": "integer"}))
    cut = Generation(text='{"a"', finish_reason="length")
    found = Generation(text='{"a":1}', others=(cut,)).parsed_as(schema)
    assert (found.parsed, found.parsed_error) == ({"a": 1}, "")
    assert (found.others[0].parsed, found.others[0].parsed_error) == (
        None,
        "cut by max_tokens at $.a",
    )
    bad = Generation.from_error(ValueError("no")).parsed_as(schema)
    assert (bad.parsed, bad.parsed_error) == (None, "ValueError: no")


def test_parameters_get_the_schema_as_their_constraint():
    schema = OutputSchema.of(of(a={"type": "integer"}))
    params = generation_params(SamplingParams(max_tokens=5), schema)
    assert generation_params(params, schema) == params  # as where the driver has done it before
    assert params == generation_params({"max_tokens": 5}, schema)
    assert json.loads(params.structured_outputs.json) == schema.as_dict()
    assert generation_params(None, None) == SamplingParams()
    compact = schema.constrain({"structured_outputs": {"disable_any_whitespace": True}})
    assert SamplingParams.from_dict(compact).structured_outputs.disable_any_whitespace
    for other in ({"regex": "a"}, {"json": of(b={"type": "integer"})}, '{"json_object": true}'):
        with pytest.raises(ConfigError, match="output_schema and structured_outputs contradict"):
            schema.constrain({"structured_outputs": other})
    with pytest.raises(ConfigError, match="leave out min_tokens"):
        generation_params({"min_tokens": 2}, schema)
