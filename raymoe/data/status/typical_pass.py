"""Which pass shows how a run went? One of the most frequent kind, of median length."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from raymoe.data.status.record import PassRecord, PlainSpan
from raymoe.plan.pictures import operations_of
from raymoe.plan.plan import Plan
from raymoe.plan.work import PassLoad
from raymoe.schedule.timeline import Timeline, middle_layers

if TYPE_CHECKING:  # a driver only names the operator: no numba there
    from raymoe.engine.accuracy import MeasuredPass

MAX_PASSES = 16  # that are remembered; each may have thousands of spans
SHOWN_LAYERS = 2  # two kinds of layers may take turns


class TypicalPass:
    """Remembers a few passes of a run, spread over all of it; one thread uses it."""

    def __init__(self) -> None:
        self._passes: list[MeasuredPass] = []
        self._stride = self._until_next = 1

    def see(self, measured: "MeasuredPass | None") -> None:
        """Take the latest pass into account; every n-th is kept, with n growing over time."""
        if measured is None or (self._passes and measured is self._passes[-1]):
            return
        self._until_next -= 1
        if self._until_next:
            return
        if len(self._passes) == MAX_PASSES:
            self._passes = self._passes[::2]
            self._stride *= 2
        self._passes.append(measured)
        self._until_next = self._stride

    def choose(self) -> "MeasuredPass | None":
        """A pass of the most frequent kind, of median length; None before the first."""
        if not self._passes:
            return None
        kinds = Counter(_kind(one.load) for one in self._passes)
        ((kind, _),) = kinds.most_common(1)
        alike = [one for one in self._passes if _kind(one.load) == kind]
        return sorted(alike, key=lambda one: one.timeline.makespan_s)[len(alike) // 2]


def record_pass(actor: str, model: str, plan: Plan, chosen: "MeasuredPass") -> PassRecord:
    """A pass beside its prediction, and what the plan computes under the roofs of its node.

    Of both only the layers in the middle: all of a large model would be megabytes.
    """
    predicted, measured = plan.passes.timeline(chosen.load), chosen.timeline
    excerpt = middle_layers(measured, SHOWN_LAYERS)
    return PassRecord(
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


def _kind(load: PassLoad) -> tuple[bool, bool]:
    """Whether it decodes, and whether it has prompts."""
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
