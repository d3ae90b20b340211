"""Loads an engine: files, plan, weights, tokenizer and a first token."""

import dataclasses
import itertools
import logging
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymoe._native import active_isa
from raymoe.config import EngineConfig, SamplingParams, Settings, check_kv_dtype, with_base
from raymoe.device.find_gpu import check_cuda, half_dtype, has_nvidia_gpu, why_no_gpu
from raymoe.device.lane import released_on_error
from raymoe.device.threads import set_num_threads
from raymoe.download.models import resolve_model
from raymoe.engine.core import EngineCore, Runner, longest_step_s
from raymoe.engine.device_memory import DeviceMemory, log_free_memory
from raymoe.engine.identity import agree, check_unchanged, files_key, open_shared
from raymoe.engine.node import check_available, device_name, find_node, is_like_the_driver
from raymoe.engine.progress import Tell, tell_log
from raymoe.engine.rank_model import (
    DTYPES,
    LoadJob,
    NewArena,
    RankModel,
    in_place_arena_bytes,
    load_runner,
    open_weights,
    read_model,
)
from raymoe.engine.ranks import load_ranks
from raymoe.engine.release import clear_frames, return_memory
from raymoe.engine.request import Request
from raymoe.engine.tasks.reading import Reading
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import (
    ConfigError,
    InfeasiblePlanError,
    PerformanceWarning,
    UnknownOptionError,
)
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.memory.adapters import AdaptedWeights
from raymoe.memory.arena import HostArena
from raymoe.memory.int8_weights import Int8Weights, int8_model
from raymoe.memory.prefixes import PrefixSalt, no_salt
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.weights import DummyWeights, WatchedWeights, Weights, WeightStore
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.schedule.builders import BUILDERS, STREAMING_BUILDERS
from raymoe.specs.config import HeadKind
from raymoe.specs.differences import differences_of
from raymoe.specs.files import MAX_TOKEN_ID, check_adapter, read_chat_template, read_json_object
from raymoe.specs.model import OVERFLOWS_IN_FLOAT16, ModelSpec
from raymoe.specs.weight_format import Int8Channel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A loaded model and its sizes.

    Attributes:
        policy: Sizes of steps and of the KV cache.
        max_model_len: Prompt and generated tokens of a row.
        eos_token_ids: Tokens that end a row.
        plan: What was planned, if it was.
        has_states: Whether layers keep states, which sequences share as copies.
        window: Tokens that layers with a sliding window keep (`ModelSpec.cache_window`).
        prefix_salt: Differs between lengths of prompts that do not share KV although they begin
            the same: rotary embeddings may depend on the length.
        num_past_tokens: As `ModelSpec.num_past_tokens`.
        restart_length: Length beyond which a row computes all its KV again.
        device_memory: What the next engine leaves free of a GPU; None without one.
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
    window: int | None = None
    num_past_tokens: int = 0
    restart_length: int | None = None
    device_memory: DeviceMemory | None = None

    @property
    def may_grow(self) -> bool:
        """Whether memory allows more sequences than `policy` says."""
        return not (self.has_states or self.policy.num_window_blocks(self.window))

    def close(self) -> None:
        """Give memory back; called once, when the engine has ended."""
        self.tokenizer.close()
        self.runner.close()


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
    device = device_name(config)
    _check_schedule(config, device)
    _check_gpu(config, device)
    tell("reading the model's files")
    directory, config = resolve_with_adapter(path, config)
    files = files_key(directory, config.adapter) if config.shared_weights is True else ""
    spec = read_model(directory, config)
    for difference in differences_of(spec):
        logger.warning("%s differs from transformers on purpose: %s", spec.name, difference)
    tokenizer = Tokenizer(  # its process loads meanwhile
        directory,
        spec.vocab_size,
        spec.media_tokens,
        split_special_tokens=config.split_special_tokens,
    )
    shared = device_memory = None
    if device == "cuda":
        device_memory = _device_memory(spec)
    try:
        weights = open_weights(spec, directory, config)
        spec = _with_table_dtype(spec, weights)
        spec, weights = _with_int8(spec, weights, config, device)
        on_host = None
        if device != "cpu" and config.may_leave_gpu_idle:
            on_host = dataclasses.replace(config, device="cpu")
        tell("planning")
        config = _with_dtype(config, spec, weights, device)
        shared = open_shared(config, files, device, _dtype(config, weights))
        config = agree(config, shared)
        config, plan = _make_plan(
            spec, weights, config, on_host, shared=shared, device_memory=device_memory
        )
        if device_name(config) == "cpu":  # the cores alone are faster
            device_memory = None
        parts = _load_plan(
            tokenizer, spec, weights, config,
            plan=plan, shared=shared, new_arena=new_arena, tell=tell,
        )  # fmt: skip
        if shared is not None:
            _check_shared(parts, directory, files, config.adapter)
        return dataclasses.replace(parts, device_memory=device_memory)
    except BaseException as error:
        tokenizer.close()
        if shared is not None:
            shared.close()
        if device_memory is not None:
            device_memory.learn(error)
        raise


def resolve_with_adapter(path: str | Path, config: EngineConfig) -> tuple[Path, EngineConfig]:
    """Return the directory of a model, and the configuration with its adapter.

    Args:
        path: A directory or a name on the hub: of a model, or of an adapter, whose base is then
            the model. Both are downloaded if they are missing.

    Raises:
        ConfigError: As `with_base` and `resolve_model`.
        CheckpointError: The same, and as `check_adapter`.
    """
    path, config = with_base(path, config)
    path, config = with_base(resolve_model(path), config)  # an adapter of the hub
    directory = resolve_model(path)
    check_adapter(directory, is_ignored=config.ignore_adapter, adapter=config.adapter)
    if config.adapter is not None:
        template = read_chat_template(Path(config.adapter))
        if template and template != read_chat_template(directory):
            logger.warning(
                "%s has a chat template of its own, which is not used: put it into the directory "
                "of the base to use it",
                config.adapter,
            )
    return directory, config


def _device_memory(spec: ModelSpec) -> DeviceMemory:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return DeviceMemory.of(Settings.from_environment().cache_directory, gpu, spec.name)


def _check_gpu(config: EngineConfig, device: str) -> None:
    if config.device == "cuda":
        check_cuda()
    is_left_out = config.device == "auto" and device == "cpu" and config.schedule != "in_place"
    if is_left_out and has_nvidia_gpu():
        warnings.warn(
            "there is an NVIDIA GPU or its driver, but the engine runs on the CPU: "
            f"{why_no_gpu()}. device='cpu' says that this is meant",
            PerformanceWarning,
            stacklevel=2,
        )


def _check_shared(
    parts: EngineParts, directory: Path, files: str, adapter: str | Path | None
) -> None:
    try:
        check_unchanged(directory, files, adapter)
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
        device=device_name(config),
        dtype=dtype,
        kv_dtype=_kv_dtype(config, dtype, spec),
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
    runner = _load(job, spec, weights, shared, tell=tell)
    with released_on_error(runner.close):
        tell("loading the tokenizer")
        tokenizer.load()
    return EngineParts(
        runner=runner,
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
        window=spec.cache_window,
        num_past_tokens=spec.num_past_tokens,
    )


def _make_plan(
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    on_host: EngineConfig | None,
    *,
    shared: SharedFile | None,
    device_memory: DeviceMemory | None,
) -> tuple[EngineConfig, Plan]:
    """Plan for the device, and for the cores alone where these are faster.

    Args:
        on_host: The configuration for the cores alone; None if the device must be used.
    """
    loaded_bytes = 0 if shared is None else shared.num_bytes  # by another engine
    reserve_bytes = 0
    # Sizes that were given, and those of weights that others use, stay as they are.
    if device_memory is not None and config.policy is None:
        reserve_bytes = device_memory.reserve_bytes()
    plan = _find_plan(
        spec, weights, config, on_host, loaded_bytes=loaded_bytes, reserve_bytes=reserve_bytes
    )
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
    reserve_bytes: int = 0,
) -> Plan:
    settings, dtype = Settings.from_environment(), _dtype(config, weights)
    device = device_name(config)
    find = partial(
        find_plan,
        spec,
        find_node(config, settings, device, loaded_bytes=loaded_bytes, reserve_bytes=reserve_bytes),
        config.workload,
        bytes_per_element=dtype.itemsize,
        kv_bytes_per_element=_kv_dtype(config, dtype, spec).itemsize,
        weight_bytes=_weight_bytes(spec, weights, _dtype(on_host or config, weights)),
        max_model_len=_context_tokens(spec, config),
        tensor_parallel_size=config.tensor_parallel_size,
        may_leave_gpu_idle=on_host is not None,
    )
    planned = config.planned
    if planned is not None and config.allows(planned):
        is_in_place = planned.schedule == "in_place"
        suits_device = is_in_place == (device == "cpu") or (is_in_place and on_host is not None)
        if not (suits_device and is_like_the_driver(config, settings)):
            logger.info("planned again: this machine is not like that of the driver")
        else:
            try:
                return find(schedule=planned.schedule, policy=planned.policy)
            except InfeasiblePlanError as error:
                logger.info("planned again: what the driver planned does not fit here: %s", error)
    return find(schedule=config.schedule, policy=config.policy)


def _with_dtype(
    config: EngineConfig, spec: ModelSpec, weights: Weights, device: str
) -> EngineConfig:
    """Replace "auto" by float16 on a GPU without products of bfloat16, which would be slow.

    Raises:
        ConfigError: The model's numbers exceed those of float16.
    """
    if config.dtype != "auto" or device != "cuda" or weights.dtype != torch.bfloat16:
        return config
    if half_dtype() == torch.bfloat16:
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


def _with_int8(
    spec: ModelSpec, weights: Weights, config: EngineConfig, device: str
) -> tuple[ModelSpec, Weights]:
    """The model and its weights in int8, if the configuration asks for it.

    Raises:
        ConfigError: The device, the type of the model or these cores have no products of int8.
    """
    formats = () if spec.quantization is None else spec.quantization.formats
    is_stored = any(isinstance(each, Int8Channel) for each in formats)
    if is_stored and device != "cpu":
        raise ConfigError(
            f"{spec.name} has weights and activations in int8 (W8A8), which cores alone multiply; "
            "add device='cpu'"
        )
    if config.compute_dtype != "int8":
        return spec, weights
    if not packed_linear_is_used(_dtype(config, weights)):
        raise ConfigError(
            f"compute_dtype is 'int8', but the model computes in {_dtype(config, weights)} on "
            f"{active_isa()} cores; it takes dtype='bfloat16' and cores with AVX2"
        )
    int8 = int8_model(spec)
    return (spec, weights) if is_stored else (int8, Int8Weights(weights, spec, int8))


def _dtype(config: EngineConfig, weights: Weights) -> torch.dtype:
    return weights.dtype if config.dtype == "auto" else DTYPES[config.dtype]


def _context_tokens(spec: ModelSpec, config: EngineConfig) -> int:
    return min(spec.max_model_len, config.max_model_len or spec.max_model_len)


def _load(
    job: LoadJob, spec: ModelSpec, weights: Weights, shared: SharedFile | None, *, tell: Tell
) -> Runner:
    tell("loading weights")
    if not isinstance(weights, DummyWeights):  # those are told from others by their type
        weights = _watched(weights, spec.num_layers, tell)
    own = dataclasses.replace(RankModel.of(job, spec, weights, rank=0), shared=shared)
    runner: Runner = load_runner(own) if job.num_ranks == 1 else load_ranks(own)
    with released_on_error(runner.close):
        tell("computing a first token")
        warm_up(runner, spec.vocab_size, is_read=spec.head != "lm")
    if job.device == "cuda":
        log_free_memory("after a first token")
    return runner


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


def _with_table_dtype(spec: ModelSpec, weights: Weights) -> ModelSpec:
    """Tables of n-grams keep the type that they are stored in."""
    store = weights.base if isinstance(weights, AdaptedWeights) else weights
    if not isinstance(store, WeightStore):
        return spec
    return spec.with_table_dtype(store.table_dtype())


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
    """Bytes of all weights but tables of n-grams, in the form that the cores' kernels read."""
    arena_bytes = in_place_arena_bytes(spec, weights, dtype) - spec.table_bytes
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


def _kv_dtype(config: EngineConfig, dtype: torch.dtype, spec: ModelSpec) -> torch.dtype:
    if config.kv_dtype == "int8":
        check_kv_dtype(config.kv_dtype, device_name(config))
        spec.check_int8_kv()
        return torch.int8
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
