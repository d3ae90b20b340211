"""The schedule of the device `cpu`."""

from raymoe.schedule.builders import build_in_place
from raymoe.schedule.graph import Resource, Task
from raymoe.schedule.timeline import simulate

SCHEDULE = build_in_place(2)


def test_issue_order_of_two_layers() -> None:
    assert str(SCHEDULE) == (
        "cpu: embed[0,0] pre[0,0] attn[0,0] post[0,0] experts[0,0]"
        " pre[1,0] attn[1,0] post[1,0] experts[1,0] head[2,0]"
    )


def test_every_task_waits_for_the_one_before_it() -> None:
    for index, waits in enumerate(SCHEDULE.dependencies):
        assert index == 0 or index - 1 in waits


def test_it_has_no_transfers() -> None:
    assert SCHEDULE.resources == (Resource.CPU,)


class OneSecondEach:
    def duration_s(self, task: Task) -> float:
        return 1.0


def test_its_makespan_is_the_sum_of_its_durations() -> None:
    timeline = simulate(SCHEDULE, OneSecondEach())
    assert timeline.makespan_s == len(SCHEDULE.tasks)
    assert timeline.utilization(Resource.CPU) == 1.0
    assert timeline.bubbles(Resource.CPU) == ()
