"""Which operator a call belongs to, and the spans that OpenTelemetry gets, if it is there."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from raymoe.data import tracing
from raymoe.data.tracing import KEY, JobSpan, OperatorTags, call_span, current_operator


def test_the_operator_is_what_the_driver_told_or_what_ray_data_knows(monkeypatch):
    context = SimpleNamespace(dataset_logger_id="dataset_1_0")
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=lambda: context))
    monkeypatch.setitem(sys.modules, "ray.data", data)
    task = SimpleNamespace(op_name="MapBatches(MoEGenerator)", kwargs={})
    monkeypatch.setattr(tracing, "current_task", lambda: task)
    assert current_operator() == ("dataset_1_0", "MapBatches(MoEGenerator)", ())
    task.kwargs[KEY] = ("dataset_2_0", "MapBatches(MoEGenerator)_3", (("traceparent", "00-1"),))
    assert current_operator() == task.kwargs[KEY]
    monkeypatch.setattr(tracing, "current_task", lambda: None)
    assert current_operator() == OperatorTags()


class Span:
    def __init__(self, name, context, attributes):
        self.name, self.context, self.attributes = name, context, dict(attributes)
        self.status, self.has_ended = None, False

    def is_recording(self):
        return True

    def set_attributes(self, attributes):
        self.attributes |= attributes

    def set_status(self, status):
        self.status = status

    def end(self):
        self.has_ended = True


@pytest.fixture
def spans(monkeypatch):
    """OpenTelemetry with a tracer that records; returns the spans."""
    found = []

    def start_span(name, context=None, attributes=()):
        found.append(Span(name, context, attributes))
        return found[-1]

    @contextlib.contextmanager
    def start_as_current_span(name, context=None, attributes=()):
        with contextlib.closing(SimpleNamespace(close=start_span(name, context, attributes).end)):
            yield found[-1]

    tracer = SimpleNamespace(start_span=start_span, start_as_current_span=start_as_current_span)
    trace = ModuleType("opentelemetry.trace")
    trace.get_tracer = lambda *_: tracer
    trace.set_span_in_context = lambda span: span.name
    trace.Status = lambda code, text: (code, text)
    trace.StatusCode = SimpleNamespace(ERROR="error")
    propagate = ModuleType("opentelemetry.propagate")
    propagate.inject = lambda carrier, context: carrier.update(traceparent=context)
    propagate.extract = lambda carrier: carrier["traceparent"]
    for module in (ModuleType("opentelemetry"), trace, propagate):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_calls_are_children_of_the_span_of_their_job(spans):
    job = JobSpan("dataset_1_0")
    with call_span(
        OperatorTags("dataset_1_0", "MapBatches(MoEGenerator)_3", job.headers), "m"
    ) as span:
        span.set_attributes({"raymoe.rows": 2})
    job.end()
    first, second = spans
    assert (first.name, first.attributes) == ("raymoe.job", {"raymoe.dataset": "dataset_1_0"})
    assert (second.name, second.context) == ("raymoe.call", "raymoe.job")
    assert second.attributes == {
        "raymoe.dataset": "dataset_1_0",
        "raymoe.operator": "MapBatches(MoEGenerator)_3",
        "gen_ai.request.model": "m",
        "raymoe.rows": 2,
    }
    assert first.has_ended
    assert second.has_ended
    assert first.status is None


def test_a_job_that_failed_says_so_without_the_text_of_the_error(spans):
    JobSpan("d").end(ValueError("what a cell holds"))
    assert spans[0].status == ("error", "ValueError")
    assert spans[0].has_ended


def test_without_opentelemetry_nothing_is_recorded(monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    job = JobSpan("d")
    assert job.headers == ()
    with call_span(OperatorTags("d", "o", job.headers), "m") as span:
        assert span is None
    job.end(ValueError())
