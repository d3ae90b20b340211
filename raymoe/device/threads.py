"""Threads of this process, and what its cores reach."""

import functools
import os
import platform
from typing import Literal

import torch

from raymoe import _native
from raymoe.device.host import read_host
from raymoe.errors import ConfigError
from raymoe.specs.hardware import HardwareSpec


def set_num_threads(num_threads: int, num_torch_threads: int | None = None) -> None:
    """Let the native kernels and torch use this many threads.

    Torch keeps the number for each thread of Python: call this in the thread that computes.
    """
    _forget_threads_in_forks()
    torch.set_num_threads(num_torch_threads or num_threads)
    if _native.num_threads() != num_threads:
        _native.set_num_threads(num_threads)


@functools.cache
def _forget_threads_in_forks() -> None:
    """Let a fork end: torch joins threads that are not there unless it is asked for its pool."""
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


ProbeDtype = Literal["bfloat16", "float32", "int8"]
PROBE_DTYPES = ("bfloat16", "float32", "int8")


def read_bandwidth_bytes_per_s(
    num_threads: int, seconds: float = 1.0, num_bytes: int = 1 << 28
) -> float:
    """Best rate at which `num_threads` read `num_bytes` of host memory on huge pages.

    Several access patterns share the time: one stream per thread with and without prefetch, four
    and sixteen streams. `num_bytes` must exceed the last-level cache by far.
    """
    _check(num_threads, seconds)
    return _native.read_bandwidth_bytes_per_s(num_threads, seconds, num_bytes)


def peak_flop_per_s(
    num_threads: int, dtype: ProbeDtype = "bfloat16", seconds: float = 0.5
) -> float:
    """Best arithmetic rate from registers, two operations for each multiply-add.

    With the active instruction set; where that has no dot products for `dtype`, the rate of
    float32, to which the kernels then convert.
    """
    _check(num_threads, seconds)
    if dtype not in PROBE_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {PROBE_DTYPES}")
    return _native.peak_flop_per_s(num_threads, seconds, dtype)


def has_bfloat16_dot_products() -> bool:
    """Whether the active instruction set multiplies bfloat16 without converting."""
    return _native.active_isa() == "avx512_bf16"


def _check(num_threads: int, seconds: float) -> None:
    if num_threads < 1 or not seconds > 0:
        raise ConfigError(f"probe: num_threads is {num_threads}, seconds is {seconds}; need > 0")


def probe_host(*, num_threads: int | None = None, seconds: float = 2.0) -> HardwareSpec:
    """Measure this machine with `num_threads` threads in about `seconds`.

    Args:
        num_threads: Threads to measure with; None for all cores that this process may use.
        seconds: Shared by the two measurements.
    """
    host = read_host()
    threads = host.num_cores if num_threads is None else num_threads
    return HardwareSpec(
        name=platform.node() or "this machine",
        num_cores=threads,
        host_memory_bytes=host.available_memory_bytes,
        host_bytes_per_s=read_bandwidth_bytes_per_s(threads, seconds / 2),
        host_flop_per_s=peak_flop_per_s(threads, "bfloat16", seconds / 2),
    )
