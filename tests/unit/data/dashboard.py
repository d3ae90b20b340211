"""A dashboard for Grafana over the series of `raymoe.data.observer`.

Queries name series by the table of metrics, so neither can change without the other:
``python -m tests.unit.data.dashboard > examples/grafana-raymoe.json`` writes the file anew.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from raymoe.data.observer import METRICS

SOURCE = {"type": "prometheus", "uid": "${source}"}
OURS = '{model=~"$model", actor=~"$actor"}'
PANEL_WIDTH, PANEL_HEIGHT = 12, 8  # of a page that is 24 wide
NEWEST_SCHEMA = 39  # of the JSON of a dashboard, as of Grafana 10.4; newer ones migrate it

_SERIES = {metric.name: metric.exported_name for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Query:
    """One line or bundle of lines.

    Attributes:
        expression: Of PromQL.
        legend: What a line is called.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart.

    Attributes:
        unit: One of Grafana's.
        most: Top of the axis; None for what the values need.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    maximum: float | None = None


def series(name: str) -> str:
    """A series with the filters of the page; an unknown name is an error."""
    return f"{_SERIES[f'raymoe_{name}']}{OURS}"


def rate(name: str) -> str:
    """How fast a counter grows, per second."""
    return f"rate({series(name)}[$__rate_interval])"


PANELS = (
    Panel(
        title="Generated tokens per second",
        description="Of each actor, and of all of them.",
        queries=(
            Query(f"sum by (actor) ({rate('generated_tokens')})", "{{actor}}"),
            Query(f"sum({rate('generated_tokens')})", "all"),
            Query(f"sum({rate('row_generated_tokens')})", "of rows returned"),
        ),
    ),
    Panel(
        title="Prompt tokens per second",
        description="Computed, and found instead of computed.",
        queries=(
            Query(f"sum({rate('prompt_tokens')})", "computed"),
            Query(f"sum({rate('cached_tokens')})", "found"),
            Query(f"sum({rate('row_prompt_tokens')})", "of rows returned"),
        ),
    ),
    Panel(
        title="Rows per second",
        description="Answered, and those of them that a journal had.",
        queries=(
            Query(f"sum({rate('rows')})", "answered"),
            Query(f"sum({rate('journal_rows')})", "from the journal"),
        ),
    ),
    Panel(
        title="Error rows by kind",
        description="In the last ten minutes.",
        queries=(Query(f"sum by (kind) (increase({series('error_rows')}[10m]))", "{{kind}}"),),
    ),
    Panel(
        title="Slots in use",
        description="A pool that is not full while rows wait is short of KV cache.",
        unit="percentunit",
        maximum=1.0,
        queries=(Query(series("pool_fill"), "{{actor}}"),),
    ),
    Panel(
        title="KV cache in use",
        description="Blocks that have an owner.",
        unit="percentunit",
        maximum=1.0,
        queries=(Query(series("kv_use"), "{{actor}}"),),
    ),
    Panel(
        title="Rows that wait, sequences that live",
        description="Inside of the actors.",
        queries=(
            Query(f"sum({series('queued_rows')})", "wait"),
            Query(f"sum({series('live_sequences')})", "live"),
        ),
    ),
    Panel(
        title="Preemptions and evictions per second",
        description="Sequences that are computed again because the KV cache was full, and KV "
        "blocks of prefixes that were lost to others.",
        queries=(
            Query(f"sum by (actor) ({rate('preemptions')})", "{{actor}}"),
            Query(f"sum by (actor) ({rate('evicted_blocks')})", "{{actor}}, blocks"),
        ),
    ),
    Panel(
        title="Measured over predicted",
        description="Length of steps over what the plan said; 1 is as predicted.",
        queries=(
            Query(
                f"sum by (actor) ({rate('step_seconds')}) / "
                f"sum by (actor) ({rate('predicted_step_seconds')})",
                "{{actor}}",
            ),
        ),
    ),
    Panel(
        title="Link busy",
        description="Share of the time in steps; near 1, weights or KV limit.",
        unit="percentunit",
        maximum=1.0,
        queries=(
            Query(
                f"sum by (actor) ({rate('link_seconds')}) / "
                f"sum by (actor) ({rate('step_seconds')})",
                "{{actor}}",
            ),
        ),
    ),
    Panel(
        title="Steps per second",
        description="Of each actor.",
        queries=(Query(f"sum by (actor) ({rate('steps')})", "{{actor}}"),),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "raymoe",
        "title": "raymoe",
        "tags": ["raymoe", "ray"],
        "schemaVersion": NEWEST_SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _choice("model"), _choice("actor")]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, 2)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {
            "x": column * PANEL_WIDTH,
            "y": row * PANEL_HEIGHT,
            "w": PANEL_WIDTH,
            "h": PANEL_HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0}
            | ({} if panel.maximum is None else {"max": panel.maximum}),
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _choice(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({_SERIES['raymoe_rows']}, {label})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
