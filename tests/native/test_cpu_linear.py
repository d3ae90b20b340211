"""Packed projections against float64, on every instruction set."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.kernels.cpu_linear import (
    PackedGroups,
    PackedLinear,
    PlainLinear,
    make_linear,
    multiply_groups,
    packed_linear_bytes,
    packed_linear_is_used,
)
from tests.kinds import covering

# Rows, inputs, outputs: none, one, tails of every kind, several tiles, several blocks of inputs.
SHAPES = [
    (0, 8, 8),
    (1, 1, 1),
    (1, 64, 32),
    (2, 3, 5),
    (5, 33, 47),
    (14, 10, 31),
    (15, 128, 33),
    (29, 5001, 70),
    (43, 2048, 64),
    (300, 96, 100),
]


def allocate(num_bytes: int) -> Tensor:
    """Aligned memory full of NaN patterns: packing must write every byte that is read."""
    memory = torch.full((num_bytes + 64,), 0xFF, dtype=torch.uint8)
    first = -memory.data_ptr() % 64
    return memory[first : first + num_bytes]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def largest_error(got: Tensor, want_f64: Tensor) -> float:
    assert got.isfinite().all()
    return (got.double() - want_f64).abs().max().item() if got.numel() else 0.0


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after a test that changes it."""
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@covering(has_bias=[False, True], shape=SHAPES)
def test_error_is_at_most_twice_that_of_torch(shape: tuple[int, int, int], has_bias: bool) -> None:
    rows, inputs, outputs = shape
    x, weight = random(rows, inputs, seed=0), random(outputs, inputs, seed=1)
    bias = random(outputs, seed=2) if has_bias else None
    want = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    got = PackedLinear(weight, bias, allocate)(x)
    assert got.dtype == torch.bfloat16
    assert got.shape == (rows, outputs)
    plain = PlainLinear(weight, bias)(x)
    assert largest_error(got, want) <= 2 * largest_error(plain, want) + 1e-6


@pytest.mark.usefixtures("isa")
@covering(has_bias=[False, True], shape=SHAPES)
def test_sums_may_stay_in_float32(shape: tuple[int, int, int], has_bias: bool) -> None:
    rows, inputs, outputs = shape
    x, weight = random(rows, inputs, seed=0), random(outputs, inputs, seed=1)
    bias = random(outputs, seed=2) if has_bias else None
    want = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    linear = PackedLinear(weight, bias, allocate)
    wide = torch.full((rows, outputs + 5), 7.0)
    got = linear(x, out=wide[:, :outputs])
    assert largest_error(got, want) <= 1e-6 * inputs + 1e-5
    assert torch.equal(got.bfloat16(), linear(x))
    assert (wide[:, outputs:] == 7.0).all()


@pytest.mark.usefixtures("isa", "threads")
def test_bits_of_a_row_depend_on_nothing_but_the_row() -> None:
    x, weight = random(300, 4200, seed=0), random(34, 4200, seed=1)
    linear = PackedLinear(weight, None, allocate)
    want = linear(x[:45])
    for num_threads in (1, 2, 3):
        _native.set_num_threads(num_threads)
        batches = [linear(x[:45])]
        batches += [torch.cat([linear(x[row : row + 1]) for row in range(45)])]
        batches += [torch.cat([linear(x[:7]), linear(x[7:24]), linear(x[24:45])])]
        if _native.active_isa() != "scalar":
            batches += [linear(x)[:45]]
        for got in batches:
            assert torch.equal(got, want)


@pytest.mark.usefixtures("isa")
def test_values_of_one_row_do_not_reach_other_rows() -> None:
    weight = random(40, 51, seed=1)
    linear = PackedLinear(weight, None, allocate)
    x = random(20, 51, seed=0)
    want = linear(x)
    x[7] = float("nan")
    got = linear(x)
    assert got[7].isnan().all()
    assert torch.equal(got[:7], want[:7])
    assert torch.equal(got[8:], want[8:])


@pytest.mark.usefixtures("isa")
def test_values_of_an_earlier_call_do_not_reach_the_next() -> None:
    linear, x = PackedLinear(random(40, 51, seed=1), None, allocate), random(20, 51, seed=0)
    want = linear(x)
    wide = PackedLinear(random(8, 95, seed=2), None, allocate)
    assert wide(torch.full((60, 95), float("nan"), dtype=torch.bfloat16)).isnan().all()
    assert torch.equal(linear(x), want)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("inputs", [64, 61, 2048])
def test_rows_may_be_far_apart_and_the_rest_of_the_output_is_kept(inputs: int) -> None:
    weight = random(40, inputs, seed=1)
    linear = PackedLinear(weight, None, allocate)
    wide = torch.full((33, inputs + 19), float("nan"), dtype=torch.bfloat16)
    wide[:, :inputs] = random(33, inputs, seed=0)
    out = torch.full((33, 50), 7.0, dtype=torch.bfloat16)
    assert linear(wide[:, :inputs], out=out[:, 5:45]) is not None
    assert torch.equal(out[:, 5:45], linear(wide[:, :inputs].contiguous()))
    assert (out[:, :5] == 7).all()
    assert (out[:, 45:] == 7).all()
    assert torch.equal(linear(wide[:, :inputs].t().contiguous().t()), out[:, 5:45])


def test_weights_may_have_any_strides() -> None:
    weight = random(70, 45, seed=1)
    x = random(3, 45, seed=0)
    want = PackedLinear(weight, None, allocate)(x)
    transposed = weight.t().contiguous().t()
    slices = random(140, 100, seed=3)
    slices[::2, 7:52] = weight
    for view in (transposed, slices[::2, 7:52]):
        assert torch.equal(PackedLinear(view, None, allocate)(x), want)


def test_packed_form_keeps_no_reference_to_the_weights() -> None:
    weight, bias = random(33, 30, seed=1), random(33, seed=2)
    linear = PackedLinear(weight, bias, allocate)
    x = random(3, 30, seed=0)
    want = linear(x)
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(x), want)


def test_packed_bytes_are_whole_panels() -> None:
    assert packed_linear_bytes(33, 5) == 2 * 3 * 32 * 2 * 2
    assert packed_linear_bytes(1024, 2816) == 1024 * 2816 * 2


@pytest.mark.usefixtures("isa")
def test_choice_is_packed_for_bfloat16_on_the_right_machine_only() -> None:
    assert packed_linear_is_used(torch.bfloat16) == (_native.active_isa() != "scalar")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        linear = make_linear(torch.zeros(8, 6, dtype=dtype), None, allocate)
        assert isinstance(linear, PackedLinear) == packed_linear_is_used(dtype)
        assert (linear.out_features, linear.in_features) == (8, 6)
        out = torch.ones(2, 8, dtype=dtype)
        assert linear(torch.ones(2, 6, dtype=dtype), out=out) is out
        assert (out == 0).all()


def test_wrong_arguments_are_named() -> None:
    linear = PackedLinear(random(8, 6, seed=0), None, allocate)
    with pytest.raises(ValueError, match="x has dtype float32, expected bfloat16"):
        linear(torch.zeros(2, 6))
    with pytest.raises(ValueError, match="packed has size 384 in dimension 0, expected 512"):
        linear(torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out has size 3 in dimension 0, expected 2"):
        linear(torch.zeros(2, 6, dtype=torch.bfloat16), out=torch.zeros(3, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="weight must be a bfloat16 matrix"):
        PackedLinear(torch.zeros(8, 6), None, allocate)
    with pytest.raises(ValueError, match="packed must be aligned to 64 bytes"):
        _native.pack_linear(random(8, 6, seed=0), allocate(385)[1:])


@pytest.mark.usefixtures("isa", "threads")
@covering(num_threads=[1, 3], num_groups=[1, 5], shape=SHAPES[1:])
def test_groups_are_projected_each_by_its_own_matrix(
    num_threads: int, num_groups: int, shape: tuple[int, int, int]
) -> None:
    _native.set_num_threads(num_threads)
    rows, inputs, outputs = shape
    x_TGI = random(rows, num_groups, inputs + 3, seed=0)[..., :inputs]
    weight_GOI = random(num_groups, outputs, inputs, seed=1)
    groups = PackedGroups.pack(weight_GOI, allocate)
    out_TGO = torch.zeros(rows, num_groups, outputs + 1, dtype=torch.bfloat16)
    assert groups(x_TGI, out_TGO[..., :outputs]) is not None
    got_TGO = groups(x_TGI)
    assert torch.equal(out_TGO[..., :outputs], got_TGO)
    assert not out_TGO[..., outputs:].any(), "wrote past its columns"
    for group in range(num_groups):
        alone = PackedLinear(weight_GOI[group], None, allocate)
        assert torch.equal(got_TGO[:, group], alone(x_TGI[:, group]))
    same_TGI = x_TGI[:, :1].expand(-1, num_groups, -1)
    some = slice(num_groups // 2, None)
    assert torch.equal(groups.some(some)(same_TGI[:, some]), groups(same_TGI)[:, some])


def test_groups_by_torch_are_the_same_projection() -> None:
    x_TGI, weight_GOI = torch.randn(9, 3, 40), torch.randn(3, 37, 40)
    want_TGO = torch.einsum("tgi,goi->tgo", x_TGI.double(), weight_GOI.double())
    torch.testing.assert_close(multiply_groups(x_TGI, weight_GOI), want_TGO.float())
