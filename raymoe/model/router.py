"""From the logits of a router to the experts of each token and their weights, as `RouterSpec` says.

T tokens, E experts, K experts per token, G groups of experts.

What a softmax alone decides has a kernel of its own on the CPU; the rest is torch, on any device.
Equal scores go to the lower index, so that a token's experts depend on nothing but its logits.
"""

import torch
from torch import Tensor

from raymoe.kernels.cpu_router import Routing, route
from raymoe.specs.layers import MoeSpec, RouterSpec


def choose_experts(
    logits_TE: Tensor, moe: MoeSpec, selection_bias_E: Tensor | None = None
) -> Routing:
    """The experts of each token and their weights, in the order of choice.

    Args:
        logits_TE: float32, float16 or bfloat16; scores and weights are float32.
        moe: Router, and number of experts of a token.
        selection_bias_E: Added to the scores for the choice alone; None where the router has none.
    """
    router = moe.router
    if router.scoring == "sparsemixer":
        return _mix_sparsely(logits_TE.float(), moe.top_k, router.jitter)
    if selection_bias_E is None and router.num_groups == 1 and router.is_plain_softmax:
        routing = route(logits_TE, moe.top_k, renormalize=router.renormalize)
        return _routing(routing.topk_ids_TK, routing.topk_weights_TK * router.scale)
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.softmax(-1) if router.scoring == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    if router.num_groups > 1:
        choice_TE = _without_other_groups(choice_TE, router)
    ids_TK = _largest(choice_TE, moe.top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if router.renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(router.min_weight_sum)
    return _routing(ids_TK, weights_TK * router.scale)


def _without_other_groups(choice_TE: Tensor, router: RouterSpec) -> Tensor:
    """Minus infinity for the experts of groups that are not among the best.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.2.2; the sum of two, DeepSeek-V3.
    """
    num_tokens, num_experts = choice_TE.shape
    group_size = num_experts // router.num_groups
    grouped_TGX = choice_TE.view(num_tokens, router.num_groups, group_size)
    if router.group_score == "max":
        score_TG = grouped_TGX.amax(-1)
    else:
        score_TG = grouped_TGX.topk(2).values.sum(-1)
    is_out_TG = torch.ones_like(score_TG, dtype=torch.bool)
    is_out_TG.scatter_(1, _largest(score_TG, router.top_groups), value=False)
    return grouped_TGX.masked_fill(is_out_TG[..., None], -torch.inf).flatten(1)


def _mix_sparsely(logits_TE: Tensor, top_k: int, jitter: float) -> Routing:
    """One expert after the other, each weighed by a softmax over those left that come near it.

    Source: GRIN (arXiv 2409.12136), section 2.2, as it is at inference, which does not sample.
    """
    left_TE, ids, weights = logits_TE, [], []
    for _ in range(top_k):
        id_T1 = _largest(left_TE, 1)
        best_T1 = left_TE.gather(1, id_T1)
        distance_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1)
        near_TE = left_TE.masked_fill(distance_TE > 2 * jitter, -torch.inf)
        ids.append(id_T1)
        weights.append(near_TE.softmax(-1).gather(1, id_T1))
        left_TE = left_TE.scatter(1, id_T1, -torch.inf)
    return _routing(torch.cat(ids, 1), torch.cat(weights, 1))


def _largest(scores_TX: Tensor, count: int) -> Tensor:
    """Columns of the largest scores, descending, ties to the lower column."""
    return scores_TX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _routing(ids_TK: Tensor, weights_TK: Tensor) -> Routing:
    return Routing(ids_TK.int().contiguous(), weights_TK)
