"""User settings: `SamplingParams`, `EngineConfig`, and `Settings` from the environment.

All are immutable, and nothing else reads the environment.
"""

import dataclasses
import functools
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.specs.adapter_config import base_and_adapter
from raymoe.specs.files import MAX_TOKEN_ID, expanded
from raymoe.structured import StructuredOutputs
from raymoe.units import MAX_INT64
from raymoe.vllm_names import engine_options, sampling_options

if TYPE_CHECKING:
    from raymoe.plan.policy import Choice, Policy
    from raymoe.specs.hardware import HardwareSpec, MeasuredNode
    from raymoe.specs.workload import Workload


NO_DIRECTORY = Path("/dev/null/raymoe")  # where nothing is found and nothing can be kept
MAX_GENERATED_TOKENS = 2**20
MAX_LOGPROBS = 64
MAX_SAMPLES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 4096
MAX_BAD_WORDS = 1024
MAX_RANKS = 64
GREEDY_BELOW_TEMPERATURE = 1e-5  # vLLM's threshold: dividing by less overflows float32

DTYPES = ("auto", "float32", "bfloat16", "float16")
COMPUTE_DTYPES = ("auto", "int8")
KV_DTYPES = (*DTYPES, "int8")
STATE_DTYPES = ("float32", "bfloat16")
HEADS = ("auto", "none")
DEVICES = ("auto", "cpu", "cuda", "emulated")
LOAD_FORMATS = ("auto", "dummy")
ON_TOO_LONG = ("error", "truncate_left", "truncate_right")
NumActors = int | Literal["auto"]  # engines of a job; as many as the cluster has room for
AUTO: Final = "auto"


Options = TypeVar("Options")


def check_kv_dtype(kv_dtype: str, device: str) -> None:
    """Raise `ConfigError` for a type of KV cache that the device's kernels do not read."""
    if kv_dtype == "int8" and device in {"cuda", "emulated"}:
        raise ConfigError(
            f"kv_dtype is 'int8', which is read by the cores alone, and the device {device!r}; "
            "set device='cpu', or leave kv_dtype at 'auto'"
        )


def refuses_unknown(
    where: str, translate: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Callable[[type[Options]], type[Options]]:
    """Give a dataclass's constructor our error for an unknown name in place of a TypeError.

    Args:
        translate: Called before, to take names of others.
    """

    def decorate(cls: type[Options]) -> type[Options]:
        fill: Any = cls.__init__
        known = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

        @functools.wraps(fill)
        def checked(self: Options, **options: Any) -> None:
            options = translate(options)
            check_names(options, known, where)
            fill(self, **options)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


def check_names(options: Iterable[object], known: Collection[str], where: str) -> None:
    """Raise `UnknownOptionError` for the first name that is not known."""
    for name in options:
        if name not in known:
            raise UnknownOptionError(str(name)[:80], known, where)


@refuses_unknown("sampling parameter", sampling_options)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one row are chosen; names and defaults are vLLM's.

    Examples:
        >>> raymoe.SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=["###"]).is_greedy
        False

    Attributes:
        max_tokens: Maximum number of tokens to generate per sequence.
        min_tokens: Before this many tokens, EOS and stop tokens are masked and stop strings end
            nothing.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens with this probability; 1 keeps all.
        top_k: Keep this many tokens; 0 or -1 keeps all.
        min_p: Drop tokens below this share of the best token's probability.
        repetition_penalty: Divides positive and multiplies negative logits of prompt and output
            tokens, as in transformers; 1 is off.
        presence_penalty: Subtracted once from the logits of generated tokens.
        frequency_penalty: Subtracted for each time a token was generated.
        no_repeat_ngram_size: No sequence of this many tokens, of prompt or output, occurs twice, as
            in transformers; 0 is off.
        stop: Strings that end a row; the text is cut before them. One that is a special token,
            which no text has, ends the row as an entry of `stop_token_ids` does.
        stop_token_ids: Tokens that end a row, in addition to the model's EOS tokens.
        ignore_eos: Continue after EOS.
        seed: Seed of this row; None takes the engine's.
        n: Sequences per prompt.
        logprobs: Return log probabilities of this many best tokens in addition to the chosen one;
            None is off.
        prompt_logprobs: The same for the tokens of the prompt.
        logit_bias: Added to the logits of these token ids.
        structured_outputs: Constraint on the text: a `StructuredOutputs`, a mapping with one of
            json, regex, choice, grammar and json_object, or the JSON text of one. The text ends
            when the constraint is complete, or unfinished at `max_tokens`.
        bad_words: Words that are not generated, with or without a space before them: the last token
            of one is masked where the tokens before it were generated.
        allowed_token_ids: All other tokens are masked, EOS too unless it is listed.
        include_stop_str_in_output: Whether the text ends after the stop string, or with that of the
            stop token, which is empty for special tokens that are skipped.
        skip_special_tokens: Whether texts leave out special tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | str | None = None
    bad_words: Iterable[str] | None = None
    allowed_token_ids: Iterable[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, (low, high) in INTEGER_RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                put(name, _integer(name, value, low, high))
        for name, (minimum, maximum) in _NUMBER_RANGES.items():
            put(name, _number(name, getattr(self, name), minimum, maximum))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        put("top_k", max(self.top_k, 0))
        put("seed", None if self.seed == -1 else self.seed)
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        put("logit_bias", _logit_bias(self.logit_bias))
        put("bad_words", _bad_words(self.bad_words))
        put("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids))
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._check()

    def _check(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
            )
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} is 0; it must be more than 0")
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            raise ConfigError(
                "structured_outputs end the text when their constraint is complete; leave out "
                "min_tokens and ignore_eos"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its normalised type."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def structured_outputs_params(self) -> StructuredOutputs | None:
        """`structured_outputs` in its normalised type."""
        return self.structured_outputs  # type: ignore[return-value]  # as above

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids that a vocabulary of this size does not have.

        Raises:
            ConfigError: Which parameter has which token.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ConfigError(
                        f"{name} has token {token}; the vocabulary has ids 0 to {vocab_size - 1}"
                    )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Parameters from a mapping; unknown keys are errors, None means "not given"."""
        return cls(**_given(options))

    def override(self, options: Mapping[str, Any]) -> "SamplingParams":
        """These parameters with the given keys replaced; None means "not given"."""
        given = _given(options)
        return dataclasses.replace(self, **given) if given else self


INTEGER_RANGES = {
    "max_tokens": (1, MAX_GENERATED_TOKENS),
    "min_tokens": (0, MAX_GENERATED_TOKENS),
    "top_k": (-1, MAX_TOKEN_ID),
    "no_repeat_ngram_size": (0, MAX_GENERATED_TOKENS),
    "n": (1, MAX_SAMPLES),
    "seed": (-1, MAX_INT64),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs")
_NUMBER_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@refuses_unknown("engine option", lambda options: engine_options(options, ENGINE_NAMES))
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs; None chooses automatically.

    Examples:
        >>> config = raymoe.EngineConfig(device="cpu", host_memory_bytes=64 * 2**30, seed=1)
        >>> with raymoe.Engine.from_pretrained(raymoe.demo_model_path(), config) as engine:
        ...     engine.max_model_len >= 256
        True

    Attributes:
        dtype: Type of the computation; "auto" is the checkpoint's.
        compute_dtype: Type of the operands of products with weights; "auto" is `dtype`, and int8
            where a checkpoint says so (W8A8). "int8" quantises a bfloat16 model while it is loaded,
            a scale for each output of a matrix and each row of inputs: about half the memory of the
            weights and faster, but results are no longer those of the model. For the device "cpu".
        kv_dtype: Type of the KV cache; "auto" is `dtype`. "int8" rounds keys and values of each
            token and head to 255 steps of a common factor, on the device "cpu": about half the
            memory of a token, and of what decoding reads, for results that differ a little.
        state_dtype: Type in memory of the states of linear attention, "float32" or "bfloat16". The
            latter halves the memory of a sequence and what decoding reads and writes of it, but
            rounds a state after each step, so that tokens depend on the steps that a row is
            computed in: on other rows, and on preemption.
        tensor_parallel_size: GPUs of the node that share every step, dividing attention heads,
            expert columns and KV cache, each with its own link. A policy and `device_memory_bytes`
            are then per GPU.
        device: "cpu"; "cuda"; "emulated", a device in host memory to which weights stream as to a
            GPU; or "auto", a GPU if there is one and the job is planned to end earlier with it than
            on the cores alone.
        load_format: "dummy" makes random weights in memory, to measure speed; the directory then
            needs only config.json.
        adapter: Directory of a LoRA adapter of PEFT, which is merged into the model tensor by
            tensor while it is loaded. An adapter's directory may also be given as the model; its
            base is then the one that it names.
        ignore_adapter: Whether a model runs although an adapter lies beside it, whose weights may
            differ from those that transformers would then compute with.
        head: "auto" is that of the checkpoint (a language model's or a classifier's); "none"
            leaves it out, so that the engine embeds.
        schedule: A name of `raymoe.schedule.builders.BUILDERS` that suits the device, or "auto".
        policy: Overrides the sizes that the planner would choose.
        planned: What the driver of a job has planned, which `map_batches_kwargs` hands to actors.
            An engine on a machine that differs, or has less memory, plans again and logs why.
        divides_node: An actor of Ray has the part of its node's cores and memory that its GPUs are
            of those of the node; `map_batches_kwargs` sets it where nodes differ.
        host_memory_bytes: Budget for weights and KV cache.
        device_memory_bytes: Usable memory of the device; all that is free by default.
        hardware: Node to plan for: a `HardwareSpec`, or a file of `raymoe profile --out`; None or
            "auto" is this machine, from its stored profile or else a quick probe. On the device
            "emulated" also a preset's name, whose rates are imitated with the host memory of this
            machine; without one the device is not slowed down. `map_batches_kwargs` hands actors a
            `MeasuredNode`, with which engines plan on machines like that of the driver.
        workload: Rows to plan for; None assumes a typical job. If given, the KV cache is allocated
            when the model is loaded, not during the run.
        max_model_len: Prompt and generated tokens of a row; at most the model's own limit.
        on_too_long: Treatment of a prompt that leaves no room for `max_tokens`: "error" makes an
            error row, "truncate_left" drops its first tokens, "truncate_right" its last.
        split_special_tokens: The text of special tokens in rows, such as ``<|im_end|>``, is encoded
            as ordinary text, as by tokenizers of transformers; in messages it makes an error row.
            Use it where rows have text of strangers.
        seed: Seed of rows whose `SamplingParams` have none.
        expected_calls: Threads that submit concurrently; once all have submitted, an idle engine
            starts at once. None relies on `linger_s`.
        linger_s: Time an idle engine waits for more rows before it starts.
        max_queued_rows: `submit` blocks while this many rows wait.
        shared_weights: Engines of one machine and user keep one copy of the weights in shared
            memory (`/dev/shm`) instead of one each, on devices with their own memory. "auto" leaves
            the choice to `map_batches_kwargs`, which shares if a node has several actors.
        watchdog_s: A longer step counts as stuck: all rows fail, and a Ray actor's process ends so
            that Ray starts another. None takes twenty times the plan's longest step, and at least
            ten minutes.
    """

    dtype: str = "auto"
    compute_dtype: str = "auto"
    tensor_parallel_size: int = 1
    device: str = "auto"
    load_format: str = "auto"
    adapter: str | Path | None = None
    ignore_adapter: bool = False
    head: str = "auto"
    schedule: str = "auto"
    policy: "Policy | None" = None
    planned: "Choice | None" = None
    divides_node: bool = False
    kv_dtype: str = "auto"
    state_dtype: str = "float32"
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    num_threads: int | None = None
    hardware: "str | HardwareSpec | MeasuredNode | None" = None
    workload: "Workload | None" = None
    max_model_len: int | None = None
    on_too_long: str = "error"
    split_special_tokens: bool = False
    seed: int = 0
    expected_calls: int | None = None
    linger_s: float = 0.1
    max_queued_rows: int = 8192
    shared_weights: bool | str = "auto"
    watchdog_s: float | None = None

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        if self.compute_dtype == "int8":
            _check_int8(self.dtype, self.device)
        _choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _choice("state_dtype", self.state_dtype, STATE_DTYPES)
        _choice("device", self.device, DEVICES)
        check_kv_dtype(self.kv_dtype, self.device)
        _choice("head", self.head, HEADS)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("on_too_long", self.on_too_long, ON_TOO_LONG)
        _flag("split_special_tokens", self.split_special_tokens)
        for name in ("host_memory_bytes", "device_memory_bytes"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1, 2**60)
        for name, high in (("num_threads", 4096), ("max_model_len", 2**30)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1, high)
        _integer("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        if self.expected_calls is not None:
            _integer("expected_calls", self.expected_calls, 1, 2**20)
        _integer("seed", self.seed, 0, MAX_INT64)
        _integer("max_queued_rows", self.max_queued_rows, 1, 2**30)
        _number("linger_s", self.linger_s, 0.0, 3600.0)
        object.__setattr__(self, "adapter", _directory("adapter", self.adapter))
        _flag("ignore_adapter", self.ignore_adapter)
        if not (self.shared_weights == "auto" or isinstance(self.shared_weights, bool)):
            raise ConfigError(
                f"shared_weights is {_shown(self.shared_weights)}; it must be True, False or 'auto'"
            )
        if self.watchdog_s is not None:
            _number("watchdog_s", self.watchdog_s, 0.001, 1e9)

    def allows(self, choice: "Choice") -> bool:
        """Whether no other schedule and no other sizes were asked for."""
        return self.policy in {None, choice.policy} and self.schedule in {"auto", choice.schedule}

    @property
    def may_leave_gpu_idle(self) -> bool:
        """Whether the job may run on the cores alone although there is a GPU."""
        is_alone = self.tensor_parallel_size == 1 and self.shared_weights is not True
        return self.device == "auto" and is_alone

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """A configuration from a mapping; unknown keys are errors, None means "not given"."""
        options = engine_options(options, ENGINE_NAMES)
        check_names(options, ENGINE_NAMES, "engine option")
        return cls(**{name: value for name, value in options.items() if value is not None})


ENGINE_NAMES: frozenset[str] = frozenset(field.name for field in dataclasses.fields(EngineConfig))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings from the environment, read once when an engine or command starts.

    Attributes:
        num_threads: `RAYMOE_NUM_THREADS`; None means all usable cores.
        host_memory_bytes: `RAYMOE_HOST_MEMORY_BYTES`; None means what the machine allows.
        cache_directory: `RAYMOE_CACHE`, which stores profiles of this machine.
    """

    num_threads: int | None = None
    host_memory_bytes: int | None = None
    cache_directory: Path = Path("~/.cache/raymoe")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read `RAYMOE_*` variables; raises ConfigError for malformed values."""
        variables = os.environ if environment is None else environment
        chosen = variables.get("RAYMOE_CACHE")
        try:
            cache = expanded(chosen or cls().cache_directory)
        except ConfigError:
            if chosen:
                raise
            cache = NO_DIRECTORY  # this user has no home
        return cls(
            num_threads=_whole(variables, "RAYMOE_NUM_THREADS", 4096),
            host_memory_bytes=_whole(variables, "RAYMOE_HOST_MEMORY_BYTES", 2**60),
            cache_directory=cache,
        )


def _whole(variables: Mapping[str, str], name: str, high: int) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:30]) <= high):
        raise ConfigError(f"{name} is {text[:40]!r}; it takes a whole number from 1 to {high}")
    return int(text)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigError(f"sampling_params is a {type(options).__name__}, not a mapping")
    options = sampling_options(options)
    check_names(options, SAMPLING_NAMES, "sampling parameter")
    return {name: value for name, value in options.items() if value is not None}


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # integer with more digits than Python prints
        text = f"an integer of {value.bit_length() if isinstance(value, int) else '?'} bits"
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        kind = type(value).__name__
        raise ConfigError(f"{name} is {_shown(value)} ({kind}); it takes a whole number")
    whole = int(value)
    if not low <= whole <= high:
        raise ConfigError(f"{name} is {_shown(value)}; it must be {low} to {high}")
    return whole


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise ConfigError(f"{name} is {_shown(value)} ({kind}); it takes a number")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not low <= real <= high:
        raise ConfigError(f"{name} is {_shown(value)}; it must be {low:g} to {high:g}")
    return real


def _check_int8(dtype: str, device: str) -> None:
    if device != "cpu":
        raise ConfigError(
            f"compute_dtype is 'int8', but the device is {device!r}; cores alone multiply int8: "
            "add device='cpu', or leave compute_dtype out"
        )
    if dtype not in {"auto", "bfloat16"}:
        raise ConfigError(
            f"compute_dtype is 'int8', but dtype is {dtype!r}; all else is computed in bfloat16: "
            "leave dtype out, or compute_dtype"
        )


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {_shown(value)}; it must be one of {', '.join(choices)}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {_shown(value)}; it takes true or false")


def _directory(name: str, value: object) -> str | None:
    if not (value is None or isinstance(value, str | Path)):
        raise ConfigError(f"{name} is {_shown(value)}; it takes the path of a directory")
    return None if value is None else str(value)


def _listed(name: str, value: object, limit: int) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {_shown(value)}; it takes a list")
    entries = list(value)
    if len(entries) > limit:
        raise ConfigError(f"{name} has {len(entries)} entries; at most {limit} are allowed")
    return entries


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else _listed("stop", value, MAX_STOP_STRINGS)
    for entry in entries:
        if not isinstance(entry, str):
            raise ConfigError(f"stop contains {_shown(entry)}; it takes strings")
        if not 1 <= len(entry) <= MAX_STOP_CHARACTERS:
            raise ConfigError(
                f"stop contains a string of {len(entry)} characters; "
                f"it must have 1 to {MAX_STOP_CHARACTERS}"
            )
    return tuple(entries)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    entries = _listed("stop_token_ids", value, MAX_STOP_TOKEN_IDS)
    return tuple(_integer("stop_token_ids entry", entry, 0, MAX_TOKEN_ID) for entry in entries)


def _bad_words(value: object) -> tuple[str, ...] | None:
    entries = () if value is None else _listed("bad_words", value, MAX_BAD_WORDS)
    for entry in entries:
        if not isinstance(entry, str) or not 1 <= len(entry) <= MAX_STOP_CHARACTERS:
            raise ConfigError(
                f"bad_words contains {_shown(entry)}; it takes texts of 1 to {MAX_STOP_CHARACTERS} "
                "characters"
            )
    return tuple(entries) or None


def _allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    entries = _listed("allowed_token_ids", value, MAX_TOKEN_ID)
    if not entries:
        raise ConfigError("allowed_token_ids is empty; leave it out, or list a token")
    return tuple(_integer("allowed_token_ids entry", entry, 0, MAX_TOKEN_ID) for entry in entries)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias is {_shown(value)}; it maps token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise ConfigError(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIASES}")
    biases = {}
    for key, bias in value.items():
        if bias is None:  # Arrow fills the keys of other rows with null
            continue
        # JSON has no integer keys, so decimal text is a token id too.
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12
        token = _integer("logit_bias key", int(key) if is_text else key, 0, MAX_TOKEN_ID)
        biases[token] = _number(f"logit_bias of token {token}", bias, -100.0, 100.0)
    return biases or None


def as_sampling_params(options: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Parameters of an operator; a mapping takes the names of `SamplingParams`."""
    if isinstance(options, SamplingParams):
        return options
    return SamplingParams.from_dict(options or {})


def with_base(
    model_source: str | Path, config: "EngineConfig"
) -> "tuple[str | Path, EngineConfig]":
    """The base of an adapter that is given as the model, and the configuration with the adapter.

    The path of the adapter becomes absolute. Raises as `base_and_adapter`.
    """
    source, _, adapter = base_and_adapter(model_source, config.adapter)
    if adapter is None:
        return source, config
    return source, dataclasses.replace(config, adapter=str(adapter))


def as_engine_config(options: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
    """Configuration of an engine; a mapping takes the names of `EngineConfig`."""
    if isinstance(options, EngineConfig):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"engine_config is {_shown(options)}; it takes an EngineConfig or a mapping of its "
            "fields"
        )
    return EngineConfig.from_dict(options or {})
