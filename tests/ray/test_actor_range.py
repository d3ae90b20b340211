"""A range of actors grows to its end where there are rows for more."""

import pytest
import ray.data

import raymoe
from raymoe.config import EngineConfig
from raymoe.data.status import read_status

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
]


def test_a_second_actor_starts_and_takes_rows(local_ray, tiny_model, tmp_path):
    rows = [{"id": index, "prompt": f"prompt {index}"} for index in range(600)]
    dataset = ray.data.from_items(rows, override_num_blocks=4)
    dataset = raymoe.generate(
        dataset, tiny_model, min_actors=1, num_actors=2, status_dir=tmp_path / "job.status",
        max_tokens=200, ignore_eos=True, id_column="id",
        engine_config=EngineConfig(dtype="float32", num_threads=1),
    )  # fmt: skip
    assert sorted(row["id"] for row in dataset.take_all()) == [row["id"] for row in rows]
    assert len(read_status(tmp_path / "job.status").actors) == 2
