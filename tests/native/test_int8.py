"""Products of int8 against exact integer sums, on every instruction set."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.codecs import StoredMatrix, as_tensor
from raymoe.kernels.cpu_experts import (
    Clamp,
    PackedExperts,
    PackedGatedFfn,
    packed_experts_bytes,
)
from raymoe.kernels.cpu_linear import (
    PackedLinear,
    joined_int8,
    packed_linear_bytes,
    quantise_matrix,
    quantise_rows,
)
from raymoe.rotation import input_run, rotated
from raymoe.specs.weight_format import Int8Channel
from tests.kinds import covering
from tests.native.test_cpu_linear import SHAPES, allocate, random

# As those, and more than one block of 8,192 inputs.
LINEAR_SHAPES = [*SHAPES, (3, 17, 33), (16, 20_001, 40)]
# Tokens, hidden, expert size, experts, experts per token.
EXPERT_SHAPES = [
    (0, 8, 8, 2, 1),
    (1, 1, 1, 1, 1),
    (1, 64, 32, 4, 2),
    (3, 33, 21, 5, 3),
    (30, 51, 48, 16, 8),
    (100, 96, 80, 8, 2),
    (1100, 24, 20, 4, 2),
]


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after a test that changes it."""
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of `quantise_rows`, float32."""
    largest = x.float().abs().amax(1, keepdim=True)
    is_zero = largest < 2.0**-120
    factors = torch.where(is_zero, 0.0, torch.tensor(127.0) / largest)
    return (x.float() * factors).round(), torch.where(is_zero, 0.0, largest / 127)


def product(x: Tensor, weight: StoredMatrix) -> Tensor:
    """Exact sums of integers, scaled in float32 in the order of the kernels."""
    assert isinstance(weight.format, Int8Channel)
    if weight.format.is_rotated:
        x = rotated(x, input_run(x.shape[1]))
    numbers, row_scales = rounded(x)
    codes = weight.pieces["codes"].view(torch.int8).double()
    sums = numbers.double() @ codes.T  # below 2^53: exact
    return sums.float() * weight.pieces["scales"][:, 0] * row_scales


def matrix(outputs: int, inputs: int, seed: int, *, is_rotated: bool = False) -> StoredMatrix:
    weight = random(outputs, inputs, seed=seed) / inputs**0.5
    return quantise_matrix(weight, is_rotated=is_rotated)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 15), (4, 16), (7, 33), (300, 96)], ids=str)
def test_rows_are_rounded_to_the_nearest(shape: tuple[int, int]) -> None:
    x = random(*shape, seed=0) * torch.logspace(-30, 30, shape[0])[:, None]
    x = x.bfloat16()
    codes, scales = quantise_rows(x)
    want, want_scales = rounded(x)
    assert torch.equal(codes.float(), want)
    assert torch.equal(scales, want_scales[:, 0])
    assert len(x) == 0 or codes.abs().amax() == 127


@pytest.mark.usefixtures("isa")
def test_rows_of_zeros_and_of_what_is_not_finite() -> None:
    x = random(6, 40, seed=0)
    x[0], x[1], x[2, 39], x[3, 5] = 0.0, 2.0**-126, float("inf"), float("nan")
    codes, scales = quantise_rows(x)
    assert not codes[:4].any()
    assert not scales[:2].any()
    assert scales[2:4].isnan().all()
    got = PackedLinear(matrix(33, 40, seed=1), None, allocate)(x)
    assert not got[:2].any()
    assert got[2:4].isnan().all()
    assert got[4:].isfinite().all()


@pytest.mark.usefixtures("isa")
@covering(has_bias=[False, True], is_rotated=[False, True], shape=LINEAR_SHAPES)
def test_products_have_the_bits_of_exact_sums(
    shape: tuple[int, int, int], has_bias: bool, is_rotated: bool
) -> None:
    rows, inputs, outputs = shape
    x = random(rows, inputs, seed=0)
    weight = matrix(outputs, inputs, seed=1, is_rotated=is_rotated)
    bias = random(outputs, seed=2) if has_bias else None
    linear = PackedLinear(weight, bias, allocate)
    want = product(x, weight) + (0.0 if bias is None else bias.float())
    assert torch.equal(linear(x), want.bfloat16())
    wide = torch.full((rows, outputs + 5), 7.0)
    assert torch.equal(linear(x, out=wide[:, :outputs]), want)
    assert (wide[:, outputs:] == 7.0).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_saturate(sign: int) -> None:
    """Pairs of 8-bit products would; so would sums of many inputs in 16 bits."""
    inputs = 1 << 15
    codes = torch.full((40, inputs), sign * 127, dtype=torch.int8)
    scales = torch.linspace(0.5, 2, 40)[:, None]
    weight = StoredMatrix(
        format=Int8Channel(), shape=(40, inputs), pieces={"codes": codes, "scales": scales}
    )
    x = torch.full((3, inputs), 4.0).bfloat16()
    want = product(x, weight)
    assert want.abs().max() > 127**2 * inputs * 0.03
    assert torch.equal(PackedLinear(weight, None, allocate)(x), want.bfloat16())


@pytest.mark.usefixtures("isa")
def test_the_lowest_code_is_a_number_too() -> None:
    """A checkpoint may have -128, which is stored as zero."""
    weight = matrix(34, 50, seed=1)
    weight.pieces["codes"][::3] = -128
    x = random(5, 50, seed=0)
    got = PackedLinear(weight, None, allocate)(x)
    assert torch.equal(got, product(x, weight).bfloat16())


@pytest.mark.usefixtures("isa")
def test_rotation_keeps_large_inputs_from_taking_the_steps_of_others() -> None:
    x, weight = random(64, 1024, seed=0), random(96, 1024, seed=1)
    x[:, ::256] *= 50
    want = x.double() @ weight.double().T
    errors = []
    for is_rotated in (False, True):
        stored = quantise_matrix(weight, is_rotated=is_rotated)
        assert (as_tensor(stored, torch.float32) - weight).norm() < 0.01 * weight.norm()
        got = PackedLinear(stored, None, allocate)(x).double()
        errors.append(float((got - want).norm() / want.norm()))
    assert errors[0] > 0.02
    assert errors[1] < 0.012


@pytest.mark.usefixtures("isa")
def test_the_error_against_unquantised_weights_is_that_of_int8() -> None:
    x, weight = random(64, 1024, seed=0), random(96, 1024, seed=1)
    want = x.double() @ weight.double().T
    got = PackedLinear(quantise_matrix(weight), None, allocate)(x).double()
    error = (got - want).norm() / want.norm()
    assert 0.004 < error < 0.02


@pytest.mark.usefixtures("isa", "threads")
def test_bits_of_a_row_depend_on_nothing_but_the_row() -> None:
    x, weight = random(300, 4201, seed=0), matrix(70, 4201, seed=1)
    linear = PackedLinear(weight, None, allocate)
    want = linear(x[:45])
    for num_threads in (1, 2, 3):
        _native.set_num_threads(num_threads)
        batches = [linear(x[:45])]
        batches += [torch.cat([linear(x[row : row + 1]) for row in range(45)])]
        batches += [torch.cat([linear(x[:7]), linear(x[7:24]), linear(x[24:45])])]
        batches += [linear(x)[:45]]
        for got in batches:
            assert torch.equal(got, want)


def test_strided_rows_and_outputs() -> None:
    wide, weight = random(20, 150, seed=0), matrix(40, 50, seed=1)
    x = wide[::2, 7:57]
    linear = PackedLinear(weight, None, allocate)
    out = torch.zeros(10, 100).bfloat16()
    linear(x, out=out[:, 30:70])
    assert torch.equal(out[:, 30:70], linear(x.contiguous()))
    assert not out[:, :30].any()


def test_joined_matrices_are_those_of_their_outputs() -> None:
    parts = [matrix(outputs, 48, seed=outputs) for outputs in (40, 8, 5)]
    x = random(9, 48, seed=0)
    got = PackedLinear(joined_int8(parts), None, allocate)(x)
    assert torch.equal(got, torch.cat([PackedLinear(p, None, allocate)(x) for p in parts], 1))


def test_scales_of_sixteen_bits_are_widened() -> None:
    weight = matrix(40, 48, seed=0)
    halves = weight.pieces["scales"].bfloat16()
    half = StoredMatrix(
        format=weight.format, shape=weight.shape, pieces=weight.pieces | {"scales": halves}
    )
    weight.pieces["scales"][:] = halves.float()
    x = random(9, 48, seed=0)
    products = [PackedLinear(each, None, allocate)(x) for each in (half, weight)]
    assert torch.equal(*products)


def test_packed_weights_take_half_the_bytes() -> None:
    outputs, inputs = 768, 2048
    num_bytes = packed_linear_bytes(outputs, inputs, Int8Channel())
    assert num_bytes == outputs * (inputs + 4)
    assert packed_experts_bytes(8, 2048, 768, gate_up=Int8Channel(), down=Int8Channel()) == 8 * (
        3 * 768 * 2048 + 4 * (2 * 768 + 2048)
    )


def make_experts(shape: tuple[int, int, int, int, int], seed: int = 0, *, is_rotated: bool = False):
    tokens, hidden, expert, experts, top_k = shape
    sizes = {"gate": (expert, hidden), "up": (expert, hidden), "down": (hidden, expert)}
    weights = {
        part: [
            matrix(*size, seed=seed + 3 * number + len(part), is_rotated=is_rotated)
            for number in range(experts)
        ]
        for part, size in sizes.items()
    }
    top = random(tokens, experts, seed=seed).float().softmax(-1).topk(top_k)
    return weights, random(tokens, hidden, seed=seed + 1), top.indices.int(), top.values


def layer(weights, hidden: Tensor, ids: Tensor, shares: Tensor, gated=None) -> Tensor:
    """The layer in float64 but for the quantisation of inputs and of gated products."""
    gated = gated or (lambda gate, up: torch.nn.functional.silu(gate) * up)
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(len(weights["gate"])):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (product(hidden[tokens], weights[part][expert]) for part in ("gate", "up"))
        products = gated(gate.double(), up.double()).bfloat16()
        down = product(products, weights["down"][expert])
        out[tokens] += shares[tokens, slots, None].double() * down.double()
    return out


def assert_close(got: Tensor, want: Tensor) -> None:
    """A rounding of the gate may move an input of down by a step: 1 of 254 of its largest."""
    assert got.isfinite().all()
    if got.numel():
        assert (got.double() - want).norm() <= 0.004 * want.norm() + 1e-9


@pytest.mark.usefixtures("isa")
@covering(is_rotated=[False, True], shape=EXPERT_SHAPES)
def test_experts_quantise_hidden_states_and_gated_products(
    shape: tuple[int, int, int, int, int], is_rotated: bool
) -> None:
    weights, *arguments = make_experts(shape, is_rotated=is_rotated)
    got = PackedExperts(*weights.values(), allocate)(*arguments)
    assert_close(got, layer(weights, *arguments))


@pytest.mark.usefixtures("isa")
def test_clamped_experts() -> None:
    weights, *arguments = make_experts((40, 70, 45, 4, 2))
    clamp = Clamp(1.7, 0.4, 0.5)
    got = PackedExperts(*weights.values(), allocate, clamp=clamp)(*arguments)

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=0.5), up.clamp(-0.4, 0.4)
        return (up + 1) * gate * torch.sigmoid(1.7 * gate)

    assert_close(got, layer(weights, *arguments, gated))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("tokens", [0, 1, 45, 600])
def test_one_network_is_an_expert_of_all_tokens(tokens: int) -> None:
    weights, hidden, *_ = make_experts((tokens, 70, 45, 1, 1))
    ffn = PackedGatedFfn(*(each[0] for each in weights.values()), allocate)
    ids, shares = torch.zeros(tokens, 1).int(), torch.ones(tokens, 1)
    assert_close(ffn(hidden), layer(weights, hidden, ids, shares))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("int8", [("gate", "up"), ("down",)], ids=str)
def test_either_product_may_be_of_bfloat16(int8: tuple[str, ...]) -> None:
    """A checkpoint may leave some matrices out."""
    weights, *arguments = make_experts((40, 70, 45, 4, 2))
    exact = layer(weights, *arguments)
    mixed = {
        part: each if part in int8 else [as_tensor(one, torch.bfloat16) for one in each]
        for part, each in weights.items()
    }
    got = PackedExperts(*mixed.values(), allocate)(*arguments).double()
    assert (got - exact).norm() < 0.02 * exact.norm()


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bits_of_a_token_depend_on_nothing_but_the_token(num_threads: int) -> None:
    weights, *arguments = make_experts((600, 50, 40, 6, 3))
    experts = PackedExperts(*weights.values(), allocate)
    _native.set_num_threads(2)
    want = experts(*arguments)
    _native.set_num_threads(num_threads)
    for sizes in ([600], [1] * 40 + [560], [13, 14, 15, 100, 458]):
        parts = zip(*(each.split(sizes) for each in arguments), strict=True)
        assert torch.equal(torch.cat([experts(*part) for part in parts]), want)


def test_groups_of_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="a scale for each output"):
        _native.pack_codes(
            _native.CodeFormat("int8", 16, False, False, False),
            (torch.zeros(4, 32).byte(), torch.ones(4, 2), 1, None, None, 1.0, 1.0),
            allocate(128 * 8 + 256),
        )
