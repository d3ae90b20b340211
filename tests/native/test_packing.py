"""Panels of codes: products are exact to float32, or those with weights rounded to bfloat16."""

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.codecs import as_tensor
from raymoe.errors import UnsupportedModelError
from raymoe.kernels.cpu_experts import (
    PackedExperts,
    PackedGatedFfn,
    PlainExperts,
    PlainGatedFfn,
)
from raymoe.kernels.cpu_linear import BFloat16Packing, Packing, packing_for, packing_of
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
from tests.kinds import covering
from tests.native.test_cpu_experts import allocate
from tests.quantisers import Quantised, quantise

FORMATS = [
    PackedInt4(32),
    PackedInt4(16, has_zero_points=True),
    PackedInt4(16, has_zero_points=True, has_order=True),
    Gptq(32),
    Awq(32),
    Mxfp4(),
    Mxfp8(),
    Nvfp4(),
    Nvfp4(is_divided=True),
    Fp8Block(),
    Fp8Channel(),
]
# Outputs and inputs: tails of panels, several tiles of FP8, more than a block of decoded pairs.
SHAPES = [(8, 32), (40, 96), (264, 544), (72, 2336)]


def make(stored: WeightFormat, shape: tuple[int, int], seed: int = 0) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    return quantise(stored, weight, scale_dtype=dtype, seed=seed)


def packed(packing: Packing, weight, shape: tuple[int, int]) -> Tensor:
    memory = allocate(packing.linear_bytes(*shape))
    packing.pack_linear(weight, memory)
    return memory


def multiply(
    packing: Packing, memory: Tensor, x: Tensor, outputs: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    out = torch.empty(len(x), outputs, dtype=dtype)
    _native.packed_linear(x, memory, None, out, packing.format)
    return out


def is_decoded(packing: Packing) -> bool:
    assert packing.format is not None
    return packing.format.is_decoded


def assert_exact(got_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> None:
    """Unrounded sums differ by the rounding of float32 alone."""
    assert got_TO.dtype == torch.float32
    size_TO = x_TI.double().abs() @ weight_OI.double().abs().t()
    error_TO = (got_TO.double() - x_TI.double() @ weight_OI.double().t()).abs()
    assert (error_TO <= 2e-7 * size_TO).all()


def test_formats_and_instruction_sets_decide_what_is_rounded(isa: str) -> None:
    for stored in FORMATS:
        matrix = make(stored, SHAPES[1]).matrix
        expected = isa in ("avx2", "avx512") or stored == Mxfp4() or "order" in matrix.pieces
        if isa != "avx512_bf16" or expected:  # a machine may lack the lookups of bytes
            assert is_decoded(packing_of(matrix)) == expected


@pytest.mark.usefixtures("isa")
@covering(shape=SHAPES, stored=FORMATS)
def test_products_are_those_of_the_matrix(stored: WeightFormat, shape: tuple[int, int]) -> None:
    for seed in (0, 1):
        quantised = make(stored, shape, seed)
        matrix = quantised.matrix
        plain, coded = BFloat16Packing(), packing_of(matrix)
        decoded = packed(plain, as_tensor(matrix, torch.bfloat16), shape)
        codes = packed(coded, matrix, shape)
        for rows in (1, 5, 33):
            x = torch.randn(rows, shape[1]).bfloat16()
            got = multiply(coded, codes, x, shape[0])
            wide = multiply(coded, codes, x, shape[0], torch.float32)
            assert torch.equal(got, wide.bfloat16())
            if is_decoded(coded):
                assert torch.equal(got, multiply(plain, decoded, x, shape[0]))
            else:
                assert_exact(wide, x, quantised.exact)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(stored: WeightFormat) -> None:
    shape = (72, 544)
    matrix = make(stored, shape).matrix
    coded = packing_of(matrix)
    codes, x = packed(coded, matrix, shape), torch.randn(40, shape[1]).bfloat16()
    want = multiply(coded, codes, x, shape[0], torch.float32)
    for rows in range(1, 30):
        got = multiply(coded, codes, x[-rows:], shape[0], torch.float32)
        assert torch.equal(got, want[-rows:])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("inputs", [4096 + 48, 2 * 4096 + 200])
@pytest.mark.parametrize("stored", [PackedInt4(24), PackedInt4(200), Fp8Block(), Fp8Channel()])
def test_blocks_begin_within_groups(stored: WeightFormat, inputs: int) -> None:
    shape = (40, inputs // 200 * 200 if stored == PackedInt4(200) else inputs // 24 * 24)
    quantised = make(stored, shape)
    coded = packing_of(quantised.matrix)
    if is_decoded(coded):
        return
    x = torch.randn(3, shape[1]).bfloat16()
    codes = packed(coded, quantised.matrix, shape)
    assert_exact(multiply(coded, codes, x, shape[0], torch.float32), x, quantised.exact)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_experts_are_those_of_the_matrices(stored: WeightFormat) -> None:
    """Gate and up lie in one panel, each with scales and zero points of its own."""
    num_experts, expert_size, hidden_size = 3, 160, 192
    sizes = {"gate": (expert_size, hidden_size), "up": (expert_size, hidden_size)}
    sizes["down"] = (hidden_size, expert_size)
    codes: dict[str, list[Quantised]] = {part: [] for part in sizes}
    for expert in range(num_experts):
        for part, shape in sizes.items():
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(expert + len(part)))
            codes[part].append(quantise(stored, weight / 10, seed=2 * expert + 1))
    matrices = [[each.matrix for each in part] for part in codes.values()]
    decoded = [[as_tensor(each, torch.bfloat16) for each in part] for part in matrices]
    hidden = torch.randn(20, hidden_size).bfloat16()
    top = torch.rand(20, num_experts).topk(2)
    arguments = (hidden, top.indices.int(), top.values)
    got = PackedExperts(*matrices, allocate)(*arguments)
    rounded = PackedExperts(*decoded, allocate)(*arguments)
    one = PackedGatedFfn(*(part[1] for part in matrices), allocate)(hidden)
    plain = PackedGatedFfn(*(part[1] for part in decoded), allocate)(hidden)
    if is_decoded(packing_of(matrices[0][0])):
        assert torch.equal(got, rounded)
        assert torch.equal(one, plain)
        return
    exact = [[each.exact for each in part] for part in codes.values()]
    experts = PlainExperts(*exact, activation="silu")
    ffn = PlainGatedFfn(*(part[1] for part in exact), activation="silu")
    wide = hidden.double()
    assert_no_further(got, rounded, experts(wide, arguments[1], top.values.double()))
    assert_no_further(one, plain, ffn(wide))


def assert_no_further(got: Tensor, rounded: Tensor, exact: Tensor) -> None:
    """Errors are at most those of products with rounded weights; the largest one is chance."""
    error, allowed = (got.double() - exact).abs(), (rounded.double() - exact).abs()
    assert error.mean() <= 1.02 * allowed.mean()
    assert error.quantile(0.99) <= 1.2 * allowed.quantile(0.99)
    assert error.max() <= 2 * allowed.max()


def test_gate_and_up_that_are_stored_differently_are_refused() -> None:
    shape = (32, 64)
    one, other = make(Gptq(32), shape, 1).matrix, make(Gptq(32), shape, 3).matrix
    down = make(Gptq(32), (64, 32)).matrix
    with pytest.raises(UnsupportedModelError, match="different orders of their inputs"):
        PackedGatedFfn(one, other, down, allocate)
    with pytest.raises(UnsupportedModelError, match="stored as gptq and up_proj as awq"):
        PackedGatedFfn(one, make(Awq(32), shape).matrix, down, allocate)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_packed_codes_take_the_bytes_of_what_is_stored(stored: WeightFormat) -> None:
    """Of real widths; GPTQ and the like name the group of each input here as they do there."""
    shape = (768, 2048)
    num_bytes = packing_for(stored, *shape).linear_bytes(*shape)
    assert num_bytes <= 1.005 * stored.matrix_bytes(*shape)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_sizes_are_known_before_there_is_a_weight(stored: WeightFormat) -> None:
    for shape in SHAPES:
        before, after = packing_for(stored, *shape), packing_of(make(stored, shape, 1).matrix)
        assert before.linear_bytes(*shape) == after.linear_bytes(*shape)
        assert before.gate_up_bytes(*shape) == after.gate_up_bytes(*shape)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("is_divided", [False, True])
def test_every_scale_of_nvfp4_is_decoded(is_divided: bool) -> None:
    """Of every sign and size; a gate and an up in one panel have a scale of the matrix each."""
    shape = (32, 16 * 256)
    matrices = [make(Nvfp4(is_divided=is_divided), shape, seed).matrix for seed in (0, 1)]
    for number, matrix in enumerate(matrices):
        scales = torch.arange(256).byte()
        scales[[127, 255]] = 0  # NaN
        matrix.pieces["scales"][:] = scales.view(torch.float8_e4m3fn)
        matrix.pieces["tensor_scale"].fill_(7.3 * 10.0 ** (-3 * number))
    coded, plain = packing_of(matrices[0]), BFloat16Packing()
    memory = allocate(coded.gate_up_bytes(*shape)), allocate(plain.gate_up_bytes(*shape))
    coded.pack_gate_up(*matrices, memory[0])
    plain.pack_gate_up(*(as_tensor(each, torch.bfloat16) for each in matrices), memory[1])
    x = torch.randn(3, shape[1]).bfloat16()
    if is_decoded(coded):
        assert torch.equal(*map(multiply, (coded, plain), memory, (x, x), (64, 64)))
    else:
        gate, up = (as_tensor(each, torch.float32) for each in matrices)
        both = torch.cat([gate[:16], up[:16], gate[16:], up[16:]])
        assert_exact(multiply(coded, memory[0], x, 64, torch.float32), x, both)


@pytest.mark.usefixtures("isa")
def test_every_scale_of_mxfp4_is_decoded() -> None:
    """But for those at which numbers overflow, and the smallest one beside zeros only."""
    shape = (32, 32 * 250)
    matrix = make(Mxfp4(), shape).matrix
    scales = torch.arange(250).byte()
    matrix.pieces["scales"].view(torch.uint8)[:] = scales
    matrix.pieces["codes"].view(32, 250, -1)[:, 0] = 0
    coded, plain = packing_of(matrix), BFloat16Packing()
    memory = packed(coded, matrix, shape), packed(plain, as_tensor(matrix, torch.bfloat16), shape)
    one_of_each = torch.zeros(250, shape[1]).bfloat16()
    for group in range(250):
        one_of_each[group, 32 * group + group % 32] = 1
    assert torch.equal(*map(multiply, (coded, plain), memory, (one_of_each,) * 2, (32, 32)))


@pytest.mark.usefixtures("isa")
def test_every_number_of_fp8_is_decoded() -> None:
    matrix = make(Fp8Channel(), (32, 256)).matrix
    codes = torch.arange(256)
    codes[[127, 255]] = 0  # NaN
    matrix.pieces["codes"][:] = codes.byte().view(torch.float8_e4m3fn)
    coded, one_of_each = packing_of(matrix), torch.eye(256).bfloat16()
    got = multiply(coded, packed(coded, matrix, (32, 256)), one_of_each, 32)
    assert torch.equal(got, as_tensor(matrix, torch.bfloat16).t())
    matrix.pieces["codes"].view(torch.uint8)[3, [127, 255]] = torch.tensor([127, 255]).byte()
    got = multiply(coded, packed(coded, matrix, (32, 256)), one_of_each, 32)
    assert got[:, 3].isnan().all()
    assert got.isnan().sum() == 256


def test_wrong_arguments_are_named() -> None:
    matrix = make(PackedInt4(32), (40, 96)).matrix
    coded = packing_of(matrix)
    assert coded.format is not None
    scales = matrix.pieces["scales"]
    codes = torch.zeros(40, 96, dtype=torch.uint8)
    memory = allocate(coded.linear_bytes(40, 96))
    for weight, named in (
        ((codes.int(), scales, 1, None, None, 1.0, 1.0), "codes has dtype int32.*expected uint8"),
        (
            (codes, scales.bfloat16(), 1, None, None, 1.0, 1.0),
            "scales has dtype bfloat16.*expected float16",
        ),
        (
            (codes, scales[:, :2], 1, None, None, 1.0, 1.0),
            "scales has size 2 in dimension 1, expected 3",
        ),
        (
            (codes, scales, 1, codes[:, :3], None, 1.0, 1.0),
            "zero points and order must be given where",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            _native.pack_codes(coded.format, weight, memory)
    with pytest.raises(ValueError, match="expected"):
        _native.pack_codes(coded.format, (codes, scales, 1, None, None, 1.0, 1.0), memory[:-64])
    with pytest.raises(ValueError, match="unknown kind 'int3'"):
        _native.CodeFormat("int3", 32, False, False, False)


def test_an_order_names_groups_that_there_are() -> None:
    matrix = make(Gptq(32), (8, 64)).matrix
    matrix.pieces["order"][5] = 2
    with pytest.raises(ValueError, match="order has group 2 for input 5, there are 2"):
        packed(packing_of(matrix), matrix, (8, 64))
