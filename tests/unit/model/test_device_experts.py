"""When our kernels for experts are used, and with which layouts."""

import subprocess
import sys

import pytest
import torch

from raymoe.kernels import elementwise
from raymoe.kernels.cpu_experts import PlainExperts
from raymoe.kernels.elementwise import triton_runs_on
from raymoe.kernels.gpu_experts_layout import (
    Compute,
    ExpertMatrices,
    TileTable,
    addresses_of,
    layout_of,
)
from raymoe.model.device_experts import grouped_experts_are_used, make_device_experts
from raymoe.specs.weight_format import Mxfp4, PackedInt4
from tests.unit.kernels.expert_cases import CLAMP, ExpertCase


def test_experts_in_host_memory_are_computed_by_torch() -> None:
    case = ExpertCase()
    made = make_device_experts(case.matrices, activation="silu", dtype=case.dtype)
    assert isinstance(made, PlainExperts)
    assert torch.equal(made(*case.inputs), case.plain()(*case.inputs))


@pytest.mark.parametrize(
    ("activation", "clamp", "dtype", "capability", "triton", "is_used"),
    [
        ("silu", None, torch.float16, (7, 5), True, True),
        ("silu", None, torch.bfloat16, (8, 9), True, True),
        ("gelu", CLAMP, torch.bfloat16, (9, 0), True, True),
        ("gelu_pytorch_tanh", None, torch.bfloat16, (9, 0), True, True),
        ("gelu", None, torch.bfloat16, (9, 0), True, False),
        ("silu", None, torch.float64, (9, 0), True, False),
        ("silu", None, torch.float16, (7, 0), True, False),
        ("silu", None, torch.float16, (8, 0), False, False),
    ],
)
def test_a_gpu_from_turing_on_with_triton_uses_our_kernels(
    activation: str,
    clamp: object,
    dtype: torch.dtype,
    capability: tuple[int, int],
    triton: bool,
    is_used: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(ExpertMatrices, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(elementwise, "find_spec", lambda _name: object() if triton else None)
    triton_runs_on.cache_clear()
    request.addfinalizer(triton_runs_on.cache_clear)
    assert grouped_experts_are_used(ExpertCase().matrices, activation, dtype, clamp) is is_used


def test_experts_that_are_stored_unlike_are_left_to_torch() -> None:
    plain, packed = ExpertCase(), ExpertCase(stored=PackedInt4(group_size=8))
    mixed = ExpertMatrices(
        [packed.matrices.gate_EFH[0], *plain.matrices.gate_EFH[1:]], *plain.matrices[1:3]
    )
    assert plain.matrices.layouts() is not None
    assert mixed.layouts() is None
    assert plain.matrices._replace(up_EFH=packed.matrices.up_EFH).layouts() is None
    assert plain.matrices._replace(down_EHF=packed.matrices.down_EHF).layouts() is not None


def test_bfloat16_is_multiplied_in_float32_before_ampere() -> None:
    for dtype, capability, dot in (
        (torch.bfloat16, (7, 5), torch.float32),
        (torch.bfloat16, (8, 0), torch.bfloat16),
        (torch.float16, (7, 5), torch.float16),
        (torch.float32, (9, 0), torch.float32),
    ):
        assert Compute.on(TileTable(capability=capability), dtype).dot == dot


def test_words_of_codes_are_read_where_all_experts_allow_it() -> None:
    case = ExpertCase(stored=Mxfp4(), hidden=64, wide=32)
    layout = layout_of(case.matrices.gate_EFH)
    assert (layout.unit, layout.unit_inputs, layout.code_strides) == (torch.int16, 4, (16, 1))
    assert layout.num_units == 16


def test_addresses_are_those_of_the_pieces_and_nothing_is_zero() -> None:
    case = ExpertCase(stored=PackedInt4(group_size=8), has_bias=True)
    matrix, bias = case.matrices.gate_EFH[2], case.matrices.biases[2].gate_F
    pieces = matrix.pieces
    expected = [pieces["codes"].data_ptr(), pieces["scales"].data_ptr(), 0, 0, bias.data_ptr(), 0]
    assert addresses_of(matrix, bias) == expected
    assert addresses_of(matrix, None) == [*expected[:4], 0, 0]


def test_nothing_loads_triton_before_a_kernel_runs() -> None:
    code = (
        "import sys, raymoe.model.loading, raymoe.cli\n"
        "import raymoe.model.device_experts\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
