"""Work on CUDA streams, timed by events of the device: alone, both directions, beside the CPU."""

import itertools
import statistics
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self

import torch

from raymoe.device.cuda_api import CudaApi, EventT, StreamT
from raymoe.device.lane import ThreadLane
from raymoe.measure.timing import KernelJob
from raymoe.schedule.graph import Op, Resource, Task

NUM_RUNS = 5  # of each measurement, of which the median counts

_ATTENTION = Task(op=Op.ATTN, layer=0, part=0, resource=Resource.CPU)

Call = Callable[[], object]


class StreamRun(Generic[StreamT, EventT]):
    """Calls that were given to a stream, between two events."""

    def __init__(
        self, api: CudaApi[StreamT, EventT], stream: StreamT, calls: Iterable[Call]
    ) -> None:
        """Enqueue all calls; the device may not have begun when this returns."""
        self._api = api
        self._start, self._end = api.new_event(), api.new_event()
        with api.use(stream):
            api.record(self._start, stream)
            for call in calls:
                call()
            api.record(self._end, stream)

    def seconds(self) -> float:
        """Time between the events; blocks until the last call is done."""
        self._api.wait_event(self._end)
        return self._api.elapsed_s(self._start, self._end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCopies:
    """Copies of one size, to be enqueued on the current stream."""

    num_bytes: int
    htod: Call
    dtoh: Call
    pageable_htod: Call
    pageable_dtoh: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes per second of the link; see `DeviceCurves` for what is beside what."""

    htod: float
    dtoh: float
    pageable_htod: float
    pageable_dtoh: float
    duplex_htod: float
    duplex_dtoh: float
    busy_htod: float
    busy_attention: float


def seconds_on_stream(
    api: CudaApi[StreamT, EventT], stream: StreamT, calls: Iterable[Call], seconds: float
) -> float:
    """Seconds of one of these calls, which are made in turn, from runs of `seconds` together."""
    endless = itertools.cycle(calls)
    once_s = StreamRun(api, stream, itertools.islice(endless, 2)).seconds() / 2
    count = _calls_in(seconds / NUM_RUNS, once_s)
    runs = [
        StreamRun(api, stream, itertools.islice(endless, count)).seconds() for _ in range(NUM_RUNS)
    ]
    return statistics.median(runs) / count


def measure_link(
    api: CudaApi[StreamT, EventT], copies: LinkCopies, attention: KernelJob, seconds: float
) -> LinkRates:
    """Each direction alone, from pageable memory, both at once, and while the CPU attends.

    Args:
        api: The device.
        copies: What to copy.
        attention: What the CPU does meanwhile; its calls must not hold the interpreter's lock.
        seconds: For all of it, about.
    """
    each_s = seconds / 6
    stream, other = api.new_stream(), api.new_stream()

    def rate(call: Call) -> float:
        return copies.num_bytes / seconds_on_stream(api, stream, [call], each_s)

    htod, dtoh = rate(copies.htod), rate(copies.dtoh)
    count = _calls_in(each_s / NUM_RUNS, copies.num_bytes / min(htod, dtoh))
    pairs = [
        (
            StreamRun(api, stream, [copies.htod] * count),
            StreamRun(api, other, [copies.dtoh] * count),
        )
        for _ in range(NUM_RUNS)
    ]
    with Background(attention.calls) as background:
        busy_htod = rate(copies.htod)
    return LinkRates(
        htod=htod,
        dtoh=dtoh,
        pageable_htod=rate(copies.pageable_htod),
        pageable_dtoh=rate(copies.pageable_dtoh),
        duplex_htod=copies.num_bytes * count / statistics.median(up.seconds() for up, _ in pairs),
        duplex_dtoh=copies.num_bytes * count / statistics.median(dn.seconds() for _, dn in pairs),
        busy_htod=busy_htod,
        busy_attention=attention.bytes_per_call / background.seconds_per_call,
    )


class Background:
    """Calls that a CPU lane repeats for as long as the context lasts, at least once.

    Attributes:
        num_calls: How many were made.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = itertools.cycle(calls)
        self._is_over = threading.Event()
        self.num_calls = 0

    @property
    def seconds_per_call(self) -> float:
        """Mean over the calls; known once the context is left."""
        return (self._mark.end_s - self._mark.start_s) / self.num_calls

    def __enter__(self) -> Self:
        self._lane = ThreadLane(Resource.CPU, context=torch.inference_mode)
        self._mark = self._lane.submit(_ATTENTION, self._repeat, ())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._lane.close()
        if error is None:
            self._mark.wait()

    def _repeat(self) -> None:
        for call in self._calls:
            call()
            self.num_calls += 1
            if self._is_over.is_set():
                return


def _calls_in(seconds: float, each_s: float) -> int:
    return max(1, int(seconds / max(each_s, 1e-9)))
