"""One large region of host memory on huge pages, allocated piecewise and freed as a whole."""

import threading

from torch import Tensor

from raymoe.device.device import NoPinning, Pinning
from raymoe.device.host_memory import HUGE_PAGE_BYTES, map_memory
from raymoe.errors import CapacityError, ConfigError, ExecutionError
from raymoe.memory.shared_file import SharedFile
from raymoe.units import ceil_div, format_bytes

ALIGNMENT = 64


def aligned_bytes(num_bytes: int) -> int:
    return ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT


class HostArena:
    """Anonymous memory of fixed size, zero until written, on huge pages if the kernel allows.

    It holds packed weights and KV blocks in one mapping: one `madvise` asks for huge pages, and a
    page-table walk covers 2 MiB instead of 4 KiB. Physical memory is used from the first write to a
    page. Thread-safe.

    Attributes:
        num_bytes: Size of the arena; the sum of `aligned_bytes` of all requests must fit.
        is_filled: Whether allocations already hold their data.
        pinning: Page-locks the memory while it is filled; whoever made the arena sets it.
    """

    is_filled = False
    pinning: Pinning = NoPinning()

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 0:
            raise ConfigError(f"arena size is {num_bytes} bytes; it cannot be negative")
        self.num_bytes = aligned_bytes(num_bytes)
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._memory: Tensor | None = self._map(self.num_bytes)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def memory(self) -> Tensor:
        """The whole arena, uint8."""
        with self._lock:
            return self._open_memory()

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate a zero-filled uint8 tensor, aligned to 64 bytes."""
        with self._lock:
            memory = self._open_memory()
            begin, taken = self._used_bytes, aligned_bytes(num_bytes)
            if num_bytes < 0 or begin + taken > self.num_bytes:
                raise CapacityError(
                    f"arena of {format_bytes(self.num_bytes)} has "
                    f"{format_bytes(self.num_bytes - begin)} free, "
                    f"{format_bytes(num_bytes)} asked; "
                    "create it with the sum of all requests, each rounded up to 64 bytes"
                )
            self._used_bytes = begin + taken
            return memory[begin : begin + num_bytes]

    def seal(self) -> None:
        """Mark the arena as filled; only a shared arena needs it."""

    def _map(self, num_bytes: int) -> Tensor:
        return map_memory(num_bytes)

    def _open_memory(self) -> Tensor:
        if self._memory is None:
            raise CapacityError("the arena is closed; allocate before close()")
        return self._memory

    def close(self) -> None:
        """Refuse further requests; the memory is freed with the last tensor of the arena."""
        with self._lock:
            self._memory = None


class ReusedMemory:
    """Host memory for the arenas of one engine after another, so that its pages are made once.

    An arena may hold what the engine before it wrote.
    """

    def __init__(self, num_bytes: int) -> None:
        """Map the memory; pages are made by the first write."""
        self._memory = map_memory(num_bytes)
        self._used_bytes = 0

    def arena(self, num_bytes: int) -> HostArena:
        """The next part as an arena; new memory if the rest is too small."""
        begin, length = self._used_bytes, aligned_bytes(num_bytes)
        if begin + length > self._memory.nbytes:
            return HostArena(num_bytes)
        self._used_bytes = begin + HUGE_PAGE_BYTES * ceil_div(length, HUGE_PAGE_BYTES)
        return _PartArena(num_bytes, self._memory[begin : begin + length])

    def restart(self) -> None:
        """Begin again; no arena may be in use."""
        self._used_bytes = 0


class _PartArena(HostArena):
    def __init__(self, num_bytes: int, part: Tensor) -> None:
        self._part = part
        super().__init__(num_bytes)

    def _map(self, num_bytes: int) -> Tensor:
        assert num_bytes == self._part.nbytes
        return self._part


class SharedArena(HostArena):
    """An arena that several processes map; allocations in the same order have the same places.

    The first process fills it and calls `seal`; for the others it `is_filled` and read-only.
    """

    def __init__(
        self, num_bytes: int, file: SharedFile, note: bytes, *, is_writable: bool = False
    ) -> None:
        """Map the memory.

        Args:
            file: Filled, or to be filled with `num_bytes`.
            note: Data for the other processes, if this one fills the file.
            is_writable: Map it as writable, which drivers need for pinning.
        """
        self._file, self._note, self._is_writable = file, note, is_writable
        self.is_filled = file.is_whole
        super().__init__(num_bytes)

    def seal(self) -> None:
        if not self.is_filled:
            self._file.publish(self._note, is_writable=self._is_writable)
            self.is_filled = True

    def close(self) -> None:
        super().close()
        self._file.close()

    def _map(self, num_bytes: int) -> Tensor:
        if not self.is_filled:
            return self._file.create(num_bytes)
        if self._file.num_bytes != aligned_bytes(num_bytes):
            raise ExecutionError(
                f"weights that other processes share have {format_bytes(self._file.num_bytes)}, "
                f"{format_bytes(num_bytes)} are expected; set shared_weights=False"
            )
        return self._file.memory(is_writable=self._is_writable)
