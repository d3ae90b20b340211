"""Token choice: known answers of Philox, agreement of every ISA with float64, the distribution."""

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.elementwise import (
    FLOAT_DTYPES,
    RandomKeys,
    argmax,
    argmax_reference,
    gumbel_argmax,
    gumbel_argmax_reference,
    gumbel_noise,
    log_sum_exp,
    philox4x32,
    topk_logprobs,
    topk_logprobs_reference,
)
from tests.kinds import covering

SHAPES = [(0, 5), (1, 1), (5, 3), (9, 64), (7, 65), (3, 513), (6, 1000), (2, 32000)]
INFINITY = float("inf")
GOLDEN_DRAWS = [714, 170, 585, 6, 832, 928]


def random_logits(num_rows: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return (3 * torch.randn(num_rows, num_tokens, generator=generator)).to(dtype)


def random_keys(num_rows: int, seed: int = 0) -> RandomKeys:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-(2**62), 2**62, (2, num_rows), generator=generator)
    narrow = torch.randint(0, 2**31 - 1, (2, num_rows), generator=generator, dtype=torch.int32)
    return RandomKeys(seed=wide[0], row_key=wide[1], sample=narrow[0], position=narrow[1])


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: list[int], key: list[int], want: str
) -> None:
    words = philox4x32([torch.tensor(c) for c in counter], tuple(torch.tensor(k) for k in key))
    assert " ".join(f"{int(word):08x}" for word in words) == want


@covering(dtype=FLOAT_DTYPES, shape=SHAPES)
def test_samples_equal_the_float64_reference(
    isa: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    logits, keys = random_logits(*shape, dtype), random_keys(shape[0])
    scale = torch.linspace(0.1, 3, shape[0])
    for factors in (None, scale):
        want = gumbel_argmax_reference(logits, keys, factors)
        assert torch.equal(gumbel_argmax(logits, keys, factors), want)


def test_every_instruction_set_draws_the_same_tokens() -> None:
    logits, keys = random_logits(64, 3000, torch.float32) / 8, random_keys(64)
    before, drawn = _native.active_isa(), []
    for name in _native.supported_isas():
        _native.set_isa(name)
        drawn.append(gumbel_argmax(logits, keys))
    _native.set_isa(before)
    assert all(torch.equal(ids, drawn[0]) for ids in drawn)
    assert drawn[0].unique().numel() > 30


def test_a_row_draws_the_same_alone_and_whatever_surrounds_it(isa: str) -> None:
    logits, keys = random_logits(40, 500, torch.float32), random_keys(40)
    whole = gumbel_argmax(logits, keys)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    shuffled = RandomKeys(
        seed=keys.seed[order],
        row_key=keys.row_key[order],
        sample=keys.sample[order],
        position=keys.position[order],
    )
    assert torch.equal(gumbel_argmax(logits[order], shuffled), whole[order])
    padded = torch.cat([logits, torch.full((40, 77), -INFINITY)], dim=1)
    assert torch.equal(gumbel_argmax(padded, keys), whole)


@pytest.mark.parametrize(
    ("field", "step"),
    [
        ("seed", 1),
        ("seed", 2**32),
        ("row_key", 1),
        ("row_key", 2**32),
        ("sample", 1),
        ("position", 1),
    ],
)
def test_each_part_of_the_key_changes_the_noise(field: str, step: int) -> None:
    base = {name: torch.zeros(1, dtype=torch.int64) for name in ("seed", "row_key")}
    base |= {name: torch.zeros(1, dtype=torch.int32) for name in ("sample", "position")}
    other = base | {field: base[field] + step}
    noise, moved = (gumbel_noise(RandomKeys(**fields), 256) for fields in (base, other))
    assert (noise != moved).all()
    flat = torch.zeros(1, 4096)
    chosen = {int(gumbel_argmax(flat, RandomKeys(**fields))) for fields in (base, other)}
    assert len(chosen) == 2


def test_the_draws_of_a_key_never_change_between_versions(isa: str) -> None:
    """Resumed jobs must continue with the tokens that they would have drawn."""
    rows = torch.arange(6)
    keys = RandomKeys(seed=rows * 3 + 1, row_key=-rows - 1, sample=rows.int(), position=rows.int())
    assert gumbel_argmax(torch.zeros(6, 1000), keys).tolist() == GOLDEN_DRAWS


def test_noise_of_the_tokens_is_distinct_and_gumbel() -> None:
    noise = gumbel_noise(random_keys(20), 5000)
    assert noise.unique().numel() > 0.999 * noise.numel()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.std().item() == pytest.approx(1.2825, abs=0.02)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_samples_follow_softmax(isa: str, factor: float) -> None:
    num_rows = 20000
    logits = torch.tensor([2.0, -1.0, 0.0, -INFINITY, 1.0, 0.5, -3.0])
    zeros = torch.zeros(num_rows, dtype=torch.int64)
    keys = RandomKeys(
        seed=zeros + 5,
        row_key=torch.arange(num_rows),
        sample=zeros.int(),
        position=zeros.int() + 9,
    )
    scale = torch.full((num_rows,), factor)
    counts = torch.bincount(
        gumbel_argmax(logits.expand(num_rows, 7), keys, scale), minlength=7
    ).double()
    expected = (logits * factor).softmax(-1).double() * num_rows
    assert counts[3] == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert statistic < 20.5  # chi-square with 5 degrees of freedom exceeds it once in 1000


@covering(dtype=FLOAT_DTYPES, shape=SHAPES)
def test_argmax_is_the_first_maximum(isa: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = random_logits(*shape, dtype)
    assert torch.equal(argmax(logits), argmax_reference(logits))
    if logits.numel():
        assert torch.equal(
            argmax(logits), (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        )
    assert argmax(torch.ones(3, 700, dtype=dtype)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rows_without_a_choice_give_minus_one(isa: str, dtype: torch.dtype) -> None:
    logits = random_logits(4, 600, dtype)
    logits[1, 599] = float("nan")
    logits[2] = -INFINITY
    for choose in (argmax, lambda x: gumbel_argmax(x, random_keys(4))):
        ids = choose(logits).tolist()
        assert ids[1] == ids[2] == -1
        assert min(ids[0], ids[3]) >= 0
    assert argmax(torch.empty(2, 0, dtype=dtype)).tolist() == [-1, -1]


def test_huge_logits_win_and_tiny_differences_do_not_decide(isa: str) -> None:
    logits = torch.zeros(1, 300)
    logits[0, 200] = INFINITY
    assert gumbel_argmax(logits, random_keys(1)).item() == 200
    logits[0, 200] = 1e30
    assert gumbel_argmax(logits, random_keys(1)).item() == 200


@covering(dtype=FLOAT_DTYPES, shape=SHAPES)
def test_log_sum_exp_equals_torch(isa: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = random_logits(*shape, dtype)
    torch.testing.assert_close(
        log_sum_exp(logits).double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6
    )


@covering(dtype=FLOAT_DTYPES, shape=SHAPES, k=[1, 5, 20])
def test_top_log_probabilities_equal_the_reference(
    isa: str, k: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    logits, k = random_logits(*shape, dtype), min(k, shape[1])
    got, want = topk_logprobs(logits, k), topk_logprobs_reference(logits, k)
    assert torch.equal(got.ids_RK, want.ids_RK)  # ties of 16-bit logits included
    torch.testing.assert_close(got.logprobs_RK, want.logprobs_RK, rtol=1e-6, atol=3e-6)


def test_log_sum_exp_of_extreme_rows(isa: str) -> None:
    logits = torch.tensor(
        [[1e4, 1e4, -1e4], [-INFINITY] * 3, [INFINITY, 0, 0], [float("nan"), 0, 0]]
    )
    got = log_sum_exp(logits)
    assert got[0].item() == pytest.approx(1e4 + 0.6931, abs=1e-2)
    assert got[1:3].tolist() == [-INFINITY, INFINITY]
    assert got[3].isnan()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="k is 4, the vocabulary has 3 tokens"):
        topk_logprobs(torch.ones(1, 3), 4)
    with pytest.raises(
        ValueError, match="gumbel_argmax: seed has size 2 in dimension 0, expected 1"
    ):
        gumbel_argmax(torch.ones(1, 3), random_keys(2))
