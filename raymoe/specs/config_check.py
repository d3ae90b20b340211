"""What a `config.json` may say: unknown types, fields and values are refused by name."""

from collections.abc import Mapping

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.families import FAMILIES, MODEL_TYPE_ALIASES
from raymoe.specs.family import FIXED, IGNORED, READ_APART, ROPE_FIELDS, Family


def find_family(config: Mapping[str, object]) -> tuple[str, Family]:
    """The model type of a configuration and its family.

    Raises:
        UnsupportedModelError: The type is unknown, or the architecture another one.
    """
    written = config.get("model_type")
    model_type = MODEL_TYPE_ALIASES.get(str(written), written)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        custom = "; custom code (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}{custom}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    known = [[family.architecture], [family.published_architecture]]
    if architectures and architectures not in known:
        raise UnsupportedModelError(
            f"architectures = {architectures!r} is not supported for model_type {model_type!r}; "
            f"supported: {family.architecture}"
        )
    return model_type, family


def canonical_config(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """The configuration with nested objects opened and every used field under one name.

    Raises:
        ConfigError: Two names of one field have different values, or a nested object is none.
    """
    flat = {name: value for name, value in config.items() if name not in family.nested}
    for outer in family.nested:
        content = config.get(outer) or {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"config.json: {outer} is {content!r}; expected an object")
        flat |= {f"{outer}.{name}": value for name, value in content.items()}
    for alias, name in family.aliases.items():
        if alias in flat:
            value = flat.pop(alias)
            if flat.setdefault(name, value) != value:
                raise ConfigError(f"{name} is {flat[name]!r} but {alias} is {value!r}")
    return flat


def check_fields(config: Mapping[str, object], model_type: str, family: Family) -> None:
    """Refuse every field that is neither used, nor ignored, nor fixed at an accepted value.

    Args:
        config: As `canonical_config` gives it.
        model_type: For messages.
        family: What is known.

    Raises:
        UnsupportedModelError: Names the field, its value and what is supported.
    """
    used = family.defaults.keys() | ROPE_FIELDS
    fixed = {name: FIXED[name] for name in FIXED.keys() - used} | dict(family.fixed)
    for name, value in config.items():
        plain = name.rpartition(".")[2]
        if plain in IGNORED or name in family.ignored or name in READ_APART:
            continue
        if name in fixed or plain in fixed:
            _check_fixed(name, value, fixed.get(name) or fixed[plain], model_type)
        elif name == "auto_map":
            _check_auto_map(value, family)
        elif name not in used and value is not None:
            raise UnsupportedModelError(
                f"field {name} = {value!r} is not known for model_type {model_type!r} and might "
                "change what the model computes; remove it from config.json if it does not. "
                f"Fields in use: {', '.join(sorted(used))}"
            )


def _check_fixed(name: str, value: object, accepted: tuple[object, ...], model_type: str) -> None:
    """Refuse a value that is not accepted; in a list, each item must be."""
    items = value if isinstance(value, list) and value else [value]
    for item in items:
        if not any(item is one or item == one for one in accepted):
            raise UnsupportedModelError(
                f"{name} = {value!r} is not supported for model_type {model_type!r}; "
                f"supported: {', '.join(map(repr, accepted))}"
            )


def _check_auto_map(value: object, family: Family) -> None:
    """Refuse code of the model's own, except where transformers has it by the same names."""
    if not value:
        return
    architecture = family.published_architecture or family.architecture
    name = architecture.removesuffix("ForCausalLM")
    known = {f"{name}{kind}" for kind in ("Config", "Model", "ForCausalLM")}
    classes = value if isinstance(value, Mapping) else {"AutoModel": value}
    for auto, path in classes.items():
        is_known = family.was_published_with_code and str(path).rpartition(".")[2] in known
        if str(auto).startswith(("AutoModel", "AutoConfig")) and not is_known:
            raise UnsupportedModelError(
                f"auto_map = {value!r}: the model brings its own code, which is never run; use a "
                "checkpoint for the architecture in transformers itself"
            )
