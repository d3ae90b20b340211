"""A missing dependency is found, whatever its kind: not by luck of timing but by the worst order.

The tests remove one dependency of a random schedule that nothing else implies, let the executor run
it on lanes that then start the waiting task first, and compare with the serial result.
"""

import itertools
import random

import pytest

from raymoe.errors import ExecutionError
from raymoe.runtime.executor import Executor
from raymoe.schedule.graph import Schedule
from tests.unit.runtime.random_schedules import (
    Edge,
    Memory,
    ancestors,
    bindings,
    edges,
    inverted_order,
    new_memory,
    random_order,
    random_schedule,
    serial_result,
    without,
)
from tests.unit.runtime.scripted_lanes import OrderNotAllowed, Script

NUM_SCHEDULES = 200


def played(schedule: Schedule, order: list[int]) -> Memory:
    script = Script(order)
    memory = new_memory(schedule)
    Executor(schedule, bindings(), script.lanes).run(memory)
    return memory


def removable(schedule: Schedule, kind: str) -> list[Edge]:
    """Edges of one kind alone that no other dependency and no lane implies.

    What a task overwrites unread can be seen only if the later of the two values is used.
    """
    return [
        edge
        for edge in edges(schedule)
        if edge.kinds == {kind}
        and (kind != "waw" or edge.is_visible)
        and edge.before not in ancestors(without(schedule, edge.before, edge.after), edge.after)
    ]


@pytest.mark.parametrize("seed", range(0, NUM_SCHEDULES, 20))
def test_every_allowed_order_gives_the_serial_result(seed: int) -> None:
    for number in range(seed, seed + 20):
        schedule = random_schedule(number)
        order = random_order(schedule, random.Random(number))
        assert played(schedule, order) == serial_result(schedule)


@pytest.mark.parametrize("kind", ["raw", "waw", "war"])
def test_a_removed_dependency_spoils_the_result(kind: str) -> None:
    num_found = 0
    for seed in itertools.count():
        schedule = random_schedule(seed)
        for edge in removable(schedule, kind)[:1]:
            faulty = without(schedule, edge.before, edge.after)
            assert played(faulty, inverted_order(schedule, edge)) != serial_result(schedule)
            num_found += 1
        if num_found == NUM_SCHEDULES:
            return


@pytest.mark.parametrize("kind", ["raw", "waw", "war"])
def test_the_waits_given_to_the_lanes_forbid_the_order_that_spoils(kind: str) -> None:
    num_found = 0
    for seed in itertools.count():
        schedule = random_schedule(seed)
        for edge in removable(schedule, kind)[:1]:
            with pytest.raises(ExecutionError) as caught:
                played(schedule, inverted_order(schedule, edge))
            assert isinstance(caught.value.__cause__, OrderNotAllowed)
            num_found += 1
        if num_found == NUM_SCHEDULES:
            return


def test_dependencies_are_those_that_the_buffers_ask_for() -> None:
    for seed in range(NUM_SCHEDULES):
        schedule = random_schedule(seed)
        asked = {(edge.before, edge.after) for edge in edges(schedule)}
        derived = {
            (wait, index) for index, waits in enumerate(schedule.dependencies) for wait in waits
        }
        assert derived == asked
