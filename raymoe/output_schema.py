"""Answers as values: the types of an `output_schema`, and what an answer has of them."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from raymoe.config import SamplingParams
from raymoe.errors import ConfigError, describe, encodable
from raymoe.regular_expressions import exact_regex
from raymoe.safe_text import MAX_LEVELS, nesting_problem
from raymoe.specs.files import read_own_json
from raymoe.structured import KINDS, StructuredOutputs
from raymoe.units import MAX_INT64

# Patterns are those of constraints: Python's `re` has another dialect.
_PATTERNS = FormatChecker(())
MAX_MESSAGE = 300  # characters of a message of a library, which may quote much
MAX_PARTS = 10_000  # of a schema whose references are written out
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null",
          list: "array", dict: "object"}  # fmt: skip
MAX_PLACES = 4  # a float with more is written with an exponent, which no constraint takes
_BOUNDS = ("multiple_of", "le", "lt", "ge", "gt")  # of a Decimal, which are Decimals themselves
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"?|[{}\[\],]|[^\s"{}\[\],]+', re.DOTALL)


def _is_pattern(value: object) -> bool:
    if isinstance(value, str):
        exact_regex(value)
    return True


_PATTERNS.checks("regex", raises=ConfigError)(_is_pattern)


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of a value: one of those of JSON Schema.

    Attributes:
        is_nullable: Whether it may be null or absent.
        fields: The names and types of an object.
        item: The type of the items of an array.
    """

    kind: str
    is_nullable: bool = False
    fields: tuple[tuple[str, "ValueType"], ...] = ()
    item: "ValueType | None" = None


class Parsed(NamedTuple):
    """The value of an answer.

    Attributes:
        value: None if there is none.
        error: Why, and where in the answer; "" if there is one.
    """

    value: Any
    error: str = ""


class _UnfitError(ValueError):
    """A value that is valid, but too large for its type; the text says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSchema:
    """What answers are read as.

    Attributes:
        text: A JSON schema. Its objects have the properties that it names and no others.
        root: The type of an answer: an object.
        model: The pydantic class whose instances answers become; None leaves them dicts.
    """

    text: str
    root: ValueType
    model: Any = None

    @classmethod
    def of(cls, value: object, *, what: str = "output_schema") -> Self:
        """Return the schema of a pydantic class, a mapping, or a file that has one as JSON.

        Args:
            what: What the user calls it.

        Raises:
            ConfigError: It is none of these, or has a part that is no type of a column; says
                where and what to write instead.
        """
        if isinstance(value, cls):
            return value
        model = value if hasattr(value, "model_json_schema") else None
        if isinstance(value, str | Path):
            value = read_own_json(Path(value), what=what)
        if model is not None:
            value = _schema_of_class(model, what)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{what} is a {type(value).__name__}; it takes a pydantic class, a "
                              "JSON schema, or the path of a file with one")  # fmt: skip
        # A copy, which is written to below; it is checked as the constraint that it becomes.
        schema = json.loads(StructuredOutputs.of({"json": value}).json or "")
        try:
            kind = validator_for(schema, Draft202012Validator)
            kind.check_schema(schema, format_checker=_PATTERNS)
        except SchemaError as error:
            message = error.message if error.cause is None else str(error.cause)
            reason = f"{error.json_path}: {message:.{MAX_MESSAGE}}"
            raise ConfigError(f"{what} is no JSON schema: {reason}") from error
        root = _Types(schema, what).of(schema, "$")
        if root.kind != "object" or root.is_nullable:
            found = f"{root.kind} or null" if root.is_nullable else root.kind
            raise ConfigError(f"{what} is of the type {found}; it takes an object: make the value "
                              "a property of one")  # fmt: skip
        return cls(text=json.dumps(schema, ensure_ascii=False), root=root, model=model)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON schema, from which `of` makes the same one without its class."""
        schema: dict[str, Any] = json.loads(self.text)
        return schema

    def constrain(self, params: Any) -> Any:
        """Return sampling parameters, given in any form, under which answers follow the schema.

        Their `structured_outputs` may have `disable_any_whitespace` alone.

        Raises:
            ConfigError: They have another constraint.
        """
        is_object = isinstance(params, SamplingParams)
        if not (is_object or params is None or isinstance(params, Mapping)):
            return params  # what reads them refuses them
        given = params.structured_outputs if is_object else (params or {}).get("structured_outputs")
        if given is None or (isinstance(given, Mapping) and not given.keys() & {*KINDS}):
            ours = {"structured_outputs": {"json": self.text, **(given or {})}}
            return params.override(ours) if is_object else {**(params or {}), **ours}
        if StructuredOutputs.of(given).json != self.text:
            raise ConfigError("output_schema and structured_outputs contradict each other; an "
                              "output_schema constrains answers already: give one")  # fmt: skip
        return params

    def parse(
        self, text: str, finish_reason: str, find_problem: Callable[[str], str] | None = None
    ) -> Parsed:
        """Return the value of an answer, or why it has none, such as "cut by max_tokens at $.a".

        Args:
            find_problem: Returns where a JSON text is not valid, and why, or ""; None where the
                answer followed the schema while it was generated: all of it is valid then, since
                it is the beginning of a valid text, and no beginning of an object is an object.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return Parsed(None, _unreadable(text, finish_reason, error))
        nesting = nesting_problem(value)  # before what recurses
        problem = f"$ {nesting}" if nesting else find_problem(text) if find_problem else ""
        if problem:
            return Parsed(None, encodable(problem))
        try:
            fitted = _fitted(value, self.root, "$")
        except _UnfitError as error:
            return Parsed(None, encodable(str(error)))
        if self.model is None:
            return Parsed(fitted)
        try:
            return Parsed(self.model.model_validate_json(text))
        except Exception as error:  # a class may check more than its schema says
            return Parsed(None, _refusal_of_model(error))


def generation_params(params: Any, schema: OutputSchema | None) -> SamplingParams:
    """Return the parameters of an operator's rows, which follow its schema if it has one."""
    constrained = params if schema is None else schema.constrain(params)
    if isinstance(constrained, SamplingParams):
        return constrained
    return SamplingParams.from_dict(constrained or {})


def _schema_of_class(model: Any, what: str) -> Any:
    # Who has such a class has pydantic, which raymoe does not need.
    from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415

    class Schema(GenerateJsonSchema):
        """A Decimal is a number, and a set an array whose equal items the class drops."""

        def decimal_schema(self, schema: Any) -> Any:
            places = schema.get("decimal_places")
            number: Any = {"type": "float"}
            if places is not None and places <= MAX_PLACES:
                number["multiple_of"] = 10.0**-places
            number |= {name: float(schema[name]) for name in _BOUNDS if name in schema}
            return self.float_schema(number)

        def set_schema(self, schema: Any) -> Any:
            return {**super().set_schema(schema), "uniqueItems": False}

        def frozenset_schema(self, schema: Any) -> Any:
            return {**super().frozenset_schema(schema), "uniqueItems": False}

    try:
        return model.model_json_schema(schema_generator=Schema)
    except Exception as error:  # a class may make its schema itself
        raise ConfigError(f"{what} is a class without a JSON schema: {describe(error)}") from error


class _Types:
    """Reads the types of a schema, and closes its objects to properties that it does not name."""

    def __init__(self, root: dict[str, Any], what: str) -> None:
        registry: Registry[Any] = Registry().with_resource("", DRAFT202012.create_resource(root))
        self._resolver, self._what = registry.resolver(), what
        self._num_parts = self._depth = 0

    def of(self, schema: Any, where: str, references: tuple[str, ...] = ()) -> ValueType:
        """Return the type of what a part of the schema allows.

        Args:
            where: The path of such a value in an answer.
            references: Those that led here.
        """
        # A part counts each time that something leads to it: two references in each of twenty
        # definitions to the next one are a million parts.
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise self._refused(f"more than {MAX_PARTS} parts, references written out,", where,
                                "make it smaller")  # fmt: skip
        if self._depth >= MAX_LEVELS:
            raise self._refused(f"more than {MAX_LEVELS} levels, references among them,", where,
                                "write it with fewer")  # fmt: skip
        self._depth += 1
        try:
            return self._of_part(schema, where, references)
        finally:
            self._depth -= 1

    def _of_part(self, schema: Any, where: str, references: tuple[str, ...]) -> ValueType:
        if not isinstance(schema, dict):
            raise self._refused(f"the schema {schema}", where, "name the type")
        if "$ref" in schema:
            return self._of_reference(schema["$ref"], where, references)
        name = next((name for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
        if name is not None and "type" not in schema:
            options = schema[name]
            if name == "allOf" and len(options) > 1:
                raise self._refused(f"an allOf of {len(options)}", where, "write it as one schema")
            return self._joined([self.of(one, where, references) for one in options], where)
        kinds = _kinds(schema)
        if not kinds:
            raise self._refused("no type", where, "name one")
        return self._joined([self._of_kind(kind, schema, where, references) for kind in kinds],
                            where)  # fmt: skip

    def _of_reference(self, reference: str, where: str, references: tuple[str, ...]) -> ValueType:
        if reference in references:
            raise self._refused(f"{reference}, which leads back to itself,", where,
                                "write out as many levels as answers may have")  # fmt: skip
        try:
            target = self._resolver.lookup(reference).contents
        except Exception as error:  # not only `Unresolvable`: such as for "http://[" or "#/enum/a"
            advice = "it must lead to a part of this schema, as #/$defs/... does"
            raise self._refused(f"$ref {reference!r:.60}", where, advice) from error
        return self.of(target, where, (*references, reference))

    def _of_kind(
        self, kind: str, schema: dict[str, Any], where: str, references: tuple[str, ...]
    ) -> ValueType:
        if kind == "array":
            if not isinstance(schema.get("items"), dict) or "prefixItems" in schema:
                raise self._refused("an array without one type of items", where,
                                    "give it items, or make it an object")  # fmt: skip
            return ValueType(kind, item=self.of(schema["items"], f"{where}[]", references))
        if kind != "object":
            return ValueType(kind, is_nullable=kind == "null")
        is_open = schema.get("additionalProperties", False) is not False
        if not schema.get("properties") or is_open or "patternProperties" in schema:
            raise self._refused("an object with properties of any name", where, "name all of them, "
                                "or use an array of objects with a name and a value")  # fmt: skip
        schema["additionalProperties"] = False
        fields = [
            (name, self.of(part, f"{where}.{name}", references))
            for name, part in schema["properties"].items()
        ]
        required = schema.get("required", ())
        return ValueType(kind, fields=tuple(
            (name, one if name in required else dataclasses.replace(one, is_nullable=True))
            for name, one in fields
        ))  # fmt: skip

    def _joined(self, types: Sequence[ValueType], where: str) -> ValueType:
        others = [
            dataclasses.replace(one, is_nullable=False) for one in types if one.kind != "null"
        ]
        found = {*others} or {ValueType("null")}
        if {one.kind for one in found} == {"integer", "number"}:
            found = {ValueType("number")}
        if len(found) != 1:
            kinds = " and ".join(one.kind for one in others)
            raise self._refused(
                f"a union of {kinds}", where, "choose one type; null may stand beside it"
            )
        is_nullable = any(one.is_nullable for one in types)
        return dataclasses.replace(found.pop(), is_nullable=is_nullable)

    def _refused(self, found: str, where: str, advice: str) -> ConfigError:
        return ConfigError(f"{self._what} has {found} at {where:.200}, which is no type of a "
                           f"column; {advice}, or constrain the text alone by structured_outputs"
                           )  # fmt: skip


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names, or those of the values that it lists."""
    if "type" in schema:
        return [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [*dict.fromkeys(_KINDS[type(value)] for value in values)]


def _fitted(value: Any, of: ValueType, where: str) -> Any:
    """Return a value as its type has it: 2.0 as the integer 2, 2 as the number 2.0."""
    _check_kind(value, of, where)
    if value is None:
        return None
    if of.item is not None:
        return [_fitted(one, of.item, f"{where}[{i}]") for i, one in enumerate(value)]
    if of.kind == "object":
        return {
            name: _fitted(value.get(name), part, f"{where}.{name}")
            for name, part in of.fields
            if name in value or not part.is_nullable
        }
    try:
        if of.kind == "string":
            value.encode()
        if of.kind == "integer" and not -MAX_INT64 - 1 <= (value := int(value)) <= MAX_INT64:
            raise OverflowError
        if of.kind == "number" and not math.isfinite(value := float(value)):
            raise OverflowError
    except UnicodeEncodeError as error:
        raise _UnfitError(f"{where}: half of a surrogate pair, which is no text") from error
    except OverflowError as error:
        raise _UnfitError(f"{where}: a number that does not fit 64 bits") from error
    return value


def _check_kind(value: Any, of: ValueType, where: str) -> None:
    is_whole = isinstance(value, float) and value.is_integer()
    kind = "integer" if is_whole else _KINDS[type(value)]
    is_fine = of.is_nullable if value is None else kind == of.kind
    if not is_fine and (kind, of.kind) != ("integer", "number"):
        raise _UnfitError(f"{where}: the type is {kind}; it takes {of.kind}")


def _unreadable(text: str, finish_reason: str, error: Exception) -> str:
    where = encodable(_end_of(text))
    if finish_reason == "length":
        return f"cut by max_tokens at {where}"
    return encodable(f"{where}: no JSON: {error}")


def _end_of(text: str) -> str:
    """Return the path of the value in which JSON ends that has no end, such as $.items[2].a."""
    path: list[str | int | None] = []
    for token in _TOKEN.findall(text):
        if token in ("{", "["):
            path.append(None if token == "{" else 0)
        elif not path:
            break
        elif token in ("}", "]"):
            path.pop()
        elif token == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        elif path[-1] is None and len(token) > 1 and token.endswith('"'):
            path[-1] = token[1:-1]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
             if part is not None)  # fmt: skip
    return "$" + "".join(parts)


def _refusal_of_model(error: Exception) -> str:
    try:
        first = error.errors()[0]  # type: ignore[attr-defined] # pydantic's ValidationError
        path = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in first["loc"])
        return encodable(f"${path}: {first['msg']:.{MAX_MESSAGE}}")
    except Exception:  # a validator's own exception may have anything under these names
        return describe(error)
