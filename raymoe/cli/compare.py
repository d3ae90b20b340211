"""`raymoe compare`: schedules side by side on an emulated device, predicted and measured."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raymoe.bench.comparison import Comparison, DecodeStep, compare_schedules
from raymoe.cli.options import size
from raymoe.errors import UnknownOptionError
from raymoe.plan.policy import PAGE_BYTES
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.draw import draw_chrome_trace, draw_svg
from raymoe.schedule.graph import Resource
from raymoe.schedule.timeline import Timeline, compare
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.units import format_seconds

ResidentShare = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of the weights that stays on the device.")
]
PageBytes = Annotated[
    int, typer.Option(parser=size, metavar="SIZE", help="Largest page of weights: 64MiB, ...")
]
CpuAttentionFraction = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Decoding rows for which the CPU attends.")
]


def run(  # noqa: PLR0913 - the options of a command
    *,
    model: Annotated[Path, typer.Option(help="Directory of the model that computes.")],
    hardware: Annotated[
        str, typer.Option(help="Whose pace is emulated: t4, l4, a5000, ...")
    ] = "l4",
    schedule: Annotated[
        list[str] | None, typer.Option(help="Schedules to run; repeatable; all by default.")
    ] = None,
    costs_of: Annotated[
        str | None,
        typer.Option(help="Model preset whose first layers set the pace, such as mixtral-8x7b."),
    ] = None,
    num_waves: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 14,
    wave_rows: Annotated[int, typer.Option(min=1, help="Sequences of each.")] = 36,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 482,
    resident_share: ResidentShare = 0.0,
    page_bytes: PageBytes = PAGE_BYTES,
    cpu_attention_fraction: CpuAttentionFraction = 1.0,
    time_scale: Annotated[
        float, typer.Option(min=0.001, help="Slow the pace down; figures are divided by it.")
    ] = 1.0,
    out: Annotated[Path, typer.Option(help="Directory for schedules.svg and trace.json.")] = Path(
        "raymoe-compare"
    ),
) -> None:
    """Run one decode step by each schedule on a device made of host memory.

    Every schedule computes the same tokens with the same kernels; each task is stretched to the
    time that the hardware would take. Writes a Gantt chart with all schedules on one axis,
    predicted above measured, and a trace for chrome://tracing or Perfetto.
    """
    names = schedule or list(STREAMING_BUILDERS)
    _check_names(names)
    console = Console(stderr=True)
    comparisons = []
    step = DecodeStep(
        num_waves=num_waves,
        wave_rows=wave_rows,
        context=context,
        resident_share=resident_share,
        page_bytes=page_bytes,
        cpu_attention_fraction=cpu_attention_fraction,
    )
    for comparison in compare_schedules(
        model,
        hardware_preset(hardware),
        names,
        step,
        costs_of=None if costs_of is None else model_preset(costs_of),
        time_scale=time_scale,
    ):
        comparisons.append(comparison)
        line = compare(comparison.predicted, comparison.measured)
        console.print(f"{comparison.name}: {line}", style="dim")
    Console().print(_table(comparisons, f"one decode step on {hardware}"))
    _draw(comparisons, f"decode step, {hardware}", out)
    console.print(f"{out / 'schedules.svg'}, {out / 'trace.json'}", style="dim")


def _check_names(names: list[str]) -> None:
    for name in names:
        if name not in STREAMING_BUILDERS:
            raise UnknownOptionError(name, STREAMING_BUILDERS, "schedule")


def _draw(comparisons: list[Comparison], title: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    timelines = [timeline for each in comparisons for timeline in _named(each)]
    (out / "schedules.svg").write_text(draw_svg(timelines, title=title))
    (out / "trace.json").write_text(draw_chrome_trace(timelines))


def _named(comparison: Comparison) -> tuple[Timeline, Timeline]:
    name = comparison.name
    return (
        Timeline(f"{name}, predicted", comparison.predicted.spans),
        Timeline(f"{name}, measured", comparison.measured.spans),
    )


def _table(comparisons: list[Comparison], title: str) -> Table:
    table = Table(title=title)
    table.add_column("schedule", no_wrap=True)
    lanes = (Resource.GPU, Resource.CPU, Resource.HTOD, Resource.DTOH)
    for column in ("predicted", "measured", "gap", *lanes, "bound", "tokens/s"):
        table.add_column(column, justify="right")
    for each in comparisons:
        table.add_row(
            each.name,
            format_seconds(each.predicted.makespan_s),
            format_seconds(each.measured.makespan_s),
            f"{100 * each.gap:+.1f} %",
            *(f"{100 * each.measured.utilization(lane):.0f} %" for lane in lanes),
            each.bound,
            f"{each.tokens_per_s:.1f}",
        )
    return table
