"""Paged attention with torch operators alone, for any device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from raymoe.kernels.cpu_attention import AttentionBatch, Chosen, softmax_with_sinks
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.latent_heads import LatentHeads
from raymoe.kernels.paged_kv import (
    BLOCK_TOKENS,
    GATHERED_BYTES,
    CacheLayout,
    KvLayout,
    block_views,
    scale_views,
    unrotated,
    write_rows,
)
from raymoe.kernels.selection import (
    IndexRows,
    Pools,
    chosen_blocks_of,
    chosen_of,
    index_scores,
)
from raymoe.specs.attention.grouped import BlockIndexerSpec


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with Q new tokens each: their rows in the step, blocks and contexts."""

    rows_SQ: Tensor
    block_table_SM: Tensor
    context_S: Tensor

    def visible(self, num_positions: int, sliding_window: int | None = None) -> Tensor:
        """Mask of the first positions that each new token sees, [S, Q, C]."""
        num_new, device = self.rows_SQ.shape[1], self.context_S.device
        first_S1 = self.context_S[:, None] - num_new
        query_SQ1 = (first_S1 + torch.arange(num_new, device=device))[..., None]
        key_C = torch.arange(num_positions, device=device)
        visible_SQC = key_C <= query_SQ1
        if sliding_window is not None:
            visible_SQC &= key_C > query_SQ1 - sliding_window
        return visible_SQC

    def is_rest(self, num_positions: int) -> Tensor:
        """Mask of positions beyond each context, [S, C]; the cache may hold NaN there."""
        position_C = torch.arange(num_positions, device=self.context_S.device)
        return position_C >= self.context_S[:, None]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """An `AttentionBatch` as indices for the device, made once for all layers of a step."""

    blocks_T: Tensor
    offsets_T: Tensor
    groups: tuple[Group, ...]
    pools: Pools | None = None
    chosen: Chosen = field(default_factory=Chosen, compare=False)

    @classmethod
    def of(cls, batch: AttentionBatch, layout: CacheLayout) -> Self:
        """Compute the indices, on the host."""
        starts, contexts = batch.query_start.long(), batch.context_tokens.long()
        num_scheduled_tokens = starts.diff()
        sequence_T = torch.repeat_interleave(num_scheduled_tokens)
        positions_T = torch.arange(len(sequence_T)) + (contexts - starts[1:])[sequence_T]
        blocks_T = batch.block_table.long()[sequence_T, positions_T // BLOCK_TOKENS]
        groups = [
            Group(
                starts[members, None] + torch.arange(take),
                _blocks(batch, contexts, members, num_blocks),
                contexts[members],
            )
            for members, take, num_blocks in _group(num_scheduled_tokens, contexts, layout)
        ]
        return cls(blocks_T, positions_T % BLOCK_TOKENS, tuple(groups))


def _group(
    num_scheduled_tokens: Tensor, contexts: Tensor, layout: CacheLayout
) -> Iterator[tuple[Tensor, int, int]]:
    num_blocks = -(-contexts // BLOCK_TOKENS)
    for take in sorted(set(num_scheduled_tokens.tolist())):
        members = (num_scheduled_tokens == take).nonzero().flatten()
        members = members[num_blocks[members].argsort(stable=True)]
        longest = int(num_blocks[members].max())
        at_once = max(1, GATHERED_BYTES // (longest * layout.block_bytes))
        for chunk in members.split(at_once):
            yield chunk, take, int(num_blocks[chunk].max())


def _blocks(batch: AttentionBatch, contexts: Tensor, members: Tensor, num_blocks: int) -> Tensor:
    is_used = torch.arange(num_blocks) * BLOCK_TOKENS < contexts[members, None]
    return batch.block_table[members, :num_blocks].long().where(is_used, 0)


_GROWTH = 8


def append_and_attend_paged(
    projected: Projected,
    cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
    masks_SGQC: Sequence[Tensor] | None = None,
) -> Tensor:
    """Compute what `cpu_attention.append_and_attend` does, on the device of its arguments.

    Args:
        masks_SGQC: Of each group, the positions that each token attends to by each KV head; None
            for all in the window.
    """
    query_THD, key_TGD, value_TGV = projected
    layout = KvLayout.of(key_TGD, value_TGV, cache.dtype)
    write_rows(cache, (batch.blocks_T, batch.offsets_T), (key_TGD, value_TGV), layout)
    out_THV = query_THD.new_empty(*query_THD.shape[:2], layout.value_dim)
    for i, group in enumerate(batch.groups):
        query_SHQD = query_THD[group.rows_SQ].transpose(1, 2)
        keys_SGCD, values_SGCV = (
            gathered.masked_fill(group.is_rest(gathered.shape[2])[:, None, :, None], 0)
            for gathered in _gather(cache, group.block_table_SM, layout)
        )
        visible_SHQC = group.visible(keys_SGCD.shape[2], sliding_window)[:, None]
        if masks_SGQC is not None:
            heads = query_THD.shape[1] // layout.num_kv_heads
            visible_SHQC = masks_SGQC[i].repeat_interleave(heads, dim=1)
        operands = _Operands(
            query_SHQD,
            keys_SGCD.to(query_SHQD.dtype),
            values_SGCV.to(query_SHQD.dtype),
            visible_SHQC,
        )
        if sinks_H is not None:
            operands = _with_sinks(operands, sinks_H / scale)
        attended_SHQV = scaled_dot_product_attention(*operands, scale=scale, enable_gqa=True)
        out_THV[group.rows_SQ] = attended_SHQV[..., : layout.value_dim].transpose(1, 2)
    return out_THV.flatten(1)


class _Operands(NamedTuple):
    query_SHQD: Tensor
    keys_SGCD: Tensor
    values_SGCV: Tensor
    visible_SHQC: Tensor


def _with_sinks(operands: _Operands, sinks_H: Tensor) -> _Operands:
    """Append a position whose score is the sink of each head and whose value is zero.

    The position has a dimension of its own: its key is 1 there, and a query the sink divided by the
    scale. Positions and dimensions grow by 8 instead of 1, because kernels need aligned sizes.
    """
    query_SHQD, keys_SGCD, values_SGCV, visible_SHQC = operands
    head_dim, num_positions = query_SHQD.shape[-1], keys_SGCD.shape[2]
    query_SHQD = pad(query_SHQD, (0, _GROWTH))
    query_SHQD[..., head_dim] = sinks_H[:, None]
    keys_SGCD = pad(keys_SGCD, (0, _GROWTH, 0, _GROWTH))
    keys_SGCD[:, :, num_positions, head_dim] = 1
    values_SGCV = pad(values_SGCV, (0, _GROWTH, 0, _GROWTH))
    visible_SHQC = pad(visible_SHQC, (0, _GROWTH))
    visible_SHQC[..., num_positions] = True
    return _Operands(query_SHQD, keys_SGCD, values_SGCV, visible_SHQC)


def _gather(cache: Tensor, table_SM: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor]:
    keys, tiles = block_views(cache, layout)
    # [S, M, G, D / P, B, P] and, for each tile, [S, M, G, B / P, columns, P]
    keys_SGCD = keys[table_SM].permute(0, 2, 1, 4, 3, 5).flatten(4, 5).flatten(2, 3)
    values = [tile[table_SM].permute(0, 2, 1, 3, 5, 4).flatten(2, 4) for tile in tiles]
    values_SGCV = torch.cat(values, dim=3)
    if not layout.is_scaled:
        return keys_SGCD, values_SGCV
    key_SGC, value_SGC = (
        scales_NGB[table_SM].transpose(1, 2).flatten(2) for scales_NGB in scale_views(cache, layout)
    )
    keys_SXD = (keys_SGCD * key_SGC[..., None]).flatten(1, 2)
    return unrotated(keys_SXD).view(keys_SGCD.shape), values_SGCV * value_SGC[..., None]


def append_and_attend_latent_paged(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    *,
    heads: LatentHeads,
    scale: float,
    masks_SQC: Sequence[Tensor] | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Append the latent rows of the step to the cache in place and attend; [T, H, V].

    The new tokens of a sequence use the form that needs fewer operations for so many tokens.

    Args:
        cache: Blocks [N, B, W]; they may be strided.
        masks_SQC: Of each group, the positions that each token attends to; None for all.
    """
    cache[batch.blocks_T, batch.offsets_T] = latent_TW.to(cache.dtype)
    out_THV = query_THD.new_empty(*query_THD.shape[:2], heads.value_dim)
    for i, group in enumerate(batch.groups):
        rows_SCW = cache[group.block_table_SM].flatten(1, 2)
        num_positions, num_new = rows_SCW.shape[1], group.rows_SQ.shape[1]
        rows_SCW = rows_SCW.masked_fill(group.is_rest(num_positions)[..., None], 0)
        attend = attend_plain if num_new >= heads.min_plain_tokens else attend_absorbed
        out_THV[group.rows_SQ] = attend(
            query_THD[group.rows_SQ],
            rows_SCW.to(query_THD.dtype),
            group.visible(num_positions) if masks_SQC is None else masks_SQC[i],
            heads,
            scale=scale,
            sinks_H=sinks_H,
        )
    return out_THV


def choose_paged(
    rows: IndexRows, keys_NEI: Tensor, batch: PagedBatch, top_k: int, *, entry_tokens: int = 1
) -> tuple[Tensor, ...]:
    """Masks of chosen positions, [S, Q, C] by group.

    Chooses what `selection.choose_positions` does, but for scores that rounding makes differ, and
    adds the tokens behind the last whole entry.
    """
    return tuple(
        _chosen_mask(rows, keys_NEI, group, top_k, entry_tokens=entry_tokens)
        for group in batch.groups
    )


def _chosen_mask(
    rows: IndexRows, keys_NEI: Tensor, group: Group, top_k: int, *, entry_tokens: int
) -> Tensor:
    keys_SCI = keys_NEI[group.block_table_SM].flatten(1, 2)
    _, num_entries, head_dim = keys_SCI.shape
    visible_SQX = group.visible(num_entries * entry_tokens)
    if num_entries <= top_k:
        return visible_SQX
    mask_SQC = visible_SQX[..., entry_tokens - 1 :: entry_tokens].clone()
    tail_SQX = visible_SQX & ~mask_SQC.repeat_interleave(entry_tokens, 2)
    weight_SQJ = rows.weight_TJ[group.rows_SQ]
    query_SQX = rows.query_TX[group.rows_SQ]
    query_SQJI = query_SQX.view(*query_SQX.shape[:2], -1, head_dim)
    product_bytes = weight_SQJ[:, 0].numel() * num_entries * torch.float32.itemsize
    at_once = max(1, GATHERED_BYTES // product_bytes)
    for first in range(0, mask_SQC.shape[1], at_once):
        some = slice(first, first + at_once)
        scores_SqC = index_scores(query_SQJI[:, some], weight_SQJ[:, some], keys_SCI)
        scores_SqC = scores_SqC.masked_fill(~mask_SQC[:, some], -torch.inf)
        chosen_SqK = chosen_of(scores_SqC, top_k)
        is_chosen_SqC = torch.zeros_like(mask_SQC[:, some]).scatter_(2, chosen_SqK, value=True)
        mask_SQC[:, some] &= is_chosen_SqC
    return mask_SQC.repeat_interleave(entry_tokens, 2) | tail_SQX


def choose_blocks_paged(
    query_TX: Tensor, keys_NBI: Tensor, batch: PagedBatch, spec: BlockIndexerSpec
) -> tuple[Tensor, ...]:
    """Masks of the positions in chosen blocks, [S, G, Q, C] by group; keys are in the cache.

    Chooses what `selection.choose_blocks` does, but for scores that rounding makes differ.
    """
    return tuple(_blocks_mask(query_TX, keys_NBI, group, spec) for group in batch.groups)


def _blocks_mask(
    query_TX: Tensor, keys_NBI: Tensor, group: Group, spec: BlockIndexerSpec
) -> Tensor:
    keys_SCI = keys_NBI[group.block_table_SM].flatten(1, 2).float()
    num_positions = keys_SCI.shape[1]
    visible_S1QC = group.visible(num_positions)[:, None]
    mask_SGQC = visible_S1QC.repeat(1, spec.num_heads, 1, 1)
    if num_positions <= spec.num_seen:
        return mask_SGQC
    query_SQX = query_TX[group.rows_SQ].float()
    shape = (*query_SQX.shape[:2], spec.num_heads, spec.head_dim)
    query_SGQI = query_SQX.view(shape).transpose(1, 2)
    position_bytes = len(keys_SCI) * spec.num_heads * torch.float32.itemsize
    at_once = max(1, GATHERED_BYTES // (position_bytes * num_positions))
    for first in range(0, mask_SGQC.shape[2], at_once):
        some = slice(first, first + at_once)
        scores_SGqC = torch.matmul(query_SGQI[:, :, some], keys_SCI[:, None].transpose(2, 3))
        scores_SGqC = scores_SGqC.masked_fill(~visible_S1QC[:, :, some], -torch.inf)
        spare = -num_positions % spec.block_tokens
        padded_SGqC = pad(scores_SGqC, (0, spare), value=-torch.inf)
        parts = torch.split(padded_SGqC, spec.block_tokens, dim=3)
        scores_SGqY = torch.stack([part.amax(3) for part in parts], dim=3)
        own_S1q1 = (visible_S1QC[:, :, some].sum(3, keepdim=True) - 1) // spec.block_tokens
        chosen_SGqK = chosen_blocks_of(scores_SGqY, own_S1q1, spec.top_k, spec.num_local)
        is_chosen_SGqY = torch.zeros_like(scores_SGqY, dtype=torch.bool)
        is_chosen_SGqY.scatter_(3, chosen_SGqK, value=True)
        is_chosen_SGqC = is_chosen_SGqY.repeat_interleave(spec.block_tokens, 3)
        mask_SGQC[:, :, some] &= is_chosen_SGqC[..., :num_positions]
    return mask_SGQC


def attend_plain(
    query_SQHD: Tensor,
    rows_SCW: Tensor,
    visible_SQC: Tensor,
    heads: LatentHeads,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend over keys and values up-projected for some heads at a time; [S, Q, H, V]."""
    num_heads = query_SQHD.shape[2]
    up_projected_dim = heads.query_dim + heads.nope_dim + 2 * heads.value_dim
    row_bytes = up_projected_dim * query_SQHD.dtype.itemsize
    at_once = max(1, GATHERED_BYTES // (rows_SCW[..., 0].numel() * row_bytes))
    attended = []
    for first in range(0, num_heads, at_once):
        some = slice(first, min(first + at_once, num_heads))
        keys_SChD, values_SChV = heads.keys_and_values(rows_SCW, some)
        operands = _Operands(
            query_SQHD[:, :, some].transpose(1, 2),
            keys_SChD.transpose(1, 2),
            values_SChV.transpose(1, 2),
            visible_SQC[:, None],
        )
        if sinks_H is not None:
            operands = _with_sinks(operands, sinks_H[some] / scale)
        attended_ShQV = scaled_dot_product_attention(*operands, scale=scale)
        attended.append(attended_ShQV[..., : heads.value_dim])
    return torch.cat(attended, dim=1).transpose(1, 2)


def attend_absorbed(
    query_SQHD: Tensor,
    rows_SCW: Tensor,
    visible_SQC: Tensor,
    heads: LatentHeads,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend over the latent rows themselves, some new tokens at a time; [S, Q, H, V]."""
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
        scores_SqHC = scores_SqHC.masked_fill(~visible_SqC[:, :, None], -torch.inf)
        weights_SqHC = softmax_with_sinks(scores_SqHC, sinks_H)
        latent_SCR = rows_SCW[..., : heads.rank]
        result_SqHR = torch.einsum("sqhc,scr->sqhr", weights_SqHC.to(latent_SCR.dtype), latent_SCR)
        attended_THV = heads.up_project(result_SqHR.flatten(0, 1))
        attended.append(attended_THV.reshape(*tokens, num_heads, -1))
    return torch.cat(attended, dim=1)
