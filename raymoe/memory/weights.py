"""The weights of a model by canonical name, checked against its specification before use."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

import torch

from raymoe.codecs import StoredMatrix, Weight
from raymoe.codecs.checks import check_values
from raymoe.codecs.stored import TORCH_DTYPES
from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import MAX_TENSORS, Checkpoint
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import EMBEDDING, HEAD, Location, locate_weights, model_weights

# Of a weight: quantised ones have up to five, and what predicts more tokens is not in use.
STORED_TENSORS = 8
OTHER_TENSORS = 4096
FLOATS = ("F16", "BF16", "F32")  # stored types of what is not quantised


class Weights(Protocol):
    """The weights of a model by canonical name, wherever they come from.

    Attributes:
        dtype: Type of most elements that are not quantised.
    """

    dtype: torch.dtype

    def __call__(self, name: str) -> Weight:
        """The weight of this canonical name; not to be written to."""

    def drop_pages(self, names: Iterable[str]) -> None:
        """Give back the memory of weights that were copied elsewhere."""


class WeightStore:
    """Views of the memory-mapped weights of one checkpoint, by canonical name.

    Calling it with a name of `specs.weight_names` gives the tensor.

    Attributes:
        checkpoint: Where the tensors lie.
        dtype: Type of most elements, for models whose configuration names none.
    """

    def __init__(self, checkpoint: Checkpoint, locations: dict[str, Location]) -> None:
        self.checkpoint = checkpoint
        self._locations = locations
        self.dtype = _dtype(checkpoint, locations.values())

    @classmethod
    def open(cls, spec: ModelSpec, directory: Path) -> Self:
        """Open the checkpoint of `directory` and check that it holds exactly the weights of `spec`.

        No memory is taken beyond the names.

        Raises:
            CheckpointError: Damaged or unsafe files, or a tensor that is missing, too many, of the
                wrong shape or type; names file and tensor.
        """
        checkpoint = Checkpoint.open(directory, max_stored_tensors(spec))
        try:
            locations = locate_weights(spec, checkpoint.shapes(), checkpoint.files())
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        for location in locations.values():
            _check_types(checkpoint, location)
        store = cls(checkpoint, locations)
        if spec.tie_word_embeddings and HEAD in checkpoint.names():
            store._check_tied_head()
        return store

    def __call__(self, name: str) -> Weight:
        """The weight of this canonical name: read-only views where the file's alignment allows.

        Rows of a tensor are as far apart as they are stored, and their elements too
        (`is_contiguous`). What is quantised is not decoded.

        Raises:
            CheckpointError: Scales or groups of a quantised weight are not usable.
        """
        location = self._locations[name]
        if location.quantised is not None:
            return self._stored_matrix(location)
        tensor = self.checkpoint.tensor(location.name)
        if location.shape is not None:
            tensor = tensor.view(location.shape)
        if location.expert is not None:
            tensor = tensor[location.expert]
        if location.is_transposed:
            tensor = tensor.T
        if location.rows is not None:
            tensor = tensor[slice(*location.rows)]
        return tensor

    def _stored_matrix(self, location: Location) -> StoredMatrix:
        assert location.quantised is not None
        stored, shape = location.quantised
        tensors, names = {}, {}
        for name, piece in location.pieces().items():
            tensor = self.checkpoint.tensor(name)
            tensors[piece.name] = tensor if location.expert is None else tensor[location.expert]
            names[piece.name] = name
        matrix = StoredMatrix(format=stored, shape=shape, pieces=tensors)
        check_values(matrix, lambda piece: self._describe(names[piece]))
        return matrix if location.rows is None else matrix.rows(*location.rows)

    def _describe(self, name: str) -> str:
        return f"{self.checkpoint.directory / self.checkpoint.entry(name).file}: tensor {name!r}"

    def drop_pages(self, names: Iterable[str]) -> None:
        """Give back the memory of weights that were copied elsewhere; views stay valid."""
        self.checkpoint.drop_pages(
            {tensor for name in names for tensor in self._locations[name].tensor_names()}
        )

    def _check_tied_head(self) -> None:
        """Refuse a stored head that differs from the embedding it is said to be.

        transformers 5 unties such a model and 4 overwrites the head; neither can be assumed.
        """
        head = self.checkpoint.tensor(HEAD)
        embedding = self.checkpoint.tensor(self._locations[EMBEDDING].name)
        is_same = head.shape == embedding.shape and torch.equal(head, embedding)
        self.checkpoint.drop_pages([HEAD, self._locations[EMBEDDING].name])
        if not is_same:
            raise CheckpointError(
                f"{self.checkpoint.directory}: tie_word_embeddings is set, but {HEAD!r} differs "
                f"from {EMBEDDING!r}; set tie_word_embeddings to false or remove the tensor"
            )


def max_stored_tensors(spec: ModelSpec) -> int:
    """How many tensors a checkpoint of this model can have, in whatever form it is stored."""
    return min(len(model_weights(spec)) * STORED_TENSORS + OTHER_TENSORS, MAX_TENSORS)


def _check_types(checkpoint: Checkpoint, location: Location) -> None:
    pieces = location.pieces()
    for name in location.tensor_names():
        entry = checkpoint.entry(name)
        supported = (*pieces[name].dtypes, *pieces[name].widened) if pieces else FLOATS
        if entry.dtype not in supported:
            raise CheckpointError(
                f"{checkpoint.directory / entry.file}: tensor {name!r} has type {entry.dtype}; "
                f"supported: {', '.join(supported)}"
            )


def _dtype(checkpoint: Checkpoint, locations: Iterable[Location]) -> torch.dtype:
    """Type of most elements that are not quantised."""
    sizes: Counter[str] = Counter()
    for name in {location.name for location in locations if location.quantised is None}:
        entry = checkpoint.entry(name)
        sizes[entry.dtype] += entry.num_bytes
    return TORCH_DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32
