"""Jobs of the CPU attention kernels: decode reads the KV cache, prefill multiplies.

The cache lies in huge pages, in shuffled blocks, and is larger than any processor cache: each call
uses the next of several layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch, append_and_attend
from raymoe.kernels.paged_kv import BLOCK_TOKENS, CacheLayout, KvLayout
from raymoe.measure.timing import KernelJob
from raymoe.memory.arena import HostArena
from raymoe.units import ceil_div

MIN_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of one layer."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads x {self.head_dim}"


def decode_job(
    shape: AttentionShape, batch: int, context: int, layers: Sequence[Tensor] | None = None
) -> KernelJob:
    """One new token for each of `batch` sequences of `context` tokens.

    Args:
        shape: Heads.
        batch: Sequences.
        context: Tokens of each, the new one included.
        layers: Of `make_layers` for at least as many tokens; made for this job by default.
    """
    return KernelJob(
        kernel="decode attention",
        case=f"{shape}, {batch} x {context}",
        calls=_calls(shape, batch, 1, context, layers),
        bytes_per_call=batch * context * shape.kv_bytes_per_token,
        flop_per_call=4 * batch * context * shape.num_heads * shape.head_dim,
    )


def prefill_job(
    shape: AttentionShape, batch: int, prompt_tokens: int, layers: Sequence[Tensor] | None = None
) -> KernelJob:
    """Causal attention of `batch` whole prompts; work above the diagonal is not counted.

    Arguments as in `decode_job`.
    """
    pairs = batch * prompt_tokens * (prompt_tokens + 1) / 2
    return KernelJob(
        kernel="prefill attention",
        case=f"{shape}, {batch} x {prompt_tokens}",
        calls=_calls(shape, batch, prompt_tokens, prompt_tokens, layers),
        bytes_per_call=batch * prompt_tokens * shape.kv_bytes_per_token,
        flop_per_call=4 * pairs * shape.num_heads * shape.head_dim,
    )


def make_layers(shape: AttentionShape, batch: int, context: int) -> list[Tensor]:
    """KV cache of sequences, so many layers that no cache holds one when its turn comes again."""
    return cache_layers(_layout(shape), batch * ceil_div(context, BLOCK_TOKENS))


def cache_layers(layout: CacheLayout, num_blocks: int) -> list[Tensor]:
    """So many layers of `num_blocks` blocks that no cache holds one when its turn comes again."""
    layer_bytes = num_blocks * layout.block_bytes
    num_layers = ceil_div(MIN_CACHE_BYTES, layer_bytes)
    layers = HostArena(num_layers * layer_bytes).allocate(num_layers * layer_bytes)
    shaped = layers.view(layout.dtype).view(num_layers, num_blocks, *layout.block_shape)
    return list(shaped.fill_(0.5))


def _calls(  # noqa: PLR0917 - of two public functions above
    shape: AttentionShape,
    batch: int,
    new_tokens: int,
    context: int,
    layers: Sequence[Tensor] | None,
) -> list[partial[Tensor]]:
    """One call for each layer."""
    tokens = batch * new_tokens
    query_THD = torch.randn(tokens, shape.num_heads, shape.head_dim).to(shape.dtype)
    key_TGD = torch.randn(tokens, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
    pass_batch = AttentionBatch(
        query_start=torch.arange(0, tokens + 1, new_tokens, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=shuffled_table(batch, ceil_div(context, BLOCK_TOKENS)),
    )
    return [
        partial(
            append_and_attend,
            query_THD, key_TGD, key_TGD, layer, pass_batch, scale=shape.head_dim**-0.5,
        )
        for layer in layers or make_layers(shape, batch, context)
    ]  # fmt: skip


def _layout(shape: AttentionShape) -> KvLayout:
    return KvLayout(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=shape.dtype)


def shuffled_table(batch: int, blocks_each: int) -> Tensor:
    """Block table of sequences whose blocks lie anywhere, [batch, blocks_each] int32."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * blocks_each, generator=generator)
    return order.to(torch.int32).reshape(batch, blocks_each)
