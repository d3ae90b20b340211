"""The few CUDA calls that lanes, packets and pinned memory are made of; tests bring their own.

torch.cuda is used only inside the methods: importing this module works on a machine without CUDA.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from raymoe.device.batched_copies import BatchedCopies, Pieces

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


def copy_one_by_one(target: Tensor, source: Tensor, pieces: Pieces) -> None:
    """Enqueue each piece by itself on the current stream."""
    sink, data = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    for begin, into, size in zip(*(each.tolist() for each in pieces), strict=True):
        sink[into : into + size].copy_(data[begin : begin + size], non_blocking=True)


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

    def allocate(self, num_bytes: int) -> Tensor:
        """Device memory, uint8.

        Raises:
            torch.OutOfMemoryError: The device has not that much left.
        """

    def reserve(self, num_bytes: int, stream: StreamT) -> None:
        """Have memory for what operations on a stream allocate; errors as `allocate`."""

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory, uint8."""

    def copy_batch(self, target: Tensor, source: Tensor, pieces: Pieces, stream: StreamT) -> None:
        """Enqueue copies from pinned memory to the device, in as few calls as there can be.

        Args:
            target: On the device; in one piece, as is the source.
            source: Pinned.
            pieces: Where in them, in bytes.
            stream: On which.
        """

    def settle(self) -> None:
        """Block the calling thread until its default stream is done."""


class TorchCuda:
    """The calls as torch makes them, on the CUDA device `index`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._batches = BatchedCopies.load()

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

    @property
    def pci_address(self) -> str:
        """Of the GPU, as sysfs has it; empty where torch does not say."""
        gpu = torch.cuda.get_device_properties(self.device)
        domain, bus, slot = (
            int(getattr(gpu, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")
        )
        return "" if min(domain, bus, slot) < 0 else f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    def limit_memory(self, num_bytes: int | None) -> None:
        """Let torch's allocator take no more than this of the GPU in this process; None: all."""
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        fraction = 1.0 if num_bytes is None else min(num_bytes / total_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def allocate(self, num_bytes: int) -> Tensor:
        """See `CudaDriver.allocate`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def reserve(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """See `CudaDriver.reserve`.

        torch keeps what is freed for the stream that used it, and gives parts of it to whoever
        allocates there: one piece of all of it now, and no pass asks CUDA for more.
        """
        with self.use(stream):
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """See `CudaDriver.allocate_pinned`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_batch(
        self, target: Tensor, source: Tensor, pieces: Pieces, stream: torch.cuda.Stream
    ) -> None:
        """See `CudaDriver.copy_batch`; one by one where the runtime or the driver is too old."""
        if self._batches is not None:
            addresses = Pieces(
                pieces.sources + source.data_ptr(), pieces.targets + target.data_ptr(), pieces.sizes
            )
            if self._batches.copy(addresses, stream.cuda_stream):
                return
            self._batches = None
        with self.use(stream):
            copy_one_by_one(target, source, pieces)

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
