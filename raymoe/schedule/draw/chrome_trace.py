"""Timelines for chrome://tracing and Perfetto: a process a timeline, a thread a lane."""

import json
from collections.abc import Sequence
from typing import Any

from raymoe.schedule.task import Resource
from raymoe.schedule.timeline import Span, Timeline

MICROSECONDS = 1e6


def draw_chrome_trace(timelines: Sequence[Timeline]) -> str:
    """The JSON text of a trace with one process for each timeline.

    Source: "Trace Event Format", Google; complete events (X) and metadata (M).
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_metadata(process, 0, "process_name", {"name": timeline.name}))
        events.append(_metadata(process, 0, "process_sort_index", {"sort_index": process}))
        for thread, resource in enumerate(Resource):
            if resource in timeline.resources:
                events.append(_metadata(process, thread, "thread_name", {"name": resource.value}))
                sort = {"sort_index": thread}
                events.append(_metadata(process, thread, "thread_sort_index", sort))
                events += [_complete(process, thread, span) for span in timeline.of(resource)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _metadata(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}


def _complete(process: int, thread: int, span: Span) -> dict[str, Any]:
    task = span.task
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": str(task),
        "cat": task.op.value,
        "ts": span.start_s * MICROSECONDS,
        "dur": span.duration_s * MICROSECONDS,
        "args": {
            "layer": task.layer,
            "part": task.part,
            "reads": [str(buffer) for buffer in task.reads],
            "writes": [str(buffer) for buffer in task.writes],
        },
    }
