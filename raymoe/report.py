"""Make a self-contained HTML page about a job from its status files."""

import dataclasses
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path

from raymoe.data import manifest as manifests
from raymoe.data.error_groups import ErrorGroup
from raymoe.data.manifest import Manifest
from raymoe.data.observer import error_kind
from raymoe.data.status import (
    GENERATE,
    HISTORY_COLUMNS,
    SUFFIX,
    HistoryPoint,
    PlainSpan,
    StepRecord,
    manifests_beside,
    read_status,
)
from raymoe.errors import CheckpointError, ConfigError
from raymoe.plan.draw import HEADROOM, STYLE, Colour, Scale, draw_operations
from raymoe.safe_text import harmless
from raymoe.schedule.draw import draw_svg, shorten, svg_page, text_at
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from raymoe.specs.files import PRIVATE_FILE, kind_problem, open_regular, write_file
from raymoe.status_view import HOW_TO_RESUME, NOTHING, ActorView, JobView, measured_over_predicted
from raymoe.units import format_money, format_seconds

MARK = "<!-- a report of raymoe -->"

PAGE_STYLE = """\
:root { --ink: #1b1f24; --soft: #57606a; --paper: #f6f7f9; --card: #fff; --line: #d8dde3 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #9aa4af; --paper: #0f1216; --card: #16191d; --line: #343b43 }
}
:root { color-scheme: light dark }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 ui-sans-serif, system-ui, sans-serif }
h1 { margin: 0 0 .25rem; font-size: 1.5rem; overflow-wrap: anywhere }
h2 { margin: 0 0 .75rem; font-size: 1.1rem }
p { margin: .25rem 0 .75rem; color: var(--soft); overflow-wrap: anywhere }
section { margin-top: 1rem; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1rem;
  margin: 0 }
dt { color: var(--soft); font-size: .85rem }
dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
th { color: var(--soft); font-weight: 600; font-size: .85rem; white-space: nowrap }
td { overflow-wrap: anywhere; min-width: 4.5rem } td:first-child { min-width: 9rem }
td.number, th.number { text-align: right; white-space: nowrap }
pre, li { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
pre { margin: 0 } ol { margin: 0; padding-left: 2.5rem }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 0 1.5rem; padding: .25rem 0 1rem; border-top: 1px solid var(--line) }
svg { display: block; width: 100%; min-width: 44rem; height: auto; border-radius: .25rem }
h3 { margin: 1rem 0 .25rem; font-size: .95rem }
"""


def text(value: object) -> str:
    """Escape text as HTML; characters that reorder or hide text become visible."""
    return escape(harmless(str(value), keep="\n"))


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            MARK,
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{text(title)}</title>",
            f"<style>{PAGE_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{text(title)}</h1>",
            f"<p>{text(subtitle)}</p>",
            *sections,
            "</body>",
            "</html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{text(title)}</h2>\n{chr(10).join(parts)}\n</section>"


def heading(value: str) -> str:
    return f"<h3>{text(value)}</h3>"


def paragraph(value: str) -> str:
    return f"<p>{text(value)}</p>"


def preformatted(value: str) -> str:
    return f"<pre>{text(value)}</pre>"


def numbers(entries: Iterable[tuple[str, str]]) -> str:
    cells = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in entries)
    return f"<dl>{''.join(cells)}</dl>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int = 1) -> str:
    """A table; columns after the first `num_names` are right-aligned."""
    styles = ["" if i < num_names else ' class="number"' for i in range(len(header))]

    def line(kind: str, cells: Sequence[str]) -> str:
        parts = (
            f"<{kind}{style}>{text(cell)}</{kind}>"
            for style, cell in zip(styles, cells, strict=True)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line("td", cells) for cells in rows)
    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def numbered(values: Iterable[str]) -> str:
    return f"<ol>{''.join(f'<li>{text(value)}</li>' for value in values)}</ol>"


def picture(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'


def is_report(path: Path) -> bool:
    try:
        with os.fdopen(open_regular(path, follows_links=True), "rb") as file:
            return MARK.encode() in file.read(200)
    except (OSError, CheckpointError):
        return False


WIDTH, PLOT_HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 44, 44  # margins of the plot; the legend is above it
LEGEND_LINE, LEGEND_COLUMNS = 18, 3
MAX_NAME = 36  # characters of a name in the legend
COLOURS = (Colour.GPU, Colour.CPU, Colour.GPU_MEMORY, Colour.OTHER, Colour.LINK, "#56b4e9")
MAX_LINES = 2 * len(COLOURS)  # the second half is dashed
INK = "#7f8a96"  # readable on light and dark
UNITS = ((3 * 86_400.0, 86_400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"))

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    points: tuple[Point, ...]  # seconds since the start, and value
    is_total: bool = False  # whether it is the sum of the other lines, drawn thick


def draw_series(
    lines: Sequence[Line], *, title: str, unit: str = "", maximum: float | None = None
) -> str:
    """Draw lines over time; `unit` follows numbers, `maximum` None fits the values."""
    points = [point for line in lines for point in line.points]
    end_s = max((seconds for seconds, _ in points), default=0.0) or 1.0
    highest = max((value for _, value in points), default=0.0)  # below 0 where counts fall
    top = maximum or HEADROOM * max(highest, 0.0) or 1.0
    rows = -(-len(lines) // LEGEND_COLUMNS)
    plot_top = TOP + LEGEND_LINE * rows
    x = Scale(0.0, end_s, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, top, plot_top + PLOT_HEIGHT, plot_top)
    body = [*_frame(x, y, unit), *_lines(lines, x, y), *_legend(lines)]
    return svg_page(harmless(title), WIDTH, plot_top + PLOT_HEIGHT + BOTTOM, body, style=STYLE)


def _frame(x: Scale, y: Scale, unit: str) -> Iterator[str]:
    scale, name = next(
        ((seconds, name) for minimum, seconds, name in UNITS if x.maximum >= minimum),
        (1.0, "seconds"),
    )
    time = Scale(0.0, x.maximum / scale, x.low, x.high)
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
        name = shorten(harmless(line.name), MAX_NAME)
        yield text_at(left + 30, top, name, "name" if line.is_total else "")


def _stroke(index: int, line: Line) -> str:
    is_dashed = index % MAX_LINES >= len(COLOURS) and not line.is_total
    dashes = ' stroke-dasharray="6 4"' if is_dashed else ""
    width = 3 if line.is_total else 1.75
    return f'stroke="{_colour(index, line)}" stroke-width="{width}" stroke-linejoin="round"{dashes}'


def _colour(index: int, line: Line) -> str:
    return INK if line.is_total else COLOURS[index % len(COLOURS)]


TOKENS = HISTORY_COLUMNS.index("num_tokens")
POOL_FILL, KV_USE = HISTORY_COLUMNS.index("pool_fill"), HISTORY_COLUMNS.index("kv_use")
MOMENTS = 120  # at which the sum of all actors is drawn

History = Sequence[HistoryPoint]


def throughput(actors: Sequence[ActorView], start_s: float) -> str:
    """Tokens per second of each actor and of all; `start_s` is Unix time."""
    lines = _lines_of_actors(actors, start_s, rates)
    if len(actors) > 1:
        lines.append(Line(name="all", points=_shifted(total_rates(_histories(actors)), start_s),
                          is_total=True))  # fmt: skip
    kind = "Generated tokens" if actors[0].status.task == GENERATE else "Tokens read"
    title = f"{kind} per second{_which(actors)}"
    return draw_series(lines, title=title)


def fills(actors: Sequence[ActorView], start_s: float) -> list[str]:
    return [
        draw_series(
            _lines_of_actors(actors, start_s, partial(levels, column=column)),
            title=f"{name}{_which(actors)}",
            unit=" %",
            maximum=100.0,
        )
        for column, name in ((POOL_FILL, "Slots in use"), (KV_USE, "KV blocks in use"))
    ]


def rates(history: History) -> list[tuple[float, float]]:
    """Tokens per second between neighbouring samples, at the later one."""
    return [
        (after[0], (after[TOKENS] - before[TOKENS]) / (after[0] - before[0]))
        for before, after in pairwise(history)
        if after[0] > before[0]
    ]


def levels(history: History, column: int) -> list[tuple[float, float]]:
    return [(point[0], 100.0 * point[column]) for point in history]


def total_rates(histories: Sequence[History]) -> list[tuple[float, float]]:
    begin_s = min(history[0][0] for history in histories)
    end_s = max(history[-1][0] for history in histories)
    step_s = (end_s - begin_s) / MOMENTS
    if not step_s > 0:
        return []
    moments = [begin_s + step_s * i for i in range(MOMENTS + 1)]
    counts = [sum(_count_at(history, moment) for history in histories) for moment in moments]
    return [
        (moment, (after - before) / step_s)
        for moment, before, after in zip(moments[1:], counts, counts[1:], strict=False)
    ]


def _count_at(history: History, moment_s: float) -> float:
    index = bisect_left(history, moment_s, key=lambda point: point[0])
    if index == 0:
        return history[0][TOKENS]
    if index == len(history):
        return history[-1][TOKENS]
    before, after = history[index - 1], history[index]
    share = (moment_s - before[0]) / (after[0] - before[0])
    return before[TOKENS] + share * (after[TOKENS] - before[TOKENS])


def _lines_of_actors(
    actors: Sequence[ActorView],
    start_s: float,
    values: Callable[[History], list[tuple[float, float]]],
) -> list[Line]:
    return [
        Line(name=actor.status.actor, points=_shifted(values(actor.status.history), start_s))
        for actor in slowest(actors)
    ]


def slowest(actors: Sequence[ActorView]) -> list[ActorView]:
    """The actors with the fewest tokens, as many as a picture shows, by name."""
    by_tokens = sorted(actors, key=lambda actor: actor.status.history[-1][TOKENS])
    return sorted(by_tokens[:MAX_LINES], key=lambda actor: actor.status.actor)


def _which(actors: Sequence[ActorView]) -> str:
    return f", the {MAX_LINES} slowest of {len(actors)} actors" if len(actors) > MAX_LINES else ""


def _histories(actors: Sequence[ActorView]) -> list[History]:
    return [actor.status.history for actor in actors]


def _shifted(points: list[tuple[float, float]], start_s: float) -> tuple[tuple[float, float], ...]:
    return tuple((max(0.0, seconds - start_s), value) for seconds, value in points)


MAX_CHARACTERS = 2000  # of a prompt or an answer
ASKS = "raymoe report --samples N"
# Others may have parts of cells outside quotes.
OUR_ERRORS = frozenset(
    ("ConfigError", "UnknownOptionError", "DecodeError", "CapacityError", "WorkerProcessError",
     "ExecutionError", "ValueError")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row of the output.

    Attributes:
        answers: Of each sample.
    """

    name: str
    prompt: str
    answers: tuple[str, ...] = ()
    error: str = ""


def summary(view: JobView, *, has_samples: bool) -> str:
    total = "" if view.total_rows is None else f" of {view.total_rows:,}"
    is_text = view.task == GENERATE
    entries = [
        ("rows finished", f"{view.num_finished_rows:,}{total}"),
        ("rows with errors", f"{view.num_error_rows:,}"),
        ("prompt tokens", f"{view.num_input_tokens:,}"),
        *_found_prompts(view),
        *([("generated tokens", f"{view.num_generated_tokens:,}")] if is_text else []),
        (f"{'generated' if is_text else 'prompt'} tokens per second", f"{view.tokens_per_s:,.0f}"),
        ("time, loading included", format_seconds(view.elapsed_s)),
        *([("runs", f"{view.former.num_runs + 1:,}")] if view.former.num_runs else []),
        ("nodes", f"{len(view.nodes):,}"),
        ("actors", f"{len(view.actors):,}"),
    ]
    if view.cost is not None:
        entries.append(("cost", format_money(view.cost, view.currency)))
    million = view.cost_per_million_tokens
    if million is not None:
        entries.append(("cost per million tokens", format_money(million, view.currency)))
    return section("Summary", *_notes(view, has_samples=has_samples), numbers(entries))


def _notes(view: JobView, *, has_samples: bool) -> Iterator[str]:
    """What a reader should know before the numbers."""
    reason = "" if view.job is None else _reason(view.job.reason, has_samples=has_samples)
    said = [f"{view.state.capitalize()}: {reason}."] if reason else []
    said += [HOW_TO_RESUME] if view.can_resume else []
    if said:
        yield paragraph(" ".join(said))
    if view.former.num_runs:
        latest = f"the latest took {format_seconds(view.run_s)}"
        is_known = view.former.elapsed_s is not None
        unknown = "" if is_known else "; how long earlier ones took is not known"
        yield paragraph(f"Rows, tokens, time and cost are of all runs; {latest}{unknown}.")


def _reason(text: str, *, has_samples: bool) -> str:
    return text if has_samples or not text else f"raymoe status and {ASKS} say why"


def _found_prompts(view: JobView) -> list[tuple[str, str]]:
    """What shared prefixes saved; nothing without any."""
    if not view.num_cached_tokens:
        return []
    found = f"{view.num_cached_tokens:,} ({100 * view.cached_share:.0f} %)"
    return [
        ("prompt tokens computed", f"{view.num_computed_prompt_tokens:,}"),
        ("prompt tokens found in the KV cache", found),
    ]


def errors(view: JobView, *, has_samples: bool) -> str:
    """What error rows say; without samples, no part of a cell."""
    rows = [
        (_error_text(group, has_samples=has_samples), f"{group.num_rows:,}")
        for group in view.error_groups
    ]
    if not rows:
        return ""
    hidden = [] if has_samples else [paragraph(f"Parts of cells are left out; {ASKS} has them.")]
    return section("Rows with errors", table(("error", "rows"), rows), *hidden)


def _error_text(group: ErrorGroup, *, has_samples: bool) -> str:
    kind = error_kind(group.template)
    if has_samples or kind in OUR_ERRORS:
        return group.text(has_quotes=has_samples)
    return kind


def sample_rows(samples: Sequence[Sample]) -> str:
    """Prompts, each beside its answers."""
    return section("Prompts and answers", *map(_pair, samples)) if samples else ""


def _pair(sample: Sample) -> str:
    count = len(sample.answers)
    answers = [
        heading(f"Answer {number} of {count}" if count > 1 else "Answer")
        + preformatted(cut(answer))
        for number, answer in enumerate(sample.answers, 1)
    ]
    if sample.error:
        answers = [heading("Error"), preformatted(cut(sample.error))]
    prompt = heading(f"Prompt of row {sample.name}") + preformatted(cut(sample.prompt))
    return f'<div class="pair"><div>{prompt}</div><div>{"".join(answers)}</div></div>'


def cut(value: str) -> str:
    """Leave out the middle of a long text."""
    num_more = len(value) - MAX_CHARACTERS
    if num_more <= 0:
        return value
    half = MAX_CHARACTERS // 2
    return f"{value[:half]}\n[... {num_more:,} characters ...]\n{value[-half:]}"


MAX_RATIO = 1.5  # of measured to predicted time
WHY_SLOWER = (
    "Steps took much longer than predicted: other programs took cores meanwhile, or the rates of "
    "this node are not those that the plan knows. Run 'raymoe profile' once while nothing else "
    "runs, and its rates are used."
)


def accuracy(view: JobView) -> str:
    rows = [
        (
            actor.status.actor,
            f"{engine.num_steps:,}",
            format_seconds(engine.predicted_s),
            format_seconds(engine.busy_s),
            f"{100 * (engine.busy_s / engine.predicted_s - 1):+.0f} %",
            f"{100 * engine.link_busy:.0f} %",
        )
        for actor in view.actors
        if (engine := actor.status.engine) is not None and engine.predicted_s
    ]
    if not rows:
        return ""
    header = ("actor", "steps", "predicted", "measured", "gap", "link busy")
    ratios = [ratio for actor in view.actors if (ratio := measured_over_predicted(actor))]
    notes = [paragraph(WHY_SLOWER)] if max(ratios) > MAX_RATIO else []
    return section("Predicted and measured", table(header, rows), *notes, *_gantt(view.steps))


def pictures(view: JobView) -> str:
    title = "Over time" + (", in the latest run" if view.former.num_runs else "")
    actors = [actor for actor in view.actors if len(actor.status.history) > 1]
    if not actors:
        return section(title, paragraph("No actor ran long enough for a curve."))
    start_s = min(actor.status.started_unix_s for actor in actors)
    charts = (throughput(actors, start_s), *fills(actors, start_s))
    return section(title, *map(picture, charts))


def roofline(view: JobView) -> str:
    """The plan under its node's roofs; empty if no weights are read from host memory."""
    record = next((one for one in view.steps if one.operations), None)
    if record is None:
        return ""
    title = harmless(f"{record.model} on {record.hardware.name}, schedule {record.schedule}")
    operations = [dataclasses.replace(one, name=harmless(one.name)) for one in record.placed]
    return section("Roofline", picture(draw_operations(record.hardware, operations, title=title)))


def actors(view: JobView, *, has_samples: bool) -> str:
    header = (
        "actor", "node", "state", "rows", "error rows", "from the journal", "tokens in",
        "tokens out", "preemptions", "measured / predicted",
    )  # fmt: skip
    rows = [_actor_row(actor) for actor in view.actors]
    reasons = [
        f"{actor.status.actor}: {_reason(actor.status.reason, has_samples=has_samples)}"
        for actor in view.actors
        if actor.status.reason
    ]
    notes = [numbered([*reasons, *view.unreadable])] if reasons or view.unreadable else []
    return section("Actors", table(header, rows, num_names=3), *notes)


def settings(view: JobView, manifest: Manifest | None) -> str:
    parts = []
    if view.job is not None and view.job.settings:
        parts += [heading("Settings"), table(("", ""), view.job.settings, num_names=2)]
    plan = next((one.status.plan for one in view.actors if one.status.plan is not None), None)
    if plan is not None:
        parts += [heading("Plan, made for a typical job"), preformatted(plan.description)]
    if manifest is not None:
        fields = dataclasses.asdict(manifest).items()
        rows = [(name, str(value)) for name, value in fields]
        parts += [heading("Manifest"), table(("", ""), rows, num_names=2)]
    return section("Settings and manifest", *parts) if parts else ""


def when(view: JobView) -> str:
    seen = datetime.fromtimestamp(view.now_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    model = view.model or "no model"
    return f"{model} | {view.state} | {seen}"


def _actor_row(actor: ActorView) -> tuple[str, ...]:
    status, engine = actor.status, actor.status.engine
    ratio = measured_over_predicted(actor)
    return (
        status.actor,
        status.node,
        actor.state,
        f"{status.rows.num_rows:,}",
        f"{status.rows.num_error_rows:,}",
        f"{status.rows.num_found_rows:,}",
        NOTHING if engine is None else f"{engine.num_prompt_tokens:,}",
        NOTHING if engine is None else f"{engine.num_generated_tokens:,}",
        NOTHING if engine is None else f"{engine.num_preemptions:,}",
        NOTHING if ratio is None else f"{ratio:.2f}",
    )


def _gantt(steps: Sequence[StepRecord]) -> Iterator[str]:
    if not steps:
        return
    record = steps[0]
    load = record.load
    what = [f"{load.decode_rows:,.0f} sequences that decode"] if load.decode_rows else []
    what += [f"{load.prompt_tokens:,.0f} prompt tokens"] if load.prompt_tokens else []
    yield paragraph(
        f"A typical step of {record.actor}: {' and '.join(what)}, predicted "
        f"{format_seconds(record.predicted_s)}, measured {format_seconds(record.measured_s)}. "
        f"Below, {record.num_shown_layers} of its {record.num_layers} layers."
    )
    lanes = [_timeline("predicted", record.predicted), _timeline("measured", record.measured)]
    yield picture(draw_svg(lanes, title=f"Schedule {harmless(record.schedule)}"))


def _timeline(name: str, spans: Sequence[PlainSpan]) -> Timeline:
    return Timeline(
        name,
        tuple(
            Span(
                Task(op=Op(op), layer=layer, part=part, resource=Resource(resource)), start_s, end_s
            )
            for op, layer, part, resource, start_s, end_s in spans
        ),
    )


def write_report(status_dir: Path, path: Path, *, samples: Sequence[Sample] | None = None) -> None:
    """Write a job's report whole, for this user alone.

    Args:
        samples: Rows to show; None shows no part of any cell, in errors neither.

    Raises:
        ConfigError: There is another file.
    """
    if path.exists() and not is_report(path):
        what = kind_problem(path, follows_links=True) or "is there and no report of raymoe"
        raise ConfigError(f"{path} {what}; choose another file")
    view = JobView.of(read_status(status_dir), time.time())
    name = status_dir.name.removesuffix(SUFFIX)
    manifest = find_manifest(status_dir)
    page_text = make_report(view, name, manifest, samples=samples)
    write_file(path, page_text, mode=PRIVATE_FILE)


def make_report(
    view: JobView,
    name: str,
    manifest: Manifest | None = None,
    *,
    samples: Sequence[Sample] | None = None,
) -> str:
    """The HTML page of a job; `manifest` is what its tokens depend on."""
    has_samples = samples is not None
    parts = (
        summary(view, has_samples=has_samples),
        errors(view, has_samples=has_samples),
        sample_rows(samples or ()),
        pictures(view),
        accuracy(view),
        roofline(view),
        actors(view, has_samples=has_samples),
        settings(view, manifest),
    )
    return page(f"raymoe: {name}", when(view), filter(None, parts))


def find_manifest(status_dir: Path) -> Manifest | None:
    for path in manifests_beside(status_dir):
        if path.is_file():
            try:
                return manifests.read(path)
            except ConfigError:  # another version's manifest: the page shows the rest
                continue
    return None
