"""The weights of a model by canonical name, and where they lie in a checkpoint.

What a checkpoint stores may have other names and forms (tuples below, read off
`conversion_mapping.py` of transformers 5.23).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from raymoe.errors import CheckpointError
from raymoe.specs.layer_weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Shape,
    expert_weights,
    layer_prefix,
    layer_weights,
)
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "Location",
    "Shape",
    "layer_prefix",
    "layer_weights",
    "locate_weights",
    "model_weights",
]

_PARTS = ("gate_proj", "up_proj", "down_proj")
_MOE_MODULES = ("mlp", "block_sparse_moe")
# Per-expert matrices: gate, up, down.
_PER_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class Location:
    """Where a canonical weight lies in a checkpoint.

    Attributes:
        name: Stored tensor.
        expert: Index into its first dimension, where all experts are stored as one tensor.
        rows: Range of the following dimension, where gate and up are stored as one.
    """

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


def model_weights(spec: ModelSpec) -> dict[str, Shape]:
    """Canonical names and shapes of all weights; a tied head has none of its own."""
    weights = spec.outer_weights()
    for i, layer in enumerate(spec.layers):
        for name, shape in layer_weights(layer, spec.hidden_size).items():
            weights[layer_prefix(i) + name] = shape
    return weights


def locate_weights(
    spec: ModelSpec, stored: Mapping[str, Shape], files: Mapping[str, str]
) -> dict[str, Location]:
    """Find every canonical weight among the stored tensors.

    Args:
        spec: The model.
        stored: Name -> shape of every tensor of the checkpoint.
        files: Name -> file of every tensor, for messages.

    Raises:
        CheckpointError: A tensor is missing, has the wrong shape, or belongs to nothing.
    """
    return _Locator(spec, stored, files).locate()


class _Locator:
    """One search for the weights of a model among the tensors of a checkpoint."""

    def __init__(
        self, spec: ModelSpec, stored: Mapping[str, Shape], files: Mapping[str, str]
    ) -> None:
        self._spec, self._stored, self._files = spec, stored, files

    def locate(self) -> dict[str, Location]:
        """See `locate_weights`."""
        locations: dict[str, Location] = {}
        for name, shape in model_weights(self._spec).items():
            if ".mlp.experts." not in name:
                other = name.replace(".mlp.", ".block_sparse_moe.")
                locations[name] = self._checked(other if other in self._stored else name, shape)
        for i, layer in enumerate(self._spec.layers):
            if isinstance(layer.ffn, MoeSpec):
                locations |= self._experts(layer_prefix(i), layer.ffn)
        used = {location.name for location in locations.values()}
        extra = [name for name in self._stored.keys() - used if not self._is_redundant(name)]
        if extra:
            name = min(extra)
            raise CheckpointError(
                f"{self._files[name]}: tensor {name!r} belongs to nothing in a "
                f"{self._spec.model_type} of this configuration ({len(extra)} such tensors); "
                "is config.json of another checkpoint?"
            )
        return locations

    def _experts(self, prefix: str, moe: MoeSpec) -> dict[str, Location]:
        canonical = f"{prefix}mlp.experts."
        for module in _MOE_MODULES:
            stored = f"{prefix}{module}.experts."
            if f"{stored}gate_up_proj" in self._stored or f"{stored}down_proj" in self._stored:
                return self._fused(stored, canonical, moe)
            for parts in _PER_EXPERT:
                if any(f"{stored}0.{part}.weight" in self._stored for part in parts):
                    return self._separate(stored, canonical, moe, parts)
        raise CheckpointError(
            f"tensor '{canonical}0.gate_proj.weight' is missing, and so is every other form in "
            f"which experts are stored ('{prefix}block_sparse_moe.experts.0.w1.weight', "
            f"'{canonical}gate_up_proj')"
        )

    def _separate(
        self, stored: str, canonical: str, moe: MoeSpec, parts: tuple[str, ...]
    ) -> dict[str, Location]:
        locations = {}
        shapes = [shape for _, shape in expert_weights(moe, self._spec.hidden_size)]
        for expert in range(moe.num_experts):
            for part, stored_part, shape in zip(_PARTS, parts, shapes, strict=True):
                location = self._checked(f"{stored}{expert}.{stored_part}.weight", shape)
                locations[f"{canonical}{expert}.{part}.weight"] = location
        return locations

    def _fused(self, stored: str, canonical: str, moe: MoeSpec) -> dict[str, Location]:
        hidden, hidden_size = moe.expert_hidden, self._spec.hidden_size
        gate_up = self._checked(
            f"{stored}gate_up_proj", (moe.num_experts, 2 * hidden, hidden_size)
        ).name
        down = self._checked(f"{stored}down_proj", (moe.num_experts, hidden_size, hidden)).name
        locations = {}
        for expert in range(moe.num_experts):
            name = f"{canonical}{expert}."
            locations[f"{name}gate_proj.weight"] = Location(gate_up, expert, (0, hidden))
            locations[f"{name}up_proj.weight"] = Location(gate_up, expert, (hidden, 2 * hidden))
            locations[f"{name}down_proj.weight"] = Location(down, expert)
        return locations

    def _checked(self, name: str, shape: Shape) -> Location:
        if name not in self._stored:
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing")
        if tuple(self._stored[name]) != shape:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name!r} has shape {list(self._stored[name])}, "
                f"config.json says {list(shape)}"
            )
        return Location(name)

    def _is_redundant(self, name: str) -> bool:
        """Old checkpoints store the rope frequencies; tied ones may store the head twice."""
        is_tied_head = self._spec.tie_word_embeddings and name == HEAD
        return is_tied_head or name.endswith(".rotary_emb.inv_freq")
