"""Scans of Gated DeltaNet beside torch functions: `python -m tools.bench_states`.

The functions are those of transformers, sizes those of Qwen3.5-35B-A3B. Calls alternate, with the
same number of threads; a line has the median and the best seconds of each and the ratio of the
medians. `--types` measures states of float32 and of bfloat16 in turns instead, by the processor
time of their threads, each between two measurements of the machine's limits.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from raymoe.bench.kernels import STATE_CASES
from raymoe.device.threads import peak_flop_per_s, set_num_threads, update_bandwidth_bytes_per_s
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.state import scan
from raymoe.measure.jobs import StateShape, scan_job
from raymoe.measure.timing import KernelJob

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


STATE_DTYPES = (torch.float32, torch.bfloat16)
LIMIT_SECONDS = 0.4


def processor_s(job: KernelJob, num_threads: int) -> float:
    """Mean over the calls of a job, each made once by threads that work all the time."""
    begin_s = time.process_time()
    for call in job.calls:
        call()
    return (time.process_time() - begin_s) / len(job.calls) / num_threads


def compare_types(
    shape: StateShape, batch: int, new_tokens: int, num_threads: int, turns: int
) -> str:
    """Medians of each type of states, as a share of updates of memory or of float32 arithmetic."""
    is_step = new_tokens == 1
    jobs = [scan_job(replace(shape, state_dtype=one), batch, new_tokens) for one in STATE_DTYPES]

    def limit() -> float:
        if is_step:
            return update_bandwidth_bytes_per_s(num_threads, LIMIT_SECONDS)
        return peak_flop_per_s(num_threads, "float32", LIMIT_SECONDS)

    samples: list[list[tuple[float, float]]] = [[], []]
    for job in jobs:
        processor_s(job, num_threads)  # first touch, clocks
    before = limit()
    for _ in range(turns):
        for job, taken in zip(jobs, samples, strict=True):
            seconds, after = processor_s(job, num_threads), limit()
            taken.append((seconds, (before + after) / 2))
            before = after
    parts = []
    for job, taken in zip(jobs, samples, strict=True):
        work = job.bytes_per_call if is_step else job.flop_per_call
        median_s = statistics.median(seconds for seconds, _ in taken)
        share = statistics.median(work / (seconds * limit) for seconds, limit in taken)
        unit = "GB/s" if is_step else "GFLOP/s"
        parts.append(f"{1e3 * median_s:.2f} ms, {work / median_s / 1e9:.1f} {unit}, {share:.0%}")
    ratio = statistics.median(
        wide / narrow for (wide, _), (narrow, _) in zip(*samples, strict=True)
    )
    case = jobs[0].case.replace(" float32", "")
    return f"{case}: float32 {parts[0]}; bfloat16 {parts[1]}; {ratio:.2f} times as fast"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    set_num_threads(given.num_threads)
    for case in STATE_CASES if given.types else ():
        print(compare_types(*case, given.num_threads, given.turns), flush=True)
    for sizes in () if given.types else CASES:
        print(compare(*sizes), flush=True)


if __name__ == "__main__":
    main()
