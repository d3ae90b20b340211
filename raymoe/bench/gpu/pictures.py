"""Pictures of the GPU suite: a steady decode pass of a part, and the rates of all contenders."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from raymoe.bench.gpu.recorder import SteadyPass
from raymoe.bench.gpu.settings import PartSettings
from raymoe.plan.draw import Colour
from raymoe.plan.plan import Plan
from raymoe.schedule.draw import draw_chrome_trace, draw_svg, svg_page, text_at
from raymoe.schedule.timeline import Timeline

WIDTH, LEFT, RIGHT, TOP = 860, 150, 250, 48
BAR_HEIGHT, BAR_STEP = 20, 30


class Bar(NamedTuple):
    """One contender: generated tokens per second, and what is written behind the bar."""

    name: str
    tokens_per_s: float
    note: str


def timeline_files(settings: PartSettings) -> tuple[str, str]:
    """Names of the Gantt chart and the trace of a part."""
    return f"{settings.file_name}.svg", f"{settings.file_name}.json"


def draw_steady_pass(plan: Plan, steady: SteadyPass, settings: PartSettings, out: Path) -> None:
    """Write a decode pass, predicted above measured, as SVG and as a Chrome trace."""
    timelines = [
        Timeline("predicted", plan.passes.timeline(steady.load).spans),
        Timeline("measured", steady.measured.spans),
    ]
    title = f"{settings.name}: a decode pass of {steady.load.decode_rows:.0f} rows"
    picture, trace = timeline_files(settings)
    (out / picture).write_text(draw_svg(timelines, title=title))
    (out / trace).write_text(draw_chrome_trace(timelines))


def draw_bars(bars: Sequence[Bar], *, title: str) -> str:
    """Generated tokens per second of each contender, as SVG; ours in another colour."""
    most = max(bar.tokens_per_s for bar in bars)
    return svg_page(title, WIDTH, TOP + BAR_STEP * len(bars) + 12, _bars(bars, most))


def _bars(bars: Sequence[Bar], most: float) -> Iterator[str]:
    for index, bar in enumerate(bars):
        y = TOP + BAR_STEP * index
        width = (WIDTH - LEFT - RIGHT) * bar.tokens_per_s / most
        colour = Colour.CPU if bar.name == "raymoe" else Colour.GPU
        yield text_at(LEFT - 10, y + 14, bar.name, "end")
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>'
        )
        yield text_at(LEFT + width + 8, y + 14, f"{bar.tokens_per_s:.4g} {bar.note}".rstrip(), "")
