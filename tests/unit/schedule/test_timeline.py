"""Simulation and the figures of a timeline, by hand."""

from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import Bubble, Timeline, simulate

X, Y = Buffer("x"), Buffer("y")
LOAD = Task(op=Op.W, layer=0, part=0, resource=Resource.HTOD, writes=(X,))
WORK = Task(op=Op.GATTN, layer=0, part=0, resource=Resource.GPU, reads=(X,), writes=(Y,))
RELOAD = Task(op=Op.W, layer=1, part=0, resource=Resource.HTOD, writes=(X,))
AGAIN = Task(op=Op.GATTN, layer=1, part=0, resource=Resource.GPU, reads=(X, Y))


class Durations:
    def duration_s(self, task: Task) -> float:
        return {Resource.HTOD: 2.0, Resource.GPU: 1.0}[task.resource]


TIMELINE = simulate(Schedule("s", (LOAD, WORK, RELOAD, AGAIN)), Durations())


def test_a_load_into_a_used_buffer_waits_for_its_last_reader() -> None:
    assert [(span.start_s, span.end_s) for span in TIMELINE.spans] == [
        (0.0, 2.0),
        (2.0, 3.0),
        (3.0, 5.0),
        (5.0, 6.0),
    ]


def test_figures_of_the_timeline() -> None:
    assert TIMELINE.makespan_s == 6.0
    assert TIMELINE.busy_s(Resource.HTOD) == 4.0
    assert TIMELINE.utilization(Resource.GPU) == 2.0 / 6.0
    assert TIMELINE.seconds_by_op() == {"w": 4.0, "gattn": 2.0}
    assert TIMELINE.resources == (Resource.GPU, Resource.HTOD)


def test_a_part_between_two_times_is_cut_at_its_edges() -> None:
    part = TIMELINE.between(1.5, 4.0)
    assert [(span.task, span.start_s, span.end_s) for span in part.spans] == [
        (LOAD, 0.0, 0.5),
        (WORK, 0.5, 1.5),
        (RELOAD, 1.5, 2.5),
    ]
    assert TIMELINE.between(0.0, 6.0) == TIMELINE
    assert not TIMELINE.between(6.0, 9.0).spans


def test_bubbles_are_the_gaps_before_the_last_task() -> None:
    assert TIMELINE.bubbles(Resource.GPU) == (
        Bubble(Resource.GPU, 0.0, 2.0),
        Bubble(Resource.GPU, 3.0, 5.0),
    )
    assert TIMELINE.bubbles(Resource.HTOD) == (Bubble(Resource.HTOD, 2.0, 3.0),)


def test_a_page_that_waits_holds_no_other_copy_back_and_shares_the_link_with_it() -> None:
    hidden = Task(op=Op.HID, layer=1, part=0, resource=Resource.HTOD, writes=(Buffer("h"),))
    schedule = Schedule("s", (LOAD, WORK, RELOAD, hidden))
    ends = [span.end_s for span in simulate(schedule, Durations()).spans]
    assert ends == [3.0, 4.0, 7.0, 2.0]  # 4 s of pages and 2 s of others take 6 s
    in_order = simulate(schedule, Durations(), own_streams=())
    assert [span.end_s for span in in_order.spans] == [2.0, 3.0, 5.0, 7.0]


def test_an_empty_timeline_has_no_length() -> None:
    empty = Timeline("empty", ())
    assert empty.makespan_s == 0.0
    assert empty.utilization(Resource.GPU) == 0.0
