"""The parts of an engine whose model streams to a device with memory of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine.pace import Pace
from raymoe.kernels.paged_kv import KvLayout
from raymoe.memory.activations import ActivationSizes, PassActivations, WaveActivations
from raymoe.memory.kv_cache import KvCache
from raymoe.memory.weight_pages import LayerPaging, WeightPages
from raymoe.memory.weights import WeightStore
from raymoe.model.decoder import Decoder
from raymoe.model.paged_loading import PagedLoader
from raymoe.plan.pages import PageCut, layer_pages
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.work import ModelWork
from raymoe.runtime.device_bindings import DeviceMemory
from raymoe.runtime.device_runner import DevicePassRunner, Passes
from raymoe.runtime.waves import Division
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.builders.shape import PassForm
from raymoe.schedule.graph import Schedule
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import DenseSpec, LayerSpec, ModelSpec, MoeSpec
from raymoe.specs.weight_names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from raymoe.units import ceil_div

DEFAULT_SCHEDULE = "cgopipe"

# Where decoding sequences attend, for schedules that do not divide them; see `Division`.
_CPU_FRACTIONS: Mapping[str, float] = MappingProxyType(
    {
        "cgopipe": 1.0,
        "vslpipe": 1.0,
        "flexgen_s3": 1.0,
        "fastdecode": 1.0,
        "flexgen_s4": 0.0,
        "layer_by_layer": 0.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What is loaded: the model, the types, the sizes."""

    spec: ModelSpec
    store: WeightStore
    dtype: torch.dtype
    kv_layout: KvLayout
    policy: Policy
    schedule: str


def cpu_attention_fraction(schedule: str, policy: DevicePolicy) -> float:
    """Share of the decoding sequences for which the CPU attends under a schedule."""
    return _CPU_FRACTIONS.get(schedule, policy.cpu_attention_fraction)


def load_on_device(
    model: LoadedModel, device: EmulatedDevice, hardware: HardwareSpec | None = None
) -> tuple[DevicePassRunner, Callable[[], None]]:
    """Fill host and device memory; returns the runner and what releases everything.

    Args:
        model: What to load.
        device: Where to.
        hardware: Whose pace the device takes on; its own cost model stays without it.

    Raises:
        CapacityError: The device's memory does not hold what the policy asks for.
        ConfigError: The schedule cannot run with this policy.
    """
    policy = model.policy.device or DevicePolicy()
    cut = layer_pages(
        model.spec,
        model.dtype.itemsize,
        page_bytes=policy.page_bytes,
        resident_bytes=policy.resident_bytes,
    )
    build = STREAMING_BUILDERS[model.schedule]
    form = PassForm(
        layers=cut.layers,
        num_waves=policy.num_waves,
        has_device_attention=True,
        staging_slots=policy.staging_slots,
    )
    memory = _load_memory(model, cut, _ring(build(form)), device)
    division = Division(
        cpu_attention_fraction=cpu_attention_fraction(model.schedule, policy),
        staged_blocks=len(memory.device.staged_kv[0]),
    )
    pace = None
    if hardware is not None:
        pace = Pace(device, ModelWork.of(model.spec, model.dtype.itemsize), hardware, cut)
    runner = DevicePassRunner(
        memory,
        Passes(form=form, build=build, division=division),
        device.lanes,
        poison=device.poison,
        before_pass=pace,
    )

    def release() -> None:
        device.close()
        memory.cache.close()
        memory.weights.close()

    return runner, release


def _ring(schedule: Schedule) -> int:
    """Waves whose attention is under way at once."""
    written = (buffer for task in schedule.tasks for buffer in task.writes)
    return 1 + max(buffer.key[0] for buffer in written if buffer.name == "qkv")


def _load_memory(model: LoadedModel, cut: PageCut, ring: int, device: Device) -> DeviceMemory:
    policy = model.policy.device or DevicePolicy()
    weights = _load_pages(model, cut, device)
    kept = _load_kept(model, device)
    sizes = ActivationSizes(
        pass_tokens=model.policy.pass_tokens,
        wave_tokens=_wave_tokens(model.policy, policy.num_waves),
        ring=ring,
        staged_blocks=model.policy.num_kv_blocks,
    )
    return DeviceMemory(
        top_k=tuple(
            layer.ffn.top_k if isinstance(layer.ffn, MoeSpec) else 0 for layer in model.spec.layers
        ),
        decoders=(_decoder(model, weights, kept, 0), _decoder(model, weights, kept, 1)),
        weights=weights,
        cache=KvCache(model.kv_layout, model.spec.num_layers, model.policy.num_kv_blocks),
        device=PassActivations(
            model.spec, sizes, model.kv_layout, dtype=model.dtype, allocate=device.allocate
        ),
        host_ring=[
            WaveActivations(model.spec, sizes.wave_tokens, model.dtype, _allocate_on_host)
            for _ in range(ring)
        ],
        staging=[_allocate_on_host(cut.page_length) for _ in range(policy.staging_slots)],
    )


def _load_pages(model: LoadedModel, cut: PageCut, device: Device) -> WeightPages:
    return WeightPages(
        model.spec,
        model.store,
        layer_paging(model.spec, cut),
        dtype=model.dtype,
        allocate_on_device=lambda num_bytes: device.allocate(num_bytes, "weights"),
        release=model.store.drop_pages,
    )


def layer_paging(spec: ModelSpec, cut: PageCut) -> list[LayerPaging]:
    """What memory needs to know of a cut: pages and resident parts of each layer."""
    return [
        LayerPaging(page_bytes=page_bytes, resident_parts=_resident_parts(cut, i, layer))
        for i, (page_bytes, layer) in enumerate(zip(cut.page_bytes, spec.layers, strict=True))
    ]


def _resident_parts(cut: PageCut, i: int, layer: LayerSpec) -> frozenset[str]:
    """The planner counts a dense network as an expert and the shared one with the attention."""
    is_dense = isinstance(layer.ffn, DenseSpec)
    parts = {"common" if is_dense else f"expert {n}" for n in range(cut.resident_experts[i])}
    if cut.is_common_resident[i]:
        parts |= {"attention"} if is_dense else {"attention", "common"}
    return frozenset(parts)


def _load_kept(model: LoadedModel, device: Device) -> dict[str, Tensor]:
    """What is in no layer: the embedding on the host, final norm and head on the device."""
    kept = {EMBEDDING: model.store(EMBEDDING).to(model.dtype)}
    head = EMBEDDING if model.spec.tie_word_embeddings else HEAD
    for name, stored in ((FINAL_NORM, FINAL_NORM), (HEAD, head)):
        source = model.store(stored)
        memory = device.allocate(source.numel() * model.dtype.itemsize, "head")
        kept[name] = memory.view(model.dtype).view(source.shape).copy_(source)
    return kept


def _decoder(
    model: LoadedModel, weights: WeightPages, kept: Mapping[str, Tensor], first_slot: int
) -> Decoder:
    """The model over the slots as they are when the first streamed layer is in `first_slot`."""
    views = dict(kept)
    for i in range(model.spec.num_layers):
        prefix = layer_prefix(i)
        for name in weights.names(i):
            views[prefix + name] = weights.device_weight(i, name, first_slot)
    return Decoder(model.spec, PagedLoader(views.__getitem__, model.dtype), lambda _names: None)


def _wave_tokens(policy: Policy, num_waves: int) -> int:
    """No wave is larger: dealing to the smallest exceeds the mean by one chunk at most."""
    return min(
        policy.pass_tokens, ceil_div(policy.pass_tokens, num_waves) + policy.prefill_chunk_tokens
    )


def _allocate_on_host(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)
