"""Expected lengths and the future peak of the cache, against brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.engine.scheduler import MIN_HISTORY, LengthForecast, count_admissible

SEQUENCES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), max_size=8)


def arrays(sequences):
    pairs = np.array(sequences, np.int64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def simulated_peak(sequences) -> int:
    return max(
        (
            sum(tokens + time for tokens, remaining in sequences if remaining >= time)
            for time in range(41)
        ),
        default=0,
    )


@given(SEQUENCES, SEQUENCES, st.integers(0, 600))
@settings(deadline=None)
def test_sequences_are_admitted_until_the_peak_exceeds_the_capacity(live, waiting, capacity):
    count = count_admissible(arrays(live), arrays(waiting), capacity)
    fits = [
        simulated_peak(live + waiting[: number + 1]) <= capacity for number in range(len(waiting))
    ]
    assert count == (fits.index(False) if False in fits else len(waiting))


def remaining(forecast, generated, limit, is_fixed=False):
    lengths = np.array([generated]), np.array([limit])
    return int(forecast.remaining(*lengths, np.array([is_fixed]))[0])


def test_without_history_a_row_counts_as_long_as_it_may_become():
    forecast = LengthForecast()
    for _ in range(MIN_HISTORY - 1):
        forecast.record_finished(1)
    assert remaining(forecast, 10, 100) == 90
    forecast.record_finished(1)
    assert remaining(forecast, 0, 100) == 1


def test_expectation_is_the_mean_of_rows_that_became_longer():
    forecast = LengthForecast()
    for length in [10] * 50 + [60] * 50:
        forecast.record_finished(length)
    assert remaining(forecast, 0, 1000) == 35
    assert remaining(forecast, 20, 1000) == 40
    assert remaining(forecast, 20, 30) == 10
    assert remaining(forecast, 60, 1000) == 940
    assert remaining(forecast, 20, 1000, is_fixed=True) == 980


def test_preemption_makes_the_forecast_careful_and_finished_rows_make_it_bold_again():
    forecast = LengthForecast()
    for _ in range(100):
        forecast.record_finished(10)
    forecast.record_preemption()
    careful = remaining(forecast, 0, 1000)
    assert careful > 200
    for _ in range(500):
        forecast.record_finished(10)
    assert remaining(forecast, 0, 1000) < 20
