"""Loads an engine: hardware, plan, memory check, weights, runner and warm-up."""

import dataclasses
import functools
import itertools
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymoe.config import EngineConfig, SamplingParams, Settings
from raymoe.device.cuda import check_cuda, free_gpu_bytes
from raymoe.device.host import read_host, rss_bytes
from raymoe.device.lane import released_on_error
from raymoe.device.threads import set_num_threads
from raymoe.engine.core import EngineCore, Runner, longest_step_s
from raymoe.engine.identity import agree, check_unchanged, files_key, open_shared
from raymoe.engine.progress import Tell, tell_log
from raymoe.engine.ranks import load_ranks
from raymoe.engine.release import clear_frames, return_memory
from raymoe.engine.request import Request
from raymoe.engine.runner_loading import (
    DTYPES,
    EngineParts,
    Loaded,
    LoadJob,
    NewArena,
    RankShare,
    configured_model,
    in_place_arena_bytes,
    load_runner,
    open_weights,
)
from raymoe.engine.tasks.reading import Reading
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import ConfigError, PerformanceWarning, UnknownOptionError
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.measure.kept import identify_machine, load_profile
from raymoe.measure.plausible import find_problems
from raymoe.measure.quick import measure_quickly
from raymoe.memory.arena import HostArena
from raymoe.memory.checkpoint import resolve_model
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weights import DummyWeights, WatchedWeights, Weights
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Footprint, Policy
from raymoe.plan.search import find_plan
from raymoe.schedule.builders import BUILDERS, STREAMING_BUILDERS
from raymoe.specs.differences import differences_of
from raymoe.specs.files import MAX_TOKEN_ID, check_adapter, read_json_object
from raymoe.specs.hardware import (
    HARDWARE_PRESETS,
    USABLE_FRACTION,
    HardwareSpec,
    MeasuredNode,
    find_hardware,
    is_hardware_file,
    preset_of_gpu,
)
from raymoe.specs.model import OVERFLOWS_IN_FLOAT16, ModelSpec
from raymoe.units import ceil_div, format_bytes

# While an actor restarts, the kernel still frees up to hundreds of gigabytes of the former process.
PATIENCE_S, LOOK_EVERY_S = 30.0, 0.5

logger = logging.getLogger(__name__)


def check_available(
    footprint: Footprint, *, what: str, num_ranks: int = 1, already_there: int = 0
) -> None:
    """Wait up to `PATIENCE_S` for free memory, then refuse a plan that lacks it.

    Without this check the kernel would kill the process later. A given budget (`host_memory_bytes`,
    a `HardwareSpec`) may exceed what the machine or the control groups of this process have left.

    Args:
        footprint: Host memory of the plan, which is that of one rank.
        what: What needs the memory, for the message.
        already_there: Bytes of it that exist already, such as weights that others have loaded.
    """
    end_s = time.monotonic() + PATIENCE_S
    is_waiting = False
    while True:
        # What this process uses so far is part of the plan's "runtime".
        free = read_host().available_memory_bytes + rss_bytes() + already_there
        available = free // num_ranks
        if footprint.total <= available:
            return
        if time.monotonic() >= end_s:
            break
        if not is_waiting:
            is_waiting = True
            logger.info(
                "%s needs %s of host memory and %s are free: waiting up to %.0f s for more",
                what,
                format_bytes(footprint.total),
                format_bytes(available),
                PATIENCE_S,
            )
        time.sleep(LOOK_EVERY_S)
    footprint.check_fits(
        available,
        what=what,
        advice="So much is free now, as /proc/meminfo and the control groups of this process say. "
        "Reduce host_memory_bytes, end what else runs on the node, or take a larger node.",
    )


EMULATED_BY_DEFAULT = "t4"
LANE_CORES = 2  # for threads that launch kernels and copies


def find_node(
    config: EngineConfig, settings: Settings, device: str, *, loaded_bytes: int = 0
) -> HardwareSpec:
    """Return the node to plan for.

    `loaded_bytes` are shared weights that another engine has loaded: they are not free, but part of
    the plan.
    """
    if device == "emulated":
        node = _emulated(config, settings)
    else:
        node = _given(config, device) or _this_machine(config, settings, device)
    if config.host_memory_bytes is not None:
        node = dataclasses.replace(node, host_memory_bytes=config.host_memory_bytes)
    elif loaded_bytes:
        maximum = node.host_memory_bytes + loaded_bytes
        node = dataclasses.replace(node, host_memory_bytes=maximum)
    if device != "cpu" and config.device_memory_bytes is not None:
        node = dataclasses.replace(node, gpu_memory_bytes=config.device_memory_bytes)
    return node


def this_node() -> HardwareSpec:
    """Return this machine as an engine would plan for it now, by default."""
    config = EngineConfig()
    return find_node(config, Settings.from_environment(), _device_name(config))


def _given(config: EngineConfig, device: str) -> HardwareSpec | None:
    chosen = config.hardware
    if isinstance(chosen, str) and chosen != "auto":
        if not is_hardware_file(chosen):
            raise ConfigError(
                f"hardware is {chosen!r}; a preset sets the pace of the device 'emulated', the "
                f"device {device!r} runs on this machine: leave it out, or name a file"
            )
        chosen = HardwareSpec.from_file(chosen)
    if not isinstance(chosen, HardwareSpec):
        return None
    if device == "cpu":
        return chosen.without_gpu()
    if not chosen.has_gpu:
        raise ConfigError(f"hardware is {chosen.name!r}, which has no GPU, for the device 'cuda'")
    return chosen


def _this_machine(config: EngineConfig, settings: Settings, device: str) -> HardwareSpec:
    """Return this machine's profile, or a quick measurement, with the memory that is free now."""
    measured = _handed(config, settings) or measured_host(config.num_threads, settings)
    measured = dataclasses.replace(measured, host_memory_bytes=_budget(settings))
    if device == "cpu":
        return measured.without_gpu()
    if config.num_threads is None and settings.num_threads is None:
        measured = dataclasses.replace(measured, num_cores=_without_lanes(measured.num_cores))
    free_bytes = free_gpu_bytes()
    if not measured.has_gpu:
        return _with_known_gpu(measured, free_bytes)
    return dataclasses.replace(measured, gpu_memory_bytes=free_bytes)


def _handed(config: EngineConfig, settings: Settings) -> HardwareSpec | None:
    """Return what the driver measured, if that was on a machine like this one."""
    node = config.hardware
    if not isinstance(node, MeasuredNode):
        return None
    machine = identify_machine(config.num_threads or settings.num_threads)
    return node.hardware if node.machine == machine.file_name else None


def _without_lanes(num_cores: int) -> int:
    """Cores for the CPU's kernels where other threads feed a GPU, which must not wait for one."""
    return max(num_cores - LANE_CORES, ceil_div(num_cores, 2))


def measured_host(num_threads: int | None = None, settings: Settings | None = None) -> HardwareSpec:
    """Return the kept profile of this machine, else a quick measurement."""
    return measured_node(num_threads, settings).hardware


def measured_node(num_threads: int | None = None, settings: Settings | None = None) -> MeasuredNode:
    """Return what `measured_host` does, with the machine that it is of."""
    settings = settings or Settings.from_environment()
    num_threads = num_threads or settings.num_threads
    machine = identify_machine(num_threads)
    kept = load_profile(settings.cache_directory, machine)
    problems = [] if kept is None else find_problems(kept)
    if kept is not None and not problems:
        return MeasuredNode(machine=machine.file_name, hardware=kept)
    if problems:
        logger.warning(
            "the profile %s is not used, as it was disturbed: %s; run 'raymoe profile --again' "
            "while nothing else runs", settings.cache_directory / machine.file_name, problems[0],
        )  # fmt: skip
    return MeasuredNode(machine=machine.file_name, hardware=_measure_quickly(num_threads))


def measured_share(num_threads: int | None, count: int) -> MeasuredNode:
    """Return what one of `count` engines that run on this machine at once has of it.

    Args:
        num_threads: Threads that were chosen for each engine; None divides the cores.
    """
    node = measured_node(num_threads)
    if num_threads is not None or count == 1:
        return node
    share = node.hardware.share(count)
    machine = identify_machine(share.num_cores).file_name
    return MeasuredNode(machine=machine, hardware=share)


_measure_quickly = functools.cache(measure_quickly)


def _emulated(config: EngineConfig, settings: Settings) -> HardwareSpec:
    chosen = config.hardware
    if chosen in {None, "auto"} or isinstance(chosen, MeasuredNode):
        chosen = EMULATED_BY_DEFAULT
    spec = find_hardware(chosen) if isinstance(chosen, str) else chosen
    if not spec.has_gpu:
        raise ConfigError(f"hardware is {spec.name!r}, which has no GPU to emulate")
    num_threads = config.num_threads or settings.num_threads
    return dataclasses.replace(
        spec,
        num_cores=num_threads or read_host().num_cores,
        host_memory_bytes=_budget(settings),
    )


def _budget(settings: Settings) -> int:
    available = int(read_host().available_memory_bytes * USABLE_FRACTION)
    return settings.host_memory_bytes or available


def _with_known_gpu(host: HardwareSpec, free_bytes: int) -> HardwareSpec:
    """Return this host with the preset of its GPU."""
    name = torch.cuda.get_device_name()
    known = preset_of_gpu(name)
    if known is None:
        raise ConfigError(
            f"the GPU {name!r} is none of the presets ({', '.join(HARDWARE_PRESETS)}); run "
            "'raymoe profile' once on this machine, or give hardware=HardwareSpec(...)"
        )
    return host.with_gpu_of(known, free_bytes)


def load_parts(
    path: str | Path,
    config: EngineConfig,
    new_arena: NewArena = HostArena,
    *,
    tell: Tell = tell_log,
) -> EngineParts:
    """Load a model with its tokenizer.

    Args:
        new_arena: Makes the host memory that a device reads.
        tell: Takes what the load does, stage by stage.
    """
    handled = sys.exception()
    try:
        return _load_parts(path, config, new_arena, tell)
    except BaseException as error:
        clear_frames(error, outer=handled)  # whoever keeps it does not keep the weights
        return_memory()
        raise


def _load_parts(
    path: str | Path, config: EngineConfig, new_arena: NewArena, tell: Tell
) -> EngineParts:
    device = _device_name(config)
    _check_schedule(config, device)
    if config.device == "cuda":
        check_cuda()
    tell("reading the model's files")
    directory = resolve_model(path)
    check_adapter(directory, is_ignored=config.ignore_adapter)
    files = files_key(directory) if config.shared_weights is True else ""
    spec = configured_model(ModelSpec.from_directory(directory), config)
    for difference in differences_of(spec):
        logger.warning("%s differs from transformers on purpose: %s", spec.name, difference)
    tokenizer = Tokenizer(  # its process loads meanwhile
        directory,
        spec.vocab_size,
        spec.media_tokens,
        split_special_tokens=config.split_special_tokens,
    )
    shared = None
    try:
        weights = open_weights(spec, directory, config)
        on_host = None
        if device != "cpu" and config.may_leave_gpu_idle:
            on_host = dataclasses.replace(config, device="cpu")
        tell("planning")
        config = _with_dtype(config, spec, weights, device)
        shared = open_shared(config, files, device, _dtype(config, weights))
        config, plan = _make_plan(spec, weights, agree(config, shared), on_host, shared=shared)
        parts = _load_plan(
            tokenizer, spec, weights, config,
            plan=plan, shared=shared, new_arena=new_arena, tell=tell,
        )  # fmt: skip
        if shared is not None:
            _check_shared(parts, directory, files)
        return parts
    except BaseException:
        tokenizer.close()
        if shared is not None:
            shared.close()
        raise


def _check_shared(parts: EngineParts, directory: Path, files: str) -> None:
    try:
        check_unchanged(directory, files)
    except BaseException:
        parts.close()
        raise


def _load_plan(
    tokenizer: Tokenizer,
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    *,
    plan: Plan,
    shared: SharedFile | None,
    new_arena: NewArena,
    tell: Tell,
) -> EngineParts:
    directory = tokenizer.directory
    settings, dtype = Settings.from_environment(), _dtype(config, weights)
    eos_token_ids = _eos_token_ids(spec, directory)
    job = LoadJob(
        directory=directory,
        config=config,
        settings=settings,
        device=_device_name(config),
        dtype=dtype,
        kv_dtype=_kv_dtype(config, dtype),
        hardware=plan.hardware,
        schedule=plan.schedule,
        policy=plan.policy,
        # With packed weights torch runs only operations too small to share: a second torch thread
        # would spin and take a core from the native kernels.
        num_torch_threads=1 if packed_linear_is_used(dtype) else plan.hardware.num_cores,
        step_limit_s=config.watchdog_s or longest_step_s(plan),
        new_arena=new_arena,
    )
    set_num_threads(job.hardware.num_cores, job.num_torch_threads)
    loaded = _load(job, spec, weights, shared, tell=tell)
    with released_on_error(loaded.release):
        tell("loading the tokenizer")
        tokenizer.load()
    return EngineParts(
        runner=loaded.runner,
        policy=plan.policy,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        max_model_len=_context_tokens(spec, config),
        head=spec.head,
        labels=spec.labels,
        is_multi_label=spec.is_multi_label,
        eos_token_ids=eos_token_ids,
        num_threads=job.hardware.num_cores,
        num_torch_threads=job.num_torch_threads,
        plan=plan,
        prefix_salt=spec.prefix_salt,
        restart_length=spec.restart_length,
        has_states=spec.has_states,
        release=loaded.release,
        interrupt=loaded.interrupt,
    )


def _make_plan(
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    on_host: EngineConfig | None,
    *,
    shared: SharedFile | None,
) -> tuple[EngineConfig, Plan]:
    """Plan for the device, and for the cores alone where these are faster.

    Args:
        on_host: The configuration for the cores alone; None if the device must be used.
    """
    loaded_bytes = 0 if shared is None else shared.num_bytes  # by another engine
    plan = _find_plan(spec, weights, config, on_host, loaded_bytes=loaded_bytes)
    if on_host is not None and plan.schedule == "in_place":
        # The cores that would feed the GPU compute too, and in the type of the checkpoint.
        config, note = on_host, plan.note
        plan = dataclasses.replace(_find_plan(spec, weights, on_host), note=note)
    logger.info("plan: %s", plan.describe())
    check_available(
        plan.footprint,
        what=spec.name,
        num_ranks=config.tensor_parallel_size,
        already_there=loaded_bytes,
    )
    return config, plan


def _find_plan(
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    on_host: EngineConfig | None = None,
    *,
    loaded_bytes: int = 0,
) -> Plan:
    settings, dtype = Settings.from_environment(), _dtype(config, weights)
    return find_plan(
        spec,
        find_node(config, settings, _device_name(config), loaded_bytes=loaded_bytes),
        config.workload,
        schedule=config.schedule,
        policy=config.policy,
        bytes_per_element=dtype.itemsize,
        kv_bytes_per_element=_kv_dtype(config, dtype).itemsize,
        weight_bytes=_weight_bytes(spec, weights, _dtype(on_host or config, weights)),
        max_model_len=_context_tokens(spec, config),
        tensor_parallel_size=config.tensor_parallel_size,
        may_leave_gpu_idle=on_host is not None,
    )


def _with_dtype(
    config: EngineConfig, spec: ModelSpec, weights: Weights, device: str
) -> EngineConfig:
    """Replace "auto" by float16 on a GPU without products of bfloat16, which would be slow.

    Raises:
        ConfigError: The model's numbers exceed those of float16.
    """
    if config.dtype != "auto" or device != "cuda" or weights.dtype != torch.bfloat16:
        return config
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return config
    where = f"{torch.cuda.get_device_name()} has no products of bfloat16"
    if spec.model_type in OVERFLOWS_IN_FLOAT16:
        raise ConfigError(
            f"{where}, and hidden states of {spec.model_type} overflow in float16: choose a GPU of "
            "the Ampere generation or later, or dtype='float32', which is slow"
        )
    warnings.warn(
        f"{where}: computing in float16, whose largest number is 65504; dtype='float32' is exact "
        "and several times slower",
        PerformanceWarning,
        stacklevel=2,
    )
    return dataclasses.replace(config, dtype="float16")


def _dtype(config: EngineConfig, weights: Weights) -> torch.dtype:
    return weights.dtype if config.dtype == "auto" else DTYPES[config.dtype]


def _context_tokens(spec: ModelSpec, config: EngineConfig) -> int:
    return min(spec.max_model_len, config.max_model_len or spec.max_model_len)


def _load(
    job: LoadJob, spec: ModelSpec, weights: Weights, shared: SharedFile | None, *, tell: Tell
) -> Loaded:
    tell("loading weights")
    if not isinstance(weights, DummyWeights):  # those are told from others by their type
        weights = _watched(weights, spec.num_layers, tell)
    if job.num_ranks == 1:
        share = RankShare.of(spec, weights, rank=0, num_ranks=1)
        loaded = load_runner(job, share, shared=shared)
    else:
        loaded = load_ranks(job, spec, weights)
    with released_on_error(loaded.release):
        tell("computing a first token")
        warm_up(loaded.runner, spec.vocab_size, is_read=spec.head != "lm")
    return loaded


def _watched(weights: Weights, num_layers: int, tell: Tell) -> Weights:
    """Tell after each layer how many are loaded."""
    numbers = itertools.count(1)

    def watch() -> None:
        number = next(numbers)
        if number < num_layers:
            tell("loading weights, layer", number, num_layers)
        elif number == num_layers:  # a GPU's kernels are compiled before the first step
            tell("compiling")

    return WatchedWeights(weights, watch)


def _device_name(config: EngineConfig) -> str:
    if config.device != "auto":
        return config.device
    has_gpu = config.schedule != "in_place" and torch.cuda.is_available()
    return "cuda" if has_gpu else "cpu"


def _check_schedule(config: EngineConfig, device: str) -> None:
    name, known = config.schedule, ("auto", *BUILDERS)
    if name not in known:
        raise UnknownOptionError(name, known, "schedule")
    has_device = device != "cpu"
    _check_ranks(config.tensor_parallel_size, device)
    fitting = ["resident", *sorted(STREAMING_BUILDERS)] if has_device else ["in_place"]
    if name not in ("auto", *fitting):
        raise ConfigError(f"schedule is {name!r}; the device {device!r} runs {', '.join(fitting)}")
    if config.policy is not None and config.policy.device is not None and not has_device:
        raise ConfigError(
            f"policy.device is given, but the device {device!r} has no memory of its own; leave "
            "policy.device out, or choose the device 'cuda' or 'emulated'"
        )


def _check_ranks(num_ranks: int, device: str) -> None:
    if num_ranks == 1:
        return
    if device == "cpu":
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but the device 'cpu' has no GPUs to divide the "
            "model between, and one engine uses all cores; leave tensor_parallel_size out"
        )
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but torch sees {torch.cuda.device_count()} "
            "GPUs; reduce it, or let the process see more (num_gpus of a Ray actor, "
            "CUDA_VISIBLE_DEVICES)"
        )


def _weight_bytes(spec: ModelSpec, weights: Weights, dtype: torch.dtype) -> int:
    arena_bytes = in_place_arena_bytes(spec, weights, dtype)
    if packed_linear_is_used(dtype):
        return arena_bytes + spec.vocab_size * spec.hidden_size * dtype.itemsize
    return spec.weight_bytes(dtype.itemsize) + arena_bytes


def warm_up(runner: Runner, vocab_size: int, *, is_read: bool = False) -> None:
    """Compile the loops and fault in every weight before the first rows."""
    core = EngineCore(
        runner,
        Policy(
            max_num_seqs=1, max_num_batched_tokens=4, max_prefill_chunk_tokens=4, num_kv_blocks=1
        ),
        max_model_len=4,
        vocab_size=vocab_size,
        eos_token_ids=(),
        decode_all=lambda sequences: [""] * len(sequences),
        finish=lambda _request: None,
    )
    core.add(
        Request(
            prompt=np.zeros(2, np.int32),
            params=SamplingParams(max_tokens=2, repetition_penalty=1.1),
            max_tokens_total=4,
            seed=0,
            row_key=0,
            future=Future(),
            reading=Reading() if is_read else None,
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
    if not (directory / "generation_config.json").exists():
        return spec.eos_token_ids
    found = _as_ids(read_json_object(directory, "generation_config.json"), directory)
    return spec.eos_token_ids if found is None else found


def _as_ids(generation: Mapping[str, Any], directory: Path) -> tuple[int, ...] | None:
    value = generation.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise ConfigError(
            f"{directory / 'generation_config.json'}: eos_token_id is {value!r:.100}; "
            "it takes a token id or a list of them"
        )
    return tuple(ids)
