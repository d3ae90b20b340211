"""The parts of a report, each from what a reader of the status knows of a job."""

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain

from raymoe.data.manifest import Manifest
from raymoe.data.status.record import PassRecord, PlainSpan
from raymoe.data.status.view import ActorView, JobView, measured_over_predicted
from raymoe.plan.pictures import draw_operations
from raymoe.report import over_time
from raymoe.report.page import (
    heading,
    numbered,
    numbers,
    paragraph,
    picture,
    preformatted,
    section,
    table,
)
from raymoe.safe_text import harmless
from raymoe.schedule.draw import draw_svg
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from raymoe.units import format_seconds

MAX_MESSAGES = 20
NOTHING = "-"


def summary(view: JobView) -> str:
    """The large numbers."""
    job = view.job
    total = f" of {job.total_rows:,}" if job is not None else ""
    entries = [
        ("rows", f"{view.num_rows:,}{total}"),
        ("error rows", f"{view.num_error_rows:,}"),
        ("tokens in", f"{view.num_input_tokens:,}"),
        ("tokens out", f"{view.num_generated_tokens:,}"),
        ("tokens out per second", f"{view.tokens_per_s:,.0f}"),
        ("time", format_seconds(view.elapsed_s)),
        ("nodes, actors", f"{len(view.nodes)}, {len(view.actors)}"),
    ]
    if job is not None and job.num_written_before:
        entries.insert(1, ("rows of former runs", f"{job.num_written_before:,}"))
    if view.cost is not None:
        entries.append(("cost", f"{view.cost:.3g}"))
    if view.cost_per_million_tokens is not None:
        entries.append(("cost per million tokens out", f"{view.cost_per_million_tokens:.3g}"))
    notes = [paragraph(f"{view.state}: {job.reason}")] if job is not None and job.reason else []
    return section("Summary", *notes, numbers(entries))


def errors(view: JobView) -> str:
    """Error rows by kind, and what the first of them said; empty where there are none."""
    said = chain.from_iterable(one.status.rows.messages for one in view.actors)
    messages = list(dict.fromkeys(said))
    if not (view.errors or messages):
        return ""
    return section(
        "Error rows",
        table(("kind", "rows"), [(kind, f"{count:,}") for kind, count in view.errors]),
        heading("What the first of them said"),
        numbered(messages[:MAX_MESSAGES]),
    )


def accuracy(view: JobView) -> str:
    """Passes as they were predicted and as they were."""
    rows = [
        (
            actor.status.actor,
            f"{engine.num_passes:,}",
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
    header = ("actor", "passes", "predicted", "measured", "gap", "link busy")
    return section("Predicted and measured", table(header, rows), *_gantt(view.passes))


def pictures(view: JobView) -> str:
    """What happened over time."""
    actors = [actor for actor in view.actors if len(actor.status.history) > 1]
    if not actors:
        return section("Over time", paragraph("No actor ran long enough to be seen twice."))
    start_s = min(actor.status.started_unix_s for actor in actors)
    charts = (over_time.throughput(actors, start_s), *over_time.fills(actors, start_s))
    return section("Over time", *map(picture, charts))


def roofline(view: JobView) -> str:
    """Where the plan lies under the roofs of its node; empty where no weights are read there."""
    record = next((one for one in view.passes if one.operations), None)
    if record is None:
        return ""
    title = harmless(f"{record.model} on {record.hardware.name}, schedule {record.schedule}")
    operations = [dataclasses.replace(one, name=harmless(one.name)) for one in record.placed]
    return section("Roofline", picture(draw_operations(record.hardware, operations, title=title)))


def actors(view: JobView) -> str:
    """A line for each process that generated, and what could not be read."""
    header = (
        "actor", "node", "state", "rows", "error rows", "from the journal", "tokens out",
        "preemptions", "measured / predicted",
    )  # fmt: skip
    rows = [_actor_row(actor) for actor in view.actors]
    reasons = [
        f"{actor.status.actor}: {actor.status.reason}"
        for actor in view.actors
        if actor.status.reason
    ]
    notes = [numbered([*reasons, *view.unreadable])] if reasons or view.unreadable else []
    return section("Actors", table(header, rows, num_names=3), *notes)


def settings(view: JobView, manifest: Manifest | None) -> str:
    """What was asked for, what was planned, and what the tokens depend on."""
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
    """Model, state and time, in a line."""
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
        NOTHING if engine is None else f"{engine.num_generated_tokens:,}",
        NOTHING if engine is None else f"{engine.num_preemptions:,}",
        NOTHING if ratio is None else f"{ratio:.2f}",
    )


def _gantt(passes: Sequence[PassRecord]) -> Iterator[str]:
    if not passes:
        return
    record = passes[0]
    load = record.load
    what = [f"{load.decode_rows:,.0f} sequences that decode"] if load.decode_rows else []
    what += [f"{load.prompt_tokens:,.0f} prompt tokens"] if load.prompt_tokens else []
    yield paragraph(
        f"A typical pass of {record.actor}: {' and '.join(what)}, predicted "
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
