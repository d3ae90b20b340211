"""Which machine this is, and where its measurements are kept.

Assumptions: proc is mounted; the NVIDIA driver writes its version to /proc/driver/nvidia/version.
"""

import hashlib
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from raymoe.device.host import read_host
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GIB

# Part of the name of a file: raise it when what is measured, or how, changes.
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What measurements depend on.

    Attributes:
        cpu_model: As the processor calls itself.
        num_threads: With which the kernels are measured.
        memory_gib: Memory of the machine or its control group, rounded.
        gpu: Name of the GPU; empty without one.
        gpu_driver: Version of its driver.
    """

    cpu_model: str
    num_threads: int
    memory_gib: int
    gpu: str = ""
    gpu_driver: str = ""

    @property
    def file_name(self) -> str:
        """A name that says what it is, and a hash that says it exactly."""
        words = f"{self.cpu_model} {self.num_threads} threads {self.memory_gib} GiB {self.gpu}"
        return kept_name(words, repr((FORMAT, astuple(self))))


def identify_machine(num_threads: int | None = None, root: Path = Path("/")) -> Machine:
    """This machine, measured with `num_threads` threads.

    Args:
        num_threads: None for all cores that this process may use.
        root: Where proc is found; tests give a tree of their own.
    """
    host = read_host()
    return Machine(
        cpu_model=_cpu_model(root),
        num_threads=host.num_cores if num_threads is None else num_threads,
        memory_gib=round(host.total_memory_bytes / GIB),
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        gpu_driver=_gpu_driver(root),
    )


def load_profile(directory: Path, machine: Machine) -> HardwareSpec | None:
    """What `store_profile` kept for this machine; None where it kept nothing.

    Raises:
        ConfigError: The file is damaged; names it.
    """
    path = directory / machine.file_name
    return HardwareSpec.from_file(path) if path.exists() else None


def store_profile(directory: Path, machine: Machine, hardware: HardwareSpec) -> Path:
    """Keep measurements for this machine; returns the file.

    Raises:
        OSError: The directory cannot be written.
    """
    path = directory / machine.file_name
    keep(path, hardware.to_file)
    return path


def kept_name(words: str, exact: str) -> str:
    """Name of a file that says what it is of, and a hash that says it exactly."""
    plain = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    digest = hashlib.sha256(exact.encode()).hexdigest()
    return f"{plain[:80]}-{digest[:12]}.json"


def keep(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers see the old one or the new one, never a part.

    Raises:
        OSError: The directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        write(written)
        written.replace(path)


def _cpu_model(root: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _gpu_driver(root: Path) -> str:
    match = re.search(
        r"Kernel Module\s+(?:\S+\s+)*?(\d[\d.]+)", _read(root / "proc/driver/nvidia/version")
    )
    return match[1] if match else ""


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
