"""Streams and events without a GPU: a device that works only when it must, or at random moments.

As on a GPU, the host enqueues and goes on; work happens later, in the order of each stream, and a
stream waits for events of others. The device is as slow as waiting hosts allow (`pace=0`), or each
call of the host moves random streams on by a few steps, so that a missing wait shows either way.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from raymoe import _native

Work = Callable[[], object]

_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_POINTERS, _SIZES = ctypes.POINTER(_POINTER), ctypes.POINTER(_SIZE)
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "cudaSetDevice": (_INT,),
    "cudaMemcpyAsync": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "cudaMemcpyBatchAsync": (
        _POINTERS, _POINTERS, _SIZES, _SIZE, ctypes.POINTER(_INT), _SIZES, _SIZE, _SIZES, _POINTER,
    ),
    "cudaEventCreateWithFlags": (_POINTERS, ctypes.c_uint),
    "cudaEventDestroy": (_POINTER,),
    "cudaEventRecord": (_POINTER, _POINTER),
    "cudaEventSynchronize": (_POINTER,),
    "cudaEventQuery": (_POINTER,),
    "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _POINTER, _POINTER),
    "cudaStreamWaitEvent": (_POINTER, _POINTER, ctypes.c_uint),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaGetErrorString": (_INT,),
}  # fmt: skip
_KEPT: list[object] = []


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

    Native threads use it too: `open_runtime` gives them its functions as those of libcudart.

    Attributes:
        host_waits: Names of the threads that blocked for the device, in order.
        copies: Bytes of each copy that native threads enqueued; a list for each call.
    """

    version = 13000  # of the CUDA runtime
    has_batches = True
    anchor_s = 60.0

    def __init__(self, *, delay: float = 0.0, seed: int = 0) -> None:
        self.host_waits: list[str] = []
        self.copies: list[list[int]] = []
        self.streams: list[FakeStream] = []
        self._delay = delay
        self._dice = random.Random(seed)
        self._handles: dict[int, FakeEvent] = {}
        self._message = ctypes.create_string_buffer(200)
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
        try:
            yield
        finally:
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

    def handle(self, stream: FakeStream) -> int:
        return 1 + self.streams.index(stream)

    def open_runtime(self) -> _native.DeviceRuntime:
        """The functions in the order of their declarations in libcudart."""
        self.clock, functions = self.new_stream(), {}
        for name, declared in _FUNCTIONS.items():
            types = declared
            call = getattr(self, "_" + name.removeprefix("cuda").lower())
            result = _POINTER if name == "cudaGetErrorString" else _INT
            if name == "cudaMemcpyBatchAsync" and self.version >= 13000:
                types = (*declared[:-2], declared[-1])
            guarded = call if result is _POINTER else partial(self._guard, call)
            functions[name] = ctypes.CFUNCTYPE(result, *types)(guarded)
        addresses = {
            name: ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
            for name, function in functions.items()
        }
        runtime = _native.cuda_runtime(
            addresses, 0, self.version, self.handle(self.clock), self.anchor_s
        )  # type: ignore[arg-type]
        _KEPT.append(functions)  # native threads and marks may outlive this object
        return runtime

    def _guard(self, call: Callable[..., int | None], *arguments: object) -> int:
        try:
            return call(*arguments) or 0
        except Exception as error:
            self._message.value = str(error).encode()[:199]
            return 700

    def _stream(self, handle: int) -> FakeStream:
        return self.streams[handle - 1]

    def _setdevice(self, device: int) -> None:
        assert device == 0

    def _enqueue_copies(self, stream: FakeStream, copies: list[tuple[int, int, int]]) -> None:
        def work() -> None:
            for target, source, num_bytes in copies:
                ctypes.memmove(target, source, num_bytes)

        with self._lock:
            self.copies.append([num_bytes for _, _, num_bytes in copies])
            stream.steps.append(work)
            self._drift()

    def _memcpyasync(
        self, target: int, source: int, num_bytes: int, kind: int, stream: int
    ) -> None:
        assert kind == 4
        self._enqueue_copies(self._stream(stream), [(target, source, num_bytes)])

    def _memcpybatchasync(self, targets, sources, sizes, count, attributes, *rest) -> int:
        assert rest[1] == 1  # one set of attributes
        assert rest[0][0] == 0  # from the first copy on
        assert list(attributes[:6]) == [1, 0, 0, 0, 0, 0]
        if not self.has_batches:
            return 801
        assert len(rest) == (4 if self.version < 13000 else 3)
        rows = [(targets[i], sources[i], sizes[i]) for i in range(count)]
        self._enqueue_copies(self._stream(rest[-1]), rows)
        return 0

    def _eventcreatewithflags(self, handle, flags: int) -> None:
        assert flags == 1  # waiting sleeps, and times are kept
        with self._lock:
            handle[0] = len(self._handles) + 1
            self._handles[len(self._handles) + 1] = FakeEvent()

    def _eventdestroy(self, handle: int) -> None:
        pass

    def _eventrecord(self, handle: int, stream: int) -> None:
        with self._lock:
            self._handles[handle] = FakeEvent()  # streams may wait for what it was before
            self.record(self._handles[handle], self._stream(stream))

    def _eventsynchronize(self, handle: int) -> None:
        self.wait_event(self._handles[handle])

    def _eventquery(self, handle: int) -> int:
        return 0 if self.is_done(self._handles[handle]) else 600

    def _eventelapsedtime(self, milliseconds, start: int, end: int) -> None:
        milliseconds[0] = 1e3 * self.elapsed_s(self._handles[start], self._handles[end])

    def _streamwaitevent(self, stream: int, handle: int, flags: int) -> None:
        self.stream_wait(self._stream(stream), self._handles[handle])

    def _streamsynchronize(self, stream: int) -> None:
        self.wait_stream(self._stream(stream))

    def _geterrorstring(self, code: int) -> int:
        return ctypes.addressof(self._message)

    def new_event(self) -> FakeEvent:
        with self._lock:
            return FakeEvent()

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        with self._lock:
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
