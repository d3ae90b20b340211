"""Which layers of a model slide, and which have experts."""

from collections.abc import Callable, Mapping

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.config_fields import ConfigFields
from raymoe.specs.family import SparseLayers

SLIDING = "sliding_attention"
DENSE, SPARSE = "dense", "sparse"


def layer_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where it sees everything.

    Raises:
        UnsupportedModelError: `layer_types` disagrees with the other fields, or names a kind of
            layer that is not implemented.
    """
    window, slides = _window(fields), _sliding_layers(fields, num_layers)
    if fields.layer_types is not None:
        slides = _named_layers(fields, num_layers, slides if window else [False] * num_layers)
        if any(slides) and window is None:
            raise UnsupportedModelError(
                "layer_types has sliding_attention layers, but the sliding window is off"
            )
    return tuple(window if is_sliding else None for is_sliding in slides)


def sparse_layers(fields: ConfigFields, rule: SparseLayers, num_layers: int) -> list[bool]:
    """Whether each layer has experts; the others are dense."""
    return _SPARSE[rule](fields, num_layers)


def _window(fields: ConfigFields) -> int | None:
    family = fields.family
    if family.windowed_layers == "none":
        return None
    if family.is_window_switched and not fields.boolean("use_sliding_window"):
        return None
    if family.windowed_layers == "even":
        return fields.positive("sliding_window")  # transformers fails without it
    return fields.positive_or_none("sliding_window")


def _sliding_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    rule = fields.family.windowed_layers
    if rule in {"none", "all"}:
        return [rule == "all"] * num_layers
    if rule == "even":
        return [i % 2 == 0 for i in range(num_layers)]
    border = fields.natural("max_window_layers")
    if rule == "from_max":
        return [i >= border for i in range(num_layers)]
    return [i % 2 == 0 and i < border for i in range(num_layers)]


def _named_layers(fields: ConfigFields, num_layers: int, slides: list[bool]) -> list[bool]:
    kinds = (fields.family.full_layer_type, SLIDING)
    named = _kinds(fields.layer_types, "layer_types", kinds, num_layers)
    if not fields.family.has_layer_types and named != slides:
        raise UnsupportedModelError(
            f"layer_types = {fields.layer_types!r} disagrees with the sliding window of this "
            "model_type, for which transformers does not read layer_types"
        )
    return named


def _kinds(value: object, name: str, kinds: tuple[str, str], num_layers: int) -> list[bool]:
    """Whether each layer is of the second of two kinds."""
    if (
        not isinstance(value, list | tuple)
        or len(value) != num_layers
        or not all(kind in kinds for kind in value)
    ):
        raise UnsupportedModelError(
            f"{name} = {value!r} is not supported; "
            f"supported: one of {', '.join(kinds)} for each of {num_layers} layers"
        )
    return [kind == kinds[1] for kind in value]


def _stepped(fields: ConfigFields, num_layers: int) -> list[bool]:
    step, dense = fields.positive("decoder_sparse_step"), fields.integers("mlp_only_layers")
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def _after_leading(fields: ConfigFields, num_layers: int) -> list[bool]:
    leading = fields.natural("first_k_dense_replace")
    return [i >= leading for i in range(num_layers)]


def _listed(fields: ConfigFields, num_layers: int) -> list[bool]:
    if not fields.has("mlp_layer_types"):
        is_counted = fields.has("first_k_dense_replace")
        return _after_leading(fields, num_layers) if is_counted else _after_first(num_layers)
    kinds = fields.get("mlp_layer_types")
    return _kinds(kinds, "mlp_layer_types", (DENSE, SPARSE), num_layers)


def _after_first(num_layers: int) -> list[bool]:
    return [i > 0 for i in range(num_layers)]


def _ranged(fields: ConfigFields, num_layers: int) -> list[bool]:
    first, step = fields.natural("moe_layer_start_index"), fields.positive("moe_layer_interval")
    last = fields.get("moe_layer_end_index")
    if last == -1:
        last = num_layers - 1
    if type(last) is not int or last < 0:
        raise ConfigError(f"config.json: moe_layer_end_index is {last!r}; expected a layer, or -1")
    return [first <= i <= last and (i + 1) % step == 0 for i in range(num_layers)]


_SPARSE: Mapping[SparseLayers, Callable[[ConfigFields, int], list[bool]]] = {
    "all": lambda _, num_layers: [True] * num_layers,
    "stepped": _stepped,
    "after_leading": _after_leading,
    "listed": _listed,
    "ranged": _ranged,
}
