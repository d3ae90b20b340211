"""Loads: dealt to micro-batches without loss, and summed up without loss."""

import random

import pytest

from raymoe.plan.work import CELLS, Repeated, StepLoad, duplicates


def random_load(dice: random.Random) -> StepLoad:
    chunk = dice.randint(1, 500)
    return StepLoad(
        decode_rows=dice.choice((0, dice.randint(1, 3000))),
        decode_context=dice.randint(1, 4000),
        prompt_tokens=dice.choice((0, chunk * dice.uniform(0.3, 30))),
        prompt_chunk=chunk,
    )


@pytest.mark.parametrize("seed", range(20))
def test_waves_hold_the_tokens_of_the_pass(seed: int) -> None:
    dice = random.Random(seed)
    load, num_micro_batches = random_load(dice), dice.randint(1, 16)
    fraction = dice.choice((0.0, dice.random(), 1.0))
    micro_batches = load.micro_batches(num_micro_batches, fraction)
    assert len(micro_batches) == num_micro_batches
    assert sum(micro_batch.tokens for micro_batch in micro_batches) == pytest.approx(load.tokens)
    assert sum(micro_batch.host.rows for micro_batch in micro_batches) == pytest.approx(
        fraction * load.decode_rows
    )
    pairs = sum(micro_batch.host.pairs + micro_batch.device.pairs for micro_batch in micro_batches)
    assert pairs == pytest.approx(load.decode_rows * load.decode_context)


def test_a_pass_of_prompts_decodes_nothing_in_any_wave() -> None:
    load = StepLoad(prompt_tokens=16384 / 7, prompt_chunk=100.1)
    for micro_batch in load.micro_batches(7, 0.5):
        assert (micro_batch.host.rows, micro_batch.device.decode_rows) == (0.0, 0.0)


def test_decoding_rows_are_spread_whatever_the_prompts() -> None:
    load = StepLoad(decode_rows=60, decode_context=200, prompt_tokens=210, prompt_chunk=70)
    shapes = load.micro_batches(2, 1.0)
    assert [shape.host.decode_rows for shape in shapes] == [30, 30]
    assert [shape.tokens for shape in shapes] == [170, 100]


def totals(steps: list[Repeated]) -> list[float]:
    sums = [0.0] * 5
    for load, number in steps:
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
    steps = [Repeated(random_load(dice), dice.uniform(0.1, 50)) for _ in range(300)]
    few = duplicates(steps)
    assert len(few) <= (CELLS + 1) * CELLS * (CELLS + 1)
    assert totals(few) == pytest.approx(totals(steps))


def test_no_prompts_and_a_few_are_not_alike() -> None:
    decoding = StepLoad(decode_rows=100, decode_context=10)
    joined = StepLoad(decode_rows=100, decode_context=10, prompt_tokens=1)
    full = StepLoad(prompt_tokens=1000, prompt_chunk=10)
    assert sorted(
        number for _, number in duplicates([*map(Repeated, (decoding, joined, full), (5, 3, 1))])
    ) == [1, 3, 5]
