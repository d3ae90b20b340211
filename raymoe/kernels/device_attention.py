"""Paged attention by torch alone, for any device: append to staged blocks, gather them, attend.

Sequences with as many new tokens go through one call together. The cache has the layout of
`paged_kv`. T tokens of the pass, S sequences, H query heads, G KV heads, D head dimension, B tokens
of a block, M blocks of the longest sequence, C = M * B, Q new tokens of each sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from raymoe.kernels.cpu_rope import Projected
from raymoe.kernels.paged_batch import PagedBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS, VALUE_COLUMNS, KvLayout

_GROWTH = 8


def append_and_attend_paged(
    projected: Projected,
    cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """As `cpu_attention.append_and_attend`, on the device of its arguments; [T, H * D]."""
    query_THD = projected.query_THD
    _, num_kv_heads, head_dim = projected.key_TGD.shape
    layout = KvLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=cache.dtype)
    _append(projected, cache, batch, layout)
    out_THD = torch.empty_like(query_THD)
    for group in batch.groups:
        query_SHQD = query_THD[group.rows_SQ].transpose(1, 2)
        keys_SGCD, values_SGCD = (
            gathered.masked_fill(group.is_rest(gathered.shape[2])[:, None, :, None], 0)
            for gathered in _gather(cache, group.block_table_SM, layout)
        )
        operands = _Operands(
            query_SHQD,
            keys_SGCD.to(query_SHQD.dtype),
            values_SGCD.to(query_SHQD.dtype),
            group.visible(keys_SGCD.shape[2], sliding_window)[:, None],
        )
        if sinks_H is not None:
            operands = _with_sinks(operands, sinks_H / scale)
        attended_SHQD = scaled_dot_product_attention(*operands, scale=scale, enable_gqa=True)
        out_THD[group.rows_SQ] = attended_SHQD[..., :head_dim].transpose(1, 2)
    return out_THD.flatten(1)


class _Operands(NamedTuple):
    """Of one call of torch's attention; the last says which positions each new token sees."""

    query_SHQD: Tensor
    keys_SGCD: Tensor
    values_SGCD: Tensor
    visible_S1QC: Tensor


def _with_sinks(operands: _Operands, sinks_H: Tensor) -> _Operands:
    """One more position, whose score is the sink of each head and whose value is zero.

    It needs a dimension of its own: there the key of that position is 1, and that of a query the
    sink, divided by the scale. Both grow by 8 rather than 1: kernels want aligned sizes.
    """
    query_SHQD, keys_SGCD, values_SGCD, visible_S1QC = operands
    head_dim, num_positions = query_SHQD.shape[-1], keys_SGCD.shape[2]
    query_SHQD = pad(query_SHQD, (0, _GROWTH))
    query_SHQD[..., head_dim] = sinks_H[:, None]
    keys_SGCD = pad(keys_SGCD, (0, _GROWTH, 0, _GROWTH))
    keys_SGCD[:, :, num_positions, head_dim] = 1
    values_SGCD = pad(values_SGCD, (0, _GROWTH, 0, _GROWTH))
    visible_S1QC = pad(visible_S1QC, (0, _GROWTH))
    visible_S1QC[..., num_positions] = True
    return _Operands(query_SHQD, keys_SGCD, values_SGCD, visible_S1QC)


def _append(projected: Projected, cache: Tensor, batch: PagedBatch, layout: KvLayout) -> None:
    num_tokens, num_kv_heads, head_dim = projected.key_TGD.shape
    pair, blocks_T, offsets_T = layout.pair, batch.blocks_T, batch.offsets_T
    keys, tiles = _views(cache, layout)
    paired = projected.key_TGD.view(num_tokens, num_kv_heads, head_dim // pair, pair)
    keys[blocks_T, :, :, offsets_T] = paired.to(cache.dtype)
    columns = torch.split(projected.value_TGD, VALUE_COLUMNS, dim=2)
    for tile, value_TGC in zip(tiles, columns, strict=True):
        tile[blocks_T, :, offsets_T // pair, :, offsets_T % pair] = value_TGC.to(cache.dtype)


def _gather(cache: Tensor, table_SM: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of whole blocks, [S, G, C, D] each."""
    keys, tiles = _views(cache, layout)
    # [S, M, G, D / P, B, P] and, of each tile, [S, M, G, B / P, columns, P]
    keys_SGCD = keys[table_SM].permute(0, 2, 1, 4, 3, 5).flatten(4, 5).flatten(2, 3)
    values = [tile[table_SM].permute(0, 2, 1, 3, 5, 4).flatten(2, 4) for tile in tiles]
    return keys_SGCD, torch.cat(values, dim=3)


def _views(cache: Tensor, layout: KvLayout) -> tuple[Tensor, list[Tensor]]:
    """Keys [N, G, D / P, B, P] and the tiles of the values, [N, G, B / P, columns, P] each."""
    num_blocks, num_kv_heads, pair = len(cache), layout.num_kv_heads, layout.pair
    shape = (num_blocks, num_kv_heads, layout.head_dim // pair, BLOCK_TOKENS, pair)
    tiles = [
        tile.view(num_blocks, num_kv_heads, BLOCK_TOKENS // pair, -1, pair)
        for tile in torch.split(cache[:, :, 1], BLOCK_TOKENS * VALUE_COLUMNS, dim=2)
    ]
    return cache[:, :, 0].view(shape), tiles
