"""From the share of a rank to what runs its passes: in place, emulated, or on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from raymoe.config import Settings
from raymoe.device.cuda import open_cuda
from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine.core import Runner
from raymoe.engine.device_loading import LoadedModel, load_on_device, load_resident
from raymoe.engine.load_job import LoadJob, RankShare
from raymoe.engine.pace import Pace
from raymoe.engine.parts import nothing
from raymoe.kernels.device_experts_tiles import TileTable
from raymoe.measure.expert_tiles import Gpu, load_tiles
from raymoe.memory.arena import HostArena
from raymoe.memory.dummy_weights import DummyWeights
from raymoe.memory.kv_cache import KvCache, blocks_of_tokens
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weights import Weights
from raymoe.model.cache import cache_layout
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
from raymoe.model.ranks import Reduce, keep
from raymoe.plan.device_memory import device_footprint, resident_footprint, workspace_bytes
from raymoe.plan.device_pass import StreamedPasses
from raymoe.plan.work import ModelWork
from raymoe.runtime.device_runner import BeforePass
from raymoe.runtime.runner import PassRunner
from raymoe.schedule.builders import build_in_place
from raymoe.schedule.timeline import Instant
from raymoe.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Loaded:
    """What runs passes.

    Attributes:
        release: Gives everything back; called once, when nothing runs any more.
        interrupt: Ends what a pass may be waiting for; from any thread.
    """

    runner: Runner
    release: Callable[[], None]
    interrupt: Callable[[], None] = nothing


def load_runner(
    job: LoadJob, share: RankShare, reduce: Reduce = keep, shared: SharedFile | None = None
) -> Loaded:
    """Fill the memory of a rank.

    Args:
        job: What is loaded.
        share: Which part of it.
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
        passes=StreamedPasses.of(share.spec, job.schedule, job.policy, job.dtype.itemsize),
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
    pace = None
    if job.config.hardware not in {None, "auto"}:
        kv_bytes = model.kv_layout.dtype.itemsize
        work = ModelWork.of(model.spec, model.dtype.itemsize, kv_element_bytes=kv_bytes)
        pages = () if _is_resident(model) else model.passes.cut.page_bytes
        pace = Pace(device, work, job.hardware, pages)
    return _load_or_close(model, device, pace)


def _workspace_bytes(model: LoadedModel) -> int:
    """What operations allocate while they run, as the plan counts it."""
    kv_bytes, passes = model.kv_layout.dtype.itemsize, model.passes
    work = ModelWork.of(model.spec, model.dtype.itemsize, kv_element_bytes=kv_bytes)
    if _is_resident(model):
        return workspace_bytes(resident_footprint(model.spec, work, passes.policy))
    return workspace_bytes(device_footprint(model.spec, work, passes))


def _kept_tiles(settings: Settings) -> TileTable | None:
    """Tiles that were measured on the GPU; None where a stand-in for one computes."""
    if not torch.cuda.is_available():
        return None
    return load_tiles(settings.cache_directory, Gpu.current())


def _is_resident(model: LoadedModel) -> bool:
    """Whether nothing streams."""
    return model.passes.schedule == "resident"


def _load_or_close(model: LoadedModel, device: Device, before_pass: BeforePass | None) -> Loaded:
    try:
        load = load_resident if _is_resident(model) else load_on_device
        return Loaded(*load(model, device, before_pass))
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

    return Loaded(PassRunner(decoder, cache, build_in_place(spec.num_layers)), release)
