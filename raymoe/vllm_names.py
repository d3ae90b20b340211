"""Arguments of vLLM that raymoe does not have, but can take.

They give a permission that raymoe does not need, say what is so anyway, or say how vLLM places and
orders its work, which the planner decides here. An argument that would change answers is none of
them, and stays refused.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from raymoe.errors import ConfigError

logger = logging.getLogger(__name__)

_BOTH = (True, False)
# Values that change no answer, by the name of a sampling parameter.
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,),
    "early_stopping": (False,), "logits_processors": ([],), "extra_args": ({},),
    "flat_logprobs": (False,), "detokenize": _BOTH, "spaces_between_special_tokens": _BOTH,
    "skip_reading_prefix_cache": _BOTH, "skip_clone": _BOTH, "output_kind": (0, 1, 2),
    "truncate_prompt_tokens": (-1,), "thinking_token_budget": (), "repetition_detection": (),
}  # fmt: skip
# The same of an engine.
_ENGINE: dict[str, tuple[Any, ...]] = {
    "task": ("generate", "auto"), "runner": ("generate", "auto"),
    "enable_prefix_caching": (True,), "enable_chunked_prefill": (True,), "enable_lora": (False,),
    "tokenizer_mode": ("auto", "hf", "slow"), "kv_cache_dtype": ("auto",),
    "config_format": ("auto", "hf"), "mamba_ssm_cache_dtype": ("auto",),
    "skip_tokenizer_init": (False,), "hf_overrides": ({},),
    "revision": ("main",), "tokenizer_revision": ("main",), "code_revision": ("main",),
    "load_format": ("safetensors", "hf"), "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,), "enable_expert_parallel": (False,), "enforce_eager": (False,),
    "distributed_executor_backend": ("uni", "mp", "ray"), "convert": ("auto", "none"),
    "generation_config": ("auto",), "logprobs_mode": ("raw_logprobs",),
    "enable_prompt_embeds": (False,), "calculate_kv_scales": (False,),
}  # fmt: skip
_PERMISSIONS = frozenset(
    ("trust_remote_code", "log_engine_metrics", "disable_log_stats", "disable_log_requests",
     "enable_log_requests", "tokenizer_pool_size", "tokenizer_pool_type", "download_dir",
     "served_model_name", "use_tqdm_on_load", "max_logprobs", "hf_token", "enable_sleep_mode",
     "aggregate_engine_logging", "ray_workers_use_nsight", "otlp_traces_endpoint",
     # Without images and adapters by row, both of which are refused, these limit nothing.
     "limit_mm_per_prompt", "mm_processor_kwargs", "mm_processor_cache_gb", "skip_mm_profiling",
     "disable_mm_preprocessor_cache", "allowed_local_media_path", "media_io_kwargs",
     "max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype", "fully_sharded_loras")
)  # fmt: skip
_PLANNED = frozenset(
    ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "block_size", "swap_space",
     "cpu_offload_gb", "kv_offloading_size", "max_parallel_loading_workers", "async_scheduling",
     "num_gpu_blocks_override", "compilation_config", "enable_chunked_prefill",
     "enable_prefix_caching", "enable_expert_parallel", "data_parallel_size",
     "pipeline_parallel_size", "enforce_eager", "structured_outputs_config",
     "guided_decoding_backend", "attention_backend", "max_seq_len_to_capture",
     "num_scheduler_steps", "scheduling_policy", "max_num_partial_prefills",
     "max_long_partial_prefills", "long_prefill_token_threshold", "cudagraph_capture_sizes",
     "disable_custom_all_reduce", "disable_cascade_attention", "enable_dbo", "speculative_config",
     "all2all_backend", "enable_eplb", "kv_cache_memory_bytes", "model_loader_extra_config",
     "prefix_caching_hash_algo", "kv_offloading_backend", "optimization_level", "performance_mode",
     "max_cudagraph_capture_size", "cuda_graph_sizes", "decode_context_parallel_size",
     "expert_placement_strategy", "disable_hybrid_kv_cache_manager", "model_impl",
     "stream_interval", "use_v2_block_manager", "preemption_mode", "safetensors_load_strategy")
)  # fmt: skip
# How vLLM reads safetensors.
_LOADERS = frozenset(("runai_streamer", "runai_streamer_sharded", "fastsafetensors", "tensorizer"))
NAMES = _ENGINE.keys() | _PERMISSIONS | _PLANNED
_SAME_OF_STRUCTURE = frozenset(
    ("backend", "backend_was_auto", "disable_fallback", "disable_additional_properties")
)


def has_no_effect(name: str, value: object) -> bool:
    """Whether a sampling parameter has a value that changes no answer."""
    return name in _SAMPLING and (value is None or _is_one_of(value, _SAMPLING[name]))


def sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters without those of vLLM that change no answer.

    Raises:
        ConfigError: Two names of the same thing.
    """
    given = {name: value for name, value in options.items() if not has_no_effect(name, value)}
    guided = given.pop("guided_decoding", None)  # the name before vLLM 0.11
    if guided is not None:
        if given.get("structured_outputs") is not None:
            raise ConfigError("guided_decoding and structured_outputs are the same; give one")
        if not isinstance(guided, Mapping | str):
            kind = type(guided).__name__
            raise ConfigError(f"guided_decoding is a {kind}; it takes a mapping, as "
                              "structured_outputs does, which is its name now")  # fmt: skip
        given["structured_outputs"] = guided
    return given


def structure_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of structured outputs without those that name vLLM's library for them."""
    return {
        name: value
        for name, value in options.items()
        if name not in _SAME_OF_STRUCTURE and not (value is None and name.startswith("_"))
    }


def engine_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return options of an engine without those of vLLM that change no answer.

    What the planner decides instead is logged, once for all.

    Args:
        known: Names that raymoe has itself.
    """
    given, planned = {}, {}
    for name, value in options.items():
        is_same = name in _PERMISSIONS or _is_one_of(value, _ENGINE.get(name, ()))
        is_chosen = name in _PLANNED and name not in known and not is_same and value is not None
        if is_chosen or (name == "load_format" and value in _LOADERS):
            planned[name] = value
        elif not is_same and (value is not None or name not in NAMES):
            given[name] = value
    if planned:
        text = ", ".join(f"{name}={value!r:.60}" for name, value in planned.items())
        logger.warning("left to raymoe's planner, which places and orders the work: %s", text)
    return given


def only(name: str) -> tuple[Any, ...]:
    """Return the values that an argument of an engine may have; () for names not known here."""
    return _ENGINE.get(name, ())


def _is_one_of(value: object, values: Collection[object]) -> bool:
    is_plain = value is None or isinstance(value, bool | int | float | str | list | dict)
    return is_plain and value in values
