"""The roofs of a node over operational intensity, turning points, and operations under them.

After MoE-Lightning (ASPLOS 2025), figures 4 and 5: the horizontal axis is the intensity at host
memory. Left of P1 the CPU is the better place, between P1 and P2 the link limits, to the right of
P2 the GPU does.
"""

import math
from collections.abc import Iterator, Sequence

from raymoe.plan.draw.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER_WIDTH,
    RIGHT,
    STYLE,
    WIDTH,
    Chart,
    Colour,
    note_at,
)
from raymoe.plan.papers.hrm import Hierarchy, Level, Operation, Placement, Point, Roof
from raymoe.schedule.draw.page import svg_page
from raymoe.units import GB, MB, TB

NAMES = ("operations per byte of host memory", "operations per second")
LIMITS = {Roof.COMPUTE: "GPU", Roof.MEMORY: "GPU memory", Roof.LINK: "link"}
COLOURS = {Roof.COMPUTE: Colour.GPU, Roof.MEMORY: Colour.GPU_MEMORY, Roof.LINK: Colour.LINK}


def draw_roofline(
    hierarchy: Hierarchy, chosen: Placement, others: Sequence[Placement] = (), *, title: str
) -> str:
    """Draw the roofs of a node with P1, the P2 of one operation, and where operations sit.

    Args:
        hierarchy: The node.
        chosen: The operation whose P2 and regions are drawn: the experts of a policy.
        others: More operations, as points: attention.
        title: The heading.
    """
    sits = (chosen, *others)
    x_values = [0.3, 3e3, 3 * chosen.p2.flop_per_byte]
    x_values += [p.operation.far_intensity * factor for p in sits for factor in (1 / 3, 3)]
    floor = hierarchy.link_bytes_per_s * min(x for x in x_values if x > 0)
    chart = Chart.decades(x_values, [floor, hierarchy.near.flop_per_s * 2])
    return svg_page(
        title,
        WIDTH,
        HEIGHT,
        [
            *chart.frame(
                NAMES,
                [f"{tick:,g}" for tick in chart.x.ticks()],
                [_rate(tick) for tick in chart.y.ticks()],
            ),
            *_regions(chart, hierarchy, chosen),
            *_roofs(chart, hierarchy),
            *_kernel(chart, chosen),
            *_turning_points(chart, chosen),
            *(element for placement in sits for element in _operation(chart, placement)),
        ],
        style=STYLE,
    )


def draw_host_roofline(host: Level, operations: Sequence[Operation], *, title: str) -> str:
    """Draw the two roofs of a node without a GPU, and what is attainable for operations there.

    Args:
        host: Cores and memory.
        operations: Of a pass.
        title: The heading.
    """
    intensities = [operation.far_intensity for operation in operations]
    x_values = [host.turning_point / 30, host.turning_point * 30]
    x_values += [x * factor for x in intensities for factor in (1 / 3, 3)]
    chart = Chart.decades(x_values, [host.attainable(min(x_values)), host.flop_per_s * 2])
    ends = ((chart.x.least, host.flop_per_s), (chart.x.most, host.flop_per_s))
    return svg_page(
        title,
        WIDTH,
        HEIGHT,
        [
            *chart.frame(
                NAMES,
                [f"{tick:,g}" for tick in chart.x.ticks()],
                [_rate(tick) for tick in chart.y.ticks()],
            ),
            chart.line(_slope(chart, host.bytes_per_s, host.flop_per_s), Colour.CPU),
            _slope_note(chart, host.bytes_per_s, f"host memory {_rate(host.bytes_per_s, 'B/s')}"),
            chart.line(ends, Colour.CPU, dash="7 4"),
            note_at(LEFT + 8, chart.y.at(host.flop_per_s) - 6, f"CPU {_rate(host.flop_per_s)}"),
            *(
                element
                for operation, x in zip(operations, intensities, strict=True)
                for element in _spot(
                    chart, Point(x, host.attainable(x)), operation.name, _host_limit(host, x)
                )
            ),
        ],
        style=STYLE,
    )


def _host_limit(host: Level, flop_per_byte: float) -> str:
    return "memory" if flop_per_byte < host.turning_point else "CPU"


def _regions(chart: Chart, hierarchy: Hierarchy, chosen: Placement) -> Iterator[str]:
    """What limits at each intensity: colour under the attainable speed, and its name.

    A GPU that is slower than the CPU even at P2 is nowhere the better place.
    """
    far, link, start, end = hierarchy.far, hierarchy.link_bytes_per_s, chart.x.least, chart.x.most
    p1, p2 = max(start, chosen.p1.flop_per_byte), chosen.p2.flop_per_byte
    if chosen.p2.flop_per_s < chosen.p1.flop_per_s:
        p1 = p2 = end
    corner = min(max(start, far.turning_point), p1)
    roof = Roof.MEMORY if chosen.balance else Roof.COMPUTE
    spans = (
        ("better on the CPU", Colour.CPU, (start, corner, p1), far.attainable),
        ("link limits", Colour.LINK, (p1, p2), lambda x: link * x),
        (f"{LIMITS[roof]} limits", COLOURS[roof], (p2, end), lambda _: chosen.p2.flop_per_s),
    )
    for name, colour, intensities, speed in spans:
        left, right = chart.x.at(intensities[0]), chart.x.at(intensities[-1])
        if right > left:
            points = [(x, speed(x)) for x in intensities]
            yield chart.area(points, colour)
            yield chart.line(points, colour, width=5)
        if right - left > LETTER_WIDTH * len(name):
            yield note_at((left + right) / 2, HEIGHT - BOTTOM - 12, name, "middle")


def _roofs(chart: Chart, hierarchy: Hierarchy) -> Iterator[str]:
    """The slanted and the flat roofs, each with its rate beside it."""
    near, far, link = hierarchy.near, hierarchy.far, hierarchy.link_bytes_per_s
    slanted = (
        ("GPU memory", Colour.GPU_MEMORY, near.bytes_per_s, near.flop_per_s),
        ("host memory", Colour.CPU, far.bytes_per_s, far.flop_per_s),
        ("link", Colour.LINK, link, near.flop_per_s),
    )
    for name, colour, bytes_per_s, flop_per_s in slanted:
        yield chart.line(_slope(chart, bytes_per_s, flop_per_s), colour)
        yield _slope_note(chart, bytes_per_s, f"{name} {_rate(bytes_per_s, 'B/s')}")
    for name, colour, flop_per_s in (
        ("GPU", Colour.GPU, near.flop_per_s),
        ("CPU", Colour.CPU, far.flop_per_s),
    ):
        ends = ((chart.x.least, flop_per_s), (chart.x.most, flop_per_s))
        yield chart.line(ends, colour, dash="7 4")
        yield note_at(LEFT + 8, chart.y.at(flop_per_s) - 6, f"{name} {_rate(flop_per_s)}")


def _slope(chart: Chart, bytes_per_s: float, flop_per_s: float) -> list[tuple[float, float]]:
    """A memory roof from the lower edge of the plot to its compute roof."""
    low = max(chart.x.least, chart.y.least / bytes_per_s)
    high = min(chart.x.most, flop_per_s / bytes_per_s)
    return [(low, low * bytes_per_s), (high, high * bytes_per_s)]


def _slope_note(chart: Chart, bytes_per_s: float, text: str) -> str:
    """Text along a slanted roof, near its lower end."""
    start = max(chart.x.least, chart.y.least / bytes_per_s) * 1.3
    x, y = chart.pixel(start, start * bytes_per_s)
    right, up = chart.pixel(10 * start, 10 * start * bytes_per_s)
    angle = math.degrees(math.atan2(up - y, right - x))
    return note_at(x - 4, y - 7, text, angle=angle)


def _kernel(chart: Chart, chosen: Placement) -> Iterator[str]:
    """The speed that device memory allows: the launch on its own roof, and across to P2."""
    start, speed = chosen.operation.near_intensity, chosen.p2.flop_per_s
    if chosen.balance is None:
        return
    yield chart.line(
        [(start, speed), (chosen.p2.flop_per_byte, speed)], Colour.GPU_MEMORY, dash="2 4"
    )
    yield chart.dot(start, speed, Colour.GPU_MEMORY, radius=5)
    x, y = chart.pixel(start, speed)
    yield note_at(x - 9, y - 7, f"kernel {_rate(speed)}", "end")


def _turning_points(chart: Chart, chosen: Placement) -> Iterator[str]:
    for name, point, style, shift in (("P1", chosen.p1, "end", -12), ("P2", chosen.p2, "", 12)):
        if point.flop_per_byte <= chart.x.least:
            continue
        x, y = chart.pixel(*point)
        bottom = HEIGHT - BOTTOM
        yield f'<path class="axis" stroke-dasharray="3 3" d="M{x:.1f} {y:.1f}V{bottom}"/>'
        yield chart.diamond(*point, COLOURS[Roof.LINK])
        text = f"{name} at {_three_digits(point.flop_per_byte)}"
        yield note_at(x + shift, y - 10, text, f"name {style}")


def _operation(chart: Chart, placement: Placement) -> Iterator[str]:
    """A point with its name, its speed and what limits it there."""
    limit = LIMITS[placement.near_roof] if placement.is_near_better else "CPU"
    yield from _spot(chart, placement.point, placement.operation.name, limit)


def _spot(chart: Chart, point: Point, name: str, limit: str) -> Iterator[str]:
    x, y = chart.pixel(*point)
    yield chart.line(
        [(point.flop_per_byte, chart.y.least), point], Colour.OTHER, width=1.5, dash="4 3"
    )
    yield chart.dot(*point, Colour.OTHER)
    is_right = x > WIDTH - RIGHT - LETTER_WIDTH * len(name) - 20
    note_x, style = (x - 10, "end") if is_right else (x + 10, "")
    yield note_at(note_x, y + 20, name, f"name {style}".rstrip())
    yield note_at(note_x, y + 36, f"{_rate(point.flop_per_s)}, {limit}", style)


def _rate(per_second: float, unit: str = "FLOP/s") -> str:
    for prefix, size in (("P", 1000 * TB), ("T", TB), ("G", GB)):
        if per_second >= size:
            return f"{_three_digits(per_second / size)} {prefix}{unit}"
    return f"{_three_digits(per_second / MB)} M{unit}"


def _three_digits(value: float) -> str:
    """Three digits that count, and never an exponent.

    >>> _three_digits(0.5), _three_digits(81.25), _three_digits(13223.0)
    ('0.5', '81.2', '13,223')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
