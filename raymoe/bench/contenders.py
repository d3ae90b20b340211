"""Engines that a benchmark compares; `python -m` this module runs one in its own process.

A contender loads the checkpoint, warms up, runs the job, and prints one JSON line. For phases it
also runs the job with one new token per row, which measures the prefill.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from raymoe.bench.workloads import WORKLOADS, make_prompts
from raymoe.config import EngineConfig, SamplingParams
from raymoe.device.host import peak_rss_bytes
from raymoe.engine.engine import Engine
from raymoe.specs.files import read_own_json
from raymoe.specs.workload import Workload

Prompts = Sequence[list[int]]
Run = Callable[[Prompts, int], int]  # prompts, new tokens -> tokens generated

PAD_TOKEN_ID = 2


class Contender(NamedTuple):
    run: Run
    predicted_s: float | None


def load_raymoe(model: Path, num_threads: int, workload: Workload) -> Contender:
    config = EngineConfig(
        dtype="bfloat16", device="cpu", num_threads=num_threads, workload=workload
    )
    engine = Engine.from_pretrained(model, config, use_tqdm=False)

    def run(prompts: Prompts, new_tokens: int) -> int:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        engine.reset_prefix_cache()  # runs repeat their prompts
        generations = engine.generate(list(prompts), params, use_tqdm=False)
        return sum(generation.num_generated_tokens for generation in generations)

    plan = engine.plan
    return Contender(run, None if plan is None else plan.estimate(workload).seconds)


def load_transformers(model: Path, num_threads: int, workload: Workload) -> Contender:
    """Transformers `generate` at its best on CPUs: grouped experts, sorted rows, static batches."""
    torch.set_num_threads(num_threads)
    transformers.logging.set_verbosity_error()
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    ).eval()
    batch_size = 32 if workload.num_rows <= 64 else 128

    @torch.inference_mode()
    def run(prompts: Prompts, new_tokens: int) -> int:
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=PAD_TOKEN_ID,
            eos_token_id=None,
        )
        ordered = sorted(prompts, key=len, reverse=True)
        count = 0
        for begin in range(0, len(ordered), batch_size):
            ids, mask = pad_left(ordered[begin : begin + batch_size])
            out = loaded.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            count += out[:, ids.shape[1] :].numel()
        return count

    return Contender(run, None)


def pad_left(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD_TOKEN_ID)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


CONTENDERS = {"raymoe": load_raymoe, "transformers": load_transformers}


def timed(run: Run, prompts: Prompts, new_tokens: int) -> float:
    """Seconds of one run that must generate every token."""
    gc.collect()
    start_s = time.perf_counter()
    generated = run(prompts, new_tokens)
    elapsed_s = time.perf_counter() - start_s
    if generated != len(prompts) * new_tokens:
        raise RuntimeError(f"{generated} tokens came back, not {len(prompts) * new_tokens}")
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("contender", choices=sorted(CONTENDERS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--phases", action="store_true")
    args = parser.parse_args()
    vocab_size = read_own_json(args.model / "config.json")["vocab_size"]
    workload = WORKLOADS[args.workload]
    prompts = make_prompts(workload, vocab_size)
    contender = CONTENDERS[args.contender](args.model, args.num_threads, workload.job)
    run = contender.run
    run(prompts[:8], 2)
    line = {
        "predicted_s": contender.predicted_s,
        "prefill_s": timed(run, prompts, 1) if args.phases else None,
        "total_s": timed(run, prompts, workload.generated_tokens),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
