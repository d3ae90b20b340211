"""Regular expressions of schemas and constraints: ECMA-262, as far as Rust's syntax can say it."""

import re
import sys
from functools import lru_cache

from raymoe.errors import ConfigError

_SPACE = r"\t-\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_MAYBE_SPACE = _SPACE + r"\x1c-\x1f\x85\x{feff}"  # ECMA-262 or Python, but not both
_WORD, _DIGIT = "A-Za-z0-9_", "0-9"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_CODE_POINT = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\})")
_SURROGATES = re.compile(r"\\u([Dd][89ABab][0-9A-Fa-f]{2})\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_LETTERS = {"t": "\t", "r": "\r", "n": "\n", "f": "\f", "v": "\v"}
_PROPERTY = re.compile(r"\\[pP]\{[\w=]+\}")


@lru_cache(64)
def exact_regex(pattern: str) -> str:
    """Translate a regex of ECMA-262 to Rust's syntax.

    Raises:
        ConfigError: Names the part that has another meaning in Rust, or none.
    """
    parts: list[str] = []
    opened: list[int] = []
    index = 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            part, index, _ = _escape(pattern, index, in_class=False, is_negated=False)
        elif character == "[":
            part, index = _class(pattern, index)
        elif character == "(":
            found = _GROUP.match(pattern, index)
            if found is None:
                raise _refused(pattern, index, index + 3, "write it without look-around and flags")
            opened.append(index)
            part, index = "(?:", found.end()  # names mean nothing, and may come twice
        elif character == ")":
            if not opened:
                raise _refused(pattern, index, index + 1, r"write \) for the character")
            opened.pop()
            part, index = character, index + 1
        elif character in "*+?{}":
            part, index = _quantifier(pattern, index)
        else:
            part, index = _ANY if character == "." else character, index + 1
        parts.append(part)
    if opened:
        raise _refused(pattern, opened[-1], opened[-1] + 1, "close the group by )")
    return "".join(parts)


def _quantifier(pattern: str, index: int) -> tuple[str, int]:
    found = _QUANTIFIER.match(pattern, index)
    if found is None:
        raise _refused(pattern, index, index + 1, r"write \{ or \} for the character")
    end = found.end()
    if pattern[end : end + 1] in ("*", "+", "?", "{"):
        raise _refused(pattern, index, end + 1, "give each part one quantifier")
    return found[0], end


def _escape(pattern: str, index: int, *, in_class: bool, is_negated: bool) -> tuple[str, int, bool]:
    """Return what an escape becomes, where it ends, and whether it is one character."""
    letter = pattern[index + 1 : index + 2]
    end = index + 2
    if letter and letter in "dDwWsS":
        members = {"d": _DIGIT, "w": _WORD}.get(letter.lower())
        if members is None:
            is_narrow = letter.islower() != is_negated
            members = _SPACE if is_narrow else _MAYBE_SPACE
        if letter.isupper():
            return f"[^{members}]", end, False
        return members if in_class else f"[{members}]", end, False
    if found := _PROPERTY.match(pattern, index):
        return found[0], found.end(), False
    code, end = _code_point(pattern, index, in_class=in_class)
    return rf"\x{{{code:x}}}", end, True


def _code_point(pattern: str, index: int, *, in_class: bool) -> tuple[int, int]:
    """Return the character that an escape stands for, and where the escape ends."""
    if found := _SURROGATES.match(pattern, index):
        high, low = (int(part, 16) for part in found.groups())
        return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00), found.end()
    if found := _CODE_POINT.match(pattern, index):
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
            raise _refused(pattern, index, found.end(), "it is no character of a text")
        return code, found.end()
    letter, end = pattern[index + 1 : index + 2], index + 2
    letter = _LETTERS.get(letter, letter)
    letter = "\b" if letter == "b" and in_class else letter
    if not letter or letter.isalnum() or letter == "_":
        raise _refused(pattern, index, end, "write it without this escape")
    return ord(letter), end


def _class(pattern: str, index: int) -> tuple[str, int]:
    """Translate a class. A hyphen beside an escape of several characters is a hyphen."""
    begin = index
    is_negated = pattern.startswith("[^", index)
    index += 1 + is_negated
    if pattern.startswith("]", index):
        raise _refused(pattern, begin, index + 1, r"write \] for the character")
    parts = ["[^" if is_negated else "["]
    while not pattern.startswith("]", index):
        part, index, is_character = _member(pattern, index, begin, is_negated=is_negated)
        parts.append(part)
        if pattern[index : index + 1] != "-" or pattern[index + 1 : index + 2] in ("", "]"):
            continue
        part, index, ends_range = _member(pattern, index + 1, begin, is_negated=is_negated)
        parts += ["-" if is_character and ends_range else r"\-", part]
    return "".join(parts) + "]", index + 1


def _member(pattern: str, index: int, begin: int, *, is_negated: bool) -> tuple[str, int, bool]:
    """As `_escape`, of a member of the class that begins at `begin`."""
    character = pattern[index : index + 1]
    if not character:
        raise _refused(pattern, begin, len(pattern), "close the class by ]")
    if pattern.startswith("--", index):
        raise _refused(pattern, index, index + 2, r"write \- for the character")
    if character == "\\":
        return _escape(pattern, index, in_class=True, is_negated=is_negated)
    return "\\" + character if character in "[&~-" else character, index + 1, True


def _refused(pattern: str, begin: int, end: int, advice: str) -> ConfigError:
    return ConfigError(
        f"structured_outputs has a regex with {pattern[begin:end]!r:.60} at character {begin}, "
        f"which cannot be kept exactly; {advice}"
    )
