"""Translates JSON schemas, regexes and grammars to exact equivalents for llguidance."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeGuard
from urllib.parse import unquote

from raymoe.engine.schema_alternatives import Alternatives
from raymoe.errors import ConfigError
from raymoe.regular_expressions import exact_regex
from raymoe.suggestions import is_misspelt
from raymoe.units import MAX_EXACT_FLOAT


def regex_of_choice(texts: tuple[str, ...]) -> str:
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
    """Translate EBNF with rules ``name ::= ...`` to Lark; return Lark unchanged.

    Raises:
        ConfigError: Neither EBNF nor Lark, or Lark with extensions of llguidance.
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


# What does not end is matched too: else each of its quotes would be tried up to the line's end.
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*("?)|/(?!/)(?:\\.|[^/\\\n])+(/?)|//[^\n]*|#[^\n]*')
_ONLY_LLGUIDANCE = (
    (re.compile(r"%(?!ignore\b|import\b|declare\b)\w+"), "leave the directive out"),
    (re.compile(r"<[^<>\n]*>"), "name texts instead of tokens"),
    (re.compile(r"(?m)^[^\S\n]*[?!]?\w+(?:\.-?\d+)?\s*\["), "leave the attributes of the rule out"),
)


def _check_lark(source: str) -> None:
    rules = _LARK_TEXT.sub(_without_text, source)
    for form, advice in _ONLY_LLGUIDANCE:
        if found := form.search(rules):
            raise _malformed(f"{found[0].strip()!r:.60} is not Lark; {advice}")


def _without_text(found: re.Match[str]) -> str:
    if "" in (found[1], found[2]):
        raise _malformed(f"{found[0]!r:.60} does not end on its line")
    return '""'


def _malformed(problem: str) -> ConfigError:
    return ConfigError(f"structured_outputs has a grammar that cannot be used: {problem}")


MAX_DEPTH = 128
MAX_DIGITS = 15  # maximum of a bound
Schema = dict[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_ASSERTIONS = _words(
    "type enum const $ref anyOf oneOf allOf properties patternProperties additionalProperties "
    "required minProperties maxProperties items prefixItems additionalItems minItems maxItems "
    "pattern minLength maxLength format multipleOf minimum maximum exclusiveMinimum "
    "exclusiveMaximum"
)
_COMPILED = _ASSERTIONS | _words("$schema $anchor $defs definitions")
# Every other keyword is an annotation, which constrains nothing.
_UNSUPPORTED = _words(
    "not if contains uniqueItems propertyNames dependentRequired dependentSchemas dependencies "
    "unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef extends disallow divisibleBy "
    "x-guidance"
)
_DRAFT = re.compile(r"https?://json-schema\.org/(draft/20(?:19-09|20-12)|draft-0[467])/schema#?")
_SCHEMA = _words("items additionalProperties additionalItems")
_LIST = _words("anyOf oneOf allOf prefixItems items")
_MAPPING = _words("properties patternProperties $defs definitions")
_FORMATS = _words("duration email hostname ipv4 ipv6 uri uuid")
_SAME_FORMAT = {"idn-email": "email", "iri": "uri"}  # those of ASCII
_DAYS_28, _DAYS_30, _DAYS_31 = "0[1-9]|1[0-9]|2[0-8]", "29|30", "31"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # Python's begin with 1
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:{_DAYS_28})|(?:0[13-9]|1[0-2])-(?:{_DAYS_30})|"
    f"(?:0[13578]|1[02])-{_DAYS_31})|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
# llguidance has second 60, which only some days have, and February 29 of each year.
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
}
MAX_HOSTNAME = 253
MAX_UNKNOWN = 256  # keywords of other tools; comparing more takes long


@lru_cache(64)
def exact_schema(text: str) -> str:
    """Return the schema to compile, with regexes in Rust's syntax.

    Raises:
        ConfigError: Names the keyword that cannot be enforced exactly and where it is.
    """
    root = json.loads(text)
    if root is True:
        return "{}"
    if root is False:
        raise _json_schema_refused("#", "the value false", "it allows no text")
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
    anchors = {f"#{schema['$anchor']}" for _, schema in schemas if "$anchor" in schema}
    for where, schema in schemas:
        _check(where, schema)
        _check_reference(where, schema, places | anchors)
    _check_names(schemas)
    _check_spelling(schemas)
    for where, schema in schemas:
        _drop_annotations(where, schema)
    _rewrite_one_of(schemas)
    for where, schema in schemas:
        _rewrite_regexes(where, schema)
        _rewrite_format(schema)
        _close_bounds(schema)
    return json.dumps(root, ensure_ascii=False)


def _check(where: str, schema: Schema) -> None:
    for name, value in schema.items():
        if name in _UNSUPPORTED and _has_effect(name, value, schema):
            raise _json_schema_refused(where, f"{name!r:.60}", "leave it out and check the answers")
    if not isinstance(schema.get("format", ""), str):
        raise _json_schema_refused(where, f"format {schema['format']!r:.60}", "it takes text")
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise _json_schema_refused(
            where, "'additionalItems' without a list of items", "use prefixItems"
        )
    _check_object(where, schema)
    for name in (*_LOWER, *_UPPER, "multipleOf"):
        _check_bound(where, name, schema.get(name))
    for name in ("enum", "const"):
        _check_numbers(where, name, schema.get(name))


def _has_effect(name: str, value: object, schema: Schema) -> bool:
    if name == "if":
        return "then" in schema or "else" in schema
    if name == "uniqueItems":
        return value is not False
    if name == "propertyNames" and isinstance(value, dict):
        rest = value.keys() & (_ASSERTIONS | _UNSUPPORTED)
        return not rest <= {"type"} or value.get("type", "string") != "string"
    if name == "propertyNames" or name.startswith("unevaluated"):
        return value is not True and value != {}
    return not (name.startswith("depend") and value == {})


def _check_spelling(schemas: list[tuple[str, Schema]]) -> None:
    unknown = {
        name: where
        for where, schema in reversed(schemas)
        for name in schema.keys() - _COMPILED - _UNSUPPORTED
    }
    for name, where in itertools.islice(unknown.items(), MAX_UNKNOWN):
        for known in sorted(_ASSERTIONS):
            if is_misspelt(name, known):
                raise _json_schema_refused(where, f"{name!r:.60}", f"did you mean {known!r}?")


def _check_reference(where: str, schema: Schema, places: set[str]) -> None:
    if "$ref" in schema:
        reference = schema["$ref"]
        if not isinstance(reference, str) or unquote(reference) not in places:
            advice = "it must lead to a schema inside this one, as #/$defs/... does"
            raise _json_schema_refused(where, f"$ref {reference!r:.60}", advice)


def _check_names(schemas: list[tuple[str, Schema]]) -> None:
    """Refuse references below an inner `$id`: they begin there instead of at the root."""
    named = [where for where, schema in schemas if "$id" in schema and where != "#"]
    for place, schema in schemas if named else ():
        for where in named if "$ref" in schema else ():
            if place == where or place.startswith(f"{where}/"):
                raise _json_schema_refused(where, "'$id' above a $ref", "leave the $id out")


def _drop_annotations(where: str, schema: Schema) -> None:
    for name in schema.keys() - _COMPILED:
        del schema[name]
    draft = _DRAFT.fullmatch(str(schema.pop("$schema", "")))
    if where == "#" and draft:
        scheme = "https" if draft[1].startswith("draft/") else "http"
        schema["$schema"] = f"{scheme}://json-schema.org/{draft[1]}/schema"


def _check_object(where: str, schema: Schema) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = [*properties] if isinstance(properties, Mapping) else []
    names += [name for name in required if isinstance(name, str)] if _is_list(required) else []
    for name in names:
        if any(ord(character) < 0x20 or character == "\x7f" for character in name):
            raise _json_schema_refused(
                where, f"property {name!r:.60}", "use names without control characters"
            )
    minimum = schema.get("minProperties", 0)
    distinct = len(set(map(str, required))) if _is_list(required) else 0
    if isinstance(minimum, (int, float)) and minimum > max(1, distinct):
        advice = "names may come twice, so require as many properties by name"
        raise _json_schema_refused(where, f"minProperties {minimum}", advice)


def _check_bound(where: str, name: str, bound: object) -> None:
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return  # llguidance names it
    text = repr(abs(bound)).removesuffix(".0")
    num_digits = len(text.replace(".", "").lstrip("0"))
    is_long = isinstance(bound, float) and ("e" in text or num_digits > MAX_DIGITS)
    if abs(bound) >= MAX_EXACT_FLOAT or is_long:
        advice = f"use less than 2**53 and at most {MAX_DIGITS} digits"
        raise _json_schema_refused(where, f"{name} {bound!r:.40}", advice)


def _check_numbers(where: str, name: str, value: object) -> None:
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        elif isinstance(part, (int, float)) and abs(part) >= MAX_EXACT_FLOAT:
            raise _json_schema_refused(
                where, f"{name} with {part!r:.40}", "use numbers of less than 2**53"
            )


def _close_bounds(schema: Schema) -> None:
    """Replace bounds that are whole and exclusive, which llguidance accepts in narrow ranges.

    The inclusive bounds are the next numbers of `MAX_DIGITS`, so nothing else is lost.
    """
    for (bound, exclusive), sign, closest in ((_LOWER, 1, max), (_UPPER, -1, min)):
        value = schema.get(exclusive)
        if value is True:  # as in draft 4
            value = schema.get(bound)
        if not _is_number(value) or sign * value < 0 or value != int(value):
            continue
        num_digits = len(str(abs(int(value))))
        inner = value + sign * round(0.1 ** max(0, MAX_DIGITS - 1 - num_digits), MAX_DIGITS)
        other = schema.get(bound, inner)
        if _is_number(other):  # llguidance names what else it is
            schema[bound] = closest(inner, other)
            del schema[exclusive]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rewrite_format(schema: Schema) -> None:
    form = schema.pop("format", None)
    form = _SAME_FORMAT.get(form, form)
    if form in _FORMATS:
        schema["format"] = form
    if form == "hostname":
        given = schema.get("maxLength", MAX_HOSTNAME)
        schema["maxLength"] = min(MAX_HOSTNAME, given) if _is_number(given) else given
    if form in _FORMAT_PATTERNS:
        part: Schema = {"pattern": _FORMAT_PATTERNS[form]}
        if "pattern" in schema:
            others = schema.get("allOf", [])
            part = {"allOf": [*others, part] if _is_list(others) else others}
        schema |= part


def _rewrite_one_of(schemas: list[tuple[str, Schema]]) -> None:
    targets = dict(schemas)
    targets |= {f"#{schema['$anchor']}": schema for _, schema in schemas if "$anchor" in schema}
    quoted = {schema["$ref"] for _, schema in schemas if "$ref" in schema}
    targets |= {reference: targets[unquote(reference)] for reference in quoted}
    alternatives = Alternatives(targets)
    for _, schema in schemas:
        options = schema.get("oneOf")
        if "anyOf" in schema or not _is_list(options):
            continue
        if alternatives.exclude_each_other(options):
            parts = [("anyOf" if name == "oneOf" else name, part) for name, part in schema.items()]
            schema.clear()
            schema.update(parts)  # the order of keywords is that of properties in the text


def _rewrite_regexes(where: str, schema: Schema) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = exact_regex(schema["pattern"])
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        rewritten = {exact_regex(pattern): part for pattern, part in patterns.items()}
        if len(rewritten) < len(patterns):
            raise _json_schema_refused(
                where, "patternProperties that are the same", "write them as one"
            )
        schema["patternProperties"] = rewritten


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _json_schema_refused(where: str, what: str, advice: str) -> ConfigError:
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


def exact_source(kind: str, source: Any) -> str:
    """Return the JSON schema, regex or Lark grammar that llguidance gets for a row's constraint.

    Args:
        kind: One of `structured.KINDS`; `source` is the value of that field.

    Raises:
        ConfigError: It cannot be kept exactly; names the part.
    """
    if kind == "json":
        return exact_schema(source)
    if kind == "regex":
        return exact_regex(source)
    if kind == "choice":
        return regex_of_choice(tuple(source))
    if kind == "grammar":
        return lark_of_grammar(source)
    return '{"type": "object"}'
