"""Critical path and gap, by hand and by property."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.errors import ScheduleError
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import Span, Timeline, bound_by, compare, critical_path, gap, simulate
from tests.unit.schedule.costs import OpCost, TaskCost
from tests.unit.schedule.forms import BUILDER_NAMES, step_forms

X, Y = Buffer("x"), Buffer("y")
LOAD = Task(op=Op.W, layer=0, part=0, resource=Resource.HTOD, writes=(X,))
NEXT = Task(op=Op.W, layer=0, part=1, resource=Resource.HTOD, writes=(Y,))
WORK = Task(op=Op.PRE, layer=0, part=0, resource=Resource.GPU, reads=(X,))
LAST = Task(op=Op.POST, layer=0, part=0, resource=Resource.GPU, reads=(Y,))
SCHEDULE = Schedule("s", (LOAD, NEXT, WORK, LAST))


def path_of(timeline: Timeline) -> list[str]:
    return [str(span.task) for span in critical_path(SCHEDULE, timeline)]


def test_the_path_goes_through_the_lane_or_the_dependency_that_ended_last() -> None:
    link_bound = simulate(SCHEDULE, OpCost({Op.W: 5, Op.PRE: 1, Op.POST: 1}))
    assert path_of(link_bound) == ["w[0,0]", "w[0,1]", "post[0,0]"]
    compute_bound = simulate(SCHEDULE, OpCost({Op.W: 1, Op.PRE: 5, Op.POST: 1}))
    assert path_of(compute_bound) == ["w[0,0]", "pre[0,0]", "post[0,0]"]


def test_the_bound_is_where_the_path_spends_its_time() -> None:
    for load_s, work_s, lane in ((5, 1, Resource.HTOD), (1, 5, Resource.GPU)):
        timeline = simulate(SCHEDULE, OpCost({Op.W: load_s, Op.PRE: work_s, Op.POST: work_s}))
        assert bound_by(SCHEDULE, timeline) is lane
    with pytest.raises(ScheduleError, match="is empty"):
        bound_by(Schedule("s", ()), Timeline("s", ()))


def test_the_path_of_a_measured_timeline_may_have_gaps() -> None:
    ends = [(0.0, 1.0), (1.1, 2.0), (1.2, 3.0), (3.5, 4.0)]
    spans = tuple(Span(t, *when) for t, when in zip(SCHEDULE.tasks, ends, strict=True))
    assert path_of(Timeline("s", spans)) == ["w[0,0]", "pre[0,0]", "post[0,0]"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_predicted_path_is_as_long_as_the_makespan(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(BUILDER_NAMES))
    schedule = STREAMING_BUILDERS[name](data.draw(step_forms(name)))
    timeline = simulate(schedule, TaskCost(data))
    path = critical_path(schedule, timeline)
    assert path[0].start_s == 0.0
    for before, after in itertools.pairwise(path):
        assert before.end_s == after.start_s
    assert path[-1].end_s == timeline.makespan_s


def test_an_empty_schedule_has_an_empty_path() -> None:
    assert critical_path(Schedule("s", ()), Timeline("s", ())) == ()


def test_a_timeline_of_another_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="timeline 't' with 0 tasks is not one of schedule 's'"):
        critical_path(SCHEDULE, Timeline("t", ()))


def test_the_line_of_a_report() -> None:
    predicted = simulate(SCHEDULE, OpCost({Op.W: 1, Op.PRE: 0.25, Op.POST: 0.5}))
    measured = simulate(SCHEDULE, OpCost({Op.W: 1, Op.PRE: 0.25, Op.POST: 0.75}))
    assert gap(predicted, measured) == pytest.approx(0.1)
    assert compare(predicted, measured) == (
        "predicted 2.5 s, measured 2.75 s, gap +10.0 %, link busy 73 %"
    )
    assert compare(measured, predicted).split(", ")[2] == "gap -9.1 %"


def test_what_was_predicted_to_take_no_time_has_no_finite_gap() -> None:
    nothing, something = Timeline("s", ()), simulate(SCHEDULE, OpCost({Op.W: 1}))
    assert gap(nothing, nothing) == 0.0
    assert gap(nothing, something) == math.inf
