"""Gates of results against plain formulas: by torch, and by the kernels of each instruction set."""

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.kernels import gates
from raymoe.kernels.elementwise import FLOAT_DTYPES
from raymoe.kernels.gates import AnyActivation, gate_and_norm, gate_values, norm_and_gate
from tests.kinds import covering

UNIT = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}
EPS = 1e-3
FORMULAS = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows that are strided."""
    return torch.randn(shape[0], shape[1] + 3).to(dtype)[:, 3:]


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=UNIT[dtype], atol=UNIT[dtype] / 4)


@pytest.mark.usefixtures("by_each")
@covering(
    dtype=FLOAT_DTYPES, activation=["sigmoid", "silu", "softplus"], width=[1, 24], tokens=[0, 1, 70]
)
def test_values_are_multiplied_by_gates(
    dtype: torch.dtype, activation: AnyActivation, width: int, tokens: int
) -> None:
    values_TX, gates_TA = draw(tokens, 5 * width, dtype=dtype), draw(tokens, 5, dtype=dtype)
    factors_TA1 = FORMULAS[activation](gates_TA.double())[..., None]
    want_TX = (values_TX.double().reshape(tokens, 5, width) * factors_TA1).flatten(1)
    close(gate_values(values_TX, gates_TA, activation), want_TX, dtype)


@pytest.mark.usefixtures("by_each")
@covering(dtype=FLOAT_DTYPES, activation=["sigmoid", "silu"], rounds=[False, True], width=[9, 64])
def test_norms_are_multiplied_by_gates(
    dtype: torch.dtype, activation: AnyActivation, rounds: bool, width: int
) -> None:
    values_TX, gates_TX = (draw(70, 3 * width, dtype=dtype) for _ in range(2))
    weight_V = torch.rand(width).to(dtype)
    heads_TAV = values_TX.double().view(70, 3, width)
    roots_TA1 = (heads_TAV.square().mean(-1, keepdim=True) + EPS).sqrt()
    want_TX = (heads_TAV / roots_TA1 * weight_V.double()).flatten(1)
    want_TX = want_TX * FORMULAS[activation](gates_TX.double())
    got_TX = norm_and_gate(
        values_TX, weight_V, gates_TX, EPS, activation=activation, rounds_norm=rounds
    )
    close(got_TX, want_TX, dtype)


@pytest.mark.usefixtures("by_each")
@covering(dtype=FLOAT_DTYPES, groups=[1, 4], width=[9, 64])
def test_gated_values_have_norms(dtype: torch.dtype, groups: int, width: int) -> None:
    values_TX, gates_TX = (draw(70, groups * width, dtype=dtype) for _ in range(2))
    weight_X = torch.rand(groups * width).to(dtype)
    gated_TX = values_TX.double() * FORMULAS["silu"](gates_TX.double())
    gated_TGX = gated_TX.view(70, groups, width)
    roots_TG1 = (gated_TGX.square().mean(-1, keepdim=True) + EPS).sqrt()
    want_TX = (gated_TGX / roots_TG1).flatten(1) * weight_X.double()
    close(gate_and_norm(values_TX, weight_X, gates_TX, num_groups=groups, eps=EPS), want_TX, dtype)


def test_16_bits_are_rounded_where_torch_rounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    values_TX, gates_TX = (draw(70, 192, dtype=torch.bfloat16) for _ in range(2))
    weight_V = torch.rand(64).bfloat16()

    def results() -> list[Tensor]:
        gated = [
            norm_and_gate(values_TX, weight_V, gates_TX, EPS, activation="silu", rounds_norm=rounds)
            for rounds in (False, True)
        ]
        gated.append(gate_values(values_TX, gates_TX, "sigmoid"))
        return [
            *gated,
            gate_and_norm(values_TX, weight_V.repeat(3), gates_TX, num_groups=3, eps=EPS),
        ]

    found = results()
    monkeypatch.setattr(gates, "native_reads", lambda *_: False)
    for native, by_torch in zip(found, results(), strict=True):
        assert (native != by_torch).float().mean() < 0.01  # at the border of two results


def test_activations_that_kernels_lack_are_named() -> None:
    values_TX = torch.randn(2, 8)
    with pytest.raises(ValueError, match="'softplus', expected sigmoid or silu"):
        _native.gate_values(values_TX, values_TX, "softplus", values_TX.clone())
