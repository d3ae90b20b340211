"""What `raymoe generate` says: what it is doing, how far it is, and what came of it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raymoe.data.status import GENERATE, rate_unit
from raymoe.safe_text import harmless
from raymoe.status_view import JobView, node_rates
from raymoe.units import format_money, format_seconds

LOG_EVERY_S, YOUNG_S, LOG_LATER_EVERY_S = 10.0, 300.0, 60.0
MIN_BAR, MAX_BAR = 6, 24  # cells
RATE = 3  # rank of the speed
SEPARATOR = " | "
MAX_GROUPS = 5


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: rows may hold what rich takes for markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Part(NamedTuple):
    """A part of the line of progress; where it is narrow, those of low rank stay."""

    rank: int
    text: str


def progress_parts(view: JobView) -> Iterator[Part]:
    """Yield what there is to say about a job that runs."""
    total = 0 if view.total_rows is None else view.total_rows
    yield Part(0, f"{view.num_finished_rows:,} of {total:,} rows")
    if view.num_error_rows:
        yield Part(2, f"{view.num_error_rows:,} with errors")
    if view.is_loading:
        yield Part(1, "loading the weights")
    elif not (view.actors or view.num_rows):
        yield Part(1, "waiting for actors")
    elif view.actors:
        yield Part(RATE, f"{view.tokens_per_s:,.0f} {rate_unit(view.task)}")
    yield Part(4, f"{format_seconds(view.run_s)} elapsed")
    if view.left_s is not None and view.num_finished_rows < total:
        yield Part(1, f"{format_seconds(view.left_s)} left")
    if view.cost_per_million_tokens is not None:
        million = format_money(view.cost_per_million_tokens, view.currency)
        yield Part(5, f"{million} per million tokens")
    if len(view.nodes) > 1:
        yield Part(6, harmless(node_rates(view.nodes)))


def progress_line(view: JobView, width: int | None = None) -> str:
    """Return rows, speed and time left as one line; with a width, with a bar and not longer."""
    parts = list(progress_parts(view))
    if width is None:
        return SEPARATOR.join(part.text for part in parts)
    while len(parts) > 1:
        last = max(parts, key=lambda part: part.rank)
        bar = len("[] ") + MIN_BAR if last.rank > RATE else 0  # speed matters more than a bar
        if _length(parts) + bar <= width:
            break
        parts.remove(last)
    text = SEPARATOR.join(part.text for part in parts)
    cells = min(MAX_BAR, width - len(text) - len("[] "))
    if cells < MIN_BAR:
        return text[:width]
    filled = round(cells * min(1.0, view.num_finished_rows / max(1, view.total_rows or 0)))
    return f"[{'#' * filled}{'.' * (cells - filled)}] {text}"


def _length(parts: list[Part]) -> int:
    return sum(len(part.text) for part in parts) + len(SEPARATOR) * (len(parts) - 1)


class Progress:
    """Shows how a job does while it runs; a context manager."""

    def __init__(
        self, look: Callable[[], JobView], console: Console, *, log_every_s: float = LOG_EVERY_S
    ) -> None:
        """Show.

        Args:
            look: Returns the latest that is known.
            log_every_s: Where there is no terminal; after some minutes a line comes less often.
        """
        self._look, self._console, self._log_every_s = look, console, log_every_s
        self._began_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self._console, transient=True)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._log, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def _draw(self) -> Text:
        # Some terminals wrap a line that fills them.
        return Text(progress_line(self._now(), self._console.width - 1))

    def _log(self) -> None:
        while not self._is_over.wait(self._wait_s()):
            self._console.print(progress_line(self._now()))

    def _wait_s(self) -> float:
        is_young = time.monotonic() - self._began_s < YOUNG_S
        return self._log_every_s if is_young else max(self._log_every_s, LOG_LATER_EVERY_S)

    def _now(self) -> JobView:
        return dataclasses.replace(self._look(), now_s=time.time())


def print_summary(view: JobView, output: str, console: Console) -> None:
    """Print what came of a job over all its runs, and where the output is."""
    for line in summary_lines(view):
        console.print(harmless(line))
    console.print(f"output: {harmless(output)}")


def summary_lines(view: JobView) -> Iterator[str]:
    """Yield rows, errors, tokens, time and cost of a job."""
    errors = f", {view.num_error_rows:,} of them with errors" if view.num_error_rows else ""
    yield f"{view.num_rows:,} rows in {format_seconds(view.elapsed_s)}{errors}"
    yield from error_lines(view)
    yield f"tokens: {tokens_text(view)}"
    if view.former.num_runs:
        yield f"time: {time_text(view)}"
    if view.cost is not None:
        yield f"cost: {cost_text(view)}"


def error_lines(view: JobView) -> Iterator[str]:
    """Yield what error rows say, the most frequent first."""
    groups = view.error_groups
    for group in groups[:MAX_GROUPS]:
        rows = "1 row" if group.num_rows == 1 else f"{group.num_rows:,} rows"
        yield f"  {rows}: {group.text()}"
    num_more = sum(group.num_rows for group in groups[MAX_GROUPS:])
    if num_more:
        yield f"  {num_more:,} more rows with other errors, see column __inference_error__"


def tokens_text(view: JobView) -> str:
    """Say how many tokens, and how fast, loading included."""
    generated = f", {view.num_generated_tokens:,} generated" if view.task == GENERATE else ""
    rate = f"{view.tokens_per_s:,.0f} {rate_unit(view.task)}"
    return f"{view.num_input_tokens:,} read{generated} ({rate}, loading included)"


def time_text(view: JobView) -> str:
    """Say how long it took, in how many runs."""
    former = view.former
    if not former.num_runs:
        return format_seconds(view.run_s)
    latest = f"{format_seconds(view.run_s)} in the latest"
    if former.elapsed_s is None:
        return f"{latest} run; how long earlier runs took is not known"
    return f"{format_seconds(view.elapsed_s)} in {former.num_runs + 1} runs, {latest}"


def cost_text(view: JobView) -> str:
    """Say what all machines cost in all runs."""
    text = format_money(view.cost or 0.0, view.currency)
    if view.former.elapsed_s is None:
        return f"{text} for the latest run"
    if view.cost_per_million_tokens is None:
        return text
    kind = "generated" if view.task == GENERATE else "read"
    million = format_money(view.cost_per_million_tokens, view.currency)
    return f"{text}, {million} per million tokens {kind}"
