"""CPU kernels of paged attention: grouped-query and multi-head latent attention (MLA)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.latent_heads import LatentHeads
from raymoe.kernels.paged_kv import (
    ALL_TOKENS,
    BLOCK_TOKENS,
    KvLayout,
    unpack_block,
    write_rows,
)


class Chosen:
    """What the layers of a step choose in turn: a layer may attend to what one before it chose.

    Attributes:
        positions: The choice of the last layer with an indexer of its own; by group of sequences
            or in one tensor, as the kernels that made it read it.
    """

    __slots__ = ("positions",)

    def __init__(self) -> None:
        self.positions: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Maps the tokens of a step to sequences and to blocks of the KV cache; all tensors are int32.

    Attributes:
        query_start: [S + 1], index of each sequence's first token; the last entry is T.
        context_tokens: [S], cached tokens after this step; the new tokens take the last positions.
        block_table: [S, M], blocks of each sequence; entries beyond its context are ignored.
        prompt_tokens: [S], prompt lengths. None: several new tokens are all prompt, one is not.
        slots: [S], where each sequence has its state; None where no layer keeps one.
        chosen: Positions that an indexer chose in this step.
        windowed: The same for layers with a sliding window; None where they have the same blocks.
    """

    query_start: Tensor
    context_tokens: Tensor
    block_table: Tensor
    prompt_tokens: Tensor | None = None
    slots: Tensor | None = None
    chosen: Chosen = field(default_factory=Chosen, compare=False)
    windowed: "AttentionBatch | None" = None

    @property
    def num_new(self) -> Tensor:
        return self.query_start.long().diff()

    @property
    def num_new_of_prompts(self) -> Tensor:
        """Return each sequence's number of new prompt tokens, [S] int64; these come first."""
        num_new, contexts = self.num_new, self.context_tokens.long()
        prompts = self.prompt_tokens
        if prompts is None:
            prompts = contexts.where(num_new > 1, 0)
        return (prompts.long() - (contexts - num_new)).clamp_min(0).minimum(num_new)

    def in_chunks(self, size: int) -> "AttentionBatch":
        """The same tokens, each in a sequence that begins with its chunk of `size` positions.

        Chunks begin at multiples of `size`, which is one of `BLOCK_TOKENS`. Prompt lengths and
        slots are left out.
        """
        num_new = self.num_new
        context = self.context_tokens.long()
        first = context - num_new
        first_chunk, last_chunk = first // size, (context - 1).clamp_min(0) // size
        counts = (last_chunk - first_chunk + 1).clamp_min(1)
        sequence_X = torch.repeat_interleave(counts)
        ends_S = counts.cumsum(0)
        index_X = torch.arange(int(counts.sum())) - (ends_S - counts)[sequence_X]
        begin_X = (first_chunk[sequence_X] + index_X) * size
        end_X = context[sequence_X].minimum(begin_X + size)
        tokens_X = end_X - first[sequence_X].maximum(begin_X)
        width = self.block_table.shape[1]
        column_XM = begin_X[:, None] // BLOCK_TOKENS + torch.arange(
            min(width, size // BLOCK_TOKENS)
        )
        return AttentionBatch(
            query_start=torch.cat([tokens_X.new_zeros(1), tokens_X.cumsum(0)]).int(),
            context_tokens=(end_X - begin_X).int(),
            block_table=self.block_table[sequence_X[:, None], column_XM.clamp_max(width - 1)],
        )

    def cut(self, begins: Tensor, ends: Tensor) -> tuple[Tensor, "AttentionBatch"]:
        """Select a range of each sequence's new tokens.

        Args:
            begins: [S] int64, first selected token, counted among the new tokens of the sequence.
            ends: [S] int64, exclusive; a sequence with an empty range is left out.

        Returns:
            Indices of the selected tokens in the step, and their batch.
        """
        sequences = (ends > begins).nonzero().flatten()
        counts = (ends - begins)[sequences]
        behind = (self.num_new - ends)[sequences]
        prompts, slots = self.prompt_tokens, self.slots
        chosen = AttentionBatch(
            query_start=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
            context_tokens=self.context_tokens[sequences] - behind.int(),
            block_table=self.block_table[sequences],
            prompt_tokens=None if prompts is None else prompts[sequences],
            slots=None if slots is None else slots[sequences],
        )
        offsets = (self.query_start[:-1] + begins)[sequences] - chosen.query_start[:-1]
        rows = torch.arange(int(counts.sum())) + torch.repeat_interleave(offsets, counts)
        return rows, chosen


def append_and_attend(  # noqa: PLR0917 - an operator: its tensors are its arguments
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGV: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Append keys and values of the step to the cache, then attend causally; returns [T, H * V].

    The token at position p of a sequence sees positions max(0, p - sliding_window + 1) .. p. Scores
    and sums are float32. The order in which a token's values are summed depends only on its
    position, never on the batch or the number of threads.

    Args:
        query_THD: float32, float16 or bfloat16; rotated.
        cache: One layer's blocks, [N, G, B * (D + V)] as in `paged_kv.KvLayout`; changed in place.
        scale: Factor of the scores, positive.
        sliding_window: Tokens that a query sees, itself included; None sees all.
        sinks_H: float32; one score per head that takes part in the softmax and has no value.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    num_tokens, num_heads, _ = query_THD.shape
    out_TX = query_THD.new_empty(num_tokens, num_heads * value_TGV.shape[2])
    try:
        _native.append_and_attend(
            query_THD,
            key_TGD,
            value_TGV,
            cache,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            out_TX,
            scale,
            ALL_TOKENS if sliding_window is None else sliding_window,
            sinks_H,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_TX


def append(key_TGD: Tensor, value_TGV: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
    """Append keys and values of the step to the cache; attention is computed elsewhere."""
    try:
        _native.append(
            key_TGD, value_TGV, cache, batch.query_start, batch.context_tokens, batch.block_table
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def append_reference(
    key_TGD: Tensor, value_TGV: Tensor, cache: Tensor, batch: AttentionBatch
) -> None:
    layout = KvLayout.of(key_TGD, value_TGV, cache.dtype)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].tolist()
        _append_tokens(
            key_TGD[begin:end],
            value_TGV[begin:end],
            cache,
            blocks,
            first=context - (end - begin),
            layout=layout,
        )


def append_and_attend_reference(  # noqa: PLR0917 - the same signature as the kernel
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGV: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    num_tokens, num_heads, _ = query_THD.shape
    layout = KvLayout.of(key_TGD, value_TGV, cache.dtype)
    append_reference(key_TGD, value_TGV, cache, batch)
    out_THV = query_THD.new_empty(num_tokens, num_heads, layout.value_dim)
    starts, contexts = batch.query_start.tolist(), batch.context_tokens.tolist()
    for sequence, context in enumerate(contexts):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].tolist()
        first = context - (end - begin)
        pairs = [unpack_block(cache[block], layout) for block in blocks]
        keys_CGD = torch.cat([keys for keys, _ in pairs])[:context].float()
        values_CGV = torch.cat([values for _, values in pairs])[:context].float()
        group = num_heads // layout.num_kv_heads
        scores_HQC = scale * torch.einsum(
            "qhd,chd->hqc", query_THD[begin:end].float(), keys_CGD.repeat_interleave(group, 1)
        )
        position_Q1 = torch.arange(first, context)[:, None]
        position_C = torch.arange(context)
        visible = position_C <= position_Q1
        if sliding_window is not None:
            visible &= position_C > position_Q1 - sliding_window
        scores_HQC = scores_HQC.masked_fill(~visible, float("-inf"))
        if sinks_H is not None:
            sink_HQ1 = sinks_H.float()[:, None, None].expand(-1, scores_HQC.shape[1], 1)
            scores_HQC = torch.cat([scores_HQC, sink_HQ1], dim=-1)
        weights_HQC = scores_HQC.softmax(-1)[..., :context]
        out_THV[begin:end] = torch.einsum(
            "hqc,chv->qhv", weights_HQC, values_CGV.repeat_interleave(group, 1)
        ).to(out_THV.dtype)
    return out_THV.reshape(num_tokens, num_heads * layout.value_dim)


def _append_tokens(
    key_QGD: Tensor,
    value_QGV: Tensor,
    cache: Tensor,
    blocks: list[int],
    *,
    first: int,
    layout: KvLayout,
) -> None:
    position_Q = first + torch.arange(len(key_QGD))
    blocks_Q = torch.tensor(blocks, dtype=torch.int64)[position_Q // BLOCK_TOKENS]
    places = (blocks_Q, position_Q % BLOCK_TOKENS)
    write_rows(cache, places, (key_QGD, value_QGV), layout)


def append_and_attend_latent(
    query_THW: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    rank: int,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Append the latent rows of the step to the cache, then attend causally; returns [T, H, R].

    Precision, order of sums, sinks and errors are those of `append_and_attend`. `query_THW` holds
    each head's absorbed query and rotated part, `latent_TW` the latent and rotated key of a token;
    `cache` [N, B, W] has the layout of `LatentLayout`. Results are sums of the first `rank`
    elements of the rows.
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
            sinks_H,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_THR


def append_latent(latent_TW: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
    """Append the latent rows of the step to the cache; attention is computed elsewhere."""
    try:
        _native.append_latent(
            latent_TW, cache, batch.query_start, batch.context_tokens, batch.block_table
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def append_latent_reference(latent_TW: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
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
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute what `append_and_attend_latent` does; in float64 for float64 queries."""
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
        scores_QHC = scores_QHC.masked_fill(is_hidden, float("-inf"))
        weights_QHC = softmax_with_sinks(scores_QHC, sinks_H)
        out_THR[begin:end] = (weights_QHC @ rows_CW[:, :rank]).to(out_THR.dtype)
    return out_THR


def softmax_with_sinks(scores_QHC: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Weights of positions [..., H, C], whose sum the sink of each head makes smaller than 1."""
    if sinks_H is None:
        return scores_QHC.softmax(-1)
    sink_QH1 = sinks_H.to(scores_QHC.dtype)[:, None].expand(*scores_QHC.shape[:-1], 1)
    return torch.cat([scores_QHC, sink_QH1], dim=-1).softmax(-1)[..., :-1]


UP_PROJECTED_BYTES = 64 << 20


def append_and_attend_up_projected(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    heads: LatentHeads,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Append the latent rows of the step, then attend over up-projected keys and values; [T, H, V].

    Arguments and errors are those of `append_and_attend_latent`.
    """
    append_latent(latent_TW, cache, batch)
    out_THV = query_THD.new_empty(*query_THD.shape[:2], heads.value_dim)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        new = slice(starts[sequence], starts[sequence + 1])
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].long()
        rows_CW = cache[blocks].flatten(0, 1)[:context].to(query_THD.dtype)
        out_THV[new] = _attend(query_THD[new], rows_CW, heads, scale=scale, sinks_H=sinks_H)
    return out_THV


def _attend(
    query_QHD: Tensor,
    rows_CW: Tensor,
    heads: LatentHeads,
    *,
    scale: float,
    sinks_H: Tensor | None,
) -> Tensor:
    num_heads, context = query_QHD.shape[1], len(rows_CW)
    dim, value_dim = (-(-size // 8) * 8 for size in (heads.query_dim, heads.value_dim))
    one_head = KvLayout(
        num_kv_heads=1, head_dim=dim, dtype=query_QHD.dtype, value_head_dim=value_dim
    )
    num_blocks = -(-context // BLOCK_TOKENS)
    at_once = max(1, UP_PROJECTED_BYTES // (num_blocks * one_head.block_bytes))
    out_QHV = query_QHD.new_empty(*query_QHD.shape[:2], heads.value_dim)
    for first in range(0, num_heads, at_once):
        some = slice(first, min(first + at_once, num_heads))
        keys_ChD, values_ChV = heads.keys_and_values(rows_CW, some)
        attended_QX = _attend_up_projected(
            _padded(query_QHD[:, some], dim),
            _padded(keys_ChD, dim),
            _padded(values_ChV, value_dim),
            scale=scale,
            sinks_h=None if sinks_H is None else sinks_H[some],
        )
        attended_QhV = attended_QX.view(len(query_QHD), -1, value_dim)
        out_QHV[:, some] = attended_QhV[..., : heads.value_dim]
    return out_QHV


def _attend_up_projected(
    query_QhD: Tensor,
    keys_ChD: Tensor,
    values_ChV: Tensor,
    *,
    scale: float,
    sinks_h: Tensor | None,
) -> Tensor:
    context, new_tokens = len(keys_ChD), len(query_QhD)
    layout = KvLayout.of(keys_ChD, values_ChV, keys_ChD.dtype)
    num_blocks = -(-context // BLOCK_TOKENS)
    up_projected = keys_ChD.new_empty(num_blocks, *layout.block_shape)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    past = context - new_tokens
    if past:
        append(keys_ChD[:past], values_ChV[:past], up_projected, _one_sequence(past, past, table))
    return append_and_attend(
        query_QhD,
        keys_ChD[past:],
        values_ChV[past:],
        up_projected,
        _one_sequence(new_tokens, context, table),
        scale=scale,
        sinks_H=sinks_h,
    )


def _one_sequence(new_tokens: int, context: int, table: Tensor) -> AttentionBatch:
    return AttentionBatch(
        query_start=torch.tensor([0, new_tokens], dtype=torch.int32),
        context_tokens=torch.tensor([context], dtype=torch.int32),
        block_table=table,
    )


def _padded(heads_ThD: Tensor, dim: int) -> Tensor:
    return functional.pad(heads_ThD, (0, dim - heads_ThD.shape[2])).contiguous()
