"""What ranks have in common while they compute; `specs.tensor_shards` says what each has.

T tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""A tensor of each rank -> their sum, the same on each; may work in place."""


def keep(tensor: Tensor) -> Tensor:
    """The sum over the ranks where there is one."""
    return tensor


class NormOverRanks:
    """RMS norms of queries and keys over the heads of all ranks, of which this one has its own.

    Args:
        reduce: Adds up over the ranks.
        count: Of ranks.
        eps: Of the norms.
    """

    def __init__(self, reduce: Reduce, count: int, eps: float) -> None:
        self._reduce, self._count, self._eps = reduce, count, eps

    def __call__(self, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Norm matrices [T, ...], each by its weight, in place; rounded as `rms_norm` does.

        A head that several ranks have counts as often in the sum as in the number of elements.
        """
        squares_PT = torch.stack([part.float().square().sum(-1) for part in parts])
        for part, weight, sum_T in zip(parts, weights, self._reduce(squares_PT), strict=True):
            mean_T1 = sum_T[:, None] / (self._count * part.shape[-1])
            normed = (part.float() * torch.rsqrt(mean_T1 + self._eps)).to(part.dtype)
            part.copy_(weight * normed)
