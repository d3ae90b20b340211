"""Profiles are kept for the machine that they are of, and for no other."""

import dataclasses
from pathlib import Path

import pytest

from raymoe.errors import ConfigError
from raymoe.measure import profile
from raymoe.measure.kept import Machine, identify_machine, load_profile, store_profile
from raymoe.specs.hardware import hardware_preset

MACHINE = Machine(
    cpu_model="AMD EPYC 9V84 96-Core Processor", num_threads=8, memory_gib=64, gpu="NVIDIA L4",
    gpu_driver="550.54.15",
)  # fmt: skip
OTHERS = {
    "cpu_model": "AMD EPYC 9V84 96-Core processor",
    "num_threads": 4,
    "memory_gib": 65,
    "gpu": "NVIDIA-L4",
    "gpu_driver": "550.54.14",
}
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (dvs)\n"
GCC = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "raymoe"
    assert load_profile(directory, MACHINE) is None
    for name in ("l4", "t4"):  # the second replaces the first
        path = store_profile(directory, MACHINE, hardware_preset(name))
        assert load_profile(directory, MACHINE) == hardware_preset(name)
        assert list(directory.iterdir()) == [path]


@pytest.mark.parametrize("field", OTHERS)
def test_another_machine_has_another_profile(field: str, tmp_path: Path) -> None:
    other = dataclasses.replace(MACHINE, **{field: OTHERS[field]})
    store_profile(tmp_path, MACHINE, hardware_preset("l4"))
    assert load_profile(tmp_path, other) is None


def test_the_file_says_what_it_is_of() -> None:
    assert MACHINE.file_name.startswith("amd-epyc-9v84-96-core-processor-8-threads-64-gib-nvidia")


def test_a_damaged_profile_is_refused_by_name(tmp_path: Path) -> None:
    store_profile(tmp_path, MACHINE, hardware_preset("l4")).write_text("{")
    with pytest.raises(ConfigError, match="amd-epyc"):
        load_profile(tmp_path, MACHINE)


@pytest.mark.parametrize(
    ("version", "driver"),
    [
        (CLOSED + GCC, "550.54.15"),
        (OPEN + GCC, "570.86.10"),
        (None, ""),
    ],
)
def test_processor_and_driver_are_read_from_proc(
    version: str | None, driver: str, tmp_path: Path
) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU @ 2 GHz \nmodel name\t: Other\n"
    )
    if version is not None:
        (tmp_path / "proc/driver/nvidia/version").write_text(version)
    machine = identify_machine(3, tmp_path)
    assert (machine.cpu_model, machine.num_threads) == ("Some CPU @ 2 GHz", 3)
    assert machine.gpu_driver == driver


def test_this_machine_has_a_name() -> None:
    machine = identify_machine()
    assert machine.cpu_model
    assert machine.num_threads >= 1
    assert machine == identify_machine()


def test_a_profile_that_cannot_be_kept_is_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(profile, "measure_machine", lambda *_: hardware_preset("l4"))
    hardware, _ = profile.obtain_profile(Path("/dev/null/raymoe"))
    assert hardware == hardware_preset("l4")
    assert "the profile is not kept" in caplog.text
    assert "set RAYMOE_CACHE" in caplog.text
