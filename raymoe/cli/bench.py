"""`raymoe bench`: engines, kernels and steps on this machine, beside what it could do at most."""

import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.live import Live
from rich.table import Table

from raymoe.bench.contenders import CONTENDERS
from raymoe.bench.gpu.report import COLUMNS, Group, first_line, groups_of, write_report
from raymoe.bench.gpu.settings import (
    DEFAULT_SHAPES,
    DEFAULT_WORKLOADS,
    GPU_CONTENDERS,
    GPU_SHAPES,
    GPU_WORKLOADS,
    NodeSettings,
    PartResult,
    Status,
    read_results,
)
from raymoe.bench.gpu.suite import RESULTS, SuiteSettings, run_gpu_suite
from raymoe.bench.kernels import kernel_jobs, measure_kernels
from raymoe.bench.operations import PhaseTimes, measure_operations
from raymoe.bench.steps import KindTimes, compare_steps, measure_lanes, times_by_kind
from raymoe.bench.suite import Result, run_suite
from raymoe.bench.workloads import SHAPES, WORKLOADS, make_checkpoint
from raymoe.cli import size
from raymoe.config import Settings
from raymoe.device.host import read_host
from raymoe.device.threads import set_num_threads
from raymoe.errors import ConfigError, ExecutionError, UnknownOptionError
from raymoe.measure.profile import obtain_profile
from raymoe.schedule.graph import Op
from raymoe.specs.files import open_regular
from raymoe.units import GB, GIB, format_seconds

SUITES = ("cpu", "gpu")
CPU, GPU = "Suite cpu", "Suite gpu"

Suite = Annotated[
    str,
    typer.Option(
        help="Measure engines on the cores of this machine (cpu), or raymoe, the schedules of "
        "published papers and accelerate on one GPU (gpu)."
    ),
]
Shapes = Annotated[
    list[str],
    typer.Option(
        "--shape",
        help="Use a model with the layer sizes of this one and random weights. Repeat the option "
        f"for several. The suite cpu has {', '.join(SHAPES)}, the suite gpu "
        f"{', '.join(GPU_SHAPES)}.",
    ),
]
Workloads = Annotated[
    list[str],
    typer.Option(
        "--workload",
        help="Run a job whose rows have these lengths. Repeat the option for several. The suite "
        f"cpu has {', '.join(WORKLOADS)}, the suite gpu {', '.join(GPU_WORKLOADS)}.",
    ),
]
Contenders = Annotated[
    list[str],
    typer.Option(
        "--contender",
        help="Measure this engine or schedule. Repeat the option for several. The suite cpu has "
        f"{', '.join(CONTENDERS)}, the suite gpu {', '.join(GPU_CONTENDERS)}.",
    ),
]
Repetitions = Annotated[
    int,
    typer.Option(min=1, help="Run each job this many times and show medians.", rich_help_panel=CPU),
]
Phases = Annotated[
    bool,
    typer.Option(
        "--phases",
        help="Measure the time of prefill separately, which doubles the time of the suite.",
        rich_help_panel=CPU,
    ),
]
Kernels = Annotated[
    bool,
    typer.Option(
        "--kernels",
        help="Measure kernels instead of engines, in about four minutes.",
        rich_help_panel=CPU,
    ),
]
Steps = Annotated[
    bool,
    typer.Option(
        "--steps",
        help="Compare the measured time of raymoe's steps with the prediction from this machine's "
        "profile, instead of comparing engines.",
        rich_help_panel=CPU,
    ),
]
Operations = Annotated[
    bool,
    typer.Option(
        "--operations",
        help="Show where the time of raymoe's jobs goes, instead of comparing engines: seconds, "
        "bytes and floating-point operations of each kind of operation, in prefill and in decode, "
        "beside the time that they would take at the limit of the machine.",
        rich_help_panel=CPU,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Run on the GPU (cuda), or on an imitation of one in host memory (emulated), which "
        "tries out the suite without a GPU.",
        rich_help_panel=GPU,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Let the emulated device take as long as this GPU would, such as l4, t4 or a5000; l4 "
        "by default.",
        rich_help_panel=GPU,
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Use at most this much memory of the GPU, as if it were a smaller one; 16GiB by "
        "default.",
        rich_help_panel=GPU,
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Use at most this much host memory; by default 85 % of what is available.",
        rich_help_panel=GPU,
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use only this many layers of each model; by default as many as memory and time "
        "allow.",
        rich_help_panel=GPU,
    ),
]
PartLimit = Annotated[
    float,
    typer.Option(
        min=10,
        help="Choose the number of rows so that each measurement takes at most this many seconds; "
        "one that takes longer has failed.",
        rich_help_panel=GPU,
    ),
]
SuiteLimit = Annotated[
    float,
    typer.Option(
        min=10,
        help="Begin no measurement that could end later than this many seconds after the start.",
        rich_help_panel=GPU,
    ),
]
MaxRows = Annotated[
    int,
    typer.Option(
        min=1, help="Use at most this many rows in each measurement.", rich_help_panel=GPU
    ),
]
Again = Annotated[
    bool,
    typer.Option(
        "--again",
        help="Also repeat measurements whose results are in the directory of --out; those that "
        "failed are repeated anyway.",
        rich_help_panel=GPU,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(min=1, help="Compute with this many threads; by default one for each core."),
]
Out = Annotated[
    Path, typer.Option(help="Write checkpoints, results and figures to this directory.")
]


# Of a step on host cores, those that take time.
STEP_OPS = (Op.PRE, Op.ATTN, Op.POST, Op.EXPERTS, Op.HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOptions:
    shapes: list[str]
    workloads: list[str]
    contenders: list[str]
    repetitions: int
    num_threads: int
    out: Path

    def __post_init__(self) -> None:
        _check_names(shape=(self.shapes, SHAPES), workload=(self.workloads, WORKLOADS))
        _check_names(contender=(self.contenders, CONTENDERS))


def run_engines(options: CpuOptions, *, has_phases: bool) -> None:
    """Run engines in turns; print a table and keep a line for each."""
    console, results, out = Console(stderr=True), [], options.out
    out.mkdir(parents=True, exist_ok=True)
    log = open_regular(out / "results.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666)
    with os.fdopen(log, "a") as lines:
        for result in run_suite(
            shapes=options.shapes,
            workloads=options.workloads,
            contenders=options.contenders,
            repetitions=options.repetitions,
            num_threads=options.num_threads,
            has_phases=has_phases,
            directory=out,
            report=lambda text: console.print(text, style="dim"),
        ):
            lines.write(result.to_json() + "\n")
            lines.flush()
            results.append(result)
    Console().print(_table(results))
    console.print(f"each result is a line of {out / 'results.jsonl'}", style="dim")


def _check_names(**options: tuple[Iterable[str], Collection[str]]) -> None:
    for name, (chosen, known) in options.items():
        for value in chosen:
            if value not in known:
                raise ConfigError(f"--{name} is {value!r}; the suite cpu takes {', '.join(known)}")


def run_steps(options: CpuOptions) -> None:
    """Hold our steps against what is predicted with this machine's profile."""
    settings = Settings.from_environment()
    options.out.mkdir(parents=True, exist_ok=True)
    hardware, _ = obtain_profile(settings.cache_directory, options.num_threads)
    for shape, workload in itertools.product(options.shapes, options.workloads):
        model = make_checkpoint(shape, options.out / shape)
        runs = compare_steps(model, hardware, WORKLOADS[workload], options.repetitions)
        Console().print(_step_table(f"{shape} {workload}", times_by_kind(runs)))


def _step_table(name: str, kinds: Iterable[KindTimes]) -> Table:
    title = f"{name}: measured steps beside the prediction from this machine's profile; gaps in %"
    table = Table(title=title, pad_edge=False)
    for column in ("steps", "predicted", "measured", "gap", *STEP_OPS):
        table.add_column(column, justify="right", no_wrap=True)
    for each in kinds:
        table.add_row(
            f"{each.num_steps} {each.kind}",
            format_seconds(each.predicted_s),
            format_seconds(each.measured_s),
            f"{100 * each.gap:+.1f}",
            *(f"{100 * each.gap_by_op[op]:+.0f}" for op in STEP_OPS),
        )
    return table


def run_operations(options: CpuOptions) -> None:
    """Show where the time of our jobs goes; keep a line for each phase."""
    path = options.out / "operations.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    log = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666)
    with os.fdopen(log, "a") as lines:
        for shape, workload in itertools.product(options.shapes, options.workloads):
            phases = measure_operations(
                make_checkpoint(shape, options.out / shape),
                WORKLOADS[workload],
                num_threads=options.num_threads,
                repetitions=options.repetitions,
            )
            for phase in phases:
                lines.write(phase.to_json(shape=shape, workload=workload) + "\n")
                Console().print(_operation_table(f"{shape} {workload}", phase))
            lines.flush()
    Console(stderr=True).print(f"each phase is a line of {path}", style="dim")


def _operation_table(name: str, phase: PhaseTimes) -> Table:
    """Fits 80 columns."""
    title = f"{name}, {phase.phase}: {phase.num_steps} steps, {phase.num_tokens} tokens"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("operation", no_wrap=True)
    for column in ("calls", "time", "share", "GB", "GFLOP", "limit", "of\nlimit"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in phase.operations:
        table.add_row(
            each.kind,
            f"{each.calls}",
            format_seconds(each.seconds),
            f"{100 * each.seconds / phase.seconds:.1f} %",
            f"{each.num_bytes / GB:.2f}" if each.bound_s else "",
            f"{each.flop / GB:.1f}" if each.flop else "",
            format_seconds(each.bound_s) if each.bound_s else "",
            f"{100 * each.bound_s / each.seconds:.0f} %" if each.bound_s and each.seconds else "",
        )
    for label, seconds in (("not accounted for", phase.not_accounted_s), ("sum", phase.sum_s)):
        share = f"{100 * seconds / phase.seconds:.1f} %"
        table.add_row(label, "", format_seconds(seconds), share)
    bound_s = sum(each.bound_s for each in phase.operations)
    of_limit = f"{100 * bound_s / phase.seconds:.0f} %"
    table.add_row(
        "by the clock", "", format_seconds(phase.seconds), "", "", "",
        format_seconds(bound_s), of_limit,
    )  # fmt: skip
    return table


def run_kernels(num_threads: int, repetitions: int) -> None:
    """Hold kernels against what the machine can do."""
    set_num_threads(num_threads, num_torch_threads=1)
    table = Table(title="kernels beside the limit of the machine")
    for column in ("kernel", "case", "bound by"):
        table.add_column(column)
    for column in ("rate", "limit", "of limit"):
        table.add_column(column, justify="right")
    with Live(table, console=Console(), vertical_overflow="visible"):
        for rate in measure_kernels(
            kernel_jobs(), num_threads=num_threads, repetitions=repetitions
        ):
            if rate.is_memory_bound:
                bound, unit, mine, limit = (
                    "memory",
                    "GB/s",
                    rate.bytes_per_s,
                    rate.limits.bytes_per_s,
                )
            else:
                bound, unit, mine, limit = (
                    "FLOPs",
                    "GFLOP/s",
                    rate.flop_per_s,
                    rate.limits.flop_per_s,
                )
            table.add_row(
                rate.kernel,
                rate.case,
                bound,
                f"{mine / GB:.1f} {unit}",
                f"{limit / GB:.1f} {unit}",
                f"{100 * rate.share_of_limit:.0f} %",
            )
    Console().print(f"{measure_lanes()}")


def _table(results: list[Result]) -> Table:
    """Fits 80 columns; the rates of the machine are in the JSON lines."""
    title = "generated tokens per second, end to end"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ("job", "engine", "tokens/s", "spread", "of\nbound", "raymoe\nis", "against\nplan")
    for column in (*columns, "prefill", "peak\nGiB"):
        justify: JustifyMethod = "left" if column in columns[:2] else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    ours = {(r.shape, r.workload): r.tokens_per_s for r in results if r.contender == "raymoe"}
    for result in results:
        mine = ours.get((result.shape, result.workload))
        spread = (result.total_s_max - result.total_s_min) / result.total_s
        table.add_row(
            f"{result.shape} {result.workload}",
            result.contender,
            f"{result.tokens_per_s:.1f}",
            f"{100 * spread:.1f} %",
            f"{100 * result.share_of_bound:.0f} %",
            f"{mine / result.tokens_per_s:.2f} x" if mine else "",
            "" if result.gap is None else f"{100 * result.gap:+.1f} %",
            "" if result.prefill_s is None else format_seconds(result.prefill_s),
            f"{result.peak_rss_bytes / GIB:.1f}",
        )
    return table


DEVICES = ("cuda", "emulated")
SUITE_HARDWARE = "l4"  # that the emulated device is as fast as, by default
DEFAULT_DEVICE_MEMORY = 16 * GIB  # so that a large card, too, has to move weights


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
    suite_limit_s: float
    max_rows: int
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
    report(f"{options.out / RESULTS} has a line for each measurement, {path} tables and figures")
    failed = [result.settings.name for result in results if result.status == Status.FAILED]
    if failed:
        raise ExecutionError(
            f"{len(failed)} of {len(results)} measurements failed ({', '.join(failed)}); their "
            f"logs are in {options.out / 'logs'}; the same command repeats them"
        )


def _suite_of(options: GpuOptions) -> SuiteSettings:
    if options.device not in DEVICES:
        raise UnknownOptionError(options.device, DEVICES, "--device")
    if options.device == "cuda" and options.hardware is not None:
        raise ConfigError(
            f"--hardware {options.hardware} is for --device emulated; leave it out, as --device "
            "cuda measures the GPU of this machine"
        )
    hardware = options.hardware or SUITE_HARDWARE
    return SuiteSettings(
        node=NodeSettings(
            device=options.device,
            hardware=None if options.device == "cuda" else hardware,
            device_memory_bytes=options.device_memory or DEFAULT_DEVICE_MEMORY,
            host_memory_bytes=options.host_memory,
            num_threads=options.num_threads,
        ),
        shapes=_known(options.shapes, GPU_SHAPES, DEFAULT_SHAPES, "shape"),
        workloads=_known(options.workloads, GPU_WORKLOADS, DEFAULT_WORKLOADS, "workload"),
        contenders=_known(options.contenders, GPU_CONTENDERS, GPU_CONTENDERS, "contender"),
        num_layers=options.num_layers,
        limit_s=options.part_limit_s,
        total_s=options.suite_limit_s,
        max_rows=options.max_rows,
        is_again=options.is_again,
    )


def _known(
    given: list[str], known: Collection[str], default: Iterable[str], where: str
) -> list[str]:
    for name in given:
        if name not in known:
            raise UnknownOptionError(name, known, f"--{where} of the suite gpu")
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


def run(  # noqa: PLR0913 - the options of a command
    *,
    suite: Suite = "cpu",
    shape: Shapes = [],  # noqa: B006 - typer copies it
    workload: Workloads = [],  # noqa: B006
    contender: Contenders = [],  # noqa: B006
    repetitions: Repetitions = 3,
    num_threads: NumThreads = None,
    phases: Phases = False,
    kernels: Kernels = False,
    steps: Steps = False,
    operations: Operations = False,
    out: Out = Path("raymoe-bench"),
    device: Device = "cuda",
    hardware: Hardware = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    layers: Layers = None,
    part_limit: PartLimit = 240.0,
    suite_limit: SuiteLimit = 2400.0,
    max_rows: MaxRows = 8192,
    again: Again = False,
) -> None:
    """Measure the tokens per second that whole jobs generate with random weights.

    Rows are greedy and generate all of their tokens. Beside each rate is the limit of the machine:
    for prefill and for decode the longer of its operations at 94 % of the measured bfloat16 peak
    and its bytes at the measured bandwidth.

    The suite gpu measures every combination of model, lengths and engine for 40 minutes, the most
    interesting ones first. The same command continues where it was stopped, and leaves gpu.jsonl,
    report.md and figures in the directory of --out. Its limit is that of the whole job: weights
    over the link, weights and KV cache read from host memory, and operations.
    """
    if suite not in SUITES:
        raise UnknownOptionError(suite, SUITES, "suite")
    cores = num_threads or read_host().num_cores
    if suite == "gpu":
        run_gpu(
            GpuOptions(
                shapes=shape, workloads=workload, contenders=contender, device=device,
                hardware=hardware, device_memory=device_memory, host_memory=host_memory,
                num_threads=num_threads, num_layers=layers, part_limit_s=part_limit,
                suite_limit_s=suite_limit, max_rows=max_rows, is_again=again, out=out,
            )
        )  # fmt: skip
    elif kernels:
        run_kernels(cores, repetitions)
    else:
        chosen = CpuOptions(
            shapes=shape or ["mixtral"], workloads=workload or ["W1"],
            contenders=contender or ["raymoe", "transformers"],
            repetitions=repetitions, num_threads=cores, out=out,
        )  # fmt: skip
        if operations:
            run_operations(chosen)
        elif steps:
            run_steps(chosen)
        else:
            run_engines(chosen, has_phases=phases)
