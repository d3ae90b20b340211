"""Identify this machine, measure it and store the measurements.

Assumes that proc is mounted and that the NVIDIA driver writes its version to
/proc/driver/nvidia/version.
"""

import dataclasses
import hashlib
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch

from raymoe.device.host import read_host
from raymoe.device.threads import probe_host, set_num_threads
from raymoe.measure.gpu import measure_device
from raymoe.measure.host import measure_host_curves, num_torch_threads
from raymoe.measure.timing import KernelJob, measure_in_turns
from raymoe.specs.hardware import USABLE_FRACTION, HardwareSpec
from raymoe.units import GIB, MIB

# Part of the file name; raise it when the measurements change.
FORMAT = 1


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
    return HardwareSpec.from_file(path) if path.exists() else None


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
    match = re.search(
        r"Kernel Module\s+(?:\S+\s+)*?(\d[\d.]+)", _read(root / "proc/driver/nvidia/version")
    )
    return match[1] if match else ""


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


USUAL_SECONDS = 55.0  # a minute including start-up
PROBE_SHARE, COPY_SHARE, DEVICE_SHARE = 0.1, 0.05, 0.35
PAGE_BYTES, NUM_PAGES, RING_PAGES = 64 * MIB, 8, 2


def measure_machine(num_threads: int | None = None, seconds: float = USUAL_SECONDS) -> HardwareSpec:
    """Measure this machine and its first GPU, in `seconds` unless single calls take longer."""
    end_s = time.perf_counter() + seconds
    host = probe_host(num_threads=num_threads, seconds=PROBE_SHARE * seconds)
    set_num_threads(host.num_cores, num_torch_threads(host.num_cores))
    (copy_s,) = measure_in_turns([staging_job()], COPY_SHARE * seconds)
    has_gpu = torch.cuda.is_available()
    left_s = end_s - time.perf_counter() - DEVICE_SHARE * seconds * has_gpu
    host = dataclasses.replace(
        host,
        host_memory_bytes=int(USABLE_FRACTION * read_host().total_memory_bytes),
        host_copy_bytes_per_s=PAGE_BYTES / copy_s,
        host_curves=measure_host_curves(host, left_s),
    )
    return measure_device(host, max(0.0, end_s - time.perf_counter())) if has_gpu else host


def obtain_profile(
    directory: Path,
    num_threads: int | None = None,
    *,
    seconds: float = USUAL_SECONDS,
    is_fresh: bool = False,
) -> tuple[HardwareSpec, Path]:
    """The stored profile of this machine and its file; measures first if there is none."""
    machine = identify_machine(num_threads)
    hardware = None if is_fresh else load_profile(directory, machine)
    if hardware is None:
        hardware = measure_machine(num_threads, seconds)
        store_profile(directory, machine, hardware)
    return hardware, directory / machine.file_name


def staging_job() -> KernelJob:
    """Copies of weight pages into a ring, as from pageable to pinned memory."""
    pages = torch.ones(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
    ring = torch.zeros(RING_PAGES, PAGE_BYTES, dtype=torch.uint8)
    return KernelJob(
        kernel="staging copy",
        case=f"{NUM_PAGES} pages",
        calls=[partial(ring[i % RING_PAGES].copy_, pages[i]) for i in range(NUM_PAGES)],
        bytes_per_call=PAGE_BYTES,
        flop_per_call=0.0,
    )
