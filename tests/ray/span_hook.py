"""What sets up OpenTelemetry in the processes of a Ray: a file of spans for each."""

import os
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor


def set_up():
    path = Path(os.environ["SPANS"], f"{os.getpid()}.json")
    out = path.open("a")  # for as long as the process runs
    exporter = ConsoleSpanExporter(
        out=out, formatter=lambda span: span.to_json(indent=None) + os.linesep
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
