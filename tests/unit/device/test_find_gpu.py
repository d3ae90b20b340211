"""What is said where torch sees no GPU, or Triton cannot compile."""

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from raymoe.device import find_gpu
from raymoe.device.find_gpu import check_compiler, check_cuda, has_nvidia_gpu, why_not_compiled
from raymoe.errors import ConfigError

OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12"
OLDER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27"
NEW = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose torch is built for CUDA 13 and sees nothing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CC", "TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def install(root: Path, driver: str, *, has_device: bool = True) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(f"{driver}\nGCC version: 12\n")
    if has_device:
        (root / "dev").mkdir()
        (root / "dev/nvidiactl").touch()


@pytest.mark.parametrize(
    ("driver", "version", "visible", "reason"),
    [
        (None, {}, None, r"no NVIDIA driver is visible here \(in a container: .*--gpus all"),
        (None, {"cuda": None}, None, r"no NVIDIA driver .*, and torch \S+ is built without CUDA"),
        (NEW, {"cuda": None}, None, r"there is no GPU 0: torch \S+ is built without CUDA"),
        (NEW, {"cuda": None, "hip": "6.4"}, None, r"0: torch \S+ is built for ROCm"),
        (OLD, {}, None, r"driver 535.183.01 is too old.* CUDA 13.0, which needs 580 or later; "
                        r"install a newer driver, or pip install 'torch==2.10.\*'"),
        (OLDER, {}, None, r"needs 580 or later; install a newer driver; or choose"),
        (OLD, {"cuda": "12.8"}, None, r"torch \S+ for CUDA 12.8 finds none with .* 535.183"),
        (NEW, {}, "", r"0: CUDA_VISIBLE_DEVICES is '' \(a Ray actor sees those of its num_gpus"),
        (NEW, {}, "7", r"finds none with .*; CUDA_VISIBLE_DEVICES is '7' \(a Ray actor"),
    ],
)  # fmt: skip
def test_why_torch_sees_no_gpu(
    driver: str | None,
    version: dict[str, str | None],
    visible: str | None,
    reason: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in version.items():
        monkeypatch.setattr(torch.version, name, value)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if driver is not None:
        install(root, driver)
    with pytest.raises(ConfigError, match=reason):
        check_cuda(root=root)


def test_a_driver_of_the_host_alone_is_that_of_a_container_without_gpus(root: Path) -> None:
    install(root, NEW, has_device=False)
    with pytest.raises(ConfigError, match=r"there is a driver, but no /dev/nvidiactl .*--gpus all"):
        check_cuda(root=root)


def test_a_gpu_is_known_by_its_driver_or_on_its_bus(root: Path) -> None:
    assert not has_nvidia_gpu(root)
    for number, (vendor, kind) in enumerate([("0x10de", "0x040300"), ("0x1002", "0x030000")]):
        device = root / f"sys/bus/pci/devices/{number}"  # the sound of a card; another maker's card
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert not has_nvidia_gpu(root)
    (root / "sys/bus/pci/devices/0/class").write_text("0x030200\n")
    assert has_nvidia_gpu(root)


def test_what_triton_lacks_to_compile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"gcc", "/opt/cc"}
    monkeypatch.setattr(find_gpu.shutil, "which", lambda name, **_: name in programs or None)
    monkeypatch.setattr(find_gpu, "find_spec", lambda _name: None)
    assert why_not_compiled(root) == ""
    monkeypatch.setattr(find_gpu, "find_spec", lambda _name: sys)
    assert "Python.h: install Python's headers" in why_not_compiled(root)
    header = root / sysconfig.get_paths()["include"].lstrip("/") / "Python.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert "ldconfig does not know libcuda.so.1" in why_not_compiled(root)
    (root / "libcuda.so.1").touch()
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(root))
    assert why_not_compiled(root) == ""
    programs.clear()
    assert "there is no gcc or clang: install one" in why_not_compiled(root)
    monkeypatch.setenv("CC", "/opt/cc")
    with pytest.raises(ConfigError, match=r"cannot compile .*: CC is '/opt/cc', which is no pro"):
        check_compiler((7, 5))
    check_compiler((7, 0))  # Triton does not run there
    programs.add("/opt/cc")
    assert why_not_compiled(root) == ""
