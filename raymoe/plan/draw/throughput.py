"""Throughput over host memory: what more memory gains, and where something else limits.

After MoE-Lightning (ASPLOS 2025), figure 1, and MoE-Lens (2025), figure 3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from raymoe.errors import ConfigError
from raymoe.plan.draw.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER_WIDTH,
    RIGHT,
    STYLE,
    TOP,
    WIDTH,
    Chart,
    Colour,
    note_at,
)
from raymoe.schedule.draw.page import svg_page
from raymoe.units import GIB, format_bytes

NAMES = ("host memory, GiB", "generated tokens per second")
COLOURS = (Colour.GPU, Colour.CPU, Colour.GPU_MEMORY, Colour.OTHER, Colour.LINK)
HEADROOM = 1.05
LEGEND_TOP, LEGEND_HEIGHT = 22, 20  # above its first line, and of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One plan: how fast with how much memory, and what limits it."""

    host_memory_bytes: float
    tokens_per_s: float
    bound: str = ""

    def __post_init__(self) -> None:
        for field in ("host_memory_bytes", "tokens_per_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"CurvePoint.{field} is {value!r}; it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Plans that differ in host memory alone.

    Attributes:
        name: For the legend.
        points: In order of memory.
        is_bound: Whether it is a bound, which is drawn dashed.
    """

    name: str
    points: tuple[CurvePoint, ...]
    is_bound: bool = False


def draw_throughput(
    curves: Sequence[Curve],
    *,
    title: str,
    weight_bytes: float = 0.0,
    chosen: CurvePoint | None = None,
) -> str:
    """Draw throughput over host memory; where what limits a curve changes, its name is noted.

    Args:
        curves: At most five.
        title: The heading.
        weight_bytes: Host memory that the weights take, below which nothing runs.
        chosen: A plan to point out.

    Raises:
        ConfigError: There is nothing to draw, or too much.
    """
    marked = [point for curve in curves for point in curve.points]
    marked += [chosen] if chosen else []
    if not marked or len(curves) > len(COLOURS):
        raise ConfigError(
            f"draw_throughput: {len(marked)} points on {len(curves)} curves; "
            f"it draws at least one point on at most {len(COLOURS)} curves"
        )
    above = LEGEND_TOP + LEGEND_HEIGHT * len(curves)
    chart = Chart.from_zero(
        HEADROOM * max(point.host_memory_bytes for point in marked) / GIB,
        max(point.tokens_per_s for point in marked) / (1 - above / (HEIGHT - TOP - BOTTOM)),
    )
    return svg_page(
        title,
        WIDTH,
        HEIGHT,
        [
            *_weights(chart, weight_bytes),
            *chart.frame(
                NAMES,
                [f"{tick:g}" for tick in chart.x.ticks()],
                [f"{tick:,g}" for tick in chart.y.ticks()],
            ),
            *(
                element
                for curve, colour in zip(curves, COLOURS, strict=False)
                for element in _curve(chart, curve, colour)
            ),
            *_legend(curves),
            *(_chosen(chart, chosen) if chosen else ()),
        ],
        style=STYLE,
    )


def _weights(chart: Chart, weight_bytes: float) -> Iterator[str]:
    if weight_bytes:
        width = chart.x.at(weight_bytes / GIB) - LEFT
        height = HEIGHT - TOP - BOTTOM
        yield f'<rect class="lane" x="{LEFT}" y="{TOP}" width="{width:.1f}" height="{height}"/>'
        text = f"weights {format_bytes(weight_bytes)}"
        is_inside = width > LETTER_WIDTH * len(text)
        x, style = (LEFT + width - 8, "end") if is_inside else (LEFT + width + 8, "")
        yield note_at(x, HEIGHT - BOTTOM - 12, text, style)


def _curve(chart: Chart, curve: Curve, colour: Colour) -> Iterator[str]:
    """The line, a dot where what limits changes, and its name in the middle of each part."""
    points = [(point.host_memory_bytes / GIB, point.tokens_per_s) for point in curve.points]
    yield chart.line(points, colour, width=3, dash="8 5" if curve.is_bound else "")
    for index, (bound, run) in enumerate(groupby(curve.points, key=lambda point: point.bound)):
        part = [(point.host_memory_bytes / GIB, point.tokens_per_s) for point in run]
        if index:
            yield chart.dot(*part[0], colour, radius=4)
        x, y = chart.pixel(*part[len(part) // 2])
        is_right = x > WIDTH - RIGHT - LETTER_WIDTH * len(bound) - 20
        note_x, style = (x - 10, "end") if is_right else (x + 10, "")
        yield note_at(note_x, y + 18, bound, style, colour=colour)


def _legend(curves: Sequence[Curve]) -> Iterator[str]:
    """Above all curves."""
    for index, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        y = TOP + LEGEND_TOP + LEGEND_HEIGHT * index
        dash = ' stroke-dasharray="8 5"' if curve.is_bound else ""
        yield (f'<path stroke="{colour}" stroke-width="3"{dash} d="M{LEFT + 16} {y - 4}h26"/>')
        yield note_at(LEFT + 50, y, curve.name)


def _chosen(chart: Chart, chosen: CurvePoint) -> Iterator[str]:
    x = chosen.host_memory_bytes / GIB
    yield chart.diamond(x, chosen.tokens_per_s, Colour.OTHER)
    left, top = chart.pixel(x, chosen.tokens_per_s)
    text = f"chosen: {chosen.tokens_per_s:.4g} tokens/s"
    yield note_at(left - 10, top - 12, text, "end name")
