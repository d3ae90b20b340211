"""Regexes and grammars in the syntax of llguidance, with the meaning that their authors expect.

Regexes are those of ECMA-262 (and so of JSON schemas) without look-around and back-references.
llguidance reads Rust's dialect, in which some of them mean something else: flags, operators in
classes, Unicode digits. These are rewritten, or refused by name. White space is what both ECMA-262
and Python take for it.

EBNF becomes Lark with one terminal for each character: llguidance's lexer is greedy, so with longer
terminals `("a" | "ab") "b"` would not match "ab".
"""

import re
from functools import lru_cache

from raymoe.errors import ConfigError

_SPACE = r"\t-\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_MAYBE_SPACE = _SPACE + r"\x1c-\x1f\x85\x{feff}"  # ECMA-262 or Python, but not both
_WORD, _DIGIT = "A-Za-z0-9_", "0-9"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_CODE_POINT = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]{1,6}\})")
_PROPERTY = re.compile(r"\\[pP]\{[\w=]+\}")


@lru_cache(64)
def exact_regex(pattern: str) -> str:
    """A regex of ECMA-262 in Rust's syntax.

    Raises:
        ConfigError: Names the part that has another meaning there, or none.
    """
    parts: list[str] = []
    index = 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            part, index = _escape(pattern, index, in_class=False, is_negated=False)
        elif character == "[":
            part, index = _class(pattern, index)
        elif character == "(":
            found = _GROUP.match(pattern, index)
            if found is None:
                raise _refused(pattern, index, index + 3, "write it without look-around and flags")
            part, index = found[0], found.end()
        elif character in "*+?{}":
            part, index = _quantifier(pattern, index)
        else:
            part, index = _ANY if character == "." else character, index + 1
        parts.append(part)
    return "".join(parts)


def _quantifier(pattern: str, index: int) -> tuple[str, int]:
    found = _QUANTIFIER.match(pattern, index)
    if found is None:
        raise _refused(pattern, index, index + 1, r"write \{ or \} for the character")
    end = found.end()
    if pattern[end : end + 1] in ("*", "+", "?", "{"):
        raise _refused(pattern, index, end + 1, "give each part one quantifier")
    return found[0], end


def _escape(pattern: str, index: int, *, in_class: bool, is_negated: bool) -> tuple[str, int]:
    letter = pattern[index + 1 : index + 2]
    end = index + 2
    if letter and letter in "dDwWsS":
        members = {"d": _DIGIT, "w": _WORD}.get(letter.lower())
        if members is None:
            is_narrow = letter.islower() != is_negated
            members = _SPACE if is_narrow else _MAYBE_SPACE
        if letter.isupper():
            return f"[^{members}]", end
        return members if in_class else f"[{members}]", end
    if letter and letter in "tnrfv":
        return pattern[index:end], end
    if letter == "b" and in_class:
        return r"\x08", end
    for form in (_CODE_POINT, _PROPERTY):
        if found := form.match(pattern, index):
            return found[0], found.end()
    if not letter or letter.isalnum() or letter == "_":
        raise _refused(pattern, index, end, "write it without this escape")
    return rf"\x{{{ord(letter):x}}}", end


def _class(pattern: str, index: int) -> tuple[str, int]:
    begin = index
    is_negated = pattern.startswith("[^", index)
    index += 1 + is_negated
    if pattern.startswith("]", index):
        raise _refused(pattern, begin, index + 1, r"write \] for the character")
    parts = ["[^" if is_negated else "["]
    while index < len(pattern):
        character = pattern[index]
        if character == "]":
            return "".join(parts) + "]", index + 1
        if pattern.startswith("--", index):
            raise _refused(pattern, index, index + 2, r"write \- for the character")
        if character == "\\":
            part, index = _escape(pattern, index, in_class=True, is_negated=is_negated)
        else:
            part, index = "\\" + character if character in "[&~" else character, index + 1
        parts.append(part)
    raise _refused(pattern, begin, len(pattern), "close the class by ]")


def _refused(pattern: str, begin: int, end: int, advice: str) -> ConfigError:
    return ConfigError(
        f"structured_outputs has a regex with {pattern[begin:end]!r:.60} at character {begin}, "
        f"which cannot be kept exactly; {advice}"
    )


def regex_of_choice(texts: tuple[str, ...]) -> str:
    """A regex in Rust's syntax that matches these texts."""
    return "(?:" + "|".join("".join(map(_code_point, text)) for text in texts) + ")"


def _code_point(character: str) -> str:
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else rf"\x{{{ord(character):x}}}"


_EBNF = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<head>[\w-]+)\s*::=
    |(?P<name>[\w-]+)
    |"(?P<literal>(?:\\.|[^"\\\n])*)"
    |\[(?P<class>\^?(?:\\.|[^\]\\\n])*)\]
    |(?P<plain>[.()|]|[*+?]|\{\d+(?:,\d*)?\})""",
    re.VERBOSE | re.DOTALL,
)
_EBNF_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|u\{([0-9A-Fa-f]{1,6})\}|(.))|(.)",
    re.DOTALL,
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"} | {character: character for character in "\\\"'[]-^/"}


@lru_cache(64)
def lark_of_grammar(source: str) -> str:
    """Lark of EBNF with rules ``name ::= ...``, or Lark as it is.

    Raises:
        ConfigError: It is no EBNF, or Lark with what only llguidance has.
    """
    if "::=" not in source:
        _check_lark(source)
        return source
    names: dict[str, str] = {"root": "start"}
    heads: dict[str, None] = {}
    used: dict[str, None] = {"root": None}
    parts: list[str] = []
    index = 0
    while index < len(source):
        found = _EBNF.match(source, index)
        if found is None:
            raise _malformed(f"{source[index : index + 20]!r} at character {index} is no EBNF")
        index = found.end()
        if found.lastgroup == "space":
            continue
        name = found["head"] or found["name"]
        if name is not None:
            names.setdefault(name, f"r{len(names)}")
        if found["head"] and name in heads:
            raise _malformed(f'the rule "{name}" is defined twice')
        if found["head"]:
            heads[name] = None
        elif name is not None:
            used[name] = None
        parts.append(f"\n{names[name]}:" if found["head"] else _lark_of(found, names))
    absent = [name for name in used if name not in heads]
    if absent:
        raise _malformed(f'the rule "{absent[0]:.60}" is not defined')
    return " ".join(parts) + "\n"


def _lark_of(found: re.Match[str], names: dict[str, str]) -> str:
    """One part of a rule."""
    if found["name"]:
        return names[found["name"]]
    if found["literal"] is not None:
        characters = [f"/{_code_point(c)}/" for c, _ in _characters(found["literal"])]
        return f"( {' '.join(characters)} )" if characters else '""'
    if found["class"] is not None:
        text = found["class"]
        is_negated = text.startswith("^")
        members = [
            "-" if character == "-" and not is_escaped else _code_point(character)
            for character, is_escaped in _characters(text[is_negated:])
        ]
        if not members or "--" in "".join(members):
            raise _malformed(f"[{text:.60}] is no class of characters")
        return f"/[{'^' if is_negated else ''}{''.join(members)}]/"
    return "/(?s:.)/" if found["plain"] == "." else found["plain"]


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters of a literal or class of EBNF, and whether each was escaped."""
    characters = []
    for found in _EBNF_ESCAPE.finditer(text):
        *codes, short, plain = found.groups()
        code = next((int(code, 16) for code in codes if code), -1)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise _malformed(f"{found[0]} is no Unicode character")
        if code < 0 and short is not None and short not in _SHORT:
            raise _malformed(f"the escape {found[0]!r} is unknown")
        character = chr(code) if code >= 0 else plain or _SHORT[short]
        characters.append((character, plain is None))
    return characters


_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_ONLY_LLGUIDANCE = (
    (re.compile(r"%(?!ignore\b|import\b|declare\b)\w+"), "leave the directive out"),
    (re.compile(r"<[^>\n]*>"), "name texts instead of tokens"),
    (re.compile(r"(?m)^\s*[?!]?\w+(?:\.-?\d+)?\s*\["), "leave the attributes of the rule out"),
)


def _check_lark(source: str) -> None:
    """Refuse options of llguidance's Lark, some of which loosen checks or are ignored here."""
    rules = _LARK_TEXT.sub('""', source)
    for form, advice in _ONLY_LLGUIDANCE:
        if found := form.search(rules):
            raise _malformed(f"{found[0].strip()!r:.60} is not Lark; {advice}")


def _malformed(problem: str) -> ConfigError:
    return ConfigError(f"structured_outputs has a grammar that cannot be used: {problem}")
