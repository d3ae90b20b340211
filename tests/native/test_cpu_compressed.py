"""Attention to last rows and entries against a plain masked reference, on every instruction set."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.compressed import (
    CompressedBatch,
    CompressedScoring,
    Pooling,
    append_and_attend_compressed,
)
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_compressed import append_and_attend_rows, pool_entries
from raymoe.kernels.paged_kv import BLOCK_TOKENS, CompressedLayout
from tests.kinds import covering
from tests.native.attention_cases import BF16, DTYPES, FP16, FP32, STEPS

pytestmark = pytest.mark.usefixtures("isa")

Sequences = Sequence[tuple[int, int]]  # contexts after the step, and new tokens
RATIOS = {"rows alone": None, "ratio 4": 4, "ratio 32": 32, "ratio 128": 128}
SMALL = (3, 16, 24)  # heads, width, window
SIZES = [(1, 8, 1), SMALL, (5, 48, 40), (33, 24, 128), (70, 64, 16), (130, 16, 8)]


class Case:
    """Random tensors of one step; memory that holds no row or entry that may be seen is NaN."""

    def __init__(
        self,
        sequences: Sequences,
        ratio: int | None,
        size: tuple[int, int, int] = SMALL,
        dtypes: tuple[torch.dtype, torch.dtype] = (FP32, FP32),
        *,
        num_chosen: int | None = None,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.sequences, (self.num_heads, self.width, window) = sequences, size
        self.layout = CompressedLayout(
            width=self.width,
            window=window,
            ratio=ratio,
            num_sums=0 if ratio is None else 1,
            dtype=dtypes[1],
        )
        self.contexts = [context for context, _ in sequences]
        self.starts = [0, *itertools.accumulate(tokens for _, tokens in sequences)]
        self.query = self._randn(self.starts[-1], self.num_heads, self.width).to(dtypes[0])
        self.rows = [self._randn(context, self.width).to(dtypes[0]) for context in self.contexts]
        self.entries = [
            self._randn(context // ratio if ratio else 0, self.width).to(dtypes[1])
            for context in self.contexts
        ]
        angles = self._randn(max([1, *self.contexts]), self.width // 8)
        self.tables = (angles.cos(), angles.sin())
        self.scoring = CompressedScoring(
            scale=2 * self.width**-0.5, sinks_H=self._randn(self.num_heads), pooling=None
        )
        self.scoring.sinks_H[0] = 30.0
        self.table, self.slots = self._places()
        self.cache = self._filled()
        self.chosen = None if num_chosen is None else self._choose(num_chosen)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _places(self) -> tuple[Tensor, Tensor]:
        count = len(self.sequences)
        num_blocks = [-(-context // BLOCK_TOKENS) for context in self.contexts]
        order = torch.randperm(sum(num_blocks) + 2, generator=self.random).int()
        table = torch.full((count, max(num_blocks, default=0)), -1, dtype=torch.int32)
        for sequence, blocks in enumerate(order[2:].split(num_blocks)):
            table[sequence, : len(blocks)] = blocks
        return table, torch.randperm(count + 2, generator=self.random)[:count].int()

    def _filled(self) -> Tensor:
        num_blocks = self.table.numel() + 2
        num_bytes = num_blocks * self.layout.block_bytes
        num_bytes += (len(self.sequences) + 2) * self.layout.sequence_bytes
        cache = torch.full([num_bytes], 0xFF, dtype=torch.uint8)
        entries_NEW, rows_MRW, _ = self.layout.views(cache)
        for sequence, (context, tokens) in enumerate(self.sequences):
            for w, entry_W in enumerate(self.entries[sequence]):
                last = (w + 1) * self.layout.ratio - 1
                block = self.table[sequence, last // BLOCK_TOKENS]
                entries_NEW[block, last % BLOCK_TOKENS // self.layout.ratio] = entry_W
            first = context - tokens
            for position in range(max(0, first - self.layout.window), first):
                row_W = self.rows[sequence][position]
                rows_MRW[-1 - self.slots[sequence], position % self.layout.window] = row_W
        return cache

    def _choose(self, num_chosen: int) -> Tensor:
        """Ascending random entries of those that each token sees, of the last ones none."""
        chosen = torch.full((self.starts[-1], num_chosen), -1, dtype=torch.int32)
        for token, (_, position) in enumerate(self.tokens()):
            visible = (position + 1) // (self.layout.ratio or 1)
            count = min(num_chosen - token % 2, visible)
            some = torch.randperm(visible, generator=self.random)[:count]
            chosen[token, :count] = some.sort().values
        return chosen

    def tokens(self) -> Iterator[tuple[int, int]]:
        for sequence, (context, tokens) in enumerate(self.sequences):
            for position in range(context - tokens, context):
                yield sequence, position

    def batch(self) -> AttentionBatch:
        return AttentionBatch(
            query_start=torch.tensor(self.starts, dtype=torch.int32),
            context_tokens=torch.tensor(self.contexts, dtype=torch.int32),
            block_table=self.table,
            slots=self.slots,
        )

    def new_rows(self) -> Tensor:
        rows = [
            rows_CW[context - tokens :]
            for rows_CW, (context, tokens) in zip(self.rows, self.sequences, strict=True)
        ]
        return torch.cat(rows) if rows else self._randn(0, self.width)

    def run(self, cache: Tensor | None = None) -> Tensor:
        return self.attend(
            slice(None), self.batch(), self.cache.clone() if cache is None else cache
        )

    def attend(self, tokens: slice, batch: AttentionBatch, cache: Tensor) -> Tensor:
        return append_and_attend_rows(
            self.query[tokens],
            self.new_rows()[tokens],
            cache,
            batch,
            layout=self.layout,
            tables=self.tables,
            scoring=self.scoring,
            chosen_TK=None if self.chosen is None else self.chosen[tokens],
        )

    def exact(self) -> Tensor:
        """All rows and entries of a sequence, masked, in float64."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        ratio, window = self.layout.ratio or 1, self.layout.window
        for token, (sequence, position) in enumerate(self.tokens()):
            rows_CW = self.rows[sequence].to(self.layout.dtype).double()
            entries_EW = self.entries[sequence].double()
            back_C = position - torch.arange(len(rows_CW))
            is_seen_E = torch.arange(len(entries_EW)) < (position + 1) // ratio
            if self.chosen is not None:
                is_seen_E &= torch.isin(torch.arange(len(entries_EW)), self.chosen[token])
            is_seen_Y = torch.cat([(back_C >= 0) & (back_C < window), is_seen_E])
            seen_YW = torch.cat([rows_CW, entries_EW])
            scores_HY = self.scoring.scale * self.query[token].double() @ seen_YW.T
            scores_HY = scores_HY.masked_fill(~is_seen_Y, -torch.inf)
            scores_HZ = torch.cat([scores_HY, self.scoring.sinks_H[:, None].double()], dim=1)
            result_HW = scores_HZ.softmax(1)[:, :-1] @ seen_YW
            out[token] = self._rotated_back(result_HW, position)
        return out

    def _rotated_back(self, rows_HW: Tensor, position: int) -> Tensor:
        turn = torch.complex(*(table[position].double() for table in self.tables)).conj()
        begin = self.width - 2 * len(turn)
        pairs = torch.view_as_complex(rows_HW[:, begin:].unflatten(1, (-1, 2)).contiguous())
        return torch.cat([rows_HW[:, :begin], torch.view_as_real(pairs * turn).flatten(1)], dim=1)


def assert_accurate(case: Case) -> None:
    got, want = case.run(), case.exact()
    assert got.dtype == case.query.dtype
    # bfloat16 rounds its probabilities, too, on the instruction set that multiplies bfloat16.
    unit = {FP32: 4e-6, FP16: 2**-10, BF16: 2**-7}[case.query.dtype]
    torch.testing.assert_close(got.double(), want, rtol=unit, atol=unit)


@covering(dtypes=DTYPES, ratio=RATIOS, sequences=STEPS)
def test_equals_the_reference_for_every_shape_of_step(
    sequences: Sequences, ratio: int | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case(sequences, ratio, dtypes=dtypes))


@covering(size=SIZES, dtypes=DTYPES)
def test_equals_the_reference_for_every_size(
    size: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case([(140, 1), (50, 18)], 4, size, dtypes))


EDGES = {
    "of one window": [(context, 1) for context in range(123, 136)],
    "of two windows": [(context, 1) for context in range(250, 263)],
    "across one window": [(135, 12)],
    "across two windows": [(262, 12)],
    "of sixteen windows": [(context, 1) for context in range(2039, 2052)],
    "across sixteen windows": [(2051, 12)],
}


@covering(dtypes=[(FP32, FP32), (BF16, BF16)], ratio={"4": 4, "128": 128}, sequences=EDGES)
def test_equals_the_reference_at_the_edges_of_windows(
    sequences: Sequences, ratio: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(Case(sequences, ratio, (2, 16, 128), dtypes))


@covering(num_chosen=[1, 7, 40], ratio={"4": 4, "32": 32}, dtypes=[(FP32, FP32), (BF16, BF16)])
def test_equals_the_reference_for_chosen_entries(
    num_chosen: int, ratio: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_accurate(
        Case([(200, 9), (130, 1), (3, 3), (97, 97)], ratio, dtypes=dtypes, num_chosen=num_chosen)
    )


def test_a_list_of_all_entries_gives_the_same_bits_as_none() -> None:
    case = Case([(200, 9), (3, 3)], 4)
    want = case.run()
    case.chosen = case._choose(51)
    for token, (_, position) in enumerate(case.tokens()):
        visible = (position + 1) // 4
        case.chosen[token, :visible] = torch.arange(visible)
    assert torch.equal(case.run(), want)


def test_torch_takes_the_same_lists() -> None:
    case = Case([(200, 9), (130, 1), (3, 3), (97, 97)], 4, num_chosen=7)
    got = append_and_attend_compressed(
        case.query,
        case.new_rows(),
        case.query.new_empty(len(case.query), 0),
        case.cache.clone(),
        CompressedBatch.of(case.batch(), case.layout, case.num_heads),
        layout=case.layout,
        tables=case.tables,
        scoring=case.scoring,
        chosen_TK=case.chosen,
    )
    torch.testing.assert_close(got.double(), case.exact(), rtol=1e-5, atol=1e-5)


def test_equals_the_reference_at_the_width_of_deepseek() -> None:
    assert_accurate(Case([(150, 1), (33, 2)], 4, (64, 512, 128), (BF16, BF16)))


def test_an_empty_step_gives_nothing() -> None:
    for sequences in ([], [(7, 0), (0, 0)]):
        assert Case(sequences, 4).run().shape == (0, 3, 16)


@covering(sequences=STEPS, ratio=RATIOS)
def test_the_last_rows_are_kept_and_nothing_else_changes(
    sequences: Sequences, ratio: int | None
) -> None:
    case = Case(sequences, ratio)
    got, want = case.cache.clone(), case.cache.clone()
    case.run(got)
    _, rows_MRW, _ = case.layout.views(want)
    for sequence, position in case.tokens():
        row_W = case.rows[sequence][position]
        rows_MRW[-1 - case.slots[sequence], position % case.layout.window] = row_W
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16)], ids=str)
def test_neither_the_batch_nor_the_threads_change_a_bit(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    sequences = [(700, 1), (90, 1), (300, 5), (4, 4), (33, 1)]
    case = Case(sequences, 4, (70, 24, 40), dtypes, num_chosen=100)
    num_threads = _native.num_threads()
    try:
        results = []
        for count in (1, 2, 8):  # with 8 threads a tile has fewer heads
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
            slots=case.slots[sequence : sequence + 1],
        )
        got = case.attend(slice(begin, end), alone, case.cache.clone())
        assert torch.equal(got, results[0][begin:end])


@covering(dtypes=DTYPES, num_heads=[6, 40])
def test_one_token_at_a_time_gives_the_same_bits_as_chunks(
    num_heads: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = Case([(140, 140)], 4, (num_heads, 40, 24), dtypes)
    want = case.run()
    for chunk in (1, 7, 64):
        cache = case.cache.clone()
        for begin in range(0, 140, chunk):
            end = min(begin + chunk, 140)
            part = AttentionBatch(
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                context_tokens=torch.tensor([end], dtype=torch.int32),
                block_table=case.table,
                slots=case.slots,
            )
            assert torch.equal(case.attend(slice(begin, end), part, cache), want[begin:end])


class Pool:
    """Values of tokens to be pooled, in one step or several."""

    def __init__(self, num_sums: int, ratio: int, dtype: torch.dtype = FP32) -> None:
        random = torch.Generator().manual_seed(1)
        self.contexts, width = [101, 77, 3], 144  # of which a task takes 128 channels
        self.layout = CompressedLayout(
            width=width, window=1, ratio=ratio, num_sums=num_sums, dtype=dtype
        )
        channels = num_sums * width
        self.pooled = [
            3 * torch.randn(context, 2 * channels, generator=random) for context in self.contexts
        ]
        self.pooling = Pooling(
            bias_MX=torch.randn(ratio, channels, generator=random),
            norm_W=torch.randn(width, generator=random),
            eps=1e-6,
        )
        angles = torch.randn(128, 8, generator=random)
        self.tables = (angles.cos(), angles.sin())

    def run(self, chunk: int) -> Tensor:
        """The cache after all tokens."""
        num_bytes = 15 * self.layout.block_bytes + 3 * self.layout.sequence_bytes
        cache = torch.full([num_bytes], 0xFF, dtype=torch.uint8)
        for begin in range(0, max(self.contexts), chunk):
            ends = [min(begin + chunk, context) for context in self.contexts]
            ranges = [slice(min(begin, end), end) for end in ends]
            counts = [each.stop - each.start for each in ranges]
            batch = AttentionBatch(
                query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
                context_tokens=torch.tensor(ends, dtype=torch.int32),
                block_table=torch.arange(15, dtype=torch.int32).flip(0).view(3, 5)[:, :4],
                slots=torch.tensor([2, 0, 1], dtype=torch.int32),
            )
            parts = [values[each] for values, each in zip(self.pooled, ranges, strict=True)]
            entries_NEW, _, sums_MA3W = self.layout.views(cache)
            pool_entries(
                torch.cat(parts),
                (entries_NEW, sums_MA3W),
                batch,
                ratio=self.layout.ratio,
                tables=self.tables,
                pooling=self.pooling,
            )
        return cache


@covering(num_sums=[1, 2], ratio=[4, 32, 64])
def test_entries_and_sums_have_the_same_bits_however_a_window_was_cut(
    num_sums: int, ratio: int
) -> None:
    pool = Pool(num_sums, ratio)
    whole = pool.run(500)
    for chunk, threads in ((1, 1), (5, 3)):
        num_threads = _native.num_threads()
        try:
            _native.set_num_threads(threads)
            assert torch.equal(pool.run(chunk), whole)
        finally:
            _native.set_num_threads(num_threads)


def test_entries_have_the_same_bits_on_every_instruction_set(isa: str) -> None:
    pool = Pool(2, 4, BF16)
    got = pool.run(7)
    _native.set_isa("scalar")
    assert torch.equal(got, pool.run(7))


# What goes wrong in a good case, and what the error says.
BROKEN: list[tuple[Callable[[Case], object], str]] = [
    (lambda case: case.table[0, 1:].fill_(99), r"block_table\[0, 1\] is 99, the cache has"),
    (lambda case: setattr(case, "starts", [0, 3, 3]), "query_start runs from 0 to 3"),
    (lambda case: setattr(case, "contexts", [201, 20]), "sequence 0 has 50 entries, block_table"),
    (lambda case: case.slots.fill_(1), r"slots\[1\] is 1, as of a sequence before"),
    (lambda case: case.slots.fill_(-1), r"slots\[0\] is -1, there are"),
    (lambda case: setattr(case, "query", case.query.half()), "query has dtype float16 and rows"),
    (
        lambda case: setattr(case, "query", case.query[..., :8].contiguous()),
        "query has size 8 in dimension 2, expected 16",
    ),
    (
        lambda case: setattr(case, "tables", tuple(table[:30] for table in case.tables)),
        "tables have 30 positions, a sequence has 40",
    ),
    (lambda case: case.chosen[0].fill_(9), r"chosen\[0, 0\] is 9, expected .* entries below 9"),
    (lambda case: case.chosen[0].fill_(3), r"chosen\[0, 1\] is 3, expected ascending"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_arguments_that_do_not_fit_are_refused_by_name(
    breaks: Callable[[Case], object], message: str
) -> None:
    case = Case([(40, 3), (20, 1)], 4, dtypes=(BF16, BF16), num_chosen=4)
    breaks(case)
    with pytest.raises(ConfigError, match=message):
        case.run()
