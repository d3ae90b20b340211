"""What a reader concludes from the files of a job: rates, time left, costs, and who is gone."""

import dataclasses

import pytest

from raymoe.data.status import read_status
from raymoe.status_view import LOST_S, MAX_NODES_IN_A_LINE, JobView, node_rates
from tests.unit.data.statuses import NOW_S, actor, job, write

SECOND = actor("node-b-2-def")


def view(tmp_path, *, now_s=NOW_S, **content):
    """Look at a job whose files were written at their own times."""
    files = read_status(write(tmp_path, **content))
    written_unix_s = tuple(one.updated_unix_s for one in files.actors)
    return JobView.of(dataclasses.replace(files, written_unix_s=written_unix_s), now_s)


def test_a_running_job_says_how_fast_how_long_and_at_what_cost(tmp_path):
    seen = view(tmp_path, job=job(), actors=[actor(), SECOND])
    assert seen.state == "running"
    assert seen.tokens_per_s == pytest.approx(20.0)
    assert [(node.name, node.tokens_per_s) for node in seen.nodes] == [
        ("node-a", pytest.approx(10.0)),
        ("node-b", pytest.approx(10.0)),
    ]
    assert seen.left_s == pytest.approx(1800.0)  # 300 rows at 100 in ten minutes
    assert seen.cost == pytest.approx(0.2)  # two nodes for a sixth of an hour at 0.6
    assert seen.cost_per_million_tokens == pytest.approx(0.2 / 6000 * 1e6)
    assert node_rates(seen.nodes) == "node-a 10 tokens/s, node-b 10 tokens/s"


def test_a_job_that_is_over_is_judged_as_a_whole(tmp_path):
    over = job(state="finished", num_rows=400, updated_unix_s=NOW_S)
    seen = view(tmp_path, job=over, actors=[actor()], now_s=NOW_S + 86_400)
    assert (seen.state, seen.is_alive, seen.left_s) == ("finished", False, None)
    assert seen.elapsed_s == 600.0
    assert seen.tokens_per_s == pytest.approx(10.0)
    (only,) = seen.actors
    assert only.state == "ended"  # it was stopped with the job, though it did not say so


def test_an_actor_that_says_nothing_is_lost_and_counts_for_nothing(tmp_path):
    dead = actor(updated_unix_s=NOW_S - LOST_S - 1)
    seen = view(tmp_path, job=job(), actors=[dead, SECOND])
    assert {one.status.actor: one.state for one in seen.actors} == {
        "node-a-1-abc": "lost",
        "node-b-2-def": "running",
    }
    assert seen.tokens_per_s == pytest.approx(10.0)
    assert seen.actors[0].age_s == pytest.approx(LOST_S + 1)


def test_a_clock_that_is_slow_kills_nobody(tmp_path):
    files = read_status(write(tmp_path, actors=[actor(updated_unix_s=NOW_S - 3600)]))
    seen = JobView.of(dataclasses.replace(files, written_unix_s=(NOW_S - 1,)), NOW_S)
    assert seen.actors[0].state == "running"


def test_a_driver_that_was_killed_shows(tmp_path):
    late = NOW_S + LOST_S + 1
    seen = view(tmp_path, job=job(), actors=[actor(updated_unix_s=late)], now_s=late)
    assert seen.state == "lost"
    assert seen.elapsed_s == 600.0


def test_without_a_driver_the_actors_speak_for_the_job(tmp_path):
    seen = view(tmp_path, actors=[actor(), SECOND])
    assert seen.state == "running"
    assert (seen.num_rows, seen.num_error_rows, seen.num_generated_tokens) == (200, 6, 2000)
    assert seen.errors == (("ConfigError", 4), ("DecodeError", 2))
    assert (seen.left_s, seen.cost, seen.cost_per_million_tokens) == (None, None, None)
    assert seen.elapsed_s == 600.0
    assert view(tmp_path / "none").state == "unknown"


def test_of_many_nodes_a_line_names_the_slowest(tmp_path):
    actors = [actor(f"node-{i:03d}-1-abc") for i in range(100)]
    slow = actor("slow-1-abc", history=actor().history[:1])
    line = node_rates(view(tmp_path, actors=[*actors, slow]).nodes)
    assert "slow 0 tokens/s" in line
    assert line.endswith(f"{101 - MAX_NODES_IN_A_LINE} faster nodes 950 tokens/s")
    assert len(line) < 250


def test_all_of_it_is_plain_data(tmp_path):
    seen = view(tmp_path, job=job(), actors=[actor(), actor("node-c-3-xyz", engine=None)])
    plain = seen.as_plain()
    assert plain["total_rows"] == 400
    assert plain["errors"] == {"ConfigError": 2, "DecodeError": 1}
    assert [one["pool_fill"] for one in plain["actors"]] == [0.75, None]
    assert plain["actors"][0]["measured_over_predicted"] == pytest.approx(1.25)
