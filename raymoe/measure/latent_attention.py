"""Jobs of the CPU kernel of latent attention: a matrix product over rows that all heads share.

The cache lies as in `measure.attention`.
"""

from dataclasses import dataclass
from functools import partial

import torch

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_latent_attention import append_and_attend_latent
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.kernels.paged_latent import LatentLayout
from raymoe.measure.attention import cache_layers, shuffled_table
from raymoe.measure.timing import KernelJob
from raymoe.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Heads of one layer and the row that they share."""

    num_heads: int = 128
    rank: int = 512
    rope_dim: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rank + self.rope_dim

    def __str__(self) -> str:
        return f"{self.num_heads} heads, latent {self.rank} + {self.rope_dim}"


def latent_decode_job(shape: LatentShape, batch: int, context: int) -> KernelJob:
    """One new token for each of `batch` sequences of `context` tokens, the new one included."""
    layout = LatentLayout(rank=shape.rank, rope_dim=shape.rope_dim, dtype=shape.dtype)
    blocks_each = ceil_div(context, BLOCK_TOKENS)
    query_THW = torch.randn(batch, shape.num_heads, shape.width).to(shape.dtype)
    latent_TW = torch.randn(batch, shape.width).to(shape.dtype)
    tokens = AttentionBatch(
        query_start=torch.arange(batch + 1, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=shuffled_table(batch, blocks_each),
    )
    scale = shape.width**-0.5
    return KernelJob(
        kernel="decode attention",
        case=f"{shape}, {batch} x {context}",
        calls=[
            partial(
                append_and_attend_latent,
                query_THW, latent_TW, layer, tokens, rank=shape.rank, scale=scale,
            )
            for layer in cache_layers(layout, batch * blocks_each)
        ],
        bytes_per_call=batch * context * shape.width * shape.dtype.itemsize,
        flop_per_call=2 * batch * context * shape.num_heads * (shape.width + shape.rank),
    )  # fmt: skip
