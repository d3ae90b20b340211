"""Attention to last tokens and compressed entries against a reference that keeps no cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from raymoe.device.threads import set_num_threads
from raymoe.errors import ConfigError
from raymoe.kernels.compressed import (
    CompressedBatch,
    CompressedScoring,
    Pooling,
    append_and_attend_compressed,
)
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_compressed import append_and_attend_compressed_on_host
from raymoe.kernels.paged_kv import BLOCK_TOKENS, CompressedLayout

WIDTH, WINDOW, HEADS, ROPE = 16, 24, 3, 8
WAYS = ("torch", "host")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # tensors this small only wait for a second thread


LAYOUTS = {
    "sliding": CompressedLayout(
        width=WIDTH, window=WINDOW, ratio=None, num_sums=0, dtype=torch.float32
    ),
    "overlapping": CompressedLayout(
        width=WIDTH, window=WINDOW, ratio=4, num_sums=2, dtype=torch.float32
    ),
    "long windows": CompressedLayout(
        width=WIDTH, window=WINDOW, ratio=64, num_sums=1, dtype=torch.float32
    ),
    "blocks": CompressedLayout(
        width=WIDTH, window=WINDOW, ratio=32, num_sums=2, dtype=torch.float32
    ),
}


def rotated(row_W: Tensor, position: int, sign: int = 1) -> Tensor:
    """A row whose last dimensions are complex numbers, turned by the position."""
    turned = torch.view_as_complex(row_W[-ROPE:].reshape(-1, 2).contiguous())
    angles = sign * position * 10.0 ** -torch.arange(ROPE // 2).double()
    turned = turned * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([row_W[:-ROPE], torch.view_as_real(turned).flatten()])


def entry(pooled_TX: Tensor, w: int, layout: CompressedLayout, pooling: Pooling) -> Tensor:
    """The entry of window `w` of a sequence."""
    ratio, width = layout.ratio, layout.width
    values_TX, scores_TX = pooled_TX.double().chunk(2, dim=1)
    tokens = torch.arange(w * ratio, (w + 1) * ratio)
    own = slice(-width, None)
    values, scores = values_TX[tokens, own], (scores_TX[tokens] + pooling.bias_MX)[:, own]
    if layout.num_sums == 2 and w > 0:
        before = tokens - ratio
        values = torch.cat([values_TX[before, :width], values])
        scores = torch.cat([(scores_TX[before] + pooling.bias_MX)[:, :width], scores])
    pooled_W = (scores.softmax(0) * values).sum(0)
    normed_W = pooled_W * torch.rsqrt(pooled_W.square().mean() + pooling.eps) * pooling.norm_W
    return rotated(normed_W, w * ratio)


class Inputs:
    """Random inputs of sequences, and what attention makes of each sequence as a whole."""

    def __init__(
        self,
        layout: CompressedLayout,
        lengths: list[int],
        *,
        seed: int = 0,
        num_heads: int = HEADS,
        way: str = "torch",
    ) -> None:
        generator, self.way = torch.Generator().manual_seed(seed), way

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.layout, self.lengths, self.num_heads = layout, lengths, num_heads
        pooled_width, width = layout.num_sums * layout.width, layout.width
        self.queries = [normal(length, num_heads, width) for length in lengths]
        self.rows = [normal(length, width) for length in lengths]
        self.pooled = [3 * normal(length, 2 * pooled_width) for length in lengths]
        angles = torch.arange(512)[:, None] * 10.0 ** -torch.arange(ROPE // 2)
        pooling = None
        if layout.ratio is not None:
            pooling = Pooling(
                bias_MX=normal(layout.ratio, pooled_width), norm_W=normal(width), eps=1e-6
            )
        self.tables = (angles.cos(), angles.sin())
        self.scoring = CompressedScoring(
            scale=0.3,
            sinks_H=normal(num_heads),
            pooling=pooling,
        )

    def expected(self, sequence: int) -> Tensor:
        length, layout = self.lengths[sequence], self.layout
        rows_TW = self.rows[sequence].double()
        entries = []
        if layout.ratio is not None:
            entries = [
                entry(self.pooled[sequence], w, layout, self.scoring.pooling)
                for w in range(length // layout.ratio)
            ]
        out_THW = torch.empty(length, HEADS, WIDTH)
        sinks_H1 = self.scoring.sinks_H[:, None].double()
        for t in range(length):
            num_entries = 0 if layout.ratio is None else (t + 1) // layout.ratio
            seen = [*rows_TW[max(0, t - WINDOW + 1) : t + 1], *entries[:num_entries]]
            seen_YW = torch.stack(seen)
            scores_HY = self.scoring.scale * self.queries[sequence][t].double() @ seen_YW.T
            weights_HY = torch.cat([scores_HY, sinks_H1], dim=1).softmax(1)[:, :-1]
            results = [rotated(result_W, t, sign=-1) for result_W in weights_HY @ seen_YW]
            out_THW[t] = torch.stack(results)
        return out_THW


class Cache:
    """Blocks and slots in use by some sequences, filled with garbage."""

    def __init__(self, layout: CompressedLayout, num_sequences: int) -> None:
        self.num_blocks = 16
        num_bytes = num_sequences * self.num_blocks * layout.block_bytes
        num_bytes += (num_sequences + 1) * layout.sequence_bytes
        self.memory = torch.full([num_bytes], 0xFF, dtype=torch.uint8)
        order = torch.randperm(
            num_sequences * self.num_blocks, generator=torch.Generator().manual_seed(1)
        )
        self.table = order.view(num_sequences, -1).int()
        self.slots = [num_sequences - i for i in range(num_sequences)]


def run_step(inputs: Inputs, cache: Cache, ranges: dict[int, tuple[int, int]]) -> list[Tensor]:
    """Attend for the tokens begin..end of some sequences in one step."""
    counts = [end - begin for begin, end in ranges.values()]
    batch = AttentionBatch(
        query_start=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        context_tokens=torch.tensor([end for _, end in ranges.values()], dtype=torch.int32),
        block_table=cache.table[list(ranges)],
        slots=torch.tensor([cache.slots[s] for s in ranges], dtype=torch.int32),
    )
    chosen = [
        torch.cat([tensors[s][begin:end] for s, (begin, end) in ranges.items()])
        for tensors in (inputs.queries, inputs.rows, inputs.pooled)
    ]
    constants = {"layout": inputs.layout, "tables": inputs.tables, "scoring": inputs.scoring}
    if inputs.way == "host":
        out_THW = append_and_attend_compressed_on_host(*chosen, cache.memory, batch, **constants)
    else:
        indices = CompressedBatch.of(batch, inputs.layout, HEADS)
        out_THW = append_and_attend_compressed(*chosen, cache.memory, indices, **constants)
    return list(out_THW.split(counts))


def ranges_of(inputs: Inputs, begin: int, chunk: int) -> dict[int, tuple[int, int]]:
    return {
        s: (begin, min(begin + chunk, length))
        for s, length in enumerate(inputs.lengths)
        if length > begin
    }


def run_in_chunks(inputs: Inputs, chunk: int) -> list[Tensor]:
    cache, results = Cache(inputs.layout, len(inputs.lengths)), [[] for _ in inputs.lengths]
    for begin in range(0, max(inputs.lengths), chunk):
        ranges = ranges_of(inputs, begin, chunk)
        for s, part in zip(ranges, run_step(inputs, cache, ranges), strict=True):
            results[s].append(part)
    return [torch.cat(parts) for parts in results]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [1, 7, 500])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_sequences_in_chunks_are_attended_as_a_whole(kind: str, chunk: int, way: str) -> None:
    inputs = Inputs(LAYOUTS[kind], [70, 3, 64], way=way)
    for s, result in enumerate(run_in_chunks(inputs, chunk)):
        torch.testing.assert_close(result, inputs.expected(s), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_entries_and_sums_do_not_depend_on_the_steps_of_a_window(kind: str, way: str) -> None:
    inputs = Inputs(LAYOUTS[kind], [101, 77], way=way)
    kept = []
    for chunk in (1, 5, 500):
        cache = Cache(inputs.layout, 2)
        cache.memory.zero_()
        for begin in range(0, 101, chunk):
            run_step(inputs, cache, ranges_of(inputs, begin, chunk))
        kept.append(cache.memory)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_sequence_goes_on_from_the_copy_of_a_slot_and_shared_blocks(kind: str, way: str) -> None:
    inputs = Inputs(LAYOUTS[kind], [101, 101], way=way)
    for tensors in (inputs.queries, inputs.rows, inputs.pooled):
        tensors[1][:96] = tensors[0][:96]
    cache = Cache(inputs.layout, 2)
    run_step(inputs, cache, {0: (0, 96)})
    inputs.layout.copy(cache.memory, [(cache.slots[0], cache.slots[1])])
    cache.table[1, : 96 // BLOCK_TOKENS] = cache.table[0, : 96 // BLOCK_TOKENS]
    first, second = run_step(inputs, cache, {0: (96, 101), 1: (96, 101)})
    torch.testing.assert_close(first, inputs.expected(0)[96:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second, inputs.expected(1)[96:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_has_the_bits_of_the_cache_in_its_type(way: str) -> None:
    layout = replace(LAYOUTS["overlapping"], dtype=torch.bfloat16)
    inputs = Inputs(layout, [70], way=way)
    for result, expected in zip(run_in_chunks(inputs, 9), [inputs.expected(0)], strict=True):
        torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
    entries_NEW, rows_MRW, _ = layout.views(Cache(layout, 1).memory)
    assert entries_NEW.dtype == rows_MRW.dtype == torch.bfloat16


def test_a_batch_without_slots_and_a_ratio_across_blocks_are_refused() -> None:
    batch = AttentionBatch(
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_tokens=torch.tensor([1], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
    )
    with pytest.raises(ConfigError, match="slots is None"):
        CompressedBatch.of(batch, LAYOUTS["sliding"], HEADS)
    with pytest.raises(ConfigError, match="an entry has 24 tokens"):
        replace(LAYOUTS["overlapping"], ratio=24)
