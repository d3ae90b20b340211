"""A step cut into micro-batches, each divided between attention on host and device.

Source: MoE-Lightning (ASPLOS 2025), algorithm 2: longest first, each to the partition with the
fewest tokens. Nothing is aborted here: a micro-batch may exceed the others by one prompt chunk.
Decoding sequences go to the partition with the least context of others that decode: where one has
a prompt less, it would get most of them, and no other would overlap with their attention.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymoe._native import compiled
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.runtime.batch import InputBatch, Int32s, Int64s, Sequences


class Staging(NamedTuple):
    """Copies of a layer's blocks to a slot of the device.

    Attributes:
        runs_N3: Blocks with earlier tokens: first block of the host cache, first block of the slot
            and number of blocks of each copy.
        num_blocks: Blocks of the slot in use, empty ones for new tokens included.
        states_N3: States of sequences with earlier tokens: the slot of the host, the place among
            the staged ones, and 1; none where layers keep no states.
    """

    runs_N3: Int64s
    num_blocks: int
    states_N3: Int64s


NOTHING = np.empty((0, 3), np.int64)
NOTHING_STAGED = Staging(NOTHING, 0, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tokens [begin, end) of the reordered step: the host's share first, then the device's.

    Attributes:
        middle: Where the device's share begins.
        sequences: All of them, those of the host first.
        host: Sequences for which the host attends.
        device: Those for which the device does.
        staged: The device's, with the block tables and slots of what is staged.
        staging: What is staged of a layer.
        window_staging: What is staged of a layer with a sliding window: no blocks behind it.
    """

    begin: int
    middle: int
    end: int
    sequences: Sequences
    host: Sequences
    device: Sequences
    staged: Sequences
    staging: Staging
    window_staging: Staging

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def num_host_tokens(self) -> int:
        return self.middle - self.begin

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBatch:
    """A step in micro-batches.

    Attributes:
        batch: The step in micro-batch order; its `logit_rows` are in the order of the original.
        micro_batches: As many as asked for; the last ones may be empty.
    """

    batch: InputBatch
    micro_batches: tuple[MicroBatch, ...]

    @property
    def has_cpu_attention(self) -> bool:
        return any(each.middle > each.begin for each in self.micro_batches)

    @property
    def has_device_attention(self) -> bool:
        return any(each.end > each.middle for each in self.micro_batches)

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
        window: The longest sliding window of a layer; None if there is none.
    """

    cpu_attention_fraction: float
    staged_blocks: int
    window: int | None = None


def whole_batch(batch: InputBatch) -> CutBatch:
    """All of a step as one micro-batch in its own order, whose sequences the device has."""
    everything = batch.sequences
    micro_batch = MicroBatch(
        begin=0,
        middle=0,
        end=len(batch.token_ids),
        sequences=everything,
        host=everything.between(0, 0),
        device=everything,
        staged=everything,
        staging=NOTHING_STAGED,
        window_staging=NOTHING_STAGED,
    )
    return CutBatch(batch=batch, micro_batches=(micro_batch,))


def cut_batch(batch: InputBatch, num_micro_batches: int, division: Division) -> CutBatch:
    """Divide a step into `num_micro_batches`, and each of those between both sides."""
    sequences = batch.sequences
    num_scheduled_tokens = sequences.num_scheduled_tokens
    contexts = sequences.context_tokens.astype(np.int64)
    shares: list[Int64s] = []  # the host's and the device's of each micro-batch
    for members in _deal(num_scheduled_tokens, contexts, num_micro_batches):
        on_device = _on_device(num_scheduled_tokens[members], contexts[members], division)
        shares += [members[~on_device], members[on_device]]
    order_S = np.concatenate(shares)
    ordered = sequences.select(order_S)
    ends = np.cumsum([len(share) for share in shares]).tolist()
    bounds = list(itertools.pairwise([0, *ends]))
    order_T = _ranges(sequences.query_start[order_S], num_scheduled_tokens[order_S])
    place_T = np.empty_like(order_T)
    place_T[order_T] = np.arange(len(order_T))
    return CutBatch(
        batch=replace(
            batch,
            token_ids=batch.token_ids[order_T],
            positions=batch.positions[order_T],
            sequences=ordered,
            logit_rows=place_T[batch.logit_rows],
        ),
        micro_batches=tuple(
            map(partial(_micro_batch, ordered, division.window), bounds[::2], bounds[1::2])
        ),
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


def _ranges(begins: Int32s, counts: Int64s) -> Int64s:
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
    ordered: Sequences, window: int | None, host: tuple[int, int], device: tuple[int, int]
) -> MicroBatch:
    """One of the sequences from `host` to `device` of a step in micro-batch order."""
    begin, middle, end = ordered.query_start[[host[0], device[0], device[1]]].tolist()
    on_device = ordered.between(*device)
    staged, staging = _stage(on_device)
    window_staging = staging
    if window is not None:
        windowed, window_staging = _stage(on_device, window)
        staged = replace(staged, window_table=windowed.block_table)
    return MicroBatch(
        begin=begin,
        middle=middle,
        end=end,
        sequences=ordered.between(host[0], device[1]),
        host=ordered.between(*host),
        device=on_device,
        staged=staged,
        staging=staging,
        window_staging=window_staging,
    )


def _stage(share: Sequences, window: int | None = None) -> tuple[Sequences, Staging]:
    """Where blocks and states of the device's share are staged, and what is copied there.

    With a window it is for layers that see no more; the columns behind it repeat its first block.
    """
    if not len(share):
        return share, NOTHING_STAGED
    contexts = share.context_tokens.astype(np.int64)
    past = contexts - share.num_scheduled_tokens
    counts, filled = -(-contexts // BLOCK_TOKENS), -(-past // BLOCK_TOKENS)
    behind, source = np.zeros_like(counts), share.block_table
    if window is not None:
        behind = np.maximum(past - window + 1, 0) // BLOCK_TOKENS
        source = source if share.window_table is None else share.window_table
    firsts = np.concatenate([[0], np.cumsum(counts - behind)])
    columns = np.arange(counts.max(initial=0))
    places = firsts[:-1, None] + np.maximum(columns - behind[:, None], 0)
    table = np.where(columns < counts[:, None], places, 0).astype(np.int32)
    states_N3 = NOTHING
    if share.slots is not None:
        begun = np.flatnonzero(past > 0)
        states_N3 = np.stack([share.slots[begun].astype(np.int64), begun, np.ones_like(begun)], 1)
        share = replace(share, slots=np.arange(len(share), dtype=np.int32))
    is_filled = (columns >= behind[:, None]) & (columns < filled[:, None])
    host = source[:, : len(columns)][is_filled].astype(np.int64)
    runs_N3 = _runs(host, places[is_filled])
    return replace(share, block_table=table), Staging(runs_N3, int(firsts[-1]), states_N3)


def _runs(host: Int64s, device: Int64s) -> Int64s:
    if not len(host):
        return NOTHING_STAGED.runs_N3
    breaks = np.flatnonzero((np.diff(host) != 1) | (np.diff(device) != 1)) + 1
    begins = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([begins, [len(host)]]))
    return np.stack([host[begins], device[begins], counts], axis=1)
