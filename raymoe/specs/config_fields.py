"""Typed access to a `config.json`: unknown fields and ill-typed values are refused by name."""

from collections.abc import Mapping

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.families import FAMILIES, FIXED, IGNORED, ROPE_FIELDS, Family

FULL, SLIDING = "full_attention", "sliding_attention"


def find_family(config: Mapping[str, object]) -> tuple[str, Family]:
    """The model type of a configuration and its family.

    Raises:
        UnsupportedModelError: The type is unknown, or the repository brings its own model code.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        custom = "; custom code (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}{custom}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    if architectures and architectures != [family.architecture]:
        raise UnsupportedModelError(
            f"architectures = {architectures!r} is not supported for model_type {model_type!r}; "
            f"supported: {family.architecture}"
        )
    return model_type, family


def check_fields(config: Mapping[str, object], model_type: str, family: Family) -> None:
    """Refuse every field that is neither used, nor ignored, nor fixed at its accepted value.

    Raises:
        UnsupportedModelError: Names the field, its value and what is supported.
    """
    used = family.defaults.keys() | family.aliases.keys() | ROPE_FIELDS
    for name, value in config.items():
        if name in used or name in IGNORED or name in family.ignored:
            continue
        if name == "auto_map":
            _check_auto_map(value)
        elif name == "layer_types" and value is not None:
            continue  # compared with the windows of the layers by ConfigFields.windows
        elif name in FIXED:
            if not any(value is accepted or value == accepted for accepted in FIXED[name]):
                raise UnsupportedModelError(
                    f"{name} = {value!r} is not supported for model_type {model_type!r}; "
                    f"supported: {', '.join(repr(accepted) for accepted in FIXED[name])}"
                )
        elif value is not None:
            raise UnsupportedModelError(
                f"field {name} = {value!r} is not known for model_type {model_type!r} and might "
                "change what the model computes; remove it from config.json if it does not. "
                f"Fields in use: {', '.join(sorted(used))}"
            )


def _check_auto_map(value: object) -> None:
    if isinstance(value, Mapping) and not any(
        str(name).startswith(("AutoModel", "AutoConfig")) for name in value
    ):
        return
    if value:
        raise UnsupportedModelError(
            f"auto_map = {value!r}: the model brings its own code, which is never run; use a "
            "checkpoint for the architecture in transformers itself"
        )


class ConfigFields:
    """The used fields of one configuration; a missing one takes the default of its family.

    Attributes:
        family: Where defaults and aliases come from.
    """

    def __init__(self, config: Mapping[str, object], family: Family) -> None:
        self.family = family
        self._values = dict(family.defaults)
        self._values |= {name: config[name] for name in family.defaults if name in config}
        for alias, name in family.aliases.items():
            if alias in config:
                if name in config and config[name] != config[alias]:
                    raise ConfigError(
                        f"{name} is {config[name]!r} but {alias} is {config[alias]!r}"
                    )
                self._values[name] = config[alias]
        self._layer_types = config.get("layer_types")

    def get(self, name: str) -> object:
        """The value as it stands."""
        return self._values[name]

    def has(self, name: str) -> bool:
        """Whether the family has the field and it is not null."""
        return self._values.get(name) is not None

    def positive(self, name: str) -> int:
        """A positive integer."""
        return self._integer(name, minimum=1)

    def natural(self, name: str) -> int:
        """An integer, zero allowed."""
        return self._integer(name, minimum=0)

    def positive_or_none(self, name: str) -> int | None:
        """A positive integer, or None where it is null."""
        return self._integer(name, minimum=1) if self.has(name) else None

    def number(self, name: str) -> float:
        """A positive number."""
        value = self._values[name]
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a positive number")

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._values[name]
        if isinstance(value, bool):
            return value
        raise ConfigError(f"config.json: {name} is {value!r}; expected true or false")

    def switch(self, name: str | None) -> bool:
        """The boolean field of this name; False where the family has none."""
        return False if name is None else self.boolean(name)

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
        if all(type(item) is int and item >= 0 for item in items):
            return tuple(items)
        raise ConfigError(f"config.json: {name} is {value!r}; expected token ids")

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where it sees everything.

        Raises:
            UnsupportedModelError: `layer_types` disagrees with the other fields, or names a kind
                of layer that is not implemented.
        """
        window, slides = self._window(), self._sliding_layers(num_layers)
        if self._layer_types is not None:
            slides = self._check_layer_types(num_layers, slides if window else [False] * num_layers)
            if any(slides) and window is None:
                raise UnsupportedModelError(
                    "layer_types has sliding_attention layers, but the sliding window is off"
                )
        return tuple(window if is_sliding else None for is_sliding in slides)

    def _window(self) -> int | None:
        if self.family.windowed_layers == "none":
            return None
        if self.family.is_window_switched and not self.boolean("use_sliding_window"):
            return None
        return self.positive_or_none("sliding_window")

    def _sliding_layers(self, num_layers: int) -> list[bool]:
        rule = self.family.windowed_layers
        if rule in {"none", "all"}:
            return [rule == "all"] * num_layers
        border = self.natural("max_window_layers")
        if rule == "from_max":
            return [i >= border for i in range(num_layers)]
        return [i % 2 == 0 and i < border for i in range(num_layers)]

    def _check_layer_types(self, num_layers: int, slides: list[bool]) -> list[bool]:
        kinds = self._layer_types
        if (
            not isinstance(kinds, list | tuple)
            or len(kinds) != num_layers
            or not all(kind in {FULL, SLIDING} for kind in kinds)
        ):
            raise UnsupportedModelError(
                f"layer_types = {kinds!r} is not supported; "
                f"supported: one of {FULL}, {SLIDING} for each of {num_layers} layers"
            )
        named = [kind == SLIDING for kind in kinds]
        if not self.family.has_layer_types and named != slides:
            raise UnsupportedModelError(
                f"layer_types = {kinds!r} disagrees with the sliding window of this model_type, "
                "for which transformers does not read layer_types"
            )
        return named

    def _integer(self, name: str, *, minimum: int) -> int:
        value = self._values[name]
        if type(value) is int and minimum <= value < 2**40:
            return value
        raise ConfigError(
            f"config.json: {name} is {value!r}; expected an integer of at least {minimum}"
        )
