"""How many rows a part has: as many as its plan says fit the time."""

from collections.abc import Callable
from dataclasses import replace

from raymoe.bench.gpu.workloads import RowStatistics
from raymoe.errors import ConfigError
from raymoe.plan.plan import Plan
from raymoe.specs.workload import Workload
from raymoe.units import format_seconds

PlanOf = Callable[[Workload], Plan]

MARGIN = 0.95  # of the rows that would take exactly the time: passes do not shrink with their rows
MOST_STEPS = 40


def fitting_plan(plan_of: PlanOf, rows: RowStatistics, most_rows: int, seconds: float) -> Plan:
    """The plan of the largest of some jobs that is predicted to fit, its prefill run twice.

    Rows beyond the last whole batch are left out: with static batches they would take as long as
    one.

    Args:
        plan_of: Plans a job.
        rows: Their lengths.
        most_rows: No more than that.
        seconds: For the job and its prefill.

    Raises:
        ConfigError: Not even one row fits.
    """
    plan = _largest(plan_of, rows, most_rows, seconds)
    num_rows, batch = plan.workload.num_rows, plan.policy.batch_size
    if num_rows <= batch or not num_rows % batch:
        return plan
    whole = plan_of(rows.job(num_rows - num_rows % batch))
    return whole if predicted_s(whole) <= seconds else plan


def predicted_s(plan: Plan) -> float:
    """Seconds of the job of a plan and of its prefill on its own."""
    return plan.job.seconds + plan.estimate(prefill_of(plan.workload)).seconds


def prefill_of(workload: Workload) -> Workload:
    """The same rows with one new token each."""
    lengths = tuple((prompt, 1) for prompt, _ in workload.row_lengths)
    return replace(workload, generated_tokens=1, row_lengths=lengths)


def _largest(plan_of: PlanOf, rows: RowStatistics, most_rows: int, seconds: float) -> Plan:
    num_rows = most_rows
    for _ in range(MOST_STEPS):
        plan = plan_of(rows.job(num_rows))
        needed_s = predicted_s(plan)
        if needed_s <= seconds:
            return plan
        if num_rows == 1:
            break
        num_rows = max(1, min(num_rows - 1, int(MARGIN * num_rows * seconds / needed_s)))
    raise ConfigError(
        f"{num_rows} rows take {format_seconds(needed_s)} and there are {format_seconds(seconds)}; "
        "allow more with --part-limit, or choose fewer layers (--layers) or shorter rows"
    )
