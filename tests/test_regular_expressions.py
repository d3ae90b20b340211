"""No regular expression of the package takes more than linear time on hostile text.

Rows, models, answers and other machines control the texts, so each pattern gets long ones that are
made of its own parts: repeated, unfinished, and with something at the end that does not match.
"""

import ast
import functools
import importlib
import itertools
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from re import _constants as codes
from re import _parser as parser
from types import SimpleNamespace

import pytest

PACKAGE = Path(__file__).parent.parent / "raymoe"
NUM_CHARACTERS = 100_000
LIMIT_S = 0.5  # CPU time: linear work takes some ms, quadratic work ten seconds and more
SCANNING = {"search", "sub", "subn", "finditer", "findall", "split"}
FUNCTIONS = SCANNING | {"compile", "match", "fullmatch"}
# Local names in patterns that functions build, by file.
LOCALS = {
    "chat/tool_calls.py": {
        "begins": "<a>|<b>",
        "ends": "</a>|</b>",
        "call": ("<function=", "</function>"),
        "tag": ("<parameter=", "</parameter>"),
        "begin": "|<parameter=(?:a|b)>",
        "frames": (("<a>", "</a>"), ("<b>", "</b>")),
    },
    "doctor/machine.py": {"field": "MemAvailable"},
    "cli/writers.py": {"PREFIX": "part-", "suffix": r"\.jsonl"},
    "download/uris.py": {"words": "NoSuchKey|404"},
    "specs/quantization.py": {"name": "self_attn.q_proj"},
}
# Patterns of configurations, for which `specs.module_patterns` decides what is understood; those
# for messages of llguidance, which the worker cuts, and for names of files.
BUILT_ELSEWHERE = {
    "specs/module_patterns.py": {"expression"},
    "specs/adapter_config.py": {"expression"},
    "engine/grammar_errors.py": {"pattern"},
    "specs/other_formats.py": {"pattern"},
}


@dataclass
class Found:
    """A pattern, where it is, and the methods that it is used with."""

    where: str
    pattern: re.Pattern[str]
    methods: set[str] = field(default_factory=set)


def calls_of(tree: ast.AST) -> Iterator[tuple[ast.Call, str | None]]:
    """Yield calls of `re`, and the name that a compiled pattern gets."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
            names |= {id(value): target.id for target, value in pairs if hasattr(target, "id")}
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and getattr(node.func.value, "id", "") == "re" and node.func.attr in FUNCTIONS:
            yield node, names.get(id(node))


@functools.cache
def methods_by_name() -> dict[str, set[str]]:
    """Return the methods that are called, by the name of what has them."""
    methods = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS - {"compile"}:
                owner = node.value
                methods[getattr(owner, "id", getattr(owner, "attr", ""))].add(node.attr)
    return methods


def evaluated(node: ast.expr, names: dict) -> object:
    return eval(compile(ast.Expression(node), "<pattern>", "eval"), names)


@functools.cache
def patterns_of(place: str) -> list[Found]:
    methods, found = methods_by_name(), []
    for call, name in calls_of(ast.parse((PACKAGE / place).read_text())):
        given = call.args[0]
        if isinstance(given, ast.Name) and given.id in BUILT_ELSEWHERE.get(place, ()):
            continue
        names = {"re": re}
        if not isinstance(given, ast.Constant):
            module = "raymoe." + place.removesuffix(".py").replace("/", ".")
            names |= vars(importlib.import_module(module.removesuffix(".__init__")))
            names |= LOCALS.get(place, {})
        places = {"compile": 1, "sub": 4, "split": 3}
        flags = [one.value for one in call.keywords if one.arg == "flags"]
        flags += call.args[places.get(call.func.attr, 2) :]
        pattern = re.compile(evaluated(given, names), *(evaluated(one, names) for one in flags))
        used = methods[name] if call.func.attr == "compile" else {call.func.attr}
        found.append(Found(f"{place}:{call.lineno}", pattern, used or {"search"}))
    return found


def example(tokens: object) -> str:
    """Return a text that a parsed pattern matches, mostly."""
    return "".join(itertools.chain.from_iterable(map(one_example, tokens)))


def one_example(token: tuple) -> str:
    code, value = token
    if code in EXAMPLES:
        return EXAMPLES[code](value)
    if code is codes.IN:
        return "x" if value[0][0] is codes.NEGATE else one_example(value[0])
    inner = inner_of(code, value)
    least = max(1, value[0]) if code in REPEATS else 1
    return example(inner[0]) * least if inner else ""


WORDS = {codes.CATEGORY_DIGIT: "0", codes.CATEGORY_SPACE: " ", codes.CATEGORY_WORD: "a"}
EXAMPLES = {
    codes.LITERAL: chr,
    codes.NOT_LITERAL: lambda _: "x",
    codes.ANY: lambda _: "x",
    codes.CATEGORY: lambda value: WORDS.get(value, "-"),
    codes.RANGE: lambda value: chr(value[0]),
}
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)


def parts(tokens: object) -> Iterator[str]:
    """Yield what each begin of a pattern and of its groups matches, and each of their tokens."""
    tokens = list(tokens)
    for index, (code, value) in enumerate(tokens):
        yield example(tokens[: index + 1])
        yield one_example((code, value))
        if code is codes.IN:
            yield from (one_example(member) for member in value)
        for inner in inner_of(code, value):
            for part in parts(inner):
                yield part
                yield example(tokens[:index]) + part


def inner_of(code: object, value: tuple) -> list:
    if code is codes.BRANCH:
        return value[1]
    if code is codes.SUBPATTERN:
        return [value[-1]]
    if code in REPEATS:
        return [value[2]]
    return []


def hostile_texts(pattern: re.Pattern[str], *, is_whole: bool) -> Iterator[str]:
    """Yield repeated parts that something ends, after nothing or after another part."""
    found = parts(parser.parse(pattern.pattern, pattern.flags & ~re.LOCALE))
    own = [part for part in dict.fromkeys(found) if part]
    fillers = dict.fromkeys([*own, " ", "\n", "a", "0", r"\"", r"\/"])
    for part in fillers:
        yield part * (NUM_CHARACTERS // len(part)) + "\0"
    if not is_whole:
        return
    for begin, part in itertools.product(own, fillers):
        yield begin + part * (NUM_CHARACTERS // len(part)) + "\0"
        both = begin + part
        yield both * (NUM_CHARACTERS // len(both)) + "\0"


def use(pattern: re.Pattern, method: str, text: str) -> None:
    if isinstance(pattern.pattern, bytes):
        text = text.encode("latin-1", "replace")
    if method in SCANNING:
        pattern.sub(text[:0], text)
    elif method == "fullmatch":
        pattern.fullmatch(text)
    else:
        place = 0  # a lexer matches at one place after another, until nothing matches
        while place < len(text) and (found := pattern.match(text, place)):
            place = max(found.end(), place + 1)


class TooSlowError(Exception):
    pass


def slow_text(found: Found, *, is_whole: bool = False) -> str | None:
    """Return a text on which a pattern exceeds the limit of CPU time, None if there is none."""

    def end(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        for text in hostile_texts(found.pattern, is_whole=is_whole):
            for method in found.methods:
                signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)  # `re` looks for signals
                try:
                    use(found.pattern, method, text)
                except TooSlowError:
                    return text
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return None


PLACES = [
    str(path.relative_to(PACKAGE))
    for path in sorted(PACKAGE.rglob("*.py"))
    if "import re\n" in path.read_text()
]


def slow_patterns(place, *, is_whole=False):
    """Yield what is wrong with patterns of a file."""
    for found in patterns_of(place):
        text = slow_text(found, is_whole=is_whole)
        if text is not None:
            yield f"{found.where} {found.pattern.pattern!r} is slow on {text[:80]!r}..."


@pytest.mark.parametrize("place", PLACES)
def test_patterns_are_linear_on_their_own_parts(place):
    assert not list(slow_patterns(place))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_patterns_are_linear_on_all_joined_parts(place):
    assert not list(slow_patterns(place, is_whole=True))


BAD = [
    r"(a+)+$", r"<[^>\n]*>", r"(?m)^\s*\w+\[", r'"(?:\\.|[^"\\\n])*"', r"<b>(.*?)</b>",
    r"(?:a|a)*b", r"\s+$", r"\w*@",
]  # fmt: skip


@pytest.mark.parametrize("pattern", BAD)
def test_patterns_that_are_slow_are_found(pattern, monkeypatch):
    monkeypatch.setitem(globals(), "LIMIT_S", 0.1)
    monkeypatch.setitem(globals(), "NUM_CHARACTERS", 30_000)
    found = SimpleNamespace(pattern=re.compile(pattern, re.DOTALL), methods={"search"})
    assert slow_text(found) is not None


def test_all_modules_with_patterns_are_looked_at():
    for place in ("engine/grammar_source.py", "chat/tool_calls.py", "download/uris.py", "units.py"):
        assert patterns_of(place)
    assert sum(len(patterns_of(place)) for place in PLACES) > 40
