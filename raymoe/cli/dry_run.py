"""`raymoe generate --dry-run`: the first rows on this machine, and what is predicted for all."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import typer
from rich.console import Console

from raymoe.cli.pipeline import Job, check_model, has_cluster, this_machine
from raymoe.data.columns import ERROR_COLUMN, PARSED_ERROR_COLUMN, SAMPLES_COLUMN
from raymoe.data.generator import MoEGenerator, output_columns
from raymoe.data.rows import RowRequest
from raymoe.data.sizing import plan_job
from raymoe.data.tasks import reader_of
from raymoe.data.workload import SAMPLED_ROWS, resized, workload_of
from raymoe.download.models import find_model
from raymoe.engine.tokenizer import Room, Text, Tokenizer
from raymoe.errors import RaymoeError
from raymoe.report import cut
from raymoe.safe_text import harmless
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload

NUM_ROWS = 3
RULE = "-" * 4


def show_first_rows(job: Job, console: Console) -> None:
    """Generate the first rows of a job here, without Ray, and print them; writes nothing.

    Raises:
        RaymoeError: The job could not run either: what is wrong with its model, options or plan.
    """
    check_model(job.model, job.options, job.engine_config, job.num_actors)
    sample = _first_rows(job, SAMPLED_ROWS)
    first = sample.slice(0, NUM_ROWS)
    reader = reader_of(job.options | _names(job))
    typer.echo(f"loading the model here for the first {first.num_rows} rows ...", err=True)
    workload = workload_of(sample, job.source.num_rows, job.model, reader)
    few = None if workload is None else resized(workload, NUM_ROWS)
    config = dataclasses.replace(job.engine_config, workload=few)
    generator = MoEGenerator(job.model, **job.options, **_names(job), engine_config=config)
    try:
        answers = generator(first)
    finally:
        generator.close()
    prompts = _Prompts(job.model)
    try:
        for number, request in enumerate(reader.read(first)):
            lines = [f"row {number + 1} of {job.source.num_rows:,}{_id(job, first, number)}"]
            lines += prompts.lines(request)
            lines += _answer(job, answers.slice(number, 1).to_pylist()[0])
            console.print(harmless("\n".join(lines), keep="\n\t"), end="\n\n")
    finally:
        prompts.close()
    console.print(harmless(_prediction(job, workload), keep="\n"))
    console.print(f"nothing was written; without --dry-run {job.source.num_rows:,} rows go to "
                  f"{harmless(str(job.writer.location))}")  # fmt: skip


def _names(job: Job) -> dict[str, Any]:
    return {"id_column": job.id_column, "error_column": job.source.error_column}


def _first_rows(job: Job, count: int) -> pa.Table:
    names = [*job.source.schema.names]
    names += [job.source.error_column] if job.source.error_column else []
    found: list[pa.Table] = []
    for table in job.source.tables(names):
        found.append(table.slice(0, count - sum(one.num_rows for one in found)))
        if sum(one.num_rows for one in found) >= count:
            break
    return pa.concat_tables(found, promote_options="permissive").combine_chunks()


def _id(job: Job, table: pa.Table, number: int) -> str:
    if job.id_column is None:
        return ""
    return f", id {table.column(job.id_column)[number].as_py()!r}"


class _Prompts:
    """Shows the prompts of rows as the model gets them."""

    def __init__(self, model: str) -> None:
        directory = find_model(model)
        assert directory is not None  # it was loaded
        spec = ModelSpec.from_directory(directory)
        self._tokenizer = Tokenizer(directory, spec.vocab_size)

    def lines(self, request: RowRequest) -> Iterator[str]:
        """Yield a heading and the text; nothing for a row that has none."""
        try:
            if request.prompt is None:
                return
            found = self._tokenizer.read(request.prompt, Room())
            if isinstance(found, Text):
                num_tokens = len(self._tokenizer.encode(request.prompt))
                text = found.text
            else:
                num_tokens = len(found)
                text = self._tokenizer.decode(found.tolist()) or str(found.tolist())
        except RaymoeError:  # the row's answer says it
            return
        yield f"{RULE} prompt of {num_tokens:,} tokens"
        yield cut(text)
        for continuation in request.continuations or ():
            yield f"{RULE} continuation"
            yield cut(str(continuation))

    def close(self) -> None:
        self._tokenizer.close()


def _answer(job: Job, row: Mapping[str, Any]) -> Iterator[str]:
    if row[ERROR_COLUMN]:
        yield f"{RULE} error row"
        yield cut(row[ERROR_COLUMN])
        return
    if "generated_text" not in row:
        added = output_columns(job.model, job.options).names - {ERROR_COLUMN}
        yield f"{RULE} answer"
        yield from (f"{name}: {cut(str(row[name]))}" for name in row if name in added)
        return
    texts: Sequence[str] = row.get(SAMPLES_COLUMN) or [row["generated_text"]]
    for number, text in enumerate(texts):
        of_all = f" {number + 1} of {len(texts)}" if len(texts) > 1 else ""
        length = "" if number else f" of {row['num_generated_tokens']:,} tokens"
        ended = "" if number else f", finish_reason {row['finish_reason']}"
        yield f"{RULE} answer{of_all}{length}{ended}"
        yield cut(text)
    if row.get(PARSED_ERROR_COLUMN):
        yield f"{RULE} not parsed: {cut(row[PARSED_ERROR_COLUMN])}"


def _prediction(job: Job, workload: Workload | None) -> str:
    """Return the plan of the whole job as the run would make it on this machine."""
    if has_cluster():
        return "the nodes of RAY_ADDRESS were not asked: the job predicts its time when it starts"
    directory = find_model(job.model)
    if workload is None or directory is None:
        return "no time can be predicted: none of the first rows can be generated"
    config, cluster = job.engine_config, this_machine()
    plan = plan_job(directory, config, workload, cluster, num_actors=job.num_actors)
    if plan is None:
        return "no time can be predicted: the job does not fit the memory that is free here"
    return plan.describe(job.price_per_hour, job.currency)
