"""Jobs of the expert and projection kernels, with weights that no cache holds.

Each call uses the next of several layers of weights, in huge pages, so that weights come from
memory as they do in a pass over a model.

T tokens, H hidden, E experts, K experts per token, F expert hidden, I inputs, O outputs.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raymoe.bench.kernels import KernelJob
from raymoe.kernels.cpu_experts import make_experts
from raymoe.kernels.cpu_linear import make_linear
from raymoe.memory.arena import HostArena
from raymoe.units import ceil_div

MIN_WEIGHT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Sizes of the experts of one layer."""

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size} x {self.expert_size}) top-{self.top_k}"


def experts_job(shape: ExpertsShape, num_tokens: int) -> KernelJob:
    """The experts of one layer, tokens routed at random, the same for all layers."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_TH = torch.randn(num_tokens, shape.hidden_size, generator=generator).bfloat16()
    logits_TE = torch.randn(num_tokens, shape.num_experts, generator=generator)
    topk_weights_TK, topk_ids_TK = logits_TE.softmax(-1).topk(shape.top_k)
    num_hit = int((torch.bincount(topk_ids_TK.reshape(-1)) > 0).sum())
    parameters = 3 * shape.hidden_size * shape.expert_size
    size = (shape.num_experts, shape.expert_size, shape.hidden_size)
    calls = []
    for _ in range(ceil_div(MIN_WEIGHT_BYTES, 2 * shape.num_experts * parameters)):
        layer = make_experts(
            _random_weights(size, generator),
            _random_weights(size, generator),
            _random_weights((size[0], size[2], size[1]), generator),
            activation="silu",
            allocate=_allocate_huge_pages,
        )
        calls.append(partial(layer, hidden_TH, topk_ids_TK.int(), topk_weights_TK))
    return KernelJob(
        kernel="experts",
        case=f"{shape}, {num_tokens} tokens",
        calls=calls,
        bytes_per_call=2 * parameters * num_hit,
        flop_per_call=2 * num_tokens * shape.top_k * parameters,
    )


def linear_job(in_features: int, out_features: int, num_tokens: int) -> KernelJob:
    """One projection."""
    generator = torch.Generator().manual_seed(0)
    parameters = in_features * out_features
    hidden_TI = torch.randn(num_tokens, in_features, generator=generator).bfloat16()
    calls = []
    for _ in range(ceil_div(MIN_WEIGHT_BYTES, 2 * parameters)):
        weight_OI = _random_weights((out_features, in_features), generator)
        calls.append(partial(make_linear(weight_OI, None, _allocate_huge_pages), hidden_TI))
    return KernelJob(
        kernel="projection",
        case=f"{in_features} x {out_features}, {num_tokens} tokens",
        calls=calls,
        bytes_per_call=2 * parameters,
        flop_per_call=2 * num_tokens * parameters,
    )


def _allocate_huge_pages(num_bytes: int) -> Tensor:
    """Anonymous memory on huge pages; lives as long as the tensor."""
    return HostArena(num_bytes).allocate(num_bytes)


def _random_weights(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.03, generator=generator)
