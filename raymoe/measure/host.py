"""Measure host kernels, and the overhead of tasks outside them.

Kernels are timed in tight loops, in which no thread falls asleep. The overhead (interpreter,
threads that wake up for each kernel) is what steps of a small decoder take beyond the kernels'
rates.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raymoe.device.emulated import HostDevice
from raymoe.device.threads import set_num_threads
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.elementwise import qkv_rope, rms_norm
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.measure.jobs import (
    AttentionShape,
    ExpertsShape,
    decode_job,
    experts_job,
    linear_job,
    make_expert_layers,
    make_layers,
    make_linear_layers,
    prefill_job,
)
from raymoe.measure.timing import KernelJob, measure_in_turns, seconds_per_call
from raymoe.memory.arena import HostArena
from raymoe.memory.kv_cache import KvCache
from raymoe.model.decoder import Decoder, cache_layouts
from raymoe.model.loading import decoder_arena_bytes
from raymoe.plan.cost import StepCost
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.runtime.batch import InputBatch, Sequences
from raymoe.runtime.in_place import InPlace
from raymoe.runtime.runner import ModelRunner
from raymoe.schedule.builders import build_in_place
from raymoe.specs.hardware import Curve, HardwareSpec, HostCurves
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from raymoe.units import ceil_div

DTYPE = torch.bfloat16
CONTEXT = BLOCK_TOKENS
# Sequences of a step and new tokens per sequence. Larger steps use all threads in more kernels:
# from 64 to 512 tokens the overhead of a task grew threefold.
STEPS = ((1, 1), (8, 1), (64, 1), (8, 64), (32, 64))
TOKENS = tuple(rows * new_tokens for rows, new_tokens in STEPS)
MIN_S = 1e-6  # floor, as the kernels' rates may predict more than a step takes
_CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 2 * CONTEXT,
    "vocab_size": 1024,
}
MODEL = ModelSpec.from_config(_CONFIG)
# So narrow that its products are far below the node's rates: what its rows take beyond them is
# nothing next to the products of a large model, and most of the time of a small one.
NARROW_MODEL = ModelSpec.from_config(
    _CONFIG | {"hidden_size": 192, "head_dim": 32, "intermediate_size": 192}
)


class NarrowModel:
    """The shortest times of the steps of a narrow model.

    They are processor time of the thread that runs a step: it works or spins for all of the step,
    so that this is the step's time, but without what it waits for other programs to leave a core.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads, self._jobs = num_threads, step_jobs(NARROW_MODEL)
        self._taken_s = [math.inf] * len(self._jobs)

    @torch.inference_mode()
    def run(self, seconds: float) -> None:
        """Run each step, in turns until so many seconds are over."""
        before = torch.get_num_threads()
        set_num_threads(self._num_threads, num_torch_threads(self._num_threads))
        end_s = time.perf_counter() + seconds
        while True:
            taken_s = [seconds_per_call(job, time.thread_time) for job in self._jobs]
            self._taken_s = [*map(min, self._taken_s, taken_s)]
            if time.perf_counter() >= end_s:
                break
        torch.set_num_threads(before)  # of a user's process, perhaps

    def overhead(self, node: HardwareSpec) -> Curve:
        """Seconds of a task beyond its kernels by the node's best rates, over tokens."""
        return task_overhead(node, self._taken_s, NARROW_MODEL)


def step_jobs(model: ModelSpec = MODEL) -> list[KernelJob]:
    runner = _make_runner(model)
    return [
        KernelJob(
            kernel="step",
            case=f"{rows * new_tokens} tokens",
            calls=[
                partial(
                    runner.time,
                    make_batch(rows, _context(new_tokens), model.vocab_size, new_tokens),
                )
            ],
            bytes_per_call=0.0,
            flop_per_call=0.0,
        )
        for rows, new_tokens in STEPS
    ]


def step_shape(rows: int, new_tokens: int) -> MicroBatchShape:
    if new_tokens == 1:
        return MicroBatchShape.decode(rows, CONTEXT)
    return MicroBatchShape.prefill(rows, new_tokens, is_on_host=True)


def task_overhead(node: HardwareSpec, step_s: Sequence[float], model: ModelSpec = MODEL) -> Curve:
    """Seconds of a task beyond its kernels, over tokens; `step_s` holds one per `step_jobs`."""
    tasks = build_in_place(model.num_layers).tasks
    work, points = ModelWork.of(model, DTYPE.itemsize), []
    for sizes, taken_s in zip(STEPS, step_s, strict=True):
        cost = StepCost(work, node, (step_shape(*sizes),))
        beyond_s = taken_s - sum(cost.kernel_s(task) for task in tasks)
        points.append((cost.tokens, max(MIN_S, beyond_s / len(tasks))))
    return Curve(tuple(points))


def make_batch(rows: int, context: int, vocab_size: int, new_tokens: int = 1) -> InputBatch:
    """The last `new_tokens` of each of `rows` sequences of `context` tokens; logits are dropped."""
    blocks, tokens = ceil_div(context, BLOCK_TOKENS), rows * new_tokens
    return InputBatch(
        token_ids=np.arange(tokens) % vocab_size,
        positions=np.tile(np.arange(context - new_tokens, context, dtype=np.int32), rows),
        sequences=Sequences(
            query_start=np.arange(0, tokens + 1, new_tokens, dtype=np.int32),
            context_tokens=np.full(rows, context, np.int32),
            block_table=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
            prompt_tokens=np.full(rows, context - (new_tokens == 1), np.int32),
        ),
        logit_rows=np.arange(new_tokens - 1, tokens, new_tokens),
    )


def _make_runner(model: ModelSpec) -> ModelRunner:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape, dtype=DTYPE).normal_(0.0, 0.03, generator=generator)
        for name, shape in model_weights(model).items()
    }
    arena = HostArena(decoder_arena_bytes(model, DTYPE))
    decoder = Decoder.load(model, weights.__getitem__, arena.allocate, DTYPE)
    num_blocks = max(rows * ceil_div(_context(new), BLOCK_TOKENS) for rows, new in STEPS)
    cache = KvCache(cache_layouts(model, DTYPE), num_blocks)
    device = HostDevice()
    placement = InPlace(decoder, cache.layers, cache.layouts, build=build_in_place, device=device)
    return ModelRunner(placement, device)


def _context(new_tokens: int) -> int:
    return max(CONTEXT, new_tokens)


# Sizes of real models that measure within a minute: experts of Qwen3-30B-A3B, heads of Mixtral.
HIDDEN_SIZE, PROJECTED_SIZE = 2048, 4096
EXPERTS = ExpertsShape(hidden_size=HIDDEN_SIZE, expert_size=768, num_experts=32, top_k=8)
HEADS = AttentionShape()
# Enough heads per key and value head for operations to limit, on the same cache.
CROWDED_HEADS = AttentionShape(num_heads=128)

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
EXPERT_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 1024)
CACHED_TOKENS = 65536  # per layer, shared by as many sequences as fit
CONTEXTS = (32, 128, 512, 2048, 8192)
USUAL_CONTEXT = 512
PREFILL_TOKENS = 2048
PROMPTS = (32, 128, 512, 2048)
THREADS_SHARE = 0.1  # share of the time for attention with fewer threads


@dataclass(frozen=True, slots=True)
class _Series:
    sizes: Sequence[float]
    jobs: Sequence[KernelJob]
    work: Callable[[KernelJob], float]

    def curve(self, seconds: Sequence[float]) -> Curve:
        return Curve(
            tuple(
                (size, self.work(job) / each_s)
                for size, job, each_s in zip(self.sizes, self.jobs, seconds, strict=True)
            )
        )


@torch.inference_mode()
def measure_host_curves(node: HardwareSpec, seconds: float) -> HostCurves:
    """Measure the kernels with a node's threads in about `seconds`; uses 2 GiB of memory."""
    end_s = time.perf_counter() + seconds
    layers = make_layers(HEADS, CACHED_TOKENS // USUAL_CONTEXT, USUAL_CONTEXT)
    usual = decode_job(HEADS, CACHED_TOKENS // USUAL_CONTEXT, USUAL_CONTEXT, layers)
    of_threads = _over_threads(usual, node.num_cores, THREADS_SHARE * seconds)
    set_num_threads(node.num_cores, num_torch_threads(node.num_cores))
    series = _all_series(layers)
    jobs = [*(job for each in series for job in each.jobs), *step_jobs()]
    times = iter(measure_in_turns(jobs, max(0.0, end_s - time.perf_counter())))
    product, experts, attention, prefill, crowd, activations = [
        each.curve([next(times) for _ in each.jobs]) for each in series
    ]
    curves = HostCurves(
        product_flop_per_s=product,
        expert_flop_per_s=experts,
        attention_bytes_per_s=attention,
        attention_flop_per_s=crowd.highest,
        attention_bytes_per_s_of_threads=of_threads,
        prefill_flop_per_s=prefill,
        activation_bytes_per_s=activations.highest,
    )
    overhead = task_overhead(dataclasses.replace(node, host_curves=curves), list(times))
    return dataclasses.replace(curves, task_overhead_s=overhead)


def num_torch_threads(num_threads: int) -> int:
    """Threads for torch: one if our kernels do the products and need the cores."""
    return 1 if packed_linear_is_used(torch.bfloat16) else num_threads


def _bytes(job: KernelJob) -> float:
    return job.bytes_per_call


def _flop(job: KernelJob) -> float:
    return job.flop_per_call


def _all_series(layers: Sequence[Tensor]) -> list[_Series]:
    decodes = [decode_job(HEADS, CACHED_TOKENS // each, each, layers) for each in CONTEXTS]
    prefills = [prefill_job(HEADS, PREFILL_TOKENS // each, each, layers) for each in PROMPTS]
    crowded = decode_job(CROWDED_HEADS, CACHED_TOKENS // USUAL_CONTEXT, USUAL_CONTEXT, layers)
    return [
        _product_series(),
        _expert_series(),
        _Series(CONTEXTS, decodes, _bytes),
        _Series(PROMPTS, prefills, _flop),
        _Series([USUAL_CONTEXT], [crowded], _flop),
        _Series([PREFILL_TOKENS], [_activation_job(PREFILL_TOKENS)], _bytes),
    ]


def _product_series() -> _Series:
    layers = make_linear_layers(HIDDEN_SIZE, PROJECTED_SIZE)
    jobs = [linear_job(HIDDEN_SIZE, PROJECTED_SIZE, rows, layers) for rows in ROWS]
    return _Series(ROWS, jobs, _flop)


def _expert_series() -> _Series:
    layers = make_expert_layers(EXPERTS)
    jobs = [experts_job(EXPERTS, tokens, layers) for tokens in EXPERT_TOKENS]
    return _Series([job.intensity_flop_per_byte for job in jobs], jobs, _flop)


def _over_threads(job: KernelJob, num_threads: int, seconds: float) -> Curve:
    powers = [1 << bit for bit in range(num_threads.bit_length())]
    counts = sorted({*powers, num_threads})
    rates = []
    for count in counts:
        set_num_threads(count, num_torch_threads(count))
        (each_s,) = measure_in_turns([job], seconds / len(counts))
        rates.append((float(count), job.bytes_per_call / each_s))
    return Curve(tuple(rates))


def _activation_job(num_tokens: int) -> KernelJob:
    head_dim, num_heads = HEADS.head_dim, HIDDEN_SIZE // HEADS.head_dim
    num_kv_heads = (PROJECTED_SIZE - HIDDEN_SIZE) // (2 * head_dim)
    table = torch.ones(num_tokens, head_dim // 2)
    positions = torch.arange(num_tokens, dtype=torch.int32)

    def run(hidden_TH: Tensor, qkv_TX: Tensor) -> None:
        rms_norm(hidden_TH, hidden_TH[0], 1e-5)
        qkv_rope(
            qkv_TX,
            positions,
            table,
            table,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    calls = []
    for _ in range(4):
        hidden_TH = torch.randn(num_tokens, HIDDEN_SIZE).bfloat16()
        qkv_TX = torch.randn(num_tokens, PROJECTED_SIZE).bfloat16()
        calls.append(partial(run, hidden_TH, qkv_TX))
    return KernelJob(
        kernel="norm and rotation",
        case=f"{num_tokens} tokens",
        calls=calls,
        bytes_per_call=2 * 2 * num_tokens * (HIDDEN_SIZE + PROJECTED_SIZE),
        flop_per_call=0.0,
    )
