"""`raymoe status`: how far a job is, from what its processes wrote beside its output."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raymoe.cli.progress import cost_text, error_lines, time_text
from raymoe.data.status import GENERATE, find_status, rate_unit, read_status
from raymoe.safe_text import harmless
from raymoe.status_view import (
    HOW_TO_RESUME,
    LOST,
    NOTHING,
    ActorView,
    JobView,
    ago,
    measured_over_predicted,
)
from raymoe.units import format_seconds

WATCH_EVERY_S = 2.0
ACTOR_COLUMNS = (
    "actor", "state", "rows", "tokens/s", "slots", "KV", "preempted", "vs plan",
)  # fmt: skip

ACTOR_CAPTION = (
    "slots, KV: shares in use now; preempted: sequences that lost their KV blocks and were "
    "computed again; vs plan: measured over predicted time of steps"
)


def run(
    job: Annotated[
        Path,
        typer.Argument(
            help="Show the job that has this output, journal_dir or status_dir.", metavar="JOB"
        ),
    ],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the status every 2 s until the job is over.")
    ] = False,
) -> None:
    """Show how far a job is and how its actors do, while it runs or after it.

    A job is running, finished, stopped by an interrupt, failed, or lost: its driver has said
    nothing for half a minute, so it was killed or is cut off. The command works on any
    machine that can read the files beside the output.
    """
    directory = find_status(job)
    if watch and not as_json:
        _watch(directory)
        return
    view = look(directory)
    while watch and view.is_alive:
        typer.echo(json.dumps(view.as_plain()))
        threading.Event().wait(WATCH_EVERY_S)
        view = look(directory)
    if as_json:
        typer.echo(json.dumps(view.as_plain(), indent=None if watch else 2))
    else:
        Console().print(render(view))


def look(directory: Path) -> JobView:
    """Read a job's status as it is now."""
    return JobView.of(read_status(directory), time.time())


def _watch(directory: Path) -> None:
    with Live(render(look(directory)), auto_refresh=False) as live:
        while True:
            view = look(directory)
            live.update(render(view), refresh=True)
            if not view.is_alive:
                return
            threading.Event().wait(WATCH_EVERY_S)


def render(view: JobView) -> RenderableType:
    parts: list[RenderableType] = [_text(line) for line in _lines(view)]
    if len(view.nodes) > 1:
        parts.append(_node_table(view))
    if view.actors:
        parts.append(_actor_table(view))
    parts += [_text(f"could not be read: {line}") for line in view.unreadable]
    return Group(*parts)


def _lines(view: JobView) -> Iterator[str]:
    yield " | ".join(_state_parts(view))
    yield " | ".join(_rate_parts(view))
    if view.cost is not None:
        yield f"cost: {cost_text(view)}"
    if view.former.num_runs:
        yield f"time: {time_text(view)}"
    if view.num_cached_tokens:
        share = f"{100 * view.cached_share:.0f} %"
        yield f"{view.num_cached_tokens:,} prompt tokens ({share}) were found in the KV cache"
    yield from error_lines(view)
    if view.job is not None and view.job.reason:
        yield f"reason: {view.job.reason}"
    if view.can_resume:
        yield HOW_TO_RESUME


def _state_parts(view: JobView) -> Iterator[str]:
    job = view.job
    yield f"{job.name if job is not None else view.model or 'job'}: {view.state}"
    if view.total_rows is None:
        yield f"{view.num_finished_rows:,} rows finished"
    else:
        yield f"{view.num_finished_rows:,} of {view.total_rows:,} rows finished"
        if view.num_rows != view.num_finished_rows:
            yield f"{view.num_rows:,} of them in the output"
    if view.num_error_rows:
        yield f"{view.num_error_rows:,} with errors"
    if view.is_loading:
        yield "loading the weights"
    if view.state == LOST and job is not None:
        yield f"its driver last wrote {ago(view.now_s - job.updated_unix_s)}"


def _rate_parts(view: JobView) -> Iterator[str]:
    rate = f"{view.tokens_per_s:,.0f} {rate_unit(view.task)}"
    yield f"{rate} in the last minute" if view.is_alive else f"{rate}, loading included"
    yield f"{view.num_input_tokens:,} tokens read"
    if view.task == GENERATE:
        yield f"{view.num_generated_tokens:,} generated"
    yield f"{format_seconds(view.elapsed_s)} elapsed"
    if view.left_s is not None:
        yield f"{format_seconds(view.left_s)} left"


def _node_table(view: JobView) -> Table:
    table = _table("nodes", ("node", "actors", "rows", "tokens/s"), num_names=1)
    for node in view.nodes:
        alive = sum(actor.is_alive for actor in node.actors)
        _add(
            table,
            node.name,
            f"{alive} of {len(node.actors)}",
            f"{node.num_rows:,}",
            f"{node.tokens_per_s:,.0f}",
        )
    return table


def _actor_table(view: JobView) -> Table:
    table = _table("actors", ACTOR_COLUMNS, num_names=2)
    for actor in view.actors:
        _add(table, *_actor_cells(actor))
    table.caption = ACTOR_CAPTION
    return table


def _actor_cells(actor: ActorView) -> Iterator[str]:
    engine, ratio = actor.status.engine, measured_over_predicted(actor)
    yield actor.status.actor
    yield actor.state if actor.state != LOST else f"lost, {format_seconds(actor.age_s)}"
    yield f"{actor.status.rows.num_rows:,}"
    yield f"{actor.tokens_per_s:,.0f}" if actor.is_alive else NOTHING
    yield NOTHING if engine is None else f"{100 * engine.pool_fill:.0f} %"
    yield NOTHING if engine is None else f"{100 * engine.kv_use:.0f} %"
    yield NOTHING if engine is None else f"{engine.num_preemptions:,}"
    yield NOTHING if ratio is None else f"{ratio:.2f}"


def _table(title: str, header: tuple[str, ...], *, num_names: int) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < num_names else "right")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(_text(cell) for cell in cells))


def _text(value: str) -> Text:
    return Text(harmless(value))
