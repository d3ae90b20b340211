"""A pass cut into waves, and the sequences of each wave between host and device attention.

Source: MoE-Lightning (ASPLOS 2025), algorithm 2: longest first, each to the partition with the
fewest tokens. Nothing is aborted here: a wave may exceed the others by one prompt chunk.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import BLOCK_TOKENS

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Sequences of a wave whose attention one side computes.

    Attributes:
        begin: First of its tokens in the wave.
        batch: Its sequences; `query_start` counts from `begin`.
    """

    begin: int
    end: int
    batch: AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Blocks of the device's share that hold earlier tokens, and where they are staged.

    Attributes:
        runs: (first block of the host cache, first block of the staging slot, number of blocks) of
            each copy.
        batch: The sequences of the share with block tables of the staging slot.
        num_blocks: Blocks of the slot in use, empty ones for new tokens included.
    """

    runs: tuple[tuple[int, int, int], ...]
    batch: AttentionBatch
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Tokens [begin, end) of the reordered pass: the host's share first, then the device's."""

    begin: int
    end: int
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
class CutPass:
    """A pass in wave order.

    Attributes:
        order_T: int64, the token of the original pass at each place.
        waves: As many as asked for; the last ones may be empty.
    """

    order_T: Tensor
    place_T: Tensor
    waves: tuple[Wave, ...]

    @property
    def has_cpu_attention(self) -> bool:
        return any(wave.host.end > wave.host.begin for wave in self.waves)

    @property
    def has_device_attention(self) -> bool:
        return any(wave.device.end > wave.device.begin for wave in self.waves)

    @property
    def most_tokens(self) -> int:
        return max(wave.num_tokens for wave in self.waves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who attends.

    The device does for sequences with several tokens in the pass, and for a share of those that
    decode, as far as it has room for their KV; the host does for all others.

    Attributes:
        cpu_attention_fraction: Share of the decoding sequences of each wave for which the host
            attends, 0..1 (omega of MoE-Gen, section 4.3).
        staged_blocks: KV blocks of one wave that the device has room for.
    """

    cpu_attention_fraction: float
    staged_blocks: int


def cut_pass(batch: AttentionBatch, num_waves: int, division: Division) -> CutPass:
    """Deal the sequences of a pass to `num_waves` waves, and those of each to the two sides."""
    starts = batch.query_start.numpy().astype(np.int64)
    contexts = batch.context_tokens.numpy().astype(np.int64)
    takes = np.diff(starts)
    waves, order, begin = [], [np.empty(0, np.int64)], 0
    for members in _deal(takes, contexts, num_waves):
        on_device = _on_device(takes[members], contexts[members], division)
        host, device = members[~on_device], members[on_device]
        wave = _wave(batch, takes, (host, device), begin)
        order += [np.arange(starts[i], starts[i + 1]) for i in (*host, *device)]
        waves.append(wave)
        begin = wave.end
    order_T = torch.from_numpy(np.concatenate(order))
    return CutPass(order_T=order_T, place_T=order_T.argsort(), waves=tuple(waves))


def _deal(takes: Int64s, contexts: Int64s, num_waves: int) -> list[Int64s]:
    members: list[list[int]] = [[] for _ in range(num_waves)]
    loads = [(0, 0, wave) for wave in range(num_waves)]
    for sequence in np.lexsort((-contexts, -takes)).tolist():
        tokens, context, wave = min(loads)
        members[wave].append(sequence)
        loads[wave] = (tokens + int(takes[sequence]), context + int(contexts[sequence]), wave)
    return [np.array(sorted(wave), np.int64) for wave in members]


def _on_device(takes: Int64s, contexts: Int64s, division: Division) -> npt.NDArray[np.bool_]:
    on_device = takes > 1
    decoding = np.flatnonzero(~on_device)
    num_on_host = int(np.ceil(division.cpu_attention_fraction * len(decoding)))
    on_device[decoding[num_on_host:]] = True
    blocks = np.where(on_device, -(-contexts // BLOCK_TOKENS), 0)
    fits: npt.NDArray[np.bool_] = np.cumsum(blocks) <= division.staged_blocks
    return on_device & fits


def _wave(batch: AttentionBatch, takes: Int64s, members: tuple[Int64s, Int64s], begin: int) -> Wave:
    host_tokens, device_tokens = (int(takes[share].sum()) for share in members)
    num_tokens = host_tokens + device_tokens
    host, device = (batch.select(torch.from_numpy(share)) for share in members)
    return Wave(
        begin=begin,
        end=begin + num_tokens,
        host=Share(begin=0, end=host_tokens, batch=host),
        device=Share(begin=host_tokens, end=num_tokens, batch=device),
        staging=_stage(device),
    )


def _stage(share: AttentionBatch) -> Staging:
    takes = np.diff(share.query_start.numpy().astype(np.int64))
    contexts = share.context_tokens.numpy().astype(np.int64)
    counts = -(-contexts // BLOCK_TOKENS)
    filled = -(-(contexts - takes) // BLOCK_TOKENS)
    firsts = np.concatenate([[0], np.cumsum(counts)])
    table = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
    host: list[Int64s] = [np.empty(0, np.int64)]
    device: list[Int64s] = [np.empty(0, np.int64)]
    for sequence, (first, count, past) in enumerate(zip(firsts, counts, filled, strict=False)):
        table[sequence, :count] = np.arange(first, first + count)
        host.append(share.block_table[sequence, :past].numpy().astype(np.int64))
        device.append(np.arange(first, first + past))
    return Staging(
        runs=_runs(np.concatenate(host), np.concatenate(device)),
        batch=AttentionBatch(
            query_start=share.query_start,
            context_tokens=share.context_tokens,
            block_table=torch.from_numpy(table),
        ),
        num_blocks=int(firsts[-1]),
    )


def _runs(host: Int64s, device: Int64s) -> tuple[tuple[int, int, int], ...]:
    if not len(host):
        return ()
    breaks = np.flatnonzero((np.diff(host) != 1) | (np.diff(device) != 1)) + 1
    begins = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([begins, [len(host)]]))
    return tuple(zip(host[begins].tolist(), device[begins].tolist(), counts.tolist(), strict=True))
