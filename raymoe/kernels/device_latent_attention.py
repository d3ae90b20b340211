"""Paged latent attention by torch alone, for any device: append to staged blocks, gather, attend.

The cache has the layout of `paged_latent`. S sequences of a group, Q new tokens of each, q of them
at a time, C positions of the longest, h heads at a time; other letters as in `latent_forms`.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from raymoe.kernels.latent_forms import LatentHeads
from raymoe.kernels.paged_batch import GATHERED_BYTES, PagedBatch


def append_and_attend_latent_paged(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    *,
    heads: LatentHeads,
    scale: float,
) -> Tensor:
    """Append the rows of the pass to the cache and attend; [T, H, V].

    The new tokens of a sequence take the form that is the cheaper one for so many of them.

    Args:
        query_THD: Plain, rotated already.
        latent_TW: The rows of the new tokens.
        cache: Blocks of one layer on the device of all arguments; changed in place.
        batch: The sequences.
        heads: Unfolds rows; of the type of the queries.
        scale: Factor of the scores.
    """
    cache[batch.blocks_T, batch.offsets_T] = latent_TW.to(cache.dtype)
    out_THV = query_THD.new_empty(*query_THD.shape[:2], heads.value_dim)
    for group in batch.groups:
        rows_SCW = cache[group.block_table_SM].flatten(1, 2)
        num_positions, num_new = rows_SCW.shape[1], group.rows_SQ.shape[1]
        rows_SCW = rows_SCW.masked_fill(group.is_rest(num_positions)[..., None], 0)
        attend = attend_plain if num_new >= heads.fewest_plain_tokens else attend_absorbed
        out_THV[group.rows_SQ] = attend(
            query_THD[group.rows_SQ],
            rows_SCW.to(query_THD.dtype),
            group.visible(num_positions),
            heads,
            scale=scale,
        )
    return out_THV


def attend_plain(
    query_SQHD: Tensor,
    rows_SCW: Tensor,
    visible_SQC: Tensor,
    heads: LatentHeads,
    *,
    scale: float,
) -> Tensor:
    """Attention over keys and values that are unfolded some heads at a time; [S, Q, H, V]."""
    num_heads = query_SQHD.shape[2]
    unfolded_dim = heads.query_dim + heads.nope_dim + 2 * heads.value_dim
    row_bytes = unfolded_dim * query_SQHD.dtype.itemsize
    at_once = max(1, GATHERED_BYTES // (rows_SCW[..., 0].numel() * row_bytes))
    attended = []
    for first in range(0, num_heads, at_once):
        some = slice(first, min(first + at_once, num_heads))
        keys_SChD, values_SChV = heads.keys_and_values(rows_SCW, some)
        attended.append(
            scaled_dot_product_attention(
                query_SQHD[:, :, some].transpose(1, 2),
                keys_SChD.transpose(1, 2),
                values_SChV.transpose(1, 2),
                attn_mask=visible_SQC[:, None],
                scale=scale,
            )
        )
    return torch.cat(attended, dim=1).transpose(1, 2)


def attend_absorbed(
    query_SQHD: Tensor,
    rows_SCW: Tensor,
    visible_SQC: Tensor,
    heads: LatentHeads,
    *,
    scale: float,
) -> Tensor:
    """Attention over the rows as they are, some new tokens at a time; [S, Q, H, V]."""
    (num_sequences, num_positions, _), num_heads = rows_SCW.shape, query_SQHD.shape[2]
    score_bytes = num_sequences * num_heads * num_positions * torch.float32.itemsize
    at_once = max(1, GATHERED_BYTES // score_bytes)
    attended = []
    for query_SqHD, visible_SqC in zip(
        torch.split(query_SQHD, at_once, 1), torch.split(visible_SQC, at_once, 1), strict=True
    ):
        tokens = query_SqHD.shape[:2]
        absorbed_SqHW = heads.absorb(query_SqHD.flatten(0, 1)).view(*tokens, num_heads, -1)
        scores_SqHC = torch.einsum("sqhw,scw->sqhc", absorbed_SqHW, rows_SCW).float() * scale
        hidden_SqHC = ~visible_SqC[:, :, None]
        weights_SqHC = scores_SqHC.masked_fill(hidden_SqHC, -torch.inf).softmax(-1)
        latent_SCR = rows_SCW[..., : heads.rank]
        result_SqHR = torch.einsum("sqhc,scr->sqhr", weights_SqHC.to(latent_SCR.dtype), latent_SCR)
        attended_THV = heads.unfold(result_SqHR.flatten(0, 1))
        attended.append(attended_THV.reshape(*tokens, num_heads, -1))
    return torch.cat(attended, dim=1)
