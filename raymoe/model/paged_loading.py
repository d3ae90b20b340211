"""Parts of a decoder over weights that others move: views only, nothing is copied or packed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raymoe.kernels.cpu_experts import Experts, GatedFfn, PlainExperts, PlainGatedFfn
from raymoe.kernels.cpu_linear import Linear, PlainLinear
from raymoe.model.loading import GetWeight, Loader, clamp_of
from raymoe.specs.model import MoeSpec
from raymoe.specs.weight_names import HEAD

GetView = Callable[[str], Tensor]


class PagedLoader(Loader):
    """Builds parts whose weights are where `view` says, whatever is there when they run.

    Weights that form one matrix (queries, keys, values) must be neighbours in memory, as
    `specs.weight_parts` orders them.
    """

    def __init__(
        self, view: GetView, stored: GetWeight, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Build over views.

        Args:
            view: Canonical name -> the weight where the decoder computes.
            stored: Canonical name -> the weight as it is stored, for the few that stay.
            dtype: Of the views.
            device: Where they are.
        """
        super().__init__(view, _refuse_to_allocate, dtype)
        self._view, self._stored, self.device = view, stored, device

    def linear(self, names: Sequence[str], *, has_bias: bool = False) -> Linear:
        """See `Loader`."""
        bias_O = _joined([self._view(f"{name}.bias") for name in names]) if has_bias else None
        return PlainLinear(_joined([self._view(f"{name}.weight") for name in names]), bias_O)

    def tied_linear(self, weight_OI: Tensor, bias: str | None) -> Linear:
        """See `Loader`; the embedding is on the host, so the head has a view of its own."""
        del weight_OI
        return PlainLinear(self._view(HEAD), None if bias is None else self._view(bias))

    def head_matrices(self, name: str, num_heads: int) -> Tensor:
        """See `Loader`; a view here."""
        weight_OI = self._view(f"{name}.weight")
        return weight_OI.view(num_heads, -1, weight_OI.shape[1])

    def experts(self, prefix: str, moe: MoeSpec) -> Experts:
        """See `Loader`."""
        gate, up, down = (
            [
                self._view(f"{prefix}{expert}.{part}_proj.weight")
                for expert in range(moe.num_experts)
            ]
            for part in ("gate", "up", "down")
        )
        return PlainExperts(
            gate,
            up,
            down,
            activation=moe.activation,
            biases=self.expert_biases(prefix, moe),
            clamp=clamp_of(moe),
        )

    def gated_ffn(self, prefix: str, activation: str) -> GatedFfn:
        """See `Loader`."""
        gate, up, down = (
            self._view(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down")
        )
        return PlainGatedFfn(gate, up, down, activation=activation)

    def table(self, name: str) -> Tensor:
        """See `Loader`."""
        return self._view(name)

    def vector(self, name: str) -> Tensor:
        """See `Loader`; a view here."""
        return self._view(name)

    def score_vector(self, name: str, *, is_on_host: bool = False) -> Tensor:
        """See `Loader`; a copy of what is stored, beside the views."""
        device = "cpu" if is_on_host else self.device
        return self._stored(name).to(device, torch.float32, copy=True)


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
