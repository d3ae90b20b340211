"""Our kernels that choose positions on a GPU: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels.gpu_attention_batch import ChoosingBatch
from raymoe.kernels.paged_kv import ALL_TOKENS, BLOCK_TOKENS, LatentHeads
from raymoe.kernels.selection import IndexRows, choose_positions_reference
from raymoe.kernels.tensors import to_device
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
    heads = LatentHeads(weight_HXR=weight.to(dtypes[0]), nope_dim=6, rope_dim=8)
    query = torch.randn(len(case.query), 5, 14, generator=case.random).to(dtypes[0])
    sequences, positions = places(case)
    blocks = case.batch.block_table.long()[sequences, positions // BLOCK_TOKENS]
    latent = case.latents[blocks, positions % BLOCK_TOKENS].to(dtypes[0])
    late_T, chosen = choosing(case, "cpu").late_T, wanted_of(case)
    # A layer that shares a choice has blocks without index keys.
    latents = case.latents.contiguous() if is_shared else case.latents
    got = append_and_attend_chosen_ragged(
        query.to(device),
        latent.to(device),
        latents.to(device),
        choosing(case, device, min_plain_tokens=minimum),
        chosen.to(device),
        heads=LatentHeads(weight_HXR=heads.weight_HXR.to(device), nope_dim=6, rope_dim=8),
        scoring=Scoring(scale=0.3),
    ).cpu().view(len(query), 5, 10)  # fmt: skip
    for token in range(len(query)):
        seen = torch.arange(int(positions[token]) + 1)
        if token in late_T.tolist():
            seen = chosen[late_T.tolist().index(token)].long()
        table = case.batch.block_table[sequences[token]].long()
        rows = case.latents[table[seen // BLOCK_TOKENS], seen % BLOCK_TOKENS].double()
        wide = LatentHeads(weight_HXR=heads.weight_HXR.double(), nope_dim=6, rope_dim=8)
        keys_ChD, values_ChV = wide.keys_and_values(rows, slice(None))
        scores_hC = 0.3 * torch.einsum("hd,chd->hc", query[token].double(), keys_ChD)
        want = torch.einsum("hc,chv->hv", scores_hC.softmax(-1), values_ChV)
        unit = UNITS[dtypes[0]]
        torch.testing.assert_close(got[token].double(), want, rtol=10 * unit, atol=10 * unit)


def places(case: Case) -> tuple[Tensor, Tensor]:
    """Sequence and position of each token."""
    num_new = case.batch.num_new
    sequences = torch.repeat_interleave(num_new)
    first = case.batch.context_tokens.long() - num_new - case.batch.query_start[:-1].long()
    return sequences, torch.arange(len(sequences)) + first[sequences]
