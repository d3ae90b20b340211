"""The included model under several schedules, against transformers in float32 on the CPU."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from raymoe.assets import demo_model_path
from raymoe.config import EngineConfig, SamplingParams
from raymoe.device.find_gpu import half_dtype
from raymoe.doctor.examine import Check, Outcome, Status, Target
from raymoe.engine.engine import Engine
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.units import KIB

SCHEDULES = ("cgopipe", "vslpipe", "module_batching")
PROMPTS = (
    "date: 3 March 2024 ->", "date: 12/24/99 ->", "phone: (212) 555-0187 ->",
    "amount: EUR 1.234,50 ->", "name: Dr. Ada M. Lovelace ->", "unit: 2,5 kg ->",
    "date: the 1st of October, 1987 at 10:30 in the morning ->", "amount: $ 12k ->",
)  # fmt: skip
NUM_TOKENS = 24
# Difference of the log probabilities of the same tokens, in nats, which `SHARE` of them keep. The
# others may choose different experts: transformers in float16 has one token that differs by 4.4.
BOUNDS = {"float16": 0.05, "bfloat16": 0.3}
SHARE = 0.95
POLICY = Policy(
    max_num_seqs=8, max_num_batched_tokens=128, max_prefill_chunk_tokens=128, num_kv_blocks=32
)
# Everything streams in small pages; attention of decode runs on both sides where a schedule allows.
STREAMED = DevicePolicy(num_micro_batches=2, page_bytes=64 * KIB, cpu_attention_fraction=0.5)
ADVICE = (
    "do not trust this device with these versions: if the rows of the kernels are fine, the error "
    "is in copies or their order; file a bug with this table"
)


class Reference(NamedTuple):
    """Prompts, the greedy tokens of transformers after each, and their log probabilities."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


def checks(target: Target) -> list[Check]:
    device = "cuda" if target.device == "cuda" else "emulated"
    return [
        Check("transformers, float32", transformers_is_sane),
        *(
            Check(f"{schedule} on {where}, float32", partial(same_tokens, target, where, schedule))
            for where, schedule in _places(device)
        ),
        *(
            Check(f"{schedule} on {where}, {dtype}", partial(near, target, where, schedule, dtype))
            for dtype in BOUNDS
            for where, schedule in (("cpu", "in_place"), (device, "module_batching"))
            if dtype != "bfloat16" or where != "cuda" or _has_bfloat16()
        ),
    ]


def _places(device: str) -> Iterator[tuple[str, str]]:
    yield "cpu", "in_place"
    yield device, "resident"
    for schedule in SCHEDULES:
        yield device, schedule


def _has_bfloat16() -> bool:
    return half_dtype() == torch.bfloat16


@functools.cache
def reference() -> Reference:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # its products are too small to share
    found = [_greedy(model, prompt) for prompt in prompts]
    torch.set_num_threads(before)
    return Reference(prompts, [tokens for tokens, _ in found], [logprobs for _, logprobs in found])


@torch.inference_mode()
def _greedy(
    model: transformers.PreTrainedModel, prompt: list[int]
) -> tuple[list[int], list[float]]:
    ids, tokens, logprobs = torch.tensor([prompt]), [], []
    for _ in range(NUM_TOKENS):
        row = model(input_ids=ids, use_cache=False).logits[0, -1].double().log_softmax(-1)
        token = int(row.argmax())
        tokens.append(token)
        logprobs.append(float(row[token]))
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return tokens, logprobs


def transformers_is_sane() -> Outcome:
    """The included model answers as it was trained to; otherwise no comparison means anything."""
    found = reference()
    mean = sum(map(sum, found.logprobs)) / sum(map(len, found.logprobs))
    value = f"{len(found.prompts)} prompts, {NUM_TOKENS} tokens each, log probability {mean:.2f}"
    return Outcome(value, Status.OK if math.isfinite(mean) else Status.FAILED)


def same_tokens(target: Target, device: str, schedule: str) -> Outcome:
    """Greedy tokens equal those of transformers."""
    expected = reference()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(
        demo_model_path(), config_of(target, device, schedule, "float32"), use_tqdm=False
    ) as engine:
        generations = engine.generate(expected.prompts, params, use_tqdm=False)
    errors = [generation.error for generation in generations if generation.error]
    if errors:
        return Outcome(errors[0], Status.FAILED, ADVICE)
    got = [list(generation.token_ids) for generation in generations]
    equal = sum(mine == other for mine, other in zip(got, expected.tokens, strict=True))
    value = f"{equal} of {len(got)} rows have the tokens of transformers"
    return Outcome(value) if equal == len(got) else Outcome(value, Status.FAILED, ADVICE)


def near(target: Target, device: str, schedule: str, dtype: str) -> Outcome:
    """Log probabilities of the same tokens are near those of transformers in float32."""
    expected = reference()
    with Engine.from_pretrained(
        demo_model_path(), config_of(target, device, schedule, dtype), use_tqdm=False
    ) as engine:
        generations = engine.score(
            expected.prompts, expected.tokens, use_tqdm=False, token_logprobs=True
        )
    gaps = []
    for generation, logprobs in zip(generations, expected.logprobs, strict=True):
        if generation.values is None:
            return Outcome(generation.error, Status.FAILED, ADVICE)
        got = generation.values["token_logprobs"]
        gaps += [abs(float(a) - b) for a, b in zip(got, logprobs, strict=True)]
    gap, bound = sorted(gaps)[int(SHARE * len(gaps))], BOUNDS[dtype]
    value = f"{100 * SHARE:.0f} % of log probabilities differ by at most {gap:.4f}, bound {bound}"
    return Outcome(value) if gap <= bound else Outcome(value, Status.FAILED, ADVICE)


def config_of(target: Target, device: str, schedule: str, dtype: str) -> EngineConfig:
    return EngineConfig(
        dtype=dtype,
        device=device,
        schedule=schedule,
        policy=replace(POLICY, device=STREAMED if schedule in SCHEDULES else None),
        num_threads=target.num_threads,
        linger_s=0.0,
        shared_weights=False,
    )
