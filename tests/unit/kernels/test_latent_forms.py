"""Plain and absorbed latent attention, on the CPU and by torch alone, against each other."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels import cpu_attention, torch_attention
from raymoe.kernels.cpu_attention import append_and_attend_latent, append_and_attend_up_projected
from raymoe.kernels.latent_heads import LatentHeads, PackedLatentHeads, PlainLatentHeads
from raymoe.kernels.paged_kv import ALL_TOKENS
from raymoe.kernels.torch_attention import PagedBatch, append_and_attend_latent_paged
from tests.kinds import covering
from tests.native.attention_cases import BF16, FP32, STEPS
from tests.native.test_cpu_latent_attention import Case
from tests.native.test_cpu_linear import allocate

# Heads, N, rotated dimensions, V, rank: values narrower and wider than keys, odd sizes, no rope.
SHAPES = [(4, 16, 8, 16, 32), (5, 24, 16, 48, 40), (1, 9, 8, 5, 24), (20, 40, 8, 24, 16)]
SHAPES += [(3, 24, 0, 16, 40)]


def make(
    sequences: list[tuple[int, int]],
    shape: tuple[int, int, int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype] = (FP32, FP32),
) -> tuple[Case, PlainLatentHeads]:
    """A case whose queries are plain, and the weight."""
    num_heads, nope, rope, value, rank = shape
    case = Case(sequences, (num_heads, rank, rope), dtypes)
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(num_heads, nope + value, rank, generator=random) * rank**-0.5
    case.query = torch.randn(case.starts[-1], num_heads, nope + rope, generator=random)
    case.query = case.query.to(dtypes[0])
    heads = PlainLatentHeads(weight.to(dtypes[0]), nope_dim=nope, rope_dim=rope)
    return case, heads


def plain_heads(like: LatentHeads, weight_HXR: Tensor) -> PlainLatentHeads:
    return PlainLatentHeads(weight_HXR, nope_dim=like.nope_dim, rope_dim=like.rope_dim)


def absorbed(case: Case, heads: LatentHeads) -> Tensor:
    """By the kernel that reads nothing but the cache."""
    query = heads.absorb(case.query)
    result = append_and_attend_latent(
        query,
        case.latent,
        case.cache.clone(),
        case.batch(),
        rank=heads.rank,
        scale=case.scale,
        sinks_H=case.sinks,
    )
    return heads.up_project(result)


def plain(case: Case, heads: LatentHeads, cache: Tensor | None = None) -> Tensor:
    cache = case.cache.clone() if cache is None else cache
    return append_and_attend_up_projected(
        case.query,
        case.latent,
        cache,
        case.batch(),
        heads=heads,
        scale=case.scale,
        sinks_H=case.sinks,
    )


def by_torch(case: Case, heads: LatentHeads, cache: Tensor | None = None) -> Tensor:
    cache = case.cache.clone() if cache is None else cache
    batch = PagedBatch.of(case.batch(), case.layout)
    return append_and_attend_latent_paged(
        case.query,
        case.latent,
        cache,
        batch,
        heads=heads,
        scale=case.scale,
        sinks_H=case.sinks,
    )


def exact(case: Case, heads: PlainLatentHeads) -> Tensor:
    """Unfolded one sequence after the other, in float64."""
    wide = plain_heads(heads, heads.weight_HXR.double())
    rows = case.cache.clone()
    out = []
    for sequence, context in enumerate(case.contexts):
        begin, end = case.starts[sequence], case.starts[sequence + 1]
        blocks = case.table[sequence, : -(-context // 32)].long()
        cached = rows[blocks].flatten(0, 1)[:context].double()
        cached[context - (end - begin) :] = case.latent[begin:end].to(case.layout.dtype).double()
        keys, values = wide.keys_and_values(cached, slice(None))
        scores = torch.einsum("qhd,chd->hqc", case.query[begin:end].double(), keys) * case.scale
        hidden = torch.arange(context) > torch.arange(context - (end - begin), context)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        if case.sinks is not None:
            sinks = case.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :context]
        out.append(torch.einsum("hqc,chv->qhv", weights, values))
    return torch.cat(out)


@covering(name=[*STEPS], shape=SHAPES, has_sinks=[False, True])
def test_all_forms_are_the_exact_result(
    name: str,
    shape: tuple[int, int, int, int, int],
    has_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, heads = make(STEPS[name], shape)
    if has_sinks:
        case.add_sinks()
    want = exact(case, heads)
    for attend in (absorbed, plain, by_torch):
        torch.testing.assert_close(attend(case, heads).double(), want, rtol=2e-5, atol=2e-5)
    for minimum in (1, ALL_TOKENS):
        monkeypatch.setattr(LatentHeads, "min_plain_tokens", minimum)
        torch.testing.assert_close(by_torch(case, heads).double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, BF16)], ids=str)
def test_the_forms_agree_in_other_types(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case, heads = make(STEPS["mixed"], (6, 32, 16, 32, 64), dtypes)
    want = exact(case, heads)
    unit = 3e-2 if dtypes[0] == BF16 else 2e-5
    for attend in (absorbed, plain, by_torch):
        torch.testing.assert_close(attend(case, heads).double(), want, rtol=unit, atol=unit)


def packed_heads(heads: PlainLatentHeads) -> PackedLatentHeads:
    return PackedLatentHeads(
        heads.weight_HXR, nope_dim=heads.nope_dim, rope_dim=heads.rope_dim, allocate=allocate
    )


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], (6, 32, 16, 32, 64)], ids=str)
def test_packed_weights_give_the_same(shape: tuple[int, int, int, int, int]) -> None:
    case, heads = make(STEPS["mixed"], shape, (BF16, BF16))
    want, packed = exact(case, heads), packed_heads(heads)
    for attend in (absorbed, plain):
        torch.testing.assert_close(attend(case, packed).double(), want, rtol=3e-2, atol=3e-2)


def test_bits_of_a_packed_row_do_not_depend_on_the_batch() -> None:
    _, heads = make(STEPS["mixed"], (6, 32, 16, 32, 64), (BF16, BF16))
    packed = packed_heads(heads)
    query, rows = torch.randn(300, 6, 48).to(BF16), torch.randn(300, 80).to(BF16)
    every = slice(None)
    for part in (slice(0, 1), slice(7, 20), slice(100, 300)):
        assert torch.equal(packed.absorb(query[part]), packed.absorb(query)[part])
        for some, all_rows in zip(
            packed.keys_and_values(rows[part], slice(1, 4)),
            packed.keys_and_values(rows, every),
            strict=True,
        ):
            assert torch.equal(some, all_rows[part, 1:4])


@pytest.mark.parametrize("attend", [plain, by_torch])
def test_both_leave_the_rows_in_the_cache(attend) -> None:  # type: ignore[no-untyped-def]
    case, heads = make(STEPS["mixed"], SHAPES[0])
    wanted, cache = case.cache.clone(), case.cache.clone()
    append_and_attend_latent(
        heads.absorb(case.query), case.latent, wanted, case.batch(), rank=heads.rank, scale=1.0
    )
    attend(case, heads, cache)
    assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_what_does_not_fit_at_once_is_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case, heads = make([(200, 150), (120, 1), (90, 90), (64, 1)], SHAPES[1])
    case.add_sinks()
    want = exact(case, heads)
    monkeypatch.setattr(cpu_attention, "UP_PROJECTED_BYTES", 150_000)
    monkeypatch.setattr(torch_attention, "GATHERED_BYTES", 150_000)
    monkeypatch.setattr(torch_attention, "GATHERED_BYTES", 150_000)
    torch.testing.assert_close(plain(case, heads).double(), want, rtol=2e-5, atol=2e-5)
    for minimum in (1, ALL_TOKENS):
        monkeypatch.setattr(LatentHeads, "min_plain_tokens", minimum)
        torch.testing.assert_close(by_torch(case, heads).double(), want, rtol=2e-5, atol=2e-5)


def test_the_plain_form_pays_from_the_operations_that_it_saves() -> None:
    deepseek = PlainLatentHeads(torch.empty(128, 256, 512), nope_dim=128, rope_dim=64)
    # 2 * 512 * 256 operations on each position, 2 * (512 + 64 + 512 - 192 - 128) less with each of
    # the new tokens, of which half see it.
    assert deepseek.min_plain_tokens == 342
    wide = PlainLatentHeads(torch.empty(4, 64, 8), nope_dim=32, rope_dim=8)
    assert wide.min_plain_tokens == ALL_TOKENS
