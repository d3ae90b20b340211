"""What one rank loads: its share of the weights, KV cache and buffers, and the runner over them."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, as_tensor
from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import open_cuda
from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice, HostDevice
from raymoe.device.lane import released_on_error
from raymoe.engine.identity import note_of
from raymoe.engine.step_costs import EmulatedTiming, split_choice
from raymoe.errors import PerformanceWarning
from raymoe.kernels.cpu_experts import ExpertGroup
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.elementwise import Routing, choose
from raymoe.kernels.gpu_experts_layout import TileTable
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.measure.kept import Gpu, load_tiles
from raymoe.memory.activations import ActivationSizes, DeviceActivations, HostActivations
from raymoe.memory.adapters import AdaptedWeights, Adapter
from raymoe.memory.arena import HostArena, SharedArena
from raymoe.memory.kv_cache import KvCache, device_cache
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weight_pages import WeightPages
from raymoe.memory.weights import DummyWeights, ShardedWeights, WatchedWeights, Weights, WeightStore
from raymoe.model.compilation import compile_attention, compile_experts
from raymoe.model.decoder import Decoder, cache_layouts
from raymoe.model.feed_forward import HostExperts
from raymoe.model.loading import PagedLoader, Reduce, decoder_arena_bytes, keep
from raymoe.plan.footprint import STAGED_MICRO_BATCHES, device_footprint, workspace_bytes
from raymoe.plan.placement import Placement
from raymoe.plan.policy import Policy
from raymoe.plan.work import ModelWork
from raymoe.runtime.batch import blocks_of_tokens
from raymoe.runtime.in_place import InPlace
from raymoe.runtime.inputs import StepInputs
from raymoe.runtime.micro_batches import Division
from raymoe.runtime.operations import StreamedMemory
from raymoe.runtime.runner import BeforeStep, ModelRunner
from raymoe.runtime.streamed import Schedules, Streamed
from raymoe.schedule.builders import RING_SCHEDULES, build_in_place, build_resident
from raymoe.schedule.program import NUM_RETURNED_SUMS
from raymoe.schedule.timeline import Instant
from raymoe.specs.attention.ngrams import NGRAM_TABLE
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.layer_weights import EMBEDDING, HEAD, layer_prefix
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.specs.tensor_shards import shard_model
from raymoe.units import MIB, format_bytes

NewArena = Callable[[int], HostArena]
# Of `DEVICE_RUNTIME_BYTES`, which a plan counts: what compiling kernels takes besides a workspace.
COMPILE_BYTES = 256 * MIB
STAGING_SLOTS = 4  # pages of the ring where weights cannot be pinned
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """A model and the sizes of a run: the same for all ranks.

    Attributes:
        hardware: What a rank has of the node.
        step_limit_s: A step that takes longer is stuck.
        new_arena: Makes the host memory of weights and KV cache for a device with its own memory.
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
    new_arena: NewArena = HostArena

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size


def configured_model(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model with the head, type of states and length that the configuration asks for."""
    spec = spec.with_state_dtype(config.state_dtype).within(config.max_model_len)
    return spec.with_head("none") if config.head == "none" else spec


def read_model(directory: Path, config: EngineConfig) -> ModelSpec:
    """The model of a directory as the configuration asks for it: with its adapter, too.

    Raises:
        CheckpointError: As for `ModelSpec.from_directory` and `Adapter.open`.
        UnsupportedModelError: The same.
    """
    spec = ModelSpec.from_directory(directory)
    if config.adapter is not None:
        spec = Adapter.open(Path(config.adapter), spec).adapted(spec)
    return configured_model(spec, config)


def open_weights(spec: ModelSpec, directory: Path, config: EngineConfig) -> Weights:
    """The weights of a whole model: those of its checkpoint, or random ones.

    Args:
        spec: As `read_model` returns it.

    Raises:
        CheckpointError: As for `WeightStore.open` and `Adapter.open`.
    """
    if config.load_format != "dummy":
        if config.adapter is None:
            return WeightStore.open(spec, directory)
        base = ModelSpec.from_directory(directory)
        adapter = Adapter.open(Path(config.adapter), base)
        base = configured_model(base, config)
        return AdaptedWeights(WeightStore.open(base, directory), base, adapter, spec)
    dtype = DTYPES[config.dtype if config.dtype != "auto" else spec.dtype or "bfloat16"]
    # On the CPU, torch reads what is not packed where it is: views would stay in its caches.
    is_copied = config.device in {"cuda", "emulated"} or packed_linear_is_used(dtype)
    return DummyWeights(spec, dtype, are_views=is_copied)


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """What one rank loads, and as what.

    Attributes:
        spec: The share of the rank, as are `weights`.
        reduce: Adds up what ranks add to hidden states.
        shared: Where the host's copy of the weights goes that other engines use too; None for one
            of its own.
    """

    job: LoadJob
    spec: ModelSpec
    weights: Weights
    rank: int = 0
    reduce: Reduce = keep
    shared: SharedFile | None = None

    @classmethod
    def of(cls, job: LoadJob, model: ModelSpec, weights: Weights, *, rank: int) -> "RankModel":
        """The share of a rank; all of it where there is only one.

        Raises:
            ConfigError: The model cannot be divided between so many ranks.
        """
        if job.num_ranks == 1:
            return cls(job=job, spec=model, weights=weights)
        part = shard_model(model, job.num_ranks)
        sharded = ShardedWeights(weights, model, part, rank)
        return cls(job=job, spec=part, weights=sharded, rank=rank)

    @property
    def dtype(self) -> torch.dtype:
        return self.job.dtype

    @cached_property
    def kv_layouts(self) -> tuple[CacheLayout, ...]:
        return cache_layouts(self.spec, self.job.kv_dtype, self.dtype)

    @cached_property
    def kv_blocks(self) -> list[int]:
        """KV blocks of each layer."""
        num_blocks = self.job.policy.num_kv_blocks
        num_windowed = self.job.policy.num_window_blocks(self.spec.cache_window) or num_blocks
        layers = self.spec.layers
        return [
            num_blocks if each.attention.cache_window is None else num_windowed for each in layers
        ]

    @cached_property
    def placement(self) -> Placement:
        job = self.job
        return Placement.of(self.spec, job.schedule, job.policy, self.dtype.itemsize)

    @property
    def work(self) -> ModelWork:
        kv_bytes = self.job.kv_dtype.itemsize
        return ModelWork.of(self.spec, self.dtype.itemsize, kv_element_bytes=kv_bytes)

    @cached_property
    def tiles(self) -> TileTable | None:
        """Measured tiles of the GPU's kernels."""
        if self.job.device != "cuda" or not torch.cuda.is_available():
            return None
        return load_tiles(self.job.settings.cache_directory, Gpu.current())

    @property
    def workspace_bytes(self) -> int:
        """Device memory that operations allocate while they run, at most; 0 if it is the host's."""
        if self.job.device != "cuda":
            return 0
        return workspace_bytes(device_footprint(self.spec, self.work, self.placement))

    def make_arena(self, num_bytes: int, device: Device) -> HostArena:
        """Memory for the host's copy of the weights."""
        if self.shared is None:
            return self.job.new_arena(num_bytes)
        # A driver pins only what could be written.
        is_writable = device.torch_device.type == "cuda"
        note = note_of(self.placement.choice)
        return SharedArena(num_bytes, self.shared, note, is_writable=is_writable)


def load_runner(model: RankModel) -> ModelRunner:
    """Fill the memory of a rank."""
    job = model.job
    if job.device == "cpu":
        return _load_in_place(model)
    before_step = None
    if job.device == "cuda":
        device: Device = open_cuda(model.rank, memory_bytes=job.config.device_memory_bytes)
    else:
        device = emulated = EmulatedDevice(job.hardware.gpu_memory_bytes, Instant())
        if job.config.hardware not in {None, "auto"}:
            splits = tuple(each.layers for each in model.placement.splits)
            before_step = EmulatedTiming(emulated, model.work, job.hardware, splits)
    load = load_resident if model.placement.is_resident else load_streamed
    with released_on_error(device.close):
        return load(model, device, before_step)


def in_place_arena_bytes(spec: ModelSpec, weights: Weights, dtype: torch.dtype) -> int:
    """Host memory of what is not read as it is stored, on the device `cpu`."""
    # Dummy weights have the type to compute in; they would be made to be looked at.
    if isinstance(weights, DummyWeights):
        return decoder_arena_bytes(spec, dtype)
    source = weights.source if isinstance(weights, WatchedWeights) else weights
    stored = source.unmerged if isinstance(source, AdaptedWeights) else source
    return decoder_arena_bytes(spec, dtype, stored)


def _load_in_place(model: RankModel) -> ModelRunner:
    """Keep everything in host memory, where the cores compute."""
    job, spec, weights = model.job, model.spec, model.weights
    arena = HostArena(in_place_arena_bytes(spec, weights, model.dtype))
    decoder = Decoder.load(spec, weights, arena.allocate, model.dtype, release=weights.drop_pages)
    workload, policy, layouts = job.config.workload, job.policy, model.kv_layouts
    cache = KvCache(layouts, model.kv_blocks, num_slots=policy.num_state_slots)
    if workload is not None:
        rows = min(workload.num_rows, policy.max_num_seqs)
        used_blocks = min(policy.num_kv_blocks, rows * blocks_of_tokens(workload.context_tokens))
        cache.touch(used_blocks, job.hardware.num_cores)
    device = HostDevice()
    placed = InPlace(decoder, cache.layers, layouts, build=build_in_place, device=device)
    return ModelRunner(placed, device, [cache.close, arena.close])


def load_streamed(
    model: RankModel, device: Device, before_step: BeforeStep | None = None
) -> ModelRunner:
    """Fill host and device memory for weights that stream.

    Args:
        before_step: Called with each step and its schedule before it runs.

    Raises:
        CapacityError: The device's memory does not hold what the policy asks for.
        ConfigError: The schedule cannot run with this policy.
    """
    steps = model.placement
    weights = _load_pages(model, device, is_pinned=not steps.device.staging_slots)
    if not steps.device.staging_slots and not _is_pinned(weights):
        steps = steps.with_staging(STAGING_SLOTS)
    cache, is_cache_pinned = _pinned_cache(model, device)
    memory = _load_memory(
        model, steps, weights, cache, device=device, is_cache_pinned=is_cache_pinned
    )
    _prepare(model, memory.decoders[0], steps.launch_tokens, device)
    schedules = Schedules(
        forms=tuple(split.form for split in steps.splits),
        build=steps.build,
        division=Division(
            cpu_attention_fraction=steps.cpu_attention_fraction,
            staged_blocks=steps.staged_blocks,
            window=model.spec.cache_window,
        ),
        planned=int(len(steps.splits) > 1),  # the share that was asked for
        choose=split_choice(model.work, model.job.hardware, steps),
        loads_ahead=steps.schedule in RING_SCHEDULES and not steps.device.staging_slots,
    )
    placed = Streamed(memory, schedules, device, before_step)
    return ModelRunner(placed, device, [device.close, cache.close, weights.close])


def _prepare(model: RankModel, decoder: Decoder, max_tokens: int, device: Device) -> None:
    """Wait for what was copied, reserve memory for intermediates and compile kernels."""
    device.synchronize()

    def compile_kernels() -> None:
        if device.torch_device.type == "cuda":
            _compile(model, decoder, max_tokens, device.torch_device)

    device.prepare(model.workspace_bytes, compile_kernels)


def _is_pinned(weights: WeightPages) -> bool:
    reason = weights.pinning.wait()
    if reason is None:
        return True
    num_bytes = weights.host_memory.nbytes
    warnings.warn(
        f"cannot pin {format_bytes(num_bytes)} of weights ({reason}): they go through a pinned "
        "staging ring, which reads and writes host memory once more for every byte loaded and "
        "takes a core. Give the container more memory to avoid it, or a plan with less.",
        PerformanceWarning,
        stacklevel=2,
    )
    return False


def _pinned_cache(model: RankModel, device: Device) -> tuple[KvCache, bool]:
    """The KV cache in host memory, and whether it is page-locked."""
    policy = model.job.policy
    num_slots = 0 if model.placement.states_on_device else policy.num_state_slots
    cache = KvCache(model.kv_layouts, model.kv_blocks, model.job.new_arena, num_slots=num_slots)
    device.bind(cache.host_memory)
    reason = device.pin(cache.host_memory)
    if reason is not None:
        warnings.warn(
            f"cannot pin {format_bytes(cache.num_bytes)} of KV cache ({reason}): what the device "
            "reads of it is copied at a fraction of the link's rate. Raise the limit of locked "
            "memory, or use fewer KV blocks.",
            PerformanceWarning,
            stacklevel=2,
        )
    return cache, reason is None


def _load_memory(
    model: RankModel,
    steps: Placement,
    weights: WeightPages,
    cache: KvCache,
    *,
    device: Device,
    is_cache_pinned: bool,
) -> StreamedMemory:
    spec, dtype = model.spec, model.dtype
    kept = _load_kept(model, device)
    sizes = ActivationSizes(
        max_num_batched_tokens=steps.policy.max_num_batched_tokens,
        micro_batch_tokens=steps.micro_batch_tokens,
        ring=steps.ring,
        staged_micro_batches=STAGED_MICRO_BATCHES,
        staged_blocks=steps.staged_blocks,
        staged_slots=steps.staged_rows if model.work.stages_states else 0,
        has_sums=steps.has_sums,
        launch_tokens=steps.launch_tokens if steps.has_host_experts else 0,
        returned_sums=NUM_RETURNED_SUMS if steps.has_host_experts else 0,
    )
    return StreamedMemory(
        top_k=tuple(
            layer.ffn.top_k if isinstance(layer.ffn, MoeSpec) else 0 for layer in spec.layers
        ),
        expert_groups=tuple(layer.groups for layer in steps.layers),
        host_experts=_host_experts(model, weights) if steps.has_host_experts else (),
        torch_device=device.torch_device,
        decoders=(
            _decoder(model, weights, kept, first_slot=0, device=device),
            _decoder(model, weights, kept, first_slot=1, device=device),
        ),
        weights=weights,
        kv=cache.layers,
        layouts=model.kv_layouts,
        states=device_cache(
            model.kv_layouts,
            0,
            lambda size: device.allocate(size, "states"),
            num_slots=steps.policy.num_state_slots if steps.device.states_on_device else 0,
        ),
        device=DeviceActivations(
            spec, sizes, model.kv_layouts, dtype=dtype, allocate=device.allocate
        ),
        host=HostActivations(spec, sizes, dtype=dtype, allocate=device.allocate_pinned),
        inputs=StepInputs(device),
        staging=[
            device.allocate_pinned(steps.page_length) for _ in range(steps.device.staging_slots)
        ],
        is_cache_pinned=is_cache_pinned,
        poison=device.poison,
    )


def _host_experts(model: RankModel, weights: WeightPages) -> tuple[HostExperts | None, ...]:
    return tuple(_host_experts_of(model, weights, i) for i in range(model.spec.num_layers))


def _host_experts_of(model: RankModel, weights: WeightPages, i: int) -> HostExperts | None:
    """The experts of a layer on the host's copy; None if cores compute none of them."""
    spec, ffn, prefix = model.spec, model.spec.layers[i].ffn, layer_prefix(i)
    if not isinstance(ffn, MoeSpec):
        return None
    last = f"mlp.experts.{ffn.num_experts - 1}."
    if weights.host_weight(i, f"{last}up_proj.weight") is None:
        return None  # all are resident

    def view(name: str) -> Weight:
        name = name.removeprefix(prefix)
        found = weights.host_weight(i, name)
        if found is None and (match := re.fullmatch(r"mlp\.experts\.\d+\.(.*)", name)):
            # Resident experts are never computed here: any weight of their shape stands for theirs.
            found = weights.host_weight(i, last + match[1])
        return as_tensor(model.weights(prefix + name), model.dtype) if found is None else found

    loader = PagedLoader(view, model.weights, model.dtype, torch.device("cpu"))
    return HostExperts(spec, ffn, loader, prefix)


def load_resident(
    model: RankModel, device: Device, before_step: BeforeStep | None = None
) -> ModelRunner:
    """Put all weights, the KV cache and states on the device; otherwise as `load_streamed`."""
    weights = _load_pages(model, device)
    kept = _load_kept(model, device)
    kept[EMBEDDING] = _put(kept[EMBEDDING], model.dtype, device, "embedding")
    layouts, policy = model.kv_layouts, model.job.policy
    cache = device_cache(
        layouts,
        model.kv_blocks,
        lambda size: device.allocate(size, "KV cache"),
        num_slots=policy.num_state_slots,
    )
    decoder = _decoder(model, weights, kept, first_slot=0, device=device)
    _prepare(model, decoder, policy.max_num_batched_tokens, device)
    placed = InPlace(
        decoder, cache, layouts, build=build_resident, device=device, before_step=before_step
    )
    return ModelRunner(placed, device, [device.close, weights.close])


def _compile(model: RankModel, decoder: Decoder, max_tokens: int, device: torch.device) -> None:
    """Compile the kernels of all steps on a GPU, that of sampling too."""
    # Steps have buffers for hidden states and for sums in float32; here both are allocated.
    token_bytes = model.spec.hidden_size * (model.dtype.itemsize + torch.float32.itemsize)
    max_tokens = min(max_tokens, COMPILE_BYTES // token_bytes)

    def compute(layer: int, hidden_TH: Tensor, routing: Routing) -> None:
        decoder.local_ffn(layer, hidden_TH, routing)
        ffn = model.spec.layers[layer].ffn
        if model.placement.ring_slots and isinstance(ffn, MoeSpec):
            rows_TL = decoder.to_latent(layer, hidden_TH) if ffn.latent_size else hidden_TH
            group = ExpertGroup(range(ffn.num_experts), rows_TL.float())
            decoder.add_experts(layer, (hidden_TH, rows_TL), routing, group)

    compile_experts(model.spec, compute, max_tokens, dtype=model.dtype, device=device)
    compile_attention(decoder, model.kv_layouts, max_tokens, dtype=model.dtype, device=device)
    if model.spec.head == "lm":
        logits_RV = torch.zeros(1, model.spec.vocab_size, dtype=model.dtype, device=device)
        choose(logits_RV, torch.zeros(1, 4, dtype=torch.int64, device=device))


def _load_pages(model: RankModel, device: Device, *, is_pinned: bool = False) -> WeightPages:
    def make_arena(num_bytes: int) -> HostArena:
        with device.memory_near():  # a file in shared memory gets its pages at once
            arena = model.make_arena(num_bytes, device)
        device.bind(arena.memory)
        if is_pinned:  # but for tables, of which the device reads nothing
            pages = arena.memory[: arena.num_bytes - model.spec.table_bytes]
            arena.pinning = device.start_pinning(pages)
        return arena

    return WeightPages(
        model.spec,
        model.weights,
        model.placement.layers,
        dtype=model.dtype,
        allocate_on_device=lambda num_bytes: device.allocate(num_bytes, "weights"),
        ring_slots=model.placement.ring_slots,
        release=model.weights.drop_pages,
        make_arena=make_arena,
    )


def _load_kept(model: RankModel, device: Device) -> dict[str, Weight]:
    """What is in no layer: the embedding on the host, final norm and head on the device."""
    embedding = as_tensor(model.weights(EMBEDDING), model.dtype)
    outer = {name: model.weights(name) for name in model.spec.outer_weights() if name != EMBEDDING}
    if model.spec.tie_word_embeddings:
        outer[HEAD] = embedding
    kept = {name: _put(weight, model.dtype, device) for name, weight in outer.items()}
    return kept | {EMBEDDING: embedding}


def _put(source: Weight, dtype: torch.dtype, device: Device, purpose: str = "head") -> Weight:
    if isinstance(source, StoredMatrix):
        pieces = {
            name: _copied(tensor, tensor.dtype, device, purpose)
            for name, tensor in source.pieces.items()
        }
        return replace(source, pieces=pieces)
    return _copied(source, dtype, device, purpose)


def _copied(source: Tensor, dtype: torch.dtype, device: Device, purpose: str) -> Tensor:
    memory = device.allocate(source.numel() * dtype.itemsize, purpose)
    return memory.view(dtype).view(source.shape).copy_(source)


def _decoder(
    model: RankModel,
    weights: WeightPages,
    kept: Mapping[str, Weight],
    *,
    first_slot: int,
    device: Device,
) -> Decoder:
    views = dict(kept)
    for i in range(model.spec.num_layers):
        prefix = layer_prefix(i)
        for name in weights.names(i):
            views[prefix + name] = weights.device_weight(i, name, first_slot)
        if (table := weights.table(i)) is not None:
            views[prefix + NGRAM_TABLE] = table
    loader = PagedLoader(
        views.__getitem__, model.weights, model.dtype, device.torch_device, tiles=model.tiles
    )
    return Decoder(model.spec, loader, lambda _names: None, reduce=model.reduce)
