"""How many rows a part has: as many as its plan says fit the time."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raymoe.bench.gpu.node import computing_dtype, device_peak_bytes, pinned_bytes_per_s
from raymoe.bench.gpu.report import RunRecorder, draw_steady_pass
from raymoe.bench.gpu.result import BusyShares, Figures, PredictedFigures
from raymoe.bench.gpu.settings import (
    BYTES_PER_ELEMENT,
    GPU_WORKLOADS,
    SCHEDULES,
    PartSettings,
    RowStatistics,
    longest_row,
    shape_spec,
    write_shape,
)
from raymoe.bench.workloads import random_prompts
from raymoe.config import EngineConfig, SamplingParams
from raymoe.device.host import peak_rss_bytes
from raymoe.engine.accuracy import RunReport
from raymoe.engine.engine import Engine
from raymoe.engine.loading import load_parts
from raymoe.errors import ConfigError, ExecutionError
from raymoe.plan.bound import device_bound
from raymoe.plan.device_pass import StreamedPasses
from raymoe.plan.plan import Plan
from raymoe.plan.work import ModelWork
from raymoe.schedule.graph import Resource
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
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


# Of the limit of a part. The rest: to start, to make and pin the weights, and to be slower than
# predicted.
JOB_SHARE = 0.5
WARM_UP_ROWS = 8
LINGER_S = 60.0  # no pass before all rows are there

Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What came of the two jobs."""

    prefill_s: float
    total_s: float
    recorder: RunRecorder
    report: RunReport


def measure_engine(settings: PartSettings, node: HardwareSpec, out: Path) -> Figures:
    """Plan, load, run the prefill of the job and then all of it.

    Args:
        settings: Of the part.
        node: Where it runs, with the memory that may be used.
        out: Where pictures and the model's `config.json` go.
    """
    contender = SCHEDULES[settings.contender]
    spec = shape_spec(settings.shape, settings.num_layers)
    plan = fitting_plan(
        lambda workload: contender.plan(spec, node, workload)[0],
        GPU_WORKLOADS[settings.workload],
        settings.most_rows,
        JOB_SHARE * settings.limit_s,
    )
    _, policy_of = contender.plan(spec, node, plan.workload)
    node = replace(node, htod_bytes_per_s=pinned_bytes_per_s(node, settings.node.device))
    model = write_shape(settings.shape, settings.num_layers, out / "models" / settings.file_name)
    run = _run(model, plan, settings, spec)
    if run.recorder.steady is not None:
        draw_steady_pass(plan, run.recorder.steady, settings, out)
    workload = plan.workload
    bound = device_bound(ModelWork.of(spec, BYTES_PER_ELEMENT), node, workload)
    return Figures(
        schedule=plan.schedule,
        policy=policy_of,
        num_rows=workload.num_rows,
        prompt_tokens=round(workload.total_prompt_tokens),
        generated_tokens=round(workload.total_generated_tokens),
        prefill_s=run.prefill_s,
        total_s=run.total_s,
        num_measured_steps=workload.generated_tokens - 1,
        pinned_bytes_per_s=node.htod_bytes_per_s,
        bound_s=bound.seconds,
        limit=bound.limit,
        device_peak_bytes=device_peak_bytes(settings.node.device),
        peak_rss_bytes=peak_rss_bytes(),
        model=_predicted(plan, spec, run),
    )


def _run(model: Path, plan: Plan, settings: PartSettings, spec: ModelSpec) -> _Run:
    config = _config(plan, settings)
    parts = load_parts(model, config)
    recorder = RunRecorder(parts.runner)
    workload = plan.workload
    prompts = random_prompts([prompt for prompt, _ in workload.row_lengths], spec.vocab_size)
    with Engine(replace(parts, runner=recorder), config) as engine:
        _generate(engine, prompts[:WARM_UP_ROWS], 2)
        prefill_s = _generate(engine, prompts, 1)
        recorder.restart()
        total_s = _generate(engine, prompts, workload.generated_tokens)
    report = engine.last_report  # complete: the engine reports a run before it ends
    assert report is not None, "an engine with a plan reports every run"
    if report.num_passes != recorder.num_passes:
        raise ExecutionError(
            f"the job came apart: {recorder.num_passes} passes, of which the engine saw "
            f"{report.num_passes} in its last run"
        )
    return _Run(prefill_s=prefill_s, total_s=total_s, recorder=recorder, report=report)


def _config(plan: Plan, settings: PartSettings) -> EngineConfig:
    return EngineConfig(
        dtype=computing_dtype(settings.node.device),
        device=settings.node.device,
        load_format="dummy",
        schedule=plan.schedule,
        policy=plan.policy,
        hardware=plan.hardware,
        host_memory_bytes=plan.hardware.host_memory_bytes,
        device_memory_bytes=plan.hardware.gpu_memory_bytes,
        num_threads=settings.node.num_threads,
        workload=plan.workload,
        max_context_tokens=longest_row(plan.workload),
        max_queued_rows=plan.workload.num_rows,
        linger_s=LINGER_S,
        watchdog_s=settings.limit_s,
    )


def _generate(engine: Engine, prompts: Prompts, new_tokens: int) -> float:
    """Seconds of a job that must generate every token."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    gc.collect()
    start_s = time.perf_counter()
    generations = engine.generate(list(prompts), params)
    elapsed_s = time.perf_counter() - start_s
    for row, generation in enumerate(generations):
        if generation.num_generated_tokens != new_tokens:
            raise ExecutionError(
                f"row {row} of {len(prompts)} has {generation.num_generated_tokens} tokens, not "
                f"{new_tokens}: {generation.error or generation.finish_reason}"
            )
    return elapsed_s


def _predicted(plan: Plan, spec: ModelSpec, run: _Run) -> PredictedFigures:
    report, streamed = run.report, 0
    if plan.schedule != "resident":
        passes = StreamedPasses.of(spec, plan.schedule, plan.policy, BYTES_PER_ELEMENT)
        streamed = passes.cut.streamed_bytes
    page_s = run.recorder.page_s
    return PredictedFigures(
        predicted_s=plan.job.seconds,
        passes_predicted_s=report.predicted_s,
        passes_measured_s=report.measured_s,
        link_bytes_per_s=streamed * report.num_passes / page_s if page_s else 0.0,
        busy=BusyShares(
            gpu=report.busy_share(Resource.GPU),
            cpu=report.busy_share(Resource.CPU),
            htod=report.busy_share(Resource.HTOD),
            dtoh=report.busy_share(Resource.DTOH),
        ),
        plan=plan.describe(),
    )
