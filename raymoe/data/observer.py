"""Metrics, history and status files of one engine; metrics are exported through Ray.

A thread reads them from the actor's status every few seconds; the hot path counts nothing for it.
"""

import dataclasses
import logging
import os
import platform
import re
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.data.error_groups import ErrorGroups
from raymoe.data.status import (
    ACTOR_PREFIX,
    ENDED,
    FAILED,
    GENERATE,
    HISTORY_COLUMNS,
    LAST_WRITE_S,
    LOADING,
    RUNNING,
    STEP_PREFIX,
    WRITE_EVERY_S,
    ActorStatus,
    HistoryPoint,
    PlainSpan,
    PlanSummary,
    RowCounts,
    StepRecord,
    make_status_directory,
    rate_unit,
    write_record,
)
from raymoe.data.tracing import OperatorTags
from raymoe.engine.outputs import EngineStats, Generation
from raymoe.periodic import Periodic
from raymoe.plan.operations import operations_of
from raymoe.plan.plan import RESOURCE_NAMES, Plan
from raymoe.plan.work import StepLoad
from raymoe.schedule.timeline import Timeline, middle_layers

if TYPE_CHECKING:
    from ray.util.metrics import Metric as RayMetric

    from raymoe.engine.accuracy import MeasuredStep
    from raymoe.engine.engine import Engine


TAGS = ("model", "actor", "dataset", "operator")  # the last two as Ray Data's metrics have them
KIND_TAG = "kind"

Values = dict[str, float]
"""Values by kind; the key is "" for a metric without kinds."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One time series of each actor, or one per kind.

    Attributes:
        name: Without the prefix and the suffix that Ray adds.
        values: Reads values from a status; empty if the status lacks them.
        has_kinds: Whether there is a tag `kind`.
    """

    name: str
    kind: MetricKind
    description: str
    values: Callable[[ActorStatus], Values]
    has_kinds: bool = False

    @property
    def exported_name(self) -> str:
        return f"ray_{self.name}" + ("_total" if self.kind is MetricKind.COUNTER else "")


def _of_rows(field: str) -> Callable[[ActorStatus], Values]:
    return lambda status: {"": float(getattr(status.rows, field))}


def _of_engine(value: Callable[[EngineStats], float]) -> Callable[[ActorStatus], Values]:
    return lambda status: {} if status.engine is None else {"": float(value(status.engine))}


def _errors(status: ActorStatus) -> Values:
    return {kind: float(count) for kind, count in status.rows.errors}


_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE

_PLAIN = (
    ("rows", _COUNTER, "Rows that were returned, including error rows.", _of_rows("num_rows")),
    (
        "journal_rows",
        _COUNTER,
        "Rows that were returned from the journal of an earlier run.",
        _of_rows("num_found_rows"),
    ),
    (
        "row_prompt_tokens",
        _COUNTER,
        "Prompt tokens of the rows that were returned.",
        _of_rows("num_input_tokens"),
    ),
    (
        "row_generated_tokens",
        _COUNTER,
        "Generated tokens of the rows that were returned, in all samples.",
        _of_rows("num_generated_tokens"),
    ),
    (
        "prompt_tokens",
        _COUNTER,
        "Prompt tokens that were computed, including those computed again after preemption.",
        _of_engine(lambda one: one.num_prompt_tokens),
    ),
    (
        "cached_tokens",
        _COUNTER,
        "Prompt tokens of finished rows that were found in the KV cache instead of computed.",
        _of_engine(lambda one: one.num_cached_tokens),
    ),
    (
        "evicted_blocks",
        _COUNTER,
        "KV blocks of cached prefixes that were evicted.",
        _of_engine(lambda one: one.num_evicted_blocks),
    ),
    (
        "generated_tokens",
        _COUNTER,
        "Tokens that were generated, including those of unfinished and of discarded rows.",
        _of_engine(lambda one: one.num_generated_tokens),
    ),
    (
        "preemptions",
        _COUNTER,
        "Preempted sequences, which lose their KV blocks and are computed again.",
        _of_engine(lambda one: one.num_preemptions),
    ),
    ("steps", _COUNTER, "Steps of the engine.", _of_engine(lambda one: one.num_steps)),
    (
        "step_seconds",
        _COUNTER,
        "Seconds that the engine spent in steps.",
        _of_engine(lambda one: one.busy_s),
    ),
    (
        "predicted_step_seconds",
        _COUNTER,
        "Seconds that the plan predicted for these steps.",
        _of_engine(lambda one: one.predicted_s),
    ),
    (
        "link_seconds",
        _COUNTER,
        "Seconds of these steps in which data was copied to the GPU.",
        _of_engine(lambda one: one.link_s),
    ),
    (
        "queued_rows",
        _GAUGE,
        "Rows that wait for a slot in the batch.",
        _of_engine(lambda one: one.num_queued_rows),
    ),
    (
        "live_sequences",
        _GAUGE,
        "Sequences that hold KV blocks.",
        _of_engine(lambda one: one.num_live_sequences),
    ),
    (
        "pool_fill",
        _GAUGE,
        "Share of the slots of the batch in use, 0 to 1.",
        _of_engine(lambda one: one.pool_fill),
    ),
    (
        "kv_use",
        _GAUGE,
        "Share of the KV blocks in use, 0 to 1.",
        _of_engine(lambda one: one.kv_use),
    ),
)

METRICS = (
    *(
        Metric(name=f"raymoe_{name}", kind=kind, description=description, values=values)
        for name, kind, description, values in _PLAIN
    ),
    Metric(
        name="raymoe_error_rows",
        kind=_COUNTER,
        description="Rows that could not be generated, by kind of error.",
        values=_errors,
        has_kinds=True,
    ),
)


class RayMetrics:
    """The metrics of one actor; Ray adds the node and worker tags."""

    def __init__(self, model: str, actor: str, operator: OperatorTags) -> None:
        """Make all series; the tag `model` is the last part of the name or directory."""
        # Planning and drivers need no Ray.
        from ray.util.metrics import Counter, Gauge  # noqa: PLC0415

        classes = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge}
        name = model.rstrip("/").rpartition("/")[2] or model
        values = name, actor, operator.dataset, operator.operator
        self._tags = dict(zip(TAGS, values, strict=True))
        self._series: dict[str, RayMetric] = {}
        self._published: dict[tuple[str, str], float] = {}
        for metric in METRICS:
            keys = (*TAGS, KIND_TAG) if metric.has_kinds else TAGS
            make = classes[metric.kind]
            self._series[metric.name] = make(metric.name, metric.description, tag_keys=keys)

    @classmethod
    def in_actor(cls, model: str, actor: str, operator: OperatorTags) -> "RayMetrics | None":
        """Return the metrics of this process; None outside an actor of a running Ray."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return None
        if ray.get_runtime_context().get_actor_id() is None:
            return None
        return cls(model, actor, operator)

    def publish(self, status: ActorStatus) -> None:
        for metric in METRICS:
            for kind, value in metric.values(status).items():
                self._set(metric, kind, value)

    def _set(self, metric: Metric, kind: str, value: float) -> None:
        series = self._series[metric.name]
        tags = {**self._tags, KIND_TAG: kind} if metric.has_kinds else self._tags
        if metric.kind is MetricKind.GAUGE:
            series.set(value, tags=tags)
            return
        before = self._published.get((metric.name, kind), 0.0)
        if value > before:  # Ray refuses increments of 0
            series.inc(value - before, tags=tags)
            self._published[metric.name, kind] = value


MAX_POINTS = 240
NUM_SUMS = 4  # columns of a point that are sums (time and counts); means follow
WINDOW_S = 60.0  # window of recent rates


class History:
    """Time series of one actor with a bounded number of points; one thread adds."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._stride = 1
        self._pending: list[HistoryPoint] = []
        self._points: list[HistoryPoint] = []

    def add(self, sample: HistoryPoint) -> None:
        """Add a sample; samples come at about equal intervals."""
        self._pending.append(sample)
        if len(self._pending) < self._stride:
            return
        if len(self._points) == self._max_points:
            self._points = list(map(merge, zip(self._points[::2], self._points[1::2], strict=True)))
            self._stride *= 2
            return
        self._points.append(merge(tuple(self._pending)))
        self._pending.clear()

    @property
    def points(self) -> tuple[HistoryPoint, ...]:
        latest = [merge(tuple(self._pending))] if self._pending else []
        return (*self._points, *latest)


def merge(points: tuple[HistoryPoint, ...]) -> HistoryPoint:
    """Merge points to one: the latest sums, the mean of the means."""
    time_s, rows, prompt_tokens, generated_tokens, *_ = points[-1]
    fill, use = (sum(point[i] for point in points) / len(points) for i in (NUM_SUMS, NUM_SUMS + 1))
    return time_s, rows, prompt_tokens, generated_tokens, fill, use


def recent_rate(
    points: tuple[HistoryPoint, ...], column: str, window_s: float = WINDOW_S
) -> float | None:
    """Return the growth of a count per second over the last `window_s`; None before two samples."""
    index = HISTORY_COLUMNS.index(column)
    if len(points) < 2:
        return None
    last = points[-1]
    first = next((p for p in reversed(points[:-1]) if last[0] - p[0] >= window_s), points[0])
    seconds = last[0] - first[0]
    return (last[index] - first[index]) / seconds if seconds > 0 else None


MAX_KINDS = 24
OTHER = "other"

_KIND = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


class RowCounter:
    """Counts the rows that an operator answered. Thread-safe, with bounded memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = self._found = self._refused = 0
        self._input_tokens = self._generated_tokens = 0
        self._errors: Counter[str] = Counter()
        self._groups = ErrorGroups()

    def add(
        self, generations: Sequence[Generation], num_found: int = 0, num_refused: int = 0
    ) -> list[int]:
        """Count the rows of one call; returns the positions of those with a new kind of error."""
        input_tokens = sum(one.num_input_tokens for one in generations)
        generated_tokens = sum(one.num_tokens_of_outputs for one in generations)
        places = [i for i, one in enumerate(generations) if one.error]
        errors = [generations[i].error for i in places]
        with self._lock:
            self._rows += len(generations)
            self._found += num_found
            self._refused += num_refused
            self._input_tokens += input_tokens
            self._generated_tokens += generated_tokens
            for error in errors:
                self._errors[error_kind(error, self._errors)] += 1
            is_new = self._groups.add(errors)
        return [i for i, new in zip(places, is_new, strict=True) if new]

    def counts(self) -> RowCounts:
        with self._lock:
            return RowCounts(
                num_rows=self._rows,
                num_error_rows=self._errors.total(),
                num_found_rows=self._found,
                num_refused_rows=self._refused,
                num_input_tokens=self._input_tokens,
                num_generated_tokens=self._generated_tokens,
                errors=tuple(self._errors.most_common()),
                error_groups=self._groups.groups(),
            )


def error_kind(error: str, known: Collection[str] = ()) -> str:
    """Return the type of an error; `OTHER` for free text and beyond `MAX_KINDS` known kinds."""
    kind = error.partition(":")[0]
    has_place = kind in known or len(known) < MAX_KINDS
    return kind if has_place and _KIND.fullmatch(kind) else OTHER


MAX_STEPS = 16  # kept in memory; each may have thousands of spans
SHOWN_LAYERS = 2  # two kinds of layers may alternate


class TypicalStep:
    """A sample of the steps of a run, spread over all of it; one thread uses it."""

    def __init__(self) -> None:
        self._steps: list[MeasuredStep] = []
        self._stride = self._until_next = 1

    def see(self, measured: "MeasuredStep | None") -> None:
        """Consider the latest step; every n-th is kept, and n grows over time."""
        if measured is None or (self._steps and measured is self._steps[-1]):
            return
        self._until_next -= 1
        if self._until_next:
            return
        if len(self._steps) == MAX_STEPS:
            self._steps = self._steps[::2]
            self._stride *= 2
        self._steps.append(measured)
        self._until_next = self._stride

    def choose(self) -> "MeasuredStep | None":
        """Return a step of the most frequent kind, of median length; None before the first."""
        if not self._steps:
            return None
        kinds = Counter(_kind(one.load) for one in self._steps)
        ((kind, _),) = kinds.most_common(1)
        duplicates = [one for one in self._steps if _kind(one.load) == kind]
        return sorted(duplicates, key=lambda one: one.timeline.makespan_s)[len(duplicates) // 2]


def record_step(actor: str, model: str, plan: Plan, chosen: "MeasuredStep") -> StepRecord:
    """Return a step with its prediction and its roofline.

    Both cover only some layers in the middle: all layers of a large model would be megabytes.
    """
    predicted, measured = plan.steps.timeline(chosen.load), chosen.timeline
    excerpt = middle_layers(measured, SHOWN_LAYERS)
    return StepRecord(
        actor=actor,
        model=model,
        schedule=plan.schedule,
        load=chosen.load,
        num_layers=excerpt.num_layers,
        num_shown_layers=excerpt.num_shown,
        predicted_s=predicted.makespan_s,
        measured_s=measured.makespan_s,
        predicted=_plain(middle_layers(predicted, SHOWN_LAYERS).timeline),
        measured=_plain(excerpt.timeline),
        hardware=dataclasses.replace(plan.hardware, host_curves=None, device_curves=None),
        operations=tuple(
            (one.name, float(one.flop), float(one.near_bytes), float(one.far_bytes))
            for one in operations_of(plan)
        ),
    )


def _kind(load: StepLoad) -> tuple[bool, bool]:
    return load.decode_rows > 0, load.prompt_tokens > 0


def _plain(timeline: Timeline) -> tuple[PlainSpan, ...]:
    return tuple(
        (
            span.task.op.value,
            span.task.layer,
            span.task.part,
            span.task.resource.value,
            span.start_s,
            span.end_s,
        )
        for span in timeline.spans
    )


class ActorProbe:
    """Reads the statistics of an engine and its operator.

    Attributes:
        actor: A unique name, valid as a file name.
        state: State of `ActorStatus`; the operator sets it.
        told_rows: Rows of the last status that was written.
    """

    def __init__(self, model: str, rows: RowCounter, task: str = GENERATE) -> None:
        self._model, self._rows, self._task = model, rows, task
        self._node, self._pid = platform.node() or "node", os.getpid()
        node = re.sub(r"[^\w.-]", "_", self._node, flags=re.ASCII)[:100]
        self.actor = f"{node}-{self._pid}-{uuid.uuid4().hex[:6]}"
        self.state, self.reason = LOADING, ""
        self.told_rows = 0
        self._started_s = time.time()
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None
        self._plan: PlanSummary | None = None
        self._history, self._steps = History(), TypicalStep()

    def attach(self, engine: "Engine") -> None:
        self._engine = engine
        self.state = RUNNING

    @property
    def has_finished_rows(self) -> bool:
        """Whether all rows are done and some of them not told; Ray may end an idle actor."""
        stats = self._stats
        is_idle = stats is not None and not stats.num_queued_rows + stats.num_live_sequences
        return is_idle and self._rows.counts().num_rows != self.told_rows

    def sample(self) -> None:
        engine, rows = self._engine, self._rows.counts()
        if engine is None:
            return
        if self._plan is None and engine.plan is not None:
            self._plan = summarise(engine.plan)
        if engine.accuracy is not None:
            self._steps.see(engine.accuracy.last_step)
        self._stats = stats = engine.stats()
        self._history.add(
            (
                time.time(),
                float(rows.num_rows),
                float(stats.num_prompt_tokens),
                float(self._num_tokens(stats)),
                stats.pool_fill,
                stats.kv_use,
            )
        )

    def _num_tokens(self, stats: EngineStats) -> int:
        is_text = self._task == GENERATE
        return stats.num_generated_tokens if is_text else stats.num_prompt_tokens

    def status(self) -> ActorStatus:
        return ActorStatus(
            actor=self.actor,
            node=self._node,
            pid=self._pid,
            model=self._model,
            task=self._task,
            state=self.state,
            reason=self.reason,
            started_unix_s=self._started_s,
            updated_unix_s=time.time(),
            rows=self._rows.counts(),
            engine=self._stats,
            plan=self._plan,
            history=self._history.points,
        )

    def typical_step(self) -> StepRecord | None:
        """Return a typical step and its prediction; runs a simulation."""
        chosen, engine = self._steps.choose(), self._engine
        if chosen is None or engine is None or engine.plan is None:
            return None
        return record_step(self.actor, self._model, engine.plan, chosen)


def summarise(plan: Plan) -> PlanSummary:
    return PlanSummary(
        schedule=plan.schedule,
        tokens_per_s=plan.tokens_per_s,
        generated_tokens=plan.workload.total_generated_tokens,
        bound=RESOURCE_NAMES[plan.bound],
        description=plan.describe(),
    )


def actor_line(status: ActorStatus) -> str:
    """Format rows, speed, utilisation, and the accuracy of the plan."""
    rows, engine = status.rows, status.engine
    parts = [f"{rows.num_rows:,} rows returned"]
    if rows.num_error_rows:
        parts.append(f"{rows.num_error_rows:,} with errors")
    rate = recent_rate(status.history, "num_tokens")
    if rate is not None:
        parts.append(f"{rate:,.0f} {rate_unit(status.task)}")
    if engine is not None:
        parts += [
            f"{100 * engine.pool_fill:.0f} % of slots in use",
            f"{100 * engine.kv_use:.0f} % of KV blocks in use",
            f"{engine.num_queued_rows:,} rows wait for a slot",
        ]
        if engine.num_preemptions:
            parts.append(f"{engine.num_preemptions:,} preemptions")
        if engine.predicted_s:
            parts.append(f"steps take {engine.busy_s / engine.predicted_s:.2f} x the prediction")
    return " | ".join(parts)


SAMPLE_EVERY_S = 1.0
LOG_EVERY_S = 60.0
FIRST_STEP_S = 10.0  # until a typical step is written; the interval then doubles

logger = logging.getLogger(__name__)


class Observer:
    """Observes one engine, from before it is loaded until it ends."""

    def __init__(
        self, model: str, rows: RowCounter, *, status_dir: str | Path | None, task: str = GENERATE
    ) -> None:
        """Start the thread; `status_dir` None writes no files."""
        self._directory = None if status_dir is None else make_status_directory(status_dir)
        self._model, self._probe = model, ActorProbe(model, rows, task)
        self._metrics: RayMetrics | None = None
        self._operator: OperatorTags | None = None
        self._written_s = self._logged_s = self._step_s = time.monotonic() - WRITE_EVERY_S
        self._step_every_s = FIRST_STEP_S
        self._cannot_write = self._is_broken = False
        self._thread = Periodic(self._look, SAMPLE_EVERY_S, name="raymoe-status")

    def attach(self, engine: "Engine") -> None:
        self._probe.attach(engine)

    def locate(self, operator: OperatorTags) -> None:
        """Take over which operator this is; the first call knows it, and metrics begin with it."""
        self._operator = operator

    def fail(self, reason: str) -> None:
        """Record that the engine broke; does not wait for a slow disk."""
        self._probe.state, self._probe.reason = FAILED, reason
        self._thread.close(LAST_WRITE_S)

    def close(self) -> None:
        """Record that the engine ends, before it does; idempotent."""
        if self._probe.state != FAILED:
            self._probe.state = ENDED
        self._thread.close(LAST_WRITE_S)

    def _look(self) -> None:
        if self._is_broken:
            return
        try:
            self._probe.sample()
            is_last = self._probe.state in {ENDED, FAILED} or self._probe.has_finished_rows
            self._tell(time.monotonic(), is_last=is_last)
        except Exception:  # rows matter more than their statistics
            logger.exception("an error of raymoe: the status of this actor is no longer written")
            self._is_broken = True

    def _tell(self, now_s: float, *, is_last: bool) -> None:
        if not is_last and now_s - self._written_s < WRITE_EVERY_S:
            return
        status = self._probe.status()
        self._written_s, self._probe.told_rows = now_s, status.rows.num_rows
        if self._metrics is None and self._operator is not None:
            self._metrics = RayMetrics.in_actor(self._model, self._probe.actor, self._operator)
        if self._metrics is not None:
            self._metrics.publish(status)
        self._write(ACTOR_PREFIX, status)
        if self._directory is not None and (is_last or self._is_time_for_a_step(now_s)):
            typical = self._probe.typical_step()
            if typical is not None:
                self._write(STEP_PREFIX, typical)
        if status.state == RUNNING and now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            logger.info("%s", actor_line(status))

    def _is_time_for_a_step(self, now_s: float) -> bool:
        if now_s - self._step_s < self._step_every_s:
            return False
        self._step_s = now_s
        self._step_every_s *= 2
        return True

    def _write(self, prefix: str, record: ActorStatus | StepRecord) -> None:
        if self._directory is None:
            return
        try:
            write_record(self._directory / f"{prefix}{record.actor}.json", record)
            self._cannot_write = False
        except OSError as error:
            if not self._cannot_write:
                logger.warning(
                    "the status of this actor cannot be written to %s: %s; rows are not affected",
                    self._directory,
                    error,
                )
            self._cannot_write = True
