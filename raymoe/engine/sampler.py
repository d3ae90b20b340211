"""Which token is next: greedy where that is all, the full processing of logits elsewhere.

R rows of a chunk of logits, V vocabulary. What is chosen for a row depends on its own logits,
tokens, parameters and (seed, row key, sample index, position), never on other rows.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.logits import forbid, keep_min_p, keep_top_k, keep_top_p, penalise
from raymoe.engine.request import Sample
from raymoe.engine.sequence import Bools, Int32s, SequenceTable
from raymoe.kernels import cpu_sampling

SLICE_ELEMENTS = 1 << 22  # logits that are processed at once: 16 MiB in float32
OFF = -1


class Sampler:
    """Parameters of live sequences as a struct of arrays, and the choice of their tokens.

    Args:
        table: The live sequences.
        eos_token_ids: Of the model; they are impossible before `min_tokens`.
    """

    def __init__(self, table: SequenceTable, eos_token_ids: tuple[int, ...]) -> None:
        size = table.num_slots
        self._table, self._eos_token_ids = table, eos_token_ids
        self._is_plain: Bools = np.zeros(size, np.bool_)
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
        self._key: npt.NDArray[np.int64] = np.zeros((size, 3), np.int64)
        self._first_free: Int32s = np.zeros(size, np.int32)
        self._samples: list[Sample | None] = [None] * size

    def admit(self, sample: Sample) -> None:
        """Take over the parameters of a sample that got a slot."""
        slot, request = sample.slot, sample.request
        params = request.params
        for name, values in self._numbers.items():
            values[slot] = getattr(params, name)
        self._top_k[slot] = params.top_k
        self._key[slot] = (request.seed, request.row_key, sample.index)
        self._first_free[slot] = len(request.prompt) + params.min_tokens
        self._is_greedy[slot] = params.is_greedy
        self._has_penalty[slot] = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        is_adjusted = self._has_penalty[slot] or params.logit_bias or params.min_tokens
        self._is_plain[slot] = params.is_greedy and not is_adjusted
        self._samples[slot] = sample

    def choose(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        """Choose a token for each row.

        Args:
            logits_RV: In any float type; not changed.
            slots: Of each row.
            positions: Of the token to choose.
        """
        is_plain = self._is_plain[slots]
        if is_plain.all():
            return _as_int32(cpu_sampling.argmax(logits_RV))
        tokens = np.empty(len(slots), np.int32)
        plain = np.flatnonzero(is_plain)
        if len(plain):
            tokens[plain] = _as_int32(cpu_sampling.argmax(logits_RV[torch.from_numpy(plain)]))
        for rows in _slices(np.flatnonzero(~is_plain), logits_RV.shape[1]):
            fresh_RV = logits_RV[torch.from_numpy(rows)].float()
            tokens[rows] = self._choose(fresh_RV, slots[rows], positions[rows])
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

    def _choose(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> Int32s:
        logits_RV = self.processed(logits_RV, slots, positions)
        key = torch.from_numpy(self._key[slots])
        drawn = _as_int32(
            cpu_sampling.gumbel_argmax(
                logits_RV,
                seed=key[:, 0],
                row_key=key[:, 1],
                sample_index=key[:, 2],
                position=torch.from_numpy(positions.astype(np.int64)),
            )
        )
        best = _as_int32(cpu_sampling.argmax(logits_RV))
        return np.where(self._is_greedy[slots], best, drawn)

    def _adjust(self, logits_RV: Tensor, slots: Int32s, positions: Int32s) -> None:
        for row, slot in enumerate(slots):
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
