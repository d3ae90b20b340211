"""The part of a node that an engine has beside its neighbours, and what they have in common."""

import dataclasses
from pathlib import Path

import ray

from raymoe.config import EngineConfig
from raymoe.data.nodes import Node
from raymoe.specs.hardware import USABLE_FRACTION, HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import PLAIN_FORMATS


def choose_sharing(config: EngineConfig, *, actors_per_node: int, num_gpus: float) -> EngineConfig:
    """Resolve "auto": engines with a device share weights with other actors of their node."""
    if config.shared_weights != "auto":
        return config
    has_device = config.device in {"cuda", "emulated"}
    has_device |= config.device == "auto" and num_gpus >= 1
    is_one_process = config.tensor_parallel_size == 1
    is_read = config.load_format != "dummy"
    shares = actors_per_node > 1 and has_device and is_one_process and is_read
    return dataclasses.replace(config, shared_weights=shares)


def saved_bytes(model_source: str | Path, config: EngineConfig, actors_per_node: int) -> int:
    """Return the weight bytes that the plan of one actor counts but other actors hold.

    0 if nothing is shared, and for a model that is not on this machine yet.
    """
    is_here = (Path(model_source) / "config.json").is_file()
    if config.shared_weights is not True or not is_here:
        return 0
    spec = read_model(model_source, config)
    num_bytes = spec.weight_bytes(PLAIN_FORMATS[dtype_of(spec, config)].item_bytes)
    num_bytes += spec.table_bytes
    return num_bytes * (actors_per_node - 1) // actors_per_node


def read_model(directory: str | Path, config: EngineConfig) -> ModelSpec:
    """The model as an engine holds it, with its adapter."""
    if config.adapter is None:
        return ModelSpec.from_directory(directory)
    # It loads torch, which the driver of other jobs does not need.
    from raymoe.engine.rank_model import read_model as read_adapted  # noqa: PLC0415

    return read_adapted(Path(directory), config)


def dtype_of(spec: ModelSpec, config: EngineConfig) -> str:
    return spec.dtype or "bfloat16" if config.dtype == "auto" else config.dtype


def share_node(config: EngineConfig, node: HardwareSpec) -> EngineConfig:
    return dataclasses.replace(
        config,
        num_threads=config.num_threads or node.num_cores,
        host_memory_bytes=config.host_memory_bytes or node.host_memory_bytes,
    )


def with_part_of_node(model_source: str | Path, config: EngineConfig) -> EngineConfig:
    """Return the configuration of an engine on its part of the node of this actor.

    The GPUs of a node divide it.
    """
    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    resources = Node.of(here).resources
    num_gpus = context.get_assigned_resources().get("GPU", 0)
    neighbours = int(resources.get("GPU", 0) / num_gpus) if num_gpus else 1
    if neighbours <= 1:
        return config
    memory_bytes = int(USABLE_FRACTION * resources.get("memory", 0) / neighbours)
    memory_bytes += saved_bytes(model_source, config, neighbours)
    num_cores = max(1, int(resources.get("CPU", 0)) // neighbours)
    return dataclasses.replace(
        config,
        num_threads=config.num_threads or num_cores,
        host_memory_bytes=config.host_memory_bytes or memory_bytes,
    )
