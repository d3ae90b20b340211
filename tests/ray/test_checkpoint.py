"""Ray's own checkpoints: ids survive the operator, so that a failed job goes on where it ended."""

import collections

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from ray.data.checkpoint import CheckpointConfig

from raymoe.config import EngineConfig
from raymoe.data.sizing import map_batches_kwargs
from tests.ray.logged import LoggedGenerator, read_log

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]

IDS = [f"row-{index}" for index in range(256)]


class FailsLate(LoggedGenerator):
    """Fails the job in its tenth call, after the rows of that call are generated."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._num_calls = 0

    def __call__(self, batch):
        self._num_calls += 1
        done = super().__call__(batch)
        if self._num_calls == 10:
            raise ValueError("the operator gave up")
        return done


@pytest.fixture
def checkpoints(local_ray, tmp_path):
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(tmp_path / "checkpoint")
    )
    yield
    context.checkpoint_config = None


def answer(operator, model, tmp_path):
    arguments = map_batches_kwargs(
        model,
        batch_size=16,
        rows_in_flight=16,  # one call at a time
        num_cpus=0,  # Ray's filter takes one of the two CPUs, and a read or a write the other
        sampling_params={"max_tokens": 4, "temperature": 1.0},
        id_column="id",
        engine_config=EngineConfig(host_memory_bytes=2 * 2**30, num_threads=1),
        journal_dir=tmp_path / "journal",
        log=str(tmp_path / "generated.log"),
    )
    dataset = ray.data.read_parquet(str(tmp_path / "in"))
    dataset.map_batches(operator, **arguments).write_parquet(str(tmp_path / "out"))


def test_a_job_with_checkpoints_and_a_journal_goes_on_where_it_failed(
    checkpoints, tiny_model, tmp_path
):
    (tmp_path / "in").mkdir()
    table = pa.table({"id": IDS, "prompt": [f"prompt {one}" for one in IDS]})
    for part in range(16):
        pq.write_table(table.slice(16 * part, 16), tmp_path / "in" / f"{part:02d}.parquet")
    with pytest.raises(ray.exceptions.RayTaskError, match="the operator gave up"):
        answer(FailsLate, tiny_model, tmp_path)
    first = read_log(tmp_path / "generated.log", IDS)
    assert 0 < len(first) < 256
    answer(LoggedGenerator, tiny_model, tmp_path)
    generated = collections.Counter(read_log(tmp_path / "generated.log", IDS))
    assert generated == collections.Counter(IDS)
    found = pq.read_table(tmp_path / "out")
    assert sorted(found.column("id").to_pylist()) == sorted(IDS)
    assert set(found.column("__inference_error__").to_pylist()) == {""}
