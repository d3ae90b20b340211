"""Kernels for experts are compiled when a model is loaded, not when a step first needs them."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, Weight, as_tensor
from raymoe.device.device import Device
from raymoe.engine.identity import Choice
from raymoe.errors import PerformanceWarning
from raymoe.kernels.cpu_elementwise import Routing
from raymoe.kernels.gpu_experts_layout import BUCKETS, TileTable
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.measure.tiles import balanced_routing
from raymoe.memory.activations import ActivationSizes, HostActivations, StepActivations
from raymoe.memory.arena import HostArena, SharedArena
from raymoe.memory.kv_cache import KvCache
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weight_pages import LayerPaging, WeightPages
from raymoe.memory.weights import Weights
from raymoe.model.decoder import Decoder
from raymoe.model.loading import PagedLoader, Reduce, keep
from raymoe.plan.device_step import StreamedSteps
from raymoe.plan.pages import PageCut, layer_pages
from raymoe.runtime.bindings import DeviceMemory
from raymoe.runtime.micro_batches import Division
from raymoe.runtime.runner import BeforeStep, DeviceStepRunner, ResidentStepRunner, Steps
from raymoe.specs.layer_weights import EMBEDDING, HEAD, expert_weights, layer_prefix
from raymoe.specs.model import DenseSpec, LayerSpec, ModelSpec, MoeSpec
from raymoe.specs.weight_format import WeightFormat
from raymoe.units import ceil_div, format_bytes

# `Decoder.local_ffn`: no rank waits for another. Layer, hidden states, and the experts of each
# token.
ComputeExperts = Callable[[int, Tensor, Routing], object]


@torch.inference_mode()
def compile_experts(
    spec: ModelSpec,
    compute: ComputeExperts,
    max_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compute experts of each kind once with as many tokens as each tile is for.

    What is in the weights does not matter; what comes of them is dropped.

    Args:
        compute: Computes the experts of a layer.
    """
    for i, moe in _kinds(spec):
        for num_tokens in _sizes(moe, max_tokens):
            hidden_TH = torch.zeros(num_tokens, spec.hidden_size, dtype=dtype, device=device)
            routing = balanced_routing(num_tokens, moe.num_experts, moe.top_k, device)
            compute(i, hidden_TH, Routing(*routing))


def _sizes(moe: MoeSpec, max_tokens: int) -> Iterator[int]:
    for bucket in BUCKETS:
        num_tokens = ceil_div(bucket * moe.num_experts, moe.top_k)
        if num_tokens <= max_tokens or bucket == BUCKETS[0]:
            yield min(num_tokens, max_tokens)


def _kinds(spec: ModelSpec) -> Iterator[tuple[int, MoeSpec]]:
    seen = set()
    for i, layer in enumerate(spec.layers):
        kind = (layer.ffn, _formats(spec, i, layer))
        if isinstance(layer.ffn, MoeSpec) and kind not in seen:
            seen.add(kind)
            yield i, layer.ffn


def _formats(spec: ModelSpec, i: int, layer: LayerSpec) -> tuple[WeightFormat | None, ...]:
    if not isinstance(layer.ffn, MoeSpec):
        return ()
    weights = expert_weights(layer.ffn, spec.hidden_size)
    return tuple(spec.format_of(layer_prefix(i) + name, shape) for name, shape in weights)


EVERYTHING = 1 << 62  # bytes: more than any model
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
    """

    spec: ModelSpec
    store: Weights
    dtype: torch.dtype
    kv_layout: CacheLayout
    steps: StreamedSteps
    tiles: TileTable | None = None
    workspace_bytes: int = 0
    reduce: Reduce = keep
    shared: SharedFile | None = None

    def make_arena(self, num_bytes: int, device: Device) -> HostArena:
        """Memory for the host's copy of the weights."""
        if self.shared is None:
            return HostArena(num_bytes)
        # A driver pins only what could be written.
        is_writable = device.torch_device.type == "cuda"
        note = Choice.of(self.steps).note()
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
    steps = model.steps
    with device.memory_near():
        weights = _load_pages(model, steps.cut, device)
    if not steps.device.staging_slots and not _is_pinned(weights.host_memory, device):
        steps = replace(steps, device=replace(steps.device, staging_slots=STAGING_SLOTS))
    memory = _load_memory(replace(model, steps=steps), weights, device)
    max_tokens = min(
        steps.micro_batches_per_group * steps.micro_batch_tokens,
        steps.policy.max_num_batched_tokens,
    )
    _compile_experts(model, memory.decoders[0], max_tokens, device)
    device.reserve(model.workspace_bytes)
    device.synchronize()
    division = Division(
        cpu_attention_fraction=steps.cpu_attention_fraction, staged_blocks=steps.staged_blocks
    )
    runner = DeviceStepRunner(
        memory,
        Steps(form=steps.form, build=steps.build, division=division),
        device,
        before_step=before_step,
    )

    def release() -> None:
        device.close()
        memory.cache.close()
        memory.weights.close()

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
    spec, dtype, steps = model.spec, model.dtype, model.steps
    kept = _load_kept(model, device)
    sizes = ActivationSizes(
        max_num_batched_tokens=steps.policy.max_num_batched_tokens,
        micro_batch_tokens=steps.micro_batch_tokens,
        ring=steps.ring,
        staged_blocks=steps.staged_blocks,
    )
    cache = KvCache(model.kv_layout, spec.num_layers, steps.policy.num_kv_blocks)
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
        decoders=(
            _decoder(model, weights, kept, first_slot=0, device=device),
            _decoder(model, weights, kept, first_slot=1, device=device),
        ),
        weights=weights,
        cache=cache,
        device=StepActivations(spec, sizes, model.kv_layout, dtype=dtype, allocate=device.allocate),
        host=HostActivations(spec, sizes, dtype=dtype, allocate=device.allocate_pinned),
        staging=[
            device.allocate_pinned(steps.cut.page_length) for _ in range(steps.device.staging_slots)
        ],
        load=device.load,
        load_blocks=device.load_blocks,
    )


def load_resident(
    model: LoadedModel, device: Device, before_step: BeforeStep | None = None
) -> tuple[ResidentStepRunner, Callable[[], None]]:
    """Put all weights and the KV cache on the device; otherwise as `load_on_device`."""
    cut = layer_pages(model.spec, model.dtype.itemsize, resident_bytes=EVERYTHING)
    weights = _load_pages(model, cut, device)
    kept = _load_kept(model, device)
    kept[EMBEDDING] = _put(kept[EMBEDDING], model.dtype, device, "embedding")
    layout, num_blocks = model.kv_layout, model.steps.policy.num_kv_blocks
    cache = [
        device.allocate(num_blocks * layout.block_bytes, "KV cache")
        .view(layout.dtype)
        .view(num_blocks, *layout.block_shape)
        for _ in range(model.spec.num_layers)
    ]
    decoder = _decoder(model, weights, kept, first_slot=0, device=device)
    _compile_experts(model, decoder, model.steps.policy.max_num_batched_tokens, device)
    device.reserve(model.workspace_bytes)
    device.synchronize()
    runner = ResidentStepRunner(decoder, cache, layout, device, before_step=before_step)

    def release() -> None:
        device.close()
        weights.close()

    return runner, release


def _compile_experts(model: LoadedModel, decoder: Decoder, max_tokens: int, device: Device) -> None:
    if device.torch_device.type != "cuda":
        return
    compile_experts(
        model.spec, decoder.local_ffn, max_tokens, dtype=model.dtype, device=device.torch_device
    )
    device.synchronize()
    torch.cuda.empty_cache()  # what the calling thread's stream holds, the lanes cannot use


def _load_pages(model: LoadedModel, cut: PageCut, device: Device) -> WeightPages:
    return WeightPages(
        model.spec,
        model.store,
        layer_paging(model.spec, cut),
        dtype=model.dtype,
        allocate_on_device=lambda num_bytes: device.allocate(num_bytes, "weights"),
        release=model.store.drop_pages,
        make_arena=lambda num_bytes: model.make_arena(num_bytes, device),
    )


def layer_paging(spec: ModelSpec, cut: PageCut) -> list[LayerPaging]:
    """What memory needs to know of a cut: pages and resident parts of each layer."""
    return [
        LayerPaging(page_bytes=page_bytes, resident_parts=_resident_parts(cut, i, layer))
        for i, (page_bytes, layer) in enumerate(zip(cut.page_bytes, spec.layers, strict=True))
    ]


def _resident_parts(cut: PageCut, i: int, layer: LayerSpec) -> frozenset[str]:
    is_dense = isinstance(layer.ffn, DenseSpec)
    parts = {"common" if is_dense else f"expert {n}" for n in range(cut.resident_experts[i])}
    if cut.is_common_resident[i]:
        parts |= {"attention"} if is_dense else {"attention", "common"}
    return frozenset(parts)


def _load_kept(model: LoadedModel, device: Device) -> dict[str, Weight]:
    """What is in no layer: the embedding on the host, final norm and head on the device."""
    embedding = as_tensor(model.store(EMBEDDING), model.dtype)
    outer = {name: model.store(name) for name in model.spec.outer_weights() if name != EMBEDDING}
    outer.setdefault(HEAD, embedding)
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
