"""How much memory the buffers of a schedule take."""

from collections.abc import Callable

from raymoe.schedule.graph import Buffer, Schedule


def live_bytes(schedule: Schedule, size_of: Callable[[Buffer], int]) -> int:
    """The most bytes in use at once, as tasks are issued.

    A buffer is in use from its first task to its last one, through all that is written to it in
    between: rings and slots keep their memory. An input is in use from the beginning; what is
    never read after its last write is a result and stays to the end.

    Args:
        schedule: The schedule.
        size_of: Bytes of a buffer; 0 for those of another tier of memory.
    """
    end = len(schedule.tasks)
    first_use: dict[Buffer, int] = dict.fromkeys(schedule.inputs, 0)
    last_use: dict[Buffer, int] = dict.fromkeys(schedule.inputs, 0)
    for index, task in enumerate(schedule.tasks):
        for buffer in task.reads:
            last_use[buffer] = index
        for buffer in task.writes:
            first_use.setdefault(buffer, index)
            last_use[buffer] = end
    changes = [0] * (end + 2)
    for buffer, first in first_use.items():
        size_bytes = size_of(buffer)
        changes[first] += size_bytes
        changes[last_use[buffer] + 1] -= size_bytes
    peak = live = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
