"""Rows go to the actor that ends them soonest, where nodes differ in speed.

Ray Data gives the next task to the actor with the fewest; on nodes of unlike speed the slowest
would hold as many rows as the fastest when the others are done.
"""

from collections.abc import Mapping
from typing import Any

import ray

from raymoe.data.nodes import Kind, Node

Pool = Any  # Ray's actor pool, which has no types here


class SpeedShares:
    """Replaces the choice of one of Ray Data's actor pools.

    Args:
        pool: Its fields are private in Ray, which has no public equivalent; its versions are
            pinned.
        kinds: Speed and most tasks of an actor, by the kind of its node. Nodes of no such kind
            count as the slowest.
    """

    def __init__(self, pool: Pool, kinds: Mapping[Kind, tuple[float, int]]) -> None:
        self._pool, self._kinds = pool, kinds
        self._by_node: dict[str, tuple[float, int]] = {}
        pool.select_actors = self.select

    def select(self, bundle: Any = None, actor_locality_enabled: bool = False) -> Any:  # noqa: ARG002 - Ray's interface
        """Return the actor that would end another task first; None if all have enough."""
        best, soonest = None, float("inf")
        for actor in self._pool._alive_actors_to_in_flight_tasks_heap:  # noqa: SLF001
            state = self._pool._running_actors[actor]  # noqa: SLF001
            speed, limit = self._of(state.actor_location)
            end = (state.num_tasks_in_flight + 1) / speed
            if state.num_tasks_in_flight < limit and end < soonest:
                best, soonest = actor, end
        return best

    def _of(self, node_id: str) -> tuple[float, int]:
        if node_id not in self._by_node:
            nodes = {node["NodeID"]: Node.of(node) for node in ray.nodes()}
            slowest = min(self._kinds.values())
            kind = nodes[node_id].kind if node_id in nodes else None
            self._by_node[node_id] = slowest if kind is None else self._kinds.get(kind, slowest)
        return self._by_node[node_id]


def share_by_speed(pool: Pool, plan: Any) -> None:
    """Share rows by speed in a pool of fixed size, if its job is planned for unlike nodes."""
    kinds = getattr(plan, "kinds", ())
    if kinds and pool.min_size() == pool.max_size():
        SpeedShares(
            pool,
            {
                node.kind: (kind.speed, kind.num_tasks)
                for kind in kinds
                for node in kind.nodes.nodes
            },
        )
