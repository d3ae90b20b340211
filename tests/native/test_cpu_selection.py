"""Choice of positions and of blocks against the plain reference, on every instruction set."""

import itertools

import pytest
import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    append,
    append_and_attend_latent_reference,
    append_latent,
)
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.paged_kv import BLOCK_TOKENS, IndexedLayout, KvLayout, LatentLayout
from raymoe.kernels.selection import (
    Division,
    IndexRows,
    Pools,
    append_pooled_keys,
    attend_blocks,
    attend_chosen,
    attend_entries,
    choose_blocks,
    choose_blocks_reference,
    choose_positions,
    choose_positions_reference,
    chosen_of,
    positions_of,
)
from tests.kinds import covering
from tests.native.attention_cases import BF16, FP16, FP32

pytestmark = pytest.mark.usefixtures("isa")

SEQUENCES = [(70, 1), (33, 1), (120, 9), (40, 7), (300, 2)]
HEADS = [(1, 8), (2, 24), (3, 128), (64, 16)]
# Products of whole numbers this small are exact in every order.
WHOLE = 4


class Case:
    """Index rows of a step, and blocks in which the index keys of earlier tokens are."""

    def __init__(
        self,
        heads: tuple[int, int],
        dtypes: tuple[torch.dtype, torch.dtype] = (FP32, FP32),
        *,
        sequences: list[tuple[int, int]] = SEQUENCES,
        values: int | None = None,
    ) -> None:
        self.random, self.values = torch.Generator().manual_seed(3), values
        num_heads, dim = heads
        latent = LatentLayout(rank=16, rope_dim=8, dtype=dtypes[1])
        self.layout = IndexedLayout(attended=latent, index_dim=dim)
        counts = [-(-context // BLOCK_TOKENS) for context, _ in sequences]
        order = torch.randperm(sum(counts), generator=self.random).to(torch.int32)
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, blocks in zip(table, order.split(counts), strict=True):
            row[: len(blocks)] = blocks
        starts = [0, *itertools.accumulate(tokens for _, tokens in sequences)]
        self.batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_tokens=torch.tensor([context for context, _ in sequences], dtype=torch.int32),
            block_table=table,
        )
        self.cache = torch.full((len(order), *self.layout.block_shape), torch.nan).to(dtypes[1])
        for part, width in ((self.latents, latent.width), (self.keys, dim)):
            contexts = self.batch.context_tokens
            everything = AttentionBatch(
                query_start=torch.cat([contexts.new_zeros(1), contexts.cumsum(0).int()]),
                context_tokens=contexts,
                block_table=table,
            )
            append_latent(self.draw(int(contexts.sum()), width).to(dtypes[1]), part, everything)
        width = dim + num_heads * (dim + 1)
        self.rows = IndexRows.of(self.draw(starts[-1], width).to(dtypes[0]), num_heads, dim)
        self.query = self.draw(starts[-1], 5, latent.width).to(dtypes[0])

    @property
    def latents(self) -> Tensor:
        return self.layout.attended_blocks(self.cache)

    @property
    def keys(self) -> Tensor:
        return self.layout.index_keys(self.cache)

    def draw(self, *shape: int) -> Tensor:
        if self.values is None:
            return torch.randn(*shape, generator=self.random)
        return torch.randint(-self.values, self.values, shape, generator=self.random).float()


@covering(
    heads=HEADS, dtypes=[(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP16)], top_k=[5, 32]
)
def test_positions_are_those_of_the_reference(
    heads: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], top_k: int
) -> None:
    case = Case(heads, dtypes, values=WHOLE)
    chosen = choose_positions(case.rows, case.keys, case.batch, top_k)
    want = choose_positions_reference(case.rows, case.keys, case.batch, top_k)
    assert torch.equal(chosen, want)


def test_equal_scores_go_to_the_lower_position_and_nan_is_the_largest() -> None:
    scores = torch.tensor([0.0, 1.0, -0.0, torch.nan, 1.0, -1.0, torch.inf, 0.0])
    assert chosen_of(scores, 1).tolist() == [3]
    assert chosen_of(scores, 4).tolist() == [1, 3, 4, 6]
    assert chosen_of(scores, 5).tolist() == [0, 1, 3, 4, 6]
    assert chosen_of(scores, 6).tolist() == [0, 1, 2, 3, 4, 6]
    case = Case((2, 8), values=1)  # all keys are 0 or -1: most scores are equal
    for top_k in (1, 7, 31):
        chosen = choose_positions(case.rows, case.keys, case.batch, top_k)
        want = choose_positions_reference(case.rows, case.keys, case.batch, top_k)
        assert torch.equal(chosen, want)


def test_a_choice_depends_on_nothing_but_the_own_sequence() -> None:
    case = Case((3, 24))
    together = choose_positions(case.rows, case.keys, case.batch, 20)
    for token in range(len(together)):
        sequence = int((case.batch.query_start[1:] <= token).sum())
        behind = int(case.batch.query_start[sequence + 1]) - token - 1
        alone = AttentionBatch(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_tokens=case.batch.context_tokens[sequence, None] - behind,
            block_table=case.batch.block_table[sequence, None],
        )
        rows = case.rows.select(torch.tensor([token]))
        assert torch.equal(choose_positions(rows, case.keys, alone, 20)[0], together[token])


@covering(
    heads=HEADS,
    dtypes=[(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP16)],
    sizes=[(1, 32, 1), (2, 32, 2), (2, 32, 1), (1, 64, 1)],
)
def test_blocks_are_those_of_the_reference(
    heads: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int]
) -> None:
    case = Case(heads, dtypes, values=WHOLE)
    top_k, block_tokens, num_local = sizes
    options = {"top_k": top_k, "block_tokens": block_tokens, "num_local": num_local}
    chosen = choose_blocks(case.rows.query_TX, case.keys, case.batch, **options)
    want = choose_blocks_reference(case.rows.query_TX, case.keys, case.batch, **options)
    assert torch.equal(chosen, want)
    positions = positions_of(case.batch)
    if top_k > 1:  # the own block is always among them
        assert torch.equal(chosen[..., -1].max(1).values, (positions // block_tokens).int())


def test_blocks_of_other_sizes_are_refused() -> None:
    case = Case((2, 24))
    for sizes, message in (
        ((1, 48, 1), "blocks of 48 tokens, expected a multiple of 32"),
        ((1, 32, 0), "own block"),
        ((3, 32, 1), "cannot choose 3 blocks of 32"),
    ):
        top_k, block_tokens, num_local = sizes
        with pytest.raises(ConfigError, match=message):
            choose_blocks(
                case.rows.query_TX,
                case.keys,
                case.batch,
                top_k=top_k,
                block_tokens=block_tokens,
                num_local=num_local,
            )


@covering(dtypes=[(FP32, FP32), (BF16, BF16)], top_k=[5, 32, 33])
def test_attention_reads_the_chosen_rows_alone(
    dtypes: tuple[torch.dtype, torch.dtype], top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels import selection  # noqa: PLC0415

    case = Case((3, 24), dtypes)
    monkeypatch.setattr(selection, "GATHERED_BYTES", 1 << 14)
    chosen = choose_positions(case.rows, case.keys, case.batch, top_k)
    sinks_H = torch.linspace(-3, 3, case.query.shape[1])
    got = attend_chosen(
        case.query, case.latents, case.batch, chosen, rank=16, scale=0.3, sinks_H=sinks_H
    )
    sequences = torch.repeat_interleave(case.batch.num_new)
    for token, positions in enumerate(chosen.long()):
        table = case.batch.block_table[sequences[token]].long()
        rows = case.latents[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS]
        blocks = torch.zeros(2, BLOCK_TOKENS, rows.shape[1], dtype=dtypes[1])
        blocks.view(64, -1)[:top_k] = rows
        want = append_and_attend_latent_reference(
            case.query[token, None].double(),
            rows[-1, None],
            blocks,
            AttentionBatch(
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                context_tokens=torch.tensor([top_k], dtype=torch.int32),
                block_table=torch.tensor([[0, 1]], dtype=torch.int32),
            ),
            rank=16,
            scale=0.3,
            sinks_H=sinks_H,
        )
        unit = 4e-6 if dtypes[0] == FP32 else 2**-7
        torch.testing.assert_close(got[token, None].double(), want, rtol=unit, atol=unit)


def test_a_step_is_divided_at_the_position_from_which_tokens_choose() -> None:
    case = Case((1, 8))
    division = Division.of(case.batch, 36)
    # Positions 69; 32; 111 to 119; 33 to 39; 298 and 299.
    assert division.early_T.tolist() == [1, 11, 12, 13]
    assert division.early.context_tokens.tolist() == [33, 36]
    assert division.late_T.tolist() == [0, *range(2, 11), *range(14, 20)]
    assert division.late.context_tokens.tolist() == [70, 120, 40, 300]
    assert division.late.query_start.tolist() == [0, 1, 10, 14, 16]


@covering(heads=HEADS, entry_tokens=[2, 4, 32, 64], top_k=[1, 3, 9])
def test_entries_are_those_of_the_reference(
    heads: tuple[int, int], entry_tokens: int, top_k: int
) -> None:
    case = Case(heads, values=WHOLE)
    keys = case.keys[:, : max(1, BLOCK_TOKENS // entry_tokens)]
    arguments = (case.rows, keys, case.batch, top_k)
    chosen = choose_positions(*arguments, entry_tokens=entry_tokens)
    want = choose_positions_reference(*arguments, entry_tokens=entry_tokens)
    assert torch.equal(chosen, want)
    seen = (positions_of(case.batch) + 1) // entry_tokens
    assert torch.equal((chosen >= 0).sum(1), seen.clamp_max(top_k))


def test_a_token_that_sees_few_positions_chooses_all_of_them() -> None:
    case = Case((2, 24))
    chosen = choose_positions(case.rows, case.keys, case.batch, 36)
    for positions, last in zip(chosen.tolist(), positions_of(case.batch).tolist(), strict=True):
        seen = min(36, last + 1)
        assert len(set(positions[:seen])) == seen
        assert positions[seen:] == [-1] * (36 - seen)


@pytest.mark.parametrize("pool", [1, 4, 16])
def test_pooled_keys_do_not_depend_on_steps(pool: int) -> None:
    random = torch.Generator().manual_seed(1)
    key_TX = torch.randn(90, 16, generator=random)
    bias_PI = torch.randn(pool, 8, generator=random)
    layout = IndexedLayout(
        attended=LatentLayout(rank=16, rope_dim=8, dtype=FP32),
        index_dim=8,
        pool=pool,
        open_dim=16,
    )
    want = key_TX[: 90 // pool * pool].view(-1, pool, 2, 8)
    weights = (want[:, :, 1] + bias_PI).softmax(1)
    want_EI = (weights * want[:, :, 0]).sum(1)
    for steps in ([90], [1] * 90, [7, 30, 3, 50]):
        cache = torch.full((5, *layout.block_shape), torch.nan)
        table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
        end = 0
        for step in steps:
            begin, end = end, end + step
            batch = AttentionBatch(
                query_start=torch.tensor([0, step], dtype=torch.int32),
                context_tokens=torch.tensor([end], dtype=torch.int32),
                block_table=table,
            )
            append_pooled_keys(
                key_TX[begin:end],
                layout.index_keys(cache),
                layout.open_tokens(cache),
                pools=Pools.of(batch, pool),
                bias_PI=bias_PI,
            )
        got = layout.index_keys(cache)[table[0].long()].flatten(0, 1)[: len(want_EI)]
        torch.testing.assert_close(got, want_EI, rtol=1e-6, atol=1e-6)
        assert layout.attended_blocks(cache).isnan().all()


@pytest.mark.parametrize("top_k", [1, 2])
def test_attention_reads_the_chosen_blocks_alone(top_k: int) -> None:
    random = torch.Generator().manual_seed(2)
    case = Case((2, 8))
    layout = KvLayout(num_kv_heads=2, head_dim=16, dtype=FP32)
    whole = AttentionBatch(
        query_start=torch.cat([torch.zeros(1).int(), case.batch.context_tokens.cumsum(0).int()]),
        context_tokens=case.batch.context_tokens,
        block_table=case.batch.block_table,
    )
    num_cached = int(case.batch.context_tokens.sum())
    key_CGD, value_CGD = (torch.randn(num_cached, 2, 16, generator=random) for _ in range(2))
    both = IndexedLayout(attended=layout, index_dim=8)  # its blocks are strided
    cache = both.attended_blocks(torch.full((len(case.cache), *both.block_shape), torch.nan))
    append(key_CGD, value_CGD, cache, whole)
    batch = case.batch
    chosen_TGK = choose_blocks(
        case.rows.query_TX, case.keys, batch, top_k=top_k, block_tokens=32, num_local=1
    )
    positions = positions_of(batch)
    sequences = torch.repeat_interleave(batch.num_new)
    rows_T = whole.query_start[sequences].long() + positions
    query_THD = torch.randn(len(rows_T), 6, 16, generator=random)
    before = cache.clone()
    projected = Projected(query_THD, key_CGD[rows_T], value_CGD[rows_T])
    got = attend_blocks(projected, cache, batch, chosen_TGK, block_tokens=32, scale=0.3)
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    for token, row in enumerate(rows_T.tolist()):
        first = row - int(positions[token])
        for head in range(6):
            blocks = chosen_TGK[token, head // 3].tolist()
            seen = [c for c in range(int(positions[token]) + 1) if c // 32 in blocks]
            keys, values = (x[first:][seen, head // 3] for x in (key_CGD, value_CGD))
            want = (0.3 * keys @ query_THD[token, head]).softmax(0) @ values
            torch.testing.assert_close(got[token].view(6, 16)[head], want, rtol=2e-5, atol=2e-5)


@covering(dtype=[FP32, FP16, BF16], entry_tokens=[2, 4, 32], top_k=[1, 2, 8])
def test_attention_reads_the_chosen_entries_and_the_open_one(
    dtype: torch.dtype, entry_tokens: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels import selection  # noqa: PLC0415

    monkeypatch.setattr(selection, "GATHERED_BYTES", 1 << 15)  # some tokens at a time
    sequences = [
        (context, new)
        for context, new in SEQUENCES
        if context - new >= (top_k + 1) * entry_tokens - 1
    ]
    case = Case((2, 8), sequences=sequences)
    batch, tokens = case.batch, entry_tokens
    contexts = batch.context_tokens
    whole = AttentionBatch(
        query_start=torch.cat([contexts.new_zeros(1), contexts.cumsum(0).int()]),
        context_tokens=contexts,
        block_table=batch.block_table,
    )
    key_CGD, value_CGV = (
        torch.randn(int(contexts.sum()), 2, width, generator=case.random).to(dtype)
        for width in (16, 72)  # values in two tiles
    )
    layout = IndexedLayout(
        attended=KvLayout(num_kv_heads=2, head_dim=16, dtype=dtype, value_head_dim=72), index_dim=8
    )
    memory = torch.full((len(case.cache), *layout.block_shape), torch.nan).to(dtype)
    cache = layout.attended_blocks(memory)
    append(key_CGD, value_CGV, cache, whole)
    chosen_TK = choose_positions(
        case.rows, case.keys[:, : BLOCK_TOKENS // tokens], batch, top_k, entry_tokens=tokens
    )
    positions = positions_of(batch)
    rows_T = whole.query_start[torch.repeat_interleave(batch.num_new)].long() + positions
    query_THD = torch.randn(len(rows_T), 6, 16, generator=case.random).to(dtype)
    before = memory.clone()
    got = attend_entries(
        Projected(query_THD, key_CGD[rows_T], value_CGV[rows_T]),
        cache,
        batch,
        chosen_TK,
        entry_tokens=tokens,
        scale=0.3,
    )
    assert torch.equal(memory.nan_to_num(), before.nan_to_num())
    unit = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}[dtype]
    for token, row in enumerate(rows_T.tolist()):
        last = int(positions[token])
        chosen = {*chosen_TK[token].tolist(), (last + 1) // tokens}
        seen = [c for c in range(last + 1) if c // tokens in chosen]
        assert len(seen) == top_k * tokens + (last + 1) % tokens
        for head in range(6):
            keys, values = (x[row - last :][seen, head // 3].float() for x in (key_CGD, value_CGV))
            want = (0.3 * keys @ query_THD[token, head].float()).softmax(0) @ values
            found = got[token].view(6, 72)[head].float()
            torch.testing.assert_close(found, want, rtol=unit, atol=unit)


def test_what_does_not_fit_is_refused() -> None:
    case = Case((2, 24))
    with pytest.raises(ConfigError, match="entries of 3 tokens"):
        choose_positions(case.rows, case.keys, case.batch, 5, entry_tokens=3)
    wide = IndexRows(case.rows.key_TI, case.rows.query_TX[:, :25], case.rows.weight_TJ)
    with pytest.raises(ConfigError, match="query has width 25"):
        choose_positions(wide, case.keys, case.batch, 5)
    with pytest.raises(ConfigError, match="keys has size 16 in dimension 1"):
        choose_positions(case.rows, case.keys[:, :16], case.batch, 5)
    one = IndexRows(case.rows.key_TI, case.rows.query_TX, case.rows.weight_TJ[:, :1])
    with pytest.raises(ConfigError, match="weights has size 1"):
        choose_positions(one, case.keys, case.batch, 5)
