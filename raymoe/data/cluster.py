"""Nodes of a Ray cluster that can run an engine, and checks that a pipeline fits on them."""

import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.util import get_node_ip_address

from raymoe.data.address import check_address
from raymoe.data.before_start import as_users_error, is_generator
from raymoe.data.by_speed import share_by_speed
from raymoe.data.nodes import Kind, Node, nodes_to_come
from raymoe.data.remote_args import RemoteArgs, describe_lack, find_nodes
from raymoe.errors import ExecutionError, InfeasiblePlanError, RaymoeError
from raymoe.specs.hardware import HARDWARE_PRESETS, USABLE_FRACTION, HardwareSpec
from raymoe.units import GB, ceil_div, format_bytes, format_seconds

try:
    import ray
except ImportError as error:
    raise ImportError(
        "raymoe.map_batches_kwargs needs Ray Data: pip install 'ray[data]>=2.60,<2.64'"
    ) from error

# Typical rates of a core; they affect the sizes of a plan, never results.
CORE_BYTES_PER_S, CORE_FLOP_PER_S = 8e9, 60e9
# Prompts and answers need little; Ray's default of 30 % of the memory would shrink the KV cache.
MIN_STORE_BYTES, MAX_STORE_BYTES = int(8 * GB), int(16 * GB)
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
        num_taken: Places of engines that other stages of the pipeline take.
        idle: What no engine can use, for people, such as nodes without a GPU.
        smaller: GPUs that are not used where each node counts as the smallest, for people.
        kinds: The nodes as clusters of like ones; none if all are the same.
        nodes: The nodes themselves; of a planned cluster none.
        num_to_come: Nodes among them that an autoscaler has to start.
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
    num_taken: int = 0
    idle: tuple[str, ...] = ()
    smaller: tuple[str, ...] = ()
    kinds: "tuple[Cluster, ...]" = ()
    nodes: tuple[Node, ...] = ()
    num_to_come: int = 0

    @classmethod
    def connected(
        cls,
        device: str = "auto",
        gpus_per_actor: float = 1,
        remote_args: RemoteArgs | None = None,
    ) -> "Cluster":
        """Return the cluster that this process is connected to.

        Nodes that an autoscaler may start count as those that run. If some nodes have GPUs, engines
        run on those unless `device` is the CPU, and on nodes with at least `gpus_per_actor` if
        there are any. A head without CPUs runs none.

        Args:
            remote_args: Ray's options of the actors, which may leave out nodes.
        """
        alive = [Node.of(node) for node in ray.nodes() if node["Alive"]] if _has_ray() else []
        to_come = nodes_to_come(alive) if alive else []
        all_nodes = [node for node in (*alive, *to_come) if node.resources.get("CPU")]
        nodes = find_nodes(all_nodes, remote_args or {})
        if all_nodes and not nodes:
            logger.warning("%s", describe_lack(all_nodes, remote_args or {}))
        with_gpus = _with_gpus(nodes, gpus_per_actor) if device in {"auto", "cuda"} else []
        nodes, found = with_gpus or nodes, nodes
        if not nodes:
            return cls(num_nodes=1, num_cpus=0, num_gpus=0)
        addresses = [node.address for node in (*alive, *to_come)]
        cluster = cls.of(nodes, gpus_per_actor, uses_gpus=bool(with_gpus))
        kinds = [
            cls.of(like, gpus_per_actor, uses_gpus=bool(with_gpus)) for like in _by_kind(nodes)
        ]
        return dataclasses.replace(
            cluster,
            is_here=addresses == [get_node_ip_address()],
            idle=_without_gpus(found, with_gpus, gpus_per_actor),
            smaller=_unused_gpus(with_gpus, gpus_per_actor),
            kinds=tuple(kinds) if len(kinds) > 1 else (),
        )

    @classmethod
    def of(cls, nodes: Sequence[Node], gpus_per_actor: float, *, uses_gpus: bool) -> "Cluster":
        """A cluster of these nodes, each of which counts as the smallest."""

        def of_all(name: str) -> float:
            return len(nodes) * min(float(node.resources.get(name, 0)) for node in nodes)

        return cls(
            num_nodes=len(nodes),
            num_cpus=of_all("CPU"),
            num_gpus=of_all("GPU") if uses_gpus else 0,
            memory_bytes=of_all("memory"),
            gpus_per_actor=gpus_per_actor,
            gpu=_known_gpu(nodes) if uses_gpus else None,
            store_bytes=max(float(one.resources.get("object_store_memory", 0)) for one in nodes),
            nodes=tuple(nodes),
            num_to_come=sum(not node.node_id for node in nodes),
        )

    @property
    def max_actors(self) -> int:
        """Engines that have a place at once: one per GPU or GPUs, or one per node without any.

        0 if other stages take all places.
        """
        if not self.num_gpus:
            return max(0, self.num_nodes - self.num_taken)
        per_node = int(self.num_gpus / self.num_nodes / self.gpus_per_actor + SMALLEST)
        places = self.num_nodes * max(1, per_node) - self.num_taken
        return max(1, places // self.num_generators) if self.num_generators else max(0, places)

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
        memory_bytes = USABLE_FRACTION * self.memory_bytes / self.num_nodes / actors_per_node
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


def _with_gpus(nodes: Sequence[Node], minimum: float) -> list[Node]:
    enough = [node for node in nodes if node.resources.get("GPU", 0) >= minimum]
    return enough or [node for node in nodes if node.resources.get("GPU", 0) > 0]


def _by_kind(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the nodes in groups of like ones, in the order of the first of each."""
    kinds: dict[Kind, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(node.kind, []).append(node)
    return list(kinds.values())


def _without_gpus(
    nodes: Sequence[Node], with_gpus: Sequence[Node], gpus_per_actor: float
) -> tuple[str, ...]:
    """Say which nodes have too few GPUs beside others that have enough."""
    num_left = len(nodes) - len(with_gpus)
    if not with_gpus or not num_left:
        return ()
    return (f"{num_left} of {len(nodes)} nodes run none: they have fewer than "
            f"{gpus_per_actor:g} GPUs",)  # fmt: skip


def _unused_gpus(with_gpus: Sequence[Node], gpus_per_actor: float) -> tuple[str, ...]:
    gpus = [float(node.resources["GPU"]) for node in with_gpus]
    more = sum(gpus) - len(gpus) * min(gpus, default=0)
    if more < gpus_per_actor:
        return ()
    return (f"{more:g} of {sum(gpus):g} GPUs are not used: each node counts as the smallest, with "
            f"{min(gpus):g}; num_actors uses more",)  # fmt: skip


def _known_gpu(nodes: Iterable[Node]) -> HardwareSpec | None:
    """Return the GPU with the least memory; None if any is unknown."""
    found = []
    for node in nodes:
        preset = HARDWARE_PRESETS.get(_PRESETS_OF_RAY.get(node.gpu_name, node.gpu_name))
        if preset is None:
            return None
        found.append(preset)
    return min(found, key=lambda preset: preset.gpu_memory_bytes, default=None)


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
        remote_args: Ray's options of them, which may leave out nodes.
    """

    name: str
    num_actors: int
    each: Resources
    remote_args: RemoteArgs = field(default_factory=dict)


def check_before_start() -> None:
    """Refuse to go on where Ray is not there yet and cannot be reached.

    Raises:
        ConfigError: No Ray answers where `ray.init` would look for one.
    """
    if not _has_ray():
        check_address()


LOOK_EVERY_S, PATIENCE_S, REPEAT_S = 1.0, 5.0, 60.0
# Of one actor. Ray starts one whose process ends again and again, without a limit.
MAX_RESTARTS_WHILE_LOADING = 3
# Each, before any of the pool has loaded. Ray counts those of the pool, and allows none.
MAX_ERRORS_WHILE_LOADING = 2


class CheckFit(ExecutionCallback):  # type: ignore[misc]  # Ray has no types here
    """Refuses a pipeline with generators that does not fit on its cluster, and watches the others.

    It only warns if the cluster can still grow.
    """

    def __init__(self) -> None:
        self._next_look_s = 0.0
        self._pools: list[PoolWatch] = []

    def before_execution_starts(self, executor: Any) -> None:
        # These are private in Ray, which has no public equivalent; its versions are pinned.
        stages = [_stage(operator) for operator in executor._topology]  # noqa: SLF001
        states = executor._topology.items()  # noqa: SLF001 - as above
        self._pools = [PoolWatch(*one) for one in states if _generates(one[0])]
        if not self._pools:
            return
        context = executor._data_context  # noqa: SLF001 - as above
        if context.max_consecutive_actor_init_deaths == 0:  # else a user has chosen
            limit = MAX_ERRORS_WHILE_LOADING * max(pool.size for pool in self._pools)
            context.max_consecutive_actor_init_deaths = limit
        nodes = [Node.of(node) for node in ray.nodes() if node["Alive"]]
        to_come = nodes_to_come(nodes)
        problem = find_problem(stages, [*nodes, *to_come])
        if not problem:
            if to_come and find_problem(stages, nodes):
                logger.info("the autoscaler has to start nodes for this pipeline")
            return
        autoscaler = ray._private.state.state.get_cluster_config()  # noqa: SLF001 - as above
        if len(nodes) == 1 and autoscaler is None and not to_come:
            raise InfeasiblePlanError(f"{problem}. {ADVICE}")
        logger.warning("%s, unless more nodes come. %s", problem, ADVICE)

    def on_execution_step(self, executor: Any) -> None:  # noqa: ARG002 - Ray's
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            try:
                for pool in self._pools:
                    pool.look(now_s)
            except RaymoeError as error:  # the job is hopeless
                raise as_users_error(error) from None
            except Exception:  # an error here would end the job
                logger.exception("an error of raymoe: the log no longer says what actors wait for")
                self._pools = []


class PoolWatch:
    """Says what the actors of a generator wait for, and when fewer run than were planned for.

    Args:
        state: That of the operator in Ray's executor, with the blocks that wait for it.
    """

    def __init__(self, operator: Any, state: Any) -> None:
        self._name = operator.name
        (self._pool,) = operator.get_autoscaling_actor_pools()
        self._each = _stage(operator).each
        self._plan = _plan_of(operator)
        self._shares = share_by_speed(self._pool, self._plan, state.total_enqueued_input_blocks)
        self._num_told = None if self._plan is None else self._plan.num_actors
        self._says_at_s: float | None = None
        self._num_running, self._runs_since_s = 0, 0.0

    @property
    def size(self) -> int:
        """The most actors."""
        return int(self._pool.max_size())

    def look(self, now_s: float) -> None:
        pending = self._pending() if self._pool.num_pending_actors() else []
        nodes = [node for node in (_node_of(actor) for actor in pending) if node]
        num_waiting = len(pending) - len(nodes)
        if self._shares is not None:
            self._shares.loading = nodes
        if not self._pool.num_running_actors():
            self._refuse_endless_restarts(pending)
        if not num_waiting:
            self._says_at_s = None
        elif self._says_at_s is None:
            self._says_at_s = now_s + PATIENCE_S
        elif now_s >= self._says_at_s:
            self._says_at_s = now_s + REPEAT_S
            logger.warning("%s", self._wait(num_waiting))
        self._compare(now_s, is_loading=bool(nodes))

    def _refuse_endless_restarts(self, pending: Iterable[Mapping[str, Any]]) -> None:
        """End a job of which no actor has ever loaded and one has died again and again."""
        restarts = max((actor["NumRestarts"] for actor in pending), default=0)
        if restarts > MAX_RESTARTS_WHILE_LOADING:
            raise ExecutionError(
                f"the process of an actor of {self._name} has ended {restarts} times while it "
                "loaded the model, without an error of its own. Ray's logs of the node say why: "
                "mostly it had too little memory, or a node was taken away. Reduce "
                "host_memory_bytes, or take nodes with more memory"
            )

    def _pending(self) -> list[Mapping[str, Any]]:
        """Return Ray's entries of the actors that have not loaded, for the first time or again."""
        ids = {handle._actor_id.hex() for handle in self._pool._pending_actors.values()}  # noqa: SLF001
        return [
            actor
            for state in ("PENDING_CREATION", "RESTARTING")
            for name, actor in ray._private.state.actors(actor_state_name=state).items()  # noqa: SLF001
            if name in ids
        ]

    def _wait(self, num_waiting: int) -> str:
        nodes = ray._private.state.available_resources_per_node().values()  # noqa: SLF001
        free = max(map(_of_stage, nodes), key=self._share, default=_of_stage({}))
        names = [name for name, amount in self._each.items() if amount]
        return (
            f"waiting for {_shown(self._each)} for {num_waiting} of {self.size} actors "
            f"of {self._name}: {_shown(free, names)} free; other jobs may hold the rest"
        )

    def _share(self, free: Resources) -> float:
        """Return how much of what an actor needs a node has, by what it has least of."""
        return min(
            (free[name] / amount for name, amount in self._each.items() if amount), default=0
        )

    def _compare(self, now_s: float, *, is_loading: bool) -> None:
        """Correct the prediction if another number of actors came to run than it was made for."""
        running = max(self._num_running, self._pool.num_running_actors())  # the last rows need few
        if running != self._num_running or is_loading:
            self._num_running, self._runs_since_s = running, now_s
        is_news = running not in {0, self._num_told} and now_s - self._runs_since_s >= PATIENCE_S
        if self._plan is not None and is_news:
            self._num_told, seconds = running, self._plan.seconds_with(running)
            logger.warning(
                "%d of %d actors of %s run: the job is predicted to take %s after loading",
                running, self.size, self._name, format_seconds(seconds),
            )  # fmt: skip


class TimedJob(Protocol):
    """What `PoolWatch` asks of the plan of a job."""

    @property
    def num_actors(self) -> int: ...

    def seconds_with(self, num_actors: int) -> float: ...


def _plan_of(operator: Any) -> TimedJob | None:
    options = [getattr(one, "fn_constructor_kwargs", None) for one in operator._logical_operators]  # noqa: SLF001
    plans = [getattr(one, "plan", None) for one in options]
    return next((plan for plan in plans if plan is not None), None)


def _node_of(actor: Mapping[str, Any]) -> str:
    """Return Ray's name of the node on which an actor loads; "" if none has taken it."""
    address = actor["Address"]
    return str(address["NodeID"]) if address["IPAddress"] else ""


def _of_stage(node: Mapping[str, float]) -> Resources:
    return {name: node.get(name, 0.0) for name in ("CPU", "GPU", "memory")}


def find_problem(stages: Sequence[Stage], nodes: Sequence[Node]) -> str:
    """Return which actors or tasks do not fit when all stages run at once; "" if all fit."""
    free = [_of_stage(node.resources) for node in nodes]
    at_first = ", ".join(_shown(node) for node in free)

    def of_stage(stage: Stage) -> list[Resources]:
        allowed = find_nodes(nodes, stage.remote_args)
        return [left for left, node in zip(free, nodes, strict=True) if node in allowed]

    pools = sorted((stage for stage in stages if stage.num_actors), key=_size, reverse=True)
    wanted = "; ".join(
        f"{pool.num_actors} x {pool.name} with {_shown(pool.each)}" for pool in pools
    )
    for pool in pools:
        allowed = of_stage(pool)
        placed = sum(_place(pool.each, allowed) for _ in range(pool.num_actors))
        if placed < pool.num_actors:
            return (
                f"{pool.num_actors - placed} of {pool.num_actors} actors of {pool.name} find no "
                f"room next to the others: the pipeline needs {wanted}; the nodes have {at_first}"
            )
    for stage in stages:
        if not stage.num_actors and not _place(stage.each, map(dict, of_stage(stage))):
            return (
                f"the actors leave no room for {stage.name}, which needs {_shown(stage.each)}: "
                f"they take {wanted}; the nodes have {at_first}"
            )
    return ""


def _stage(operator: Any) -> Stage:
    each = operator.min_scheduling_resources()
    return Stage(
        name=operator.name,
        num_actors=sum(pool.min_size() for pool in operator.get_autoscaling_actor_pools()),
        each={"CPU": each.cpu or 0, "GPU": each.gpu or 0, "memory": each.memory or 0},
        remote_args=getattr(operator, "_ray_remote_args", None) or {},
    )


def _generates(operator: Any) -> bool:
    return any(map(is_generator, operator._logical_operators))  # noqa: SLF001


def _size(stage: Stage) -> tuple[float, ...]:
    return stage.each["GPU"], stage.each["CPU"], stage.each["memory"]


def _place(each: Resources, free: Iterable[Resources]) -> bool:
    for node in free:
        if all(node[name] + SMALLEST > amount for name, amount in each.items()):
            for name, amount in each.items():
                node[name] -= amount
            return True
    return False


def _shown(resources: Resources, names: Collection[str] = ()) -> str:
    """Return amounts as text: of `names`, by default of the CPUs and of what else there is."""
    names = names or [name for name, amount in resources.items() if amount or name == "CPU"]
    return " + ".join(
        f"{format_bytes(amount)} of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in resources.items()
        if name in names
    )
