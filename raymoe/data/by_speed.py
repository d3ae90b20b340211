"""Each actor of a pool gets its part of the rows, by the speed of its node.

Ray Data gives the next task to the actor with the fewest, up to a limit that is the same for all.
The first that has loaded the model would take all rows of a small job before the others are there,
and on nodes of unlike speed the slowest would hold as many as the fastest when those are done.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from raymoe.data.nodes import Kind, Node

Pool = Any  # Ray's actor pool, which has no types here


class SpeedShares:
    """Replaces the choice of one of Ray Data's actor pools.

    An actor has at most its part of the tasks that run or wait, where those that load have theirs.

    Args:
        pool: Its fields are private in Ray, which has no public equivalent; its versions are
            pinned.
        num_waiting: Returns how many tasks wait for an actor; blocks that are still to be joined
            count as one each.
        kinds: Speed and most tasks of an actor, by the kind of its node. Nodes of no such kind
            count as the slowest; without any, all are the same.

    Attributes:
        loading: Ray's names of the nodes on which actors load.
    """

    def __init__(
        self, pool: Pool, num_waiting: Callable[[], int], kinds: Mapping[Kind, tuple[float, int]]
    ) -> None:
        self._pool, self._num_waiting, self._kinds = pool, num_waiting, kinds
        self._max_tasks = pool.max_tasks_in_flight_per_actor()
        self._slowest = min(kinds.values(), default=(1.0, self._max_tasks))
        self._by_node: dict[str, tuple[float, int]] = {}
        self.loading: Sequence[str] = ()
        pool.select_actors = self.select

    def select(self, bundle: Any = None, actor_locality_enabled: bool = False) -> Any:  # noqa: ARG002 - Ray's interface
        """Return the actor that would end another task first; None if all have enough."""
        actors = self._pool._running_actors  # noqa: SLF001
        nodes = [*(state.actor_location for state in actors.values()), *self.loading]
        num_tasks = self._pool.num_tasks_in_flight() + self._num_waiting()
        tasks_per_speed = num_tasks / sum(self._of(node)[0] for node in nodes) if nodes else 0.0
        best, soonest = None, float("inf")
        for actor in self._pool._alive_actors_to_in_flight_tasks_heap:  # noqa: SLF001
            speed, limit = self._of(actors[actor].actor_location)
            limit = min(limit, self._max_tasks, max(1, math.ceil(tasks_per_speed * speed)))
            num_own = actors[actor].num_tasks_in_flight
            if num_own < limit and (num_own + 1) / speed < soonest:
                best, soonest = actor, (num_own + 1) / speed
        return best

    def _of(self, node_id: str) -> tuple[float, int]:
        if node_id not in self._by_node:
            nodes = {node["NodeID"]: Node.of(node) for node in ray.nodes()} if self._kinds else {}
            kind = nodes[node_id].kind if node_id in nodes else None
            known = self._slowest if kind is None else self._kinds.get(kind, self._slowest)
            self._by_node[node_id] = known
        return self._by_node[node_id]


def share_by_speed(pool: Pool, plan: Any, num_waiting: Callable[[], int]) -> SpeedShares | None:
    """Share rows by speed in a pool of fixed size; None where Ray chooses how many actors run.

    Args:
        plan: Of the job, with the speed of each kind of node where nodes are unlike.
    """
    if pool.min_size() != pool.max_size():
        return None
    kinds = {
        node.kind: (kind.speed, kind.num_tasks)
        for kind in getattr(plan, "kinds", ())
        for node in kind.nodes.nodes
    }
    return SpeedShares(pool, num_waiting, kinds)
