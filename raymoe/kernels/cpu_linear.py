"""Dense projections on the CPU: packed bfloat16 weights where the ISA has dot products for them.

T tokens, I inputs, O outputs.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Allocate = Callable[[int], Tensor]  # bytes -> uint8 [bytes], 64-byte aligned, kept by the caller


class Linear(Protocol):
    """A projection that owns (or views) its weights."""

    in_features: int
    out_features: int

    def __call__(self, input_TI: Tensor) -> Tensor:
        """Project [T, I] to [T, O] in the type of the input."""


class PlainLinear:
    """oneDNN or MKL through torch; the weights stay where they are. Also the reference."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, input_TI: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.linear(input_TI, self._weight_OI, self._bias_O)


def make_linear(weight_OI: Tensor, bias_O: Tensor | None, allocate: Allocate) -> Linear:
    """The fastest projection for these weights on this machine.

    Args:
        weight_OI: May be a view of the checkpoint; a packed projection copies it into `allocate`
            and keeps no reference, a plain one keeps the view.
        bias_O: Optional bias, in the same type.
        allocate: Where packed weights go.
    """
    del allocate
    return PlainLinear(weight_OI, bias_O)


def packed_linear_is_used(dtype: torch.dtype) -> bool:
    """Whether `make_linear` copies weights of this type into packed form on this machine."""
    del dtype
    return False
