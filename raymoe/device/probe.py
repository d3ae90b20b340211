"""Measure what this machine can do, as a `HardwareSpec`."""

import platform

from raymoe.device.host import read_host
from raymoe.kernels.cpu_probe import peak_flop_per_s, read_bandwidth_bytes_per_s
from raymoe.specs.hardware import HardwareSpec


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
