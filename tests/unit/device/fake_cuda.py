"""Streams and events without a GPU: a device that works only when it must, or at random moments.

As on a GPU, the host enqueues and goes on; work happens later, in the order of each stream, and a
stream waits for events of others. The device is as slow as waiting hosts allow (`pace=0`), or each
call of the host moves random streams on by a few steps, so that a missing wait shows either way.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

Work = Callable[[], object]


@dataclass(eq=False)
class FakeStream:
    steps: list[Work] = field(default_factory=list)
    blockers: dict[int, "FakeEvent"] = field(default_factory=dict)  # of the step with that index
    num_done: int = 0


@dataclass(eq=False)
class FakeEvent:
    stream: FakeStream | None = None
    index: int = -1
    time_s: float | None = None


class FakeCuda:
    """Owns the clock of the device: every step takes a second.

    Attributes:
        host_waits: Names of the threads that blocked for the device, in order.
        log: What was recorded ("record") and awaited ("wait"), with the number of the event.
    """

    def __init__(self, *, delay: float = 0.0, seed: int = 0) -> None:
        self.host_waits: list[str] = []
        self.log: list[tuple[str, int]] = []
        self.streams: list[FakeStream] = []
        self._delay = delay
        self._dice = random.Random(seed)
        self._events: list[FakeEvent] = []
        self._lock = threading.RLock()
        self._current = threading.local()
        self._fault: Exception | None = None
        self._clock_s = 0.0

    def thread_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        yield
        self._current.stream = before

    def launch(self, work: Work) -> None:
        """Enqueue work on the calling thread's stream, as a kernel launch does."""
        with self._lock:
            self._current.stream.steps.append(work)
            self._drift()

    def new_stream(self) -> FakeStream:
        with self._lock:
            self.streams.append(FakeStream())
            return self.streams[-1]

    def new_event(self) -> FakeEvent:
        with self._lock:
            self._events.append(FakeEvent())
            return self._events[-1]

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        with self._lock:
            self.log.append(("record", self._events.index(event)))
            event.stream, event.index = stream, len(stream.steps)
            stream.steps.append(lambda: setattr(event, "time_s", self._clock_s))
            self._drift()

    def stream_wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            assert event.stream is not None, "a stream waits for an event that was not recorded"
            stream.blockers[len(stream.steps)] = event
            stream.steps.append(lambda: None)
            self._drift()

    def is_done(self, event: FakeEvent) -> bool:
        with self._lock:
            self._drift()
            return event.time_s is not None

    def wait_event(self, event: FakeEvent) -> None:
        with self._lock:
            self.log.append(("wait", self._events.index(event)))
            self.host_waits.append(threading.current_thread().name)
            assert event.stream is not None, "the host waits for an event that was not recorded"
            self._advance(event.stream, event.index + 1)

    def wait_stream(self, stream: FakeStream) -> None:
        with self._lock:
            self._advance(stream, len(stream.steps))

    def elapsed_s(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.time_s is not None
        assert end.time_s is not None
        return end.time_s - start.time_s

    def _advance(self, stream: FakeStream, num_steps: int) -> None:
        while stream.num_done < num_steps:
            event = stream.blockers.get(stream.num_done)
            if event is not None and event.time_s is None:
                assert event.stream is not None
                self._advance(event.stream, event.index + 1)
            self._step(stream)
        if self._fault is not None:
            raise RuntimeError(f"CUDA error: {self._fault}")

    def _step(self, stream: FakeStream) -> None:
        step = stream.steps[stream.num_done]
        stream.num_done += 1
        self._clock_s += 1.0
        try:
            step()
        except Exception as fault:  # as on a GPU, known to those who wait, and for good
            self._fault = self._fault or fault

    def _drift(self) -> None:
        while self._dice.random() < self._delay:
            stream = self._dice.choice(self.streams)
            event = stream.blockers.get(stream.num_done)
            is_blocked = event is not None and event.time_s is None
            if stream.num_done < len(stream.steps) and not is_blocked:
                self._step(stream)
