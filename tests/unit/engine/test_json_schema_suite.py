"""Grammars of JSON schemas accept what jsonschema accepts, in the JSON-Schema-Test-Suite.

`tests/data/json_schema_suite.json` has the suite and its license. A text counts as accepted if a
generation could write it, byte by byte. Properties are put in the order of the schema first.
"""

import datetime
import json
import random
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from packaging.version import Version

from raymoe.engine.grammars import compile_request
from raymoe.engine.workers.grammar_worker import PARSER_LIMITS, grammar_text, load_vocabulary
from raymoe.errors import ConfigError
from raymoe.structured import StructuredOutputs
from tests.unit.engine.fakes import EOS, VOCAB_SIZE

SUITE = json.loads((Path(__file__).parents[2] / "data/json_schema_suite.json").read_text())
GROUPS = SUITE["groups"]
REFUSED_WHOLE = {
    "contains", "dependentRequired", "dependentSchemas", "dynamicRef", "not", "refRemote", "defs",
}  # fmt: skip
# What only such texts hold is never generated: other names first, 1.0 for 1, escapes of strings.
NOT_GENERATED = 24
BOUNDS_SPACES = pytest.mark.skipif(
    Version(version("llguidance")) < Version("1.8"), reason="llguidance 1.7 bounds no spaces"
)


@pytest.fixture(scope="module")
def vocabulary(tokenizer_directory):
    return load_vocabulary(str(tokenizer_directory), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def matcher_of(vocabulary):
    limits = LLParserLimits(**PARSER_LIMITS)

    def make(schema):
        """A matcher, or None if the schema is refused."""
        try:
            outputs = StructuredOutputs.of({"json": schema})
            text = grammar_text(**compile_request(outputs))
        except (ConfigError, ValueError):
            return None
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        return None if matcher.is_error() else matcher

    return make


def accepts(matcher, text):
    tokens = list(text.encode())
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def ordered(value, schema):
    """The value with its properties in the order of the schema."""
    if isinstance(value, dict):
        known = schema.get("properties", {}) if isinstance(schema, dict) else {}
        names = [*(name for name in known if name in value), *(n for n in value if n not in known)]
        return {name: ordered(value[name], known.get(name, {})) for name in names}
    return [ordered(item, {}) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_refused_is_kept(group, matcher_of):
    num_kept = 0
    for description, schema, instances in GROUPS[group]:
        matcher = matcher_of(schema)
        if matcher is None:
            continue
        num_kept += 1
        for what, value, is_valid in instances:
            text = json.dumps(ordered(value, schema), ensure_ascii=False)
            if accepts(matcher, text):
                assert is_valid, (description, what, schema, text)
    assert (num_kept == 0) == (group in REFUSED_WHOLE)


def test_most_of_what_is_valid_can_be_generated(matcher_of):
    rejected, num_valid = [], 0
    for group, cases in GROUPS.items():
        for description, schema, instances in cases:
            matcher = matcher_of(schema)
            for what, value, is_valid in instances if matcher else ():
                if is_valid:
                    num_valid += 1
                    text = json.dumps(ordered(value, schema), ensure_ascii=False)
                    if not accepts(matcher, text):
                        rejected.append((group, description, what))
    assert num_valid >= 250
    assert len(rejected) <= NOT_GENERATED, rejected


def test_the_suite_agrees_with_jsonschema_so_that_its_answers_count():
    for group in ("properties", "items", "enum", "anyOf", "minimum", "pattern"):
        for _, schema, instances in GROUPS[group]:
            validator = jsonschema.Draft202012Validator(schema)
            for what, value, is_valid in instances:
                assert validator.is_valid(value) == is_valid, what


@pytest.mark.parametrize(
    ("schema", "text", "is_valid"),
    [
        ({"type": "object", "properties": {"a": {}}}, '{"a":1,"b":2}', True),  # objects are open
        ({"type": "object", "additionalProperties": False}, '{"b":2}', False),
        ({"type": "integer"}, "-0", True),
        ({"type": "array"}, "[" + " " * 32 + "]", True),
        pytest.param({"type": "array"}, "[" + " " * 33 + "]", False, marks=BOUNDS_SPACES),
        ({"type": "string"}, '"a\nb"', False),
        ({"type": "string", "pattern": "^\\d$"}, '"٣"', False),
        ({"type": "string", "pattern": "^\\S$"}, '"\ufeff"', False),
        ({"type": "string", "pattern": "^[^\\s]$"}, '"\x85"', False),
        ({"type": "string", "pattern": "^[a&&b]$"}, '"&"', True),
        ({"type": "string", "pattern": "^.$"}, '"\u2028"', False),
        ({"type": "string", "pattern": "a|^b$"}, '"xax"', True),
        ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, "3", False),
        ({"enum": [1, {"a": ["é\n"]}]}, '{"a":["é\\n"]}', True),
    ],
)
def test_details_of_the_form(schema, text, is_valid, matcher_of):
    assert accepts(matcher_of(schema), text) == is_valid


def test_compact_json_has_no_space(vocabulary):
    outputs = StructuredOutputs.of({"json_object": True, "disable_any_whitespace": True})
    text = grammar_text(**compile_request(outputs))
    matcher = LLMatcher(vocabulary, text, log_level=0)
    assert accepts(matcher, '{"a":[1,2]}')
    assert not accepts(matcher, '{"a": 1}')


def draw(matcher, rng):
    """A text of the grammar, random byte by byte."""
    matcher, text = matcher.deep_copy(), bytearray()
    mask = np.zeros(matcher_words(), np.int32)
    while not (matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.2)):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256])
        text.append(rng.choice(allowed.tolist()))
        assert matcher.try_consume_tokens([text[-1]]) == 1
    return bytes(text).decode()


def matcher_words():
    return -(-VOCAB_SIZE // 32)


def conforms(text, name):
    """What jsonschema's checker says; without its optional packages, Python of times."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    if name in ("time", "date-time"):
        text = text.upper().replace("Z", "+00:00")
        try:
            datetime.datetime.fromisoformat(f"1970-01-01T{text}" if name == "time" else text)
        except ValueError:
            return False
    return checker.conforms(text, name)


FORMATS = (
    "date", "time", "date-time", "duration", "email", "idn-email", "hostname", "ipv4", "ipv6",
    "iri", "uri", "uuid",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_texts_of_a_format_are_valid(name, count, matcher_of):
    rng = random.Random(count)
    schema = {"type": "string", "format": name}
    for more in ({}, {"pattern": "[0-9a-f:]", "maxLength": 40, "minLength": 7}):
        if name in ("duration", "uri", "iri") and more:
            continue  # random texts are long
        matcher = matcher_of(schema | more)
        for _ in range(count):
            text = json.loads(draw(matcher, rng))
            assert conforms(text, name), text
            jsonschema.validate(text, schema | more)


@pytest.mark.parametrize(
    ("name", "text", "is_valid"),
    [
        ("time", "23:59:59Z", True),
        ("time", "23:59:60Z", False),
        ("time", "23:59:59.25+05:30", True),
        ("date-time", "2016-12-31T23:59:60Z", False),
        ("date-time", "2024-02-29t00:00:00z", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2000-02-29", True),
        ("date", "0000-01-01", False),
        ("date", "2023-04-31", False),
        ("date", "2023-12-31", True),
        ("hostname", ".".join(["a" * 60] * 5), False),
        ("uuid4", "any text", True),  # an annotation
    ],
)
def test_dates_and_times_are_those_of_the_calendar(name, text, is_valid, matcher_of):
    schema = {"type": "string", "format": name}
    assert accepts(matcher_of(schema), json.dumps(text)) == is_valid
    assert accepts(matcher_of(schema | {"pattern": "."}), json.dumps(text)) == is_valid


def is_within(value, schema):
    bounds = [
        (schema.get("minimum"), "__ge__"), (schema.get("maximum"), "__le__"),
        (schema.get("exclusiveMinimum"), "__gt__"), (schema.get("exclusiveMaximum"), "__lt__"),
    ]  # fmt: skip
    return all(b is None or getattr(value, how)(Fraction(str(b))) for b, how in bounds)


def texts_near(bounds):
    """Numbers at and around bounds, with some digits too many."""
    steps = (0, "0.1", "0.001", "0.000001", "0.5", 1)
    values = {
        Fraction(str(b)) + sign * Fraction(s) for b in bounds for s in steps for sign in (1, -1)
    }
    texts = {"-0", "0.0", "-0.0"}
    for value in values:
        for places in (0, 1, 3, 6):
            digits = abs(value) * 10**places
            if digits.denominator == 1:
                text = str(digits.numerator).rjust(places + 1, "0")
                text = f"{text[:-places]}.{text[-places:]}" if places else text
                texts.add(f"-{text}" if value < 0 else text)
    return texts


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_numbers_stay_within_their_bounds(count, matcher_of):
    rng = random.Random(count)
    for _ in range(count):
        low = rng.choice(
            (0, 0, 1, -1, 5, 10, 99, -1000, 0.5, -0.6, 1.5, rng.randrange(-99, 99) / 8)
        )
        high = low + rng.choice((0.001, 0.5, 0.999, 1, 1.001, 2, 100))
        names = (
            rng.choice(("minimum", "exclusiveMinimum")),
            rng.choice(("maximum", "exclusiveMaximum")),
        )
        bounds = dict(zip(names, (low, round(high, 4)), strict=True))
        parts = [{name: bound} for name, bound in bounds.items()]
        for schema in (
            {"type": "number"} | bounds,
            {"type": "number", "allOf": parts},
            {"$ref": "#/$defs/a", "type": "number", "$defs": {"a": parts[0]}} | parts[1],
        ):
            matcher = matcher_of(schema)
            for text in texts_near(bounds.values()):
                if accepts(matcher, text):
                    assert is_within(Fraction(text), bounds), (schema, text)


def test_bounds_of_one_field_do_not_meet_those_of_another(matcher_of):
    price = {"type": "number", "exclusiveMinimum": 0}
    share = {"type": "number", "minimum": 0, "maximum": 0.5}
    note = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"properties": {"price": price, "share": share, "note": note}, "type": "object",
              "additionalProperties": False}  # fmt: skip
    matcher = matcher_of(schema)
    assert accepts(matcher, '{"price":19.5,"share":0,"note":null}')
    assert not accepts(matcher, '{"price":0,"share":0,"note":null}')
    assert not accepts(matcher, '{"price":1,"share":0.51,"note":null}')
    integer = matcher_of({"type": ["integer", "null"], "exclusiveMinimum": 0, "maximum": 3})
    assert [accepts(integer, str(n)) for n in range(5)] == [False, True, True, True, False]
    cents = matcher_of({"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01})
    assert [accepts(cents, text) for text in ("0", "0.01", "0.005", "12.5")] == [0, 1, 0, 1]
    draft_4 = matcher_of({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5})
    assert [accepts(draft_4, text) for text in ("0", "0.0", "0.2")] == [False, False, True]


def test_one_of_references_that_exclude_each_other_is_kept(matcher_of):
    cat = {"properties": {"k": {"const": "cat"}, "next": {"$ref": "#/$defs/Pet"}},
           "required": ["k"], "type": "object", "additionalProperties": False}  # fmt: skip
    dog = {"properties": {"k": {"const": "dog"}}, "required": ["k"], "type": "object"}
    pet = {"discriminator": {"propertyName": "k", "mapping": {"cat": "#/$defs/Cat"}},
           "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}  # fmt: skip
    matcher = matcher_of({"$defs": {"Cat": cat, "Dog": dog, "Pet": pet}, "$ref": "#/$defs/Pet"})
    assert accepts(matcher, '{"k":"cat","next":{"k":"dog"}}')
    assert not accepts(matcher, '{"k":"cow"}')
    assert not accepts(matcher, '{"k":"cat","age":1}')
