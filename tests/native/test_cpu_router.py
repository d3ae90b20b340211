"""Routing against Hugging Face's routers, and the shared expert's gate, on every ISA."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from raymoe.errors import ConfigError
from raymoe.kernels.elementwise import FLOAT_DTYPES, add_gated_, route, route_reference
from tests.kinds import covering

pytestmark = pytest.mark.usefixtures("isa")


def distinct_logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Random order, no ties even in bfloat16: torch.topk breaks ties as it likes."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.linspace(-4, 4, num_experts) if num_experts <= 64 else torch.arange(num_experts)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)
    return levels[order].to(dtype)


# Tokens, experts, experts of a token.
SIZES = [(0, 8, 2), (1, 1, 1), (5, 8, 2), (50, 64, 8), (33, 60, 4), (9, 3, 3), (7, 130, 6)]


@covering(dtype=FLOAT_DTYPES, sizes=SIZES, renormalize=[True, False])
def test_routing_equals_the_routers_of_hugging_face(
    sizes: tuple[int, int, int], renormalize: bool, dtype: torch.dtype
) -> None:
    num_tokens, num_experts, top_k = sizes
    logits = distinct_logits(num_tokens, num_experts, dtype)
    config = SimpleNamespace(
        num_experts_per_tok=top_k,
        num_experts=num_experts,
        num_local_experts=num_experts,
        norm_topk_prob=renormalize,
        hidden_size=num_experts,
    )
    router = (MixtralTopKRouter if renormalize else Qwen2MoeTopKRouter)(config)
    router.weight.data = torch.eye(num_experts, dtype=dtype)  # logits pass through unchanged
    with torch.no_grad():
        _, weights, ids = router(logits)
    round_to = None if renormalize else dtype
    got = route(logits, top_k, renormalize=renormalize, round_to=round_to)
    assert got.topk_ids_TK.dtype == torch.int32
    assert torch.equal(got.topk_ids_TK.long(), ids)
    unit = 2**-21 if round_to in (None, torch.float32) else 2**-7
    torch.testing.assert_close(got.topk_weights_TK, weights.float(), rtol=unit, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 70, dtype=dtype)
    logits[1, 69] = 1
    logits[2, 3] = -0.0
    logits[3, [5, 66]] = 2
    want = [[0, 1, 2], [69, 0, 1], [0, 1, 2], [5, 66, 0]]
    assert route(logits, 3, renormalize=True).topk_ids_TK.tolist() == want
    assert route_reference(logits, 3, renormalize=True).topk_ids_TK.tolist() == want


def test_experts_of_a_token_are_distinct_even_with_nan_and_infinity() -> None:
    logits = torch.full((3, 20), float("-inf"))
    logits[1] = float("nan")
    logits[2, 7] = float("nan")
    ids = route(logits, 6, renormalize=False).topk_ids_TK.tolist()
    assert ids[0] == ids[1] == [0, 1, 2, 3, 4, 5]
    assert ids[2][0] == 7
    assert len(set(ids[2])) == 6


def test_many_experts_take_the_reference_and_bad_top_k_is_refused() -> None:
    logits = distinct_logits(2, 1500, torch.float32)
    got, want = (f(logits, 4, renormalize=True) for f in (route, route_reference))
    assert torch.equal(got.topk_ids_TK, want.topk_ids_TK)
    with pytest.raises(ConfigError, match="top_k is 9, there are 8 experts"):
        route(torch.ones(1, 8), 9, renormalize=True)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 8), (1, 1), (9, 100), (64, 1024)])
def test_gated_addition_rounds_as_hugging_face(
    num_tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    out, shared = torch.randn(2, num_tokens, hidden, generator=generator).to(dtype)
    gate = (3 * torch.randn(num_tokens, 1, generator=generator)).to(dtype)
    want = out + torch.sigmoid(gate) * shared
    assert add_gated_(out, shared, gate) is out
    if dtype == torch.float32:
        torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    else:
        assert torch.equal(out, want)
