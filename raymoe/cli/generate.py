"""`raymoe generate`: a table of prompts in, the same table with generated text out."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from raymoe.cli.pipeline import (
    PROMPT_COLUMNS,
    Job,
    check_model,
    find_manifest,
    find_written,
    print_summary,
    run_job,
)
from raymoe.cli.progress import Tally, plain_console
from raymoe.cli.resume import Remains
from raymoe.cli.sinks import check_apart, open_sink
from raymoe.cli.sources import FORMS, Source, open_source
from raymoe.config import DTYPES, ON_TOO_LONG, EngineConfig, SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.data.openai_batch import ID_COLUMN, TOOLS_COLUMN
from raymoe.data.rows import RowReader
from raymoe.errors import ConfigError
from raymoe.units import format_bytes

TABLE = "Table"
SAMPLING = "Sampling"
RUN = "Run"

Model = Annotated[str, typer.Option(help="Model directory, or a name on the hub.")]
Input = Annotated[
    str, typer.Option("--input", help="Parquet or JSONL: a file, a directory or a glob.")
]
Output = Annotated[
    Path, typer.Option(help="Directory for parquet parts, or a file that ends in .jsonl.")
]
PromptColumn = Annotated[str, typer.Option(help="Text, or token ids.", rich_help_panel=TABLE)]
MessagesColumn = Annotated[str, typer.Option(help="Chat messages.", rich_help_panel=TABLE)]
IdColumn = Annotated[
    str | None, typer.Option(help="Unique ids; --resume needs them.", rich_help_panel=TABLE)
]
ToolsColumn = Annotated[
    str | None, typer.Option(help="Tools that messages may call.", rich_help_panel=TABLE)
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
OnTooLong = Annotated[
    str, typer.Option(help=f"One of {', '.join(ON_TOO_LONG)}.", rich_help_panel=RUN)
]
PreserveOrder = Annotated[
    bool, typer.Option("--preserve-order", help="Rows in input order.", rich_help_panel=RUN)
]
Arrange = Annotated[
    bool,
    typer.Option(
        "--arrange",
        help="Sort rows so that those whose prompts begin alike share their computation; no row "
        "comes out before all were read, and their order is lost.",
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where a run ended.", rich_help_panel=RUN)
]
Journal = Annotated[
    bool,
    typer.Option(
        "--journal/--no-journal",
        help="Keep finished rows beside the output, for --resume and for actors that are killed; "
        "a cluster's nodes must share that file system.",
        rich_help_panel=RUN,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output.", rich_help_panel=RUN)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the logs of Ray.", rich_help_panel=RUN)
]


def run(  # noqa: PLR0913 - the options of a command
    *,
    model: Model,
    input_: Input,
    output: Output,
    prompt_column: PromptColumn = "prompt",
    messages_column: MessagesColumn = "messages",
    id_column: IdColumn = None,
    tools_column: ToolsColumn = None,
    form: Form = "auto",
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
    on_too_long: OnTooLong = "error",
    preserve_order: PreserveOrder = False,
    arrange: Arrange = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    journal: Journal = True,
    verbose: Verbose = False,
) -> None:
    """Generate text for every row of a table; every input row gives one output row.

    Rows that cannot be generated come out too: column __inference_error__ says why. Runs in a
    local Ray, or in the cluster that RAY_ADDRESS names.
    """
    flags = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    more = {"ignore_eos": ignore_eos, **_parse(sampling_params)}
    columns = dict(zip(PROMPT_COLUMNS, (prompt_column, messages_column, tools_column), strict=True))
    options = {"sampling_params": SamplingParams.from_dict(flags).override(more), **columns}
    config = EngineConfig(dtype=dtype, num_threads=num_threads, on_too_long=on_too_long, seed=seed)
    source = open_source(input_, prompt_column=prompt_column, id_column=id_column, form=form)
    id_column = _check_columns(source, options, id_column)
    _check_resume(resume=resume, overwrite=overwrite, id_column=id_column)
    if arrange and preserve_order:
        raise ConfigError("--arrange and --preserve-order contradict each other; give one of them")
    check_apart(output, source.paths, input_)
    remains = Remains(output=output.resolve())
    job = Job(
        model=model,
        source=source,
        sink=open_sink(output, source.json_columns, is_batch=source.is_batch),
        options=options,
        engine_config=config,
        num_rows=source.num_rows,
        id_column=id_column,
        journal_dir=remains.journal if journal else None,
        num_actors=num_actors,
        batch_size=batch_size,
        preserve_order=preserve_order,
        is_arranged=arrange,
        verbose=verbose,
    )
    tally = _run(job, remains, resume=resume, overwrite=overwrite)
    print_summary(tally, output, plain_console())


def _set_batch_columns(options: dict[str, Any], id_column: str | None) -> str:
    """Set the columns that requests of a batch are read into; returns that of their ids."""
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
    options |= {"tools_column": TOOLS_COLUMN, "has_choices": True}
    return ID_COLUMN


def _check_resume(*, resume: bool, overwrite: bool, id_column: str | None) -> None:
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite contradict each other; give one of them")
    if resume and id_column is None:
        raise ConfigError("--resume needs --id-column: it skips the ids that are already written")


def _run(job: Job, remains: Remains, *, resume: bool, overwrite: bool) -> Tally:
    check_model(job)  # before an old output is given up
    _prepare(job, remains, resume=resume, overwrite=overwrite)
    tally = run_job(_without_written(job) if resume else job, plain_console(stderr=True))
    remains.finish()
    return tally


def _prepare(job: Job, remains: Remains, *, resume: bool, overwrite: bool) -> None:
    """Make the output and what is beside it ready; nothing changes before all is checked."""
    manifest = find_manifest(job)
    remains.check(manifest, resume=resume, overwrite=overwrite)
    job.sink.prepare(resume=resume, overwrite=overwrite)
    remains.prepare(manifest, resume=resume, has_journal=job.journal_dir is not None)
    num_bytes = remains.journal_bytes
    if num_bytes:
        size = format_bytes(num_bytes)
        typer.echo(f"finished rows in {remains.journal} ({size}) are not generated again", err=True)


def _without_written(job: Job) -> Job:
    """Return the job without the rows that a former run wrote."""
    written = find_written(job.source, job.sink, job.id_column or "")
    total = job.num_rows
    typer.echo(f"{written.num_rows:,} of {total:,} rows are already written", err=True)
    return dataclasses.replace(job, written=written, num_rows=total - written.num_rows)


def _parse(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--sampling-params is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--sampling-params is {text}; it takes a JSON object")
    return options


def _check_columns(source: Source, options: dict[str, Any], id_column: str | None) -> str | None:
    """Find out now what the operator would find at its first batch; returns the column of ids."""
    if source.is_batch:
        id_column = _set_batch_columns(options, id_column)
    reader = RowReader(
        defaults=options["sampling_params"],
        id_column=id_column,
        **{name: options[name] for name in PROMPT_COLUMNS},
    )
    reader.check_schema(source.schema)
    OutputColumns.of(options["sampling_params"]).check_schema(source.schema)
    return id_column
