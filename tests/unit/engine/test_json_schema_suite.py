"""Grammars of JSON schemas accept what jsonschema accepts, in the JSON-Schema-Test-Suite.

`tests/data/json_schema_suite.json` has the suite and its license. A text counts as accepted if a
generation could write it, byte by byte. Properties are put in the order of the schema first.
"""

import json
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher, LLParserLimits

from raymoe.engine.grammars import compile_request
from raymoe.engine.workers.grammar_worker import PARSER_LIMITS, grammar_text, load_vocabulary
from raymoe.errors import ConfigError
from raymoe.structured import StructuredOutputs
from tests.unit.engine.fakes import EOS, VOCAB_SIZE

SUITE = json.loads((Path(__file__).parents[2] / "data/json_schema_suite.json").read_text())
GROUPS = SUITE["groups"]
REFUSED_WHOLE = {
    "contains", "dependentRequired", "dependentSchemas", "dynamicRef", "if-then-else",
    "maxContains", "minContains", "not", "propertyNames", "refRemote", "unevaluatedItems",
    "unevaluatedProperties", "defs",
}  # fmt: skip
# What only such texts hold is never generated: other names first, 1.0 for 1, escapes of strings.
NOT_GENERATED = 24


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
        ({"type": "array"}, "[" + " " * 33 + "]", False),
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
