"""When each task ran, predicted or measured."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from raymoe.errors import ScheduleError
from raymoe.schedule.graph import OWN_STREAMS, Op, Resource, Schedule, Task


@dataclass(frozen=True, slots=True)
class Span:
    task: Task
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Bubble:
    resource: Resource
    start_s: float
    end_s: float


class LinkUse(NamedTuple):
    """What crossed the link in one direction.

    Attributes:
        busy_s: Seconds in which at least one copy was in progress; without the gaps between copies.
    """

    num_bytes: int = 0
    busy_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.busy_s if self.busy_s else 0.0

    def plus(self, other: "LinkUse", sign: int = 1) -> "LinkUse":
        return LinkUse(self.num_bytes + sign * other.num_bytes, self.busy_s + sign * other.busy_s)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one run of a schedule, in issue order.

    Examples:
        >>> plan = raymoe.find_plan(model, node)
        >>> timeline = plan.steps.timeline(plan.decode_load)
        >>> 0 < timeline.seconds_by_op()["experts"] < timeline.makespan_s
        True

    Attributes:
        links: What crossed the link in each direction; empty if that was not measured.
    """

    name: str
    spans: tuple[Span, ...]
    links: Mapping[Resource, LinkUse] = field(default_factory=dict, compare=False)

    @property
    def makespan_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    def scaled(self, factor: float) -> "Timeline":
        return Timeline(
            self.name,
            tuple(
                Span(span.task, span.start_s * factor, span.end_s * factor) for span in self.spans
            ),
        )

    def between(self, start_s: float, end_s: float) -> "Timeline":
        """The part between two times, with tasks cut at the edges; starts at zero."""
        cut = (
            Span(span.task, max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s)
            for span in self.spans
            if span.end_s > start_s and span.start_s < end_s
        )
        return Timeline(self.name, tuple(cut))

    @property
    def resources(self) -> tuple[Resource, ...]:
        used = {span.task.resource for span in self.spans}
        return tuple(resource for resource in Resource if resource in used)

    def of(self, resource: Resource) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.task.resource is resource)

    def busy_s(self, resource: Resource) -> float:
        """Seconds in which at least one task ran; pages and small copies to the device overlap."""
        busy_s = until_s = 0.0
        for span in sorted(self.of(resource), key=lambda span: span.start_s):
            busy_s += max(0.0, span.end_s - max(span.start_s, until_s))
            until_s = max(until_s, span.end_s)
        return busy_s

    def utilization(self, resource: Resource) -> float:
        """Busy share of a resource, 0..1; 0 for an empty timeline."""
        makespan_s = self.makespan_s
        return self.busy_s(resource) / makespan_s if makespan_s else 0.0

    def bubbles(self, resource: Resource) -> tuple[Bubble, ...]:
        """Idle gaps of a resource before its last task."""
        gaps, free_s = [], 0.0
        for span in sorted(self.of(resource), key=lambda span: span.start_s):
            if span.start_s > free_s:
                gaps.append(Bubble(resource, free_s, span.start_s))
            free_s = max(free_s, span.end_s)
        return tuple(gaps)

    def seconds_by_op(self) -> dict[str, float]:
        """Busy seconds per operation, in order of first use."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.task.op] = seconds.get(span.task.op, 0.0) + span.duration_s
        return seconds


class CostModel(Protocol):
    """Predicts the duration of tasks."""

    def duration_s(self, task: Task) -> float:
        """Duration of a task that runs alone, in seconds; not negative."""


class Instant:
    """A cost model of tasks that take no time, where only their order matters."""

    def duration_s(self, task: Task) -> float:
        del task
        return 0.0


def simulate(
    schedule: Schedule, cost: CostModel, *, own_streams: Collection[Op] = OWN_STREAMS
) -> Timeline:
    """Predict a timeline: each lane in issue order, each task after its dependencies.

    Examples:
        >>> class Constant:
        ...     def duration_s(self, task):
        ...         return 0.001
        >>> plan = raymoe.find_plan(model, node)
        >>> schedule = plan.steps.schedule(plan.decode_load)
        >>> raymoe.simulate(schedule, Constant()).makespan_s < 0.001 * (len(schedule.tasks) + 1)
        True

    Args:
        own_streams: As ours have them; without any, copies to the device go one after the other, as
            the papers assume.
    """
    free_s = dict.fromkeys(_LANES, 0.0)
    spans: list[Span] = []
    durations_s = list(map(cost.duration_s, schedule.tasks))
    slowdown = 1.0
    if Op.W in own_streams:
        slowdown = _slowdown_of_pages(zip(schedule.tasks, durations_s, strict=True))
    for task, waits, alone_s in zip(
        schedule.tasks, schedule.dependencies, durations_s, strict=True
    ):
        lane = task.op if task.op in own_streams else task.resource
        start_s = max([free_s[lane], *(spans[wait].end_s for wait in waits)])
        end_s = start_s + alone_s * (slowdown if lane is Op.W else 1.0)
        free_s[lane] = end_s
        spans.append(Span(task, start_s, end_s))
    return Timeline(schedule.name, tuple(spans))


def _slowdown_of_pages(durations_s: Iterable[tuple[Task, float]]) -> float:
    """Factor by which pages of weights take longer because other copies use the link, too."""
    pages_s = others_s = 0.0
    for task, alone_s in durations_s:
        if task.op is Op.W:
            pages_s += alone_s
        elif task.resource is Resource.HTOD:
            others_s += alone_s
    return 1.0 + others_s / pages_s if pages_s else 1.0


def critical_path(schedule: Schedule, timeline: Timeline) -> tuple[Span, ...]:
    """The chain of tasks that determines the makespan, first to last.

    From the task that ends last, the chain goes back to whichever ended last: a dependency or the
    previous task on the lane. In a predicted timeline the chain has no gaps and is as long as the
    makespan; gaps of a measured chain lie between the end of a task and the start of its successor.
    """
    spans = timeline.spans
    if tuple(span.task for span in spans) != schedule.tasks:
        raise ScheduleError(
            f"timeline {timeline.name!r} with {len(spans)} tasks is not one of schedule "
            f"{schedule.name!r} with {len(schedule.tasks)}"
        )
    held_by = _holders(schedule, timeline)
    path: list[Span] = []
    at = max(range(len(spans)), key=lambda index: spans[index].end_s, default=None)
    while at is not None:
        path.append(spans[at])
        at = held_by[at]
    return tuple(reversed(path))


def bound_by(schedule: Schedule, timeline: Timeline) -> Resource:
    """The resource with the largest share of the critical path; ScheduleError if nothing ran."""
    seconds = dict.fromkeys(timeline.resources, 0.0)
    for span in critical_path(schedule, timeline):
        seconds[span.task.resource] += span.duration_s
    if not seconds:
        raise ScheduleError(f"timeline {timeline.name!r} is empty; nothing bounds it")
    return max(seconds, key=seconds.__getitem__)


def gap(predicted: Timeline, measured: Timeline) -> float:
    """Measured over predicted makespan, minus 1."""
    if not predicted.makespan_s:
        return math.inf if measured.makespan_s else 0.0
    return measured.makespan_s / predicted.makespan_s - 1


def compare(predicted: Timeline, measured: Timeline) -> str:
    """A report line; the link share is that from host to device."""
    link = measured.links.get(Resource.HTOD, LinkUse(0, measured.busy_s(Resource.HTOD)))
    return report_line(predicted.makespan_s, measured.makespan_s, link)


def report_line(predicted_s: float, measured_s: float, link: LinkUse) -> str:
    """A report line for one or more timelines; `link` is that from host to device."""
    difference = measured_s / predicted_s - 1 if predicted_s else math.inf
    busy = link.busy_s / measured_s if measured_s else 0.0
    rate = f" at {link.bytes_per_s / 1e9:.3g} GB/s" if link.num_bytes else ""
    return (
        f"predicted {predicted_s:.3g} s, measured {measured_s:.3g} s, "
        f"gap {100 * difference:+.1f} %, link busy {100 * busy:.0f} %{rate}"
    )


def _holders(schedule: Schedule, timeline: Timeline) -> list[int | None]:
    spans = timeline.spans
    last_on: dict[Op | Resource, int] = {}
    holders: list[int | None] = []
    for index, (task, waits) in enumerate(zip(schedule.tasks, schedule.dependencies, strict=True)):
        before = (*waits, last_on[task.lane]) if task.lane in last_on else waits
        holders.append(max(before, key=lambda other: spans[other].end_s, default=None))
        last_on[task.lane] = index
    return holders


_LANES: Mapping[Op | Resource, int] = {
    key: lane for lane, key in enumerate((*Resource, *sorted(OWN_STREAMS)))
}


@dataclass(slots=True)
class _Run:
    """Consecutive tasks of one lane without a gap; waits are runs of other lanes."""

    lane: int
    waits: tuple[int, ...]
    kinds: list[int]


@dataclass(frozen=True, slots=True)
class Outline:
    kinds: tuple[Task, ...]
    _counts: tuple[int, ...]  # of tasks of each kind
    _runs: tuple[_Run, ...]

    @classmethod
    def of(cls, schedule: Schedule, kind_of: Callable[[Task], Hashable]) -> "Outline":
        """Reduce a schedule; `kind_of` is equal for tasks of equal duration."""
        lanes = [_LANES[task.lane] for task in schedule.tasks]
        waits = _needed_waits(lanes, schedule.dependencies)
        awaited = {wait for task_waits in waits for wait in task_waits}
        kinds: dict[Hashable, tuple[int, Task]] = {}
        runs: list[_Run] = []
        run_of: list[int] = []
        last_on: dict[int, int] = {}
        for index, (task, lane) in enumerate(zip(schedule.tasks, lanes, strict=True)):
            before = last_on.get(lane)
            if before is None or waits[index] or before in awaited:
                run_of.append(len(runs))
                runs.append(_Run(lane, tuple(run_of[wait] for wait in waits[index]), []))
            else:
                run_of.append(run_of[before])
            kind, _ = kinds.setdefault(kind_of(task), (len(kinds), task))
            runs[run_of[index]].kinds.append(kind)
            last_on[lane] = index
        counts = Counter(kind for run in runs for kind in run.kinds)
        return cls(
            tuple(task for _, task in kinds.values()),
            tuple(counts[kind] for kind in range(len(kinds))),
            tuple(runs),
        )

    def makespan_s(self, durations_s: Sequence[float]) -> float:
        """Length of the schedule, as `simulate` computes it, for the seconds of each of `kinds`."""
        durations_s = self._sharing_link(durations_s)
        free_s = [0.0] * len(_LANES)
        ends_s: list[float] = []
        for run in self._runs:
            now_s = free_s[run.lane]
            for wait in run.waits:
                if ends_s[wait] > now_s:  # noqa: PLR1730 - the innermost loop of planning
                    now_s = ends_s[wait]
            for kind in run.kinds:
                now_s += durations_s[kind]
            free_s[run.lane] = now_s
            ends_s.append(now_s)
        return max(free_s)

    def _sharing_link(self, durations_s: Sequence[float]) -> Sequence[float]:
        slowdown = _slowdown_of_pages(
            (task, count * alone_s)
            for task, count, alone_s in zip(self.kinds, self._counts, durations_s, strict=True)
        )
        return [
            alone_s * slowdown if task.op is Op.W else alone_s
            for task, alone_s in zip(self.kinds, durations_s, strict=True)
        ]


def _needed_waits(
    lanes: Sequence[int], dependencies: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    needed: list[tuple[int, ...]] = []
    # For each task, the last task of each lane that has ended when it ends.
    reached: list[list[int]] = []
    last_on = [-1] * len(_LANES)
    for index, (lane, waits) in enumerate(zip(lanes, dependencies, strict=True)):
        before = last_on[lane]
        known = list(reached[before]) if before >= 0 else [-1] * len(_LANES)
        kept = []
        for wait in reversed(waits):  # latest first, as it may imply earlier ones
            if wait > known[lanes[wait]]:
                kept.append(wait)
                known = list(map(max, known, reached[wait]))
        known[lane] = index
        needed.append(tuple(kept))
        reached.append(known)
        last_on[lane] = index
    return needed


class Excerpt(NamedTuple):
    timeline: Timeline
    num_shown: int
    num_layers: int


def middle_layers(timeline: Timeline, num_layers: int) -> Excerpt:
    """Cut layers out of the middle of a step; a step with fewer stays whole."""
    starts = {
        span.task.layer: span.start_s
        for span in timeline.spans
        if span.task.op is Op.PRE and span.task.part == 0
    }
    shown = min(num_layers, len(starts))
    first = (len(starts) - shown) // 2
    start_s = starts[first] if first else 0.0
    end_s = starts.get(first + shown, timeline.makespan_s)
    return Excerpt(
        Timeline(timeline.name, timeline.between(start_s, end_s).spans), shown, len(starts)
    )
