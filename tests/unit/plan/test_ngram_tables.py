"""Tables of n-grams take memory of the host alone, and little of a step."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.cost import MicroBatchShape, StepCost
from raymoe.plan.footprint import device_footprint, host_footprint
from raymoe.plan.placement import Placement
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.schedule.graph import Op, Task
from raymoe.schedule.timeline import Resource
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import GIB

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_models.json").read_text())
POLICY = Policy(
    max_num_seqs=64, max_num_batched_tokens=1024, max_prefill_chunk_tokens=1024, num_kv_blocks=64
)
WIDTH = 2560


@cache
def flash_next() -> ModelSpec:
    (found,) = (one for one in PUBLISHED if one["name"] == "Qwen/Qwen3.8-Flash-Next")
    return ModelSpec.from_config(found["config"])


@pytest.mark.parametrize("schedule", ["in_place", "cgopipe", "resident"])
def test_the_host_has_the_whole_table_and_the_device_rows_of_a_step(schedule: str) -> None:
    model = flash_next()
    has_device = schedule == "cgopipe"
    device = DevicePolicy(num_micro_batches=1, page_bytes=1 << 24) if has_device else None
    work = ModelWork.of(model, 2)
    placement = Placement.of(model, schedule, replace(POLICY, device=device), 2)
    host = host_footprint(model, work, placement, model.weight_bytes(2))
    assert host.bytes_of("tables of n-grams") == model.table_bytes > 95 * GIB
    assert dict(host.parts).get("weights", 0) < model.weight_bytes(2) + GIB
    on_device = device_footprint(model, work, placement)
    assert on_device.total < 251 * GIB  # of which resident weights are most
    if has_device:
        none = ModelWork.of(replace(model, layers=model.layers[:1] + model.layers[2:]), 2)
        less = device_footprint(model, none, placement).bytes_of("activations")
        result = 10_240 - 6144  # elements of the largest result of a layer
        assert on_device.bytes_of("activations") - less == 1024 * 2 * (WIDTH + result)


def seconds(model: ModelSpec, op: Op, resource: Resource) -> float:
    shapes = (MicroBatchShape.decode(1000, 100),)
    cost = StepCost(ModelWork.of(model, 2), hardware_preset("l4"), shapes)
    return cost.duration_s(Task(op=op, layer=0, part=0, resource=resource))


def test_reading_and_sending_rows_is_part_of_the_embedding() -> None:
    model, node = flash_next(), hardware_preset("l4")
    none = replace(model, layers=model.layers[:1] + model.layers[2:])
    read = seconds(model, Op.EMBED, Resource.CPU) - seconds(none, Op.EMBED, Resource.CPU)
    assert read >= 1000 * 2 * 2 * WIDTH / node.host_bytes_per_s * 0.99
    sent = seconds(model, Op.UP, Resource.HTOD) - seconds(none, Op.UP, Resource.HTOD)
    assert sent == pytest.approx(1000 * 2 * WIDTH / node.htod_bytes_per_s, rel=0.01)


@pytest.mark.slow
def test_a_host_without_room_for_the_table_is_refused_with_its_bytes() -> None:
    workload = Workload(num_rows=1000, prompt_tokens=400, generated_tokens=100)
    node = replace(hardware_preset("l4"), host_memory_bytes=300 * GIB)
    with pytest.raises(InfeasiblePlanError, match="tables of n-grams 95"):
        find_plan(flash_next(), node, workload)
    node = replace(node, host_memory_bytes=400 * GIB)
    plan = find_plan(flash_next(), node, workload)
    assert plan.footprint.bytes_of("tables of n-grams") == flash_next().table_bytes
    assert plan.footprint.total <= 400 * GIB
