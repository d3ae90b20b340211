"""What llguidance refuses is said in our words: no option, type or place of its own."""

import re

import pytest
from llguidance import LLMatcher, LLParserLimits

from raymoe.engine.grammar_errors import in_our_words
from raymoe.engine.grammars import compile_request
from raymoe.engine.workers.grammar_worker import (
    PARSER_LIMITS,
    grammar_text,
    load_vocabulary,
    reason,
)
from raymoe.structured import StructuredOutputs
from tests.unit.engine.fakes import EOS, VOCAB_SIZE

FOREIGN = re.compile(r"coerce|option|\byet\b|f64|lookaround|json-schema:///|\d \||\(at |\(And")
LOOP = {"a": {"$ref": "#/$defs/b", "minLength": 2}, "b": {"$ref": "#/$defs/a", "maxLength": 3}}
TWO = {"a": {}, "b": {}}


@pytest.fixture(scope="module")
def refusal(tokenizer_directory):
    vocabulary = load_vocabulary(str(tokenizer_directory), VOCAB_SIZE, [EOS])

    def refuse(options):
        outputs = StructuredOutputs.of(options)
        limits = LLParserLimits(**PARSER_LIMITS)
        try:
            text = grammar_text(**compile_request(outputs))
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
            problem = reason(ValueError(matcher.get_error()))
        except ValueError as error:
            problem = reason(error)
        return in_our_words(outputs, f"cannot be used: {problem}")

    return refuse


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "it has a oneOf .* write anyOf"),
        ({"type": "object", "properties": TWO, "minProperties": 1}, "it has minProp.* leave"),
        ({"$defs": LOOP, "$ref": "#/$defs/a"}, r"a \$ref to #/\$defs/a that leads back to itself"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "patternProperties /.a/ and /b./ that may"),
        ({"minimum": "3"}, 'it has minimum "3"; it takes a number'),
        ({"minLength": -1}, "it has minLength -1; it takes a whole number from 0"),
        ({"required": "a"}, 'it has required "a"; it takes a list'),
        ({"pattern": 3}, "it has pattern 3; it takes text"),
        ({"enum": 3}, "it has enum that is no list"),
        ({"properties": [1]}, "properties that are no object"),
        ({"type": "colour"}, "it has type colour; known are null, boolean"),
        ({"type": ["string", 3]}, "it has a type that is no name or list of null"),
        ({"properties": {"a": 3}}, "a part that is neither an object nor true or false"),
        ({"multipleOf": 0}, "it has multipleOf 0; it takes more than 0"),
        ({"multipleOf": 99999999999}, "it has multipleOf 99999999999, too many digits"),
        ({"type": "string", "pattern": "^a$", "format": "ipv4"}, "it allows no text: pattern"),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "it allows no number"),
        ({"anyOf": []}, "it allows no JSON: anyOf is empty"),
        ({"type": "string", "pattern": "[z-a]"}, "malformed regex: invalid character class range"),
        ({"type": "string", "pattern": "a^b"}, r"it has \^ or \$ within a regex"),
    ],
)
def test_schemas(schema, message, refusal):
    found = refusal({"json": schema})
    assert re.search(message, found)
    assert not FOREIGN.search(found)


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(a", r"'\(' at character 0, .*; close the group by \)"),
        (r"\p{Foo} 1 | b", "it has a malformed regex: Unicode property not found"),
        ("$a", r"it has \^ or \$ within a regex"),
    ],
)
def test_regexes(regex, message, refusal):
    found = refusal({"regex": regex})
    assert re.search(message, found)
    assert not FOREIGN.search(found)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: "a" b', 'line 1, character 8: "b" is not defined$'),
        ('a: "x"', "it has no rule start$"),
        ("start: A\n%declare A", "line 2, character 1: %declare is not supported"),
        ("%import common.FOO\nstart: FOO", "common.FOO cannot be imported; define it instead$"),
        ('start{a}: "a"', "rules with parameters are not supported"),
        ('start.5: "a"', "priorities are not supported"),
        ('start: A & B\nA: "a"\nB: "b"', "& joins terminals alone"),
        ("start: /a/l", "the flag l of a regex is not supported"),
        ('start: ("a"', r"line 1, character 12: Expected token '\)', found '\\n'$"),
        ("start: 'a'", "line 1, character 8: what begins here is not Lark"),
        ("start: /(a/", "line 1, character 8: it has a malformed regex: unclosed group$"),
        ("root ::= [z-a]", "^cannot be used: it has a malformed regex"),
    ],
)
def test_grammars(grammar, message, refusal):
    found = refusal({"grammar": grammar})
    assert re.search(message, found)
    assert not FOREIGN.search(found)


def test_what_happens_while_text_is_matched():
    outputs = StructuredOutputs.of({"regex": "a"})
    found = in_our_words(
        outputs, "cannot be matched: Current row has 2001 items; max is 2000; consider something"
    )
    assert "2001 readings of the text at once, and at most 2000" in found
    for ours in ("does not allow token 5", "cannot be matched: lexer error: too many expressions"):
        assert in_our_words(outputs, ours) == ours
