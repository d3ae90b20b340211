"""A list of tasks that is no schedule is refused with the lanes and the task."""

import pytest

from raymoe.errors import ScheduleError
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task

A, B = Buffer("a"), Buffer("b", (1,))


def compute(layer: int, *, reads: tuple[Buffer, ...] = (), resource: str = "gpu") -> Task:
    lane = Resource(resource)
    return Task(op=Op.PRE, layer=layer, part=0, resource=lane, reads=reads, writes=(A,))


def load(page: int, *writes: Buffer) -> Task:
    return Task(op=Op.W, layer=0, part=page, resource=Resource.HTOD, writes=writes)


def refusal(*tasks: Task, inputs: frozenset[Buffer] = frozenset()) -> str:
    with pytest.raises(ScheduleError) as caught:
        Schedule("s", tasks, inputs)
    return str(caught.value)


def test_the_task_is_shown_with_what_every_lane_was_given_before() -> None:
    tasks = [compute(layer) for layer in range(6)]
    assert refusal(load(0, A), *tasks, load(1, B), compute(6, reads=(Buffer("c"),))) == (
        "schedule 's': task pre[6,0] on lane gpu reads c, which no earlier task writes and which "
        "is not an input; no buffer is called 'c' so far\n"
        "issued until then (task 9 of 9 is marked):\n"
        "  gpu: ... pre[3,0] pre[4,0] pre[5,0] >pre[6,0]<\n"
        "  htod: w[0,0] w[0,1]"
    )


def test_a_writer_that_comes_too_late_is_named() -> None:
    message = refusal(load(1, A), compute(0, reads=(B,)), load(0, B))
    assert "w[0,0] on lane htod writes it, but is issued later" in message


def test_buffers_of_the_same_name_are_listed() -> None:
    message = refusal(load(0, B), compute(0, reads=(Buffer("b", (2,)),)))
    assert "reads b[2], which" in message
    assert "so far there is b[1]\n" in message
    many = [Buffer("b", (key,)) for key in range(9, 0, -1)]
    message = refusal(load(0, *many), compute(0, reads=(Buffer("b", (0,)),)))
    assert "so far there is b[1], b[2], b[3], b[4], b[5], b[6], ...\n" in message


def test_an_operation_on_a_lane_that_cannot_run_it_is_refused() -> None:
    message = refusal(compute(0), compute(1, resource="dtoh"))
    assert "task pre[1,0] on lane dtoh cannot run there; pre runs on cpu or gpu\n" in message
    assert "  gpu: pre[0,0]\n  dtoh: >pre[1,0]<" in message


def test_the_second_of_two_equal_tasks_is_marked() -> None:
    message = refusal(load(0, A), load(0, B))
    assert "task w[0,0] on lane htod occurs twice" in message
    assert "  htod: w[0,0] >w[0,0]<" in message
