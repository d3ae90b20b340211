"""Regexes, EBNF and Lark in llguidance mean what they mean elsewhere, or are refused by name."""

import json
import random
import re
import string

import pytest
from llguidance import LLMatcher, LLParserLimits

from raymoe.engine.grammar_source import (
    exact_regex,
    exact_schema,
    lark_of_grammar,
    regex_of_choice,
)
from raymoe.engine.workers.grammar_worker import PARSER_LIMITS, load_vocabulary
from raymoe.errors import ConfigError
from raymoe.output_schema import OutputSchema
from tests.unit.engine.fakes import EOS, VOCAB_SIZE

WORD = f"{string.ascii_letters}{string.digits}_"


@pytest.fixture(scope="module")
def accepts(tokenizer_directory):
    vocabulary = load_vocabulary(str(tokenizer_directory), VOCAB_SIZE, [EOS])
    limits = LLParserLimits(**PARSER_LIMITS)

    def accepts(grammar, text):
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        assert not matcher.is_error(), matcher.get_error()
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", r"'\(\?='"), ("(?i)a", r"'\(\?i'"), ("a(?<!b)", r"'\(\?<'"), (r"\bword", "b'"),
        (r"(a)\1", "1'"), ("a++", r"'\+\+'"), ("a**", r"'\*\*'"), ("a{,3}", r"'\{'"),
        ("[]a]", r"'\[\]'"), ("[a-c--b]", "'--'"), ("[a", r"close the class"), (r"\A", "A'"),
        ("a\\", "without this escape"), (r"\x{41}", "x'"), ("a)", r"'\)' .*write \\\)"),
        ("(a|(b)", r"'\('"),
        (r"\ud83d", "no character of a text"), (r"[\u{110000}]", "no character of a text"),
    ],
)  # fmt: skip
def test_regexes_that_mean_something_else_are_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        exact_regex(pattern)


def test_regexes_accept_what_pythons_accept(accepts):
    rng = random.Random(3)
    atoms = [
        "a",
        "b",
        "[ab&]",
        "[^a]",
        r"\d",
        r"\s",
        r"[\w-]",
        r"\S",
        ".",
        "(?:a|bc)",
        r"[\[~]",
        r"\.",
    ]
    num_accepted = 0
    for _ in range(400):
        parts = [rng.choice(atoms) + rng.choice(("", "", "*", "+", "?", "{1,2}")) for _ in "xyz"]
        pattern = "".join(parts)
        grammar = LLMatcher.grammar_from_regex(exact_regex(pattern))
        text = "".join(rng.choices("aabbc1& ~[.-é\n", k=rng.randrange(5)))
        is_valid = re.fullmatch(pattern, text, re.ASCII) is not None
        assert accepts(grammar, text) == is_valid, (pattern, text)
        num_accepted += is_valid
    assert num_accepted > 20


@pytest.mark.parametrize(
    ("pattern", "members"),
    [
        (r"[\w-ä]", f"{WORD}-ä"),
        (r"[+-\w]", f"+-{WORD}"),
        (r"[.-\d]", ".-0123456789"),
        (r"[\d-x]", "0123456789-x"),
        (r"[\w-\.]", f"{WORD}-."),
        (r"[\d-\s]", "0123456789- \n"),
        (r"[^\S-a]", " \n"),
        (r"[\p{Lu}-~]", "ABÄZ-~"),
        (r"[a-b-~]", "ab-~"),
        (r"[-a]", "-a"),
        (r"[a\d-]", "a0123456789-"),
        (r"[\x2b-\x2d]", "+,-"),
        (r"[\u{61}-\u{63}]", "abc"),
        (r"[\ud83d\ude00-\ud83d\ude01]", "😀😁"),
        (r"[\--.]", "-."),
        (r"[!-\-]", "!+,-"),
    ],
)
def test_hyphens_beside_escapes_of_several_characters_are_hyphens(pattern, members, accepts):
    grammar = LLMatcher.grammar_from_regex(exact_regex(pattern))
    found = {text for text in "ABZÄabcxyzä019_+,-.!~@|\x7f \n😀😁" if accepts(grammar, text)}
    assert found == {one for one in members if one in "ABZÄabcxyzä019_+,-.!~@|\x7f \n😀😁"}


def test_constraints_and_schemas_have_one_dialect(accepts):
    for pattern, valid, invalid in (
        (r"^\p{Lu}\p{Ll}+$", "Éa", "éa"),
        (r"^(?<year>\d{4})-(?P<month>\d{2})$", "2026-11", "2026-1"),
        (r"^((?<a>x)|(?<a>y))\-$", "y-", "x"),
        (r"^\u{61}\/\u0062$", "a/b", "u/b"),
        (r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$", "a.b-c@d-e.org", "a+b@c.org"),
    ):
        grammar = LLMatcher.grammar_from_regex(exact_regex(pattern.strip("^$")))
        assert [accepts(grammar, valid), accepts(grammar, invalid)] == [True, False]
        text = {"type": "string", "pattern": pattern}
        schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
        constraint = exact_schema(OutputSchema.of(schema).text)
        grammar = LLMatcher.grammar_from_json_schema(constraint)
        assert accepts(grammar, json.dumps({"a": valid}, ensure_ascii=False))
        assert not accepts(grammar, json.dumps({"a": invalid}, ensure_ascii=False))


def test_choices_are_taken_as_they_are(accepts):
    texts = ("a.b", "a", "\\", "日\n", "[x]/")
    grammar = LLMatcher.grammar_from_regex(regex_of_choice(texts))
    for text in (*texts, "axb", "", "ab"):
        assert accepts(grammar, text) == (text in texts)


@pytest.mark.parametrize(
    ("source", "valid", "invalid"),
    [
        ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a", "abbb"]),
        ('root ::= [a-z]+ "z"', ["az", "zzz"], ["a", "z"]),
        ('root ::= a\na ::= "(" a ")" | ""', ["", "(())"], ["(()"]),
        ('root ::= x-1 # it\nx-1 ::= ["\\]^-]{2,3}', ['"]', "^--"], ['"', "[["]),
        (r'root ::= "\u00e9\x41\U0001f600" | [^\n]', ["éA😀", "x"], ["\n", "é"[:0]]),
        ('root ::= ("a"\n | .) "b"', ["ab", "\nb"], ["b"]),
        ('start: "a" /b+/', ["ab", "abbb"], ["a"]),
    ],
)
def test_grammars_accept_their_texts(source, valid, invalid, accepts):
    grammar = LLMatcher.grammar_from_lark(lark_of_grammar(source))
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("root ::= absent", '"absent" is not defined'),
        ('a ::= "b"', '"root" is not defined'),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        (r"root ::= [\ud800-\udfff]", "no Unicode character"),
        (r'root ::= "\q"', "escape"),
        ('root ::= "a', "no EBNF"),
        ('start: %json {"not": {}}', "'%json' is not Lark"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "'%llguidance' is not Lark"),
        ("start: <|tool|>", "is not Lark; name texts"),
        ('start: x\nx[max_tokens=3]: "a"', "leave the attributes"),
    ],
)
def test_grammars_that_cannot_be_kept_are_refused(source, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        lark_of_grammar(source)
