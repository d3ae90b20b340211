"""Latent attention of a pass over the paged cache on the CPU, in absorbed form.

T tokens of the pass, S sequences, H query heads, R rank of the latent, W = R + rotated dimensions,
N blocks, B tokens of a block.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; appendix C for the absorbed form.
"""

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS


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
