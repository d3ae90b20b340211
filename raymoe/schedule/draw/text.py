"""Timelines in text: one line a lane, one letter a slice of time."""

from collections.abc import Sequence

from raymoe.schedule.draw.palette import LOOKS, ops_in_order
from raymoe.schedule.task import Op, Resource
from raymoe.schedule.timeline import Timeline

PARTLY_BUSY = "."
ROUNDING = 1e-9  # of a cell; what is left of a task that ends where the cell begins


def draw_text(timelines: Sequence[Timeline], *, columns: int = 80) -> str:
    """Draw timelines below each other on one time axis.

    A letter is the operation that took most of its slice of time; a dot a slice that was idle for
    more than half of it; a blank an idle one. The percentage is the busy share of the lane.

    Args:
        timelines: What to draw, each under its name.
        columns: Letters for the longest timeline.
    """
    longest_s = max((timeline.makespan_s for timeline in timelines), default=0.0)
    lanes = [
        (timeline, resource, name)
        for timeline in timelines
        for resource, name in _named_lanes(timeline)
    ]
    name_width = max((len(name) for _, _, name in lanes), default=0)
    lane_width = max((len(resource) for _, resource, _ in lanes), default=0)
    lines = [
        f"{name:<{name_width}}  {resource:<{lane_width}} "
        f"|{_cells(timeline, resource, longest_s, columns)}| "
        f"{100 * timeline.utilization(resource):3.0f}%"
        for timeline, resource, name in lanes
    ]
    ops = ops_in_order({span.task.op for timeline in timelines for span in timeline.spans})
    legend = "  ".join(f"{LOOKS[op].letter} {LOOKS[op].meaning}" for op in ops)
    return "\n".join([*lines, f"{longest_s:.3g} s wide: {legend}"])


def _named_lanes(timeline: Timeline) -> list[tuple[Resource, str]]:
    names = (timeline.name, *("" for _ in Resource))
    return list(zip(timeline.resources, names, strict=False))


def _cells(timeline: Timeline, resource: Resource, longest_s: float, columns: int) -> str:
    if not longest_s:
        return " " * columns
    cell_s = longest_s / columns
    busy: list[dict[Op, float]] = [{} for _ in range(columns)]
    for span in timeline.of(resource):
        for cell in range(int(span.start_s / cell_s), min(int(span.end_s / cell_s) + 1, columns)):
            end_s = min(span.end_s, (cell + 1) * cell_s)
            share = (end_s - max(span.start_s, cell * cell_s)) / cell_s
            busy[cell][span.task.op] = busy[cell].get(span.task.op, 0.0) + share
    return "".join(map(_letter, busy))


def _letter(shares: dict[Op, float]) -> str:
    total = sum(shares.values())
    if total < ROUNDING:
        return " "
    if total < 0.5:
        return PARTLY_BUSY
    return LOOKS[max(shares, key=lambda op: shares[op])].letter
