"""What an engine is put together from; loaded from a model, or made by a test."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import open_cuda
from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine.core import Runner
from raymoe.engine.device_loading import LoadedModel, load_on_device, load_resident
from raymoe.engine.tokenizer import Tokenizer
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.gpu_experts_layout import TileTable
from raymoe.measure.tiles import Gpu, load_tiles
from raymoe.memory.arena import HostArena
from raymoe.memory.kv_cache import KvCache, blocks_of_tokens
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weights import DummyWeights, ShardedWeights, Weights, WeightStore
from raymoe.model.decoder import Decoder, cache_layout
from raymoe.model.loading import Reduce, decoder_arena_bytes, keep
from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.device_step import (
    StreamedSteps,
    device_footprint,
    resident_footprint,
    workspace_bytes,
)
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.work import AttentionShape, MicroBatchShape, ModelWork
from raymoe.runtime.micro_batches import CutStep, MicroBatch
from raymoe.runtime.runner import BeforeStep, StepRunner
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.graph import Schedule
from raymoe.schedule.timeline import Instant
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import shard_model


def nothing() -> None:
    """There is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A loaded model and its sizes.

    Attributes:
        policy: Sizes of steps and of the KV cache.
        max_model_len: Prompt and generated tokens of a row.
        eos_token_ids: Tokens that end a row.
        plan: What was planned, if it was.
        shares_across_lengths: Whether prompts of different lengths that begin the same have the
            same KV there; not where rotary embeddings depend on the length.
        release: Called once when the engine has ended: gives memory back.
        interrupt: Called when a step is stuck: ends what it may be waiting for, so that it fails.
    """

    runner: Runner
    policy: Policy
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_threads: int
    num_torch_threads: int | None = None
    plan: Plan | None = None
    shares_across_lengths: bool = True
    release: Callable[[], None] = nothing
    interrupt: Callable[[], None] = nothing

    def close(self) -> None:
        self.tokenizer.close()
        self.release()


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """A model and the sizes of a run.

    Attributes:
        hardware: What a rank has of the node.
        step_limit_s: A step that takes longer is stuck.
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
    step_limit_s: float

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class RankShare:
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


class EmulatedTiming:
    """Sets the cost model of a device before each step."""

    def __init__(
        self,
        device: EmulatedDevice,
        work: ModelWork,
        hardware: HardwareSpec,
        page_bytes: tuple[tuple[int, ...], ...],
    ) -> None:
        """Price steps of a model.

        Args:
            work: The model whose costs are taken.
            hardware: On which it would run.
            page_bytes: Of each layer, the bytes of each page that streams.
        """
        self._device, self._work, self._hardware = device, work, hardware
        self._page_bytes = page_bytes

    def __call__(self, cut: CutStep, schedule: Schedule) -> None:
        """Take the costs of this step from here on."""
        self._device.cost = DeviceCost.of_schedule(
            schedule,
            self._work,
            self._hardware,
            micro_batches=tuple(
                micro_batch_shape(micro_batch) for micro_batch in cut.micro_batches
            ),
            page_bytes=self._page_bytes,
        )


def micro_batch_shape(micro_batch: MicroBatch) -> MicroBatchShape:
    """A micro-batch in the numbers that costs depend on; every sequence gets logits."""
    host, device = micro_batch.host.batch, micro_batch.device.batch
    return MicroBatchShape(
        host=_attention_shape(host),
        device=_attention_shape(device),
        logit_rows=len(host.context_tokens) + len(device.context_tokens),
    )


def _attention_shape(batch: AttentionBatch) -> AttentionShape:
    num_scheduled_tokens = np.diff(batch.query_start.numpy()).astype(np.int64)
    contexts = batch.context_tokens.numpy().astype(np.int64)
    pairs = (
        num_scheduled_tokens * (contexts - num_scheduled_tokens)
        + num_scheduled_tokens * (num_scheduled_tokens + 1) // 2
    )
    is_decode = num_scheduled_tokens == 1
    return AttentionShape(
        rows=int(num_scheduled_tokens.sum()),
        decode_rows=int(is_decode.sum()),
        pairs=int(pairs[is_decode].sum()),
        prompt_pairs=int(pairs[~is_decode].sum()),
        context_tokens=int(contexts.sum()),
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """What runs passes.

    Attributes:
        release: Gives everything back; called once, when nothing runs any more.
        interrupt: Ends what a step may be waiting for; from any thread.
    """

    runner: Runner
    release: Callable[[], None]
    interrupt: Callable[[], None] = nothing


def load_runner(
    job: LoadJob, share: RankShare, reduce: Reduce = keep, shared: SharedFile | None = None
) -> Loaded:
    """Fill the memory of a rank.

    Args:
        reduce: Adds up what ranks add to hidden states.
        shared: Where the host's copy of the weights goes that other engines use too.
    """
    if job.device == "cpu":
        return _load_in_place(job, share)
    model = LoadedModel(
        spec=share.spec,
        store=share.weights,
        dtype=job.dtype,
        kv_layout=cache_layout(share.spec, job.kv_dtype),
        steps=StreamedSteps.of(share.spec, job.schedule, job.policy, job.dtype.itemsize),
        reduce=reduce,
        shared=shared,
    )
    if job.device == "cuda":
        model = replace(
            model, tiles=_kept_tiles(job.settings), workspace_bytes=_workspace_bytes(model)
        )
        opened = open_cuda(share.rank, memory_bytes=job.config.device_memory_bytes)
        return _load_or_close(model, opened, None)
    return _load_emulated(job, model)


def _load_emulated(job: LoadJob, model: LoadedModel) -> Loaded:
    device = EmulatedDevice(job.hardware.gpu_memory_bytes, Instant())
    emulated_timing = None
    if job.config.hardware not in {None, "auto"}:
        kv_bytes = model.kv_layout.dtype.itemsize
        work = ModelWork.of(model.spec, model.dtype.itemsize, kv_element_bytes=kv_bytes)
        pages = () if _is_resident(model) else model.steps.cut.page_bytes
        emulated_timing = EmulatedTiming(device, work, job.hardware, pages)
    return _load_or_close(model, device, emulated_timing)


def _workspace_bytes(model: LoadedModel) -> int:
    kv_bytes, steps = model.kv_layout.dtype.itemsize, model.steps
    work = ModelWork.of(model.spec, model.dtype.itemsize, kv_element_bytes=kv_bytes)
    if _is_resident(model):
        return workspace_bytes(resident_footprint(model.spec, work, steps.policy))
    return workspace_bytes(device_footprint(model.spec, work, steps))


def _kept_tiles(settings: Settings) -> TileTable | None:
    if not torch.cuda.is_available():
        return None
    return load_tiles(settings.cache_directory, Gpu.current())


def _is_resident(model: LoadedModel) -> bool:
    return model.steps.schedule == "resident"


def _load_or_close(model: LoadedModel, device: Device, before_step: BeforeStep | None) -> Loaded:
    try:
        load = load_resident if _is_resident(model) else load_on_device
        return Loaded(*load(model, device, before_step))
    except BaseException:
        device.close()
        raise


def in_place_arena_bytes(spec: ModelSpec, weights: Weights, dtype: torch.dtype) -> int:
    """Host memory of what is not read as it is stored, on the device `cpu`."""
    # Dummy weights have the type to compute in; they would be made to be looked at.
    stored = None if isinstance(weights, DummyWeights) else weights
    return decoder_arena_bytes(spec, dtype, stored)


def _load_in_place(job: LoadJob, share: RankShare) -> Loaded:
    spec, weights = share.spec, share.weights
    arena = HostArena(in_place_arena_bytes(spec, weights, job.dtype))
    decoder = Decoder.load(spec, weights, arena.allocate, job.dtype, release=weights.drop_pages)
    workload, policy = job.config.workload, job.policy
    cache = KvCache(cache_layout(spec, job.kv_dtype), spec.num_layers, policy.num_kv_blocks)
    if workload is not None:
        rows = min(workload.num_rows, policy.batch_size)
        used_blocks = min(policy.num_kv_blocks, rows * blocks_of_tokens(workload.context_tokens))
        cache.touch(used_blocks, job.hardware.num_cores)

    def release() -> None:
        cache.close()
        arena.close()

    return Loaded(StepRunner(decoder, cache, build_in_place(spec.num_layers)), release)
