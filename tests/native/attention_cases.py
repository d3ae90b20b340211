"""Random passes over a paged cache, for the tests of attention kernels."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    append_and_attend,
    append_and_attend_reference,
)
from raymoe.kernels.paged_kv import (
    BLOCK_TOKENS,
    KvLayout,
    pack_block,
    rotated_keys,
    scale_views,
    scaled,
    unrotated,
)

BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
# Query type, cache type.
DTYPES = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, FP16), (FP32, BF16)]
WITH_INT8 = [*DTYPES, (BF16, INT8), (FP32, INT8), (FP16, INT8)]
# Query heads, KV heads, head dimension: groups of 1, 2, 3, 4, 7, 8, 40; vectors with tails. The
# last ones have values of another size.
HEADS = [(2, 2, 8), (4, 2, 24), (3, 1, 64), (8, 2, 128), (7, 1, 80), (8, 1, 256), (40, 1, 40)]
HEADS += [(8, 2, 192, 128), (3, 1, 16, 72), (4, 2, 72, 8)]
# Context and query tokens of each sequence.
STEPS = {
    "one token": [(1, 1)],
    "exactly one block": [(32, 32)],
    "one token after a block": [(33, 1)],
    "decode": [(1, 1), (31, 1), (32, 1), (100, 1), (129, 1), (300, 1)],
    "prefill": [(5, 5), (130, 130), (70, 70)],
    "chunks": [(40, 8), (65, 33), (160, 100), (2, 1)],
    "mixed": [(33, 1), (96, 96), (1, 1), (200, 3), (64, 64)],
}
# Context and query tokens of sequences, and the sequences whose first blocks each of them has, with
# how many: families, families within them, splits that are shared whole and in part.
SHARING: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int, int]]]] = {
    "a chunk": ([(140, 1), (300, 1), (131, 3)], [(1, 0, 4), (2, 0, 4)]),
    "less than a chunk": ([(140, 1), (140, 1)], [(1, 0, 3)]),
    "half of a split": ([(700, 1), (600, 1), (640, 2)], [(1, 0, 16), (2, 0, 16)]),
    "whole splits": ([(2400, 1), (2060, 1), (2049, 1)], [(1, 0, 64), (2, 0, 64)]),
    "nested": (
        [(1500, 1), (1400, 2), (1300, 1), (500, 1), (260, 1), (900, 640)],
        [(1, 0, 40), (2, 0, 36), (3, 0, 12), (4, 0, 5), (5, 0, 8)],
    ),
    "two families": ([(300, 1), (310, 1), (200, 1), (400, 1)], [(1, 0, 8), (3, 2, 4)]),
    "many rows": ([(300 + i, 1 + i % 3) for i in range(40)], [(i, 0, 8) for i in range(1, 40)]),
}


def unwritten(layout: KvLayout, num_blocks: int) -> Tensor:
    """A cache whose numbers, or factors, are NaN."""
    shape = (num_blocks, *layout.block_shape)
    if layout.is_scaled:
        return torch.full(shape, -1, dtype=INT8)
    return torch.full(shape, torch.nan, dtype=layout.dtype)


def is_unwritten(cache: Tensor) -> Tensor:
    """Which blocks are as `unwritten` makes them."""
    return (cache == -1 if cache.dtype == INT8 else cache.isnan()).flatten(1).all(1)


def filled(cache: Tensor, value: float, layout: KvLayout) -> Tensor:
    """A copy with this number, or factor, in blocks that are unwritten."""
    is_filled, cache = is_unwritten(cache), cache.clone()
    if not layout.is_scaled:
        cache[is_filled] = value
        return cache
    cache[is_filled] = 127 if value else 0
    for scales_NGB in scale_views(cache, layout):
        scales_NGB[is_filled] = value
    return cache


class Case:
    """Random tensors of one step; blocks that nobody owns are unwritten."""

    def __init__(
        self,
        sequences: Sequence[tuple[int, int]],
        heads: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        seed: int = 0,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads, head_dim = heads[:3]
        self.layout = KvLayout(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtypes[1],
            value_head_dim=heads[3] if len(heads) > 3 else None,
        )
        counts = [-(-context // BLOCK_TOKENS) for context, _ in sequences]
        order = torch.randperm(sum(counts) + 2, generator=self.random).to(torch.int32)
        self.table = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.int32)
        self.cache = unwritten(self.layout, len(order))
        begin = 0
        for sequence, (context, tokens) in enumerate(sequences):
            blocks = order[begin : begin + counts[sequence]]
            self.table[sequence, : len(blocks)] = blocks
            begin += len(blocks)
            self._fill_past(blocks, context - tokens)
        self.contexts = [context for context, _ in sequences]
        self.starts = [0, *itertools.accumulate(tokens for _, tokens in sequences)]
        self.query, self.key, self.value = (
            self._randn(self.starts[-1], *shape).to(dtypes[0])
            for shape in (
                (num_heads, head_dim),
                (num_kv_heads, head_dim),
                (num_kv_heads, self.layout.value_dim),
            )
        )
        self.scale = head_dim**-0.5
        self.sinks: Tensor | None = None

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _fill_past(self, blocks: Tensor, past: int) -> None:
        """Random KV for the past; the rest of a begun block is zero, as the kernel leaves it."""
        for index, block in enumerate(blocks[: -(-past // BLOCK_TOKENS)].tolist()):
            layout = self.layout
            keys, values = (
                self._randn(BLOCK_TOKENS, layout.num_kv_heads, dim)
                for dim in (layout.head_dim, layout.value_dim)
            )
            for part in (keys, values):
                part[max(past - index * BLOCK_TOKENS, 0) :] = 0
            self.cache[block] = pack_block(keys, values, layout)

    def cached(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the step as the cache has them."""
        if not self.layout.is_scaled:
            return self.key.to(self.layout.dtype), self.value.to(self.layout.dtype)
        key_TGD, value_TGV = (
            numbers * scale[..., None]
            for numbers, scale in (scaled(rotated_keys(self.key)), scaled(self.value))
        )
        return unrotated(key_TGD), value_TGV

    def add_sinks(self) -> None:
        """Scores without values, some of them far above or below all others."""
        self.sinks = 3 * self._randn(self.query.shape[1])
        self.sinks[0], self.sinks[-1] = 200.0, -200.0

    def batch(self) -> AttentionBatch:
        return AttentionBatch(
            query_start=torch.tensor(self.starts, dtype=torch.int32),
            context_tokens=torch.tensor(self.contexts, dtype=torch.int32),
            block_table=self.table,
        )

    def run(self, window: int | None = None, cache: Tensor | None = None) -> Tensor:
        cache = self.cache.clone() if cache is None else cache
        return append_and_attend(
            self.query,
            self.key,
            self.value,
            cache,
            self.batch(),
            scale=self.scale,
            sliding_window=window,
            sinks_H=self.sinks,
        )

    def reference(self, window: int | None = None, *, exact: bool = False) -> Tensor:
        """Exact: without rounding of the output."""
        query = self.query.double() if exact else self.query
        return append_and_attend_reference(
            query,
            self.key,
            self.value,
            filled(self.cache, 0, self.layout),
            self.batch(),
            scale=self.scale,
            sliding_window=window,
            sinks_H=self.sinks,
        )
