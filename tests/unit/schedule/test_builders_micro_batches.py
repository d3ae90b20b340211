"""The options of the family of micro-batches, and what they buy."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import ConfigError
from raymoe.schedule.builders import (
    RING_SCHEDULES,
    STREAMING_BUILDERS,
    build_micro_batches,
    build_vslpipe,
)
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm
from raymoe.schedule.timeline import simulate
from tests.unit.schedule.costs import T4_LIKE, OpCost, link_bound_costs
from tests.unit.schedule.forms import (
    form_for,
    grouped_layer,
    layer_of,
    step_forms,
    streamed_layer,
    uniform_form,
)

RESIDENT = LayerPlacement()


def order(schedule: Schedule, *ops: Op) -> str:
    """Tasks of some operations in issue order, whatever their lanes."""
    return " ".join(str(task) for task in schedule.tasks if task.op in ops)


def test_a_look_ahead_of_zero_ends_a_wave_before_the_next_begins() -> None:
    schedule = build_micro_batches(
        replace(uniform_form(num_layers=1), micro_batches_per_group=1, look_ahead=0)
    )
    assert order(schedule, Op.PRE, Op.EXPERTS) == (
        "pre[0,0] experts[0,0] pre[0,1] experts[0,1] pre[0,2] experts[0,2]"
    )


def test_a_front_waits_for_the_whole_expert_group_of_its_wave() -> None:
    form = uniform_form(num_layers=2, num_micro_batches=4)
    schedule = build_micro_batches(replace(form, micro_batches_per_group=2, look_ahead=3))
    assert order(schedule, Op.PRE, Op.POST, Op.EXPERTS) == (
        "pre[0,0] pre[0,1] pre[0,2] pre[0,3] post[0,0] post[0,1] experts[0,0]"
        " pre[1,0] pre[1,1] post[0,2] post[0,3] experts[0,1]"
        " pre[1,2] pre[1,3] post[1,0] post[1,1] experts[1,0] post[1,2] post[1,3] experts[1,1]"
    )


def test_a_last_group_may_be_smaller() -> None:
    schedule = build_micro_batches(
        replace(uniform_form(1, num_micro_batches=3), micro_batches_per_group=2, look_ahead=0)
    )
    groups = [task for task in schedule.tasks if task.op is Op.EXPERTS]
    assert [task.part for task in groups] == [0, 1]
    assert groups[1].writes == (Buffer("hidden", (2,)),)


def test_a_front_waits_until_the_attention_pages_of_its_layer_are_issued() -> None:
    late = layer_of(3, attention_pages=(2,), expert_pages=(0, 1))
    form = StepForm(layers=(late, late), num_micro_batches=3)
    schedule = build_micro_batches(replace(form, micro_batches_per_group=1, look_ahead=2))
    assert order(schedule, Op.PRE, Op.W) == (
        "pre[0,0] pre[0,1] pre[0,2] w[1,0] w[1,1] w[1,2] pre[1,0] pre[1,1] pre[1,2]"
        " w[0,0] w[0,1] w[0,2]"
    )


@pytest.mark.parametrize(
    ("num_pages", "by_micro_batch"),
    [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (7, [3, 2, 2])],
)
def test_pages_are_spread_evenly_and_early(num_pages: int, by_micro_batch: list[int]) -> None:
    form = uniform_form(num_layers=1, num_pages=num_pages)
    schedule = build_micro_batches(replace(form, micro_batches_per_group=1, look_ahead=0))
    words = order(schedule, Op.HID, Op.W).split("hid")[1:]
    assert [word.count("w[") for word in words] == by_micro_batch


def test_pages_can_come_as_one_block_behind_the_first_hidden_states() -> None:
    form = uniform_form(num_layers=1)
    schedule = build_micro_batches(
        replace(form, micro_batches_per_group=1, look_ahead=0), interleaves_pages=False
    )
    assert order(schedule, Op.HID, Op.W) == "hid[0,0] w[0,0] w[0,1] w[0,2] hid[0,1] hid[0,2]"


def test_the_next_streamed_layer_is_spread_over_the_resident_ones_before_it() -> None:
    pages = streamed_layer(4)
    form = StepForm(layers=(pages, RESIDENT, pages, RESIDENT), num_micro_batches=2)
    schedule = build_micro_batches(replace(form, micro_batches_per_group=1, look_ahead=0))
    assert order(schedule, Op.HID, Op.W) == (
        "hid[0,0] w[2,0] hid[0,1] w[2,1] hid[1,0] w[2,2] hid[1,1] w[2,3]"
        " hid[2,0] w[0,0] hid[2,1] w[0,1] hid[3,0] w[0,2] hid[3,1] w[0,3]"
    )


def test_waves_that_meet_at_the_end_of_a_layer_have_buffers_of_their_own() -> None:
    form = uniform_form(num_layers=2, num_micro_batches=4)
    schedule = build_micro_batches(replace(form, micro_batches_per_group=1, look_ahead=2))
    written = [task.writes[0].key for task in schedule.tasks if task.op is Op.QKV]
    assert written == [(0,), (1,), (2,), (0,), (1,), (2,), (0,), (1,)]


def test_a_split_wave_reads_both_halves_and_stages_its_kv_in_turn() -> None:
    form = StepForm(
        layers=(streamed_layer(),) * 2,
        num_micro_batches=3,
        has_cpu_attention=True,
        has_device_attention=True,
    )
    schedule = build_micro_batches(replace(form, micro_batches_per_group=1, look_ahead=0))
    posts = [task for task in schedule.tasks if task.op is Op.POST]
    assert {Buffer("attention", (0,)), Buffer("device_attention", (0,))} <= set(posts[0].reads)
    staged = [task.writes[0].key for task in schedule.tasks if task.op is Op.KV]
    assert staged == [(0,), (1,), (0,), (1,), (0,), (1,)]


def test_pages_go_through_the_staging_ring_in_turn() -> None:
    form = StepForm(layers=(streamed_layer(),) * 2, num_micro_batches=1, staging_slots=2)
    schedule = build_micro_batches(replace(form, micro_batches_per_group=1, look_ahead=0))
    staged = [task.writes[0].key for task in schedule.tasks if task.op is Op.STAGE]
    assert staged == [(0,), (1,), (0,), (1,), (0,), (1,)]
    assert schedule.resources[-1] is Resource.HOST_COPY


@pytest.mark.parametrize(
    ("search_point", "message"),
    [
        ({"micro_batches_per_group": 0, "look_ahead": 0}, "micro_batches_per_group is 0"),
        ({"micro_batches_per_group": 1, "look_ahead": -1}, "look_ahead is -1"),
    ],
)
def test_a_knob_out_of_range_is_refused(search_point: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(uniform_form(), **search_point)


def test_vslpipe_has_two_waves_at_most() -> None:
    with pytest.raises(
        ConfigError, match="num_micro_batches is 3; vslpipe cuts a step in at most 2"
    ):
        build_vslpipe(uniform_form(num_micro_batches=3))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cgopipe_is_never_longer_than_s3_where_the_link_is_the_bound(data: st.DataObject) -> None:
    # With one micro-batch nothing runs ahead, and the link waits for the first attention of the
    # step.
    form = data.draw(step_forms(min_pages=1, min_micro_batches=2, max_staging_slots=0))
    form = replace(form, has_cpu_attention=True, has_device_attention=False)  # as both papers do
    cost = data.draw(link_bound_costs(form))
    cgopipe, s3 = (
        simulate(STREAMING_BUILDERS[name](form), cost).makespan_s
        for name in ("cgopipe", "flexgen_s3")
    )
    assert cgopipe <= s3 * (1 + 1e-9)


def test_schedules_rank_as_in_figure_6_of_moe_lightning() -> None:
    seconds = {
        name: simulate(
            STREAMING_BUILDERS[name](form_for(name, 32, 14, 32)), T4_LIKE, own_streams=()
        ).makespan_s
        for name in ("cgopipe", "fastdecode", "flexgen_s3", "flexgen_s4", "layer_by_layer")
    }
    assert sorted(seconds, key=lambda name: seconds[name])[:2] == ["cgopipe", "fastdecode"]
    assert max(seconds, key=lambda name: seconds[name]) == "layer_by_layer"


def test_cgopipe_keeps_a_link_busy_that_is_the_bound() -> None:
    timeline = simulate(STREAMING_BUILDERS["cgopipe"](uniform_form(32, 14, 32)), T4_LIKE)
    assert timeline.utilization(Resource.HTOD) > 0.95


def test_groups_of_experts_pass_through_a_ring_after_the_attention_of_their_layer() -> None:
    form = StepForm(layers=(grouped_layer(),) * 2, num_micro_batches=2, ring_slots=2)
    schedule = build_micro_batches(form)
    assert order(schedule, Op.PRE, Op.POST, Op.EXPERTS, Op.W, Op.HEAD) == (
        # Page 0 is attention, which is loaded a layer ahead; half of the groups fit the ring.
        "pre[0,0] pre[0,1] w[1,0] post[0,0] post[0,1]"
        " experts[0,0] experts[0,4] w[0,3] experts[0,1] experts[0,5] w[0,4]"
        " experts[0,2] experts[0,6] experts[0,3] pre[1,0] experts[0,7] pre[1,1]"
        " w[1,1] w[1,2] post[1,0] w[0,0] post[1,1]"
        " experts[1,0] experts[1,4] w[1,3] experts[1,1] experts[1,5] w[1,4]"
        " experts[1,2] experts[1,6] experts[1,3] experts[1,7]"
        " w[0,1] w[0,2] head[2,0]"
    )
    loads = [task for task in schedule.tasks if task.op is Op.W and task.layer == 1]
    slots = {task.part: task.writes[0].key for task in loads}
    assert slots == {0: (1, 0), 1: (2, 0), 2: (3, 0), 3: (2, 0), 4: (3, 0)}


def test_a_ring_of_half_a_layer_costs_little_while_the_link_is_the_bound() -> None:
    """With a fifth of its memory: 2 of 4 groups and attention, not two layers."""
    costs = {Op.W: 1.0, Op.ATTN: 0.3, Op.PRE: 0.1, Op.POST: 0.1, Op.EXPERTS: 0.4}
    whole = StepForm(layers=(streamed_layer(5),) * 6, num_micro_batches=4)
    ring = StepForm(layers=(grouped_layer(),) * 6, num_micro_batches=4, ring_slots=2)
    whole_s = simulate(build_micro_batches(whole), OpCost(costs)).makespan_s
    ring_s = simulate(build_micro_batches(ring), OpCost(costs | {Op.EXPERTS: 0.1})).makespan_s
    assert whole_s < ring_s < 1.3 * whole_s


def test_baselines_with_barriers_refuse_groups() -> None:
    form = StepForm(layers=(grouped_layer(),), num_micro_batches=1, ring_slots=1)
    for name in sorted(set(STREAMING_BUILDERS) - RING_SCHEDULES):
        with pytest.raises(ConfigError, match=f"{name}.* loads whole layers"):
            STREAMING_BUILDERS[name](form)
