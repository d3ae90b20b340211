"""The synchronisation of the baselines is that of their papers."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.schedule import timeline
from raymoe.schedule.builders import STREAMING_BUILDERS, build_flexgen_s4, build_layer_by_layer
from raymoe.schedule.graph import Op, Resource
from raymoe.schedule.program import StepForm
from tests.unit.schedule.costs import OpCost, TaskCost
from tests.unit.schedule.figure_6 import (
    gpu_share_during_cpu_attention,
    share_of_gpu_idle_time_spent_on,
)
from tests.unit.schedule.forms import form_for, step_forms, streamed_layer, uniform_form

# Copies one after the other, as in the papers.
simulate = partial(timeline.simulate, own_streams=())

WITH_BARRIERS = ("flexgen_s3", "flexgen_s4", "layer_by_layer")


@pytest.mark.parametrize("name", WITH_BARRIERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_nothing_starts_before_all_that_was_issued_before_a_sync_has_ended(
    name: str, data: st.DataObject
) -> None:
    form = data.draw(step_forms(name))
    spans = simulate(STREAMING_BUILDERS[name](form), TaskCost(data)).spans
    for place, span in enumerate(spans):
        if span.task.op is Op.SYNC:
            assert span.start_s >= max(before.end_s for before in spans[:place])
            assert all(after.start_s >= span.end_s for after in spans[place + 1 :])


def test_s3_overlaps_nothing_but_the_first_wave_with_the_weights() -> None:
    # The law of FlexGen's loop for one layer of 3 micro-batches: the first one waits for the
    # weights.
    cost = OpCost(
        {Op.PRE: 1, Op.QKV: 2, Op.ATTN: 4, Op.HID: 8, Op.POST: 16, Op.EXPERTS: 32, Op.W: 100}
    )
    run = simulate(STREAMING_BUILDERS["flexgen_s3"](uniform_form(num_layers=1)), cost)
    assert run.makespan_s == (3 * 100 + 8 + 16 + 32) + 2 * (1 + 2 + 4 + 8 + 16 + 32)


def test_s4_takes_for_each_wave_the_longer_of_computation_and_the_next_kv() -> None:
    form = form_for("flexgen_s4", num_layers=1, num_micro_batches=3, num_pages=3)
    cost = OpCost({Op.GATTN: 1, Op.EXPERTS: 2, Op.KV: 10, Op.W: 100})
    run = simulate(build_flexgen_s4(form), cost)
    assert run.makespan_s == (10 + 3 * 100 + 10) + 10 + 3
    gpu_bound = simulate(build_flexgen_s4(form), OpCost({Op.EXPERTS: 50, Op.KV: 10}))
    assert gpu_bound.makespan_s == 10 + 3 * 50


def test_s4_stores_the_new_kv_of_a_wave_while_the_next_one_is_computed() -> None:
    form = form_for("flexgen_s4", num_layers=1, num_micro_batches=3, num_pages=3)
    run = simulate(build_flexgen_s4(form), OpCost({Op.PRE: 5, Op.QKV: 4, Op.APPEND: 1}))
    assert run.makespan_s == 3 * 5 + (4 + 1)


def test_s4_attends_in_line_for_rows_that_stay_on_the_cpu() -> None:
    form = StepForm(layers=(streamed_layer(),), num_micro_batches=2, has_device_attention=True)
    cost = OpCost({Op.QKV: 1, Op.ATTN: 2, Op.HID: 4, Op.GATTN: 8, Op.EXPERTS: 16})
    schedule = build_flexgen_s4(form)
    assert simulate(schedule, cost).makespan_s == 2 * (8 + 16)
    in_line = [str(task) for task in schedule.tasks if task.part == 0 and task.layer == 0]
    assert in_line.index("hid[0,0]") < in_line.index("post[0,0]")


def test_layer_by_layer_hides_no_transfer_of_weights() -> None:
    cost = OpCost({Op.PRE: 1, Op.ATTN: 2, Op.EXPERTS: 4, Op.W: 10})
    run = simulate(build_layer_by_layer(uniform_form(num_layers=2)), cost)
    assert run.makespan_s == 2 * (3 * (1 + 2 + 4) + 3 * 10)
    assert run.busy_s(Resource.HTOD) == 60


def test_baselines_idle_where_figure_6_shows_it() -> None:
    """MoE-Lightning, figure 6, with its squares: attention longer than the rest, KV longest."""
    squares = OpCost(
        {Op.PRE: 1, Op.QKV: 0.2, Op.ATTN: 3, Op.HID: 0.2, Op.POST: 1, Op.EXPERTS: 1.5}
        | {Op.W: 1, Op.KV: 5, Op.GATTN: 0.5}
    )
    s1, s3, s4 = (
        simulate(STREAMING_BUILDERS[name](form_for(name, 8, 4, 4)), squares)
        for name in ("cgopipe", "flexgen_s3", "flexgen_s4")
    )
    assert gpu_share_during_cpu_attention(s3) == 0.0
    assert gpu_share_during_cpu_attention(s1) > 0.8
    assert share_of_gpu_idle_time_spent_on(s4, Op.KV) > 0.7
    assert share_of_gpu_idle_time_spent_on(s4, Op.KV, Op.W) > 0.95
    assert s1.utilization(Resource.GPU) > 0.9
    assert max(s3.utilization(Resource.GPU), s4.utilization(Resource.GPU)) < 0.7
