"""Bytes in use, by hand and against the sizes that a step is planned with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from tests.unit.schedule.forms import BUILDER_NAMES, step_forms
from tests.unit.schedule.liveness import live_bytes

A, B, C = Buffer("a"), Buffer("b"), Buffer("c")
SIZES = {A: 1, B: 10, C: 100}


def task(layer: int, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> Task:
    return Task(op=Op.PRE, layer=layer, part=0, resource=Resource.GPU, reads=reads, writes=writes)


@pytest.mark.parametrize(
    ("steps", "inputs", "peak"),
    [
        ([((), (A,)), ((A,), (B,)), ((B,), (C,)), ((C,), ())], (), 110),
        ([((A,), (B,)), ((B,), (C,))], (A,), 110),
        ([((A,), ()), ((), (B,)), ((A,), (C,))], (A,), 111),
        ([((), (A,)), ((), (B,)), ((B,), (C,))], (), 111),
        ([((), (B,)), ((B,), ()), ((), (C,)), ((C,), ()), ((), (B,)), ((B,), ())], (), 110),
    ],
    ids=["chain", "input_ends", "input_stays", "unread_is_result", "place_is_kept"],
)
def test_peak_of_a_schedule_by_hand(
    steps: list[tuple[tuple[Buffer, ...], tuple[Buffer, ...]]],
    inputs: tuple[Buffer, ...],
    peak: int,
) -> None:
    tasks = tuple(task(layer, *step) for layer, step in enumerate(steps))
    schedule = Schedule("s", tasks, frozenset(inputs))
    assert live_bytes(schedule, SIZES.__getitem__) == peak


def test_an_empty_schedule_needs_nothing() -> None:
    assert live_bytes(Schedule("s", ()), SIZES.__getitem__) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_step_stays_within_its_slots_its_rings_and_its_hidden_states(
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(BUILDER_NAMES))
    form = data.draw(step_forms(name))
    schedule = STREAMING_BUILDERS[name](form)
    max_pages = max(pages.num_common_pages for pages in form.layers)
    groups = [group for pages in form.layers for group in pages.group_pages]
    is_on_cores = any(pages.host_experts for pages in form.layers)
    max_in_flight = {
        "weights": 2 * max_pages + form.ring_slots * max(map(len, groups), default=0),
        "expert_sum": form.num_micro_batches if groups or is_on_cores else 0,
        "host_rows": is_on_cores * form.num_micro_batches,
        "host_sum": is_on_cores * form.num_micro_batches,
        "returned_sum": is_on_cores * 2,
        "staging": form.staging_slots,
        "staged_kv": 2,
        "hidden": form.num_micro_batches,
        "qkv": max(2, form.num_micro_batches) if name == "flexgen_s4" else form.num_micro_batches,
        "host_qkv": max(2, form.num_micro_batches)
        if name == "flexgen_s4"
        else form.num_micro_batches,
    }
    for tier, limit in max_in_flight.items():
        assert live_bytes(schedule, lambda buffer, tier=tier: int(buffer.name == tier)) <= limit
