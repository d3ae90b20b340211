"""A step cut into micro-batches, each divided between attention on host and device.

Source: MoE-Lightning (ASPLOS 2025), algorithm 2: longest first, each to the partition with the
fewest tokens. Nothing is aborted here: a micro-batch may exceed the others by one prompt chunk.
Decoding sequences go to the partition with the least context of others that decode: where one has
a prompt less, it would get most of them, and no other would overlap with their attention.
"""

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe._native import compiled
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Sequences of a micro-batch whose attention one side computes.

    Attributes:
        begin: First of its tokens in the micro-batch.
        batch: Its sequences; `query_start` counts from `begin`.
    """

    begin: int
    end: int
    batch: AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Blocks of the device's share that hold earlier tokens, and where they are staged.

    Attributes:
        runs_N3: First block of the host cache, first block of the staging slot and number of blocks
            of each copy.
        batch: The sequences of the share with block tables of the staging slot.
        num_blocks: Blocks of the slot in use, empty ones for new tokens included.
    """

    runs_N3: Int64s
    batch: AttentionBatch
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tokens [begin, end) of the reordered step: the host's share first, then the device's.

    Attributes:
        batch: All its sequences.
    """

    begin: int
    end: int
    batch: AttentionBatch
    host: Share
    device: Share
    staging: Staging

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStep:
    """A step in micro-batch order.

    Attributes:
        order_T: int64, the token of the original step at each place.
        micro-batches: As many as asked for; the last ones may be empty.
    """

    order_T: Tensor
    place_T: Tensor
    micro_batches: tuple[MicroBatch, ...]

    @property
    def has_cpu_attention(self) -> bool:
        return any(
            micro_batch.host.end > micro_batch.host.begin for micro_batch in self.micro_batches
        )

    @property
    def has_device_attention(self) -> bool:
        return any(
            micro_batch.device.end > micro_batch.device.begin for micro_batch in self.micro_batches
        )

    @property
    def max_tokens(self) -> int:
        return max(micro_batch.num_tokens for micro_batch in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who attends.

    The device does for sequences with several tokens in the step, and for a share of those that
    decode, as far as it has room for their KV; the host does for all others.

    Attributes:
        cpu_attention_fraction: Share of decoding sequences of a micro-batch for which the host
            attends, 0..1 (omega of MoE-Gen, section 4.3).
        staged_blocks: KV blocks of one micro-batch that the device has room for.
    """

    cpu_attention_fraction: float
    staged_blocks: int


def cut_step(batch: AttentionBatch, num_micro_batches: int, division: Division) -> CutStep:
    """Divide a step into `num_micro_batches`, and each of those between both sides."""
    starts = batch.query_start.numpy().astype(np.int64)
    contexts = batch.context_tokens.numpy().astype(np.int64)
    num_scheduled_tokens = np.diff(starts)
    shares: list[Int64s] = []  # the host's and the device's of each micro-batch
    for members in _deal(num_scheduled_tokens, contexts, num_micro_batches):
        on_device = _on_device(num_scheduled_tokens[members], contexts[members], division)
        shares += [members[~on_device], members[on_device]]
    order_S = np.concatenate(shares)
    ordered = batch.select(torch.from_numpy(order_S))
    ends = np.cumsum([len(share) for share in shares]).tolist()
    bounds = list(itertools.pairwise([0, *ends]))
    micro_batches = list(map(partial(_micro_batch, ordered), bounds[::2], bounds[1::2]))
    order_T = _ranges(starts[order_S], num_scheduled_tokens[order_S])
    place_T = np.empty_like(order_T)
    place_T[order_T] = np.arange(len(order_T))
    return CutStep(
        order_T=torch.from_numpy(order_T),
        place_T=torch.from_numpy(place_T),
        micro_batches=tuple(micro_batches),
    )


def _deal(num_scheduled_tokens: Int64s, contexts: Int64s, num_micro_batches: int) -> list[Int64s]:
    order = np.lexsort((-contexts, -num_scheduled_tokens))
    dealt = _deal_in_order(num_scheduled_tokens, contexts, order, num_micro_batches)
    return [np.flatnonzero(dealt == micro_batch) for micro_batch in range(num_micro_batches)]


@compiled
def _deal_in_order(
    num_scheduled_tokens: Int64s, contexts: Int64s, order: Int64s, num_micro_batches: int
) -> Int64s:
    """Give prompts to the micro-batch with the fewest tokens, then decoding sequences.

    These go to the one whose decoding sequences have the least context, of those with room.
    """
    dealt = np.empty(len(order), np.int64)
    tokens = np.zeros(num_micro_batches, np.int64)
    context = np.zeros(num_micro_batches, np.int64)
    room = -(-num_scheduled_tokens.sum() // num_micro_batches) + num_scheduled_tokens.max()
    for sequence in order:
        is_decode, chosen = num_scheduled_tokens[sequence] == 1, -1
        for i in range(num_micro_batches):
            if chosen < 0:
                is_better = tokens[i] < room
            elif is_decode and context[i] != context[chosen]:
                is_better = context[i] < context[chosen] and tokens[i] < room
            else:
                is_better = tokens[i] < tokens[chosen]
            if is_better:
                chosen = i
        dealt[sequence] = chosen
        tokens[chosen] += num_scheduled_tokens[sequence]
        if is_decode:
            context[chosen] += contexts[sequence]
    return dealt


def _ranges(begins: Int64s, counts: Int64s) -> Int64s:
    """Return the numbers from each begin on, `counts` of each."""
    ends = np.cumsum(counts)
    return np.repeat(begins - ends + counts, counts) + np.arange(counts.sum())


def _on_device(
    num_scheduled_tokens: Int64s, contexts: Int64s, division: Division
) -> npt.NDArray[np.bool_]:
    on_device = num_scheduled_tokens > 1
    decoding = np.flatnonzero(~on_device)
    num_on_host = int(np.ceil(division.cpu_attention_fraction * len(decoding)))
    on_device[decoding[num_on_host:]] = True
    blocks = np.where(on_device, -(-contexts // BLOCK_TOKENS), 0)
    fits: npt.NDArray[np.bool_] = np.cumsum(blocks) <= division.staged_blocks
    return on_device & fits


def _micro_batch(
    ordered: AttentionBatch, host: tuple[int, int], device: tuple[int, int]
) -> MicroBatch:
    """One of the sequences from `host` to `device` of a step in micro-batch order."""
    begin, middle, end = ordered.query_start[[host[0], device[0], device[1]]].tolist()
    on_device = ordered.between(*device)
    return MicroBatch(
        begin=begin,
        end=end,
        batch=ordered.between(host[0], device[1]),
        host=Share(begin=0, end=middle - begin, batch=ordered.between(*host)),
        device=Share(begin=middle - begin, end=end - begin, batch=on_device),
        staging=_stage(on_device),
    )


def _stage(share: AttentionBatch) -> Staging:
    if not len(share.context_tokens):
        return Staging(runs_N3=np.empty((0, 3), np.int64), batch=share, num_blocks=0)
    num_scheduled_tokens = np.diff(share.query_start.numpy().astype(np.int64))
    contexts = share.context_tokens.numpy().astype(np.int64)
    counts = -(-contexts // BLOCK_TOKENS)
    filled = -(-(contexts - num_scheduled_tokens) // BLOCK_TOKENS)
    firsts = np.concatenate([[0], np.cumsum(counts)])
    columns = np.arange(counts.max(initial=0))
    places = firsts[:-1, None] + columns
    table = np.where(columns < counts[:, None], places, 0).astype(np.int32)
    is_filled = columns < filled[:, None]
    host = share.block_table.numpy()[:, : len(columns)][is_filled].astype(np.int64)
    return Staging(
        runs_N3=_runs(host, places[is_filled]),
        batch=AttentionBatch(
            query_start=share.query_start,
            context_tokens=share.context_tokens,
            block_table=torch.from_numpy(table),
        ),
        num_blocks=int(firsts[-1]),
    )


def _runs(host: Int64s, device: Int64s) -> Int64s:
    if not len(host):
        return np.empty((0, 3), np.int64)
    breaks = np.flatnonzero((np.diff(host) != 1) | (np.diff(device) != 1)) + 1
    begins = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([begins, [len(host)]]))
    return np.stack([host[begins], device[begins], counts], axis=1)
