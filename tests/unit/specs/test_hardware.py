"""HardwareSpec: a node has all numbers of a GPU or none."""

import dataclasses

import pytest

from raymoe.errors import ConfigError
from raymoe.specs.hardware import DEVICE_FIELDS, HOST_FIELDS, HardwareSpec

HOST = HardwareSpec(
    name="host", num_cores=2, host_memory_bytes=1, host_bytes_per_s=1.0, host_flop_per_s=1.0
)
GPU = dataclasses.replace(HOST, **dict.fromkeys(DEVICE_FIELDS, 1))


def test_a_node_has_a_gpu_only_when_its_numbers_are_given() -> None:
    assert not HOST.has_gpu
    assert GPU.has_gpu


@pytest.mark.parametrize("value", [0, -1, float("nan")])
@pytest.mark.parametrize("field", DEVICE_FIELDS)
def test_one_missing_number_of_the_gpu_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"HardwareSpec\.{field} is"):
        dataclasses.replace(GPU, **{field: value})


@pytest.mark.parametrize("field", DEVICE_FIELDS)
def test_one_number_of_a_gpu_alone_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="on a node with a GPU all of"):
        dataclasses.replace(HOST, **{field: 1})


@pytest.mark.parametrize("spec", [HOST, GPU], ids=["host", "gpu"])
@pytest.mark.parametrize("field", HOST_FIELDS)
def test_numbers_of_the_host_are_positive(field: str, spec: HardwareSpec) -> None:
    with pytest.raises(ConfigError, match=rf"HardwareSpec\.{field} is 0"):
        dataclasses.replace(spec, **{field: 0})
