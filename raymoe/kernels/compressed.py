"""Attention to the last tokens and to entries that pool earlier ones, by torch on any device.

The host has kernels of its own, in `cpu_compressed`.

T tokens, S sequences, W width of a row and of an entry, H heads, R rows of a slot, C entries, K
chosen ones, A sums of a slot. The new tokens of a window in a step are a *part*: P parts, the
longest first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import native_reads, rms_norm_reference
from raymoe.kernels.gpu_attention_batch import (
    AttentionCompute,
    ChoosingTokens,
    CompressedTokens,
)
from raymoe.kernels.paged_kv import BLOCK_TOKENS, GATHERED_BYTES, CompressedLayout
from raymoe.kernels.selection import IndexRows, chosen_of, index_scores

QUERIES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Parts:
    """The new tokens of a step by the windows of entries.

    Attributes:
        tokens: The k-th tokens of the first parts, of as many as have one.
        offset_T: Places of the tokens in their windows.
        previous_P: The part of the window before; that of the same sequence's first part is 0.
        first_S: The first part of each sequence.
        last_S: Its last part.
        is_new_S: Whether it has no earlier tokens.
        is_closed_S: Whether its last window is complete.
        closed_E: The parts that complete a window.
        block_E: Blocks of their entries.
        row_E: Rows in these blocks.
        position_E: int32, of the first tokens of these windows.
    """

    tokens: tuple[Tensor, ...]
    offset_T: Tensor
    previous_P: Tensor
    first_S: Tensor
    last_S: Tensor
    is_new_S: Tensor
    is_closed_S: Tensor
    closed_E: Tensor
    block_E: Tensor
    row_E: Tensor
    position_E: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, position_T: Tensor, ratio: int) -> Self:
        """Compute the indices, on the host."""
        starts = batch.query_start.long()
        sequence_T = torch.repeat_interleave(starts.diff())
        offset_T = position_T % ratio
        is_begin_T = offset_T == 0
        is_begin_T[starts[:-1]] = True
        part_T = is_begin_T.cumsum(0) - 1
        begin_P = is_begin_T.nonzero().flatten()
        length_P = torch.cat([begin_P[1:], starts[-1:]]) - begin_P
        order_P = length_P.argsort(descending=True, stable=True)
        place_P = torch.empty_like(order_P)
        place_P[order_P] = torch.arange(len(order_P))
        begin_P, length_P = begin_P[order_P], length_P[order_P]
        last_P = begin_P + length_P - 1
        is_closed_P = offset_T[last_P] == ratio - 1
        closed_E = is_closed_P.nonzero().flatten()
        last_E = last_P[closed_E]
        end_E = position_T[last_E]
        last_S = place_P[part_T[starts[1:] - 1]]
        return cls(
            tokens=tuple(begin_P[: int((length_P > k).sum())] + k for k in range(int(length_P[0]))),
            offset_T=offset_T,
            previous_P=place_P[(order_P - 1).clamp_min(0)],
            first_S=place_P[part_T[starts[:-1]]],
            last_S=last_S,
            is_new_S=position_T[starts[:-1]] == 0,
            is_closed_S=is_closed_P[last_S],
            closed_E=closed_E,
            block_E=batch.block_table[sequence_T[last_E], end_E // BLOCK_TOKENS].long(),
            row_E=end_E % BLOCK_TOKENS // ratio,
            position_E=(end_E - (ratio - 1)).int(),
        )


class Group(NamedTuple):
    """Sequences with Q new tokens each.

    Attributes:
        token_SQ: The tokens' places in the step.
        first_S: Position of each first new token.
        slot_S: Indices of the slots, counted from the end.
        block_SM: The blocks that have entries.
        num_entries: The most of any of these sequences, after the step.
    """

    token_SQ: Tensor
    first_S: Tensor
    slot_S: Tensor
    block_SM: Tensor
    num_entries: int


@dataclass(frozen=True, slots=True)
class CompressedBatch:
    """An `AttentionBatch` as indices for layers with one layout, on the host or a device.

    Attributes:
        position_T: int32.
        slot_S: Indices of the slots, counted from the end.
        kept_K: The tokens whose rows slots keep.
        slot_K: Where, and in which row.
        row_K: The row.
        parts: None without entries.
        tokens: For the kernel in Triton; torch attends for groups if it is None.
    """

    position_T: Tensor
    slot_S: Tensor
    kept_K: Tensor
    slot_K: Tensor
    row_K: Tensor
    groups: tuple[Group, ...]
    parts: Parts | None
    tokens: CompressedTokens | None = None

    @classmethod
    def of(
        cls,
        batch: AttentionBatch,
        layout: CompressedLayout,
        num_heads: int,
        compute: AttentionCompute | None = None,
    ) -> Self:
        """Compute the indices, on the host; `compute` is that of the kernel in Triton.

        Raises:
            ConfigError: The batch has no slots.
        """
        if batch.slots is None:
            raise ConfigError("slots is None; this attention needs the slot of each sequence")
        starts, contexts = batch.query_start.long(), batch.context_tokens.long()
        num_new = starts.diff()
        sequence_T = torch.repeat_interleave(num_new)
        position_T = torch.arange(len(sequence_T)) + (contexts - starts[1:])[sequence_T]
        slot_S = -1 - batch.slots.long()
        kept_K = (position_T >= (contexts - layout.window)[sequence_T]).nonzero().flatten()
        return cls(
            position_T=position_T.int(),
            slot_S=slot_S,
            kept_K=kept_K,
            slot_K=slot_S[sequence_T[kept_K]],
            row_K=position_T[kept_K] % layout.window,
            groups=tuple(
                Group(
                    starts[members, None] + torch.arange(count),
                    contexts[members] - count,
                    slot_S[members],
                    _blocks(batch, contexts, members, layout),
                    _num_entries(int(contexts[members].max()), layout),
                )
                for members, count in _group(num_new, contexts, layout, num_heads)
            )
            if compute is None
            else (),
            parts=None
            if layout.ratio is None or not len(position_T)
            else Parts.of(batch, position_T, layout.ratio),
            tokens=None if compute is None else CompressedTokens.of(batch, compute),
        )


@dataclass(frozen=True, slots=True)
class CompressedBatches:
    """One batch for each layout of a model's layers.

    Attributes:
        are_chosen: Whether some token chooses among its entries.
        choosing: For the kernel in Triton; torch scores entries if it is None.
    """

    layouts: tuple[CompressedLayout, ...]
    batches: tuple[CompressedBatch, ...]
    are_chosen: bool = False
    choosing: ChoosingTokens | None = None

    def of_layout(self, layout: CompressedLayout) -> CompressedBatch:
        return self.batches[self.layouts.index(layout)]


def _num_entries(context: int, layout: CompressedLayout) -> int:
    return 0 if layout.ratio is None else context // layout.ratio


def _group(
    num_new: Tensor, contexts: Tensor, layout: CompressedLayout, num_heads: int
) -> Iterator[tuple[Tensor, int]]:
    """Sequences with equal numbers of new tokens, as many as may be gathered at once."""
    for count in sorted(set(num_new.tolist()) - {0}):
        members = (num_new == count).nonzero().flatten()
        members = members[contexts[members].argsort(stable=True)]
        rows = layout.window + count + _num_entries(int(contexts[members].max()), layout)
        queries = num_heads * min(count, QUERIES_AT_ONCE)
        num_bytes = torch.float32.itemsize * rows * (layout.width + queries)
        for chunk in members.split(max(1, GATHERED_BYTES // num_bytes)):
            yield chunk, count


def _blocks(
    batch: AttentionBatch, contexts: Tensor, members: Tensor, layout: CompressedLayout
) -> Tensor:
    """Blocks of each member that hold entries, or block 0."""
    num_entries = _num_entries(int(contexts[members].max()), layout)
    num_blocks = -(-num_entries // max(1, layout.block_entries))
    step = layout.block_step
    end_M = (torch.arange(num_blocks) + 1) * step * BLOCK_TOKENS
    is_used = end_M - BLOCK_TOKENS < contexts[members, None]
    table_SM = batch.block_table[members][:, step - 1 : num_blocks * step : step].long()
    return table_SM.where(is_used, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How entries are made of the values of tokens, on one device.

    Attributes:
        bias_MX: float32, added to what decides the weights, by place in the window.
        norm_W: float32, weight of the norm of entries.
    """

    bias_MX: Tensor
    norm_W: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedScoring:
    """What attention needs besides rows, on one device.

    Attributes:
        sinks_H: float32.
        pooling: None without entries.
    """

    scale: float
    sinks_H: Tensor
    pooling: Pooling | None


def rotate_ends(
    rows_TNW: Tensor, position_T: Tensor, tables: tuple[Tensor, Tensor], *, backwards: bool = False
) -> Tensor:
    """Rotate the last dimensions of rows in pairs of neighbours by their positions, or back.

    Computed in float32 and rounded once.
    """
    if native_reads(rows_TNW[:, 0]):
        out_TNW = rows_TNW.new_empty(rows_TNW.shape)
        _native.rotate_ends(rows_TNW, position_T.int(), *tables, backwards, out_TNW)
        return out_TNW
    return rotate_ends_reference(rows_TNW, position_T, tables, backwards=backwards)


def rotate_ends_reference(
    rows_TNW: Tensor, position_T: Tensor, tables: tuple[Tensor, Tensor], *, backwards: bool = False
) -> Tensor:
    cos_T1R, sin_T1R = (table_PR[position_T.long(), None].float() for table_PR in tables)
    if backwards:
        sin_T1R = -sin_T1R
    begin = rows_TNW.shape[2] - 2 * cos_T1R.shape[2]
    first, second = rows_TNW[..., begin::2].float(), rows_TNW[..., begin + 1 :: 2].float()
    pairs = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R)
    rotated = torch.stack(pairs, dim=-1).flatten(-2).to(rows_TNW.dtype)
    return torch.cat([rows_TNW[..., :begin], rotated], dim=-1)


def keep_rows(row_TW: Tensor, rows_MRW: Tensor, batch: CompressedBatch) -> None:
    """Write the last rows of each sequence to its slot."""
    rows_MRW[batch.slot_K, batch.row_K] = row_TW.to(rows_MRW.dtype)[batch.kept_K]


def _append_entries(
    pooled_TX: Tensor,
    entries_and_sums: tuple[Tensor, Tensor],
    batch: CompressedBatch,
    tables: tuple[Tensor, Tensor],
    *,
    pooling: Pooling | None,
) -> None:
    entries_NEW, sums_MA3W = entries_and_sums
    if pooling is None or batch.parts is None:
        return
    parts, entry_EW = batch.parts, _pool(pooled_TX, sums_MA3W, batch, pooling)
    entry_E1W = rotate_ends(entry_EW[:, None], parts.position_E, tables)
    entries_NEW[parts.block_E, parts.row_E] = entry_E1W[:, 0].to(entries_NEW.dtype)


def append_and_attend_compressed(  # noqa: PLR0913, PLR0917 - an operator: its tensors are its arguments
    query_THW: Tensor,
    row_TW: Tensor,
    pooled_TX: Tensor,
    cache: Tensor,
    batch: CompressedBatch,
    *,
    layout: CompressedLayout,
    tables: tuple[Tensor, Tensor],
    scoring: CompressedScoring,
    chosen_TK: Tensor | None = None,
) -> Tensor:
    """Add the step's rows and entries to the cache and attend; [T, H, W], rotated back.

    The token at position p sees the rows of the positions from p - R + 1 to p, and the entries of
    the windows that end at p or before. Scores and softmax are float32. A sequence all of whose
    tokens are new starts from an empty slot, whatever it holds.

    Args:
        query_THW: Rotated.
        row_TW: Rotated keys, which are values as well.
        pooled_TX: Values of the tokens, then what decides their weights: [T, 2 A W]. With two sums,
            those for the next window come first in either.
        cache: Bytes of one layer, in `layout`; changed in place.
        tables: Cosines and sines, [positions, half of the rotated dimensions], float32.
        chosen_TK: int32, the entries that each token attends to instead of all of windows that
            ended: some of these in ascending order, then -1.
    """
    entries_NEW, rows_MRW, sums_MA3W = layout.views(cache)
    entries_and_sums = (entries_NEW, sums_MA3W)
    _append_entries(pooled_TX, entries_and_sums, batch, tables, pooling=scoring.pooling)
    row_TW = row_TW.to(rows_MRW.dtype)
    out_THW = torch.empty_like(query_THW)
    if batch.tokens is not None and len(query_THW):
        from raymoe.kernels.gpu_compressed import attend_launch  # noqa: PLC0415 - needs Triton

        attend_launch(
            query_THW,
            row_TW,
            (entries_NEW, rows_MRW),
            batch.tokens,
            out_THW,
            layout=layout,
            scale=scoring.scale,
            sinks_H=scoring.sinks_H,
            chosen_TK=chosen_TK,
        ).run()
    for group in batch.groups:
        recent_SXW = _recent(row_TW, rows_MRW, group)
        entry_SCW = entries_NEW[group.block_SM].flatten(1, 2)[:, : group.num_entries]
        chosen_SQK = None if chosen_TK is None else chosen_TK[group.token_SQ]
        out_THW[group.token_SQ] = _attend(
            query_THW[group.token_SQ], recent_SXW, entry_SCW, chosen_SQK, group, layout, scoring
        )
    keep_rows(row_TW, rows_MRW, batch)
    return rotate_ends(out_THW, batch.position_T, tables, backwards=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndex:
    """What chooses entries of one step in one layer.

    Attributes:
        pooled_TX: As `pooled_TX` of `append_and_attend_compressed`, for index keys.
        rows: Rotated index queries and the weights of their heads; no keys.
        pooling: Of index keys.
    """

    pooled_TX: Tensor
    rows: IndexRows
    pooling: Pooling


def append_index_keys(
    index: EntryIndex,
    cache: Tensor,
    batch: CompressedBatch,
    *,
    layout: CompressedLayout,
    tables: tuple[Tensor, Tensor],
) -> Tensor:
    """Add the index keys of the step's entries to the cache; return all, [N, E, I]."""
    keys_NEI, sums_MA3I = layout.index_views(cache)
    keys_and_sums = (keys_NEI, sums_MA3I)
    _append_entries(index.pooled_TX, keys_and_sums, batch, tables, pooling=index.pooling)
    return keys_NEI


def choose_entries(
    rows: IndexRows,
    keys_NEI: Tensor,
    batch: CompressedBatch,
    *,
    ratio: int,
    top_k: int,
) -> Tensor:
    """Choose entries as `selection.choose_positions`, on any device; [T, K] int32."""
    out_TK = torch.full((len(rows.query_TX), top_k), -1, dtype=torch.int32, device=keys_NEI.device)
    for group in batch.groups:
        keys_SCI = keys_NEI[group.block_SM].flatten(1, 2)[:, : group.num_entries]
        (num_sequences, num_new), num_heads = group.token_SQ.shape, rows.weight_TJ.shape[1]
        num_bytes = torch.float32.itemsize * num_sequences * num_heads * max(1, group.num_entries)
        at_once = max(1, GATHERED_BYTES // num_bytes)
        for begin in range(0, num_new, at_once):
            end = min(num_new, begin + at_once)
            token_Sq = group.token_SQ[:, begin:end]
            shape = (*token_Sq.shape, num_heads, keys_NEI.shape[2])
            query_SqJI = rows.query_TX[token_Sq].view(shape)
            scores_SqC = index_scores(query_SqJI, rows.weight_TJ[token_Sq], keys_SCI)
            position_Sq = group.first_S[:, None] + torch.arange(begin, end, device=keys_NEI.device)
            out_TK[token_Sq] = _chosen_entries(scores_SqC, position_Sq, ratio, top_k)
    return out_TK


def _chosen_entries(scores_SqC: Tensor, position_Sq: Tensor, ratio: int, top_k: int) -> Tensor:
    """The largest of the scores of seen entries in ascending order, then -1."""
    scores_SqC = pad(scores_SqC, (0, max(0, top_k - scores_SqC.shape[2])))
    is_late_SqC = _entries_end(position_Sq, ratio, scores_SqC.shape[2])
    chosen_SqK = chosen_of(scores_SqC.masked_fill(is_late_SqC, -torch.inf), top_k)
    is_late_SqK = chosen_SqK >= ((position_Sq + 1) // ratio)[..., None]
    return chosen_SqK.masked_fill(is_late_SqK, -1).int()


def _recent(row_TW: Tensor, rows_MRW: Tensor, group: Group) -> Tensor:
    """Rows of the R positions before the new tokens, 0 before the first, and of these."""
    window = rows_MRW.shape[1]
    back_R = torch.arange(-window, 0, device=row_TW.device)
    position_SR = group.first_S[:, None] + back_R
    past_SRW = rows_MRW[group.slot_S[:, None], position_SR % window]
    past_SRW = past_SRW.masked_fill((position_SR < 0)[..., None], 0)
    return torch.cat([past_SRW, row_TW[group.token_SQ]], dim=1)


def _attend(  # noqa: PLR0917 - rows and what to do with them
    query_SQHW: Tensor,
    recent_SXW: Tensor,
    entry_SCW: Tensor,
    chosen_SQK: Tensor | None,
    group: Group,
    layout: CompressedLayout,
    scoring: CompressedScoring,
) -> Tensor:
    window, ratio, dtype = layout.window, layout.ratio or 1, query_SQHW.dtype
    num_new, device = query_SQHW.shape[1], query_SQHW.device
    is_rest_SC = _entries_end(group.first_S + num_new - 1, ratio, entry_SCW.shape[1])
    entry_SCW = entry_SCW.masked_fill(is_rest_SC[..., None], 0)
    attended = []
    for begin in range(0, num_new, QUERIES_AT_ONCE):
        end = min(num_new, begin + QUERIES_AT_ONCE)
        # The row at index x has the position first - R + x.
        row_SKW = recent_SXW[:, begin + 1 : window + end]
        query_q1 = torch.arange(begin, end, device=device)[:, None]
        back_qK = query_q1 + window - torch.arange(begin + 1, window + end, device=device)
        position_Sq = group.first_S[:, None] + query_q1[:, 0]
        is_hidden_SqK = (back_qK < 0) | (back_qK >= window) | (back_qK > position_Sq[..., None])
        is_unseen_SqC = _entries_end(position_Sq, ratio, entry_SCW.shape[1])
        if chosen_SQK is not None:
            is_unseen_SqC |= _is_not_chosen(chosen_SQK[:, begin:end], entry_SCW.shape[1])
        seen_SYW = torch.cat([row_SKW, entry_SCW], dim=1).to(dtype)
        hidden_SqY = torch.cat([is_hidden_SqK, is_unseen_SqC], dim=2)
        attended.append(_softmax(query_SQHW[:, begin:end], seen_SYW, hidden_SqY, scoring))
    return torch.cat(attended, dim=1)


def _entries_end(position_X: Tensor, ratio: int, num_entries: int) -> Tensor:
    """Whether entries are of windows that end after these positions, [X, C]."""
    entry_C = torch.arange(num_entries, device=position_X.device)
    return entry_C >= ((position_X + 1) // ratio)[..., None]


def _is_not_chosen(chosen_SqK: Tensor, num_entries: int) -> Tensor:
    """Whether entries are missing in the lists of tokens, [S, q, C]."""
    index_SqK = chosen_SqK.long().where(chosen_SqK >= 0, num_entries)
    is_missing = torch.ones(
        *chosen_SqK.shape[:2], num_entries + 1, dtype=torch.bool, device=chosen_SqK.device
    )
    return is_missing.scatter_(2, index_SqK, value=False)[..., :num_entries]


def _softmax(
    query_SqHW: Tensor, seen_SYW: Tensor, hidden_SqY: Tensor, scoring: CompressedScoring
) -> Tensor:
    scores_SqHY = torch.einsum("sqhw,syw->sqhy", query_SqHW, seen_SYW).float() * scoring.scale
    scores_SqHY = scores_SqHY.masked_fill(hidden_SqY[:, :, None], -torch.inf)
    sink_SqH1 = scoring.sinks_H[:, None].expand(*scores_SqHY.shape[:3], 1)
    weights_SqHY = torch.cat([scores_SqHY, sink_SqH1], dim=3).softmax(-1)[..., :-1]
    return torch.einsum("sqhy,syw->sqhw", weights_SqHY.to(seen_SYW.dtype), seen_SYW)


def _pool(pooled_TX: Tensor, sums_MA3W: Tensor, batch: CompressedBatch, pooling: Pooling) -> Tensor:
    """Add the step's tokens to the sums of their slots; return the entries of whole windows.

    Tokens are added one after the other, so that an entry does not depend on the steps that its
    window was cut into. Entries have a norm and are not rotated yet.
    """
    parts = batch.parts
    assert parts is not None, "layers without entries pool nothing"
    num_sums, _, width = sums_MA3W.shape[1:]
    values_TX, scores_TX = pooled_TX.float().tensor_split(2, dim=1)
    scores_TX = scores_TX + pooling.bias_MX[parts.offset_T]
    values_TAW, scores_TAW = (x.view(-1, num_sums, width) for x in (values_TX, scores_TX))
    empty_3W = sums_MA3W.new_zeros(3, width)
    empty_3W[0] = -torch.inf
    carried_SA3W = sums_MA3W[batch.slot_S]
    carried_SA3W = carried_SA3W.where(~parts.is_new_S[:, None, None, None], empty_3W)
    own_P3W = empty_3W.repeat(len(parts.previous_P), 1, 1)
    left = [empty_3W.expand(len(parts.last_S), 3, width)]
    if num_sums > 1:
        next_P3W = own_P3W.clone()
        next_P3W[parts.first_S] = carried_SA3W[:, 1]
        _accumulate(next_P3W, values_TAW[:, 0], scores_TAW[:, 0], parts.tokens)
        own_P3W = next_P3W[parts.previous_P]
        left.insert(0, next_P3W[parts.last_S])
    own_P3W[parts.first_S] = carried_SA3W[:, 0]
    _accumulate(own_P3W, values_TAW[:, -1], scores_TAW[:, -1], parts.tokens)
    after_close_SA3W = torch.stack(left, dim=1)
    still_open_SA3W = torch.stack([own_P3W[parts.last_S], *left[:-1]], dim=1)
    is_closed = parts.is_closed_S[:, None, None, None]
    sums_MA3W[batch.slot_S] = after_close_SA3W.where(is_closed, still_open_SA3W)
    _, weight_EW, sum_EW = own_P3W[parts.closed_E].unbind(1)
    entry_EW = (sum_EW / weight_EW).to(pooled_TX.dtype)
    return rms_norm_reference(entry_EW, pooling.norm_W, pooling.eps, 0.0)


def _accumulate(
    sums_P3W: Tensor, values_TW: Tensor, scores_TW: Tensor, tokens: tuple[Tensor, ...]
) -> None:
    """Add values of tokens, weighted by the exponentials of their scores, to sums in place."""
    for token_p in tokens:
        some_p3W = sums_P3W[: len(token_p)]
        maximum_pW, weight_pW, sum_pW = some_p3W.unbind(1)
        score_pW = scores_TW[token_p]
        new_pW = torch.maximum(maximum_pW, score_pW)
        kept_pW, added_pW = (maximum_pW - new_pW).exp(), (score_pW - new_pW).exp()
        some_p3W[:, 1] = weight_pW * kept_pW + added_pW
        some_p3W[:, 2] = sum_pW * kept_pW + added_pW * values_TW[token_p]
        some_p3W[:, 0] = new_pW
