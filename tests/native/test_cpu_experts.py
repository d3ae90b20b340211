"""Fused experts and gated feed-forwards against float64, on every instruction set."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_experts import (
    SIGMOID_GATES,
    SQUARES,
    PackedExperts,
    PackedGatedFfn,
    PlainExperts,
    PlainGatedFfn,
    RowMajorExperts,
    make_experts,
    make_gated_ffn,
    packed_experts_bytes,
)
from tests.kinds import covering

# Tokens, hidden, expert size, experts, experts per token.
SHAPES = [
    (0, 8, 8, 2, 1),
    (1, 1, 1, 1, 1),
    (1, 64, 32, 4, 2),
    (3, 33, 21, 5, 3),
    (7, 40, 17, 5, 1),
    (30, 51, 48, 16, 8),
    (100, 96, 80, 8, 2),
    (45, 70, 4200, 2, 2),
]
BLOCKS = (1100, 24, 20, 4, 2)  # more than two blocks of tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A layer of experts and a route."""

    gate: Tensor
    up: Tensor
    down: Tensor
    hidden: Tensor
    ids: Tensor
    weights: Tensor

    def packed(self) -> PackedExperts:
        return PackedExperts(self.gate, self.up, self.down, allocate)

    @cache  # noqa: B019 - the same case for every instruction set, freed with the session
    def plain(self) -> Tensor:
        experts = PlainExperts(self.gate, self.up, self.down, activation="silu")
        return experts(self.hidden, self.ids, self.weights)

    @cache  # noqa: B019 - as above
    def exact(self) -> Tensor:
        wide = [tensor.double() for tensor in (self.gate, self.up, self.down)]
        experts = PlainExperts(*wide, activation="silu")
        return experts(self.hidden.double(), self.ids, self.weights.double())


@cache
def shared_case(shape: tuple[int, int, int, int, int]) -> Case:
    """A case that its tests leave as it is."""
    return make_case(shape)


def make_case(shape: tuple[int, int, int, int, int], seed: int = 0) -> Case:
    tokens, hidden, expert, experts, top_k = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    top = random(tokens, experts).softmax(-1).topk(top_k)
    return Case(
        gate=(random(experts, expert, hidden) / hidden**0.5 * 2).bfloat16(),
        up=(random(experts, expert, hidden) / hidden**0.5).bfloat16(),
        down=(random(experts, hidden, expert) / expert**0.5).bfloat16(),
        hidden=random(tokens, hidden).bfloat16(),
        ids=top.indices.int(),
        weights=top.values,
    )


def allocate(num_bytes: int) -> Tensor:
    """Aligned memory full of NaN patterns: packing must write every byte that is read."""
    memory = torch.full((num_bytes + 64,), 0xFF, dtype=torch.uint8)
    first = -memory.data_ptr() % 64
    return memory[first : first + num_bytes]


def assert_close_as_torch(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Error against float64 at most twice that of bfloat16 torch, in the mean and the largest."""
    assert got.dtype == torch.bfloat16
    assert got.shape == exact.shape
    assert got.isfinite().all()
    error, allowed = (got.double() - exact).abs(), (plain.double() - exact).abs()
    if got.numel():
        assert error.mean() <= 2 * allowed.mean() + 1e-6
        assert error.max() <= 2 * allowed.max() + 1e-4


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after a test that changes it."""
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [*SHAPES, BLOCKS])
def test_error_is_at_most_twice_that_of_torch(shape: tuple[int, int, int, int, int]) -> None:
    case = shared_case(shape)
    got = case.packed()(case.hidden, case.ids, case.weights)
    assert_close_as_torch(got, case.plain(), case.exact())


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_bits_of_a_token_depend_on_nothing_but_the_token(num_threads: int) -> None:
    case = make_case((600, 50, 40, 6, 3))
    experts = case.packed()
    _native.set_num_threads(2)
    want = experts(case.hidden, case.ids, case.weights)
    _native.set_num_threads(num_threads)
    for sizes in ([600], [1] * 40 + [560], [13, 14, 15, 100, 458]):
        parts = zip(
            case.hidden.split(sizes),
            case.ids.split(sizes),
            case.weights.split(sizes),
            strict=True,
        )
        assert torch.equal(torch.cat([experts(*part) for part in parts]), want)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    shuffled = experts(case.hidden[order], case.ids[order], case.weights[order])
    assert torch.equal(shuffled, want[order])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("expert", [0, 3, 5])
def test_all_tokens_may_go_to_one_expert(expert: int) -> None:
    case = make_case((700, 48, 20, 6, 1))
    case.ids.fill_(expert)
    got = case.packed()(case.hidden, case.ids, case.weights)
    assert_close_as_torch(got, case.plain(), case.exact())


@pytest.mark.usefixtures("isa")
def test_uneven_routes_leave_experts_empty() -> None:
    case = make_case((90, 48, 20, 16, 2))
    case.ids[:, 0] = torch.where(torch.arange(90) < 80, 3, 15).int()
    case.ids[:, 1] = 7
    got = case.packed()(case.hidden, case.ids, case.weights)
    assert_close_as_torch(got, case.plain(), case.exact())


@pytest.mark.usefixtures("isa")
def test_values_of_one_token_do_not_reach_other_tokens() -> None:
    case = make_case((40, 33, 21, 4, 2))
    experts = case.packed()
    want = experts(case.hidden, case.ids, case.weights)
    case.hidden[11] = float("nan")
    case.weights[20, 1] = float("nan")
    got = experts(case.hidden, case.ids, case.weights)
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[11, 20]] = True
    assert got[bad].isnan().all()
    assert torch.equal(got[~bad], want[~bad])


@pytest.mark.usefixtures("isa")
def test_values_of_an_earlier_call_do_not_reach_the_next() -> None:
    before = make_case((300, 96, 80, 4, 2))
    before.hidden.fill_(float("nan"))
    case = make_case((40, 33, 21, 4, 2))
    experts = case.packed()
    want = experts(case.hidden, case.ids, case.weights)
    before.packed()(before.hidden, before.ids, before.weights)
    assert torch.equal(experts(case.hidden, case.ids, case.weights), want)


@pytest.mark.usefixtures("isa")
def test_large_gates_saturate_instead_of_overflowing() -> None:
    gate = torch.tensor([[[1000.0, 0.0]], [[-1000.0, 0.0]]]).bfloat16()
    up = torch.tensor([[[0.0, 1.0]]] * 2).bfloat16()
    down = torch.ones(2, 2, 1).bfloat16()
    hidden = torch.tensor([[1000.0, 0.5]]).bfloat16()
    experts = PackedExperts(gate, up, down, allocate)
    for expert, want in ((0, 5e5), (1, 0.0)):
        got = experts(hidden, torch.tensor([[expert]]).int(), torch.ones(1, 1))
        torch.testing.assert_close(got.float(), torch.full((1, 2), want), rtol=0.01, atol=1e-6)


@pytest.mark.usefixtures("isa")
@covering(activation=[*SIGMOID_GATES], shape=SHAPES)
def test_gated_ffn_error_is_at_most_twice_that_of_torch(
    shape: tuple[int, int, int, int, int], activation: str
) -> None:
    case = shared_case(shape)
    weights = (case.gate[0], case.up[0], case.down[0])
    got = PackedGatedFfn(*weights, allocate, activation=activation)(case.hidden)
    plain = PlainGatedFfn(*weights, activation=activation)(case.hidden)
    wide = PlainGatedFfn(*(weight.double() for weight in weights), activation=activation)
    assert_close_as_torch(got, plain, wide(case.hidden.double()))


@pytest.mark.usefixtures("isa")
def test_gelu_of_large_numbers_is_the_number_or_zero() -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    ffn = PackedGatedFfn(one, one, one, allocate, activation="gelu_pytorch_tanh")
    got = ffn(torch.tensor([[1e10], [300.0], [0.0], [-300.0], [-1e10]]).bfloat16())
    want = torch.tensor([[1e20], [9e4], [0.0], [0.0], [0.0]]).bfloat16()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


def test_inputs_may_be_strided_and_weights_lists_of_views() -> None:
    case = make_case((20, 33, 21, 4, 2))
    want = case.packed()(case.hidden, case.ids, case.weights)
    gate_up = torch.cat([case.gate, case.up], 1)  # one tensor, as some checkpoints have it
    down = case.down.transpose(1, 2).contiguous()
    experts = PackedExperts(
        [both[:21] for both in gate_up],
        [each.t().contiguous().t() for each in case.up],
        [each.t() for each in down],
        allocate,
    )
    wide = torch.cat([case.hidden, torch.full_like(case.hidden, float("nan"))], 1)[:, :33]
    assert torch.equal(experts(wide, case.ids.t().contiguous().t(), case.weights), want)
    assert torch.equal(experts(case.hidden.t().contiguous().t(), case.ids, case.weights), want)


@pytest.mark.usefixtures("isa")
def test_choice_is_packed_for_bfloat16_and_known_activations_on_the_right_machine_only() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for activation in (*SIGMOID_GATES, "relu"):
            weights = [torch.ones(2, 3, 4, dtype=dtype)] * 2 + [torch.ones(2, 4, 3, dtype=dtype)]
            experts = make_experts(*weights, activation=activation, allocate=allocate)
            first = [weight[0] for weight in weights]
            ffn = make_gated_ffn(*first, activation=activation, allocate=allocate)
            has_vectors = _native.active_isa() != "scalar"
            is_native = has_vectors and dtype == torch.bfloat16 and activation in SIGMOID_GATES
            is_packed = is_native and activation not in SQUARES
            assert isinstance(experts, PackedExperts) == is_packed
            assert isinstance(experts, RowMajorExperts) == (is_native and not is_packed)
            assert isinstance(ffn, PackedGatedFfn) == is_packed
            hidden = torch.ones(2, 4, dtype=dtype)
            ids = torch.tensor([[0, 1], [1, 0]]).int()
            got = experts(hidden, ids, torch.full((2, 2), 0.5))
            torch.testing.assert_close(got, ffn(hidden))


def test_layer_is_allocated_in_one_piece_of_the_announced_size() -> None:
    sizes: list[int] = []

    def count(num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return allocate(num_bytes)

    case = make_case((1, 33, 21, 5, 1))
    PackedExperts(case.gate, case.up, case.down, count)
    assert sizes == [packed_experts_bytes(5, 33, 21)]
    assert packed_experts_bytes(8, 1024, 2816) == 8 * 3 * 1024 * 2816 * 2


def test_wrong_arguments_are_named() -> None:
    case = make_case((4, 6, 5, 3, 2))
    experts = case.packed()
    with pytest.raises(ValueError, match="hidden has dtype float32, expected bfloat16"):
        experts(case.hidden.float(), case.ids, case.weights)
    with pytest.raises(ValueError, match="topk_ids has dtype int64, expected int32"):
        experts(case.hidden, case.ids.long(), case.weights)
    with pytest.raises(ValueError, match="topk_weights has size 1 in dimension 1, expected 2"):
        experts(case.hidden, case.ids, case.weights[:, :1])
    with pytest.raises(ValueError, match="topk_ids has expert 3 for token 2, there are 3 experts"):
        experts(case.hidden, case.ids.index_fill(0, torch.tensor([2]), 3), case.weights)
    with pytest.raises(ConfigError, match="activation 'tanh' is not one of"):
        make_experts(case.gate, case.up, case.down, activation="tanh", allocate=allocate)
