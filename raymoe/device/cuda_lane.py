"""A lane that is a CUDA stream: its thread issues work, the device waits by itself."""

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple

from raymoe.device.cuda_api import CudaApi, EventT, StreamT
from raymoe.device.lane import Call, HostMark, Mark
from raymoe.device.worker import ThreadContext, Worker
from raymoe.schedule.graph import Resource, Task

# Event times are float32 milliseconds since the anchor: after a minute still exact to 4 us.
ANCHOR_S = 60.0


class _Anchor(NamedTuple, Generic[EventT]):
    """An event of the lane and when it happened, in seconds of `time.perf_counter`."""

    event: EventT
    host_s: float


class _Issued(NamedTuple, Generic[EventT]):
    """What a task left in its stream."""

    start: EventT
    done: EventT
    anchor: _Anchor[EventT]


class CudaMark(Generic[StreamT, EventT]):
    """The end of a task on a stream: first it is *issued*, later the device is done with it."""

    __slots__ = ("_api", "_issue", "_issued", "stream")

    def __init__(self, api: CudaApi[StreamT, EventT], stream: StreamT) -> None:
        self.stream = stream
        self._api = api
        self._issue = HostMark()
        self._issued: _Issued[EventT] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if not self._issue.is_done:
            return False
        return self._issued is None or self._api.is_done(self._issued.done)

    @property
    def start_s(self) -> float:
        """When the device reached the task."""
        return self._time_s(self._issued.start) if self._issued else 0.0

    @property
    def end_s(self) -> float:
        """When the device was done with it."""
        return self._time_s(self._issued.done) if self._issued else 0.0

    def wait(self) -> None:
        """Block the calling thread until the device is done with the task.

        Raises:
            Cancelled: The task failed or was not started.
        """
        self._api.wait_event(self.wait_issued())

    def wait_issued(self) -> EventT:
        """Block until the task is in its stream; returns the event of its end.

        Raises:
            Cancelled: The task failed or was not started.
        """
        self._issue.wait()
        assert self._issued is not None
        return self._issued.done

    def finish(self, issued: _Issued[EventT]) -> None:
        """Say that the task is in its stream; once, by its lane."""
        self._issued = issued
        self._issue.finish(0.0, 0.0)

    def cancel(self, error: BaseException) -> None:
        """Say that the task will not be done; once, instead of `finish`."""
        self._issue.cancel(error)

    def _time_s(self, event: EventT) -> float:
        assert self._issued is not None
        anchor = self._issued.anchor
        return anchor.host_s + self._api.elapsed_s(anchor.event, event)


class CudaLane(Generic[StreamT, EventT]):
    """Owns a stream and the thread that issues to it.

    A dependency on a task of another stream is a wait of the stream; the thread waits only until
    that task is issued. A dependency on a task of a host lane blocks the thread, and so holds back
    this stream alone. Buffers that several streams use must not come from torch's caching
    allocator while a run lasts: it knows one stream per buffer.
    """

    is_synchronous = False

    def __init__(
        self,
        resource: Resource,
        api: CudaApi[StreamT, EventT],
        context: ThreadContext | None = None,
    ) -> None:
        """Start the thread.

        Args:
            resource: What the lane stands for.
            api: Of the device.
            context: Entered by the thread; None for that of `api`.
        """
        self.resource = resource
        self.stream = api.new_stream()
        self._api = api
        self._anchor: _Anchor[EventT] | None = None
        self._last: EventT | None = None
        self._worker = Worker(f"raymoe-lane-{resource}", context or api.thread_context)

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> CudaMark[StreamT, EventT]:
        """Queue `call`, which enqueues the work of `task` on the stream; see `Lane.submit`."""
        del task  # its length is the device's affair
        mark = CudaMark(self._api, self.stream)
        self._worker.put(partial(self._run, call, after, mark))
        return mark

    def close(self) -> None:
        """Issue what was submitted, wait until the stream is done, end the thread."""
        self._worker.close()
        self._api.wait_stream(self.stream)

    def _run(self, call: Call, after: Sequence[Mark], mark: CudaMark[StreamT, EventT]) -> None:
        try:
            issued = self._issue(call, after)
        except BaseException as error:  # whatever it is belongs to those who wait for the mark
            # What the call enqueued before it failed still uses its buffers. If the device itself
            # failed, nothing runs any more, and the error at hand says why.
            with contextlib.suppress(RuntimeError):
                self._api.wait_stream(self.stream)
            mark.cancel(error)
        else:
            self._last = issued.done
            mark.finish(issued)

    def _issue(self, call: Call, after: Sequence[Mark]) -> _Issued[EventT]:
        api, stream = self._api, self.stream
        anchor = self._recent_anchor()
        for before in after:
            if not isinstance(before, CudaMark):
                before.wait()
            elif before.stream is not stream:
                api.stream_wait(stream, before.wait_issued())
            else:
                before.wait_issued()
        start, done = api.new_event(), api.new_event()
        with api.use(stream):
            api.record(start, stream)
            call()
            api.record(done, stream)
        return _Issued(start, done, anchor)

    def _recent_anchor(self) -> _Anchor[EventT]:
        """The lane's anchor; a new one where it is old and the stream has nothing to do."""
        anchor = self._anchor
        if anchor is not None:
            is_recent = time.perf_counter() - anchor.host_s < ANCHOR_S
            if is_recent or (self._last is not None and not self._api.is_done(self._last)):
                return anchor
        event = self._api.new_event()
        self._api.record(event, self.stream)
        self._api.wait_event(event)
        self._anchor = _Anchor(event, time.perf_counter())
        return self._anchor
