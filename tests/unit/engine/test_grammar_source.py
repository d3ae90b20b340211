"""Regexes, EBNF and Lark in llguidance mean what they mean elsewhere, or are refused by name."""

import random
import re

import pytest
from llguidance import LLMatcher, LLParserLimits

from raymoe.engine.grammar_source import exact_regex, lark_of_grammar, regex_of_choice
from raymoe.engine.workers.grammar_worker import PARSER_LIMITS, load_vocabulary
from raymoe.errors import ConfigError
from tests.unit.engine.fakes import EOS, VOCAB_SIZE


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
        ("a\\", "without this escape"), (r"\x{41}", "x'"),
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
