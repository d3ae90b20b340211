"""Many tasks with random stalls: no deadlock, nothing left behind, right results, right times."""

import gc
import weakref
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from raymoe.device.emulated import EmulatedDevice, RandomStalls
from raymoe.device.lane import TaskMark
from raymoe.device.mover import Copies
from raymoe.runtime.executor import Bindings, Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Task
from raymoe.schedule.timeline import simulate
from tests.unit.runtime.random_schedules import (
    POISON,
    Memory,
    digest,
    new_memory,
    random_schedule,
    serial_result,
    work,
)

pytestmark = pytest.mark.slow

NUM_TASKS = 200_000
TASKS_PER_RUN = 2_000


class Durations:
    """Between a half and one and a half of `mean_s`, by task."""

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s

    def duration_s(self, task: Task) -> float:
        return self._mean_s * (0.5 + digest(str(task)) / 2**32)


def poison(buffer: Buffer, memory: Memory) -> None:
    memory.buffers[buffer] = POISON


def num_marks() -> int:
    return sum(type(thing) is TaskMark for thing in gc.get_objects())


def run(task: Task, memory: Memory) -> Copies | None:
    """The work of a copy is done when its bytes are there."""
    if task.resource in {Resource.HTOD, Resource.DTOH}:
        return Copies(record=partial(work, task, memory))
    work(task, memory)
    return None


BINDINGS: Bindings[Memory] = dict.fromkeys(Op, run)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def num_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_tasks_with_stalls_in_every_lane_leave_nothing_behind() -> None:
    gc.collect()
    before = (num_threads(), num_handles(), num_marks())
    stall = RandomStalls(probability=0.01, longest_s=1e-3, seed=1)
    memories: list[weakref.ref[Memory]] = []
    with closing(EmulatedDevice(0, Durations(0.0), stall=stall)) as device:
        for seed in range(NUM_TASKS // TASKS_PER_RUN):
            schedule = random_schedule(seed, num_tasks=TASKS_PER_RUN, num_buffers=12)
            memory = new_memory(schedule)
            memories.append(weakref.ref(memory))
            Executor(schedule, BINDINGS, device.lanes, on_dead=poison).run(memory)
            assert memory.results == serial_result(schedule).results
        del memory
        gc.collect()
        assert not any(memory() for memory in memories)
        assert num_threads() == before[0] + len(device.lanes)
    del device
    gc.collect()
    assert (num_threads(), num_handles(), num_marks()) == before


@pytest.mark.parametrize("seed", range(3))
def test_measured_times_are_the_predicted_ones(seed: int) -> None:
    schedule = random_schedule(seed, num_tasks=400, num_buffers=20)
    cost = Durations(4e-3)
    with closing(EmulatedDevice(0, cost)) as device:
        measured = Executor(schedule, BINDINGS, device.lanes).run(new_memory(schedule))
    predicted = simulate(schedule, cost)
    assert measured.makespan_s == pytest.approx(predicted.makespan_s, rel=0.05)
