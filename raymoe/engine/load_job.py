"""LoadJob: what an engine loads, decided once; its ranks are processes that get it as it is."""

from dataclasses import dataclass
from pathlib import Path

import torch

from raymoe.config import EngineConfig, Settings
from raymoe.memory.dummy_weights import DummyWeights
from raymoe.memory.sharded_weights import ShardedWeights
from raymoe.memory.weights import Weights, WeightStore
from raymoe.plan.policy import Policy
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import shard_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """A model and the sizes of a run.

    Attributes:
        directory: Of the model.
        config: Of the engine.
        settings: Of the environment.
        device: "cpu", "cuda" or "emulated".
        dtype: Type to compute in.
        kv_dtype: Of the KV cache.
        hardware: What a rank has of the node.
        schedule: Name of the schedule.
        policy: Sizes of passes.
        num_torch_threads: Of torch, in each rank.
        pass_limit_s: A pass that takes longer is stuck.
    """

    directory: Path
    config: EngineConfig
    settings: Settings
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    hardware: HardwareSpec
    schedule: str
    policy: Policy
    num_torch_threads: int
    pass_limit_s: float

    @property
    def num_ranks(self) -> int:
        """Processes that share every pass."""
        return self.config.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank loads of a model.

    Attributes:
        rank: From 0.
        spec: Its part.
        weights: Of that part.
    """

    rank: int
    spec: ModelSpec
    weights: Weights

    @classmethod
    def of(cls, model: ModelSpec, weights: Weights, *, rank: int, num_ranks: int) -> "RankShare":
        """The share of a rank; all of it where there is only one.

        Raises:
            ConfigError: The model cannot be divided between so many ranks.
        """
        if num_ranks == 1:
            return cls(rank, model, weights)
        part = shard_model(model, num_ranks)
        return cls(rank, part, ShardedWeights(weights, model, part, rank))


def open_weights(spec: ModelSpec, directory: Path, config: EngineConfig) -> Weights:
    """The weights of a whole model: those of its checkpoint, or random ones.

    Raises:
        CheckpointError: As for `WeightStore.open`.
    """
    if config.load_format != "dummy":
        return WeightStore.open(spec, directory)
    name = config.dtype if config.dtype != "auto" else spec.dtype or "bfloat16"
    return DummyWeights(spec, DTYPES[name])
