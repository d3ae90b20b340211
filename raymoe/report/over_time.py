"""Throughput, pool and KV cache of each actor over time, from the histories of their status."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from raymoe.data.status.record import HISTORY_COLUMNS, HistoryPoint
from raymoe.data.status.view import ActorView
from raymoe.report.series import MAX_LINES, Line, draw_series

TOKENS = HISTORY_COLUMNS.index("num_generated_tokens")
POOL_FILL, KV_USE = HISTORY_COLUMNS.index("pool_fill"), HISTORY_COLUMNS.index("kv_use")
MOMENTS = 120  # at which the sum of all actors is drawn

History = Sequence[HistoryPoint]


def throughput(actors: Sequence[ActorView], start_s: float) -> str:
    """Generated tokens per second of each actor, and of all of them.

    Args:
        actors: With histories.
        start_s: When the first of them began to load, in Unix time.
    """
    lines = _lines(actors, start_s, rates)
    if len(actors) > 1:
        lines.append(Line(name="all", points=_shifted(total_rates(_histories(actors)), start_s),
                          is_total=True))  # fmt: skip
    title = f"Generated tokens per second{_which(actors)}"
    return draw_series(lines, title=title)


def fills(actors: Sequence[ActorView], start_s: float) -> list[str]:
    """Shares of slots and of KV blocks in use, a picture each."""
    return [
        draw_series(
            _lines(actors, start_s, partial(levels, column=column)),
            title=f"{name}{_which(actors)}",
            unit=" %",
            most=100.0,
        )
        for column, name in ((POOL_FILL, "Slots in use"), (KV_USE, "KV blocks in use"))
    ]


def rates(history: History) -> list[tuple[float, float]]:
    """Tokens per second between neighbouring moments, at the later one."""
    return [
        (after[0], (after[TOKENS] - before[TOKENS]) / (after[0] - before[0]))
        for before, after in pairwise(history)
        if after[0] > before[0]
    ]


def levels(history: History, column: int) -> list[tuple[float, float]]:
    """A share at each moment, in percent."""
    return [(point[0], 100.0 * point[column]) for point in history]


def total_rates(histories: Sequence[History]) -> list[tuple[float, float]]:
    """Tokens per second of all actors at moments that are equally far apart."""
    begin_s = min(history[0][0] for history in histories)
    end_s = max(history[-1][0] for history in histories)
    step_s = (end_s - begin_s) / MOMENTS
    if not step_s > 0:
        return []
    moments = [begin_s + step_s * i for i in range(MOMENTS + 1)]
    counts = [sum(_count_at(history, moment) for history in histories) for moment in moments]
    return [
        (moment, (after - before) / step_s)
        for moment, before, after in zip(moments[1:], counts, counts[1:], strict=False)
    ]


def _count_at(history: History, moment_s: float) -> float:
    """Tokens at a moment: linear between two, constant before the first and after the last."""
    index = bisect_left(history, moment_s, key=lambda point: point[0])
    if index == 0:
        return history[0][TOKENS]
    if index == len(history):
        return history[-1][TOKENS]
    before, after = history[index - 1], history[index]
    share = (moment_s - before[0]) / (after[0] - before[0])
    return before[TOKENS] + share * (after[TOKENS] - before[TOKENS])


def _lines(
    actors: Sequence[ActorView],
    start_s: float,
    values: Callable[[History], list[tuple[float, float]]],
) -> list[Line]:
    return [
        Line(name=actor.status.actor, points=_shifted(values(actor.status.history), start_s))
        for actor in slowest(actors)
    ]


def slowest(actors: Sequence[ActorView]) -> list[ActorView]:
    """As many actors as a picture has place for: those with the fewest tokens, by name."""
    by_tokens = sorted(actors, key=lambda actor: actor.status.history[-1][TOKENS])
    return sorted(by_tokens[:MAX_LINES], key=lambda actor: actor.status.actor)


def _which(actors: Sequence[ActorView]) -> str:
    return f", the {MAX_LINES} slowest of {len(actors)} actors" if len(actors) > MAX_LINES else ""


def _histories(actors: Sequence[ActorView]) -> list[History]:
    return [actor.status.history for actor in actors]


def _shifted(points: list[tuple[float, float]], start_s: float) -> tuple[tuple[float, float], ...]:
    return tuple((max(0.0, seconds - start_s), value) for seconds, value in points)
