"""The measurement of lanes measures what it says."""

import pytest

from raymoe.bench.steps import TARGET_S, LaneLatency, _chain, measure_lanes
from raymoe.schedule.graph import Op, Resource


def test_each_task_waits_for_the_one_before_on_the_other_lane() -> None:
    schedule = _chain([Op.ATTN, Op.W], 6)
    lanes = [task.resource for task in schedule.tasks]
    assert lanes == [Resource.CPU, Resource.HTOD] * 3
    assert schedule.dependencies == ((), (0,), (1,), (2,), (3,), (4,))


def test_the_report_is_in_microseconds() -> None:
    latency = LaneLatency(same_lane_s=4e-6, other_lane_s=25.04e-6, other_lane_p99_s=90e-6)
    assert str(latency) == (
        "time between two tasks of a step: on one thread 4.0 us, on two threads 25.0 us "
        "(99 % below 90.0 us), target 40 us"
    )


def test_a_measurement_gives_positive_times() -> None:
    latency = measure_lanes(num_tasks=100)
    assert latency.same_lane_s > 0
    assert 0 < latency.other_lane_s <= latency.other_lane_p99_s


@pytest.mark.slow
def test_a_dependent_task_starts_within_the_target() -> None:
    latency = measure_lanes()
    assert latency.same_lane_s < TARGET_S
    assert latency.other_lane_s < TARGET_S
