"""Rows of several turns whose actor is killed: each once, with the texts of an undisturbed run."""

import contextlib
import json

import pyarrow as pa
import pytest
import ray.data

import raymoe
from raymoe.assets import demo_model_path
from raymoe.config import SamplingParams
from raymoe.data.generator import MoEGenerator
from tests.ray.calculator import MAX_TURNS, HeldBackTurns, add_up, make_bills
from tests.ray.matrix import CONFIG, ROWS_PER_BLOCK, Job, allow, small_cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's cluster for tests
]

NUM_ROWS, NUM_KILLS = 1008, 2
LONGEST_S = 1200
PARAMS = SamplingParams(max_tokens=16, temperature=0.7)
OPTIONS = {"sampling_params": PARAMS, "rollout": add_up}


def test_a_job_in_one_call_plans_for_the_calls_and_adds_what_functions_return(local_ray):
    rows = make_bills(40)
    for row in rows:
        del row["id"]  # then equal rows are counted, and known by all of their columns
    options = {"max_tokens": 8, "temperature": 0.7, "rollout": add_up, "num_actors": 1}
    ds = raymoe.generate(
        ray.data.from_items([*rows, *rows]), demo_model_path(), calls_per_row=4, **options
    )
    plan = raymoe.map_batches_kwargs(
        demo_model_path(), ds=ray.data.from_items(rows), calls_per_row=4, rollout=add_up
    ).plan
    found = ds.take_all()
    assert len(found) == 80
    assert {row["__inference_error__"] for row in found} == {""}
    assert all(len(row["answers"]) == row["num_calls"] == len(row["items"]) for row in found)
    assert len({row["text"] for row in found}) > 60  # equal rows have samples of their own
    assert plan.plan.workload.num_rows == 160


@pytest.mark.slow
def test_an_actor_that_is_killed_twice_gives_each_row_once_and_the_same_texts(tmp_path):
    rows = make_bills(NUM_ROWS)
    assert {len(row["items"]) for row in rows} == {*range(1, MAX_TURNS + 1)}
    with small_cluster(1):
        allow(tmp_path, 0)
        job = Job(demo_model_path(), rows, tmp_path, HeldBackTurns, **OPTIONS)
        for number in range(NUM_KILLS):
            num_done = (number + 1) * NUM_ROWS // (NUM_KILLS + 1)
            job.allow(num_done)
            job.wait_for_rows(num_done - ROWS_PER_BLOCK)
            (actor,) = job.actors()
            job.allow(num_done + 4 * ROWS_PER_BLOCK)  # others are in the middle of their turns
            actor.kill()
            actor.wait(60)
        job.allow(10 * NUM_ROWS)
        job.finish(LONGEST_S)
        found = pa.concat_tables(job.tables).to_pylist()
        num_again = job.num_regenerated()
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows)
    assert {row["__inference_error__"] for row in found} == {""}
    expected = undisturbed(rows)
    assert told(found) == told(expected)
    assert num_again < NUM_ROWS / 2
    num_cached = sum(row["num_cached_tokens"] for row in expected)
    share = num_cached / sum(row["num_input_tokens"] for row in expected)
    assert share > 0.3, f"{share:.1%} of the prompt tokens were found again"


def undisturbed(rows):
    """What the rows give in one process without Ray."""
    operator = MoEGenerator(demo_model_path(), id_column="id", engine_config=CONFIG, **OPTIONS)
    with contextlib.closing(operator):
        return operator(pa.Table.from_pylist(rows)).to_pylist()


def told(rows):
    """Rows by id, without what depends on those beside them."""
    return {
        row["id"]: json.dumps({key: row[key] for key in sorted(row) if key != "num_cached_tokens"})
        for row in rows
    }
