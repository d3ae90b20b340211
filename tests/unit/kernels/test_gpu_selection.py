"""Our kernels that choose positions on a GPU: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch, append, append_and_attend
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gpu_attention_batch import (
    BlockChoosingBatch,
    ChoosingBatch,
    ChoosingTokens,
    PooledBatch,
)
from raymoe.kernels.latent_heads import PlainLatentHeads
from raymoe.kernels.paged_kv import (
    ALL_TOKENS,
    BLOCK_TOKENS,
    IndexedLayout,
    KvLayout,
)
from raymoe.kernels.selection import (
    IndexRows,
    attend_blocks,
    attend_entries,
    choose_blocks_reference,
    choose_positions_reference,
)
from raymoe.kernels.tensors import to_device
from raymoe.specs.attention.grouped import BlockIndexerSpec, PooledIndexerSpec
from tests.kinds import covering
from tests.native.attention_cases import BF16, FP16, FP32
from tests.native.test_cpu_selection import WHOLE, Case
from tests.triton_mode import DEVICES
from tests.unit.kernels.test_gpu_attention import compute_of

pytest.importorskip("triton")

SEQUENCES = [(70, 1), (12, 1), (97, 9), (40, 7)]
TOP_K = 20
UNITS = {FP32: 2e-5, FP16: 2**-8, BF16: 3e-2}


def choosing(case: Case, device: str, *, min_plain_tokens: int = ALL_TOKENS) -> ChoosingBatch:
    batch = ChoosingBatch.of(
        case.batch,
        case.layout,
        compute_of(case.query.dtype, device),
        min_plain_tokens=min_plain_tokens,
        top_k=TOP_K,
    )
    return to_device(batch, torch.device(device))


def chosen_by(case: Case, device: str) -> Tensor:
    from raymoe.kernels.gpu_selection import choose_positions_ragged  # noqa: PLC0415

    rows = IndexRows(case.rows.key_TI, *(
        part.to(device) for part in (case.rows.query_TX, case.rows.weight_TJ)
    ))  # fmt: skip
    keys = case.layout.index_keys(case.cache.to(device))
    return choose_positions_ragged(rows, keys, choosing(case, device), TOP_K)


def wanted_of(case: Case) -> Tensor:
    """What the tokens choose that see more than they choose."""
    batch = ChoosingBatch.of(
        case.batch, case.layout, compute_of(FP32, "cpu"), min_plain_tokens=ALL_TOKENS, top_k=TOP_K
    )
    rows, late = case.rows.select(batch.late_T), case.batch.cut(*late_ranges(case))[1]
    return choose_positions_reference(rows, case.keys, late, TOP_K)


def late_ranges(case: Case) -> tuple[Tensor, Tensor]:
    num_new = case.batch.num_new
    first = case.batch.context_tokens.long() - num_new
    return (TOP_K - first).clamp_min(0).minimum(num_new), num_new


@pytest.mark.parametrize("device", DEVICES)
@covering(
    heads=[(1, 8), (3, 24), (64, 128)],
    dtypes=[(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP16)],
)
def test_positions_are_those_of_the_reference(
    heads: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    case = Case(heads, dtypes, sequences=SEQUENCES, values=WHOLE)
    assert torch.equal(chosen_by(case, device).cpu(), wanted_of(case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry_tokens", [4, 64])
def test_entries_are_those_of_the_reference(entry_tokens: int, device: str) -> None:
    from raymoe.kernels.gpu_selection import choose_positions_ragged  # noqa: PLC0415

    case = Case((3, 24), sequences=SEQUENCES, values=WHOLE)
    keys = case.keys[:, : max(1, BLOCK_TOKENS // entry_tokens)]
    tokens = ChoosingTokens.of(case.batch, compute_of(FP32, device), entry_tokens=entry_tokens)
    tokens = to_device(tokens, torch.device(device))
    rows = to_device(case.rows, torch.device(device))
    chosen = choose_positions_ragged(rows, keys.to(device), tokens, 5)
    want = choose_positions_reference(case.rows, keys, case.batch, 5, entry_tokens=entry_tokens)
    assert torch.equal(chosen.cpu(), want)


@pytest.mark.parametrize("device", DEVICES)
@covering(dtypes=[(FP32, FP32), (FP32, BF16), (BF16, BF16)], sizes=[(1, 32, 1), (1, 64, 1)])
def test_blocks_and_attention_to_them_are_those_of_the_host(
    dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int], device: str
) -> None:
    from raymoe.kernels.gpu_selection import (  # noqa: PLC0415
        append_and_attend_blocks_ragged,
        choose_blocks_ragged,
    )

    top_k, block_tokens, num_local = sizes
    case = Case((2, 24), dtypes, sequences=SEQUENCES, values=WHOLE)
    indexer = BlockIndexerSpec(
        num_heads=2, head_dim=24, block_tokens=block_tokens, top_k=top_k, num_local=num_local
    )
    batch = BlockChoosingBatch.of(case.batch, compute_of(dtypes[0], device), indexer)
    batch = to_device(batch, torch.device(device))
    chosen = choose_blocks_ragged(case.rows.query_TX.to(device), case.keys.to(device), batch)
    late_T = batch.late_T.cpu()
    num_new = case.batch.num_new
    first = case.batch.context_tokens.long() - num_new
    begins = (indexer.num_seen - first).clamp_min(0).minimum(num_new)
    late = case.batch.cut(begins, num_new)[1]
    options = {"top_k": top_k, "block_tokens": block_tokens, "num_local": num_local}
    want = choose_blocks_reference(case.rows.query_TX[late_T], case.keys, late, **options)
    assert torch.equal(chosen.cpu(), want)

    cache, projected = blocks_of(case, dtypes[1]), projected_of(case, dtypes[0])
    copy = cache.to(device, copy=True)
    layout = IndexedLayout(
        attended=KvLayout(num_kv_heads=2, head_dim=16, dtype=dtypes[1]), index_dim=8
    )
    got = append_and_attend_blocks_ragged(
        to_device(projected, torch.device(device)),
        layout.attended_blocks(copy),
        batch,
        chosen,
        scale=0.3,
    ).cpu()
    blocks = layout.attended_blocks(cache)
    everything = append_and_attend(*projected, blocks, case.batch, scale=0.3)
    unit = UNITS[dtypes[0]]
    early_T = batch.early_T.cpu()
    close = {"rtol": 10 * unit, "atol": 10 * unit}
    torch.testing.assert_close(got[early_T], everything[early_T], **close)
    picked = Projected(*(each[late_T] for each in projected))
    exact = attend_blocks(picked, blocks, late, want, block_tokens=block_tokens, scale=0.3)
    torch.testing.assert_close(got[late_T], exact, **close)


@pytest.mark.parametrize("device", DEVICES)
@covering(dtypes=[(FP32, FP32), (FP32, BF16), (BF16, BF16)], entry_tokens=[2, 4, 16])
def test_attention_to_entries_is_that_of_the_host(
    dtypes: tuple[torch.dtype, torch.dtype], entry_tokens: int, device: str
) -> None:
    from raymoe.kernels.gpu_selection import (  # noqa: PLC0415
        append_and_attend_entries_ragged,
        choose_positions_ragged,
    )

    indexer = PooledIndexerSpec(num_heads=3, head_dim=24, block_tokens=entry_tokens, top_k=2)
    case = Case((3, 24), dtypes, sequences=SEQUENCES, values=WHOLE)
    pooled = PooledBatch.of(case.batch, compute_of(dtypes[0], device), indexer)
    pooled = to_device(pooled, torch.device(device))
    late = pooled.late
    assert late is not None
    rows = to_device(case.rows, torch.device(device))
    keys = case.keys[:, : BLOCK_TOKENS // entry_tokens]
    chosen = choose_positions_ragged(rows, keys.to(device), late.choosing, 2)
    late_T, num_new = late.choosing.late_T.cpu(), case.batch.num_new
    first = case.batch.context_tokens.long() - num_new
    begins = (indexer.num_seen - first).clamp_min(0).minimum(num_new)
    batch = case.batch.cut(begins, num_new)[1]
    want = choose_positions_reference(
        case.rows.select(late_T), keys, batch, 2, entry_tokens=entry_tokens
    )
    assert torch.equal(chosen.cpu(), want)

    cache, projected = blocks_of(case, dtypes[1]), projected_of(case, dtypes[0])
    copy = cache.to(device, copy=True)
    layout = IndexedLayout(
        attended=KvLayout(num_kv_heads=2, head_dim=16, dtype=dtypes[1]), index_dim=8
    )
    got = append_and_attend_entries_ragged(
        to_device(projected, torch.device(device)),
        layout.attended_blocks(copy),
        pooled.everything,
        late,
        chosen,
        0.3,
    ).cpu()
    blocks = layout.attended_blocks(cache)
    everything = append_and_attend(*projected, blocks, case.batch, scale=0.3)
    unit = UNITS[dtypes[0]]
    close = {"rtol": 10 * unit, "atol": 10 * unit}
    early_T = late.early_T.cpu()
    torch.testing.assert_close(got[early_T], everything[early_T], **close)
    picked = Projected(*(each[late_T] for each in projected))
    exact = attend_entries(picked, blocks, batch, want, entry_tokens=entry_tokens, scale=0.3)
    torch.testing.assert_close(got[late_T], exact, **close)
    assert len(early_T) + len(late_T) == len(got)


def projected_of(case: Case, dtype: torch.dtype) -> Projected:
    num_tokens = len(case.query)
    return Projected(
        torch.randn(num_tokens, 6, 16, generator=case.random).to(dtype),
        *(torch.randn(num_tokens, 2, 16, generator=case.random).to(dtype) for _ in range(2)),
    )


def blocks_of(case: Case, dtype: torch.dtype) -> Tensor:
    """Random keys and values of all tokens, in blocks that index keys follow."""
    contexts = case.batch.context_tokens
    whole = AttentionBatch(
        query_start=torch.cat([contexts.new_zeros(1), contexts.cumsum(0).int()]),
        context_tokens=contexts,
        block_table=case.batch.block_table,
    )
    layout = IndexedLayout(attended=KvLayout(num_kv_heads=2, head_dim=16, dtype=dtype), index_dim=8)
    cache = torch.zeros(len(case.cache), *layout.block_shape, dtype=dtype)
    shape = (int(contexts.sum()), 2, 16)
    key, value = (torch.randn(*shape, generator=case.random).to(dtype) for _ in range(2))
    append(key, value, layout.attended_blocks(cache), whole)
    return cache


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_at_once_is_chosen_in_pieces(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels import gpu_selection  # noqa: PLC0415

    case = Case((3, 24), sequences=SEQUENCES, values=WHOLE)
    monkeypatch.setattr(gpu_selection, "GATHERED_BYTES", 1)
    assert torch.equal(chosen_by(case, device).cpu(), wanted_of(case))


@pytest.mark.parametrize("device", DEVICES)
@covering(
    dtypes=[(FP32, FP32), (FP32, BF16), (BF16, BF16)],
    minimum=[1, ALL_TOKENS],
    is_shared=[False, True],
)
def test_attention_reads_chosen_rows_or_all_that_are_seen(
    dtypes: tuple[torch.dtype, torch.dtype],
    minimum: int,
    is_shared: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raymoe.kernels import gpu_selection  # noqa: PLC0415
    from raymoe.kernels.gpu_attention import Scoring  # noqa: PLC0415
    from raymoe.kernels.gpu_selection import append_and_attend_chosen_ragged  # noqa: PLC0415

    if is_shared:  # and in pieces
        monkeypatch.setattr(gpu_selection, "ABSORBED_BYTES", 5000)
    case = Case((3, 24), dtypes, sequences=SEQUENCES, values=WHOLE)
    weight = torch.randn(5, 6 + 10, 16, generator=case.random)
    heads = PlainLatentHeads(weight.to(dtypes[0]), nope_dim=6, rope_dim=8)
    query = torch.randn(len(case.query), 5, 14, generator=case.random).to(dtypes[0])
    sequences, positions = places(case)
    blocks = case.batch.block_table.long()[sequences, positions // BLOCK_TOKENS]
    latent = case.latents[blocks, positions % BLOCK_TOKENS].to(dtypes[0])
    late_T, chosen = choosing(case, "cpu").late_T, wanted_of(case)
    sinks_H = torch.linspace(-3, 3, 5)
    # A layer that shares a choice has blocks without index keys.
    latents = case.latents.contiguous() if is_shared else case.latents
    got = append_and_attend_chosen_ragged(
        query.to(device),
        latent.to(device),
        latents.to(device),
        choosing(case, device, min_plain_tokens=minimum),
        chosen.to(device),
        heads=PlainLatentHeads(heads.weight_HXR.to(device), nope_dim=6, rope_dim=8),
        scoring=Scoring(scale=0.3, sinks_H=sinks_H.to(device)),
    ).cpu().view(len(query), 5, 10)  # fmt: skip
    for token in range(len(query)):
        seen = torch.arange(int(positions[token]) + 1)
        if token in late_T.tolist():
            seen = chosen[late_T.tolist().index(token)].long()
        table = case.batch.block_table[sequences[token]].long()
        rows = case.latents[table[seen // BLOCK_TOKENS], seen % BLOCK_TOKENS].double()
        wide = PlainLatentHeads(heads.weight_HXR.double(), nope_dim=6, rope_dim=8)
        keys_ChD, values_ChV = wide.keys_and_values(rows, slice(None))
        scores_hC = 0.3 * torch.einsum("hd,chd->hc", query[token].double(), keys_ChD)
        weights_hC = torch.cat([scores_hC, sinks_H.double()[:, None]], dim=1).softmax(-1)[:, :-1]
        want = torch.einsum("hc,chv->hv", weights_hC, values_ChV)
        unit = UNITS[dtypes[0]]
        torch.testing.assert_close(got[token].double(), want, rtol=10 * unit, atol=10 * unit)


def places(case: Case) -> tuple[Tensor, Tensor]:
    """Sequence and position of each token."""
    num_new = case.batch.num_new
    sequences = torch.repeat_interleave(num_new)
    first = case.batch.context_tokens.long() - num_new - case.batch.query_start[:-1].long()
    return sequences, torch.arange(len(sequences)) + first[sequences]
