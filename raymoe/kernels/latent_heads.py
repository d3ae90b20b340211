"""The weights that up-project latents to keys and values of heads, and what is done with them.

The plain form of latent attention up-projects cached rows; the absorbed form projects queries to
the space of the rows and up-projects its results.

T tokens, H heads (h: some of them), N dimensions of a key that are not rotated, V of a value, R of
a latent, W of a cached row (R and the rotated ones), D of a query (N and the rotated ones), C rows.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_linear import Allocate, PackedGroups
from raymoe.kernels.elementwise import triton_runs_on
from raymoe.kernels.paged_kv import ALL_TOKENS


class LatentHeads(ABC):
    """One weight [N + V, R] for each head."""

    def __init__(self, *, nope_dim: int, rope_dim: int, value_dim: int, rank: int) -> None:
        self.nope_dim, self.rope_dim, self.value_dim, self.rank = (
            nope_dim,
            rope_dim,
            value_dim,
            rank,
        )
        self.query_dim = nope_dim + rope_dim

    def absorb(self, query_THD: Tensor, out: Tensor | None = None) -> Tensor:
        """Project queries to the space of the cached rows, [T, H, W]."""
        if out is None:
            out = query_THD.new_empty(*query_THD.shape[:2], self.rank + self.rope_dim)
        self._absorb_nope(query_THD[..., : self.nope_dim], out[..., : self.rank])
        out[..., self.rank :] = query_THD[..., self.nope_dim :]
        return out

    @abstractmethod
    def _absorb_nope(self, nope_THN: Tensor, out_THR: Tensor) -> None:
        """Write what is not rotated to `out_THR`."""

    @abstractmethod
    def up_project(self, result_THR: Tensor, out: Tensor | None = None) -> Tensor:
        """Up-project results of the absorbed form to those of the plain form, [T, H, V]."""

    @abstractmethod
    def keys_and_values(self, rows_CW: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Up-project rows to keys [..., C, h, D] and values [..., C, h, V] of some heads."""

    @property
    def min_plain_tokens(self) -> int:
        """Return the number of new prompt tokens from which the plain form does fewer operations.

        Up-projection costs 2 R (N + V) operations per position. It saves 2 (W + R - D - V) per pair
        of a new token and a position it sees; in a prompt computed in one step that is half of all
        pairs.
        """
        saved = 2 * self.rank - self.nope_dim - self.value_dim
        spent = 2 * self.rank * (self.nope_dim + self.value_dim)
        return spent // saved + 1 if saved > 0 else ALL_TOKENS


class PlainLatentHeads(LatentHeads):
    """Reference, and on GPUs: torch multiplies by `weight_HXR` [H, N + V, R] without a copy."""

    def __init__(self, weight_HXR: Tensor, *, nope_dim: int, rope_dim: int) -> None:
        _, up_projected, rank = weight_HXR.shape
        value_dim = up_projected - nope_dim
        super().__init__(nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim, rank=rank)
        self.weight_HXR = weight_HXR

    def _absorb_nope(self, nope_THN: Tensor, out_THR: Tensor) -> None:
        _multiply(nope_THN.transpose(0, 1), self.weight_HXR[:, : self.nope_dim], out_THR)

    def up_project(self, result_THR: Tensor, out: Tensor | None = None) -> Tensor:
        weight_HRV = self.weight_HXR[:, self.nope_dim :].transpose(1, 2)
        result_HTR = result_THR.transpose(0, 1)
        if out is None:
            return torch.bmm(result_HTR, weight_HRV).transpose(0, 1)
        return _multiply(result_HTR, weight_HRV, out)

    def keys_and_values(self, rows_CW: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        weight_hXR = self.weight_HXR[heads]
        up_projected = functional.linear(rows_CW[..., : self.rank], weight_hXR.flatten(0, 1))
        up_projected_ChX = up_projected.view(*rows_CW.shape[:-1], *weight_hXR.shape[:2])
        nope_ChN, value_ChV = torch.split(up_projected_ChX, [self.nope_dim, self.value_dim], dim=-1)
        rope_ChO = rows_CW[..., None, self.rank :].expand(*nope_ChN.shape[:-1], -1)
        return torch.cat([nope_ChN, rope_ChO], dim=-1), value_ChV


def _multiply(left_HTX: Tensor, right_HXY: Tensor, out_THY: Tensor) -> Tensor:
    """Write one product per head to `out_THY`; on a GPU without a copy of the result."""
    out_HTY = out_THY.transpose(0, 1)
    if triton_runs_on(out_THY.device):
        torch.bmm(left_HTX, right_HXY, out=out_HTY)
    else:  # MKL multiplies all heads at once only into contiguous memory
        out_HTY.copy_(torch.bmm(left_HTX, right_HXY))
    return out_THY


class PackedLatentHeads(LatentHeads):
    """Our kernel on packed bfloat16 weights: those of keys [N, R] twice, once transposed."""

    def __init__(
        self, weight_HXR: Tensor, *, nope_dim: int, rope_dim: int, allocate: Allocate
    ) -> None:
        _, up_projected, rank = weight_HXR.shape
        value_dim = up_projected - nope_dim
        super().__init__(nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim, rank=rank)
        key_HNR, value_HVR = torch.split(weight_HXR, [nope_dim, value_dim], dim=1)
        self._absorbed = PackedGroups.pack(key_HNR.transpose(1, 2), allocate)
        self._keys = PackedGroups.pack(key_HNR, allocate)
        self._values = PackedGroups.pack(value_HVR, allocate)

    def _absorb_nope(self, nope_THN: Tensor, out_THR: Tensor) -> None:
        self._absorbed(nope_THN, out_THR)

    def up_project(self, result_THR: Tensor, out: Tensor | None = None) -> Tensor:
        return self._values(result_THR, out)

    def keys_and_values(self, rows_CW: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        keys, values = self._keys.some(heads), self._values.some(heads)
        latent_ChR = rows_CW[:, None, : self.rank].expand(-1, keys.num_groups, -1)
        key_ChD = rows_CW.new_empty(len(rows_CW), keys.num_groups, self.query_dim)
        keys(latent_ChR, key_ChD[..., : self.nope_dim])
        key_ChD[..., self.nope_dim :] = rows_CW[:, None, self.rank :]
        return key_ChD, values(latent_ChR)


def packed_shapes(nope_dim: int, value_dim: int, rank: int) -> list[tuple[int, int]]:
    """Return [O, I] of the matrices of a head for which `PackedLatentHeads` allocates memory."""
    return [(rank, nope_dim), (nope_dim, rank), (value_dim, rank)]
