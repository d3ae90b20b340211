"""Two axes and what is drawn between them, as SVG."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raymoe.schedule.draw.page import round_step, text_at

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 92, 28, 68, 58  # margins of the plot
NUM_TICKS = 8
LETTER_WIDTH = 6.4  # of a note
STYLE = """
.note { paint-order: stroke; stroke: #ffffff; stroke-width: 4; stroke-linejoin: round }
.mark { stroke: #ffffff; stroke-width: 1.5 } .axis { stroke: #8b939c; fill: none }
@media (prefers-color-scheme: dark) { .note, .mark { stroke: #16191d } .axis { stroke: #6b747e } }
"""


class Colour(StrEnum):
    """Of Okabe and Ito, as for the operations that use the same resource in a Gantt chart."""

    CPU = "#d55e00"
    LINK = "#e69f00"
    GPU_MEMORY = "#009e73"
    GPU = "#0072b2"
    OTHER = "#cc79a7"


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels along one axis.

    Attributes:
        least: Value at pixel `low`.
        most: Value at pixel `high`.
        is_log: Whether equal factors take equal lengths.
    """

    least: float
    most: float
    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; what lies beyond an end is moved there."""
        value = min(max(value, self.least), self.most)
        if self.is_log:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return self.low + share * (self.high - self.low)

    def ticks(self) -> tuple[float, ...]:
        """Powers of ten, or round steps."""
        if self.is_log:
            first, last = (math.ceil(math.log10(v) - 1e-9) for v in (self.least, self.most))
            return tuple(10.0**power for power in range(first, last + 1))
        step = round_step((self.most - self.least) / NUM_TICKS)
        first = math.ceil(self.least / step - 1e-9)
        return tuple(step * i for i in range(first, int(self.most / step + 1e-9) + 1))


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot: both scales and the elements that lie in it."""

    x: Scale
    y: Scale

    @classmethod
    def decades(cls, x_values: Iterable[float], y_values: Iterable[float]) -> "Chart":
        """Logarithmic axes from whole powers of ten to whole powers of ten around the values."""
        (left, right), (bottom, top) = _decades(x_values), _decades(y_values)
        return cls(
            Scale(left, right, LEFT, WIDTH - RIGHT, is_log=True),
            Scale(bottom, top, HEIGHT - BOTTOM, TOP, is_log=True),
        )

    @classmethod
    def from_zero(cls, x_most: float, y_most: float) -> "Chart":
        """Linear axes from zero."""
        return cls(
            Scale(0.0, x_most, LEFT, WIDTH - RIGHT), Scale(0.0, y_most, HEIGHT - BOTTOM, TOP)
        )

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies."""
        return self.x.at(x), self.y.at(y)

    def frame(
        self,
        names: tuple[str, str],
        x_labels: Sequence[str],
        y_labels: Sequence[str],
    ) -> Iterator[str]:
        """Grid, tick labels and names of both axes; one label for each tick."""
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value, label in zip(self.x.ticks(), x_labels, strict=True):
            x = self.x.at(value)
            yield f'<path class="tick" d="M{x:.1f} {TOP}V{bottom}"/>'
            yield text_at(x, bottom + 18, label, "middle")
        for value, label in zip(self.y.ticks(), y_labels, strict=True):
            y = self.y.at(value)
            yield f'<path class="tick" d="M{LEFT} {y:.1f}H{right}"/>'
            yield text_at(LEFT - 8, y + 4, label, "end")
        yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        yield text_at((LEFT + right) / 2, HEIGHT - 14, names[0], "middle name")
        yield text_at(16, TOP - 16, names[1], "name")

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        width: float = 2,
        dash: str = "",
    ) -> str:
        """A line through points."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return (
            f'<path fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes} '
            f'stroke-linejoin="round" d="{self._outline(points)}"/>'
        )

    def area(self, points: Iterable[tuple[float, float]], colour: str) -> str:
        """What lies below a line, lightly."""
        corners = list(points)
        down = [(corners[-1][0], self.y.least), (corners[0][0], self.y.least)]
        return (
            f'<path fill="{colour}" fill-opacity="0.12" d="{self._outline([*corners, *down])}z"/>'
        )

    def dot(self, x: float, y: float, colour: str, *, radius: float = 6) -> str:
        """A point."""
        left, top = self.pixel(x, y)
        return (
            f'<circle class="mark" cx="{left:.1f}" cy="{top:.1f}" r="{radius:g}" fill="{colour}"/>'
        )

    def diamond(self, x: float, y: float, colour: str) -> str:
        """A turning point."""
        left, top = self.pixel(x, y)
        return f'<path class="mark" fill="{colour}" d="M{left:.1f} {top - 8:.1f}l8 8l-8 8l-8 -8z"/>'

    def _outline(self, points: Iterable[tuple[float, float]]) -> str:
        pixels = (self.pixel(x, y) for x, y in points)
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)


def note_at(
    x: float, y: float, text: str, style: str = "", *, angle: float = 0.0, colour: str = ""
) -> str:
    """A line of text that stays readable on top of lines, turned by an angle in degrees."""
    note = text_at(x, y, text, f"note {style}".rstrip(), colour=colour)
    return f'<g transform="rotate({angle:.1f} {x:.1f} {y:.1f})">{note}</g>' if angle else note


def _decades(values: Iterable[float]) -> tuple[float, float]:
    present = [value for value in values if 0 < value < math.inf]
    low, high = math.floor(math.log10(min(present))), math.ceil(math.log10(max(present)))
    return 10.0**low, 10.0 ** max(high, low + 1)
