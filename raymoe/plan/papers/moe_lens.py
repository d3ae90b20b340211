"""MoE-Lens: throughput from host memory for KV, in the limit and for a finite job.

Source: MoE-Lens (2025), section 5. Stage 1 bounds the rate of endless requests by the KV that host
memory holds; stage 2 adds a finite number of requests, a KV cache of blocks, the overlap of prefill
and decoding, and the ends of the job, where the pipeline is not full.

Assumptions:
- A step takes as long as sending all weights over the link once: nothing is resident, and neither
  CPU attention nor its memory traffic slows the link. (Section 8.2 sees steps of 5 s become 6 s.)
- Rows have the mean lengths; nothing is preempted.
- A step has the tokens at which the GPU takes as long as the link (n_real, section 6.3). The paper
  writes T_GPU for it, and for tokens per second in equation 4.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import Self

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.papers.hrm import BYTES_PER_ELEMENT, PaperModel
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div, format_bytes

BLOCK_TOKENS = 16


class Bound(StrEnum):
    KV_MEMORY = "host memory for KV"
    GPU = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class LensNode:
    step_s: float  # delta: seconds to send all weights over the link
    kv_tokens: float  # M: tokens whose KV fits in host memory
    max_num_batched_tokens: float  # n_real: tokens at which the GPU takes as long as the link

    def __post_init__(self) -> None:
        for field in ("step_s", "kv_tokens", "max_num_batched_tokens"):
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"LensNode.{field} is {value!r}; it must be positive")

    @classmethod
    def of(cls, model: ModelSpec, hardware: HardwareSpec, *, kv_bytes: float | None = None) -> Self:
        """Count a model on a node with a GPU (MoE-Lens, section 5.2: delta, section 6.3: n_real).

        The node's rate of matrix products must be sustained. `kv_bytes` defaults to what the
        weights leave; raises InfeasiblePlanError if that is nothing.
        """
        weight_bytes = model.weight_bytes(BYTES_PER_ELEMENT)
        step_s = weight_bytes / hardware.htod_bytes_per_s
        if kv_bytes is None:
            kv_bytes = hardware.host_memory_bytes - weight_bytes
        if kv_bytes <= 0:
            raise InfeasiblePlanError(
                f"{model.name} needs {format_bytes(weight_bytes)} of host memory for weights; "
                f"{hardware.name} has {format_bytes(hardware.host_memory_bytes)}, "
                f"{format_bytes(-kv_bytes)} short, and nothing for KV"
            )
        token_flop = ModelWork.of(model, BYTES_PER_ELEMENT).token_flop
        return cls(
            step_s=step_s,
            kv_tokens=kv_bytes / model.kv_bytes_per_token(BYTES_PER_ELEMENT),
            max_num_batched_tokens=step_s * hardware.gpu_flop_per_s / token_flop,
        )


def gemm_intensity(model: PaperModel, tokens: float) -> float:
    """Operations of matrix products per byte of weights read in a step.

    Source: MoE-Lens, section 5.1, equation 1, in its first printed form (the second has 2 for the
    projections where the first has 4). It equals tokens times top-k over experts.
    """
    flop = model.expert_flop(tokens) + model.dense_flop(tokens)
    return flop / (model.layer_expert_bytes + model.layer_dense_bytes)


def tokens_to_saturate(
    flop_per_s: float, link_bytes_per_s: float, *, num_experts: int, top_k: int
) -> float:
    """Tokens per step at which GPU time equals link time, in 16 bits (MoE-Lens, equation 2)."""
    return flop_per_s / link_bytes_per_s * num_experts / top_k


def parallelism_memory_efficiency(prompt_tokens: float, generated_tokens: float) -> float:
    """PME: tokens that a step computes per token of KV held, over a row's life.

    Source: MoE-Lens, section 5.2, equation 3, last form; the sum before it has (g + 1) for g.
    """
    held = (2 * prompt_tokens + generated_tokens) * generated_tokens / 2
    return (prompt_tokens + generated_tokens) / held


def effective_kv_tokens(kv_tokens: float, workload: Workload) -> float:
    """KV capacity equivalent to overlapping prefill and decoding (MoE-Lens, 5.4, equation 7)."""
    mean_tokens = workload.prompt_tokens + workload.generated_tokens / 2
    return kv_tokens * workload.context_tokens / mean_tokens


def host_bandwidth_need(kv_bytes: float, weight_bytes: float, link_bytes_per_s: float) -> float:
    """Host bandwidth that hides reading all KV once per step (MoE-Lens, 5.3, equation 5)."""
    return (kv_bytes + weight_bytes) / weight_bytes * link_bytes_per_s


def host_flop_need(
    kv_bytes_per_s: float, *, queries_per_kv_head: float, flop_per_byte: float
) -> float:
    """CPU flop/s for attention at a KV rate; the factor 2 widens 16 bits to 32.

    Source: MoE-Lens, section 5.3, equation 6; s is `queries_per_kv_head`.
    """
    return 2 * queries_per_kv_head * flop_per_byte * kv_bytes_per_s


def stage1_tokens_per_s(node: LensNode, workload: Workload) -> float:
    """Bound of generated tokens per second for endless requests.

    Source: MoE-Lens, section 5.2, equation 4, times the generated share (it counts prompt tokens
    too).
    """
    pme = parallelism_memory_efficiency(workload.prompt_tokens, workload.generated_tokens)
    tokens_per_step = min(pme * node.kv_tokens, node.max_num_batched_tokens)
    return tokens_per_step / node.step_s * workload.generated_tokens / workload.context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage2:
    admitted_per_step: float  # q: rows that start in each step and just fill the cache
    active_rows: float  # g q: rows that decode at once
    memory_tokens_per_s: float  # T_1: limited by KV memory
    gpu_tokens_per_s: float  # T_2: limited by the GPU
    tokens_per_s: float  # T: generated tokens per second of the whole job
    bound: Bound  # which of T_1 and T_2 applies


def stage2(node: LensNode, workload: Workload, *, block_tokens: int = BLOCK_TOKENS) -> Stage2:
    """Predict a job of `workload.num_rows` rows (MoE-Lens, section 5.5, equations 8 to 14)."""
    prompt, generated, rows = workload.prompt_tokens, workload.generated_tokens, workload.num_rows
    blocks = sum(ceil_div(prompt + i, block_tokens) for i in range(generated + 1))
    admitted = node.kv_tokens / block_tokens / blocks
    memory = rows * generated / ((rows / admitted + generated) * node.step_s)
    gpu = rows * generated / (_gpu_bound_steps(node.max_num_batched_tokens, workload) * node.step_s)
    return Stage2(
        admitted_per_step=admitted,
        active_rows=generated * admitted,
        memory_tokens_per_s=memory,
        gpu_tokens_per_s=gpu,
        tokens_per_s=min(memory, gpu),
        bound=Bound.GPU if gpu < memory else Bound.KV_MEMORY,
    )


def _gpu_bound_steps(max_num_batched_tokens: float, workload: Workload) -> float:
    """Steps of a GPU-bound job: filling, middle, and draining while the last rows decode.

    While the pipeline fills, prefill falls linearly from all tokens of a step to its share in the
    middle. Equation 12 assumes that prompts are left after that; for few rows it gives a middle of
    negative length. Here such a job ends its prompts on that line.

    Source: MoE-Lens, section 5.5, equations 11 and 12.
    """
    generated = workload.generated_tokens
    prompts = workload.num_rows * workload.prompt_tokens
    middle = max_num_batched_tokens * workload.prompt_tokens / workload.context_tokens
    filling = generated * (middle + max_num_batched_tokens) / 2
    if prompts > filling:
        return 2 * generated + (prompts - filling) / middle
    slope = (max_num_batched_tokens - middle) / generated
    return (
        generated
        + (max_num_batched_tokens - sqrt(max_num_batched_tokens**2 - 2 * slope * prompts)) / slope
    )
