"""The norms around attention and feed-forward network, of either kind.

T tokens, H hidden.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_norm import add_rms_norm_, rms_norm
from raymoe.model.loading import Loader
from raymoe.specs.model import ModelSpec


class Norm(Protocol):
    """A norm of hidden states."""

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """The norm of every row; a new tensor."""

    def after_adding_(self, hidden_TH: Tensor, delta_TH: Tensor) -> Tensor:
        """The same of the sum, which goes to `hidden_TH`."""


class RmsNorm:
    """Root mean square, and a weight."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        self._weight_H, self._eps = weight_H, eps

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(hidden_TH, self._weight_H, self._eps)

    def after_adding_(self, hidden_TH: Tensor, delta_TH: Tensor) -> Tensor:
        """See `Norm`."""
        return add_rms_norm_(hidden_TH, delta_TH, self._weight_H, self._eps)


class LayerNorm:
    """Mean and variance, a weight, and a bias where there is one; by torch."""

    def __init__(self, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> None:
        self._weight_H, self._bias_H, self._eps = weight_H, bias_H, eps

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """See `Norm`."""
        shape = self._weight_H.shape
        return functional.layer_norm(hidden_TH, shape, self._weight_H, self._bias_H, self._eps)

    def after_adding_(self, hidden_TH: Tensor, delta_TH: Tensor) -> Tensor:
        """See `Norm`."""
        return self(hidden_TH.add_(delta_TH))


def load_norm(model: ModelSpec, loader: Loader, name: str) -> Norm:
    """The norm of this name, of the kind that the model has."""
    weight_H = loader.vector(f"{name}.weight")
    if model.norm == "rms":
        return RmsNorm(weight_H, model.norm_eps)
    bias_H = loader.vector(f"{name}.bias") if model.has_norm_bias else None
    return LayerNorm(weight_H, bias_H, model.norm_eps)
