"""`raymoe doctor`: whether this machine runs raymoe correctly, and what keeps it from its bound."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raymoe._version import __version__
from raymoe.cli import EXIT_FAILED
from raymoe.doctor.examine import SECTIONS, Finding, Status, Target, examine
from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.safe_text import harmless

DEVICES = ("auto", "cuda", "cpu")
STYLES = {
    Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red", Status.SKIPPED: "dim",
}  # fmt: skip


def run(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Check this file, which raymoe plan --write wrote, instead of the machine, and "
            "say what its nodes cost an hour.",
        ),
    ] = None,
    *,
    device: Annotated[
        str,
        typer.Option(
            help="Examine this device, cuda or cpu; auto is the GPU where torch sees one."
        ),
    ] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Use this many threads; by default one for each core.")
    ] = None,
    limit: Annotated[
        float,
        typer.Option(min=1, help="Begin no check later than this many seconds after the start."),
    ] = 280.0,
    section: Annotated[
        list[str],
        typer.Option(
            help=f"Check only this section, one of {', '.join(SECTIONS)}. Repeat the option "
            "for several."
        ),
    ] = [],  # noqa: B006 - typer copies it
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one JSON object.")
    ] = False,
) -> None:
    """Check in at most five minutes whether this machine computes correctly, and how fast it is.

    Kernels are compared with plain formulas for each format of weights, and the included model with
    transformers under several schedules. Neither Ray nor a network is needed. A warning says what
    makes this machine slower than it could be. With a FILE for a cluster, that is checked as far
    as no cloud is needed. The exit code is 1 if a check failed.
    """
    if device not in DEVICES:
        raise UnknownOptionError(device, DEVICES, "--device")
    if file is not None and section:
        raise ConfigError("--section is for the machine; leave it out where a FILE is checked")
    for name in section:
        if name not in SECTIONS:
            raise UnknownOptionError(name, SECTIONS, "--section")
    if file is not None:
        # It imports other commands.
        from raymoe.cli.doctor.cluster_file import examine_file  # noqa: PLC0415

        _show(examine_file(file), "file", str(file), as_json=as_json)
        return
    chosen = _with_gpu() if device == "auto" else device
    target = Target(device=chosen, num_threads=num_threads)
    _show(examine(target, limit, section or SECTIONS), "device", chosen, as_json=as_json)


def _show(found: Iterator[Finding], kind: str, subject: str, *, as_json: bool) -> None:
    """Print findings as they come; raises Exit if a check failed.

    Args:
        kind: What is examined: a file, or a device.
        subject: Its name.
    """
    begin_s, findings = time.monotonic(), []
    with Console(stderr=True).status("examining") as status:
        for finding in found:
            findings.append(finding)
            status.update(f"{finding.section}: {finding.name} {finding.status}")
    seconds = time.monotonic() - begin_s
    if as_json:
        typer.echo(_as_json(findings, {kind: subject}, seconds))
    else:
        _print(findings, f"raymoe {__version__} on the {kind} {subject}", seconds)
    if any(finding.status == Status.FAILED for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _with_gpu() -> str:
    try:
        import torch  # noqa: PLC0415 - whether it can be imported is part of the examination
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _as_json(findings: Sequence[Finding], subject: dict[str, str], seconds: float) -> str:
    content = {
        "raymoe": __version__,
        **subject,
        "is_healthy": all(finding.status != Status.FAILED for finding in findings),
        "seconds": round(seconds, 1),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(content, indent=1)


def _print(findings: Sequence[Finding], title: str, seconds: float) -> None:
    table = Table(title=harmless(title), expand=False)
    for column in ("", "check", "", "found"):
        table.add_column(column, overflow="fold")
    section = ""
    for finding in findings:
        if finding.section != section and section:
            table.add_section()
        shown = "" if finding.section == section else finding.section
        section = finding.section
        status = Text(finding.status, style=STYLES[finding.status])
        table.add_row(shown, finding.name, status, Text(harmless(finding.value)))
    console = Console()
    console.print(table)
    for finding in findings:
        if finding.advice:
            text = f"{finding.section}, {finding.name}: {harmless(finding.advice)}"
            console.print(Text(text, style=STYLES[finding.status]))
    failed, warned = (
        sum(finding.status == status for finding in findings)
        for status in (Status.FAILED, Status.WARNING)
    )
    console.print(
        f"{len(findings)} checks in {seconds:.0f} s: {failed} failed, {warned} warnings",
        highlight=False,
    )
