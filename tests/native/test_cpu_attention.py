"""Paged attention against the plain reference, on every instruction set."""

from collections.abc import Callable

import pytest
import torch

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    append,
    append_and_attend,
    append_reference,
)
from raymoe.kernels.paged_kv import BLOCK_TOKENS, scale_views, unpack_block
from tests.kinds import covering
from tests.native.attention_cases import (
    BF16,
    FP16,
    FP32,
    HEADS,
    INT8,
    SHARING,
    STEPS,
    WITH_INT8,
    Case,
    filled,
    is_unwritten,
    unwritten,
)

pytestmark = pytest.mark.usefixtures("isa")


def assert_accurate(case: Case, window: int | None = None) -> None:
    got = case.run(window)
    want = case.reference(window, exact=True)
    assert got.shape == want.shape
    assert got.dtype == case.query.dtype
    # bfloat16 rounds its probabilities, too, on the instruction set that multiplies bfloat16.
    unit = {FP32: 2e-6, FP16: 2**-10, BF16: 2**-7}[case.query.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=unit, atol=unit)


@covering(dtypes=WITH_INT8, sequences=STEPS)
def test_equals_the_reference_for_every_shape_of_pass(
    sequences: list[tuple[int, int]], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case(sequences, (4, 2, 64), dtypes))


@covering(dtypes=WITH_INT8, heads=HEADS)
def test_equals_the_reference_for_every_shape_of_heads(
    heads: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case([(70, 1), (50, 18)], heads, dtypes))


@covering(dtypes=WITH_INT8, window=[1, 2, 31, 32, 33, 100, 1000])
def test_a_token_sees_only_its_window(window: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert_accurate(Case([(260, 1), (150, 150), (300, 40)], (4, 2, 32), dtypes), window)


@covering(dtypes=WITH_INT8, heads=HEADS)
def test_sinks_take_their_part_of_the_softmax(
    heads: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = Case([(70, 1), (50, 18), (1, 1)], heads, dtypes)
    case.add_sinks()
    assert_accurate(case)
    assert_accurate(case, window=5)


def test_sinks_count_once_in_contexts_of_several_splits() -> None:
    case = Case([(3000, 1), (2100, 70)], (3, 1, 16), (FP32, FP32))
    case.add_sinks()
    assert_accurate(case)


def test_sinks_of_another_shape_or_type_are_refused() -> None:
    case = Case([(70, 1)], (4, 2, 8), (BF16, BF16))
    for case.sinks in (torch.zeros(2), torch.zeros(4, dtype=BF16)):
        with pytest.raises(ConfigError, match="sinks"):
            case.run()


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, INT8)], ids=str)
@pytest.mark.parametrize("window", [None, 1500])
def test_equals_the_reference_for_thousands_of_tokens(
    dtypes: tuple[torch.dtype, torch.dtype], window: int | None
) -> None:
    assert_accurate(Case([(3000, 1), (2100, 70)], (2, 1, 16), dtypes), window)


def test_an_empty_pass_gives_nothing() -> None:
    for sequences in ([], [(7, 0), (0, 0)]):
        case = Case(sequences, (4, 2, 64), (BF16, BF16))
        assert case.run().shape == (0, 256)


@pytest.mark.parametrize("dtypes", WITH_INT8, ids=str)
def test_keys_and_values_land_in_the_layout_of_the_cache(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = Case([(70, 40), (33, 1)], (4, 2, 24), dtypes)
    cache, wanted = case.cache.clone(), case.cached()
    case.run(cache=cache)
    first = 0
    for sequence, context in enumerate(case.contexts):
        count = case.starts[sequence + 1] - case.starts[sequence]
        for offset in range(count):
            index, row = divmod(context - count + offset, BLOCK_TOKENS)
            keys, values = unpack_block(cache[case.table[sequence, index]], case.layout)
            assert torch.equal(keys[row], wanted[0][first + offset])
            assert torch.equal(values[row], wanted[1][first + offset])
        first += count
    untouched = is_unwritten(cache)
    owned = torch.zeros_like(untouched)
    owned[case.table[case.table >= 0].long()] = True
    assert torch.equal(untouched, ~owned)


@pytest.mark.parametrize("dtypes", WITH_INT8, ids=str)
def test_what_a_previous_owner_left_in_a_block_does_not_matter(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = Case([(33, 1), (40, 40), (1, 1)], (4, 2, 64), dtypes)
    want = case.run()
    assert not want.isnan().any()
    for stale in (torch.inf, -torch.inf, 1e4):
        assert torch.equal(case.run(cache=filled(case.cache, stale, case.layout)), want)


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, INT8)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_neither_the_batch_nor_the_threads_change_a_bit(
    dtypes: tuple[torch.dtype, torch.dtype], window: int | None
) -> None:
    sequences = [(2500, 1), (90, 1), (1100, 40), (64, 64), (33, 1)]
    case = Case(sequences, (3, 1, 24), dtypes)
    num_threads = _native.num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            _native.set_num_threads(count)
            results.append(case.run(window))
    finally:
        _native.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for sequence in range(len(sequences)):
        begin, end = case.starts[sequence], case.starts[sequence + 1]
        alone = append_and_attend(
            case.query[begin:end],
            case.key[begin:end],
            case.value[begin:end],
            case.cache.clone(),
            AttentionBatch(
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                context_tokens=torch.tensor([case.contexts[sequence]], dtype=torch.int32),
                block_table=case.table[sequence : sequence + 1],
            ),
            scale=case.scale,
            sliding_window=window,
        )
        assert torch.equal(alone, results[0][begin:end])


@covering(dtypes=WITH_INT8, window=[None, 20])
def test_one_token_at_a_time_gives_the_same_bits_as_chunks(
    dtypes: tuple[torch.dtype, torch.dtype], window: int | None
) -> None:
    case = Case([(140, 140)], (6, 2, 40), dtypes)
    want = case.run(window)
    for chunk in (1, 7, 64):
        cache = unwritten(case.layout, len(case.cache))
        for begin in range(0, 140, chunk):
            end = min(begin + chunk, 140)
            got = append_and_attend(
                case.query[begin:end],
                case.key[begin:end],
                case.value[begin:end],
                cache,
                AttentionBatch(
                    query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                    context_tokens=torch.tensor([end], dtype=torch.int32),
                    block_table=case.table,
                ),
                scale=case.scale,
                sliding_window=window,
            )
            assert torch.equal(got, want[begin:end])


@covering(dtypes=WITH_INT8, name=[*STEPS])
def test_append_alone_leaves_the_same_cache(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = Case(STEPS[name], (4, 2, 72), dtypes)
    attended, appended = case.cache.clone(), case.cache.clone()
    case.run(cache=attended)
    append(case.key, case.value, appended, case.batch())
    assert torch.equal(appended.view(torch.uint8), attended.view(torch.uint8))
    wanted = filled(case.cache, 0, case.layout)
    append_reference(case.key, case.value, wanted, case.batch())
    assert torch.equal(filled(appended, 0, case.layout), wanted)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_few_large_elements_of_int8_keys_leave_the_others_their_steps(dtype: torch.dtype) -> None:
    exact, rounded = (Case([(200, 200)], (4, 2, 128), (dtype, cache)) for cache in (dtype, INT8))
    for case in (exact, rounded):
        case.key[..., 5] *= 30
        case.query[..., 5] /= 30
    error = (rounded.run().double() - exact.run().double()).pow(2).mean().sqrt()
    assert error < 0.005  # 0.013 where keys are not rotated


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_without_a_factor_are_zero_or_not_numbers(dtype: torch.dtype) -> None:
    case = Case([(40, 8)], (4, 2, 72), (dtype, INT8))
    tiny = torch.finfo(dtype).smallest_normal
    case.key[0, 0], case.value[0, 0] = 0, tiny
    case.key[1, 1], case.value[1, 1] = -tiny, torch.finfo(dtype).max
    case.key[2, 0, 5], case.value[2, 1, 6] = torch.inf, torch.nan
    appended, wanted = case.cache.clone(), filled(case.cache, 0, case.layout)
    append(case.key, case.value, appended, case.batch())
    append_reference(case.key, case.value, wanted, case.batch())
    block = int(case.table[0, 1])
    for got, want in zip(
        unpack_block(appended[block], case.layout),
        unpack_block(wanted[block], case.layout),
        strict=True,
    ):
        assert torch.equal(got[:8].isnan(), want[:8].isnan())
        assert torch.equal(got[:8].nan_to_num(), want[:8].nan_to_num())
    key_NGB, value_NGB = scale_views(appended, case.layout)
    assert key_NGB[block].isnan().sum() == value_NGB[block].isnan().sum() == 1


def test_append_refuses_blocks_that_are_not_there() -> None:
    case = Case([(40, 8)], (2, 2, 16), (FP32, FP32))
    case.table[0, 1] = 99
    with pytest.raises(ConfigError, match=r"block_table\[0, 1\] is 99, the cache has 4 blocks"):
        append(case.key, case.value, case.cache, case.batch())


def test_sequences_may_share_the_blocks_of_a_prefix() -> None:
    case = Case([(96, 1), (96, 1)], (4, 2, 64), (BF16, BF16))
    case.table[1, :2] = case.table[0, :2]
    assert_accurate(case)


@covering(dtypes=WITH_INT8, name=[*SHARING], heads=[(4, 2, 64), (7, 1, 40), (2, 2, 24)])
def test_who_shares_a_prefix_changes_no_bit(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], heads: tuple[int, ...]
) -> None:
    sequences, shared = SHARING[name]
    case = Case(sequences, heads, dtypes)
    case.add_sinks()
    own = case.table.clone()
    for sequence, other, count in shared:
        case.cache[own[sequence, :count]] = case.cache[own[other, :count]]
    for window in (None, 400):
        want = case.run(window)
        for sequence, other, count in shared:
            case.table[sequence, :count] = case.table[other, :count]
        assert torch.equal(case.run(window), want)
        case.table.copy_(own)
    assert_accurate(case)


def test_blocks_that_left_the_window_are_not_read() -> None:
    case = Case([(300, 1), (200, 2)], (4, 2, 64), (FP32, FP32))
    want = case.run(window=40)
    case.table[:, :4] = -5
    assert torch.equal(case.run(window=40), want)


@pytest.mark.parametrize("window", [None, 64])
def test_bfloat16_errs_at_most_twice_as_much_as_torch(window: int | None) -> None:
    case = Case([(700, 200)], (8, 2, 128), (BF16, BF16))
    exact = case.reference(window, exact=True).double()
    got = case.run(window).double()
    cache = case.cache.nan_to_num().clone()
    append_and_attend(
        case.query, case.key, case.value, cache, case.batch(), scale=1.0
    )  # for the appended tokens
    pairs = [unpack_block(cache[block], case.layout) for block in case.table[0].tolist()]
    keys, values = (
        torch.cat(parts)[:700].repeat_interleave(4, 1) for parts in zip(*pairs, strict=True)
    )
    position = torch.arange(500, 700)[:, None]
    hidden = torch.arange(700) > position
    if window is not None:
        hidden |= torch.arange(700) <= position - window
    scores = torch.einsum("qhd,chd->hqc", case.query, keys).float() * case.scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(BF16)
    plain = torch.einsum("hqc,chd->qhd", weights, values).reshape(200, -1).double()
    assert (got - exact).pow(2).mean().sqrt() <= 2 * (plain - exact).pow(2).mean().sqrt()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_strided_rows_of_a_fused_projection_are_taken() -> None:
    case = Case([(40, 3), (20, 1)], (4, 2, 16), (BF16, BF16))
    want = case.run()
    fused = torch.cat([case.query, case.key, case.value], dim=1)
    case.query, case.key, case.value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    assert torch.equal(case.run(), want)


def test_a_query_of_nan_gives_nan_in_its_own_row_only() -> None:
    case = Case([(40, 1), (20, 1)], (4, 2, 16), (FP32, FP32))
    want = case.run()
    case.query[0, 1] = torch.nan
    got = case.run()
    assert got[0, 16:32].isnan().all()
    got[0, 16:32] = want[0, 16:32]
    assert torch.equal(got, want)


# What goes wrong in a good case, and what the error says.
BROKEN: list[tuple[Callable[[Case], object], str]] = [
    (
        lambda case: case.table[0, 1:].fill_(len(case.cache)),
        r"block_table\[0, 1\] is 5, the cache has 5 blocks",
    ),
    (
        lambda case: setattr(case, "starts", [0, 3, 3]),
        "query_start runs from 0 to 3, expected 0 to 4",
    ),
    (lambda case: setattr(case, "starts", [0, 5, 4]), "query_start falls after entry 1"),
    (
        lambda case: setattr(case, "contexts", [65, 20]),
        "sequence 0 has 65 context_tokens, block_table room for 64",
    ),
    (
        lambda case: setattr(case, "contexts", [2, 20]),
        "sequence 0 has 3 tokens in the step but 2 context_tokens",
    ),
    (
        lambda case: setattr(case, "cache", case.cache.half()),
        "query has dtype bfloat16 and cache float16",
    ),
    (
        lambda case: setattr(case, "cache", case.cache[..., :-2].contiguous()),
        "cache has size 1022 in dimension 2, expected 1024",
    ),
    (
        lambda case: setattr(case, "value", case.value.float()),
        "value has dtype float32, expected bfloat16",
    ),
    (
        lambda case: setattr(case, "query", case.query[:, :3]),
        "query has 3 heads, not a multiple of key's 2",
    ),
    (
        lambda case: setattr(case, "key", case.key[:3]),
        "key has size 3 in dimension 0, expected 4",
    ),
    (
        lambda case: setattr(case, "scale", float("nan")),
        "scale is nan, expected a positive number",
    ),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_arguments_that_do_not_fit_are_refused_by_name(
    breaks: Callable[[Case], object], message: str
) -> None:
    case = Case([(40, 3), (20, 1)], (4, 2, 16), (BF16, BF16))
    breaks(case)
    with pytest.raises(ConfigError, match=message):
        case.run()


def test_a_head_dim_that_is_no_multiple_of_8_is_refused() -> None:
    case = Case([(40, 3)], (4, 2, 16), (BF16, BF16))
    case.query, case.key, case.value = (
        tensor[..., :12].contiguous() for tensor in (case.query, case.key, case.value)
    )
    with pytest.raises(ConfigError, match="query has head_dim 12, expected a multiple of 8"):
        case.run()


def test_a_window_of_nothing_is_refused() -> None:
    case = Case([(40, 3)], (4, 2, 16), (BF16, BF16))
    with pytest.raises(ConfigError, match="sliding_window is 0, expected 1 or more"):
        case.run(window=0)
