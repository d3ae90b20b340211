"""When the contents of a buffer have been read for the last time."""

import threading
from dataclasses import dataclass

from raymoe.schedule.graph import Buffer, Schedule


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The *versions* of each buffer: what one task wrote, or what was there before the first.

    Versions that nobody reads are not listed: results of the schedule, or data for the next one.
    Nor are versions that a reader itself replaces (an update in place): the memory lives on.

    Attributes:
        buffers: The buffer of each version.
        num_readers: How many tasks read each version.
        versions_of_task: For each task in issue order, the versions that it reads.
    """

    buffers: tuple[Buffer, ...]
    num_readers: tuple[int, ...]
    versions_of_task: tuple[tuple[int, ...], ...]


def find_lifetimes(schedule: Schedule) -> Lifetimes:
    """Find the versions of all buffers of a schedule and who reads them."""
    writer: dict[Buffer, int] = {}
    readers: dict[tuple[Buffer, int], list[int]] = {}
    updated: set[tuple[Buffer, int]] = set()
    for index, task in enumerate(schedule.tasks):
        for buffer in dict.fromkeys(task.reads):
            readers.setdefault((buffer, writer.get(buffer, -1)), []).append(index)
        for buffer in task.writes:
            if buffer in task.reads:
                updated.add((buffer, writer.get(buffer, -1)))
            writer[buffer] = index
    listed = [(version, tasks) for version, tasks in readers.items() if version not in updated]
    versions_of_task: list[list[int]] = [[] for _ in schedule.tasks]
    for number, (_, tasks) in enumerate(listed):
        for index in tasks:
            versions_of_task[index].append(number)
    return Lifetimes(
        buffers=tuple(buffer for (buffer, _), _ in listed),
        num_readers=tuple(len(tasks) for _, tasks in listed),
        versions_of_task=tuple(map(tuple, versions_of_task)),
    )


class ReaderCounts:
    """Counts, during one run, the readers that each version still waits for. Thread-safe."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._num_left = list(lifetimes.num_readers)
        self._lock = threading.Lock()

    def finish(self, index: int) -> tuple[Buffer, ...]:
        """Say that task `index` has read; returns the buffers that no other task will read."""
        dead = []
        with self._lock:
            for version in self._lifetimes.versions_of_task[index]:
                self._num_left[version] -= 1
                if self._num_left[version] == 0:
                    dead.append(self._lifetimes.buffers[version])
        return tuple(dead)
