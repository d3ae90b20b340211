"""What runs with more and more waiting actors say: efficiency, overhead, limit of a driver."""

from collections.abc import Iterator, Sequence
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
        steady_rows_per_s: Rows that came out between the first and the last quarter, per second.
        actor_cpu_s: Of all actors since they were ready.
        driver_cpu_s: Of the process that runs the job.
        ray_cpu_s: Of Ray's own processes on all nodes.
    """

    num_actors: int
    num_rows: int
    rows_per_task: int
    start_s: float
    job_s: float
    steady_rows_per_s: float
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


def steady_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Rows per second while the second and third quarter of the rows came out.

    Args:
        arrivals: (time, rows) of every block that came out, in order.

    Raises:
        ExecutionError: There are too few blocks to tell.
    """
    total = sum(rows for _, rows in arrivals)
    seen, inside = 0, []
    for time_s, rows in arrivals:
        seen += rows
        if FIRST_QUARTER * total < seen <= LAST_QUARTER * total:
            inside.append((time_s, rows))
    if len(inside) < 3 or inside[-1][0] <= inside[0][0]:
        raise ExecutionError(
            f"{len(arrivals)} blocks of rows are too few to see a steady rate; give more rows"
        )
    return sum(rows for _, rows in inside[1:]) / (inside[-1][0] - inside[0][0])


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
    """How much of n times the rate of one actor n actors reach."""
    first = min(runs, key=lambda run: run.num_actors)

    def share(rate: float, first_rate: float, num_actors: int) -> float:
        return rate / (num_actors * first_rate / first.num_actors)

    return [
        Efficiency(
            num_actors=run.num_actors,
            steady=share(run.steady_rows_per_s, first.steady_rows_per_s, run.num_actors),
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
    limits: Sequence[Run], node_rows_per_s: float, rows_per_task: int
) -> Iterator[str]:
    """What the driver's limit means for many nodes, with the arithmetic.

    Args:
        limits: Runs whose operator takes no time.
        node_rows_per_s: Of a node at its real pace.
        rows_per_task: That the plan's sizes give.
    """
    for run in limits:
        yield (
            f"operator that takes no time, {run.rows_per_task} rows a task: "
            f"{run.tasks_per_s:.0f} tasks/s, {run.rows_per_s:,.0f} rows/s, "
            f"{1e3 * run.driver_cpu_s * run.rows_per_task / run.num_rows:.2f} ms of driver CPU a "
            "task"
        )
    slowest = min(limits, key=lambda run: run.tasks_per_s)
    limit = slowest.tasks_per_s
    yield (
        f"so the driver starts {limit:.0f} tasks/s at least on this machine, beside actors, which "
        "share its cores; a node at its real pace takes "
        f"{node_rows_per_s:.2f} rows/s / {rows_per_task} rows a task = "
        f"{node_rows_per_s / rows_per_task:.4f} tasks/s"
    )
    for nodes in PROJECTED_NODES:
        needed = nodes * node_rows_per_s / rows_per_task
        yield (
            f"{nodes:>5} nodes: {nodes} * {node_rows_per_s:.2f} / {rows_per_task} = {needed:.2f} "
            f"tasks/s, {100 * needed / limit:.1f} % of the driver's limit"
            + (_too_many(nodes, node_rows_per_s, limit) if needed > limit else "")
        )
    yield (
        f"the limit is reached at {limit:.0f} * {rows_per_task} / {node_rows_per_s:.2f} = "
        f"{limit * rows_per_task / node_rows_per_s:,.0f} nodes. Not measured: Ray with that many "
        "nodes; this is the driver's share alone"
    )


def _too_many(nodes: int, node_rows_per_s: float, limit: float) -> str:
    least = nodes * node_rows_per_s / limit
    return f": too many; a task needs {least:.0f} rows or more, or the input several jobs"
