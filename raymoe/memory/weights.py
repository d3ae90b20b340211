"""The weights of a model by canonical name, checked against its specification."""

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from raymoe.codecs import (
    TORCH_DTYPES,
    StoredMatrix,
    Weight,
    as_tensor,
    check_values,
    is_in_order,
)
from raymoe.errors import CheckpointError, ConfigError
from raymoe.memory.checkpoint import MAX_TENSORS, Checkpoint
from raymoe.specs.attention.ngrams import (
    NGRAM_MULTIPLIERS,
    NGRAM_OFFSETS,
    NGRAM_SCALE,
    NGRAM_SIZES,
    NGRAM_TABLE,
)
from raymoe.specs.layer_weights import EMBEDDING, TOKEN_EXPERTS, layer_prefix
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import cut_of
from raymoe.specs.weight_format import FP8_ROWS, Piece, WeightFormat
from raymoe.specs.weight_names import Location, head_names, locate_weights, model_weights
from raymoe.specs.weights import Shape
from raymoe.units import ceil_div

# Per weight: quantised ones have up to five, and layers for multi-token prediction are unused.
STORED_TENSORS = 8
OTHER_TENSORS = 4096
FLOATS = ("F16", "BF16", "F32")  # stored types of what is not quantised
INTEGERS = ("I32", "I64")  # those of tables by token id, and of hashes
FP8 = "F8_E4M3"  # another one of tables of n-grams
_HASHES = (NGRAM_MULTIPLIERS, NGRAM_SIZES, NGRAM_OFFSETS)


logger = logging.getLogger(__name__)


class Weights(Protocol):
    """The weights of a model by canonical name.

    Attributes:
        dtype: Type of most elements that are not quantised.
    """

    dtype: torch.dtype

    def __call__(self, name: str) -> Weight:
        """Return a weight, which must not be written to."""

    def drop_pages(self, names: Iterable[str]) -> None:
        """Free the memory of weights that were copied elsewhere; views stay valid."""


class WeightStore:
    """Views of the memory-mapped weights of one checkpoint.

    Attributes:
        dtype: Type of most elements, for models whose configuration names none.
    """

    def __init__(self, checkpoint: Checkpoint, locations: dict[str, Location]) -> None:
        self.checkpoint = checkpoint
        self._locations = locations
        self.dtype = _dtype(checkpoint, locations.values())

    @classmethod
    def open(cls, spec: ModelSpec, directory: Path) -> Self:
        """Open the checkpoint of `directory` and check that it holds exactly the weights of `spec`.

        Raises:
            CheckpointError: Damaged or unsafe files, or a tensor that is missing, unexpected, or of
                the wrong shape or type; names file and tensor.
        """
        checkpoint = Checkpoint.open(directory, max_stored_tensors(spec))
        try:
            locations = _locate(spec, checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        for name, location in locations.items():
            _check_types(checkpoint, location, _plain_types(name))
        store = cls(checkpoint, locations)
        if spec.tie_word_embeddings:
            for head in head_names(spec):
                if head in checkpoint.names():
                    store._check_tied_head(head)
        return store

    def __call__(self, name: str) -> Weight:
        """Return read-only views, or copies where alignment or rows in groups require them.

        Rows and elements may be strided (`is_contiguous`).
        """
        location = self._locations[name]
        if location.is_decoded:
            return self._decoded(location)
        if location.quantised is not None:
            return self._stored_matrix(location)
        if location.constant is not None:
            value, shape = location.constant
            return torch.full(shape, value, dtype=self.dtype)
        return located(self.checkpoint.tensor(location.name), location)

    def _decoded(self, location: Location) -> Tensor:
        """Decode the rows of a weight in each group, [O, I] float32."""
        assert location.quantised is not None, "it is decoded"
        stored, (rows, columns) = location.quantised
        count, size = location.num_groups, rows // location.num_groups
        begin, end, _ = location.rows or (0, size, 1)
        first = begin // FP8_ROWS * FP8_ROWS
        names = {piece.name: name for name, piece in location.pieces().items()}
        found = {name: self.checkpoint.tensor(tensor) for name, tensor in names.items()}
        parts = []
        for group in range(count):
            pieces = {
                name: tensor.view(count, -1, tensor.shape[1])[group]
                for name, tensor in found.items()
            }
            matrix = StoredMatrix(format=stored, shape=(size, columns), pieces=pieces)
            check_values(matrix, lambda piece: self._describe(names[piece]))
            parts.append(as_tensor(matrix.rows(first, end), torch.float32)[begin - first :])
        return torch.cat(parts)

    def _stored_matrix(self, location: Location) -> StoredMatrix:
        assert location.quantised is not None
        stored, shape = location.quantised
        tensors, names = {}, {}
        for name, piece in location.pieces().items():
            tensor = self.checkpoint.tensor(name)
            is_of_all = location.expert is None or tensor.numel() == 1
            part = tensor if is_of_all else tensor[location.expert]
            tensors[piece.name] = _as_piece(part, piece)
            names[piece.name] = name
        matrix = StoredMatrix(format=stored, shape=shape, pieces=tensors)
        check_values(matrix, lambda piece: self._describe(names[piece]))
        if location.rows is None:
            return matrix
        if location.num_groups > 1:
            return matrix.rows_of_groups(*location.rows[:2], location.num_groups)
        return matrix.rows(*location.rows)

    def table_dtype(self) -> str | None:
        """The type of tables of n-grams; None if there are none, or they differ."""
        found = {
            TORCH_DTYPES[self.checkpoint.entry(location.name).dtype]
            for name, location in self._locations.items()
            if NGRAM_TABLE in name
        }
        return str(found.pop()).removeprefix("torch.") if len(found) == 1 else None

    def _describe(self, name: str) -> str:
        return f"{self.checkpoint.directory / self.checkpoint.entry(name).file}: tensor {name!r}"

    def drop_pages(self, names: Iterable[str]) -> None:
        self.checkpoint.drop_pages(
            {tensor for name in names for tensor in self._locations[name].tensor_names()}
        )

    def _check_tied_head(self, name: str) -> None:
        """Refuse a stored head that differs from the embedding to which it is tied.

        transformers 5 unties such a model and 4 overwrites the head, so neither can be assumed.
        """
        other = self._locations[EMBEDDING].name
        head, embedding = self.checkpoint.tensor(name), self.checkpoint.tensor(other)
        is_same = head.shape == embedding.shape and torch.equal(head, embedding)
        self.checkpoint.drop_pages([name, other])
        if not is_same:
            raise CheckpointError(
                f"{self.checkpoint.directory}: tie_word_embeddings is set, but {name!r} differs "
                f"from {other!r}; set tie_word_embeddings to false or remove the tensor"
            )


def located(tensor: Tensor, location: Location) -> Tensor:
    """The weight in a stored tensor: a view, or a copy of rows in groups."""
    if location.shape is not None:
        tensor = tensor.view(location.shape)
    if location.expert is not None:
        tensor = tensor[location.expert]
    if location.is_transposed:
        tensor = tensor.T
    return rows_of(tensor, location)


def rows_of(tensor: Tensor, location: Location) -> Tensor:
    """The rows of a weight among those of a tensor with several."""
    if location.rows is None:
        return tensor
    rows = slice(*location.rows)
    if location.num_groups == 1:
        return tensor[rows]
    grouped = tensor.view(location.num_groups, -1, *tensor.shape[1:])
    return grouped[:, rows].flatten(0, 1)


def _as_piece(stored: Tensor, piece: Piece) -> Tensor:
    """A stored tensor in the shape of its piece: one element may be stored as a scalar.

    Matrices in one tensor, gate and up, may each have a scale; else one is that of all rows. Bytes
    that hold several codes are unsigned, whatever a file calls them.
    """
    if stored.dtype == torch.int8:
        stored = stored.view(torch.uint8)
    if not piece.is_repeated:
        return stored.view(piece.shape)
    rows = piece.shape[0]
    return stored.reshape(-1, 1).repeat_interleave(rows // stored.numel(), 0)


def _locate(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, Location]:
    """Find the weights among the tensors of the index; if one is missing, among all of its files.

    Files that several checkpoints share hold tensors that are none of this one's.
    """
    shapes, files, others = checkpoint.shapes(), checkpoint.files(), checkpoint.unindexed
    if not others:
        return locate_weights(spec, shapes, files)
    indexed = {name: shape for name, shape in shapes.items() if name not in others}
    try:
        found = locate_weights(spec, indexed, files)
    except CheckpointError:
        return locate_weights(spec, shapes, files)
    logger.warning(
        "%s: %d tensors that the index does not name are not read, such as %s",
        checkpoint.directory,
        len(others),
        min(others),
    )
    return found


def max_stored_tensors(spec: ModelSpec) -> int:
    return min(len(model_weights(spec)) * STORED_TENSORS + OTHER_TENSORS, MAX_TENSORS)


def _plain_types(name: str) -> tuple[str, ...]:
    """Stored types of a weight that is not quantised."""
    if name.endswith((TOKEN_EXPERTS, *_HASHES)):
        return INTEGERS
    return (*FLOATS, FP8) if NGRAM_TABLE in name else FLOATS


def _check_types(checkpoint: Checkpoint, location: Location, plain: tuple[str, ...]) -> None:
    pieces = location.pieces()
    for name in location.tensor_names():
        entry = checkpoint.entry(name)
        supported = (*pieces[name].dtypes, *pieces[name].widened) if pieces else plain
        if entry.dtype not in supported:
            raise CheckpointError(
                f"{checkpoint.directory / entry.file}: tensor {name!r} has type {entry.dtype}; "
                f"supported: {', '.join(supported)}"
            )


def _dtype(checkpoint: Checkpoint, locations: Iterable[Location]) -> torch.dtype:
    sizes: Counter[str] = Counter()
    plain = (location for location in locations if location.quantised is None)
    for name in {name for location in plain for name in location.tensor_names()}:
        entry = checkpoint.entry(name)
        if entry.dtype in FLOATS:
            sizes[entry.dtype] += entry.num_bytes
    return TORCH_DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32


class WatchedWeights:
    """Weights that say when their memory may be freed: after each layer that is loaded.

    Attributes:
        source: The weights themselves.
    """

    def __init__(self, weights: Weights, watch: Callable[[], None]) -> None:
        self.dtype: torch.dtype = weights.dtype
        self.source, self._watch = weights, watch

    def __call__(self, name: str) -> Weight:
        return self.source(name)

    def drop_pages(self, names: Iterable[str]) -> None:
        self.source.drop_pages(names)
        self._watch()


class ShardedWeights:
    """Views of one rank's weights, with the shapes of `specs.tensor_shards.shard_model`."""

    def __init__(self, weights: Weights, model: ModelSpec, part: ModelSpec, rank: int) -> None:
        self.dtype: torch.dtype = weights.dtype
        self._weights, self._rank, self._count = weights, rank, part.num_shards
        self._shapes = model_weights(model)
        self._parts = model_weights(part)

    def __call__(self, name: str) -> Weight:
        """Return the rank's part of a weight.

        Raises:
            CheckpointError: As for `WeightStore`.
            ConfigError: Inputs would have to be cut whose quantisation groups hold non-neighbours.
        """
        whole, part = self._shapes[name], self._parts[name]
        cut = cut_of(name, whole, part, rank=self._rank, count=self._count)
        weight = self._weights(name)
        if isinstance(weight, StoredMatrix):
            return self._cut_matrix(name, weight, cut.axis, (cut.begin, cut.end))
        if cut.is_zero:
            return torch.zeros_like(weight)
        if cut.axis is None:
            return weight
        return weight.narrow(cut.axis, cut.begin, cut.end - cut.begin)

    def drop_pages(self, names: Iterable[str]) -> None:
        self._weights.drop_pages(names)

    def _cut_matrix(
        self, name: str, matrix: StoredMatrix, axis: int | None, ends: tuple[int, int]
    ) -> StoredMatrix:
        if axis is None:
            return matrix
        if axis == 0:
            return matrix.rows(*ends)
        if "order" in matrix.pieces and not is_in_order(matrix):
            raise ConfigError(
                f"{name} is stored as {matrix.format.name} with columns in an order of their own "
                f"(act-order), which cannot be divided between {self._count} ranks; leave out "
                "tensor_parallel_size"
            )
        return matrix.columns(*ends)


def table_dtype(spec: ModelSpec) -> torch.dtype | None:
    """The type of tables of n-grams in memory; None if there are none."""
    found = [layer.ngrams.dtype for layer in spec.layers if layer.ngrams is not None]
    return getattr(torch, found[0]) if found else None


NUM_VALUES = (1 << 24) - 3  # odd, so that rows of matrices do not repeat
STANDARD_DEVIATION = 0.02
# With these scales, decoded codes are as small as the other weights.
SCALE, EXPONENT = 1e-3, 118
LARGEST_CODE = 0x7E  # of E4M3; the next one is NaN
MAX_VIEW = 1 << 27  # elements; larger weights (embeddings) are copied


class DummyWeights:
    """Random weights; the same for the same name.

    All are cut out of the same few numbers. With `are_views` most of them are views of these
    numbers, which cost nothing to make and suit whoever copies them; otherwise each is a copy.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, are_views: bool = False) -> None:
        self.dtype = dtype
        self._spec = spec
        self._shapes = model_weights(spec)
        self._are_views = are_views
        self._hashes = {
            layer_prefix(i) + name: torch.tensor(values)
            for i, layer in enumerate(spec.layers)
            if (ngrams := layer.ngrams) is not None
            for name, values in zip(
                _HASHES, (ngrams.multipliers, ngrams.sizes, ngrams.offsets), strict=True
            )
        }
        self._table_dtype = table_dtype(spec)
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(NUM_VALUES, generator=generator)
        values = values.mul_(STANDARD_DEVIATION).to(dtype)
        codes = torch.randint(
            LARGEST_CODE + 1, (NUM_VALUES,), dtype=torch.uint8, generator=generator
        )
        if are_views:
            largest = max(prod(shape) for shape in self._shapes.values())
            length = NUM_VALUES + min(largest, MAX_VIEW)
            values, codes = repeated(values, length), repeated(codes, length)
        self._values, self._codes = values, codes

    def __call__(self, name: str) -> Weight:
        shape = self._shapes[name]
        if name.endswith(TOKEN_EXPERTS):  # the same few experts for all: they exist in every layer
            return torch.arange(shape[1]).expand(shape)
        if name in self._hashes:
            return self._hashes[name]
        if NGRAM_TABLE in name or name.endswith(NGRAM_SCALE):
            return self._table(name, shape)
        stored = self._spec.format_of(name, shape)
        if stored is not None:
            rows, columns = shape
            return self._matrix(name, stored, (rows, columns))
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype)
        drawn = self._drawn(self._values, name, shape)
        # Larger embeddings, so that tokens differ by more than the layers add; otherwise all tokens
        # choose the same experts.
        return drawn / STANDARD_DEVIATION if name == EMBEDDING else drawn

    def _table(self, name: str, shape: Shape) -> Tensor:
        """A tensor of a table of n-grams, or the scale of all."""
        has_codes = self._table_dtype == torch.float8_e4m3fn
        if name.endswith(NGRAM_SCALE):
            return torch.full(shape, SCALE if has_codes else 1.0, dtype=self.dtype)
        drawn = self._drawn(self._codes if has_codes else self._values, name, shape)
        return drawn.view(torch.float8_e4m3fn) if has_codes else drawn.to(self._table_dtype)

    def _drawn(self, values: Tensor, name: str, shape: Shape) -> Tensor:
        if self._are_views and prod(shape) <= len(values) - NUM_VALUES:
            begin = start_of(name)
            return values[begin : begin + prod(shape)].view(shape)
        return dealt(values[:NUM_VALUES], name, shape)

    def drop_pages(self, names: Iterable[str]) -> None:
        """Do nothing: no weight is kept."""

    def _matrix(self, name: str, stored: WeightFormat, shape: tuple[int, int]) -> StoredMatrix:
        pieces = {piece.name: self._piece(name, piece, shape) for piece in stored.pieces(*shape)}
        return StoredMatrix(format=stored, shape=shape, pieces=pieces)

    def _piece(self, name: str, piece: Piece, shape: tuple[int, int]) -> Tensor:
        dtype = TORCH_DTYPES[piece.dtypes[0]]
        if piece.name == "tensor_scale":
            return torch.ones(piece.shape, dtype=dtype)
        if piece.name == "scales":
            value = SCALE if dtype.is_floating_point else EXPONENT
            return torch.full(piece.shape, value, dtype=dtype)
        if piece.name == "shape":
            return torch.tensor(shape, dtype=dtype)
        if piece.name == "order":  # all columns in the first group
            return torch.zeros(piece.shape, dtype=dtype)
        width = (*piece.shape[:-1], piece.shape[-1] * dtype.itemsize)
        drawn = self._drawn(self._codes, name + piece.suffix, width)
        return (drawn - LARGEST_CODE // 2 if dtype == torch.int8 else drawn).view(dtype)


def start_of(name: str) -> int:
    """Where a weight begins in the numbers; a multiple of 8, so that bytes can be words."""
    return zlib.crc32(name.encode()) % (NUM_VALUES // 8) * 8


def repeated(values: Tensor, length: int) -> Tensor:
    """The values over and over."""
    return values.repeat(ceil_div(length, len(values)))[:length]


def dealt(values: Tensor, name: str, shape: Shape) -> Tensor:
    """Return values from a place that depends on the name, wrapping around at the end."""
    out = torch.empty(shape, dtype=values.dtype)
    flat, at = out.view(-1), start_of(name)
    done = 0
    while done < len(flat):
        count = min(len(flat) - done, len(values) - at)
        flat[done : done + count] = values[at : at + count]
        done, at = done + count, 0
    return out
