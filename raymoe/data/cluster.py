"""Cluster: which nodes may run an engine, and what one of its actors has there."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec
from raymoe.units import GB, ceil_div, format_bytes

try:
    import ray
except ImportError as error:
    raise ImportError(
        "raymoe.map_batches_kwargs needs Ray Data: pip install 'ray[data]>=2.60,<2.64'"
    ) from error

MEMORY_FRACTION = 0.85  # of a node's: Ray ends processes of a node that is 95 % full
# Typical rates of a core; they decide the sizes of a plan, never results.
CORE_BYTES_PER_S, CORE_FLOP_PER_S = 8e9, 60e9
# Prompts and answers need little: Ray's default of 30 % of the memory belongs to the KV cache.
ENOUGH_STORE_BYTES, MOST_STORE_BYTES = int(8 * GB), int(16 * GB)
_ACCELERATOR = "accelerator_type:"
_PRESETS_OF_RAY = {"a10g": "a10"}  # Ray's names of GPUs that are not ours in lower case

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes that may run an engine; one of unknown size when there is none yet.

    Where nodes differ, each counts as much as the smallest: an actor may land on any.

    Attributes:
        num_nodes: How many.
        num_cpus: Of all of them; 0 where nothing is known.
        num_gpus: Of all of them.
        memory_bytes: Of all of them, without Ray's object stores.
        gpus_per_actor: That an engine takes, where there are any.
        gpu: The preset with their GPU, where Ray knows its name and we do.
        store_bytes: Of the largest object store.
        num_generators: Of the pipeline that runs there, with as many actors each; None where that
            was not said.
    """

    num_nodes: int
    num_cpus: float
    num_gpus: float
    memory_bytes: float = 0
    gpus_per_actor: float = 1
    gpu: HardwareSpec | None = None
    store_bytes: float = 0
    num_generators: int | None = None

    @classmethod
    def connected(cls, device: str = "auto", gpus_per_actor: float = 1) -> "Cluster":
        """Return the cluster that this process is connected to.

        Args:
            device: Of the engines. Where some nodes have GPUs, engines run on those, unless they
                are for the CPU. A head without CPUs runs none.
            gpus_per_actor: That an engine takes at once; nodes with fewer run none where others
                have enough.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if _has_ray() else []
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
        )

    def actors_per_node(self, num_actors: int) -> int:
        """Actors on the fullest node.

        Not more than its GPUs: the nodes of a cluster that grows come after the first actors.
        """
        even = ceil_div(num_actors, self.num_nodes)
        if not self.num_gpus:
            return even
        return min(even, max(1, int(self.num_gpus / self.num_nodes / self.gpus_per_actor)))

    def share(self, num_actors: int) -> HardwareSpec | None:
        """Return what one of the actors may use of its node; None when no node is known."""
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
        """Return the CPUs that Ray reserves for one actor; threads of the engine are another thing.

        A node keeps one for its reads, maps and writes: actors that took all CPUs would wait for
        blocks that nobody may read. A single node keeps room for a second generator too; of several
        nodes actors take all they can, since that alone spreads them.
        """
        if not self.num_cpus:
            return 1
        generators = self.num_generators or (2 if self.num_nodes == 1 else 1)
        spare = self.num_cpus / self.num_nodes - 1
        share = max(0.0, spare) / (self.actors_per_node(num_actors) * generators)
        return float(math.floor(share)) if share >= 1 else math.floor(share * 1000) / 1000

    def advise(self) -> None:
        """Warn of an object store that takes memory which the KV cache could use."""
        if self.store_bytes > MOST_STORE_BYTES:
            logger.warning(
                "Ray's object store has %s of a node, which the engine cannot use; prompts and "
                "answers need little of it: start nodes with --object-store-memory=%d",
                format_bytes(self.store_bytes),
                ENOUGH_STORE_BYTES,
            )


def _has_ray() -> bool:
    return bool(ray.is_initialized())


def _with_gpus(nodes: Sequence[Mapping[str, Any]], least: float) -> list[Mapping[str, Any]]:
    """The nodes with so many GPUs, or, where there are none, those with any."""
    enough = [resources for resources in nodes if resources.get("GPU", 0) >= least]
    return enough or [resources for resources in nodes if resources.get("GPU", 0) > 0]


def _known_gpu(nodes: Iterable[Mapping[str, Any]]) -> HardwareSpec | None:
    """The GPU with the least memory; None where Ray or we do not know one of them."""
    found = []
    for resources in nodes:
        names = [name for name in resources if name.startswith(_ACCELERATOR)]
        name = names[0].removeprefix(_ACCELERATOR).lower() if names else ""
        preset = HARDWARE_PRESETS.get(_PRESETS_OF_RAY.get(name, name))
        if preset is None:
            return None
        found.append(preset)
    return min(found, key=lambda preset: preset.gpu_memory_bytes, default=None)
