"""Does a pipeline fit its cluster? Asked before it starts: Ray would wait without a word.

Only the driver that starts a pipeline sees all its stages, so Ray Data calls back from there.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback

from raymoe.data.generator import MoEGenerator
from raymoe.errors import InfeasiblePlanError
from raymoe.units import format_bytes

VARIABLE = "RAY_DATA_EXECUTION_CALLBACKS"  # read for each pipeline, also for one made before
SMALLEST = 1e-4  # Ray's unit of a resource; sums of floats are less exact
ADVICE = (
    "Ray would wait for them without a word. Give each map_batches_kwargs of the pipeline "
    "num_generators=N, so that N generators share the nodes, or less num_actors, num_cpus, "
    "num_gpus or memory; or end one stage before the next with materialize()"
)

logger = logging.getLogger(__name__)

Resources = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one stage of a pipeline must have at once.

    Attributes:
        name: Ray's, for people.
        num_actors: 0 where it runs tasks, of which one must find room at a time.
        each: Of an actor or a task: CPU, GPU and memory.
        is_generator: A `MoEGenerator` runs in it.
    """

    name: str
    num_actors: int
    each: Resources
    is_generator: bool = False


def check_before_start() -> None:
    """Have all pipelines of this process checked for room when they start."""
    name = f"{CheckFit.__module__}.{CheckFit.__name__}"
    given = os.environ.get(VARIABLE, "")  # noqa: TID251 - a list of Ray's and no setting of ours
    names = [each for each in given.split(",") if each]
    if name not in names:
        os.environ[VARIABLE] = ",".join([*names, name])  # noqa: TID251 - as above


class CheckFit(ExecutionCallback):  # type: ignore[misc]  # Ray has no types here
    """Refuses a pipeline with generators for which its cluster has no room.

    Where nodes may still come, it warns instead.
    """

    def before_execution_starts(self, executor: Any) -> None:
        """Called by Ray Data with the executor of a pipeline."""
        # Ray names these with an underscore and has no others; its versions are pinned.
        stages = [_stage(operator) for operator in executor._topology]  # noqa: SLF001
        if not any(stage.is_generator for stage in stages):
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        problem = find_problem(stages, nodes)
        if not problem:
            return
        autoscaler = ray._private.state.state.get_cluster_config()  # noqa: SLF001 - as above
        if len(nodes) == 1 and autoscaler is None:
            raise InfeasiblePlanError(f"{problem}. {ADVICE}")
        logger.warning("%s, unless more nodes come. %s", problem, ADVICE)


def find_problem(stages: Sequence[Stage], nodes: Iterable[Mapping[str, float]]) -> str:
    """Say which actors or tasks find no room when all stages run at once; "" if all do."""
    free = [{name: node.get(name, 0.0) for name in ("CPU", "GPU", "memory")} for node in nodes]
    at_first = ", ".join(_shown(node) for node in free)
    pools = sorted((stage for stage in stages if stage.num_actors), key=_size, reverse=True)
    wanted = "; ".join(
        f"{pool.num_actors} x {pool.name} with {_shown(pool.each)}" for pool in pools
    )
    for pool in pools:
        placed = sum(_place(pool.each, free) for _ in range(pool.num_actors))
        if placed < pool.num_actors:
            return (
                f"{pool.num_actors - placed} of {pool.num_actors} actors of {pool.name} find no "
                f"room next to the others: the pipeline needs {wanted}; the nodes have {at_first}"
            )
    for stage in stages:
        if not stage.num_actors and not _place(stage.each, [dict(node) for node in free]):
            return (
                f"the actors leave no room for {stage.name}, which needs {_shown(stage.each)}: "
                f"they take {wanted}; the nodes have {at_first}"
            )
    return ""


def _stage(operator: Any) -> Stage:
    each = operator.min_scheduling_resources()
    functions = [getattr(one, "fn", None) for one in operator._logical_operators]  # noqa: SLF001
    return Stage(
        name=operator.name,
        num_actors=sum(pool.min_size() for pool in operator.get_autoscaling_actor_pools()),
        each={"CPU": each.cpu or 0, "GPU": each.gpu or 0, "memory": each.memory or 0},
        is_generator=any(isinstance(fn, type) and issubclass(fn, MoEGenerator) for fn in functions),
    )


def _size(stage: Stage) -> tuple[float, ...]:
    return stage.each["GPU"], stage.each["CPU"], stage.each["memory"]


def _place(each: Resources, free: Iterable[Resources]) -> bool:
    """Take what one actor or task needs from the first node that has it."""
    for node in free:
        if all(node[name] + SMALLEST > amount for name, amount in each.items()):
            for name, amount in each.items():
                node[name] -= amount
            return True
    return False


def _shown(resources: Resources) -> str:
    parts = [f"{resources['CPU']:g} CPU"]
    parts += [f"{resources['GPU']:g} GPU"] if resources["GPU"] else []
    parts += [f"{format_bytes(resources['memory'])} of memory"] if resources["memory"] else []
    return " + ".join(parts)
