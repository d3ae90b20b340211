"""From a model directory to the parts of an engine; nothing large is taken before the plan fits."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymoe.config import EngineConfig, SamplingParams, Settings
from raymoe.device.cuda import open_cuda
from raymoe.device.device import Device
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine.core import EngineCore, Runner
from raymoe.engine.device_loading import LoadedModel, load_on_device, load_resident
from raymoe.engine.node import find_node
from raymoe.engine.pace import Pace
from raymoe.engine.parts import EngineParts
from raymoe.engine.request import Request
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.device_experts_tiles import TileTable
from raymoe.kernels.threads import set_num_threads
from raymoe.measure.expert_tiles import Gpu, load_tiles
from raymoe.memory.arena import HostArena
from raymoe.memory.dummy_weights import DummyWeights
from raymoe.memory.kv_cache import KvCache, blocks_of_tokens
from raymoe.memory.source import resolve_model
from raymoe.memory.weights import WeightStore
from raymoe.model.cache import cache_layout
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
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
from raymoe.specs.workload import Workload

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Release = Callable[[], None]


def load_parts(path: str | Path, config: EngineConfig) -> EngineParts:
    """Resolve, check, plan, then load. See `Engine.from_pretrained` for the errors."""
    device = _device_name(config)
    schedule = _schedule_name(config, device)
    settings = Settings.from_environment()
    directory = resolve_model(path)
    spec = ModelSpec.from_directory(directory)
    store = _open_weights(spec, directory, config)
    dtype = store.dtype if config.dtype == "auto" else DTYPES[config.dtype]
    kv_dtype = _kv_dtype(config, dtype)
    hardware = find_node(config, settings, device)
    context = min(spec.max_context_tokens, config.max_context_tokens or spec.max_context_tokens)
    # Dummy weights have the type to compute in; they would be made to be looked at.
    arena_bytes = decoder_arena_bytes(spec, dtype, None if _is_dummy(config) else store)
    plan = find_plan(
        spec,
        hardware,
        config.workload,
        schedule=schedule,
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
        kv_layout=cache_layout(spec, kv_dtype),
        passes=StreamedPasses.of(spec, plan.schedule, plan.policy, dtype.itemsize),
    )
    if device == "cpu":
        runner, release = _load_in_place(model, arena_bytes, config.workload, hardware.num_cores)
    elif device == "cuda":
        model = replace(model, tiles=_kept_tiles(settings))
        opened = open_cuda(memory_bytes=config.device_memory_bytes)
        runner, release = _load_or_close(model, opened, None)
    else:
        is_paced = config.hardware not in {None, "auto"}
        runner, release = _load_emulated(model, hardware, is_paced=is_paced)
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
        shares_across_lengths=not spec.rope.depends_on_length,
        release=release,
    )


def _is_dummy(config: EngineConfig) -> bool:
    return config.load_format == "dummy"


def _open_weights(
    spec: ModelSpec, directory: Path, config: EngineConfig
) -> WeightStore | DummyWeights:
    if not _is_dummy(config):
        return WeightStore.open(spec, directory)
    name = config.dtype if config.dtype != "auto" else spec.dtype or "bfloat16"
    return DummyWeights(spec, DTYPES[name])


def _device_name(config: EngineConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _schedule_name(config: EngineConfig, device: str) -> str:
    """The schedule that is asked for, once it suits the device; "auto" lets the planner choose."""
    name, known = config.schedule, ("auto", *BUILDERS)
    if name not in known:
        raise UnknownOptionError(name, known, "schedule")
    has_device = device != "cpu"
    fitting = ["resident", *sorted(STREAMING_BUILDERS)] if has_device else ["in_place"]
    if name not in ("auto", *fitting):
        raise ConfigError(f"schedule is {name!r}; the device {device!r} runs {', '.join(fitting)}")
    if config.policy is not None and config.policy.device is not None and not has_device:
        raise ConfigError(
            f"policy.device is given, but the device {device!r} has no memory of its own; leave "
            "it out, or choose the device 'cuda' or 'emulated'"
        )
    return name


def _load_emulated(
    model: LoadedModel, hardware: HardwareSpec, *, is_paced: bool
) -> tuple[Runner, Release]:
    device = EmulatedDevice(hardware.gpu_memory_bytes, Instant())
    pace = None
    if is_paced:
        work = ModelWork.of(
            model.spec, model.dtype.itemsize, kv_element_bytes=model.kv_layout.dtype.itemsize
        )
        pages = () if _is_resident(model) else model.passes.cut.page_bytes
        pace = Pace(device, work, hardware, pages)
    return _load_or_close(model, device, pace)


def _kept_tiles(settings: Settings) -> TileTable | None:
    """Tiles that were measured on the GPU; None where a stand-in for one computes."""
    if not torch.cuda.is_available():
        return None
    return load_tiles(settings.cache_directory, Gpu.current())


def _is_resident(model: LoadedModel) -> bool:
    """Whether nothing streams."""
    return model.passes.schedule == "resident"


def _load_or_close(
    model: LoadedModel, device: Device, before_pass: BeforePass | None
) -> tuple[Runner, Release]:
    try:
        load = load_resident if _is_resident(model) else load_on_device
        return load(model, device, before_pass)
    except BaseException:
        device.close()
        raise


def _load_in_place(
    model: LoadedModel, arena_bytes: int, workload: Workload | None, num_threads: int
) -> tuple[Runner, Release]:
    spec, arena, store = model.spec, HostArena(arena_bytes), model.store
    decoder = Decoder.load(spec, store, arena.allocate, model.dtype, release=store.drop_pages)
    policy = model.passes.policy
    cache = KvCache(model.kv_layout, spec.num_layers, policy.num_kv_blocks)
    if workload is not None:
        rows = min(workload.num_rows, policy.batch_size)
        used_blocks = min(policy.num_kv_blocks, rows * blocks_of_tokens(workload.context_tokens))
        cache.touch(used_blocks, num_threads)

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


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    kv_dtype = dtype if config.kv_dtype == "auto" else DTYPES[config.kv_dtype]
    if dtype not in (kv_dtype, torch.float32):
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype!r} and the model computes in {dtype}; the attention "
            "kernels take a cache of the same type, or any type when the model is float32"
        )
    return kv_dtype


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
