"""The invariants of a schedule, for every builder over random passes."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymoe.schedule.builders import (
    BUILDERS,
    RING_SCHEDULES,
    STREAMING_BUILDERS,
    build_in_place,
    load_first_layer,
    load_second_layer,
)
from raymoe.schedule.graph import Op, Resource, Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm, next_first_slot
from raymoe.schedule.timeline import simulate
from tests.unit.schedule import meaning
from tests.unit.schedule.costs import TaskCost
from tests.unit.schedule.forms import BUILDER_NAMES, step_forms

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def built(draw: st.DrawFn) -> tuple[Schedule, StepForm]:
    """A schedule of any builder, and the pass it is for."""
    name = draw(st.sampled_from(BUILDER_NAMES))
    form = draw(step_forms(name))
    return STREAMING_BUILDERS[name](form), form


def topological_order(schedule: Schedule, rng: random.Random) -> list[int]:
    """Any order that the dependencies allow, whatever the lanes."""
    num_waits = [len(waits) for waits in schedule.dependencies]
    followers: list[list[int]] = [[] for _ in schedule.tasks]
    for index, waits in enumerate(schedule.dependencies):
        for wait in waits:
            followers[wait].append(index)
    ready = [index for index, count in enumerate(num_waits) if not count]
    order = []
    while ready:
        index = ready.pop(rng.randrange(len(ready)))
        order.append(index)
        for follower in followers[index]:
            num_waits[follower] -= 1
            if not num_waits[follower]:
                ready.append(follower)
    return order


@QUICK
@given(built())
def test_issue_order_is_a_topological_order(case: tuple[Schedule, StepForm]) -> None:
    schedule, _ = case
    for index, waits in enumerate(schedule.dependencies):
        assert all(wait < index for wait in waits)


@QUICK
@given(built())
def test_every_wave_passes_every_layer_once(case: tuple[Schedule, StepForm]) -> None:
    schedule, form = case
    steps = sorted(form.steps)
    with_states = [step for step in steps if form.layers[step.layer].states_on_device]
    with_kv = [step for step in steps if not form.layers[step.layer].states_on_device]
    on_cpu, on_device = (
        with_kv if is_used else []
        for is_used in (form.has_cpu_attention, form.has_device_attention)
    )
    per_micro_batch = {
        Op.PRE: steps,
        Op.POST: steps,
        Op.QKV: with_kv,
        Op.ATTN: on_cpu,
        Op.HID: on_cpu,
        Op.KV: on_device,
        Op.APPEND: on_device,
        Op.GATTN: sorted(on_device + with_states),
    }
    for op, expected in per_micro_batch.items():
        found = sorted((task.layer, task.part) for task in schedule.tasks if task.op is op)
        assert found == expected
    for layer in range(form.num_layers):
        of_layer = [t for t in schedule.tasks if t.op is Op.EXPERTS and t.layer == layer]
        num_groups = form.layers[layer].num_groups
        for group in range(num_groups):
            of_group = [task for task in of_layer if task.part % num_groups == group]
            micro_batches = [b.key[0] for task in of_group for b in task.writes]
            assert sorted(micro_batches) == list(range(form.num_micro_batches))
        sums = {
            task.part: [buffer.key for buffer in task.reads]
            for task in schedule.tasks
            if task.op is Op.SUMS and task.layer == layer
        }
        by_launch = {
            task.part // num_groups: [buffer.key for buffer in task.writes] for task in of_layer
        }
        assert sums == (by_launch if form.layers[layer].host_experts else {})


@QUICK
@given(built())
def test_every_page_is_loaded_once(case: tuple[Schedule, StepForm]) -> None:
    schedule, form = case
    pages = sorted(
        (layer, page) for layer, of in enumerate(form.layers) for page in range(of.num_pages)
    )
    for op in (Op.W, Op.STAGE) if form.staging_slots else (Op.W,):
        found = sorted((task.layer, task.part) for task in schedule.tasks if task.op is op)
        assert found == pages


@QUICK
@given(built(), st.randoms(use_true_random=False))
def test_each_task_finds_what_it_needs_in_any_order_that_the_dependencies_allow(
    case: tuple[Schedule, StepForm], rng: random.Random
) -> None:
    schedule, form = case
    in_order = meaning.run(schedule, form, range(len(schedule.tasks)))
    for _ in range(3):
        assert meaning.run(schedule, form, topological_order(schedule, rng)) == in_order


@QUICK
@given(built(), st.data())
def test_makespan_is_between_the_busiest_lane_and_the_sum(
    case: tuple[Schedule, StepForm], data: st.DataObject
) -> None:
    schedule, _ = case
    timeline = simulate(schedule, TaskCost(data))
    total_s = sum(span.duration_s for span in timeline.spans)
    busiest_s = max(timeline.busy_s(resource) for resource in Resource)
    assert busiest_s <= timeline.makespan_s <= total_s


@QUICK
@given(step_forms())
def test_a_pass_finds_what_the_one_before_has_loaded(form: StepForm) -> None:
    memory = meaning.initial_memory(form)
    for buffer in meaning.first_layer_in_slot(form, form.first_slot):
        memory[buffer] = ("nothing",)
    for task in load_first_layer(form).tasks:
        meaning.perform(task, form, memory)
    for _ in range(3):
        on_device = {b: held for b, held in memory.items() if b.name == "weights"}
        memory = meaning.initial_memory(form)
        for buffer in meaning.first_layer_in_slot(form, form.first_slot):
            del memory[buffer]
        memory |= on_device
        for task in STREAMING_BUILDERS["cgopipe"](form).tasks:
            meaning.perform(task, form, memory)
        meaning.check_results(form, memory)
        form = replace(form, first_slot=next_first_slot(form))


def test_nothing_is_loaded_first_where_all_is_resident() -> None:
    form = StepForm(layers=(LayerPlacement(),), num_micro_batches=2)
    assert load_first_layer(form).tasks == ()


def test_the_pass_in_place_means_the_same() -> None:
    schedule = build_in_place(3)
    form = StepForm(layers=(LayerPlacement(),) * 3, num_micro_batches=1)
    meaning.run(schedule, form, range(len(schedule.tasks)))


@pytest.mark.parametrize("name", BUILDER_NAMES)
def test_a_schedule_carries_the_name_of_its_builder(name: str) -> None:
    form = StepForm(
        layers=(LayerPlacement(),),
        num_micro_batches=1,
        has_device_attention=True,
    )
    assert BUILDERS[name](form).name == name


@QUICK
@given(data=st.data())
def test_a_step_begins_with_the_pages_of_its_second_layer(data: st.DataObject) -> None:
    """So they may be loaded before it: what is loaded after them waits behind them."""
    name = data.draw(st.sampled_from(sorted(RING_SCHEDULES)))
    form = data.draw(step_forms(name, max_staging_slots=0))
    ahead = load_second_layer(form).tasks
    loads = [task for task in STREAMING_BUILDERS[name](form).tasks if task.op is Op.W]
    assert loads[: len(ahead)] == list(ahead)
