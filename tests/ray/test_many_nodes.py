"""The suites of many nodes, small: a cluster of local nodes, engines that wait, every id once."""

import json

import pytest

from raymoe.specs.workload import Workload
from tests.scale import bench_scale, waiting_job
from tests.scale.local_cluster import local_cluster
from tests.scale.waiting_generator import read_actor_logs
from tests.scale.waiting_job import DRIVER, RAY, WaitingJob, run_waiting_job

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_a_million_rows_but_fewer(tmp_path, capsys):
    options = ("million", "--actors", "2", "--rows", "3000", "--speedup", "200")
    bench_scale.APP([*options, "--out", str(tmp_path)], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "3,000 rows, every id once, on 2 actors" in printed
    (line,) = (tmp_path / "million.jsonl").read_text().splitlines()
    figures = json.loads(line)
    assert figures["num_rows"] == 3000
    assert figures["actor_cpu_s"] > 0
    samples = [json.loads(line) for line in (tmp_path / "million-memory.jsonl").open()]
    assert {sample["process"] for sample in samples} == {DRIVER, RAY, "actor 1", "actor 2"}
    assert (tmp_path / "million.svg").read_text().startswith("<svg")


def test_actors_of_all_nodes_take_rows_and_the_driver_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting_job, "ROWS_PER_READ", 100)  # no multiple of 16
    job = WaitingJob(
        workload=Workload(num_rows=2000, prompt_tokens=20, generated_tokens=4),
        model=None,
        num_actors=2,
        rows_in_flight=64,
        rows_per_task=16,
        log_dir=tmp_path / "logs",
    )
    with local_cluster(2):
        figures, _ = run_waiting_job(job)
    assert figures.num_actors == 2
    assert figures.tasks_per_s > 0
    assert figures.driver_cpu_s > 0
    logs = read_actor_logs(job.log_dir).values()
    num_calls = sum(len(moments) - 1 for moments in logs)
    assert num_calls == 2000 // 16  # full ones alone, none of which waits for another


def test_scale_compares_more_actors_with_fewer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_scale, "INSTANT_TASKS", 100)
    options = ("scale", "--actors", "1", "--actors", "2", "--rows", "300")
    bench_scale.APP([*options, "--speedup", "400", "--out", str(tmp_path)], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "% of 2 times one" in printed
    assert "1000 nodes: 1000 *" in printed
    lines = [json.loads(line) for line in (tmp_path / "scale.jsonl").open()]
    assert [line["suite"] for line in lines] == ["scale", "scale", "instant", "instant"]
    assert [line["num_rows"] for line in lines[:2]] == [300, 600]
    assert (tmp_path / "scale.svg").read_text().startswith("<svg")
