"""`raymoe generate`: a table of prompts in, the same table with generated text out."""

import dataclasses
import json
from typing import Any

import typer
from rich.console import Console

from raymoe.cli import generate_options as option
from raymoe.cli.lease import Lease
from raymoe.cli.pipeline import (
    PROMPT_COLUMNS,
    Job,
    check_model,
    find_manifest,
    find_written,
    print_summary,
    run_job,
)
from raymoe.cli.progress import plain_console
from raymoe.cli.resume import Remains
from raymoe.cli.sinks import check_apart, open_sink
from raymoe.cli.sources import Source, open_source
from raymoe.cli.storage import Location
from raymoe.cli.storage_errors import without_secrets
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.data.openai_batch import CONTENT_COLUMNS, ID_COLUMN, TOOLS_COLUMN
from raymoe.data.rows import SAMPLING_COLUMN, RowReader
from raymoe.data.samples import INPUT_MAY_NOT_HAVE, check_names
from raymoe.data.status.record import Pairs
from raymoe.errors import ConfigError, RaymoeError
from raymoe.report.write import write_report
from raymoe.safe_text import harmless
from raymoe.units import format_bytes

ADDRESSES = frozenset({"input", "output", "journal"})


def run(  # noqa: PLR0913 - the options of a command
    context: typer.Context,
    *,
    model: option.Model,
    input_: option.Input,
    output: option.Output,
    prompt_column: option.PromptColumn = "prompt",
    messages_column: option.MessagesColumn = "messages",
    id_column: option.IdColumn = None,
    tools_column: option.ToolsColumn = None,
    form: option.Form = "auto",
    samples_as_rows: option.SamplesAsRows = False,
    max_tokens: option.MaxTokens = 64,
    temperature: option.Temperature = 0.0,
    top_p: option.TopP = 1.0,
    top_k: option.TopK = 0,
    seed: option.Seed = 0,
    ignore_eos: option.IgnoreEos = False,
    sampling_params: option.MoreParams = "{}",
    dtype: option.Dtype = "auto",
    num_actors: option.NumActors = 1,
    batch_size: option.BatchSize = 32,
    num_threads: option.NumThreads = None,
    on_too_long: option.OnTooLong = "error",
    preserve_order: option.PreserveOrder = False,
    arrange: option.Arrange = False,
    resume: option.Resume = False,
    overwrite: option.Overwrite = False,
    journal: option.Journal = None,
    no_journal: option.NoJournal = False,
    price_per_hour: option.Price = None,
    report: option.Report = True,
    verbose: option.Verbose = False,
) -> None:
    """Generate text for every row of a table; every input row gives one output row.

    Rows that cannot be generated come out too: column __inference_error__ says why. Runs in a
    local Ray, or in the cluster that RAY_ADDRESS names.
    """
    _refuse_both({"--resume": resume, "--overwrite": overwrite})
    _refuse_both({"--arrange": arrange, "--preserve-order": preserve_order})
    flags = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    params = _read_params({**flags, "ignore_eos": ignore_eos}, sampling_params)
    options = _options(params, samples_as_rows, prompt_column, messages_column, tools_column)
    config = EngineConfig(dtype=dtype, num_threads=num_threads, on_too_long=on_too_long, seed=seed)
    source = open_source(input_, prompt_column=prompt_column, id_column=id_column, form=form)
    id_column = _check_columns(source, options, id_column)
    remains = _find_output(output, source, input_, journal)
    lease, columns = Lease(remains.output), _content_columns(options, source.is_batch)
    job = Job(
        model=model, source=source, options=options, engine_config=config, id_column=id_column,
        sink=open_sink(remains.output, source, has_samples=samples_as_rows,
                       content_columns=columns, run=lease.run), lease=lease,
        journal_dir=None if no_journal else remains.journal, status_dir=remains.status,
        price_per_hour=price_per_hour, settings=_settings(context.params), verbose=verbose,
        num_actors=num_actors, batch_size=batch_size,
        preserve_order=preserve_order, is_arranged=arrange,
    )  # fmt: skip
    _run(job, remains, resume=resume, overwrite=overwrite, has_report=report)


def _settings(params: dict[str, Any]) -> Pairs:
    """Return what was asked for, for people: keys that an address may have are left out."""
    texts = {name.rstrip("_"): str(value) for name, value in params.items()}
    addresses = {name: text for name, text in texts.items() if name in ADDRESSES and "://" in text}
    return tuple((texts | {one: without_secrets(addresses[one]) for one in addresses}).items())


def _read_params(flags: dict[str, Any], more: str) -> SamplingParams:
    return SamplingParams.from_dict(flags).override(_parse(more))


def _options(params: SamplingParams, samples_as_rows: bool, *columns: str | None) -> dict[str, Any]:
    """Return the options of the operator."""
    named = dict(zip(PROMPT_COLUMNS, columns, strict=True))
    return {"sampling_params": params, "has_choices": samples_as_rows, **named}


def _content_columns(options: dict[str, Any], is_batch: bool) -> tuple[str, ...]:
    """Return the columns that the answer of a row depends on."""
    if is_batch:
        return CONTENT_COLUMNS
    named = [options[name] for name in PROMPT_COLUMNS]
    return (*(name for name in named if name is not None), SAMPLING_COLUMN)


def _find_output(output: str, source: Source, input_: str, journal_dir: str | None) -> Remains:
    place = Location.parse(output)
    check_apart(place, source.files, Location.parse(input_))
    return Remains.of(place, journal_dir)


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


def _refuse_both(flags: dict[str, bool]) -> None:
    if all(flags.values()):
        raise ConfigError(f"{' and '.join(flags)} contradict each other; give one of them")


def _run(job: Job, remains: Remains, *, resume: bool, overwrite: bool, has_report: bool) -> None:
    if resume and job.id_column is None:
        raise ConfigError("--resume needs --id-column: it skips the ids that are already written")
    check_model(job)  # before an old output is given up
    assert job.lease is not None
    with job.lease:
        _write(job, remains, resume=resume, overwrite=overwrite, has_report=has_report)


def _write(job: Job, remains: Remains, *, resume: bool, overwrite: bool, has_report: bool) -> None:
    _prepare(job, remains, resume=resume, overwrite=overwrite)
    console = plain_console()
    try:
        tally = run_job(_without_written(job) if resume else job, plain_console(stderr=True))
        remains.finish()
        print_summary(tally, remains.output, console)
    finally:
        if has_report:  # of a run that failed, too
            _write_report(remains, console)


def _write_report(remains: Remains, console: Console) -> None:
    if remains.status is None or remains.report is None:
        return
    try:
        write_report(remains.status, remains.report)
        console.print(f"report: {harmless(str(remains.report))}")
    except (OSError, RaymoeError) as error:  # the rows are there
        typer.echo(f"no report in {remains.report}: {error}", err=True)


def _prepare(job: Job, remains: Remains, *, resume: bool, overwrite: bool) -> None:
    """Make the output and what is beside it ready; nothing changes before all is checked."""
    manifest = find_manifest(job)
    remains.check(manifest, resume=resume, overwrite=overwrite)
    job.sink.prepare(resume=resume, overwrite=overwrite)
    remains.prepare(manifest, resume=resume, has_journal=job.journal_dir is not None)
    if remains.journal is None:
        typer.echo("no journal: rows of an actor that is killed are generated again; --journal DIR "
                   "keeps them in a directory that all nodes share", err=True)  # fmt: skip
    num_bytes = remains.journal_bytes
    if num_bytes:
        size = format_bytes(num_bytes)
        typer.echo(f"finished rows in {remains.journal} ({size}) are not generated again", err=True)


def _without_written(job: Job) -> Job:
    """Return the job without the rows that a former run wrote."""
    columns, id_column = _content_columns(job.options, job.source.is_batch), job.id_column or ""
    written = find_written(job.source, job.sink, columns, id_column)
    reasons = {"have been edited since they were written": written.changed,
               "had an error from outside": written.failed}  # fmt: skip
    for reason, ids in reasons.items():
        if len(ids):
            typer.echo(f"{len(ids):,} rows {reason} and are generated again", err=True)
    if written.stale:
        job.sink.drop(written.stale, id_column)
    total = job.source.num_rows
    typer.echo(f"{written.num_rows:,} of {total:,} rows are already written", err=True)
    return dataclasses.replace(job, written=written)


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
    if options["has_choices"]:
        _check_samples(source)
    if source.is_batch:
        id_column = _set_batch_columns(options, id_column)
    reader = RowReader(
        defaults=options["sampling_params"],
        id_column=id_column,
        **{name: options[name] for name in PROMPT_COLUMNS},
    )
    reader.check_schema(source.schema)
    columns = OutputColumns.of(options["sampling_params"], has_choices=options["has_choices"])
    columns.check_schema(source.schema)
    return id_column


def _check_samples(source: Source) -> None:
    if source.is_batch:
        raise ConfigError("--samples-as-rows has no meaning for an OpenAI batch: each response has "
                          "all samples; leave it out, or add --format table")  # fmt: skip
    check_names(source.schema.names, INPUT_MAY_NOT_HAVE)
