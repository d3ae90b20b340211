"""Frozen dataclasses of numbers and text, to and from what JSON can hold; nothing is guessed."""

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

from raymoe.errors import ConfigError, UnknownOptionError

Data = TypeVar("Data")


def from_plain(kind: type[Data], value: object, *, where: str) -> Data:
    """Build a dataclass from a mapping of its fields.

    Fields may be str, int, float, tuples, dataclasses, or one of these and None.

    Args:
        kind: The dataclass.
        value: What JSON held.
        where: Names the source in errors.

    Raises:
        ConfigError: A field is missing, unknown, or of another type; names it.
    """
    return cast("Data", _read(kind, value, where))


def to_json(data: object) -> str:
    """The JSON text of a dataclass: a line for each field, nested ones indented."""
    return _write(data, "") + "\n"


def _write(value: object, indent: str) -> str:
    if not dataclasses.is_dataclass(value):
        return json.dumps(value)
    deeper = indent + "  "
    lines = [
        f'{deeper}"{field.name}": {_write(getattr(value, field.name), deeper)}'
        for field in dataclasses.fields(value)
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _read(kind: object, value: object, where: str) -> object:
    if get_origin(kind) is types.UnionType:
        (kind,) = (member for member in get_args(kind) if member is not types.NoneType)
        return None if value is None else _read(kind, value, where)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(cast("float", value))
    if kind is int and is_number and isinstance(value, int):
        return value
    if kind is str and isinstance(value, str):
        return value
    names = {float: "a number", int: "a whole number", str: "text"}
    raise ConfigError(f"{where} is {value!r}; it takes {names[cast('type', kind)]}")


def _dataclass(kind: type, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} holds {type(value).__name__}; it takes an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise UnknownOptionError(str(name), fields, f"field of {where}")
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING:
            raise ConfigError(f"{where} has no field {name!r}")
    types_of = get_type_hints(kind)
    return kind(**{name: _read(types_of[name], value[name], f"{where}: {name}") for name in value})


def _tuple(members: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} is {value!r}; it takes a list")
    if members[-1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise ConfigError(f"{where} is {value!r}; it takes {len(members)} entries")
    return tuple(_read(kind, entry, where) for kind, entry in zip(members, value, strict=True))
