"""Rows of a pool go to the actor that ends them soonest."""

from types import SimpleNamespace

import ray

from raymoe.data.by_speed import share_by_speed
from raymoe.data.nodes import Node

FAST, SLOW = {"CPU": 16.0, "memory": 4e10}, {"CPU": 4.0, "memory": 1e10}
NODES = {"a": FAST, "b": SLOW, "new": {"CPU": 1.0}}


class Pool:
    """Three actors of Ray Data, on nodes of these names."""

    def __init__(self, *nodes, largest=3):
        self._running_actors = {
            number: SimpleNamespace(num_tasks_in_flight=0, actor_location=name)
            for number, name in enumerate(nodes)
        }
        self._alive_actors_to_in_flight_tasks_heap = dict.fromkeys(self._running_actors)
        self.max_size = lambda: largest

    def min_size(self):
        return 3

    def select_actors(self):
        return "Ray's"

    def hand_out(self, count):
        for _ in range(count):
            self._running_actors[self.select_actors()].num_tasks_in_flight += 1
        return [state.num_tasks_in_flight for state in self._running_actors.values()]


def plan():
    kinds = ((FAST, 6.0, 90), (SLOW, 2.0, 20))
    return SimpleNamespace(kinds=[
        SimpleNamespace(speed=speed, num_tasks=most,
                        nodes=SimpleNamespace(nodes=[Node(resources=resources)]))
        for resources, speed, most in kinds
    ])  # fmt: skip


def test_each_actor_gets_tasks_by_the_speed_of_its_node(monkeypatch):
    """A node that nobody has planned for counts as the slowest."""
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"NodeID": one, "Resources": NODES[one]} for one in NODES]
    )
    pool = Pool("a", "b", "new")
    share_by_speed(pool, plan())
    assert pool.hand_out(50) == [30, 10, 10]
    assert pool.hand_out(80) == [90, 20, 20]  # as many as each has room for
    assert pool.select_actors() is None
    del pool._alive_actors_to_in_flight_tasks_heap[0]  # it restarts
    pool._running_actors[2].num_tasks_in_flight = 0
    assert pool.select_actors() == 2


def test_other_pools_are_left_to_ray():
    for pool, of_job in ((Pool("a"), None), (Pool("a", largest=4), plan())):
        share_by_speed(pool, of_job)
        assert pool.select_actors() == "Ray's"
