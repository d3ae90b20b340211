"""Do the actors of a node share the weights, and what does that save each of them?"""

import dataclasses
from pathlib import Path

from raymoe.config import EngineConfig
from raymoe.specs.model import ModelSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def choose_sharing(config: EngineConfig, *, actors_per_node: int, num_gpus: float) -> EngineConfig:
    """Decide "auto": engines with a device each share the weights with their neighbours.

    Args:
        config: Of the engines.
        actors_per_node: Engines of a node.
        num_gpus: Of the cluster.
    """
    if config.shared_weights != "auto":
        return config
    has_device = config.device in {"cuda", "emulated"}
    has_device |= config.device == "auto" and num_gpus >= 1
    is_one_process = config.tensor_parallel_size == 1
    is_read = config.load_format != "dummy"
    shares = actors_per_node > 1 and has_device and is_one_process and is_read
    return dataclasses.replace(config, shared_weights=shares)


def saved_bytes(model_source: str | Path, config: EngineConfig, actors_per_node: int) -> int:
    """Weights in the plan of one actor that are its neighbours' in truth: all but its part.

    0 where nothing is shared, and for a model that is not on this machine yet.
    """
    is_here = (Path(model_source) / "config.json").is_file()
    if config.shared_weights is not True or not is_here:
        return 0
    spec = ModelSpec.from_directory(model_source)
    num_bytes = spec.weight_bytes(BYTES_PER_ELEMENT[dtype_of(spec, config)])
    return num_bytes * (actors_per_node - 1) // actors_per_node


def dtype_of(spec: ModelSpec, config: EngineConfig) -> str:
    """The type that an engine computes in."""
    return spec.dtype or "bfloat16" if config.dtype == "auto" else config.dtype
