"""`raymoe demo`: messy rows in, tidy rows out, with the bundled model, checked."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from rich.table import Table
from rich.text import Text

from raymoe.assets import demo_model_path
from raymoe.assets.wrangling import KINDS, make_rows
from raymoe.cli.pipeline import Job, check_model, run_job
from raymoe.cli.progress import plain_console, print_summary
from raymoe.cli.sources import open_source
from raymoe.cli.storage import Location
from raymoe.cli.writers import ParquetWriter
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.status import clear_status, report_beside, status_beside
from raymoe.errors import ConfigError, ExecutionError
from raymoe.report import write_report
from raymoe.safe_text import harmless

MAX_TOKENS = 32  # the longest answer has 24
SAMPLES_PER_KIND = 2
INPUT_NAME, OUTPUT_NAME = "prompts.parquet", "answers"


def run(
    *,
    rows: Annotated[int, typer.Option(min=1, help="Make and tidy this many messy rows.")] = 6000,
    output: Annotated[
        Path,
        typer.Option(help="Write prompts and answers to this directory; each run replaces it."),
    ] = Path("raymoe-demo"),
    seed: Annotated[
        int, typer.Option(min=0, max=999_999, help="Make other rows with another seed.")
    ] = 0,
    num_actors: Annotated[
        int, typer.Option(min=1, help="Run this many engines, each in an actor of Ray.")
    ] = 1,
    min_accuracy: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fail if a smaller share of the answers is right."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the logs of Ray.")] = False,
) -> None:
    """Tidy thousands of messy rows with the included model, and check every answer.

    The model is a small Mixture-of-Experts trained on this task; none of the rows was seen in
    training. It needs neither a network nor a GPU.
    """
    input_path = _write_prompts(output, rows, seed)
    source = open_source(str(input_path), id_column="id")
    writer = ParquetWriter(location=Location.local(output / OUTPUT_NAME))
    job = Job(
        model=str(demo_model_path()),
        source=source,
        writer=writer,
        options={"sampling_params": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)},
        engine_config=EngineConfig(),
        id_column="id",
        status_dir=_status_dir(output),
        num_actors=num_actors,
        verbose=verbose,
    )
    check_model(job.model, job.options, job.engine_config, job.num_actors)
    clear_status(_status_dir(output))
    writer.prepare(resume=False, overwrite=True)
    console = plain_console()
    console.print(f"{rows:,} messy rows in {input_path}")
    view = run_job(job, plain_console(stderr=True))
    answers = pq.read_table(output / OUTPUT_NAME).sort_by("id")
    scores = score(answers)
    console.print(_sample_table(answers))
    console.print(_score_table(scores))
    _check_ids(source.ids, answers.column("id"))
    print_summary(view, str(writer.location), console)
    console.print(f"input:  {input_path}")
    write_report(_status_dir(output), report_beside(_status_dir(output)))
    console.print(f"report: {report_beside(_status_dir(output))}")
    total = scores[-1]
    console.print(f"exact match: {100 * total.accuracy:.2f} % of {total.num_rows:,} rows")
    if min_accuracy is not None and total.accuracy < min_accuracy:
        raise ExecutionError(
            f"exact match {total.accuracy:.4f} is below --min-accuracy {min_accuracy}"
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    kind: str
    num_rows: int
    num_exact: int

    @property
    def accuracy(self) -> float:
        return self.num_exact / max(1, self.num_rows)


def score(answers: pa.Table) -> list[Score]:
    """Return the score of each kind, and of all rows as the last."""
    given = pc.utf8_trim_whitespace(answers.column("generated_text"))
    is_exact = pc.equal(given, answers.column("answer"))
    kinds = answers.column("kind")
    scores = []
    for kind in KINDS:
        of_kind = is_exact.filter(pc.equal(kinds, kind))
        scores.append(
            Score(kind=kind, num_rows=len(of_kind), num_exact=pc.sum(of_kind).as_py() or 0)
        )
    num_exact = pc.sum(is_exact).as_py() or 0
    return [*scores, Score(kind="all", num_rows=len(is_exact), num_exact=num_exact)]


def _write_prompts(output: Path, num_rows: int, seed: int) -> Path:
    status_dir = _status_dir(output)
    ours = {INPUT_NAME, OUTPUT_NAME, status_dir.name, report_beside(status_dir).name}
    others = sorted({path.name for path in output.iterdir()} - ours) if output.is_dir() else []
    if others or (output.exists() and not output.is_dir()):
        what = f"holds {others[0]}" if others else "is a file"
        raise ConfigError(f"--output {output} {what}; choose a directory of its own for the demo")
    shutil.rmtree(output / OUTPUT_NAME, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    made = list(make_rows(num_rows, seed=seed, held_out=True))
    table = pa.table(
        {
            "id": pa.array([f"row-{index:07d}" for index in range(num_rows)]),
            "kind": pa.array([row.kind for row in made]),
            "prompt": pa.array([row.prompt for row in made]),
            "answer": pa.array([row.answer for row in made]),
        }
    )
    path = output / INPUT_NAME
    pq.write_table(table, path)
    return path


def _status_dir(output: Path) -> Path:
    return status_beside(output / OUTPUT_NAME)


def _check_ids(expected: pa.Array, found: pa.ChunkedArray) -> None:
    missing = len(expected.filter(pc.invert(pc.is_in(expected, value_set=found))))
    if missing or len(found) != len(expected):
        raise ExecutionError(
            f"{len(expected):,} rows went in and {len(found):,} came out, {missing:,} are missing"
        )


def _sample_table(answers: pa.Table) -> Table:
    table = Table(title="a few of the rows")
    for column in ("kind", "prompt", "generated text", "right"):
        table.add_column(column)
    for kind in KINDS:
        rows = answers.filter(pc.equal(answers.column("kind"), kind)).slice(0, SAMPLES_PER_KIND)
        for row in rows.to_pylist():
            text = row["generated_text"] or row["__inference_error__"]
            right = "yes" if text.strip() == row["answer"] else f"no: {row['answer']}"
            table.add_row(*(Text(harmless(cell)) for cell in (kind, row["prompt"], text, right)))
    return table


def _score_table(scores: Sequence[Score]) -> Table:
    table = Table(title="exact match")
    table.add_column("kind")
    for column in ("rows", "exact", "share"):
        table.add_column(column, justify="right")
    for one in scores:
        share = f"{100 * one.accuracy:.2f} %"
        table.add_row(one.kind, f"{one.num_rows:,}", f"{one.num_exact:,}", share)
    return table
