"""Loading a runner: weights to host or device memory, and what executes steps on them."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, as_tensor
from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import open_cuda
from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice
from raymoe.device.lane import call_all, released_on_error
from raymoe.engine.core import Runner
from raymoe.engine.identity import Choice
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import PerformanceWarning
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_experts import ExpertGroup
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.elementwise import Routing
from raymoe.kernels.gpu_experts_layout import TileTable
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.measure.kept import Gpu, load_tiles
from raymoe.memory.activations import ActivationSizes, HostActivations, StepActivations
from raymoe.memory.arena import HostArena, SharedArena
from raymoe.memory.kv_cache import KvCache, blocks_of_tokens, device_cache
from raymoe.memory.prefixes import PrefixSalt, no_salt
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weight_pages import LayerPaging, WeightPages
from raymoe.memory.weights import DummyWeights, ShardedWeights, Weights, WeightStore
from raymoe.model.compilation import compile_attention, compile_experts
from raymoe.model.decoder import Decoder, cache_layouts
from raymoe.model.feed_forward import HostExperts
from raymoe.model.loading import PagedLoader, Reduce, decoder_arena_bytes, keep
from raymoe.plan.cost import StepCost
from raymoe.plan.footprint import device_footprint, workspace_bytes
from raymoe.plan.placement import Placement
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.step import StepModel
from raymoe.plan.work import AttentionShape, MicroBatchShape, ModelWork, StepLoad
from raymoe.runtime.bindings import DeviceMemory
from raymoe.runtime.micro_batches import CutStep, Division, MicroBatch
from raymoe.runtime.runner import (
    BeforeStep,
    DeviceStepRunner,
    ResidentStepRunner,
    StepRunner,
    Steps,
)
from raymoe.schedule.builders import RING_SCHEDULES, build_in_place
from raymoe.schedule.graph import Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import NUM_RETURNED_SUMS
from raymoe.schedule.timeline import Instant
from raymoe.specs.config import HeadKind
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.layer_weights import EMBEDDING, HEAD, layer_prefix
from raymoe.specs.model import DenseSpec, LayerSpec, ModelSpec, MoeSpec
from raymoe.specs.tensor_shards import shard_model
from raymoe.units import MIB, format_bytes

NewArena = Callable[[int], HostArena]
# Of `DEVICE_RUNTIME_BYTES`, which a plan counts: what compiling kernels takes besides a workspace.
COMPILE_BYTES = 256 * MIB
STAGING_SLOTS = 4  # pages of the ring where weights cannot be pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What is loaded.

    Attributes:
        tiles: Measured tiles of the GPU's kernels.
        workspace_bytes: Device memory that operations allocate while they run, at most.
        reduce: Adds up what ranks add to hidden states, where `spec` is the part of one.
        shared: Where the host's copy of the weights goes that other engines use too; None for one
            of its own.
        new_arena: Makes the host memory of weights and KV cache.
        hardware: What the rank has of the node.
    """

    spec: ModelSpec
    store: Weights
    dtype: torch.dtype
    kv_layouts: tuple[CacheLayout, ...]
    placement: Placement
    tiles: TileTable | None = None
    workspace_bytes: int = 0
    reduce: Reduce = keep
    shared: SharedFile | None = None
    new_arena: NewArena = HostArena
    hardware: HardwareSpec | None = None

    @property
    def work(self) -> ModelWork:
        kv_bytes = self.kv_layouts[0].dtype.itemsize
        return ModelWork.of(self.spec, self.dtype.itemsize, kv_element_bytes=kv_bytes)

    def make_arena(self, num_bytes: int, device: Device) -> HostArena:
        """Memory for the host's copy of the weights."""
        if self.shared is None:
            return self.new_arena(num_bytes)
        # A driver pins only what could be written.
        is_writable = device.torch_device.type == "cuda"
        note = Choice.of(self.placement).note()
        return SharedArena(num_bytes, self.shared, note, is_writable=is_writable)


def load_on_device(
    model: LoadedModel, device: Device, before_step: BeforeStep | None = None
) -> tuple[DeviceStepRunner, Callable[[], None]]:
    """Fill host and device memory; returns the runner and what releases everything.

    Args:
        before_step: Called with each step and its schedule before it runs.

    Raises:
        CapacityError: The device's memory does not hold what the policy asks for.
        ConfigError: The schedule cannot run with this policy.
    """
    steps = model.placement
    with device.memory_near():
        weights = _load_pages(model, device)
    if not steps.device.staging_slots and not _is_pinned(weights.host_memory, device):
        staged = replace(steps.device, staging_slots=STAGING_SLOTS)
        steps = replace(steps, policy=replace(steps.policy, device=staged))
    memory = _load_memory(replace(model, placement=steps), weights, device)
    device.synchronize()
    device.prepare(
        model.workspace_bytes,
        partial(_compile, model, memory.decoders[0], steps.launch_tokens, device.torch_device),
    )
    division = Division(
        cpu_attention_fraction=steps.cpu_attention_fraction, staged_blocks=steps.staged_blocks
    )
    runner = DeviceStepRunner(
        memory,
        Steps(
            forms=tuple(split.form for split in steps.splits),
            build=steps.build,
            division=division,
            choose=SplitChoice.of(model, steps),
            loads_ahead=steps.schedule in RING_SCHEDULES and not steps.device.staging_slots,
        ),
        device,
        before_step=before_step,
    )

    def release() -> None:
        call_all([device.close, memory.cache.close, memory.weights.close])

    return runner, release


def _is_pinned(memory: Tensor, device: Device) -> bool:
    reason = device.pin(memory)
    if reason is None:
        return True
    warnings.warn(
        f"cannot pin {format_bytes(memory.nbytes)} of weights ({reason}): they go through a pinned "
        "staging ring, which reads and writes host memory once more for every byte loaded and "
        "takes a core. Raise the limit of locked memory (ulimit -l, or the container's memory) "
        "to avoid it.",
        PerformanceWarning,
        stacklevel=2,
    )
    return False


def _load_memory(model: LoadedModel, weights: WeightPages, device: Device) -> DeviceMemory:
    spec, dtype, steps = model.spec, model.dtype, model.placement
    kept = _load_kept(model, device)
    sizes = ActivationSizes(
        max_num_batched_tokens=steps.policy.max_num_batched_tokens,
        micro_batch_tokens=steps.micro_batch_tokens,
        ring=steps.ring,
        staged_blocks=steps.staged_blocks,
        has_sums=steps.has_sums,
        launch_tokens=steps.launch_tokens if steps.has_host_experts else 0,
        returned_sums=NUM_RETURNED_SUMS if steps.has_host_experts else 0,
    )
    policy, is_on_device = steps.policy, steps.device.states_on_device
    num_slots = 0 if is_on_device else policy.num_state_slots
    cache = KvCache(model.kv_layouts, policy.num_kv_blocks, model.new_arena, num_slots=num_slots)
    reason = device.pin(cache.host_memory)
    if reason is not None:
        warnings.warn(
            f"cannot pin {format_bytes(cache.num_bytes)} of KV cache ({reason}): what the device "
            "reads of it is copied at a fraction of the link's rate. Raise the limit of locked "
            "memory, or use fewer KV blocks.",
            PerformanceWarning,
            stacklevel=2,
        )
    return DeviceMemory(
        top_k=tuple(
            layer.ffn.top_k if isinstance(layer.ffn, MoeSpec) else 0 for layer in spec.layers
        ),
        expert_groups=tuple(layer.groups for layer in steps.layers),
        host_experts=_host_experts(model, weights) if steps.has_host_experts else (),
        decoders=(
            _decoder(model, weights, kept, first_slot=0, device=device),
            _decoder(model, weights, kept, first_slot=1, device=device),
        ),
        weights=weights,
        cache=cache,
        states=device_cache(
            model.kv_layouts,
            0,
            lambda size: device.allocate(size, "states"),
            num_slots=policy.num_state_slots if is_on_device else 0,
        ),
        device=StepActivations(
            spec, sizes, model.kv_layouts, dtype=dtype, allocate=device.allocate
        ),
        host=HostActivations(spec, sizes, dtype=dtype, allocate=device.allocate_pinned),
        staging=[
            device.allocate_pinned(steps.page_length) for _ in range(steps.device.staging_slots)
        ],
        is_cache_pinned=reason is None,
    )


def _host_experts(model: LoadedModel, weights: WeightPages) -> tuple[HostExperts | None, ...]:
    return tuple(_host_experts_of(model, weights, i) for i in range(model.spec.num_layers))


def _host_experts_of(model: LoadedModel, weights: WeightPages, i: int) -> HostExperts | None:
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
        return as_tensor(model.store(prefix + name), model.dtype) if found is None else found

    loader = PagedLoader(view, model.store, model.dtype, torch.device("cpu"))
    return HostExperts(spec, ffn, loader, prefix)


class SplitChoice:
    """Chooses how much of the experts the cores compute in a step, by its predicted time.

    Steps of about the same size get the same answer.
    """

    def __init__(self, steps: StepModel) -> None:
        self._steps = steps
        self._found: dict[StepLoad, int] = {}

    @classmethod
    def of(cls, model: LoadedModel, steps: Placement) -> Callable[[CutStep], int]:
        if len(steps.splits) == 1 or model.hardware is None or not model.hardware.has_gpu:
            planned = len(steps.splits) > 1  # nothing to choose by: the share that was asked for
            return lambda _cut: int(planned)
        return cls(StepModel(model.work, model.hardware, steps))

    def __call__(self, cut: CutStep) -> int:
        shapes = [micro_batch_shape(micro_batch) for micro_batch in cut.micro_batches]
        total = sum(shapes[1:], start=shapes[0])
        shares = (total.host, total.device)
        decode_rows = sum(share.decode_rows for share in shares)
        prompts = total.logit_rows - decode_rows
        prompt_tokens = total.tokens - decode_rows
        load = StepLoad(
            decode_rows=_rounded(decode_rows),
            decode_context=_rounded(sum(share.pairs for share in shares) / max(1, decode_rows)),
            prompt_tokens=_rounded(prompt_tokens),
            prompt_chunk=_rounded(prompt_tokens / max(1, prompts)) or 1.0,
        )
        if load not in self._found:
            splits = self._steps.splits
            self._found[load] = splits.index(self._steps.split(load))
        return self._found[load]


SIZE_BITS = 3  # leading bits of a step's sizes that tell steps apart


def _rounded(value: float) -> float:
    shift = max(0, int(value).bit_length() - SIZE_BITS)
    return float(int(value) >> shift << shift)


def load_resident(
    model: LoadedModel, device: Device, before_step: BeforeStep | None = None
) -> tuple[ResidentStepRunner, Callable[[], None]]:
    """Put all weights, the KV cache and states on the device; otherwise as `load_on_device`."""
    weights = _load_pages(model, device)
    kept = _load_kept(model, device)
    kept[EMBEDDING] = _put(kept[EMBEDDING], model.dtype, device, "embedding")
    layouts, policy = model.kv_layouts, model.placement.policy
    cache = device_cache(
        layouts,
        policy.num_kv_blocks,
        lambda size: device.allocate(size, "KV cache"),
        num_slots=policy.num_state_slots,
    )
    decoder = _decoder(model, weights, kept, first_slot=0, device=device)
    device.synchronize()
    max_tokens = model.placement.policy.max_num_batched_tokens
    device.prepare(
        model.workspace_bytes, partial(_compile, model, decoder, max_tokens, device.torch_device)
    )
    runner = ResidentStepRunner(decoder, cache, layouts, device, before_step=before_step)

    def release() -> None:
        call_all([device.close, weights.close])

    return runner, release


def _compile(model: LoadedModel, decoder: Decoder, max_tokens: int, device: torch.device) -> None:
    """Compile the kernels of all steps on a GPU."""
    if device.type != "cuda":
        return
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


def _load_pages(model: LoadedModel, device: Device) -> WeightPages:
    return WeightPages(
        model.spec,
        model.store,
        layer_paging(model.spec, model.placement.layers),
        dtype=model.dtype,
        allocate_on_device=lambda num_bytes: device.allocate(num_bytes, "weights"),
        ring_slots=model.placement.ring_slots,
        release=model.store.drop_pages,
        make_arena=lambda num_bytes: model.make_arena(num_bytes, device),
    )


def layer_paging(spec: ModelSpec, layers: Sequence[LayerPlacement]) -> list[LayerPaging]:
    """What memory needs to know of a placement: pages and resident parts of each layer."""
    return [
        LayerPaging(
            page_bytes=placed.page_bytes,
            resident_parts=_resident_parts(placed, layer),
            group_pages=placed.group_pages,
        )
        for placed, layer in zip(layers, spec.layers, strict=True)
    ]


def _resident_parts(placed: LayerPlacement, layer: LayerSpec) -> frozenset[str]:
    is_dense = isinstance(layer.ffn, DenseSpec)
    parts = {"common" if is_dense else f"expert {n}" for n in range(placed.resident_experts)}
    if placed.is_common_resident:
        parts |= {"attention"} if is_dense else {"attention", "common"}
    return frozenset(parts)


def _load_kept(model: LoadedModel, device: Device) -> dict[str, Weight]:
    """What is in no layer: the embedding on the host, final norm and head on the device."""
    embedding = as_tensor(model.store(EMBEDDING), model.dtype)
    outer = {name: model.store(name) for name in model.spec.outer_weights() if name != EMBEDDING}
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
    model: LoadedModel,
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
    loader = PagedLoader(
        views.__getitem__, model.store, model.dtype, device.torch_device, tiles=model.tiles
    )
    return Decoder(model.spec, loader, lambda _names: None, reduce=model.reduce)


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
        has_states: Whether layers keep states, which sequences share as copies.
        prefix_salt: Differs between lengths of prompts that do not share KV although they begin
            the same: rotary embeddings may depend on the length.
        restart_length: Length beyond which a row computes all its KV again.
        release: Called once when the engine has ended: gives memory back.
        interrupt: Called when a step is stuck: ends what it may be waiting for, so that it fails.
    """

    runner: Runner
    policy: Policy
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    head: HeadKind = "lm"
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    num_threads: int
    num_torch_threads: int | None = None
    plan: Plan | None = None
    prefix_salt: PrefixSalt = no_salt
    has_states: bool = False
    restart_length: int | None = None
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


def configured_model(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model with the head and the type of states that the configuration asks for."""
    spec = spec.with_state_dtype(config.state_dtype)
    return spec.with_head("none") if config.head == "none" else spec


def open_weights(spec: ModelSpec, directory: Path, config: EngineConfig) -> Weights:
    """The weights of a whole model: those of its checkpoint, or random ones.

    Raises:
        CheckpointError: As for `WeightStore.open`.
    """
    if config.load_format != "dummy":
        return WeightStore.open(spec, directory)
    dtype = DTYPES[config.dtype if config.dtype != "auto" else spec.dtype or "bfloat16"]
    # On the CPU, torch reads what is not packed where it is: views would stay in its caches.
    is_copied = config.device in {"cuda", "emulated"} or packed_linear_is_used(dtype)
    return DummyWeights(spec, dtype, are_views=is_copied)


class EmulatedTiming:
    """Sets the cost model of a device before each step."""

    def __init__(
        self,
        device: EmulatedDevice,
        work: ModelWork,
        hardware: HardwareSpec,
        cuts: tuple[tuple[LayerPlacement, ...], ...],
    ) -> None:
        """Price steps of a model.

        Args:
            work: The model whose costs are taken.
            hardware: On which it would run.
            cuts: Its pages by form of a step; empty if nothing streams.
        """
        self._device, self._work, self._hardware = device, work, hardware
        self._cuts = cuts

    def __call__(self, cut: CutStep, schedule: Schedule, form: int) -> None:
        """Take the costs of this step from here on."""
        self._device.cost = StepCost.of_schedule(
            schedule,
            self._work,
            self._hardware,
            micro_batches=tuple(
                micro_batch_shape(micro_batch) for micro_batch in cut.micro_batches
            ),
            layers=self._cuts[form] if self._cuts else (),
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
    """What runs steps.

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
        kv_layouts=cache_layouts(share.spec, job.kv_dtype, job.dtype),
        placement=Placement.of(share.spec, job.schedule, job.policy, job.dtype.itemsize),
        reduce=reduce,
        shared=shared,
        new_arena=job.new_arena,
        hardware=job.hardware,
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
        cuts = (
            () if _is_resident(model) else tuple(split.layers for split in model.placement.splits)
        )
        emulated_timing = EmulatedTiming(device, model.work, job.hardware, cuts)
    return _load_or_close(model, device, emulated_timing)


def _workspace_bytes(model: LoadedModel) -> int:
    return workspace_bytes(device_footprint(model.spec, model.work, model.placement))


def _kept_tiles(settings: Settings) -> TileTable | None:
    if not torch.cuda.is_available():
        return None
    return load_tiles(settings.cache_directory, Gpu.current())


def _is_resident(model: LoadedModel) -> bool:
    return model.placement.is_resident


def _load_or_close(model: LoadedModel, device: Device, before_step: BeforeStep | None) -> Loaded:
    load = load_resident if _is_resident(model) else load_on_device
    with released_on_error(device.close):
        return Loaded(*load(model, device, before_step))


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
    layouts = cache_layouts(spec, job.kv_dtype, job.dtype)
    cache = KvCache(layouts, policy.num_kv_blocks, num_slots=policy.num_state_slots)
    if workload is not None:
        rows = min(workload.num_rows, policy.max_num_seqs)
        used_blocks = min(policy.num_kv_blocks, rows * blocks_of_tokens(workload.context_tokens))
        cache.touch(used_blocks, job.hardware.num_cores)

    def release() -> None:
        cache.close()
        arena.close()

    return Loaded(StepRunner(decoder, cache, build_in_place(spec.num_layers)), release)
