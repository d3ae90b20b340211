"""`raymoe bench --suite cpu`: engines, kernels and passes on the cores of this machine."""

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from raymoe.bench.contenders import CONTENDERS
from raymoe.bench.jobs import kernel_jobs
from raymoe.bench.kernels import measure_kernels
from raymoe.bench.lanes import measure_lanes
from raymoe.bench.passes import KindTimes, compare_passes, times_by_kind
from raymoe.bench.suite import Result, run_suite
from raymoe.bench.workloads import SHAPES, WORKLOADS, make_checkpoint
from raymoe.config import Settings
from raymoe.errors import ConfigError
from raymoe.kernels.threads import set_num_threads
from raymoe.measure.profile import obtain_profile
from raymoe.schedule.graph import Op
from raymoe.units import GB, GIB, format_seconds

# Of a pass on host cores, those that take time.
PASS_OPS = (Op.PRE, Op.ATTN, Op.POST, Op.EXPERTS, Op.HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOptions:
    """Of the suite cpu."""

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
    with (out / "results.jsonl").open("a") as lines:
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
    console.print(f"one JSON line for each in {out / 'results.jsonl'}", style="dim")


def _check_names(**options: tuple[Iterable[str], Collection[str]]) -> None:
    for name, (chosen, known) in options.items():
        for value in chosen:
            if value not in known:
                raise ConfigError(f"--{name} {value!r} is not one of {', '.join(known)}")


def run_passes(options: CpuOptions) -> None:
    """Hold our passes against what is predicted with this machine's profile."""
    settings = Settings.from_environment()
    options.out.mkdir(parents=True, exist_ok=True)
    hardware, _ = obtain_profile(settings.cache_directory, options.num_threads)
    for shape, workload in itertools.product(options.shapes, options.workloads):
        model = make_checkpoint(shape, options.out / shape)
        runs = compare_passes(model, hardware, WORKLOADS[workload], options.repetitions)
        Console().print(_pass_table(f"{shape} {workload}", times_by_kind(runs)))


def _pass_table(name: str, kinds: Iterable[KindTimes]) -> Table:
    title = f"{name}: passes predicted with this machine's profile; gaps in %"
    table = Table(title=title, pad_edge=False)
    for column in ("passes", "predicted", "measured", "gap", *PASS_OPS):
        table.add_column(column, justify="right", no_wrap=True)
    for each in kinds:
        table.add_row(
            f"{each.num_passes} {each.kind}",
            format_seconds(each.predicted_s),
            format_seconds(each.measured_s),
            f"{100 * each.gap:+.1f}",
            *(f"{100 * each.gap_by_op[op]:+.0f}" for op in PASS_OPS),
        )
    return table


def run_kernels(num_threads: int, repetitions: int) -> None:
    """Hold kernels against what the machine can do."""
    set_num_threads(num_threads, num_torch_threads=1)
    table = Table(title="kernels beside what the machine can do")
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
    Console().print(f"lanes: {measure_lanes()}")


def _table(results: list[Result]) -> Table:
    table = Table(title="generated tokens per second, end to end")
    columns = ("shape", "workload", "engine", "tokens/s", "min..max", "of bound", "raymoe is")
    for column in (*columns, "against plan", "prefill", "peak RSS", "peak GFLOP/s", "GB/s"):
        table.add_column(column, justify="left" if column in columns[:3] else "right")
    ours = {(r.shape, r.workload): r.tokens_per_s for r in results if r.contender == "raymoe"}
    for result in results:
        mine = ours.get((result.shape, result.workload))
        low = result.generated_tokens / result.total_s_max
        high = result.generated_tokens / result.total_s_min
        table.add_row(
            result.shape,
            result.workload,
            result.contender,
            f"{result.tokens_per_s:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{100 * result.share_of_bound:.0f} %",
            f"{mine / result.tokens_per_s:.2f} x" if mine else "",
            "" if result.gap is None else f"{100 * result.gap:+.1f} % time",
            "" if result.prefill_s is None else format_seconds(result.prefill_s),
            f"{result.peak_rss_bytes / GIB:.2f} GiB",
            f"{result.limits.flop_per_s / GB:.0f}",
            f"{result.limits.bytes_per_s / GB:.1f}",
        )
    return table
