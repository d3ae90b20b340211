"""How fast are the expert and projection kernels? Medians with weights that no cache holds.

Each call uses the next of several layers of weights, in huge pages, so that weights come from
memory as they do in a pass over a model.

T tokens, H hidden, E experts, K experts per token, F expert hidden, I inputs, O outputs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raymoe.kernels.cpu_experts import make_experts
from raymoe.kernels.cpu_linear import make_linear
from raymoe.memory.arena import HostArena


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Sizes of the experts of one layer."""

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int


EXPERTS_SHAPES = {
    "mixtral": ExpertsShape(hidden_size=1024, expert_size=2816, num_experts=8, top_k=2),
    "qwen3": ExpertsShape(hidden_size=1024, expert_size=384, num_experts=64, top_k=8),
    "qwen3-30b": ExpertsShape(hidden_size=2048, expert_size=768, num_experts=128, top_k=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """Median rate of one kernel on one shape.

    Attributes:
        weight_bytes_per_s: Weights that the call needs, each counted once.
    """

    median_s: float
    flop_per_s: float
    weight_bytes_per_s: float


def bench_experts(
    shape: ExpertsShape, num_tokens: int, *, num_layers: int = 4, seconds: float = 1.0
) -> KernelRate:
    """Rate of the experts with a random softmax route, the same for all layers."""
    return ExpertsBench(shape, num_layers=num_layers).measure(num_tokens, seconds=seconds)


class ExpertsBench:
    """Several layers of random experts, measured at any number of tokens."""

    def __init__(self, shape: ExpertsShape, *, num_layers: int = 4) -> None:
        self._shape = shape
        generator = torch.Generator().manual_seed(0)
        size = (shape.num_experts, shape.expert_size, shape.hidden_size)
        gate_EFH = _random_weights(size, generator)
        up_EFH = _random_weights(size, generator)
        down_EHF = _random_weights((size[0], size[2], size[1]), generator)
        self._layers = [
            make_experts(
                gate_EFH, up_EFH, down_EHF, activation="silu", allocate=allocate_huge_pages
            )
            for _ in range(num_layers)
        ]

    def measure(self, num_tokens: int, *, seconds: float = 1.0) -> KernelRate:
        """Median over about `seconds` of calls, each on the next layer."""
        shape = self._shape
        generator = torch.Generator().manual_seed(num_tokens)
        hidden_TH = torch.randn(num_tokens, shape.hidden_size, generator=generator).bfloat16()
        logits_TE = torch.randn(num_tokens, shape.num_experts, generator=generator)
        topk_weights_TK, topk_ids_TK = logits_TE.softmax(-1).topk(shape.top_k)
        topk_ids_TK = topk_ids_TK.int()
        median_s = _median_s(
            [partial(layer, hidden_TH, topk_ids_TK, topk_weights_TK) for layer in self._layers],
            seconds,
        )
        num_hit = int((torch.bincount(topk_ids_TK.reshape(-1)) > 0).sum())
        parameters = 3 * shape.hidden_size * shape.expert_size
        return KernelRate(
            median_s=median_s,
            flop_per_s=2 * num_tokens * shape.top_k * parameters / median_s,
            weight_bytes_per_s=2 * parameters * num_hit / median_s,
        )


def bench_linear(
    in_features: int,
    out_features: int,
    num_tokens: int,
    *,
    num_layers: int = 8,
    seconds: float = 1.0,
    make: Callable[..., Callable[[Tensor], Tensor]] = make_linear,
) -> KernelRate:
    """Rate of a projection; `make` has the signature of `make_linear`."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = _random_weights((out_features, in_features), generator)
    layers = [make(weight_OI.clone(), None, allocate_huge_pages) for _ in range(num_layers)]
    hidden_TI = torch.randn(num_tokens, in_features, generator=generator).bfloat16()
    median_s = _median_s([partial(layer, hidden_TI) for layer in layers], seconds)
    parameters = in_features * out_features
    return KernelRate(
        median_s=median_s,
        flop_per_s=2 * num_tokens * parameters / median_s,
        weight_bytes_per_s=2 * parameters / median_s,
    )


def allocate_huge_pages(num_bytes: int) -> Tensor:
    """Anonymous memory on huge pages; lives as long as the tensor."""
    return HostArena(num_bytes).allocate(num_bytes)


def _random_weights(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.03, generator=generator)


def _median_s(calls: list[Callable[[], Tensor]], seconds: float) -> float:
    calls[0]()
    times_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times_s) < len(calls):
        call = calls[len(times_s) % len(calls)]
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)
