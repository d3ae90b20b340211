"""A pass as indices on the device whose memory holds the cache, whatever a token leaves there.

Sequences with as many new tokens go through one call together. S sequences of a group, M blocks of
the longest, Q new tokens of each, C positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS, CacheLayout

# Gathered blocks of one call: room beside weights and caches is scarce.
GATHERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with Q new tokens each: their rows in the pass, blocks and contexts."""

    rows_SQ: Tensor
    block_table_SM: Tensor
    context_S: Tensor

    def visible(self, num_positions: int, sliding_window: int | None = None) -> Tensor:
        """Which of the first positions each new token sees, [S, Q, C]."""
        num_new, device = self.rows_SQ.shape[1], self.context_S.device
        first_S1 = self.context_S[:, None] - num_new
        query_SQ1 = (first_S1 + torch.arange(num_new, device=device))[..., None]
        key_C = torch.arange(num_positions, device=device)
        visible_SQC = key_C <= query_SQ1
        if sliding_window is not None:
            visible_SQC &= key_C > query_SQ1 - sliding_window
        return visible_SQC

    def is_rest(self, num_positions: int) -> Tensor:
        """Which positions lie behind the context of each sequence, [S, C]: NaN may be there."""
        position_C = torch.arange(num_positions, device=self.context_S.device)
        return position_C >= self.context_S[:, None]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """An `AttentionBatch` as indices on the device, made once for all layers of a pass."""

    blocks_T: Tensor
    offsets_T: Tensor
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, batch: AttentionBatch, layout: CacheLayout, device: torch.device) -> Self:
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
            Group(
                (starts[members, None] + torch.arange(take)).to(device),
                _blocks(batch, contexts, members, num_blocks).to(device),
                contexts[members].to(device),
            )
            for members, take, num_blocks in _group(takes, contexts, layout)
        ]
        offsets_T = positions_T % BLOCK_TOKENS
        return cls(blocks_T.to(device), offsets_T.to(device), tuple(groups))


def _group(
    takes: Tensor, contexts: Tensor, layout: CacheLayout
) -> Iterator[tuple[Tensor, int, int]]:
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
