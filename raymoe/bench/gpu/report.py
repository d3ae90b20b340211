"""Report of the GPU suite: result tables, bar charts and timelines of a decode step."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from raymoe.bench.gpu.settings import Figures, PartResult, PartSettings, PredictedFigures, Status
from raymoe.bench.steps import StepKind, shape_of
from raymoe.engine.core import Runner
from raymoe.plan.draw import Colour
from raymoe.plan.plan import Plan
from raymoe.plan.work import StepLoad
from raymoe.runtime.batch import InputBatch
from raymoe.schedule.draw import draw_chrome_trace, draw_svg, svg_page, text_at
from raymoe.schedule.timeline import Timeline
from raymoe.specs.files import write_file
from raymoe.units import GB, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class SteadyDecode:
    load: StepLoad
    measured: Timeline


@dataclass(slots=True)
class RunRecorder:
    """Wraps a runner and records transfers and a representative decode step."""

    runner: Runner
    num_steps: int = 0
    # The last among the decoding steps with the most rows.
    steady: SteadyDecode | None = field(default=None)
    # Around the next decoding step; then None.
    profile: AbstractContextManager[object] | None = None

    def restart(self) -> None:
        self.num_steps, self.steady = 0, None

    @property
    def last_timeline(self) -> Timeline:
        return self.runner.last_timeline

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        return self.runner.compute_logits(hidden_RH)

    def interrupt(self) -> None:
        self.runner.interrupt()

    def close(self) -> None:
        self.runner.close()

    @contextmanager
    def run(self, batch: InputBatch) -> Iterator[Tensor]:
        shape = shape_of(batch)
        profile: AbstractContextManager[object] = nullcontext()
        if self.profile is not None and StepKind.of(shape) is StepKind.DECODE:
            profile, self.profile = self.profile, None
        with profile, self.runner.run(batch) as hidden_RH:
            yield hidden_RH
        self.num_steps += 1
        maximum = self.steady.load.decode_rows if self.steady else 1
        if StepKind.of(shape) is StepKind.DECODE and shape.tokens >= maximum:
            context = shape.host.context_tokens / shape.tokens
            load = StepLoad(decode_rows=shape.tokens, decode_context=context)
            self.steady = SteadyDecode(load, self.last_timeline)


WIDTH, LEFT, RIGHT, TOP = 860, 150, 250, 48
BAR_HEIGHT, BAR_STEP = 20, 30


class Bar(NamedTuple):
    name: str
    tokens_per_s: float
    note: str


def timeline_files(settings: PartSettings) -> tuple[str, str]:
    return f"{settings.file_name}.svg", f"{settings.file_name}.json"


def draw_steady_step(plan: Plan, steady: SteadyDecode, settings: PartSettings, out: Path) -> None:
    timelines = [
        Timeline("predicted", plan.steps.timeline(steady.load).spans),
        Timeline("measured", steady.measured.spans),
    ]
    title = f"{settings.name}: a decode step of {steady.load.decode_rows:.0f} rows"
    picture, trace = timeline_files(settings)
    write_file(out / picture, draw_svg(timelines, title=title))
    write_file(out / trace, draw_chrome_trace(timelines))


def draw_bars(bars: Sequence[Bar], *, title: str) -> str:
    maximum = max(bar.tokens_per_s for bar in bars)
    return svg_page(title, WIDTH, TOP + BAR_STEP * len(bars) + 12, _bars(bars, maximum))


def _bars(bars: Sequence[Bar], maximum: float) -> Iterator[str]:
    for index, bar in enumerate(bars):
        y = TOP + BAR_STEP * index
        width = (WIDTH - LEFT - RIGHT) * bar.tokens_per_s / maximum
        colour = Colour.CPU if bar.name == "raymoe" else Colour.GPU
        yield text_at(LEFT - 10, y + 14, bar.name, "end")
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>'
        )
        yield text_at(LEFT + width + 8, y + 14, f"{bar.tokens_per_s:.4g} {bar.note}".rstrip(), "")


REPORT = "report.md"
MAX_PERCENT_RATIO = 10.0
COLUMNS = (
    "contender",
    "rows",
    "decode",
    "end to end",
    "raymoe is",
    "link GB/s",
    "GPU busy",
    "to plan",
    "of bound",
)
MORE_COLUMNS = (
    "bound by",
    "of pinned",
    "prefill",
    "tasks on GPU, CPU, in, out",
    "load",
    "schedule (policy)",
)
LEGEND = (
    "Prefill, decode and end to end are tokens per second: prompt tokens over the time of the same "
    "job with one new token for each row, the other generated tokens over the remaining time, and "
    "all generated tokens over the whole time (~: extrapolated from the first steps). Link: the "
    "rate at which weights were copied to the GPU, beside the rate of pinned copies just before. "
    "GPU busy: the share of a decode step in which a kernel ran. Tasks: the share of the steps in "
    "which each resource had a task, including gaps between its kernels (in: host to device, out: "
    "device to host). To plan: how much longer the job took than planned. Of bound: the share of "
    "the rate at which this node could move the bytes and do the operations of the job without any "
    "overhead. Load: the time to write the weights to host memory and pin them."
)


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    file_name: str
    results: tuple[PartResult, ...]

    def rows(self) -> Iterator[tuple[str, ...]]:
        ours = [r for r in self.results if r.settings.contender == "raymoe"]
        mine = ours[0].figures if ours else None
        for result in self.results:
            if result.figures is not None:
                yield _row(result.settings.contender, result.figures, mine)

    def notes(self) -> Iterator[str]:
        for result in self.results:
            if result.figures is None:
                reason = first_line(result.reason)
                yield f"{result.settings.contender} {result.status}: {reason}"

    def bars(self) -> str | None:
        bars = [
            Bar(
                result.settings.contender,
                result.figures.tokens_per_s,
                f"tokens/s, {_percent(result.figures.share_of_bound)} of bound",
            )
            for result in self.results
            if result.figures is not None
        ]
        return draw_bars(bars, title=self.title) if bars else None


def groups_of(results: Iterable[PartResult]) -> list[Group]:
    ordered = sorted(results, key=_group_key)
    return [_group(tuple(members)) for _, members in groupby(ordered, key=_group_key)]


def write_report(results: Sequence[PartResult], out: Path) -> Path:
    sections = [LEGEND]
    for group in groups_of(results):
        lines = [f"## {group.title}", "", *_markdown(group)]
        bars = group.bars()
        if bars is not None:
            write_file(out / group.file_name, bars)
            lines += ["", f"![generated tokens per second]({group.file_name})"]
        links = [link for result in group.results for link in _timeline_links(result, out)]
        if links:
            lines += ["", f"A steady decode step: {', '.join(links)}."]
        sections.append("\n".join(lines))
    path = out / REPORT
    write_file(path, "# GPU suite\n\n" + "\n\n".join(sections) + "\n")
    return path


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _group_key(result: PartResult) -> tuple[str, ...]:
    settings = result.settings
    return (settings.shape, settings.workload, f"{settings.num_layers:04d}", str(settings.node))


def _group(results: tuple[PartResult, ...]) -> Group:
    first = results[0]
    settings, node = first.settings, first.settings.node
    measured = next((r for r in results if r.status == Status.DONE), first)
    cap = node.device_memory_bytes
    title = (
        f"{settings.shape}, {settings.num_layers} of {first.whole_layers} layers, "
        f"{settings.workload}: {measured.device_name}, "
        f"{'all its memory' if cap is None else format_bytes(cap)}"
    )
    digest = hashlib.sha256(repr(_group_key(first)).encode()).hexdigest()
    name = f"{settings.shape}-{settings.workload}-{digest[:8]}.svg"
    return Group(title=title, file_name=name, results=results)


def _row(contender: str, figures: Figures, ours: Figures | None) -> tuple[str, ...]:
    is_part = figures.num_measured_steps < figures.generated_tokens // figures.num_rows - 1
    mark = "~" if is_part else ""
    rate, model = figures.tokens_per_s, figures.model
    decode = figures.decode_tokens_per_s
    pinned, gap, link, kernels, tasks = ("",) * 5 if model is None else _model_cells(figures, model)
    return (
        contender,
        f"{figures.num_rows}",
        f"{mark}{decode:.1f}" if decode else "",
        f"{mark}{rate:.1f}",
        "" if ours is None else f"{ours.tokens_per_s / rate:.2f} x",
        link,
        kernels,
        gap,
        _percent(figures.share_of_bound),
        figures.limit,
        pinned,
        f"{figures.prefill_tokens_per_s:.1f}",
        tasks,
        format_seconds(figures.load_s),
        f"{figures.schedule} ({figures.policy})",
    )


def _model_cells(figures: Figures, model: PredictedFigures) -> tuple[str, str, str, str, str]:
    busy, link, pinned = model.busy, model.link_bytes_per_s, figures.pinned_bytes_per_s
    return (
        _percent(link / pinned) if link else "",
        _gap(figures.total_s / model.predicted_s),
        f"{link / GB:.1f}/{pinned / GB:.1f}" if link else "",
        _percent(model.kernel_share) if model.kernel_share else "",
        ", ".join(_percent(share) for share in (busy.gpu, busy.cpu, busy.htod, busy.dtoh)),
    )


def _gap(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %" if ratio < MAX_PERCENT_RATIO else f"{ratio:.0f} x"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _markdown(group: Group) -> Iterator[str]:
    rows = list(group.rows())
    if rows:
        yield _line((*COLUMNS, *MORE_COLUMNS))
        yield _line(["---"] * len((*COLUMNS, *MORE_COLUMNS)))
        yield from map(_line, rows)
        yield ""
    yield from (f"- {note}" for note in group.notes())


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _timeline_links(result: PartResult, out: Path) -> Iterator[str]:
    picture, trace = timeline_files(result.settings)
    if result.figures is not None and (out / picture).exists():
        yield f"[{result.settings.contender}]({picture}) ([trace]({trace}))"
