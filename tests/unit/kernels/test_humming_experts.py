"""Experts with products of humming-kernels: all but the products in Triton's interpreter.

The products are a model of theirs: how codes are decoded and rounded, and sums in float32.
"""

import math

import pytest
import torch
from torch import Tensor

from raymoe.codecs import Codes
from raymoe.doctor import kernels as doctor
from raymoe.doctor.examine import Status
from raymoe.kernels.cpu_experts import SIGMOID_GATES, Clamp, ExpertGroup
from raymoe.kernels.humming.packing import PackedMatrices, unpacked, unpacked_bias, why_not_packed
from raymoe.specs.layers import rows_at_once
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Gptq,
    Mxfp4,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)
from tests.quantisers import E2M1
from tests.unit.kernels.expert_cases import CLAMP, ExpertCase
from tests.unit.kernels.test_gpu_experts import error_of

pytest.importorskip("triton")

FP16, BF16 = torch.float16, torch.bfloat16
FORMATS: dict[str, WeightFormat] = {
    "fp8": Fp8Block(),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "int4": PackedInt4(group_size=32),
    "gptq": Gptq(group_size=64),
    "awq": Awq(group_size=32),
}
SIZES = {"hidden": 192, "wide": 128}


def weights_of(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Weights as the kernels multiply them: numbers times scales, each rounded to 16 bits."""
    scales_BG = codes.scales_BG
    if scales_BG.dtype == torch.uint8:
        scales_BG = torch.exp2(scales_BG.float() - 127)
    scales_BG = scales_BG.float().to(dtype).float()
    outputs, inputs = codes.codes_OI.shape
    rows_O = torch.arange(outputs)[:, None] // codes.block_rows
    groups_I = torch.arange(inputs) // codes.group_size
    numbers_C = torch.tensor([_number(code, codes.kind) for code in range(256)])
    numbers_OI = numbers_C[codes.codes_OI.long()]
    if codes.zeros_OG is not None:
        numbers_OI -= codes.zeros_OG[:, groups_I].float() - 8
    return (numbers_OI * scales_BG[rows_O, groups_I]).to(dtype)


def _number(code: int, kind: str) -> float:
    if kind == "int4":
        return code - 8.0
    if kind == "e2m1":
        return float(E2M1[code % 16])
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * math.ldexp(8 + mantissa, exponent - 10)


class ModelOfAProduct:
    """`GroupedProduct` as its package's sources say."""

    def __init__(self, packed: PackedMatrices) -> None:
        dtype, experts = packed.layout.dtype, range(len(packed.codes))
        codes_E = [unpacked(packed, expert) for expert in experts]
        self._weights_E = [weights_of(codes, dtype).float() for codes in codes_E]
        self._scales_E = [
            1.0 if codes.tensor_scale is None else float(codes.tensor_scale) for codes in codes_E
        ]
        self._biases_E = [unpacked_bias(packed, expert) for expert in experts]

    def __call__(
        self, input_RI: Tensor, offsets_E1: Tensor, expected_rows: int, out_RO: Tensor
    ) -> None:
        assert 0 < expected_rows <= len(input_RI)
        out_RO.fill_(float("nan"))  # where a product writes nothing
        bounds = offsets_E1.tolist()
        assert bounds[0] == 0
        for expert, weight_OI in enumerate(self._weights_E):
            rows = slice(bounds[expert], bounds[expert + 1])
            sum_RO = input_RI[rows].float() @ weight_OI.t() * self._scales_E[expert]
            bias_O = self._biases_E[expert]
            out_RO[rows] = sum_RO.to(out_RO.dtype) if bias_O is None else sum_RO + bias_O


def experts_of(case: ExpertCase):
    from raymoe.kernels.humming.experts import HummingExperts, packed_experts  # noqa: PLC0415

    return HummingExperts(
        packed_experts(case.matrices, case.dtype),
        product=ModelOfAProduct,
        activation=case.activation,
        clamp=case.clamp,
    )


def check(case: ExpertCase) -> None:
    """The error is that of torch in the same type, and of one more rounding of each result."""
    got_TH, exact_TH = experts_of(case)(*case.inputs), case.exact()
    assert got_TH.dtype == case.dtype
    plain = error_of(case.plain()(*case.inputs), exact_TH)
    assert error_of(got_TH, exact_TH) <= 2 * plain


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_in_every_format(name: str, dtype: torch.dtype) -> None:
    check(ExpertCase(stored=FORMATS[name], dtype=dtype, are_reordered=False, **SIZES))


@pytest.mark.parametrize("clamp", [None, CLAMP, Clamp(1.702, 7.0, 7.0)])
def test_biases_and_the_clamp(clamp: Clamp | None) -> None:
    check(ExpertCase(stored=Mxfp4(), has_bias=True, clamp=clamp, dtype=BF16, **SIZES))


@pytest.mark.parametrize("activation", [*SIGMOID_GATES, "relu2"])
def test_every_activation(activation: str) -> None:
    check(ExpertCase(stored=Mxfp4(), activation=activation, dtype=BF16, **SIZES))


def test_experts_without_tokens_and_no_tokens() -> None:
    routes = [[4, 1], [1, 4], [4, 1], [1, 4]]
    case = ExpertCase(
        stored=Mxfp4(), dtype=BF16, num_tokens=4, num_experts=6, routes=routes, **SIZES
    )
    check(case)
    none = [each[:0] for each in case.inputs]
    assert experts_of(case)(*none).shape == (0, case.hidden)


@pytest.mark.slow
def test_groups_add_up_to_all_experts_whatever_rows_are_computed_at_once() -> None:
    """Expert 5 has more rows than are computed at once; the last programs of it have none."""
    routes = [[5, token % 5] for token in range(140)]
    case = ExpertCase(
        stored=Mxfp4(), dtype=BF16, num_tokens=140, num_experts=6, routes=routes, **SIZES
    )
    experts = experts_of(case)
    assert rows_at_once(280, 1 / 6) < 140
    sum_TH = torch.zeros(case.num_tokens, case.hidden)
    for group in (range(5), range(5, 6)):
        experts.add(case.hidden_TH, (case.ids_TK, case.weights_TK), ExpertGroup(group, sum_TH))
    assert torch.equal(sum_TH.to(case.dtype), experts(*case.inputs))


def test_only_choices_of_the_group_are_sorted() -> None:
    """Experts of other groups have no rows, since their weights may not be there."""
    routes = [[2, 0], [1, 3], [3, 2], [0, 3]]
    case = ExpertCase(
        stored=Mxfp4(), dtype=BF16, num_tokens=4, num_experts=5, routes=routes, **SIZES
    )
    sort, choices = experts_of(case)._sort(case.ids_TK, range(2, 4))
    sort.run()
    assert choices.offsets_E1.tolist() == [0, 0, 0, 2, 5, 5]
    assert choices.tokens_R[:5].tolist() == [0, 2, 1, 2, 3]
    assert choices.places_TK[case.ids_TK == 2].tolist() == [0, 1]
    assert choices.places_TK[case.ids_TK == 3].tolist() == [2, 3, 4]


def test_experts_that_the_kernels_do_not_take_are_named() -> None:
    from raymoe.kernels.humming.experts import packed_experts  # noqa: PLC0415 - needs Triton

    taken = ExpertCase(stored=Gptq(group_size=64), are_reordered=False, **SIZES)
    assert why_not_packed(taken.matrices, FP16) is None
    reordered = ExpertCase(stored=Gptq(group_size=64), **SIZES)
    assert "act-order" in str(why_not_packed(reordered.matrices, FP16))
    assert "16-bit weights" in str(why_not_packed(ExpertCase(**SIZES).matrices, FP16))
    with pytest.raises(AssertionError, match="act-order"):
        packed_experts(reordered.matrices, FP16)


def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    case = ExpertCase(stored=Mxfp4(), dtype=BF16, num_tokens=30, **SIZES)
    experts = experts_of(case)
    some_TH = experts(*(each[11:14] for each in case.inputs))
    assert torch.equal(some_TH, experts(*case.inputs)[11:14])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("stored", doctor.PACKED_FORMATS, ids=str)
def test_the_doctors_bound_allows_the_roundings(
    stored: WeightFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it compares the products themselves with that bound."""
    from raymoe.kernels.humming import experts  # noqa: PLC0415 - needs Triton

    monkeypatch.setattr(doctor, "TOKENS", (3,))
    monkeypatch.setattr(experts, "GroupedProduct", ModelOfAProduct)
    case = lambda: doctor.experts(stored, dtype, doctor.CPU, doctor.make_packed)  # noqa: E731
    found = doctor.compare(case, doctor.BOUNDS[dtype])
    assert found.status == Status.OK, found.value


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("stored", [Mxfp4(), Nvfp4()], ids=str)
def test_weights_of_four_bits_are_multiplied_exactly(
    stored: WeightFormat, dtype: torch.dtype
) -> None:
    """Numbers of two bits times scales of at most four fit both types."""
    from raymoe.kernels.humming.experts import packed_experts  # noqa: PLC0415 - needs Triton

    case = ExpertCase(stored=stored, num_experts=1, top_k=1, **SIZES)
    codes = unpacked(packed_experts(case.matrices, dtype)[0], 0)
    rounded_OI = weights_of(codes, dtype)
    assert torch.equal(rounded_OI.double(), weights_of(codes, torch.float32).double())
