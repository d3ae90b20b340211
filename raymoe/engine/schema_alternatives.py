"""Proves that alternatives of a oneOf exclude each other, so that it is an anyOf.

llguidance enforces oneOf only then, and does not look where references lead, as those of
discriminated unions do.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

MAX_ALTERNATIVES = 64
MAX_STEPS = 10_000  # comparisons of a schema
_TYPES = {
    "null": {"null"},
    "boolean": {"boolean"},
    "integer": {"integer"},
    "number": {"integer", "fraction"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
_ALL = frozenset().union(*_TYPES.values())


class Alternatives:
    """The schemas of one document, by their places.

    Args:
        targets: What each reference leads to, such as ``#/$defs/a``.
    """

    def __init__(self, targets: Mapping[str, dict[str, Any]]) -> None:
        self._targets, self._steps = targets, 0

    def exclude_each_other(self, options: list[Any]) -> bool:
        """Whether no value is valid for two of these schemas; False if that is not proved."""
        pairs = itertools.combinations(options, 2)
        few = len(options) <= MAX_ALTERNATIVES
        return few and all(self._are_disjoint(left, right, 0) for left, right in pairs)

    def _are_disjoint(self, left: Any, right: Any, depth: int) -> bool:
        self._steps += 1
        if depth > 16 or self._steps > MAX_STEPS:
            return False
        if left is False or right is False:
            return True
        if not isinstance(left, dict) or not isinstance(right, dict):
            return False
        for one, other in ((left, right), (right, left)):
            if "$ref" in one:  # what else there is has no meaning in old drafts
                target = self._targets.get(str(one["$ref"]))
                return self._are_disjoint(target, other, depth + 1)
        for one, other in ((left, right), (right, left)):
            for name in ("anyOf", "oneOf"):
                options = one.get(name)
                if isinstance(options, list) and all(
                    self._are_disjoint(option, other, depth + 1) for option in options
                ):
                    return True
        return self._differ(left, right, depth)

    def _differ(self, left: dict[str, Any], right: dict[str, Any], depth: int) -> bool:
        values = _values(left), _values(right)
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
        common = _types(left) & _types(right)
        if not common:
            return True
        ours, theirs = left.get("properties"), right.get("properties")
        if common != {"object"} or not isinstance(ours, dict) or not isinstance(theirs, dict):
            return False
        required = [*_list(left, "required"), *_list(right, "required")]
        return any(
            self._are_disjoint(ours[name], theirs[name], depth + 1)
            for name in required
            if isinstance(name, str) and name in ours and name in theirs
        )


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values of const or enum as text that is the same for equal ones."""
    if "const" in schema:
        return {_canonical(schema["const"])}
    values = schema.get("enum")
    return {*map(_canonical, values)} if isinstance(values, list) else None


def _canonical(value: Any) -> str:
    # 1 and 1.0 are equal in JSON Schema.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        parts = sorted((json.dumps(key), _canonical(part)) for key, part in value.items())
        return f"{{{','.join(f'{key}:{part}' for key, part in parts)}}}"
    return json.dumps(value)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return _ALL
    return frozenset().union(*(_TYPES.get(name, _ALL) for name in names))
