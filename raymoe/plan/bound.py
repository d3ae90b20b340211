"""The time of a job at the limits of the machine: operations over peak, bytes over bandwidth.

Assumptions:
- All rows are processed together: prefill reads every weight once, each decode step reads the
  weights that it touches (with B rows the expected number of distinct experts) and the KV cache.
- A phase takes the longer of its two times; nothing else takes any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.plan.work import ModelWork
from raymoe.specs.model import ModelSpec

# What the best matrix products reach of the rate of bare dot-product instructions.
GEMM_EFFICIENCY = 0.94


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBound:
    """Seconds of the two phases at the limit, and what binds each."""

    prefill_s: float
    decode_s: float
    prefill_limit: str
    decode_limit: str

    @property
    def total_s(self) -> float:
        """The whole job."""
        return self.prefill_s + self.decode_s


def job_bound(
    model: ModelSpec,
    prompt_lengths: Sequence[int],
    generated_tokens: int,
    *,
    flop_per_s: float,
    bytes_per_s: float,
    bytes_per_element: int = 2,
) -> JobBound:
    """Bound of a job whose rows all generate the same number of tokens.

    Args:
        model: The model.
        prompt_lengths: Tokens of each prompt.
        generated_tokens: Of each row; the first comes out of the prefill.
        flop_per_s: Attainable rate of matrix products.
        bytes_per_s: Read bandwidth of host memory.
        bytes_per_element: Of KV cache, and of weights that are not quantised.
    """
    work = ModelWork.of(model, bytes_per_element)
    rows = len(prompt_lengths)
    prompt_tokens = sum(prompt_lengths)
    pairs = sum(length * (length + 1) // 2 for length in prompt_lengths)
    prefill_flop = work.token_flop * prompt_tokens + work.head_flop * rows
    prefill_flop += work.prefill_pair_flop * pairs
    prefill_bytes = work.all_weight_bytes + work.kv_token_bytes * prompt_tokens
    steps = generated_tokens - 1
    contexts = steps * prompt_tokens + rows * steps * generated_tokens // 2
    decode_flop = (work.token_flop + work.head_flop) * rows * steps + work.pair_flop * contexts
    decode_bytes = work.touched_weight_bytes(rows) * steps + work.kv_token_bytes * contexts
    prefill = _phase(prefill_flop / flop_per_s, prefill_bytes / bytes_per_s)
    decode = _phase(decode_flop / flop_per_s, decode_bytes / bytes_per_s)
    return JobBound(
        prefill_s=prefill[0], decode_s=decode[0], prefill_limit=prefill[1], decode_limit=decode[1]
    )


def _phase(compute_s: float, memory_s: float) -> tuple[float, str]:
    return (compute_s, "compute") if compute_s >= memory_s else (memory_s, "memory bandwidth")
