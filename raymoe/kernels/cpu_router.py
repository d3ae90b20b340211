"""From router logits to the experts of each token on the CPU; the gate of a shared expert.

T tokens, H hidden, E experts, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_norm import FLOAT_DTYPES

MAX_NATIVE_EXPERTS = 1024


class Routing(NamedTuple):
    """The experts of each token, by descending weight; ids are distinct within a token."""

    topk_ids_TK: Tensor  # int32
    topk_weights_TK: Tensor  # float32


def route(
    logits_TE: Tensor, top_k: int, *, renormalize: bool, round_to: torch.dtype | None = None
) -> Routing:
    """Choose experts: softmax over all of them in float32, then the `top_k` largest.

    Equal logits go to the lower index; NaN counts as the largest.

    Args:
        logits_TE: float32, float16 or bfloat16.
        top_k: K.
        renormalize: Divide the chosen weights by their sum (Mixtral; `norm_topk_prob` elsewhere).
        round_to: Round the weights to this type, as Hugging Face does for Qwen2-MoE, Qwen3-MoE
            and OLMoE (type of the logits) but not for Mixtral.
    """
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"route: top_k is {top_k}, there are {num_experts} experts")
    if num_experts > MAX_NATIVE_EXPERTS or not _is_native(logits_TE):
        routing = route_reference(logits_TE, top_k, renormalize=renormalize)
    else:
        routing = Routing(
            torch.empty(num_tokens, top_k, dtype=torch.int32),
            torch.empty(num_tokens, top_k, dtype=torch.float32),
        )
        _native.route(logits_TE, renormalize, *routing)
    if round_to is None or round_to == torch.float32:
        return routing
    return routing._replace(topk_weights_TK=routing.topk_weights_TK.to(round_to).float())


def route_reference(logits_TE: Tensor, top_k: int, *, renormalize: bool) -> Routing:
    """The plain reference of `route`, unrounded."""
    weights_TE = logits_TE.float().softmax(-1)
    order_TE = logits_TE.float().sort(stable=True, dim=-1, descending=True).indices
    ids_TK = order_TE[:, :top_k]
    weights_TK = weights_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return Routing(ids_TK.int().contiguous(), weights_TK)


def add_gated_(out_TH: Tensor, shared_TH: Tensor, gate_T1: Tensor) -> Tensor:
    """Add sigmoid(gate) * shared to `out_TH` in place (Qwen2-MoE's shared expert); returns it.

    All three have one type; sigmoid, product and sum are rounded to it one by one.
    """
    if not all(_is_native(x) and x.dtype == out_TH.dtype for x in (out_TH, shared_TH, gate_T1)):
        return out_TH.add_(gate_T1.sigmoid() * shared_TH)
    _native.add_gated(out_TH, shared_TH, gate_T1)
    return out_TH


def _is_native(x: Tensor) -> bool:
    return (
        x.ndim == 2
        and x.dtype in FLOAT_DTYPES
        and x.is_cpu
        and (x.shape[1] == 1 or x.stride(1) == 1)
        and not (x.requires_grad and torch.is_grad_enabled())
    )
