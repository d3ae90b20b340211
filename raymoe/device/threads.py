"""Threads and huge pages of this process, and measurements of its cores."""

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from raymoe import _native
from raymoe.device.host import read_host
from raymoe.errors import ConfigError
from raymoe.specs.hardware import HardwareSpec


def _use_huge_pages() -> None:
    """Have torch put large tensors on huge pages, unless the user's environment decides.

    Results of large prompt steps are new memory each: on huge pages a step has a tenth of the page
    faults. torch reads the variable once, at its first allocation, and nothing else may see it.
    """
    variables = os.environ  # noqa: TID251 - of torch, no setting of ours
    if _HUGE_PAGES not in variables:
        variables[_HUGE_PAGES] = "1"
        torch.empty(1, device="cpu")
        del variables[_HUGE_PAGES]


_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_use_huge_pages()  # before any weight is read


def set_num_threads(num_threads: int, num_torch_threads: int | None = None) -> None:
    """Set the number of threads of the native kernels and of torch.

    torch keeps its number per Python thread: call this in the thread that computes.
    """
    _forget_threads_in_forks()
    torch.set_num_threads(num_torch_threads or num_threads)
    if _native.num_threads() != num_threads:
        _native.set_num_threads(num_threads)


@contextmanager
def torch_on_all_cores() -> Iterator[None]:
    """Let torch use the threads of the native kernels, in this Python thread; for large copies."""
    before = torch.get_num_threads()
    torch.set_num_threads(_native.num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _forget_threads_in_forks() -> None:
    """Reset torch's pool in forked children, whose exit would join threads that they lack."""
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


ProbeDtype = Literal["bfloat16", "float32", "int8"]
PROBE_DTYPES = ("bfloat16", "float32", "int8")


def read_bandwidth_bytes_per_s(
    num_threads: int, seconds: float = 1.0, num_bytes: int = 1 << 28
) -> float:
    """Return the best rate at which threads read `num_bytes` of host memory on huge pages.

    The time is divided among several access patterns: one stream per thread with and without
    prefetch, four and sixteen streams. `num_bytes` must exceed the last-level cache by far.
    """
    _check(num_threads, seconds)
    return _native.read_bandwidth_bytes_per_s(num_threads, seconds, num_bytes)


def update_bandwidth_bytes_per_s(
    num_threads: int, seconds: float = 1.0, num_bytes: int = 1 << 28
) -> float:
    """Return the best rate, reads and writes together, of scaling host memory in place."""
    _check(num_threads, seconds)
    return _native.update_bandwidth_bytes_per_s(num_threads, seconds, num_bytes)


def peak_flop_per_s(
    num_threads: int, dtype: ProbeDtype = "bfloat16", seconds: float = 0.5
) -> float:
    """Return the best arithmetic rate from registers; a multiply-add counts as two operations.

    If the active instruction set has no dot products for `dtype`, this is the rate of float32, to
    which the kernels then convert.
    """
    _check(num_threads, seconds)
    if dtype not in PROBE_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {PROBE_DTYPES}")
    return _native.peak_flop_per_s(num_threads, seconds, dtype)


def has_bfloat16_dot_products() -> bool:
    return _native.active_isa() == "avx512_bf16"


def _check(num_threads: int, seconds: float) -> None:
    if num_threads < 1 or not seconds > 0:
        raise ConfigError(f"probe: num_threads is {num_threads}, seconds is {seconds}; need > 0")


def probe_host(*, num_threads: int | None = None, seconds: float = 2.0) -> HardwareSpec:
    host = read_host()
    threads = host.num_cores if num_threads is None else num_threads
    return HardwareSpec(
        name=platform.node() or "this machine",
        num_cores=threads,
        host_memory_bytes=host.available_memory_bytes,
        host_bytes_per_s=read_bandwidth_bytes_per_s(threads, seconds / 2),
        host_flop_per_s=peak_flop_per_s(threads, "bfloat16", seconds / 2),
    )
