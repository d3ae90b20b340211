"""The layout of the paged cache of latent attention: all heads share one row for each token.

N blocks, B tokens of a block, W = rank + rotated dimensions.

    cache [N, B, W]

A row is the latent of keys and values, then the rotated key. The scores of a token are products
with the whole row, its values are the latent.
"""

from dataclasses import dataclass

import torch

from raymoe.errors import ConfigError
from raymoe.kernels.paged_kv import BLOCK_TOKENS, check_cache_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """Latents and rotated keys.

    Attributes:
        rank: Elements of the latent.
        rope_dim: Elements of the rotated key.
    """

    rank: int
    rope_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_cache_dtype(self.dtype)
        for name, size in (("rank", self.rank), ("rope_dim", self.rope_dim)):
            if size < 8 or size % 8:
                raise ConfigError(
                    f"{name} of the latent is {size}; the kernels need multiples of 8"
                )

    @property
    def width(self) -> int:
        """Elements of a row (W)."""
        return self.rank + self.rope_dim

    @property
    def block_shape(self) -> tuple[int, int]:
        """Shape of one block of one layer: [B, W]."""
        return (BLOCK_TOKENS, self.width)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return BLOCK_TOKENS * self.width * self.dtype.itemsize
