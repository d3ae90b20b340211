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
from raymoe.engine.nucleus import keep_nucleus
from raymoe.engine.sequence import Int32s, SequenceTable
from raymoe.kernels.cpu_sampling import log_sum_exp, topk_logprobs
from raymoe.kernels.paged_kv import BLOCK_TOKENS

Float32s = npt.NDArray[np.float32]

SMALL_TOP_K = 64  # up to here the native selection is faster than torch's


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
    least_R1 = logits_RV.amax(1, keepdim=True) + min_p_R.log()[:, None]
    logits_RV.masked_fill_(logits_RV < least_R1, float("-inf"))
