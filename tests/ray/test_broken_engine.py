"""A broken engine ends its actor; Ray starts another. A cause that stays fails the job."""

import pytest
import ray.data

from raymoe.config import EngineConfig
from raymoe.data.cluster import MAX_ERRORS_WHILE_LOADING
from raymoe.data.sizing import configure_data_context, map_batches_kwargs
from tests.ray.broken import BreaksAlways, BreaksOnce, LoadsLate, NeverLoads

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]


def rows_through(operator, model, mark, *, num_actors=1, **of_subclass):
    arguments = map_batches_kwargs(
        model,
        num_actors=num_actors,
        batch_size=8,
        rows_in_flight=16,
        sampling_params={"max_tokens": 2},
        engine_config=EngineConfig(host_memory_bytes=3 * 2**30, num_threads=1),
    )
    arguments["fn_constructor_kwargs"].update(of_subclass, mark=str(mark))
    items = [{"id": index, "prompt": f"row {index}"} for index in range(64)]
    dataset = ray.data.from_items(items, override_num_blocks=8)
    configure_data_context(context=dataset.context)
    return dataset.map_batches(operator, **arguments).take_all()


@pytest.mark.slow
def test_rows_of_a_broken_engine_are_done_by_the_next_actor(local_ray, tiny_model, tmp_path):
    rows = rows_through(BreaksOnce, tiny_model, tmp_path / "mark")
    assert (tmp_path / "mark").exists()
    assert sorted(row["id"] for row in rows) == list(range(64))
    assert {row["__inference_error__"] for row in rows} == {""}


@pytest.mark.slow
def test_an_engine_that_breaks_again_fails_the_job_with_the_cause(local_ray, tiny_model, tmp_path):
    with pytest.raises(ray.exceptions.RayTaskError, match="is broken: this engine is closed"):
        rows_through(BreaksAlways, tiny_model, tmp_path / "starts")
    assert (tmp_path / "starts").read_text().count("started") == 2


@pytest.mark.slow
def test_a_model_that_never_loads_ends_the_job_with_its_own_error(local_ray, tiny_model, tmp_path):
    with pytest.raises(ray.exceptions.ActorDiedError, match="OSError: no such weights here"):
        rows_through(NeverLoads, tiny_model, tmp_path / "loads")
    assert (tmp_path / "loads").read_text().count("loads") == 1 + MAX_ERRORS_WHILE_LOADING


@pytest.mark.slow
def test_each_actor_of_a_pool_may_fail_to_load_twice(local_ray, tiny_model, tmp_path):
    num_failures = 3 * MAX_ERRORS_WHILE_LOADING
    rows = rows_through(
        LoadsLate, tiny_model, tmp_path / "loads", num_actors=3, num_failures=num_failures
    )
    assert sorted(row["id"] for row in rows) == list(range(64))
    assert len(list(tmp_path.glob("loads-*"))) == num_failures
