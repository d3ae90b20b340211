"""Paged attention by torch alone, for any device: append to staged blocks, gather them, attend.

Sequences with as many new tokens go through one call together. The cache has the layout of
`paged_kv`. T tokens of the pass, S sequences, H query heads, G KV heads, D head dimension, B tokens
of a block, M blocks of the longest sequence, C = M * B, Q new tokens of each sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_rope import Projected
from raymoe.kernels.paged_kv import BLOCK_TOKENS, VALUE_COLUMNS, KvLayout

# Gathered keys and values of one call: room beside weights and caches is scarce.
GATHERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with Q new tokens each: their rows in the pass, blocks and contexts."""

    rows_SQ: Tensor
    block_table_SM: Tensor
    context_S: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """An `AttentionBatch` as indices on the device, made once for all layers of a pass."""

    blocks_T: Tensor
    offsets_T: Tensor
    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, batch: AttentionBatch, layout: KvLayout, device: torch.device) -> Self:
        """Work the indices out on the host and send them to `device`.

        Args:
            batch: On the host.
            layout: Of the cache; decides how many sequences go into one group.
            device: Where attention will run.
        """
        starts, contexts = batch.query_start.long(), batch.context_tokens.long()
        takes = starts.diff()
        sequence_T = torch.repeat_interleave(takes)
        positions_T = torch.arange(len(sequence_T)) + (contexts - starts[1:])[sequence_T]
        blocks_T = batch.block_table.long()[sequence_T, positions_T // BLOCK_TOKENS]
        groups = [
            _Group(
                (starts[members, None] + torch.arange(take)).to(device),
                _blocks(batch, contexts, members, num_blocks).to(device),
                contexts[members].to(device),
            )
            for members, take, num_blocks in _group(takes, contexts, layout)
        ]
        offsets_T = positions_T % BLOCK_TOKENS
        return cls(blocks_T.to(device), offsets_T.to(device), tuple(groups))


def append_and_attend_paged(
    projected: Projected,
    cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
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
            _without_rest(gathered, group).to(query_SHQD.dtype)
            for gathered in _gather(cache, group.block_table_SM, layout)
        )
        attended_SHQD = scaled_dot_product_attention(
            query_SHQD,
            keys_SGCD,
            values_SGCD,
            attn_mask=_visible(group, keys_SGCD.shape[2], sliding_window),
            scale=scale,
            enable_gqa=True,
        )
        out_THD[group.rows_SQ] = attended_SHQD.transpose(1, 2)
    return out_THD.flatten(1)


def _group(takes: Tensor, contexts: Tensor, layout: KvLayout) -> Iterator[tuple[Tensor, int, int]]:
    """Sequences of one group, their new tokens, and the blocks of the longest of them."""
    num_blocks = -(-contexts // BLOCK_TOKENS)
    for take in sorted(set(takes.tolist())):
        members = (takes == take).nonzero().flatten()
        members = members[num_blocks[members].argsort(stable=True)]
        longest = int(num_blocks[members].max())
        at_once = max(1, GATHERED_BYTES // (longest * layout.block_bytes))
        for chunk in members.split(at_once):
            yield chunk, take, int(num_blocks[chunk].max())


def _blocks(batch: AttentionBatch, contexts: Tensor, members: Tensor, num_blocks: int) -> Tensor:
    """Block tables of some sequences; block 0 stands where a sequence has no block."""
    is_used = torch.arange(num_blocks) * BLOCK_TOKENS < contexts[members, None]
    return batch.block_table[members, :num_blocks].long().where(is_used, 0)


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


def _without_rest(gathered_SGCD: Tensor, group: _Group) -> Tensor:
    """Zero behind the context of each sequence: what lies there may be NaN."""
    position_C = torch.arange(gathered_SGCD.shape[2], device=gathered_SGCD.device)
    is_rest_SC = position_C >= group.context_S[:, None]
    return gathered_SGCD.masked_fill(is_rest_SC[:, None, :, None], 0)


def _visible(group: _Group, num_positions: int, sliding_window: int | None) -> Tensor:
    """Which positions each new token sees, [S, 1, Q, C]."""
    num_new = group.rows_SQ.shape[1]
    device = group.context_S.device
    first_S1 = group.context_S[:, None] - num_new
    query_SQ1 = (first_S1 + torch.arange(num_new, device=device))[..., None]
    key_C = torch.arange(num_positions, device=device)
    visible_SQC = key_C <= query_SQ1
    if sliding_window is not None:
        visible_SQC &= key_C > query_SQ1 - sliding_window
    return visible_SQC[:, None]
