"""Rows of a hybrid with and without a common prefix: `python -m tools.bench_prefixes`.

A random Qwen3-Next in float32 on the CPU. Prompts are equally long: those without a common prefix
differ in their first token. Runs alternate; a line has the prompt tokens computed, the median and
the best seconds, and whether the tokens of shared rows are those that each has alone.
"""

import argparse
import statistics
import tempfile
import time

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import Policy

CONFIG = Qwen3NextConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32,
    num_experts_per_tok=4, moe_intermediate_size=256, shared_expert_intermediate_size=256,
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
    linear_value_head_dim=64, initializer_range=0.1,
)  # fmt: skip
SUFFIX, GENERATED = 32, 16


def run(engine: Engine, prompts: list[list[int]]) -> tuple[float, int, list[tuple[int, ...]]]:
    params = {"temperature": 0, "max_tokens": GENERATED, "ignore_eos": True}
    before, begin_s = engine.stats().num_prompt_tokens, time.perf_counter()
    rows = engine.generate(prompts, params)
    seconds = time.perf_counter() - begin_s
    tokens = [row.token_ids for row in rows]
    return seconds, engine.stats().num_prompt_tokens - before, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    head = torch.randint(100, 4096, (given.prefix,)).tolist()
    tails = torch.randint(100, 4096, (given.rows, SUFFIX)).tolist()
    prompts = {
        "without": [[row % 100, *head[1:], *tail] for row, tail in enumerate(tails)],
        "with": [[*head, *tail] for tail in tails],
    }
    policy = Policy(
        max_num_seqs=given.rows,
        max_num_batched_tokens=2048,
        max_prefill_chunk_tokens=2048,
        num_kv_blocks=given.rows * ((given.prefix + SUFFIX + GENERATED) // 32 + 2),
    )
    config = EngineConfig(
        device="cpu", dtype="float32", policy=policy, num_threads=given.threads, linger_s=60.0
    )
    with tempfile.TemporaryDirectory() as directory:
        Qwen3NextForCausalLM(CONFIG).save_pretrained(directory)
        with Engine.from_pretrained(directory, config) as engine:
            run(engine, prompts["without"][:2])
            runs = [
                {name: run(engine, rows) for name, rows in prompts.items()}
                for _ in range(given.repeats)
            ]
            alone = [run(engine, [prompt])[2][0] for prompt in prompts["with"][:8]]
    medians = {}
    for name in prompts:
        seconds = [each[name][0] for each in runs]
        medians[name] = statistics.median(seconds)
        print(f"{name:>8}: {runs[0][name][1]:,} prompt tokens, {medians[name]:.2f} s "
              f"({min(seconds):.2f})")  # fmt: skip
    print(f"ratio {medians['without'] / medians['with']:.2f}, same tokens: "
          f"{all(each['with'][2][:8] == alone for each in runs)}")  # fmt: skip


if __name__ == "__main__":
    main()
