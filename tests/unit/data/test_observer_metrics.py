"""Which number of a status is which series, and what a counter is increased by."""

import dataclasses
from typing import ClassVar

import pytest
import ray.util.metrics

from raymoe.data.observer import METRICS, MetricKind, RayMetrics
from raymoe.data.tracing import OperatorTags
from tests.unit.data.statuses import ENGINE, ROWS, actor

EXPECTED = {
    "ray_raymoe_rows_total": {"": 100},
    "ray_raymoe_journal_rows_total": {"": 10},
    "ray_raymoe_row_prompt_tokens_total": {"": 900},
    "ray_raymoe_row_generated_tokens_total": {"": 1000},
    "ray_raymoe_error_rows_total": {"ConfigError": 2, "DecodeError": 1},
    "ray_raymoe_prompt_tokens_total": {"": 900},
    "ray_raymoe_cached_tokens_total": {"": 64},
    "ray_raymoe_evicted_blocks_total": {"": 3},
    "ray_raymoe_generated_tokens_total": {"": 1100},
    "ray_raymoe_preemptions_total": {"": 2},
    "ray_raymoe_steps_total": {"": 50},
    "ray_raymoe_step_seconds_total": {"": 20},
    "ray_raymoe_predicted_step_seconds_total": {"": 16},
    "ray_raymoe_link_seconds_total": {"": 5},
    "ray_raymoe_queued_rows": {"": 7},
    "ray_raymoe_live_sequences": {"": 30},
    "ray_raymoe_pool_fill": {"": 0.75},
    "ray_raymoe_kv_use": {"": 0.75},
}


def test_each_series_is_the_number_that_its_name_says():
    found = {metric.exported_name: metric.values(actor()) for metric in METRICS}
    assert found == EXPECTED
    assert all(metric.description for metric in METRICS)


def test_before_the_model_is_loaded_only_rows_are_known():
    found = {metric.name for metric in METRICS if metric.values(actor(engine=None))}
    tokens = {"raymoe_row_prompt_tokens", "raymoe_row_generated_tokens"}
    assert found == {"raymoe_rows", "raymoe_journal_rows", "raymoe_error_rows"} | tokens


class Recorded:
    """What Ray was told of one series; refuses what Ray refuses."""

    all: ClassVar[dict[str, "Recorded"]] = {}

    def __init__(self, name, description, tag_keys):
        self.name, self.tag_keys, self.told = name, set(tag_keys), []
        self.all[name] = self

    def inc(self, value, tags):
        assert value > 0
        self._tell(value, tags)

    def set(self, value, tags):
        self._tell(value, tags)

    def _tell(self, value, tags):
        assert set(tags) == self.tag_keys
        self.told.append((value, tags))


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(Recorded, "all", {})
    monkeypatch.setattr(ray.util.metrics, "Counter", Recorded)
    monkeypatch.setattr(ray.util.metrics, "Gauge", Recorded)
    return Recorded.all


def test_counters_grow_by_what_came_since_and_gauges_are_set(recorded):
    metrics = RayMetrics("/models/mixtral/", "node-a-1-abc", OperatorTags("d_1", "MapBatches_2"))
    metrics.publish(actor())
    metrics.publish(actor())
    engine = dataclasses.replace(ENGINE, num_generated_tokens=1500, num_queued_rows=0)
    rows = dataclasses.replace(ROWS, errors=(("ConfigError", 5), ("DecodeError", 1)))
    metrics.publish(actor(engine=engine, rows=rows))
    tags = {"model": "mixtral", "actor": "node-a-1-abc"}
    tags |= {"dataset": "d_1", "operator": "MapBatches_2"}
    assert recorded["raymoe_generated_tokens"].told == [(1100.0, tags), (400.0, tags)]
    assert [value for value, _ in recorded["raymoe_queued_rows"].told] == [7, 7, 0]
    errors = [(value, tags["kind"]) for value, tags in recorded["raymoe_error_rows"].told]
    assert errors == [(2, "ConfigError"), (1, "DecodeError"), (3, "ConfigError")]
    counters = {metric.name for metric in METRICS if metric.kind is MetricKind.COUNTER}
    assert all(
        len(series.told) < 3
        for name, series in recorded.items()
        if name in counters - {"raymoe_error_rows"}
    )


def test_outside_of_an_actor_there_are_none():
    assert RayMetrics.in_actor("model", "actor", OperatorTags()) is None
