"""From a model directory to the parts of an engine; nothing large is taken before the plan fits."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymoe.config import EngineConfig, SamplingParams, Settings
from raymoe.engine.core import EngineCore, Runner
from raymoe.engine.identity import check_unchanged, files_key
from raymoe.engine.load_job import DTYPES, LoadJob, RankShare, open_weights
from raymoe.engine.memory_check import check_available
from raymoe.engine.node import find_node
from raymoe.engine.parts import EngineParts
from raymoe.engine.ranks import load_ranks
from raymoe.engine.request import Request
from raymoe.engine.runner_loading import Loaded, in_place_arena_bytes, load_runner
from raymoe.engine.sharing import agree, open_shared
from raymoe.engine.tokenizer import Tokenizer
from raymoe.engine.watchdog import longest_pass_s
from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.threads import set_num_threads
from raymoe.memory.shared_file import SharedFile
from raymoe.memory.source import resolve_model
from raymoe.memory.weights import Weights
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.search import find_plan
from raymoe.schedule.builders import BUILDERS, STREAMING_BUILDERS
from raymoe.specs.config import MAX_TOKEN_ID
from raymoe.specs.files import read_json_object
from raymoe.specs.model import ModelSpec

logger = logging.getLogger(__name__)


def load_parts(path: str | Path, config: EngineConfig) -> EngineParts:
    """Resolve, check, plan, then load. See `Engine.from_pretrained` for the errors."""
    device = _device_name(config)
    _check_schedule(config, device)
    directory = resolve_model(path)
    files = files_key(directory) if config.shared_weights is True else ""
    spec = ModelSpec.from_directory(directory)
    tokenizer = Tokenizer(directory, spec.vocab_size)  # its process loads while we do
    shared = None
    try:
        weights = open_weights(spec, directory, config)
        shared = open_shared(config, files, device, _dtype(config, weights))
        parts = _plan_and_load(tokenizer, spec, weights, agree(config, shared), shared=shared)
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


def _plan_and_load(
    tokenizer: Tokenizer,
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    *,
    shared: SharedFile | None,
) -> EngineParts:
    directory = tokenizer.directory
    settings, dtype = Settings.from_environment(), _dtype(config, weights)
    plan = _make_plan(spec, weights, config, settings, shared=shared)
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
        # Where the weights are packed, torch is left with operations too small to share: its second
        # thread would only spin beside the workers of the native kernels and take their cores.
        num_torch_threads=1 if packed_linear_is_used(dtype) else plan.hardware.num_cores,
        pass_limit_s=config.watchdog_s or longest_pass_s(plan),
    )
    set_num_threads(job.hardware.num_cores, job.num_torch_threads)
    loaded = _load(job, spec, weights, shared)
    try:
        tokenizer.load()
    except BaseException:
        loaded.release()
        raise
    return EngineParts(
        runner=loaded.runner,
        policy=plan.policy,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        max_context_tokens=_context_tokens(spec, config),
        eos_token_ids=eos_token_ids,
        num_threads=job.hardware.num_cores,
        num_torch_threads=job.num_torch_threads,
        plan=plan,
        shares_across_lengths=not spec.rope.depends_on_length,
        release=loaded.release,
        interrupt=loaded.interrupt,
    )


def _make_plan(
    spec: ModelSpec,
    weights: Weights,
    config: EngineConfig,
    settings: Settings,
    *,
    shared: SharedFile | None,
) -> Plan:
    """Plan, and find out whether the memory is there."""
    dtype = _dtype(config, weights)
    loaded_bytes = 0 if shared is None else shared.num_bytes  # by another engine
    plan = find_plan(
        spec,
        find_node(config, settings, _device_name(config), loaded_bytes=loaded_bytes),
        config.workload,
        schedule=config.schedule,
        policy=config.policy,
        bytes_per_element=dtype.itemsize,
        kv_bytes_per_element=_kv_dtype(config, dtype).itemsize,
        weight_bytes=_weight_bytes(spec, weights, dtype),
        max_context_tokens=_context_tokens(spec, config),
        tensor_parallel_size=config.tensor_parallel_size,
    )
    logger.info("plan: %s", plan.describe())
    check_available(
        plan.footprint,
        what=spec.name,
        num_ranks=config.tensor_parallel_size,
        already_there=loaded_bytes,
    )
    return plan


def _dtype(config: EngineConfig, weights: Weights) -> torch.dtype:
    return weights.dtype if config.dtype == "auto" else DTYPES[config.dtype]


def _context_tokens(spec: ModelSpec, config: EngineConfig) -> int:
    return min(spec.max_context_tokens, config.max_context_tokens or spec.max_context_tokens)


def _load(job: LoadJob, spec: ModelSpec, weights: Weights, shared: SharedFile | None) -> Loaded:
    """Load all ranks and let each touch its weights."""
    if job.num_ranks == 1:
        share = RankShare.of(spec, weights, rank=0, num_ranks=1)
        loaded = load_runner(job, share, shared=shared)
    else:
        loaded = load_ranks(job, spec, weights)
    try:
        warm_up(loaded.runner, spec.vocab_size)
    except BaseException:
        loaded.release()
        raise
    return loaded


def _device_name(config: EngineConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_schedule(config: EngineConfig, device: str) -> None:
    """Refuse a schedule or policy that does not suit the device."""
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
            "it out, or choose the device 'cuda' or 'emulated'"
        )


def _check_ranks(num_ranks: int, device: str) -> None:
    if num_ranks == 1:
        return
    if device == "cpu":
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but the device 'cpu' has no GPUs to divide the "
            "model between, and one engine uses all cores; leave it out"
        )
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but torch sees {torch.cuda.device_count()} "
            "CUDA devices; reduce it, or let the process see more (num_gpus of a Ray actor, "
            "CUDA_VISIBLE_DEVICES)"
        )


def _weight_bytes(spec: ModelSpec, weights: Weights, dtype: torch.dtype) -> int:
    """Weights in memory: packed copies and the embedding, or the mapped files and their copies."""
    arena_bytes = in_place_arena_bytes(spec, weights, dtype)
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
        decode_all=lambda sequences: [""] * len(sequences),
        finish=lambda _request: None,
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
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise ConfigError(
            f"{directory / 'generation_config.json'}: eos_token_id is {value!r:.100}; "
            "it takes a token id or a list of them"
        )
    return tuple(ids)
