"""Dependencies are derived from buffers."""

import random

import pytest

from raymoe.errors import ScheduleError
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task

A, B = Buffer("a"), Buffer("b", (1,))


def task(
    layer: int, reads: tuple[Buffer, ...] = (), writes: tuple[Buffer, ...] = (), part: int = 0
) -> Task:
    return Task(
        op=Op.PRE, layer=layer, part=part, resource=Resource.CPU, reads=reads, writes=writes
    )


def test_a_reader_waits_for_the_last_writer() -> None:
    schedule = Schedule("s", (task(0, writes=(A,)), task(1, writes=(A,)), task(2, reads=(A,))))
    assert schedule.dependencies == ((), (0,), (1,))


def test_a_writer_waits_for_all_readers_since_the_last_write() -> None:
    schedule = Schedule(
        "s",
        (task(0, writes=(A,)), task(1, reads=(A,)), task(2, reads=(A,)), task(3, writes=(A,))),
    )
    assert schedule.dependencies == ((), (0,), (0,), (0, 1, 2))


def test_a_task_that_updates_in_place_waits_for_writer_and_readers_not_for_itself() -> None:
    schedule = Schedule(
        "s",
        (
            task(0, writes=(A,)),
            task(1, reads=(A,), writes=(B,)),
            task(2, reads=(A,), writes=(A,)),
            task(3, reads=(A,)),
        ),
    )
    assert schedule.dependencies == ((), (0,), (0, 1), (2,))


def test_inputs_may_be_read_first() -> None:
    tasks = (task(0, reads=(A,)),)
    assert Schedule("s", tasks, frozenset({A})).dependencies == ((),)
    with pytest.raises(ScheduleError, match=r"pre\[0,0\] on lane cpu reads a, which no earlier"):
        Schedule("s", tasks)


def test_a_task_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"pre\[4,0\] on lane cpu occurs twice"):
        Schedule("s", (task(4), task(4)))


def test_derived_waits_equal_a_plain_search_on_random_schedules() -> None:
    rng = random.Random(0)
    buffers = [Buffer("x", (key,)) for key in range(4)]
    for _ in range(200):
        tasks = tuple(
            task(
                layer,
                reads=tuple(rng.sample(buffers, rng.randint(0, 2))),
                writes=tuple(rng.sample(buffers, rng.randint(0, 2))),
            )
            for layer in range(12)
        )
        schedule = Schedule("random", tasks, frozenset(buffers))
        for later, waits in enumerate(schedule.dependencies):
            assert closure(schedule, waits) >= conflicts(tasks, later)


def closure(schedule: Schedule, waits: tuple[int, ...]) -> set[int]:
    found: set[int] = set()
    stack = list(waits)
    while stack:
        index = stack.pop()
        if index not in found:
            found.add(index)
            stack.extend(schedule.dependencies[index])
    return found


def conflicts(tasks: tuple[Task, ...], later: int) -> set[int]:
    reads, writes = set(tasks[later].reads), set(tasks[later].writes)
    return {
        index
        for index, earlier in enumerate(tasks[:later])
        if set(earlier.writes) & (reads | writes) or set(earlier.reads) & writes
    }
