"""Which token is next: greedy where that is all, the full processing of logits elsewhere.

R rows of a chunk of logits, V vocabulary. What is chosen for a row depends on its own logits,
tokens, parameters and (seed, row key, sample index, position), never on other rows.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.grammars import TokenBitmasks
from raymoe.engine.logits import forbid, keep_min_p, keep_top_k, keep_top_p, penalise
from raymoe.engine.request import Sample
from raymoe.engine.sequence import Bools, Int32s, SequenceTable
from raymoe.kernels.cpu_sampling import RandomKeys, argmax, gumbel_argmax

# Logits that are copied at once: 16 MiB in float32, which the allocator has at hand. Memory for
# those of all rows would come from the kernel page by page, which takes longer than choosing.
SLICE_ELEMENTS = 1 << 22
GREEDY, FREE, PROCESSED = range(3)  # argmax; temperature alone; everything else


class Sampler:
    """Parameters of live sequences as a struct of arrays, and the choice of their tokens.

    Args:
        table: The live sequences.
        eos_token_ids: Of the model; they are impossible before `min_tokens`.
        masks: Of rows with a grammar; without it there must be none.
    """

    def __init__(
        self,
        table: SequenceTable,
        eos_token_ids: tuple[int, ...],
        masks: TokenBitmasks | None = None,
    ) -> None:
        size = table.num_slots
        self._table, self._eos_token_ids, self._masks = table, eos_token_ids, masks
        self._has_grammar: Bools = np.zeros(size, np.bool_)
        self._path = np.zeros(size, np.int8)  # GREEDY, FREE or PROCESSED
        self._is_special: Bools = np.zeros(size, np.bool_)  # logit_bias or min_tokens
        self._is_greedy: Bools = np.zeros(size, np.bool_)
        self._has_penalty: Bools = np.zeros(size, np.bool_)
        self._numbers = {
            name: np.zeros(size, np.float32)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
        }
        self._top_k: Int32s = np.zeros(size, np.int32)
        self._seed, self._row_key = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._sample_index: Int32s = np.zeros(size, np.int32)
        self._first_free: Int32s = np.zeros(size, np.int32)
        self._samples: list[Sample | None] = [None] * size

    def admit(self, sample: Sample) -> None:
        """Take over the parameters of a sample that got a slot."""
        slot, request = sample.slot, sample.request
        params = request.params
        for name, values in self._numbers.items():
            values[slot] = getattr(params, name)
        self._top_k[slot] = params.top_k
        self._seed[slot], self._row_key[slot] = request.seed, request.row_key
        self._sample_index[slot] = sample.index
        self._first_free[slot] = len(request.prompt) + params.min_tokens
        self._is_greedy[slot] = params.is_greedy
        self._has_penalty[slot] = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        self._is_special[slot] = bool(params.logit_bias or params.min_tokens)
        self._has_grammar[slot] = request.params.form is not None
        is_adjusted = self._has_penalty[slot] or self._is_special[slot] or self._has_grammar[slot]
        is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        if is_adjusted or (is_filtered and not params.is_greedy):
            self._path[slot] = PROCESSED
        else:
            self._path[slot] = GREEDY if params.is_greedy else FREE
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
            slots: Of each row.
            positions: Of the token to choose.
            rows: Those to choose for, ascending; all by default.
        """
        if rows is None:
            rows = np.arange(len(slots))
        tokens = np.empty(len(slots), np.int32)
        path = self._path[slots]
        for choose, kind in (
            (self._choose_greedy, GREEDY),
            (self._choose_free, FREE),
            (self._choose_processed, PROCESSED),
        ):
            chosen = np.flatnonzero(path == kind)
            if kind != PROCESSED and len(chosen) == logits_RV.shape[0]:
                return choose(logits_RV, slots, positions)
            for part in _slices(chosen, logits_RV.shape[1]):
                some_RV = logits_RV.index_select(0, torch.from_numpy(rows[part]))
                tokens[part] = choose(some_RV, slots[part], positions[part])
        return tokens

    def processed(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Tensor:
        """The float32 logits that the token is drawn from."""
        logits_RV = logits_RV.to(torch.float32, copy=True)
        self._adjust(logits_RV, slots, positions)
        sampled = np.flatnonzero(~self._is_greedy[slots])
        if len(sampled):
            rows = torch.from_numpy(sampled)
            logits_RV[rows] = self._filter(logits_RV[rows], slots[sampled])
        return logits_RV

    def _choose_greedy(self, logits_RV: Tensor, _slots: Int32s, _positions: Int32s) -> Int32s:
        return _as_int32(argmax(logits_RV))

    def _choose_free(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        scale_R = torch.from_numpy(1.0 / self._numbers["temperature"][slots])
        return _as_int32(gumbel_argmax(logits_RV, self._random_keys(slots, positions), scale_R))

    def _choose_processed(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        logits_RV = self.processed(logits_RV, slots, positions)
        drawn = _as_int32(gumbel_argmax(logits_RV, self._random_keys(slots, positions)))
        return np.where(self._is_greedy[slots], _as_int32(argmax(logits_RV)), drawn)

    def _random_keys(self, slots: Int32s, positions: Int32s) -> RandomKeys:
        return RandomKeys(
            seed=torch.from_numpy(self._seed[slots]),
            row_key=torch.from_numpy(self._row_key[slots]),
            sample=torch.from_numpy(self._sample_index[slots]),
            position=torch.from_numpy(positions),
        )

    def _adjust(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> None:
        for row in np.flatnonzero(self._is_special[slots]):
            slot = slots[row]
            sample = self._samples[slot]
            assert sample is not None
            params = sample.request.params
            if params.logit_bias:
                token_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
                logits_RV[row, token_ids] += torch.tensor(list(params.logit_bias.values()))
            if positions[row] < self._first_free[slot]:
                eos = () if params.ignore_eos else self._eos_token_ids
                forbid(logits_RV[row], (*eos, *(params.stop_token_ids or ())))
        rows = np.flatnonzero(self._has_penalty[slots])
        if len(rows):
            names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
            penalties = tuple(self._numbers[name][slots[rows]] for name in names)
            index = torch.from_numpy(rows)
            penalised_RV = logits_RV[index]
            penalise(penalised_RV, slots[rows], self._table, penalties)
            logits_RV[index] = penalised_RV
        rows = np.flatnonzero(self._has_grammar[slots])
        if len(rows):
            assert self._masks is not None
            self._masks.apply(logits_RV, rows, slots[rows])

    def _filter(self, logits_RV: Tensor, slots: Int32s) -> Tensor:
        def numbers(name: str) -> Tensor:
            return torch.from_numpy(self._numbers[name][slots])

        logits_RV /= numbers("temperature")[:, None]
        top_k_R = torch.from_numpy(self._top_k[slots])
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


def _as_int32(tokens: Tensor) -> Int32s:
    return tokens.numpy().astype(np.int32)
