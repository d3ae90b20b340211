"""Selection of positions on a GPU: scores in Triton, and attention to the chosen latent rows.

T tokens, L of them that choose, C positions, K chosen ones, J index heads, I elements of a key.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gpu_attention import (
    Attending,
    DeviceCache,
    Scoring,
    append_and_attend_latent_ragged,
    append_and_attend_ragged,
    append_latent_rows,
    append_launch,
)
from raymoe.kernels.gpu_attention_batch import (
    BlockChoosingBatch,
    ChoosingBatch,
    ChoosingTokens,
    LateTokens,
    RaggedBatch,
)
from raymoe.kernels.gpu_attention_kernels import BLOCK_TOKENS
from raymoe.kernels.gpu_common import MINUS_INFINITY, TRITON_TYPES, Launch
from raymoe.kernels.latent_heads import LatentHeads
from raymoe.kernels.paged_kv import BLOCK_TOKENS as TOKENS_OF_BLOCK
from raymoe.kernels.paged_kv import GATHERED_BYTES, KvLayout, LatentLayout
from raymoe.kernels.selection import (
    IndexRows,
    chosen_blocks_of,
    chosen_of,
    with_open_entry,
)
from raymoe.kernels.triton_support import power_of_two

_POSITIONS = 64  # of a program
_MIN_DOT = 16
# Upper bound of the absorbed queries and results of tokens that attend in one call.
ABSORBED_BYTES = 256 << 20
_RANK_BYTES = 32  # of a position: its score, and what sorting it takes


@triton.jit(do_not_specialize=["query_stride", "weight_stride", "table_stride", "out_stride"])
def index_scores_kernel(
    query_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_stride: tl.tensor,
    weight_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr,
    POSITIONS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Score some positions of one token; those that it does not see are minus infinity.

    Each position is that of an entry of `ENTRY_TOKENS` tokens, which is in the block of its last
    token.

    Args:
        keys_ptr: Index keys, [N, E, I]; blocks are `BLOCK_SIZE` elements apart.
        sequences_ptr: int32, row of each token in the block table.
        positions_ptr: int32, position of each token.
        out_ptr: float32 [L, C].
    """
    token = tl.program_id(0).to(tl.int64)
    own = tl.load(positions_ptr + token)
    position_C = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    last_C = (position_C + 1) * ENTRY_TOKENS - 1
    is_seen_C = last_C <= own
    row_ptr = table_ptr + tl.load(sequences_ptr + token).to(tl.int64) * table_stride
    blocks_C = tl.load(row_ptr + last_C // BLOCK_TOKENS, mask=is_seen_C, other=0)
    places_C = blocks_C.to(tl.int64) * BLOCK_SIZE + last_C % BLOCK_TOKENS // ENTRY_TOKENS * DIM
    dims_I, heads_J = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_HEADS)
    keys_CI = tl.load(
        keys_ptr + places_C[:, None] + dims_I[None, :],
        mask=is_seen_C[:, None] & (dims_I < DIM)[None, :],
        other=0,
    )
    query_IJ = tl.load(
        query_ptr + token * query_stride + dims_I[:, None] + heads_J[None, :] * DIM,
        mask=(dims_I < DIM)[:, None] & (heads_J < NUM_HEADS)[None, :],
        other=0,
    )
    weight_J = tl.load(
        weight_ptr + token * weight_stride + heads_J, mask=heads_J < NUM_HEADS, other=0
    )
    products_CJ = tl.dot(keys_CI.to(DOT), query_IJ.to(DOT), input_precision="ieee")
    weighted_CJ = tl.maximum(products_CJ, 0.0) * weight_J.to(tl.float32)[None, :]
    scores_C = tl.where(is_seen_C, tl.sum(weighted_CJ, 1), MINUS_INFINITY)
    # Rows of `out` are whole steps of positions.
    tl.store(out_ptr + token * out_stride + position_C, scores_C)


def scores_launch(
    rows: IndexRows,
    keys_NEI: Tensor,
    batch: ChoosingBatch | ChoosingTokens,
    some: slice,
    out_LC: Tensor,
) -> Launch:
    """Score all positions for some of the tokens that choose; `rows` are those of these tokens."""
    num_heads, dim = rows.weight_TJ.shape[1], keys_NEI.shape[2]
    return Launch(
        kernel=index_scores_kernel,
        grid=(len(rows.query_TX), out_LC.shape[1] // _POSITIONS),
        arguments={
            "query_ptr": rows.query_TX,
            "weight_ptr": rows.weight_TJ,
            "keys_ptr": keys_NEI,
            "table_ptr": batch.table_SM,
            "sequences_ptr": batch.sequences_L[some],
            "positions_ptr": batch.positions_L[some],
            "out_ptr": out_LC,
            "query_stride": rows.query_TX.stride(0),
            "weight_stride": rows.weight_TJ.stride(0),
            "table_stride": batch.table_SM.stride(0),
            "out_stride": out_LC.stride(0),
        },
        constants={
            "NUM_HEADS": num_heads,
            "PADDED_HEADS": max(power_of_two(num_heads), _MIN_DOT),
            "DIM": dim,
            "PADDED_DIM": max(power_of_two(dim), _MIN_DOT),
            "BLOCK_SIZE": keys_NEI.stride(0),
            "ENTRY_TOKENS": batch.entry_tokens,
            "POSITIONS": _POSITIONS,
            "DOT": TRITON_TYPES[batch.compute.dot],
        },
        options={"num_warps": 4, "num_stages": 1},
    )


def choose_positions_ragged(
    rows: IndexRows, keys_NEI: Tensor, batch: ChoosingBatch | ChoosingTokens, top_k: int
) -> Tensor:
    """Choose as `selection.choose_positions` for the tokens that choose, [L, K] int32.

    Args:
        rows: Of all tokens of the step; their keys are in the cache.
        top_k: Of positions, or of entries of so many tokens as the batch says.
    """
    num_late = len(batch.late_T)
    num_entries = max(top_k, batch.num_positions // batch.entry_tokens)
    width = -(-num_entries // _POSITIONS) * _POSITIONS
    out_LK = torch.empty(num_late, top_k, dtype=torch.int32, device=keys_NEI.device)
    at_once = max(1, GATHERED_BYTES // (width * _RANK_BYTES))
    for first in range(0, num_late, at_once):
        some = slice(first, min(first + at_once, num_late))
        scores_lC = torch.empty(some.stop - first, width, device=keys_NEI.device)
        chosen = rows.select(batch.late_T[some])
        scores_launch(chosen, keys_NEI, batch, some, scores_lC).run()
        chosen_lK = chosen_of(scores_lC, top_k).int()
        seen_l = (batch.positions_L[some] + 1) // batch.entry_tokens
        out_LK[some] = chosen_lK.masked_fill(chosen_lK >= seen_l[:, None], -1)
    return out_LK


def append_and_attend_chosen_ragged(
    query_THD: Tensor,
    latent_TW: Tensor,
    cache: Tensor,
    batch: ChoosingBatch,
    chosen_LK: Tensor,
    *,
    heads: LatentHeads,
    scoring: Scoring,
    out: Tensor | None = None,
) -> Tensor:
    """Append the latent rows in place and attend; [T, H * V], in `out`.

    Tokens that choose use the absorbed form over their chosen rows, which are read in place.

    Args:
        cache: Blocks [N, B, W]; they may be strided.
    """
    append_latent_rows(latent_TW, cache, batch.slots_T)
    num_tokens, num_heads, _ = query_THD.shape
    out_THV = query_THD.new_empty(num_tokens, num_heads, heads.value_dim)
    if out is not None:
        out_THV = out.view(num_tokens, num_heads, heads.value_dim)
    if len(batch.early_T):
        early_T = batch.early_T
        out_THV[early_T] = append_and_attend_latent_ragged(
            query_THD[early_T], latent_TW[early_T], cache, batch.early, heads=heads, scoring=scoring
        ).view(len(early_T), num_heads, -1)
    token_bytes = num_heads * (2 * heads.rank + heads.rope_dim) * query_THD.dtype.itemsize
    at_once = max(1, ABSORBED_BYTES // token_bytes)
    for first in range(0, len(batch.late_T), at_once):
        some = slice(first, min(first + at_once, len(batch.late_T)))
        attended_lHV = _attend_chosen(
            query_THD[batch.late_T[some]], cache, batch, some, chosen_LK, heads, scoring
        )
        out_THV[batch.late_T[some]] = attended_lHV
    return out_THV.flatten(1)


def _attend_chosen(
    query_lHD: Tensor,
    cache: Tensor,
    batch: ChoosingBatch,
    some: slice,
    chosen_LK: Tensor,
    heads: LatentHeads,
    scoring: Scoring,
) -> Tensor:
    layout = LatentLayout(rank=heads.rank, rope_dim=heads.rope_dim, dtype=cache.dtype)
    places_lK = _places(cache, batch, some, chosen_LK[some])
    tiles_lF = batch.tiles.tiles_NF[some].clone()
    tiles_lF[:, :2] -= some.start
    absorbed_lHW = heads.absorb(query_lHD)
    result_lHR = absorbed_lHW.new_empty(*absorbed_lHW.shape[:2], layout.rank)
    Attending(
        query_THD=absorbed_lHW,
        cache=DeviceCache.of_chosen(cache, layout, places_lK),
        out_THV=result_lHR,
        compute=batch.compute,
        scoring=scoring,
    ).run(batch.tiles._replace(tiles_NF=tiles_lF))
    return heads.up_project(result_lHR)


def _places(cache: Tensor, batch: ChoosingBatch, some: slice, chosen_LK: Tensor) -> Tensor:
    """Where chosen rows begin, in units of `DeviceCache.of_chosen`; anywhere for -1."""
    positions_LK = chosen_LK.long().clamp_min(0)
    rows_LM = batch.table_SM[batch.sequences_L[some].long()].long()
    blocks_LK = rows_LM.gather(1, positions_LK // TOKENS_OF_BLOCK)
    elements_LK = blocks_LK * cache.stride(0) + positions_LK % TOKENS_OF_BLOCK * cache.stride(1)
    return (elements_LK // DeviceCache.CHOSEN_UNIT).int()


@triton.jit(do_not_specialize=["query_stride", "table_stride"])
def index_block_scores_kernel(
    query_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Write the largest product of each head of one token with the keys of one block of the cache.

    Keys that the token does not see count as minus infinity.

    Args:
        keys_ptr: Index keys, [N, B, I]; blocks are `BLOCK_SIZE` elements apart.
        sequences_ptr: int32, row of each token in the block table.
        positions_ptr: int32, position of each token.
        out_ptr: float32 [L, blocks, J].
    """
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position_B = column * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    own = tl.load(positions_ptr + token)
    is_seen_B = position_B <= own
    row_ptr = table_ptr + tl.load(sequences_ptr + token).to(tl.int64) * table_stride
    block = tl.load(row_ptr + column, mask=column * BLOCK_TOKENS <= own, other=0).to(tl.int64)
    dims_I, heads_J = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_HEADS)
    rows_B = block * BLOCK_SIZE + tl.arange(0, BLOCK_TOKENS) * DIM
    keys_BI = tl.load(
        keys_ptr + rows_B[:, None] + dims_I[None, :],
        mask=is_seen_B[:, None] & (dims_I < DIM)[None, :],
        other=0,
    )
    query_IJ = tl.load(
        query_ptr + token * query_stride + dims_I[:, None] + heads_J[None, :] * DIM,
        mask=(dims_I < DIM)[:, None] & (heads_J < NUM_HEADS)[None, :],
        other=0,
    )
    products_BJ = tl.dot(keys_BI.to(DOT), query_IJ.to(DOT), input_precision="ieee")
    products_BJ = tl.where(is_seen_B[:, None], products_BJ, MINUS_INFINITY)
    place = (token * tl.num_programs(1) + column) * NUM_HEADS
    tl.store(out_ptr + place + heads_J, tl.max(products_BJ, 0), mask=heads_J < NUM_HEADS)


def block_scores_launch(
    query_LX: Tensor, keys_NBI: Tensor, batch: BlockChoosingBatch, some: slice, out_LMJ: Tensor
) -> Launch:
    """Score blocks of the cache for some of the tokens that choose, whose queries are given."""
    num_heads, dim, ragged = batch.indexer.num_heads, keys_NBI.shape[2], batch.everything
    return Launch(
        kernel=index_block_scores_kernel,
        grid=out_LMJ.shape[:2],
        arguments={
            "query_ptr": query_LX,
            "keys_ptr": keys_NBI,
            "table_ptr": ragged.table_SM,
            "sequences_ptr": batch.sequences_L[some],
            "positions_ptr": batch.positions_L[some],
            "out_ptr": out_LMJ,
            "query_stride": query_LX.stride(0),
            "table_stride": ragged.table_SM.stride(0),
        },
        constants={
            "NUM_HEADS": num_heads,
            "PADDED_HEADS": max(power_of_two(num_heads), _MIN_DOT),
            "DIM": dim,
            "PADDED_DIM": max(power_of_two(dim), _MIN_DOT),
            "BLOCK_SIZE": keys_NBI.stride(0),
            "DOT": TRITON_TYPES[ragged.compute.dot],
        },
        options={"num_warps": 4, "num_stages": 1},
    )


def choose_blocks_ragged(query_TX: Tensor, keys_NBI: Tensor, batch: BlockChoosingBatch) -> Tensor:
    """Choose as `selection.choose_blocks` for the tokens that choose, [L, J, K] int32.

    Args:
        query_TX: Of all tokens of the step; their keys are in the cache.
    """
    indexer, num_late = batch.indexer, len(batch.late_T)
    parts = indexer.block_tokens // TOKENS_OF_BLOCK
    width = -(-batch.num_positions // indexer.block_tokens) * parts
    out_LJK = torch.empty(
        num_late, indexer.num_heads, indexer.top_k, dtype=torch.int32, device=keys_NBI.device
    )
    at_once = max(1, GATHERED_BYTES // (width * indexer.num_heads * _RANK_BYTES))
    for first in range(0, num_late, at_once):
        some = slice(first, min(first + at_once, num_late))
        scores_lMJ = torch.empty(
            some.stop - first, width, indexer.num_heads, device=keys_NBI.device
        )
        query_lX = query_TX[batch.late_T[some]]
        block_scores_launch(query_lX, keys_NBI, batch, some, scores_lMJ).run()
        scores_lYPJ = scores_lMJ.view(len(scores_lMJ), width // parts, parts, indexer.num_heads)
        scores_lJY = scores_lYPJ.amax(2).transpose(1, 2)
        own_l11 = (batch.positions_L[some] // indexer.block_tokens)[:, None, None]
        out_LJK[some] = chosen_blocks_of(
            scores_lJY, own_l11, indexer.top_k, indexer.num_local
        ).int()
    return out_LJK


def append_and_attend_blocks_ragged(
    projected: Projected,
    cache: Tensor,
    batch: BlockChoosingBatch,
    chosen_LGK: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Append keys and values in place and attend; [T, H * V], in `out`.

    Tokens that choose read the blocks that their KV heads chose in place.

    Args:
        cache: Blocks [N, G, B * (D + V)]; they may be strided.
    """
    query_THD, key_TGD, value_TGV = projected
    layout, ragged = KvLayout.of(key_TGD, value_TGV, cache.dtype), batch.everything
    scoring = Scoring(scale=scale)
    append_launch(projected, ragged.slots_T, cache, layout).run()
    out_THV = _attend_early(projected, cache, (batch.early_T, batch.early), scoring, out)
    query_LHD = query_THD[batch.late_T]
    late_LHV = query_LHD.new_empty(*query_LHD.shape[:2], layout.value_dim)
    group = query_LHD.shape[1] // layout.num_kv_heads
    tables_LGM = _chosen_tables(batch, chosen_LGK)
    for head in range(layout.num_kv_heads):
        own = slice(head * group, (head + 1) * group)
        memory = cache[:, head : head + 1]
        Attending(
            query_THD=query_LHD[:, own],
            cache=DeviceCache.of_blocks(
                memory, replace(layout, num_kv_heads=1), tables_LGM[:, head].contiguous()
            ),
            out_THV=late_LHV[:, own],
            compute=ragged.compute,
            scoring=scoring,
        ).run(batch.tiles)
    out_THV[batch.late_T] = late_LHV
    return out_THV.flatten(1)


def _attend_early(
    projected: Projected,
    cache: Tensor,
    early: tuple[Tensor, RaggedBatch],
    scoring: Scoring,
    out: Tensor | None,
) -> Tensor:
    """Attend from the tokens that do not choose; [T, H, V] of all, in `out`."""
    (early_T, batch), query_THD = early, projected.query_THD
    shape = (*query_THD.shape[:2], projected.value_TGV.shape[2])
    out_THV = query_THD.new_empty(shape) if out is None else out.view(shape)
    if len(early_T):
        rows = Projected(*(each[early_T] for each in projected))
        early_EX = append_and_attend_ragged(rows, cache, batch, scoring)
        out_THV[early_T] = early_EX.view(len(early_EX), *out_THV.shape[1:])
    return out_THV


def append_and_attend_entries_ragged(
    projected: Projected,
    cache: Tensor,
    everything: RaggedBatch,
    late: LateTokens,
    chosen_LK: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Append keys and values in place and attend; [T, H * V], in `out`.

    Tokens that choose read the entries that they chose in place.

    Args:
        cache: Blocks [N, G, B * (D + V)]; they may be strided.
        chosen_LK: Entries, as many of each token.
    """
    query_THD, key_TGD, value_TGV = projected
    layout, scoring = KvLayout.of(key_TGD, value_TGV, cache.dtype), Scoring(scale=scale)
    append_launch(projected, everything.slots_T, cache, layout).run()
    out_THV = _attend_early(projected, cache, (late.early_T, late.early), scoring, out)
    choosing, tokens = late.choosing, late.choosing.entry_tokens
    per_block = TOKENS_OF_BLOCK // tokens
    entries_LR = with_open_entry(chosen_LK, choosing.positions_L, tokens)
    last_L1 = (choosing.positions_L.long() // tokens)[:, None]
    entries_LR = entries_LR.minimum(last_L1)  # the open one may have no token yet
    rows_LM = choosing.table_SM[choosing.sequences_L.long()].long()
    blocks_LR = rows_LM.gather(1, entries_LR // per_block)
    runs_LR = (blocks_LR * per_block + entries_LR % per_block).int()
    query_LHD = query_THD[choosing.late_T]
    late_LHV = query_LHD.new_empty(*query_LHD.shape[:2], layout.value_dim)
    Attending(
        query_THD=query_LHD,
        cache=DeviceCache.of_runs(cache, layout, runs_LR, tokens),
        out_THV=late_LHV,
        compute=everything.compute,
        scoring=scoring,
    ).run(late.tiles)
    out_THV[choosing.late_T] = late_LHV
    return out_THV.flatten(1)


def _chosen_tables(batch: BlockChoosingBatch, chosen_LGK: Tensor) -> Tensor:
    """Blocks of the cache that chosen blocks of positions are, [L, G, M] int32."""
    parts = batch.indexer.block_tokens // TOKENS_OF_BLOCK
    part_M = torch.arange(parts, device=chosen_LGK.device)
    column_LGM = (chosen_LGK.long()[..., None] * parts + part_M).flatten(2)
    last_L11 = (batch.positions_L.long() // TOKENS_OF_BLOCK)[:, None, None]
    column_LGM = column_LGM.minimum(last_L11)
    return batch.everything.table_SM[batch.sequences_L.long()[:, None, None], column_LGM]
