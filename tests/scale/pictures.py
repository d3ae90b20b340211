"""Pictures of runs with waiting engines: efficiency over actors, memory over time."""

from collections.abc import Mapping, Sequence

from raymoe.plan.draw import HEIGHT, LEFT, STYLE, TOP, WIDTH, Chart, Colour, note_at
from raymoe.schedule.draw import svg_page
from raymoe.units import GIB
from tests.scale.figures import Efficiency

HEADROOM = 1.1
TARGET = 95.0  # percent
LINE_HEIGHT = 20
MAX_POINTS = 600  # of a line
Series = Sequence[tuple[float, float]]


def draw_efficiency(found: Sequence[Efficiency], *, title: str) -> str:
    """Draw the share of n times the rate of one actor that n actors reach."""
    maximum = max(each.num_actors for each in found)
    chart = Chart.from_zero(HEADROOM * maximum, HEADROOM * 100)
    steady = [(each.num_actors, 100 * each.steady) for each in found]
    job = [(each.num_actors, 100 * each.job) for each in found]
    body = [
        *_frame(chart, "actors, each on a node of its own", "% of one actor's rate times actors"),
        chart.line([(0, TARGET), (HEADROOM * maximum, TARGET)], Colour.OTHER, width=1, dash="4 4"),
        chart.line(steady, Colour.GPU, width=2),
        *_legend(Colour.GPU, place=0, name="between first and last quarter of the tokens"),
        chart.line(job, Colour.CPU, width=2),
        *_legend(Colour.CPU, place=1, name="whole job, from when all actors were ready"),
        *(chart.dot(*point, Colour.GPU, radius=4) for point in steady),
        *(chart.dot(*point, Colour.CPU, radius=4) for point in job),
    ]
    return svg_page(title, WIDTH, HEIGHT, body, style=STYLE)


def draw_memory(memory: Mapping[str, Sequence[Series]], *, title: str) -> str:
    """Draw resident memory over time.

    Args:
        memory: (seconds, bytes) of processes, by the kind that stands in the legend; processes of
            a kind share a colour. At most as many kinds as there are colours.
        title: The heading.
    """
    kinds = {kind: [_minutes_and_gib(line) for line in lines] for kind, lines in memory.items()}
    points = [point for lines in kinds.values() for line in lines for point in line]
    chart = Chart.from_zero(
        max(time for time, _ in points) or 1.0,
        HEADROOM * max(used for _, used in points) * (1 + 0.06 * len(kinds)),
    )
    body = [*_frame(chart, "minutes", "resident memory, GiB")]
    for place, (colour, (kind, lines)) in enumerate(zip(Colour, kinds.items(), strict=False)):
        body += [chart.line(line, colour, width=2) for line in lines]
        body += _legend(colour, place=place, name=kind)
    return svg_page(title, WIDTH, HEIGHT, body, style=STYLE)


def _minutes_and_gib(points: Series) -> Series:
    thinned = points[:: max(1, len(points) // MAX_POINTS)]
    return [(time_s / 60, used / GIB) for time_s, used in thinned]


def _frame(chart: Chart, x_name: str, y_name: str) -> list[str]:
    x_labels = [f"{tick:g}" for tick in chart.x.ticks()]
    return list(chart.frame((x_name, y_name), x_labels, [f"{tick:g}" for tick in chart.y.ticks()]))


def _legend(colour: Colour, *, place: int, name: str) -> list[str]:
    y = TOP + LINE_HEIGHT * (place + 1)
    return [
        f'<path stroke="{colour}" stroke-width="3" d="M{LEFT + 16} {y - 4}h26"/>',
        note_at(LEFT + 50, y, name),
    ]
