"""Loads: dealt to waves without loss, and summed up without loss."""

import random

import pytest

from raymoe.plan.work import CELLS, Passes, PassLoad, alike


def random_load(dice: random.Random) -> PassLoad:
    chunk = dice.randint(1, 500)
    return PassLoad(
        decode_rows=dice.choice((0, dice.randint(1, 3000))),
        decode_context=dice.randint(1, 4000),
        prompt_tokens=dice.choice((0, chunk * dice.uniform(0.3, 30))),
        prompt_chunk=chunk,
    )


@pytest.mark.parametrize("seed", range(20))
def test_waves_hold_the_tokens_of_the_pass(seed: int) -> None:
    dice = random.Random(seed)
    load, num_waves = random_load(dice), dice.randint(1, 16)
    fraction = dice.choice((0.0, dice.random(), 1.0))
    waves = load.waves(num_waves, fraction)
    assert len(waves) == num_waves
    assert sum(wave.tokens for wave in waves) == pytest.approx(load.tokens)
    assert sum(wave.host.rows for wave in waves) == pytest.approx(fraction * load.decode_rows)
    pairs = sum(wave.host.pairs + wave.device.pairs for wave in waves)
    assert pairs == pytest.approx(load.decode_rows * load.decode_context)


def test_a_pass_of_prompts_decodes_nothing_in_any_wave() -> None:
    load = PassLoad(prompt_tokens=16384 / 7, prompt_chunk=100.1)
    for wave in load.waves(7, 0.5):
        assert (wave.host.rows, wave.device.decode_rows) == (0.0, 0.0)


def totals(passes: list[Passes]) -> list[float]:
    sums = [0.0] * 5
    for load, number in passes:
        rows = number * load.decode_rows
        parts = (
            number,
            rows,
            rows * load.decode_context,
            number * load.prompt_tokens,
            number * load.prompt_tokens / load.prompt_chunk,
        )
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_passes_that_are_alike_hold_together_what_they_held_apart(seed: int) -> None:
    dice = random.Random(seed)
    passes = [Passes(random_load(dice), dice.uniform(0.1, 50)) for _ in range(300)]
    few = alike(passes)
    assert len(few) <= (CELLS + 1) * CELLS * (CELLS + 1)
    assert totals(few) == pytest.approx(totals(passes))


def test_no_prompts_and_a_few_are_not_alike() -> None:
    decoding = PassLoad(decode_rows=100, decode_context=10)
    joined = PassLoad(decode_rows=100, decode_context=10, prompt_tokens=1)
    full = PassLoad(prompt_tokens=1000, prompt_chunk=10)
    assert sorted(
        number for _, number in alike([*map(Passes, (decoding, joined, full), (5, 3, 1))])
    ) == [1, 3, 5]
