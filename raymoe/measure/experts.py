"""Jobs of the expert and projection kernels, with weights that no cache holds.

Each call uses the next of several layers of weights, in huge pages, so that weights come from
memory as they do in a pass over a model.

T tokens, H hidden, E experts, K experts per token, F expert hidden, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raymoe.kernels.cpu_experts import Experts, make_experts
from raymoe.kernels.cpu_linear import Linear, make_linear
from raymoe.measure.timing import KernelJob
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

    @property
    def parameters(self) -> int:
        """Of one expert."""
        return 3 * self.hidden_size * self.expert_size

    def __str__(self) -> str:
        return f"{self.num_experts} x ({self.hidden_size} x {self.expert_size}) top-{self.top_k}"


def experts_job(
    shape: ExpertsShape,
    num_tokens: int,
    layers: Sequence[Experts] | None = None,
    *,
    kernel: str = "experts",
    expert_bytes: int | None = None,
) -> KernelJob:
    """The experts of one layer, tokens routed at random, the same for all layers.

    Args:
        shape: Sizes.
        num_tokens: Tokens of a call.
        layers: Of `make_expert_layers`; made for this job by default.
        kernel: What they are called.
        expert_bytes: Of the weights of one expert; of bfloat16 by default.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_TH = torch.randn(num_tokens, shape.hidden_size, generator=generator).bfloat16()
    logits_TE = torch.randn(num_tokens, shape.num_experts, generator=generator)
    topk_weights_TK, topk_ids_TK = logits_TE.softmax(-1).topk(shape.top_k)
    num_hit = int((torch.bincount(topk_ids_TK.reshape(-1)) > 0).sum())
    return KernelJob(
        kernel=kernel,
        case=f"{shape}, {num_tokens} tokens",
        calls=[
            partial(layer, hidden_TH, topk_ids_TK.int(), topk_weights_TK)
            for layer in layers or make_expert_layers(shape)
        ],
        bytes_per_call=(expert_bytes or 2 * shape.parameters) * num_hit,
        flop_per_call=2 * num_tokens * shape.top_k * shape.parameters,
    )


def linear_job(
    in_features: int, out_features: int, num_tokens: int, layers: Sequence[Linear] | None = None
) -> KernelJob:
    """One projection; `layers` of `make_linear_layers`, made for this job by default."""
    parameters = in_features * out_features
    hidden_TI = torch.randn(num_tokens, in_features).bfloat16()
    return KernelJob(
        kernel="projection",
        case=f"{in_features} x {out_features}, {num_tokens} tokens",
        calls=[
            partial(layer, hidden_TI)
            for layer in layers or make_linear_layers(in_features, out_features)
        ],
        bytes_per_call=2 * parameters,
        flop_per_call=2 * num_tokens * parameters,
    )


def make_expert_layers(shape: ExpertsShape) -> list[Experts]:
    """Layers of the same random experts, each in memory of its own."""
    size = (shape.num_experts, shape.expert_size, shape.hidden_size)
    gate_EFH, up_EFH = _random_weights(size), _random_weights(size)
    down_EHF = _random_weights((size[0], size[2], size[1]))
    return [
        make_experts(
            gate_EFH.clone(),
            up_EFH.clone(),
            down_EHF.clone(),
            activation="silu",
            allocate=allocate_huge_pages,
        )
        for _ in range(ceil_div(MIN_WEIGHT_BYTES, 2 * shape.num_experts * shape.parameters))
    ]


def make_linear_layers(in_features: int, out_features: int) -> list[Linear]:
    """Layers of the same random projection, each in memory of its own."""
    weight_OI = _random_weights((out_features, in_features))
    return [
        make_linear(weight_OI.clone(), None, allocate_huge_pages)
        for _ in range(ceil_div(MIN_WEIGHT_BYTES, weight_OI.nbytes))
    ]


def allocate_huge_pages(num_bytes: int) -> Tensor:
    """Anonymous memory on huge pages; lives as long as the tensor."""
    return HostArena(num_bytes).allocate(num_bytes)


def _random_weights(size: tuple[int, ...]) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.03)
