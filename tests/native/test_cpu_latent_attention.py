"""Latent attention in absorbed form against the plain reference, on every instruction set."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    append_and_attend_latent,
    append_and_attend_latent_reference,
    append_latent,
    append_latent_reference,
)
from raymoe.kernels.paged_kv import BLOCK_TOKENS, LatentLayout
from tests.kinds import covering
from tests.native.attention_cases import BF16, DTYPES, FP16, FP32, SHARING, STEPS

pytestmark = pytest.mark.usefixtures("isa")

# Heads, rank, rotated dimensions: vectors and panels with tails, one and several tiles of heads.
HEADS = [(1, 8, 8), (3, 24, 8), (16, 32, 16), (20, 72, 8), (33, 40, 24), (70, 64, 16), (130, 16, 8)]
HEADS += [(18, 40, 0)]


class Case:
    """Random tensors of one step; rows that no token owns are NaN."""

    def __init__(
        self,
        sequences: Sequence[tuple[int, int]],
        heads: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        seed: int = 0,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        num_heads, self.rank, rope_dim = heads
        self.layout = LatentLayout(rank=self.rank, rope_dim=rope_dim, dtype=dtypes[1])
        counts = [-(-context // BLOCK_TOKENS) for context, _ in sequences]
        order = torch.randperm(sum(counts) + 2, generator=self.random).to(torch.int32)
        self.table = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.int32)
        self.cache = torch.full((len(order), *self.layout.block_shape), torch.nan).to(dtypes[1])
        owned = iter(order.split([*counts, 2]))
        for sequence, (context, tokens) in enumerate(sequences):
            blocks = next(owned)
            self.table[sequence, : len(blocks)] = blocks
            for position in range(context - tokens):
                row = self._randn(self.layout.width).to(dtypes[1])
                self.cache[blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = row
        self.contexts = [context for context, _ in sequences]
        self.starts = [0, *itertools.accumulate(tokens for _, tokens in sequences)]
        num_tokens, width = self.starts[-1], self.layout.width
        self.query = self._randn(num_tokens, num_heads, width).to(dtypes[0])
        self.latent = self._randn(num_tokens, width).to(dtypes[0])
        self.scale = 2 * width**-0.5
        self.sinks: Tensor | None = None

    def add_sinks(self) -> None:
        """Scores without values, some of them far above or below all others."""
        self.sinks = 3 * self._randn(self.query.shape[1])
        self.sinks[0], self.sinks[-1] = 200.0, -200.0

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def batch(self) -> AttentionBatch:
        return AttentionBatch(
            query_start=torch.tensor(self.starts, dtype=torch.int32),
            context_tokens=torch.tensor(self.contexts, dtype=torch.int32),
            block_table=self.table,
        )

    def run(self, cache: Tensor | None = None, *, tokens: slice = slice(None)) -> Tensor:
        return self.attend(tokens, self.batch(), self.cache.clone() if cache is None else cache)

    def attend(self, tokens: slice, batch: AttentionBatch, cache: Tensor) -> Tensor:
        return append_and_attend_latent(
            self.query[tokens],
            self.latent[tokens],
            cache,
            batch,
            rank=self.rank,
            scale=self.scale,
            sinks_H=self.sinks,
        )

    def exact(self) -> Tensor:
        """The reference on the rounded cache, otherwise unrounded."""
        return append_and_attend_latent_reference(
            self.query.double(),
            self.latent.to(self.layout.dtype),
            self.cache.clone(),
            self.batch(),
            rank=self.rank,
            scale=self.scale,
            sinks_H=self.sinks,
        )


def assert_accurate(case: Case) -> None:
    got, want = case.run(), case.exact()
    assert got.shape == want.shape
    assert got.dtype == case.query.dtype
    # bfloat16 rounds its probabilities, too, on the instruction set that multiplies bfloat16.
    unit = {FP32: 4e-6, FP16: 2**-10, BF16: 2**-7}[case.query.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=unit, atol=unit)


@covering(dtypes=DTYPES, sequences=STEPS)
def test_equals_the_reference_for_every_shape_of_pass(
    sequences: list[tuple[int, int]], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case(sequences, (5, 48, 16), dtypes))


@covering(dtypes=DTYPES, heads=HEADS)
def test_equals_the_reference_for_every_shape_of_heads(
    heads: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case([(70, 1), (50, 18)], heads, dtypes))


@covering(dtypes=DTYPES, heads=HEADS)
def test_sinks_take_their_part_of_the_softmax(
    heads: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = Case([(70, 1), (50, 18), (1, 1), (1100, 1)], heads, dtypes)
    case.add_sinks()
    assert_accurate(case)


@pytest.mark.parametrize("sinks", [torch.zeros(4), torch.zeros(5).half()], ids=["few", "half"])
def test_sinks_of_another_shape_or_type_are_refused(sinks: Tensor) -> None:
    case = Case([(7, 1)], (5, 16, 8), (BF16, BF16))
    case.sinks = sinks
    with pytest.raises(ConfigError, match="sinks"):
        case.run()


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16)], ids=str)
def test_equals_the_reference_for_thousands_of_tokens(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    assert_accurate(Case([(3000, 1), (2100, 40)], (3, 16, 8), dtypes))


def test_equals_the_reference_at_the_width_of_deepseek() -> None:
    assert_accurate(Case([(150, 1), (33, 2)], (128, 512, 64), (BF16, BF16)))


def test_an_empty_pass_gives_nothing() -> None:
    for sequences in ([], [(7, 0), (0, 0)]):
        assert Case(sequences, (4, 16, 8), (BF16, BF16)).run().shape == (0, 4, 16)


@covering(dtypes=DTYPES, name=[*STEPS])
def test_rows_land_in_their_places_and_nowhere_else(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = Case(STEPS[name], (4, 40, 8), dtypes)
    attended, appended, wanted = (case.cache.clone() for _ in range(3))
    case.run(attended)
    append_latent(case.latent, appended, case.batch())
    append_latent_reference(case.latent, wanted, case.batch())
    assert torch.equal(attended.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(appended.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_what_a_previous_owner_left_in_a_block_does_not_matter(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = Case([(33, 1), (40, 40), (1, 1)], (4, 24, 8), dtypes)
    want = case.run()
    assert not want.isnan().any()
    for stale in (torch.inf, -torch.inf, 1e4):
        cache = torch.where(case.cache.isnan(), torch.tensor(stale, dtype=dtypes[1]), case.cache)
        assert torch.equal(case.run(cache), want)


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16)], ids=str)
def test_neither_the_batch_nor_the_threads_change_a_bit(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = Case([(2500, 1), (90, 1), (1100, 20), (64, 64), (33, 1)], (3, 24, 8), dtypes)
    num_threads = _native.num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            _native.set_num_threads(count)
            results.append(case.run())
    finally:
        _native.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for sequence, context in enumerate(case.contexts):
        begin, end = case.starts[sequence], case.starts[sequence + 1]
        alone = AttentionBatch(
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context_tokens=torch.tensor([context], dtype=torch.int32),
            block_table=case.table[sequence : sequence + 1],
        )
        got = case.attend(slice(begin, end), alone, case.cache.clone())
        assert torch.equal(got, results[0][begin:end])


@covering(dtypes=DTYPES, num_heads=[6, 40])
def test_one_token_at_a_time_gives_the_same_bits_as_chunks(
    num_heads: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = Case([(140, 140)], (num_heads, 40, 8), dtypes)
    want = case.run()
    for chunk in (1, 7, 64):
        cache = torch.full_like(case.cache, torch.nan)
        for begin in range(0, 140, chunk):
            end = min(begin + chunk, 140)
            part = AttentionBatch(
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                context_tokens=torch.tensor([end], dtype=torch.int32),
                block_table=case.table,
            )
            assert torch.equal(case.attend(slice(begin, end), part, cache), want[begin:end])


# A tile of 64 rows has the heads of one token or of several, up to 21 of them.
@covering(
    dtypes=DTYPES, name=[*SHARING], heads=[(16, 40, 8), (3, 24, 16), (20, 32, 8), (70, 16, 8)]
)
def test_who_shares_a_prefix_changes_no_bit(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], heads: tuple[int, int, int]
) -> None:
    sequences, shared = SHARING[name]
    case = Case(sequences, heads, dtypes)
    case.add_sinks()
    for sequence, other, count in shared:
        case.cache[case.table[sequence, :count]] = case.cache[case.table[other, :count]]
    want = case.run()
    for sequence, other, count in shared:
        case.table[sequence, :count] = case.table[other, :count]
    assert torch.equal(case.run(), want)
    assert_accurate(case)


def test_bfloat16_errs_at_most_twice_as_much_as_torch() -> None:
    case = Case([(700, 1), (650, 1)], (16, 512, 64), (BF16, BF16))
    exact, got = case.exact(), case.run().double()
    cache = case.cache.clone()
    append_latent(case.latent, cache, case.batch())
    plain = []
    for sequence, context in enumerate(case.contexts):
        blocks = case.table[sequence, : -(-context // BLOCK_TOKENS)].long()
        rows = cache[blocks].flatten(0, 1)[:context]
        scores = (case.query[sequence] @ rows.T).float() * case.scale
        plain.append(scores.softmax(-1).to(BF16) @ rows[:, :512])
    error, plain_error = got - exact, torch.stack(plain).double() - exact
    assert error.pow(2).mean().sqrt() <= 2 * plain_error.pow(2).mean().sqrt()
    assert error.abs().max() <= 2 * plain_error.abs().max()


def test_rows_any_distance_apart_are_taken() -> None:
    case = Case([(40, 3), (20, 1)], (4, 16, 8), (BF16, BF16))
    want = case.run()
    fused = torch.cat([case.query.flatten(1), case.latent], dim=1)
    case.query, case.latent = fused[:, :-24].unflatten(1, (4, 24)), fused[:, -24:]
    assert torch.equal(case.run(), want)


def test_a_query_of_nan_gives_nan_in_its_own_row_only() -> None:
    case = Case([(40, 1), (20, 1)], (4, 16, 8), (FP32, FP32))
    want = case.run()
    case.query[0, 1] = torch.nan
    got = case.run()
    assert got[0, 1].isnan().all()
    got[0, 1] = want[0, 1]
    assert torch.equal(got, want)


# What goes wrong in a good case, and what the error says.
BROKEN: list[tuple[Callable[[Case], object], str]] = [
    (lambda case: case.table[0, 1:].fill_(9), r"block_table\[0, 1\] is 9, the cache has 5 blocks"),
    (lambda case: setattr(case, "starts", [0, 3, 3]), "query_start runs from 0 to 3"),
    (lambda case: setattr(case, "contexts", [65, 20]), "sequence 0 has 65 context_tokens"),
    (
        lambda case: setattr(case, "cache", case.cache.half()),
        "latent has dtype bfloat16 and cache float16",
    ),
    (
        lambda case: setattr(case, "cache", case.cache[..., :-8].contiguous()),
        "cache has size 16 in dimension 2, expected 24",
    ),
    (
        lambda case: setattr(case, "query", case.query.float()),
        "query has dtype float32, expected bfloat16",
    ),
    (
        lambda case: setattr(case, "query", case.query[..., :16].contiguous()),
        "query has size 16 in dimension 2, expected 24",
    ),
    (lambda case: setattr(case, "rank", 12), "out has rank 12, expected a multiple of 8 up to 24"),
    (lambda case: setattr(case, "rank", 32), "out has rank 32, expected a multiple of 8 up to 24"),
    (lambda case: setattr(case, "scale", 0.0), "scale is 0.0"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_arguments_that_do_not_fit_are_refused_by_name(
    breaks: Callable[[Case], object], message: str
) -> None:
    case = Case([(40, 3), (20, 1)], (4, 16, 8), (BF16, BF16))
    breaks(case)
    with pytest.raises(ConfigError, match=message):
        case.run()


def test_sizes_that_are_no_multiples_of_8_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_dim of the latent is 12"):
        LatentLayout(rank=16, rope_dim=12, dtype=FP16)
    with pytest.raises(ConfigError, match="rank of the latent is 4"):
        LatentLayout(rank=4, rope_dim=8, dtype=FP16)
