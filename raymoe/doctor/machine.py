"""Versions of packages, and what the operating system allows. Imports neither torch nor kernels."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from raymoe._version import __version__
from raymoe.config import Settings
from raymoe.device.host import HostInfo, read_host
from raymoe.doctor.examine import Check, Outcome, Status, Target
from raymoe.units import GIB, KIB, format_bytes

PROJECT = "raymoe"
SHOWN = ("torch", "transformers", "ray", "llguidance", "numba", "numpy", "pyarrow", "triton")
# What still works without them.
OPTIONAL: Mapping[str, str] = {
    "ray": "raymoe.generate, MoEGenerator and `raymoe generate` need it; Engine, plan, profile and "
    "bench do not",
    "llguidance": "structured outputs need it",
    "triton": "on a GPU, experts and attention then run through torch, several times slower",
}
MIN_SHARED_BYTES = GIB
MAX_IDLE_LOAD = 0.25  # of the cores
MIN_AVAILABLE = 0.5  # of the memory


def checks(target: Target) -> list[Check]:
    host = read_host()
    found = [Check("raymoe", lambda: Outcome(f"{__version__}, Python {platform.python_version()}"))]
    found += [Check(name, partial(package, name)) for name in _packages(target)]
    if target.device == "cuda" and find_spec("triton") is not None:
        found.append(Check("compiler", compiler))
    return [
        *found,
        Check("cores", partial(cores, host)),
        Check("memory", partial(memory, host)),
        Check("huge pages", huge_pages),
        Check("shared memory", partial(shared_memory, host)),
        Check("cache", cache),
    ]


def _packages(target: Target) -> Iterator[str]:
    for name in SHOWN:
        if name != "triton" or target.device == "cuda":
            yield name


def package(name: str) -> Outcome:
    """The version of a package, held against what our own metadata allows."""
    optional = OPTIONAL.get(name)
    bad = Status.FAILED if optional is None else Status.WARNING
    if find_spec(name) is None:
        return Outcome("missing", bad, optional or f"pip install {name}")
    try:
        found = version(name)
    except PackageNotFoundError:
        return Outcome("there, of unknown version")
    allowed = _allowed(name)
    if not allowed.contains(found, prereleases=True):
        return Outcome(f"{found}, not {allowed}", bad, f"pip install '{name}{allowed}'")
    return Outcome(found)


def _allowed(name: str) -> SpecifierSet:
    """Versions that our metadata names; all if it names none."""
    try:
        needed = map(Requirement, requires(PROJECT) or ())
    except PackageNotFoundError:
        return SpecifierSet()
    return next((each.specifier for each in needed if each.name == name), SpecifierSet())


def compiler() -> Outcome:
    """Whether Triton can compile its kernels, which it does when they first run."""
    from raymoe.device.find_gpu import why_not_compiled  # noqa: PLC0415 - it imports torch

    reason = why_not_compiled()
    if reason:
        advice = "every kernel of raymoe on the GPU needs it, once"
        return Outcome(reason, Status.FAILED, advice)
    return Outcome("Triton finds a C compiler, Python's headers and libcuda")


def cores(host: HostInfo) -> Outcome:
    count = os.cpu_count() or host.num_cores
    value = f"{host.num_cores} of {count}, {host.num_physical_cores} physical"
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "AMD64"}:
        advice = "tested on Linux on x86-64; other machines use portable kernels, which are slow"
        return Outcome(f"{value}, {platform.machine()}", Status.WARNING, advice)
    load = os.getloadavg()[0]
    if load > MAX_IDLE_LOAD * host.num_cores:
        advice = "other programs take cores: rates below are lower than those of an idle machine"
        return Outcome(f"{value}; load {load:.1f}", Status.WARNING, advice)
    return Outcome(value)


def memory(host: HostInfo) -> Outcome:
    total, free = host.total_memory_bytes, host.available_memory_bytes
    value = f"{format_bytes(free)} of {format_bytes(total)} available"
    if free < MIN_AVAILABLE * total:
        advice = "weights and KV cache get 0.85 of what is available: end what else uses memory"
        return Outcome(value, Status.WARNING, advice)
    return Outcome(value)


def huge_pages(root: Path = Path("/")) -> Outcome:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    match = re.search(r"\[(\w+)\]", path.read_text()) if path.exists() else None
    mode = match[1] if match else "unknown"
    if mode in {"always", "madvise"}:
        return Outcome(mode)
    advice = f"kernels read weights and KV faster from huge pages: echo madvise > {path}"
    return Outcome(mode, Status.WARNING, advice)


def shared_memory(host: HostInfo, directory: Path = Path("/dev/shm")) -> Outcome:
    if not directory.is_dir():
        advice = "actors of one machine then each load their own weights"
        return Outcome(f"no {directory}", Status.WARNING, advice)
    status = os.statvfs(directory)
    free, total = (count * status.f_frsize for count in (status.f_bavail, status.f_blocks))
    value = f"{format_bytes(free)} of {format_bytes(total)} free in {directory}"
    if free >= min(MIN_SHARED_BYTES, host.total_memory_bytes // 4):
        return Outcome(value)
    advice = (
        "actors that share weights need room for all of them: docker --shm-size, or in Kubernetes "
        "an emptyDir with medium Memory; or set shared_weights=False"
    )
    return Outcome(value, Status.WARNING, advice)


def cache() -> Outcome:
    """Whether profiles of this machine can be kept."""
    directory = Settings.from_environment().cache_directory
    parts = (directory, *directory.parents)
    nearest = next(path for path in parts if os.path.exists(path))  # noqa: PTH110 - never raises
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Outcome(str(directory))
    advice = "profiles of this machine cannot be kept: set RAYMOE_CACHE to a directory of yours"
    return Outcome(f"{directory} cannot be written", Status.WARNING, advice)


def kib_of(field: str, text: str) -> int:
    """Bytes of all lines such as "AnonHugePages:  2048 kB" in a file of proc."""
    return KIB * sum(map(int, re.findall(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)))
