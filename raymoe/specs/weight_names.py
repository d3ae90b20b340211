"""The parts of a layer that move between memories as a whole, and their order.

A layer is moved as its attention part (norms, projections, router: what the operations around
attention read), then what every token visits of its feed-forward network, then expert after expert.
Within a part the projections of queries, keys and values are neighbours, so that they can be read
as one matrix, and so are their biases.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from raymoe.errors import CheckpointError, UnsupportedModelError
from raymoe.specs.layer_weights import EXPERTS, HEAD, Shape, layer_prefix, layer_weights
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.stored_names import EXPERT, Fused, Naming, namings_of
from raymoe.specs.weight_format import Piece, WeightFormat

_EXPERT_NUMBER = re.compile(rf"(?<=^{re.escape(EXPERTS)})\d+(?=\.)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# What predicts a second token: layers that hold such a matrix (DeepSeek-V3, GLM), or modules whose
# names begin like that (ERNIE).
_PREDICTOR_MARK = "eh_proj.weight"
_PREDICTORS = "model.mtp_"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a canonical weight lies in a checkpoint; read from left to right.

    Attributes:
        name: Stored tensor.
        shape: In which to read it, where that is not as it is stored.
        expert: Index into its first dimension, where all experts are stored as one tensor.
        is_transposed: Whether the matrix is stored [inputs, outputs].
        rows: First, end and step of its rows, where several weights are stored as one.
        quantised: Format and shape of what is stored in several tensors; their names begin with
            `name`, without ".weight", and end with the suffixes of the format.
    """

    name: str
    shape: Shape | None = None
    expert: int | None = None
    is_transposed: bool = False
    rows: tuple[int, int, int] | None = None
    quantised: tuple[WeightFormat, tuple[int, int]] | None = None

    def pieces(self) -> dict[str, Piece]:
        """Stored tensors of a quantised weight, by their names; shapes are of one expert."""
        if self.quantised is None:
            return {}
        stored, shape = self.quantised
        module = self.name.removesuffix(".weight")
        return {module + piece.suffix: piece for piece in _pieces(stored, shape)}

    def tensor_names(self) -> tuple[str, ...]:
        """Of all stored tensors of the weight."""
        return tuple(self.pieces()) or (self.name,)


@lru_cache
def _pieces(stored: WeightFormat, shape: tuple[int, int]) -> tuple[Piece, ...]:
    return stored.pieces(*shape)


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
    best: dict[str, _Place] = {}
    missing: list[str] | None = None
    for naming in namings_of(spec.model_type):
        places = dict(_places(spec, naming))
        absent = [name for name, place in places.items() if place.absent(stored)]
        if missing is None or len(absent) < len(missing):
            best, missing = places, absent
        if not missing:
            break
    if missing:
        raise CheckpointError(_explain_missing(spec, missing[0], best[missing[0]], stored))
    _check_shapes(best.values(), stored, files)
    for place in best.values():
        _check_cut(place.location)
    used = {name for place in best.values() for name in place.shapes}
    _check_for_others(spec, used, stored, files)
    return {name: place.location for name, place in best.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight should lie, and the shapes of the tensors stored there."""

    location: Location
    shapes: Mapping[str, Shape]

    def absent(self, stored: Collection[str]) -> str | None:
        """The first of its tensors that is not stored."""
        return next((name for name in self.shapes if name not in stored), None)


def _places(spec: ModelSpec, naming: Naming) -> Iterator[tuple[str, _Place]]:
    """The place of every canonical weight when all is named in one way."""
    for name, shape in spec.outer_weights().items():
        yield (
            name,
            _plain_or_quantised(Location(naming.rename(name)), shape, spec.format_of(name, shape)),
        )
    for i, layer in enumerate(spec.layers):
        weights = layer_weights(layer, spec.hidden_size)
        num_experts = layer.ffn.num_experts if isinstance(layer.ffn, MoeSpec) else 0
        names = _LayerNames(naming, naming.layers.format(layer=i), weights, num_experts)
        for name, shape in weights.items():
            canonical = layer_prefix(i) + name
            yield canonical, names.place(name, spec.format_of(canonical, shape))


class _LayerNames:
    """The names of one layer."""

    def __init__(
        self, naming: Naming, prefix: str, weights: Mapping[str, Shape], num_experts: int
    ) -> None:
        self._naming, self._prefix, self._weights = naming, prefix, weights
        self._num_experts = num_experts
        self._fused = {name: tensor for tensor in naming.fused for name in tensor.weights}

    def place(self, name: str, quantised: WeightFormat | None) -> _Place:
        """Of a canonical weight, named without the prefix of its layer."""
        number = _EXPERT_NUMBER.search(name)
        general = name if number is None else _EXPERT_NUMBER.sub(EXPERT, name)
        tensor = self._fused.get(general)
        if tensor is not None:
            expert = None if number is None else number[0]
            return self._in_fused(tensor, general, expert, quantised)
        stored = self._naming.rename(general)
        if number is not None:
            stored = stored.replace(EXPERT, number[0])
        location = Location(self._prefix + stored)
        return _plain_or_quantised(location, self._weights[name], quantised)

    def _in_fused(
        self, tensor: Fused, general: str, expert: str | None, quantised: WeightFormat | None
    ) -> _Place:
        shapes = [self._weights[name.replace(EXPERT, expert or "")] for name in tensor.weights]
        index, count = tensor.weights.index(general), len(tensor.weights)
        begin, total = sum(shape[0] for shape in shapes[:index]), sum(shape[0] for shape in shapes)
        rows = None
        if count > 1:
            end = begin + shapes[index][0]
            rows = (index, total, count) if tensor.is_interleaved else (begin, end, 1)
        location = Location(
            self._prefix + tensor.name, expert=None if expert is None else int(expert), rows=rows
        )
        whole = (total, *shapes[0][1:])
        if quantised is not None:
            return self._quantised(location, whole, quantised)
        return self._in_one(tensor, location, whole)

    def _in_one(self, tensor: Fused, location: Location, whole: Shape) -> _Place:
        """Of a weight in one tensor; `whole` is the shape of all that lies there of an expert."""
        shape = stored_shape = whole[:: -1 if tensor.is_transposed else 1]
        if location.expert is not None:
            shape = stored_shape = (self._num_experts, *shape)
        if tensor.is_folded:
            stored_shape = (shape[0] * shape[1], *shape[2:])
        elif tensor.is_row:
            stored_shape = (1, *shape)
        location = replace(
            location,
            shape=None if shape == stored_shape else shape,
            is_transposed=tensor.is_transposed,
        )
        return _Place(location, {location.name: stored_shape})

    def _quantised(self, location: Location, whole: Shape, quantised: WeightFormat) -> _Place:
        """Of a quantised weight; its tensors are never transposed or folded."""
        place = _plain_or_quantised(location, whole, quantised)
        if location.expert is None:
            return place
        shapes = {name: (self._num_experts, *shape) for name, shape in place.shapes.items()}
        return replace(place, shapes=shapes)


def _plain_or_quantised(location: Location, shape: Shape, quantised: WeightFormat | None) -> _Place:
    if quantised is None:
        return _Place(location, {location.name: shape})
    location = replace(location, quantised=(quantised, (shape[0], shape[1])))
    try:
        pieces = location.pieces()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"tensor {location.name!r}: {error}") from error
    return _Place(location, {name: piece.shape for name, piece in pieces.items()})


def _explain_missing(spec: ModelSpec, name: str, best: _Place, stored: Collection[str]) -> str:
    absent = best.absent(stored)
    assert absent is not None
    message = f"tensor {absent!r} of shape {list(best.shapes[absent])} is missing"
    if best.location.quantised is not None:
        form, (rows, columns) = best.location.quantised
        tensors = ", ".join(map(repr, best.shapes))
        return f"{message}; a matrix of {rows} x {columns} is stored as {form.name}: {tensors}"
    places = (dict(_places(spec, naming))[name] for naming in namings_of(spec.model_type))
    others = {place.location.name for place in places} - {best.location.name}
    if others:
        message += f", and so are its other names: {', '.join(map(repr, sorted(others)))}"
    return message


def _check_shapes(
    places: Iterable[_Place], stored: Mapping[str, Shape], files: Mapping[str, str]
) -> None:
    for name, shape in (item for place in places for item in place.shapes.items()):
        if tuple(stored[name]) != shape:
            raise CheckpointError(
                f"{files[name]}: tensor {name!r} has shape {list(stored[name])}, "
                f"config.json says {list(shape)}"
            )


def _check_cut(location: Location) -> None:
    """What holds several quantised weights must be divisible between them."""
    if location.rows is None:
        return
    begin, _, step = location.rows
    for name, piece in location.pieces().items():
        is_cut = begin % piece.rows > 0 or (step > 1 and piece.rows > 1)
        if piece.row_axis is not None and is_cut:
            raise UnsupportedModelError(
                f"tensor {name!r} has one entry for {piece.rows} rows, and the weights that it "
                f"holds are divided at row {begin} in steps of {step}"
            )


def _check_for_others(
    spec: ModelSpec, used: set[str], stored: Mapping[str, Shape], files: Mapping[str, str]
) -> None:
    extra = [name for name in stored.keys() - used if not _is_redundant(spec, name, stored)]
    if extra:
        name = min(extra)
        raise CheckpointError(
            f"{files[name]}: tensor {name!r} belongs to nothing in a {spec.model_type} of this "
            f"configuration ({len(extra)} such tensors); is config.json of another checkpoint?"
        )


def _is_redundant(spec: ModelSpec, name: str, stored: Mapping[str, Shape]) -> bool:
    """What is stored and not computed.

    Old checkpoints store the rope frequencies; tied ones may store the head twice; layers that
    predict a second token follow the last one, or are modules of their own; some families store
    what chooses tokens in contexts that are refused.
    """
    if name.startswith(_PREDICTORS) or name.endswith(".rotary_emb.inv_freq"):
        return True
    namings = namings_of(spec.model_type)
    if any(part in name for naming in namings for part in naming.unread):
        return True
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= spec.num_layers:
        return layer[0] + _PREDICTOR_MARK in stored
    return spec.tie_word_embeddings and name == HEAD
