"""Experts with biases and limits: transformers' gpt-oss, and the fused kernel against float64."""

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from raymoe.errors import ConfigError
from raymoe.kernels.cpu_experts import Biases, Clamp, PackedExperts, PlainExperts, gated_product
from tests.kinds import covering
from tests.native.test_cpu_experts import SHAPES, Case, allocate, assert_close_as_torch, make_case

CLAMP = Clamp(gain=1.702, limit=0.8, gate_limit=0.7, offset=0.5)  # cuts a third of the gates
Shape = tuple[int, int, int, int, int]


def random_biases(case: Case, dtype: torch.dtype = torch.bfloat16) -> list[Biases]:
    generator = torch.Generator().manual_seed(7)
    experts, size, hidden = case.gate.shape
    return [
        Biases(*(torch.randn(n, generator=generator).to(dtype) for n in (size, size, hidden)))
        for _ in range(experts)
    ]


def plain(case: Case, biases: list[Biases] | None, clamp: Clamp | None, dtype: torch.dtype):
    matrices = (tensor.to(dtype) for tensor in (case.gate, case.up, case.down))
    if biases is not None:
        biases = [Biases(*(bias.to(dtype) for bias in each)) for each in biases]
    experts = PlainExperts(*matrices, activation="silu", biases=biases, clamp=clamp)
    return experts(case.hidden.to(dtype), case.ids, case.weights)


@pytest.mark.usefixtures("isa")
@covering(shape=SHAPES, clamp=[None, CLAMP], has_bias=[False, True])
def test_error_of_the_kernel_is_at_most_twice_that_of_torch(
    has_bias: bool, clamp: Clamp | None, shape: Shape
) -> None:
    case = make_case(shape)
    biases = random_biases(case) if has_bias else None
    packed = PackedExperts(case.gate, case.up, case.down, allocate, biases=biases, clamp=clamp)
    got = packed(case.hidden, case.ids, case.weights)
    exact = plain(case, biases, clamp, torch.float64)
    assert_close_as_torch(got, plain(case, biases, clamp, torch.bfloat16), exact)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("value", [torch.nan, 1e30, -1e30])
def test_limits_cut_huge_values_and_let_nan_through(value: float) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    packed = PackedExperts(one, one, one, allocate, clamp=CLAMP)
    hidden = torch.full((1, 1), value, dtype=torch.bfloat16)
    got = packed(hidden, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    wide = hidden.float()
    torch.testing.assert_close(
        got.float(), gated_product(wide, wide, "silu", CLAMP), rtol=1e-2, atol=1e-6, equal_nan=True
    )


def gpt_oss_experts() -> GptOssExperts:
    config = GptOssConfig(
        hidden_size=20,
        intermediate_size=12,
        num_local_experts=5,
        num_hidden_layers=1,
        swiglu_limit=1.1,
        swiglu_alpha=0.9,
    )
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor[..., ::2], tensor[..., 1::2]


@torch.no_grad()
def test_plain_experts_compute_as_gpt_oss_does() -> None:
    theirs = gpt_oss_experts()
    hidden, top = torch.randn(40, 20), torch.randn(40, 5).softmax(-1).topk(2)
    gate, up = (part.transpose(1, 2) for part in parts(theirs.gate_up_proj))
    gate_bias, up_bias = parts(theirs.gate_up_proj_bias)
    biases = [Biases(gate_bias[e], up_bias[e], theirs.down_proj_bias[e]) for e in range(5)]
    ours = PlainExperts(
        gate,
        up,
        theirs.down_proj.transpose(1, 2),
        activation="silu",
        biases=biases,
        clamp=Clamp(theirs.alpha, theirs.limit, theirs.limit),
    )
    want = theirs(hidden, top.indices, top.values)
    torch.testing.assert_close(ours(hidden, top.indices.int(), top.values), want)


def test_an_unknown_activation_is_refused_with_biases_too() -> None:
    case = make_case((1, 8, 8, 2, 1))
    with pytest.raises(ConfigError, match="tanh"):
        PlainExperts(case.gate, case.up, case.down, activation="tanh", biases=random_biases(case))
