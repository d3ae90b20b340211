"""From the logits of the model to those that are sampled: bias, penalties, temperature, filters.

The order and meaning of each step are those of transformers' processors and warpers (repetition
penalty, temperature, top-k, top-p, min-p) and of vLLM (bias, presence and frequency penalty).
R rows, V vocabulary; all logits here are float32 and changed in place.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.jit import compiled
from raymoe.engine.sequence import Int32s, SequenceTable
from raymoe.kernels.paged_kv import BLOCK_TOKENS

Float32s = npt.NDArray[np.float32]

NUCLEUS_CANDIDATES = 1024  # tokens that are sorted first; nearly always hold the nucleus


def forbid(logits_V: Tensor, token_ids: Sequence[int]) -> None:
    """Make these tokens impossible."""
    logits_V[torch.as_tensor(token_ids, dtype=torch.int64)] = float("-inf")


def penalise(
    logits_RV: Tensor, slots: Int32s, table: SequenceTable, penalties: tuple[Float32s, ...]
) -> None:
    """Apply repetition, presence and frequency penalties to the tokens of each slot.

    Args:
        logits_RV: One row for each slot.
        slots: Whose tokens were seen before.
        table: Holds the tokens.
        penalties: (repetition, presence, frequency) of each row.
    """
    repetition, presence, frequency = penalties
    _penalise(
        logits_RV.numpy(),
        (slots, table.known_tokens, table.prompt_tokens, table.block_table, table.token_blocks),
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
    slots, known_tokens, prompt_tokens, block_table, token_blocks = sequences
    repetition, presence, frequency = penalties
    for row, slot in enumerate(slots):
        # counts_V: 0 is unseen, else 1 + how often it was generated.
        for position in range(known_tokens[slot]):
            block = block_table[slot, position // BLOCK_TOKENS]
            token = token_blocks[block, position % BLOCK_TOKENS]
            if counts_V[token] == 0:
                counts_V[token] = 1
            if position >= prompt_tokens[slot]:
                counts_V[token] += 1
        for position in range(known_tokens[slot]):
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
    best_RK = logits_RV.topk(count).values
    index_R1 = (top_k_R.clamp(max=count) - 1)[:, None].long()
    logits_RV.masked_fill_(logits_RV < best_RK.gather(1, index_R1), float("-inf"))


def keep_top_p(logits_RV: Tensor, top_p_R: Tensor) -> None:
    """Keep the fewest best tokens whose probability reaches top_p, at least one."""
    num_candidates = min(NUCLEUS_CANDIDATES, logits_RV.shape[1])
    is_short_R = _keep_nucleus(logits_RV, top_p_R, num_candidates)
    if num_candidates < logits_RV.shape[1] and bool(is_short_R.any()):
        rows_RV = logits_RV[is_short_R]
        _keep_nucleus(rows_RV, top_p_R[is_short_R], logits_RV.shape[1])
        logits_RV[is_short_R] = rows_RV


def _keep_nucleus(logits_RV: Tensor, top_p_R: Tensor, num_candidates: int) -> Tensor:
    """Filter the rows whose nucleus is within the candidates; returns which are not, untouched."""
    best = logits_RV.topk(num_candidates)
    probability_RK = (best.values - logits_RV.logsumexp(1, keepdim=True)).exp()
    above_RK = probability_RK.cumsum(1) - probability_RK  # of better tokens
    is_kept_RK = above_RK < top_p_R[:, None]
    is_kept_RK[:, 0] = True
    is_whole = num_candidates == logits_RV.shape[1]
    is_short_R = is_kept_RK[:, -1] & (not is_whole)
    rows = (~is_short_R).nonzero()[:, 0]
    kept_RK = best.values[rows].masked_fill(~is_kept_RK[rows], float("-inf"))
    filtered_RV = torch.full((len(rows), logits_RV.shape[1]), float("-inf"))
    logits_RV[rows] = filtered_RV.scatter_(1, best.indices[rows], kept_RK)
    return is_short_R


def keep_min_p(logits_RV: Tensor, min_p_R: Tensor) -> None:
    """Drop tokens less probable than min_p times the best of their row."""
    least_R1 = logits_RV.amax(1, keepdim=True) + min_p_R.log()[:, None]
    logits_RV.masked_fill_(logits_RV < least_R1, float("-inf"))
