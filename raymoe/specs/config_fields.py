"""Typed access to a `config.json`: ill-typed values are refused by name."""

from collections.abc import Mapping

from raymoe.errors import ConfigError
from raymoe.specs.family import Family

MAX_INTEGER = 2**40 - 1
MAX_NUMBER = 1e30
MAX_TOKEN_ID = 2**31 - 1


class ConfigFields:
    """The used fields of one configuration; a missing one takes the default of its family.

    Attributes:
        family: Where defaults come from.
        layer_types: The field of this name, in families that do not use it as well.
    """

    def __init__(self, config: Mapping[str, object], family: Family) -> None:
        """Read a configuration that `canonical_config` gives."""
        self.family = family
        self._values = dict(family.defaults)
        self._values |= {name: config[name] for name in family.defaults if name in config}
        self.layer_types = config.get("layer_types")

    def get(self, name: str) -> object:
        """The value as it stands."""
        return self._values[name]

    def has(self, name: str) -> bool:
        """Whether the family has the field and it is not null."""
        return self._values.get(name) is not None

    def positive(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        """A positive integer."""
        return _integer(name, self._values[name], minimum=1, maximum=maximum)

    def natural(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        """An integer, zero allowed."""
        return _integer(name, self._values[name], minimum=0, maximum=maximum)

    def positive_or_none(self, name: str) -> int | None:
        """A positive integer, or None where it is null."""
        return _integer(name, self._values[name], minimum=1) if self.has(name) else None

    def number(self, name: str) -> float:
        """A positive number."""
        value = self._values[name]
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value < MAX_NUMBER
        ):
            return float(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a positive number")

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._values[name]
        if isinstance(value, bool):
            return value
        raise ConfigError(f"config.json: {name} is {value!r}; expected true or false")

    def switch(self, name: str | bool | None) -> bool:
        """A boolean as it is, or the field of this name; False where the family has none."""
        return self.boolean(name) if isinstance(name, str) else bool(name)

    def number_or(self, name: str | float) -> float:
        """A number as it is, or the field of this name."""
        return self.number(name) if isinstance(name, str) else name

    def uniform(self, name: str) -> int:
        """A positive integer, or a list with the same one for each layer."""
        value = self._values[name]
        if isinstance(value, list) and value == value[:1] * len(value):
            value = value[0] if value else None
        return _integer(name, value, minimum=1)

    def integers(self, name: str) -> frozenset[int]:
        """A list of integers; empty where the field is null or the family has none."""
        value = self._values.get(name)
        if value is None:
            return frozenset()
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return frozenset(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a list of integers")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or null."""
        value = self._values.get(name)
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in items):
            return tuple(items)
        raise ConfigError(f"config.json: {name} is {value!r}; expected token ids")


def _integer(name: str, value: object, *, minimum: int, maximum: int = MAX_INTEGER) -> int:
    if type(value) is int and minimum <= value <= maximum:
        return value
    bounds = f"at least {minimum}" + (f" and at most {maximum}" if maximum < MAX_INTEGER else "")
    raise ConfigError(f"config.json: {name} is {value!r:.100}; expected an integer of {bounds}")
