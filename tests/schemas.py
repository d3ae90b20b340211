"""Random JSON schemas whose texts are short, in the keywords that generations can be held to."""

import random
from typing import Any

NAMES = ("id", "name", "größe", "a b", 'say "hi"', "tags", "x_1", "kind", "日付")
PATTERNS = ("^[a-z]{1,6}$", "^\\d{3}-\\d{2}$", "^(ab|cd)*x$", "^[A-Z][a-z]{0,3}( [A-Z])?$", "^$")
FORMATS = ("date", "time", "ipv4", "uuid", "date-time")
VALUES = ("x", "y z", "é\n", "", 0, -7, 3.5, True, False, None, [1, "a"], {"k": None})


class SchemaMaker:
    """Makes one schema; parts of it may be referred to from elsewhere in it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._parts: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        """An object or array with everything else inside."""
        schema = self._rng.choice((self._object, self._array))(3)
        return {**schema, "$defs": self._parts} if self._parts else schema

    def _any(self, depth: int) -> dict[str, Any]:
        flat = (self._string, self._integer, self._enum, self._flag)
        deep = (self._object, self._array, self._union, self._reference)
        return self._rng.choice(flat + deep if depth else flat)(depth - 1)

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(NAMES, self._rng.randrange(5))
        properties = {name: self._any(depth) for name in names}
        required = [name for name in names if self._rng.random() < 0.6]
        # A random model would fill an open object until `max_tokens`.
        more = {"additionalProperties": False, **self._rng.choice(({}, {"title": "T"}))}
        return {"type": "object", "properties": properties, "required": required, **more}

    def _array(self, depth: int) -> dict[str, Any]:
        minimum = self._rng.randrange(3)
        maximum = minimum + self._rng.randrange(3)
        if self._rng.random() < 0.3:
            items = [self._any(depth) for _ in range(1 + maximum)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        return {
            "type": "array",
            "items": self._any(depth),
            "minItems": minimum,
            "maxItems": maximum,
        }

    def _string(self, _depth: int) -> dict[str, Any]:
        minimum = self._rng.randrange(4)
        kind = self._rng.choice(
            (
                {"pattern": self._rng.choice(PATTERNS)},
                {"format": self._rng.choice(FORMATS)},
                {"minLength": minimum, "maxLength": minimum + self._rng.randrange(8)},
            )
        )
        return {"type": "string", **kind}

    def _integer(self, _depth: int) -> dict[str, Any]:
        low = self._rng.randrange(-2000, 2000)
        high = low + self._rng.randrange(5000)
        names = self._rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "maximum")))
        return {"type": "integer", names[0]: low - 1, names[1]: high}

    def _enum(self, _depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(VALUES)}
        return {"enum": self._rng.sample(VALUES, self._rng.randrange(1, 5))}

    def _flag(self, _depth: int) -> dict[str, Any]:
        return {"type": self._rng.choice(("boolean", "null", ["boolean", "null"]))}

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        if not self._parts or self._rng.random() < 0.5:
            part = self._any(depth)
            self._parts[f"part{len(self._parts)}"] = part
        return {"$ref": f"#/$defs/{self._rng.choice(sorted(self._parts))}"}
