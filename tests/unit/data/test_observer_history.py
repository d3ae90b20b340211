"""Time series stay bounded and keep what they summed up."""

import pytest

from raymoe.data.observer import History, recent_rate


def sample(number, fill=0.5):
    return (float(number), 2.0 * number, 3.0 * number, 5.0 * number, fill, 1.0 - fill)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 86_400])
def test_a_run_of_any_length_takes_a_fixed_number_of_points(count):
    history = History(max_points=8)
    for number in range(count):
        history.add(sample(number, fill=number % 2))
        assert number % 997 or len(history.points) <= 9
    points = history.points
    assert len(points) <= 9
    assert points[-1][:4] == sample(count - 1)[:4]  # nothing of a sum is lost
    assert [point[0] for point in points] == sorted({point[0] for point in points})
    assert len(points) >= min(count, 4)


def test_points_stand_for_equal_times_and_their_fills_are_means():
    history = History(max_points=4)
    for number in range(16):
        history.add(sample(number, fill=1.0 if number >= 8 else 0.0))
    assert [point[0] for point in history.points] == [3.0, 7.0, 11.0, 15.0]
    assert [point[4] for point in history.points] == [0.0, 0.0, 1.0, 1.0]
    assert [point[5] for point in history.points] == [1.0, 1.0, 0.0, 0.0]


def test_the_recent_rate_is_that_of_the_last_minute():
    slow = [(float(t), 0.0, 0.0, 1.0 * t, 0.0, 0.0) for t in range(0, 100, 10)]
    fast = [(float(t), 0.0, 0.0, 100 + 7.0 * (t - 100), 0.0, 0.0) for t in range(100, 170, 10)]
    assert recent_rate((*slow, *fast), "num_tokens") == 7
    assert recent_rate(tuple(slow[:3]), "num_tokens") == 1
    assert recent_rate(tuple(slow[:1]), "num_tokens") is None
    assert recent_rate((slow[0], slow[0]), "num_tokens") is None
