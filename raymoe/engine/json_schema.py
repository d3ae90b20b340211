"""Which JSON schemas can a generation be held to? All others are refused by keyword and place.

llguidance 1.9 refuses most of what it cannot keep; here is the rest, found by comparing it with the
JSON-Schema-Test-Suite, with random bounds of numbers and with `jsonschema`. Formats are kept in
shape: no 29th of February is refused. Properties come in the order of the schema.
"""

import bisect
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from raymoe.engine.grammar_text import exact_regex
from raymoe.errors import ConfigError

MAX_DEPTH = 128
MAX_EXACT = 2**53  # numbers are floats in llguidance
MAX_DIGITS = 15  # of a bound
Schema = dict[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANNOTATIONS = _words(
    "$schema $id $anchor $comment title description default examples example deprecated readOnly "
    "writeOnly $defs definitions discriminator"
)
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_KNOWN = _ANNOTATIONS | _words(
    "type enum const $ref anyOf oneOf allOf properties patternProperties additionalProperties "
    "required minProperties maxProperties items prefixItems additionalItems minItems maxItems "
    "pattern minLength maxLength format multipleOf minimum maximum exclusiveMinimum "
    "exclusiveMaximum"
)
_SCHEMA = _words("items additionalProperties additionalItems")
_LIST = _words("anyOf oneOf allOf prefixItems items")
_MAPPING = _words("properties patternProperties $defs definitions")
_JOINING = _words("anyOf oneOf allOf $ref")
_FORMATS = _words("date time date-time duration email hostname ipv4 ipv6 uri uuid")


@lru_cache(64)
def exact_schema(text: str) -> str:
    """The schema to compile: with regexes in Rust's syntax.

    Raises:
        ConfigError: Names the keyword that cannot be kept and where it is.
    """
    root = json.loads(text)
    if root is True:
        return "{}"
    if root is False:
        raise _refused("#", "the value false", "it allows no text")
    pending = [("#", root, 0)]
    schemas: list[tuple[str, Schema]] = []
    while pending:
        where, schema, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(f"structured_outputs has a schema of more than {MAX_DEPTH} levels")
        if isinstance(schema, dict):
            schemas.append((where, schema))
            pending += [(place, part, depth + 1) for place, part in _parts(where, schema)]
    places = {where for where, _ in schemas}
    for where, schema in schemas:
        _check(where, schema)
        _check_reference(where, schema, places)
    _check_ranges(schemas)
    for where, schema in schemas:
        _rewrite_regexes(where, schema)
    return json.dumps(root, ensure_ascii=False)


def _check(where: str, schema: Schema) -> None:
    for name, value in schema.items():
        if name not in _KNOWN and not (name == "uniqueItems" and value is False):
            raise _refused(where, f"{name!r:.60}", "leave it out and check the answers")
    schema.pop("uniqueItems", None)
    form = schema.get("format")
    if form is not None and (not isinstance(form, str) or form not in _FORMATS):
        raise _refused(where, f"format {form!r:.60}", f"known are {', '.join(sorted(_FORMATS))}")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise _refused(where, "'additionalItems' without a list of items", "use prefixItems")
    _check_object(where, schema)
    for name in (*_LOWER, *_UPPER, "multipleOf"):
        _check_bound(where, name, schema.get(name))
    for name in ("enum", "const"):
        _check_numbers(where, name, schema.get(name))


def _check_reference(where: str, schema: Schema, places: set[str]) -> None:
    if "$ref" in schema:
        reference = schema["$ref"]
        is_text = isinstance(reference, str)
        is_anchor = is_text and re.fullmatch(r"#[A-Za-z_][\w.-]*", reference)
        if not is_text or not (is_anchor or unquote(reference) in places):
            advice = "it must lead to a schema inside this one, as #/$defs/... does"
            raise _refused(where, f"$ref {reference!r:.60}", advice)
    if where != "#" and "$id" in schema:
        raise _refused(where, "'$id'", "an inner schema cannot have its own names")


def _check_object(where: str, schema: Schema) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = [*properties] if isinstance(properties, Mapping) else []
    names += [name for name in required if isinstance(name, str)] if _is_list(required) else []
    for name in names:
        if any(ord(character) < 0x20 or character == "\x7f" for character in name):
            raise _refused(where, f"property {name!r:.60}", "use names without control characters")
    least = schema.get("minProperties", 0)
    distinct = len(set(map(str, required))) if _is_list(required) else 0
    if isinstance(least, (int, float)) and least > max(1, distinct):
        advice = "names may come twice, so require as many properties by name"
        raise _refused(where, f"minProperties {least}", advice)


def _check_bound(where: str, name: str, bound: object) -> None:
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return  # llguidance names a wrong type
    text = repr(abs(bound)).removesuffix(".0")
    num_digits = len(text.replace(".", "").lstrip("0"))
    is_long = isinstance(bound, float) and ("e" in text or num_digits > MAX_DIGITS)
    if abs(bound) >= MAX_EXACT or is_long:
        advice = f"use less than 2**53 and at most {MAX_DIGITS} digits"
        raise _refused(where, f"{name} {bound!r:.40}", advice)


def _check_numbers(where: str, name: str, value: object) -> None:
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, (int, float)) and abs(part) >= MAX_EXACT:
            raise _refused(where, f"{name} with {part!r:.40}", "use numbers of less than 2**53")


def _check_ranges(schemas: list[tuple[str, Schema]]) -> None:
    """Refuse a range of less than 1 from or to an exclusive bound: it may hold the bound.

    Where schemas may be joined, bounds of different ones may make a range.
    """
    numbers = [(where, schema) for where, schema in schemas if schema.get("type") != "integer"]
    is_joined = any(_JOINING & schema.keys() for _, schema in schemas)
    for group in [numbers] if is_joined else [[one] for one in numbers]:
        highs = {
            is_open: sorted(
                (high, where)
                for high, is_open_too, where in _bounds(group, _UPPER)
                if is_open_too or not is_open
            )
            for is_open in (False, True)
        }
        for low, is_open, where in _bounds(group, _LOWER):
            others = highs[not is_open]  # one of both bounds is exclusive
            index = bisect.bisect(others, low, key=lambda entry: entry[0])
            if index < len(others) and others[index][0] < low + 1:
                what = f"a range of numbers from {low} to {others[index][0]} without one of them"
                raise _refused(where, what, "use minimum and maximum")


def _bounds(
    group: list[tuple[str, Schema]], names: tuple[str, str]
) -> Iterator[tuple[float, bool, str]]:
    for where, schema in group:
        for name in names:
            value = schema.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                is_open = name.startswith("exclusive") or schema.get(_exclusive(name)) is True
                yield value, is_open, where


def _exclusive(name: str) -> str:
    return "exclusive" + name[0].upper() + name[1:]


def _rewrite_regexes(where: str, schema: Schema) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = exact_regex(schema["pattern"])
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        rewritten = {exact_regex(pattern): part for pattern, part in patterns.items()}
        if len(rewritten) < len(patterns):
            raise _refused(where, "patternProperties that are alike", "write them as one")
        schema["patternProperties"] = rewritten


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _refused(where: str, what: str, advice: str) -> ConfigError:
    return ConfigError(
        f"structured_outputs has a JSON schema with {what} at {where:.200}, which no generation "
        f"can be held to; {advice}"
    )


def _parts(where: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        if name in _LIST and isinstance(value, list):
            yield from ((f"{where}/{name}/{index}", part) for index, part in enumerate(value))
        elif name in _SCHEMA:
            yield f"{where}/{name}", value
        elif name in _MAPPING and isinstance(value, Mapping):
            yield from ((f"{where}/{name}/{_escaped(key)}", part) for key, part in value.items())


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")  # as JSON pointers do
