"""Selection of the positions that a token attends to, by scores of index keys.

A token at position p sees p + 1 positions. With more than `top_k` of them it attends to the `top_k`
with the largest scores; equal scores go to the lower position (`torch.topk` does not say to which),
and NaN counts as the largest. Tokens before position `top_k` attend to all that they see. What a
token chooses depends only on its own index queries and the keys of its sequence: not on chunks,
shared prefixes or other sequences.

A key may stand for an entry of P tokens instead of one (`pooled_keys`). A token then chooses among
the entries all of whose tokens it sees, and attends to the tokens behind them in any case.

T tokens, C positions, K chosen ones, X index elements of a token, I elements of an index key, J
index heads, B tokens of a block, E keys of a block, W elements of a latent row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import (
    AttentionBatch,
    append_and_attend,
    append_and_attend_latent,
)
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.paged_kv import BLOCK_TOKENS, KvLayout, gather_runs, rows_of

# Upper bound of the chosen rows that are gathered in one call.
GATHERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexRows:
    """What an indexer makes of tokens: keys [T, I], queries [T, J * I] and weights of heads [T, J].

    Factors that are the same for all positions are left out: they do not change the order. Keys
    that are pooled are followed by what decides their weights, [T, 2 I] in all.
    """

    key_TI: Tensor
    query_TX: Tensor
    weight_TJ: Tensor

    @classmethod
    def of(cls, row_TX: Tensor, num_heads: int, head_dim: int) -> "IndexRows":
        """Split rows [T, I + J * I + J], or with 2 I in front; views."""
        key_width = row_TX.shape[1] - num_heads * (head_dim + 1)
        sizes = [key_width, num_heads * head_dim, num_heads]
        return cls(*torch.split(row_TX, sizes, dim=1))

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


@dataclass(frozen=True, slots=True)
class Pools:
    """The entries of P tokens that a step completes, and the tokens of those that stay open.

    Attributes:
        token_EP: Tokens of the entries, counted in the step; negative ones are from earlier steps.
        block_E: Blocks of the entries.
        row_E: Their rows in these.
        first_E: Positions of their first tokens.
        kept_K: Tokens of open entries.
        block_K: Their blocks.
        offset_K: Their places in the entries.
    """

    token_EP: Tensor
    block_E: Tensor
    row_E: Tensor
    first_E: Tensor
    kept_K: Tensor
    block_K: Tensor
    offset_K: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, pool: int) -> "Pools":
        """Compute the indices, on the host."""
        starts, contexts = batch.query_start.long(), batch.context_tokens.long()
        sequence_T = torch.repeat_interleave(starts.diff())
        position_T = torch.arange(len(sequence_T)) + (contexts - starts[1:])[sequence_T]
        block_T = batch.block_table[sequence_T, position_T // BLOCK_TOKENS].long()
        end_E = (position_T % pool == pool - 1).nonzero().flatten()
        token_EP = end_E[:, None] + torch.arange(1 - pool, 1)
        is_earlier_EP = token_EP < starts[sequence_T[end_E], None]
        kept_K = (position_T >= (contexts // pool * pool)[sequence_T]).nonzero().flatten()
        return cls(
            token_EP=token_EP.masked_fill(is_earlier_EP, -1),
            block_E=block_T[end_E],
            row_E=position_T[end_E] % BLOCK_TOKENS // pool,
            first_E=position_T[end_E] + 1 - pool,
            kept_K=kept_K,
            block_K=block_T[kept_K],
            offset_K=position_T[kept_K] % pool,
        )


def pool_tokens(key_TX: Tensor, open_NPX: Tensor, pools: Pools) -> Tensor:
    """Return the tokens of completed entries, [E, P, X], and keep those of open ones in place.

    Open entries keep the tokens themselves, so that no entry depends on the steps that its tokens
    came in.

    Args:
        open_NPX: Tokens of the open entry of each block, of which at most one is used.
    """
    key_TX = key_TX.to(open_NPX.dtype)
    token_EP = pools.token_EP
    new_EPX = key_TX[token_EP.clamp_min(0)]
    row_EPX = torch.where(token_EP[..., None] < 0, open_NPX[pools.block_E], new_EPX)
    open_NPX[pools.block_K, pools.offset_K] = key_TX[pools.kept_K]
    return row_EPX


def append_pooled_keys(
    key_TX: Tensor, keys_NEI: Tensor, open_NPX: Tensor, *, pools: Pools, bias_PI: Tensor
) -> None:
    """Add tokens to the entries of their windows; in place, on the device of the arguments.

    An entry is the sum of its tokens' keys, weighed in each dimension by a softmax over the tokens.

    Args:
        key_TX: Keys of the tokens, then what decides their weights, [T, 2 I].
        keys_NEI: Whole entries.
        open_NPX: As in `pool_tokens`.
        bias_PI: float32, added to what decides the weights, by place in the entry.
    """
    row_EPX = pool_tokens(key_TX, open_NPX, pools)
    value_EPI, score_EPI = row_EPX.float().chunk(2, dim=2)
    weight_EPI = (score_EPI + bias_PI).softmax(dim=1)
    keys_NEI[pools.block_E, pools.row_E] = (weight_EPI * value_EPI).sum(1).to(keys_NEI.dtype)


def with_tail(chosen_TK: Tensor, position_T: Tensor, pool: int) -> Tensor:
    """Positions of chosen entries of P tokens and of the tokens behind all entries.

    Returns:
        [T, K * P + P - 1] int32 in ascending order, then -1 where the token sees no more.
    """
    offset_P = torch.arange(pool, device=chosen_TK.device, dtype=torch.int32)
    entries_TX = (chosen_TK[..., None] * pool + offset_P).flatten(1)
    position_T1 = position_T[:, None].int()
    tail_TP = (position_T1 + 1) // pool * pool + offset_P[: pool - 1]
    return torch.cat([entries_TX, tail_TP.masked_fill(tail_TP > position_T1, -1)], dim=1)


def positions_of(batch: AttentionBatch) -> Tensor:
    """Position of each token, [T] int64."""
    starts = batch.query_start.long()
    first_S = batch.context_tokens.long() - starts[1:]
    sequence_T = torch.repeat_interleave(starts.diff())
    return torch.arange(len(sequence_T)) + first_S[sequence_T]


def choose_positions(
    rows: IndexRows, keys_NEI: Tensor, batch: AttentionBatch, top_k: int, *, entry_tokens: int = 1
) -> Tensor:
    """Choose positions, or entries of `entry_tokens` each, [T, K] int32 in ascending order.

    Tokens that see fewer choose all of them; -1 follows.

    Args:
        keys_NEI: Index keys of one layer, the tokens' own included; blocks may be strided.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    out_TK = torch.empty(len(rows.query_TX), top_k, dtype=torch.int32)
    try:
        _native.choose_positions(
            rows.query_TX,
            rows.weight_TJ,
            keys_NEI,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            entry_tokens,
            out_TK,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_TK


def choose_positions_reference(
    rows: IndexRows, keys_NEI: Tensor, batch: AttentionBatch, top_k: int, *, entry_tokens: int = 1
) -> Tensor:
    out_TK = torch.full((len(rows.query_TX), top_k), -1, dtype=torch.int32)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_tokens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        last_C = torch.arange(1, context // entry_tokens + 1) * entry_tokens - 1
        blocks_C = batch.block_table[sequence, last_C // BLOCK_TOKENS].long()
        keys_CI = keys_NEI[blocks_C, last_C % BLOCK_TOKENS // entry_tokens].float()
        for token in range(begin, end):
            seen_CI = keys_CI[: (context - (end - token) + 1) // entry_tokens]
            query_JI = rows.query_TX[token].float().view(-1, keys_CI.shape[1])
            scores_C = index_scores(query_JI, rows.weight_TJ[token].float(), seen_CI)
            count = min(top_k, len(seen_CI))
            out_TK[token, :count] = chosen_of(scores_C, count).int()
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


def chosen_blocks_of(scores_QY: Tensor, own_Q1: Tensor, top_k: int, num_local: int) -> Tensor:
    """Indices of the largest scores of blocks, the token's own block and those before it first."""
    block_Y = torch.arange(scores_QY.shape[-1], device=scores_QY.device)
    is_local_QY = (block_Y <= own_Q1) & (block_Y > own_Q1 - num_local)
    return chosen_of(scores_QY.masked_fill(is_local_QY, torch.inf), top_k)


def attend_chosen(
    query_THW: Tensor,
    latents_NBW: Tensor,
    batch: AttentionBatch,
    chosen_TK: Tensor,
    *,
    rank: int,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend to the chosen latent rows of each token, which are in the cache already; [T, H, R].

    Precision and errors are those of `cpu_attention.append_and_attend_latent`; the order of sums is
    that of the positions. Each token chooses some, and -1 may follow.
    """
    num_tokens = len(chosen_TK)
    out_THR = query_THW.new_empty(*query_THW.shape[:2], rank)
    count_T = (chosen_TK >= 0).sum(1, dtype=torch.int32)
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
            rows_tKW[:, -1].to(query_THW.dtype),  # the last chosen one, written over itself
            rows_tKW.view(count * num_blocks, BLOCK_TOKENS, -1),
            AttentionBatch(
                query_start=torch.arange(count + 1, dtype=torch.int32),
                context_tokens=count_T[some],
                block_table=torch.arange(count * num_blocks, dtype=torch.int32).view(count, -1),
            ),
            rank=rank,
            scale=scale,
            sinks_H=sinks_H,
        )
    return out_THR


def places_of(batch: AttentionBatch, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Block and offset of chosen positions, the last one repeated up to whole blocks of them."""
    padding = -chosen_TK.shape[1] % BLOCK_TOKENS
    last_T1 = chosen_TK.amax(1, keepdim=True)
    chosen_TK = torch.cat([chosen_TK, last_T1.expand(-1, padding)], dim=1)
    chosen_TK = chosen_TK.where(chosen_TK >= 0, last_T1).long()
    sequence_T = torch.repeat_interleave(batch.num_new)
    blocks_TK = batch.block_table.long()[sequence_T[:, None], chosen_TK // BLOCK_TOKENS]
    return blocks_TK, chosen_TK % BLOCK_TOKENS


def block_places(
    batch: AttentionBatch, chosen_TGK: Tensor, block_tokens: int
) -> tuple[Tensor, Tensor]:
    """Blocks of the cache that chosen blocks of positions are, [T, G, M], and contexts [T].

    A chosen block may be several of the cache. The token's own block is among the chosen ones, and
    all but that are whole.
    """
    position_T, parts = positions_of(batch), block_tokens // BLOCK_TOKENS
    column_TGM = (chosen_TGK.long()[..., None] * parts + torch.arange(parts)).flatten(2)
    column_TGM = column_TGM.minimum((position_T // BLOCK_TOKENS)[:, None, None])
    sequence_T = torch.repeat_interleave(batch.num_new)
    table_TGM = batch.block_table[sequence_T[:, None, None], column_TGM]
    context_T = (chosen_TGK.shape[2] - 1) * block_tokens + position_T % block_tokens + 1
    return table_TGM, context_T.int()


def attend_blocks(
    projected: Projected,
    cache: Tensor,
    batch: AttentionBatch,
    chosen_TGK: Tensor,
    *,
    block_tokens: int,
    scale: float,
) -> Tensor:
    """Attend to the blocks that each KV head of each token chose; [T, H * V].

    Precision and errors are those of `cpu_attention.append_and_attend`. Keys and values are in the
    cache already. The only new token of a sequence reads them there; several read copies, as the
    kernel clears what follows a token that begins a block.

    Args:
        cache: Blocks of one layer, [N, G, B * (D + V)]; they may be strided.
    """
    table_TGM, context_T = block_places(batch, chosen_TGK, block_tokens)
    num_tokens, num_kv_heads, num_blocks = table_TGM.shape
    is_alone_T = (batch.num_new == 1).repeat_interleave(batch.num_new)
    alone_T, together_T = is_alone_T.nonzero().flatten(), (~is_alone_T).nonzero().flatten()
    at_once = max(1, GATHERED_BYTES // (num_blocks * cache[0, 0].nbytes))
    outs = []
    for head in range(num_kv_heads):
        own, blocks_N1X = _of_kv_head(projected, head, num_kv_heads), cache[:, head : head + 1]
        width = own.query_THD.shape[1] * own.value_TGV.shape[2]
        out_TX = own.query_THD.new_empty(num_tokens, width)
        for rows in (alone_T, *torch.split(together_T, at_once)):
            if not len(rows):
                continue
            table_tM, memory = table_TGM[rows, head], blocks_N1X
            if rows is not alone_T:
                memory = blocks_N1X[table_tM.flatten().long()]
                table_tM = torch.arange(table_tM.numel(), dtype=torch.int32).view(len(rows), -1)
            out_TX[rows] = append_and_attend(
                own.query_THD[rows],
                own.key_TGD[rows],
                own.value_TGV[rows],
                memory,
                AttentionBatch(
                    query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
                    context_tokens=context_T[rows],
                    block_table=table_tM.contiguous(),
                ),
                scale=scale,
            )
        outs.append(out_TX)
    return torch.cat(outs, dim=1)


def _of_kv_head(projected: Projected, head: int, num_kv_heads: int) -> Projected:
    """Queries, key and value of one KV head."""
    query_THD, key_TGD, value_TGV = projected
    own, group = slice(head, head + 1), query_THD.shape[1] // num_kv_heads
    queries = query_THD[:, head * group : (head + 1) * group]
    return Projected(queries, key_TGD[:, own], value_TGV[:, own])


def attend_entries(
    projected: Projected,
    cache: Tensor,
    batch: AttentionBatch,
    chosen_TK: Tensor,
    *,
    entry_tokens: int,
    scale: float,
) -> Tensor:
    """Attend to the entries that each token chose and to the tokens behind them; [T, H * V].

    Precision and errors are those of `cpu_attention.append_and_attend`. Keys and values are in the
    cache already; what a token chose is copied side by side.

    Args:
        cache: Blocks of one layer, [N, G, B * (D + V)]; they may be strided.
        chosen_TK: Entries of `entry_tokens` in ascending order, K of each token.
    """
    query_THD, key_TGD, value_TGV = projected
    layout = KvLayout.of(key_TGD, value_TGV, cache.dtype)
    entries_TR = with_open_entry(chosen_TK, positions_of(batch), entry_tokens)
    blocks_TR, runs_TR = entry_places(batch, entries_TR, entry_tokens)
    open_T = (positions_of(batch) + 1) % entry_tokens
    context_T = chosen_TK.shape[1] * entry_tokens + open_T
    num_tokens, num_runs = blocks_TR.shape
    per_block = BLOCK_TOKENS // entry_tokens
    num_blocks = num_runs // per_block
    out_TX = query_THD.new_empty(num_tokens, query_THD.shape[1] * layout.value_dim)
    at_once = max(1, GATHERED_BYTES // (num_blocks * cache[0].nbytes))
    for rows in torch.split(torch.arange(num_tokens), at_once):
        memory = gather_runs(
            cache, blocks_TR[rows].view(-1, per_block), runs_TR[rows].view(-1, per_block), layout
        )
        table_tM = torch.arange(len(memory)).view(len(rows), num_blocks)
        last_t = context_T[rows] - 1
        last_blocks_t = table_tM[torch.arange(len(rows)), last_t // BLOCK_TOKENS]
        # The last position is written over itself.
        key_tGD, value_tGV = rows_of(memory, last_blocks_t, last_t % BLOCK_TOKENS, layout)
        out_TX[rows] = append_and_attend(
            query_THD[rows],
            key_tGD.to(query_THD.dtype),
            value_tGV.to(query_THD.dtype),
            memory,
            AttentionBatch(
                query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
                context_tokens=context_T[rows].int(),
                block_table=table_tM.int(),
            ),
            scale=scale,
        )
    return out_TX


def with_open_entry(chosen_TK: Tensor, position_T: Tensor, entry_tokens: int) -> Tensor:
    """Chosen entries of each token, then its open one up to whole blocks, [T, R] int64."""
    per_block = BLOCK_TOKENS // entry_tokens
    spare = -(chosen_TK.shape[1] + 1) % per_block
    open_T1 = ((position_T.long() + 1) // entry_tokens)[:, None]
    return torch.cat([chosen_TK.long(), open_T1.expand(-1, 1 + spare)], dim=1)


def entry_places(
    batch: AttentionBatch, entries_TR: Tensor, entry_tokens: int
) -> tuple[Tensor, Tensor]:
    """Blocks of entries, and their places in these; those of the token itself if it sees none."""
    first_TR = (entries_TR * entry_tokens).minimum(positions_of(batch)[:, None])
    sequence_T = torch.repeat_interleave(batch.num_new)
    blocks_TR = batch.block_table.long()[sequence_T[:, None], first_TR // BLOCK_TOKENS]
    return blocks_TR, first_TR % BLOCK_TOKENS // entry_tokens
