"""`generate`: a job in one call. `build_processor`: pipelines written for ray.data.llm."""

import asyncio
import dataclasses
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

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
from raymoe.data.model_files import fetch_for_plan
from raymoe.data.prompt_template import TEMPLATES, PromptTemplate, read_json_schema
from raymoe.data.remote_args import take_remote_args
from raymoe.data.request_column import as_in_ray
from raymoe.data.rollouts import check_rollout
from raymoe.data.rows import NO_COLUMN, SAMPLING_COLUMN
from raymoe.data.sizing import POOL_OPTIONS, configure_data_context, map_batches_kwargs
from raymoe.data.workload import find_columns
from raymoe.download.files import UnreachableError
from raymoe.download.hub import HubModel
from raymoe.download.models import find_files, open_model
from raymoe.errors import ConfigError, UnknownOptionError, describe, in_step
from raymoe.output_schema import OutputSchema
from raymoe.specs.files import read_config
from raymoe.specs.workload import TASKS
from raymoe.vllm_names import NAMES, engine_options, has_no_effect, only

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

    Examples:
        >>> ds = ray.data.from_items([{"prompt": "date: 5 March 2024 ->"}])
        >>> ds = raymoe.generate(ds, raymoe.demo_model_path(), temperature=0.0)
        >>> ds.take_all()[0]["generated_text"]
        '2024-03-05'

    Args:
        ds: With a column ``prompt`` (text or token ids) or ``messages``; other columns are kept.
        model: A model directory, a name on the Hugging Face hub, or a URI (``s3://``).
        options: Fields of `SamplingParams` (``max_tokens=256, temperature=0.0``), and options of
            `map_batches_kwargs` and `MoEGenerator` (``num_actors=8, id_column="id"``). Also
            ``prompt_template``, Jinja over the columns of a row that makes its prompt;
            ``system_prompt``, the same for a message before it, which makes the row a chat; each is
            text or ``"@FILE"``. ``json_schema``, a schema or a file with one that answers follow;
            ``output_schema`` of `MoEGenerator` also reads their values. With a journal_dir,
            ``retry_errors=True`` generates rows again whose recorded answer is an error.
            ``rollout``, a coroutine function that asks the model several times for each row, with
            ``calls_per_row`` for the plan.

    Raises:
        ConfigError: An option that does not exist, or a value that cannot be used.
    """
    check_rollout(options)
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
    fetch_for_plan(model, runtime_env=take_remote_args(dict(options)).get("runtime_env"))
    template.check_model(model)
    names = find_columns(ds)
    if names is not None:
        template.check(names)
    ds = ds.map_batches(template.apply, batch_size=None, batch_format="pyarrow")
    options = {**options, **template.operator_columns, "error_column": template.error_column}
    ds = _generated(ds, model, options)
    is_ours = names is None or template.error_column not in names
    return ds.drop_columns([template.error_column]) if is_ours else ds


def _generated(ds: "Dataset", model: str | Path, options: Mapping[str, Any]) -> "Dataset":
    context = ds.context
    if context.execution_no_progress_timeout_s == type(context)().execution_no_progress_timeout_s:
        order = context.execution_options.preserve_order  # the user's own settings stay
        configure_data_context(context=context, preserve_order=order)
    kwargs = map_batches_kwargs(model, ds=ds, **options)
    ds = ds.repartition(target_num_rows_per_block=kwargs["batch_size"], strict=True)
    return ds.map_batches(MoEGenerator, **kwargs)


@dataclass(kw_only=True)
class MoEEngineProcessorConfig:
    """What `build_processor` runs.

    Fields and defaults are those of Ray's `vLLMEngineProcessorConfig`. `build_processor` refuses a
    field whose value has no meaning for raymoe.

    Examples:
        >>> config = raymoe.MoEEngineProcessorConfig(
        ...     model_source=str(raymoe.demo_model_path()), chat_template_stage=False
        ... )
        >>> processor = raymoe.build_processor(
        ...     config,
        ...     preprocess=lambda row: {
        ...         "prompt": f"date: {row['day']} March 2024 ->",
        ...         "sampling_params": {"temperature": 0.0},
        ...     },
        ...     postprocess=lambda row: {"date": row["generated_text"].strip()},
        ... )
        >>> processor(ray.data.from_items([{"day": 5}])).take_all()
        [{'date': '2024-03-05'}]

    Attributes:
        model_source: A model directory, a name on the Hugging Face hub, or a URI (``s3://``).
        batch_size: Rows of one call of the operator.
        concurrency: The most actors, or the fewest and the most, as Ray means it; None runs as many
            as the cluster has room for.
        engine_kwargs: Fields of `EngineConfig`, or arguments of vLLM's engine that mean the same.
        should_continue_on_error: Failed rows are kept, with a reason in ``__inference_error__``.
        chat_template_stage: Whether rows have ``messages``; else they have a ``prompt``.
        tokenize_stage: False if rows have token ids in ``tokenized_prompt``.
        detokenize_stage: The text is always made.
        max_concurrent_batches: Calls in flight per actor; the planner chooses if it is 8.
        apply_chat_template: What Ray called ``chat_template_stage`` before, as it did
            `chat_template`, `tokenize`, `detokenize`, `has_image`, `prepare_image_stage`,
            `resources_per_bundle` (now ``placement_group_config``) and `experimental`.
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
    apply_chat_template: InitVar[bool | None] = None
    chat_template: InitVar[str | None] = None
    tokenize: InitVar[bool | None] = None
    detokenize: InitVar[bool | None] = None
    has_image: InitVar[bool | None] = None
    prepare_image_stage: InitVar[Any] = None
    resources_per_bundle: InitVar[dict[str, float] | None] = None
    experimental: InitVar[dict[str, Any] | None] = None

    def __post_init__(  # noqa: PLR0917 - names of Ray before 2.60
        self,
        apply_chat_template: bool | None,
        chat_template: str | None,
        tokenize: bool | None,
        detokenize: bool | None,
        has_image: bool | None,
        prepare_image_stage: Any,
        resources_per_bundle: dict[str, float] | None,
        experimental: dict[str, Any] | None,
    ) -> None:
        renamed = {
            "chat_template_stage": apply_chat_template,
            "tokenize_stage": tokenize,
            "detokenize_stage": detokenize,
            "prepare_multimodal_stage": has_image or prepare_image_stage,
        }
        for name, value in renamed.items():
            if value is not None:
                setattr(self, name, value)
        if chat_template is not None and apply_chat_template is not False:
            self.chat_template_stage = {"chat_template": chat_template}
        if resources_per_bundle is not None:
            self.placement_group_config = {"bundle_per_worker": resources_per_bundle}
        tasks = (experimental or {}).get("max_tasks_in_flight_per_actor")
        if tasks is not None:
            self.max_tasks_in_flight_per_actor = tasks


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a processor, with the names of Ray's.

    Attributes:
        fn: The class of its actors.
        map_batches_kwargs: Options that `generate` gets for it.
    """

    fn: type
    map_batches_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A pipeline from one dataset to another: preprocess, generate, postprocess.

    Attributes:
        model_name: The model as it was named; `model_source` has its revision too.
    """

    model_source: str
    model_name: str
    operator_kwargs: Mapping[str, Any]
    output_names: frozenset[str]
    preprocess: Callable[..., Any]
    postprocess: Callable[..., Any]
    preprocess_map_kwargs: Mapping[str, Any]
    postprocess_map_kwargs: Mapping[str, Any]
    should_continue_on_error: bool
    is_chat: bool

    def __call__(self, dataset: "Dataset") -> "Dataset":
        """Return the lazy dataset of postprocessed rows."""
        before = _around(self.preprocess, self._before)
        dataset = dataset.map(before, **self.preprocess_map_kwargs)
        options = self.operator_kwargs
        dataset = _generated(dataset, self.model_source, options)
        after = _around(self.postprocess, self._after)
        return dataset.map(after, **self.postprocess_map_kwargs)

    def list_stage_names(self) -> list[str]:
        """Return the name of the one stage, whose actors template, tokenise, compute and decode."""
        return [MoEGenerator.__name__]

    def get_stage_by_name(self, name: str) -> Stage:
        """Return the stage.

        Raises:
            ValueError: It has another name.
        """
        (own,) = self.list_stage_names()
        if name != own:
            raise ValueError(f"Stage {name} not found; the one stage is {own}")
        return Stage(MoEGenerator, self.operator_kwargs)

    def log_input_column_names(self) -> None:
        """Log which columns `preprocess` has to return."""
        name = self.operator_kwargs["messages_column" if self.is_chat else "prompt_column"]
        kind = "messages in OpenAI's format" if self.is_chat else "text or token ids"
        logger.info(
            "required: %s (%s); optional: %s (by default those of raymoe.SamplingParams)",
            name, kind, SAMPLING_COLUMN,
        )  # fmt: skip

    def _before(self, preprocess: Callable[[Row], Any], row: Row) -> Row:
        added = preprocess(row)
        if not isinstance(added, Mapping):
            kind = type(added).__name__
            raise TypeError(f"preprocess returned a {kind}; it returns a dict for each row")
        row = {**row, **added}
        self._refuse_other_requests(row)
        if self.operator_kwargs["prompt_column"] == TOKENS_COLUMN and "prompt" in row:
            row.setdefault(TOKENS_COLUMN, row["prompt"])
        return {name: cell for name, cell in row.items() if name not in self.output_names}

    def _refuse_other_requests(self, row: Row) -> None:
        """Refuse what Ray's engine would have read of a row, and this one does not."""
        for name, advice in _OF_OTHER_REQUESTS.items():
            if _has_effect(row.get(name)):
                raise ConfigError(f"a row has {name}={row[name]!r:.60}; {advice}")
        model = row.get("model")
        if model is not None and model != self.model_name:
            raise ConfigError(
                f"a row has model={model!r:.60}, for which ray.data.llm loads an adapter; a job "
                "has one here: give adapter in engine_kwargs, and leave 'model' out of the rows"
            )

    def _after(self, postprocess: MapRow, row: Row) -> Row:
        prefix = self.operator_kwargs.get("column_prefix", "")
        error = prefix + ERROR_COLUMN
        row = as_in_ray(row, prefix)
        if row[error]:
            return row
        for name in (SAMPLING_COLUMN, TOKENS_COLUMN):  # which Ray's engine has taken
            row.pop(name, None)
        if not self.should_continue_on_error:
            return _row_of(postprocess(row))
        try:
            with in_step("postprocessing the row"):
                return {**_row_of(postprocess(dict(row))), error: ""}
        except Exception as problem:
            return row | {error: describe(problem)}


def _row_of(result: Any) -> Row:
    if not isinstance(result, Mapping):
        kind = type(result).__name__
        raise TypeError(f"postprocess returned a {kind}; it returns a dict for each row")
    return dict(result)


def _has_effect(options: Any) -> bool:
    """Whether something is given; Arrow gives rows the keys of others, without values."""
    if not isinstance(options, Mapping):
        return options is not None
    return any(
        value is not None and not has_no_effect(name, value) for name, value in options.items()
    )


def _around(function: Any, use: Callable[[MapRow, Row], Row]) -> Any:
    """Return what `Dataset.map` takes for a user's function, class or coroutine.

    Args:
        use: Called with the function of a row, which has no awaiting in it, and the row.
    """
    if isinstance(function, type):

        class Around:
            """An object of the user's class in each worker."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._function = _plain(function(*args, **kwargs))

            def __call__(self, row: Row) -> Row:
                return use(self._function, row)

        Around.__name__ = function.__name__  # in Ray's progress
        return Around
    return functools.partial(use, _plain(function))


def _plain(function: Callable[[Row], Any]) -> MapRow:
    """Return the function that waits for what a coroutine returns."""
    call = function if inspect.isroutine(function) else type(function).__call__
    if not (inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(function)):
        return function
    return functools.partial(_run, function)


def _run(function: Callable[[Row], Any], row: Row) -> Row:
    return asyncio.run(function(row))


TOKENS_COLUMN = "tokenized_prompt"
_NO_IMAGES = "raymoe takes text: leave it out"
_OF_OTHER_REQUESTS = {
    "pooling_params": "give task_options in builder_kwargs, such as {'dimensions': 256}",
    "tokenization_kwargs": "give max_model_len and on_too_long in engine_kwargs, such as 512 and "
                           "'truncate_right'",
    "multimodal_data": _NO_IMAGES,
    "mm_processor_kwargs": _NO_IMAGES,
    "multimodal_uuids": _NO_IMAGES,
}  # fmt: skip
_FIELDS = {one.name: one for one in dataclasses.fields(MoEEngineProcessorConfig)}
_STAGE_FIELDS = ("enabled", "chat_template_kwargs")
# Sizes of Ray's own processes for a stage, which raymoe does not have.
_STAGE_SIZES = frozenset(("batch_size", "concurrency", "num_cpus", "memory", "runtime_env"))
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
# Arguments that name files of the model, or say what is in them.
_OF_MODEL = frozenset(
    ("task_type", "model", "revision", "tokenizer_revision", "code_revision", "quantization",
     "hf_overrides")
)  # fmt: skip
_RENAMED = {"mamba_ssm_cache_dtype": "state_dtype"}


def build_processor(  # noqa: PLR0917 - the arguments of ray.data.llm
    config: Any,
    preprocess: Callable[..., Any] | None = None,
    postprocess: Callable[..., Any] | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Build a pipeline as `ray.data.llm.build_processor` does, with raymoe as its engine.

    Args:
        config: A `MoEEngineProcessorConfig`, or Ray's ``vLLMEngineProcessorConfig`` as it is.
        preprocess: Called with each row; what it returns is added to the row, which then has
            ``messages`` (or ``prompt``) and usually ``sampling_params``. It is a function, a
            coroutine, or a class whose objects are called: each worker makes one.
        postprocess: Called with each row and its ``generated_text``; returns the row to keep. Error
            rows (with `should_continue_on_error`) are kept as they are.
        preprocess_map_kwargs: For `Dataset.map`, as ``num_cpus`` or ``fn_constructor_kwargs``.
        postprocess_map_kwargs: The same.
        builder_kwargs: ``chat_template_kwargs``, and further options of `map_batches_kwargs`.

    Raises:
        ConfigError: A field of the configuration that has no meaning here.
    """
    given = _fields_of(config)
    if (builder_kwargs or {}).get("rollout") is not None:
        raise ConfigError("rows of a processor have one prompt; give rollout to raymoe.generate")
    options = _options_of(given, dict(builder_kwargs or {}))
    of_rows = {name: value for name, value in options.items() if name not in POOL_OPTIONS}
    name, engine_kwargs = str(given["model_source"]), given["engine_kwargs"]
    model = _at_revision(name, engine_kwargs)
    check_options(model, of_rows, POOL_OPTIONS)
    _fetch_for_plan(model, given["runtime_env"])
    check_options(model, of_rows, POOL_OPTIONS)  # again: more is known now
    _check_model(model, engine_kwargs)
    return Processor(
        model_source=model,
        model_name=name,
        operator_kwargs=options,
        output_names=output_columns(model, options).names,
        preprocess=preprocess or _same,
        postprocess=postprocess or _same,
        preprocess_map_kwargs=preprocess_map_kwargs or {},
        postprocess_map_kwargs=postprocess_map_kwargs or {},
        should_continue_on_error=given["should_continue_on_error"],
        is_chat=options["prompt_column"] == NO_COLUMN,
    )


def _options_of(given: Mapping[str, Any], builder: dict[str, Any]) -> Row:
    """Return the options of `map_batches_kwargs` and `MoEGenerator`."""
    chat = _stage(given, "chat_template_stage")
    is_tokenized = not _stage(given, "tokenize_stage")["enabled"]
    _stage(given, "detokenize_stage")
    if chat.get("chat_template_kwargs") is not None:
        builder.setdefault("chat_template_kwargs", chat["chat_template_kwargs"])
    is_chat = chat["enabled"]
    return {
        "prompt_column": NO_COLUMN if is_chat else TOKENS_COLUMN if is_tokenized else "prompt",
        "messages_column": "messages" if is_chat else NO_COLUMN,
        "engine_config": _engine_config(given),
        # Of a head with one output, which Ray calls a score, and raymoe a class.
        "task": "classify" if given["task_type"] == "score" else given["task_type"],
        "batch_size": given["batch_size"],
        "should_continue_on_error": given["should_continue_on_error"],
        "reasoning_parser": "none",  # texts are whole, as vLLM's are
        "tool_call_parser": "none",
        "has_request": True,
        **{name: given[name] for name in ("accelerator_type", "runtime_env")},
        **_pool_sizes(given),
        **builder,
    }


def _same(row: Row) -> Row:
    return row


def _fetch_for_plan(model: str, runtime_env: Mapping[str, Any] | None) -> None:
    try:
        fetch_for_plan(model, runtime_env=runtime_env)
    except UnreachableError as error:  # a job with it asks again
        logger.info("nothing is known of the model yet: %s", error)


def _fields_of(config: Any) -> Row:
    """Return the fields by name; refuses what has no meaning here."""
    missing = [name for name in _FIELDS if not hasattr(config, name)]
    if missing:
        raise ConfigError(
            f"config is a {type(config).__name__} without {', '.join(missing[:3])}; it takes a "
            "raymoe.MoEEngineProcessorConfig or ray.data.llm's vLLMEngineProcessorConfig"
        )
    given = {name: getattr(config, name) for name in _FIELDS}
    unknown = sorted({*getattr(config, "model_fields_set", ())} - _FIELDS.keys())
    if unknown:
        raise ConfigError(f"config has {unknown[0]}={getattr(config, unknown[0])!r:.60}, which "
                          "raymoe does not know; leave it out")  # fmt: skip
    if "concurrency" not in getattr(config, "model_fields_set", _FIELDS):
        given["concurrency"] = None  # Ray's default of one actor is nobody's choice
    given["task_type"] = str(getattr(given["task_type"], "value", given["task_type"]))
    if given["dynamic_lora_loading_path"] is not None:
        raise ConfigError("dynamic_lora_loading_path has no meaning for raymoe, as a job has one "
                          "adapter: give adapter in engine_kwargs")  # fmt: skip
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
    sizes = [f"{key}={one!r:.60}" for key, one in stage.items() if key in _STAGE_SIZES]
    if sizes and stage["enabled"]:
        logger.warning("%s has %s, without effect: the engine's actors do this work",
                       name, ", ".join(sizes))  # fmt: skip
    for key, one in stage.items() if stage["enabled"] else ():
        same_model = key == "model_source" and one == given["model_source"]
        if key not in (*_STAGE_FIELDS, *_STAGE_SIZES) and not same_model:
            advice = f"leave {key} out"
            if key == "chat_template":
                advice = "put it into the file chat_template.jinja of the model's directory"
            raise ConfigError(
                f"{name} has {key}={one!r:.60}, which has no meaning for raymoe: the actors of the "
                f"engine do this work, with the model's own files; {advice}"
            )
    return stage


_PROCESSORS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def _pool_sizes(given: Mapping[str, Any]) -> Row:
    concurrency = given["concurrency"]
    options: Row = {} if concurrency is None else _actors_of(concurrency)
    default: Any = _FIELDS["max_concurrent_batches"].default
    if given["max_concurrent_batches"] != default:
        options["rows_in_flight"] = given["max_concurrent_batches"] * given["batch_size"]
    return options | _resources(given)


def _resources(given: Mapping[str, Any]) -> Row:
    """Return what a placement group has for an actor: a bundle for each of its GPUs."""
    group = given["placement_group_config"]
    if not group:
        return {}
    num_ranks = given["engine_kwargs"].get("tensor_parallel_size", 1)
    bundles = group.get("bundles") or [group.get("bundle_per_worker") or {}] * num_ranks
    total: Counter[str] = Counter()
    for bundle in bundles[:num_ranks]:
        total.update({name: amount or 0 for name, amount in bundle.items()})
    options = {key: total.pop(name) for name, key in _PROCESSORS.items() if name in total}
    return options | ({"resources": dict(total)} if total else {})


def _actors_of(concurrency: Any) -> Row:
    sizes = (1, concurrency) if isinstance(concurrency, int) else tuple(concurrency)
    if len(sizes) != 2 or not all(type(n) is int and n >= 1 for n in sizes) or sizes[0] > sizes[1]:
        raise ConfigError(f"concurrency is {concurrency!r}; it takes n, or (fewest, most) from 1")
    min_actors, max_actors = sizes
    return {"num_actors": max_actors} | (
        {"min_actors": min_actors} if min_actors < max_actors else {}
    )


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Translate arguments of vLLM's engine; those of `EngineConfig` stay."""
    ours: Row = {}
    options = {key: one for key, one in given["engine_kwargs"].items() if key not in _OF_MODEL}
    model = given["model_source"]
    if str(options.get("tokenizer") or model) == str(model):
        options.pop("tokenizer", None)
    else:
        raise ConfigError(
            f"engine_kwargs has tokenizer={options['tokenizer']!r}; raymoe takes that of the "
            "model: put its files into the model's directory"
        )
    for key, value in engine_options(options, ENGINE_NAMES).items():
        name = _RENAMED.get(key, key)
        if name in ENGINE_NAMES:
            ours[name] = _DTYPE_ALIASES.get(value, value) if name.endswith("dtype") else value
        elif name == "enable_lora":
            raise ConfigError(
                f"engine_kwargs has enable_lora={value!r}, for adapters (LoRA) of single rows; a "
                "job has one here: give adapter in engine_kwargs"
            )
        elif values := only(name):
            allowed = " or ".join(map(repr, values))
            raise ConfigError(f"engine_kwargs has {name}={value!r}; raymoe takes only {allowed}")
        else:
            raise UnknownOptionError(name, ENGINE_NAMES | NAMES, "key of engine_kwargs")
    if given["max_pending_requests"] is not None:
        ours.setdefault("max_queued_rows", given["max_pending_requests"])
    return as_engine_config(ours)


def _at_revision(model: str | Path, engine_kwargs: Mapping[str, Any]) -> str:
    """Return the model at the revision that is asked for, as `open_model` takes it."""
    revision = engine_kwargs.get("revision")
    for name in ("tokenizer_revision", "code_revision"):
        other = engine_kwargs.get(name)
        if other not in (None, "main", revision):
            raise ConfigError(f"engine_kwargs has {name}={other!r}, and revision={revision!r}; "
                              "raymoe takes all files of a model at one revision")  # fmt: skip
    if revision in (None, "main"):
        return str(model)
    if not isinstance(open_model(model), HubModel):
        raise ConfigError(f"engine_kwargs has revision={revision!r}, which only a model of the hub "
                          f"has; {str(model)!r} is none")  # fmt: skip
    name = str(model).removeprefix("hf://")
    return f"hf://{name}@{quote(str(revision), safe='')}"


def _check_model(model: str | Path, engine_kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that contradict the files of the model."""
    directory, overrides = find_files(model), engine_kwargs.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        kind = type(overrides).__name__
        raise ConfigError(f"engine_kwargs has hf_overrides of the type {kind}; raymoe takes a dict")
    if directory is None:
        if overrides:
            raise ConfigError(
                "engine_kwargs has hf_overrides, which are compared with config.json of the model, "
                "and that is not known here; leave them out"
            )
        if engine_kwargs.get("quantization") is not None:
            logger.warning("quantization=%r is left to the model, whose files say it",
                           engine_kwargs["quantization"])  # fmt: skip
        return
    config = read_config(directory)
    _check_quantization(engine_kwargs.get("quantization"), config)
    for name, value, own in _differences(overrides, config):
        raise ConfigError(
            f"engine_kwargs has hf_overrides with {name}={value!r:.60}, but config.json of the "
            f"model has {own!r:.60}; change it in a copy of the model's directory"
        )


def _differences(
    overrides: Mapping[str, Any], config: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield names and values that a configuration has otherwise, and those that it has."""
    for name, value in overrides.items():
        own = config.get(name)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            yield from _differences(value, own, f"{place}{name}.")
        elif value != own:
            yield place + name, value, own


def _check_quantization(asked: Any, config: Mapping[str, Any]) -> None:
    stored = config.get("quantization_config")
    method = str(stored.get("quant_method")) if isinstance(stored, Mapping) else None
    if asked is not None and (method is None or _method(str(asked)) != _method(method)):
        raise ConfigError(
            f"engine_kwargs has quantization={asked!r}, but the model is "
            f"{'not quantised' if method is None else 'quantised as ' + repr(method)}; leave it "
            "out, or give a model that is stored so"
        )


def _method(name: str) -> str:
    """Return the name of a format without that of vLLM's kernels for it."""
    return name.partition("_marlin")[0].partition("_fp")[0].replace("compressed_", "compressed-")
