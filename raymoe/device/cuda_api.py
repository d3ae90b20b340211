"""The few CUDA calls that lanes and pinned memory use; tests replace them.

torch.cuda is used only inside methods, so this module imports on machines without CUDA.
"""

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from raymoe import _native
from raymoe.device.lane import ThreadContext, Worker, call_all
from raymoe.device.mover import CHUNK_BYTES
from raymoe.errors import ConfigError
from raymoe.units import format_bytes

logger = logging.getLogger(__name__)

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class CudaApi(Protocol[StreamT, EventT]):
    """Streams and events of one device. Thread-safe."""

    def thread_context(self) -> AbstractContextManager[object]:
        """Context that a thread enters before it uses the device."""

    def use(self, stream: StreamT) -> AbstractContextManager[object]:
        """Make `stream` the current stream of the calling thread."""

    def new_stream(self) -> StreamT:
        """Make a stream that does not wait for the default stream."""

    def handle(self, stream: StreamT) -> int:
        """The runtime's handle of a stream."""

    def open_runtime(self) -> _native.DeviceRuntime:
        """The calls by which native threads use the device."""

    def new_event(self) -> EventT:
        """Make a timed event; waiting for it sleeps."""

    def record(self, event: EventT, stream: StreamT) -> None:
        """Record `event` after all work in the stream so far."""

    def stream_wait(self, stream: StreamT, event: EventT) -> None:
        """Let later work of the stream wait for a recorded event; the host does not wait."""

    def is_done(self, event: EventT) -> bool:
        """Whether a recorded event has completed."""

    def wait_event(self, event: EventT) -> None:
        """Block the calling thread until a recorded event has completed."""

    def wait_stream(self, stream: StreamT) -> None:
        """Block the calling thread until the stream has done all work so far."""

    def elapsed_s(self, start: EventT, end: EventT) -> float:
        """Seconds between two completed events."""


class HostRegistrar(Protocol):
    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock a range; return the reason if that is refused, with nothing left locked."""

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins at `address`."""


class CudaDriver(CudaApi[StreamT, EventT], HostRegistrar, Protocol[StreamT, EventT]):
    """All calls that a device needs."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate device memory, uint8.

        Raises:
            torch.OutOfMemoryError: The device has not that much left.
        """

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory for allocations of this thread in its stream; raises like `allocate`."""

    def synchronize(self) -> None:
        """Block the calling thread until its current stream is done."""


CUDART_FUNCTIONS = (
    "cudaSetDevice", "cudaMemcpyAsync", "cudaEventCreateWithFlags", "cudaEventDestroy",
    "cudaEventRecord", "cudaEventSynchronize", "cudaEventQuery", "cudaEventElapsedTime",
    "cudaStreamWaitEvent", "cudaStreamSynchronize", "cudaGetErrorString",
)  # fmt: skip
# Event times are float32 milliseconds since an anchor: after a minute they are exact to 4 us.
ANCHOR_S = 60.0
FIRST_WITH_BATCHES = 12080  # cudaMemcpyBatchAsync


def load_cudart() -> ctypes.CDLL:
    """Load the CUDA runtime that torch uses; it is in the process already where torch has CUDA.

    Raises:
        ConfigError: There is none.
    """
    major = (torch.version.cuda or "").split(".")[0]
    packages = Path(torch.__file__).parent.parent / "nvidia"
    found = sorted(packages.glob(f"*/lib/libcudart.so.{major}")) if major else []
    for name in (f"libcudart.so.{major}", *map(str, found), "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(
        f"libcudart.so.{major} was not found, which copies weights to the GPU: pip install "
        f"nvidia-cuda-runtime-cu{major}, or add the lib64 of CUDA to LD_LIBRARY_PATH"
    )


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


class TorchCuda:
    """The calls as torch makes them, on the CUDA device `index`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._clock = self.new_stream()

    def thread_context(self) -> AbstractContextManager[object]:
        """Set the current device and inference mode, which both belong to a thread."""
        context = ExitStack()
        context.enter_context(torch.inference_mode())
        context.enter_context(torch.cuda.device(self.device))
        return context

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def handle(self, stream: torch.cuda.Stream) -> int:
        return int(stream.cuda_stream)

    def open_runtime(self) -> _native.DeviceRuntime:
        library = load_cudart()
        version = ctypes.c_int()
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        functions = {name: _address(library, name) for name in CUDART_FUNCTIONS}
        if version.value >= FIRST_WITH_BATCHES:
            functions["cudaMemcpyBatchAsync"] = _address(library, "cudaMemcpyBatchAsync")
        return _native.cuda_runtime(
            functions, self.device.index, version.value, self.handle(self._clock), ANCHOR_S
        )

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def stream_wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def wait_event(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    @property
    def pci_address(self) -> str:
        """Return the address of the GPU in sysfs; empty if torch does not know it."""
        gpu = torch.cuda.get_device_properties(self.device)
        domain, bus, slot = (
            int(getattr(gpu, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")
        )
        return "" if min(domain, bus, slot) < 0 else f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    def limit_memory(self, num_bytes: int | None) -> None:
        """Limit torch's allocator in this process; None removes the limit."""
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        fraction = 1.0 if num_bytes is None else min(num_bytes / total_bytes, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def reserve(self, num_bytes: int) -> None:
        """Allocate and free one piece in the current stream.

        torch keeps it for later allocations in that stream, so that no step calls cudaMalloc. From
        the first product of a thread in a stream on, torch keeps a workspace for cuBLAS too: a
        product before gives it memory of its own, so that it does not split the piece.
        """
        square = torch.ones(16, 16, dtype=torch.float16, device=self.device)
        torch.mm(square, square)
        torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def register(self, address: int, num_bytes: int) -> str | None:
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, PORTABLE))
        if code == 0:
            return None
        reason = str(torch.cuda.CudaError(code))
        self._forget_error()
        return reason

    def unregister(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    def _forget_error(self) -> None:
        """Consume the error that the runtime keeps for the calling thread.

        torch's binding has no cudaGetLastError (proposed in pytorch/pytorch#165990), and the next
        kernel launch anywhere would raise the error of the refused registration.
        """
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            return


HOST_PAGE_BYTES = 4096


def cut(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    while begin < end:
        stop = min(end, begin - begin % step + step)
        yield begin, stop
        begin = stop


class PinnedMemory:
    """The registrations of one host tensor; `close` it before the memory is freed."""

    def __init__(self, memory: Tensor, registrar: HostRegistrar) -> None:
        self.memory = memory
        self._registrar = registrar
        self._addresses: list[int] = []
        self._next = memory.data_ptr()  # what lies before it is registered
        self._reason: str | None = None
        self.seconds = 0.0

    def register(
        self, *, filled_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> str | None:
        """Register all of the tensor, or nothing; return the reason if that is refused.

        Registers in chunks: one call for a large arena needs all of it at once, and its refusal
        would not say how much would have fitted.

        Args:
            filled_bytes: Register only whole chunks within the first so many bytes; a later call
                goes on behind them.
        """
        start_s = time.perf_counter()
        begin, num_bytes = self.memory.data_ptr(), self.memory.nbytes
        if begin % HOST_PAGE_BYTES or not self.memory.is_contiguous():
            raise ConfigError("only memory in one piece that begins at a page can be pinned")
        filled = begin + (num_bytes if filled_bytes is None else filled_bytes)
        for address, end in cut(self._next, begin + num_bytes, chunk_bytes):
            if self._reason is not None or end > filled:
                break
            reason = self._registrar.register(address, end - address)
            if reason is not None:
                self.close()
                done = f"{format_bytes(address - begin)} of {format_bytes(num_bytes)}"
                self._reason = f"{reason} after {done}"
                break
            self._addresses.append(address)
            self._next = end
        self.seconds += time.perf_counter() - start_s
        return self._reason

    def holds(self, tensor: Tensor) -> bool:
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset >= 0 and offset + tensor.nbytes <= self.memory.nbytes

    def close(self) -> None:
        """Unregister all ranges, then raise the first refusal."""
        addresses, self._addresses = self._addresses, []
        call_all([partial(self._registrar.unregister, address) for address in addresses])


class PinningThread:
    """Page-locks host memory in a thread of its own, while another fills it from the begin on."""

    def __init__(
        self,
        memory: Tensor,
        registrar: HostRegistrar,
        context: ThreadContext,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Start the thread, which stays in `context` and locks chunk by chunk."""
        self._pinned, self._chunk_bytes = PinnedMemory(memory, registrar), chunk_bytes
        self._worker = Worker("raymoe-pinning", context)
        self._reason: str | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def filled(self, part: Tensor) -> None:
        """Say that the memory has its data up to the end of this part of it."""
        filled_bytes = part.data_ptr() + part.nbytes - self._pinned.memory.data_ptr()
        self._worker.put(partial(self._register, filled_bytes))

    def wait(self) -> str | None:
        """Wait until all is page-locked; the reason if that was refused, and nothing is locked.

        Called once.
        """
        start_s = time.perf_counter()
        self._worker.put(partial(self._register, None))
        self._worker.close()
        if self._error is not None:
            raise self._error
        if self._reason is None:
            logger.info(
                "pinned %s in %.1f s, and waited %.1f s for it",
                format_bytes(self._pinned.memory.nbytes),
                self._pinned.seconds,
                time.perf_counter() - start_s,
            )
        return self._reason

    def close(self) -> None:
        """End the thread, and unregister all."""
        self._is_over = True
        self._worker.close()
        self._pinned.close()

    def _register(self, filled_bytes: int | None) -> None:
        if self._is_over:
            return
        try:
            self._reason = self._pinned.register(
                filled_bytes=filled_bytes, chunk_bytes=self._chunk_bytes
            )
        except BaseException as error:  # whoever waits gets it
            self._error, self._is_over = error, True
