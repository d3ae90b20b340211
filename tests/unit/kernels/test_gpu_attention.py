"""Our attention kernels against the plain reference: in Triton's interpreter, or on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import append_reference
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gpu_attention_batch import (
    MAX_NARROW_DIM,
    AttentionCompute,
    RaggedBatch,
    attention_compute,
)
from raymoe.kernels.paged_kv import BLOCK_TOKENS, unpack_block
from raymoe.kernels.tensors import to_device
from tests.native.attention_cases import BF16, DTYPES, FP16, FP32, HEADS, STEPS, Case
from tests.triton_mode import DEVICES

pytest.importorskip("triton")

# Of probabilities and results, which are rounded to the type of the query; sums are float32.
UNITS = {FP32: 2e-5, FP16: 2**-9, BF16: 2**-6}
device = pytest.mark.parametrize("device", DEVICES)
SMALL = {"has_small_shared_memory": True}  # fewer positions in a tile
# Contexts of several parts, whose ends are those of parts and blocks, and not.
LONG = [(1, 1), (64, 1), (65, 1), (150, 1)]


def compute_of(dtype: torch.dtype, device: str, dim: int = 0) -> AttentionCompute:
    """How a case is computed; the interpreter multiplies raw bits where it is given bfloat16."""
    if device == "cuda":
        return attention_compute(torch.device(device), dtype, dim)
    dot = FP32 if dtype == BF16 else dtype
    return AttentionCompute(dtype=dtype, dot=dot, has_wide_values=dim > MAX_NARROW_DIM)


def run(
    case: Case,
    window: int | None = None,
    *,
    device: str,
    cache: Tensor | None = None,
    compute: AttentionCompute | None = None,
) -> Tensor:
    # They need Triton.
    from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
        Scoring,
        append_and_attend_ragged,
    )

    compute = compute or compute_of(case.query.dtype, device)
    sinks = None if case.sinks is None else case.sinks.to(device)
    return append_and_attend_ragged(
        Projected(*(each.to(device) for each in (case.query, case.key, case.value))),
        (case.cache.clone() if cache is None else cache).to(device),
        to_device(RaggedBatch.of(case.batch(), compute), torch.device(device)),
        Scoring(scale=case.scale, sliding_window=window, sinks_H=sinks),
    ).cpu()


def check(case: Case, window: int | None = None, *, device: str, **options: object) -> None:
    got = run(case, window, device=device, **options)
    assert got.dtype == case.query.dtype
    unit = UNITS[case.query.dtype]
    want = case.reference(window, exact=True)
    torch.testing.assert_close(got.double(), want.double(), rtol=unit, atol=unit)


@device
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP16), (BF16, BF16)], ids=str)
def test_equals_the_reference_for_tokens_alone_and_together(
    dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    case = Case([(33, 1), (40, 9), (1, 1), (5, 5)], (2, 1, 24, 72), dtypes)
    check(case, device=device)
    check(case, device=device, compute=replace(compute_of(dtypes[0], device), **SMALL))


@device
@pytest.mark.slow
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS)
def test_equals_the_reference_for_every_shape_of_pass(
    sequences: list[tuple[int, int]], dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    check(Case(sequences, (4, 2, 72), dtypes), device=device)


@device
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("heads", [*HEADS, (12, 1, 192), (2, 2, 96), (80, 1, 16)], ids=str)
def test_equals_the_reference_for_every_shape_of_heads(
    heads: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    check(Case([(70, 1), (50, 18)], heads, (FP32, dtype)), device=device)


@device
@pytest.mark.parametrize("window", [1, 33])
def test_a_token_sees_only_its_window(window: int, device: str) -> None:
    check(Case([(70, 1), (40, 35)], (2, 1, 16), (FP32, FP32)), window, device=device)


@device
@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_token_sees_only_its_window_in_long_contexts(
    window: int, dtype: torch.dtype, device: str
) -> None:
    case = Case([(260, 1), (150, 150), (300, 40)], (4, 2, 32), (FP32, dtype))
    check(case, window, device=device)


@device
@pytest.mark.parametrize("window", [None, 33])
def test_sinks_take_their_part_of_the_softmax(window: int | None, device: str) -> None:
    case = Case([(40, 1), (37, 5), (1, 1)], (2, 1, 16), (FP32, BF16))
    case.add_sinks()
    check(case, window, device=device)


@device
@pytest.mark.slow
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_sinks_of_every_shape(
    heads: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    case = Case([(70, 1), (50, 18), (1, 1)], heads, dtypes)
    case.add_sinks()
    check(case, device=device)


@device
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    [
        (None, True),
        pytest.param(None, False, marks=pytest.mark.slow),
        pytest.param(66, False, marks=pytest.mark.slow),
        pytest.param(100, True, marks=pytest.mark.slow),
    ],
)
def test_parts_of_a_context_are_merged(
    window: int | None, has_sinks: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels import gpu_attention as launches  # noqa: PLC0415

    case = Case(LONG, (2, 1, 16), (FP32, FP32))
    if has_sinks:
        case.add_sinks()
    whole = run(case, window, device=device)
    monkeypatch.setattr(launches, "SPLIT_POSITIONS", 64)
    check(case, window, device=device)
    monkeypatch.setattr(launches, "GATHERED_BYTES", 1)  # one token at a time
    in_parts = run(case, window, device=device)
    # What has one part is not activated by the merge: its bits do not depend on its neighbours.
    assert torch.equal(in_parts[:2], whole[:2])


@device
def test_bits_of_a_token_do_not_depend_on_its_neighbours(device: str) -> None:
    sequences = [(33, 1), (20, 9), (40, 1)]
    together = Case(sequences, (2, 1, 24), (FP32, BF16))
    got = run(together, device=device)
    for number, (begin, end) in enumerate([(0, 1), (1, 10), (10, 11)]):
        alone = Case([sequences[number]], (2, 1, 24), (FP32, BF16))
        alone.cache, alone.table = together.cache, together.table[number : number + 1]
        for name in ("query", "key", "value"):
            setattr(alone, name, getattr(together, name)[begin:end])
        assert torch.equal(run(alone, device=device), got[begin:end])


@device
def test_turing_takes_the_same_kernels_with_smaller_steps(device: str) -> None:
    compute = AttentionCompute.on((7, 5), FP16)
    assert compute.dot == FP32
    check(Case([(33, 1), (40, 34)], (2, 1, 40), (FP16, FP16)), device=device, compute=compute)


@device
@pytest.mark.parametrize("dtype", [FP16, pytest.param(BF16, marks=pytest.mark.slow)], ids=str)
def test_wide_heads_of_gemma4(dtype: torch.dtype, device: str) -> None:
    case = Case([(40, 1), (70, 20)], (8, 1, 512), (dtype, dtype))
    check(case, device=device, compute=compute_of(dtype, device, 512))


@device
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_keys_and_values_land_where_the_reference_puts_them(
    dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    case = Case([(34, 3), (33, 1)], (2, 2, 72), dtypes)
    got, want = case.cache.clone().to(device), case.cache.clone()
    run(case, device=device, cache=got)
    append_reference(case.key, case.value, want, case.batch())
    for sequence, context in enumerate(case.contexts):
        for block in case.table[sequence, : -(-context // BLOCK_TOKENS)].tolist():
            ours, theirs = (unpack_block(each[block].cpu(), case.layout) for each in (got, want))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@device
def test_an_empty_pass_gives_nothing(device: str) -> None:
    assert run(Case([], (4, 2, 64), (BF16, BF16)), device=device).shape == (0, 256)
