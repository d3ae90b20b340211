"""Choose the next tokens: penalties and constraints, temperature, top-k, top-p, min-p, the draw.

Top-p is found in linear time by weighted selection: a sort of each row costs as much as a layer
when the vocabulary is large and the distribution flat.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe._native import compiled
from raymoe.engine.grammars import TokenBitmasks
from raymoe.engine.outputs import SLICE_ROWS, Int32s, TokenLogprob
from raymoe.engine.request import Sample
from raymoe.engine.sequence import SequenceTable
from raymoe.kernels.elementwise import (
    RandomKeys,
    argmax,
    choose,
    gumbel_argmax,
    log_sum_exp,
    pack_draws,
    topk_logprobs,
)
from raymoe.kernels.paged_kv import BLOCK_TOKENS

Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


@compiled
def keep_nucleus(logits_RV: Float32s, top_p_R: Float32s, log_sum_R: Float32s) -> None:
    """Make everything outside of the nucleus of its row -inf.

    Args:
        top_p_R: Probability that the nucleus reaches.
        log_sum_R: Logarithm of the sum of exponentials; rows where it is not finite are left alone.
    """
    values = np.empty(logits_RV.shape[1], np.float32)
    weights = np.empty(logits_RV.shape[1], np.float64)
    for row in range(logits_RV.shape[0]):
        log_sum, top_p = log_sum_R[row], np.float64(top_p_R[row])
        if np.isfinite(log_sum):
            count = _candidates(logits_RV[row], log_sum, top_p, (values, weights))
            threshold, above = _border(values[:count], weights[:count], top_p)
            _drop_below(logits_RV[row], threshold, log_sum, top_p - above)


@compiled
def _candidates(
    logits_V: Float32s, log_sum: float, top_p: float, out: tuple[Float32s, Float64s]
) -> int:
    """Tokens that may be in the nucleus; those below a share of (1 - top_p) / V are not."""
    # The slack lets no rounding empty the set where all tokens are equal.
    floor = log_sum + np.log(max((1.0 - top_p) / len(logits_V), 1e-30)) - 1e-3
    count = 0
    for logit in logits_V:
        if logit >= floor:
            out[0][count] = logit
            out[1][count] = np.exp(np.float64(logit) - log_sum)
            count += 1
    return count


@compiled
def _border(values: Float32s, weights: Float64s, top_p: float) -> tuple[float, float]:
    begin, end, above = 0, len(values), 0.0
    while True:
        pivot = values[(begin + end) // 2]
        equal, less = _partition(values, weights, (begin, end), pivot)
        greater_weight = weights[begin:equal].sum()
        if above + greater_weight >= top_p and equal > begin:
            end = equal
            continue
        equal_weight = weights[equal:less].sum()
        if above + greater_weight + equal_weight >= top_p or less == end:
            return pivot, above + greater_weight
        above += greater_weight + equal_weight
        begin = less


@compiled
def _partition(
    values: Float32s, weights: Float64s, window: tuple[int, int], pivot: float
) -> tuple[int, int]:
    equal, less = window
    place = equal
    while place < less:
        value, weight = values[place], weights[place]
        if value > pivot:
            values[place], weights[place] = values[equal], weights[equal]
            values[equal], weights[equal] = value, weight
            equal += 1
            place += 1
        elif value < pivot:
            less -= 1
            values[place], weights[place] = values[less], weights[less]
            values[less], weights[less] = value, weight
        else:
            place += 1
    return equal, less


@compiled
def _drop_below(logits_V: Float32s, threshold: float, log_sum: float, missing: float) -> None:
    for token in range(len(logits_V)):
        if logits_V[token] == threshold and missing > 0.0:
            missing -= np.exp(np.float64(threshold) - log_sum)
        elif logits_V[token] <= threshold:
            logits_V[token] = -np.inf


SMALL_TOP_K = 64  # up to here the native selection is faster than torch's


def forbid(logits_V: Tensor, token_ids: Sequence[int] | Int32s) -> None:
    logits_V[torch.as_tensor(token_ids, dtype=torch.int64)] = float("-inf")


def keep_only(logits_V: Tensor, token_ids: Sequence[int]) -> None:
    index = torch.as_tensor(token_ids, dtype=torch.int64)
    kept = logits_V[index]
    logits_V.fill_(float("-inf"))
    logits_V[index] = kept


def ending_tokens(generated: Int32s, words: Sequence[tuple[int, ...]]) -> list[int]:
    """Last tokens of the words whose other tokens have just been generated, as in vLLM."""
    return [
        word[-1]
        for word in words
        if len(word) <= len(generated) + 1
        and tuple(generated[len(generated) - len(word) + 1 :].tolist()) == word[:-1]
    ]


def repeating_tokens(tokens: Int32s, ngram_size: int) -> Int32s:
    """Tokens that would end a sequence of `ngram_size` tokens that occurs in `tokens` already.

    Reference: `NoRepeatNGramLogitsProcessor` of transformers.
    """
    if len(tokens) < ngram_size:
        return tokens[:0]
    ngrams = np.lib.stride_tricks.sliding_window_view(tokens, ngram_size)
    last = tokens[len(tokens) - ngram_size + 1 :]
    following: Int32s = ngrams[(ngrams[:, :-1] == last).all(1), -1]
    return following


def penalise(
    logits_RV: Tensor, slots: Int32s, table: SequenceTable, penalties: tuple[Float32s, ...]
) -> None:
    """Apply repetition, presence and frequency penalties to the tokens of each slot.

    Args:
        logits_RV: One row for each slot.
        slots: Whose tokens were seen before.
        penalties: (repetition, presence, frequency) of each row.
    """
    repetition, presence, frequency = penalties
    _penalise(
        logits_RV.numpy(),
        (slots, table.num_tokens, table.prompt_tokens, table.block_table, table.token_blocks),
        (repetition, presence, frequency),
        np.zeros(logits_RV.shape[1], np.int32),
    )


@compiled
def _penalise(
    logits_RV: Float32s,
    sequences: tuple[Int32s, Int32s, Int32s, Int32s, Int32s],
    penalties: tuple[Float32s, Float32s, Float32s],
    counts_V: Int32s,
) -> None:
    slots, num_tokens, prompt_tokens, block_table, token_blocks = sequences
    repetition, presence, frequency = penalties
    for row, slot in enumerate(slots):
        # counts_V: 0 is unseen, else 1 + how often it was generated.
        for position in range(num_tokens[slot]):
            block = block_table[slot, position // BLOCK_TOKENS]
            token = token_blocks[block, position % BLOCK_TOKENS]
            if counts_V[token] == 0:
                counts_V[token] = 1
            if position >= prompt_tokens[slot]:
                counts_V[token] += 1
        for position in range(num_tokens[slot]):
            block = block_table[slot, position // BLOCK_TOKENS]
            token = token_blocks[block, position % BLOCK_TOKENS]
            if counts_V[token] == 0:
                continue
            num_generated = counts_V[token] - 1
            counts_V[token] = 0
            logit = logits_RV[row, token]
            logit = logit * repetition[row] if logit < 0 else logit / repetition[row]
            if num_generated > 0:
                logit -= frequency[row] * num_generated + presence[row]
            logits_RV[row, token] = logit


def keep_top_k(logits_RV: Tensor, top_k_R: Tensor) -> None:
    """Drop what is below the k-th best logit of its row; ties with it stay."""
    count = min(int(top_k_R.max()), logits_RV.shape[1])
    if count <= SMALL_TOP_K:
        best_RK = logits_RV.gather(1, topk_logprobs(logits_RV, count).ids_RK)
    else:
        best_RK = logits_RV.topk(count).values
    index_R1 = (top_k_R.clamp(max=count) - 1)[:, None].long()
    logits_RV.masked_fill_(logits_RV < best_RK.gather(1, index_R1), float("-inf"))


def keep_top_p(logits_RV: Tensor, top_p_R: Tensor) -> None:
    """Keep the fewest best tokens whose probability reaches top_p, at least one.

    Of equal logits at the border, those with the lowest ids stay. A row without a finite logit is
    left alone.
    """
    log_sum_R = log_sum_exp(logits_RV)
    keep_nucleus(logits_RV.numpy(), top_p_R.numpy(), log_sum_R.numpy())


def keep_min_p(logits_RV: Tensor, min_p_R: Tensor) -> None:
    """Drop tokens less probable than min_p times the best of their row."""
    min_R1 = logits_RV.amax(1, keepdim=True) + min_p_R.log()[:, None]
    logits_RV.masked_fill_(logits_RV < min_R1, float("-inf"))


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probability of one token of each row, and of the best ones.

    Args:
        logits_RV: Raw logits in any float type.
        token_ids: The token of each row.
        num_top: How many of the best tokens are wanted of each row.
    """
    entries: list[TokenLogprob] = []
    for begin in range(0, len(token_ids), SLICE_ROWS):
        end = min(begin + SLICE_ROWS, len(token_ids))
        entries += _slice(logits_RV[begin:end].float(), token_ids[begin:end], num_top[begin:end])
    return entries


def _slice(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    log_sum_R1 = logits_RV.logsumexp(1, keepdim=True)
    chosen = logits_RV.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None])
    chosen_R = (chosen - log_sum_R1)[:, 0].tolist()
    best = logits_RV.topk(min(max(num_top), logits_RV.shape[1]))
    top_ids, top_logprobs = best.indices.tolist(), (best.values - log_sum_R1).tolist()
    return [
        TokenLogprob(
            token_id=token_ids[row],
            logprob=chosen_R[row],
            top=tuple(zip(top_ids[row][:count], top_logprobs[row][:count], strict=True)),
        )
        for row, count in enumerate(num_top)
    ]


# Logits that are copied at once: 16 MiB in float32, which the allocator has at hand. Memory for
# those of all rows would come from the kernel page by page, which takes longer than choosing.
SLICE_ELEMENTS = 1 << 22
GREEDY, FREE, PROCESSED = range(3)  # argmax; temperature alone; everything else


class Sampler:
    """Chooses the next tokens of live sequences, by the parameters in the table of their slots.

    Args:
        masks: Of rows with a grammar; without it there must be none.
    """

    def __init__(
        self,
        table: SequenceTable,
        eos_token_ids: tuple[int, ...],
        masks: TokenBitmasks | None = None,
    ) -> None:
        self._table, self._eos_token_ids, self._masks = table, eos_token_ids, masks
        self._samples: list[Sample | None] = [None] * table.num_slots

    def admit(self, sample: Sample) -> None:
        """Take over the parameters of a sample that got a slot."""
        slot, request = sample.slot, sample.request
        params = request.params
        for name, values in self._table.numbers.items():
            values[slot] = getattr(params, name)
        self._table.top_k[slot] = params.top_k
        self._table.seed[slot], self._table.row_key[slot] = request.seed, request.row_key
        self._table.sample_index[slot] = sample.index
        self._table.first_free[slot] = len(request.prompt) + params.min_tokens
        self._table.is_greedy[slot] = params.is_greedy
        self._table.has_penalty[slot] = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        self._table.is_special[slot] = bool(
            params.logit_bias
            or params.min_tokens
            or params.no_repeat_ngram_size
            or params.allowed_token_ids
            or request.bad_words
        )
        self._table.has_grammar[slot] = sample.is_constrained
        is_adjusted = (
            self._table.has_penalty[slot]
            or self._table.is_special[slot]
            or self._table.has_grammar[slot]
        )
        is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        if is_adjusted or (is_filtered and not params.is_greedy):
            self._table.path[slot] = PROCESSED
        else:
            self._table.path[slot] = GREEDY if params.is_greedy else FREE
        self._samples[slot] = sample

    def choose(
        self,
        logits_RV: Tensor,
        slots: Int32s,
        positions: Int32s,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> Int32s:
        """Choose a token for each row; -1 where the logits allow none.

        Args:
            logits_RV: In any float type; not changed.
            rows: Those to choose for, ascending; all by default.
        """
        if rows is None:
            rows = np.arange(len(slots))
        tokens = np.empty(len(slots), np.int32)
        path = self._table.path[slots]
        for choose_some, kind in (
            (self._choose_greedy, GREEDY),
            (self._choose_free, FREE),
            (self._choose_processed, PROCESSED),
        ):
            chosen = np.flatnonzero(path == kind)
            if kind != PROCESSED and len(chosen) == logits_RV.shape[0]:
                return choose_some(logits_RV, slots, positions)
            for part in _slices(chosen, logits_RV.shape[1]):
                some_RV = logits_RV.index_select(0, torch.from_numpy(rows[part]))
                tokens[part] = choose_some(some_RV, slots[part], positions[part])
        return tokens

    def needs_logits(self, slots: Int32s, is_sample: Bools) -> Bools:
        """Rows for which the host chooses, or of whose logits it reads more: those of prompts."""
        table = self._table
        is_looked_at = ~is_sample | table.is_read[slots] | table.wants_logprobs[slots]
        is_needed: Bools = is_looked_at | (table.path[slots] == PROCESSED)
        return is_needed

    def choose_on_device(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        """As `choose`, where the logits are; tokens of rows that need their logits mean nothing."""
        is_greedy = self._table.path[slots] != FREE
        temperature = np.where(is_greedy, np.float32(1), self._table.numbers["temperature"][slots])
        draws_R4 = pack_draws(
            self._random_keys(slots, positions),
            torch.from_numpy(1.0 / temperature),
            torch.from_numpy(is_greedy),
        )
        return _as_int32(to_host(choose(logits_RV, draws_R4.to(logits_RV.device))))

    def processed(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Tensor:
        """The float32 logits that the token is drawn from."""
        logits_RV = logits_RV.to(torch.float32, copy=True)
        self._adjust(logits_RV, slots, positions)
        sampled = np.flatnonzero(~self._table.is_greedy[slots])
        if len(sampled):
            rows = torch.from_numpy(sampled)
            logits_RV[rows] = self._filter(logits_RV[rows], slots[sampled])
        return logits_RV

    def _choose_greedy(self, logits_RV: Tensor, _slots: Int32s, _positions: Int32s) -> Int32s:
        return _as_int32(argmax(logits_RV))

    def _choose_free(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        scale_R = torch.from_numpy(1.0 / self._table.numbers["temperature"][slots])
        return _as_int32(gumbel_argmax(logits_RV, self._random_keys(slots, positions), scale_R))

    def _choose_processed(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        logits_RV = self.processed(logits_RV, slots, positions)
        drawn = _as_int32(gumbel_argmax(logits_RV, self._random_keys(slots, positions)))
        return np.where(self._table.is_greedy[slots], _as_int32(argmax(logits_RV)), drawn)

    def _random_keys(self, slots: Int32s, positions: Int32s) -> RandomKeys:
        table = self._table
        return RandomKeys(
            seed=torch.from_numpy(table.seed[slots]),
            row_key=torch.from_numpy(table.row_key[slots]),
            sample=torch.from_numpy(table.sample_index[slots]),
            position=torch.from_numpy(positions),
        )

    def _adjust(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> None:
        for row in np.flatnonzero(self._table.is_special[slots]):
            slot = slots[row]
            sample = self._samples[slot]
            assert sample is not None
            request, params = sample.request, sample.request.params
            if params.logit_bias:
                token_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
                logits_RV[row, token_ids] += torch.tensor(list(params.logit_bias.values()))
            if positions[row] < self._table.first_free[slot]:
                eos = () if params.ignore_eos else self._eos_token_ids
                forbid(logits_RV[row], (*eos, *(params.stop_token_ids or ())))
            if size := params.no_repeat_ngram_size:
                forbid(logits_RV[row], repeating_tokens(self._table.tokens(slot), size))
            if params.allowed_token_ids:
                keep_only(logits_RV[row], params.allowed_token_ids)
            if request.bad_words:
                forbid(
                    logits_RV[row], ending_tokens(self._table.generated(slot), request.bad_words)
                )
        rows = np.flatnonzero(self._table.has_penalty[slots])
        if len(rows):
            names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
            penalties = tuple(self._table.numbers[name][slots[rows]] for name in names)
            index = torch.from_numpy(rows)
            penalised_RV = logits_RV[index]
            penalise(penalised_RV, slots[rows], self._table, penalties)
            logits_RV[index] = penalised_RV
        rows = np.flatnonzero(self._table.has_grammar[slots])
        if len(rows):
            assert self._masks is not None
            self._masks.apply(logits_RV, rows, slots[rows])

    def _filter(self, logits_RV: Tensor, slots: Int32s) -> Tensor:
        def numbers(name: str) -> Tensor:
            return torch.from_numpy(self._table.numbers[name][slots])

        logits_RV /= numbers("temperature")[:, None]
        top_k_R = torch.from_numpy(self._table.top_k[slots])
        top_p_R, min_p_R = numbers("top_p"), numbers("min_p")
        for uses_R, keep, value_R in (
            ((top_k_R > 0) & (top_k_R < logits_RV.shape[1]), keep_top_k, top_k_R),
            (top_p_R < 1, keep_top_p, top_p_R),
            (min_p_R > 0, keep_min_p, min_p_R),
        ):
            if bool(uses_R.all()):
                keep(logits_RV, value_R)
            elif bool(uses_R.any()):
                used_RV = logits_RV[uses_R]
                keep(used_RV, value_R[uses_R])
                logits_RV[uses_R] = used_RV
        return logits_RV


def _slices(rows: npt.NDArray[np.int64], vocab_size: int) -> Iterator[npt.NDArray[np.int64]]:
    step = max(1, SLICE_ELEMENTS // vocab_size)
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step]


def to_host(tensor: Tensor) -> Tensor:
    """Wait for a tensor and copy it from a GPU to pinned memory, which torch keeps for the next."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def _as_int32(tokens: Tensor) -> Int32s:
    return tokens.numpy().astype(np.int32)
