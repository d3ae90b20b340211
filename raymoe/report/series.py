"""Values over time, as SVG: a line for each actor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymoe.plan.draw import STYLE, Colour, Scale
from raymoe.safe_text import harmless
from raymoe.schedule.draw import svg_page, text_at

WIDTH, PLOT_HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 44, 44  # margins of the plot; the legend stands above it
LEGEND_LINE, LEGEND_COLUMNS = 18, 3
MAX_NAME = 36  # letters of a name in the legend
COLOURS = (Colour.GPU, Colour.CPU, Colour.GPU_MEMORY, Colour.OTHER, Colour.LINK, "#56b4e9")
MAX_LINES = 2 * len(COLOURS)  # the second half is dashed
INK = "#7f8a96"  # readable on light and dark
HEADROOM = 1.05
UNITS = ((3 * 86_400.0, 86_400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"))

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Values of one thing.

    Attributes:
        points: Seconds since the start, and value.
        is_total: Whether it is the sum of the others, drawn thick.
    """

    name: str
    points: tuple[Point, ...]
    is_total: bool = False


def draw_series(
    lines: Sequence[Line], *, title: str, unit: str = "", most: float | None = None
) -> str:
    """Draw lines over time.

    Args:
        lines: At most `MAX_LINES`, and a total.
        title: The heading.
        unit: Behind each number of the axis.
        most: Top of the axis; None for what the values need.
    """
    points = [point for line in lines for point in line.points]
    end_s = max((seconds for seconds, _ in points), default=0.0) or 1.0
    top = most or HEADROOM * max((value for _, value in points), default=0.0) or 1.0
    rows = -(-len(lines) // LEGEND_COLUMNS)
    plot_top = TOP + LEGEND_LINE * rows
    x = Scale(0.0, end_s, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, top, plot_top + PLOT_HEIGHT, plot_top)
    body = [*_frame(x, y, unit), *_lines(lines, x, y), *_legend(lines)]
    return svg_page(harmless(title), WIDTH, plot_top + PLOT_HEIGHT + BOTTOM, body, style=STYLE)


def _frame(x: Scale, y: Scale, unit: str) -> Iterator[str]:
    scale, name = next(
        ((seconds, name) for least, seconds, name in UNITS if x.most >= least), (1.0, "seconds")
    )
    time = Scale(0.0, x.most / scale, x.low, x.high)
    for tick in time.ticks():
        at = time.at(tick)
        yield f'<path class="tick" d="M{at:.1f} {y.high:.1f}V{y.low:.1f}"/>'
        yield text_at(at, y.low + 17, f"{tick:g}", "middle")
    for tick in y.ticks():
        at = y.at(tick)
        yield f'<path class="tick" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield text_at(LEFT - 8, at + 4, f"{tick:,g}{unit}", "end")
    yield text_at(WIDTH - RIGHT, y.low + 34, name, "end")


def _lines(lines: Sequence[Line], x: Scale, y: Scale) -> Iterator[str]:
    for index, line in enumerate(lines):
        pixels = [f"{x.at(seconds):.1f} {y.at(value):.1f}" for seconds, value in line.points]
        if len(pixels) == 1:
            left, top = pixels[0].split()
            yield f'<circle cx="{left}" cy="{top}" r="3" fill="{_colour(index, line)}"/>'
        if len(pixels) > 1:
            yield f'<path fill="none" {_stroke(index, line)} d="M{"L".join(pixels)}"/>'


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    width = (WIDTH - LEFT - RIGHT) / LEGEND_COLUMNS
    for index, line in enumerate(lines):
        row, column = divmod(index, LEGEND_COLUMNS)
        left, top = LEFT + column * width, TOP + row * LEGEND_LINE
        yield f'<path {_stroke(index, line)} d="M{left:.1f} {top - 4}h22"/>'
        yield text_at(left + 30, top, short(harmless(line.name)), "name" if line.is_total else "")


def _stroke(index: int, line: Line) -> str:
    is_dashed = index % MAX_LINES >= len(COLOURS) and not line.is_total
    dashes = ' stroke-dasharray="6 4"' if is_dashed else ""
    width = 3 if line.is_total else 1.75
    return f'stroke="{_colour(index, line)}" stroke-width="{width}" stroke-linejoin="round"{dashes}'


def _colour(index: int, line: Line) -> str:
    return INK if line.is_total else COLOURS[index % len(COLOURS)]


def short(name: str) -> str:
    """A name that fits, cut in the middle: both ends of a host's name tell something."""
    if len(name) <= MAX_NAME:
        return name
    half = (MAX_NAME - 3) // 2
    return f"{name[:half]}...{name[-half:]}"
