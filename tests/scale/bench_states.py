"""Scans of Gated DeltaNet beside torch functions: `python -m tests.scale.bench_states`.

The functions are those of transformers, sizes those of Qwen3.5-35B-A3B. Calls alternate, with the
same number of threads; a line has the median and the best seconds of each and the ratio of the
medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from raymoe.device.threads import set_num_threads
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_state import scan

GROUPS, HEADS, DIM = 16, 32, 128
# Sequences, new tokens of each, repetitions.
CASES = ((64, 1, 15), (512, 1, 5), (8, 2048, 3))


def measure(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def compare(batch: int, new_tokens: int, repetitions: int) -> str:
    size = (batch, new_tokens)
    query, key = torch.randn(2, *size, GROUPS, DIM).bfloat16()
    value, gain = torch.randn(*size, HEADS, DIM).bfloat16(), torch.rand(*size, HEADS)
    log_decay = -torch.rand(*size, HEADS) / 10
    states = torch.zeros(batch, HEADS, DIM, DIM)
    sequences = AttentionBatch(
        query_start=torch.arange(0, batch * new_tokens + 1, new_tokens, dtype=torch.int32),
        context_tokens=torch.full((batch,), new_tokens + (new_tokens == 1), dtype=torch.int32),
        block_table=torch.empty(0, 0, dtype=torch.int32),
        slots=torch.arange(batch, dtype=torch.int32),
    )
    step = new_tokens == 1
    torch_rule = torch_recurrent_gated_delta_rule if step else torch_chunk_gated_delta_rule

    def ours() -> torch.Tensor:
        return scan(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), log_decay.flatten(0, 1),
            gain.flatten(0, 1), states, sequences, scale=DIM**-0.5, delta=True, normalize=True,
        )  # fmt: skip

    def theirs() -> object:
        shared = HEADS // GROUPS
        wide_query, wide_key = (x.repeat_interleave(shared, 2) for x in (query, key))
        return torch_rule(
            wide_query, wide_key, value, log_decay, gain,
            initial_state=states if step else None, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    samples = [(measure(ours), measure(theirs)) for _ in range(repetitions + 1)][1:]
    ours_s, theirs_s = zip(*samples, strict=True)
    median_s, torch_s = statistics.median(ours_s), statistics.median(theirs_s)
    return (
        f"{batch} x {new_tokens}: raymoe {median_s:.4f} s (best {min(ours_s):.4f}), "
        f"torch {torch_s:.4f} s (best {min(theirs_s):.4f}), ratio {torch_s / median_s:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-threads", type=int, default=2)
    set_num_threads(parser.parse_args().num_threads)
    for case in CASES:
        print(compare(*case), flush=True)


if __name__ == "__main__":
    main()
