"""The limits of this machine as the kernels meet them: memory read rate, arithmetic rate."""

from typing import Literal

from raymoe import _native
from raymoe.errors import ConfigError

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
