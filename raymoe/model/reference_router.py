"""The routers in plain torch: the oracle of the tests, one token after the other where it matters.

T tokens, E experts, K experts per token, G groups of experts.
"""

import torch
from torch import Tensor

from raymoe.specs.model import MoeSpec


def reference_routing(
    logits_TE: Tensor, moe: MoeSpec, selection_bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, [T, K] each, in the type of the logits."""
    if moe.router.scoring == "sparsemixer":
        return _sparse_mixer(logits_TE, moe)
    router = moe.router
    scores_TE = logits_TE.softmax(-1) if router.scoring == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    if router.num_groups > 1:
        size = moe.num_experts // router.num_groups
        grouped_TGX = choice_TE.clone().view(len(choice_TE), router.num_groups, size)
        score_TG = grouped_TGX.topk(1 if router.group_score == "max" else 2).values.sum(-1)
        worst_TG = score_TG.topk(router.num_groups - router.top_groups, largest=False).indices
        for token, groups in enumerate(worst_TG.tolist()):
            grouped_TGX[token, groups] = -torch.inf
        choice_TE = grouped_TGX.flatten(1)
    ids_TK = choice_TE.topk(moe.top_k).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if router.renormalize:
        sums_T1 = weights_TK.sum(-1, keepdim=True)
        weights_TK = weights_TK / sums_T1.clamp_min(router.min_weight_sum)
    return ids_TK, weights_TK * router.scale


def _sparse_mixer(logits_TE: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    ids_TK = logits_TE.topk(moe.top_k).indices
    weights_TK = torch.empty(ids_TK.shape, dtype=logits_TE.dtype)
    for token, ids in enumerate(ids_TK.tolist()):
        left = dict(enumerate(logits_TE[token].tolist()))
        for slot, best in enumerate(ids):
            near = [
                logit
                for logit in left.values()
                if left[best] - logit <= 2 * moe.router.jitter * max(abs(logit), left[best])
            ]
            weights_TK[token, slot] = torch.tensor(near).sub(left.pop(best)).exp().sum() ** -1
    return ids_TK, weights_TK
