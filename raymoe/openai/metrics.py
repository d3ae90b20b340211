"""The metrics of a server as Prometheus reads them: its batches, and the engines at work.

Those of engines are the ones that Ray exports, without Ray's prefix, read from status files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from raymoe.data.observer import KIND_TAG, METRICS, MetricKind
from raymoe.data.status import ActorStatus
from raymoe.openai.store import STATUSES, BatchRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Samples = Iterable[tuple[Mapping[str, str], float]]
"""Labels and value of each time series."""


def exposition(batches: Sequence[BatchRecord], actors: Sequence[ActorStatus]) -> str:
    """Return the page of all metrics."""
    return "".join((*_of_server(batches), *_of_engines(actors)))


def _of_server(batches: Sequence[BatchRecord]) -> Iterator[str]:
    statuses = [batch.status for batch in batches]
    by_status = [({"status": one}, statuses.count(one)) for one in sorted(STATUSES)]
    yield _family("raymoe_batches", MetricKind.GAUGE, "Batches by status.", by_status)
    by_result = [
        ({"result": "completed"}, sum(batch.num_completed for batch in batches)),
        ({"result": "failed"}, sum(batch.num_failed for batch in batches)),
    ]
    help_text = "Requests of batches that have a response, by what it is."
    yield _family("raymoe_batch_requests_total", MetricKind.COUNTER, help_text, by_result)


def _of_engines(actors: Sequence[ActorStatus]) -> Iterator[str]:
    for metric in METRICS:
        samples = [
            (_tags(actor) | ({KIND_TAG: kind} if metric.has_kinds else {}), value)
            for actor in actors
            for kind, value in metric.values(actor).items()
        ]
        name = metric.exported_name.removeprefix("ray_")
        if samples:
            yield _family(name, metric.kind, metric.description, samples)


def _tags(actor: ActorStatus) -> dict[str, str]:
    model = actor.model.rstrip("/").rpartition("/")[2] or actor.model
    return {"model": model, "actor": actor.actor}  # no dataset: a server's batches have none


def _family(name: str, kind: MetricKind, help_text: str, samples: Samples) -> str:
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{text.translate(ESCAPES)}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value:.12g}")
    return "\n".join(lines) + "\n"
