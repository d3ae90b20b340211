"""Where the schedules of MoE-Lightning's figure 6 idle, looked for in any timeline."""

from raymoe.schedule.graph import Op, Resource
from raymoe.schedule.timeline import Timeline


def busy_s(timeline: Timeline, lane: Resource, window: tuple[float, float], *ops: Op) -> float:
    """Seconds within a window in which a lane works, on these operations or on any."""
    begin_s, end_s = window
    return sum(
        max(0.0, min(span.end_s, end_s) - max(span.start_s, begin_s))
        for span in timeline.of(lane)
        if not ops or span.task.op in ops
    )


def gpu_share_during_cpu_attention(timeline: Timeline) -> float:
    """Share of the time of CPU attention in which the GPU works; S3 leaves it idle."""
    windows = [
        (span.start_s, span.end_s) for span in timeline.of(Resource.CPU) if span.task.op is Op.ATTN
    ]
    total_s = sum(end_s - start_s for start_s, end_s in windows)
    return sum(busy_s(timeline, Resource.GPU, window) for window in windows) / total_s


def share_of_gpu_idle_time_spent_on(timeline: Timeline, *ops: Op) -> float:
    """Share of the idle time of the GPU in which these copies to it run; S4 waits for its KV."""
    bubbles = [(gap.start_s, gap.end_s) for gap in timeline.bubbles(Resource.GPU)]
    total_s = sum(end_s - start_s for start_s, end_s in bubbles)
    return sum(busy_s(timeline, Resource.HTOD, gap, *ops) for gap in bubbles) / total_s
