"""Probes give plausible rates on every instruction set; they are not exact on a busy machine."""

import pytest

from raymoe import _native
from raymoe.device.threads import (
    PROBE_DTYPES,
    ProbeDtype,
    has_bfloat16_dot_products,
    peak_flop_per_s,
    probe_host,
    read_bandwidth_bytes_per_s,
    update_bandwidth_bytes_per_s,
)
from raymoe.errors import ConfigError


def test_memory_has_plausible_rates(isa: str) -> None:
    for measure in (read_bandwidth_bytes_per_s, update_bandwidth_bytes_per_s):
        rate = measure(1, 0.04, 1 << 24)
        assert 1e8 < rate < 2e12


@pytest.mark.parametrize("dtype", PROBE_DTYPES)
def test_arithmetic_has_a_plausible_rate(isa: str, dtype: ProbeDtype) -> None:
    lanes = {"scalar": 1, "avx2": 8, "avx512": 16, "avx512_bf16": 16}[isa]
    dots = {"bfloat16": 2, "float32": 1, "int8": 4}[dtype]
    rate = peak_flop_per_s(1, dtype, 0.02)
    fastest = 2 * 2 * lanes * dots * 7e9  # two units, two operations, a clock of 7 GHz
    assert 5e7 < rate < fastest


def test_bfloat16_dot_products_double_the_rate_of_float32() -> None:
    if "avx512_bf16" not in _native.supported_isas():
        pytest.skip("this processor has no bfloat16 dot products")
    before = _native.active_isa()
    _native.set_isa("avx512_bf16")
    assert has_bfloat16_dot_products()
    ratio = peak_flop_per_s(1, "bfloat16", 0.1) / peak_flop_per_s(1, "float32", 0.1)
    _native.set_isa("scalar")
    assert not has_bfloat16_dot_products()
    _native.set_isa(before)
    assert 1.3 < ratio < 3


def test_the_host_is_measured_as_a_hardware_spec() -> None:
    spec = probe_host(num_threads=1, seconds=0.1)
    assert spec.num_cores == 1
    assert spec.host_bytes_per_s > 1e8
    assert spec.host_flop_per_s > 5e7


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads is 0"):
        read_bandwidth_bytes_per_s(0)
    with pytest.raises(ConfigError, match="dtype 'int4' is not one of"):
        peak_flop_per_s(1, "int4")  # type: ignore[arg-type] - that is the test
    with pytest.raises(ValueError, match="64 bytes are too few to read"):
        read_bandwidth_bytes_per_s(1, 0.1, 64)
