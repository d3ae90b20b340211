"""From a model directory to the parts of an engine; nothing large is taken before the plan fits."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymoe.config import EngineConfig, SamplingParams, Settings
from raymoe.device.cuda import open_cuda
from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice
from raymoe.device.host import read_host
from raymoe.device.probe import probe_host
from raymoe.engine.core import EngineCore, Runner
from raymoe.engine.device_loading import DEFAULT_SCHEDULE, LoadedModel, load_on_device
from raymoe.engine.pace import Pace
from raymoe.engine.parts import EngineParts
from raymoe.engine.request import Request
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import ConfigError, UnknownOptionError, UnsupportedModelError
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.paged_kv import KvLayout
from raymoe.kernels.threads import set_num_threads
from raymoe.measure.machine import identify_machine, load_profile
from raymoe.memory.arena import HostArena
from raymoe.memory.kv_cache import KvCache
from raymoe.memory.source import resolve_model
from raymoe.memory.weights import WeightStore
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
from raymoe.model.support import check_supported
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.plan.streaming import StreamedPasses
from raymoe.plan.work import ModelWork
from raymoe.runtime.device_runner import BeforePass
from raymoe.runtime.runner import PassRunner
from raymoe.schedule.builders import BUILDERS, STREAMING_BUILDERS
from raymoe.schedule.builders.in_place import build_in_place
from raymoe.schedule.simulate import Instant
from raymoe.specs.files import read_json_object
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_hardware import hardware_preset, is_hardware_file
from raymoe.units import GIB

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Release = Callable[[], None]

MEMORY_FRACTION = 0.85  # of what is available: Ray ends processes of a node that is 95 % full
EMULATED_MEMORY_BYTES = 16 * GIB  # a T4
PROBE_S = 0.3  # enough to tell the machine's kind; `raymoe profile` takes a minute


def load_parts(path: str | Path, config: EngineConfig) -> EngineParts:
    """Resolve, check, plan, then load. See `Engine.from_pretrained` for the errors."""
    device = _device_name(config)
    schedule = _schedule_name(config, device)
    settings = Settings.from_environment()
    directory = resolve_model(path)
    spec = ModelSpec.from_directory(directory)
    check_supported(spec)
    store = WeightStore.open(spec, directory)
    dtype = store.dtype if config.dtype == "auto" else DTYPES[config.dtype]
    kv_dtype = _kv_dtype(config, dtype)
    hardware = _hardware(config, settings)
    context = min(spec.max_context_tokens, config.max_context_tokens or spec.max_context_tokens)
    arena_bytes = decoder_arena_bytes(spec, dtype, store.stored_dtype)
    plan = find_plan(
        spec,
        hardware,
        policy=config.policy,
        bytes_per_element=dtype.itemsize,
        kv_bytes_per_element=kv_dtype.itemsize,
        weight_bytes=_weight_bytes(spec, dtype, arena_bytes),
        max_context_tokens=context,
    )
    logger.info("plan: %s", plan.describe())
    tokenizer = Tokenizer(directory, spec.vocab_size)
    # Where the weights are packed, torch is left with operations too small to share: its second
    # thread would only spin beside the workers of the native kernels and take their cores.
    num_torch_threads = 1 if packed_linear_is_used(dtype) else hardware.num_cores
    set_num_threads(hardware.num_cores, num_torch_threads)
    model = LoadedModel(
        spec=spec,
        store=store,
        dtype=dtype,
        kv_layout=_kv_layout(spec, kv_dtype),
        passes=StreamedPasses.of(spec, schedule, plan.policy, dtype.itemsize),
    )
    if device == "cpu":
        runner, release = _load_in_place(model, arena_bytes)
    elif device == "cuda":
        runner, release = _load_cuda(model, config)
    else:
        runner, release = _load_emulated(model, config)
    warm_up(runner, spec.vocab_size)
    return EngineParts(
        runner=runner,
        policy=plan.policy,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        max_context_tokens=context,
        eos_token_ids=_eos_token_ids(spec, directory),
        num_threads=hardware.num_cores,
        num_torch_threads=num_torch_threads,
        plan=plan,
        release=release,
    )


def _device_name(config: EngineConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _schedule_name(config: EngineConfig, device: str) -> str:
    """The schedule that is asked for, or the device's usual one."""
    if config.schedule not in ("auto", *BUILDERS):
        raise UnknownOptionError(config.schedule, BUILDERS, "schedule")
    is_streamed = device != "cpu"
    default = DEFAULT_SCHEDULE if is_streamed else "in_place"
    name = default if config.schedule == "auto" else config.schedule
    if (name in STREAMING_BUILDERS) != is_streamed:
        fitting = sorted(STREAMING_BUILDERS) if is_streamed else ["in_place"]
        raise ConfigError(f"schedule is {name!r}; the device {device!r} runs {', '.join(fitting)}")
    if config.policy is not None and config.policy.device is not None and not is_streamed:
        raise ConfigError(
            f"policy.device is given, but the device {device!r} has no memory of its own; leave "
            "it out, or choose the device 'cuda' or 'emulated'"
        )
    return name


def _load_emulated(model: LoadedModel, config: EngineConfig) -> tuple[Runner, Release]:
    hardware = None if config.hardware is None else _emulated_hardware(config.hardware)
    memory_bytes = EMULATED_MEMORY_BYTES if hardware is None else hardware.gpu_memory_bytes
    device = EmulatedDevice(config.device_memory_bytes or memory_bytes, Instant())
    pace = None
    if hardware is not None:
        work = ModelWork.of(model.spec, model.dtype.itemsize)
        pace = Pace(device, work, hardware, model.passes.cut.page_bytes)
    return _load_or_close(model, device, pace)


def _load_cuda(model: LoadedModel, config: EngineConfig) -> tuple[Runner, Release]:
    return _load_or_close(model, open_cuda(memory_bytes=config.device_memory_bytes), None)


def _load_or_close(
    model: LoadedModel, device: Device, before_pass: BeforePass | None
) -> tuple[Runner, Release]:
    try:
        return load_on_device(model, device, before_pass)
    except BaseException:
        device.close()
        raise


def _load_in_place(model: LoadedModel, arena_bytes: int) -> tuple[Runner, Release]:
    spec, arena, store = model.spec, HostArena(arena_bytes), model.store
    decoder = Decoder.load(spec, store, arena.allocate, model.dtype, release=store.drop_pages)
    cache = KvCache(model.kv_layout, spec.num_layers, model.passes.policy.num_kv_blocks)

    def release() -> None:
        cache.close()
        arena.close()

    return PassRunner(decoder, cache, build_in_place(spec.num_layers)), release


def _weight_bytes(spec: ModelSpec, dtype: torch.dtype, arena_bytes: int) -> int:
    """Weights in memory: packed copies and the embedding, or the mapped files and their copies."""
    if packed_linear_is_used(dtype):
        return arena_bytes + spec.vocab_size * spec.hidden_size * dtype.itemsize
    return spec.weight_bytes(dtype.itemsize) + arena_bytes


def warm_up(runner: Runner, vocab_size: int) -> None:
    """Compile the loops and touch every weight, so that the first rows need not wait for it."""
    core = EngineCore(
        runner,
        Policy(batch_size=1, pass_tokens=4, prefill_chunk_tokens=4, num_kv_blocks=1),
        max_context_tokens=4,
        vocab_size=vocab_size,
        eos_token_ids=(),
        decode=lambda _token_ids: "",
        finish=lambda _request, _generation: None,
    )
    core.add(
        Request(
            prompt=np.zeros(2, np.int32),
            params=SamplingParams(max_tokens=2, repetition_penalty=1.1),
            limit_tokens=4,
            seed=0,
            row_key=0,
            future=Future(),
        )
    )
    while core.has_work:
        core.step()


def _hardware(config: EngineConfig, settings: Settings) -> HardwareSpec:
    """The node to plan for: given, from a file, or this machine with the memory that it has now."""
    chosen = config.hardware
    if config.device != "emulated":
        if isinstance(chosen, HardwareSpec):
            return chosen
        if chosen is not None and is_hardware_file(chosen):
            return HardwareSpec.from_file(chosen)
        if chosen not in (None, "auto"):
            raise ConfigError(
                f"hardware is {chosen!r}; a preset sets the pace of the device 'emulated', the "
                f"device {config.device!r} runs on this machine: leave it out, or name a file"
            )
    num_threads = config.num_threads or settings.num_threads
    kept = load_profile(settings.cache_directory, identify_machine(num_threads))
    measured = kept or probe_host(num_threads=num_threads, seconds=PROBE_S)
    budget = config.host_memory_bytes or settings.host_memory_bytes
    return dataclasses.replace(
        measured,
        host_memory_bytes=budget or int(read_host().available_memory_bytes * MEMORY_FRACTION),
    )


def _emulated_hardware(hardware: str | HardwareSpec) -> HardwareSpec:
    """The node whose pace the emulated device takes on; the host stays the machine at hand."""
    spec = hardware_preset(hardware) if isinstance(hardware, str) else hardware
    if not spec.has_gpu:
        raise ConfigError(f"hardware is {spec.name!r}, which has no GPU to emulate")
    return spec


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    kv_dtype = dtype if config.kv_dtype == "auto" else DTYPES[config.kv_dtype]
    if dtype not in (kv_dtype, torch.float32):
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype!r} and the model computes in {dtype}; the attention "
            "kernels take a cache of the same type, or any type when the model is float32"
        )
    return kv_dtype


def _kv_layout(spec: ModelSpec, dtype: torch.dtype) -> KvLayout:
    attentions = [layer.grouped_attention for layer in spec.layers]
    shapes = {(attention.num_kv_heads, attention.head_dim) for attention in attentions}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"{spec.name}: layers with different KV heads or head_dim ({sorted(shapes)})"
        )
    num_kv_heads, head_dim = shapes.pop()
    return KvLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


def _eos_token_ids(spec: ModelSpec, directory: Path) -> tuple[int, ...]:
    """EOS tokens: those of generation_config.json, else of config.json, as transformers does."""
    if not (directory / "generation_config.json").exists():
        return spec.eos_token_ids
    found = _as_ids(read_json_object(directory, "generation_config.json"), directory)
    return spec.eos_token_ids if found is None else found


def _as_ids(generation: Mapping[str, Any], directory: Path) -> tuple[int, ...] | None:
    value = generation.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(
            f"{directory / 'generation_config.json'}: eos_token_id is {value!r}; "
            "it takes a token id or a list of them"
        )
    return tuple(ids)
