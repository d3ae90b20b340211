"""Jobs for the kernels of quantised experts, in checkpoint formats with random codes."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from raymoe.kernels.cpu_experts import Experts, make_experts, packed_experts_bytes
from raymoe.measure.jobs import (
    MIN_WEIGHT_BYTES,
    AttentionShape,
    CompressedShape,
    ExpertsShape,
    LatentShape,
    StateShape,
    allocate_huge_pages,
    compressed_job,
    decode_job,
    experts_job,
    latent_decode_job,
    linear_job,
    prefill_job,
    random_matrix,
    scan_job,
)
from raymoe.measure.timing import KernelJob, Limits, mean_limits, measure_limits, seconds_per_call
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from raymoe.units import ceil_div

# Formats of GLM and MiniMax-M2, Kimi, Qwen's AWQ, gpt-oss, MiniMax-M3 and NVIDIA's checkpoints.
FORMATS: tuple[WeightFormat, ...] = (
    Fp8Block(), PackedInt4(32), Awq(128), Mxfp4(), Mxfp8(), Nvfp4(),
)  # fmt: skip


def quantised_experts_job(shape: ExpertsShape, num_tokens: int, stored: WeightFormat) -> KernelJob:
    return experts_job(
        shape,
        num_tokens,
        make_quantised_layers(shape, stored),
        kernel=f"experts in {stored.name}",
        expert_bytes=_expert_bytes(shape, stored),
    )


def make_quantised_layers(shape: ExpertsShape, stored: WeightFormat) -> list[Experts]:
    """Layers of random experts, each in its own memory; together they exceed the CPU caches."""
    layer_bytes = shape.num_experts * _expert_bytes(shape, stored)
    wide, high = (shape.expert_size, shape.hidden_size), (shape.hidden_size, shape.expert_size)
    gate_up, down = random_matrix(stored, wide), random_matrix(stored, high)
    return [
        make_experts(
            [gate_up] * shape.num_experts,
            [gate_up] * shape.num_experts,
            [down] * shape.num_experts,
            activation="silu",
            allocate=allocate_huge_pages,
            dtype=torch.bfloat16,
        )
        for _ in range(ceil_div(MIN_WEIGHT_BYTES, layer_bytes))
    ]


def _expert_bytes(shape: ExpertsShape, stored: WeightFormat) -> int:
    sizes = (shape.hidden_size, shape.expert_size)
    return packed_experts_bytes(1, *sizes, gate_up=stored, down=stored)


EIGHT_KV_HEADS = AttentionShape()  # Mixtral, Llama 3 8B
FOUR_KV_HEADS = AttentionShape(num_kv_heads=4)  # Qwen3 30B-A3B
INT8_KV = AttentionShape(has_int8_kv=True)
LATENT = LatentShape()  # DeepSeek-V2 and V3, Kimi-K2 with half the heads
FEW_HEADS = LatentShape(num_heads=16)  # DeepSeek-V2-Lite
OVERLAPPING = CompressedShape()  # DeepSeek-V4-Flash, half of its layers, and the other half
LONG_WINDOWS = CompressedShape(ratio=128)
DECODE_CASES = (
    (64, 512), (64, 1024), (64, 4096), (128, 2048),
    (256, 512), (256, 1024), (512, 512), (512, 1024),
)  # fmt: skip
INT8_CASES = ((64, 512), (64, 1024), (64, 4096))
SHARED_TOKENS = (512, 2048)  # of 64 sequences, which have 64 tokens of their own
LATENT_CASES = ((64, 512), (64, 1024), (64, 4096))
COMPRESSED_CASES = (
    (OVERLAPPING, 64, 1, 1024), (OVERLAPPING, 64, 1, 2048), (OVERLAPPING, 1, 1, 2048),
    (LONG_WINDOWS, 64, 1, 1024), (LONG_WINDOWS, 64, 1, 2048),
    (OVERLAPPING, 1, 1024, 1024), (LONG_WINDOWS, 1, 1024, 1024),
)  # fmt: skip
PREFILL_CASES = ((16, 128), (8, 512), (2, 2048))
GATED_DELTANET = StateShape()  # Qwen3.5 35B-A3B, Qwen3-Next
KIMI_DELTA = StateShape(num_groups=32, per_channel=True)  # Kimi-Linear
MAMBA_2 = StateShape(num_groups=8, num_heads=128, value_dim=64, delta=False)  # Nemotron-3
STATE_CASES = (
    (GATED_DELTANET, 64, 1), (GATED_DELTANET, 512, 1), (KIMI_DELTA, 64, 1), (MAMBA_2, 64, 1),
    (GATED_DELTANET, 8, 2048), (KIMI_DELTA, 2, 2048), (MAMBA_2, 2, 2048),
)  # fmt: skip
FEW_BIG_EXPERTS = ExpertsShape(hidden_size=1024, expert_size=2816, num_experts=8, top_k=2)
MANY_SMALL_EXPERTS = ExpertsShape(hidden_size=1024, expert_size=384, num_experts=64, top_k=8)
TOKENS = (32, 128, 512, 2048)
QUANTISED_EXPERTS = ExpertsShape(hidden_size=2048, expert_size=768, num_experts=16, top_k=4)
QUANTISED_TOKENS = (4, 32, 512, 2048)  # 1, 8, 128 and 512 rows per expert


def kernel_jobs() -> list[Callable[[], KernelJob]]:
    """Makers of jobs, so that only one job's data exists at a time (2 GiB at most)."""
    return [
        *(partial(decode_job, EIGHT_KV_HEADS, *case) for case in DECODE_CASES),
        *(partial(decode_job, FOUR_KV_HEADS, *case) for case in ((64, 1024), (256, 1024))),
        *(partial(decode_job, INT8_KV, *case) for case in INT8_CASES),
        *(
            partial(decode_job, shape, 64, shared + 64, shared_tokens=shared)
            for shape in (EIGHT_KV_HEADS, FOUR_KV_HEADS)
            for shared in SHARED_TOKENS
        ),
        *(partial(latent_decode_job, LATENT, *case) for case in LATENT_CASES),
        partial(latent_decode_job, FEW_HEADS, 64, 1024),
        *(partial(compressed_job, *case) for case in COMPRESSED_CASES),
        *(partial(prefill_job, EIGHT_KV_HEADS, *case) for case in PREFILL_CASES),
        *(
            partial(experts_job, shape, tokens)
            for shape in (FEW_BIG_EXPERTS, MANY_SMALL_EXPERTS)
            for tokens in TOKENS
        ),
        *(
            partial(quantised_experts_job, QUANTISED_EXPERTS, tokens, stored)
            for stored in FORMATS
            for tokens in QUANTISED_TOKENS
        ),
        *(partial(scan_job, *case) for case in STATE_CASES),
        *(partial(linear_job, 1024, 3072, tokens) for tokens in TOKENS),
    ]


LIMITS_SECONDS = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    kernel: str
    case: str
    bytes_per_s: float
    flop_per_s: float
    is_memory_bound: bool
    # Roofline time of a call at the measured bandwidth (that of updates where the job updates) and
    # bfloat16 peak, over its actual time.
    share_of_limit: float
    limits: Limits


def measure_kernels(
    makers: Sequence[Callable[[], KernelJob]], *, num_threads: int, repetitions: int
) -> Iterator[KernelRate]:
    """Yield the rate of each kernel; only one kernel's data exists at a time."""
    for make in makers:
        yield _measure(make(), num_threads, repetitions)


def _measure(job: KernelJob, num_threads: int, repetitions: int) -> KernelRate:
    seconds_per_call(job)  # first touch, clocks
    runs = []
    before = measure_limits(num_threads, LIMITS_SECONDS, updates=job.updates)
    for _ in range(repetitions):
        seconds = seconds_per_call(job)
        after = measure_limits(num_threads, LIMITS_SECONDS, updates=job.updates)
        runs.append((seconds, mean_limits([before, after])))
        before = after
    median_s = statistics.median(seconds for seconds, _ in runs)
    limits = mean_limits([limits for _, limits in runs])
    return KernelRate(
        kernel=job.kernel,
        case=job.case,
        bytes_per_s=job.bytes_per_call / median_s,
        flop_per_s=job.flop_per_call / median_s,
        is_memory_bound=_memory_s(job, limits) >= _arithmetic_s(job, limits),
        share_of_limit=statistics.median(
            max(_memory_s(job, limits), _arithmetic_s(job, limits)) / seconds
            for seconds, limits in runs
        ),
        limits=limits,
    )


def _memory_s(job: KernelJob, limits: Limits) -> float:
    return job.bytes_per_call / limits.bytes_per_s


def _arithmetic_s(job: KernelJob, limits: Limits) -> float:
    return job.flop_per_call / limits.flop_per_s
