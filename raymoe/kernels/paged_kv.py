"""The layout of the paged KV cache that the attention kernels read.

T tokens, G KV heads, D head dimension, B tokens of a block, N blocks, P elements of a pair.

A block holds B tokens of one sequence for all KV heads of one layer, keys and values apart:

    cache [N, G, 2, B * D]      keys   [D / P, B, P]      values [D / C, B / P, C, P]

P is 2 for bfloat16 and 1 otherwise: the bfloat16 dot-product instruction multiplies pairs, so one
vector of keys scores 16 tokens without a horizontal sum (design, section 5). Values lie in tiles of
C = 64 dimensions, the last one narrower if need be: the kernel reads each as one run of memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raymoe.errors import ConfigError

BLOCK_TOKENS = 32
VALUE_COLUMNS = 64
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CacheLayout(Protocol):
    """Shape and type of one layer's cache, whatever a token leaves in it."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block of one layer."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Keys and values of grouped-query attention."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_cache_dtype(self.dtype)
        if self.head_dim < 8 or self.head_dim % 8:
            raise ConfigError(f"head_dim is {self.head_dim}; the kernels need a multiple of 8")

    @property
    def pair(self) -> int:
        """Elements that one dot-product step multiplies together (P)."""
        return 2 if self.dtype == torch.bfloat16 else 1

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of one block of one layer: [G, 2, B * D]."""
        return (self.num_kv_heads, 2, BLOCK_TOKENS * self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return 2 * self.num_kv_heads * BLOCK_TOKENS * self.head_dim * self.dtype.itemsize


def check_cache_dtype(dtype: torch.dtype) -> None:
    """Refuse types that no attention kernel reads.

    Raises:
        ConfigError: The type is none of `CACHE_DTYPES`.
    """
    if dtype not in CACHE_DTYPES:
        raise ConfigError(f"KV cache dtype is {dtype}; supported: {CACHE_DTYPES}")


def unpack_block(block: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of one block [G, 2, B * D], each copied to [B, G, D]. For tests."""
    heads, dim, pair = layout.num_kv_heads, layout.head_dim, layout.pair
    keys = block[:, 0].reshape(heads, dim // pair, BLOCK_TOKENS, pair).permute(2, 0, 1, 3)
    tiles = [
        tile.reshape(heads, BLOCK_TOKENS // pair, -1, pair).permute(1, 3, 0, 2).flatten(0, 1)
        for tile in torch.split(block[:, 1], BLOCK_TOKENS * VALUE_COLUMNS, dim=1)
    ]
    return keys.reshape(BLOCK_TOKENS, heads, dim), torch.cat(tiles, dim=2)


def pack_block(keys_BGD: Tensor, values_BGD: Tensor, layout: KvLayout) -> Tensor:
    """The inverse of `unpack_block`: one block [G, 2, B * D]. For tests."""
    heads, dim, pair = layout.num_kv_heads, layout.head_dim, layout.pair
    keys = keys_BGD.reshape(BLOCK_TOKENS, heads, dim // pair, pair).permute(1, 2, 0, 3)
    tiles = [
        tile.reshape(-1, pair, heads, tile.shape[2]).permute(2, 0, 3, 1).reshape(heads, -1)
        for tile in torch.split(values_BGD, VALUE_COLUMNS, dim=2)
    ]
    return torch.stack([keys.reshape(heads, -1), torch.cat(tiles, dim=1)], dim=1)
