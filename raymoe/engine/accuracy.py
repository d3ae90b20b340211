"""Compares predicted with measured step times, corrects predictions, and plans again by them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from raymoe.engine.outputs import Int32s
from raymoe.engine.sequence import SchedulerOutput
from raymoe.plan.job import StepTimes, estimate_job
from raymoe.plan.plan import Plan
from raymoe.plan.policy import Policy
from raymoe.plan.work import StepLoad
from raymoe.schedule.graph import Resource
from raymoe.schedule.timeline import LinkUse, Timeline, report_line
from raymoe.specs.workload import Workload
from raymoe.units import format_seconds

LEARNING_RATE = 0.1  # weight of the latest step in the correction of its kind

logger = logging.getLogger(__name__)


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
        notes: What changed meanwhile.
    """

    num_steps: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    busy_s: Mapping[Resource, float] = field(default_factory=dict)
    links: Mapping[Resource, LinkUse] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

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
            notes=self.notes,
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
        return "; ".join((f"{self.num_steps} steps: {line}", *self.notes))


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

    def note(self, text: str) -> None:
        self.report = replace(self.report, notes=(*self.report.notes, text))
        self.total = replace(self.total, notes=(*self.total.notes, text))

    def record(self, done: SchedulerOutput, measured: Timeline) -> None:
        load = load_of(done)
        predicted_s = self.correction.seconds_of(load)
        self.report = self.report.with_step(predicted_s, measured)
        self.total = self.total.with_step(predicted_s, measured)
        self.last_step = MeasuredStep(load, measured)
        self.correction.learn(load, measured.makespan_s)


MIN_ROWS, MAX_ROWS = 64, 1024  # finished rows that show how long rows are
MIN_CHANGE = 0.25  # of a mean length or of step times against what was planned with
MAX_GROWTH = 4  # sequences of a new policy over those of the plan
MAX_PLAN_S = 3.0
MIN_LEFT_S = 20 * MAX_PLAN_S  # a job that ends sooner is not planned again
MIN_GAIN = 0.05  # of the time that is left
SEQUENCES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)  # of a new policy over those of the plan
TOKENS = (0.25, 0.5, 0.75, 1.0)


class NewPolicy(NamedTuple):
    policy: Policy
    workload: Workload
    times: StepTimes
    text: str


class Replanner:
    """Plans the rest of a job again where its rows or its steps differ from what was planned.

    Sizes of steps change, within the memory that the plan took: sequences, tokens of a step, and
    whether rows enter at the steady rate. Device use stays. The engine thread owns this; another
    thread plans, with the measured ratios of step times.

    Args:
        may_grow: Whether there may be more sequences than planned.

    Attributes:
        num_slots: The most sequences of any policy.
    """

    def __init__(self, plan: Plan, accuracy: Accuracy, *, may_grow: bool = True) -> None:
        self._plan, self._accuracy, self._may_grow = plan, accuracy, may_grow
        self._policy, self._workload = plan.policy, plan.workload
        self._ratios: dict[StepKind, float] = {}  # that the policy was planned with
        self._rows: deque[tuple[int, int]] = deque(maxlen=MAX_ROWS)
        self._cached: deque[int] = deque(maxlen=MAX_ROWS)
        self._num_finished = 0
        self._next_check = max(MIN_ROWS, plan.policy.max_num_seqs)  # rows that end early are short
        self._planning: Future[NewPolicy | None] | None = None

    @property
    def num_slots(self) -> int:
        planned = self._plan.policy
        if not self._may_grow:
            return planned.max_num_seqs
        limit = min(planned.max_num_batched_tokens, planned.num_kv_blocks)
        return max(planned.max_num_seqs, min(MAX_GROWTH * planned.max_num_seqs, limit))

    @property
    def is_planning(self) -> bool:
        return self._planning is not None

    def record_row(
        self, num_prompt_tokens: int, num_generated_tokens: int, num_cached_tokens: int = 0
    ) -> None:
        self._rows.append((num_prompt_tokens, max(1, num_generated_tokens)))
        self._cached.append(num_cached_tokens)
        self._num_finished += 1

    def poll(self, num_unfinished: int) -> Policy | None:
        """The policy from now on, if it changes; starts to plan where something differs."""
        if self._planning is not None:
            return self._take(self._planning) if self._planning.done() else None
        if self._num_finished < self._next_check:
            return None
        self._next_check = 2 * self._num_finished
        ratios = self._accuracy.correction.ratios
        left = max(num_unfinished, self._plan.workload.num_rows - self._num_finished)
        shared = sum(self._cached) / len(self._cached)
        observed = replace(Workload.of_rows(tuple(self._rows), shared), num_rows=max(1, left))
        if self._differs(observed, ratios):
            self._planning = Future()
            arguments = (self._planning, observed, ratios)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return None

    def better(self, observed: Workload, ratios: Mapping[StepKind, float]) -> NewPolicy | None:
        """The fastest policy found in `MAX_PLAN_S`; None if the job gains too little."""
        deadline_s = time.monotonic() + MAX_PLAN_S
        largest = replace(self._plan.policy, max_num_seqs=self.num_slots)
        times = self._plan.step_times(observed, largest)

        def seconds(policy: Policy) -> float:
            def of_step(load: StepLoad) -> float:
                return times(load) * ratios.get(StepKind.of(load), 1.0)

            return estimate_job(observed, policy, of_step).seconds

        now_s = best_s = seconds(self._policy)
        if now_s < MIN_LEFT_S:
            return None
        best = self._policy
        for change in (self._with_sequences, self._with_tokens):
            for policy in change(best):
                if time.monotonic() < deadline_s and (policy_s := seconds(policy)) < best_s:
                    best, best_s = policy, policy_s
        if best_s > (1 - MIN_GAIN) * now_s:
            return None
        text = (
            f"planned again for {observed.prompt_tokens} + {observed.generated_tokens} tokens a "
            f"row: up to {best.max_num_seqs:,} sequences and {best.max_num_batched_tokens:,} "
            f"tokens in a step, {format_seconds(best_s)} left, not {format_seconds(now_s)}"
        )
        return NewPolicy(best, observed, times, text)

    def _with_sequences(self, policy: Policy) -> Iterator[Policy]:
        for share in SEQUENCES:
            count = min(round(share * self._plan.policy.max_num_seqs), self.num_slots)
            if 1 <= count <= policy.max_num_batched_tokens:
                for is_steady in (True, False):
                    yield replace(policy, max_num_seqs=count, steady_admission=is_steady)

    def _with_tokens(self, policy: Policy) -> Iterator[Policy]:
        for share in TOKENS:
            tokens = int(share * self._plan.policy.max_num_batched_tokens)
            if tokens >= policy.max_num_seqs:
                yield replace(policy, max_num_batched_tokens=tokens)

    def _differs(self, observed: Workload, ratios: Mapping[StepKind, float]) -> bool:
        planned = self._workload
        changes = [
            observed.prompt_tokens / planned.prompt_tokens,
            observed.computed_prompt_tokens / planned.computed_prompt_tokens,
            observed.generated_tokens / planned.generated_tokens,
            *(ratio / self._ratios.get(kind, 1.0) for kind, ratio in ratios.items()),
        ]
        return any(abs(change - 1) > MIN_CHANGE for change in changes)

    def _run(
        self,
        planning: Future[NewPolicy | None],
        observed: Workload,
        ratios: Mapping[StepKind, float],
    ) -> None:
        try:
            planning.set_result(self.better(observed, ratios))
        except BaseException as error:
            planning.set_exception(error)

    def _take(self, planning: "Future[NewPolicy | None]") -> Policy | None:
        self._planning = None
        error = planning.exception()
        if error is not None:
            logger.error("the job could not be planned again; its policy stays", exc_info=error)
            return None
        found = planning.result()
        if found is None:
            return None
        self._policy, self._workload = found.policy, found.workload
        self._ratios = self._accuracy.correction.ratios
        self._accuracy.correction.seconds_of = found.times
        self._accuracy.note(found.text)
        logger.info("%s", found.text)
        return found.policy


def load_of(done: SchedulerOutput) -> StepLoad:
    """A step in the numbers that predictions depend on; one new token counts as decoding."""
    contexts = done.batch.sequences.context_tokens
    return load_of_scheduled_tokens(done.num_scheduled_tokens, contexts)


def load_of_scheduled_tokens(num_scheduled_tokens: Int32s, contexts: Int32s) -> StepLoad:
    """Return the load for the tokens that each sequence computes, and those it has afterwards."""
    is_decode = num_scheduled_tokens == 1
    decoding = int(np.count_nonzero(is_decode))
    chunks = num_scheduled_tokens[~is_decode].astype(np.int64)
    total, pairs = int(chunks.sum()), int((chunks * (2 * contexts[~is_decode] - chunks)).sum())
    return StepLoad(
        decode_rows=decoding,
        decode_context=float(contexts[is_decode].mean()) if decoding else 0.0,
        prompt_tokens=total,
        prompt_chunk=total / len(chunks) if total else 1.0,
        prompt_spread=len(chunks) * pairs / total**2 if total else 1.0,
    )
