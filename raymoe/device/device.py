"""The protocol of a device, and the accounting of its memory."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from raymoe.device.lane import Lane
from raymoe.errors import CapacityError, ConfigError
from raymoe.schedule.graph import Op, Resource
from raymoe.schedule.timeline import LinkUse
from raymoe.units import ceil_div, format_bytes

ALIGNMENT = 256  # as cudaMalloc
T = TypeVar("T")


class MemoryLedger:
    """Adds up allocations by purpose and refuses those beyond the limit. Thread-safe."""

    def __init__(self, memory_bytes: int) -> None:
        if memory_bytes < 0:
            raise ConfigError(f"device memory is {memory_bytes} bytes; it cannot be negative")
        self.memory_bytes = memory_bytes
        self._bytes_of: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes allocated so far, each allocation rounded up to 256 bytes."""
        with self._lock:
            return sum(self._bytes_of.values())

    def take(self, num_bytes: int, purpose: str) -> None:
        """Account for an allocation.

        Raises:
            CapacityError: It does not fit; lists allocations by purpose, largest first.
        """
        if num_bytes < 0:
            raise ConfigError(f"{purpose}: {num_bytes} bytes asked; it cannot be negative")
        taken = ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT
        with self._lock:
            free_bytes = self.memory_bytes - sum(self._bytes_of.values())
            if taken > free_bytes:
                raise CapacityError(self._refusal(taken, free_bytes, purpose))
            self._bytes_of[purpose] = self._bytes_of.get(purpose, 0) + taken

    def table(self) -> str:
        with self._lock:
            return _table(self._rows())

    def _rows(self) -> list[tuple[str, int]]:
        return sorted(self._bytes_of.items(), key=lambda row: -row[1])

    def _refusal(self, taken: int, free_bytes: int, purpose: str) -> str:
        table = _table([*self._rows(), ("free", free_bytes), (f"{purpose} (asked)", taken)])
        return (
            f"device memory of {format_bytes(self.memory_bytes)} is "
            f"{format_bytes(taken - free_bytes)} short for {purpose}:\n{table}\n"
            "plan with smaller micro-batches, fewer resident weights or smaller pages, "
            "or give the device more memory"
        )


def _table(rows: list[tuple[str, int]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {format_bytes(size):>12}" for name, size in rows)


class Pinning(Protocol):
    """Page-locks host memory while the caller fills it from the begin on."""

    def filled(self, part: Tensor) -> None:
        """Say that the memory has its data up to the end of this part of it."""

    def wait(self) -> str | None:
        """Wait until all is page-locked; the reason if that is refused, with nothing locked."""


class NoPinning:
    """Memory that nobody has to page-lock."""

    def filled(self, part: Tensor) -> None:
        """Do nothing."""

    def wait(self) -> str | None:
        return None


class Device(Protocol):
    """Memory with a limit and the lanes on which a schedule runs; the device owns both."""

    @property
    def lanes(self) -> Mapping[Resource | Op, Lane]:
        """One lane for each resource, and for operations that have a lane of their own.

        None where tasks run in the thread that submits them.
        """

    @property
    def ledger(self) -> MemoryLedger:
        """Account of the device's memory."""

    @property
    def torch_device(self) -> torch.device:
        """Device of the tensors."""

    @property
    def poison(self) -> Callable[[Tensor], None] | None:
        """Overwrites device memory that is no longer read; None if its readers cannot be known."""

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Allocate device memory, uint8, uninitialised; `purpose` names it in errors.

        Raises:
            CapacityError: The device has not that much left; lists allocations.
        """

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Allocate page-locked host memory until `close`, uint8, for buffers copied in every step.

        Raises:
            CapacityError: It cannot be had or locked.
        """

    def pin(self, memory: Tensor) -> str | None:
        """Page-lock host memory until `close`; return the reason if that is refused."""

    def start_pinning(self, memory: Tensor) -> Pinning:
        """Page-lock host memory until `close`, in parts, while it is filled."""

    def prepare(self, num_bytes: int, compile_kernels: Callable[[], object]) -> None:
        """Reserve memory for allocations during steps, and compile kernels where steps run.

        Raises:
            CapacityError: There is not that much.
        """

    def memory_near(self) -> AbstractContextManager[None]:
        """Prefer the device's NUMA node for host pages that this thread makes meanwhile."""

    def bind(self, memory: Tensor) -> None:
        """Prefer the device's NUMA node for host memory that begins at a page and is not written.

        Warns with `PerformanceWarning`, once, if that is refused.
        """

    def compute(self, call: Callable[[], T]) -> T:
        """Call where the lane of computation does, after its tasks; return when all is done."""

    def computing(self) -> AbstractContextManager[object]:
        """Let the calling thread launch kernels in the stream of the lane of computation.

        The lane is idle meanwhile. Matrix products are for `compute`: torch keeps a workspace for
        each thread that makes any.
        """

    def synchronize(self) -> None:
        """Wait for the work that the calling thread itself has put on the device."""

    def traffic(self) -> Mapping[Resource, LinkUse]:
        """What has crossed the link so far, to the device and to the host."""

    def close(self) -> None:
        """Finish what was submitted, end the lanes and release memory; idempotent.

        Releases everything, and then raises the first error.
        """
