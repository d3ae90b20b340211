"""Our kernels for experts against the plain reference: in Triton's interpreter, or on a GPU."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from raymoe.kernels.cpu_experts import SIGMOID_GATES, ExpertGroup
from raymoe.kernels.gpu_experts_layout import Compute, TileTable
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Gptq,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from tests.triton_mode import DEVICES
from tests.unit.kernels.expert_cases import CLAMP, ExpertCase

pytest.importorskip("triton")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FORMATS: dict[str, tuple[WeightFormat | None, dict[str, int]]] = {
    "plain": (None, {}),
    "fp8 block": (Fp8Block(), {"hidden": 136, "wide": 24}),
    "fp8 channel": (Fp8Channel(), {}),
    "int4 packed": (PackedInt4(group_size=32), {"hidden": 64, "wide": 32}),
    "int4 packed, rows, odd": (PackedInt4(group_size=0), {"hidden": 75, "wide": 45}),
    "int4 packed, odd groups": (PackedInt4(group_size=5), {"hidden": 45, "wide": 15}),
    "int4 zero points": (
        PackedInt4(group_size=128, has_zero_points=True),
        {"hidden": 128, "wide": 128},
    ),
    "int4 act-order": (PackedInt4(group_size=32, has_order=True), {"hidden": 64, "wide": 32}),
    "gptq": (Gptq(group_size=32), {"hidden": 64, "wide": 32}),
    "awq": (Awq(group_size=32), {"hidden": 64, "wide": 32}),
    "mxfp4": (Mxfp4(), {"hidden": 160, "wide": 32}),
    "mxfp8": (Mxfp8(), {"hidden": 96, "wide": 32}),
    "nvfp4": (Nvfp4(), {"hidden": 144, "wide": 48}),
    "nvfp4 divided": (Nvfp4(is_divided=True), {"hidden": 48, "wide": 32}),
}
device = pytest.mark.parametrize("device", DEVICES)


def compute_of(case: ExpertCase) -> Compute:
    """How a case is computed; the interpreter multiplies raw bits where it is given bfloat16."""
    if case.device == "cuda":
        tiles = TileTable(capability=torch.cuda.get_device_capability())
        return Compute.on(tiles, case.dtype)
    dot = FP32 if case.dtype == BF16 else case.dtype
    return Compute(dtype=case.dtype, dot=dot, tiles=TileTable(capability=(8, 0)))


def run(case: ExpertCase, rows: slice | None = None, compute: Compute | None = None) -> Tensor:
    from raymoe.kernels.gpu_experts import GroupedExperts  # noqa: PLC0415 - needs Triton

    experts = GroupedExperts(
        case.matrices,
        compute=compute or compute_of(case),
        activation=case.activation,
        clamp=case.clamp,
    )
    return experts(*(each[rows or slice(None)] for each in case.inputs))


def error_of(got_TH: Tensor, exact_TH: Tensor) -> float:
    return float((got_TH.double().cpu() - exact_TH).norm() / exact_TH.norm())


def check(case: ExpertCase, compute: Compute | None = None) -> None:
    """The error is at most twice that of torch in the same type, whose products it shares."""
    got_TH, exact_TH = run(case, compute=compute), case.exact()
    assert got_TH.dtype == case.dtype
    plain = error_of(case.plain()(*case.inputs), exact_TH)
    assert error_of(got_TH, exact_TH) <= 2 * plain + 1e-7


@device
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_in_every_format(name: str, device: str) -> None:
    stored, sizes = FORMATS[name]
    for dtype in (FP16, BF16) if device == "cuda" else (FP16,):  # BF16: decoded in pairs
        check(ExpertCase(stored=stored, dtype=dtype, device=device, **sizes))


@device
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_in_every_type(
    name: str, dtype: torch.dtype, seed: int, device: str
) -> None:
    stored, sizes = FORMATS[name]
    check(
        ExpertCase(
            stored=stored, dtype=dtype, num_tokens=40, top_k=3, seed=seed, device=device, **sizes
        )
    )


@device
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_equals_the_reference_in_types_without_a_product(dtype: torch.dtype, device: str) -> None:
    check(ExpertCase(dtype=dtype, stored=Mxfp4(), hidden=32, wide=32, device=device))
    check(ExpertCase(dtype=dtype, hidden=24, wide=16, device=device))


@device
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_turing_takes_the_same_kernels_with_smaller_steps(dtype: torch.dtype, device: str) -> None:
    case = ExpertCase(dtype=dtype, hidden=40, wide=24, device=device)
    compute = Compute.on(TileTable(capability=(7, 5)), dtype)
    assert compute.dot == (FP16 if dtype == FP16 else FP32)
    check(case, compute)


@device
@pytest.mark.parametrize("stored", [PackedInt4(group_size=8), Gptq(group_size=8)], ids=str)
def test_takes_scales_of_either_half_type(stored: WeightFormat, device: str) -> None:
    check(ExpertCase(stored=stored, scale_dtype=BF16, hidden=40, wide=24, device=device))


@device
@pytest.mark.parametrize("stored", [None, Mxfp4(), PackedInt4(group_size=32)], ids=str)
def test_biases_and_the_clamp(stored: WeightFormat | None, device: str) -> None:
    check(ExpertCase(stored=stored, has_bias=True, clamp=CLAMP, hidden=64, wide=32, device=device))


@device
@pytest.mark.parametrize("activation", SIGMOID_GATES)
def test_biases_with_every_activation_of_the_kernels(activation: str, device: str) -> None:
    check(ExpertCase(has_bias=True, activation=activation, dtype=FP32, device=device))


@device
@pytest.mark.parametrize(("hidden", "wide"), [(1, 1), (63, 65), (64, 64), (129, 31)], ids=str)
def test_equals_the_reference_for_odd_sizes(hidden: int, wide: int, device: str) -> None:
    check(ExpertCase(hidden=hidden, wide=wide, num_tokens=5, device=device))


@device
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 70])
def test_equals_the_reference_for_any_number_of_tokens(num_tokens: int, device: str) -> None:
    check(ExpertCase(num_tokens=num_tokens, hidden=24, wide=16, device=device))


@device
@pytest.mark.parametrize(
    "routes",
    [[[2]] * 17, [[0]], [[2, 1]], [[0, 2]] * 5, [[2, 0, 1]] * 3 + [[1, 2, 0]] * 6],
    ids=["all to one", "one token", "one token, two experts", "some empty", "unsorted"],
)
def test_any_distribution_over_the_experts(routes: list[list[int]], device: str) -> None:
    check(ExpertCase(routes=routes, num_tokens=len(routes), hidden=24, wide=16, device=device))


@device
def test_no_tokens_give_nothing(device: str) -> None:
    assert run(ExpertCase(num_tokens=3, device=device), slice(0, 0)).shape == (0, 72)


@device
@pytest.mark.parametrize("stored", [None, Mxfp4()], ids=str)
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(
    stored: WeightFormat | None, device: str
) -> None:
    case = ExpertCase(stored=stored, num_tokens=20, hidden=64, wide=32, device=device)
    whole_TH = run(case)
    for rows in (slice(0, 1), slice(5, 13)):
        assert torch.equal(run(case, rows), whole_TH[rows])


@device
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize(
    "ends",
    [(3, 5), *(pytest.param(e, marks=pytest.mark.slow) for e in ((1, 2, 3, 4, 5), (5,)))],
    ids=str,
)
def test_groups_of_experts_one_after_the_other_give_the_same_bits(
    ends: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    from raymoe.kernels.gpu_experts import GroupedExperts  # noqa: PLC0415 - needs Triton

    case = ExpertCase(dtype=dtype, num_experts=5, top_k=3, hidden=24, wide=16, device=device)
    hidden_TH, *routing = case.inputs
    grouped = GroupedExperts(case.matrices, compute=compute_of(case))
    for experts in (grouped, case.plain()):
        sum_TH = torch.zeros_like(hidden_TH, dtype=FP32)
        for begin, end in itertools.pairwise((0, *ends)):
            experts.add(hidden_TH, tuple(routing), ExpertGroup(range(begin, end), sum_TH))
        assert torch.equal(sum_TH.to(dtype), experts(*case.inputs))
        assert sum_TH.abs().sum() > 0


@device
@pytest.mark.parametrize(
    ("chosen", "begins"),
    [
        ((0, 1, 2), (0, 2)),  # groups that none of the rows chose are left out
        *(
            pytest.param(chosen, range(0, 8, 2), marks=pytest.mark.slow)
            for chosen in ((0, 1, 2), (5, 6, 7), (1, 4, 6))
        ),
    ],
    ids=str,
)
def test_groups_with_more_rows_than_there_is_room_for_give_the_same_bits(
    chosen: tuple[int, ...],
    begins: Sequence[int],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raymoe.kernels.gpu_experts import GroupedExperts  # noqa: PLC0415 - needs Triton

    case = ExpertCase(
        num_experts=8, top_k=3, hidden=24, wide=16, num_tokens=150, routes=[chosen] * 150,
        device=device,
    )  # fmt: skip
    hidden_TH, *routing = case.inputs
    grouped, rows = GroupedExperts(case.matrices, compute=compute_of(case)), []
    computed = grouped._computed

    def noting(hidden_TX: Tensor, groups: object, some: range) -> Tensor:
        rows.append(some)
        return computed(hidden_TX, groups, some)

    monkeypatch.setattr(grouped, "_computed", noting)
    sum_TH = torch.zeros_like(hidden_TH, dtype=FP32)
    for begin in begins:  # a share of 113 rows, room for 256 of 450
        group = ExpertGroup(range(begin, begin + 2), sum_TH)
        grouped.add(hidden_TH, tuple(routing), group)
    assert rows == [range(256), range(256, 450)] * len(begins)
    assert torch.equal(sum_TH.to(case.dtype), grouped(*case.inputs))
    assert sum_TH.abs().sum() > 0


@device
def test_tables_that_name_neighbours_need_not_be_read(device: str) -> None:
    case = ExpertCase(
        stored=Gptq(group_size=32), are_reordered=False, hidden=64, wide=32, device=device
    )
    assert case.matrices.layouts()[0].has_order is False
    check(case)


@device
def test_experts_lie_in_different_buffers_and_at_odd_places(device: str) -> None:
    case = ExpertCase(stored=Mxfp4(), hidden=32, wide=32, device=device)
    for matrix in case.matrices.gate_EFH:
        codes = matrix.pieces["codes"]
        memory = torch.zeros(codes.numel() + 3, dtype=torch.uint8, device=codes.device)
        matrix.pieces["codes"] = memory[3:].view(codes.shape).copy_(codes)
    gate_up, _ = case.matrices.layouts()
    assert gate_up.unit == torch.uint8, "codes at odd addresses are read as bytes"
    check(case)


@device
def test_weights_that_change_between_two_calls_are_read_anew(device: str) -> None:
    from raymoe.kernels.gpu_experts import GroupedExperts  # noqa: PLC0415 - needs Triton

    case = ExpertCase(device=device, hidden=24, wide=16)
    experts = GroupedExperts(case.matrices, compute=compute_of(case))
    first_TH = experts(*case.inputs)
    for weight in case.matrices.down_EHF:
        weight.mul_(2)
    torch.testing.assert_close(experts(*case.inputs), 2 * first_TH)


@device
@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", FP16), ("scale", BF16), ("bias", FP16), ("hidden", BF16)], ids=str
)
def test_what_is_not_a_number_stays_so(kind: str, dtype: torch.dtype, device: str) -> None:
    case = ExpertCase(
        dtype=dtype, stored=Fp8Channel(), routes=[[0], [1]], num_tokens=2, has_bias=True,
        hidden=24, wide=16, device=device,
    )  # fmt: skip
    gate = case.matrices.gate_EFH[1].pieces
    if kind == "e4m3":
        gate["codes"].view(torch.uint8)[3, 5] = 0x7F
    elif kind == "scale":
        gate["scales"][3] = torch.nan
    elif kind == "bias":
        case.matrices.biases[1].gate_F[3] = torch.nan
    else:
        case.hidden_TH[1, 5] = torch.nan
    got_TH = run(case)
    assert got_TH[1].isnan().all()
    assert not got_TH[0].isnan().any()
