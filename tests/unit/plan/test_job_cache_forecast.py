"""The forecast against one that adds up every step."""

import random

import pytest

from raymoe.plan.job import CacheForecast

Held = tuple[int, int, int]  # last step, sequences, their offset


def fits(held: list[Held], capacity: int) -> bool:
    """Whether what runs at any last step takes more than there is."""
    return all(
        sum(offset + count * step for last, count, offset in held if last >= step) <= capacity
        for step, _, _ in held
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_forecast_is_that_of_adding_up_every_step(seed: int) -> None:
    dice = random.Random(seed)
    capacity = dice.randint(200, 4000)
    forecast, held = CacheForecast(capacity), list[Held]()
    answers = set()
    for now in range(300):
        ended = forecast.end(now)
        assert ended.count == sum(count for last, count, _ in held if last == now)
        held = [each for each in held if each[0] > now]
        for _ in range(dice.randint(0, 4)):
            last, count = now + dice.randint(1, 40), dice.randint(1, 3)
            new = (last, count, count * (dice.randint(1, 60) - now))
            forecast.hold(*new)
            answers.add(forecast.fits)
            assert forecast.fits == fits([*held, new], capacity)
            if dice.random() < 0.5 and not forecast.fits:
                forecast.hold(last, -new[1], -new[2])
            else:
                held.append(new)
    assert answers == {True, False}


def test_an_empty_cache_fits() -> None:
    assert CacheForecast(0).fits
    assert not CacheForecast(0).end(3).count
