"""How far are we? A live line on a terminal, a log line every minute elsewhere."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from raymoe.data.columns import CHOICES_COLUMN, ERROR_COLUMN
from raymoe.data.status.row_counter import error_kind
from raymoe.units import format_seconds

LOG_EVERY_S = 60.0
BAR_CELLS = 24
MAX_REASON_CHARACTERS = 120


@dataclass(kw_only=True)
class Tally:
    """What has come out so far."""

    total_rows: int
    num_rows: int = 0
    num_errors: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    started_s: float = field(default_factory=time.monotonic)
    finished_s: float | None = None

    def add(self, table: pa.Table) -> None:
        """Count the rows of one output table."""
        self.num_rows += table.num_rows
        self.num_input_tokens += pc.sum(table.column("num_input_tokens")).as_py() or 0
        self.num_generated_tokens += pc.sum(_generated_tokens(table)).as_py() or 0
        errors = [error for error in table.column(ERROR_COLUMN).to_pylist() if error]
        self.num_errors += len(errors)
        self.reasons.update(_without_numbers(error) for error in errors)
        self.kinds.update(error_kind(error, self.kinds) for error in errors)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, up to the end if there was one."""
        return (self.finished_s or time.monotonic()) - self.started_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, loading included."""
        return self.num_generated_tokens / max(self.elapsed_s, 1e-9)

    def line(self) -> str:
        """Return rows, speed and the time that is left, as one line."""
        parts = [f"{self.num_rows:,} of {self.total_rows:,} rows"]
        if self.num_errors:
            parts.append(f"{self.num_errors:,} error rows")
        parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        parts.append(f"{format_seconds(self.elapsed_s)} elapsed")
        if 0 < self.num_rows < self.total_rows:
            left_s = (self.total_rows - self.num_rows) * self.elapsed_s / self.num_rows
            parts.append(f"{format_seconds(left_s)} left")
        return " | ".join(parts)


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: rows may hold what rich takes for markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Progress:
    """Shows a tally while it grows; a context manager."""

    def __init__(
        self,
        tally: Tally,
        console: Console,
        *,
        more: Callable[[], Iterable[str]] = tuple,
        log_every_s: float = LOG_EVERY_S,
    ) -> None:
        """Show.

        Args:
            tally: What comes out.
            console: Where; harmless text only.
            more: Asked for what else there is to say, each time that the line is shown.
            log_every_s: Where there is no terminal.
        """
        self._tally, self._more = tally, more
        self._console = console
        self._log_every_s = log_every_s
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
        tally = self._tally
        filled = round(BAR_CELLS * tally.num_rows / max(1, tally.total_rows))
        return Text(f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {self._line()}")

    def _log(self) -> None:
        while not self._is_over.wait(self._log_every_s):
            self._console.print(self._line())

    def _line(self) -> str:
        return " | ".join((self._tally.line(), *self._more()))


def _generated_tokens(table: pa.Table) -> pa.ChunkedArray:
    """Return the number of tokens of each row, or of each sample where the table has them."""
    if CHOICES_COLUMN not in table.column_names:
        return table.column("num_generated_tokens")
    return pc.struct_field(pc.list_flatten(table.column(CHOICES_COLUMN)), "num_generated_tokens")


def _without_numbers(error: str) -> str:
    """Return an error without what differs from row to row, so that equal reasons are counted."""
    return re.sub(r"\d+", "N", error)[:MAX_REASON_CHARACTERS]
