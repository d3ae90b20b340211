"""Norms of hidden states.

T tokens, H hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from raymoe.kernels.elementwise import add_rms_norm_, rms_norm
from raymoe.model.loading import Loader
from raymoe.specs.model import ModelSpec


class Norm(Protocol):
    """A norm of hidden states."""

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """Return the norm of every row as a new tensor."""

    def after_adding_(
        self, hidden_TH: Tensor, delta_TH: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Add `delta_TH` to `hidden_TH` in place and return the norm of the sum, in `out`."""


class RmsNorm:
    def __init__(self, weight_H: Tensor | None, eps: float, offset: float | None = None) -> None:
        self._weight_H, self._eps, self._offset = weight_H, eps, offset

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        return rms_norm(hidden_TH, self._weight_H, self._eps, self._offset)

    def after_adding_(
        self, hidden_TH: Tensor, delta_TH: Tensor, out: Tensor | None = None
    ) -> Tensor:
        return add_rms_norm_(
            hidden_TH, delta_TH, self._weight_H, self._eps, offset=self._offset, out=out
        )


class LayerNorm:
    def __init__(self, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> None:
        self._weight_H, self._bias_H, self._eps = weight_H, bias_H, eps

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        shape = self._weight_H.shape
        return functional.layer_norm(hidden_TH, shape, self._weight_H, self._bias_H, self._eps)

    def after_adding_(
        self, hidden_TH: Tensor, delta_TH: Tensor, out: Tensor | None = None
    ) -> Tensor:
        normed_TH = self(hidden_TH.add_(delta_TH))
        return normed_TH if out is None else out.copy_(normed_TH)


NormHeads = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Norms queries and keys [T, heads * D] in place, each by its weights."""


class HeadLayerNorms:
    """Layer norms of the heads of queries and keys, each head by weights of its own."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def __call__(self, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Norm matrices [T, heads * D] in place, by weights [heads, D], and round once."""
        for part_TX, weight_ND in zip(parts, weights, strict=True):
            heads_TND = part_TX.float().view(len(part_TX), *weight_ND.shape)
            normed_TND = functional.layer_norm(heads_TND, weight_ND.shape[1:], eps=self._eps)
            part_TX.copy_((normed_TND * weight_ND.float()).flatten(1))


def load_norm(model: ModelSpec, loader: Loader, name: str) -> Norm:
    weight_H = loader.vector(f"{name}.weight")
    if model.norm != "layer":
        return RmsNorm(weight_H, model.norm_eps, model.norm_offset)
    bias_H = loader.vector(f"{name}.bias") if model.has_norm_bias else None
    return LayerNorm(weight_H, bias_H, model.norm_eps)
