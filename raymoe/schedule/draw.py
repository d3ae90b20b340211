"""Draw timelines, predicted or measured, as text, SVG and Chrome trace."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from raymoe.schedule.graph import Op, Resource
from raymoe.schedule.timeline import Span, Timeline

__all__ = ["draw_chrome_trace", "draw_svg", "draw_text"]


class Look(NamedTuple):
    letter: str
    colour: str
    ink: str
    meaning: str


LOOKS: Mapping[Op, Look] = {
    Op.EMBED: Look("e", "#bbbbbb", "#000000", "tokens"),
    Op.UP: Look("u", "#999999", "#000000", "embeddings"),
    Op.PRE: Look("A", "#56b4e9", "#000000", "norm, QKV"),
    Op.QKV: Look("q", "#44aa99", "#000000", "QKV to host"),
    Op.ATTN: Look("B", "#d55e00", "#ffffff", "attention"),
    Op.KV: Look("k", "#aa4499", "#ffffff", "KV to device"),
    Op.APPEND: Look("a", "#882255", "#ffffff", "new KV"),
    Op.GATTN: Look("G", "#cc79a7", "#000000", "GPU attention"),
    Op.HID: Look("h", "#f0e442", "#000000", "hidden states"),
    Op.POST: Look("C", "#009e73", "#ffffff", "O, router"),
    Op.ROWS: Look("r", "#aa22ee", "#ffffff", "rows to host"),
    Op.CEXPERTS: Look("E", "#332288", "#ffffff", "CPU experts"),
    Op.SUMS: Look("m", "#004400", "#ffffff", "CPU sums"),
    Op.EXPERTS: Look("X", "#0072b2", "#ffffff", "FFN"),
    Op.STAGE: Look("s", "#999933", "#000000", "page to ring"),
    Op.W: Look("w", "#e69f00", "#000000", "weight page"),
    Op.SYNC: Look("|", "#cc3311", "#ffffff", "wait for all"),
    Op.HEAD: Look("H", "#ddcc77", "#000000", "logits"),
}


def ops_in_order(ops: set[Op]) -> tuple[Op, ...]:
    return tuple(op for op in Op if op in ops)


STYLE = """\
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1b1f24 }
.page { fill: #ffffff } .lane { fill: #eef0f2 } .tick { stroke: #c8ccd1; stroke-width: 1 }
.title { font-size: 16px; font-weight: 600 } .name { font-weight: 600 }
.end { text-anchor: end } .middle { text-anchor: middle } .label { font-size: 10px }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8ea }
  .page { fill: #16191d } .lane { fill: #262b31 } .tick { stroke: #454c55 }
}"""


TITLE_LEFT, TITLE_SIZE, MIN_TITLE_SIZE = 16, 16.0, 10.0  # px
TITLE_LETTER = 0.6  # mean width of a bold letter over its size


def svg_page(title: str, width: int, height: float, body: Iterable[str], *, style: str = "") -> str:
    """The SVG text of a picture; `style` adds CSS rules."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
            f'width="{width}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{style}</style>",
            f'<rect class="page" width="{width}" height="{height:.0f}"/>',
            _title(title, width - 2 * TITLE_LEFT),
            *body,
            "</svg>\n",
        ]
    )


def _title(title: str, width: float) -> str:
    """A title that is no wider: a long one is smaller, and shorter in the middle."""
    letters = int(width / (TITLE_LETTER * MIN_TITLE_SIZE))
    shown = shorten(title, letters)
    size = min(TITLE_SIZE, width / (TITLE_LETTER * max(1, len(shown))))
    style = "" if size == TITLE_SIZE else f' style="font-size:{size:.1f}px"'
    return f'<text class="title" x="{TITLE_LEFT:.1f}" y="26"{style}>{escape(shown)}</text>'


def shorten(text: str, num_characters: int) -> str:
    """Leave out the middle of a name, as both ends are informative."""
    if len(text) <= num_characters:
        return text
    half = (num_characters - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def text_at(x: float, y: float, text: str, style: str, *, colour: str = "") -> str:
    ink = f' style="fill:{colour}"' if colour else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:g}"{ink}>{escape(text)}</text>'


def round_step(minimum: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `minimum`."""
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= minimum)


PARTLY_BUSY = "."
ROUNDING = 1e-9  # cells; ignores the rest of a task that ends where the cell begins


def draw_text(timelines: Sequence[Timeline], *, columns: int = 80) -> str:
    """Draw timelines below each other on one time axis, the longest with `columns` cells.

    A cell shows the letter of the operation that took most of it, a dot if it was idle for more
    than half, and a blank if all of it was. The percentage is the busy share of the lane.
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


WIDTH = 1200
LEFT, RIGHT = 96, 64  # margins of the bars, for lane names and busy shares
LANE_HEIGHT, BAR_HEIGHT = 20, 16
HEADING_HEIGHT = 26
LEGEND_COLUMN = 138
LETTER_WIDTH = 6.2  # px, in bar labels
MIN_BAR = 0.15  # px; wider bars would make a lane of many short tasks look too busy
WIDE_BAR = 4.0  # px; bars from this width leave a thin gap to the next
HAIR = 0.6
NUM_TICKS = 10


@dataclass(frozen=True, slots=True)
class _Axis:
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
    """Draw timelines on one time axis, for light and dark pages; percentages are busy shares."""
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


MICROSECONDS = 1e6


def draw_chrome_trace(timelines: Sequence[Timeline]) -> str:
    """A trace with a process per timeline (Google "Trace Event Format": X and M events)."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_metadata(process, 0, "process_name", {"name": timeline.name}))
        events.append(_metadata(process, 0, "process_sort_index", {"sort_index": process}))
        for thread, resource in enumerate(Resource):
            if resource in timeline.resources:
                events.append(_metadata(process, thread, "thread_name", {"name": resource.value}))
                sort = {"sort_index": thread}
                events.append(_metadata(process, thread, "thread_sort_index", sort))
                events += [_complete(process, thread, span) for span in timeline.of(resource)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _metadata(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}


def _complete(process: int, thread: int, span: Span) -> dict[str, Any]:
    task = span.task
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": str(task),
        "cat": task.op.value,
        "ts": span.start_s * MICROSECONDS,
        "dur": span.duration_s * MICROSECONDS,
        "args": {
            "layer": task.layer,
            "part": task.part,
            "reads": [str(buffer) for buffer in task.reads],
            "writes": [str(buffer) for buffer in task.writes],
        },
    }
