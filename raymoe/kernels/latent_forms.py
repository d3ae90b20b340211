"""The two forms of latent attention, and the ways from one to the other; torch, on any device.

In the *plain* form keys and values of every head are unfolded from the cached rows. In the
*absorbed* form queries are carried into the space of the rows and results out of it, so that
attention reads nothing but the cache. Both compute the same; what differs is rounding.

T tokens, H heads, N dimensions of a query that are not rotated, D = N + rotated ones, V dimensions
of a value, R rank of the latent, W = R + rotated dimensions. The weight that unfolds a latent is
[H, N + V, R]: for each head the rows of its key, then those of its value.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

NEVER = 2**62  # tokens that no sequence has


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """The weight that unfolds latents into keys and values, and its sizes.

    Attributes:
        weight_HXR: [H, N + V, R].
        nope_dim: N.
        rope_dim: Dimensions of queries and of the shared key that are rotated.
    """

    weight_HXR: Tensor
    nope_dim: int
    rope_dim: int

    @property
    def rank(self) -> int:
        """R."""
        return self.weight_HXR.shape[2]

    @property
    def query_dim(self) -> int:
        """D."""
        return self.nope_dim + self.rope_dim

    @property
    def value_dim(self) -> int:
        """V."""
        return self.weight_HXR.shape[1] - self.nope_dim

    def absorb(self, query_THD: Tensor) -> Tensor:
        """Queries in the space of the cached rows, [T, H, W]."""
        num_tokens, num_heads, _ = query_THD.shape
        absorbed_THW = query_THD.new_empty(num_tokens, num_heads, self.rank + self.rope_dim)
        nope_HTN = query_THD[..., : self.nope_dim].transpose(0, 1)
        absorbed_HTR = torch.bmm(nope_HTN, self.weight_HXR[:, : self.nope_dim])
        absorbed_THW[..., : self.rank] = absorbed_HTR.transpose(0, 1)
        absorbed_THW[..., self.rank :] = query_THD[..., self.nope_dim :]
        return absorbed_THW

    def unfold(self, result_THR: Tensor) -> Tensor:
        """Results of the absorbed form as those of the plain one, [T, H, V]."""
        weight_HRV = self.weight_HXR[:, self.nope_dim :].transpose(1, 2)
        return torch.bmm(result_THR.transpose(0, 1), weight_HRV).transpose(0, 1)

    def keys_and_values(self, rows_CW: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys [C, h, D] and values [C, h, V] of some heads; what precedes C stays in front."""
        weight_hXR = self.weight_HXR[heads]
        unfolded = functional.linear(rows_CW[..., : self.rank], weight_hXR.flatten(0, 1))
        unfolded_ChX = unfolded.view(*rows_CW.shape[:-1], *weight_hXR.shape[:2])
        nope_ChN, value_ChV = torch.split(unfolded_ChX, [self.nope_dim, self.value_dim], dim=-1)
        rope_ChO = rows_CW[..., None, self.rank :].expand(*nope_ChN.shape[:-1], -1)
        return torch.cat([nope_ChN, rope_ChO], dim=-1), value_ChV

    @property
    def fewest_plain_tokens(self) -> int:
        """Tokens of a prompt from which on the plain form is the one with less work.

        It spends 2 R (N + V) operations on every position to save 2 (W + R - D - V) with every new
        token that sees it; in a prompt taken at once that is half of them.
        """
        saved = 2 * self.rank + self.rope_dim - self.query_dim - self.value_dim
        spent = 2 * self.rank * self.weight_HXR.shape[1]
        return spent // saved + 1 if saved > 0 else NEVER
