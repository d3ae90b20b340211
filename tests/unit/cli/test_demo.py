"""The demo: fresh rows, honest scores, no file of others activated."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from raymoe.assets.wrangling import KINDS
from raymoe.cli import demo
from raymoe.cli.progress import print_summary
from raymoe.data.error_groups import ErrorGroups
from raymoe.data.status import StatusFiles
from raymoe.errors import ConfigError, ExecutionError
from raymoe.status_view import JobView
from tests.unit.data.statuses import NOW_S, job


def test_scores_are_by_kind_and_overall():
    answers = pa.table(
        {
            "kind": ["date", "date", "name", "name"],
            "generated_text": [" 2024-01-02", "2024-01-03", "Doe, Jane ", ""],
            "answer": ["2024-01-02", "2024-01-04", "Doe, Jane", "Roe, Jo"],
        }
    )
    scores = {one.kind: (one.num_exact, one.num_rows) for one in demo.score(answers)}
    assert scores["date"] == scores["name"] == (1, 2)
    assert scores["all"] == (2, 4)
    assert set(scores) == {*KINDS, "all"}


def test_each_run_replaces_the_prompts_and_answers_of_the_last(tmp_path):
    output = tmp_path / "demo"
    first = pq.read_table(demo._write_prompts(output, 20, seed=0))
    (output / "answers").mkdir()
    (output / "answers" / "part-000000.parquet").write_text("old")
    (output / "answers.status").mkdir()
    (output / "answers.report.html").write_text("old")
    second = pq.read_table(demo._write_prompts(output, 30, seed=1))
    assert (first.num_rows, second.num_rows) == (20, 30)
    assert first.column("prompt").to_pylist() != second.column("prompt").to_pylist()[:20]
    assert len(set(second.column("id").to_pylist())) == 30
    assert not (output / "answers").exists()


def test_a_directory_with_files_of_others_is_refused(tmp_path):
    (tmp_path / "thesis.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"holds thesis\.doc"):
        demo._write_prompts(tmp_path, 10, seed=0)
    with pytest.raises(ConfigError, match="is a file"):
        demo._write_prompts(tmp_path / "thesis.doc", 10, seed=0)


@pytest.mark.parametrize("found", [["a"], ["a", "b", "b"], ["a", "c"]])
def test_lost_and_repeated_rows_fail_the_demo(found):
    with pytest.raises(ExecutionError, match="2 rows went in"):
        demo._check_ids(pa.array(["a", "b"]), pa.chunked_array([found]))
    demo._check_ids(pa.array(["a", "b"]), pa.chunked_array([["b", "a"]]))


def test_text_of_a_model_does_nothing_to_a_terminal():
    evil = "\x1b]0;owned\x07[bold]"
    answers = pa.table(
        {
            "kind": [KINDS[0]],
            "prompt": [evil],
            "generated_text": [evil],
            "__inference_error__": [""],
            "answer": ["right"],
        }
    )
    log = io.StringIO()
    Console(file=log, width=300, force_terminal=True).print(demo._sample_table(answers))
    assert "\\x1b]0;owned\\x07[bold]" in log.getvalue()
    assert "\x1b]" not in log.getvalue()
    assert "\x07" not in log.getvalue()


def test_errors_of_rows_do_nothing_to_a_terminal():
    log = io.StringIO()
    found = ErrorGroups()
    found.add(["\x1b[2J: bad"])
    view = JobView.of(StatusFiles(job=job(error_groups=found.groups())), NOW_S)
    print_summary(view, "a\x1b[2J", Console(file=log, width=300))
    assert "\x1b" not in log.getvalue()
    assert "1 row: \\x1b[2J: bad" in log.getvalue()
