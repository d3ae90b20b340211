"""Where the weights of a model are in a checkpoint."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from raymoe.errors import CheckpointError, UnsupportedModelError
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.families.stored_names import EXPERT, Fused, Naming, namings_of
from raymoe.specs.layer_weights import (
    EXPERTS,
    FFN_NORM,
    HEAD,
    LABEL_HEAD,
    layer_prefix,
    layer_weights,
)
from raymoe.specs.layers import LayerSpec, MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import (
    SCALES_SUFFIXES,
    Fp8Block,
    Fp8Tensor,
    Mxfp4,
    Piece,
    WeightFormat,
)
from raymoe.specs.weights import Shape

_EXPERT_NUMBER = re.compile(rf"(?<=^{re.escape(EXPERTS)})\d+(?=\.)")
_LAYER = re.compile(r"(?:\w+\.)*layers\.(\d+)\.")
_NUMBER = re.compile(r"\.(\d+)\.")
# Tensors that predict a second token: layers that hold such a matrix (DeepSeek-V3, GLM), or modules
# whose names begin like this (ERNIE, MiMo, EXAONE).
_PREDICTOR_MARK = "eh_proj.weight"
# Ends of the names of tensors beside codes, or of codes.
_OF_CODES = (
    *(".weight_packed", ".qweight", ".weight_scale_2", ".weight_scale", ".weight_scale_inv"),
    *(".scales", ".scale"),
)
_OF_NVFP4 = (".weight_scale_2", ".weight_global_scale")
_MLX_EXPERTS = ".switch_mlp."
_PREDICTORS = ("model.mtp_", "mtp.", "model.mtp.")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a canonical weight is in a checkpoint; fields apply in order."""

    name: str
    shape: Shape | None = None  # shape to read it in, if it differs from the stored one
    expert: int | None = None  # index into the first dimension, if all experts are in one tensor
    is_transposed: bool = False  # whether the matrix is stored [inputs, outputs]
    # First, end and step of its rows, if several weights are in one tensor.
    rows: tuple[int, int, int] | None = None
    num_groups: int = 1  # equal parts of the tensor, in each of which it has such rows
    # Format and shape of a weight stored in several tensors, named `name` without ".weight" plus
    # the format's suffixes.
    quantised: tuple[WeightFormat, tuple[int, int]] | None = None
    # Whether each of the groups is quantised by itself, and decoded while it is loaded.
    is_decoded: bool = False
    # Its one value and its shape, if it is not stored because all of it is that.
    constant: tuple[float, Shape] | None = None

    def pieces(self) -> dict[str, Piece]:
        """Stored tensors of a quantised weight by name; shapes are per expert."""
        if self.quantised is None:
            return {}
        stored, shape = self.quantised
        if self.is_decoded:
            return self._pieces_of_groups(stored, shape)
        module = self.name.removesuffix(".weight")
        if module == self.name:  # parameters of experts: "gate_up_proj" and "gate_up_proj_scale"
            return {
                module + piece.suffix.removeprefix(".weight"): piece
                for piece in _pieces(stored, shape)
            }
        return {module + piece.suffix: piece for piece in _pieces(stored, shape)}

    def _pieces_of_groups(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, Piece]:
        """Those of a group, one after another for all groups."""
        group = (shape[0] // self.num_groups, shape[1])
        module = self.name.removesuffix(".weight")
        return {
            module + piece.suffix: replace(
                piece, shape=(self.num_groups * piece.shape[0], *piece.shape[1:])
            )
            for piece in _pieces(stored, group)
        }

    def tensor_names(self) -> tuple[str, ...]:
        if self.constant is not None:
            return ()
        return tuple(self.pieces()) or (self.name,)


@lru_cache
def _pieces(stored: WeightFormat, shape: tuple[int, int]) -> tuple[Piece, ...]:
    return stored.pieces(*shape)


def model_weights(spec: ModelSpec) -> dict[str, Shape]:
    weights = spec.outer_weights()
    for i, layer in enumerate(spec.layers):
        for name, shape in layer_weights(layer, spec.hidden_size).items():
            weights[layer_prefix(i) + name] = shape
    return weights


def locate_weights(
    spec: ModelSpec, stored: Mapping[str, Shape], files: Mapping[str, str]
) -> dict[str, Location]:
    """Find every canonical weight among the stored tensors (name -> shape).

    Messages name the tensor's file. Raises CheckpointError if a tensor is missing, unknown, or has
    the wrong shape.
    """
    best: dict[str, _Place] = {}
    missing: list[str] = []
    fewest: tuple[int, int] | None = None
    spec = _with_stored_scales(spec, stored)
    namings = _likely(spec, namings_of(spec.model_type, spec.wrapper), stored)
    for naming in namings:
        places = dict(_places(spec, naming))
        absent = [name for name, place in places.items() if place.absent(stored)]
        num_wrong = sum(any(place.other_shapes(stored)) for place in places.values())
        if fewest is None or (len(absent), num_wrong) < fewest:
            best, missing, fewest = places, absent, (len(absent), num_wrong)
        if fewest == (0, 0):
            break
    if missing:
        mixed = _mixed(spec, namings, stored)
        if mixed is None:
            alternatives = [dict(_places(spec, naming))[missing[0]] for naming in namings]
            raise CheckpointError(_explain_missing(best[missing[0]], alternatives, stored))
        best = mixed
    _check_shapes(best.values(), stored, files)
    for place in best.values():
        _check_cut(place.location)
    used = {name for place in best.values() for name in place.shapes}
    _check_for_others(spec, used, stored, files)
    return {name: place.location for name, place in best.items()}


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a model that is not quantised, as one naming has them.

    Attributes:
        shapes: By name, in the order of the weights that they hold.
        weights: Canonical names of the weights in each, and where.
        unread: Parts of the names of tensors that are not used.
    """

    shapes: Mapping[str, Shape]
    weights: Mapping[str, Sequence[tuple[str, Location]]]
    unread: tuple[str, ...]
    _modules: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, spec: ModelSpec, naming: Naming) -> "StoredTensors":
        shapes: dict[str, Shape] = {}
        weights: dict[str, list[tuple[str, Location]]] = defaultdict(list)
        for name, place in _places(spec, naming):
            shapes |= place.shapes
            for tensor in place.shapes:
                weights[tensor].append((name, place.location))
        modules: dict[str, list[str]] = defaultdict(list)
        for tensor in shapes:
            modules[tensor.rpartition(".")[0]].append(tensor)
        return cls(shapes, weights, naming.unread, modules)

    def of_module(self, module: str) -> Sequence[str]:
        """Names of the tensors that are parameters of a module, in order."""
        return self._modules.get(module, ())

    def is_unread(self, name: str) -> bool:
        return any(part in f"{name}." for part in self.unread)


def unquantised_tensors(spec: ModelSpec, names: Collection[str]) -> Iterator[StoredTensors]:
    """The ways to name the tensors of a model, without those that none of these names suits."""
    plain = replace(spec, quantization=None, tie_word_embeddings=False)
    for naming in _likely(plain, namings_of(spec.model_type, spec.wrapper), names):
        yield StoredTensors.of(plain, naming)


def _with_stored_scales(spec: ModelSpec, stored: Collection[str]) -> ModelSpec:
    """The model with the names that scales of FP8 matrices, and of FP4 experts, have here."""
    found = spec.quantization
    if found is None:
        return spec
    experts = [name for name in stored if f".{EXPERTS.removeprefix('mlp.')}" in name]
    # FP4 of NVIDIA has scales of one of these names too.
    in_fp4 = {name.removesuffix(end) for end in _OF_NVFP4 for name in stored if name.endswith(end)}
    others = [name for name in stored if name.rpartition(".")[0] not in in_fp4]
    found = found.with_formats(
        lambda form: _with_suffix(form, others),
        experts=None if found.experts is None else _with_suffix(found.experts, experts),
    )
    return replace(spec, quantization=found)


def _with_suffix(form: WeightFormat, stored: Collection[str]) -> WeightFormat:
    if not isinstance(form, Fp8Block | Fp8Tensor | Mxfp4):
        return form
    if form.scales_suffix not in SCALES_SUFFIXES:
        return form
    suffixes = (form.scales_suffix, *SCALES_SUFFIXES)
    ends = {suffix: (suffix, suffix.replace(".weight", "_proj")) for suffix in suffixes}
    suffix = next((one for one in suffixes if any(n.endswith(ends[one]) for n in stored)), None)
    return form if suffix is None else replace(form, scales_suffix=suffix)


def _likely(
    spec: ModelSpec, namings: Sequence[Naming], stored: Collection[str]
) -> Sequence[Naming]:
    """The namings of which some stored tensor has the prefix; all if there is none."""
    starts = {name[: found.start(1)] for name in stored if (found := _NUMBER.search(name))}
    outer = tuple(spec.outer_weights())

    def is_likely(naming: Naming) -> bool:
        is_prefix = naming.layers.partition("{")[0] in starts
        return is_prefix or any(naming.rename(name) in stored for name in outer)

    return [naming for naming in namings if is_likely(naming)] or namings


def _mixed(
    spec: ModelSpec, namings: Sequence[Naming], stored: Mapping[str, Shape]
) -> dict[str, "_Place"] | None:
    """Find each weight where any naming has it, as transformers renames tensor by tensor.

    None if one is missing, or if a tensor would not hold exactly the weights that one naming puts
    there: names that mean different weights in different namings are never mixed up.
    """
    chosen: dict[str, _Place] = {}
    weights = zip(*(_places(spec, naming) for naming in namings), strict=True)
    for _, layer in groupby(weights, key=_layer_of):
        places = [dict(column) for column in zip(*layer, strict=True)]
        found = _mixed_layer(places, stored)
        if found is None:
            return None
        chosen |= found
    return chosen


def _layer_of(weight: Sequence[tuple[str, "_Place"]]) -> str:
    layer = _LAYER.match(weight[0][0])
    return "" if layer is None else layer[1]


def _mixed_layer(
    places: Sequence[Mapping[str, "_Place"]], stored: Mapping[str, Shape]
) -> dict[str, "_Place"] | None:
    chosen: dict[str, _Place] = {}
    users: dict[str, set[str]] = defaultdict(set)
    for name in places[0]:
        present = [column[name] for column in places if not column[name].absent(stored)]
        if not present:
            return None
        chosen[name] = min(present, key=lambda place: place.rank(stored))
        for tensor in chosen[name].shapes:
            users[tensor].add(name)
    for column in places:
        whole: dict[str, set[str]] = defaultdict(set)
        for name, place in column.items():
            for tensor in place.shapes:
                whole[tensor].add(name)
        users = {tensor: names for tensor, names in users.items() if whole[tensor] != names}
    return None if users else chosen


@dataclass(frozen=True, slots=True)
class _Place:
    location: Location
    shapes: Mapping[str, Shape]

    def absent(self, stored: Collection[str]) -> str | None:
        return next((name for name in self.shapes if name not in stored), None)

    def other_shapes(self, stored: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
        """Stored tensors of another shape, with the one that they should have."""
        for name, shape in self.shapes.items():
            found = tuple(stored.get(name, shape))
            if found != shape and not self._has_same_numbers(name, found, shape):
                yield name, shape

    def rank(self, stored: Mapping[str, Shape]) -> tuple[bool, bool]:
        """Sort places: of the right shape first, and those that store nothing last."""
        return any(self.other_shapes(stored)), not self.shapes

    def _has_same_numbers(self, name: str, found: Shape, shape: Shape) -> bool:
        """Whether one number is stored in another shape, or one of all or two of each expert.

        modelopt writes scales of blocks as [rows, 1, columns, 1].
        """
        if self.location.quantised is not None and found == (shape[0], 1, shape[-1], 1):
            return len(shape) == 2
        if self.location.quantised is None or shape[-1] != 1 or len(shape) > 2:
            return found == () and shape == (1,)
        others = [math.prod(shape)]
        if name.endswith(("_proj_scale", "_proj_scale_inv")):
            others += [1, 2 * shape[0]] if self.location.rows is not None else [1]
        return math.prod(found) in others


def _places(spec: ModelSpec, naming: Naming) -> Iterator[tuple[str, _Place]]:
    for name, shape in spec.outer_weights().items():
        is_label_head = name == HEAD and spec.head == "labels"
        stored = LABEL_HEAD if is_label_head else naming.rename(name)
        form = None if is_label_head else spec.format_of(name, shape)
        yield name, _plain_or_quantised(Location(stored), shape, form)
    number, fewest_kv_heads = 0, _fewest_kv_heads(spec)
    for i, layer in enumerate(spec.layers):
        weights = layer_weights(layer, spec.hidden_size)
        last = number + (naming.numbers_networks and layer.has_network)
        prefixes = [naming.layers.format(layer=each) for each in (number, last)]
        number = last + (layer.ngrams is None)  # those are part of the next layer
        names = _LayerNames(naming, prefixes, weights, layer, fewest_kv_heads=fewest_kv_heads)
        for name, shape in weights.items():
            canonical = layer_prefix(i) + name
            place = names.place(name, spec.stored_format_of(canonical, shape))
            if place.location.quantised and spec.format_of(canonical, shape) is None:
                place = _decoded(place)
            yield canonical, place


def _fewest_kv_heads(spec: ModelSpec) -> int:
    attentions = (layer.attention for layer in spec.layers)
    heads = (each.num_kv_heads for each in attentions if isinstance(each, AttentionSpec))
    return min(heads, default=1)


def _decoded(place: _Place) -> _Place:
    location = replace(place.location, is_decoded=True)
    shapes = {name: piece.stored_shape for name, piece in location.pieces().items()}
    return _Place(location, shapes)


class _LayerNames:
    def __init__(
        self,
        naming: Naming,
        prefixes: Sequence[str],
        weights: Mapping[str, Shape],
        layer: LayerSpec,
        *,
        fewest_kv_heads: int,
    ) -> None:
        self._fewest_kv_heads = fewest_kv_heads
        self._naming, self._prefixes, self._weights = naming, prefixes, weights
        self._attention = layer.attention
        self._num_experts = layer.ffn.num_experts if isinstance(layer.ffn, MoeSpec) else 0
        self._fused = {name: tensor for tensor in naming.fused for name in tensor.weights}

    def place(self, name: str, quantised: WeightFormat | None) -> _Place:
        number = _EXPERT_NUMBER.search(name)
        general = name if number is None else _EXPERT_NUMBER.sub(EXPERT, name)
        constants = {0.0: self._naming.zeros, 1.0: self._naming.ones}
        for value, names in constants.items():
            if general in names:
                return _Place(Location(general, constant=(value, self._weights[name])), {})
        tensor = self._fused.get(general)
        if tensor is not None:
            expert = None if number is None else number[0]
            return self._in_fused(tensor, general, expert, quantised)
        stored = self._naming.rename(general)
        if number is not None:
            stored = stored.replace(EXPERT, number[0])
        location = Location(self._prefix(general) + stored)
        return _plain_or_quantised(location, self._weights[name], quantised)

    def _prefix(self, name: str) -> str:
        return self._prefixes[name.startswith(("mlp.", FFN_NORM))]

    def _in_fused(
        self, tensor: Fused, general: str, expert: str | None, quantised: WeightFormat | None
    ) -> _Place:
        names = [name.replace(EXPERT, expert or "") for name in tensor.weights]
        shapes = [self._weights[name] for name in names if name in self._weights]
        index, count = tensor.weights.index(general), len(shapes)
        begin, total = sum(shape[0] for shape in shapes[:index]), sum(shape[0] for shape in shapes)
        rows, num_groups = None, 1
        if tensor.groups is not None:
            num_groups = getattr(self._attention, tensor.groups)
        if tensor.has_fewest_groups:
            num_groups = self._fewest_kv_heads
            _check_groups(general, [shape[0] for shape in shapes], num_groups)
        if count > 1:
            end = begin + shapes[index][0]
            rows = (index, total, count) if tensor.is_interleaved else (begin, end, 1)
            rows = (rows[0] // num_groups, rows[1] // num_groups, rows[2])
        # Transposed matrices are not stored in other formats.
        is_other = tensor.is_transposed and not isinstance(quantised, Mxfp4 | None)
        location = Location(
            self._prefix(general) + tensor.name + (".weight" if is_other else ""),
            expert=None if expert is None else int(expert),
            rows=rows,
            num_groups=num_groups,
        )
        whole = (total, *shapes[0][1:])
        if quantised is not None:
            return self._quantised(location, whole, quantised)
        return self._in_one(tensor, location, whole)

    def _in_one(self, tensor: Fused, location: Location, whole: Shape) -> _Place:
        """Locate a weight in a fused tensor; `whole` is that tensor's shape per expert."""
        shape = stored_shape = whole[:: -1 if tensor.is_transposed else 1]
        if location.expert is not None:
            shape = stored_shape = (self._num_experts, *shape)
        if tensor.is_folded:
            stored_shape = (shape[0] * shape[1], *shape[2:])
        elif tensor.shape is not None:
            stored_shape = tuple(shape[0] if size == -1 else size for size in tensor.shape)
        location = replace(
            location,
            shape=None if shape == stored_shape else shape,
            is_transposed=tensor.is_transposed,
        )
        return _Place(location, {location.name: stored_shape})

    def _quantised(self, location: Location, whole: Shape, quantised: WeightFormat) -> _Place:
        place = _plain_or_quantised(location, whole, quantised)
        if location.expert is None:
            return place
        shapes = {name: (self._num_experts, *shape) for name, shape in place.shapes.items()}
        return replace(place, shapes=shapes)


def _check_groups(name: str, rows: Sequence[int], num_groups: int) -> None:
    if any(count % num_groups for count in rows):
        raise UnsupportedModelError(
            f"the tensor with {name} has {' + '.join(map(str, rows))} rows, which are no "
            f"{num_groups} equal groups, one for each KV head of the layer that has the fewest"
        )


def _plain_or_quantised(location: Location, shape: Shape, quantised: WeightFormat | None) -> _Place:
    if quantised is None:
        return _Place(location, {location.name: shape})
    location = replace(location, quantised=(quantised, (shape[0], shape[1])))
    try:
        pieces = location.pieces()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"tensor {location.name!r}: {error}") from error
    return _Place(location, {name: piece.stored_shape for name, piece in pieces.items()})


def _explain_missing(best: _Place, places: Iterable[_Place], stored: Collection[str]) -> str:
    absent = best.absent(stored)
    assert absent is not None
    message = f"tensor {absent!r} of shape {list(best.shapes[absent])} is missing"
    if best.location.quantised is not None:
        form, (rows, columns) = best.location.quantised
        tensors = ", ".join(map(repr, best.shapes))
        return f"{message}; a matrix of {rows} x {columns} is stored as {form.name}: {tensors}"
    message += _unnamed_codes(absent, stored)
    others = {place.location.name for place in places} - {best.location.name}
    if others:
        message += f", and so are its other names: {', '.join(map(repr, sorted(others)))}"
    if any(_MLX_EXPERTS in name for name in stored):
        message += (
            f"; {_MLX_EXPERTS!r} is a name of MLX, which only MLX reads: take the repository that "
            "it was converted from"
        )
    return message


def _unnamed_codes(name: str, stored: Collection[str]) -> str:
    """What to say of a tensor whose module is stored in a format of which it is not known."""
    module = name.rpartition(".")[0]
    found = [f"{module}{suffix}" for suffix in _OF_CODES if f"{module}{suffix}" in stored]
    if not found:
        return ""
    return f"; there is {found[0]!r}, and quantization_config has no such format for {module}"


def _check_shapes(
    places: Iterable[_Place], stored: Mapping[str, Shape], files: Mapping[str, str]
) -> None:
    for name, shape in (item for place in places for item in place.other_shapes(stored)):
        raise CheckpointError(
            f"{files[name]}: tensor {name!r} has shape {list(stored[name])}, "
            f"config.json says {list(shape)}{_unnamed_codes(name, stored)}"
        )


def _check_cut(location: Location) -> None:
    if location.rows is None or location.is_decoded:
        return
    begin, end, step = location.rows
    for name, piece in location.pieces().items():
        is_cut = begin % piece.rows > 0 or (step > 1 and piece.rows > 1)
        if location.num_groups > 1 and location.quantised is not None:
            _, (rows, _) = location.quantised
            is_cut |= end % piece.rows > 0 or rows // location.num_groups % piece.rows > 0
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
            f"configuration ({len(extra)} such tensors)"
            f"{_unnamed_codes(name, stored) or '; is config.json of another checkpoint?'}"
        )


def _is_redundant(spec: ModelSpec, name: str, stored: Mapping[str, Shape]) -> bool:
    """Whether a stored tensor is not used.

    Old checkpoints store rope frequencies; tied ones may store the head twice; layers that predict
    a second token follow the last one or are separate modules; some families store an
    indexer for longer contexts than are computed.
    """
    unread = () if spec.quantization is None else spec.quantization.unread
    if name.startswith(_PREDICTORS) or name.endswith((".rotary_emb.inv_freq", *unread)):
        return True
    namings = namings_of(spec.model_type, spec.wrapper)
    if any(part in name for naming in namings for part in naming.unread):
        return True
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= spec.num_layers:
        return layer[0] + _PREDICTOR_MARK in stored
    heads = head_names(spec)
    if spec.head == "lm":
        return spec.tie_word_embeddings and name in heads
    biases = [name.removesuffix("weight") + "bias" for name in heads]
    return name in (*heads, *biases, LABEL_HEAD)


def head_names(spec: ModelSpec) -> tuple[str, ...]:
    """Every name under which the head of a language model may be stored."""
    namings = namings_of(spec.model_type, spec.wrapper)
    return tuple(dict.fromkeys(naming.rename(HEAD) for naming in namings))
