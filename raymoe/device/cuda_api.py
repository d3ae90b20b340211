"""The few CUDA calls that lanes, packets and pinned memory use; tests replace them.

torch.cuda is used only inside methods, so this module imports on machines without CUDA.
"""

import ctypes
import resource
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.units import GIB, MIB, format_bytes

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


Int64s = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Sources, targets and sizes of copies, in bytes."""

    sources: Int64s
    targets: Int64s
    sizes: Int64s


def copy_one_by_one(target: Tensor, source: Tensor, pieces: Pieces) -> None:
    target_bytes, data = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
    for begin, into, size in zip(*(each.tolist() for each in pieces), strict=True):
        target_bytes[into : into + size].copy_(data[begin : begin + size], non_blocking=True)


class CudaApi(Protocol[StreamT, EventT]):
    """Streams and events of one device. Thread-safe."""

    def thread_context(self) -> AbstractContextManager[object]:
        """Context that a thread enters before it uses the device."""

    def use(self, stream: StreamT) -> AbstractContextManager[object]:
        """Make `stream` the current stream of the calling thread."""

    def new_stream(self) -> StreamT:
        """Make a stream that does not wait for the default stream."""

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

    def reserve(self, num_bytes: int, stream: StreamT) -> None:
        """Reserve memory for allocations by operations on a stream; raises like `allocate`."""

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Allocate page-locked host memory, uint8."""

    def copy_batch(self, target: Tensor, source: Tensor, pieces: Pieces, stream: StreamT) -> None:
        """Enqueue copies between contiguous pinned and device memory, in few calls."""

    def synchronize(self) -> None:
        """Block the calling thread until its default stream is done."""


class TorchCuda:
    """The calls as torch makes them, on the CUDA device `index`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._batches = BatchedCopies.load()

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

    def reserve(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Allocate and free one piece on the stream.

        torch keeps it for later allocations on that stream, so that no step calls cudaMalloc.
        """
        with self.use(stream):
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_batch(
        self, target: Tensor, source: Tensor, pieces: Pieces, stream: torch.cuda.Stream
    ) -> None:
        if self._batches is not None:
            addresses = Pieces(
                pieces.sources + source.data_ptr(), pieces.targets + target.data_ptr(), pieces.sizes
            )
            if self._batches.copy(addresses, stream.cuda_stream):
                return
            self._batches = None
        with self.use(stream):
            copy_one_by_one(target, source, pieces)

    def synchronize(self) -> None:
        torch.cuda.default_stream(self.device).synchronize()

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


# The driver refuses a copy that crosses from one registered range into the next. So chunks end at
# addresses that are multiples of their size, and copies are cut there too.
CHUNK_BYTES = GIB
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
        self.seconds = 0.0

    def register(self, *, chunk_bytes: int = CHUNK_BYTES) -> str | None:
        """Register all of the tensor, or nothing; return the reason if that is refused.

        Registers in chunks: one call for a large arena needs all of it at once, and its refusal
        would not say how much would have fitted.
        """
        start_s = time.perf_counter()
        begin, num_bytes = self.memory.data_ptr(), self.memory.nbytes
        if begin % HOST_PAGE_BYTES or not self.memory.is_contiguous():
            raise ConfigError("only memory in one piece that begins at a page can be pinned")
        for address, end in cut(begin, begin + num_bytes, chunk_bytes):
            reason = self._registrar.register(address, end - address)
            if reason is not None:
                self.close()
                done = f"{format_bytes(address - begin)} of {format_bytes(num_bytes)}"
                return f"{reason} after {done}{_limit()}"
            self._addresses.append(address)
        self.seconds = time.perf_counter() - start_s
        return None

    def holds(self, tensor: Tensor) -> bool:
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset >= 0 and offset + tensor.nbytes <= self.memory.nbytes

    def close(self) -> None:
        while self._addresses:
            self._registrar.unregister(self._addresses.pop())


def _limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"; locked memory is limited to {format_bytes(soft)} (ulimit -l)"


FIRST_VERSION, FIRST_WITHOUT_INDEX = 12080, 13000
IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
NOT_SUPPORTED = (36, 801)  # cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported

Runs = tuple[tuple[int, int, int], ...]  # source row, target row, rows


def cut_runs(runs: Runs, row_bytes: int, source_address: int, chunk_bytes: int) -> Pieces:
    """Cut runs of rows at multiples of `chunk_bytes`, where pinned ranges meet."""
    sources, targets, counts = np.array(runs, np.int64).reshape(-1, 3).T
    begins, sizes = sources * row_bytes + source_address, counts * row_bytes
    num_pieces = (begins + sizes - 1) // chunk_bytes - begins // chunk_bytes + 1
    run = np.repeat(np.arange(len(sizes)), num_pieces)
    nth = np.arange(len(run)) - (np.cumsum(num_pieces) - num_pieces)[run]
    chunk = (begins[run] // chunk_bytes + nth) * chunk_bytes
    first = np.maximum(begins[run], chunk)
    last = np.minimum((begins + sizes)[run], chunk + chunk_bytes)
    offset = first - begins[run]
    return Pieces(first - source_address, targets[run] * row_bytes + offset, last - first)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaRuntime(Protocol):
    """The libcudart functions in use."""

    def cudaRuntimeGetVersion(self, version: object) -> int:  # noqa: N802 - CUDA's name
        """Write 12080 for 12.8."""

    def cudaMemcpyBatchAsync(self, *arguments: object) -> int:  # noqa: N802 - CUDA's name
        """Enqueue all copies."""


class BatchedCopies:
    """Enqueues any number of copies between addresses in one call."""

    def __init__(self, runtime: CudaRuntime, version: int) -> None:
        self._runtime = runtime
        self._has_index = version < FIRST_WITHOUT_INDEX

    @classmethod
    def load(cls) -> Self | None:
        """Load from torch's runtime; None if it is missing or older than 12.8."""
        if torch.version.cuda is None:
            return None
        try:
            library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        except OSError:  # statically linked into torch, so that nothing can be called
            return None
        return cls.of(library)

    @classmethod
    def of(cls, runtime: CudaRuntime) -> Self | None:
        version = ctypes.c_int()
        if runtime.cudaRuntimeGetVersion(ctypes.byref(version)) or version.value < FIRST_VERSION:
            return None
        return cls(runtime, version.value)

    def copy(self, addresses: Pieces, stream: int) -> bool:
        """Enqueue copies between pinned and device memory on a stream that is not the default.

        Returns False, with nothing enqueued, if the driver does not support it.

        Raises:
            RuntimeError: The driver refused the copies.
        """
        count = len(addresses.sizes)
        sources, targets, sizes = (np.ascontiguousarray(each, np.int64) for each in addresses)
        attributes = _Attributes(src_access_order=IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._runtime.cudaMemcpyBatchAsync(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *([ctypes.byref(failed)] if self._has_index else []),
            ctypes.c_void_p(stream),
        )
        if code in NOT_SUPPORTED:
            return False
        if code:
            raise RuntimeError(f"cudaMemcpyBatchAsync refused {count} copies: CUDA error {code}")
        return True


# 16 MiB take 0.7 to 1.4 ms at 12 to 25 GB/s, which is the longest wait of a small copy. The 20 us
# until the host has sent the next packet then cost 1 to 3 % of the link.
PACKET_BYTES = 16 * MIB


class PacketCopier(Generic[StreamT, EventT]):
    """Copies on one stream with at most one packet in flight; used by the lane's thread alone.

    A copy engine serves its streams in turn and never interrupts a copy: with one packet in flight,
    a copy on another stream starts next.
    """

    def __init__(
        self,
        api: CudaApi[StreamT, EventT],
        stream: StreamT,
        *,
        packet_bytes: int = PACKET_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Set the sizes; no copy crosses a source address that is a multiple of `chunk_bytes`."""
        if packet_bytes <= 0 or chunk_bytes <= 0:
            raise ConfigError(
                f"packets of {packet_bytes}, chunks of {chunk_bytes} bytes: too small"
            )
        self._api = api
        self._stream = stream
        self._packet_bytes = packet_bytes
        self._chunk_bytes = chunk_bytes
        self._in_flight: EventT | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy contiguous `source` to `target` of equal bytes.

        Returns when the last packet is in flight; later work on the stream runs after it.
        """
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ConfigError("source and target must be in one piece")
        if target.nbytes != source.nbytes:
            raise ConfigError(f"cannot copy {source.nbytes} bytes to {target.nbytes} bytes")
        target_bytes, data = _as_bytes(target), _as_bytes(source)
        origin = data.data_ptr()
        for chunk_begin, chunk_end in cut(origin, origin + data.numel(), self._chunk_bytes):
            for begin in range(chunk_begin - origin, chunk_end - origin, self._packet_bytes):
                end = min(begin + self._packet_bytes, chunk_end - origin)
                self._send(target_bytes[begin:end], data[begin:end])

    def _send(self, target: Tensor, source: Tensor) -> None:
        if self._in_flight is not None:
            self._api.wait_event(self._in_flight)
        with self._api.use(self._stream):
            target.copy_(source, non_blocking=True)
        self._in_flight = self._api.new_event()
        self._api.record(self._in_flight, self._stream)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
