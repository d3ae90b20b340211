"""`raymoe status` and `raymoe report`: from another process, while a job runs and after it."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from raymoe.cli import run
from raymoe.cli.pipeline import JobWatch, RunStats
from raymoe.data.error_groups import ErrorGroup
from raymoe.data.status import read_status
from raymoe.errors import ExecutionError
from raymoe.report import is_report
from raymoe.status_view import node_rates
from tests.unit.cli.test_progress import table
from tests.unit.data.statuses import NOW_S, actor, job, write

ROOT = Path(__file__).parents[3]


@pytest.fixture
def answers(tmp_path):
    """A job that runs right now on two nodes, one of which died."""
    shift_s = time.time() - NOW_S
    alive, dead = (moved(actor(name), shift_s) for name in ("node-a-1-abc", "node-b-2-def"))
    dead = dataclasses.replace(dead, updated_unix_s=dead.updated_unix_s - 100)
    status = write(
        tmp_path / "answers.status",
        job=dataclasses.replace(job(), updated_unix_s=time.time()),
        actors=[alive, dead],
    )
    old_s = time.time() - 100
    os.utime(status / "actor-node-b-2-def.json", (old_s, old_s))
    return tmp_path / "answers"


def moved(status, shift_s):
    history = tuple((time_s + shift_s, *rest) for time_s, *rest in status.history)
    return dataclasses.replace(
        status, updated_unix_s=status.updated_unix_s + shift_s, history=history
    )


def test_the_status_has_the_job_its_nodes_and_its_dead(answers, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["status", str(answers)]) == 0
    shown = capsys.readouterr().out
    assert "answers: running | 207 of 400 rows finished | 100 of them in the output" in shown
    assert "3 with errors" in shown
    assert "10 tokens/s in the last minute" in shown
    assert re.search(r"9m\d\ds left", shown)  # 193 rows at 207 in ten minutes
    assert "USD per million tokens generated" in shown
    assert "lost, 1m4" in shown  # 100 s, or what a busy machine made of them
    assert "2 rows: ConfigError: column 'prompt' is empty" in shown
    assert "node-b" in shown


def test_the_status_as_json_is_one_object(answers, capsys):
    assert run(["status", str(answers), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["state"], plain["num_rows"], plain["total_rows"]) == ("running", 100, 400)
    assert plain["num_finished_rows"] == 207  # of the dead only those of complete batches
    assert plain["error_groups"][1] == {"num_rows": 1, "error": "DecodeError: 'my cell'"}
    assert [one["state"] for one in plain["actors"]] == ["running", "lost"]
    assert [one["node"] for one in plain["nodes"]] == ["node-a", "node-b"]


def test_watching_ends_with_the_job(answers, capsys):
    write(answers.with_name("answers.status"), job=job(state="finished", num_rows=400))
    assert run(["status", str(answers), "--watch"]) == 0
    assert "answers: finished | 400 of 400 rows finished" in capsys.readouterr().out


def test_a_job_that_is_not_there_is_bad_usage(tmp_path, capsys):
    assert run(["status", str(tmp_path / "nothing")]) == 2
    assert "no status of a job here" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "nothing")]) == 2


def test_names_that_actors_chose_do_nothing_to_a_terminal(tmp_path, capsys):
    evil = "\x1b]0;owned\x07\x1b[2J"
    write(
        tmp_path / "answers.status",
        job=job(name=evil, reason=evil, error_groups=(ErrorGroup(num_rows=1, template=evil),)),
        actors=[actor(node=evil), actor("other-1-abc")],
    )
    (tmp_path / "answers.status" / "actor-torn.json").write_text(f'{{"{evil}')
    assert run(["status", str(tmp_path / "answers")]) == 0
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_report_is_made_from_a_job_that_runs(answers, capsys):
    assert run(["report", str(answers)]) == 0
    path = answers.with_name("answers.report.html")
    assert str(path) in capsys.readouterr().out
    assert is_report(path)
    other = answers.with_name("other.html")
    assert run(["report", str(answers), "--output", str(other)]) == 0
    assert is_report(other)
    missing = answers.with_name("missing") / "other.html"
    assert run(["report", str(answers), "--output", str(missing)]) == 1


def test_status_needs_neither_torch_nor_ray(answers):
    script = (
        "import sys; from raymoe.cli import run\n"
        f"assert run(['status', {str(answers)!r}]) == run(['report', {str(answers)!r}]) == 0\n"
        "loaded = {'torch', 'ray', 'numba', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True)


def watched(tmp_path, run_stats):
    return JobWatch(
        tmp_path, run_stats, name="job", model="m", settings=(("a", "b"),), price_per_hour=1.0
    )


def caused(error, cause):
    error.__cause__ = cause
    return error


def test_a_driver_says_how_its_job_ended(tmp_path):
    run_stats = RunStats(total_rows=5)
    with watched(tmp_path, run_stats) as watch:
        watch.note("predicted", "1 s to generate")
        run_stats.add(table(4))
        run_stats.add(table(1, "ConfigError: no"))
        run_stats.finished_s = run_stats.started_s + 2.0
    done = read_status(tmp_path).job
    assert done.state == "finished"
    assert (done.num_rows, done.num_error_rows, done.total_rows) == (5, 1, 5)
    assert (done.num_input_tokens, done.num_generated_tokens) == (25, 50)
    settings = (("a", "b"), ("predicted", "1 s to generate"))
    assert (done.elapsed_s, done.settings) == (2.0, settings)
    assert [(one.num_rows, one.text()) for one in done.error_groups] == [(1, "ConfigError: no")]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "finished", ""),
        (ExecutionError("the engine broke"), "failed", "the engine broke"),
        (ValueError(), "failed", "ValueError"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (KeyboardInterrupt("by SIGTERM"), "stopped", "by SIGTERM"),
        (caused(ExecutionError("12 rows are safe"), KeyboardInterrupt()), "stopped", "12 rows"),
    ],
)
def test_a_driver_says_whether_its_job_was_stopped_or_failed(tmp_path, error, state, reason):
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, watched(tmp_path, RunStats(total_rows=5)):
        if error is not None:
            raise error
    done = read_status(tmp_path).job
    assert done.state == state
    assert done.reason.startswith(reason)


def test_a_driver_knows_what_its_actors_do(tmp_path):
    write(tmp_path, actors=[moved(actor(), time.time() - NOW_S)])
    with watched(tmp_path, RunStats(total_rows=5, num_generated_tokens=1000)) as watch:
        deadline = time.monotonic() + 10
        while not watch.view.actors and time.monotonic() < deadline:
            time.sleep(0.01)
        assert node_rates(watch.view.nodes) == "node-a 10 tokens/s"
        assert watch.view.cost_per_million_tokens > 0
        begin_s = time.monotonic()
        watch.wait_for_actors(0.1)  # it goes on, so this gives up
        assert time.monotonic() - begin_s >= 0.1
