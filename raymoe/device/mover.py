"""Lanes of copies: native threads move bytes over the link, and none waits for the interpreter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from raymoe import _native
from raymoe.device.lane import Call, Lane, Mark, TaskMark
from raymoe.errors import ConfigError, ExecutionError
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import LinkUse
from raymoe.units import GIB, MIB

# Two packets are in flight. One of 16 MiB takes 0.3 to 1.4 ms at 55 to 12 GB/s: time enough to send
# the next one, and the longest wait of a small copy on another stream.
PACKET_BYTES = 16 * MIB
# The driver refuses a copy that crosses from one registered range into the next. So ranges end at
# addresses that are multiples of this, and copies are cut there too.
CHUNK_BYTES = GIB

Int64s = npt.NDArray[np.int64]
Rows = Sequence[tuple[int, int, int]] | npt.NDArray[np.int64]


@dataclass(slots=True)
class Copies:
    """What a task copies, in order; the memory must outlive the task.

    Attributes:
        rows: Target address, source address and bytes of each copy.
        can_batch: All host memory is pinned, so that one call may enqueue them all.
        record: Notes what was written, for `on_dead` of executors.
        on_done: Called when the bytes are there, before anyone who waits for the task goes on. It
            takes the interpreter's lock, so executors set it only for devices that poison memory.
        token: Cancels the task if it has not started.
    """

    rows: Rows = ()
    can_batch: bool = False
    record: Callable[[], None] | None = None
    on_done: Callable[[], None] | None = None
    token: _native.CancelToken | None = None

    @classmethod
    def of(cls, *pairs: tuple[Tensor, Tensor]) -> Self:
        """Copies to contiguous targets from contiguous sources of equal bytes."""
        return cls([_row(target, source) for target, source in pairs])

    @classmethod
    def of_runs(cls, target: Tensor, source: Tensor, runs: Int64s, *, is_pinned: bool) -> Self:
        """Copies of runs of rows between contiguous tensors whose rows have the same size.

        Args:
            runs: First row of the source, first row of the target and number of rows of each.
        """
        if not len(runs):
            return cls()
        rows = source[0].nbytes * runs[:, [1, 0, 2]]
        rows[:, 0] += target.data_ptr()
        rows[:, 1] += source.data_ptr()
        return cls(rows, can_batch=is_pinned)

    @classmethod
    def of_all(cls, first: Self, second: Self) -> Self:
        """The copies of both, between the same memories."""
        if not len(first.rows) or not len(second.rows):
            return first if len(first.rows) else second
        return cls(np.concatenate([first.rows, second.rows]), can_batch=first.can_batch)


def _row(target: Tensor, source: Tensor) -> tuple[int, int, int]:
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ConfigError("source and target must be in one piece")
    if target.nbytes != source.nbytes:
        raise ConfigError(f"cannot copy {source.nbytes} bytes to {target.nbytes} bytes")
    return target.data_ptr(), source.data_ptr(), source.nbytes


class CopyTime(NamedTuple):
    """Seconds on a simulated link (negative: by its rate), and by which the copy begins late."""

    seconds: float = -1.0
    stall_s: float = 0.0


def by_rate(_task: Task) -> CopyTime:
    return CopyTime()


class MoverLane:
    """A stream whose tasks are copies that a native thread issues.

    Their calls run in `submit` and return what to copy; the thread then waits for other tasks,
    copies and ends the mark without the interpreter's lock.
    """

    is_synchronous = True  # `Copies.on_done` comes when the work is done

    def __init__(
        self,
        resource: Resource,
        mover: _native.Mover,
        time_of: Callable[[Task], CopyTime] = by_rate,
    ) -> None:
        self.resource = resource
        self._mover = mover
        self._time_of = time_of

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> TaskMark:
        mark = TaskMark()
        try:
            copies = call()
            if not isinstance(copies, Copies):
                copies = Copies()
            seconds, stall_s = self._time_of(task)
        except Exception as error:  # the waiters of the mark get it
            mark.cancel(error)
            return mark
        try:
            self._mover.submit(
                copies.rows, copies.can_batch, after, mark, seconds, stall_s, copies.on_done,
                copies.token,
            )  # fmt: skip
        except RuntimeError as error:
            raise ExecutionError(str(error)) from error
        return mark

    def count_arrived(self) -> None:
        self._mover.count_arrived()

    def close(self) -> None:
        self._mover.close()


class Link:
    """The movers of a device.

    Pages of weights and staged KV have streams of their own, so that hidden states, which may wait
    for the CPU, hold none of them back.
    """

    def __init__(
        self,
        runtime: _native.DeviceRuntime,
        new_stream: Callable[[bool], int],
        time_of: Callable[[Task], CopyTime] = by_rate,
    ) -> None:
        """Start the threads.

        Args:
            new_stream: Makes a stream for copies to the device (True) or to the host.
            time_of: Time of a task on a simulated link.
        """
        directions = (Resource.HTOD, Resource.DTOH)
        self._meters = {resource: _native.LinkMeter() for resource in directions}

        def lane(name: str, resource: Resource) -> MoverLane:
            to_device = resource is Resource.HTOD
            mover = _native.Mover(
                f"raymoe-lane-{name}", runtime, new_stream(to_device), to_device=to_device,
                packet_bytes=PACKET_BYTES, chunk_bytes=CHUNK_BYTES, meter=self._meters[resource],
            )  # fmt: skip
            return MoverLane(resource, mover, time_of)

        self.lanes: Mapping[Resource | Op, Lane] = MappingProxyType(
            {
                Op.W: lane("pages", Resource.HTOD),
                Op.KV: lane("kv", Resource.HTOD),
                Resource.HTOD: lane("htod", Resource.HTOD),
                Resource.DTOH: lane("dtoh", Resource.DTOH),
            }
        )

    def traffic(self) -> dict[Resource, LinkUse]:
        """What has crossed the link so far."""
        for lane in self.lanes.values():
            assert isinstance(lane, MoverLane)
            lane.count_arrived()
        return {resource: LinkUse(*meter.read()) for resource, meter in self._meters.items()}
