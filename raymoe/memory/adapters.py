"""Weights of a model with those of a LoRA adapter merged into them, one by one as they are read."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from raymoe.codecs import BLOCK_ELEMENTS, StoredMatrix, Weight, as_tensor, row_blocks
from raymoe.device.threads import torch_on_all_cores
from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import Checkpoint
from raymoe.memory.weights import FLOATS, WeightStore, located, rows_of
from raymoe.specs.adapter_config import AdapterConfig
from raymoe.specs.adapters import Change, Factors, adapted_model, find_changes
from raymoe.specs.files import resolve_inside
from raymoe.specs.layer_weights import EMBEDDING, HEAD
from raymoe.specs.model import ModelSpec
from raymoe.specs.other_formats import ADAPTER_WEIGHTS, other_format
from raymoe.specs.weight_names import Location, model_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter of one model, its tensors mapped.

    Attributes:
        changes: By canonical name of the weight.
    """

    config: AdapterConfig
    tensors: Checkpoint
    changes: dict[str, Change]

    @classmethod
    def open(cls, directory: Path, spec: ModelSpec) -> "Adapter":
        """Open the adapter in a directory and find what it changes in a model.

        Raises:
            UnsupportedModelError: It is none of LoRA or rsLoRA.
            CheckpointError: Files are missing, damaged or unsafe, or a tensor does not fit the
                model; names it.
        """
        config = AdapterConfig.read(directory)
        present = {path.name for path in directory.iterdir()}
        if ADAPTER_WEIGHTS not in present:
            found = other_format(present) or "the adapter is not whole"
            raise CheckpointError(f"{directory}: there is no {ADAPTER_WEIGHTS}; {found}")
        tensors = Checkpoint(
            directory, {ADAPTER_WEIGHTS: resolve_inside(directory, ADAPTER_WEIGHTS)}
        )
        for name in tensors.names():
            if tensors.entry(name).dtype not in FLOATS:
                raise CheckpointError(
                    f"{directory / ADAPTER_WEIGHTS}: tensor {name!r} has type "
                    f"{tensors.entry(name).dtype}; supported: {', '.join(FLOATS)}"
                )
        changes = find_changes(spec, config, tensors.shapes())
        unread = tensors.names().difference(*(change.tensors for change in changes.values()))
        if unread:
            logger.warning(
                "%s: %d tensors change parts of %s that are not computed, such as %s",
                directory, len(unread), spec.name, min(unread),
            )  # fmt: skip
        return cls(config, tensors, changes)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """The model as it is held with this adapter (`specs.adapters.adapted_model`)."""
        return adapted_model(spec, self.config, self.changes)


class AdaptedWeights:
    """The weights of a base with the changes of an adapter, each made when it is asked for.

    A change is computed in float32 and added in float32; the sum is rounded to the type that the
    base is stored in, and to `dtype` if that is quantised.
    """

    def __init__(
        self, base: WeightStore, base_spec: ModelSpec, adapter: Adapter, spec: ModelSpec
    ) -> None:
        """Store what is read; `spec` is that of the base as `Adapter.adapted` returns it."""
        self.dtype: torch.dtype = base.dtype
        self.base = base
        self._spec, self._base_spec, self._shapes = spec, base_spec, model_weights(spec)
        self._tensors, self._changes = adapter.tensors, adapter.changes
        self._is_untied = base_spec.tie_word_embeddings and not spec.tie_word_embeddings

    def __call__(self, name: str) -> Weight:
        change, weight = self._changes.get(name), None
        if change is None and not self._is_decoded(name):
            return self.base(self._in_base(name))
        if change is not None and change.saved is not None:
            weight = located(self._tensors.tensor(change.saved), change.location)
        with torch_on_all_cores():
            merged = self._merged(name, weight, change)
        # Of which the sum is a copy; other experts may need the same factors.
        self.base.drop_pages([self._in_base(name)])
        if weight is not None and change is not None and change.saved is not None:
            self._tensors.drop_pages([change.saved])
        return merged

    def unmerged(self, name: str) -> Weight:
        """A weight of the shape, type and strides that a call returns; no data is read."""
        if name not in self._changes and not self._is_decoded(name):
            return self.base(self._in_base(name))
        return torch.empty(self._shapes[name], dtype=self._dtype_of(name), device="meta")

    def drop_pages(self, names: Iterable[str]) -> None:
        names = list(names)
        self.base.drop_pages(map(self._in_base, names))
        changes = [self._changes[name] for name in names if name in self._changes]
        self._tensors.drop_pages(tensor for change in changes for tensor in change.tensors)

    def _in_base(self, name: str) -> str:
        return EMBEDDING if name == HEAD and self._is_untied else name

    def _is_decoded(self, name: str) -> bool:
        """Whether the base has a matrix quantised that this model has not."""
        shape = self._shapes[name]
        is_plain = self._spec.format_of(name, shape) is None
        return is_plain and self._base_spec.format_of(self._in_base(name), shape) is not None

    def _dtype_of(self, name: str) -> torch.dtype:
        stored, shape = self._in_base(name), self._shapes[name]
        if self._base_spec.stored_format_of(stored, shape) is not None:
            return self.dtype
        weight = self.base(stored)
        assert isinstance(weight, Tensor), "it is not quantised"
        return weight.dtype

    def _merged(self, name: str, saved: Tensor | None, change: Change | None) -> Tensor:
        weight = self.base(self._in_base(name)) if saved is None else saved
        out = torch.empty(self._shapes[name], dtype=self._dtype_of(name))
        factors = added = None
        if change is not None and change.factors is not None:
            factors = self._factors(change.factors, change.location)
        if change is not None and change.added is not None:
            vector, scale = change.added
            added = located(self._tensors.tensor(vector), change.location).float() * scale
        for rows, block in _float_blocks(weight):
            if factors is not None:
                left, right, scale = factors
                block = torch.addmm(block, left[rows], right, alpha=scale)  # noqa: PLW2901
            out[rows] = block if added is None else block + added[rows]
        return out

    def _factors(self, factors: Factors, location: Location) -> tuple[Tensor, Tensor, float]:
        """The factors [O, R] and [R, I] in float32 whose product changes the weight, and its scale.

        Parameters with experts have the rows of A expert by expert, the columns of B rank by rank.
        """
        a, b = self._tensors.tensor(factors.a), self._tensors.tensor(factors.b)
        if factors.num_experts is not None:
            a = a.view(factors.num_experts, -1, a.shape[1])[location.expert]
            b = b.view(len(b), -1, factors.num_experts)[:, :, location.expert]
        elif location.expert is not None and location.shape is not None:  # rows of one matrix
            b = b.view(*location.shape[:-1], -1)[location.expert]
        left, right = (a.T, b.T) if factors.is_swapped else (b, a)
        if location.is_transposed:
            left, right = right.T, left.T
        return rows_of(left, location).float(), right.float(), factors.scale


def _float_blocks(weight: Weight) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight in float32, some at once."""
    if isinstance(weight, StoredMatrix):
        for rows, block in row_blocks(weight):
            yield rows, as_tensor(block, torch.float32)
        return
    count = max(1, BLOCK_ELEMENTS // max(1, weight[:1].numel()))
    for begin in range(0, len(weight), count):
        rows = slice(begin, begin + count)
        yield rows, weight[rows].float()
