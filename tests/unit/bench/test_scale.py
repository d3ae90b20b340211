"""Figures of runs with many actors, and what they mean for more."""

import os
import sys
from subprocess import PIPE, Popen
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from raymoe.errors import ExecutionError
from raymoe.plan.draw import Colour
from raymoe.processes import usage_of
from raymoe.specs.workload import Workload
from tests.scale.figures import Run, describe_limit, describe_overhead, efficiencies, steady_rate
from tests.scale.pictures import draw_efficiency, draw_memory
from tests.scale.waiting_job import descendants
from tests.scale.waiting_rows import RowCheck, make_rows


def a_run(**changes) -> Run:
    figures = {
        "num_actors": 1,
        "num_rows": 1000,
        "rows_per_task": 10,
        "start_s": 5.0,
        "job_s": 100.0,
        "steady_tokens_per_s": 12.0,
        "actor_cpu_s": 2.0,
        "driver_cpu_s": 0.5,
        "ray_cpu_s": 0.25,
    }
    return Run(**(figures | changes))


def test_efficiency_is_the_share_of_n_times_the_first_rate() -> None:
    runs = [a_run(num_actors=2), a_run(), a_run(num_actors=4, steady_tokens_per_s=45.6, job_s=26.0)]
    found = {each.num_actors: each for each in efficiencies(runs)}
    assert found[1].steady == found[1].job == 1
    assert found[2].steady == found[2].job == 0.5
    assert found[4].steady == pytest.approx(0.95)
    assert found[4].job == pytest.approx(100 / 26 / 4)


def test_a_steady_rate_leaves_out_beginning_and_end() -> None:
    start = [(0.0, 25)]
    middle = [(10.0 + i, 5) for i in range(10)]
    end = [(500.0, 25)]
    assert steady_rate(start + middle + end) == pytest.approx(5)
    with pytest.raises(ExecutionError, match="2 steps are too few"):
        steady_rate([(0.0, 10), (1.0, 10)])


def test_an_operator_without_an_engine_has_no_efficiency() -> None:
    with pytest.raises(ExecutionError, match="no steady rate"):
        efficiencies([a_run(steady_tokens_per_s=None)])


def test_overhead_is_for_each_row() -> None:
    text = describe_overhead(a_run())
    assert "2.000 ms in its actor" in text
    assert "0.500 ms in the driver (5.00 ms for a task of 10 rows)" in text


def test_the_limit_is_the_lowest_rate_and_shows_its_arithmetic() -> None:
    limits = [a_run(job_s=1.0), a_run(job_s=0.5)]  # 100 and 200 tasks/s
    lines = list(describe_limit(limits, 4.0, lambda nodes: 16 if nodes < 1000 else 160))
    text = "\n".join(lines)
    assert "100 nodes: 100 * 4.00 rows/s / 16 rows a task = 25.00 tasks/s, 25.0 % of" in text
    assert "1000 nodes: 1000 * 4.00 rows/s / 160 rows a task = 25.00 tasks/s, 25.0 % of" in text
    assert "100 * 160 / 4.00 = 4,000 nodes" in lines[-1]


def test_pictures_are_drawn_from_all_points() -> None:
    found = efficiencies([a_run(), a_run(num_actors=16, steady_tokens_per_s=185)])
    driver = [(float(i), 1e9 + i) for i in range(2000)]
    actors = [[(0.0, 2e9), (9.0, number * 1e9)] for number in range(1, 10)]
    memory = {"driver": [driver], "each actor": actors}
    for picture in (draw_efficiency(found, title="a <b>"), draw_memory(memory, title="m")):
        page = ElementTree.fromstring(picture)
        assert page.tag.endswith("svg")
        assert "nan" not in picture
    assert picture.count("each actor") == 1
    lines = picture.count(f'stroke="{Colour.LINK}"')  # the second colour, once in the legend
    assert lines == len(actors) + 1


def test_rows_are_made_from_ids_and_are_of_all_lengths() -> None:
    workload = Workload(num_rows=200, prompt_tokens=40, generated_tokens=8)
    ids = pa.table({"id": range(200)})
    rows = make_rows(ids, workload=workload).to_pylist()
    lengths = [len(row["prompt"]) for row in rows]
    assert sum(lengths) / 200 == pytest.approx(40, rel=0.05)
    assert (min(lengths), max(lengths)) == (30, 50)
    assert len({row["prompt"] for row in rows}) == 200
    assert rows == make_rows(ids, workload=workload).to_pylist()


def test_ids_are_there_once() -> None:
    def block(*ids, error=""):
        return pa.table({"id": list(ids), "__inference_error__": [error] * len(ids)})

    check = RowCheck(4)
    check.add(block(3, 0))
    check.add(block(1))
    with pytest.raises(ExecutionError, match="1 of 4 ids are missing, such as 2"):
        check.finish()
    check.add(block(2))
    check.finish()
    check.add(block(1))
    with pytest.raises(ExecutionError, match="1 of 4 ids are there twice, such as 1"):
        check.finish()
    with pytest.raises(ExecutionError, match="error rows: ValueError: no"):
        check.add(block(1, error="ValueError: no"))


def test_processes_are_found_with_what_they_use() -> None:
    code = "print(flush=True); input()"
    child = Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # until then it is a copy of this process, of no size
    assert child.pid in descendants(os.getpid())
    usage = usage_of(child.pid)
    assert usage is not None
    assert usage.rss_bytes > 1e6
    child.communicate(b"\n")
    assert usage_of(child.pid) is None
    assert child.pid not in descendants(os.getpid())
