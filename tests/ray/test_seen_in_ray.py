"""A job in Ray's structured logs, and in the spans of an OpenTelemetry that is set up in Ray."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCRIPT = """
import sys, ray, raymoe
ray.init(
    "local", num_cpus=2, include_dashboard=False, object_store_memory=150 * 2**20,
    logging_config=ray.LoggingConfig(encoding="JSON"), _tracing_startup_hook=sys.argv[2] or None,
)
rows = [{"id": f"row-{i}", "prompt": "a" * (i % 7)} for i in range(30)]
ds = raymoe.generate(
    ray.data.from_items(rows), sys.argv[1], id_column="id", num_actors=1, max_tokens=2,
    ignore_eos=True, engine_config={"host_memory_bytes": 3 * 2**30, "num_threads": 1},
)
assert len(ds.take_all()) == 30
ray.shutdown()
"""


def run(model, tmp_path, hook=""):
    places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), hook],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "SPANS": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_logs_have_job_actor_and_row(tiny_model, tmp_path):
    lines = run(tiny_model, tmp_path).splitlines()
    found = [json.loads(line[line.index("{") :]) for line in lines if '"row": ' in line]
    (record,) = found  # the first of several with such an error
    assert record["row"] == "'row-0'"
    assert "column 'prompt' is empty" in record["message"]
    assert record["job_id"]
    assert record["actor_id"]


@pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None, reason="it comes with 'ray[default]' alone"
)
def test_calls_are_spans_below_that_of_their_job(tiny_model, tmp_path):
    run(tiny_model, tmp_path, "tests.ray.span_hook:set_up")
    spans = [
        json.loads(line)
        for path in tmp_path.glob("*.json")
        for line in path.read_text().split("\n")
        if line
    ]
    (job,) = (span for span in spans if span["name"] == "raymoe.job")
    calls = [span for span in spans if span["name"] == "raymoe.call"]
    assert {call["parent_id"] for call in calls} == {job["context"]["span_id"]}
    assert {call["context"]["trace_id"] for call in calls} == {job["context"]["trace_id"]}
    about = [call["attributes"] for call in calls]
    assert sum(one["raymoe.rows"] for one in about) == 30
    assert sum(one["raymoe.error_rows"] for one in about) == 5
    assert sum(one["gen_ai.usage.output_tokens"] for one in about) == 50
    assert {one["raymoe.dataset"] for one in about} == {job["attributes"]["raymoe.dataset"]}
    assert all("MoEGenerator" in one["raymoe.operator"] for one in about)
