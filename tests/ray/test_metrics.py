"""The series of an actor arrive where Prometheus would read them, with the numbers of its rows."""

import importlib.util
import os
import re
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest
import ray

import raymoe
from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.data.observer import METRICS
from tests.local_ray import LOCAL_RAY

NEEDED = ("prometheus_client", "opentelemetry", "aiohttp_cors", "grpc")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="Ray exports metrics with pip install 'ray[default]' alone",
    ),
]

TABLE = pa.table({"id": list(range(20)), "prompt": [f"row {i}" if i else "" for i in range(20)]})


@pytest.fixture
def ray_with_metrics():
    places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
    path = os.pathsep.join([*dict.fromkeys(map(str, places)), os.environ.get("PYTHONPATH", "")])
    ray.init(
        "local",
        **LOCAL_RAY,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield
    ray.shutdown()


@ray.remote
class Holder:
    """An actor with an operator, as Ray Data makes them, that stays."""

    def __init__(self, model):
        self._operator = MoEGenerator(
            model,
            sampling_params={"max_tokens": 4, "temperature": 0.0, "ignore_eos": True},
            engine_config=EngineConfig(host_memory_bytes=3 * 2**30, num_threads=1),
        )

    def generate(self, table):
        return self._operator(table).num_rows

    def stats(self):
        return self._operator._engine.stats()


def exported():
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read().decode()


def scrape():
    """Values by series and the tags that are ours."""
    found = {}
    series = re.findall(r"^(ray_raymoe_\w+)\{(.*)\} (\S+)$", exported(), re.MULTILINE)
    for name, labels, value in series:
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[name, tags.get("kind", "")] = (float(value), tags)
    return found


def test_the_series_arrive_with_the_numbers_of_the_rows(ray_with_metrics, tiny_model):
    holder = Holder.remote(tiny_model)
    assert ray.get(holder.generate.remote(TABLE)) == 20
    stats = ray.get(holder.stats.remote())
    expected = {
        ("ray_raymoe_rows_total", ""): 20.0,
        ("ray_raymoe_error_rows_total", "ValueError"): 1.0,
        ("ray_raymoe_generated_tokens_total", ""): 19 * 4.0,
        ("ray_raymoe_row_generated_tokens_total", ""): 19 * 4.0,
        ("ray_raymoe_prompt_tokens_total", ""): float(stats.num_prompt_tokens),
        ("ray_raymoe_steps_total", ""): float(stats.num_steps),
        ("ray_raymoe_live_sequences", ""): 0.0,
        ("ray_raymoe_kv_use", ""): 0.0,
    }
    deadline = time.monotonic() + 60
    found = {}
    while time.monotonic() < deadline and not expected.keys() <= found.keys():
        time.sleep(0.5)
        found = scrape()
    values = {series: value for series, (value, _) in found.items()}
    assert {series: values.get(series) for series in expected} == expected
    assert values["ray_raymoe_step_seconds_total", ""] == pytest.approx(stats.busy_s)
    predicted = values["ray_raymoe_predicted_step_seconds_total", ""]
    assert predicted == pytest.approx(stats.predicted_s)
    tags = found["ray_raymoe_rows_total", ""][1]
    assert tags["model"] == tiny_model.name
    assert tags["actor"]
    assert not tags.get("dataset")  # that of Ray Data, which runs no job here
    known = {metric.exported_name for metric in METRICS}
    assert {name for name, _ in found} <= known


def test_the_series_of_a_job_have_the_labels_of_ray_datas(ray_with_metrics, tiny_model):
    config = EngineConfig(host_memory_bytes=3 * 2**30, num_threads=1)
    ds = ray.data.from_arrow([TABLE.slice(first, 1) for first in range(20)])
    ds = raymoe.generate(ds, tiny_model, max_tokens=4, id_column="id", engine_config=config)
    rows = iter(ds.iter_rows())
    next(rows)
    deadline = time.monotonic() + 60
    found = {}
    while time.monotonic() < deadline and not found:
        time.sleep(0.5)
        found = scrape()
    tags = found["ray_raymoe_rows_total", ""][1]
    place = f'dataset="{tags["dataset"]}",.*operator="{re.escape(tags["operator"])}"'
    assert re.search(f"^ray_data_.*{place}", exported(), re.MULTILINE)
    assert len([*rows]) == 19
