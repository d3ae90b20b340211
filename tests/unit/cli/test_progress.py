"""What a job says of itself: a line while it runs, a few at its end."""

import dataclasses
import io
import itertools
import re
import time

import pyarrow as pa
import pytest
from rich.cells import cell_len
from rich.console import Console

from raymoe.cli.progress import Progress, progress_line, summary_lines
from raymoe.cli.writers import RunStats
from raymoe.data.error_groups import ErrorGroups
from raymoe.data.status import FormerRuns, StatusFiles
from raymoe.status_view import JobView
from tests.unit.data.statuses import ENGINE, NOW_S, ROWS, actor, job


def table(num_rows, error=""):
    return pa.table(
        {
            "num_input_tokens": pa.array([5] * num_rows, pa.int32()),
            "num_generated_tokens": pa.array([10] * num_rows, pa.int32()),
            "__inference_error__": pa.array([error] * num_rows, pa.string()),
        }
    )


def view(status=None, actors=(), now_s=NOW_S):
    files = StatusFiles(job=status, actors=tuple(actors), written_unix_s=(NOW_S,) * len(actors))
    return JobView.of(files, now_s)


def busy(name="node-a-1-abc", num_finished=1250):
    engine = dataclasses.replace(ENGINE, num_finished_rows=num_finished)
    return actor(name, engine=engine, rows=dataclasses.replace(ROWS, num_rows=1200))


def groups(*errors):
    found = ErrorGroups()
    found.add(errors)
    return found.groups()


LARGE = job(total_rows=12_000, num_rows=1200, price_per_hour=0.6, num_error_rows=12)


def test_tokens_rows_and_errors_are_counted():
    run_stats, part = RunStats(total_rows=10), RunStats(total_rows=0)
    run_stats.add(table(4))
    part.add(table(1, "ValueError: 17 is odd"))
    part.add(table(1, "ValueError: 19 is odd"))
    run_stats.merge(part)
    assert (run_stats.num_rows, run_stats.num_errors) == (6, 2)
    assert (run_stats.num_input_tokens, run_stats.num_generated_tokens) == (30, 60)
    assert [(one.num_rows, one.text()) for one in run_stats.error_groups.groups()] == [
        (2, "ValueError: 17 to 19 is odd")
    ]


def test_answers_at_their_limit_of_tokens_are_counted():
    stats = RunStats(total_rows=3)
    part = table(3).append_column("finish_reason", pa.array(["length", "stop", "length"]))
    stats.add(part)
    stats.merge(stats)
    assert stats.num_cut == 4


def test_a_line_counts_finished_rows_and_says_how_long_the_rest_takes():
    line = progress_line(view(LARGE, [busy()]))
    # Found 10, and 1,250 finished by the engine in 600 s, of which 1,200 are in batches.
    assert line == (
        "1,260 of 12,000 rows | 12 with errors | 10 tokens/s | 10m00s elapsed | 1h25m14s left | "
        "16.67 USD per million tokens"
    )


@pytest.mark.parametrize("width", [120, 80, 60, 40, 20, 8])
@pytest.mark.parametrize("num_nodes", [1, 9])
def test_a_line_fits_and_keeps_rows_and_the_time_left(width, num_nodes):
    actors = [busy(f"node-{i}-1-abc", 130) for i in range(num_nodes)]
    line = progress_line(view(LARGE, actors), width)
    assert cell_len(line) <= width
    if width >= 60:
        assert " of 12,000 rows" in line
        assert " left" in line
    if width >= 80:
        assert line.startswith("[#")
        assert "tokens/s" in line


@pytest.mark.parametrize("columns", [120, 80, 60])
def test_a_terminal_shows_one_line_whatever_its_width(columns):
    log = io.StringIO()
    console = Console(file=log, width=columns, force_terminal=True, soft_wrap=True)
    seen = view(LARGE, [busy(f"node-{i}-1-abc") for i in range(3)])
    with Progress(lambda: seen, console):
        pass
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log.getvalue())
    lines = [line for line in re.split(r"[\r\n]", shown) if line]
    assert lines
    assert all("of 12,000 rows" in line and cell_len(line) < columns for line in lines)


def test_while_weights_load_the_line_says_so():
    loading = actor(
        state="loading", engine=None, history=(), rows=dataclasses.replace(ROWS, num_rows=0)
    )
    line = progress_line(view(job(num_rows=0, total_rows=64), [loading]), 79)
    assert "0 of 64 rows" in line
    assert "loading the weights" in line


def test_a_log_gets_lines_without_control_characters():
    log = io.StringIO()
    seen = view(job(num_rows=0, total_rows=2))
    with Progress(lambda: seen, Console(file=log, width=200), log_every_s=0.01):
        deadline = time.monotonic() + 5
        while log.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "0 of 2 rows" in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_errors_are_counted_by_kind_whatever_their_text_is():
    failed = groups("ConfigError: 17 is odd", "ConfigError: it's even", "\x1b[31m no kind")
    assert view(job(error_groups=failed)).errors == {"ConfigError": 2, "other": 1}


def test_a_summary_is_of_all_runs():
    former = FormerRuns(
        num_runs=2, num_rows=300, num_error_rows=1, num_input_tokens=100,
        num_generated_tokens=4000, elapsed_s=600.0, node_s=9000.0,
        error_groups=groups("ValueError: 3 is odd"),
    )  # fmt: skip
    done = job(
        state="finished", num_rows=400, former=former, error_groups=groups("ValueError: 5 is odd")
    )
    assert list(summary_lines(view(done, [actor()], NOW_S + 3600))) == [
        "700 rows in 20m00s, 4 of them with errors",
        "  2 rows: ValueError: 3 to 5 is odd",
        "tokens: 1,000 read, 10,000 generated (8 tokens/s, loading included)",
        "time: 20m00s in 3 runs, 10m00s in the latest",
        "cost: 1.60 USD, 160.00 USD per million tokens generated",
    ]


def test_a_summary_says_what_is_not_known():
    former = FormerRuns(num_runs=1, num_rows=300, num_generated_tokens=4000, elapsed_s=None)
    done = job(state="finished", num_rows=100, former=former)
    lines = list(summary_lines(view(done)))
    assert "400 rows in 10m00s, 3 of them with errors" in lines
    assert any("10 tokens/s" in line for line in lines)  # of this run's 6,000 tokens
    assert any("how long earlier runs took is not known" in line for line in lines)


def test_of_many_errors_a_summary_has_the_most_frequent():
    errors = [
        f"Error{name}: no"
        for name, count in zip("abcdefg", itertools.count(1))
        for _ in range(count)
    ]
    lines = list(summary_lines(view(job(error_groups=groups(*errors)))))
    assert lines[1] == "  7 rows: Errorg: no"
    assert lines[6] == "  3 more rows with other errors, see column __inference_error__"
