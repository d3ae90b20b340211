"""What happened over time, in a fixed number of points: a run of days takes no more than one hour.

When there is no place for another point, every two become one, and from then on each stands for
twice as many samples.
"""

from raymoe.data.status.record import HISTORY_COLUMNS, HistoryPoint

MAX_POINTS = 240
NUM_SUMS = 4  # the time and counts in front of a point; means follow
WINDOW_S = 60.0  # that counts as now


class History:
    """Bounded time series of one actor; one thread adds."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        """Start empty.

        Args:
            max_points: An even number; one more stands for what is not yet a whole point.
        """
        self._max_points = max_points
        self._stride = 1
        self._pending: list[HistoryPoint] = []
        self._points: list[HistoryPoint] = []

    def add(self, sample: HistoryPoint) -> None:
        """Take a sample; samples come at equal intervals, more or less."""
        self._pending.append(sample)
        if len(self._pending) < self._stride:
            return
        if len(self._points) == self._max_points:
            self._points = list(map(merge, zip(self._points[::2], self._points[1::2], strict=True)))
            self._stride *= 2
            return
        self._points.append(merge(tuple(self._pending)))
        self._pending.clear()

    @property
    def points(self) -> tuple[HistoryPoint, ...]:
        """All that happened, up to the latest sample."""
        latest = [merge(tuple(self._pending))] if self._pending else []
        return (*self._points, *latest)


def merge(points: tuple[HistoryPoint, ...]) -> HistoryPoint:
    """One point for several: the latest sums, the mean of the means."""
    time_s, rows, prompt_tokens, generated_tokens, *_ = points[-1]
    fill, use = (sum(point[i] for point in points) / len(points) for i in (NUM_SUMS, NUM_SUMS + 1))
    return time_s, rows, prompt_tokens, generated_tokens, fill, use


def recent_rate(
    points: tuple[HistoryPoint, ...], column: str, window_s: float = WINDOW_S
) -> float | None:
    """How much a count grew per second at the end of a history.

    Args:
        points: In order of time.
        column: A count of `HISTORY_COLUMNS`.
        window_s: How long the end is.

    Returns:
        None before there are two moments.
    """
    index = HISTORY_COLUMNS.index(column)
    if len(points) < 2:
        return None
    last = points[-1]
    first = next((p for p in reversed(points[:-1]) if last[0] - p[0] >= window_s), points[0])
    seconds = last[0] - first[0]
    return (last[index] - first[index]) / seconds if seconds > 0 else None
