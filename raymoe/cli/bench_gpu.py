"""`raymoe bench --suite gpu`: the options of the suite, its progress, tables and report."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from raymoe.bench.gpu.contenders import GPU_CONTENDERS
from raymoe.bench.gpu.report import COLUMNS, Group, first_line, groups_of, write_report
from raymoe.bench.gpu.result import PartResult, Status, read_results
from raymoe.bench.gpu.settings import NodeSettings
from raymoe.bench.gpu.shapes import DEFAULT_SHAPES, GPU_SHAPES
from raymoe.bench.gpu.suite import RESULTS, SuiteSettings, run_gpu_suite
from raymoe.bench.gpu.workloads import DEFAULT_WORKLOADS, GPU_WORKLOADS
from raymoe.errors import ConfigError, ExecutionError, UnknownOptionError

DEVICES = ("cuda", "emulated")
EMULATED_BY_DEFAULT = "l4"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """The options of the command, as they were given; empty or None where they were not."""

    shapes: list[str]
    workloads: list[str]
    contenders: list[str]
    device: str
    hardware: str | None
    device_memory: int | None
    host_memory: int | None
    num_threads: int | None
    num_layers: int | None
    part_limit_s: float
    most_rows: int
    is_again: bool
    out: Path


def run_gpu(options: GpuOptions) -> None:
    """Run the suite; fails at the end if a part did.

    Raises:
        ConfigError: An option does not exist or does not suit the device.
        ExecutionError: A part failed.
    """
    suite = _suite_of(options)
    console, results = Console(stderr=True), []

    def report(text: str) -> None:
        console.print(text, style="dim", markup=False)

    for result in run_gpu_suite(suite, options.out, report):
        results.append(result)
        report(_line_of(result))
        path = write_report(read_results(options.out / RESULTS), options.out)
    keys = {result.key for result in results}
    for group in groups_of(read_results(options.out / RESULTS)):
        if any(result.key in keys for result in group.results):
            _print(group)
    report(f"{options.out / RESULTS} has a line for each part, {path} tables and pictures")
    failed = [result.settings.name for result in results if result.status == Status.FAILED]
    if failed:
        raise ExecutionError(
            f"{len(failed)} of {len(results)} parts failed ({', '.join(failed)}); their logs are "
            f"in {options.out / 'logs'}; the same command runs them again"
        )


def _suite_of(options: GpuOptions) -> SuiteSettings:
    if options.device not in DEVICES:
        raise UnknownOptionError(options.device, DEVICES, "device of the GPU suite")
    if options.device == "cuda" and options.hardware is not None:
        raise ConfigError(
            f"--hardware {options.hardware} sets the pace of --device emulated; a GPU has its own"
        )
    hardware = options.hardware or EMULATED_BY_DEFAULT
    return SuiteSettings(
        node=NodeSettings(
            device=options.device,
            hardware=None if options.device == "cuda" else hardware,
            device_memory_bytes=options.device_memory,
            host_memory_bytes=options.host_memory,
            num_threads=options.num_threads,
        ),
        shapes=_known(options.shapes, GPU_SHAPES, DEFAULT_SHAPES, "shape"),
        workloads=_known(options.workloads, GPU_WORKLOADS, DEFAULT_WORKLOADS, "workload"),
        contenders=_known(options.contenders, GPU_CONTENDERS, GPU_CONTENDERS, "contender"),
        num_layers=options.num_layers,
        limit_s=options.part_limit_s,
        most_rows=options.most_rows,
        is_again=options.is_again,
    )


def _known(
    given: list[str], known: Collection[str], default: Iterable[str], where: str
) -> list[str]:
    for name in given:
        if name not in known:
            raise UnknownOptionError(name, known, f"{where} of the GPU suite")
    return given or list(default)


def _line_of(result: PartResult) -> str:
    if result.figures is None:
        return f"  {result.status}: {first_line(result.reason)}"
    figures = result.figures
    return (
        f"  {figures.tokens_per_s:.1f} tokens/s ({figures.num_rows} rows), "
        f"{100 * figures.share_of_bound:.3g} % of the bound"
    )


def _print(group: Group) -> None:
    """What fits a narrow terminal; the report has more."""
    table = Table(title=group.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        justify: JustifyMethod = "left" if column == COLUMNS[0] else "right"
        table.add_column(column.replace(" ", "\n", 1), justify=justify, no_wrap=True)
    for row in group.rows():
        table.add_row(*row[: len(COLUMNS)])
    console = Console()
    console.print(table)
    for note in group.notes():
        console.print(f"  {note}", markup=False)
