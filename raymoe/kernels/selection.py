"""Selection of the positions that a token attends to, by scores of index keys.

A token at position p sees p + 1 positions. With more than `top_k` of them it attends to the `top_k`
with the largest scores; equal scores go to the lower position (`torch.topk` does not say to which),
and NaN counts as the largest. Tokens before position `top_k` attend to all that they see. What a
token chooses depends only on its own index queries and the keys of its sequence: not on chunks,
shared prefixes or other sequences.

T tokens, C positions, K chosen ones, X index elements of a token, I elements of an index key, J
index heads, B tokens of a block, W elements of a latent row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch, append_and_attend_latent
from raymoe.kernels.paged_kv import BLOCK_TOKENS

# Upper bound of the chosen rows that are gathered in one call.
GATHERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexRows:
    """What an indexer makes of tokens: keys [T, I], queries [T, J * I] and weights of heads [T, J].

    Factors that are the same for all positions are left out: they do not change the order.
    """

    key_TI: Tensor
    query_TX: Tensor
    weight_TJ: Tensor

    @classmethod
    def of(cls, row_TX: Tensor, num_heads: int, head_dim: int) -> "IndexRows":
        """Split rows [T, I + J * I + J]; views."""
        return cls(*torch.split(row_TX, [head_dim, num_heads * head_dim, num_heads], dim=1))

    def select(self, rows: Tensor) -> "IndexRows":
        return IndexRows(self.key_TI[rows], self.query_TX[rows], self.weight_TJ[rows])


@dataclass(frozen=True, slots=True)
class Division:
    """The tokens of a step that attend to all positions they see, and those that choose.

    Both with their indices in the step.
    """

    early_T: Tensor
    early: AttentionBatch
    late_T: Tensor
    late: AttentionBatch

    @classmethod
    def of(cls, batch: AttentionBatch, top_k: int) -> "Division":
        """Divide at position `top_k` of each sequence."""
        num_new = batch.num_new
        first = batch.context_tokens.long() - num_new
        border = (top_k - first).clamp_min(0).minimum(num_new)
        early_T, early = batch.cut(torch.zeros_like(border), border)
        return cls(early_T, early, *batch.cut(border, num_new))


def sees_more_than(batch: AttentionBatch, number: int) -> bool:
    """Whether some token of a step sees more positions than this."""
    return len(batch.context_tokens) > 0 and int(batch.context_tokens.max()) > number


def choose_positions(
    rows: IndexRows, keys_NBI: Tensor, batch: AttentionBatch, top_k: int
) -> Tensor:
    """Choose the positions of tokens that see at least `top_k`, [T, K] int32 in ascending order.

    Args:
        keys_NBI: Index keys of one layer, the tokens' own included; blocks may be strided.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    out_TK = torch.empty(len(rows.query_TX), top_k, dtype=torch.int32)
    try:
        _native.choose_positions(
            rows.query_TX,
            rows.weight_TJ,
            keys_NBI,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            out_TK,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_TK


def choose_positions_reference(
    rows: IndexRows, keys_NBI: Tensor, batch: AttentionBatch, top_k: int
) -> Tensor:
    out_TK = torch.empty(len(rows.query_TX), top_k, dtype=torch.int32)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].long()
        keys_CI = keys_NBI[blocks].flatten(0, 1)[:context].float()
        for token in range(begin, end):
            seen_CI = keys_CI[: context - (end - token) + 1]
            query_JI = rows.query_TX[token].float().view(-1, keys_CI.shape[1])
            scores_C = index_scores(query_JI, rows.weight_TJ[token].float(), seen_CI)
            out_TK[token] = chosen_of(scores_C, top_k).int()
    return out_TK


def choose_blocks(
    query_TX: Tensor,
    keys_NBI: Tensor,
    batch: AttentionBatch,
    *,
    top_k: int,
    block_tokens: int,
    num_local: int,
) -> Tensor:
    """Choose blocks of positions for each index head, [T, J, K] int32 in ascending order.

    The score of a block is the largest product of the head's query with the keys in it that the
    token sees; the token's own block and those before it, `num_local` in all, come first. Each
    token sees at least `top_k` blocks. Equal scores go to the lower block.

    Args:
        query_TX: Index queries, [T, J * I].
        block_tokens: Positions of a block, in multiples of those of a block of the cache.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    num_heads = query_TX.shape[1] // keys_NBI.shape[2]
    out_TJK = torch.empty(len(query_TX), num_heads, top_k, dtype=torch.int32)
    try:
        _native.choose_blocks(
            query_TX,
            keys_NBI,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            block_tokens,
            num_local,
            out_TJK,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_TJK


def choose_blocks_reference(
    query_TX: Tensor,
    keys_NBI: Tensor,
    batch: AttentionBatch,
    *,
    top_k: int,
    block_tokens: int,
    num_local: int,
) -> Tensor:
    num_heads = query_TX.shape[1] // keys_NBI.shape[2]
    out_TJK = torch.empty(len(query_TX), num_heads, top_k, dtype=torch.int32)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        blocks = batch.block_table[sequence, : -(-context // BLOCK_TOKENS)].long()
        keys_CI = keys_NBI[blocks].flatten(0, 1)[:context].float()
        for token in range(begin, end):
            seen_CI = keys_CI[: context - (end - token) + 1]
            query_JI = query_TX[token].float().view(num_heads, -1)
            products_JC = query_JI @ seen_CI.T
            parts = torch.split(products_JC, block_tokens, dim=1)
            scores_JY = torch.stack([part.amax(1) for part in parts], dim=1)
            scores_JY[:, max(0, len(parts) - num_local) :] = torch.inf
            out_TJK[token] = chosen_of(scores_JY, top_k).int()
    return out_TJK


def index_scores(query_QJI: Tensor, weight_QJ: Tensor, keys_CI: Tensor) -> Tensor:
    """Scores of positions, [..., C] float32; keys may have the sequences of queries in front."""
    keys_IC = keys_CI.float().transpose(-1, -2)
    if keys_IC.ndim == 3:
        keys_IC = keys_IC[:, None]
    products_QJC = torch.matmul(query_QJI.float(), keys_IC).clamp_min(0)
    return torch.matmul(weight_QJ.float().unsqueeze(-2), products_QJC).squeeze(-2)


def chosen_of(scores_QC: Tensor, top_k: int) -> Tensor:
    """Indices of the largest scores, [..., K] int64 in ascending order; ties go to lower ones."""
    bits_QC = (scores_QC + 0.0).view(torch.int32)  # the negative zero becomes the other one
    bits_QC = torch.where(scores_QC.isnan(), 0x7FFFFFFF, bits_QC)
    ordered_QC = torch.where(bits_QC < 0, bits_QC ^ 0x7FFFFFFF, bits_QC).long()
    index_C = torch.arange(scores_QC.shape[-1], device=scores_QC.device)
    ranks_QC = (ordered_QC << 32) - index_C
    return ranks_QC.topk(top_k, dim=-1, sorted=False).indices.sort(dim=-1).values


def attend_chosen(
    query_THW: Tensor,
    latents_NBW: Tensor,
    batch: AttentionBatch,
    chosen_TK: Tensor,
    *,
    rank: int,
    scale: float,
) -> Tensor:
    """Attend to the chosen latent rows of each token, which are in the cache already; [T, H, R].

    Precision and errors are those of `cpu_attention.append_and_attend_latent`; the order of sums is
    that of the positions.
    """
    num_tokens, top_k = chosen_TK.shape
    out_THR = query_THW.new_empty(*query_THW.shape[:2], rank)
    blocks_TK, offsets_TK = places_of(batch, chosen_TK)
    num_blocks = blocks_TK.shape[1] // BLOCK_TOKENS
    block_bytes = BLOCK_TOKENS * latents_NBW.shape[2] * latents_NBW.dtype.itemsize
    at_once = max(1, GATHERED_BYTES // (num_blocks * block_bytes))
    for first in range(0, num_tokens, at_once):
        some = slice(first, min(first + at_once, num_tokens))
        rows_tKW = latents_NBW[blocks_TK[some], offsets_TK[some]]
        count = len(rows_tKW)
        out_THR[some] = append_and_attend_latent(
            query_THW[some],
            rows_tKW[:, top_k - 1].to(query_THW.dtype),  # written over itself
            rows_tKW.view(count * num_blocks, BLOCK_TOKENS, -1),
            AttentionBatch(
                query_start=torch.arange(count + 1, dtype=torch.int32),
                context_tokens=torch.full((count,), top_k, dtype=torch.int32),
                block_table=torch.arange(count * num_blocks, dtype=torch.int32).view(count, -1),
            ),
            rank=rank,
            scale=scale,
        )
    return out_THR


def places_of(batch: AttentionBatch, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Block and offset of chosen positions, the last one repeated up to whole blocks of them."""
    padding = -chosen_TK.shape[1] % BLOCK_TOKENS
    chosen_TK = torch.cat([chosen_TK, chosen_TK[:, -1:].expand(-1, padding)], dim=1).long()
    sequence_T = torch.repeat_interleave(batch.num_new)
    blocks_TK = batch.block_table.long()[sequence_T[:, None], chosen_TK // BLOCK_TOKENS]
    return blocks_TK, chosen_TK % BLOCK_TOKENS
