"""What a reader concludes from the files of a job: rates, time left, costs, and who is gone."""

import dataclasses

import pytest

from raymoe.data.error_groups import ErrorGroup
from raymoe.data.status import FormerRuns, PlanSummary, RowCounts, read_status
from raymoe.status_view import LOST_S, MAX_NODES_IN_A_LINE, JobView, former_runs, node_rates
from tests.unit.data.statuses import ENGINE, NOW_S, actor, job, write

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
    # Of each actor 97 rows by its engine and 10 that it found, in ten minutes.
    assert (seen.num_rows, seen.num_finished_rows) == (100, 214)
    assert seen.left_s == pytest.approx(600.0 * (400 - 214) / 214)
    assert seen.cost == pytest.approx(0.2)  # two nodes for a sixth of an hour at 0.6
    assert seen.cost_per_million_tokens == pytest.approx(0.2 / 6000 * 1e6)
    assert node_rates(seen.nodes) == "node-a 10 tokens/s, node-b 10 tokens/s"


def test_before_rows_finish_tokens_say_how_long_the_job_takes_at_most(tmp_path):
    plan = PlanSummary(schedule="a", tokens_per_s=1.0, generated_tokens=5100, bound="b",
                       description="c")  # fmt: skip
    rows, engine = RowCounts(), dataclasses.replace(ENGINE, num_finished_rows=0)
    young = actor(plan=plan, rows=rows, engine=engine)
    seen = view(tmp_path / "a", job=job(num_rows=0), actors=[young])
    assert seen.left_s == pytest.approx((5100 - 1100) / 10)
    first = dataclasses.replace(young, engine=dataclasses.replace(engine, num_finished_rows=1))
    seen = view(tmp_path / "b", job=job(num_rows=0), actors=[first])
    assert seen.left_s == pytest.approx(400.0)  # not 399 times ten minutes
    assert (
        view(tmp_path / "c", job=job(num_rows=0), actors=[actor(rows=rows, engine=engine)]).left_s
        is None
    )


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
    assert seen.errors == {"ConfigError": 4, "DecodeError": 2}
    assert [one.num_rows for one in seen.error_groups] == [4, 2]
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


FORMER = FormerRuns(
    num_runs=2, num_rows=50, num_error_rows=1, num_input_tokens=100, num_generated_tokens=1000,
    num_computed_prompt_tokens=90, num_cached_tokens=10, elapsed_s=400.0, node_s=4800.0,
    error_groups=(ErrorGroup.of("ConfigError: 17 is odd"),),
)  # fmt: skip


def test_all_totals_are_of_all_runs(tmp_path):
    now = job(former=FORMER, error_groups=(ErrorGroup.of("ConfigError: 9 is odd"),))
    seen = view(tmp_path, job=now, actors=[actor()])
    assert (seen.num_rows, seen.total_rows, seen.num_error_rows) == (150, 450, 4)
    assert seen.num_finished_rows == 50 + 107
    assert (seen.num_input_tokens, seen.num_generated_tokens) == (1000, 7000)
    assert (seen.num_computed_prompt_tokens, seen.num_cached_tokens) == (990, 74)
    assert (seen.run_s, seen.elapsed_s) == (600.0, 1000.0)
    assert seen.cost == pytest.approx(0.8 + 0.1)
    assert [(one.num_rows, one.text()) for one in seen.error_groups] == [
        (2, "ConfigError: 9 to 17 is odd")
    ]
    assert seen.left_s == pytest.approx(600.0 * (400 - 107) / 107)
    over = view(tmp_path, job=dataclasses.replace(now, state="finished"))
    assert over.tokens_per_s == pytest.approx(7000 / 1000)


def test_the_next_run_knows_what_all_runs_so_far_took(tmp_path):
    write(tmp_path, job=job(former=FORMER, updated_unix_s=NOW_S), actors=[actor()])
    took = former_runs(tmp_path)  # of a driver that was killed: as far as it wrote
    assert (took.num_runs, took.elapsed_s) == (3, 1000.0)
    assert took.node_s == pytest.approx(5400.0)
    assert (took.num_computed_prompt_tokens, took.num_cached_tokens) == (990, 74)
    assert former_runs(tmp_path / "none").elapsed_s is None


def test_without_the_time_of_former_runs_the_rate_is_of_this_one(tmp_path):
    former = dataclasses.replace(FORMER, elapsed_s=None, node_s=None)
    seen = view(tmp_path, job=job(former=former, state="finished"))
    assert (seen.num_generated_tokens, seen.elapsed_s) == (7000, 600.0)
    assert seen.tokens_per_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("state", "age_s", "shown", "can_resume"),
    [
        ("running", 1, "running", False),
        ("running", LOST_S + 1, "lost", True),
        ("finished", LOST_S + 1, "finished", False),
        ("stopped", 1, "stopped", True),
        ("failed", 1, "failed", True),
    ],
)
def test_a_job_that_can_go_on_says_so(tmp_path, state, age_s, shown, can_resume):
    seen = view(tmp_path, job=job(state=state), now_s=NOW_S + age_s)
    assert (seen.state, seen.can_resume) == (shown, can_resume)
