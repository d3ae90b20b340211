"""The weights of one rank of several: parts of those of a model, cut when they are asked for."""

from collections.abc import Iterable

import torch

from raymoe.codecs import StoredMatrix, Weight
from raymoe.codecs.checks import is_in_order
from raymoe.errors import ConfigError
from raymoe.memory.weights import Weights
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import cut_of
from raymoe.specs.weight_names import model_weights


class ShardedWeights:
    """Views of weights, by canonical name, with the shapes of `specs.tensor_shards.shard_model`.

    Attributes:
        dtype: As of the whole.

    Args:
        weights: Of the whole model.
        model: The whole model.
        part: What each rank has of it.
        rank: Which one this is.
    """

    def __init__(self, weights: Weights, model: ModelSpec, part: ModelSpec, rank: int) -> None:
        self.dtype: torch.dtype = weights.dtype
        self._weights, self._rank, self._count = weights, rank, part.num_shards
        self._shapes = model_weights(model)
        self._parts = model_weights(part)

    def __call__(self, name: str) -> Weight:
        """The rank's part of a weight.

        Raises:
            CheckpointError: As for `WeightStore`.
            ConfigError: The inputs of a quantised matrix that would be cut are in groups of others
                than their neighbours.
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
        """Give back the memory of weights that were copied elsewhere."""
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
