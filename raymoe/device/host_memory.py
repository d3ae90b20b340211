"""Host memory that a process maps for itself, on huge pages if the kernel allows."""

import contextlib
import mmap

import torch
from torch import Tensor

from raymoe.errors import CapacityError
from raymoe.units import MIB, format_bytes

HUGE_PAGE_BYTES = 2 * MIB


def map_memory(num_bytes: int) -> Tensor:
    """Map a zero-filled uint8 tensor, aligned to a page, and to a huge page if it is that large.

    The tensor owns the mapping through the buffer protocol. Physical memory is used from the first
    write to a page.

    Raises:
        CapacityError: The system refuses so much.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    is_huge = num_bytes >= HUGE_PAGE_BYTES
    length = num_bytes + (HUGE_PAGE_BYTES if is_huge else 0)
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"cannot map {format_bytes(length)} of host memory ({error}); reduce host_memory_bytes"
        ) from error
    if is_huge and hasattr(mmap, "MADV_HUGEPAGE"):
        # Kernels without transparent huge pages return EINVAL, which is harmless.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    padding = -memory.data_ptr() % HUGE_PAGE_BYTES if is_huge else 0
    return memory[padding : padding + num_bytes]
