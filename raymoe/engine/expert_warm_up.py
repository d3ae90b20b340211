"""Kernels for experts are compiled when a model is loaded, not when a pass first needs them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from raymoe.kernels.cpu_router import Routing
from raymoe.kernels.device_experts_tiles import BUCKETS
from raymoe.measure.expert_tiles import balanced_routing
from raymoe.specs.model import LayerSpec, ModelSpec, MoeSpec
from raymoe.specs.weight_format import WeightFormat
from raymoe.specs.weight_names import expert_weights, layer_prefix
from raymoe.units import ceil_div

# `Decoder.own_ffn`: no rank waits for another. Layer, hidden states, and the experts of each token.
ComputeExperts = Callable[[int, Tensor, Routing], object]


@torch.inference_mode()
def compile_experts(
    spec: ModelSpec,
    compute: ComputeExperts,
    most_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compute experts of each kind once with as many tokens as each tile is for.

    What is in the weights does not matter; what comes of them is dropped.

    Args:
        spec: The model.
        compute: Computes the experts of a layer.
        most_tokens: Of one launch.
        dtype: Of hidden states.
        device: Where they are.
    """
    for i, moe in _kinds(spec):
        for num_tokens in _sizes(moe, most_tokens):
            hidden_TH = torch.zeros(num_tokens, spec.hidden_size, dtype=dtype, device=device)
            routing = balanced_routing(num_tokens, moe.num_experts, moe.top_k, device)
            compute(i, hidden_TH, Routing(*routing))


def _sizes(moe: MoeSpec, most_tokens: int) -> Iterator[int]:
    """The fewest tokens for each choice of tiles that a launch may make."""
    for bucket in BUCKETS:
        num_tokens = ceil_div(bucket * moe.num_experts, moe.top_k)
        if num_tokens <= most_tokens or bucket == BUCKETS[0]:
            yield min(num_tokens, most_tokens)


def _kinds(spec: ModelSpec) -> Iterator[tuple[int, MoeSpec]]:
    """A layer of each kind: its numbers, and how its experts are stored."""
    seen = set()
    for i, layer in enumerate(spec.layers):
        kind = (layer.ffn, _formats(spec, i, layer))
        if isinstance(layer.ffn, MoeSpec) and kind not in seen:
            seen.add(kind)
            yield i, layer.ffn


def _formats(spec: ModelSpec, i: int, layer: LayerSpec) -> tuple[WeightFormat | None, ...]:
    if not isinstance(layer.ffn, MoeSpec):
        return ()
    weights = expert_weights(layer.ffn, spec.hidden_size)
    return tuple(spec.format_of(layer_prefix(i) + name, shape) for name, shape in weights)
