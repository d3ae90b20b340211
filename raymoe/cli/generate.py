"""`raymoe generate`: a table of prompts in, the same table with generated text out."""

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from raymoe.cli.pipeline import (
    PROMPT_COLUMNS,
    Job,
    check_model,
    content_columns,
    find_manifest,
    run_job,
)
from raymoe.cli.progress import plain_console, print_summary
from raymoe.cli.resume import Lease, ResumeState, count_written, find_written
from raymoe.cli.sources import FORMS, Source, open_source
from raymoe.cli.storage import Location, without_secrets
from raymoe.cli.writers import check_apart, open_writer
from raymoe.config import DEVICES, DTYPES, ON_TOO_LONG, EngineConfig, SamplingParams
from raymoe.data.columns import INPUT_MAY_NOT_HAVE, check_names
from raymoe.data.generator import output_columns
from raymoe.data.status import FormerRuns, Pairs
from raymoe.data.tasks import read_task, reader_of
from raymoe.engine.tasks.rows import CONTINUATION_COLUMN
from raymoe.engine.tokenizer import check_template_kwargs
from raymoe.errors import ConfigError, RaymoeError
from raymoe.openai.batch import CONTENT_COLUMNS, ID_COLUMN, TOOLS_COLUMN
from raymoe.report import write_report
from raymoe.safe_text import harmless
from raymoe.specs.files import read_json_object
from raymoe.specs.workload import TASKS
from raymoe.units import format_bytes, parse_bytes

TABLE = "Table"
SAMPLING = "Sampling"
RUN = "Run"

Model = Annotated[str, typer.Option(help="Model directory, or a name on the hub.")]
Input = Annotated[
    str,
    typer.Option(
        "--input",
        help="Parquet or JSONL: a file, a directory or a glob; also s3://, gs:// and others.",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        help="Directory for parquet parts, or a file that ends in .jsonl; also s3://, gs:// ..."
    ),
]
PromptColumn = Annotated[str, typer.Option(help="Text, or token ids.", rich_help_panel=TABLE)]
MessagesColumn = Annotated[str, typer.Option(help="Chat messages.", rich_help_panel=TABLE)]
IdColumn = Annotated[
    str | None, typer.Option(help="Unique ids; --resume needs them.", rich_help_panel=TABLE)
]
ToolsColumn = Annotated[
    str | None, typer.Option(help="Tools that messages may call.", rich_help_panel=TABLE)
]
TemplateKwargs = Annotated[
    str,
    typer.Option(
        "--chat-template-kwargs",
        help='For the chat template, as a JSON object, such as {"enable_thinking": false}.',
        rich_help_panel=TABLE,
    ),
]
Task = Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.", rich_help_panel=TABLE)]
TaskOptionsText = Annotated[
    str,
    typer.Option(
        "--task-options",
        help='Of a task besides generate, as a JSON object, such as {"labels": ["yes", "no"]}.',
        rich_help_panel=TABLE,
    ),
]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"Of JSON lines: {', '.join(FORMS)}. Requests of an OpenAI batch bring their own "
        "parameters and are answered as responses.",
        rich_help_panel=TABLE,
    ),
]
SamplesAsRows = Annotated[
    bool,
    typer.Option(
        "--samples-as-rows",
        help="With n in --sampling-params, each sample is a row of its own: same id, its number in "
        "sample_index, of num_samples.",
        rich_help_panel=TABLE,
    ),
]
MaxTokens = Annotated[
    int, typer.Option(help="Most tokens to generate for a row.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep this much probability.", rich_help_panel=SAMPLING)]
TopK = Annotated[
    int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int, typer.Option(help="Of rows that have none.", rich_help_panel=SAMPLING)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after EOS.", rich_help_panel=SAMPLING)
]
MoreParams = Annotated[str, typer.Option(help="More, as a JSON object.", rich_help_panel=SAMPLING)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.", rich_help_panel=RUN)]
NumActors = Annotated[
    int, typer.Option(min=1, help="Engines; each loads the model.", rich_help_panel=RUN)
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Rows of one call of the operator.", rich_help_panel=RUN)
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="Cores of an engine.", rich_help_panel=RUN)
]
Device = Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.", rich_help_panel=RUN)]
TensorParallelSize = Annotated[
    int, typer.Option(min=1, help="GPUs of an engine.", rich_help_panel=RUN)
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a row.", rich_help_panel=RUN)
]
HostMemory = Annotated[
    str | None,
    typer.Option(help="For weights and KV cache, such as 64GiB.", rich_help_panel=RUN),
]
DeviceMemory = Annotated[
    str | None, typer.Option(help="Of the GPU, such as 16GiB.", rich_help_panel=RUN)
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-config",
        metavar="KEY=VALUE|FILE",
        help="A field of EngineConfig, such as schedule=vslpipe, or a JSON file; repeatable.",
        rich_help_panel=RUN,
    ),
]
OnTooLong = Annotated[
    str, typer.Option(help=f"One of {', '.join(ON_TOO_LONG)}.", rich_help_panel=RUN)
]
SplitSpecial = Annotated[
    bool,
    typer.Option(
        "--split-special-tokens",
        help="Encode special tokens in the text of rows, such as <|im_end|>, as ordinary text; in "
        "messages they make an error row.",
        rich_help_panel=RUN,
    ),
]
PreserveOrder = Annotated[
    bool, typer.Option("--preserve-order", help="Rows in input order.", rich_help_panel=RUN)
]
SortByPrefix = Annotated[
    bool,
    typer.Option(
        "--sort-by-prefix",
        help="Sort rows so that those whose prompts begin the same share their computation; no row "
        "comes out before all were read, and their order is lost.",
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run ended.", rich_help_panel=RUN)
]
Journal = Annotated[
    str | None,
    typer.Option(
        help="Keep finished rows in this directory, for --resume and for actors that are killed; "
        "a cluster's nodes must share it. By default beside a local output.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
NoJournal = Annotated[
    bool, typer.Option("--no-journal", help="Keep no finished rows.", rich_help_panel=RUN)
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output.", rich_help_panel=RUN)
]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, help="Of a node, to show what tokens cost.", rich_help_panel=RUN),
]
Currency = Annotated[
    str,
    typer.Option(help="Currency of --price-per-hour, named with each cost.", rich_help_panel=RUN),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report",
        help="Write a page with pictures of the run beside the output.",
        rich_help_panel=RUN,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the logs of Ray.", rich_help_panel=RUN)
]


OTHER_FORMATS = frozenset(
    (".csv", ".tsv", ".json", ".txt", ".xlsx", ".gz", ".zst", ".arrow", ".feather", ".orc", ".avro",
     ".ndjson")
)  # fmt: skip
SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "ignore_eos")
ENGINE_FLAGS = ("dtype", "num_threads", "on_too_long", "split_special_tokens", "seed", "device",
                "tensor_parallel_size", "max_model_len")  # fmt: skip
ADDRESSES = frozenset({"input", "output", "journal"})
OF_JOB = ("model", "num_actors", "batch_size", "price_per_hour", "currency",
          "preserve_order", "verbose")  # fmt: skip
OF_BATCHES = ("input_", "output", "prompt_column", "messages_column", "id_column", "tools_column",
              "task", "task_options", "form", "samples_as_rows", "resume", "overwrite", "journal",
              "no_journal", "report")  # fmt: skip


def run(  # noqa: PLR0913 - the options of a command
    context: typer.Context,
    *,
    model: Model,
    input_: Input,
    output: Output,
    prompt_column: PromptColumn = "prompt",
    messages_column: MessagesColumn = "messages",
    id_column: IdColumn = None,
    tools_column: ToolsColumn = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    task: Task = "generate",
    task_options: TaskOptionsText = "{}",
    form: Form = "auto",
    samples_as_rows: SamplesAsRows = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    sampling_params: MoreParams = "{}",
    dtype: Dtype = "auto",
    num_actors: NumActors = 1,
    batch_size: BatchSize = 32,
    num_threads: NumThreads = None,
    device: Device = "auto",
    tensor_parallel_size: TensorParallelSize = 1,
    max_model_len: MaxModelLen = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    engine_config: EngineOptions = None,
    on_too_long: OnTooLong = "error",
    split_special_tokens: SplitSpecial = False,
    preserve_order: PreserveOrder = False,
    sort_by_prefix: SortByPrefix = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    journal: Journal = None,
    no_journal: NoJournal = False,
    price_per_hour: Price = None,
    currency: Currency = "USD",
    report: Report = True,
    verbose: Verbose = False,
) -> None:
    """Generate text for every row of a table; every input row gives one output row.

    With --task score, classify or embed, columns with log probabilities, labels or embeddings.
    Column __inference_error__ says why a row failed. Runs in a local Ray, or in RAY_ADDRESS's.
    """
    where = without_secrets(input_) if "://" in input_ else input_
    plain_console(stderr=True).print(harmless(f"reading {where} and the model {model}"))
    job, resume_state = _make_job(context.params)
    _run(job, resume_state, resume=resume, overwrite=overwrite, has_report=report)


def _make_job(given: Mapping[str, Any]) -> tuple[Job, ResumeState]:
    options, config = _options(given), _engine_config(given)
    texts = (
        given["prompt_column"],
        options["task_options"].get("continuation_column", CONTINUATION_COLUMN),
    )
    source = open_source(
        given["input_"], text_columns=texts, id_column=given["id_column"], form=given["form"]
    )
    id_column = _check_columns(source, options, given["id_column"], given["model"])
    state = _find_output(given["output"], source, given["input_"], given["journal"])
    lease, columns = Lease(state.output), _content_columns(options, source)
    writer = open_writer(state.output, source, has_samples=given["samples_as_rows"],
                         content_columns=columns, run=lease.run)  # fmt: skip
    job = Job(
        source=source, options=options, engine_config=config, id_column=id_column, writer=writer,
        lease=lease, journal_dir=None if given["no_journal"] else state.journal,
        status_dir=state.status, settings=_settings(given), is_sorted=given["sort_by_prefix"],
        **{name: given[name] for name in OF_JOB},
    )  # fmt: skip
    return job, state


def check_batch_options(arguments: Sequence[str]) -> tuple[dict[str, Any], EngineConfig]:
    """Return options and engine of `raymoe generate` with these arguments, for OpenAI batches.

    Raises:
        ConfigError: They cannot be used for any batch, or are given by the server that runs them.
    """
    app = typer.Typer(add_completion=False)
    app.command()(run)
    files = ("--input", "", "--output", "")
    command = typer.main.get_command(app)
    context = command.make_context("raymoe generate", [*files, *arguments])
    given = context.params
    for name in OF_BATCHES:
        source = context.get_parameter_source(name)
        is_file = name in ("input_", "output")
        if given[name] if is_file else source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.rstrip('_').replace('_', '-')} is given by the server for "
                              "each batch; leave it out")  # fmt: skip
    options, config = _options(given), _engine_config(given)
    _set_batch_columns(options, None)
    check_model(given["model"], options, config, given["num_actors"])
    return options, config


def _settings(params: Mapping[str, Any]) -> Pairs:
    texts = {name.rstrip("_"): str(value) for name, value in params.items()}
    addresses = {name: text for name, text in texts.items() if name in ADDRESSES and "://" in text}
    return tuple((texts | {one: without_secrets(addresses[one]) for one in addresses}).items())


def _read_params(given: Mapping[str, Any]) -> SamplingParams:
    flags = {name: given[name] for name in SAMPLING_FLAGS}
    return SamplingParams.from_dict(flags).override(_parse(given, "sampling_params"))


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    fields = {name: given[name] for name in ENGINE_FLAGS}
    fields["head"] = "none" if given["task"] == "embed" else None
    fields |= {f"{name}_bytes": given[name] for name in ("host_memory", "device_memory")}
    for text in given["engine_config"] or ():
        name, is_pair, value = text.partition("=")
        path = Path(text)
        if is_pair:
            fields[name] = _value(value)
        elif path.is_file():
            fields |= read_json_object(path.parent, path.name)
        else:
            raise ConfigError(f"--engine-config {text}: it takes KEY=VALUE, or a file of JSON")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in fields.keys() & {"host_memory_bytes", "device_memory_bytes"}:
        try:
            fields[name] = parse_bytes(str(fields[name]))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    return EngineConfig.from_dict(fields)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # plain text, such as a name
        return text
    except RecursionError as error:
        raise ConfigError(f"{text[:40]}... is nested too deep") from error


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_both(given, "resume", "overwrite")
    _refuse_both(given, "sort_by_prefix", "preserve_order")
    named = {name: given[name] for name in PROMPT_COLUMNS}
    task_options = _parse(given, "task_options")
    if read_task(given["task"], task_options) is not None:
        _refuse_sampling(given)
    return {
        "sampling_params": _read_params(given),
        "has_choices": given["samples_as_rows"],
        "chat_template_kwargs": check_template_kwargs(_parse(given, "chat_template_kwargs")),
        "task": given["task"],
        "task_options": task_options,
        **named,
    }


def _refuse_sampling(given: Mapping[str, Any]) -> None:
    defaults = inspect.signature(run).parameters
    for name in (*SAMPLING_FLAGS, "sampling_params", "samples_as_rows"):
        if given[name] != defaults[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no meaning for --task {given['task']}; leave it out")


def _content_columns(options: dict[str, Any], source: Source) -> tuple[str, ...]:
    return CONTENT_COLUMNS if source.is_batch else content_columns(options)


def _find_output(output: str, source: Source, input_: str, journal_dir: str | None) -> ResumeState:
    place = Location.parse(output)
    if place.suffix in OTHER_FORMATS:
        raise ConfigError(f"--output {output}: {place.suffix} cannot be written; it takes a "
                          "directory for parquet, or a file that ends in .jsonl")  # fmt: skip
    check_apart(place, source.files, Location.parse(input_))
    return ResumeState.of(place, journal_dir)


def _set_batch_columns(options: dict[str, Any], id_column: str | None) -> str:
    own = {
        "id_column": id_column in (None, ID_COLUMN),
        "prompt_column": options["prompt_column"] == "prompt",
        "messages_column": options["messages_column"] == "messages",
        "tools_column": options["tools_column"] in (None, TOOLS_COLUMN),
    }
    for name, is_own in own.items():
        if not is_own:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no meaning for an OpenAI batch; leave it out, or "
                "add --format table"
            )
    options |= {"tools_column": TOOLS_COLUMN, "has_choices": True, "has_token_bytes": True}
    return ID_COLUMN


def _refuse_both(given: Mapping[str, Any], *names: str) -> None:
    if all(given[name] for name in names):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise ConfigError(f"{flags} contradict each other; give one of them")


def _run(
    job: Job, resume_state: ResumeState, *, resume: bool, overwrite: bool, has_report: bool
) -> None:
    if resume and job.id_column is None:
        raise ConfigError("--resume needs --id-column: it skips the ids that are already written")
    # Before an old output is given up.
    check_model(job.model, job.options, job.engine_config, job.num_actors)
    assert job.lease is not None
    with job.lease:
        _write(job, resume_state, resume=resume, overwrite=overwrite, has_report=has_report)


def _write(
    job: Job, resume_state: ResumeState, *, resume: bool, overwrite: bool, has_report: bool
) -> None:
    former = resume_state.former_runs()  # before their status is removed
    _prepare(job, resume_state, resume=resume, overwrite=overwrite)
    console = plain_console()
    try:
        if resume:
            job = _without_written(job, former)
        view = run_job(job, plain_console(stderr=True))
        resume_state.finish()
        print_summary(view, str(resume_state.output), console)
    finally:
        if has_report:  # of a run that failed, too
            _write_report(resume_state, console)


def _write_report(resume_state: ResumeState, console: Console) -> None:
    if resume_state.status is None or resume_state.report is None:
        return
    try:
        write_report(resume_state.status, resume_state.report)
        console.print(f"report: {harmless(str(resume_state.report))}")
    except (OSError, RaymoeError) as error:  # the rows are there
        typer.echo(f"no report in {resume_state.report}: {error}", err=True)


def _prepare(job: Job, resume_state: ResumeState, *, resume: bool, overwrite: bool) -> None:
    manifest = find_manifest(job)
    resume_state.check(manifest, resume=resume, overwrite=overwrite)
    job.writer.prepare(resume=resume, overwrite=overwrite)
    resume_state.prepare(manifest, resume=resume, has_journal=job.journal_dir is not None)
    if resume_state.journal is None:
        typer.echo("no journal: rows of an actor that is killed are generated again; --journal DIR "
                   "keeps them in a directory that all nodes share", err=True)  # fmt: skip
    num_bytes = resume_state.journal_bytes
    if num_bytes:
        size = format_bytes(num_bytes)
        typer.echo(
            f"finished rows in {resume_state.journal} ({size}) are not generated again", err=True
        )


def _without_written(job: Job, former: FormerRuns) -> Job:
    columns, id_column = _content_columns(job.options, job.source), job.id_column or ""
    written = find_written(job.source, job.writer, columns, id_column)
    reasons = {"have been edited since they were written": written.changed,
               "had an error from outside": written.failed}  # fmt: skip
    for reason, ids in reasons.items():
        if len(ids):
            typer.echo(f"{len(ids):,} rows {reason} and are generated again", err=True)
    counts = written.counts
    if written.stale:
        job.writer.drop(written.stale, id_column)
        counts = count_written(job.writer, id_column)
    total = job.source.num_rows
    typer.echo(f"{written.num_rows:,} of {total:,} rows are already written", err=True)
    return dataclasses.replace(job, written=written, former=counts.added_to(former))


def _parse(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    flag, text = f"--{name.replace('_', '-')}", given[name]
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{flag} is {text:.100}; it takes a JSON object")
    return options


def _check_columns(
    source: Source, options: dict[str, Any], id_column: str | None, model: str
) -> str | None:
    """Find out now what the operator would find at its first batch; returns the column of ids."""
    if options["has_choices"]:
        _check_samples(source)
    if source.is_batch:
        if options["task"] != "generate":
            raise ConfigError(f"--task {options['task']} has no meaning for an OpenAI batch; add "
                              "--format table, or leave it out")  # fmt: skip
        id_column = _set_batch_columns(options, id_column)
    try:
        reader_of({**options, "id_column": id_column}).check_schema(source.schema)
    except ConfigError as error:
        raise ConfigError(_as_typed(str(error))) from error
    output_columns(model, options).check_names(source.schema.names)
    return id_column


def _as_typed(message: str) -> str:
    """Name options as one types them."""
    return re.sub(r"\b(\w+)_column\b", r"--\1-column", message)


def _check_samples(source: Source) -> None:
    if source.is_batch:
        raise ConfigError("--samples-as-rows has no meaning for an OpenAI batch: each response has "
                          "all samples; leave it out, or add --format table")  # fmt: skip
    check_names(source.schema.names, INPUT_MAY_NOT_HAVE)
