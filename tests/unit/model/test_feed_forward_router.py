"""Experts and weights of every kind of router, against transformers and the plain reference."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from raymoe.errors import CheckpointError
from raymoe.model.feed_forward import choose_experts
from raymoe.model.loading import Loader
from raymoe.specs.layers import MoeSpec, RouterSpec
from raymoe.specs.model import ModelSpec
from tests.reference import SCORES, reference_routing
from tests.unit.specs.config_classes import config_of, written
from tests.unit.specs.test_meaning import CONFIGS, randomise, theirs

ROUTERS = {
    "softmax": RouterSpec(),
    "scaled softmax": RouterSpec(renormalize=False, scale=2.5),
    "softmax in groups by their best": RouterSpec(
        renormalize=False, num_groups=4, top_groups=2, group_score="max"
    ),
    "sigmoid in groups by two": RouterSpec(
        scoring="sigmoid", scale=1.7, num_groups=3, top_groups=2, group_score="top2_sum"
    ),
    "sigmoid as it is": RouterSpec(scoring="sigmoid", renormalize=False),
    "softmax with a floor": RouterSpec(min_weight_sum=0.4),
    "sigmoid with a larger sum": RouterSpec(scoring="sigmoid", added_weight_sum=0.3),
    "sigmoid chosen by logits": RouterSpec(scoring="sigmoid", chooses_by_logits=True),
    "root of softplus": RouterSpec(scoring="sqrtsoftplus", added_weight_sum=1e-20, scale=1.5),
    "sparse mixer": RouterSpec(scoring="sparsemixer", jitter=0.2),
}


def moe_of(router: RouterSpec, num_experts: int = 12, top_k: int = 3) -> MoeSpec:
    return MoeSpec(
        num_experts=num_experts, top_k=top_k, expert_hidden=8, activation="silu", router=router
    )


def by_expert(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
    out_TE = torch.zeros(len(ids_TK), num_experts)
    return out_TE.scatter(1, ids_TK.long(), weights_TK.float())


@pytest.mark.parametrize("name", CONFIGS)
def test_routers_choose_and_weigh_as_in_transformers(name: str) -> None:
    family, fields = CONFIGS[name]
    config = config_of(family, **fields)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config)
        selection_E = randomise(model)
        logits_TE, ids_TK, weights_TK = theirs(family, model, torch.randn(200, 32))
    moe = ModelSpec.from_config(written(config)).layers[-1].ffn
    assert isinstance(moe, MoeSpec)
    got = choose_experts(logits_TE, moe, selection_E)
    assert got.topk_ids_TK.dtype == torch.int32
    assert got.topk_weights_TK.dtype == torch.float32
    want_TE = by_expert(ids_TK, weights_TK, moe.num_experts)
    torch.testing.assert_close(by_expert(*got, moe.num_experts), want_TE, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("jitter", [0.01, 0.3])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_the_sparse_mixer_is_that_of_transformers(shift: float, jitter: float) -> None:
    logits_TE = torch.randn(300, 16) + shift
    weights_TK, ids_TK = sparsemixer(logits_TE, jitter_eps=jitter, training=False)
    moe = moe_of(RouterSpec(scoring="sparsemixer", jitter=jitter), 16, 2)
    got = choose_experts(logits_TE, moe)
    assert torch.equal(got.topk_ids_TK.long(), ids_TK)
    torch.testing.assert_close(got.topk_weights_TK, weights_TK)
    assert (weights_TK < 1).any()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 77])
@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_agrees_with_the_reference(name: str, num_tokens: int, has_bias: bool) -> None:
    moe = moe_of(ROUTERS[name])
    logits_TE = torch.randn(num_tokens, 12)
    selection_E = torch.randn(12) / 4 if has_bias and name != "sparse mixer" else None
    ids_TK, weights_TK = reference_routing(logits_TE.double(), moe, selection_E)
    got = choose_experts(logits_TE, moe, selection_E)
    want_TE = by_expert(ids_TK, weights_TK, 12)
    torch.testing.assert_close(by_expert(*got, 12), want_TE, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_lower_expert(name: str) -> None:
    moe = moe_of(ROUTERS[name])
    logits_TE = torch.zeros(2, 12)
    logits_TE[1, 9] = 2
    ids = choose_experts(logits_TE, moe).topk_ids_TK.tolist()
    assert ids[0] == [0, 1, 2]
    assert ids[1] == [9, 0, 1] or moe.router.num_groups > 1


def test_the_bias_of_the_choice_does_not_weigh() -> None:
    moe = moe_of(replace(ROUTERS["sigmoid as it is"]), top_k=1)
    logits_TE, selection_E = torch.zeros(1, 12), torch.zeros(12)
    logits_TE[0, 3], selection_E[5] = 0.5, 1.0
    ids_TK, weights_TK = choose_experts(logits_TE, moe, selection_E)
    assert (ids_TK.item(), weights_TK.item()) == (5, 0.5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_experts_that_token_ids_name_are_weighed_by_scores(scoring: str) -> None:
    moe = moe_of(RouterSpec(scoring=scoring, added_weight_sum=1e-20, scale=1.5, num_token_ids=20))
    logits_TE = torch.randn(9, 12)
    ids_TK = torch.rand(9, 12).argsort()[:, :3]
    out = choose_experts(logits_TE, moe)
    assert not torch.equal(out.topk_ids_TK.sort().values, ids_TK.sort().values.int())
    got = choose_experts(logits_TE, moe, out=out, ids_TK=ids_TK)
    assert torch.equal(got.topk_ids_TK, ids_TK.int())
    weights_TK = SCORES[scoring](logits_TE).gather(1, ids_TK)
    want_TK = 1.5 * weights_TK / weights_TK.sum(1, keepdim=True)
    torch.testing.assert_close(got.topk_weights_TK, want_TK)


@pytest.mark.parametrize(
    ("row", "is_valid"),
    [((3, 0, 7), True), ((3, 0, 3), False), ((3, -1, 7), False), ((3, 0, 8), False)],
)
def test_a_table_that_names_no_such_experts_is_refused(
    row: tuple[int, int, int], is_valid: bool
) -> None:
    table_VK = torch.tensor([[0, 1, 2], row])
    loader = Loader({"table": table_VK}.__getitem__, torch.empty, torch.float32)
    if is_valid:
        assert torch.equal(loader.token_table("table", 8), table_VK)
        return
    with pytest.raises(CheckpointError, match="3 different experts of 8"):
        loader.token_table("table", 8)
