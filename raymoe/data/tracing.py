"""Where a call belongs in Ray Data, and spans where OpenTelemetry is set up; it needs neither."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from raymoe._version import __version__

KEY = "raymoe_operator"  # in the arguments of a task of Ray Data: an `OperatorTags`


class OperatorTags(NamedTuple):
    """The operator that a call belongs to, by the names that Ray Data's metrics have.

    Attributes:
        dataset: Of one execution; "" outside Ray Data.
        operator: With its place in the pipeline, if the driver told it; "" outside Ray Data.
        trace: The span of the pipeline, as headers of W3C's trace context; () without one.
    """

    dataset: str = ""
    operator: str = ""
    trace: tuple[tuple[str, str], ...] = ()


def current_task() -> Any:
    """Return the task of Ray Data that this thread runs, if any."""
    module = sys.modules.get("ray.data._internal.execution.interfaces.task_context")
    return None if module is None else module.TaskContext.get_current()


def current_operator() -> OperatorTags:
    """Return what the driver has told the task that this thread runs, or what is known here."""
    task = current_task()
    if task is None:
        return OperatorTags()
    told = task.kwargs.get(KEY)
    if told is not None:
        return OperatorTags(*told)
    context = sys.modules["ray.data"].DataContext.get_current()
    return OperatorTags(context.dataset_logger_id or "", task.op_name)


def _tracer() -> Any:
    """Return OpenTelemetry's tracer; None where nobody has loaded it, as its set-up does."""
    trace = sys.modules.get("opentelemetry.trace")
    return None if trace is None else trace.get_tracer("raymoe", __version__)


class JobSpan:
    """The span ``raymoe.job`` of a pipeline; does nothing without OpenTelemetry."""

    def __init__(self, dataset: str) -> None:
        """Start it."""
        tracer, about = _tracer(), {"raymoe.dataset": dataset}
        self._span = None if tracer is None else tracer.start_span("raymoe.job", attributes=about)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What makes spans of other processes its children."""
        if self._span is None:
            return ()
        carrier: dict[str, str] = {}
        trace = importlib.import_module("opentelemetry.trace")
        _propagate().inject(carrier, context=trace.set_span_in_context(self._span))
        return tuple(carrier.items())

    def end(self, error: Exception | None = None) -> None:
        if self._span is None:
            return
        if error is not None:
            trace = importlib.import_module("opentelemetry.trace")
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
        self._span.end()


@contextlib.contextmanager
def call_span(tags: OperatorTags, model: str) -> Iterator[Any]:
    """Put a span ``raymoe.call`` around the body; gives None where nothing is recorded."""
    tracer = _tracer()
    if tracer is None:
        yield None
        return
    parent = _propagate().extract(dict(tags.trace)) if tags.trace else None
    about = {
        "raymoe.dataset": tags.dataset,
        "raymoe.operator": tags.operator,
        "gen_ai.request.model": model,
    }
    with tracer.start_as_current_span("raymoe.call", context=parent, attributes=about) as span:
        yield span if span.is_recording() else None


def _propagate() -> Any:
    return importlib.import_module("opentelemetry.propagate")
