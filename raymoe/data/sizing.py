"""How many rows, calls and resources? The arguments of `map_batches` for a `MoEGenerator`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymoe.config import EngineConfig
from raymoe.data.options import as_engine_config
from raymoe.errors import ConfigError
from raymoe.units import ceil_div

try:
    import ray
    from ray.data import ActorPoolStrategy
except ImportError as error:
    raise ImportError(
        "raymoe.map_batches_kwargs needs Ray Data: pip install 'ray[data]>=2.60,<2.64'"
    ) from error

MAX_CONCURRENT_CALLS = 256  # beyond it Ray Data dispatches slower than it gains
PREFETCHED_FRACTION = 0.25  # tasks that wait at the actor with their input already local


def map_batches_kwargs(
    model_source: str | Path,
    *,
    num_actors: int = 1,
    rows_in_flight: int = 1024,
    batch_size: int = 16,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    memory: int | None = None,
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the keyword arguments with which `Dataset.map_batches` runs `MoEGenerator`.

    Blocks should have about `batch_size` rows: a task is one block, and the unit of a retry.
    ``ds.repartition(target_num_rows_per_block=64)`` before `map_batches` does that.

    Args:
        model_source: A local model directory, or a name on the Hugging Face hub.
        num_actors: Engines; each has its own copy of the weights.
        rows_in_flight: Rows inside one actor; 1.5 to 2 times the sequences that are live at once.
        batch_size: Rows of one call; a call leaves when its slowest row does, so small is better.
        num_gpus: Of an actor; None takes one where the cluster has any and the device allows it.
        num_cpus: Of an actor; None shares the CPUs of the nodes and leaves one to the reads.
        memory: Bytes that Ray reserves for an actor; None takes what the plan needs. It decides
            placement only and limits nothing.
        engine_config: An `EngineConfig`, or its fields as a dict.
        options: Passed to `MoEGenerator`: sampling_params, id_column and so on.

    Raises:
        ConfigError: A number that makes no sense.
    """
    for name, value in (
        ("num_actors", num_actors),
        ("rows_in_flight", rows_in_flight),
        ("batch_size", batch_size),
    ):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1")
    config = as_engine_config(engine_config)
    calls = min(MAX_CONCURRENT_CALLS, ceil_div(rows_in_flight, batch_size))
    cluster = Cluster.connected()
    gpus = _choose_num_gpus(num_gpus, config, cluster)
    return {
        "batch_size": batch_size,
        "batch_format": "pyarrow",
        "num_gpus": gpus,
        "num_cpus": cluster.cpus_for(num_actors) if num_cpus is None else num_cpus,
        "memory": memory,
        "udf_modifying_row_count": False,
        "fn_constructor_args": (str(model_source),),
        "fn_constructor_kwargs": {
            "engine_config": config,
            "max_concurrent_calls": calls,
            **options,
        },
        "compute": ActorPoolStrategy(
            size=num_actors,
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=calls + max(2, math.ceil(calls * PREFETCHED_FRACTION)),
            enable_true_multi_threading=True,
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What Ray has; one node of unknown size when Ray is not running yet."""

    num_nodes: int
    num_cpus: float
    num_gpus: float

    @classmethod
    def connected(cls) -> "Cluster":
        """Return the cluster that this process is connected to."""
        if not ray.is_initialized():
            return cls(num_nodes=1, num_cpus=0, num_gpus=0)
        resources = ray.cluster_resources()
        return cls(
            num_nodes=max(1, sum(1 for node in ray.nodes() if node["Alive"])),
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
        )

    def cpus_for(self, num_actors: int) -> float:
        """Return the CPUs of one actor such that a node's reads and writes keep one.

        Without it a job waits for ever: actors that took all CPUs wait for blocks that nobody
        may read.
        """
        if not self.num_cpus:
            return 1
        cpus_per_node = self.num_cpus / self.num_nodes
        spare = 1.0 if cpus_per_node >= 2 else 0.5
        share = (cpus_per_node - spare) / ceil_div(num_actors, self.num_nodes)
        return float(math.floor(share)) if share >= 1 else math.floor(share * 1000) / 1000


def _choose_num_gpus(
    num_gpus: float | None, config: EngineConfig, cluster: Cluster
) -> float | None:
    if num_gpus is not None:
        return num_gpus
    wants_gpu = config.device == "cuda" or (config.device == "auto" and cluster.num_gpus >= 1)
    return 1 if wants_gpu else None
