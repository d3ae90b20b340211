"""Structured outputs that hurt: malformed, exploding, or slow to match."""

from typing import Any


def nested(levels: int) -> str:
    """Text of a schema of that many levels; too deep for Python's own writer."""
    return '{"type":"array","items":' * levels + '{"type":"null"}' + "}" * levels


def optional(count: int, **more: Any) -> dict[str, Any]:
    """A schema of that many properties that may all be left out."""
    properties = {f"k{index}": {"type": "integer"} for index in range(count)}
    return {"type": "object", "properties": properties, **more}


def malformed_outputs() -> list[Any]:
    """Values of `structured_outputs` that are wrong, and what the error row says."""
    return [
        ({"json": "{"}, "is not JSON"),
        ({"json": nested(400)}, "more than 128 levels"),
        ({"json": nested(9000)}, "recursion"),
        ({"json": {"$ref": "#/$defs/absent"}}, "'#/$defs/absent'"),
        ({"json": {"type": "object", "properties": {"a": {"type": "colour"}}}}, "colour"),
        ({"json": {"type": "array", "uniqueItems": True}}, "'uniqueItems' at #"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"regex": "(a"}, "close the group"),
        ({"grammar": "root ::= absent"}, '"absent" is not defined'),
        ({"grammar": "root ::= root"}, "no next token"),
        ({"choice": ["x" * (1 << 19)]}, "524288 characters"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ("[1", "is not JSON"),
    ]


def exploding_outputs(variant: int = 0) -> list[Any]:
    """Values whose compilation needs more time or memory than it may have, or more rules."""
    patterns = [{"type": "string", "pattern": f"a.{{{distance}}}b"} for distance in range(30)]
    parts = ['("a" | "b" | "")?'] * (3000 + variant)
    return [
        {"json": {"allOf": [*patterns, {"type": "string", "maxLength": 500 + variant}]}},
        {"json": optional(3000 + variant)},
        {"grammar": "root ::= " + " ".join(parts)},
    ]


def slow_outputs(variant: int = 0) -> list[Any]:
    """Values that compile, and whose bitmasks cost more than a row may use."""
    return [
        {"regex": "(((a?b?c?d?e?){0,%d}){0,60}){0,60}@" % (60 + variant)},  # noqa: UP031 - braces
        {"grammar": f'root ::= root root root | root root | "a" | "{variant}@"'},
    ]
