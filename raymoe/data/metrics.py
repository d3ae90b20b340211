"""How an engine does, as series of Ray: for Prometheus, Grafana, and Ray's own dashboard.

They are read from the status of an actor every few seconds; nothing is counted in the hot path.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from raymoe.data.status import ActorStatus
from raymoe.engine.outputs import EngineStats

if TYPE_CHECKING:
    from ray.util.metrics import Metric as RayMetric

TAGS = ("model", "actor")
KIND_TAG = "kind"

Values = dict[str, float]
"""Values by the kind that they are of; those of a metric without kinds are under ""."""


class MetricKind(StrEnum):
    """How a value behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One series of each actor, or one of each kind of something.

    Attributes:
        name: Without the prefix and the suffix that Ray adds.
        values: From a status; empty where it says nothing of it.
        has_kinds: Whether there is a tag `kind`.
    """

    name: str
    kind: MetricKind
    description: str
    values: Callable[[ActorStatus], Values]
    has_kinds: bool = False

    @property
    def exported_name(self) -> str:
        """The name on the metrics port."""
        return f"ray_{self.name}" + ("_total" if self.kind is MetricKind.COUNTER else "")


def _of_rows(field: str) -> Callable[[ActorStatus], Values]:
    return lambda status: {"": float(getattr(status.rows, field))}


def _of_engine(value: Callable[[EngineStats], float]) -> Callable[[ActorStatus], Values]:
    return lambda status: {} if status.engine is None else {"": float(value(status.engine))}


def _errors(status: ActorStatus) -> Values:
    return {kind: float(count) for kind, count in status.rows.errors}


_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE

_PLAIN = (
    ("rows", _COUNTER, "Rows answered, error rows included.", _of_rows("num_rows")),
    ("journal_rows", _COUNTER, "Rows that a journal had.", _of_rows("num_found_rows")),
    (
        "prompt_tokens",
        _COUNTER,
        "Prompt tokens computed, recomputation included.",
        _of_engine(lambda one: one.num_prompt_tokens),
    ),
    (
        "cached_tokens",
        _COUNTER,
        "Prompt tokens of finished rows that were found instead of computed.",
        _of_engine(lambda one: one.num_cached_tokens),
    ),
    (
        "generated_tokens",
        _COUNTER,
        "Tokens generated.",
        _of_engine(lambda one: one.num_generated_tokens),
    ),
    (
        "preemptions",
        _COUNTER,
        "Sequences that gave up their KV blocks and were computed again.",
        _of_engine(lambda one: one.num_preemptions),
    ),
    ("passes", _COUNTER, "Passes run.", _of_engine(lambda one: one.num_passes)),
    ("pass_seconds", _COUNTER, "Time in passes.", _of_engine(lambda one: one.busy_s)),
    (
        "predicted_pass_seconds",
        _COUNTER,
        "What the plan predicted for these passes.",
        _of_engine(lambda one: one.predicted_s),
    ),
    (
        "link_seconds",
        _COUNTER,
        "Time in passes that the link to the device was busy.",
        _of_engine(lambda one: one.link_s),
    ),
    (
        "queued_rows",
        _GAUGE,
        "Rows that wait for a slot.",
        _of_engine(lambda one: one.num_queued_rows),
    ),
    (
        "live_sequences",
        _GAUGE,
        "Sequences with KV blocks.",
        _of_engine(lambda one: one.num_live_sequences),
    ),
    ("pool_fill", _GAUGE, "Slots in use, 0 to 1.", _of_engine(lambda one: one.pool_fill)),
    ("kv_use", _GAUGE, "KV blocks in use, 0 to 1.", _of_engine(lambda one: one.kv_use)),
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
    """The metrics of one actor; Ray exports them under its own names of node and worker."""

    def __init__(self, model: str, actor: str) -> None:
        """Make all series.

        Args:
            model: Name or directory; its last part is the tag.
            actor: Name of this process.
        """
        # Planning and drivers need no Ray.
        from ray.util.metrics import Counter, Gauge  # noqa: PLC0415

        classes = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge}
        self._tags = {"model": model.rstrip("/").rpartition("/")[2] or model, "actor": actor}
        self._series: dict[str, RayMetric] = {}
        self._published: dict[tuple[str, str], float] = {}
        for metric in METRICS:
            keys = (*TAGS, KIND_TAG) if metric.has_kinds else TAGS
            make = classes[metric.kind]
            self._series[metric.name] = make(metric.name, metric.description, tag_keys=keys)

    @classmethod
    def in_actor(cls, model: str, actor: str) -> "RayMetrics | None":
        """The metrics of this process; None where it is no actor of a running Ray."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return None
        return None if ray.get_runtime_context().get_actor_id() is None else cls(model, actor)

    def publish(self, status: ActorStatus) -> None:
        """Bring all series to what a status says."""
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
        if value > before:  # Ray takes no increment of 0
            series.inc(value - before, tags=tags)
            self._published[metric.name, kind] = value
