"""RMS norm against Hugging Face's module and the reference, on every instruction set."""

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

from raymoe import _native
from raymoe.kernels.elementwise import FLOAT_DTYPES, add_rms_norm_, rms_norm, rms_norm_reference
from tests.kinds import covering

SHAPES = [(0, 8), (1, 1), (3, 7), (2, 64), (5, 129), (33, 1000), (40, 1024)]
UNIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}

pytestmark = pytest.mark.usefixtures("isa")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal_but_for_the_order_of_sums(got: Tensor, want: Tensor) -> None:
    """Equal; float32 within 4 units, 16-bit types: at most 1 in 200 values, by 2 units."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(
        got, want, rtol=(4 if got.dtype == torch.float32 else 2) * UNIT[got.dtype], atol=0
    )
    if got.dtype != torch.float32:
        assert (got != want).sum() <= max(1, got.numel() // 200)


@covering(dtype=FLOAT_DTYPES, shape=SHAPES)
def test_norm_equals_the_module_of_hugging_face(shape: tuple[int, int], dtype: torch.dtype) -> None:
    hidden = random(*shape, dtype=dtype)
    for module_type, offset in (
        (MixtralRMSNorm, None),
        (OlmoeRMSNorm, None),
        (Olmo3RMSNorm, 0.0),
        (Gemma4RMSNorm, 0.0),
        (Gemma3RMSNorm, 1.0),
    ):
        module = module_type(shape[1], eps=1e-5)
        module.weight.data = random(shape[1], dtype=dtype, seed=1)
        with torch.no_grad():
            want = module(hidden)
            got = rms_norm(hidden, module.weight, 1e-5, offset)
        assert_equal_but_for_the_order_of_sums(got, want)


@covering(dtype=FLOAT_DTYPES, shape=SHAPES)
def test_residual_is_added_in_place_and_rounded(shape: tuple[int, int], dtype: torch.dtype) -> None:
    residual, delta = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    for offset in (None, 1.0):
        want_residual = residual + delta
        got = add_rms_norm_(residual, delta, weight, 1e-6, offset=offset)
        assert torch.equal(residual, want_residual)
        want = rms_norm_reference(want_residual, weight, 1e-6, offset)
        assert_equal_but_for_the_order_of_sums(got, want)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_norm_without_weight_only_scales(dtype: torch.dtype) -> None:
    hidden = random(9, 70, dtype=dtype)
    got = rms_norm(hidden, None, 1e-6)
    assert_equal_but_for_the_order_of_sums(got, rms_norm_reference(hidden, None, 1e-6))


def test_rows_may_be_strided_and_unaligned() -> None:
    wide = random(6, 101, dtype=torch.bfloat16)
    weight = random(100, dtype=torch.bfloat16, seed=1)
    got = rms_norm(wide[:, 1:], weight, 1e-6)
    assert torch.equal(got, rms_norm(wide[:, 1:].contiguous(), weight, 1e-6))
    residual = wide.clone()
    add_rms_norm_(residual[:, 1:], wide[:, 1:], weight, 1e-6)
    assert torch.equal(residual[:, 1:], 2 * wide[:, 1:])
    assert torch.equal(residual[:, 0], wide[:, 0])


def test_rows_do_not_depend_on_the_batch_or_the_threads() -> None:
    hidden, weight = random(200, 384, dtype=torch.float32), random(384, dtype=torch.float32)
    whole = rms_norm(hidden, weight, 1e-6)
    before = _native.num_threads()
    _native.set_num_threads(3)
    assert torch.equal(rms_norm(hidden, weight, 1e-6), whole)
    _native.set_num_threads(before)
    assert torch.equal(rms_norm(hidden[17:18], weight, 1e-6), whole[17:18])


def test_other_types_and_ranks_take_the_reference() -> None:
    hidden = random(2, 3, 16, dtype=torch.float32)
    assert torch.equal(rms_norm(hidden, None, 1e-6), rms_norm_reference(hidden, None, 1e-6))
    mixed = rms_norm(hidden[0].bfloat16(), torch.ones(16), 1e-6)
    assert mixed.dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    hidden = random(3, 40, dtype=dtype)
    clean = rms_norm(hidden, None, 1e-6)
    hidden[1, 39] = float("nan")
    got = rms_norm(hidden, None, 1e-6)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm: weight has size 9 in dimension 0, expected 8"):
        rms_norm(torch.ones(2, 8), torch.ones(9), 1e-6)
