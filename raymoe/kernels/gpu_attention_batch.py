"""Choice of the attention kernels on a device (Triton or torch), tile sizes, and batches for them.

This module does not import Triton, so that it can be used without a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch, Chosen
from raymoe.kernels.elementwise import FLOAT_DTYPES, triton_runs_on
from raymoe.kernels.paged_kv import BLOCK_TOKENS, GATHERED_BYTES, CacheLayout
from raymoe.kernels.selection import Division, Pools, sees_more_than
from raymoe.kernels.torch_attention import PagedBatch
from raymoe.kernels.triton_support import TENSOR_CORES_SINCE, power_of_two, shared_memory_kib
from raymoe.specs.attention.grouped import BlockIndexerSpec, PooledIndexerSpec
from raymoe.specs.hardware import HOPPER

# Positions of the context that one program reads for a decode token. A constant, with cuts at its
# multiples, so that the order of a token's sums does not depend on the batch.
SPLIT_POSITIONS = 1024
_MIN_ROWS = 16


MAX_NARROW_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCompute:
    """Types in which the Triton kernels attend.

    Attributes:
        dtype: Type of queries and results.
        dot: Type of the products: that of the tensor cores, or float32 on GPUs without them.
        has_warpgroups: Whether four warps multiply together, as on Hopper.
        has_small_shared_memory: Whether a multiprocessor has at most 100 KiB for its programs.
        has_wide_values: Whether heads of some layer have values of more than 256 dimensions, of
            which a tile holds fewer rows.
    """

    dtype: torch.dtype
    dot: torch.dtype
    has_warpgroups: bool = False
    has_small_shared_memory: bool = False
    has_wide_values: bool = False

    @classmethod
    def on(
        cls, capability: tuple[int, int], dtype: torch.dtype, value_dim: int = 0
    ) -> "AttentionCompute":
        return cls(
            dtype=dtype,
            dot=dtype if capability >= TENSOR_CORES_SINCE else torch.float32,
            has_warpgroups=capability >= HOPPER,
            has_small_shared_memory=shared_memory_kib(capability) <= 100,
            has_wide_values=value_dim > MAX_NARROW_DIM,
        )

    @property
    def has_tensor_cores(self) -> bool:
        return self.dot != torch.float32

    @property
    def tile_tokens(self) -> int:
        if self.has_wide_values:
            return 16 if self.has_tensor_cores else 8
        return 64 if self.has_tensor_cores else 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """Sizes of what one program multiplies at once.

    Attributes:
        heads: Query heads of one KV head.
        step: Dimensions of queries and keys in one product.
        stages: Depth of the software pipeline (Triton's `num_stages`).
    """

    heads: int
    rows: int
    positions: int
    step: int
    warps: int
    stages: int


def attention_tile(
    compute: AttentionCompute, *, tokens: int, group: int, dims: tuple[int, int], pair: int
) -> AttentionTile:
    """Return the tile for so many tokens of a sequence; it depends on the model and the GPU alone.

    Consecutive tokens share the keys that they read, so a tile of several tokens has one query
    head. A tile of one token has as many query heads of a KV head as registers allow.

    Args:
        group: Query heads of a KV head.
    """
    key_dim, value_dim = dims
    is_wide = value_dim > MAX_NARROW_DIM
    if compute.has_tensor_cores:
        min_rows, max_rows = _MIN_ROWS, 32 // pair if is_wide else 64
    else:
        min_rows = max_rows = _MIN_ROWS // 2 if is_wide else _MIN_ROWS
    heads = 1 if tokens > 1 else min(power_of_two(group), max_rows)
    rows = max(tokens * heads, min_rows)
    if not compute.has_tensor_cores:
        # A thread keeps all operands of a product in registers, so steps are as small as possible.
        return AttentionTile(
            heads=heads,
            rows=rows,
            positions=16 * pair,
            step=16 * pair,
            warps=8 if is_wide or rows > _MIN_ROWS else 4,
            stages=1,
        )
    # Limits of the register file, from compiler output: one warpgroup for bfloat16, because the
    # kernel splits words into pairs of bfloat16.
    has_four_warps = compute.has_warpgroups and compute.dot == torch.bfloat16
    return AttentionTile(
        heads=heads,
        rows=rows,
        positions=16 * pair if is_wide else _positions(compute, dims),
        step=max(min(key_dim & -key_dim, 128), 16 * pair),
        warps=8 if value_dim > 128 and rows > _MIN_ROWS and not has_four_warps else 4,
        stages=2,
    )


def _positions(compute: AttentionCompute, dims: tuple[int, int]) -> int:
    """Of a tile on tensor cores; with 32, two programs share a small shared memory."""
    key_dim, value_dim = dims
    is_half = compute.has_small_shared_memory and 64 < key_dim <= 128
    return 32 if is_half or value_dim > 128 else 64


def attention_compute(
    device: torch.device, dtype: torch.dtype, value_dim: int = 0
) -> AttentionCompute | None:
    """Return how the Triton kernels attend on a device; None where torch attends.

    `value_dim` is that of the widest layer with grouped-query attention.

    The Triton kernels run on GPUs from Turing on, if Triton is installed.
    """
    if not triton_runs_on(device) or dtype not in FLOAT_DTYPES:
        return None
    return AttentionCompute.on(torch.cuda.get_device_capability(device), dtype, value_dim)


TILE_FIELDS = 4

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Tiles(NamedTuple):
    """Tiles of one size, those with the longest contexts first.

    Attributes:
        tiles_NF: int32 [N, 4]: sequence, first token in the step, number of tokens, its position.
        num_positions: Exclusive upper bound of all positions.
    """

    tiles_NF: Tensor
    tokens: int
    num_positions: int

    def split(self, at_once: int) -> Iterator["Tiles"]:
        for tiles_nF in torch.split(self.tiles_NF, at_once):
            yield self._replace(tiles_NF=tiles_nF)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """An `AttentionBatch` as the Triton kernels take it.

    Attributes:
        slots_T: int64, slot of each token in the cache, in tokens.
        table_SM: int32 block table; entries beyond a context are not read.
        alone: Tiles of one token.
    """

    compute: AttentionCompute
    slots_T: Tensor
    table_SM: Tensor
    alone: Tiles
    together: Tiles

    @classmethod
    def of(cls, batch: AttentionBatch, compute: AttentionCompute) -> Self:
        """Compute the tiles, on the host."""
        work = _Work(batch)
        is_alone_S = work.num_scheduled_tokens_S == 1
        return cls(
            compute=compute,
            slots_T=_tensor(work.slots_T, torch.int64),
            table_SM=_tensor(work.table_SM, torch.int32),
            alone=work.tiles(is_alone_S, 1),
            together=work.tiles(~is_alone_S, compute.tile_tokens),
        )


class UpProjected(NamedTuple):
    """Sequences whose keys and values are up-projected together.

    Attributes:
        rows_C: int64, cache slots of all their tokens.
        starts_S1: int32 [S, 1], index in `rows_C` of each sequence's first token.
    """

    rows_C: Tensor
    starts_S1: Tensor
    tiles: Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRaggedBatch:
    """An `AttentionBatch` as the Triton kernels over a latent cache take it.

    Attributes:
        slots_T: int64, slot of each token in the cache, in tokens.
        table_SM: int32 block table; entries beyond a context are not read.
        tokens_A: int64, tokens that use the absorbed form.
        alone: Tiles of one token; they index `tokens_A`.
        up_projected: The other sequences, in plain form.
        pools: Of index keys; None where they are not pooled.
    """

    compute: AttentionCompute
    slots_T: Tensor
    table_SM: Tensor
    tokens_A: Tensor
    alone: Tiles
    up_projected: tuple[UpProjected, ...]
    pools: Pools | None = None

    @classmethod
    def of(
        cls,
        batch: AttentionBatch,
        layout: CacheLayout,
        compute: AttentionCompute,
        *,
        min_plain_tokens: int,
    ) -> Self:
        """Compute the tiles, on the host.

        Sequences with at least `min_plain_tokens` new tokens use the plain form.
        """
        work = _Work(batch)
        is_alone_S = work.num_scheduled_tokens_S < min_plain_tokens
        tokens_A = np.flatnonzero(is_alone_S[work.sequence_T])
        row_bytes = layout.block_bytes // BLOCK_TOKENS
        return cls(
            compute=compute,
            slots_T=_tensor(work.slots_T, torch.int64),
            table_SM=_tensor(work.table_SM, torch.int32),
            tokens_A=_tensor(tokens_A, torch.int64),
            alone=work.tiles(is_alone_S, 1, is_packed=True),
            up_projected=tuple(
                work.up_projected(members, compute.tile_tokens)
                for members in _groups(~is_alone_S, work.contexts_S, GATHERED_BYTES // row_bytes)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosingTokens:
    """Tokens of an `AttentionBatch`, for the kernel that scores what they choose from.

    Attributes:
        table_SM: int32 block table; entries beyond a context are not read.
        late_T: int64, the tokens: all, or those that see more than they choose.
        sequences_L: int32, their rows in the block table.
        positions_L: int32, their positions.
        num_positions: Exclusive upper bound of all positions.
        entry_tokens: That an index key stands for.
    """

    compute: AttentionCompute
    table_SM: Tensor
    late_T: Tensor
    sequences_L: Tensor
    positions_L: Tensor
    num_positions: int
    entry_tokens: int

    @classmethod
    def of(
        cls,
        batch: AttentionBatch,
        compute: AttentionCompute,
        *,
        entry_tokens: int,
        late_T: Tensor | None = None,
    ) -> Self:
        """Compute the indices, on the host."""
        work = _Work(batch)
        tokens_T = np.arange(len(work.sequence_T)) if late_T is None else late_T.numpy()
        sequences_T, positions_T = work.places(tokens_T)
        return cls(
            compute=compute,
            table_SM=_tensor(work.table_SM, torch.int32),
            late_T=_tensor(tokens_T, torch.int64),
            sequences_L=_tensor(sequences_T, torch.int32),
            positions_L=_tensor(positions_T, torch.int32),
            num_positions=int(work.contexts_S.max()),
            entry_tokens=entry_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosingBatch:
    """An `AttentionBatch` in which some tokens see more positions than an indexer chooses.

    Attributes:
        slots_T: int64, slot of each token in the cache, in tokens.
        table_SM: int32 block table; entries beyond a context are not read.
        early_T: int64, tokens that attend to all that they see; `early` counts only these.
        late_T: int64, tokens that choose.
        sequences_L: int32, row of each token that chooses in the block table.
        positions_L: int32, its position.
        num_positions: Exclusive upper bound of all positions.
        tiles: Of the tokens that choose, each over its chosen rows.
        pools: Of index keys; None where they are not pooled.
        entry_tokens: That an index key stands for.
    """

    compute: AttentionCompute
    slots_T: Tensor
    table_SM: Tensor
    early_T: Tensor
    early: LatentRaggedBatch
    late_T: Tensor
    sequences_L: Tensor
    positions_L: Tensor
    num_positions: int
    tiles: Tiles
    pools: Pools | None = None
    entry_tokens: int = 1
    chosen: Chosen = field(default_factory=Chosen, compare=False)

    @classmethod
    def of(
        cls,
        batch: AttentionBatch,
        layout: CacheLayout,
        compute: AttentionCompute,
        *,
        min_plain_tokens: int,
        top_k: int,
        entry_tokens: int = 1,
    ) -> Self:
        """Divide the tokens, on the host.

        Those that choose attend to `top_k` tokens and to those behind the last whole entry.
        """
        division, work = Division.of(batch, top_k + entry_tokens - 1), _Work(batch)
        late_T = division.late_T.numpy()
        sequences_L, positions_L = work.places(late_T)
        index_L, ones_L = np.arange(len(late_T)), np.ones(len(late_T), np.int64)
        fields = (index_L, index_L, ones_L, top_k - 1 + (positions_L + 1) % entry_tokens)
        return cls(
            compute=compute,
            slots_T=_tensor(work.slots_T, torch.int64),
            table_SM=_tensor(work.table_SM, torch.int32),
            early_T=division.early_T,
            early=LatentRaggedBatch.of(
                division.early, layout, compute, min_plain_tokens=min_plain_tokens
            ),
            late_T=division.late_T,
            sequences_L=_tensor(sequences_L, torch.int32),
            positions_L=_tensor(positions_L, torch.int32),
            num_positions=int(work.contexts_S.max()),
            tiles=Tiles(
                _tensor(np.stack(fields, axis=1), torch.int32), 1, top_k + entry_tokens - 1
            ),
            entry_tokens=entry_tokens,
        )


# Of a token: its sequence's row in the block table, its slot (counted from the end), its position,
# and that of its sequence's first new token.
COMPRESSED_FIELDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTokens:
    """The tokens of a batch as the kernel of attention to compressed entries takes them.

    Attributes:
        tokens_TF: int32 [T, `COMPRESSED_FIELDS`].
        table_SM: int32 block table; entries beyond a context are not read.
    """

    compute: AttentionCompute
    tokens_TF: Tensor
    table_SM: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, compute: AttentionCompute) -> Self:
        """Compute the fields, on the host; the batch has slots."""
        assert batch.slots is not None, "checked by `CompressedBatch.of`"
        starts, contexts = batch.query_start.int(), batch.context_tokens.int()
        num_new = starts.diff()
        sequence_T = torch.repeat_interleave(num_new)
        first_S = contexts - num_new
        position_T = torch.arange(len(sequence_T)) + (first_S - starts[:-1])[sequence_T]
        fields = (sequence_T, -1 - batch.slots[sequence_T], position_T, first_S[sequence_T])
        return cls(
            compute=compute,
            tokens_TF=torch.stack([each.int() for each in fields], dim=1),
            table_SM=batch.block_table.int(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoosingBatch:
    """An `AttentionBatch` in which some tokens see more blocks than an indexer chooses.

    Attributes:
        everything: All tokens, for layers that do not choose.
        early_T: int64, tokens that attend to all that they see; `early` counts only these.
        late_T: int64, tokens that choose.
        sequences_L: int32, row of each token that chooses in the block table.
        positions_L: int32, its position.
        num_positions: Exclusive upper bound of all positions.
        tiles: Of the tokens that choose, each over its chosen blocks.
    """

    everything: RaggedBatch
    early_T: Tensor
    early: RaggedBatch
    late_T: Tensor
    sequences_L: Tensor
    positions_L: Tensor
    num_positions: int
    tiles: Tiles
    indexer: BlockIndexerSpec

    @classmethod
    def of(
        cls, batch: AttentionBatch, compute: AttentionCompute, indexer: BlockIndexerSpec
    ) -> Self:
        """Divide the tokens, on the host."""
        division, work = Division.of(batch, indexer.num_seen), _Work(batch)
        late_T = division.late_T.numpy()
        sequences_L, positions_L = work.places(late_T)
        whole = (indexer.top_k - 1) * indexer.block_tokens
        index_L, ones_L = np.arange(len(late_T)), np.ones(len(late_T), np.int64)
        fields = (index_L, index_L, ones_L, whole + positions_L % indexer.block_tokens)
        return cls(
            everything=RaggedBatch.of(batch, compute),
            early_T=division.early_T,
            early=RaggedBatch.of(division.early, compute),
            late_T=division.late_T,
            sequences_L=_tensor(sequences_L, torch.int32),
            positions_L=_tensor(positions_L, torch.int32),
            num_positions=int(work.contexts_S.max()),
            tiles=Tiles(_tensor(np.stack(fields, axis=1), torch.int32), 1, indexer.num_seen),
            indexer=indexer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTokens:
    """The tokens of a batch that choose blocks by pooled keys, and those that do not.

    Attributes:
        early_T: int64, tokens that attend to all that they see; `early` counts only these.
        choosing: The others.
        tiles: Of these, each over its chosen blocks.
    """

    early_T: Tensor
    early: RaggedBatch
    choosing: ChoosingTokens
    tiles: Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledBatch:
    """An `AttentionBatch` for layers that choose blocks by pooled keys.

    Attributes:
        late: None where every token attends to all that it sees.
    """

    everything: RaggedBatch
    pools: Pools
    late: LateTokens | None

    @classmethod
    def of(
        cls, batch: AttentionBatch, compute: AttentionCompute, indexer: PooledIndexerSpec
    ) -> Self:
        """Divide the tokens, on the host."""
        everything, tokens = RaggedBatch.of(batch, compute), indexer.block_tokens
        pools = Pools.of(batch, tokens)
        if not sees_more_than(batch, indexer.num_seen):
            return cls(everything=everything, pools=pools, late=None)
        division = Division.of(batch, indexer.num_seen)
        choosing = ChoosingTokens.of(batch, compute, entry_tokens=tokens, late_T=division.late_T)
        num_late, whole = len(division.late_T), indexer.top_k * tokens
        index_L, ones_L = torch.arange(num_late), torch.ones(num_late, dtype=torch.int64)
        last_L = whole - 1 + (choosing.positions_L + 1) % tokens
        fields_LF = torch.stack([index_L, index_L, ones_L, last_L], dim=1).int()
        late = LateTokens(
            early_T=division.early_T,
            early=RaggedBatch.of(division.early, compute),
            choosing=choosing,
            tiles=Tiles(fields_LF, 1, indexer.num_seen),
        )
        return cls(everything=everything, pools=pools, late=late)


StagedBatch = (
    PagedBatch | RaggedBatch | LatentRaggedBatch | ChoosingBatch | BlockChoosingBatch | PooledBatch
)


class _Work:
    def __init__(self, batch: AttentionBatch) -> None:
        self.starts_S = batch.query_start.numpy().astype(np.int64)
        self.contexts_S = batch.context_tokens.numpy().astype(np.int64)
        self.num_scheduled_tokens_S = np.diff(self.starts_S)
        self.starts_S = self.starts_S[:-1]
        self.sequence_T = np.repeat(
            np.arange(len(self.num_scheduled_tokens_S)), self.num_scheduled_tokens_S
        )
        self._firsts_S = self.contexts_S - self.num_scheduled_tokens_S
        self._table_SM = batch.block_table.numpy().astype(np.int64)
        counts_S = -(-self.contexts_S // BLOCK_TOKENS)
        columns_M = np.arange(self._table_SM.shape[1])
        self.table_SM = np.where(columns_M < counts_S[:, None], self._table_SM, 0)
        offsets_T = np.arange(len(self.sequence_T)) - self.starts_S[self.sequence_T]
        self.slots_T = self._slots(self.sequence_T, self._firsts_S[self.sequence_T] + offsets_T)

    def places(self, tokens_L: Int64s) -> tuple[Int64s, Int64s]:
        """Sequences and positions of some tokens."""
        sequences_L = self.sequence_T[tokens_L]
        positions_L = self._firsts_S[sequences_L] + tokens_L - self.starts_S[sequences_L]
        return sequences_L, positions_L

    def tiles(self, chosen_S: Bools, tokens: int, *, is_packed: bool = False) -> Tiles:
        """Cut the new tokens of some sequences into tiles of at most `tokens`.

        Args:
            is_packed: Whether token indices count only the tokens of these sequences.
        """
        members = np.flatnonzero(chosen_S)
        starts = self.starts_S[members]
        if is_packed:
            starts = (
                np.cumsum(self.num_scheduled_tokens_S[members])
                - self.num_scheduled_tokens_S[members]
            )
        return self._tiles(members, tokens, names=members, starts=starts)

    def up_projected(self, members: Int64s, tokens: int) -> UpProjected:
        contexts, names = self.contexts_S[members], np.arange(len(members))
        starts = np.cumsum(contexts) - contexts
        sequence_C = np.repeat(members, contexts)
        position_C = np.arange(len(sequence_C)) - np.repeat(starts, contexts)
        return UpProjected(
            _tensor(self._slots(sequence_C, position_C), torch.int64),
            _tensor(starts[:, None], torch.int32),
            self._tiles(members, tokens, names=names, starts=self.starts_S[members]),
        )

    def _tiles(self, members: Int64s, tokens: int, *, names: Int64s, starts: Int64s) -> Tiles:
        num_scheduled_tokens = self.num_scheduled_tokens_S[members]
        counts = -(-num_scheduled_tokens // tokens)
        of_N = np.repeat(np.arange(len(members)), counts)
        offset_N = (np.arange(len(of_N)) - (np.cumsum(counts) - counts)[of_N]) * tokens
        position_N = self._firsts_S[members][of_N] + offset_N
        fields = (
            names[of_N],
            starts[of_N] + offset_N,
            np.minimum(num_scheduled_tokens[of_N] - offset_N, tokens),
            position_N,
        )
        order_N = np.argsort(-position_N, kind="stable")
        return Tiles(
            _tensor(np.stack(fields, axis=1)[order_N], torch.int32),
            tokens,
            int(self.contexts_S[members].max(initial=0)),
        )

    def _slots(self, sequence: Int64s, position: Int64s) -> Int64s:
        blocks = self._table_SM[sequence, position // BLOCK_TOKENS]
        slots: Int64s = blocks * BLOCK_TOKENS + position % BLOCK_TOKENS
        return slots


def _groups(chosen_S: Bools, contexts_S: Int64s, max_positions: int) -> Iterator[Int64s]:
    group: list[int] = []
    num_positions = 0
    for sequence in np.flatnonzero(chosen_S).tolist():
        context = int(contexts_S[sequence])
        if group and num_positions + context > max_positions:
            yield np.array(group)
            group, num_positions = [], 0
        group.append(sequence)
        num_positions += context
    if group:
        yield np.array(group)


def _tensor(values: Int64s, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
