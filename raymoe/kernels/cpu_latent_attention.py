"""Latent attention of a pass over the paged cache on the CPU, in absorbed form.

T tokens of the pass, S sequences, H query heads, R rank of the latent, W = R + rotated dimensions,
N blocks, B tokens of a block.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; appendix C for the absorbed form.
"""

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch, append, append_and_attend
from raymoe.kernels.paged_kv import BLOCK_TOKENS, KvLayout, LatentHeads


def append_and_attend_latent(
    query_THW: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    rank: int,
    scale: float,
) -> Tensor:
    """Append the rows of the pass to the cache, then attend causally; returns [T, H, R].

    Scores and sums are float32; the order of sums of a token depends only on its own position,
    never on the batch or the number of threads.

    Args:
        query_THW: float32, float16 or bfloat16; each head's query of the latent, then its rotated
            part.
        latent_TW: Same type; the latent and the rotated key of each token.
        cache: One layer's blocks, [N, B, W] in the layout of `paged_latent`; changed in place.
        batch: Ragged shape of the pass.
        rank: R; results are sums of the first R elements of the rows.
        scale: Factor of the scores, positive.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    num_tokens, num_heads, _ = query_THW.shape
    out_THR = query_THW.new_empty(num_tokens, num_heads, rank)
    try:
        _native.append_and_attend_latent(
            query_THW,
            latent_TW,
            cache,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            out_THR,
            scale,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_THR


def append_latent(latent_TW: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
    """Append the rows of the pass to the cache and attend to nothing.

    Arguments and errors as in `append_and_attend_latent`.
    """
    try:
        _native.append_latent(
            latent_TW, cache, batch.query_start, batch.context_tokens, batch.block_table
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def append_latent_reference(latent_TW: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
    """The plain reference of `append_latent`."""
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        for offset in range(end - begin):
            index, row = divmod(context - (end - begin) + offset, BLOCK_TOKENS)
            block = int(batch.block_table[sequence, index])
            cache[block, row] = latent_TW[begin + offset].to(cache.dtype)


def append_and_attend_latent_reference(
    query_THW: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    rank: int,
    scale: float,
) -> Tensor:
    """The plain reference of `append_and_attend_latent`; float64 for queries of float64."""
    append_latent_reference(latent_TW, cache, batch)
    wide = torch.float64 if query_THW.dtype == torch.float64 else torch.float32
    out_THR = query_THW.new_empty(*query_THW.shape[:2], rank)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].long()
        rows_CW = cache[blocks].flatten(0, 1)[:context].to(wide)
        query_QHW = query_THW[begin:end].to(wide)
        scores_QHC = scale * torch.einsum("qhw,cw->qhc", query_QHW, rows_CW)
        position_Q11 = torch.arange(context - (end - begin), context)[:, None, None]
        is_hidden = torch.arange(context) > position_Q11
        weights_QHC = scores_QHC.masked_fill(is_hidden, float("-inf")).softmax(-1)
        out_THR[begin:end] = (weights_QHC @ rows_CW[:, :rank]).to(out_THR.dtype)
    return out_THR


UNFOLDED_BYTES = 64 << 20  # keys and values of the heads that are unfolded at a time


def append_and_attend_unfolded(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    heads: LatentHeads,
    scale: float,
) -> Tensor:
    """Append the rows of the pass to the cache, then attend causally; returns [T, H, V].

    Args:
        query_THD: Rotated already.
        latent_TW: The rows of the new tokens.
        cache: One layer's blocks in the layout of `paged_latent`; changed in place.
        batch: Ragged shape of the pass.
        heads: Unfolds rows; of the type of the queries.
        scale: Factor of the scores, positive.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit.
    """
    append_latent(latent_TW, cache, batch)
    out_THV = query_THD.new_empty(*query_THD.shape[:2], heads.value_dim)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        new = slice(starts[sequence], starts[sequence + 1])
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].long()
        rows_CW = cache[blocks].flatten(0, 1)[:context].to(query_THD.dtype)
        out_THV[new] = _attend(query_THD[new], rows_CW, heads, scale)
    return out_THV


def _attend(query_QHD: Tensor, rows_CW: Tensor, heads: LatentHeads, scale: float) -> Tensor:
    """Attention of one sequence, some heads after the other."""
    num_heads, context = query_QHD.shape[1], len(rows_CW)
    # The kernel has one size for keys and values; what is added to either is zero.
    dim = -(-max(heads.query_dim, heads.value_dim) // 8) * 8
    one_head = KvLayout(num_kv_heads=1, head_dim=dim, dtype=query_QHD.dtype)
    num_blocks = -(-context // BLOCK_TOKENS)
    at_once = max(1, UNFOLDED_BYTES // (num_blocks * one_head.block_bytes))
    out_QHV = query_QHD.new_empty(*query_QHD.shape[:2], heads.value_dim)
    for first in range(0, num_heads, at_once):
        some = slice(first, min(first + at_once, num_heads))
        keys_ChD, values_ChV = heads.keys_and_values(rows_CW, some)
        attended_QX = _attend_unfolded(
            _padded(query_QHD[:, some], dim),
            _padded(keys_ChD, dim),
            _padded(values_ChV, dim),
            scale,
        )
        attended_QhD = attended_QX.view(len(query_QHD), -1, dim)
        out_QHV[:, some] = attended_QhD[..., : heads.value_dim]
    return out_QHV


def _attend_unfolded(
    query_QhD: Tensor, keys_ChD: Tensor, values_ChD: Tensor, scale: float
) -> Tensor:
    """Causal attention of the last Q tokens over all keys; [Q, h * D]."""
    (context, num_heads, dim), new_tokens = keys_ChD.shape, len(query_QhD)
    layout = KvLayout(num_kv_heads=num_heads, head_dim=dim, dtype=keys_ChD.dtype)
    num_blocks = -(-context // BLOCK_TOKENS)
    unfolded = keys_ChD.new_empty(num_blocks, *layout.block_shape)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    past = context - new_tokens
    if past:
        append(keys_ChD[:past], values_ChD[:past], unfolded, _one_sequence(past, past, table))
    return append_and_attend(
        query_QhD,
        keys_ChD[past:],
        values_ChD[past:],
        unfolded,
        _one_sequence(new_tokens, context, table),
        scale=scale,
    )


def _one_sequence(new_tokens: int, context: int, table: Tensor) -> AttentionBatch:
    return AttentionBatch(
        query_start=torch.tensor([0, new_tokens], dtype=torch.int32),
        context_tokens=torch.tensor([context], dtype=torch.int32),
        block_table=table,
    )


def _padded(heads_ThD: Tensor, dim: int) -> Tensor:
    return functional.pad(heads_ThD, (0, dim - heads_ThD.shape[2])).contiguous()
