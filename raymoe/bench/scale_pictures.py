"""Pictures of runs with waiting engines: efficiency over actors, memory over time."""

from collections.abc import Mapping, Sequence

from raymoe.bench.scale import Efficiency
from raymoe.plan.draw.chart import HEIGHT, LEFT, STYLE, TOP, WIDTH, Chart, Colour, note_at
from raymoe.schedule.draw.page import svg_page
from raymoe.units import GIB

HEADROOM = 1.1
TARGET = 95.0  # percent
LINE_HEIGHT = 20
MOST_POINTS = 600  # of a line
Series = Sequence[tuple[float, float]]


def draw_efficiency(found: Sequence[Efficiency], *, title: str) -> str:
    """Draw the share of n times the rate of one actor that n actors reach."""
    most = max(each.num_actors for each in found)
    chart = Chart.from_zero(HEADROOM * most, HEADROOM * 100)
    steady = [(each.num_actors, 100 * each.steady) for each in found]
    job = [(each.num_actors, 100 * each.job) for each in found]
    body = [
        *_frame(chart, "actors, each on a node of its own", "% of one actor's rate times actors"),
        chart.line([(0, TARGET), (HEADROOM * most, TARGET)], Colour.OTHER, width=1, dash="4 4"),
        *_line(
            chart, steady, Colour.GPU, place=0, name="between first and last quarter of the tokens"
        ),
        *_line(chart, job, Colour.CPU, place=1, name="whole job, from when all actors were ready"),
        *(chart.dot(*point, Colour.GPU, radius=4) for point in steady),
        *(chart.dot(*point, Colour.CPU, radius=4) for point in job),
    ]
    return svg_page(title, WIDTH, HEIGHT, body, style=STYLE)


def draw_memory(memory: Mapping[str, Series], *, title: str) -> str:
    """Draw resident memory over time.

    Args:
        memory: (seconds, bytes) of each process, by its name for the legend; at most five.
        title: The heading.
    """
    lines = {
        name: [(time_s / 60, used / GIB) for time_s, used in _thinned(points)]
        for name, points in memory.items()
    }
    points = [point for line in lines.values() for point in line]
    chart = Chart.from_zero(
        max(time for time, _ in points) or 1.0,
        HEADROOM * max(used for _, used in points) * (1 + 0.06 * len(lines)),
    )
    body = [*_frame(chart, "minutes", "resident memory, GiB")]
    for place, (colour, (name, line)) in enumerate(zip(Colour, lines.items(), strict=False)):
        body += _line(chart, line, colour, place=place, name=name)
    return svg_page(title, WIDTH, HEIGHT, body, style=STYLE)


def _thinned(points: Series) -> Series:
    return points[:: max(1, len(points) // MOST_POINTS)]


def _frame(chart: Chart, x_name: str, y_name: str) -> list[str]:
    x_labels = [f"{tick:g}" for tick in chart.x.ticks()]
    return list(chart.frame((x_name, y_name), x_labels, [f"{tick:g}" for tick in chart.y.ticks()]))


def _line(chart: Chart, points: Series, colour: Colour, *, place: int, name: str) -> list[str]:
    y = TOP + LINE_HEIGHT * (place + 1)
    return [
        chart.line(points, colour, width=2),
        f'<path stroke="{colour}" stroke-width="3" d="M{LEFT + 16} {y - 4}h26"/>',
        note_at(LEFT + 50, y, name),
    ]
