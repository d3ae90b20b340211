"""Many nodes whose engines only wait: `python -m tests.scale.bench_scale scale|million`.

A local cluster with a node for each actor stands for machines with a GPU; their steps take as long
as the plan of Mixtral-8x7B on an L4 node says, divided by a speed-up. Everything else is real, so a
speed-up of s makes all that is measured here s times harder than it is at the nodes' own pace.
"""

import dataclasses
import functools
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from raymoe.data.sizing import rows_of_a_call
from raymoe.errors import ConfigError
from raymoe.plan.plan import Plan
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload
from raymoe.units import GIB, format_seconds
from tests.scale.figures import Run, describe_limit, describe_overhead, efficiencies
from tests.scale.local_cluster import local_cluster
from tests.scale.pictures import draw_efficiency, draw_memory
from tests.scale.waiting import WaitingModel
from tests.scale.waiting_job import Samples, WaitingJob, run_waiting_job

MODEL, NODE = "mixtral-8x7b", "l4"
ROWS_PER_SEQUENCE = 2  # inside of an actor; enough here, where lengths vary by half
MANY_ROWS = 10**6  # so many that plans are for a steady stream of them
INSTANT_ROWS, INSTANT_TASKS = (16, 64), 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What to run; None takes the suite's own number."""

    actors: list[int] | None = None
    rows: int | None = None
    speedup: float | None = None
    out: Path = Path("raymoe-bench")


APP = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Actors = Annotated[list[int] | None, typer.Option(min=1, help="Nodes; repeatable for scale.")]
Rows = Annotated[int | None, typer.Option(min=1, help="Rows; for each actor in scale.")]
Speedup = Annotated[float | None, typer.Option(min=0.01, help="Engines are faster by this.")]
OUT = Path("raymoe-bench")
Out = Annotated[Path, typer.Option(help="Directory of results and pictures.")]


@APP.command()
def scale(
    actors: Actors = None,
    rows: Rows = None,
    speedup: Speedup = None,
    out: Out = Path("raymoe-bench"),
) -> None:
    """Efficiency over more and more actors, the same number of rows for each."""
    out.mkdir(parents=True, exist_ok=True)
    _run_scale(ScaleOptions(actors=actors, rows=rows, speedup=speedup, out=out))


@APP.command()
def million(
    actors: Actors = None,
    rows: Rows = None,
    speedup: Speedup = None,
    out: Out = Path("raymoe-bench"),
) -> None:
    """One long job, with its memory over time."""
    out.mkdir(parents=True, exist_ok=True)
    _run_million(ScaleOptions(actors=actors, rows=rows, speedup=speedup, out=out))


def _run_scale(options: ScaleOptions) -> None:
    """The same number of rows for each actor, with more and more actors."""
    console = Console(soft_wrap=True)
    plan = _plan(Workload(num_rows=MANY_ROWS, prompt_tokens=418, generated_tokens=128))
    each = options.rows or plan.policy.max_num_seqs
    model = WaitingModel.of(plan, speedup=options.speedup or 4.0)
    console.print(_describe(plan, model))
    runs = []
    for num_actors in sorted(set(options.actors or (1, 2, 4, 8, 16))):
        job = _Job(plan, model, num_actors=num_actors, num_rows=each * num_actors)
        run, _ = job.run()
        runs.append(run)
        (found,) = (one for one in efficiencies(runs) if one.num_actors == num_actors)
        _write(options.out / "scale.jsonl", "scale", run, model.speedup)
        console.print(
            f"{num_actors:>3} actors: {run.steady_tokens_per_s:,.0f} tokens/s in the middle half "
            f"({100 * found.steady:.1f} % of {num_actors} times one), {run.rows_per_s:.1f} rows/s "
            f"over all ({100 * found.job:.1f} %), {format_seconds(run.job_s)}, every id once"
        )
        console.print(describe_overhead(run))
    picture = options.out / "scale.svg"
    title = f"{MODEL} on {NODE} nodes that wait, {model.speedup:g} times faster than real ones"
    picture.write_text(draw_efficiency(efficiencies(runs), title=title))
    limits = list(_run_instant(plan, options.out))
    rows_of_call = functools.partial(rows_of_a_call, _rows_in_flight(plan))
    for line in describe_limit(limits, _node_rate(plan), rows_of_call):
        console.print(line)
    console.print(f"results: {options.out / 'scale.jsonl'}, {picture}")


def _run_instant(plan: Plan, out: Path) -> Iterator[Run]:
    for rows_per_task in INSTANT_ROWS:
        num_rows = INSTANT_TASKS * rows_per_task
        run, _ = _Job(plan, None, num_actors=1, num_rows=num_rows).run(rows_per_task)
        _write(out / "scale.jsonl", "instant", run, None)
        yield run


def _run_million(options: ScaleOptions) -> None:
    """One long job, with its memory over time."""
    if options.actors is not None and len(options.actors) > 1:
        raise ConfigError("million takes one number of --actors")
    console = Console(soft_wrap=True)
    num_rows, num_actors = options.rows or 10**6, (options.actors or (4,))[0]
    plan = _plan(Workload(num_rows=MANY_ROWS, prompt_tokens=32, generated_tokens=8))
    model = WaitingModel.of(plan, speedup=options.speedup or 10.0)
    console.print(_describe(plan, model))
    job = _Job(plan, model, num_actors=num_actors, num_rows=num_rows, has_journal=True)
    run, samples = job.run()
    _write(options.out / "million.jsonl", "million", run, model.speedup)
    console.print(
        f"{num_rows:,} rows, every id once, on {num_actors} actors in "
        f"{format_seconds(run.job_s)}: {run.rows_per_s:.0f} rows/s; planned "
        f"{num_actors * model.speedup * _node_rate(plan):.0f}"
    )
    console.print(describe_overhead(run))
    picture = options.out / "million.svg"
    title = f"{num_rows:,} rows through {num_actors} waiting actors: resident memory"
    picture.write_text(draw_memory(samples.by_kind(), title=title))
    for line in _describe_memory(samples):
        console.print(line)
    with (options.out / "million-memory.jsonl").open("w") as file:
        for name, points in samples.memory.items():
            for time_s, rss_bytes in points:
                sample = {"process": name, "time_s": time_s, "rss_bytes": rss_bytes}
                file.write(json.dumps(sample) + "\n")
    console.print(f"results: {options.out / 'million.jsonl'}, {picture}")


@dataclass(frozen=True)
class _Job:
    """A job on a cluster of its own."""

    plan: Plan
    model: WaitingModel | None
    num_actors: int
    num_rows: int
    has_journal: bool = False

    def run(self, rows_per_task: int | None = None) -> tuple[Run, Samples]:
        rows_in_flight = _rows_in_flight(self.plan)
        workload = dataclasses.replace(self.plan.workload, num_rows=self.num_rows)
        with tempfile.TemporaryDirectory(prefix="raymoe-") as name, local_cluster(self.num_actors):
            return run_waiting_job(
                WaitingJob(
                    workload=workload,
                    model=self.model,
                    num_actors=self.num_actors,
                    rows_in_flight=rows_in_flight,
                    rows_per_task=rows_per_task or rows_of_a_call(rows_in_flight, self.num_actors),
                    log_dir=Path(name) / "logs",
                    journal_dir=Path(name) / "journal" if self.has_journal else None,
                )
            )


def _plan(workload: Workload) -> Plan:
    context = 2 * workload.context_tokens
    return find_plan(model_preset(MODEL), hardware_preset(NODE), workload, max_model_len=context)


def _rows_in_flight(plan: Plan) -> int:
    return ROWS_PER_SEQUENCE * plan.policy.max_num_seqs


def _node_rate(plan: Plan) -> float:
    """Rows per second of a node at its real pace, over a whole job."""
    return plan.workload.num_rows / plan.job.seconds


def _describe(plan: Plan, model: WaitingModel) -> str:
    workload, step_s = plan.workload, plan.steps.seconds(plan.decode_load)
    return (
        f"{MODEL} on {NODE}: {workload.prompt_tokens} + {workload.generated_tokens} tokens a row, "
        f"{plan.policy.max_num_seqs} sequences, {step_s:.2f} s a step, "
        f"{_node_rate(plan):.2f} rows/s "
        f"a node by plan; passes here take 1/{model.speedup:g} of that"
    )


def _write(path: Path, kind: str, run: Run, speedup: float | None) -> None:
    line = {"suite": kind, "speedup": speedup, **dataclasses.asdict(run)}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _describe_memory(samples: Samples) -> Iterator[str]:
    """For each process, memory early and late: what grows with the rows would show here."""
    for name, points in samples.memory.items():
        used = [rss_bytes / GIB for _, rss_bytes in points]
        quarter = max(1, len(used) // 4)
        early, late = (
            statistics.median(used[quarter : 2 * quarter]),
            statistics.median(used[-quarter:]),
        )
        yield (
            f"{name}: {early:.2f} GiB in the second quarter, {late:.2f} in the last, at most "
            f"{max(used):.2f}"
        )


if __name__ == "__main__":
    APP()
