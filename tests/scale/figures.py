"""What runs with more and more waiting actors say: efficiency, overhead, limit of a driver."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raymoe.errors import ExecutionError

FIRST_QUARTER, LAST_QUARTER = 0.25, 0.75
PROJECTED_NODES = (16, 100, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job on a number of actors.

    Attributes:
        num_actors: Actors, each on a node of its own.
        num_rows: Rows that came out, each once.
        rows_per_task: Rows of one call of the operator.
        start_s: From the start of the job until all actors were ready.
        job_s: From then to the last row.
        steady_tokens_per_s: Of all actors, between their first and last quarter; None without an
            engine.
        actor_cpu_s: Of all actors since they were ready.
        driver_cpu_s: Of the process that runs the job.
        ray_cpu_s: Of Ray's own processes on all nodes.
    """

    num_actors: int
    num_rows: int
    rows_per_task: int
    start_s: float
    job_s: float
    steady_tokens_per_s: float | None
    actor_cpu_s: float
    driver_cpu_s: float
    ray_cpu_s: float

    @property
    def rows_per_s(self) -> float:
        """Of the whole job, from when all actors were ready to the last row."""
        return self.num_rows / self.job_s

    @property
    def tasks_per_s(self) -> float:
        """Calls of the operator, likewise."""
        return self.rows_per_s / self.rows_per_task


def steady_rate(steps: Sequence[tuple[float, int]]) -> float:
    """Tokens per second while the second and third quarter of the tokens were generated.

    Not rows: those of a call come out together, so they come in micro-batches.

    Args:
        passes: (end, tokens) of every step of every actor, in the order of their ends.

    Raises:
        ExecutionError: There are too few steps to tell.
    """
    total = sum(tokens for _, tokens in steps)
    seen, inside = 0, []
    for time_s, tokens in steps:
        seen += tokens
        if FIRST_QUARTER * total < seen <= LAST_QUARTER * total:
            inside.append((time_s, tokens))
    if len(inside) < 3 or inside[-1][0] <= inside[0][0]:
        raise ExecutionError(f"{len(steps)} steps are too few to see a steady rate; give more rows")
    return sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """A run beside the one with the fewest actors.

    Attributes:
        steady: Of the rates between first and last quarter.
        job: Of the rates of whole jobs.
    """

    num_actors: int
    steady: float
    job: float


def efficiencies(runs: Sequence[Run]) -> list[Efficiency]:
    """How much of n times the rate of one actor n actors reach.

    Raises:
        ExecutionError: There are runs without an engine.
    """
    first = min(runs, key=lambda run: run.num_actors)

    def share(rate: float | None, first_rate: float | None, num_actors: int) -> float:
        if rate is None or first_rate is None:
            raise ExecutionError("an operator without an engine has no steady rate")
        return rate / (num_actors * first_rate / first.num_actors)

    return [
        Efficiency(
            num_actors=run.num_actors,
            steady=share(run.steady_tokens_per_s, first.steady_tokens_per_s, run.num_actors),
            job=share(run.rows_per_s, first.rows_per_s, run.num_actors),
        )
        for run in runs
    ]


def describe_overhead(run: Run) -> str:
    """CPU time for each row, by who spends it."""
    actor, driver, ray = (
        1e3 * cpu_s / run.num_rows for cpu_s in (run.actor_cpu_s, run.driver_cpu_s, run.ray_cpu_s)
    )
    return (
        f"{run.num_actors} actors: CPU time of a row {actor:.3f} ms in its actor, {driver:.3f} ms "
        f"in the driver ({driver * run.rows_per_task:.2f} ms for a task of {run.rows_per_task} "
        f"rows), {ray:.3f} ms in Ray's own processes"
    )


def describe_limit(
    limits: Sequence[Run], node_rows_per_s: float, rows_of_a_task: Callable[[int], int]
) -> Iterator[str]:
    """What the driver's limit means for many nodes, with the arithmetic.

    Args:
        limits: Runs whose operator takes no time.
        node_rows_per_s: Of a node at its real pace.
        rows_of_a_task: That the plan's sizes give, for a number of nodes.
    """
    for run in limits:
        yield (
            f"operator that takes no time, {run.rows_per_task} rows a task: "
            f"{run.tasks_per_s:.0f} tasks/s, {run.rows_per_s:,.0f} rows/s, "
            f"{1e3 * run.driver_cpu_s * run.rows_per_task / run.num_rows:.2f} ms of driver CPU a "
            "task"
        )
    limit = min(run.tasks_per_s for run in limits)
    yield (
        f"so the driver starts {limit:.0f} tasks/s at least on this machine, beside actors, which "
        f"share its cores; a node at its real pace takes {node_rows_per_s:.2f} rows/s"
    )
    for nodes in PROJECTED_NODES:
        rows = rows_of_a_task(nodes)
        needed = nodes * node_rows_per_s / rows
        yield (
            f"{nodes:>5} nodes: {nodes} * {node_rows_per_s:.2f} rows/s / {rows} rows a task = "
            f"{needed:.2f} tasks/s, {100 * needed / limit:.1f} % of the driver's limit"
        )
    maximum = PROJECTED_NODES[-1]
    yield (
        f"with the tasks of {maximum:,} nodes the limit is reached at {limit:.0f} * "
        f"{rows_of_a_task(maximum)} / {node_rows_per_s:.2f} = "
        f"{limit * rows_of_a_task(maximum) / node_rows_per_s:,.0f} nodes. Not measured: Ray with "
        "that many nodes; this is the driver's share alone"
    )
