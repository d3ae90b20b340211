"""Rates that the driver measured serve engines on machines like its own, and no others."""

import dataclasses

import pytest

from raymoe.config import EngineConfig, Settings
from raymoe.engine import node as engine_node
from raymoe.measure.kept import identify_machine, store_profile
from raymoe.specs.hardware import Curve, HardwareSpec, MeasuredNode

HANDED = HardwareSpec(
    name="the driver's",
    num_cores=2,
    host_memory_bytes=64,
    host_bytes_per_s=9e9,
    host_flop_per_s=7e9,
)


@pytest.fixture
def own(monkeypatch, tmp_path):
    """What this machine measures itself, and its settings."""
    node = dataclasses.replace(HANDED, name="own")
    monkeypatch.setattr(engine_node, "_measure_quickly", lambda _threads: node)
    return Settings(cache_directory=tmp_path, num_threads=None)


@pytest.mark.parametrize("num_threads", [None, 1])
def test_an_engine_on_a_machine_like_the_drivers_measures_nothing(own, num_threads) -> None:
    handed = MeasuredNode(machine=identify_machine(num_threads).file_name, hardware=HANDED)
    config = EngineConfig(hardware=handed, num_threads=num_threads)
    node = engine_node.find_node(config, own, "cpu")
    assert node.name == "the driver's"
    assert node.host_memory_bytes > 64, "how much memory is free is looked up here"


def test_an_engine_on_another_machine_measures_its_own(own) -> None:
    machines = [
        dataclasses.replace(identify_machine(), cpu_model="another"),
        identify_machine(identify_machine().num_threads + 1),
    ]
    for machine in machines:
        handed = MeasuredNode(machine=machine.file_name, hardware=HANDED)
        node = engine_node.find_node(EngineConfig(hardware=handed), own, "cpu")
        assert node.name == "own"


def test_actors_of_one_machine_get_their_share(own, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path))
    monkeypatch.delenv("RAYMOE_NUM_THREADS", raising=False)
    whole, half = engine_node.measured_share(None, 1), engine_node.measured_share(None, 2)
    assert (whole.hardware.num_cores, half.hardware.num_cores) == (2, 1)
    assert half.hardware.host_flop_per_s == whole.hardware.host_flop_per_s / 2
    assert half.machine == identify_machine(1).file_name
    assert engine_node.measured_share(1, 2).hardware.num_cores == 2, (
        "threads that a user chose stay"
    )


def test_a_profile_that_cannot_be_true_is_not_used(own, caplog) -> None:
    slow = dataclasses.replace(HANDED, name="slow", task_overhead_s=Curve(((1.0, 9e-3),)))
    path = store_profile(own.cache_directory, identify_machine(), slow)
    assert engine_node.measured_host(None, own).name == "own"
    assert f"{path} is not used" in caplog.text
    assert "raymoe profile --again" in caplog.text
    store_profile(own.cache_directory, identify_machine(), dataclasses.replace(HANDED, name="kept"))
    assert engine_node.measured_host(None, own).name == "kept"
