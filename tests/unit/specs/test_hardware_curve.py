"""Curves: exact on both sides of a roofline, constant where nothing was measured."""

import math
import random

import pytest

from raymoe.errors import ConfigError
from raymoe.specs.hardware import Curve


def test_measured_points_are_kept() -> None:
    random_points = random.Random()
    sizes = sorted(random_points.sample(range(1, 10**6), 20))
    points = tuple((float(size), random_points.uniform(1, 1e12)) for size in sizes)
    for size, value in points:
        assert Curve(points).at(size) == pytest.approx(value, rel=1e-12)


def test_a_roofline_is_exact_on_both_sides_of_its_knee() -> None:
    knee, slope = 16.0, 25e9
    roof = Curve(tuple((size, slope * min(size, knee)) for size in (1.0, knee, 4096.0)))
    for size in (1.3, 2, 7.9, 15, 16, 17, 900, 4000):
        assert roof.at(size) == pytest.approx(slope * min(size, knee))


def test_beyond_the_ends_it_is_constant() -> None:
    curve = Curve(((2.0, 10.0), (8.0, 40.0)))
    assert (curve.at(0.1), curve.at(1e9), curve.highest) == (10.0, 40.0, 40.0)
    assert Curve(((3.0, 7.0),)).at(100) == 7.0


@pytest.mark.parametrize(
    "points",
    [(), ((1.0, 0.0),), ((-1.0, 1.0),), ((1.0, math.nan),), ((2.0, 1.0), (1.0, 1.0))],
)
def test_points_without_meaning_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match=r"Curve\.points"):
        Curve(points)


def test_a_scaled_curve_is_higher_everywhere() -> None:
    curve, size = Curve(((1.0, 2.0), (8.0, 5.0), (64.0, 3.0))), random.uniform(0.1, 100)
    assert curve.scaled(3).at(size) == pytest.approx(3 * curve.at(size))
