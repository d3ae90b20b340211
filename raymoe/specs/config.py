"""Read a `config.json`: find its family, check and type its fields."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.class_defaults import ClassDefaults
from raymoe.specs.class_fields import is_read
from raymoe.specs.families import FAMILIES, MODEL_TYPE_ALIASES, WRAPPERS
from raymoe.specs.families.rules import (
    FIXED,
    IGNORED,
    READ_APART,
    ROPE_FIELDS,
    Family,
    used_fields,
)
from raymoe.specs.files import MAX_INTEGER, MAX_NUMBER, MAX_TOKEN_ID, integer

logger = logging.getLogger(__name__)
MAX_LOGGED = 100  # fields; a file may have millions


class ConfigFields:
    """The used fields of one configuration, with the defaults of its class for missing ones."""

    def __init__(
        self, config: Mapping[str, object], family: Family, defaults: ClassDefaults
    ) -> None:
        self.family, self.config, self._defaults = family, config, defaults
        self._used = used_fields(family)
        self.layer_types = config.get("layer_types")

    def get(self, name: str) -> object:
        if name not in self._used:
            return None
        return self.config[name] if name in self.config else self._default(name)

    def _default(self, name: str) -> object:
        if name in self.family.defaults:
            return self.family.defaults[name]
        value = self._defaults.get(name)
        others = {**self._defaults.aliases, **self.family.aliases}
        names = [alias for alias, ours in others.items() if ours == name]
        names += [ours for alias, ours in others.items() if alias == name]
        for other in names:
            if value is None and other not in self._used:
                value = self._defaults.get(other)
        return value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def positive(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        return integer(name, self.get(name), minimum=1, maximum=maximum)

    def natural(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        return integer(name, self.get(name), minimum=0, maximum=maximum)

    def positive_or_none(self, name: str) -> int | None:
        return integer(name, self.get(name), minimum=1) if self.has(name) else None

    def number(self, name: str) -> float:
        value = self.get(name)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value < MAX_NUMBER
        ):
            return float(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a positive number")

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if isinstance(value, bool):
            return value
        raise ConfigError(f"config.json: {name} is {value!r}; expected true or false")

    def switch(self, name: str | bool) -> bool:
        """A boolean, or the value of the field of this name."""
        return self.boolean(name) if isinstance(name, str) else name

    def number_or(self, name: str | float) -> float:
        return self.number(name) if isinstance(name, str) else name

    def number_or_none(self, name: str | None) -> float | None:
        return self.number(name) if name is not None and self.has(name) else None

    def uniform(self, name: str) -> int:
        """A positive integer, or a list that repeats one for each layer."""
        value = self.get(name)
        if isinstance(value, list) and value == value[:1] * len(value):
            value = value[0] if value else None
        return integer(name, value, minimum=1)

    def integers(self, name: str) -> frozenset[int]:
        """A list of integers; empty if null or unknown to the family."""
        value = self.get(name)
        if value is None:
            return frozenset()
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return frozenset(value)
        raise ConfigError(f"config.json: {name} is {value!r}; expected a list of integers")

    def by_layer(self, name: str) -> Sequence[object] | None:
        """A list with an entry for each layer; None if null."""
        value, num_layers = self.get(name), self.positive("num_hidden_layers")
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != num_layers:
            raise ConfigError(
                f"config.json: {name} is {value!r:.100}; expected a list of {num_layers} entries"
            )
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in items):
            return tuple(items)
        raise ConfigError(f"config.json: {name} is {value!r}; expected token ids")


HeadKind = Literal["lm", "labels", "none"]
_LM = "ForCausalLM"
HEADS: Mapping[str, HeadKind] = {
    _LM: "lm",
    "ForSequenceClassification": "labels",
    "Model": "none",
}


def find_family(config: Mapping[str, object]) -> tuple[str, Family]:
    """Model type and family of a configuration; raises UnsupportedModelError if unknown."""
    written = config.get("model_type")
    model_type = MODEL_TYPE_ALIASES.get(str(written), written)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        custom = "; custom code (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted({*FAMILIES, *WRAPPERS}))}{custom}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    names = (family.architecture, *family.published_architectures)
    known = [[name.removesuffix(_LM) + kind] for name in names for kind in HEADS]
    # Classes that wrap it: the text part may be saved alone, and keep the name of the whole.
    wrappers = [one for one in WRAPPERS.values() if model_type in one.texts]
    known += [[name] for wrapper in wrappers for name in wrapper.architectures]
    if architectures and architectures not in known:
        raise UnsupportedModelError(
            f"architectures = {architectures!r} is not supported for model_type {model_type!r}; "
            f"supported: {' or '.join(names)}, and that name with "
            f"{' or '.join(kind for kind in HEADS if kind != _LM)} instead of {_LM}"
        )
    return model_type, family


def head_of(config: Mapping[str, object]) -> HeadKind:
    """The head of the class that `architectures` names; that of a language model by default."""
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else _LM
    return next((head for kind, head in HEADS.items() if name.endswith(kind)), "lm")


def labels_of(config: Mapping[str, object]) -> tuple[str, ...]:
    """Names of classes, in order, as transformers reads them: two where none are written."""
    found = config.get("id2label")
    if found is None:
        count = integer("num_labels", config.get("num_labels", 2), minimum=1, maximum=1 << 20)
        return tuple(f"LABEL_{index}" for index in range(count))
    names = found if isinstance(found, Mapping) else {}
    labels = [names.get(str(index)) for index in range(len(names))]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ConfigError(
            f"config.json: id2label is {found!r:.100}; expected a name for each number from 0"
        )
    return tuple(map(str, labels))


def canonical_config(
    config: Mapping[str, object], family: Family, defaults: ClassDefaults
) -> dict[str, object]:
    """Flatten nested objects and name fields canonically; raises ConfigError on conflicts."""
    flat = {name: value for name, value in config.items() if name not in family.nested}
    for outer in family.nested:
        content = config.get(outer) or {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"config.json: {outer} is {content!r}; expected an object")
        flat |= {f"{outer}.{name}": value for name, value in content.items()}
    used, others = used_fields(family), {**defaults.aliases, **family.aliases}
    others |= {name: alias for alias, name in defaults.aliases.items() if alias in used}
    for alias, name in others.items():
        if alias in flat and alias not in used:
            value = flat.pop(alias)
            if flat.setdefault(name, value) != value:
                raise ConfigError(f"{name} is {flat[name]!r} but {alias} is {value!r}")
    return flat


def check_fields(
    config: Mapping[str, object], model_type: str, family: Family, defaults: ClassDefaults
) -> tuple[str, ...]:
    """Names of fields that are neither used nor known, and that transformers does not read either.

    They cannot change what transformers computes, and nothing reads them here. Raises
    UnsupportedModelError for what it reads and this does not, and for values that the publisher's
    own code follows and this does not (`Family.fixed`).
    """
    used = used_fields(family) | ROPE_FIELDS
    missing = {name: defaults.values[name] for name in family.fixed if name in defaults.values}
    unread: list[str] = []
    for name, value in (missing | dict(config)).items():
        plain = name.rpartition(".")[2]
        if plain in IGNORED or name in family.ignored or name in READ_APART:
            continue
        if name == "auto_map":
            _check_auto_map(value, family)
            continue
        accepted = _accepted(name, family, used)
        if accepted is None or _is_accepted(value, accepted):
            continue
        if name not in family.fixed and _is_unread(plain, defaults):
            unread.append(name)
            continue
        raise _refusal(name, value, model_type, family)
    return tuple(unread)


def _accepted(name: str, family: Family, used: frozenset[str]) -> tuple[object, ...] | None:
    """The values of a field that are followed; None if all are."""
    plain = name.rpartition(".")[2]
    if name in family.fixed:
        return family.fixed[name]
    if plain in FIXED and plain not in used:
        return FIXED[plain]
    return None if name in used else (None,)


def _is_accepted(value: object, accepted: tuple[object, ...]) -> bool:
    items = value if isinstance(value, list) and value else [value]
    return all(any(item is one or item == one for one in accepted) for item in items)


def _is_unread(name: str, defaults: ClassDefaults) -> bool:
    return defaults.directory is not None and not is_read(
        name, defaults.model_type, defaults.directory
    )


def _refusal(name: str, value: object, model_type: str, family: Family) -> UnsupportedModelError:
    used = used_fields(family) | ROPE_FIELDS
    accepted = _accepted(name, family, used)
    if accepted is not None and accepted != (None,):
        return UnsupportedModelError(
            f"{name} = {value!r} is not supported for model_type {model_type!r}; "
            f"supported: {', '.join(map(repr, accepted))}"
        )
    return UnsupportedModelError(
        f"field {name} = {value!r} is not known for model_type {model_type!r}, and the installed "
        "transformers reads it or cannot be asked, so that it might change what the model "
        "computes; remove it from config.json if it does not. "
        f"Fields in use: {', '.join(sorted(used))}"
    )


@cache
def log_unread(name: str, model_type: str, fields: tuple[str, ...]) -> None:
    """Say once in a process which fields of a configuration are ignored, if there are any."""
    if not fields:
        return
    shown = ", ".join(f"{field!r:.80}" for field in fields[:MAX_LOGGED])
    more = f" and {len(fields) - MAX_LOGGED:,} more" if len(fields) > MAX_LOGGED else ""
    logger.warning(
        "%s: ignored fields of config.json that transformers does not read for model_type %r: %s%s",
        name,
        model_type,
        shown,
        more,
    )


def _check_auto_map(value: object, family: Family) -> None:
    if not value:
        return
    stems = [
        name.removesuffix(_LM) for name in family.published_architectures or [family.architecture]
    ]
    known = {f"{stem}{kind}" for stem in stems for kind in ("Config", "Model", _LM)}
    classes = value if isinstance(value, Mapping) else {"AutoModel": value}
    for auto, path in classes.items():
        is_known = family.was_published_with_code and str(path).rpartition(".")[2] in known
        if str(auto).startswith(("AutoModel", "AutoConfig")) and not is_known:
            raise UnsupportedModelError(
                f"auto_map = {value!r}: the model brings its own code, which is never run; use a "
                "checkpoint for the architecture in transformers itself"
            )
