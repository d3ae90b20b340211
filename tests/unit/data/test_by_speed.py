"""Each actor of a pool gets its part of the rows."""

from types import SimpleNamespace

import pytest
import ray

from raymoe.data.by_speed import share_by_speed
from raymoe.data.nodes import Node

FAST, SLOW = {"CPU": 16.0, "memory": 4e10}, {"CPU": 4.0, "memory": 1e10}
NODES = {"a": FAST, "b": SLOW, "new": {"CPU": 1.0}}


class Pool:
    """Three actors of Ray Data, on nodes of these names, and tasks that wait for one."""

    def __init__(self, *nodes, largest=3):
        self._running_actors = {}
        self._alive_actors_to_in_flight_tasks_heap = {}
        self.max_size = lambda: largest
        self.num_waiting = 0
        for name in nodes:
            self.add(name)

    def add(self, name):
        actor = len(self._running_actors)
        state = SimpleNamespace(num_tasks_in_flight=0, actor_location=name)
        self._running_actors[actor] = state
        self._alive_actors_to_in_flight_tasks_heap[actor] = 0

    def min_size(self):
        return 3

    def max_tasks_in_flight_per_actor(self):
        return 90

    def num_tasks_in_flight(self):
        return sum(state.num_tasks_in_flight for state in self._running_actors.values())

    def select_actors(self):
        return "Ray's"

    def hand_out(self, count):
        """Let so many more tasks wait, and hand out what the actors take."""
        self.num_waiting += count
        while self.num_waiting:
            actor = self.select_actors()
            if actor is None:
                break
            self._running_actors[actor].num_tasks_in_flight += 1
            self.num_waiting -= 1
        return [state.num_tasks_in_flight for state in self._running_actors.values()]


def plan():
    kinds = ((FAST, 6.0, 99), (SLOW, 2.0, 20))
    return SimpleNamespace(kinds=[
        SimpleNamespace(speed=speed, num_tasks=most,
                        nodes=SimpleNamespace(nodes=[Node(resources=resources)]))
        for resources, speed, most in kinds
    ])  # fmt: skip


@pytest.fixture
def share(monkeypatch):
    nodes = [{"NodeID": one, "Resources": NODES[one]} for one in NODES]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    return lambda pool, of_job: share_by_speed(pool, of_job, lambda: pool.num_waiting)


def test_each_actor_gets_tasks_by_the_speed_of_its_node(share):
    """A node that nobody has planned for counts as the slowest."""
    pool = Pool("a", "b", "new")
    share(pool, plan())
    assert pool.hand_out(50) == [30, 10, 10]
    assert pool.hand_out(100) == [90, 20, 20]  # as many as each has room for
    assert pool.select_actors() is None
    del pool._alive_actors_to_in_flight_tasks_heap[0]  # it restarts
    pool._running_actors[2].num_tasks_in_flight = 0
    assert pool.select_actors() == 2


def test_actors_that_load_find_their_part(share):
    pool = Pool("b")
    shares = share(pool, plan())
    shares.loading = ["a", "new"]
    assert pool.hand_out(10) == [2]
    assert pool.hand_out(10) == [4]
    pool.add("a")
    shares.loading = ["new"]
    assert pool.hand_out(0) == [4, 12]
    shares.loading = []  # its node is gone: the others take what it would have had
    assert pool.hand_out(0) == [5, 15]


def test_an_actor_without_a_task_may_have_one(share):
    pool = Pool("b")
    share(pool, plan()).loading = ["a", "a"]
    assert pool.hand_out(1) == [1]


def test_like_nodes_share_evenly(share):
    for of_job in (None, SimpleNamespace(kinds=())):
        pool = Pool("a", "b")
        shares = share(pool, of_job)
        shares.loading = ["new"]
        assert pool.hand_out(30) == [10, 10]
        assert pool.hand_out(900) == [90, 90]


def test_ranges_are_left_to_ray(share):
    pool = Pool("a", largest=4)
    assert share(pool, plan()) is None
    assert pool.select_actors() == "Ray's"
