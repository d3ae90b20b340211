"""A job on a head without CPUs and four nodes of unlike speed: who gets which rows."""

import math
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
from ray.cluster_utils import Cluster

import raymoe
from raymoe.config import EngineConfig
from raymoe.data import processor
from raymoe.data.sizing import map_batches_kwargs
from raymoe.data.status import ENDED, read_status
from raymoe.specs.workload import Workload
from raymoe.units import GIB, MIB
from tests.ray.broken import PLACE, WaitsForOthers

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),  # Ray copies its own context
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's cluster for tests
]
CPUS = (12, 8, 4, 2)
ROWS_PER_TASK, NUM_TASKS = 16, 104
MANY = Workload(num_rows=1_000_000, prompt_tokens=20, generated_tokens=8)


@pytest.fixture(scope="module")
def unlike_nodes(tmp_path_factory):
    common = {"include_dashboard": False, "object_store_memory": 100 * MIB}
    system = {"prestart_worker_first_driver": False}  # else a process for each of the CPUs
    head = {"num_cpus": 0, "_system_config": system, **common}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for num_cpus in CPUS:
            cluster.add_node(num_cpus=num_cpus, memory=2 * GIB, **common)
        cluster.wait_for_nodes()
        places = Path(raymoe.__file__).parents[1], Path(__file__).parents[2]
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            PLACE: str(tmp_path_factory.mktemp("called")),
        }
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": variables},
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def rows(number):
    return ray.data.from_items([{"id": i, "prompt": f"date: {i} May"} for i in range(number)])


def rows_by_cpus(status_dir):
    """Rows of each actor, by the CPUs of its node."""
    cpus = {node["NodeID"]: node["Resources"].get("CPU") for node in ray.nodes()}
    node_of = {one["Pid"]: one["Address"]["NodeID"] for one in ray._private.state.actors().values()}
    limit_s = time.monotonic() + 60
    while any(actor.state != ENDED for actor in read_status(status_dir).actors):
        assert time.monotonic() < limit_s, "an actor does not end"
        time.sleep(0.2)
    actors = read_status(status_dir).actors
    return {cpus[node_of[actor.pid]]: actor.rows.num_rows for actor in actors}


def test_each_node_gets_rows_by_its_speed(unlike_nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "MoEGenerator", WaitsForOthers)
    num_rows = ROWS_PER_TASK * NUM_TASKS
    ds = raymoe.generate(
        rows(num_rows), raymoe.demo_model_path(), workload=MANY, max_tokens=2,
        batch_size=ROWS_PER_TASK, status_dir=tmp_path, engine_config={"num_threads": 1},
    )  # fmt: skip
    assert sorted(row["id"] for row in ds.take_all()) == list(range(num_rows))
    kinds = ds._logical_plan.dag.fn_constructor_kwargs.plan.kinds
    speeds = {kind.nodes.num_cpus: kind.speed for kind in kinds}
    assert sorted(speeds, key=speeds.get, reverse=True) == [*CPUS]
    found = rows_by_cpus(tmp_path)
    assert found.keys() == speeds.keys()
    print(f"rows by CPUs: {found}; tokens/s: {speeds}")  # noqa: T201 - what the run is read for
    for cpus, speed in speeds.items():
        part = math.ceil(NUM_TASKS * speed / sum(speeds.values()))
        # Others, whose parts are rounded up too, may have taken one each from the last to load.
        assert part - len(CPUS) < found[cpus] / ROWS_PER_TASK <= part


@pytest.mark.parametrize("num_rows", [64, 3000])
def test_a_job_of_few_rows_has_fewer_actors_and_says_why(unlike_nodes, tmp_path, num_rows):
    """Ray itself does not say how many rows a file of Parquet has."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"date: {i} May" for i in range(num_rows)]}), path)
    kwargs = map_batches_kwargs(
        raymoe.demo_model_path(),
        ds=ray.data.read_parquet(str(path)),
        engine_config=EngineConfig(),
    )
    assert kwargs.plan.plan.workload.num_rows == num_rows
    assert kwargs["compute"].max_size == 1
    text = kwargs.plan.describe()
    assert "actors: 1, with room for 4" in text
    assert text.count("more would hardly end the job sooner") == 3
