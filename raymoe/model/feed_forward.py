"""Feed-forward networks, and the routers that choose experts as `RouterSpec` says.

T tokens, E experts, K experts per token, G groups of experts, L width of the experts' latent.

A router is one launch on a GPU. On the CPU a plain softmax has its own kernel; others use torch.
Ties go to the lower index, so that a token's experts depend on nothing but its logits.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_experts import (
    ExpertGroup,
    ExpertsInGroups,
    GatedFfn,
    RowMajorExperts,
    gated_product,
)
from raymoe.kernels.elementwise import Routing, add_gated_, route, triton_runs_on
from raymoe.model.loading import Loader, PagedLoader, Reduce, clamp_of
from raymoe.model.norms import RmsNorm, load_norm
from raymoe.specs.layer_weights import (
    EXPERTS_INPUT_NORM,
    EXPERTS_RESULT_NORM,
    LATENT_IN,
    LATENT_OUT,
    SHARED_RESULT_NORM,
    TOKEN_EXPERTS,
)
from raymoe.specs.layers import MoeSpec, RouterSpec
from raymoe.specs.model import DenseSpec, ModelSpec


def choose_experts(
    logits_TE: Tensor,
    moe: MoeSpec,
    selection_bias_E: Tensor | None = None,
    out: Routing | None = None,
    *,
    ids_TK: Tensor | None = None,
) -> Routing:
    """Return the experts of each token and their weights, in the order of choice.

    Args:
        logits_TE: float32, float16 or bfloat16; scores and weights are float32.
        selection_bias_E: Added to the scores, or to the logits where the router chooses by these,
            for the choice alone; None if the router has none.
        out: Receives the result; rows may be strided.
        ids_TK: The experts, where something else has chosen them.
    """
    router = moe.router
    if ids_TK is not None:
        routing = _weigh(_scores(logits_TE.float(), router), ids_TK.long(), router)
        return routing if out is None else _copied(routing, out)
    if router.logit_softcap is not None:
        capped_TE = (logits_TE.float() / router.logit_softcap).tanh()
        logits_TE = capped_TE * router.logit_softcap
    if router.scoring != "sparsemixer" and triton_runs_on(logits_TE.device):
        return _choose_in_one_launch(logits_TE, moe, selection_bias_E, out)
    routing = _choose(logits_TE, moe, selection_bias_E)
    return routing if out is None else _copied(routing, out)


def _choose_in_one_launch(
    logits_TE: Tensor, moe: MoeSpec, selection_bias_E: Tensor | None, out: Routing | None
) -> Routing:
    from raymoe.kernels import gpu_elementwise  # noqa: PLC0415 - needs Triton

    router, size = moe.router, (len(logits_TE), moe.top_k)
    if out is None:
        ids_TK = logits_TE.new_empty(size, dtype=torch.int32)
        out = Routing(ids_TK, logits_TE.new_empty(size, dtype=torch.float32))
    gpu_elementwise.route(
        logits_TE,
        selection_bias_E,
        *out,
        scoring=router.scoring,
        chooses_by_logits=router.chooses_by_logits,
        renormalizes=router.renormalize,
        min_sum=router.min_weight_sum,
        added_sum=router.added_weight_sum,
        scale=router.scale,
        groups=(router.num_groups, router.top_groups),
        sums_two=router.group_score != "max",
    ).run()
    return out


def _copied(routing: Routing, out: Routing) -> Routing:
    out.topk_ids_TK.copy_(routing.topk_ids_TK)
    out.topk_weights_TK.copy_(routing.topk_weights_TK)
    return out


def _choose(logits_TE: Tensor, moe: MoeSpec, selection_bias_E: Tensor | None) -> Routing:
    router = moe.router
    if router.scoring == "sparsemixer":
        return _mix_sparsely(logits_TE.float(), moe.top_k, router.jitter)
    if selection_bias_E is None and router.num_groups == 1 and _is_plain_softmax(router):
        routing = route(logits_TE, moe.top_k, renormalize=router.renormalize)
        return _routing(routing.topk_ids_TK, routing.topk_weights_TK * router.scale)
    logits_TE = logits_TE.float()
    scores_TE = _scores(logits_TE, router)
    # Scores but softmax have the order of logits, and those of large ones are equal.
    is_sorted = selection_bias_E is None and router.num_groups == 1 and router.scoring != "softmax"
    choice_TE = logits_TE if is_sorted or router.chooses_by_logits else scores_TE
    if selection_bias_E is not None:
        choice_TE = choice_TE + selection_bias_E
    if router.num_groups > 1:
        choice_TE = _without_other_groups(choice_TE, router)
    return _weigh(scores_TE, _largest(choice_TE, moe.top_k), router)


def _scores(logits_TE: Tensor, router: RouterSpec) -> Tensor:
    if router.scoring == "softmax":
        return logits_TE.softmax(-1)
    if router.scoring == "sigmoid":
        return logits_TE.sigmoid()
    return functional.softplus(logits_TE).sqrt()


def _weigh(scores_TE: Tensor, ids_TK: Tensor, router: RouterSpec) -> Routing:
    weights_TK = scores_TE.gather(1, ids_TK)
    if router.renormalize:
        sum_T1 = weights_TK.sum(-1, keepdim=True).clamp_min(router.min_weight_sum)
        weights_TK = weights_TK / (sum_T1 + router.added_weight_sum)
    return _routing(ids_TK, weights_TK * router.scale)


def _without_other_groups(choice_TE: Tensor, router: RouterSpec) -> Tensor:
    """Mask the experts of groups that are not among the best with minus infinity.

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


def _is_plain_softmax(router: RouterSpec) -> bool:
    """Whether the weights are those of a softmax, renormalised or not, times `scale`."""
    return router.scoring == "softmax" and router.min_weight_sum + router.added_weight_sum == 0


def _mix_sparsely(logits_TE: Tensor, top_k: int, jitter: float) -> Routing:
    """Choose experts one after the other, each weighed by a softmax over the remaining close ones.

    Source: GRIN (arXiv 2409.12136), section 2.2, at inference, which does not sample.
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
    return scores_TX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _routing(ids_TK: Tensor, weights_TK: Tensor) -> Routing:
    return Routing(ids_TK.int().contiguous(), weights_TK)


class FeedForward(Protocol):
    def route(
        self,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        out: Routing | None = None,
        *,
        ids_TK: Tensor | None = None,
    ) -> Routing | None:
        """Choose the experts of each token, in `out`; None if the layer has no router.

        Args:
            ids_TK: The experts, where token ids decide.
        """

    def __call__(
        self,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        chosen: Routing | Tensor | None,
        reduce: Reduce,
        *,
        latent_TL: Tensor | None = None,
    ) -> Tensor:
        """Return what the network adds to the hidden state, summed over the ranks, [T, H].

        Args:
            chosen: The experts of each token, or their weighted sums, [T, L], where `add_experts`
                of a layer with experts has computed them; None if the layer has no router.
            latent_TL: `MoE.to_latent` of the norm, where it was computed before.
        """


class LinearFfn:
    """Three projections, with biases or a clamped product."""

    def __init__(self, spec: DenseSpec, loader: Loader, prefix: str) -> None:
        self._gate, self._up, self._down = (
            loader.linear([f"{prefix}{part}_proj"], has_bias=spec.has_bias)
            for part in ("gate", "up", "down")
        )
        self._activation, self._clamp = spec.activation, clamp_of(spec)

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        gate_TF, up_TF = self._gate(hidden_TH), self._up(hidden_TH)
        return self._down(gated_product(gate_TF, up_TF, self._activation, self._clamp))


def load_network(spec: DenseSpec, loader: Loader, prefix: str) -> GatedFfn:
    if spec.has_bias or spec.clamp is not None:
        return LinearFfn(spec, loader, prefix)
    return loader.gated_ffn(prefix, spec.activation)


class Dense:
    def __init__(self, spec: DenseSpec, loader: Loader, prefix: str) -> None:
        self._ffn = load_network(spec, loader, prefix)

    def route(
        self,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        out: Routing | None = None,
        *,
        ids_TK: Tensor | None = None,
    ) -> None:
        """Return None: a dense layer has no router."""

    def __call__(
        self,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        chosen: Routing | Tensor | None,
        reduce: Reduce,
        *,
        latent_TL: Tensor | None = None,
    ) -> Tensor:
        del hidden_TH, chosen, latent_TL
        return reduce(self._ffn(normed_TH))


class MoE:
    """Router, experts and optional shared expert."""

    def __init__(self, model: ModelSpec, spec: MoeSpec, loader: Loader, layer: str) -> None:
        self._spec, prefix = spec, f"{layer}mlp."
        self._router_norm = self._expert_scales_E = self._branch_norms = None
        if spec.router.has_input_norm:
            weight_H = loader.vector(f"{prefix}gate.input_norm.weight")
            self._router_norm = RmsNorm(weight_H, model.norm_eps)
        if spec.router.has_expert_scales:
            self._expert_scales_E = loader.score_vector(f"{prefix}gate.expert_scales")
        if spec.has_branch_norms:
            names = (EXPERTS_INPUT_NORM, EXPERTS_RESULT_NORM, SHARED_RESULT_NORM)
            self._branch_norms = [load_norm(model, loader, f"{layer}{name}") for name in names]
        self._router = loader.linear([f"{prefix}gate"], has_bias=spec.router.has_bias)
        self._selection_bias_E = None
        if spec.router.has_selection_bias:
            # Trained in steps of 0.001 (DeepSeek-V3, section 4.2), which bfloat16 near 1 cannot
            # represent.
            self._selection_bias_E = loader.score_vector(f"{prefix}gate.e_score_correction_bias")
        self.experts_VK = None
        if spec.router.num_token_ids:
            self.experts_VK = loader.token_table(f"{layer}{TOKEN_EXPERTS}", spec.num_experts)
        self._experts = loader.experts(f"{prefix}experts.", spec)
        self._latent_in = self._latent_out = self._shared = self._shared_gate = None
        if spec.latent_size is not None:
            self._latent_in, self._latent_out = (
                loader.linear([layer + name]) for name in (LATENT_IN, LATENT_OUT)
            )
        if spec.shared is not None:
            network = spec.shared.network(spec.activation)
            self._shared = load_network(network, loader, f"{prefix}shared_expert.")
            if spec.shared.is_gated:
                self._shared_gate = loader.linear([f"{prefix}shared_expert_gate"])

    def route(
        self,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        out: Routing | None = None,
        *,
        ids_TK: Tensor | None = None,
    ) -> Routing:
        assert (ids_TK is None) == (self.experts_VK is None), "token ids decide in some layers"
        logits_TE = self._logits(hidden_TH, normed_TH)
        routing = choose_experts(logits_TE, self._spec, self._selection_bias_E, out, ids_TK=ids_TK)
        if self._expert_scales_E is not None:
            routing.topk_weights_TK.mul_(self._expert_scales_E[routing.topk_ids_TK.long()])
        return routing

    def _logits(self, hidden_TH: Tensor, normed_TH: Tensor) -> Tensor:
        if self._router_norm is None and triton_runs_on(normed_TH.device):
            return self._router(normed_TH)  # its kernel reads every type
        size = (len(normed_TH), self._spec.num_experts)
        logits_TE = torch.empty(size, dtype=torch.float32, device=normed_TH.device)
        if self._router_norm is None:
            return self._router(normed_TH, logits_TE)
        logits_TE = self._router(self._router_norm(hidden_TH), logits_TE)
        return logits_TE * float(hidden_TH.shape[1] ** -0.5)

    def to_latent(self, normed_TH: Tensor, out: Tensor | None = None) -> Tensor:
        """Project the input of the experts to their latent, [T, L], in `out`."""
        assert self._latent_in is not None, "the experts read the hidden state"
        return self._latent_in(normed_TH, out)

    def __call__(
        self,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        chosen: Routing | Tensor | None,
        reduce: Reduce,
        *,
        latent_TL: Tensor | None = None,
    ) -> Tensor:
        assert chosen is not None, "the experts of a layer need the routing of its router"
        if isinstance(chosen, Tensor):
            routed_TH = chosen
        else:
            rows_TX = normed_TH if latent_TL is None else latent_TL
            if self._latent_in is not None and latent_TL is None:
                rows_TX = self.to_latent(normed_TH)
            input_TX, routing = self._expert_input(hidden_TH, rows_TX, chosen)
            routed_TH = self._experts(input_TX, *routing)
        if self._latent_out is not None:
            routed_TH = self._latent_out(routed_TH)
        if self._branch_norms is None:
            return reduce(self._with_shared(normed_TH, routed_TH))
        _, result_norm, shared_norm = self._branch_norms
        assert self._shared is not None, "the other branch is the shared expert"
        shared_TH = shared_norm(reduce(self._shared(normed_TH)))
        return shared_TH.add_(result_norm(reduce(routed_TH)))

    def add_experts(
        self, hidden_TH: Tensor, rows_TX: Tensor, routing: Routing, group: ExpertGroup
    ) -> None:
        """Add the outputs of a group of experts, as `ExpertsInGroups` does.

        `rows_TX` is the norm of the hidden state, or its latent.
        """
        assert isinstance(self._experts, ExpertsInGroups), "weights on a device are in groups"
        input_TX, routing = self._expert_input(hidden_TH, rows_TX, routing)
        self._experts.add(input_TX, routing, group)

    def _expert_input(
        self, hidden_TH: Tensor, rows_TX: Tensor, routing: Routing
    ) -> tuple[Tensor, Routing]:
        if self._branch_norms is not None:
            return self._branch_norms[0](hidden_TH), routing
        return _scaled_input(rows_TX, routing, self._spec)

    def _with_shared(self, normed_TH: Tensor, out_TH: Tensor) -> Tensor:
        if self._shared is None or self._spec.shared is None:
            return out_TH
        shared_TH = self._shared(normed_TH)
        if self._shared_gate is None:
            return out_TH.add_(shared_TH, alpha=self._spec.shared.scale)
        return add_gated_(out_TH, shared_TH, self._shared_gate(normed_TH))


def _scaled_input(input_TH: Tensor, routing: Routing, spec: MoeSpec) -> tuple[Tensor, Routing]:
    if not spec.router.scales_input:
        return input_TH, routing
    weights_T1 = routing.topk_weights_TK
    scaled_TH = input_TH * weights_T1.to(input_TH.dtype)
    return scaled_TH, routing._replace(topk_weights_TK=torch.ones_like(weights_T1))


class HostExperts:
    """The experts of a layer as cores compute them, where their weights lie in host memory.

    Attributes:
        reads_hidden: Whether they read the hidden state, through a norm of their own, and not the
            normed one or its latent.
        uses_torch: Whether torch decodes or multiplies, and not the native kernel alone.
    """

    def __init__(self, model: ModelSpec, spec: MoeSpec, loader: PagedLoader, layer: str) -> None:
        self._spec, self.reads_hidden = spec, spec.has_branch_norms
        self._norm = None
        if spec.has_branch_norms:
            self._norm = load_norm(model, loader, f"{layer}{EXPERTS_INPUT_NORM}")
        experts = loader.host_experts(f"{layer}mlp.experts.", spec)
        self._experts = experts
        self.uses_torch = not isinstance(experts, RowMajorExperts) or experts.are_decoded

    def add(self, rows_TX: Tensor, routing: Routing, group: ExpertGroup) -> None:
        """Add the outputs of some experts to the sums of the tokens, in ascending order."""
        input_TX = rows_TX if self._norm is None else self._norm(rows_TX)
        self._experts.add(*_scaled_input(input_TX, routing, self._spec), group)
