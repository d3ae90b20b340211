"""Convolutions and scans of states on a device; arguments and results are those of `state`.

Triton's kernels take one token after the other. Without Triton, and for long prompts, torch
multiplies matrices of a chunk of tokens (WY form: Parallelizing Linear Transformers with the Delta
Rule, arXiv 2406.06484; with decays: Gated Delta Networks, arXiv 2412.06464).

T tokens, S sequences, C channels, P past inputs of a channel, N slots. H heads in G groups, K x V
sizes of a state. X chunks of L tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import triton_runs_on

Int64s = npt.NDArray[np.int64]

CHUNK_TOKENS = 64
# With decays for each channel, every pair of tokens of a chunk has factors for each of them.
CHUNK_TOKENS_OF_CHANNEL_DECAYS = 16
# New tokens of a sequence from which Triton's kernel, which takes one after the other, leaves the
# scan to torch: about a microsecond for each, by our estimate, whatever the number of sequences.
MIN_CHUNKED_TOKENS = 2048
CHUNK_BYTES = 32 << 20  # upper bound of one tensor of the chunks that are multiplied at once
MIN_LOG_DECAY = -200.0  # exp of it is 0 in float32; sums of infinities would have no differences


@dataclass(frozen=True, slots=True)
class Chunks:
    """Runs of at most L tokens, of which those of a sequence come in order.

    Attributes:
        tokens_XL: int64, T beyond the end of a run.
        sequences_X: int64, numbers of their sequences.
        slots_S: int64, slots of the sequences.
        levels: For each run, the number of runs of its sequence before it.
    """

    tokens_XL: Tensor
    sequences_X: Tensor
    slots_S: Tensor
    levels: tuple[int, ...]

    @classmethod
    def of(cls, sequences_SF: Int64s, length: int, num_tokens: int) -> Self:
        """Cut sequences (slot, first token, number of tokens) into runs of `length`."""
        slots_S, firsts_S, counts_S = sequences_SF.T
        runs_S = -(-counts_S // length)
        sequence_X = np.repeat(np.arange(len(runs_S)), runs_S)
        level_X = np.arange(len(sequence_X)) - (np.cumsum(runs_S) - runs_S)[sequence_X]
        order_X = np.argsort(level_X, kind="stable")
        sequence_X, level_X = sequence_X[order_X], level_X[order_X]
        offsets_XL = level_X[:, None] * length + np.arange(length)
        tokens_XL = np.where(
            offsets_XL < counts_S[sequence_X, None],
            firsts_S[sequence_X, None] + offsets_XL,
            num_tokens,
        )
        return cls(
            torch.from_numpy(tokens_XL),
            torch.from_numpy(sequence_X),
            torch.from_numpy(np.ascontiguousarray(slots_S)),
            tuple(level_X.tolist()),
        )

    def split(self, at_once: int) -> Iterator["Chunks"]:
        for begin in range(0, len(self.levels), at_once):
            yield self.between(begin, begin + at_once)

    def between(self, begin: int, end: int) -> "Chunks":
        some = slice(begin, end)
        tokens_XL, sequences_X = self.tokens_XL[some], self.sequences_X[some]
        return Chunks(tokens_XL, sequences_X, self.slots_S, self.levels[some])

    def of_one_level(self) -> Iterator[slice]:
        """Runs without another of their sequence among them."""
        begin = 0
        for _, level in groupby(self.levels):
            end = begin + sum(1 for _ in level)
            yield slice(begin, end)
            begin = end


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Sequences with new tokens as indices for the device, made once for all layers of a step.

    Attributes:
        num_tokens: Of the step (T).
        fresh: int64, slots of sequences all of whose tokens are new.
        sequences_SF: int32 [S, 3]: slot, first token, number of tokens.
        sequence_T: int32, the sequence of each token.
        scanned_SF: Those of `sequences_SF` that Triton's kernel scans; None without Triton.
        chunks: The others, as runs that torch scans.
    """

    num_tokens: int
    fresh: Tensor
    sequences_SF: Tensor
    sequence_T: Tensor
    scanned_SF: Tensor | None
    chunks: tuple[Chunks, ...]

    @classmethod
    def of(
        cls, batch: AttentionBatch, device: torch.device, *, has_channel_decays: bool = False
    ) -> Self:
        """Compute the indices, on the host.

        Args:
            device: Where they are used.
            has_channel_decays: Whether there are decays for each channel, which makes pairs of
                tokens expensive.

        Raises:
            ConfigError: There are no slots.
        """
        if batch.slots is None:
            raise ConfigError(
                "slots is None; layers that keep states need the slot of each sequence"
            )
        starts = batch.query_start.numpy().astype(np.int64)
        counts = np.diff(starts)
        sequences_SF = np.stack([batch.slots.numpy(), starts[:-1], counts], axis=1)
        is_fresh = batch.context_tokens.numpy() == counts
        has_tokens = counts > 0
        sequences_SF, is_fresh = sequences_SF[has_tokens], is_fresh[has_tokens]
        uses_triton, num_tokens = triton_runs_on(device), int(starts[-1])
        limit = MIN_CHUNKED_TOKENS if uses_triton else 2
        is_long = sequences_SF[:, 2] >= limit
        alone, together = sequences_SF[~is_long], sequences_SF[is_long]
        longest = int(together[:, 2].max(initial=1))
        chunk_tokens = CHUNK_TOKENS_OF_CHANNEL_DECAYS if has_channel_decays else CHUNK_TOKENS
        cut = [(together, min(chunk_tokens, longest))]
        if not uses_triton:
            cut.append((alone, 1))

        return cls(
            num_tokens=num_tokens,
            fresh=_tensor(sequences_SF[is_fresh, 0], torch.int64),
            sequences_SF=_tensor(sequences_SF, torch.int32),
            sequence_T=_tensor(
                np.repeat(np.arange(len(sequences_SF)), sequences_SF[:, 2]), torch.int32
            ),
            scanned_SF=_tensor(alone, torch.int32) if uses_triton else None,
            chunks=tuple(
                Chunks.of(members, length, num_tokens) for members, length in cut if len(members)
            ),
        )


def _tensor(values: Int64s, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def causal_conv_on_device(  # noqa: PLR0917 - an operator: its tensors are its arguments
    inputs_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    past_NPC: Tensor,
    batch: StateBatch,
    *,
    activation: Literal["silu", "none"],
) -> Tensor:
    """`state.causal_conv`; `weight_CW` is the transpose of a contiguous [W, C]."""
    out_TC = inputs_TC.new_empty(inputs_TC.shape)
    if not batch.num_tokens:
        return out_TC
    past_NPC.index_fill_(0, batch.fresh, 0)
    if batch.scanned_SF is None:
        return _convolve(inputs_TC, weight_CW, bias_C, past_NPC, batch, out_TC, activation)
    from raymoe.kernels.gpu_state.kernels import (  # noqa: PLC0415 - needs Triton
        causal_conv_launches,
    )

    tables = (batch.sequences_SF, batch.sequence_T)
    for launch in causal_conv_launches(
        inputs_TC, weight_CW, bias_C, past_NPC, tables, out_TC, is_silu=activation == "silu"
    ):
        launch.run()
    return out_TC


def _convolve(  # noqa: PLR0917 - an operator: its tensors are its arguments
    inputs_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    past_NPC: Tensor,
    batch: StateBatch,
    out_TC: Tensor,
    activation: str,
) -> Tensor:
    """Convolve the last inputs of each sequence, followed by its new ones."""
    num_past, num_channels = past_NPC.shape[1:]
    slots_S, firsts_S, counts_S = batch.sequences_SF.long().unbind(1)
    past_RC = past_NPC[slots_S].flatten(0, 1)
    # Row of a token in all past inputs and then all tokens, `back` tokens before it.
    tokens_T, sequence_T = torch.arange(len(inputs_TC)).to(firsts_S), batch.sequence_T.long()
    offsets_T = tokens_T - firsts_S[sequence_T]

    def rows(sequences: Tensor, offsets: Tensor, firsts: Tensor) -> Tensor:
        is_past = offsets < 0
        before = (sequences + 1) * num_past + offsets
        return torch.where(is_past, before, len(past_RC) + firsts + offsets)

    known_RC = torch.cat([past_RC, inputs_TC])
    at_once = max(1, CHUNK_BYTES // (num_channels * torch.float32.itemsize))
    for begin in range(0, len(inputs_TC), at_once):
        some = slice(begin, begin + at_once)
        sequences, offsets = sequence_T[some], offsets_T[some]
        sum_tC = torch.zeros(len(offsets), num_channels, device=inputs_TC.device)
        if bias_C is not None:
            sum_tC += bias_C
        for tap, weight_C in enumerate(weight_CW.t()):
            chosen = rows(sequences, offsets - (num_past - tap), firsts_S[sequences])
            sum_tC.addcmul_(known_RC[chosen].float(), weight_C)
        out_TC[some] = functional.silu(sum_tC) if activation == "silu" else sum_tC
    kept_SP = counts_S[:, None] - num_past + torch.arange(num_past).to(counts_S)
    every_S1 = torch.arange(len(counts_S)).to(counts_S)[:, None]
    past_NPC[slots_S] = known_RC[rows(every_S1, kept_SP, firsts_S[:, None])]
    return out_TC


def scan_on_device(  # noqa: PLR0913, PLR0917 - an operator: its tensors are its arguments
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    log_decay: Tensor,
    gain_TH: Tensor,
    states_NHKV: Tensor,
    batch: StateBatch,
    *,
    scale: float,
    delta: bool,
    normalize: bool,
) -> Tensor:
    """`state.scan`.

    Bits of a token whose sequence has `MIN_CHUNKED_TOKENS` new ones, or without Triton, depend on
    how the sequence is cut into steps, and on others if the library of matrix products lets them.
    """
    num_tokens, (num_heads, value_dim) = batch.num_tokens, value_THV.shape[1:]
    # A row more for what is beyond the end of a chunk.
    out_RHV = value_THV.new_empty(num_tokens + 1, num_heads, value_dim)
    out_THV = out_RHV[:num_tokens]
    if not num_tokens:
        return out_THV
    states_NHKV.index_fill_(0, batch.fresh, 0)
    inputs = (query_TGK, key_TGK, value_THV, log_decay, gain_TH)
    if batch.scanned_SF is not None and len(batch.scanned_SF):
        from raymoe.kernels.gpu_state.kernels import scan_launch  # noqa: PLC0415 - needs Triton

        scan_launch(
            *inputs,
            states_NHKV,
            batch.scanned_SF,
            out_THV,
            scale=scale,
            delta=delta,
            normalize=normalize,
        ).run()
    kind = _Kind(scale, delta, normalize)
    for chunks in batch.chunks:
        rows_S, held_NHKV = chunks.slots_S, states_NHKV
        if states_NHKV.dtype != torch.float32:  # rounded once, after the last token
            rows_S, held_NHKV = torch.arange(len(rows_S)).to(rows_S), states_NHKV[rows_S].float()
        for some in chunks.split(_at_once(chunks, states_NHKV, log_decay)):
            operands = _Operands.of(inputs, some, kind)
            _scan_chunks(operands, held_NHKV, rows_S[some.sequences_X], some, out_RHV=out_RHV)
        if held_NHKV is not states_NHKV:
            states_NHKV[chunks.slots_S] = held_NHKV.to(states_NHKV.dtype)
    return out_THV


def _at_once(chunks: Chunks, states_NHKV: Tensor, log_decay: Tensor) -> int:
    """Chunks whose largest tensor is within the bound: pairs in float64, rows, or states."""
    _, num_heads, key_dim, value_dim = states_NHKV.shape
    length = chunks.tokens_XL.shape[1]
    of_pair = torch.float64.itemsize * (key_dim if log_decay.dim() == 3 else 1)
    rows = torch.float64.itemsize * max(key_dim, value_dim)
    state = torch.float32.itemsize * key_dim * value_dim
    largest = num_heads * max(length * length * of_pair, length * rows, state)
    return max(1, CHUNK_BYTES // largest)


class _Kind(NamedTuple):
    scale: float
    delta: bool
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """Chunks as matrices; what they are multiplied with does not depend on a state.

    Attributes:
        read_XHLK: Queries, decayed since the state before the chunk.
        written_XHLK: Keys, decayed until the state after it.
        kept: Decay of the state over the chunk, [X, H, 1, 1] or [X, H, K, 1].
        scores_XHLL: What a token reads of each one so far.
        change_XHLV: What a token writes if the state before the chunk is zero.
        seen_XHLK: Times that state, what is to be subtracted from it; None without the delta rule.
    """

    read_XHLK: Tensor
    written_XHLK: Tensor
    kept: Tensor
    scores_XHLL: Tensor
    change_XHLV: Tensor
    seen_XHLK: Tensor | None

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...], chunks: Chunks, kind: _Kind) -> Self:
        num_tokens, group = len(inputs[0]), inputs[2].shape[1] // inputs[1].shape[1]
        is_token_XL = chunks.tokens_XL < num_tokens
        tokens_XL = chunks.tokens_XL.clamp(max=num_tokens - 1)

        def gathered(values: Tensor) -> Tensor:
            """[X, H, L, ...], zero beyond the end of a chunk."""
            found = values[tokens_XL].float()
            mask = is_token_XL.view(*is_token_XL.shape, *[1] * (found.dim() - 2))
            return found.masked_fill(~mask, 0).transpose(1, 2)

        query_XHLK, key_XHLK = (
            _unit(gathered(each), kind.normalize).repeat_interleave(group, 1) for each in inputs[:2]
        )
        query_XHLK = query_XHLK * kind.scale
        log_decay = gathered(inputs[3]).clamp(min=MIN_LOG_DECAY).double().cumsum(2)
        if log_decay.dim() == 3:
            log_decay = log_decay[..., None]
        gain_XHL1 = gathered(inputs[4])[..., None]
        scores_XHLL, products_XHLL = _pairs(query_XHLK, key_XHLK, log_decay)
        change_XHLV = gain_XHL1 * gathered(inputs[2])
        decay, seen_XHLK = log_decay.exp().float(), None
        if kind.delta:
            lower_XHLL = (gain_XHL1 * products_XHLL).tril(-1)
            both = torch.cat([change_XHLV, gain_XHL1 * decay * key_XHLK], dim=3)
            solved = torch.linalg.solve_triangular(
                lower_XHLL, both, upper=False, unitriangular=True
            )
            change_XHLV, seen_XHLK = solved.split([change_XHLV.shape[3], key_XHLK.shape[3]], dim=3)
        return cls(
            read_XHLK=decay * query_XHLK,
            written_XHLK=(log_decay[:, :, -1:] - log_decay).exp().float() * key_XHLK,
            kept=decay[:, :, -1, :, None],
            scores_XHLL=scores_XHLL,
            change_XHLV=change_XHLV,
            seen_XHLK=seen_XHLK,
        )


def _unit(rows: Tensor, is_normalized: bool) -> Tensor:
    if not is_normalized:
        return rows
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def _pairs(query_XHLK: Tensor, key_XHLK: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Products of queries and of keys with each key so far, decayed since then; [X, H, L, L].

    Decays are those of heads, [X, H, L, 1], or of channels, [X, H, L, K], summed from the first.
    """
    length = key_XHLK.shape[2]
    is_later_LL = torch.ones(length, length, dtype=torch.bool, device=key_XHLK.device).triu(1)
    since = (log_decay[:, :, :, None] - log_decay[:, :, None]).masked_fill(
        is_later_LL[:, :, None], -torch.inf
    )
    decay = since.exp().float()
    if decay.shape[-1] == 1:
        keys_XHKL = key_XHLK.transpose(2, 3)
        return query_XHLK @ keys_XHKL * decay[..., 0], key_XHLK @ keys_XHKL * decay[..., 0]
    decayed_XHLLK = decay * key_XHLK[:, :, None]
    scores, products = (
        (decayed_XHLLK @ each[..., None])[..., 0] for each in (query_XHLK, key_XHLK)
    )
    return scores, products


def _scan_chunks(
    operands: _Operands, held_NHKV: Tensor, rows_X: Tensor, chunks: Chunks, *, out_RHV: Tensor
) -> None:
    """Go through the chunks of each sequence with its state, in float32 at `rows_X`."""
    for some in chunks.of_one_level():
        state_XHKV = held_NHKV[rows_X[some]]
        change_XHLV = operands.change_XHLV[some]
        if operands.seen_XHLK is not None:
            change_XHLV = change_XHLV - operands.seen_XHLK[some] @ state_XHKV
        read_XHLV = operands.read_XHLK[some] @ state_XHKV
        read_XHLV += operands.scores_XHLL[some] @ change_XHLV
        state_XHKV = operands.kept[some] * state_XHKV
        state_XHKV += operands.written_XHLK[some].transpose(2, 3) @ change_XHLV
        held_NHKV[rows_X[some]] = state_XHKV
        out_RHV[chunks.tokens_XL[some]] = read_XHLV.transpose(1, 2).to(out_RHV.dtype)
