"""The parts of a layer that move between memories as a whole, and their order.

A layer is moved as its attention part (norms, projections, router: what the operations around
attention read), then what every token visits of its feed-forward network, then expert after expert.
Within a part the projections of queries, keys and values are neighbours, so that they can be read
as one matrix, and so are their biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from raymoe.specs.layer_weights import EXPERTS, ROUTER, Shape, layer_weights, num_elements
from raymoe.specs.layers import LayerSpec

# Bytes: each part begins at a multiple, so that all types of elements can be read in it.
PART_ALIGNMENT = 16

_FIRST = ("input_layernorm.weight", *(f"self_attn.{part}_proj.weight" for part in "qkv"))
_NEXT = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """Weights that are in the same place at the same time.

    Attributes:
        name: "attention", "common" (the dense network, or the shared expert) or "expert <n>".
        shapes: Canonical names without the prefix of the layer, in the order in which they lie.
    """

    name: str
    shapes: Mapping[str, Shape]

    @property
    def num_elements(self) -> int:
        """Elements of all its weights."""
        return num_elements(self.shapes.items())


def layer_parts(layer: LayerSpec, hidden_size: int) -> tuple[WeightPart, ...]:
    """The parts of a layer in order; a part that would be empty is left out."""
    groups: dict[str, dict[str, Shape]] = {"attention": {}, "common": {}}
    weights = layer_weights(layer, hidden_size)
    ordered = [name for name in (*_FIRST, *_NEXT) if name in weights]
    ordered += [name for name in weights if name not in set(ordered)]
    for name in ordered:
        groups.setdefault(_part_of(name), {})[name] = weights[name]
    return tuple(WeightPart(name=name, shapes=shapes) for name, shapes in groups.items() if shapes)


def _part_of(name: str) -> str:
    if name.startswith(EXPERTS):
        return f"expert {name.removeprefix(EXPERTS).split('.')[0]}"
    is_network = name.startswith("mlp.") and not name.startswith(ROUTER)
    return "common" if is_network else "attention"
