"""`generate`: a job in one call. `build_processor`: pipelines written for ray.data.llm."""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymoe.config import (
    ENGINE_NAMES,
    SAMPLING_NAMES,
    EngineConfig,
    as_engine_config,
    as_sampling_params,
)
from raymoe.data.columns import ERROR_COLUMN
from raymoe.data.generator import MoEGenerator, check_options, output_columns
from raymoe.data.journal_place import place_of
from raymoe.data.prompt_template import TEMPLATES, PromptTemplate, read_json_schema
from raymoe.data.rows import NO_COLUMN, SAMPLING_COLUMN
from raymoe.data.sizing import configure_data_context, map_batches_kwargs
from raymoe.data.workload import find_columns
from raymoe.errors import ConfigError, UnknownOptionError, describe, in_step
from raymoe.output_schema import OutputSchema
from raymoe.specs.workload import TASKS

if TYPE_CHECKING:
    from ray.data import Dataset

Row = dict[str, Any]
MapRow = Callable[[Row], Row]

logger = logging.getLogger(__name__)

# `seed` is an option of `MoEGenerator`: that of rows which have none.
_SAMPLING_OPTIONS = SAMPLING_NAMES - {"seed"}


def generate(ds: "Dataset", model: str | Path, **options: Any) -> "Dataset":
    """Generate text for every row of a dataset.

    It configures Ray Data for long steps, cuts the dataset into blocks, chooses the sizes of the
    actors for the cluster, and returns the lazy dataset with the columns of `MoEGenerator`.

    Args:
        ds: With a column ``prompt`` (text or token ids) or ``messages``; other columns are kept.
        model: A local model directory, or a name on the Hugging Face hub.
        options: Fields of `SamplingParams` (``max_tokens=256, temperature=0.0``), and options of
            `map_batches_kwargs` and `MoEGenerator` (``num_actors=8, id_column="id"``). Also
            ``prompt_template``, Jinja over the columns of a row that makes its prompt;
            ``system_prompt``, the same for a message before it, which makes the row a chat; each is
            text or ``"@FILE"``. ``json_schema``, a schema or a file with one that answers follow;
            ``output_schema`` of `MoEGenerator` also reads their values. With a journal_dir,
            ``retry_errors=True`` generates rows again whose recorded answer is an error.

    Raises:
        ConfigError: An option that does not exist, or a value that cannot be used.
    """
    _take_schema(options)
    _take_retries(options)
    sampling = {name: options.pop(name) for name in _SAMPLING_OPTIONS & options.keys()}
    if options.get("output_schema") is not None:
        options["output_schema"] = OutputSchema.of(options["output_schema"])
        sampling = options["output_schema"].constrain(sampling)
    if sampling:
        defaults = as_sampling_params(options.get("sampling_params"))
        options["sampling_params"] = defaults.override(sampling)
    template = _take_template(options)
    if template is None:
        return _generated(ds, model, options)
    return _generated_from(template, ds, model, options)


def _take_schema(options: dict[str, Any]) -> None:
    schema = options.pop("json_schema", None)
    if schema is None:
        return
    if options.get("structured_outputs") is not None:
        raise ConfigError("json_schema and structured_outputs contradict each other; give one")
    options["structured_outputs"] = {"json": read_json_schema(schema)}


def _take_retries(options: dict[str, Any]) -> None:
    if not options.pop("retry_errors", False):
        return
    directory = options.get("journal_dir")
    if directory is None:
        raise ConfigError("retry_errors needs a journal_dir: answers are recorded there")
    place_of(directory).forget_errors()


def _take_template(options: dict[str, Any]) -> PromptTemplate | None:
    given = {name: options.pop(name) for name in TEMPLATES if name in options}
    if all(value is None for value in given.values()):
        return None
    names = ("prompt_column", "messages_column", "error_column", "column_prefix")
    columns = {name: options[name] for name in names if options.get(name) is not None}
    template = PromptTemplate.of(given, **columns)
    for name in ("prompt_column", "messages_column"):
        if template.prompt is not None and name in columns:
            raise ConfigError(f"prompt_template and {name} contradict each other: a template makes "
                              "the prompts from any columns")  # fmt: skip
    return template


def _generated_from(
    template: PromptTemplate, ds: "Dataset", model: str | Path, options: Mapping[str, Any]
) -> "Dataset":
    """Return the answers to prompts of a template, without the column of its errors."""
    template.check_model(model)
    names = find_columns(ds)
    if names is not None:
        template.check(names)
    ds = ds.map_batches(template.apply, batch_size=None, batch_format="pyarrow")
    options = {**options, **template.operator_columns, "error_column": template.error_column}
    ds = _generated(ds, model, options)
    is_ours = names is None or template.error_column not in names
    return ds.drop_columns([template.error_column]) if is_ours else ds


def _generated(
    ds: "Dataset", model: str | Path, options: Mapping[str, Any], **more: Any
) -> "Dataset":
    context = ds.context
    if context.execution_no_progress_timeout_s == type(context)().execution_no_progress_timeout_s:
        order = context.execution_options.preserve_order  # the user's own settings stay
        configure_data_context(context=context, preserve_order=order)
    kwargs = map_batches_kwargs(model, ds=ds, **options)
    ds = ds.repartition(target_num_rows_per_block=kwargs["batch_size"], strict=True)
    return ds.map_batches(MoEGenerator, **kwargs, **more)


@dataclass(kw_only=True)
class MoEEngineProcessorConfig:
    """What `build_processor` runs.

    Fields and defaults are those of Ray's `vLLMEngineProcessorConfig`. `build_processor` refuses a
    field whose value has no meaning for raymoe.

    Attributes:
        model_source: A local model directory, or a name on the Hugging Face hub.
        batch_size: Rows of one call of the operator.
        concurrency: Actors, or the fewest and the most; None runs as many as the cluster has room
            for.
        engine_kwargs: Fields of `EngineConfig`, or arguments of vLLM's engine that mean the same.
        should_continue_on_error: Failed rows are kept, with a reason in ``__inference_error__``.
        chat_template_stage: Whether rows have ``messages``; else they have a ``prompt``.
        tokenize_stage: False if rows have token ids in ``tokenized_prompt``.
        detokenize_stage: The text is always made.
        max_concurrent_batches: Calls in flight per actor; the planner chooses if it is 8.
    """

    model_source: str
    batch_size: int = 32
    accelerator_type: str | None = None
    concurrency: int | tuple[int, int] | None = None
    runtime_env: dict[str, Any] | None = None
    max_pending_requests: int | None = None
    max_concurrent_batches: int = 8
    max_tasks_in_flight_per_actor: int | None = None
    should_continue_on_error: bool = False
    chat_template_stage: Any = True
    tokenize_stage: Any = True
    detokenize_stage: Any = True
    prepare_multimodal_stage: Any = False
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    task_type: str = "generate"
    log_engine_metrics: bool = True
    dynamic_lora_loading_path: str | None = None
    placement_group_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A pipeline from one dataset to another: preprocess, generate, postprocess."""

    model_source: str
    operator_kwargs: Mapping[str, Any]
    output_names: frozenset[str]
    preprocess: MapRow
    postprocess: MapRow
    preprocess_map_kwargs: Mapping[str, Any]
    postprocess_map_kwargs: Mapping[str, Any]
    should_continue_on_error: bool
    is_chat: bool
    remote_kwargs: Mapping[str, Any]

    def __call__(self, dataset: "Dataset") -> "Dataset":
        """Return the lazy dataset of postprocessed rows."""
        dataset = dataset.map(self._before, **self.preprocess_map_kwargs)
        options = self.operator_kwargs
        dataset = _generated(dataset, self.model_source, options, **self.remote_kwargs)
        return dataset.map(self._after, **self.postprocess_map_kwargs)

    def log_input_column_names(self) -> None:
        """Log which columns `preprocess` has to return."""
        name = self.operator_kwargs["messages_column" if self.is_chat else "prompt_column"]
        kind = "messages in OpenAI's format" if self.is_chat else "text or token ids"
        logger.info(
            "required: %s (%s); optional: %s (by default those of raymoe.SamplingParams)",
            name, kind, SAMPLING_COLUMN,
        )  # fmt: skip

    def _before(self, row: Row) -> Row:
        row = {**row, **self.preprocess(row)}
        params = row.get(SAMPLING_COLUMN)
        if isinstance(params, Mapping):  # the text is always made
            row[SAMPLING_COLUMN] = {k: v for k, v in params.items() if k != "detokenize"}
        if self.operator_kwargs["prompt_column"] == TOKENS_COLUMN and "prompt" in row:
            row.setdefault(TOKENS_COLUMN, row["prompt"])
        return {name: cell for name, cell in row.items() if name not in self.output_names}

    def _after(self, row: Row) -> Row:
        prefix = self.operator_kwargs.get("column_prefix", "")
        error = prefix + ERROR_COLUMN
        if row[error]:
            return row
        if f"{prefix}embedding" in row:
            row[f"{prefix}embeddings"] = row[f"{prefix}embedding"]  # Ray's name
        if not self.should_continue_on_error:
            return self.postprocess(row)
        try:
            with in_step("postprocessing the row"):
                return {**self.postprocess(dict(row)), error: ""}
        except Exception as problem:
            return row | {error: describe(problem)}


TOKENS_COLUMN = "tokenized_prompt"
_FIELDS = {one.name: one for one in dataclasses.fields(MoEEngineProcessorConfig)}
_STAGE_FIELDS = ("enabled", "model_source", "chat_template_kwargs")
_STAGE_ADVICE = {
    "chat_template": "put it into the file chat_template.jinja of the model's directory",
    "batch_size": "give batch_size to the processor's configuration",
    "concurrency": "give concurrency to the processor's configuration",
    "num_cpus": "give num_cpus in builder_kwargs",
    "memory": "give memory in builder_kwargs",
    "runtime_env": "give runtime_env to the processor's configuration",
}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_RENAMED = {"mamba_ssm_cache_dtype": "state_dtype"}
# Arguments of vLLM's engine. These values say what raymoe does anyway:
_ALREADY_SO: dict[str, tuple[Any, ...]] = {
    "task": ("generate", "auto"), "runner": ("generate", "auto"),
    "enable_prefix_caching": (True, None), "enable_chunked_prefill": (True, None),
    "trust_remote_code": (False,), "pipeline_parallel_size": (1,), "data_parallel_size": (1,),
    "enable_expert_parallel": (False,), "enable_lora": (False, None), "quantization": (None,),
    "tokenizer": (None,), "tokenizer_mode": ("auto", "hf"), "speculative_config": (None,),
    "kv_cache_dtype": ("auto",), "enforce_eager": (True, False, None),
    "mamba_ssm_cache_dtype": ("auto",),
    "disable_log_stats": (True, False), "revision": (None,), "download_dir": (None,),
    "load_format": ("safetensors",), "config_format": ("auto", "hf"),
    "distributed_executor_backend": ("uni", "mp", "ray", None), "skip_tokenizer_init": (False,),
}  # fmt: skip
# These tune vLLM's scheduler and memory; the planner chooses their counterparts.
_PLANNED = frozenset(
    ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "block_size", "swap_space",
     "cpu_offload_gb", "kv_offloading_size", "max_parallel_loading_workers", "async_scheduling",
     "num_gpu_blocks_override", "compilation_config")
)  # fmt: skip


def build_processor(  # noqa: PLR0917 - the arguments of ray.data.llm
    config: Any,
    preprocess: MapRow | None = None,
    postprocess: MapRow | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Build a pipeline as `ray.data.llm.build_processor` does, with raymoe as its engine.

    Args:
        config: A `MoEEngineProcessorConfig`, or Ray's ``vLLMEngineProcessorConfig`` as it is.
        preprocess: Called with each row; what it returns is added to the row, which then has
            ``messages`` (or ``prompt``) and usually ``sampling_params``.
        postprocess: Called with each row and its ``generated_text``; returns the row to keep. Error
            rows (with `should_continue_on_error`) are kept as they are.
        preprocess_map_kwargs: For `Dataset.map`, as ``num_cpus``.
        postprocess_map_kwargs: The same.
        builder_kwargs: ``chat_template_kwargs``, and further options of `map_batches_kwargs`.

    Raises:
        ConfigError: A field of the configuration that has no meaning here.
    """
    given = _fields_of(config)
    builder = dict(builder_kwargs or {})
    chat = _stage(given, "chat_template_stage")
    is_tokenized = not _stage(given, "tokenize_stage")["enabled"]
    _stage(given, "detokenize_stage")
    if chat.get("chat_template_kwargs") is not None:
        builder.setdefault("chat_template_kwargs", chat["chat_template_kwargs"])
    is_chat = chat["enabled"]
    options = {
        "prompt_column": NO_COLUMN if is_chat else TOKENS_COLUMN if is_tokenized else "prompt",
        "messages_column": "messages" if is_chat else NO_COLUMN,
        "engine_config": _engine_config(given),
        "task": given["task_type"],
        "batch_size": given["batch_size"],
        "should_continue_on_error": given["should_continue_on_error"],
        **_pool_sizes(given),
        **builder,
    }
    of_pool = inspect.signature(map_batches_kwargs).parameters
    of_rows = {name: value for name, value in options.items() if name not in of_pool}
    check_options(given["model_source"], of_rows, of_pool)
    remote = {name: given[name] for name in ("accelerator_type", "runtime_env")}
    return Processor(
        model_source=str(given["model_source"]),
        operator_kwargs=options,
        output_names=output_columns(given["model_source"], options).names,
        preprocess=preprocess or _same,
        postprocess=postprocess or _same,
        preprocess_map_kwargs=preprocess_map_kwargs or {},
        postprocess_map_kwargs=postprocess_map_kwargs or {},
        should_continue_on_error=given["should_continue_on_error"],
        is_chat=is_chat,
        remote_kwargs={name: value for name, value in remote.items() if value is not None},
    )


def _same(row: Row) -> Row:
    return row


def _fields_of(config: Any) -> Row:
    """Return the fields by name; refuses what has no meaning here."""
    missing = [name for name in _FIELDS if not hasattr(config, name)]
    if missing:
        raise ConfigError(
            f"config is a {type(config).__name__} without {', '.join(missing[:3])}; it takes a "
            "raymoe.MoEEngineProcessorConfig or ray.data.llm's vLLMEngineProcessorConfig"
        )
    given = {name: getattr(config, name) for name in _FIELDS}
    if "concurrency" not in getattr(config, "model_fields_set", _FIELDS):
        given["concurrency"] = None  # Ray's default of one actor is nobody's choice
    given["task_type"] = str(getattr(given["task_type"], "value", given["task_type"]))
    for name, why in {
        "dynamic_lora_loading_path": "a job has one adapter: give adapter in engine_kwargs",
        "placement_group_config": "an actor is on one node: give concurrency and engine_kwargs",
    }.items():
        if given[name] is not None:
            raise ConfigError(f"{name} has no meaning for raymoe, as {why}")
    if not given["log_engine_metrics"]:
        raise ConfigError("log_engine_metrics=False has no meaning for raymoe: it exports metrics "
                          "where Ray does (pip install 'raymoe[metrics]')")  # fmt: skip
    if given["max_tasks_in_flight_per_actor"] is not None:
        logger.warning("max_tasks_in_flight_per_actor is left to raymoe's planner")
    if _stage(given, "prepare_multimodal_stage")["enabled"]:
        raise ConfigError("prepare_multimodal_stage has no meaning for raymoe, which takes text")
    if given["task_type"] not in TASKS:
        raise ConfigError(f"task_type is {given['task_type']!r}; raymoe takes {', '.join(TASKS)}")
    return given


def _stage(given: Mapping[str, Any], name: str) -> Row:
    value = given[name]
    if isinstance(value, bool):
        return {"enabled": value}
    if hasattr(value, "model_dump"):  # one of Ray's typed configurations
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it takes True, False or a mapping")
    stage = {"enabled": True} | {key: one for key, one in value.items() if one is not None}
    for key, one in stage.items():
        same_model = key == "model_source" and one == given["model_source"]
        if key not in _STAGE_FIELDS or (key == "model_source" and not same_model):
            if not stage["enabled"]:
                continue
            advice = _STAGE_ADVICE.get(key, f"leave {key} out")
            raise ConfigError(
                f"{name} has {key}={one!r:.60}, which has no meaning for raymoe: the actors of the "
                f"engine do this work, with the model's own files; {advice}"
            )
    return stage


def _pool_sizes(given: Mapping[str, Any]) -> Row:
    concurrency = given["concurrency"]
    options: Row = {} if concurrency is None else _actors_of(concurrency)
    default: Any = _FIELDS["max_concurrent_batches"].default
    if given["max_concurrent_batches"] != default:
        options["rows_in_flight"] = given["max_concurrent_batches"] * given["batch_size"]
    return options


def _actors_of(concurrency: Any) -> Row:
    sizes = (concurrency, concurrency) if isinstance(concurrency, int) else tuple(concurrency)
    if len(sizes) != 2 or not all(type(n) is int and n >= 1 for n in sizes) or sizes[0] > sizes[1]:
        raise ConfigError(f"concurrency is {concurrency!r}; it takes n, or (fewest, most) from 1")
    min_actors, max_actors = sizes
    return {"num_actors": max_actors} | (
        {"min_actors": min_actors} if min_actors < max_actors else {}
    )


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Translate arguments of vLLM's engine; those of `EngineConfig` stay."""
    ours: Row = {}
    for name, value in given["engine_kwargs"].items():
        if name == "task_type" or (name in _ALREADY_SO and value in _ALREADY_SO[name]):
            continue
        name = _RENAMED.get(name, name)  # noqa: PLW2901 - the value stays
        if name in _PLANNED:
            logger.warning("engine_kwargs: %s=%r is left to raymoe's planner", name, value)
        elif name in ENGINE_NAMES:
            ours[name] = _DTYPE_ALIASES.get(value, value) if name.endswith("dtype") else value
        elif name in _ALREADY_SO:
            only = " or ".join(map(repr, _ALREADY_SO[name]))
            raise ConfigError(f"engine_kwargs has {name}={value!r}; raymoe takes only {only}")
        else:
            known = ENGINE_NAMES | _PLANNED | _ALREADY_SO.keys()
            raise UnknownOptionError(name, known, "key of engine_kwargs")
    if given["max_pending_requests"] is not None:
        ours.setdefault("max_queued_rows", given["max_pending_requests"])
    return as_engine_config(ours)
