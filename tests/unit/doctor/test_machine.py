"""What versions and limits of a machine mean for raymoe."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from raymoe.device.host import HostInfo
from raymoe.doctor import machine
from raymoe.doctor.examine import Status, Target
from raymoe.units import GIB, MIB

HOST = HostInfo(
    num_cores=8, num_physical_cores=4, total_memory_bytes=64 * GIB, available_memory_bytes=60 * GIB
)
CPU, CUDA = Target(device="cpu"), Target(device="cuda")


@pytest.mark.parametrize(
    ("name", "status"),
    [("ray", Status.WARNING), ("llguidance", Status.WARNING), ("transformers", Status.FAILED)],
)
def test_a_missing_package_fails_only_what_needs_it(
    name: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    found = machine.package(name)
    assert (found.value, found.status) == ("missing", status)
    assert found.advice


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.9.0+cu128", Status.OK), ("2.13.1", Status.OK), ("2.8.9", Status.FAILED),
        ("2.14.0", Status.FAILED), ("2.14.0a0+git1", Status.FAILED),
    ],
)  # fmt: skip
def test_versions_are_held_against_our_metadata(
    version: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["torchvision>=9", "torch[extra]>=2.9,<2.14", 'ray>=1; extra == "x"']
    monkeypatch.setattr(machine, "requires", lambda _name: lines)
    monkeypatch.setattr(machine, "version", lambda _name: version)
    found = machine.package("torch")
    assert (found.status, "<2.14,>=2.9" in found.advice) == (status, status != Status.OK)


def test_a_source_tree_without_metadata_knows_no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> list[str]:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(machine, "requires", nothing)
    assert machine.package("torch").status == Status.OK


@pytest.mark.parametrize(
    ("text", "status"),
    [("always [madvise] never", Status.OK), ("[always] madvise never", Status.OK),
     ("always madvise [never]", Status.WARNING), (None, Status.WARNING)],
)  # fmt: skip
def test_huge_pages(text: str | None, status: Status, tmp_path: Path) -> None:
    directory = tmp_path / "sys/kernel/mm/transparent_hugepage"
    if text is not None:
        directory.mkdir(parents=True)
        (directory / "enabled").write_text(text)
    assert machine.huge_pages(tmp_path).status == status


def test_little_shared_or_free_memory_and_a_busy_machine_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Docker:
        f_bavail, f_blocks, f_frsize = 64 * MIB // 4096, 64 * MIB // 4096, 4096

    assert machine.shared_memory(HOST, tmp_path / "none").status == Status.WARNING
    monkeypatch.setattr(machine.os, "statvfs", lambda _path: Docker)
    assert "--shm-size" in machine.shared_memory(HOST, tmp_path).advice
    assert machine.memory(HOST).status == Status.OK
    full = HostInfo(
        num_cores=8, num_physical_cores=4, total_memory_bytes=64 * GIB,
        available_memory_bytes=20 * GIB,
    )  # fmt: skip
    assert machine.memory(full).status == Status.WARNING
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (7.0, 0, 0))
    assert "load 7.0" in machine.cores(HOST).value


def test_bytes_of_proc() -> None:
    text = "Rss: 12 kB\nAnonHugePages:      2048 kB\nAnonHugePages:  4 kB\n"
    assert machine.kib_of("AnonHugePages", text) == 2052 * 1024
