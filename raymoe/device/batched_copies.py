"""Many copies in one call of the CUDA runtime (cudaMemcpyBatchAsync, since CUDA 12.8), by ctypes.

torch has no binding of it. A call of its own for each run of KV blocks costs the host some
microseconds and the link a gap; one call for all of them costs neither.

Source: CUDA Runtime API, "Memory Management", cudaMemcpyBatchAsync; CUDA 13.0 dropped the argument
that says which copy failed.
"""

import ctypes
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

FIRST_VERSION, FIRST_WITHOUT_INDEX = 12080, 13000
IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
NOT_SUPPORTED = (36, 801)  # cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported

Int64s = npt.NDArray[np.int64]
Runs = tuple[tuple[int, int, int], ...]  # source row, target row, rows


class Pieces(NamedTuple):
    """Copies in bytes from the beginning of a source to that of a target."""

    sources: Int64s
    targets: Int64s
    sizes: Int64s


def cut_runs(runs: Runs, row_bytes: int, source_address: int, chunk_bytes: int) -> Pieces:
    """Runs of rows as pieces, none of which crosses an address where pinned ranges may meet.

    Args:
        runs: Source row, target row and number of rows of each.
        row_bytes: Bytes of a row.
        source_address: Of the first row of the source.
        chunk_bytes: Pinned ranges end at multiples of it.
    """
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
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaRuntime(Protocol):
    """The two functions of libcudart that are called here."""

    def cudaRuntimeGetVersion(self, version: object) -> int:  # noqa: N802 - CUDA's name
        """Write 12080 for 12.8."""

    def cudaMemcpyBatchAsync(self, *arguments: object) -> int:  # noqa: N802 - CUDA's name
        """Enqueue all copies."""


class BatchedCopies:
    """Enqueues copies between addresses, all in one call."""

    def __init__(self, runtime: CudaRuntime, version: int) -> None:
        """Use a runtime that has the function; `load` finds it."""
        self._runtime = runtime
        self._has_index = version < FIRST_WITHOUT_INDEX

    @classmethod
    def load(cls) -> Self | None:
        """Of the runtime that torch uses; None where that is older than 12.8 or not there."""
        if torch.version.cuda is None:
            return None
        try:
            library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        except OSError:  # linked into torch, so that there is nothing to call
            return None
        return cls.of(library)

    @classmethod
    def of(cls, runtime: CudaRuntime) -> Self | None:
        """Of a runtime, if it has the function."""
        version = ctypes.c_int()
        if runtime.cudaRuntimeGetVersion(ctypes.byref(version)) or version.value < FIRST_VERSION:
            return None
        return cls(runtime, version.value)

    def copy(self, addresses: Pieces, stream: int) -> bool:
        """Enqueue copies between pinned and device memory on a stream that is not the default.

        Args:
            addresses: Sources, targets and sizes of the copies.
            stream: Its handle.

        Returns:
            Whether the driver can; if not, nothing was enqueued.

        Raises:
            RuntimeError: It refused the copies.
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
