"""Experts on row-major weights against float64, on every instruction set."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.kernels.cpu_experts import (
    SIGMOID_GATES,
    Biases,
    Clamp,
    ExpertGroup,
    PlainExperts,
    RowMajorExperts,
)
from tests.kinds import covering
from tests.native.test_cpu_expert_biases import CLAMP, random_biases
from tests.native.test_cpu_experts import BLOCKS, SHAPES, Case, make_case, threads

__all__ = ["threads"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    activation: str = "silu"
    has_bias: bool = False
    clamp: Clamp | None = None


def cast(case: Case, dtype: torch.dtype) -> Case:
    """The same numbers, all of which bfloat16 has."""
    tensors = {field.name: getattr(case, field.name) for field in fields(case)}
    return Case(
        **{
            name: tensor if name in ("ids", "weights") else tensor.to(dtype)
            for name, tensor in tensors.items()
        }
    )


def biases_of(case: Case, options: Options, dtype: torch.dtype) -> list[Biases] | None:
    return (
        random_biases(case, torch.bfloat16)
        and [Biases(*(bias.to(dtype) for bias in each)) for each in random_biases(case)]
        if options.has_bias
        else None
    )


def row_major(case: Case, options: Options = Options()) -> RowMajorExperts:
    return RowMajorExperts(
        list(case.gate), list(case.up), list(case.down),
        activation=options.activation,
        biases=biases_of(case, options, case.gate.dtype),
        clamp=options.clamp,
    )  # fmt: skip


def summed(experts: RowMajorExperts, case: Case, group: range | None = None) -> Tensor:
    sum_TH = torch.zeros(case.hidden.shape)
    group = range(len(case.gate)) if group is None else group
    experts.add(case.hidden, (case.ids, case.weights), ExpertGroup(group, sum_TH))
    return sum_TH


def plain(case: Case, options: Options, dtype: torch.dtype) -> Tensor:
    wide = cast(case, dtype)
    experts = PlainExperts(
        wide.gate, wide.up, wide.down,
        activation=options.activation,
        biases=biases_of(case, options, dtype),
        clamp=options.clamp,
    )  # fmt: skip
    weights = case.weights.double() if dtype == torch.float64 else case.weights
    return experts(wide.hidden, case.ids, weights).double()


def check(case: Case, options: Options = Options()) -> None:
    """Error against float64 at most twice that of torch in the same type."""
    exact = plain(case, options, torch.float64)
    allowed = (plain(case, options, case.hidden.dtype) - exact).abs()
    error = (summed(row_major(case, options), case).double() - exact).abs()
    assert error.isfinite().all()
    if error.numel():
        assert error.mean() <= 2 * allowed.mean() + 1e-6
        assert error.max() <= 2 * allowed.max() + 1e-4


@pytest.mark.usefixtures("isa")
@covering(dtype=DTYPES, shape=[*SHAPES, BLOCKS])
def test_error_is_at_most_twice_that_of_torch(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check(cast(make_case(shape), dtype))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        Options(activation="gelu_pytorch_tanh"),
        Options(has_bias=True),
        Options(clamp=CLAMP),
        Options(has_bias=True, clamp=CLAMP),
    ],
    ids=str,
)
def test_activations_biases_and_limits(options: Options, dtype: torch.dtype) -> None:
    assert options.activation in SIGMOID_GATES
    check(cast(make_case((30, 51, 48, 16, 8)), dtype), options)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_relus_have_one_projection(dtype: torch.dtype, *, has_bias: bool) -> None:
    case = cast(make_case((30, 51, 48, 16, 8)), dtype)
    check(replace(case, gate=case.up), Options(activation="relu2", has_bias=has_bias))


@pytest.mark.usefixtures("isa")
def test_a_square_of_a_relu_is_exact_from_the_smallest_number_to_the_largest() -> None:
    one = torch.ones(1, 1, 1)
    experts = RowMajorExperts([one[0]], [one[0]], [one[0]], activation="relu2")
    hidden = torch.tensor([[-1e10], [-1.0], [-1e-19], [0.0], [1e-18], [3.0], [1e15]])
    got, want = experts(hidden, torch.zeros(7, 1).int(), torch.ones(7, 1)), hidden.relu().square()
    assert ((got - want).abs() <= 1e-6 * want + 1e-38 * hidden.square()).all()


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_token_depend_on_nothing_but_the_token(dtype: torch.dtype) -> None:
    case = cast(make_case((600, 50, 40, 6, 3)), dtype)
    experts = row_major(case)
    _native.set_num_threads(1)
    want = summed(experts, case)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    for num_threads in (2, 5):
        _native.set_num_threads(num_threads)
        for rows in (order, order[:13], order[:1]):
            part = Case(
                gate=case.gate, up=case.up, down=case.down,
                hidden=case.hidden[rows], ids=case.ids[rows], weights=case.weights[rows],
            )  # fmt: skip
            assert torch.equal(summed(experts, part), want[rows])


@pytest.mark.usefixtures("isa")
def test_groups_in_turn_give_the_bits_of_all_at_once() -> None:
    case = make_case((90, 48, 20, 16, 4))
    experts = row_major(case)
    sum_TH = torch.zeros(case.hidden.shape)
    for begin, end in ((0, 3), (3, 4), (4, 4), (4, 16)):
        experts.add(case.hidden, (case.ids, case.weights), ExpertGroup(range(begin, end), sum_TH))
    assert torch.equal(sum_TH, summed(experts, case))


@pytest.mark.usefixtures("isa")
def test_experts_outside_the_group_are_not_read() -> None:
    case = make_case((40, 33, 21, 4, 2))
    want = summed(row_major(case), case, range(2, 4))
    for weight in (case.gate, case.up, case.down):
        weight[:2] = torch.nan
    assert torch.equal(summed(row_major(case), case, range(2, 4)), want)


def test_inputs_may_be_strided() -> None:
    case = make_case((20, 33, 21, 4, 2))
    want = summed(row_major(case), case)
    wide = torch.cat([case.hidden, torch.full_like(case.hidden, torch.nan)], 1)[:, :33]
    ids, weights = (each.t().contiguous().t() for each in (case.ids, case.weights))
    sum_TH = torch.zeros(20, 70)[:, 5:38]
    row_major(case).add(wide, (ids, weights), ExpertGroup(range(4), sum_TH))
    assert torch.equal(sum_TH, want)


def test_wrong_arguments_are_named() -> None:
    case = make_case((4, 6, 5, 3, 2))
    experts = row_major(case)
    routing, sum_TH = (case.ids, case.weights), torch.zeros(4, 6)
    with pytest.raises(ValueError, match="topk_ids has dtype int64, expected int32"):
        experts.add(case.hidden, (case.ids.long(), case.weights), ExpertGroup(range(3), sum_TH))
    with pytest.raises(ValueError, match="sum has dtype bfloat16, expected float32"):
        experts.add(case.hidden, routing, ExpertGroup(range(3), sum_TH.bfloat16()))
    with pytest.raises(ValueError, match="experts 1 to 4 of 3"):
        experts.add(case.hidden, routing, ExpertGroup(range(1, 4), sum_TH))
