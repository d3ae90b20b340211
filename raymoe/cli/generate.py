"""`raymoe generate`: a table of prompts in, the same table with generated text out."""

import dataclasses
import inspect
import json
import pkgutil
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from raymoe.cli.checks import check_money, num_actors_or_auto
from raymoe.cli.dry_run import show_first_rows
from raymoe.cli.hub_output import HubOutput
from raymoe.cli.one_schema import check_id_of_lines
from raymoe.cli.pipeline import (
    PROMPT_COLUMNS,
    Job,
    check_model,
    content_columns,
    find_manifest,
    has_cluster,
    run_job,
)
from raymoe.cli.progress import plain_console, print_summary
from raymoe.cli.resume import (
    Lease,
    ResumeState,
    Written,
    count_written,
    find_written,
    lease_bucket,
)
from raymoe.cli.resume_without_ids import WrittenRows, find_written_rows
from raymoe.cli.sources import FORMS, Source, TemplatedSource, open_source
from raymoe.cli.stopping import Stopped
from raymoe.cli.storage import Location
from raymoe.cli.writers import JsonlWriter, check_apart, open_writer
from raymoe.config import (
    AUTO,
    DEVICES,
    DTYPES,
    ON_TOO_LONG,
    EngineConfig,
    SamplingParams,
    with_base,
)
from raymoe.data.columns import INPUT_MAY_NOT_HAVE, check_names
from raymoe.data.generator import output_columns
from raymoe.data.prompt_template import TEMPLATES, PromptTemplate, read_json_schema
from raymoe.data.remote_args import take_remote_args
from raymoe.data.rows import SAMPLING_COLUMN
from raymoe.data.status import FormerRuns, Pairs
from raymoe.data.tasks import read_task, read_task_of, reader_of
from raymoe.download.uris import without_secrets
from raymoe.engine.tasks.rows import CONTINUATION_COLUMN
from raymoe.engine.tokenizer import check_template_kwargs
from raymoe.errors import ConfigError, RaymoeError
from raymoe.openai.batch import CONTENT_COLUMNS, ID_COLUMN, TOOLS_COLUMN
from raymoe.output_schema import OutputSchema
from raymoe.report import write_report
from raymoe.safe_text import harmless
from raymoe.specs.files import read_json_object
from raymoe.specs.workload import TASKS
from raymoe.units import CURRENCY, format_bytes, parse_bytes

START = "Start here"
PROMPTS = "Prompts"
ANSWERS = "Answers"
TASKS_PANEL = "Other tasks than generating"
FILES = "Files of the job"
MACHINE = "Machine"

Model = Annotated[
    str,
    typer.Option(
        help="Use the model in this directory, of this name on the Hugging Face hub, or at this "
        "URI (s3://, gs://, abfs://, hf://).",
        metavar="DIR|NAME|URI",
        rich_help_panel=START,
    ),
]
AdapterDirectory = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        help="Merge the LoRA adapter in this directory, as PEFT writes it, into the model while it "
        "is loaded.",
        show_default=False,
        metavar="DIR",
        rich_help_panel=MACHINE,
    ),
]
Input = Annotated[
    str,
    typer.Option(
        "--input",
        help="Read the rows from this file, directory, glob, or URI such as s3://jobs/in or "
        "hf://datasets/org/name?split=train. They are parquet, JSON lines, CSV with a header, "
        "Arrow, or a dataset that save_to_disk wrote.",
        metavar="PATH",
        rich_help_panel=START,
    ),
]
Output = Annotated[
    str,
    typer.Option(
        help="Write the rows with their answers here: to a directory as parquet, or to a file that "
        "ends in .jsonl. URIs such as s3://jobs/out and hf://datasets/org/name/out work too.",
        metavar="PATH",
        rich_help_panel=START,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show the prompts and answers of the first rows, and predict the time for all. "
        "Nothing is written.",
        rich_help_panel=START,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Generate only the first N rows; --resume without this option continues with the "
        "others.",
        show_default=False,
        metavar="N",
        rich_help_panel=START,
    ),
]
PromptColumn = Annotated[
    str,
    typer.Option(
        help="Read the prompts from this column, as text or lists of token ids. The model gets "
        "them as they are, without its chat template.",
        metavar="NAME",
        rich_help_panel=PROMPTS,
    ),
]
PromptText = Annotated[
    str | None,
    typer.Option(
        "--prompt-template",
        metavar="TEXT|@FILE",
        help="Make the prompt of each row from its columns by a Jinja template, such as "
        "'Summarise: {{ text }}'. The model gets the result as it is; for its chat template add "
        "--system-prompt. A row with null in a column of the template becomes an error row; "
        "{{ text or '' }} writes nothing instead.",
        show_default=False,
        rich_help_panel=PROMPTS,
    ),
]
SystemText = Annotated[
    str | None,
    typer.Option(
        "--system-prompt",
        metavar="TEXT|@FILE",
        help="Make each row a chat for the model's chat template: this text as the system's "
        "message, also a Jinja template, and the prompt as the user's. '' makes chats without a "
        "system's message.",
        show_default=False,
        rich_help_panel=PROMPTS,
    ),
]
MessagesColumn = Annotated[
    str,
    typer.Option(
        help="Read chats from this column, as lists of messages or JSON text of them. A row has a "
        "prompt or messages.",
        metavar="NAME",
        rich_help_panel=PROMPTS,
    ),
]
IdColumn = Annotated[
    str | None,
    typer.Option(
        help="Tell rows apart by the unique ids in this column: --resume finds those that have "
        "been edited, and the samples of a row do not depend on other rows.",
        show_default=False,
        metavar="NAME",
        rich_help_panel=PROMPTS,
    ),
]
ToolsColumn = Annotated[
    str | None,
    typer.Option(
        help="Read the tools that messages may call from this column.",
        show_default=False,
        metavar="NAME",
        rich_help_panel=PROMPTS,
    ),
]
TemplateKwargs = Annotated[
    str,
    typer.Option(
        "--chat-template-kwargs",
        help="Give the chat template the arguments in this JSON object, such as "
        '{"enable_thinking": false}.',
        metavar="JSON",
        rich_help_panel=PROMPTS,
    ),
]
SplitSpecial = Annotated[
    bool,
    typer.Option(
        "--split-special-tokens",
        help="Encode special tokens in the text of rows, such as <|im_end|>, as ordinary text. In "
        "messages they make an error row.",
        rich_help_panel=PROMPTS,
    ),
]
OnTooLong = Annotated[
    str,
    typer.Option(
        help=f"Do this with a prompt that is too long, one of {', '.join(ON_TOO_LONG)}.",
        metavar="WORD",
        rich_help_panel=PROMPTS,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        help="Generate at most this many tokens for an answer.",
        metavar="N",
        rich_help_panel=ANSWERS,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="Choose tokens this freely: 0 always takes the best one, 1 samples from the "
        "model's probabilities.",
        metavar="X",
        rich_help_panel=ANSWERS,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Sample from the best tokens that together have this probability.",
        metavar="X",
        rich_help_panel=ANSWERS,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        help="Sample from this many of the best tokens; 0 is all.",
        metavar="N",
        rich_help_panel=ANSWERS,
    ),
]
NumAnswers = Annotated[
    int,
    typer.Option(
        "--n",
        min=1,
        help="Give each row this many answers, all of them in the column generated_texts. They "
        "differ only if the temperature is above 0.",
        metavar="N",
        rich_help_panel=ANSWERS,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help=r"End an answer before this text, in which \n is a line break and \t a tab. Repeat "
        "it for several.",
        show_default=False,
        rich_help_panel=ANSWERS,
    ),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="Let each answer be JSON that follows the JSON schema in this file.",
        show_default=False,
        rich_help_panel=ANSWERS,
    ),
]
SchemaOfOutput = Annotated[
    str | None,
    typer.Option(
        "--output-schema",
        metavar="FILE|MODULE:CLASS",
        help="Let each answer be JSON that follows the JSON schema in this file, or this pydantic "
        "class, and write its values to the column parsed; parsed_error says why a row has none.",
        show_default=False,
        rich_help_panel=ANSWERS,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Sample with this seed; another one gives other answers.",
        metavar="N",
        rich_help_panel=ANSWERS,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Go on after the model's end of text, up to --max-tokens.",
        rich_help_panel=ANSWERS,
    ),
]
MoreParams = Annotated[
    str,
    typer.Option(
        help="Set further sampling parameters by a JSON object, such as "
        '{"repetition_penalty": 1.1}; the guide lists them.',
        metavar="JSON",
        rich_help_panel=ANSWERS,
    ),
]
SamplesAsRows = Annotated[
    bool,
    typer.Option(
        "--samples-as-rows",
        help="Write each answer of --n as a row of its own, with the same id, its number in "
        "sample_index, and the number of all in num_samples.",
        rich_help_panel=ANSWERS,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with a job that has ended before all rows were written.",
        rich_help_panel=FILES,
    ),
]
RetryErrors = Annotated[
    bool,
    typer.Option(
        "--retry-errors",
        help="With --resume, generate rows again whose recorded answer is an error, and keep the "
        "others.",
        rich_help_panel=FILES,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace what is in the output, and start anew.",
        rich_help_panel=FILES,
    ),
]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"Read JSON lines as this, one of {', '.join(FORMS)}. Requests of an OpenAI batch "
        "bring their own parameters and are answered as responses.",
        metavar="WORD",
        rich_help_panel=FILES,
    ),
]
PreserveOrder = Annotated[
    bool,
    typer.Option(
        "--preserve-order", help="Write the rows in the order of the input.", rich_help_panel=FILES
    ),
]
SortByPrefix = Annotated[
    bool,
    typer.Option(
        "--sort-by-prefix",
        help="Sort rows so that those whose prompts begin the same share their computation. No "
        "row comes out before all were read, and their order is lost.",
        rich_help_panel=FILES,
    ),
]
Journal = Annotated[
    str | None,
    typer.Option(
        help="Keep finished rows in this directory, which the nodes of a cluster must share, or in "
        "a bucket (s3://jobs/journal), for --resume and for actors that are killed. By default it "
        "is beside a local output.",
        show_default=False,
        metavar="PATH",
        rich_help_panel=FILES,
    ),
]
NoJournal = Annotated[
    bool,
    typer.Option(
        "--no-journal",
        help="Keep no journal: rows of an actor that is killed are generated again.",
        rich_help_panel=FILES,
    ),
]
Currency = Annotated[
    str,
    typer.Option(help="Name this currency with each cost.", rich_help_panel=MACHINE),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report",
        help="Write a page with pictures of the run beside the output.",
        rich_help_panel=FILES,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help=f"Compute with numbers of this type, one of {', '.join(DTYPES)}.",
        metavar="WORD",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help=f"Compute on this device, one of {', '.join(DEVICES)}.",
        metavar="WORD",
        rich_help_panel=MACHINE,
    ),
]
NumActors = Annotated[
    int,  # or the word "auto", which typer has no type for
    typer.Option(
        parser=num_actors_or_auto,
        help="Run this many engines, each of which loads the model; auto runs one on each GPU, or "
        "on each node without one, and fewer if more would not end the job sooner.",
        metavar="N",
        rich_help_panel=MACHINE,
    ),
]
RayRemoteArgs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Run engines where Ray's options of an actor say, such as accelerator_type=L4 or "
        'label_selector={"market": "spot"}; only such nodes are counted. Repeat it for several.',
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Hand this many rows at a time to an engine, which forms its own batches of them; the "
        "plan chooses if none is given.",
        metavar="N",
        rich_help_panel=MACHINE,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Let each engine use this many cores; by default it uses its share of the machine.",
        show_default=False,
        metavar="N",
        rich_help_panel=MACHINE,
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        min=1, help="Divide each engine over this many GPUs.", metavar="N", rich_help_panel=MACHINE
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Limit a row, prompt and answer together, to this many tokens; by default it is the "
        "model's limit.",
        show_default=False,
        metavar="N",
        rich_help_panel=MACHINE,
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Use at most this much memory for weights and KV cache, such as 64GiB.",
        show_default=False,
        metavar="SIZE",
        rich_help_panel=MACHINE,
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        help="Use at most this much memory of the GPU, such as 16GiB.",
        show_default=False,
        metavar="SIZE",
        rich_help_panel=MACHINE,
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-config",
        metavar="KEY=VALUE|FILE",
        help="Set a field of EngineConfig, such as schedule=vslpipe, or those of a JSON file. "
        "Repeat it for several.",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        help="Show what tokens cost if a node costs this much an hour.",
        show_default=False,
        metavar="X",
        rich_help_panel=MACHINE,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the logs of Ray.", rich_help_panel=MACHINE)
]
Task = Annotated[
    str,
    typer.Option(
        help=f"Do this with each row, one of {', '.join(TASKS)}.",
        metavar="WORD",
        rich_help_panel=TASKS_PANEL,
    ),
]
TaskOptionsText = Annotated[
    str,
    typer.Option(
        "--task-options",
        help="Set the options of the task by a JSON object, such as "
        '{"labels": ["yes", "no"]} for classify.',
        metavar="JSON",
        rich_help_panel=TASKS_PANEL,
    ),
]


OTHER_FORMATS = frozenset(
    (".csv", ".tsv", ".json", ".txt", ".xlsx", ".gz", ".zst", ".arrow", ".feather", ".orc", ".avro",
     ".ndjson")
)  # fmt: skip
# Those of Python, as all defaults are that both have.
PARAMS, CONFIG = SamplingParams(), EngineConfig()
SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "n", "stop", "json_schema",
                  "ignore_eos")  # fmt: skip
ENGINE_FLAGS = ("adapter", "dtype", "num_threads", "on_too_long", "split_special_tokens", "seed",
                "device", "tensor_parallel_size", "max_model_len")  # fmt: skip
ADDRESSES = frozenset({"input", "journal", "model", "output"})
OF_JOB = ("model", "num_actors", "batch_size", "price_per_hour", "currency",
          "preserve_order", "verbose")  # fmt: skip
OF_BATCHES = ("input_", "output", "prompt_column", "messages_column", "id_column", "tools_column",
              "task", "task_options", "form", "samples_as_rows", "resume", "overwrite", "journal",
              "no_journal", "report", "prompt_template", "system_prompt", "limit", "dry_run",
              "retry_errors")  # fmt: skip


def run(  # noqa: PLR0913 - the options of a command
    context: typer.Context,
    *,
    model: Model,
    input_: Input,
    output: Output,
    dry_run: DryRun = False,
    limit: Limit = None,
    prompt_column: PromptColumn = "prompt",
    prompt_template: PromptText = None,
    system_prompt: SystemText = None,
    messages_column: MessagesColumn = "messages",
    id_column: IdColumn = None,
    tools_column: ToolsColumn = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    split_special_tokens: SplitSpecial = False,
    on_too_long: OnTooLong = "error",
    max_tokens: MaxTokens = PARAMS.max_tokens,
    temperature: Temperature = PARAMS.temperature,
    top_p: TopP = PARAMS.top_p,
    top_k: TopK = PARAMS.top_k,
    n: NumAnswers = PARAMS.n,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    output_schema: SchemaOfOutput = None,
    seed: Seed = CONFIG.seed,
    ignore_eos: IgnoreEos = PARAMS.ignore_eos,
    sampling_params: MoreParams = "{}",
    samples_as_rows: SamplesAsRows = False,
    resume: Resume = False,
    retry_errors: RetryErrors = False,
    overwrite: Overwrite = False,
    form: Form = "auto",
    preserve_order: PreserveOrder = False,
    sort_by_prefix: SortByPrefix = False,
    journal: Journal = None,
    no_journal: NoJournal = False,
    report: Report = True,
    adapter: AdapterDirectory = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_actors: NumActors = AUTO,  # type: ignore[assignment]  # as above
    ray_remote_args: RayRemoteArgs = None,
    batch_size: BatchSize = None,
    num_threads: NumThreads = None,
    tensor_parallel_size: TensorParallelSize = 1,
    max_model_len: MaxModelLen = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    engine_config: EngineOptions = None,
    price_per_hour: Price = None,
    currency: Currency = CURRENCY,
    verbose: Verbose = False,
    task: Task = "generate",
    task_options: TaskOptionsText = "{}",
) -> None:
    """Generate text for each row, in a local Ray or RAY_ADDRESS's; errors are a column."""
    _run_until_stopped(context.params, context.obj or sys.argv[2:])


def _run_until_stopped(given: Mapping[str, Any], arguments: Sequence[str]) -> None:
    where = without_secrets(given["input_"]) if "://" in given["input_"] else given["input_"]
    plain_console(stderr=True).print(harmless(f"reading {where} and the model {given['model']}"))
    job, resume_state = _make_job(given)
    try:
        _run(job, resume_state, given)
    except Stopped as stopped:
        typer.echo(how_to_go_on(job, arguments), err=True)
        raise typer.Exit(stopped.exit_code) from stopped


def how_to_go_on(job: Job, arguments: Sequence[str]) -> str:
    """Return what to type after a job was stopped.

    Args:
        arguments: Those it was called with.
    """
    kept = [each for each in arguments if each not in {"--overwrite", "--resume"}]
    return f"to go on: raymoe generate {shlex.join(kept)} --resume"


def _make_job(given: Mapping[str, Any]) -> tuple[Job, ResumeState]:
    options = _options(given)
    model, config = with_base(given["model"], _engine_config(given))
    given = {**given, "model": str(model)}
    source = _with_prompts(_open_source(given, options), options, given)
    id_column = _check_columns(source, options, given["id_column"], given["model"])
    state = _find_output(given["output"], source, given["input_"], given["journal"])
    lease = Lease(state.output, lease_bucket(state.output, given["output"]))
    columns = _content_columns(options, source)
    writer = open_writer(state.output, source, has_samples=given["samples_as_rows"],
                         content_columns=columns, has_ids=id_column is not None,
                         run=lease.run)  # fmt: skip
    if id_column is not None and isinstance(writer, JsonlWriter):
        check_id_of_lines(source.schema.field(id_column).type, id_column)
    job = Job(
        source=source, options=options, engine_config=config, id_column=id_column, writer=writer,
        lease=lease, journal_dir=None if given["no_journal"] else state.journal,
        status_dir=state.status, settings=_settings(given), is_sorted=given["sort_by_prefix"],
        remote_args=_remote_args(given),
        **{name: given[name] for name in OF_JOB},
    )  # fmt: skip
    return job, state


def _open_source(given: Mapping[str, Any], options: Mapping[str, Any]) -> Source:
    texts = [options["task_options"].get("continuation_column", CONTINUATION_COLUMN)]
    is_text = given["prompt_column"] != given["messages_column"]
    if is_text and given["prompt_template"] is None:  # else it is a column as others
        texts.append(given["prompt_column"])
    return open_source(
        given["input_"], text_columns=texts, id_column=given["id_column"], form=given["form"],
        limit=given["limit"],
    )  # fmt: skip


def _with_prompts(source: Source, options: dict[str, Any], given: Mapping[str, Any]) -> Source:
    """Return the rows with the prompts of a template, and have the operator read those."""
    names = [name for name in TEMPLATES if given[name] is not None]
    if not names:
        return source
    if source.is_batch:
        raise ConfigError(f"{_flag(names[0])} has no meaning for an OpenAI batch; leave it out, or "
                          "add --format table")  # fmt: skip
    columns = {name: given[name] for name in ("prompt_column", "messages_column")}
    try:
        template = PromptTemplate.of({name: given[name] for name in names}, **columns)
        template.check_model(given["model"])
        source = TemplatedSource.of(source, template)
    except ConfigError as error:
        raise ConfigError(_as_typed(str(error))) from error
    options |= template.operator_columns
    return source


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
            raise ConfigError(f"{_flag(name)} is given by the server for "
                              "each batch; leave it out")  # fmt: skip
    options = _options(given)
    model, config = with_base(given["model"], _engine_config(given))
    _set_batch_columns(options, None)
    check_model(str(model), options, config, given["num_actors"])
    return options, config


def _settings(params: Mapping[str, Any]) -> Pairs:
    texts = {name.rstrip("_"): str(value) for name, value in params.items()}
    if params["ray_remote_args"]:  # the variables of a runtime environment may be secrets
        names = (text.partition("=")[0] for text in params["ray_remote_args"])
        texts["ray_remote_args"] = ", ".join(names)
    addresses = {name: text for name, text in texts.items() if name in ADDRESSES and "://" in text}
    return tuple((texts | {one: without_secrets(addresses[one]) for one in addresses}).items())


def _read_output_schema(text: str | None) -> OutputSchema | None:
    flag = "--output-schema"
    if text is None or ":" not in text or Path(text).exists():
        return None if text is None else OutputSchema.of(text, what=flag)
    sys.path.append(str(Path.cwd()))
    try:
        value = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag} {text}: {error}; it takes a file, or MODULE:CLASS of a module "
                          "in this directory or an installed one") from error  # fmt: skip
    return OutputSchema.of(value, what=flag)


def _read_params(
    given: Mapping[str, Any], output_schema: OutputSchema | None = None
) -> SamplingParams:
    flags = {name: given[name] for name in SAMPLING_FLAGS}
    flags["stop"] = [_with_breaks(text) for text in given["stop"] or ()] or None
    schema = flags.pop("json_schema")
    if schema is not None:
        flags["structured_outputs"] = {"json": read_json_schema(schema, what="--json-schema")}
    more = _parse(given, "sampling_params")
    for name, flag in (("n", "n"), ("stop", "stop"), ("structured_outputs", "json_schema")):
        if name in more and _is_given(given, flag):
            raise ConfigError(f"{_flag(flag)} and {name} of --sampling-params contradict each "
                              "other; give one of them")  # fmt: skip
    if output_schema is not None:
        more = output_schema.constrain(more)
    params = SamplingParams.from_dict(flags).override(more)
    if params.n > 1 and params.is_greedy:
        typer.echo(f"the {params.n} answers of a row are equal at temperature 0; add --temperature "
                   "1, say, unless rows have their own", err=True)  # fmt: skip
    return params


def _with_breaks(text: str) -> str:
    """Return a text that was typed, with its line breaks and tabs."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


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
    config = EngineConfig.from_dict(fields)
    if config.device == "cuda" and not has_cluster():  # engines run here
        from raymoe.device.find_gpu import check_cuda  # noqa: PLC0415 - it imports torch

        check_cuda()
    return config


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # plain text, such as a name
        return text
    except RecursionError as error:
        raise ConfigError(f"{text[:40]}... is nested too deep") from error


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    check_money(given["price_per_hour"], given["currency"])
    _refuse_both(given, "resume", "overwrite")
    _refuse_both(given, "json_schema", "output_schema")
    _refuse_both(given, "sort_by_prefix", "preserve_order")
    if given["retry_errors"] and not given["resume"]:
        raise ConfigError("--retry-errors needs --resume: it generates rows of a former run again")
    if given["prompt_template"] is not None:
        for name in ("prompt_column", "messages_column"):
            if _is_given(given, name):
                raise ConfigError(f"--prompt-template and {_flag(name)} contradict each other: a "
                                  "template makes the prompts from any columns")  # fmt: skip
    named = {name: given[name] for name in PROMPT_COLUMNS}
    task_options = _parse(given, "task_options")
    if read_task(given["task"], task_options) is not None:
        _refuse_sampling(given)
    schema = _read_output_schema(given["output_schema"])
    return {
        "sampling_params": _read_params(given, schema),
        "output_schema": None if schema is None else schema.as_dict(),
        "has_choices": given["samples_as_rows"],
        "chat_template_kwargs": check_template_kwargs(_parse(given, "chat_template_kwargs")),
        "task": given["task"],
        "task_options": task_options,
        **named,
    }


def _refuse_sampling(given: Mapping[str, Any]) -> None:
    for name in (*SAMPLING_FLAGS, "output_schema", "sampling_params", "samples_as_rows"):
        if _is_given(given, name):
            raise ConfigError(
                f"{_flag(name)} has no meaning for --task {given['task']}; leave it out"
            )


def _is_given(given: Mapping[str, Any], name: str) -> bool:
    # typer has () for an option that may be repeated and was not given.
    return given[name] not in (inspect.signature(run).parameters[name].default, (), [])


def _flag(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"


def _content_columns(options: dict[str, Any], source: Source) -> tuple[str, ...]:
    return CONTENT_COLUMNS if source.is_batch else content_columns(options)


def _find_output(output: str, source: Source, input_: str, journal_dir: str | None) -> ResumeState:
    on_hub = HubOutput.of(output)
    if on_hub is not None:
        on_hub.check_apart(input_)
    place = Location.parse(output) if on_hub is None else on_hub.working
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
                f"{_flag(name)} has no meaning for an OpenAI batch; leave it out, or "
                "add --format table"
            )
    if options["output_schema"] is not None:
        raise ConfigError("--output-schema has no meaning for an OpenAI batch, whose requests have "
                          "a response_format each; leave it out, or add --format table"
                          )  # fmt: skip
    options |= {"tools_column": TOOLS_COLUMN, "has_choices": True, "has_token_bytes": True}
    return ID_COLUMN


def _refuse_both(given: Mapping[str, Any], *names: str) -> None:
    if all(given[name] for name in names):
        flags = " and ".join(map(_flag, names))
        raise ConfigError(f"{flags} contradict each other; give one of them")


def _run(job: Job, resume_state: ResumeState, given: Mapping[str, Any]) -> None:
    if given["dry_run"]:
        show_first_rows(job, plain_console())
        return
    # Before an old output is given up.
    check_model(job.model, job.options, job.engine_config, job.num_actors)
    assert job.lease is not None
    with job.lease:
        _write(job, resume_state, given)


def _write(job: Job, resume_state: ResumeState, given: Mapping[str, Any]) -> None:
    on_hub = HubOutput.of(given["output"])
    if on_hub is not None:
        on_hub.check(resume=given["resume"], overwrite=given["overwrite"])
    former = resume_state.former_runs()  # before their status is removed
    _prepare(job, resume_state, resume=given["resume"], overwrite=given["overwrite"])
    if given["retry_errors"]:
        resume_state.forget_errors()
    console = plain_console()
    try:
        if given["resume"]:
            job = _without_written(job, former, retries_errors=given["retry_errors"])
        view = run_job(job, plain_console(stderr=True))
        resume_state.finish()
        print_summary(view, str(resume_state.output), console)
        if on_hub is not None:
            console.print(f"sent to {harmless(str(on_hub))}: {harmless(on_hub.send())}")
    finally:
        if given["report"]:  # of a run that failed, too
            _write_report(resume_state, console)


def _write_report(resume_state: ResumeState, console: Console) -> None:
    if resume_state.status is None or resume_state.report is None:
        return
    try:
        write_report(resume_state.status, resume_state.report)
        console.print(f"report: {harmless(str(resume_state.report))}")
        job = shlex.quote(str(resume_state.status))
        console.print(harmless(f"raymoe report {job} --samples 10 adds prompts and answers to it"))
    except (OSError, RaymoeError) as error:  # the rows are there
        typer.echo(f"no report in {resume_state.report}: {error}", err=True)


def _prepare(job: Job, resume_state: ResumeState, *, resume: bool, overwrite: bool) -> None:
    manifest = find_manifest(job)
    resume_state.check(manifest, resume=resume, overwrite=overwrite)
    job.writer.prepare(resume=resume, overwrite=overwrite)
    resume_state.prepare(manifest, resume=resume, has_journal=job.journal_dir is not None)
    if resume_state.journal is None:
        typer.echo("no journal: rows of an actor that is killed are generated again; --journal "
                   "keeps them in a directory that all nodes share, or in a bucket", err=True
                   )  # fmt: skip
    num_bytes = resume_state.journal_bytes
    if num_bytes:
        size = format_bytes(num_bytes)
        typer.echo(
            f"finished rows in {resume_state.journal} ({size}) are not generated again", err=True
        )


def _without_written(job: Job, former: FormerRuns, *, retries_errors: bool) -> Job:
    if job.id_column is None:
        typer.echo("no --id-column: rows are known by their cells, and of equal rows as many are "
                   "written as the output has", err=True)  # fmt: skip
    columns = _content_columns(job.options, job.source)
    written = _find_written(job, columns, retries_errors=retries_errors)
    counts = written.counts
    if written.stale:
        job.writer.drop(written.stale, job.id_column)
        counts = count_written(job.writer, job.id_column)
    total = job.source.num_rows
    typer.echo(f"{written.num_rows:,} of {total:,} rows are already written", err=True)
    return dataclasses.replace(job, written=written, former=counts.added_to(former))


def _find_written(
    job: Job, columns: Sequence[str], *, retries_errors: bool
) -> Written | WrittenRows:
    """Return the rows of former runs, and say what happens to those that are not as they were."""
    had_error = "had an error" if retries_errors else "had an error from outside"
    source, writer = job.source, job.writer
    if job.id_column is None:
        rows = find_written_rows(source, writer, columns, is_sampled=_may_be_sampled(job),
                                 retries_errors=retries_errors)  # fmt: skip
        _say(f"{had_error} and are generated again", rows.num_failed)
        _say("are equal to rows that are missing and come again with them", rows.num_again)
        _say("of the output are like none of the input and stay; with --id-column, a row that has "
             "been edited takes the place of what it was", rows.num_unknown)  # fmt: skip
        return rows
    written = find_written(source, writer, columns, job.id_column, retries_errors=retries_errors)
    _say("have been edited since they were written and are generated again", len(written.changed))
    _say(f"{had_error} and are generated again", len(written.failed))
    return written


def _say(what: str, num_rows: int) -> None:
    if num_rows:
        typer.echo(f"{num_rows:,} rows {what}", err=True)


def _may_be_sampled(job: Job) -> bool:
    if read_task_of(job.options) is not None:
        return False
    params: SamplingParams = job.options["sampling_params"]
    return not params.is_greedy or SAMPLING_COLUMN in job.source.schema.names


def _remote_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return where engines may run, as `map_batches_kwargs` has it."""
    args = {}
    for text in given["ray_remote_args"] or ():
        name, is_pair, value = text.partition("=")
        if not is_pair:
            raise ConfigError(f"--ray-remote-args {text}: it takes KEY=VALUE")
        args[name] = _value(value)
    take_remote_args({"ray_remote_args": args})
    return {"ray_remote_args": args} if args else {}


def _parse(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    flag, text = _flag(name), given[name]
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
    message = re.sub(r"\b(\w+)_column\b", r"--\1-column", message)
    return re.sub(r"\b(prompt|system)_(template|prompt)\b", r"--\1-\2", message)


def _check_samples(source: Source) -> None:
    if source.is_batch:
        raise ConfigError("--samples-as-rows has no meaning for an OpenAI batch: each response has "
                          "all samples; leave it out, or add --format table")  # fmt: skip
    check_names(source.schema.names, INPUT_MAY_NOT_HAVE)
