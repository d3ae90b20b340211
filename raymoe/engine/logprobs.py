"""Log probabilities of tokens under the model's own distribution.

R rows of a chunk of logits, V vocabulary. Like vLLM, before bias, penalties and temperature.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raymoe.engine.generation import TokenLogprob

SLICE_ROWS = 32  # float32 copies of that many rows at once


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
