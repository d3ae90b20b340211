"""Which JSON schemas can a generation be held to? All others are refused.

The grammar compiler silently ignores some keywords, alone or beside others (found by trying, with
xgrammar 0.2.8); the text would then not fit the schema. Formats are kept in shape: no 30th of
February is refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raymoe.errors import ConfigError

MAX_DEPTH = 128


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANNOTATIONS = _words(
    "$schema $id $anchor $comment title description default examples example deprecated readOnly "
    "writeOnly $defs definitions"
)
_OF_TYPE = {
    "object": "properties patternProperties additionalProperties unevaluatedProperties "
    "propertyNames required minProperties maxProperties",
    "array": "items prefixItems additionalItems unevaluatedItems minItems maxItems",
    "string": "pattern minLength maxLength format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum",
}
_TYPE_OF = {keyword: kind for kind, keywords in _OF_TYPE.items() for keyword in keywords.split()}
_SCHEMA = _words(
    "items additionalProperties additionalItems unevaluatedProperties unevaluatedItems "
    "propertyNames"
)
_LIST = _words("anyOf oneOf allOf prefixItems")
_MAPPING = _words("properties patternProperties $defs definitions")
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # what stands beside is not kept
_KNOWN = _ANNOTATIONS | {*_TYPE_OF, *_ALONE, "type"}
_FORMATS = _words(
    "date time date-time duration email hostname ipv4 ipv6 uri uri-reference uri-template uuid "
    "json-pointer relative-json-pointer"
)


def check_schema(text: str) -> None:
    """Refuse a schema that no grammar can keep.

    Raises:
        ConfigError: Names the keyword and where it is.
    """
    pending = [("#", json.loads(text), 0)]
    while pending:
        where, schema, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(f"structured_outputs has a schema of more than {MAX_DEPTH} levels")
        if isinstance(schema, Mapping):
            _check_keywords(where, schema)
            pending += [(place, part, depth + 1) for place, part in _parts(where, schema)]


def _check_keywords(where: str, schema: Mapping[str, Any]) -> None:
    for name, value in schema.items():
        if name not in _KNOWN and not (name == "uniqueItems" and value is False):
            raise _refused(where, f"{name!r}", "leave it out and check the answers")
    _check_types(where, schema)
    _check_alone(where, schema)
    _check_object(where, schema)
    if "\\\\" in str(schema.get("pattern")):
        raise _refused(where, "a pattern with a backslash in the text", "leave the pattern out")
    form = schema.get("format")
    if form is not None and form not in _FORMATS:
        raise _refused(where, f"format {form!r:.60}", f"known are {', '.join(sorted(_FORMATS))}")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        raise _refused(where, f"$ref {reference!r:.60}", "only parts of the schema itself can be")


def _check_types(where: str, schema: Mapping[str, Any]) -> None:
    types = schema.get("type", [])
    kinds = {types} if isinstance(types, str) else {str(kind) for kind in types}
    kinds |= {"number"} if "integer" in kinds else set()
    kinds |= {"object"} if "properties" in schema and not kinds else set()
    for name in schema:
        kind = _TYPE_OF.get(name)
        if kind is not None and kind not in kinds:
            raise _refused(where, f"{name!r} without type {kind!r}", f"add the type {kind!r}")


def _check_alone(where: str, schema: Mapping[str, Any]) -> None:
    for name in _ALONE:
        beside = schema.keys() - _ANNOTATIONS - {name}
        if name in ("enum", "const"):
            beside -= {"type"}
        if name in schema and beside:
            raise _refused(where, f"{name!r} beside {min(beside)!r}", "write it as one of both")


def _check_object(where: str, schema: Mapping[str, Any]) -> None:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return  # the compiler says it better
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise _refused(where, f"required {unknown[0]!r:.60}", "add it to properties")
    if len(patterns) > 1 or (patterns and properties):
        raise _refused(where, "patternProperties beside others", "one pattern alone can be")
    if "propertyNames" in schema and (patterns or properties):
        raise _refused(where, "propertyNames beside properties", "one of them alone can be")


def _refused(where: str, what: str, advice: str) -> ConfigError:
    return ConfigError(
        f"structured_outputs has a JSON schema with {what} at {where:.200}, which no generation "
        f"can be held to; {advice}"
    )


def _parts(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        if name in _SCHEMA:
            yield f"{where}/{name}", value
        elif name in _LIST and isinstance(value, list):
            yield from ((f"{where}/{name}/{index}", part) for index, part in enumerate(value))
        elif name in _MAPPING and isinstance(value, Mapping):
            yield from ((f"{where}/{name}/{key}", part) for key, part in value.items())
