"""Progress: counts, speed, the time that is left."""

import io
import time

import pyarrow as pa
from rich.console import Console

from raymoe.cli.pipeline import Progress
from raymoe.cli.writers import RunStats


def table(num_rows, error=""):
    return pa.table(
        {
            "num_input_tokens": pa.array([5] * num_rows, pa.int32()),
            "num_generated_tokens": pa.array([10] * num_rows, pa.int32()),
            "__inference_error__": pa.array([error] * num_rows, pa.string()),
        }
    )


def test_tokens_rows_and_reasons_are_counted():
    run_stats = RunStats(total_rows=10, started_s=0.0, finished_s=2.0)
    run_stats.add(table(4))
    run_stats.add(table(1, "ValueError: 17 is odd"))
    run_stats.add(table(1, "ValueError: 19 is odd"))
    assert (run_stats.num_rows, run_stats.num_errors) == (6, 2)
    assert (run_stats.num_input_tokens, run_stats.num_generated_tokens) == (30, 60)
    assert run_stats.tokens_per_s == 30
    assert run_stats.reasons == {"ValueError: N is odd": 2}


def test_the_line_says_how_long_the_rest_takes():
    run_stats = RunStats(total_rows=40, started_s=0.0, finished_s=20.0)
    run_stats.add(table(10))
    assert run_stats.line() == "10 of 40 rows | 5 tokens/s | 20.0 s elapsed | 1m00s left"


def test_a_log_gets_lines_without_control_characters():
    log = io.StringIO()
    run_stats = RunStats(total_rows=2)
    with Progress(run_stats, Console(file=log, width=200), log_every_s=0.01):
        deadline = time.monotonic() + 5
        while "of 2 rows" not in log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "0 of 2 rows" in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_errors_are_counted_by_kind_whatever_their_text_is():
    run_stats = RunStats(total_rows=10)
    run_stats.add(table(2, "ConfigError: 17 is odd"))
    run_stats.add(table(1, "\x1b[31m no kind"))
    assert run_stats.kinds == {"ConfigError": 2, "other": 1}


def test_a_line_has_what_else_there_is_to_say():
    log = io.StringIO()
    said = iter([(), ("0.5 per million tokens", "now node-a 7 tokens/s")])
    shown = []

    def more():
        shown.append(next(said, ("last",)))
        return shown[-1]

    with Progress(
        RunStats(total_rows=2), Console(file=log, width=200), more=more, log_every_s=0.01
    ):
        deadline = time.monotonic() + 5
        while len(shown) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    first, second, *_ = log.getvalue().splitlines()
    assert first.endswith("elapsed")
    assert second.endswith("elapsed | 0.5 per million tokens | now node-a 7 tokens/s")


def test_a_terminal_gets_a_line_that_is_drawn_again():
    log = io.StringIO()
    run_stats = RunStats(total_rows=2)
    console = Console(file=log, width=200, force_terminal=True)
    with Progress(run_stats, console):
        run_stats.add(table(2))
    assert "2 of 2 rows" in log.getvalue()
    assert "\x1b[2K" in log.getvalue()
