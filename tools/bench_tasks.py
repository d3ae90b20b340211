"""What scoring costs: `python -m tools.bench_tasks memory|speed`.

`memory`: resident memory after 1,000 and 10,000 documents through one `MoEGenerator`.
`speed`: tokens per second of scoring documents and of the prefill of generation (`max_tokens=1`),
of the same model and the same prompts, in turns; and per second of CPU time, which other programs
on the machine disturb less.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa

from raymoe.assets import demo_model_path
from raymoe.bench.workloads import make_checkpoint, random_prompts
from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from raymoe.specs.workload import Workload
from raymoe.units import MIB

ROWS_PER_BATCH = 250


def documents(num_rows: int) -> Iterator[pa.Table]:
    """Tables of documents of 32 to 160 tokens that share nothing."""
    choose = np.random.default_rng(5)
    for begin in range(0, num_rows, ROWS_PER_BATCH):
        lengths = choose.integers(32, 161, ROWS_PER_BATCH)
        tokens = [choose.integers(3, 250, n).tolist() for n in lengths]
        ids = range(begin, begin + ROWS_PER_BATCH)
        yield pa.table({"id": ids, "continuation": tokens})


def measure_memory(num_rows: int, num_threads: int) -> dict[int, float]:
    """Resident MiB after 1, 2, 4, ... thousand rows and after all."""
    config = EngineConfig(num_threads=num_threads, max_model_len=256, device="cpu")
    generator = MoEGenerator(
        demo_model_path(), task="score", task_options={"token_logprobs": True}, engine_config=config
    )
    process, seen, done, tokens = psutil.Process(), {}, 0, 0
    begin_s = time.monotonic()
    for table in documents(num_rows):
        answers = generator(table)
        assert not any(answers.column("__inference_error__").to_pylist())
        done += table.num_rows
        tokens += sum(answers.column("num_input_tokens").to_pylist())
        if done in {1000, 2000, 4000, 7000, num_rows}:
            seen[done] = process.memory_info().rss / MIB
            print(f"{done:,} documents, {tokens:,} tokens: {seen[done]:,.0f} MiB", flush=True)
    print(f"{tokens / (time.monotonic() - begin_s):,.0f} tokens/s")
    generator.close()
    return seen


def measure_speed(shape: str, num_rows: int, num_tokens: int, num_turns: int, threads: int) -> None:
    """Print tokens per second of both in each turn, and the medians of their ratios."""
    directory = Path(tempfile.gettempdir()) / f"raymoe-bench-{shape}"
    make_checkpoint(shape, directory)
    workload = Workload(num_rows=num_rows, prompt_tokens=num_tokens, generated_tokens=1)
    config = EngineConfig(
        num_threads=threads, device="cpu", workload=workload, max_model_len=num_tokens + 2
    )
    params = {"max_tokens": 1, "temperature": 0.0}
    ratios, cpu_ratios = [], []
    with Engine.from_pretrained(directory, config) as engine:
        for turn in range(num_turns + 1):  # the first one warms up
            prompts = random_prompts([num_tokens] * num_rows, 4000)
            rates, cpu_s = {}, {}
            for kind in ("score", "generate") if turn % 2 else ("generate", "score"):
                cached = engine.stats().num_cached_tokens
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                if kind == "score":
                    answers = engine.score([None] * num_rows, prompts)
                else:
                    answers = engine.generate(prompts, params)
                rates[kind] = num_rows * num_tokens / (time.perf_counter() - begin_s)
                cpu_s[kind] = time.process_time() - begin_cpu_s
                assert not any(answer.error for answer in answers)
                assert engine.stats().num_cached_tokens == cached, "prompts were shared"
            if turn:
                ratios.append(rates["score"] / rates["generate"])
                cpu_ratios.append(cpu_s["generate"] / cpu_s["score"])
                print(
                    f"score {rates['score']:,.0f}, prefill {rates['generate']:,.0f} tokens/s: "
                    f"ratio {ratios[-1]:.3f}, by CPU time {cpu_ratios[-1]:.3f}", flush=True,
                )  # fmt: skip
    medians = [statistics.median(each) for each in (ratios, cpu_ratios)]
    print(f"median ratio {medians[0]:.3f}, by CPU time {medians[1]:.3f}, of {num_turns} turns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["memory", "speed"])
    parser.add_argument("--shape", default="mixtral")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.what == "memory":
        measure_memory(given.rows or 10_000, given.threads)
    else:
        measure_speed(given.shape, given.rows or 16, given.tokens, given.turns, given.threads)


if __name__ == "__main__":
    main()
