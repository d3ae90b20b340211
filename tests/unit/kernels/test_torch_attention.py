"""Attention by torch alone against the plain reference; the tensors could be on any device."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels import torch_attention
from raymoe.kernels.cpu_attention import append_reference
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.paged_kv import BLOCK_TOKENS, unpack_block
from raymoe.kernels.torch_attention import PagedBatch, append_and_attend_paged
from tests.kinds import covering
from tests.native.attention_cases import BF16, FP16, FP32, HEADS, STEPS, WITH_INT8, Case


def run(case: Case, window: int | None = None, cache: Tensor | None = None) -> Tensor:
    return append_and_attend_paged(
        Projected(case.query, case.key, case.value),
        case.cache.clone() if cache is None else cache,
        PagedBatch.of(case.batch(), case.layout),
        scale=case.scale,
        sliding_window=window,
        sinks_H=None if case.sinks is None else case.sinks.to(case.query.dtype),
    )


def check(case: Case, window: int | None = None) -> None:
    # torch rounds the probabilities to the type of the query, and sums in float32.
    unit = {FP32: 2e-5, FP16: 2**-9, BF16: 2**-6}[case.query.dtype]
    want = case.reference(window, exact=True)
    torch.testing.assert_close(run(case, window).double(), want.double(), rtol=unit, atol=unit)


@covering(dtypes=WITH_INT8, sequences=STEPS)
def test_equals_the_reference_for_every_shape_of_pass(
    sequences: list[tuple[int, int]], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    check(Case(sequences, (4, 2, 72), dtypes))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_reference_for_every_shape_of_heads(heads: tuple[int, ...]) -> None:
    check(Case([(70, 1), (50, 18)], heads, (FP32, BF16)))


@pytest.mark.parametrize("window", [1, 31, 32, 33, 100])
def test_a_token_sees_only_its_window(window: int) -> None:
    check(Case([(260, 1), (150, 150), (300, 40)], (4, 2, 32), (FP32, FP32)), window)


@covering(dtypes=WITH_INT8, heads=HEADS, window=[None, 33])
def test_sinks_take_their_part_of_the_softmax(
    window: int | None,
    heads: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = Case([(70, 1), (50, 18), (1, 1)], heads, dtypes)
    case.add_sinks()
    check(case, window)


def test_large_groups_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(1 + 17 * n, 1) for n in range(12)] + [(40, 8)] * 3, (4, 2, 64), (FP32, FP32))
    monkeypatch.setattr(torch_attention, "GATHERED_BYTES", 5 * case.layout.block_bytes)
    assert len(PagedBatch.of(case.batch(), case.layout).groups) > 4
    check(case)


def test_an_empty_pass_gives_nothing() -> None:
    assert run(Case([], (4, 2, 64), (BF16, BF16))).shape == (0, 256)


@pytest.mark.parametrize("dtypes", WITH_INT8, ids=str)
def test_keys_and_values_land_where_the_reference_puts_them(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = Case([(70, 40), (33, 1)], (4, 2, 72), dtypes)
    got, want = case.cache.clone(), case.cache.clone()
    run(case, cache=got)
    append_reference(case.key, case.value, want, case.batch())
    for sequence, context in enumerate(case.contexts):
        for block in case.table[sequence, : -(-context // BLOCK_TOKENS)].tolist():
            for ours, theirs in zip(
                unpack_block(got[block], case.layout),
                unpack_block(want[block], case.layout),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
