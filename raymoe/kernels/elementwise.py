"""Norms, rotary embeddings, routers and sampling, on CPUs and GPUs.

Functions with an `out` on a GPU are one launch of `gpu_elementwise`, which imports Triton and is
imported where it is called. All other tensors are computed by torch: the references.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.triton_support import OLDEST_CAPABILITY

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def triton_runs_on(device: torch.device) -> bool:
    """Whether kernels in Triton run there: on GPUs from Turing on, if Triton is installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def rms_norm(
    hidden_TH: Tensor,
    weight_H: Tensor | None,
    eps: float,
    offset: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the RMS norm of every row, [T, H], in `out` or a new contiguous tensor.

    Args:
        hidden_TH: Rows may be strided.
        eps: Added to the mean of squares.
        offset: None rounds the normed value to its type before it is multiplied by the weight
            (Llama); a number multiplies it by `offset + weight` in float32 and rounds once: 0 in
            OLMo-3 and Gemma-4, 1 in Gemma-3.
    """
    return _norm(hidden_TH, None, weight_H, eps, offset, out)


def add_rms_norm_(
    residual_TH: Tensor,
    delta_TH: Tensor,
    weight_H: Tensor | None,
    eps: float,
    *,
    offset: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Add `delta_TH` to `residual_TH` in place and return the RMS norm of the sum, [T, H]."""
    if delta_TH.shape != residual_TH.shape or delta_TH.dtype != residual_TH.dtype:
        residual_TH.add_(delta_TH)
        return _norm(residual_TH, None, weight_H, eps, offset, out)
    return _norm(residual_TH, delta_TH, weight_H, eps, offset, out)


def _norm(  # noqa: PLR0917 - in the order of the kernels
    hidden_TH: Tensor,
    delta_TH: Tensor | None,
    weight_H: Tensor | None,
    eps: float,
    offset: float | None,
    out: Tensor | None,
) -> Tensor:
    rows = [x for x in (hidden_TH, delta_TH, out) if x is not None]
    if all(native_reads(x, weight_H) for x in rows):
        out = torch.empty(hidden_TH.shape, dtype=hidden_TH.dtype) if out is None else out
        _native.rms_norm(hidden_TH, delta_TH, weight_H, eps, offset, out)
        return out
    if triton_runs_on(hidden_TH.device) and all(_has_rows(x, (weight_H,)) for x in rows):
        from raymoe.kernels import gpu_elementwise  # noqa: PLC0415 - needs Triton

        out = hidden_TH.new_empty(hidden_TH.shape) if out is None else out
        gpu_elementwise.rms_norm(hidden_TH, delta_TH, weight_H, eps, offset, out).run()
        return out
    if delta_TH is not None:
        hidden_TH.add_(delta_TH)
    normed_TH = rms_norm_reference(hidden_TH, weight_H, eps, offset)
    return normed_TH if out is None else out.copy_(normed_TH)


def native_reads(rows: Tensor, *weights: Tensor | None) -> bool:
    """Whether native kernels read these rows, with weights of the same type."""
    return rows.is_cpu and _has_rows(rows, weights)


def _has_rows(x: Tensor, weights: Sequence[Tensor | None] = ()) -> bool:
    """Whether kernels read these rows, with weights of the same type."""
    return (
        x.ndim == 2
        and x.dtype in FLOAT_DTYPES
        and (x.shape[1] == 1 or x.stride(1) == 1)
        and not (x.requires_grad and torch.is_grad_enabled())
        and all(w is None or (w.dtype == x.dtype and w.is_contiguous()) for w in weights)
    )


def rms_norm_reference(
    hidden_TH: Tensor, weight_H: Tensor | None, eps: float, offset: float | None = None
) -> Tensor:
    wide_TH = hidden_TH.float()
    mean_T1 = wide_TH.pow(2).mean(-1, keepdim=True)
    return weigh_norm(wide_TH * torch.rsqrt(mean_T1 + eps), weight_H, offset, hidden_TH.dtype)


def weigh_norm(
    normed_TH: Tensor, weight_H: Tensor | None, offset: float | None, dtype: torch.dtype
) -> Tensor:
    """Multiply float32 rows by the weight of a norm, with the roundings of `rms_norm`."""
    if weight_H is None:
        return normed_TH.to(dtype)
    if offset is None:
        return weight_H * normed_TH.to(dtype)
    return (normed_TH * (offset + weight_H.float())).to(dtype)


MAX_NATIVE_HEAD_DIM = 512


class Projected(NamedTuple):
    """Contiguous queries [T, H, D], keys [T, G, D] and values [T, G, V] of a step.

    In latent attention keys are the cached rows (G = 1) and values have no dimensions, or are what
    an indexer made of the tokens (`selection.IndexRows`).
    """

    query_THD: Tensor
    key_TGD: Tensor
    value_TGV: Tensor


class Steps(NamedTuple):
    """What `qkv_rope` does, in order.

    Attributes:
        eps: Of the norms.
        clip: Largest magnitude after the norms, values included (OLMoE's `clip_qkv`).
        is_norm_after_rope: Norm each head of queries and keys after the rotation (Hunyuan).
        is_interleaved: Dimensions 2 i and 2 i + 1 form a pair (DeepSeek, ERNIE) instead of i and i
            + R. The output holds the first elements of all pairs before the second ones, in queries
            and keys, which leaves their products unchanged.
        norms_values: Norm each head of the values, without a weight (Gemma-4).
        values_are_keys: There are queries and keys only; the values are the keys before norm and
            rotation (layers of Gemma-4 with full attention).
        norm_offset: `offset` of `rms_norm` for the norms of queries and keys.
    """

    eps: float = 1e-6
    clip: float = math.inf
    is_norm_after_rope: bool = False
    is_interleaved: bool = False
    norms_values: bool = False
    values_are_keys: bool = False
    norm_offset: float | None = None


PLAIN_STEPS = Steps()


def qkv_rope(  # noqa: PLR0913 - an operator: its tensors are its arguments
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    steps: Steps = PLAIN_STEPS,
    out: Projected | None = None,
) -> Projected:
    """Split, norm queries and keys, clip all three, rotate queries and keys.

    The order of operations and every rounding are those of Hugging Face's attention: for bfloat16
    the cosines, the sines, both products and their sum are each rounded.

    Args:
        qkv_TX: Queries, keys and values concatenated; float32, float16 or bfloat16.
        positions_T: int32, each in [0, P); ValueError otherwise.
        cos_PR: Cosines by position, float32, already multiplied by the attention scaling. The first
            2 R dimensions of every head are rotated, the others are copied.
        value_dim: Dimensions of a value (V); None if it has as many as a key.
        q_norm: Weight [D] for a norm per head (Qwen3), [H * D] for one norm over all heads of a
            token (OLMoE), None for no norm.
        k_norm: Likewise, [D] or [G * D].
        out: Receives the result; contiguous.
    """
    tables = (cos_PR, sin_PR)
    sizes = (num_heads, num_kv_heads, head_dim, value_dim or head_dim)
    _check_width(qkv_TX, sizes, steps)
    norms = (q_norm, k_norm)
    is_native = _rope_is_native(qkv_TX, positions_T, tables, norms)
    is_triton = triton_runs_on(qkv_TX.device) and _rope_fits(qkv_TX, positions_T, tables, norms)
    if not is_native and not is_triton:
        result = qkv_rope_reference(
            qkv_TX, positions_T, tables, sizes=sizes, norms=norms, steps=steps
        )
        return result if out is None else copied(result, out)
    if out is None:
        shapes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, sizes[3]))
        out = Projected(*(qkv_TX.new_empty(len(qkv_TX), *shape) for shape in shapes))
    if is_native:
        _native.qkv_rope(
            qkv_TX, positions_T, *tables, *norms, *out, *steps[:2], *steps[2:6], steps.norm_offset
        )
    else:
        from raymoe.kernels import gpu_elementwise  # noqa: PLC0415 - needs Triton

        gpu_elementwise.qkv_rope(
            qkv_TX, (positions_T, *tables), norms, out, sizes=sizes, steps=steps
        ).run()
    return out


def copied(source: Projected, target: Projected) -> Projected:
    for from_tensor, to_tensor in zip(source, target, strict=True):
        to_tensor.copy_(from_tensor)
    return target


def _check_width(qkv_TX: Tensor, sizes: tuple[int, int, int, int], steps: Steps) -> None:
    heads, kv_heads, dim, value_dim = sizes
    width = (heads + kv_heads) * dim + (0 if steps.values_are_keys else kv_heads * value_dim)
    if qkv_TX.ndim != 2 or qkv_TX.shape[1] != width:
        raise ConfigError(
            f"qkv_rope: qkv has shape {tuple(qkv_TX.shape)}, expected [T, {width}] for {heads} "
            f"query and {kv_heads} KV heads of {dim}"
        )


def _rope_is_native(
    qkv_TX: Tensor,
    positions_T: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
) -> bool:
    return qkv_TX.is_cpu and _rope_fits(qkv_TX, positions_T, tables, norms)


def _rope_fits(
    qkv_TX: Tensor,
    positions_T: Tensor,
    tables: Sequence[Tensor],
    norms: tuple[Tensor | None, Tensor | None],
) -> bool:
    return (
        _has_rows(qkv_TX, norms)
        and positions_T.dtype == torch.int32
        and all(table.dtype == torch.float32 and table.is_contiguous() for table in tables)
        and tables[0].shape[1] <= MAX_NATIVE_HEAD_DIM // 2
    )


def qkv_rope_reference(
    qkv_TX: Tensor,
    positions_T: Tensor,
    tables: tuple[Tensor, Tensor],
    *,
    sizes: tuple[int, int, int, int],
    norms: tuple[Tensor | None, Tensor | None],
    steps: Steps,
) -> Projected:
    """Sizes are (H, G, D, V); norms are the weights for queries and keys."""
    heads, kv_heads, dim, value_dim = sizes
    angles = [t[positions_T.long(), None].to(qkv_TX.dtype) for t in tables]
    query_TY, key_TY, *rest = qkv_TX.tensor_split([heads * dim, (heads + kv_heads) * dim], dim=1)
    value_TY = key_TY if steps.values_are_keys else rest[0]
    if steps.norms_values:
        rows = value_TY.reshape(-1, value_dim)
        value_TY = rms_norm_reference(rows, None, steps.eps).view(value_TY.shape)
    rotated = []
    for part_TY, norm in zip((query_TY, key_TY), norms, strict=True):
        x_TY = part_TY if steps.is_norm_after_rope else _norm_heads(part_TY, norm, dim, steps)
        x_TND = x_TY.clamp(-steps.clip, steps.clip).reshape(len(x_TY), part_TY.shape[1] // dim, dim)
        x_TND = rotate_heads(x_TND, *angles, is_interleaved=steps.is_interleaved)
        if steps.is_norm_after_rope and norm is not None:
            x_TND = rms_norm_reference(x_TND, norm, steps.eps, steps.norm_offset)
        rotated.append(x_TND)
    value_TY = value_TY.clamp(-steps.clip, steps.clip)
    value_TGV = value_TY.reshape(len(value_TY), kv_heads, value_dim)
    return Projected(rotated[0], rotated[1], value_TGV)


def latent_rope(
    query_TAD: Tensor,
    row_TW: Tensor,
    angles: tuple[Tensor, Tensor, Tensor],
    *,
    row_norm: Tensor,
    eps: float,
    is_interleaved: bool,
    out: Projected | None = None,
) -> Projected:
    """Norm the latent that begins a row; rotate the rest of the row and the end of each query.

    Rounds as `qkv_rope` does. Returns queries [T, A, D] and rows [T, 1, W], whose values are empty.
    Without `out`, queries may be rotated in place. The latent has as many dimensions as `row_norm`.
    """
    positions_T, *tables = angles
    (num_tokens, width), rank, norms = row_TW.shape, len(row_norm), (row_norm, None)
    if triton_runs_on(row_TW.device) and _rope_fits(row_TW, positions_T, tables, norms):
        from raymoe.kernels import gpu_elementwise  # noqa: PLC0415 - needs Triton

        if out is None:
            row_T1W = row_TW.new_empty(num_tokens, 1, width)
            out = Projected(torch.empty_like(query_TAD), row_T1W, row_T1W[..., :0])
        gpu_elementwise.latent_rope(
            query_TAD,
            row_TW,
            angles,
            row_norm,
            out,
            eps=eps,
            is_interleaved=is_interleaved,
        ).run()
        return out
    rows_T = positions_T.long()
    cosines, sines = (table_PR[rows_T, None].to(row_TW.dtype) for table_PR in tables)
    row_T1W = torch.empty_like(row_TW)[:, None]
    row_T1W[:, 0, :rank] = rms_norm(row_TW[:, :rank], row_norm, eps)
    row_T1W[..., rank:] = rotate_heads(
        row_TW[:, None, rank:], cosines, sines, is_interleaved=is_interleaved
    )
    rope_TAO = query_TAD[..., query_TAD.shape[2] + rank - width :]
    rope_TAO.copy_(rotate_heads(rope_TAO, cosines, sines, is_interleaved=is_interleaved))
    result = Projected(query_TAD, row_T1W, row_T1W[..., :0])
    return result if out is None else copied(result, out)


def rotate_heads(
    heads_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, *, is_interleaved: bool
) -> Tensor:
    """Rotate the first 2 R dimensions of heads as `qkv_rope` does; all in one type."""
    parted_TND = _part_pairs(heads_TND, cos_T1R) if is_interleaved else heads_TND
    return _rotate(parted_TND, cos_T1R, sin_T1R)


def _norm_heads(x_TY: Tensor, weight: Tensor | None, head_dim: int, steps: Steps) -> Tensor:
    if weight is None:
        return x_TY
    span = x_TY.shape[1] if weight.numel() == x_TY.shape[1] else head_dim
    rows = x_TY.reshape(-1, span)
    return rms_norm_reference(rows, weight, steps.eps, steps.norm_offset).view(x_TY.shape)


def _part_pairs(heads_TND: Tensor, cos_T1R: Tensor) -> Tensor:
    end = 2 * cos_T1R.shape[-1]
    parts = (heads_TND[..., 0:end:2], heads_TND[..., 1:end:2], heads_TND[..., end:])
    return torch.cat(parts, dim=-1)


def _rotate(heads_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    half = cos_T1R.shape[-1]
    first, second = heads_TND[..., :half], heads_TND[..., half : 2 * half]
    rotated = (first * cos_T1R + -second * sin_T1R, second * cos_T1R + first * sin_T1R)
    return torch.cat([*rotated, heads_TND[..., 2 * half :]], dim=-1)


MAX_NATIVE_EXPERTS = 1024


class Routing(NamedTuple):
    """The experts of each token by descending weight; a token's expert ids are distinct."""

    topk_ids_TK: Tensor  # int32
    topk_weights_TK: Tensor  # float32


def route(
    logits_TE: Tensor, top_k: int, *, renormalize: bool, round_to: torch.dtype | None = None
) -> Routing:
    """Choose experts: softmax over all experts in float32, then the `top_k` largest.

    Equal logits go to the lower index; NaN counts as the largest.

    Args:
        renormalize: Divide the chosen weights by their sum (Mixtral; `norm_topk_prob` elsewhere).
        round_to: Round the weights to this type. Hugging Face rounds to the type of the logits for
            Qwen2-MoE, Qwen3-MoE and OLMoE, and does not round for Mixtral.
    """
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"route: top_k is {top_k}, there are {num_experts} experts")
    if num_experts > MAX_NATIVE_EXPERTS or not _router_is_native(logits_TE):
        routing = route_reference(logits_TE, top_k, renormalize=renormalize)
    else:
        routing = Routing(
            torch.empty(num_tokens, top_k, dtype=torch.int32),
            torch.empty(num_tokens, top_k, dtype=torch.float32),
        )
        _native.route(logits_TE, renormalize, *routing)
    if round_to is None or round_to == torch.float32:
        return routing
    return routing._replace(topk_weights_TK=routing.topk_weights_TK.to(round_to).float())


def route_reference(logits_TE: Tensor, top_k: int, *, renormalize: bool) -> Routing:
    weights_TE = logits_TE.float().softmax(-1)
    order_TE = logits_TE.float().sort(stable=True, dim=-1, descending=True).indices
    ids_TK = order_TE[:, :top_k]
    weights_TK = weights_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return Routing(ids_TK.int().contiguous(), weights_TK)


def add_gated_(out_TH: Tensor, shared_TH: Tensor, gate_T1: Tensor) -> Tensor:
    """Add sigmoid(gate) * shared to `out_TH` in place (Qwen2-MoE's shared expert) and return it.

    All three tensors have one type; sigmoid, product and sum are each rounded to it.
    """
    if not all(
        _router_is_native(x) and x.dtype == out_TH.dtype for x in (out_TH, shared_TH, gate_T1)
    ):
        return out_TH.add_(gate_T1.sigmoid() * shared_TH)
    _native.add_gated(out_TH, shared_TH, gate_T1)
    return out_TH


def _router_is_native(x: Tensor) -> bool:
    return x.is_cpu and _has_rows(x)


WORD = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
GROUP_TOKENS, GROUP_COUNTERS = 64, 16  # 16 counters of 4 words serve 64 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKeys:
    """Counters of the random numbers of each row; the token id is the third counter.

    Attributes:
        sample: int32 [R], index among the samples of a prompt.
        position: int32 [R], position of the token to sample.
    """

    seed: Tensor
    row_key: Tensor
    sample: Tensor
    position: Tensor


class TopLogprobs(NamedTuple):
    """The largest log-probabilities of every row, descending; ties are ordered by token id."""

    ids_RK: Tensor  # int64
    logprobs_RK: Tensor  # float32


def argmax(logits_RV: Tensor) -> Tensor:
    """Return the first index of the largest logit of every row, int64 [R]; any float type.

    The result is -1 for a row that has a NaN or no logit above -inf: no token can be chosen.
    """
    if not _sampling_is_native(logits_RV):
        return argmax_reference(logits_RV)
    ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    _native.argmax(logits_RV, ids_R)
    return ids_R


def argmax_reference(logits_RV: Tensor) -> Tensor:
    return _first_largest(logits_RV.float())


def gumbel_argmax(logits_RV: Tensor, keys: RandomKeys, scale_R: Tensor | None = None) -> Tensor:
    """Sample a token of every row from softmax(logits * scale), int64 [R]; -1 as in `argmax`.

    Args:
        logits_RV: Any float type; tokens that must not be chosen are -inf.
        scale_R: float32 factors, such as 1 / temperature; None for 1.
    """
    if not _sampling_is_native(logits_RV):
        return gumbel_argmax_reference(logits_RV, keys, scale_R)
    ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    _native.gumbel_argmax(
        logits_RV, scale_R, keys.seed, keys.row_key, keys.sample, keys.position, ids_R
    )
    return ids_R


def gumbel_argmax_reference(
    logits_RV: Tensor, keys: RandomKeys, scale_R: Tensor | None = None
) -> Tensor:
    scaled_RV = logits_RV.float() if scale_R is None else logits_RV.float() * scale_R[:, None]
    return _first_largest(scaled_RV.double() + gumbel_noise(keys, logits_RV.shape[1]))


def pack_draws(keys: RandomKeys, scale_R: Tensor, is_greedy_R: Tensor) -> Tensor:
    """Return how `choose` chooses a token of each row, int64 [R, 4], to send in one piece.

    The columns are seed, row key, position and sample, and the bits of the scale, which are 0 where
    the largest logit is wanted.
    """
    bits_R = scale_R.contiguous().view(torch.int32).long().masked_fill(is_greedy_R, 0)
    place_R = keys.position.long() << 32 | (keys.sample.long() & WORD)
    return torch.stack([keys.seed.long(), keys.row_key.long(), place_R, bits_R], dim=1)


def choose(logits_RV: Tensor, draws_R4: Tensor) -> Tensor:
    """Choose a token of every row by `argmax` or `gumbel_argmax`, int32 [R], where the logits are.

    The host draws the same tokens: the noise and all roundings are those of its kernel.
    """
    if not (triton_runs_on(logits_RV.device) and _has_rows(logits_RV)):
        return choose_reference(logits_RV, draws_R4)
    from raymoe.kernels import gpu_elementwise  # noqa: PLC0415 - needs Triton

    ids_R = draws_R4.new_empty(len(draws_R4), dtype=torch.int32)
    gpu_elementwise.choose(logits_RV, draws_R4, ids_R).run()
    return ids_R


def choose_reference(logits_RV: Tensor, draws_R4: Tensor) -> Tensor:
    seed, row_key, place, bits = draws_R4.unbind(1)
    keys = RandomKeys(seed=seed, row_key=row_key, sample=place & WORD, position=place >> 32)
    drawn_R = gumbel_argmax_reference(logits_RV, keys, bits.int().view(torch.float32))
    return drawn_R.where(bits != 0, argmax_reference(logits_RV)).int()


def gumbel_noise(keys: RandomKeys, num_tokens: int) -> Tensor:
    """Return the Gumbel noise of tokens 0 .. num_tokens - 1, float64 [R, num_tokens]."""
    halves = [
        part.long() >> shift & WORD for part in (keys.seed, keys.row_key) for shift in (0, 32)
    ]
    zero_R = torch.zeros_like(halves[0])
    mixed = philox4x32(halves, (zero_R, zero_R))
    token_V = torch.arange(num_tokens)
    counter_V = token_V // GROUP_TOKENS * GROUP_COUNTERS + token_V % GROUP_COUNTERS
    position_R1, sample_R1 = (part.long()[:, None] & WORD for part in (keys.position, keys.sample))
    counter = [counter_V, position_R1, sample_R1, mixed[2][:, None]]
    words = philox4x32(counter, (mixed[0][:, None], mixed[1][:, None]))
    which_RV = (token_V % GROUP_TOKENS // GROUP_COUNTERS).expand_as(words[0])
    word_RV = torch.stack(words).gather(0, which_RV[None])[0]
    return -torch.log(-torch.log1p(-(word_RV.double() + 0.5) / 2**32))


def philox4x32(counter: list[Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Compute Philox4x32-10 on int64 tensors that hold 32-bit words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
    """
    key0, key1 = key
    for _ in range(10):
        product0, product1 = counter[0] * PHILOX_MULTIPLIERS[0], counter[2] * PHILOX_MULTIPLIERS[1]
        counter = [
            (product1 >> 32 & WORD) ^ counter[1] ^ key0,
            product1 & WORD,
            (product0 >> 32 & WORD) ^ counter[3] ^ key1,
            product0 & WORD,
        ]
        key0, key1 = (key0 + PHILOX_WEYL[0]) & WORD, (key1 + PHILOX_WEYL[1]) & WORD
    return counter


def log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Return the log-sum-exp of every row, float32 [R], without a float32 copy of the logits."""
    if not _sampling_is_native(logits_RV):
        return logits_RV.float().logsumexp(-1)
    out_R = torch.empty(logits_RV.shape[0], dtype=torch.float32)
    _native.log_sum_exp(logits_RV, out_R)
    return out_R


def topk_logprobs(logits_RV: Tensor, k: int) -> TopLogprobs:
    num_rows, num_tokens = logits_RV.shape
    if not 1 <= k <= num_tokens:
        raise ConfigError(f"topk_logprobs: k is {k}, the vocabulary has {num_tokens} tokens")
    if not _sampling_is_native(logits_RV):
        return topk_logprobs_reference(logits_RV, k)
    ids_RK = torch.empty(num_rows, k, dtype=torch.int64)
    values_RK = torch.empty(num_rows, k, dtype=torch.float32)
    _native.top_k(logits_RV, ids_RK, values_RK)
    return TopLogprobs(ids_RK, values_RK - log_sum_exp(logits_RV)[:, None])


def topk_logprobs_reference(logits_RV: Tensor, k: int) -> TopLogprobs:
    order_RK = logits_RV.float().sort(stable=True, dim=-1, descending=True).indices[:, :k]
    return TopLogprobs(order_RK, logits_RV.float().log_softmax(-1).gather(1, order_RK))


def _first_largest(values_RV: Tensor) -> Tensor:
    if values_RV.shape[1] == 0:
        return torch.full((values_RV.shape[0],), -1)
    ids_R = values_RV.sort(stable=True, dim=-1, descending=True).indices[:, 0]
    largest_R = values_RV.amax(-1)  # NaN if the row has one
    return ids_R.masked_fill(largest_R.isnan() | (largest_R == float("-inf")), -1)


def _sampling_is_native(logits_RV: Tensor) -> bool:
    return (
        logits_RV.ndim == 2
        and logits_RV.dtype in FLOAT_DTYPES
        and logits_RV.is_cpu
        and (logits_RV.shape[1] == 1 or logits_RV.stride(1) == 1)
    )
