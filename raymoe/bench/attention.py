"""How fast the CPU attention kernels read the KV cache (decode) and multiply (prefill).

The cache lies in huge pages and is larger than any processor cache: calls rotate over layers.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch, append_and_attend
from raymoe.kernels.paged_kv import BLOCK_TOKENS, KvLayout
from raymoe.memory.arena import HostArena

MIN_CACHE_BYTES = 512 << 20


def bench_decode(  # noqa: PLR0917 - the shape of an attention
    batch: int,
    context: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    *,
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 5,
) -> float:
    """GB/s of KV read by one decode step of `batch` sequences of `context` tokens; median."""
    layout = KvLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    blocks_each = -(-context // BLOCK_TOKENS)
    kv_bytes = 2 * batch * context * num_kv_heads * head_dim * dtype.itemsize
    layers = _make_layers(layout, batch * blocks_each, kv_bytes)
    query_THD = torch.randn(batch, num_heads, head_dim).to(dtype)
    key_TGD = torch.randn(batch, num_kv_heads, head_dim).to(dtype)
    pass_batch = AttentionBatch(
        query_start=torch.arange(batch + 1, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=_shuffled_table(batch, blocks_each),
    )

    def attend(layer: Tensor) -> None:
        append_and_attend(query_THD, key_TGD, key_TGD, layer, pass_batch, scale=head_dim**-0.5)

    return kv_bytes / _seconds_per_call(attend, layers, repeats) / 1e9


def bench_prefill(  # noqa: PLR0917 - the shape of an attention
    batch: int,
    prompt_tokens: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    *,
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 5,
) -> float:
    """GFLOP/s of the causal attention of `batch` whole prompts; work above the diagonal is free."""
    layout = KvLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    blocks_each = -(-prompt_tokens // BLOCK_TOKENS)
    tokens = batch * prompt_tokens
    layers = _make_layers(layout, batch * blocks_each, MIN_CACHE_BYTES)
    query_THD = torch.randn(tokens, num_heads, head_dim).to(dtype)
    key_TGD = torch.randn(tokens, num_kv_heads, head_dim).to(dtype)
    pass_batch = AttentionBatch(
        query_start=torch.arange(0, tokens + 1, prompt_tokens, dtype=torch.int32),
        context_tokens=torch.full((batch,), prompt_tokens, dtype=torch.int32),
        block_table=_shuffled_table(batch, blocks_each),
    )

    def attend(layer: Tensor) -> None:
        append_and_attend(query_THD, key_TGD, key_TGD, layer, pass_batch, scale=head_dim**-0.5)

    pairs = batch * prompt_tokens * (prompt_tokens + 1) / 2
    return 4 * pairs * num_heads * head_dim / _seconds_per_call(attend, layers, repeats) / 1e9


def _make_layers(layout: KvLayout, num_blocks: int, kv_bytes: int) -> list[Tensor]:
    """Enough layers that none is left in a cache when its turn comes again."""
    count = max(1, -(-MIN_CACHE_BYTES // kv_bytes))
    layer_bytes = num_blocks * layout.block_bytes
    layers = HostArena(count * layer_bytes).allocate(count * layer_bytes).view(layout.dtype)
    layers.fill_(0.5)
    return list(layers.view(count, num_blocks, *layout.block_shape))


def _shuffled_table(batch: int, blocks_each: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * blocks_each, generator=generator)
    return order.to(torch.int32).reshape(batch, blocks_each)


def _seconds_per_call(call: Callable[[Tensor], None], layers: list[Tensor], repeats: int) -> float:
    for layer in layers:
        call(layer)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for layer in layers:
            call(layer)
        seconds.append((time.perf_counter() - begin) / len(layers))
    return sorted(seconds)[len(seconds) // 2]
