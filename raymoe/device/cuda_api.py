"""The few CUDA calls that lanes, packets and pinned memory are made of; tests bring their own.

torch.cuda is used only inside the methods: importing this module works on a machine without CUDA.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, TypeVar

import torch
from torch import Tensor

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class CudaApi(Protocol[StreamT, EventT]):
    """Streams and events of one device. Thread-safe."""

    def thread_context(self) -> AbstractContextManager[object]:
        """What a thread enters before it uses the device."""

    def use(self, stream: StreamT) -> AbstractContextManager[object]:
        """Make `stream` the one to which the calling thread's work goes."""

    def new_stream(self) -> StreamT:
        """A stream that does not wait for the default stream."""

    def new_event(self) -> EventT:
        """An event with a time; who waits for it sleeps."""

    def record(self, event: EventT, stream: StreamT) -> None:
        """Let `event` happen when the stream has done what it was given so far."""

    def stream_wait(self, stream: StreamT, event: EventT) -> None:
        """Let later work of the stream wait for a recorded event; the host does not wait."""

    def is_done(self, event: EventT) -> bool:
        """Whether a recorded event has happened."""

    def wait_event(self, event: EventT) -> None:
        """Block the calling thread until a recorded event has happened."""

    def wait_stream(self, stream: StreamT) -> None:
        """Block the calling thread until the stream has done what it was given so far."""

    def elapsed_s(self, start: EventT, end: EventT) -> float:
        """Seconds between two events that have happened."""


class HostRegistrar(Protocol):
    """Page-locks host memory."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock a range; the reason if that is refused, with nothing left behind."""

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins at `address`."""


class CudaDriver(CudaApi[StreamT, EventT], HostRegistrar, Protocol[StreamT, EventT]):
    """All that a device is made of."""

    @property
    def device(self) -> torch.device:
        """Where torch finds the memory."""

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory, uint8."""

    def settle(self) -> None:
        """Block the calling thread until its default stream is done."""


class TorchCuda:
    """The calls as torch makes them, on the CUDA device `index`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def thread_context(self) -> AbstractContextManager[object]:
        """Current device and inference mode, both of which belong to a thread."""
        context = ExitStack()
        context.enter_context(torch.inference_mode())
        context.enter_context(torch.cuda.device(self.device))
        return context

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """See `CudaApi.use`."""
        return torch.cuda.stream(stream)

    def new_stream(self) -> torch.cuda.Stream:
        """See `CudaApi.new_stream`."""
        return torch.cuda.Stream(self.device)

    def new_event(self) -> torch.cuda.Event:
        """See `CudaApi.new_event`."""
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See `CudaApi.record`."""
        event.record(stream)

    def stream_wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `CudaApi.stream_wait`."""
        stream.wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        """See `CudaApi.is_done`."""
        return bool(event.query())

    def wait_event(self, event: torch.cuda.Event) -> None:
        """See `CudaApi.wait_event`."""
        event.synchronize()

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        """See `CudaApi.wait_stream`."""
        stream.synchronize()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `CudaApi.elapsed_s`."""
        return float(start.elapsed_time(end)) / 1e3

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """See `CudaDriver.allocate_pinned`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def settle(self) -> None:
        """See `CudaDriver.settle`."""
        torch.cuda.default_stream(self.device).synchronize()

    def register(self, address: int, num_bytes: int) -> str | None:
        """See `HostRegistrar.register`."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, PORTABLE))
        if code == 0:
            return None
        reason = str(torch.cuda.CudaError(code))
        self._forget_error()
        return reason

    def unregister(self, address: int) -> None:
        """See `HostRegistrar.unregister`."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def _forget_error(self) -> None:
        """Consume the error that the runtime keeps for the calling thread.

        torch's binding has no cudaGetLastError (proposed in pytorch/pytorch#165990), and the next
        kernel launch, wherever it is, would raise the error of the refused registration.
        """
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            return
