"""Lines of files, of which one that has no end or no bottom costs itself only.

A line is kept in memory up to a limit, its nesting is counted before a parser recurses into it, and
what is said of it depends on its bytes alone: a resumed run knows lines without an id by that.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from raymoe.data.rows import shown
from raymoe.safe_text import MAX_LEVELS
from raymoe.units import MIB

MAX_LINE_BYTES = 32 * MIB  # the longest text that is tokenized, in characters of four bytes
MAX_WRITTEN_BYTES = 512 * MIB  # of a row of an output: log probabilities take many times its text
MAX_KEYS, MAX_KEY_CHARACTERS = 1000, 1000  # of a line
MAX_COLUMNS = 4 * MAX_KEYS  # of all lines, or of CSV
DISCARD_BYTES = 1 * MIB

_LISTS_AND_OBJECTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        data: With its end; the begin only of a line that is too long.
        num_bytes: Of the whole line.
    """

    data: bytes
    num_bytes: int

    @property
    def problem(self) -> str:
        """Why it cannot be read, or ""."""
        if self.num_bytes == len(self.data):
            return ""
        return f"the line has {self.num_bytes:,} bytes; at most {len(self.data):,} are read"

    @property
    def has_content(self) -> bool:
        return bool(self.data.removeprefix(codecs.BOM_UTF8).strip()) or bool(self.problem)


def read_lines(file: IO[bytes] | Any, max_bytes: int | None = None) -> Iterator[Line]:
    r"""Yield the lines of a file from where it is; they end with "\n" only.

    Args:
        max_bytes: Of a line that is kept; None is `MAX_LINE_BYTES`.
    """
    limit = MAX_LINE_BYTES if max_bytes is None else max_bytes
    while data := file.readline(limit):
        num_bytes = len(data)
        is_whole = num_bytes < limit or data.endswith(b"\n")
        while not is_whole and (rest := file.readline(DISCARD_BYTES)):
            num_bytes += len(rest)
            is_whole = rest.endswith(b"\n")
        yield Line(data, num_bytes)


def parse_line(line: Line) -> tuple[dict[str, Any] | None, str]:
    """Return the object of a line if it has one, and "" or what is wrong with the line.

    The object of a line with an error is what can be used of it, such as its id.
    """
    if line.problem:
        return None, line.problem
    data = line.data.removeprefix(codecs.BOM_UTF8)  # which some editors and Windows write
    data, error = _without_deep_values(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        error = f"the line is not UTF-8: {problem.reason} at byte {problem.start}"
        text = data.decode(errors="replace")
    try:
        record = json.loads(text)
    except ValueError as problem:
        return None, error or f"the line is not JSON: {problem} in {shown(text)}"
    if not isinstance(record, dict):
        return None, error or f"the line is not a JSON object: {shown(record)}"
    for key in [key for key in record if _key_problem(key)]:
        del record[key]
        error = error or f"the key {shown(key)} {_key_problem(key)}"
    if len(record) > MAX_KEYS:
        error = error or f"the line has {len(record):,} keys; at most {MAX_KEYS:,} are read"
    return record, error


def _key_problem(key: str) -> str:
    if len(key) > MAX_KEY_CHARACTERS:
        return f"has {len(key):,} characters; at most {MAX_KEY_CHARACTERS:,} are read"
    try:
        key.encode()
    except UnicodeEncodeError as problem:
        return f"has a lone surrogate at character {problem.start}"
    return ""


def _without_deep_values(data: bytes) -> tuple[bytes, str]:
    """Put null in the place of values that are nested too deeply to be parsed, and say so."""
    if data.count(b"[") + data.count(b"{") <= MAX_LEVELS:
        return data, ""
    kept: list[bytes] = []
    level = deepest = begin = end = 0
    for token in _LISTS_AND_OBJECTS.finditer(data):
        if token[0] in b"[{":
            level += 1
            begin, deepest = (token.start(), level) if level == 2 else (begin, max(deepest, level))
        elif token[0] in b"]}":
            level -= 1
            if level == 1 and deepest > MAX_LEVELS + 1:
                kept += data[end:begin], b"null"
                end = token.end()
                deepest = 0
    if level > MAX_LEVELS + 1 or (level > 1 and deepest > MAX_LEVELS + 1):
        kept, end = [], len(data)  # it has no end, and is no JSON
    elif not kept:
        return data, ""
    return b"".join([*kept, data[end:]]), f"the line is nested more than {MAX_LEVELS} levels deep"
