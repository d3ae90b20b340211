"""Compares predicted with measured step times, and corrects predictions by the ratio."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from raymoe.engine.outputs import Int32s
from raymoe.engine.sequence import ScheduledStep
from raymoe.plan.work import StepLoad
from raymoe.schedule.graph import Resource
from raymoe.schedule.timeline import LinkUse, Timeline, report_line

LEARNING_RATE = 0.1  # weight of the latest pass in the correction of its kind


class StepKind(StrEnum):
    """The contents of a step; the cost model errs differently for each kind."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"

    @classmethod
    def of(cls, load: StepLoad) -> "StepKind":
        if not load.prompt_tokens:
            return cls.DECODE
        return cls.MIXED if load.decode_rows else cls.PREFILL


@dataclass(slots=True)
class Correction:
    """Predicts step times by a cost model times the measured ratio of the step's kind.

    Attributes:
        seconds_of: The cost model's prediction of a step.
    """

    seconds_of: Callable[[StepLoad], float]
    _ratios: dict[StepKind, float]

    def __init__(self, seconds_of: Callable[[StepLoad], float]) -> None:
        self.seconds_of, self._ratios = seconds_of, {}

    def __call__(self, load: StepLoad) -> float:
        return self.seconds_of(load) * self._ratios.get(StepKind.of(load), 1.0)

    @property
    def ratios(self) -> dict[StepKind, float]:
        """Measured over predicted time of each kind of step; recent steps weigh most."""
        return dict(self._ratios)

    def learn(self, load: StepLoad, measured_s: float) -> None:
        predicted_s = self.seconds_of(load)
        if predicted_s <= 0:
            return
        kind, ratio = StepKind.of(load), measured_s / predicted_s
        before = self._ratios.get(kind, ratio)
        self._ratios[kind] = before + LEARNING_RATE * (ratio - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The steps of one run; printed as one line.

    Attributes:
        predicted_s: Sum of the cost model's uncorrected predictions.
        measured_s: Sum of step times, without the time between steps.
        busy_s: Busy seconds of each resource that worked.
        links: What crossed the link in each direction.
    """

    num_steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    busy_s: Mapping[Resource, float] = field(default_factory=dict)
    links: Mapping[Resource, LinkUse] = field(default_factory=dict)

    def with_step(self, predicted_s: float, measured: Timeline) -> "RunReport":
        busy_s, links = dict(self.busy_s), dict(self.links)
        for resource, use in measured.links.items():
            links[resource] = links.get(resource, LinkUse()).plus(use)
        for resource in measured.resources:
            use_of = measured.links.get(resource)
            busy = measured.busy_s(resource) if use_of is None else use_of.busy_s
            busy_s[resource] = busy_s.get(resource, 0.0) + busy
        return RunReport(
            num_steps=self.num_steps + 1,
            predicted_s=self.predicted_s + predicted_s,
            measured_s=self.measured_s + measured.makespan_s,
            busy_s=busy_s,
            links=links,
        )

    def busy_share(self, resource: Resource) -> float:
        """Busy share of a resource in the steps, 0..1."""
        return self.busy_s.get(resource, 0.0) / self.measured_s if self.measured_s else 0.0

    @property
    def link(self) -> LinkUse:
        """From host to device."""
        num_bytes = self.links.get(Resource.HTOD, LinkUse()).num_bytes
        return LinkUse(num_bytes, self.busy_s.get(Resource.HTOD, 0.0))

    def __str__(self) -> str:
        line = report_line(self.predicted_s, self.measured_s, self.link)
        return f"{self.num_steps} passes: {line}"


class MeasuredStep(NamedTuple):
    """The load of a step, and when its tasks ran."""

    load: StepLoad
    timeline: Timeline


class Accuracy:
    """Adds up the steps of a run. The engine thread owns it; other threads may read."""

    def __init__(self, correction: Correction) -> None:
        self.correction = correction
        self.report = self.total = RunReport()
        self.last_step: MeasuredStep | None = None

    def restart(self) -> None:
        self.report = RunReport()

    def record(self, done: ScheduledStep, measured: Timeline) -> None:
        load = load_of(done)
        predicted_s = self.correction.seconds_of(load)
        self.report = self.report.with_step(predicted_s, measured)
        self.total = self.total.with_step(predicted_s, measured)
        self.last_step = MeasuredStep(load, measured)
        self.correction.learn(load, measured.makespan_s)


def load_of(done: ScheduledStep) -> StepLoad:
    """A step in the numbers that predictions depend on; one new token counts as decoding."""
    return load_of_scheduled_tokens(done.num_scheduled_tokens, done.context_tokens)


def load_of_scheduled_tokens(num_scheduled_tokens: Int32s, contexts: Int32s) -> StepLoad:
    """Return the load for the tokens that each sequence computes, and those it has afterwards."""
    is_decode = num_scheduled_tokens == 1
    decoding, chunks = int(np.count_nonzero(is_decode)), num_scheduled_tokens[~is_decode]
    return StepLoad(
        decode_rows=decoding,
        decode_context=float(contexts[is_decode].mean()) if decoding else 0.0,
        prompt_tokens=int(chunks.sum()),
        prompt_chunk=float(chunks.mean()) if len(chunks) else 1.0,
    )
