"""Timeline: when each task ran, whether predicted or measured."""

from dataclasses import dataclass

from raymoe.schedule.task import Resource, Task


@dataclass(frozen=True, slots=True)
class Span:
    """One task and when it ran, in seconds since the start of its timeline."""

    task: Task
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Bubble:
    """An idle gap of a resource between two of its tasks, or before the first."""

    resource: Resource
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one run of a schedule, in issue order."""

    name: str
    spans: tuple[Span, ...]

    @property
    def makespan_s(self) -> float:
        """From zero to the end of the last task."""
        return max((span.end_s for span in self.spans), default=0.0)

    def scaled(self, factor: float) -> "Timeline":
        """The same with all times multiplied."""
        return Timeline(
            self.name,
            tuple(
                Span(span.task, span.start_s * factor, span.end_s * factor) for span in self.spans
            ),
        )

    def between(self, start_s: float, end_s: float) -> "Timeline":
        """The part between two times, tasks cut at its edges; it starts at zero."""
        cut = (
            Span(span.task, max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s)
            for span in self.spans
            if span.end_s > start_s and span.start_s < end_s
        )
        return Timeline(self.name, tuple(cut))

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources in use, in the order of the enumeration."""
        used = {span.task.resource for span in self.spans}
        return tuple(resource for resource in Resource if resource in used)

    def of(self, resource: Resource) -> tuple[Span, ...]:
        """The spans of one resource, in issue order."""
        return tuple(span for span in self.spans if span.task.resource is resource)

    def busy_s(self, resource: Resource) -> float:
        """Seconds that a resource worked."""
        return sum(span.duration_s for span in self.of(resource))

    def utilization(self, resource: Resource) -> float:
        """Busy share of a resource, 0..1; 0 for an empty timeline."""
        makespan_s = self.makespan_s
        return self.busy_s(resource) / makespan_s if makespan_s else 0.0

    def bubbles(self, resource: Resource) -> tuple[Bubble, ...]:
        """The idle gaps of a resource before its last task."""
        gaps, free_s = [], 0.0
        for span in self.of(resource):
            if span.start_s > free_s:
                gaps.append(Bubble(resource, free_s, span.start_s))
            free_s = max(free_s, span.end_s)
        return tuple(gaps)

    def seconds_by_op(self) -> dict[str, float]:
        """Busy seconds of each kind of work, in order of first use."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.task.op] = seconds.get(span.task.op, 0.0) + span.duration_s
        return seconds
