"""Kernels on CPU and GPU against plain formulas in float64, for each stored format of weights.

T tokens, H hidden size, E experts, K experts of a token, F intermediate size, C context. Of states:
C channels, W taps, H heads in G groups, K x V sizes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from raymoe.codecs import Weight, as_tensor, on_device
from raymoe.device.find_gpu import half_dtype
from raymoe.doctor.examine import Check, Outcome, Status, Target
from raymoe.kernels.compressed import CompressedScoring, Pooling
from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    append_and_attend,
    append_and_attend_latent,
)
from raymoe.kernels.cpu_compressed import append_and_attend_compressed_on_host
from raymoe.kernels.cpu_experts import Experts
from raymoe.kernels.cpu_experts import make_experts as make_cpu_experts
from raymoe.kernels.cpu_linear import make_linear
from raymoe.kernels.elementwise import Projected, argmax, qkv_rope, rms_norm, route
from raymoe.kernels.gpu_attention_batch import (
    AttentionCompute,
    LatentRaggedBatch,
    RaggedBatch,
    attention_compute,
)
from raymoe.kernels.gpu_experts_layout import ExpertMatrices
from raymoe.kernels.gpu_state.scan import StateBatch
from raymoe.kernels.humming.products import why_not_here
from raymoe.kernels.latent_heads import PlainLatentHeads
from raymoe.kernels.paged_kv import (
    BLOCK_TOKENS,
    CacheLayout,
    CompressedLayout,
    KvLayout,
    LatentLayout,
)
from raymoe.kernels.state import causal_conv, scan
from raymoe.kernels.tensors import to_device
from raymoe.kernels.torch_attention import (
    PagedBatch,
    append_and_attend_latent_paged,
    append_and_attend_paged,
)
from raymoe.measure.jobs import allocate_huge_pages, random_matrix
from raymoe.model.device_experts import make_device_experts
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from raymoe.units import ceil_div

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Largest error relative to the norm of the result: some roundings of weights, products and results.
BOUNDS = {FLOAT32: 1e-5, FLOAT16: 4 * 2**-11, BFLOAT16: 4 * 2**-8}
FORMATS: tuple[WeightFormat, ...] = (
    Fp8Block(), Fp8Channel(), Fp8Tensor(), PackedInt4(32), Gptq(128), Awq(128), Mxfp4(), Mxfp8(),
    Nvfp4(),
)  # fmt: skip
# Those that humming-kernels multiplies.
PACKED_FORMATS = (Fp8Block(), PackedInt4(32), Gptq(128), Awq(128), Mxfp4(), Nvfp4())
HIDDEN_SIZE, EXPERT_SIZE, NUM_EXPERTS, TOP_K = 256, 256, 4, 2
TOKENS = (3, 200)  # tiles of decode and of prefill
CONTEXTS = (1, 33, 70, 1200)  # the last in several parts
STATE_CONTEXTS = (1, 33, 80)
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
RANK, ROPE_DIM, NOPE_DIM = 128, 32, 64
WINDOW, ENTRY_TOKENS = 128, 4
STATE_HEADS, STATE_GROUPS, STATE_DIM, TAPS = 4, 2, 64, 4
# Whether decays are those of channels, and whether there is the delta rule: Gated DeltaNet, Kimi
# Delta Attention, Mamba-2.
STATE_KINDS = ((False, True), (True, True), (False, False))

Pair = tuple[Tensor, Tensor]  # a result, and what the formula gives in float64
Case = Callable[[], Iterator[Pair]]
MakeExperts = Callable[[ExpertMatrices, torch.dtype], Experts]
CPU = torch.device("cpu")


def checks(target: Target) -> list[Check]:
    found = list(_cpu_checks())
    if target.device == "cuda":
        found += _device_checks(torch.device("cuda"))
    return found


def _cpu_checks() -> Iterator[Check]:
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        yield _check("CPU norm, rotation, router, projection", dtype, partial(elementwise, dtype))
        yield _check("CPU attention", dtype, partial(attention, dtype, CPU))
        yield _check("CPU latent attention", dtype, partial(latent_attention, dtype, CPU))
        yield _check("CPU attention to entries", dtype, partial(compressed_attention, dtype))
        yield _check("CPU states", dtype, partial(states, dtype, CPU))
        yield _check("CPU experts", dtype, partial(experts, None, dtype, CPU))
    for stored in FORMATS:
        case = partial(experts, stored, BFLOAT16, CPU)
        yield _check(f"CPU experts, {stored.name}", BFLOAT16, case)


def _device_checks(device: torch.device) -> Iterator[Check]:
    half = half_dtype()
    for dtype in dict.fromkeys((half, FLOAT32, FLOAT16)):
        compute = attention_compute(device, dtype, HEAD_DIM)
        yield _check("GPU attention", dtype, partial(attention, dtype, device, compute))
        case = partial(latent_attention, dtype, device, compute)
        yield _check("GPU latent attention", dtype, case)
        yield _check("GPU states", dtype, partial(states, dtype, device))
        yield _check("GPU experts", dtype, partial(experts, None, dtype, device))
    for stored in FORMATS:
        yield _check(f"GPU experts, {stored.name}", half, partial(experts, stored, half, device))
    if why_not_here(torch.cuda.get_device_capability(device), half) is None:
        for stored in PACKED_FORMATS:
            case = partial(experts, stored, half, device, make_packed)
            yield _check(f"GPU experts of humming-kernels, {stored.name}", half, case)


def _check(name: str, dtype: torch.dtype, case: Case) -> Check:
    return Check(f"{name}, {_name(dtype)}", partial(compare, case, BOUNDS[dtype]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def compare(case: Case, bound: float) -> Outcome:
    """The largest error of all pairs, relative to the norm of what the formula gives."""
    errors = []
    for got, want in case():
        wide = got.double().cpu()
        is_finite = bool(wide.isfinite().all())
        error = float((wide - want).norm() / want.norm()) if is_finite else math.inf
        errors.append(error)
    value = f"error {max(errors):.1e}, bound {bound:.1e}"
    if max(errors) <= bound:
        return Outcome(value)
    advice = (
        "results of this kernel are wrong here: do not use it, and file a bug with this table, the "
        "processor or GPU, and the versions"
    )
    return Outcome(value, Status.FAILED, advice)


def elementwise(dtype: torch.dtype) -> Iterator[Pair]:
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    hidden, weight = random(37, HIDDEN_SIZE), random(HIDDEN_SIZE)
    exact = hidden.double()
    normed = exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    yield rms_norm(hidden, weight, 1e-6), normed * weight.double()
    matrix = random(96, HIDDEN_SIZE) / 16
    yield make_linear(matrix, None, allocate_huge_pages)(hidden), exact @ matrix.double().T
    logits = random(37, 16)
    found = route(logits, TOP_K, renormalize=True)
    best, order = logits.double().softmax(-1).topk(TOP_K)
    if dtype == FLOAT32:  # without ties
        yield found.topk_ids_TK, order.double()
    yield found.topk_weights_TK, best / best.sum(-1, keepdim=True)
    yield argmax(logits.float()), logits.float().max(-1).indices.double()
    qkv, positions = random(37, 4 * 32), torch.arange(37, dtype=torch.int32)
    angles = torch.outer(positions.float(), 10000.0 ** (-torch.arange(16) / 16))
    cosines, sines = angles.cos(), angles.sin()
    got = qkv_rope(
        qkv, positions, cosines, sines, num_heads=2, num_kv_heads=1, head_dim=32
    ).query_THD
    first, second = qkv[:, :64].double().view(37, 2, 2, 16).unbind(2)
    cos, sin = cosines.double()[:, None], sines.double()[:, None]
    yield got, torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def random_experts(stored: WeightFormat | None, dtype: torch.dtype) -> ExpertMatrices:
    generator = torch.Generator().manual_seed(2)

    def weight(rows: int, columns: int) -> Weight:
        if stored is not None:
            return random_matrix(stored, (rows, columns), generator)
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn / math.sqrt(columns)).to(dtype)

    wide, high = (EXPERT_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE, EXPERT_SIZE)
    gates, ups, downs = (
        [weight(*shape) for _ in range(NUM_EXPERTS)] for shape in (wide, wide, high)
    )
    return ExpertMatrices(gates, ups, downs)


def make(matrices: ExpertMatrices, dtype: torch.dtype) -> Experts:
    """The experts that an engine uses for these matrices where they are."""
    if matrices.device != CPU:
        return make_device_experts(matrices, activation="silu", dtype=dtype)
    return make_cpu_experts(
        *matrices[:3], activation="silu", allocate=allocate_huge_pages, dtype=dtype
    )


def make_packed(matrices: ExpertMatrices, dtype: torch.dtype) -> Experts:
    """The experts of humming-kernels; groups of random matrices are in order."""
    from raymoe.kernels.humming.experts import make_humming_experts  # noqa: PLC0415 - needs Triton

    return make_humming_experts(matrices._replace(are_reordered=False), dtype=dtype)


def experts(
    stored: WeightFormat | None,
    dtype: torch.dtype,
    device: torch.device,
    make_experts: MakeExperts = make,
) -> Iterator[Pair]:
    """The experts of a layer, for few tokens and many."""
    matrices = random_experts(stored, dtype)
    gates, ups, downs = ([on_device(one, device) for one in each] for each in matrices[:3])
    compute = make_experts(ExpertMatrices(gates, ups, downs), dtype)
    generator = torch.Generator().manual_seed(3)
    for num_tokens in TOKENS:
        hidden_TH = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).to(dtype)
        scores_TE = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
        weights_TK, ids_TK = scores_TE.softmax(-1).topk(TOP_K)
        arguments = (hidden_TH, ids_TK.int(), weights_TK)
        yield compute(*(each.to(device) for each in arguments)), formula(matrices, *arguments)


def formula(
    matrices: ExpertMatrices, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Add up weight * down(silu(gate(x)) * up(x)) over the experts of each token, in float64."""
    out_TH = torch.zeros(hidden_TH.shape, dtype=torch.float64)
    for expert in range(matrices.num_experts):
        tokens, slots = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up, down = (as_tensor(w[expert], FLOAT32).double() for w in matrices[:3])
        x = hidden_TH[tokens].double()
        y = (silu(x @ gate.T) * (x @ up.T)) @ down.T
        out_TH.index_add_(0, tokens, weights_TK[tokens, slots, None].double() * y)
    return out_TH


class Sequences(NamedTuple):
    """Random queries, keys and values of sequences: their prompts, then one more token of each."""

    query_THD: Tensor
    key_TGD: Tensor
    value_TGV: Tensor

    def attended(self, scale: float) -> Tensor:
        """softmax(q k) v of each token over its sequence so far, in float64, [T, H * V]."""
        group, out = self.query_THD.shape[1] // self.key_TGD.shape[1], []
        for query, key, value in zip(
            *(torch.split(each.double(), list(CONTEXTS)) for each in self), strict=True
        ):
            scores = scale * torch.einsum("qhd,chd->hqc", query, key.repeat_interleave(group, 1))
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out.append(torch.einsum("hqc,chv->qhv", weights, value.repeat_interleave(group, 1)))
        return torch.cat(out).flatten(1)


def _steps(lengths: tuple[int, ...]) -> Iterator[tuple[list[int], AttentionBatch]]:
    """Rows of two steps, which compute the prompts and then the last tokens."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    yield (
        [start + t for start, n in zip(starts, lengths, strict=True) for t in range(n - 1)],
        _batch([n - 1 for n in lengths], [n - 1 for n in lengths]),
    )
    yield (
        [start + n - 1 for start, n in zip(starts, lengths, strict=True)],
        _batch([1] * len(lengths), list(lengths)),
    )


def _batch(num_new: list[int], contexts: list[int]) -> AttentionBatch:
    blocks = ceil_div(max(CONTEXTS), BLOCK_TOKENS)
    order = torch.randperm(len(CONTEXTS) * blocks, generator=torch.Generator().manual_seed(4))
    # A sequence of one token has no prompt before it.
    chosen = [i for i, n in enumerate(num_new) if n]
    lengths = torch.tensor([0, *(num_new[i] for i in chosen)])
    return AttentionBatch(
        query_start=lengths.cumsum(0).int(),
        context_tokens=torch.tensor([contexts[i] for i in chosen], dtype=torch.int32),
        block_table=order.int().view(len(CONTEXTS), blocks)[chosen],
        slots=torch.tensor(chosen, dtype=torch.int32),
    )


def attention(
    dtype: torch.dtype, device: torch.device, compute: AttentionCompute | None = None
) -> Iterator[Pair]:
    """Prompts and then a decode step of grouped-query attention over paged keys and values.

    With `compute` the Triton kernels attend, else the CPU's or torch.
    """
    generator, count = torch.Generator().manual_seed(5), sum(CONTEXTS)
    sequences = Sequences(
        *(
            torch.randn(count, heads, HEAD_DIM, generator=generator).to(dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
    )
    layout = KvLayout(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    cache, scale = _cache(layout, device), HEAD_DIM**-0.5
    want = sequences.attended(scale)
    for rows, batch in _steps(CONTEXTS):
        projected = Projected(*(each[rows].to(device) for each in sequences))
        if compute is not None:
            # This module imports Triton.
            from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
                Scoring,
                append_and_attend_ragged,
            )

            ragged = to_device(RaggedBatch.of(batch, compute), device)
            got = append_and_attend_ragged(projected, cache, ragged, Scoring(scale=scale))
        elif device == CPU:
            got = append_and_attend(*projected, cache, batch, scale=scale)
        else:
            paged = to_device(PagedBatch.of(batch, layout), device)
            got = append_and_attend_paged(projected, cache, paged, scale=scale)
        yield got, want[rows]


def _cache(layout: CacheLayout, device: torch.device) -> Tensor:
    num_blocks = len(CONTEXTS) * ceil_div(max(CONTEXTS), BLOCK_TOKENS)
    return torch.zeros(num_blocks, *layout.block_shape, dtype=layout.dtype, device=device)


def latent_attention(
    dtype: torch.dtype, device: torch.device, compute: AttentionCompute | None = None
) -> Iterator[Pair]:
    """The same for multi-head latent attention."""
    generator, count = torch.Generator().manual_seed(6), sum(CONTEXTS)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    heads = _latent_heads(random(HEADS, 2 * NOPE_DIM, RANK) / math.sqrt(RANK))
    query_THD, latent_TW = random(count, HEADS, heads.query_dim), random(count, RANK + ROPE_DIM)
    exact = _latent_heads(heads.weight_HXR.double())
    keys_values = exact.keys_and_values(latent_TW.double(), slice(0, HEADS))
    sequences, scale = Sequences(query_THD, *keys_values), heads.query_dim**-0.5
    want = sequences.attended(scale)
    layout = LatentLayout(rank=RANK, rope_dim=ROPE_DIM, dtype=dtype)
    attend = _latent_attention(layout, device, compute, _latent_heads(heads.weight_HXR.to(device)))
    for rows, batch in _steps(CONTEXTS):
        got = attend(query_THD[rows].to(device), latent_TW[rows].to(device), batch, scale)
        yield got.flatten(1), want[rows]


def _latent_heads(weight_HXR: Tensor) -> PlainLatentHeads:
    return PlainLatentHeads(weight_HXR, nope_dim=NOPE_DIM, rope_dim=ROPE_DIM)


def _latent_attention(
    layout: LatentLayout,
    device: torch.device,
    compute: AttentionCompute | None,
    heads: PlainLatentHeads,
) -> Callable[[Tensor, Tensor, AttentionBatch, float], Tensor]:
    cache = _cache(layout, device)

    def cpu(query: Tensor, latent: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        absorbed, rank = heads.absorb(query), heads.rank
        return heads.up_project(
            append_and_attend_latent(absorbed, latent, cache, batch, rank=rank, scale=scale)
        )

    def paged(query: Tensor, latent: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        there = to_device(PagedBatch.of(batch, layout), device)
        return append_and_attend_latent_paged(query, latent, cache, there, heads=heads, scale=scale)

    def ragged(query: Tensor, latent: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        # This module imports Triton.
        from raymoe.kernels.gpu_attention import (  # noqa: PLC0415
            Scoring,
            append_and_attend_latent_ragged,
        )

        assert compute is not None
        minimum = heads.min_plain_tokens
        tiles = LatentRaggedBatch.of(batch, layout, compute, min_plain_tokens=minimum)
        there = to_device(tiles, device)
        return append_and_attend_latent_ragged(
            query, latent, cache, there, heads=heads, scoring=Scoring(scale=scale)
        )

    if compute is not None:
        return ragged
    return cpu if device == CPU else paged


def compressed_attention(dtype: torch.dtype) -> Iterator[Pair]:
    """The same for attention to the last rows and to entries of windows that overlap."""
    generator, count = torch.Generator().manual_seed(8), sum(CONTEXTS)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    layout = CompressedLayout(
        width=RANK, window=WINDOW, ratio=ENTRY_TOKENS, num_sums=2, dtype=dtype
    )
    query_THW, row_TW = random(count, HEADS, RANK).to(dtype), random(count, RANK).to(dtype)
    pooled_TX = random(count, 4 * RANK).to(dtype)
    angles_PR = random(max(CONTEXTS), ROPE_DIM // 2)
    tables = (angles_PR.cos(), angles_PR.sin())
    pooling = Pooling(bias_MX=random(ENTRY_TOKENS, 2 * RANK), norm_W=random(RANK), eps=1e-6)
    scoring = CompressedScoring(scale=RANK**-0.5, sinks_H=random(HEADS), pooling=pooling)
    lengths = list(CONTEXTS)
    parts = (torch.split(each.double(), lengths) for each in (query_THW, row_TW, pooled_TX))
    want = torch.cat(
        [
            _attended_to_entries(query, row, pooled, tables, scoring)
            for query, row, pooled in zip(*parts, strict=True)
        ]
    )
    blocks = len(CONTEXTS) * ceil_div(max(CONTEXTS), BLOCK_TOKENS)
    num_bytes = blocks * layout.block_bytes + len(CONTEXTS) * layout.sequence_bytes
    cache = torch.zeros(num_bytes, dtype=torch.uint8)
    for rows, batch in _steps(CONTEXTS):
        got = append_and_attend_compressed_on_host(
            query_THW[rows],
            row_TW[rows],
            pooled_TX[rows],
            cache,
            batch,
            layout=layout,
            tables=tables,
            scoring=scoring,
        )
        yield got, want[rows]


def _attended_to_entries(  # noqa: PLR0917 - of the function above
    query_CHW: Tensor,
    row_CW: Tensor,
    pooled_CX: Tensor,
    tables: tuple[Tensor, Tensor],
    scoring: CompressedScoring,
) -> Tensor:
    """Attention of one sequence in float64, [C, H, W]."""
    pooling = scoring.pooling
    assert pooling is not None
    context, count = len(row_CW), len(row_CW) // ENTRY_TOKENS
    values_EMAW, scores_EMAW = (
        each[: count * ENTRY_TOKENS].view(count, ENTRY_TOKENS, 2, RANK)
        for each in pooled_CX.tensor_split(2, dim=1)
    )
    scores_EMAW = scores_EMAW + pooling.bias_MX.view(ENTRY_TOKENS, 2, RANK)

    def of_two_windows(each_EMAW: Tensor, fill: float) -> Tensor:
        before = torch.full_like(each_EMAW[:1, :, 0], fill)
        return torch.cat([torch.cat([before, each_EMAW[:-1, :, 0]])[:count], each_EMAW[:, :, 1]], 1)

    weights_EYW = of_two_windows(scores_EMAW, -math.inf).softmax(1)
    entry_EW = (weights_EYW * of_two_windows(values_EMAW, 0.0)).sum(1)
    entry_EW = entry_EW * torch.rsqrt(entry_EW.square().mean(1, keepdim=True) + pooling.eps)
    begins_E = torch.arange(count) * ENTRY_TOKENS
    entry_EW = _turned((entry_EW * pooling.norm_W)[:, None], begins_E, tables, 1)[:, 0]
    position_C = torch.arange(context)
    back_CC = position_C[:, None] - position_C
    is_seen_CY = torch.cat(
        [
            (back_CC >= 0) & (back_CC < WINDOW),
            torch.arange(count) < (position_C[:, None] + 1) // ENTRY_TOKENS,
        ],
        dim=1,
    )
    seen_YW = torch.cat([row_CW, entry_EW])
    scores_HCY = scoring.scale * torch.einsum("chw,yw->hcy", query_CHW, seen_YW)
    sinks_HC1 = scoring.sinks_H.double()[:, None, None].expand(-1, context, 1)
    scores_HCZ = torch.cat([scores_HCY.masked_fill(~is_seen_CY, -math.inf), sinks_HC1], dim=2)
    result_CHW = torch.einsum("hcy,yw->chw", scores_HCZ.softmax(2)[..., :-1], seen_YW)
    return _turned(result_CHW, position_C, tables, -1)


def _turned(
    rows_CHW: Tensor, position_C: Tensor, tables: tuple[Tensor, Tensor], sign: int
) -> Tensor:
    """Rows whose last dimensions are complex numbers, turned by their positions."""
    cos_CR, sin_CR = (table[position_C].double() for table in tables)
    turn_C1R = torch.complex(cos_CR, sign * sin_CR)[:, None]
    kept, ends = torch.split(rows_CHW, [RANK - ROPE_DIM, ROPE_DIM], dim=2)
    turned = (
        torch.view_as_complex(ends.reshape(*ends.shape[:2], ROPE_DIM // 2, 2).contiguous())
        * turn_C1R
    )
    return torch.cat([kept, torch.view_as_real(turned).flatten(2)], dim=2)


def states(dtype: torch.dtype, device: torch.device) -> Iterator[Pair]:
    """Prompts and then a decode step: a convolution, and scans of each kind."""
    generator, count = torch.Generator().manual_seed(7), sum(STATE_CONTEXTS)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    sizes = [STATE_GROUPS * STATE_DIM, STATE_GROUPS * STATE_DIM, STATE_HEADS * STATE_DIM]
    inputs_TC, weight_WC = random(count, sum(sizes)).to(dtype), random(TAPS, sum(sizes))
    past_NPC = torch.full((len(STATE_CONTEXTS), TAPS - 1, sum(sizes)), math.nan, dtype=dtype).to(
        device
    )
    want = _convolved(inputs_TC, weight_WC)
    for rows, batch in _steps(STATE_CONTEXTS):
        there = _prepared(batch, device)
        weight_CW, inputs = weight_WC.to(device).t(), inputs_TC[rows].to(device)
        got = causal_conv(inputs, weight_CW, None, past_NPC, there, activation="silu")
        yield got, want[rows]
    queries, keys, values = (
        each.reshape(count, -1, STATE_DIM) for each in torch.split(inputs_TC, sizes, dim=1)
    )
    for has_channel_decays, is_delta in STATE_KINDS:
        decays = -random(*(count, STATE_HEADS, STATE_DIM)[: 2 + has_channel_decays]).exp() / 20
        gains = random(count, STATE_HEADS).sigmoid()
        shape = (len(STATE_CONTEXTS), STATE_HEADS, STATE_DIM, STATE_DIM)
        matrices = torch.full(shape, math.nan).to(device)
        want = _scanned((queries, keys, values, decays, gains), is_delta=is_delta)
        for rows, batch in _steps(STATE_CONTEXTS):
            got = scan(
                queries[rows].to(device),
                keys[rows].to(device),
                values[rows].to(device),
                decays[rows].to(device),
                gains[rows].to(device),
                matrices,
                _prepared(batch, device),
                scale=STATE_DIM**-0.5,
                delta=is_delta,
                normalize=True,
            )
            yield got, want[rows]


def _prepared(batch: AttentionBatch, device: torch.device) -> AttentionBatch | StateBatch:
    return batch if device == CPU else to_device(StateBatch.of(batch, device), device)


def _convolved(inputs_TC: Tensor, weight_WC: Tensor) -> Tensor:
    """Convolve each sequence from its start, then silu, in float64."""
    found = []
    for each in torch.split(inputs_TC.double(), list(STATE_CONTEXTS)):
        padded = torch.cat([each.new_zeros(TAPS - 1, each.shape[1]), each])
        windows_TCW = padded.unfold(0, TAPS, 1)
        found.append(silu((windows_TCW * weight_WC.double().t()).sum(-1)))
    return torch.cat(found)


def _scanned(operands: tuple[Tensor, ...], *, is_delta: bool) -> Tensor:
    """Token by token as `state.scan` says, from the start of each sequence, in float64."""
    query, key, value, log_decay, gain = (each.double() for each in operands)
    shared = STATE_HEADS // STATE_GROUPS
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 1)
        for x in (query, key)
    )
    decay = log_decay.exp().view(*gain.shape, -1, 1)
    starts = {sum(STATE_CONTEXTS[:i]) for i in range(len(STATE_CONTEXTS))}
    out = torch.empty_like(value)
    for t in range(len(value)):
        if t in starts:
            state = value.new_zeros(STATE_HEADS, STATE_DIM, STATE_DIM)
        state, change = state * decay[t], value[t]
        if is_delta:
            change = change - torch.einsum("hkv,hk->hv", state, key[t])
        state = state + key[t, :, :, None] * (gain[t, :, None] * change)[:, None]
        out[t] = torch.einsum("hkv,hk->hv", state, query[t]) * STATE_DIM**-0.5
    return out
