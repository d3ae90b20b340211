"""`MoEGenerator`: tables in, tables out, many threads at once, one engine underneath."""

import atexit
import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec

from raymoe.chat.parser import ChatParser
from raymoe.chat.reasoning import shortest_name
from raymoe.config import (
    ENGINE_NAMES,
    SAMPLING_NAMES,
    EngineConfig,
    SamplingParams,
    as_engine_config,
    as_sampling_params,
    with_base,
)
from raymoe.data.batches import check_format, column_names, num_rows
from raymoe.data.columns import NO_PARSER, OutputColumns, logprob_tokens, with_token_bytes
from raymoe.data.error_groups import ErrorGroup
from raymoe.data.job_rows import Found, JobRows, Submit, check_job, content_key
from raymoe.data.journal import SYNC_EVERY_S
from raymoe.data.manifest import Manifest
from raymoe.data.observer import Observer, RowCounter
from raymoe.data.occurrences import RowNumbers
from raymoe.data.request_column import RequestCells, timed
from raymoe.data.rollouts import (
    Function,
    RolloutColumns,
    RolloutLimits,
    Rollouts,
    check_rollout,
    name_of,
)
from raymoe.data.rows import SAMPLING_COLUMN, RowReader, RowRequest, shown
from raymoe.data.serial_calls import CallerThread, SerialCalls
from raymoe.data.status import GENERATE, make_status_directory, status_beside
from raymoe.data.tasks import read_task, read_task_of, reader_and_columns, task_fields
from raymoe.data.tracing import call_span, current_operator
from raymoe.download.models import find_files
from raymoe.engine.answers import AnswerReader, split_generation
from raymoe.engine.outputs import Generation
from raymoe.engine.tasks.rows import TaskOptions, TaskRow
from raymoe.engine.tokenizer import check_template_kwargs
from raymoe.errors import (
    ConfigError,
    ExecutionError,
    UnknownOptionError,
    encodable,
    in_step,
)
from raymoe.output_schema import OutputSchema, generation_params
from raymoe.specs.files import check_adapter, expanded, read_chat_template
from raymoe.specs.model import ModelSpec

if TYPE_CHECKING:
    from raymoe.engine.engine import Engine
    from raymoe.engine.identity import ModelIdentity


LAST_FLUSH_S = 10.0  # a slow disk must not delay the replacement of a broken process

P = ParamSpec("P")

logger = logging.getLogger(__name__)


def check_options(
    model_source: str | Path, options: Mapping[str, Any], others: Collection[str] = ()
) -> None:
    """Check on the driver what a `MoEGenerator` would refuse on its node, minutes later.

    Args:
        others: Options that exist besides, to be suggested.

    Raises:
        UnknownOptionError: `MoEGenerator` has no such option.
        ConfigError: There is no such model, or a value cannot be used.
        UnsupportedModelError: The model's mathematics is not implemented.
    """
    known = inspect.signature(MoEGenerator).parameters.keys() - {"model_source"}
    _refuse_unknown(options, {*known, *others} - {"options"})
    check_template_kwargs(options.get("chat_template_kwargs") or {})
    check_rollout(options)
    output_columns(model_source, options)
    model_source, config = with_base(model_source, as_engine_config(options.get("engine_config")))
    directory = find_files(model_source)
    if directory is not None:
        check_adapter(directory, is_ignored=config.ignore_adapter, adapter=config.adapter)
        spec = ModelSpec.from_directory(directory)
        as_sampling_params(options.get("sampling_params")).check_tokens(spec.vocab_size)


def check_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a `MoEGenerator` by name.

    Raises:
        UnknownOptionError: It has no such argument.
        ConfigError: It lacks its model, or has an argument twice.
    """
    signature = inspect.signature(MoEGenerator)
    _refuse_unknown(kwargs, signature.parameters.keys())
    args = tuple(args)
    if not args and "model_source" not in kwargs:
        raise ConfigError(
            "MoEGenerator has no model_source; give a local model directory or a name on the hub, "
            "in map_batches as fn_constructor_kwargs={'model_source': ...}"
        )
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ConfigError(
            f"MoEGenerator({', '.join(f'{one!r:.60}' for one in args)}, ...): {error}; only "
            "model_source may be given without its name"
        ) from None


def _refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    for name in options:
        if name in known:
            continue
        for group, fields in {
            "sampling_params": SAMPLING_NAMES,
            "engine_config": ENGINE_NAMES,
        }.items():
            if name in fields:
                raise ConfigError(
                    f"unknown option {name!r}; it belongs to {group}: give "
                    f"{group}={{{name!r}: {options[name]!r:.60}}}"
                )
        raise UnknownOptionError(name, known)


def _with_known_arguments(
    init: "Callable[Concatenate[MoEGenerator, P], None]",
) -> "Callable[Concatenate[MoEGenerator, P], None]":
    """Have wrong arguments named, with what was probably meant, instead of Python's TypeError."""

    def checked(self: "MoEGenerator", /, *args: P.args, **kwargs: P.kwargs) -> None:
        check_rollout(check_arguments(args, kwargs))
        init(self, *args, **kwargs)

    return functools.update_wrapper(checked, init)


def chat_parser(model_source: str | Path, options: Mapping[str, Any]) -> ChatParser:
    """Return the parsers of a `MoEGenerator`, as far as its model is known here."""
    config = as_engine_config(options.get("engine_config"))
    directory = find_files(with_base(model_source, config)[0])
    template = "" if directory is None else read_chat_template(directory)
    return ChatParser.of(
        template,
        options.get("reasoning_parser", "auto"),
        options.get("tool_call_parser", "auto"),
        options.get("tools_column") is not None,
    )


def output_columns(
    model_source: str | Path, options: Mapping[str, Any]
) -> OutputColumns | RolloutColumns:
    """Return the columns that a `MoEGenerator` adds, as far as its model is known here."""
    task, prefix = read_task_of(options), check_prefix(options.get("column_prefix", ""))
    if options.get("rollout") is not None:
        return RolloutColumns(prefix)
    schema = read_schema(options.get("output_schema"), task)
    params = generation_params(options.get("sampling_params"), schema)
    has_request = bool(options.get("has_request"))
    if task is not None:
        return OutputColumns(fields=task_fields(task, has_request=has_request), prefix=prefix)
    return OutputColumns.of(
        params,
        has_choices=bool(options.get("has_choices")),
        has_token_bytes=bool(options.get("has_token_bytes")),
        parser=chat_parser(model_source, options),
        has_request=has_request,
        schema=schema,
        prefix=prefix,
    )


def read_schema(value: object, task: TaskOptions | None) -> OutputSchema | None:
    """Return the schema of an operator's answers, which are dicts; None without one."""
    if value is not None and task is not None:
        raise ConfigError(f"output_schema has no meaning for the task {task.task!r}, which writes "
                          "no text; leave it out")  # fmt: skip
    return None if value is None else dataclasses.replace(OutputSchema.of(value), model=None)


def check_prefix(prefix: object) -> str:
    if not isinstance(prefix, str):
        raise ConfigError(f"column_prefix is {prefix!r:.60}; it takes text, such as 'judge_'")
    return prefix


class MoEGenerator:
    """The callable class for `Dataset.map_batches`, with batches of every format; needs no Ray.

    It owns one engine and is called by many threads: each call blocks until the rows of its batch
    are done, while the engine batches the rows of all calls. Every input row gives one output row,
    in order. A row that cannot be generated becomes an error row (``__inference_error__`` says why,
    ``finish_reason`` is "error", the text is empty) and does not affect other rows.

    Columns added: ``generated_text, generated_tokens, num_input_tokens, num_cached_tokens`` (of the
    prompt, found in the KV cache of earlier rows instead of computed; depends on their order),
    ``num_generated_tokens, finish_reason, __inference_error__``; with ``n > 1`` also
    ``generated_texts`` (all samples; the other columns hold the first), with ``has_choices`` also
    ``choices``, with ``logprobs`` and ``prompt_logprobs`` columns of these names.

    Examples:
        >>> generator = raymoe.MoEGenerator(
        ...     raymoe.demo_model_path(), sampling_params={"temperature": 0.0}
        ... )
        >>> frame = pandas.DataFrame({"prompt": ["name: Dr. Ada B. Lovelace ->"]})
        >>> generator(frame)["generated_text"].tolist()
        ['Lovelace, Ada']
        >>> generator.close()
        >>> ds = ray.data.from_items([{"prompt": "amount: EUR 1.234,50 ->"}])
        >>> kwargs = raymoe.map_batches_kwargs(
        ...     raymoe.demo_model_path(), ds=ds, sampling_params={"temperature": 0.0}
        ... )
        >>> ds.map_batches(raymoe.MoEGenerator, **kwargs).take_all()[0]["generated_text"]
        '1234.50 EUR'
        >>> ds = ray.data.range(4)
        >>> context = raymoe.configure_data_context(preserve_order=True, context=ds.context)
        >>> context.execution_options.preserve_order
        True

    Args:
        model_source: A model directory, a name on the Hugging Face hub, or a URI (``s3://``).
        sampling_params: Defaults for every row; ``max_tokens``, ``temperature`` and so on. A column
            ``sampling_params`` (struct or JSON text) overrides them for its row, key by key.
        prompt_column: Text, or token ids.
        messages_column: Chat messages, as structs or JSON text; a row has a prompt or messages.
        id_column: Its value, instead of the prompt, seeds the random numbers of a row.
        tools_column: Tools that the messages may call, as structs or JSON text, for chat templates
            that support them.
        chat_template_kwargs: Passed to the chat template, such as ``{"enable_thinking": False}``; a
            column of this name (struct or JSON text) overrides them for its row, key by key.
            ``continue_final_message`` and ``add_generation_prompt`` are among them.
        error_column: Rows with text in this column become error rows with that text.
        has_choices: Adds a column with all samples of a row, their finish reasons and log
            probabilities; rows may then ask for ``n`` and ``logprobs`` themselves.
        has_token_bytes: Adds a column ``token_bytes`` with the bytes of text that each token among
            a row's log probabilities stands for.
        has_request: Adds a struct ``__request__`` with what ray.data.llm says of a row's request:
            ``request_id, batch_uuid, prompt`` (a chat rendered), ``prompt_token_ids, params,
            time_taken_llm`` (seconds), ``metrics, logprobs`` and ``prompt_logprobs``. Rows may then
            ask for log probabilities themselves.
        reasoning_parser: Splits reasoning from the answers of rows with messages, into a column
            ``reasoning_text``. "auto" finds the parser from the chat template and adds the column
            if the template marks reasoning; "none" leaves reasoning in ``generated_text``.
        tool_call_parser: The same for the calls of rows with tools, into a column ``tool_calls`` (a
            list of name, arguments as JSON text, and the id that the model gave the call, null
            without one). "auto" needs a tools_column. What cannot be read stays in
            ``generated_text``.
        output_schema: A pydantic class, a JSON schema of an object, or the path of a file with one.
            Answers follow it, and the column ``parsed`` has their values as structs; where it is
            null, ``parsed_error`` says why, such as ``cut by max_tokens at $.items[2].price``.
        engine_config: An `EngineConfig`, or its fields as a dict.
        should_continue_on_error: False raises on the first error row instead.
        seed: For rows whose parameters have none.
        max_concurrent_calls: Threads that call at once; when all of them have submitted, an idle
            engine starts without waiting for `linger_s`. `map_batches_kwargs` sets it.
        linger_s: How long an idle engine waits for more rows.
        on_too_long: "error", "truncate_left" or "truncate_right".
        journal_dir: Directory in which each finished row is recorded and looked up before it is
            generated, so that a killed actor or job does not generate finished rows again. All
            actors of a job use the same directory, on a file system that their nodes share, or a
            place in a bucket, such as ``s3://bucket/job``, which one driver at a time may use. It
            belongs to one model and one set of options; this class refuses to start with others.
            Remove it when the job is done. It also identifies a row that ends every process it runs
            in and makes it an error row (`raymoe.data.quarantine`); without it such a row is
            retried forever.
        journal_sync_s: Interval at which the journal is forced to disk, or put into its bucket.
            On disk, records survive the end of a process at once, and that of the machine after
            this time; in a bucket both after this time.
        status_dir: Directory in which this actor writes its status every few seconds, for ``raymoe
            status`` and ``raymoe report``; all actors of a job use the same directory. With a
            journal_dir, the directory of the same name with the ending ``.status`` is the default.
        task: "generate"; "score" adds the columns ``logprob, mean_logprob, num_scored_tokens,
            perplexity, is_greedy``, "classify" ``label, label_probability, label_probabilities``,
            "embed" ``embedding``, each with ``num_input_tokens, num_cached_tokens`` and
            ``__inference_error__``.
        task_options: Fields of `raymoe.engine.tasks.rows.TaskOptions`.
        column_prefix: Precedes the name of each column added, ``__inference_error__`` too, so that
            a pipeline can have several generators. A rollout names its own columns.
        rollout: ``async def turns(row, generate)``, called with each row as a dict. Each ``await
            generate(prompt, tools=..., **sampling_params)`` takes a text, token ids or messages,
            and returns a `Generation`; calls of all rows share steps. It returns a dict of columns,
            beside which there are ``num_calls, num_input_tokens, num_cached_tokens,
            num_generated_tokens`` (of all calls) and ``__inference_error__``. What it raises makes
            an error row.
        rollout_limits: Of each row: ``calls`` (1,000 by default), ``tokens`` that are generated,
            and ``seconds`` besides the calls. Beyond them it becomes an error row.
    """

    _engine: "Engine | None" = None
    _observer: Observer | None = None
    _job: JobRows | None = None
    _template = ""  # the chat template, once the engine is open
    _parser = NO_PARSER
    _answers: AnswerReader | None = None
    _rollouts: Rollouts | None = None
    _columns: OutputColumns | RolloutColumns
    _has_finished_a_batch = _has_generated_a_batch = False

    @_with_known_arguments
    def __init__(  # noqa: PLR0913 - the options of a user, all keyword-only
        self,
        model_source: str | Path,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        messages_column: str = "messages",
        id_column: str | None = None,
        tools_column: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
        output_schema: Any = None,
        error_column: str | None = None,
        has_choices: bool = False,
        has_token_bytes: bool = False,
        has_request: bool = False,
        engine_config: EngineConfig | Mapping[str, Any] | None = None,
        should_continue_on_error: bool = True,
        seed: int | None = None,
        max_concurrent_calls: int | None = None,
        linger_s: float | None = None,
        on_too_long: str | None = None,
        journal_dir: str | Path | None = None,
        journal_sync_s: float = SYNC_EVERY_S,
        status_dir: str | Path | None = None,
        task: str = "generate",
        task_options: Mapping[str, Any] | None = None,
        column_prefix: str = "",
        rollout: Function | None = None,
        rollout_limits: Mapping[str, Any] | None = None,
    ) -> None:
        self._pid, self._task = os.getpid(), read_task(task, task_options)
        self._schema, prefix = read_schema(output_schema, self._task), check_prefix(column_prefix)
        reader = RowReader(
            defaults=generation_params(sampling_params, self._schema), prompt_column=prompt_column,
            messages_column=messages_column, id_column=id_column, tools_column=tools_column,
            error_column=error_column, has_choices=has_choices, has_request=has_request,
            is_rollout=rollout is not None,
            chat_template_kwargs=check_template_kwargs(chat_template_kwargs or {}))  # fmt: skip
        self._reader, self._columns = reader_and_columns(reader, self._task, prefix)
        parsers = (reasoning_parser, tool_call_parser, (tools_column or rollout) is not None)
        ChatParser.of("", *parsers)  # refuses unknown names before the model loads
        self._has_token_bytes, self._raises = has_token_bytes, not should_continue_on_error
        self._request_cells = RequestCells(self._task) if has_request else None
        config = _with_changes(
            as_engine_config(engine_config), task, seed=seed, linger_s=linger_s,
            expected_calls=max_concurrent_calls, on_too_long=on_too_long)  # fmt: skip
        self._model, open_job = str(model_source), None
        if journal_dir is not None:
            identity, config = _identify(model_source, config)
            model_source = identity.directory  # the engine loads what was identified
            parts = (reader.defaults, config, reader.chat_template_kwargs, self._task,
                     "" if rollout is None else name_of(rollout), parsers[0])  # fmt: skip
            open_job = _prepare_job(journal_dir, identity, parts, journal_sync_s)
            status_dir = status_dir or _status_beside(journal_dir)
        self._load(model_source, config, name=self._model, status_dir=status_dir, open_job=open_job)
        if self._task is None:
            self._choose_parser(*parsers)
            self._choose_columns(reader, prefix, rollout, rollout_limits)

    def __call__(self, batch: Any) -> Any:
        """Generate for the rows of one batch; blocks until all are done.

        Args:
            batch: An Arrow table, a pandas frame, or arrays by name, as Ray Data gives it for its
                `batch_format`.

        Returns:
            The batch in the same format, with the columns added.
        """
        tags = current_operator()
        if self._observer is not None:
            self._observer.locate(tags)
        with call_span(tags, self._model) as span:
            table, generations = self._answer(batch)
            if span is not None:
                span.set_attributes(_span_attributes(generations))
        if self._raises:
            _raise_first_error(generations)
        return table

    def _answer(self, batch: Any) -> tuple[Any, Sequence[Generation]]:
        self._check(batch)
        if os.getpid() != self._pid:
            raise ExecutionError(
                f"this MoEGenerator is of process {self._pid}; make one in each process, and start "
                "processes with the method 'spawn'"
            )
        if self._engine is None:
            raise ExecutionError("this MoEGenerator is closed")
        requests = self._reader.read(batch)
        with self._calls.count(len(requests), self._engine):
            whole, num_found = self._generate(self._engine, requests)
        self._has_finished_a_batch = True
        engine = self._engine
        parts = [
            generation.after(functools.partial(self._finished, engine, request))
            for request, generation in zip(requests, whole, strict=True)
        ]
        if self._has_token_bytes and self._task is None:
            parts = add_token_bytes(parts, self._engine.token_bytes)
        if self._request_cells is not None:
            parts = self._request_cells.add(self._engine, requests, parts)
        table, generations = self._columns.append(batch, parts)
        num_refused = sum(bool(request.error) for request in requests)
        for position in self._counts.add(generations, num_found, num_refused):
            _log_error(requests[position], position, generations[position].error)
        return table, generations

    def close(self) -> None:
        """Stop the engine and free its memory; idempotent.

        Does nothing in a forked process: threads and files belong to its parent.
        """
        if os.getpid() != self._pid:
            return
        engine, self._engine = self._engine, None
        rollouts, self._rollouts = self._rollouts, None
        if self._observer is not None:
            self._observer.close()  # it reads the engine a last time
        if rollouts is not None:
            rollouts.close()  # before the engine ends their calls
        if engine is not None:
            engine.close()
        if self._answers is not None:
            self._answers.close()
        if self._job is not None:
            self._job.close()

    def __del__(self) -> None:
        # Not after `close`: the interpreter may have ended so far that nothing can be called.
        if getattr(self, "_engine", None) is not None:
            self.close()

    def _load(
        self,
        model_source: str | Path,
        config: EngineConfig,
        *,
        name: str,
        status_dir: str | Path | None,
        open_job: Callable[[], JobRows] | None,
    ) -> None:
        """Start the engine, with an observer from before it loads, and open its journal."""
        self._calls, self._numbers = SerialCalls(config.expected_calls), RowNumbers()
        self._counts = RowCounter()
        self._answers = None if self._schema is None else AnswerReader(self._schema)
        try:
            task = GENERATE if self._task is None else self._task.task
            self._observer = Observer(name, self._counts, status_dir=status_dir, task=task)
            self._engine = self._open_engine(model_source, config)
            if isinstance(self._reader, RowReader):
                self._engine.check_params(self._reader.defaults)
            self._job = None if open_job is None else open_job()
        except BaseException as error:
            if self._observer is not None:
                self._observer.fail(f"{type(error).__name__}: {error}")
            self.close()
            raise
        self._observer.attach(self._engine)
        # Ray may end an actor while one of its threads still refers to this object.
        atexit.register(_close, weakref.ref(self))

    def _open_engine(self, model_source: str | Path, config: EngineConfig) -> "Engine":
        """Load the engine; subclasses override this."""
        engine = _load_engine(model_source, config)
        self._template = read_chat_template(engine.directory)
        return engine

    def _choose_parser(self, reasoning: str, tool_calls: str, has_tools: bool) -> None:
        self._parser = ChatParser.of(self._template, reasoning, tool_calls, has_tools)
        if self._engine is not None:
            self._engine.reasoning_parser = self._parser.reasoning

    def _choose_columns(
        self, reader: RowReader, prefix: str, rollout: Function | None, limits: object
    ) -> None:
        if rollout is not None:
            self._start_rollouts(rollout, limits, reader, prefix)
            return
        self._columns = OutputColumns.of(
            reader.defaults, has_choices=reader.has_choices, has_token_bytes=self._has_token_bytes,
            has_request=reader.has_request, parser=self._parser, schema=self._schema, prefix=prefix,
        )  # fmt: skip

    def _start_rollouts(
        self, rollout: Function, limits: object, reader: RowReader, prefix: str
    ) -> None:
        assert self._engine is not None
        self._columns = RolloutColumns(prefix)
        self._rollouts = Rollouts(
            rollout,
            self._engine,
            limits=RolloutLimits.of(limits),
            split=functools.partial(self._finished, self._engine),
            reserved=self._columns.names,
            template_kwargs=reader.chat_template_kwargs,
        )

    @property
    def thread_pool_executor(self) -> CallerThread:
        """Where Ray Data has a class called that it was not told to be thread-safe.

        This one is, so that its calls run in the threads that they come from.
        """
        return CallerThread()

    @thread_pool_executor.setter
    def thread_pool_executor(self, executor: Executor) -> None:
        executor.shutdown(wait=False)

    def _check(self, batch: Any) -> None:
        check_format(batch)
        names = column_names(batch)
        self._columns.check_names(names)
        # Blocks may lack a column that is null in all their rows, so only a first one is an error.
        if num_rows(batch) and not self._has_finished_a_batch:
            self._reader.check_columns(names)

    def _numbered(self, requests: Sequence[RowRequest]) -> list[RowRequest]:
        """Return the rows, each of which knows how many equal ones there were before it."""
        sampled = [
            i
            for i, request in enumerate(requests)
            if self._task is None
            and request.row_key is None
            and (self._rollouts is not None or not request.sampling_params.is_greedy)
        ]
        numbers = self._numbers.claim([content_key(requests[i]) for i in sampled])
        numbered = list(requests)
        for i, number in zip(sampled, numbers, strict=True):
            if number:
                numbered[i] = dataclasses.replace(requests[i], occurrence=number)
        return numbered

    def _generate(
        self, engine: "Engine", requests: Sequence[RowRequest]
    ) -> tuple[list[Generation], int]:
        """Return the answers, and how many of them an earlier run has left."""
        good = self._numbered([request for request in requests if not request.error])
        job = self._job
        known = [Found(b"", b"", None)] * len(good) if job is None else job.find(good)
        missing = [i for i, found in enumerate(known) if found.answer is None]
        wanted, places = [good[i] for i in missing], [known[i] for i in missing]
        submit: Submit = functools.partial(_submit, engine, self._task)
        if self._request_cells is not None:
            submit = timed(submit)
        if self._rollouts is not None:
            submit = self._rollouts.submit
        try:
            futures = submit(wanted) if job is None else job.submit(wanted, places, submit)
            fresh = iter(_wait_for(engine, futures))
        except Exception as error:
            self._fail(error)
        self._has_generated_a_batch |= bool(missing)
        if job is not None:
            job.flush()
        done = iter([next(fresh) if found.answer is None else found.answer for found in known])
        generations = [
            Generation(finish_reason="error", error=encodable(request.error))
            if request.error
            else _with_column(next(done), request.column)
            for request in requests
        ]
        return generations, len(known) - len(missing)

    def _finished(
        self, engine: "Engine", request: RowRequest, generation: Generation
    ) -> Generation:
        """Return an answer with its parts and its value; the journal keeps it whole.

        So parsers and schemas may change.
        """
        if self._parser != NO_PARSER and generation.prompt_end and not generation.error:
            generation = split_generation(
                self._parser,
                generation,
                request.prompt,
                request.sampling_params,
                decode=engine.decode,
            )
        if self._answers is not None:
            generation = self._answers.read(generation, request.sampling_params)
        return generation

    def _fail(self, error: Exception) -> NoReturn:
        """End the process inside a Ray actor, so that Ray restarts it; raise elsewhere.

        Without a journal, a restarted actor that breaks again before it generated anything raises
        too: the cause is permanent, and the job would restart forever. With a journal, the crash
        counts tell whether the cause is a row, which becomes an error row, or the engine, which
        fails the job.
        """
        logger.critical("the engine is broken: %s", error, exc_info=error)
        if self._job is not None:
            with contextlib.suppress(ExecutionError):  # the journal broke too, and has logged why
                self._job.save(LAST_FLUSH_S)
        if self._observer is not None:
            self._observer.fail(f"the engine is broken: {error}")
        is_useful = self._has_generated_a_batch or self._job is not None
        if should_leave_process(is_restart_useful=is_useful):
            logging.shutdown()
            os._exit(1)
        raise ExecutionError(f"the engine is broken: {error}") from error


def _close(reference: "weakref.ref[MoEGenerator]") -> None:
    operator = reference()
    if operator is not None:
        operator.close()


def _with_changes(config: EngineConfig, task: str, **changes: Any) -> EngineConfig:
    given = {name: value for name, value in changes.items() if value is not None}
    if task == "embed":
        given["head"] = "none"
    return dataclasses.replace(config, **given)


def add_token_bytes(
    generations: Sequence[Generation], read: Callable[[set[int]], dict[int, bytes]]
) -> list[Generation]:
    """Return generations with the bytes of the tokens of their log probabilities."""
    wanted = {token for generation in generations for token in logprob_tokens(generation)}
    try:
        with in_step("finding the bytes of tokens"):
            token_bytes = read(wanted) if wanted else {}
            return [with_token_bytes(generation, token_bytes) for generation in generations]
    except ExecutionError:  # the engine was closed, which is no row's fault
        raise
    except Exception as error:
        if len(generations) == 1:
            return [Generation.from_error(error, generations[0].num_input_tokens)]
    return [one for generation in generations for one in add_token_bytes([generation], read)]


def _status_beside(journal_dir: str | Path) -> Path | None:
    if "://" in str(journal_dir):
        return None
    try:
        return make_status_directory(status_beside(expanded(journal_dir)))
    except ConfigError as error:
        logger.warning("no status is written: %s; give a status_dir", error)
        return None


def _load_engine(model_source: str | Path, config: EngineConfig) -> "Engine":
    # A driver only names `MoEGenerator`; torch loads where a generator is made.
    from raymoe.engine.engine import Engine  # noqa: PLC0415

    if _has_gpu_of_ray():
        from raymoe.engine.node import require_gpu  # noqa: PLC0415 - loads torch, as above

        require_gpu(config)
        if config.divides_node:
            from raymoe.data.node_share import with_part_of_node  # noqa: PLC0415 - it imports Ray

            config = with_part_of_node(model_source, config)
    return Engine.from_pretrained(model_source, config)


def _has_gpu_of_ray() -> bool:
    """Whether Ray has given GPUs to this process, which is an actor's."""
    import ray  # noqa: PLC0415 - engines without Ray do not need it

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.get_accelerator_ids().get("GPU"))


def _identify(
    model_source: str | Path, config: EngineConfig
) -> "tuple[ModelIdentity, EngineConfig]":
    """The identity of a model, and the configuration with its adapter."""
    from raymoe.engine.identity import ModelIdentity  # noqa: PLC0415 - loads torch, as above
    from raymoe.engine.load import resolve_with_adapter  # noqa: PLC0415 - the same

    directory, config = resolve_with_adapter(model_source, config)
    return ModelIdentity.of(directory, adapter=config.adapter), config


def _prepare_job(
    directory: str | Path, identity: "ModelIdentity", parts: tuple[Any, ...], sync_every_s: float
) -> Callable[[], JobRows]:
    """Return what opens the job's journal; the last of its parts is the parser of reasoning."""
    params, config, kwargs, task, rollout, parser = parts
    parser = shortest_name(parser, read_chat_template(identity.directory))
    make_manifest = functools.partial(
        Manifest.of, identity, params, config, kwargs, task, parser, rollout
    )
    check_job(directory, make_manifest())  # in a second, not after minutes of loading
    return functools.partial(_open_job, directory, identity, make_manifest, sync_every_s)


def _open_job(
    directory: str | Path,
    identity: "ModelIdentity",
    make_manifest: Callable[[], Manifest],
    sync_every_s: float,
) -> JobRows:
    _ = identity.weights  # waits until they are known
    identity.check_unchanged()
    return JobRows.open(directory, make_manifest(), sync_every_s=sync_every_s)


def _submit(
    engine: "Engine", task: TaskOptions | None, requests: Sequence[RowRequest]
) -> list[Future[Generation]]:
    if task is not None:
        rows = [TaskRow(request.prompt, request.continuations) for request in requests]
        return engine.submit_task(rows, task)
    return engine.submit(
        [request.prompt for request in requests if request.prompt is not None],
        [request.sampling_params for request in requests],
        row_keys=[request.row_key for request in requests],
        occurrences=[request.occurrence for request in requests],
    )


def _wait_for(engine: "Engine", futures: Sequence[Future[Generation]]) -> list[Generation]:
    if not futures:
        return []
    engine.enter_call()  # after `submit`: this thread brings no more rows
    try:
        return [future.result() for future in futures]
    finally:
        engine.leave_call()


def _with_column(generation: Generation, column: str) -> Generation:
    if not generation.error or not column:
        return generation
    kind, _, reason = generation.error.partition(": ")
    if reason.split(" ", 1)[0] in SAMPLING_NAMES:
        column = SAMPLING_COLUMN
    return dataclasses.replace(generation, error=f"{kind}: column {column!r}: {reason}")


def _log_error(request: RowRequest, position: int, error: str) -> None:
    """Log the first row with an error of its kind, without what may be of its cells."""
    row_id = request.row_id
    row = f"number {position} of its batch" if row_id is None else shown(row_id)
    text = ErrorGroup.of(error).text(has_quotes=False)
    logger.info("row %s is an error row: %s", row, text, extra={"row": row})


def _span_attributes(generations: Sequence[Generation]) -> dict[str, int]:
    """Return what a call did; tokens by the names of OpenTelemetry's conventions."""
    return {
        "raymoe.rows": len(generations),
        "raymoe.error_rows": sum(bool(one.error) for one in generations),
        "gen_ai.usage.input_tokens": sum(one.num_input_tokens for one in generations),
        "gen_ai.usage.output_tokens": sum(one.num_tokens_of_outputs for one in generations),
    }


def _raise_first_error(generations: Sequence[Generation]) -> None:
    for position, generation in enumerate(generations):
        if generation.error:
            error = ExecutionError(
                f"row {position} of the batch cannot be generated: {generation.error}; with "
                "should_continue_on_error=True it would become an error row"
            )
            column = re.search(r"column '([^']*)'", generation.error)
            raise error.at(row=position, column=column and column[1])


def should_leave_process(*, is_restart_useful: bool) -> bool:
    """Whether ending this process is the way to get a new engine.

    True inside a Ray actor: Ray starts a new one and sends it the same batches, while an exception
    would fail the job. False elsewhere, and for a restarted actor that broke again, unless
    `is_restart_useful`: the engine has generated something, or the journal counts crashes.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    return is_restart_useful or not context.was_current_actor_reconstructed
