"""Page-lock host memory that exists already, in chunks."""

import resource
import time
from collections.abc import Iterator

from torch import Tensor

from raymoe.device.cuda_api import HostRegistrar
from raymoe.errors import ConfigError
from raymoe.units import GIB, format_bytes

# A copy that crosses from one registered range into the next is refused by the driver, so chunks
# end at addresses that are multiples of their size, where copies are cut as well.
CHUNK_BYTES = GIB
HOST_PAGE_BYTES = 4096


def cut(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) at the multiples of `step`."""
    while begin < end:
        stop = min(end, begin - begin % step + step)
        yield begin, stop
        begin = stop


class PinnedMemory:
    """Owns the registrations of one host tensor; `close` before its memory goes.

    Attributes:
        memory: The tensor.
        seconds: How long registering took.
    """

    def __init__(self, memory: Tensor, registrar: HostRegistrar) -> None:
        self.memory = memory
        self._registrar = registrar
        self._addresses: list[int] = []
        self.seconds = 0.0

    def register(self, *, chunk_bytes: int = CHUNK_BYTES) -> str | None:
        """Register all of the tensor; the reason if that is refused, with nothing left registered.

        Chunk by chunk, because one call for all of a large arena needs all of it at once, and
        because its refusal would not say how much there was room for.

        Raises:
            ConfigError: The tensor does not begin at a page of host memory, or is not in one piece.
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
        """Whether a tensor lies in this memory."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset >= 0 and offset + tensor.nbytes <= self.memory.nbytes

    def close(self) -> None:
        """Undo the registrations; may be called again."""
        while self._addresses:
            self._registrar.unregister(self._addresses.pop())


def _limit() -> str:
    """The limit of locked memory of this process, for a message; nothing where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"; locked memory is limited to {format_bytes(soft)} (ulimit -l)"
