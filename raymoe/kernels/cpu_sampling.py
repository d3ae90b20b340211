"""Choosing tokens on the CPU: first maximum, Gumbel-max sampling, log-probabilities.

R rows, V vocabulary, N ids per row, K largest. Sampling is counter based: the noise of a token is a
function of (seed, row key, sample index, position, token id) alone, so that a row's tokens never
depend on its neighbours, on the instruction set or on the number of threads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_norm import FLOAT_DTYPES

WORD = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
GROUP_TOKENS, GROUP_COUNTERS = 64, 16  # 16 counters of 4 words serve 64 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKeys:
    """What the noise of every row depends on, beside the token id.

    Attributes:
        seed: int64 [R], any bits.
        row_key: int64 [R], any bits.
        sample: int32 [R], index among the samples of a prompt.
        position: int32 [R], position of the token to choose.
    """

    seed: Tensor
    row_key: Tensor
    sample: Tensor
    position: Tensor


class TopLogprobs(NamedTuple):
    """The largest log-probabilities of every row, descending; equal ones by token id."""

    ids_RK: Tensor  # int64
    logprobs_RK: Tensor  # float32


def argmax(logits_RV: Tensor) -> Tensor:
    """First position of the largest logit of every row, int64 [R]; any float type.

    -1 for a row that has a NaN or nothing above -inf: no token can be chosen there.
    """
    if not _is_native(logits_RV):
        return argmax_reference(logits_RV)
    ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    _native.argmax(logits_RV, ids_R)
    return ids_R


def argmax_reference(logits_RV: Tensor) -> Tensor:
    """The plain reference of `argmax`."""
    return _first_largest(logits_RV.float())


def gumbel_argmax(logits_RV: Tensor, keys: RandomKeys, scale_R: Tensor | None = None) -> Tensor:
    """Sample a token of every row from softmax(logits * scale), int64 [R]; -1 as in `argmax`.

    Args:
        logits_RV: Any float type; tokens that must not be chosen are -inf.
        keys: Of the noise.
        scale_R: float32 factors, such as 1 / temperature; None for 1.
    """
    if not _is_native(logits_RV):
        return gumbel_argmax_reference(logits_RV, keys, scale_R)
    ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    _native.gumbel_argmax(
        logits_RV, scale_R, keys.seed, keys.row_key, keys.sample, keys.position, ids_R
    )
    return ids_R


def gumbel_argmax_reference(
    logits_RV: Tensor, keys: RandomKeys, scale_R: Tensor | None = None
) -> Tensor:
    """The plain reference of `gumbel_argmax`, with noise in float64."""
    scaled_RV = logits_RV.float() if scale_R is None else logits_RV.float() * scale_R[:, None]
    return _first_largest(scaled_RV.double() + gumbel_noise(keys, logits_RV.shape[1]))


def gumbel_noise(keys: RandomKeys, num_tokens: int) -> Tensor:
    """The noise of tokens 0 .. num_tokens - 1 of every row, float64 [R, num_tokens]."""
    halves = [
        part.long() >> shift & WORD for part in (keys.seed, keys.row_key) for shift in (0, 32)
    ]
    zero_R = torch.zeros_like(halves[0])
    mixed = philox4x32(halves, (zero_R, zero_R))
    token_V = torch.arange(num_tokens)
    counter_V = token_V // GROUP_TOKENS * GROUP_COUNTERS + token_V % GROUP_COUNTERS
    position_R1, sample_R1 = (part.long()[:, None] & WORD for part in (keys.position, keys.sample))
    counter = [counter_V, position_R1, sample_R1, mixed[2][:, None]]
    words = philox4x32(counter, (mixed[0][:, None], mixed[1][:, None]))
    which_RV = (token_V % GROUP_TOKENS // GROUP_COUNTERS).expand_as(words[0])
    word_RV = torch.stack(words).gather(0, which_RV[None])[0]
    return -torch.log(-torch.log1p(-(word_RV.double() + 0.5) / 2**32))


def philox4x32(counter: list[Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
    """
    key0, key1 = key
    for _ in range(10):
        product0, product1 = counter[0] * PHILOX_MULTIPLIERS[0], counter[2] * PHILOX_MULTIPLIERS[1]
        counter = [
            (product1 >> 32 & WORD) ^ counter[1] ^ key0,
            product1 & WORD,
            (product0 >> 32 & WORD) ^ counter[3] ^ key1,
            product0 & WORD,
        ]
        key0, key1 = (key0 + PHILOX_WEYL[0]) & WORD, (key1 + PHILOX_WEYL[1]) & WORD
    return counter


def log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials of every row, float32 [R], without a float32 copy."""
    if not _is_native(logits_RV):
        return logits_RV.float().logsumexp(-1)
    out_R = torch.empty(logits_RV.shape[0], dtype=torch.float32)
    _native.log_sum_exp(logits_RV, out_R)
    return out_R


def log_softmax_at(logits_RV: Tensor, ids_RN: Tensor) -> Tensor:
    """Log-probabilities of the given tokens of every row, float32 [R, N] (or [R] for ids [R])."""
    index_RN = ids_RN.long() if ids_RN.ndim == 2 else ids_RN.long()[:, None]
    logprobs_RN = logits_RV.gather(1, index_RN).float() - log_sum_exp(logits_RV)[:, None]
    return logprobs_RN if ids_RN.ndim == 2 else logprobs_RN[:, 0]


def topk_logprobs(logits_RV: Tensor, k: int) -> TopLogprobs:
    """The `k` largest log-probabilities of every row."""
    num_rows, num_tokens = logits_RV.shape
    if not 1 <= k <= num_tokens:
        raise ConfigError(f"topk_logprobs: k is {k}, the vocabulary has {num_tokens} tokens")
    if not _is_native(logits_RV):
        return topk_logprobs_reference(logits_RV, k)
    ids_RK = torch.empty(num_rows, k, dtype=torch.int64)
    values_RK = torch.empty(num_rows, k, dtype=torch.float32)
    _native.top_k(logits_RV, ids_RK, values_RK)
    return TopLogprobs(ids_RK, values_RK - log_sum_exp(logits_RV)[:, None])


def topk_logprobs_reference(logits_RV: Tensor, k: int) -> TopLogprobs:
    """The plain reference of `topk_logprobs`."""
    order_RK = logits_RV.float().sort(stable=True, dim=-1, descending=True).indices[:, :k]
    return TopLogprobs(order_RK, logits_RV.float().log_softmax(-1).gather(1, order_RK))


def _first_largest(values_RV: Tensor) -> Tensor:
    if values_RV.shape[1] == 0:
        return torch.full((values_RV.shape[0],), -1)
    ids_R = values_RV.sort(stable=True, dim=-1, descending=True).indices[:, 0]
    largest_R = values_RV.amax(-1)  # NaN if the row has one
    return ids_R.masked_fill(largest_R.isnan() | (largest_R == float("-inf")), -1)


def _is_native(logits_RV: Tensor) -> bool:
    return (
        logits_RV.ndim == 2
        and logits_RV.dtype in FLOAT_DTYPES
        and logits_RV.is_cpu
        and (logits_RV.shape[1] == 1 or logits_RV.stride(1) == 1)
    )
