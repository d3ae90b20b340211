"""A few layers of a pass: what a picture has place for."""

from typing import NamedTuple

from raymoe.schedule.task import Op
from raymoe.schedule.timeline import Timeline


class Excerpt(NamedTuple):
    """Part of a timeline, which starts at zero.

    Attributes:
        num_shown: Layers in it.
        num_layers: Of the whole pass.
    """

    timeline: Timeline
    num_shown: int
    num_layers: int


def middle_layers(timeline: Timeline, num_layers: int) -> Excerpt:
    """Cut so many layers out of the middle of a pass; one of fewer is left whole."""
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
