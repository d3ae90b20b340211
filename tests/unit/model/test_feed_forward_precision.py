"""Scores of routers are float32, whatever the decoder computes in."""

import pytest
import torch
from torch import Tensor

from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.model.feed_forward import MoE
from raymoe.model.loading import Loader, PagedLoader
from raymoe.specs.layer_weights import expert_weights
from raymoe.specs.layers import MoeSpec, RouterSpec
from raymoe.specs.presets_models import model_preset

HIDDEN, NUM_EXPERTS = 32, 8
SPEC = MoeSpec(
    num_experts=NUM_EXPERTS,
    top_k=1,
    expert_hidden=16,
    activation="silu",
    router=RouterSpec(scoring="sigmoid", has_selection_bias=True),
)


def weights_with(router_EH: Tensor, bias_E: Tensor) -> dict[str, Tensor]:
    weights = {"mlp.gate.weight": router_EH, "mlp.gate.e_score_correction_bias": bias_E}
    for expert in range(NUM_EXPERTS):
        for name, shape, *_ in expert_weights(SPEC, HIDDEN, expert):
            weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
    return weights


MODEL = model_preset("mixtral-8x7b")  # for norms, which these experts have not


def load(weights: dict[str, Tensor], *, is_paged: bool) -> MoE:
    if not is_paged:
        loader = Loader(
            weights.__getitem__, lambda size: torch.empty(size, dtype=torch.uint8), torch.bfloat16
        )
        return MoE(MODEL, SPEC, loader, "")
    views = {name: weight.bfloat16() for name, weight in weights.items()}
    cpu = torch.device("cpu")
    loader = PagedLoader(views.__getitem__, weights.__getitem__, torch.bfloat16, cpu)
    return MoE(MODEL, SPEC, loader, "")


@pytest.mark.parametrize("is_paged", [False, True])
def test_biases_of_the_choice_are_told_apart_beyond_bfloat16(is_paged: bool) -> None:
    router_EH = torch.zeros(NUM_EXPERTS, HIDDEN, dtype=torch.bfloat16)
    bias_E = torch.full((NUM_EXPERTS,), 5.0)
    bias_E[6] += 0.001
    assert bias_E.bfloat16().unique().numel() == 1
    moe = load(weights_with(router_EH, bias_E), is_paged=is_paged)
    hidden_TH = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    assert (moe.route(hidden_TH, hidden_TH).topk_ids_TK == 6).all()


@pytest.mark.skipif(
    not packed_linear_is_used(torch.bfloat16),
    reason="this instruction set multiplies through torch, which rounds",
)
def test_logits_are_told_apart_beyond_bfloat16_where_weights_are_packed() -> None:
    router_EH = torch.full((NUM_EXPERTS, HIDDEN), 1 / 16, dtype=torch.bfloat16)
    router_EH[5, 0] += 1 / 256  # logits of 2, of which bfloat16 tells steps of 1 / 64 apart
    moe = load(weights_with(router_EH, torch.zeros(NUM_EXPERTS)), is_paged=False)
    hidden_TH = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    assert (moe.route(hidden_TH, hidden_TH).topk_ids_TK == 5).all()
