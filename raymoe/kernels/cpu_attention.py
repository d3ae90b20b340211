"""Attention of a pass over the paged KV cache on the CPU: append, decode and prefill in one call.

T tokens of the pass, S sequences, H query heads, G KV heads, D head dimension, N blocks,
B tokens of a block, M blocks of the longest sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.paged_kv import BLOCK_TOKENS, KvLayout, pack_block, unpack_block

ALL_TOKENS = 2**62  # a sliding window that no sequence leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Which tokens of a pass belong to which sequence, and where their KV lives. All int32.

    Attributes:
        query_start: [S + 1], first token of each sequence in the pass; ends with T. A sequence
            with one token in the pass is a decode or a one-token chunk: the same thing.
        context_tokens: [S], tokens of each sequence in the cache after this pass appended its own;
            the positions of its query tokens are the last of them.
        block_table: [S, M], blocks of each sequence in order; entries beyond its context are
            ignored.
        prompt_tokens: [S], length of the prompt of each sequence; None: of all that came so far
            where several tokens are new, nothing where one is.
    """

    query_start: Tensor
    context_tokens: Tensor
    block_table: Tensor
    prompt_tokens: Tensor | None = None

    @property
    def num_new(self) -> Tensor:
        """Tokens of each sequence in the pass, [S] int64."""
        return self.query_start.long().diff()

    @property
    def num_new_of_prompts(self) -> Tensor:
        """How many of these are of the prompt, [S] int64; they come first."""
        num_new, contexts = self.num_new, self.context_tokens.long()
        prompts = self.prompt_tokens
        if prompts is None:
            prompts = contexts.where(num_new > 1, 0)
        return (prompts.long() - (contexts - num_new)).clamp_min(0).minimum(num_new)

    def select(self, sequences: Tensor) -> "AttentionBatch":
        """Some sequences with all their tokens.

        Args:
            sequences: int64, which ones and in which order.
        """
        num_new = self.num_new[sequences]
        return self._of(sequences, self.context_tokens[sequences], num_new)

    def cut(self, begins: Tensor, ends: Tensor) -> tuple[Tensor, "AttentionBatch"]:
        """Some of the new tokens of each sequence, and the batch of these alone.

        Args:
            begins: [S] int64, first of the new tokens of each sequence that is in the cut.
            ends: [S] int64, behind the last; sequences without any are left out.
        """
        sequences = (ends > begins).nonzero().flatten()
        counts = (ends - begins)[sequences]
        behind = (self.num_new - ends)[sequences]
        chosen = self._of(sequences, self.context_tokens[sequences] - behind.int(), counts)
        offsets = (self.query_start[:-1] + begins)[sequences] - chosen.query_start[:-1]
        rows = torch.arange(int(counts.sum())) + torch.repeat_interleave(offsets, counts)
        return rows, chosen

    def _of(self, sequences: Tensor, contexts: Tensor, num_new: Tensor) -> "AttentionBatch":
        prompts = self.prompt_tokens
        return AttentionBatch(
            query_start=torch.cat([num_new.new_zeros(1), num_new.cumsum(0)]).int(),
            context_tokens=contexts,
            block_table=self.block_table[sequences],
            prompt_tokens=None if prompts is None else prompts[sequences],
        )


def append_and_attend(  # noqa: PLR0917 - an operator: its tensors are its arguments
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Append keys and values of the pass to the cache, then attend causally; returns [T, H * D].

    Token at position p of a sequence sees positions max(0, p - sliding_window + 1) .. p.
    Scores and sums are float32; the order of sums of a token depends only on its own position,
    never on the batch or the number of threads.

    Args:
        query_THD: float32, float16 or bfloat16; rotated already.
        key_TGD: Same type, rotated already.
        value_TGD: Same type.
        cache: One layer's blocks, [N, G, 2, B * D] in the layout of `paged_kv`; changed in place.
        batch: Ragged shape of the pass.
        scale: Factor of the scores, positive.
        sliding_window: Tokens that a query sees, itself included; None sees all.
        sinks_H: float32; a score of each head that takes part in the softmax and has no value.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    num_tokens, num_heads, head_dim = query_THD.shape
    out_TX = query_THD.new_empty(num_tokens, num_heads * head_dim)
    try:
        _native.append_and_attend(
            query_THD,
            key_TGD,
            value_TGD,
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


def append(key_TGD: Tensor, value_TGD: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
    """Append keys and values of the pass to the cache and attend to nothing.

    For sequences whose attention is computed elsewhere; arguments and errors as in
    `append_and_attend`.
    """
    try:
        _native.append(
            key_TGD, value_TGD, cache, batch.query_start, batch.context_tokens, batch.block_table
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def append_reference(
    key_TGD: Tensor, value_TGD: Tensor, cache: Tensor, batch: AttentionBatch
) -> None:
    """The plain reference of `append`."""
    _, num_kv_heads, head_dim = key_TGD.shape
    layout = KvLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=cache.dtype)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].tolist()
        _append_tokens(
            key_TGD[begin:end],
            value_TGD[begin:end],
            cache,
            blocks,
            first=context - (end - begin),
            layout=layout,
        )


def append_and_attend_reference(  # noqa: PLR0917 - the same signature as the kernel
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The plain reference of `append_and_attend`, one sequence after another, in float32."""
    num_tokens, num_heads, head_dim = query_THD.shape
    layout = KvLayout(num_kv_heads=key_TGD.shape[1], head_dim=head_dim, dtype=cache.dtype)
    append_reference(key_TGD, value_TGD, cache, batch)
    out_THD = torch.empty_like(query_THD)
    starts, contexts = batch.query_start.tolist(), batch.context_tokens.tolist()
    for sequence, context in enumerate(contexts):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].tolist()
        first = context - (end - begin)
        pairs = [unpack_block(cache[block], layout) for block in blocks]
        keys_CGD = torch.cat([keys for keys, _ in pairs])[:context].float()
        values_CGD = torch.cat([values for _, values in pairs])[:context].float()
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
        out_THD[begin:end] = torch.einsum(
            "hqc,chd->qhd", weights_HQC, values_CGD.repeat_interleave(group, 1)
        ).to(out_THD.dtype)
    return out_THD.reshape(num_tokens, num_heads * head_dim)


def _append_tokens(
    key_QGD: Tensor,
    value_QGD: Tensor,
    cache: Tensor,
    blocks: list[int],
    *,
    first: int,
    layout: KvLayout,
) -> None:
    for offset in range(key_QGD.shape[0]):
        index, row = divmod(first + offset, BLOCK_TOKENS)
        keys, values = unpack_block(cache[blocks[index]], layout)
        keys[row] = key_QGD[offset].to(cache.dtype)
        values[row] = value_QGD[offset].to(cache.dtype)
        cache[blocks[index]] = pack_block(keys, values, layout)
