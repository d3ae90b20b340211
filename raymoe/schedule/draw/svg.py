"""Timelines as an SVG Gantt chart: lanes as rows, one time axis, a colour for each operation."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.schedule.draw.page import round_step, svg_page, text_at
from raymoe.schedule.draw.palette import LOOKS, ops_in_order
from raymoe.schedule.task import Op
from raymoe.schedule.timeline import Span, Timeline

WIDTH = 1200
LEFT, RIGHT = 96, 64  # of the bars; beside them stand lane names and busy shares
LANE_HEIGHT, BAR_HEIGHT = 20, 16
HEADING_HEIGHT = 26
LEGEND_COLUMN = 138
LETTER_WIDTH = 6.2  # of the labels in bars
MIN_BAR = 0.15  # px; a lane of many short tasks would look busier than it is if they were wider
WIDE_BAR = 4.0  # px; those leave a hair's breadth to the next one
HAIR = 0.6
NUM_TICKS = 10


@dataclass(frozen=True, slots=True)
class _Axis:
    """Seconds to pixels; the axis is `longest_s` long."""

    longest_s: float

    def x(self, seconds: float) -> float:
        share = seconds / self.longest_s if self.longest_s else 0.0
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> tuple[float, ...]:
        if not self.longest_s:
            return (0.0,)
        step_s = round_step(self.longest_s / NUM_TICKS)
        return tuple(step_s * index for index in range(int(self.longest_s / step_s + 1e-9) + 1))

    def label(self, seconds: float) -> str:
        for unit, scale in (("s", 1.0), ("ms", 1e3)):
            if self.longest_s * scale >= 1.0:
                return f"{seconds * scale:.4g} {unit}"
        return f"{seconds * 1e6:.4g} µs"


def draw_svg(timelines: Sequence[Timeline], *, title: str) -> str:
    """Draw timelines below each other on one time axis.

    The percentage at the right of a lane is its busy share of its own timeline. Readable on light
    and on dark pages.

    Args:
        timelines: What to draw, each under its name and makespan.
        title: The heading of the picture.
    """
    axis = _Axis(max((timeline.makespan_s for timeline in timelines), default=0.0))
    body: list[str] = []
    top = 44.0
    for timeline in timelines:
        body += _timeline(timeline, axis, top)
        top += HEADING_HEIGHT + LANE_HEIGHT * len(timeline.resources)
    bottom = top + 8
    ops = ops_in_order({span.task.op for timeline in timelines for span in timeline.spans})
    legend = list(_legend(ops, bottom + 30))
    height = bottom + 34 + LANE_HEIGHT * math.ceil(len(ops) / _legend_columns())
    return svg_page(title, WIDTH, height, [*_grid(axis, 44.0, bottom), *body, *legend])


def _grid(axis: _Axis, top: float, bottom: float) -> Iterator[str]:
    for seconds in axis.ticks():
        x = axis.x(seconds)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>'
        yield text_at(x, bottom + 14, axis.label(seconds), "middle")


def _timeline(timeline: Timeline, axis: _Axis, top: float) -> Iterator[str]:
    heading = f"{timeline.name}: {axis.label(timeline.makespan_s)}"
    yield text_at(LEFT, top + 17, heading, "name")
    for row, resource in enumerate(timeline.resources):
        y = top + HEADING_HEIGHT + row * LANE_HEIGHT
        end = axis.x(timeline.makespan_s)
        yield text_at(LEFT - 8, y + 12, resource.value, "end")
        yield f'<rect class="lane" x="{LEFT}" y="{y:g}" width="{end - LEFT:.1f}" height="16"/>'
        yield from _bars(timeline.of(resource), axis, y)
        share = f"{100 * timeline.utilization(resource):.0f} %"
        yield text_at(WIDTH - 12, y + 12, share, "end")


def _bars(spans: Sequence[Span], axis: _Axis, y: float) -> Iterator[str]:
    """One path an operation, so that ten thousands of tasks stay a small file; then labels."""
    for op in ops_in_order({span.task.op for span in spans}):
        bars = _joined([span for span in spans if span.task.op is op], axis)
        outline = "".join(
            f"M{x:.2f} {y:g}h{width:.2f}v{BAR_HEIGHT}h-{width:.2f}z" for x, width in bars
        )
        yield f'<path fill="{LOOKS[op].colour}" d="{outline}"/>'
    for span in spans:
        width = axis.x(span.end_s) - axis.x(span.start_s)
        for text in (f"{span.task.op} {span.task.part}", str(span.task.part)):
            if LETTER_WIDTH * (len(text) + 1) < width:
                yield _bar_label(text, span, axis, y)
                break


def _bar_label(text: str, span: Span, axis: _Axis, y: float) -> str:
    x = (axis.x(span.start_s) + axis.x(span.end_s)) / 2
    return text_at(x, y + 11.5, text, "label middle", colour=LOOKS[span.task.op].ink)


def _joined(spans: Sequence[Span], axis: _Axis) -> list[tuple[float, float]]:
    """Left edge and width of each bar; narrow ones that touch become one."""
    bars: list[tuple[float, float]] = []
    for span in spans:
        x, width = axis.x(span.start_s), axis.x(span.end_s) - axis.x(span.start_s)
        if width > WIDE_BAR:
            bars.append((x, width - HAIR))
        elif bars and bars[-1][1] <= WIDE_BAR and x - sum(bars[-1]) < MIN_BAR:
            bars[-1] = (bars[-1][0], x + max(width, MIN_BAR) - bars[-1][0])
        else:
            bars.append((x, max(width, MIN_BAR)))
    return bars


def _legend_columns() -> int:
    return (WIDTH - LEFT) // LEGEND_COLUMN


def _legend(ops: Sequence[Op], top: float) -> Iterator[str]:
    for index, op in enumerate(ops):
        row, column = divmod(index, _legend_columns())
        x, y = LEFT + column * LEGEND_COLUMN, top + row * LANE_HEIGHT
        look = LOOKS[op]
        yield f'<rect x="{x}" y="{y:g}" width="12" height="12" fill="{look.colour}"/>'
        yield text_at(x + 18, y + 10, f"{op}: {look.meaning}", "label")
