"""Nodes of several kinds under one pool of actors: which run engines, and what each gets.

An operator of Ray Data has one pool, with one request and one limit of tasks for all its actors,
and two operators could only share rows that are divided before any is generated. So there is one
pool: its actors ask for what the smallest node has, plan on the node where they are, and get rows
by the speed of that plan (`raymoe.data.by_speed`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raymoe.data.cluster import Cluster
from raymoe.data.nodes import GROUP_LABEL, NODE_LABEL, Node
from raymoe.data.remote_args import RemoteArgs
from raymoe.plan.plan import Plan
from raymoe.plan.prediction import Prediction
from raymoe.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from raymoe.specs.workload import Workload

LATER = 1.1  # of the time that all take: what an engine less may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """The engines on like nodes.

    Attributes:
        plan: Of each engine, for its part of the rows.
        memory_bytes: What each reserves.
        num_tasks: Tasks that each has at most; 0 until it is chosen.
    """

    nodes: Cluster
    num_actors: int
    plan: Plan
    memory_bytes: int
    num_tasks: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second of one engine."""
        return self.plan.rate

    def describe(self, workload: "Workload | None") -> str:
        policy, nodes = self.plan.policy, self.nodes
        rows = "" if workload is None else f"{self.plan.workload.num_rows:,} rows each, "
        return (
            f"{show_nodes(nodes)}: {count(self.num_actors, 'actor')}, {rows}up to "
            f"{policy.max_num_seqs:,} sequences, schedule {self.plan.schedule}, "
            f"{self.speed:,.0f} tokens/s each"
        )


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def show_nodes(nodes: Cluster) -> str:
    """Return how many nodes there are of a kind, and what each has."""
    each = [f"{nodes.num_cpus / nodes.num_nodes:g} CPU"]
    if nodes.num_gpus:
        name = "" if nodes.gpu is None else f" ({nodes.gpu.name})"
        each.append(f"{nodes.num_gpus / nodes.num_nodes:g} GPU{name}")
    each.append(f"{format_bytes(nodes.memory_bytes / nodes.num_nodes)} of memory")
    return f"{count(nodes.num_nodes, 'node')} with {' + '.join(each)}"


# Of nodes and the rows of each engine on them; None if they are too small, or nothing is known.
PlanKind = Callable[[Cluster, int | None], KindPlan | None]


def plan_kinds(
    kinds: Sequence[Cluster], num_rows: int | None, plan_kind: PlanKind
) -> list[KindPlan]:
    """Return the plans of the kinds that can hold the model, the fastest first, rows by speed.

    Args:
        num_rows: Of the job; None if nobody knows.
    """
    places = sum(nodes.max_actors for nodes in kinds)
    even = None if num_rows is None else ceil_div(num_rows, places)
    found = [plan for plan in (plan_kind(nodes, even) for nodes in kinds) if plan is not None]
    return sorted(_by_speed(found, num_rows, plan_kind), key=lambda kind: -kind.speed)


def _by_speed(
    kinds: Sequence[KindPlan], num_rows: int | None, plan_kind: PlanKind
) -> Iterator[KindPlan]:
    total = sum(kind.speed * kind.num_actors for kind in kinds)
    for kind in kinds:
        rows = None if num_rows is None else max(1, round(num_rows * kind.speed / total))
        yield plan_kind(kind.nodes, rows) or kind


def kinds_that_pay(
    kinds: Sequence[KindPlan], num_rows: int | None, plan_kind: PlanKind
) -> list[KindPlan]:
    """Return the fastest kinds with which the job ends about when it does with all.

    Where some rows wait for a place in the batch, all nodes help.
    """
    if any(kind.plan.workload.num_rows > kind.plan.policy.max_num_seqs for kind in kinds):
        return list(kinds)
    limit_s = LATER * predict(kinds).seconds
    for number in range(1, len(kinds)):
        fewer = list(_by_speed(kinds[:number], num_rows, plan_kind))
        if predict(fewer).seconds <= limit_s:
            return fewer
    return list(kinds)


def predict(kinds: Iterable[KindPlan]) -> Prediction:
    """What a job takes whose rows these engines share."""
    return Prediction.together([Prediction.of(kind.plan, kind.num_actors) for kind in kinds])


def common_cpus(kinds: Iterable[tuple[Cluster, int]]) -> float:
    """Return the CPUs that each of so many actors of these nodes can have."""
    return min(replace(nodes, num_generators=1).cpus_for(number) for nodes, number in kinds)


def without_nodes(
    remote_args: RemoteArgs, nodes: Iterable[Node], num_cpus: float, memory_bytes: float
) -> RemoteArgs:
    """Return Ray's options such that no actor starts on these nodes.

    Nodes that are too small for the request are left out by it.
    """
    fitting = [
        node
        for node in nodes
        if node.resources.get("CPU", 0) >= num_cpus
        and node.resources.get("memory", 0) >= memory_bytes
    ]
    wanted = {
        NODE_LABEL: sorted({node.node_id for node in fitting if node.node_id}),
        GROUP_LABEL: sorted({node.labels[GROUP_LABEL] for node in fitting if not node.node_id}),
    }
    others = {name: f"!in({','.join(values)})" for name, values in wanted.items() if values}
    if not others:
        return remote_args
    selector = {**others, **(remote_args.get("label_selector") or {})}
    changed = {**remote_args, "label_selector": selector}
    if remote_args.get("fallback_strategy"):
        changed["fallback_strategy"] = [
            {**one, "label_selector": {**others, **(one.get("label_selector") or {})}}
            for one in remote_args["fallback_strategy"]
        ]
    return changed
