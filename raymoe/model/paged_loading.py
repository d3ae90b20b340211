"""Parts of a decoder over weights that others move: views only, nothing is copied or packed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, as_tensor
from raymoe.codecs.checks import is_in_order
from raymoe.kernels.cpu_experts import Experts, GatedFfn, PlainGatedFfn
from raymoe.kernels.cpu_linear import Linear, PlainLinear, SideBySide
from raymoe.kernels.device_experts_choice import ExpertMatrices, make_device_experts
from raymoe.kernels.device_experts_tiles import TileTable
from raymoe.model.loading import GetWeight, HeadMatrices, Loader, clamp_of
from raymoe.specs.model import MoeSpec
from raymoe.specs.weight_names import HEAD

GetView = Callable[[str], Weight]


class PagedLoader(Loader):
    """Builds parts whose weights are where `view` says, whatever is there when they run.

    Weights that form one matrix (queries, keys, values) must be neighbours in memory, as
    `specs.weight_parts` orders them.
    """

    def __init__(
        self,
        view: GetView,
        stored: GetWeight,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tiles: TileTable | None = None,
    ) -> None:
        """Build over views.

        Args:
            view: Canonical name -> the weight where the decoder computes.
            stored: Canonical name -> the weight as it is stored, for the few that stay.
            dtype: Of the views.
            device: Where they are.
            tiles: Measured tiles of the GPU's kernels for experts.
        """
        super().__init__(view, _refuse_to_allocate, dtype)
        self._view, self._stored, self.device = view, stored, device
        self._tiles = tiles

    def linear(self, names: Sequence[str], *, has_bias: bool = False) -> Linear:
        """See `Loader`."""
        weights = [self._view(f"{name}.weight") for name in names]
        biases = [self.vector(f"{name}.bias") for name in names] if has_bias else None
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(plain) == len(weights):
            return PlainLinear(_joined(plain), None if biases is None else _joined(biases))
        parts = [
            PlainLinear(weight, None if biases is None else biases[i])
            for i, weight in enumerate(weights)
        ]
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def tied_linear(self, weight_OI: Tensor, bias: str | None) -> Linear:
        """See `Loader`; the embedding is on the host, so the head has a view of its own."""
        del weight_OI
        return PlainLinear(self._view(HEAD), None if bias is None else self.vector(bias))

    def head_matrices(self, name: str, num_heads: int) -> HeadMatrices:
        """See `Loader`; a view here, decoded whenever it is asked for."""
        weight = self._view(f"{name}.weight")
        shape = (num_heads, -1, weight.shape[1])
        return lambda: as_tensor(weight, self.dtype).view(shape)

    def experts(self, prefix: str, moe: MoeSpec) -> Experts:
        """See `Loader`."""
        return make_device_experts(
            self.expert_matrices(prefix, moe),
            activation=moe.activation,
            dtype=self.dtype,
            clamp=clamp_of(moe),
            tiles=self._tiles,
        )

    def expert_matrices(self, prefix: str, moe: MoeSpec) -> ExpertMatrices:
        """The views of all experts of a layer."""
        gate, up, down = (
            [
                self._view(f"{prefix}{expert}.{part}_proj.weight")
                for expert in range(moe.num_experts)
            ]
            for part in ("gate", "up", "down")
        )
        return ExpertMatrices(
            gate,
            up,
            down,
            biases=self.expert_biases(prefix, moe),
            are_reordered=self._are_reordered(prefix, moe),
        )

    def _are_reordered(self, prefix: str, moe: MoeSpec) -> bool:
        """Whether an expert's inputs are in groups of others than their neighbours.

        The tables that say so are read from the checkpoint: there is nothing in a slot yet.
        """
        names = (
            f"{prefix}{expert}.{part}_proj.weight"
            for expert in range(moe.num_experts)
            for part in ("gate", "up", "down")
        )
        with_tables = (name for name in names if _has_order(self._view(name)))
        return not all(_is_in_order(self._stored(name)) for name in with_tables)

    def gated_ffn(self, prefix: str, activation: str) -> GatedFfn:
        """See `Loader`."""
        gate, up, down = (
            self._view(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down")
        )
        return PlainGatedFfn(gate, up, down, activation=activation)

    def table(self, name: str) -> Tensor:
        """See `Loader`."""
        return self.vector(name)

    def vector(self, name: str) -> Tensor:
        """See `Loader`; a view here."""
        view = self._view(name)
        assert isinstance(view, Tensor), "tables and vectors are never quantised"
        return view

    def score_vector(self, name: str, *, is_on_host: bool = False) -> Tensor:
        """See `Loader`; a copy of what is stored, beside the views."""
        device = "cpu" if is_on_host else self.device
        stored = self._stored(name)
        assert isinstance(stored, Tensor), "vectors are never quantised"
        return stored.to(device, torch.float32, copy=True)


def _has_order(weight: Weight) -> bool:
    return isinstance(weight, StoredMatrix) and "order" in weight.pieces


def _is_in_order(stored: Weight) -> bool:
    return isinstance(stored, StoredMatrix) and is_in_order(stored)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Neighbouring tensors of equal width as one tensor."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        assert part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        assert part.storage_offset() == offset, "weights of one projection are not neighbours"
        offset += part.numel()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _refuse_to_allocate(num_bytes: int) -> Tensor:
    raise AssertionError(f"{num_bytes} bytes asked for; paged parts are views")
