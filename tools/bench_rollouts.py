"""What several turns cost: `python -m tools.bench_rollouts`.

Rows of one to six turns with a calculator, by the demo model; then each of their calls as a row
of its own, with the same prompts and so the same tokens. Both in turns, after one that warms up.
Prints generated tokens per second, also per second of CPU time, which other programs disturb less,
the medians of their ratios, and the share of prompt tokens that were found in the cache.
"""

import argparse
import contextlib
import re
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa

from raymoe.assets import demo_model_path
from raymoe.assets.wrangling import make_rows
from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator

PARAMS = {"max_tokens": 16, "temperature": 0.0}
ROWS_PER_CALL, NUM_CALLS = 16, 64
MAX_TURNS = 6
NUMBER = re.compile(r"\d+(\.\d+)?")


async def add_up(row: Mapping[str, Any], generate: Callable[..., Any]) -> dict[str, Any]:
    """Ask for each amount in canonical form; a calculator adds it to those before."""
    text, total, prompts = "", Decimal(0), []
    for item in row["items"]:
        text += item
        prompts.append(text)
        answer = await generate(text)
        number = NUMBER.search(answer.text)
        total += Decimal(number[0]) if number else 0
        text += f"{answer.text} total: {total}\n"
    return {"prompts": prompts}


def make_table(num_rows: int, seed: int) -> pa.Table:
    """Make rows with one to six amounts as people write them."""
    random = Random(seed)
    tasks = (one.prompt for one in make_rows(50 * num_rows, seed=seed) if one.kind == "amount")
    items = [[next(tasks) for _ in range(random.randint(1, MAX_TURNS))] for _ in range(num_rows)]
    return pa.table({"id": range(num_rows), "items": items})


def measure(generator: MoEGenerator, table: pa.Table) -> tuple[pa.Table, float, float]:
    """Return the answers, and generated tokens per second and per second of CPU time."""
    begins = range(0, len(table), ROWS_PER_CALL)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(NUM_CALLS) as threads:
        parts = threads.map(lambda i: generator(table.slice(i, ROWS_PER_CALL)), begins)
        answers = pa.concat_tables(parts)
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    assert not any(answers["__inference_error__"].to_pylist())
    num_tokens = total(answers, "num_generated_tokens")
    return answers, num_tokens / seconds, num_tokens / cpu_s


def total(table: pa.Table, column: str) -> int:
    return sum(table[column].to_pylist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5, help="Measure both this many times.")
    parser.add_argument("--threads", type=int, default=None, help="Of each engine.")
    args = parser.parse_args()
    config = EngineConfig(device="cpu", num_threads=args.threads, max_model_len=512)
    options: dict[str, Any] = {"sampling_params": PARAMS, "engine_config": config}
    options |= {"id_column": "id", "max_concurrent_calls": NUM_CALLS}
    ratios, cpu_ratios = [], []
    with (
        contextlib.closing(MoEGenerator(demo_model_path(), rollout=add_up, **options)) as rows,
        contextlib.closing(MoEGenerator(demo_model_path(), **options)) as calls,
    ):
        for turn in range(args.turns + 1):
            answers, speed, of_cpu = measure(rows, make_table(args.rows, turn))
            prompts = [text for texts in answers["prompts"].to_pylist() for text in texts]
            single = pa.table({"id": range(len(prompts)), "prompt": prompts})
            alone, single_speed, of_single_cpu = measure(calls, single)
            num_tokens = total(answers, "num_generated_tokens")
            assert total(alone, "num_generated_tokens") == num_tokens
            found = total(answers, "num_cached_tokens") / total(answers, "num_input_tokens")
            print(
                f"{len(prompts):,} calls, {num_tokens:,} tokens: {speed:,.0f} tokens/s in turns, "
                f"{single_speed:,.0f} as single calls; {of_cpu:,.0f} and {of_single_cpu:,.0f} per "
                f"second of CPU time; {found:.1%} of the prompt tokens were found",
                flush=True,
            )
            if turn:
                ratios.append(speed / single_speed)
                cpu_ratios.append(of_cpu / of_single_cpu)
    print(f"ratio {statistics.median(ratios):.2f}, of CPU time {statistics.median(cpu_ratios):.2f}")


if __name__ == "__main__":
    main()
