"""Paged latent attention on a GPU by our kernels, in both forms.

Needs Triton. The reference is `device_latent_attention`, torch alone. T tokens of the pass, A of
them alone, C positions; other letters as in `latent_forms`.
"""

from torch import Tensor

from raymoe.kernels.device_attention_batch import LatentRaggedBatch, Unfolded
from raymoe.kernels.device_attention_choice import AttentionCompute
from raymoe.kernels.device_attention_launches import Attending, DeviceCache, Scoring
from raymoe.kernels.latent_forms import LatentHeads
from raymoe.kernels.paged_batch import GATHERED_BYTES
from raymoe.kernels.paged_latent import LatentLayout


def append_and_attend_latent_ragged(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: LatentRaggedBatch,
    *,
    heads: LatentHeads,
    scoring: Scoring,
) -> Tensor:
    """Append the rows of the pass to the cache and attend; [T, H, V].

    Tokens that are attended to alone take the absorbed form, which reads nothing but the cache; the
    others the plain one, over keys and values that are unfolded some heads at a time.

    Args:
        query_THD: Plain, rotated already.
        latent_TW: The rows of the new tokens.
        cache: Blocks of one layer, [N, B, W]; changed in place.
        batch: The sequences.
        heads: Unfolds rows; of the type of the queries.
        scoring: What queries do with keys.
    """
    cache.view(-1, cache.shape[2])[batch.slots_T] = latent_TW.to(cache.dtype)
    out_THV = query_THD.new_empty(*query_THD.shape[:2], heads.value_dim)
    if len(batch.tokens_A):
        _attend_absorbed(query_THD, cache, batch, out_THV, heads=heads, scoring=scoring)
    for unfolded in batch.unfolded:
        _attend_plain(
            query_THD,
            cache,
            unfolded,
            out_THV,
            compute=batch.compute,
            heads=heads,
            scoring=scoring,
        )
    return out_THV


def _attend_absorbed(
    query_THD: Tensor,
    cache: Tensor,
    batch: LatentRaggedBatch,
    out_THV: Tensor,
    *,
    heads: LatentHeads,
    scoring: Scoring,
) -> None:
    layout = LatentLayout(rank=heads.rank, rope_dim=heads.rope_dim, dtype=cache.dtype)
    absorbed_AHW = heads.absorb(query_THD[batch.tokens_A])
    result_AHR = absorbed_AHW.new_empty(*absorbed_AHW.shape[:2], layout.rank)
    Attending(
        query_THD=absorbed_AHW,
        cache=DeviceCache.of_latents(cache, layout, batch.table_SM),
        out_THV=result_AHR,
        compute=batch.compute,
        scoring=scoring,
    ).run(batch.alone)
    out_THV[batch.tokens_A] = heads.unfold(result_AHR)


def _attend_plain(
    query_THD: Tensor,
    cache: Tensor,
    unfolded: Unfolded,
    out_THV: Tensor,
    *,
    compute: AttentionCompute,
    heads: LatentHeads,
    scoring: Scoring,
) -> None:
    rows_CW = cache.view(-1, cache.shape[2])[unfolded.rows_C].to(query_THD.dtype)
    unfolded_dim = heads.query_dim + heads.nope_dim + 2 * heads.value_dim
    head_bytes = len(rows_CW) * unfolded_dim * rows_CW.dtype.itemsize
    num_heads = query_THD.shape[1]
    at_once = max(1, GATHERED_BYTES // head_bytes)
    for first in range(0, num_heads, at_once):
        some = slice(first, min(first + at_once, num_heads))
        keys_ChD, values_ChV = heads.keys_and_values(rows_CW, some)
        Attending(
            query_THD=query_THD[:, some],
            cache=DeviceCache.of_rows(keys_ChD, values_ChV, unfolded.starts_S1),
            out_THV=out_THV[:, some],
            compute=compute,
            scoring=scoring,
        ).run(unfolded.tiles)
