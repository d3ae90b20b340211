"""The errors that raymoe raises on purpose.

RaymoeError
  ConfigError (ValueError)        user input
    UnknownOptionError            with a suggestion
    UnsupportedModelError         lists what is supported
  CheckpointError                 file, tensor name, expected and found
  InfeasiblePlanError             nothing fits; shows the footprint and the bytes missing
  ScheduleError                   an invariant of a schedule is broken
  CapacityError                   KV blocks or memory exhausted
  ExecutionError                  a task or the engine failed; carries the cause
  WorkerProcessError              a helper process was ended from outside; the row may be retried
RaymoeWarning
  PerformanceWarning              slower than predicted, or a slow path was taken
"""

import difflib
from collections.abc import Iterable
from typing import Any, Self

# What vLLM, transformers and others call it, and what it may be here.
OTHER_NAMES = {
    "max_new_tokens": ("max_tokens",), "max_completion_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens",), "max_length": ("max_tokens", "max_model_len"),
    "stop_strings": ("stop",), "eos_token_id": ("stop_token_ids",), "typical_p": ("top_p",),
    "num_return_sequences": ("n",), "best_of": ("n",), "top_logprobs": ("logprobs",),
    "guided_json": ("structured_outputs",), "guided_decoding": ("structured_outputs",),
    "guided_regex": ("structured_outputs",), "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",), "response_format": ("structured_outputs",),
    "torch_dtype": ("dtype",), "kv_cache_dtype": ("kv_dtype",), "tp": ("tensor_parallel_size",),
    "mamba_ssm_cache_dtype": ("state_dtype",), "ssm_dtype": ("state_dtype",),
    "tp_size": ("tensor_parallel_size",), "gpu_memory_utilization": ("device_memory_bytes",),
    "max_seq_len": ("max_model_len",), "max_context_len": ("max_model_len",),
    "cpu_offload_gb": ("host_memory_bytes",), "swap_space": ("host_memory_bytes",),
    "max_num_seqs": ("policy",), "max_num_batched_tokens": ("policy",),
    "concurrency": ("num_actors",), "model": ("model_source",), "messages": ("messages_column",),
    "prompt": ("prompt_column",), "engine_kwargs": ("engine_config",),
    "continue_on_error": ("should_continue_on_error",), "tools": ("tools_column",),
}  # fmt: skip
WITHOUT_COUNTERPART = {
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "num_beams": "there is no beam search; n gives several samples",
    "use_beam_search": "there is no beam search; n gives several samples",
    "detokenize": "the text is always made; leave it out",
    "quantization": "it is read from the model; leave it out",
    "enable_prefix_caching": "prefixes are always shared; leave it out",
    "enable_chunked_prefill": "prompts are always computed in chunks; leave it out",
    "trust_remote_code": "no code of a model is ever run; leave it out",
    "pipeline_parallel_size": "layers stream to one GPU instead; leave it out",
    "device_map": "the planner places weights; leave it out",
}


class RaymoeError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        row: Position in its batch of the row that is at fault; None if none is.
        column: The column at fault.
        path: The file or directory at fault.
    """

    row: int | None = None
    column: str | None = None
    path: str | None = None

    def at(self, *, row: int | None = None, column: str | None = None, path: object = None) -> Self:
        """Note what is at fault, and return the error."""
        self.row, self.column = row, column
        self.path = None if path is None else str(path)
        return self


class ConfigError(RaymoeError, ValueError):
    """User input that cannot be used; names the field, the value and the limit."""


class UnknownOptionError(ConfigError):
    """An option that does not exist; suggests the nearest one.

    Attributes:
        name: What was given.
        known: The accepted names.
        where: What takes the option, such as "sampling parameter".
        suggestion: The name that was probably meant, or None.
    """

    def __init__(self, name: str, known: Iterable[str], where: str = "option") -> None:
        self.name, self.known, self.where = name, tuple(sorted(known)), where
        near = difflib.get_close_matches(name, self.known, n=1)
        other = next((one for one in OTHER_NAMES.get(name, ()) if one in self.known), None)
        self.suggestion = other or (near[0] if near else None)
        if self.suggestion:
            hint = f"did you mean {self.suggestion!r}?"
        else:
            hint = WITHOUT_COUNTERPART.get(name) or f"known: {', '.join(self.known)}"
        super().__init__(f"unknown {where} {name!r}; {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.known, self.where), self.__dict__


class UnsupportedModelError(ConfigError):
    """A model, or a field of its configuration, whose computation raymoe does not implement."""


class CheckpointError(RaymoeError):
    """Weights that are missing, damaged, unsafe or do not fit the configuration."""


class InfeasiblePlanError(RaymoeError):
    """No policy fits the memory; the message has the footprint and the missing bytes."""


class ScheduleError(RaymoeError):
    """A schedule that breaks an invariant; the message shows the task and its lane."""


class CapacityError(RaymoeError):
    """KV blocks or memory ran out."""


class ExecutionError(RaymoeError):
    """A task or the engine failed; `__cause__` is the first error."""


class WorkerProcessError(RaymoeError):
    """A helper process (tokenizer, chat template, grammar) was ended from outside.

    The row is not at fault: a journal does not keep it, and a resumed job tries it again.
    """


class RaymoeWarning(UserWarning):
    """Base of every warning raised on purpose."""


class PerformanceWarning(RaymoeWarning):
    """Something works but is slower than it should be; the message says what to change."""
