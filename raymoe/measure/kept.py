"""Which machine this is, and its measurements that are kept: profiles, and tiles of GPU kernels."""

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from raymoe.device.host import read_host
from raymoe.errors import ConfigError
from raymoe.kernels.gpu_experts_layout import TileTable
from raymoe.specs.files import read_own_json
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GIB

# Part of the name of a file: raise it when what is measured, or how, changes.
FORMAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu_model: str
    num_threads: int  # threads that run the kernels
    memory_gib: int  # memory of the machine or its control group, rounded
    gpu: str = ""  # name of the GPU; empty without one
    gpu_driver: str = ""

    @property
    def file_name(self) -> str:
        words = f"{self.cpu_model} {self.num_threads} threads {self.memory_gib} GiB {self.gpu}"
        return kept_name(words, repr((FORMAT, astuple(self))))


def identify_machine(num_threads: int | None = None, root: Path = Path("/")) -> Machine:
    """This machine; kernels use `num_threads`, or all cores of this process if None."""
    host = read_host()
    return Machine(
        cpu_model=_cpu_model(root),
        num_threads=host.num_cores if num_threads is None else num_threads,
        memory_gib=round(host.total_memory_bytes / GIB),
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        gpu_driver=_gpu_driver(root),
    )


def load_profile(directory: Path, machine: Machine) -> HardwareSpec | None:
    """The stored profile of this machine, or None; raises ConfigError if the file is damaged."""
    path = directory / machine.file_name
    return HardwareSpec.from_file(path) if os.path.exists(path) else None  # noqa: PTH110 - never raises


def store_profile(directory: Path, machine: Machine, hardware: HardwareSpec) -> Path:
    """Store measurements for this machine and return the file; may raise OSError."""
    path = directory / machine.file_name
    keep(path, hardware.to_file)
    return path


def kept_name(words: str, exact: str) -> str:
    """A file name of readable words and a hash of `exact`."""
    plain = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    digest = hashlib.sha256(exact.encode()).hexdigest()
    return f"{plain[:80]}-{digest[:12]}.json"


def keep(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: readers see the old or the new one; may raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        write(written)
        written.replace(path)


def _cpu_model(root: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _gpu_driver(root: Path) -> str:
    version = _read(root / "proc/driver/nvidia/version").partition("Kernel Module")[2]
    match = re.search(r"(?<!\S)\d[\d.]+", version)
    return match[0] if match else ""


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# Part of the name of a file: raise it when the kernels change so that old choices mislead.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    capability: tuple[int, int]

    @classmethod
    def current(cls, index: int = 0) -> "Gpu":
        return cls(
            name=torch.cuda.get_device_name(index),
            capability=torch.cuda.get_device_capability(index),
        )

    @property
    def file_name(self) -> str:
        return kept_name(f"tiles {self.name}", repr((FORMAT, self.name, self.capability)))


def load_tiles(directory: Path, gpu: Gpu) -> TileTable:
    """Stored tiles of this GPU, else the defaults; raises ConfigError if the file is damaged."""
    path = directory / gpu.file_name
    if not os.path.exists(path):  # noqa: PTH110 - never raises
        return TileTable(capability=gpu.capability)
    try:
        return TileTable.from_json(gpu.capability, read_own_json(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; remove it") from error


def store_tiles(directory: Path, gpu: Gpu, tiles: TileTable) -> Path:
    """Replace the stored tiles of this GPU and return the file; may raise OSError."""
    path = directory / gpu.file_name
    keep(path, lambda written: written.write_text(json.dumps(tiles.to_json(), indent=1) + "\n"))
    return path
