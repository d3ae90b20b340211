"""SVG rooflines of a node and throughput against host memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.operations import operations_of
from raymoe.plan.papers.hrm import Hierarchy, Level, PlacedOperation, Point, Roof, place
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.plan import RESOURCE_NAMES, Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import Operation
from raymoe.schedule.draw import round_step, svg_page, text_at
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.units import GB, GIB, MB, TB, format_bytes

__all__ = ["Curve", "CurvePoint", "draw_host_roofline", "draw_roofline", "draw_throughput"]
WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 92, 28, 68, 58  # margins of the plot
NUM_TICKS = 8
LETTER_WIDTH = 6.4  # px, in notes
STYLE = """
.note { paint-order: stroke; stroke: #ffffff; stroke-width: 4; stroke-linejoin: round }
.mark { stroke: #ffffff; stroke-width: 1.5 } .axis { stroke: #8b939c; fill: none }
@media (prefers-color-scheme: dark) { .note, .mark { stroke: #16191d } .axis { stroke: #6b747e } }
"""


class Colour(StrEnum):
    """Okabe-Ito colours, the same per resource as in the Gantt chart."""

    CPU = "#d55e00"
    LINK = "#e69f00"
    GPU_MEMORY = "#009e73"
    GPU = "#0072b2"
    OTHER = "#cc79a7"


@dataclass(frozen=True, slots=True)
class Scale:
    minimum: float
    maximum: float
    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        value = min(max(value, self.minimum), self.maximum)
        if self.is_log:
            share = math.log(value / self.minimum) / math.log(self.maximum / self.minimum)
        else:
            share = (value - self.minimum) / (self.maximum - self.minimum)
        return self.low + share * (self.high - self.low)

    def ticks(self) -> tuple[float, ...]:
        if self.is_log:
            first, last = (math.ceil(math.log10(v) - 1e-9) for v in (self.minimum, self.maximum))
            return tuple(10.0**power for power in range(first, last + 1))
        step = round_step((self.maximum - self.minimum) / NUM_TICKS)
        first = math.ceil(self.minimum / step - 1e-9)
        return tuple(step * i for i in range(first, int(self.maximum / step + 1e-9) + 1))


@dataclass(frozen=True, slots=True)
class Chart:
    x: Scale
    y: Scale

    @classmethod
    def decades(cls, x_values: Iterable[float], y_values: Iterable[float]) -> "Chart":
        (left, right), (bottom, top) = _decades(x_values), _decades(y_values)
        return cls(
            Scale(left, right, LEFT, WIDTH - RIGHT, is_log=True),
            Scale(bottom, top, HEIGHT - BOTTOM, TOP, is_log=True),
        )

    @classmethod
    def from_zero(cls, x_max: float, y_max: float) -> "Chart":
        return cls(Scale(0.0, x_max, LEFT, WIDTH - RIGHT), Scale(0.0, y_max, HEIGHT - BOTTOM, TOP))

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        return self.x.at(x), self.y.at(y)

    def frame(
        self,
        names: tuple[str, str],
        x_labels: Sequence[str],
        y_labels: Sequence[str],
    ) -> Iterator[str]:
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
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return (
            f'<path fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes} '
            f'stroke-linejoin="round" d="{self._outline(points)}"/>'
        )

    def area(self, points: Iterable[tuple[float, float]], colour: str) -> str:
        corners = list(points)
        down = [(corners[-1][0], self.y.minimum), (corners[0][0], self.y.minimum)]
        return (
            f'<path fill="{colour}" fill-opacity="0.12" d="{self._outline([*corners, *down])}z"/>'
        )

    def dot(self, x: float, y: float, colour: str, *, radius: float = 6) -> str:
        left, top = self.pixel(x, y)
        return (
            f'<circle class="mark" cx="{left:.1f}" cy="{top:.1f}" r="{radius:g}" fill="{colour}"/>'
        )

    def diamond(self, x: float, y: float, colour: str) -> str:
        left, top = self.pixel(x, y)
        return f'<path class="mark" fill="{colour}" d="M{left:.1f} {top - 8:.1f}l8 8l-8 8l-8 -8z"/>'

    def _outline(self, points: Iterable[tuple[float, float]]) -> str:
        pixels = (self.pixel(x, y) for x, y in points)
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)


def note_at(
    x: float, y: float, text: str, style: str = "", *, angle: float = 0.0, colour: str = ""
) -> str:
    note = text_at(x, y, text, f"note {style}".rstrip(), colour=colour)
    return f'<g transform="rotate({angle:.1f} {x:.1f} {y:.1f})">{note}</g>' if angle else note


def _decades(values: Iterable[float]) -> tuple[float, float]:
    present = [value for value in values if 0 < value < math.inf]
    low, high = math.floor(math.log10(min(present))), math.ceil(math.log10(max(present)))
    return 10.0**low, 10.0 ** max(high, low + 1)


NAMES = ("operations per byte of host memory", "operations per second")
LIMITS = {Roof.COMPUTE: "GPU", Roof.MEMORY: "GPU memory", Roof.LINK: "link"}
COLOURS = {Roof.COMPUTE: Colour.GPU, Roof.MEMORY: Colour.GPU_MEMORY, Roof.LINK: Colour.LINK}


def draw_roofline(
    hierarchy: Hierarchy,
    chosen: PlacedOperation,
    others: Sequence[PlacedOperation] = (),
    *,
    title: str,
) -> str:
    """Draw a node's roofs, all operations as points, and P1, P2 and the regions of `chosen`."""
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
    intensities = [operation.far_intensity for operation in operations]
    x_values = [host.turning_point / 30, host.turning_point * 30]
    x_values += [x * factor for x in intensities for factor in (1 / 3, 3)]
    chart = Chart.decades(x_values, [host.attainable(min(x_values)), host.flop_per_s * 2])
    ends = ((chart.x.minimum, host.flop_per_s), (chart.x.maximum, host.flop_per_s))
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


def _regions(chart: Chart, hierarchy: Hierarchy, chosen: PlacedOperation) -> Iterator[str]:
    """Colour and name each limit's range; none for a GPU slower than the CPU even at P2."""
    far, link, start, end = (
        hierarchy.far,
        hierarchy.link_bytes_per_s,
        chart.x.minimum,
        chart.x.maximum,
    )
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
        ends = ((chart.x.minimum, flop_per_s), (chart.x.maximum, flop_per_s))
        yield chart.line(ends, colour, dash="7 4")
        yield note_at(LEFT + 8, chart.y.at(flop_per_s) - 6, f"{name} {_rate(flop_per_s)}")


def _slope(chart: Chart, bytes_per_s: float, flop_per_s: float) -> list[tuple[float, float]]:
    low = max(chart.x.minimum, chart.y.minimum / bytes_per_s)
    high = min(chart.x.maximum, flop_per_s / bytes_per_s)
    return [(low, low * bytes_per_s), (high, high * bytes_per_s)]


def _slope_note(chart: Chart, bytes_per_s: float, text: str) -> str:
    start = max(chart.x.minimum, chart.y.minimum / bytes_per_s) * 1.3
    x, y = chart.pixel(start, start * bytes_per_s)
    right, up = chart.pixel(10 * start, 10 * start * bytes_per_s)
    angle = math.degrees(math.atan2(up - y, right - x))
    return note_at(x - 4, y - 7, text, angle=angle)


def _kernel(chart: Chart, chosen: PlacedOperation) -> Iterator[str]:
    start, speed = chosen.operation.near_intensity, chosen.p2.flop_per_s
    if chosen.balance is None:
        return
    yield chart.line(
        [(start, speed), (chosen.p2.flop_per_byte, speed)], Colour.GPU_MEMORY, dash="2 4"
    )
    yield chart.dot(start, speed, Colour.GPU_MEMORY, radius=5)
    x, y = chart.pixel(start, speed)
    yield note_at(x - 9, y - 7, f"kernel {_rate(speed)}", "end")


def _turning_points(chart: Chart, chosen: PlacedOperation) -> Iterator[str]:
    for name, point, style, shift in (("P1", chosen.p1, "end", -12), ("P2", chosen.p2, "", 12)):
        if point.flop_per_byte <= chart.x.minimum:
            continue
        x, y = chart.pixel(*point)
        bottom = HEIGHT - BOTTOM
        yield f'<path class="axis" stroke-dasharray="3 3" d="M{x:.1f} {y:.1f}V{bottom}"/>'
        yield chart.diamond(*point, COLOURS[Roof.LINK])
        text = f"{name} at {_three_digits(point.flop_per_byte)}"
        yield note_at(x + shift, y - 10, text, f"name {style}")


def _operation(chart: Chart, placement: PlacedOperation) -> Iterator[str]:
    limit = LIMITS[placement.near_roof] if placement.is_near_better else "CPU"
    yield from _spot(chart, placement.point, placement.operation.name, limit)


def _spot(chart: Chart, point: Point, name: str, limit: str) -> Iterator[str]:
    x, y = chart.pixel(*point)
    yield chart.line(
        [(point.flop_per_byte, chart.y.minimum), point], Colour.OTHER, width=1.5, dash="4 3"
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


THROUGHPUT_NAMES = ("host memory, GiB", "generated tokens per second")
THROUGHPUT_COLOURS = (Colour.GPU, Colour.CPU, Colour.GPU_MEMORY, Colour.OTHER, Colour.LINK)
HEADROOM = 1.05
LEGEND_TOP, LEGEND_HEIGHT = 22, 20  # distance of the first line from the top; line height


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
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
    """Plans that differ only in host memory; a bound is drawn dashed."""

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
    """Draw throughput over host memory, labelling where the bottleneck changes."""
    marked = [point for curve in curves for point in curve.points]
    marked += [chosen] if chosen else []
    if not marked or len(curves) > len(THROUGHPUT_COLOURS):
        raise ConfigError(
            f"draw_throughput: {len(marked)} points on {len(curves)} curves; "
            f"it draws at least one point on at most {len(THROUGHPUT_COLOURS)} curves"
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
                THROUGHPUT_NAMES,
                [f"{tick:g}" for tick in chart.x.ticks()],
                [f"{tick:,g}" for tick in chart.y.ticks()],
            ),
            *(
                element
                for curve, colour in zip(curves, THROUGHPUT_COLOURS, strict=False)
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
        is_in_flight = width > LETTER_WIDTH * len(text)
        x, style = (LEFT + width - 8, "end") if is_in_flight else (LEFT + width + 8, "")
        yield note_at(x, HEIGHT - BOTTOM - 12, text, style)


def _curve(chart: Chart, curve: Curve, colour: Colour) -> Iterator[str]:
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
    for index, (curve, colour) in enumerate(zip(curves, THROUGHPUT_COLOURS, strict=False)):
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


PlanOn = Callable[[HardwareSpec], Plan]
"""Plans one job on any node."""

STEPS = 4  # of host memory, from the weights to what the node has, and on to twice as much
PAPERS: Mapping[str, tuple[str, Callable[[PaperPolicies], Policy]]] = {
    "cgopipe": ("CGOPipe, policy of MoE-Lightning", PaperPolicies.cgopipe),
    "vslpipe": ("VSLPipe, policy of MoE-Lens", PaperPolicies.vslpipe),
}


def roofline_picture(plan: Plan) -> str:
    return draw_operations(
        plan.hardware,
        operations_of(plan),
        title=f"{plan.model_name} on {plan.hardware.name}, decoding by schedule {plan.schedule}",
    )


def draw_operations(node: HardwareSpec, operations: Sequence[Operation], *, title: str) -> str:
    """Draw a node's roofs with operations below them; the first operation is highlighted."""
    if not node.has_gpu:
        host = Level(node.host_flop_per_s, node.host_bytes_per_s)
        return draw_host_roofline(host, operations, title=title)
    hierarchy = Hierarchy.of(node)
    first, *others = (place(hierarchy, operation) for operation in operations)
    return draw_roofline(hierarchy, first, others, title=title)


def throughput_picture(plan: Plan, model: ModelSpec, plan_on: PlanOn) -> str:
    """Throughput over host memory, next to the papers' policies by the same cost model."""
    own, weight_bytes = plan.hardware, dict(plan.footprint.parts).get("weights", 0)
    nodes = [
        replace(own, host_memory_bytes=memory)
        for memory in _memories(weight_bytes, own.host_memory_bytes)
    ]

    def choose(node: HardwareSpec) -> Plan:
        return plan if node == own else plan_on(node)

    curves = [Curve(name="raymoe", points=tuple(_points(nodes, choose, has_bound=True)))]
    if own.has_gpu:
        curves += [_paper_curve(plan, model, schedule, nodes) for schedule in PAPERS]
    return draw_throughput(
        [curve for curve in curves if curve.points],
        title=f"{plan.model_name} on {own.name}, {plan.workload.num_rows:,} rows of "
        f"{plan.workload.prompt_tokens:,} + {plan.workload.generated_tokens:,} tokens",
        weight_bytes=weight_bytes,
        chosen=_point(plan),
    )


def _paper_curve(
    plan: Plan, model: ModelSpec, schedule: str, nodes: Iterable[HardwareSpec]
) -> Curve:
    name, choose = PAPERS[schedule]

    def plan_on(node: HardwareSpec) -> Plan:
        try:
            policy = choose(PaperPolicies(model, node, plan.workload))
        except ConfigError as error:  # the paper has no formula for such a job
            raise InfeasiblePlanError(str(error)) from error
        return find_plan(model, node, plan.workload, schedule=schedule, policy=policy)

    return Curve(name=name, points=tuple(_points(nodes, plan_on)))


def _memories(weight_bytes: int, own_bytes: int) -> Iterator[int]:
    for step in range(1, STEPS):
        yield weight_bytes + (own_bytes - weight_bytes) * step // STEPS
    for step in range(STEPS + 1):
        yield own_bytes + own_bytes * step // STEPS


def _points(
    nodes: Iterable[HardwareSpec], plan_on: PlanOn, *, has_bound: bool = False
) -> Iterator[CurvePoint]:
    for node in nodes:
        with suppress(InfeasiblePlanError):
            plan = plan_on(node)
            yield _point(plan, RESOURCE_NAMES[plan.bound] if has_bound else "")


def _point(plan: Plan, bound: str = "") -> CurvePoint:
    return CurvePoint(
        host_memory_bytes=plan.hardware.host_memory_bytes,
        tokens_per_s=plan.tokens_per_s,
        bound=bound,
    )
