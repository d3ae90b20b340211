"""`raymoe report`: one page with pictures, from what a job wrote beside it."""

from pathlib import Path
from typing import Annotated

import typer

from raymoe.cli.samples import read_samples
from raymoe.data.status import find_status, read_status, report_beside
from raymoe.errors import ExecutionError
from raymoe.report import write_report
from raymoe.safe_text import harmless


def run(
    job: Annotated[
        Path,
        typer.Argument(
            help="Report on the job that has this output, journal_dir or status_dir.", metavar="JOB"
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the page to this HTML file; by default one beside the output."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="Show this many rows of the output, prompts beside answers, and quote cells in "
            "errors. Without it, the page has no part of any cell.",
            metavar="N",
        ),
    ] = 0,
) -> None:
    """Write a page with pictures of a job, while it runs or after it.

    The page is one file that loads nothing and that only this user may read: rows, rates, errors,
    predicted and measured, a typical step, the roofline, actors, settings.
    """
    directory = find_status(job)
    path = output or report_beside(directory)
    rows = read_samples(directory, read_status(directory).job, samples) if samples else None
    try:
        write_report(directory, path, samples=rows)
    except OSError as error:
        raise ExecutionError(f"{path} cannot be written: {error.strerror}") from error
    typer.echo(harmless(str(path)))
