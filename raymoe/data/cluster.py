"""Nodes of a Ray cluster that can run an engine, and checks that a pipeline fits on them."""

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.util import get_node_ip_address

from raymoe.data.generator import MoEGenerator
from raymoe.errors import InfeasiblePlanError
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec
from raymoe.units import GB, ceil_div, format_bytes

try:
    import ray
except ImportError as error:
    raise ImportError(
        "raymoe.map_batches_kwargs needs Ray Data: pip install 'ray[data]>=2.60,<2.64'"
    ) from error

MEMORY_FRACTION = 0.85  # of a node's memory: Ray kills processes of a node that is 95 % full
# Typical rates of a core; they affect the sizes of a plan, never results.
CORE_BYTES_PER_S, CORE_FLOP_PER_S = 8e9, 60e9
# Prompts and answers need little; Ray's default of 30 % of the memory would shrink the KV cache.
MIN_STORE_BYTES, MAX_STORE_BYTES = int(8 * GB), int(16 * GB)
_ACCELERATOR = "accelerator_type:"
_PRESETS_OF_RAY = {"a10g": "a10"}  # Ray's GPU names whose lower case is not our name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes that can run an engine; if nodes differ, each counts as the smallest.

    Attributes:
        gpus_per_actor: GPUs that an engine uses.
        gpu: Hardware preset of their GPU, None if its name is unknown.
        num_generators: Generators of the pipeline, with as many actors each; None if not given.
        is_here: Whether the only node is this machine.
    """

    num_nodes: int
    num_cpus: float
    num_gpus: float
    memory_bytes: float = 0
    gpus_per_actor: float = 1
    gpu: HardwareSpec | None = None
    store_bytes: float = 0
    num_generators: int | None = None
    is_here: bool = False

    @classmethod
    def connected(cls, device: str = "auto", gpus_per_actor: float = 1) -> "Cluster":
        """Return the cluster that this process is connected to.

        If some nodes have GPUs, engines run on those unless `device` is the CPU, and on nodes with
        at least `gpus_per_actor` if there are any. A head without CPUs runs none.
        """
        alive = [node for node in ray.nodes() if node["Alive"]] if _has_ray() else []
        nodes = [node["Resources"] for node in alive]
        nodes = [resources for resources in nodes if resources.get("CPU")]
        with_gpus = _with_gpus(nodes, gpus_per_actor) if device in {"auto", "cuda"} else []
        nodes = with_gpus or nodes
        if not nodes:
            return cls(num_nodes=1, num_cpus=0, num_gpus=0)

        def of_all(name: str) -> float:
            return len(nodes) * min(float(resources.get(name, 0)) for resources in nodes)

        return cls(
            num_nodes=len(nodes),
            num_cpus=of_all("CPU"),
            num_gpus=of_all("GPU") if with_gpus else 0,
            memory_bytes=of_all("memory"),
            gpus_per_actor=gpus_per_actor,
            gpu=_known_gpu(with_gpus),
            store_bytes=max(float(node.get("object_store_memory", 0)) for node in nodes),
            is_here=[node.get("NodeManagerAddress") for node in alive] == [get_node_ip_address()],
        )

    def actors_per_node(self, num_actors: int) -> int:
        """Return the number of actors on the fullest node.

        It is at most the node's number of GPUs, because nodes of a growing cluster come after the
        first actors.
        """
        even = ceil_div(num_actors, self.num_nodes)
        if not self.num_gpus:
            return even
        return min(even, max(1, int(self.num_gpus / self.num_nodes / self.gpus_per_actor)))

    def share(self, num_actors: int) -> HardwareSpec | None:
        """Return the hardware that one actor may use of its node; None if no node is known."""
        if not (self.num_cpus and self.memory_bytes):
            return None
        actors_per_node = self.actors_per_node(num_actors) * (self.num_generators or 1)
        cores = max(1, int(self.num_cpus / self.num_nodes) // actors_per_node)
        memory_bytes = MEMORY_FRACTION * self.memory_bytes / self.num_nodes / actors_per_node
        host = HardwareSpec(
            name="a node of the cluster",
            num_cores=cores,
            host_memory_bytes=int(memory_bytes),
            host_bytes_per_s=cores * CORE_BYTES_PER_S,
            host_flop_per_s=cores * CORE_FLOP_PER_S,
        )
        return host if self.gpu is None else host.with_gpu_of(self.gpu, self.gpu.gpu_memory_bytes)

    def cpus_for(self, num_actors: int) -> float:
        """Return the CPUs that Ray reserves for one actor; engine threads are not limited by it.

        A node keeps one CPU for reads, maps and writes, so that they can run next to actors. A
        single node keeps room for a second generator. On several nodes actors reserve all they can,
        because only that spreads them.
        """
        if not self.num_cpus:
            return 1
        generators = self.num_generators or (2 if self.num_nodes == 1 else 1)
        spare = self.num_cpus / self.num_nodes - 1
        share = max(0.0, spare) / (self.actors_per_node(num_actors) * generators)
        return float(math.floor(share)) if share >= 1 else math.floor(share * 1000) / 1000

    def advise(self) -> None:
        """Warn if the object store uses memory that the KV cache could use."""
        if self.store_bytes > MAX_STORE_BYTES:
            logger.warning(
                "Ray's object store has %s of a node, which the engine cannot use; prompts and "
                "answers need little of it: start nodes with --object-store-memory=%d",
                format_bytes(self.store_bytes),
                MIN_STORE_BYTES,
            )


def _has_ray() -> bool:
    return bool(ray.is_initialized())


def _with_gpus(nodes: Sequence[Mapping[str, Any]], minimum: float) -> list[Mapping[str, Any]]:
    enough = [resources for resources in nodes if resources.get("GPU", 0) >= minimum]
    return enough or [resources for resources in nodes if resources.get("GPU", 0) > 0]


def _known_gpu(nodes: Iterable[Mapping[str, Any]]) -> HardwareSpec | None:
    """Return the GPU with the least memory; None if any is unknown."""
    found = []
    for resources in nodes:
        names = [name for name in resources if name.startswith(_ACCELERATOR)]
        name = names[0].removeprefix(_ACCELERATOR).lower() if names else ""
        preset = HARDWARE_PRESETS.get(_PRESETS_OF_RAY.get(name, name))
        if preset is None:
            return None
        found.append(preset)
    return min(found, key=lambda preset: preset.gpu_memory_bytes, default=None)


VARIABLE = "RAY_DATA_EXECUTION_CALLBACKS"  # read for each pipeline, also for one made before
SMALLEST = 1e-4  # Ray's unit of a resource; sums of floats are less exact
ADVICE = (
    "Ray would wait for them without a word. Give each map_batches_kwargs of the pipeline "
    "num_generators=N, so that N generators share the nodes, or less num_actors, num_cpus, "
    "num_gpus or memory; or end one stage before the next with materialize()"
)


Resources = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one stage of a pipeline must have at once.

    Attributes:
        num_actors: 0 for a stage of tasks, of which one at a time must fit.
        each: CPU, GPU and memory of an actor or task.
        is_generator: Whether a `MoEGenerator` runs in it.
    """

    name: str
    num_actors: int
    each: Resources
    is_generator: bool = False


def check_before_start() -> None:
    """Make all pipelines of this process check at their start that they fit."""
    name = f"{CheckFit.__module__}.{CheckFit.__name__}"
    given = os.environ.get(VARIABLE, "")  # noqa: TID251 - a list of Ray's and no setting of ours
    names = [each for each in given.split(",") if each]
    if name not in names:
        os.environ[VARIABLE] = ",".join([*names, name])  # noqa: TID251 - as above


class CheckFit(ExecutionCallback):  # type: ignore[misc]  # Ray has no types here
    """Refuses a pipeline with generators that does not fit on its cluster.

    It only warns if the cluster can still grow.
    """

    def before_execution_starts(self, executor: Any) -> None:
        # These are private in Ray, which has no public equivalent; its versions are pinned.
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
    """Return which actors or tasks do not fit when all stages run at once; "" if all fit."""
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
