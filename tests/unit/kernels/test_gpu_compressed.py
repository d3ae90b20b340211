"""Attention to rows and entries in Triton against what torch makes of the same cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from raymoe.kernels.compressed import (
    CompressedBatch,
    CompressedScoring,
    append_and_attend_compressed,
)
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.gpu_attention_batch import CompressedTokens
from raymoe.kernels.paged_kv import CompressedLayout
from raymoe.kernels.tensors import to_device
from tests.native.attention_cases import BF16, FP16, FP32
from tests.triton_mode import DEVICES
from tests.unit.kernels.test_compressed import LAYOUTS, Cache, Inputs, ranges_of
from tests.unit.kernels.test_gpu_attention import compute_of

pytest.importorskip("triton")

UNITS = {FP32: 2e-5, FP16: 2**-7, BF16: 2**-4}
device = pytest.mark.parametrize("device", DEVICES)


def batch_of(cache: Cache, ranges: dict[int, tuple[int, int]]) -> AttentionBatch:
    counts = [end - begin for begin, end in ranges.values()]
    return AttentionBatch(
        query_start=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        context_tokens=torch.tensor([end for _, end in ranges.values()], dtype=torch.int32),
        block_table=cache.table[list(ranges)],
        slots=torch.tensor([cache.slots[s] for s in ranges], dtype=torch.int32),
    )


class Step:
    """Some tokens of sequences whose earlier ones are in a cache, by torch and by Triton."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype) -> None:
        self.inputs, self.dtype = inputs, dtype
        self.cache = Cache(inputs.layout, len(inputs.lengths))

    def __call__(self, ranges: dict[int, tuple[int, int]], on: str | None) -> Tensor:
        inputs, target = self.inputs, torch.device(on or "cpu")
        compute = None if on is None else compute_of(self.dtype, on)
        batch = CompressedBatch.of(
            batch_of(self.cache, ranges), inputs.layout, inputs.num_heads, compute
        )
        assert bool(batch.groups) == (on is None)
        cache = self.cache.memory.to(target)
        out = append_and_attend_compressed(
            *(
                torch.cat([each[s][begin:end] for s, (begin, end) in ranges.items()])
                .to(FP32 if on is None else self.dtype)
                .to(target)
                for each in (inputs.queries, inputs.rows, inputs.pooled)
            ),
            cache,
            to_device(batch, target),
            layout=inputs.layout,
            tables=to_device(inputs.tables, target),
            scoring=to_device(inputs.scoring, target),
        )
        self.cache.memory = cache.cpu()
        return out.cpu()


def check(layout: CompressedLayout, lengths: list[int], chunk: int, **options: object) -> None:
    """Both attend in the same steps, and torch continues a cache of its own."""
    dtype, on = options.get("dtype", FP32), options["device"]
    assert isinstance(dtype, torch.dtype)
    assert isinstance(on, str)
    inputs = Inputs(replace(layout, dtype=dtype), lengths)
    for each in (inputs.queries, inputs.rows, inputs.pooled):
        each[:] = [values.to(dtype).float() for values in each]
    plain, ours = Step(inputs, dtype), Step(inputs, dtype)
    for begin in range(0, max(lengths), chunk):
        ranges = ranges_of(inputs, begin, chunk)
        expected, got = plain(ranges, None), ours(ranges, on)
        assert got.dtype == dtype
        unit = UNITS[dtype]
        torch.testing.assert_close(got.float(), expected, rtol=unit, atol=unit)


@device
@pytest.mark.parametrize("kind", LAYOUTS)
def test_equals_torch_in_chunks(kind: str, device: str) -> None:
    check(LAYOUTS[kind], [70, 3, 64], 33, device=device)


@device
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 500])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_equals_torch_in_every_type(kind: str, chunk: int, dtype: torch.dtype, device: str) -> None:
    check(LAYOUTS[kind], [70, 3, 64], chunk, dtype=dtype, device=device)


@device
@pytest.mark.slow
def test_heads_of_several_tiles_and_wide_rows(device: str) -> None:
    """As DeepSeek-V4-Flash has them: 64 heads of 512, here of 70 heads of 72."""
    layout = CompressedLayout(width=72, window=40, ratio=4, num_sums=2, dtype=FP32)
    inputs = Inputs(layout, [90, 41], num_heads=70)
    plain, ours = Step(inputs, FP32), Step(inputs, FP32)
    for begin in (0, 45):
        ranges = ranges_of(inputs, begin, 45)
        torch.testing.assert_close(ours(ranges, device), plain(ranges, None), rtol=2e-5, atol=2e-5)


@device
@pytest.mark.parametrize("kind", ["overlapping", "long windows"])
def test_a_token_attends_to_the_entries_that_it_chose(kind: str, device: str) -> None:
    """To the last of its entries, and to every third before: as if there were no others."""
    from raymoe.kernels.gpu_compressed import attend_launch  # noqa: PLC0415 - it needs Triton

    layout, target = LAYOUTS[kind], torch.device(device)
    inputs = Inputs(layout, [150, 66])
    ranges = {0: (149, 150), 1: (60, 66)}
    step = Step(inputs, FP32)
    step({0: (0, 149), 1: (0, 60)}, None)
    before = step.cache.memory.clone()
    step(ranges, None)
    batch = batch_of(step.cache, ranges)
    position_T = [*range(149, 150), *range(60, 66)]
    visible_T = [(position + 1) // layout.ratio for position in position_T]
    chosen = [[e for e in range(count) if (count - 1 - e) % 3 == 0] for count in visible_T]
    num_chosen = max(map(len, chosen)) + 2
    chosen_TK = torch.tensor(
        [[*each, *[-1] * (num_chosen - len(each))] for each in chosen], dtype=torch.int32
    )
    query_THW = torch.cat([inputs.queries[s][b:e] for s, (b, e) in ranges.items()])
    row_TW = torch.cat([inputs.rows[s][b:e] for s, (b, e) in ranges.items()])
    entries_NEW, _, _ = layout.views(step.cache.memory.to(target))
    _, rows_MRW, _ = layout.views(before.to(target))
    out_THW = torch.empty_like(query_THW, device=target)
    attend_launch(
        query_THW.to(target),
        row_TW.to(target),
        (entries_NEW, rows_MRW),
        to_device(CompressedTokens.of(batch, compute_of(FP32, device)), target),
        out_THW,
        layout=layout,
        scale=inputs.scoring.scale,
        sinks_H=inputs.scoring.sinks_H.to(target),
        chosen_TK=chosen_TK.to(target),
    ).run()
    sequence_T = [0] + [1] * 6
    for t, (s, position) in enumerate(zip(sequence_T, position_T, strict=True)):
        seen = [inputs.rows[s][max(0, position - layout.window + 1) : position + 1]]
        for e in chosen[t]:
            column = e // layout.block_entries * layout.block_step + layout.block_step - 1
            block = entries_NEW[int(step.cache.table[s, column])]
            seen.append(block[e % layout.block_entries][None].cpu())
        expected_HW = softmax(query_THW[t], torch.cat(seen), inputs.scoring)
        torch.testing.assert_close(out_THW[t].cpu(), expected_HW, rtol=2e-5, atol=2e-5)


def softmax(query_HW: Tensor, seen_YW: Tensor, scoring: CompressedScoring) -> Tensor:
    scores_HY = scoring.scale * query_HW.double() @ seen_YW.double().T
    scores_HX = torch.cat([scores_HY, scoring.sinks_H[:, None].double()], dim=1)
    return (scores_HX.softmax(1)[:, :-1] @ seen_YW.double()).float()


@device
def test_a_step_without_tokens_is_nothing(device: str) -> None:
    inputs = Inputs(LAYOUTS["sliding"], [3])
    step = Step(inputs, FP32)
    step({0: (0, 3)}, device)
    assert step({0: (3, 3)}, device).shape == (0, inputs.num_heads, inputs.layout.width)
