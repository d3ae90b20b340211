"""Cores and memory that this process may use, with CPU affinity and control groups.

Assumptions: control groups are mounted in the usual place (/sys/fs/cgroup, version 1, 2 or both); a
limit of any ancestor counts; pages of the file cache can be reclaimed.
"""

import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raymoe.units import KIB

UNLIMITED = 1 << 60  # version 1 writes the largest page-aligned number for "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """What this process may use of its machine.

    Attributes:
        num_cores: Threads that can run at once: CPU affinity, at most the CPU quota.
        num_physical_cores: The same, with hyper-threads of one core counted once.
        total_memory_bytes: Memory of the machine, at most the limit of the control group.
        available_memory_bytes: What can be allocated without swapping or an OOM kill.
    """

    num_cores: int
    num_physical_cores: int
    total_memory_bytes: int
    available_memory_bytes: int


def read_host(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> HostInfo:
    """Read the limits of this process.

    Args:
        root: Contains proc and sys; tests use their own tree.
        cpus: CPUs that may be used; None asks the operating system.
    """
    cpus = frozenset(os.sched_getaffinity(0)) if cpus is None else cpus
    quota = min(_cpu_quotas(root), default=len(cpus))
    total, available = _meminfo(root)
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return HostInfo(
        num_cores=max(1, min(len(cpus), quota)),
        num_physical_cores=max(1, min(_num_physical_cores(root, cpus), quota)),
        total_memory_bytes=total,
        available_memory_bytes=available,
    )


def trim_heap() -> None:
    """Return what was freed to the system; glibc keeps it for later requests of this process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries keep nothing, or have no such call
        trim(ctypes.c_size_t(0))


def peak_rss_bytes(root: Path = Path("/")) -> int:
    return _status_bytes(root, "VmHWM:")


def rss_bytes(root: Path = Path("/")) -> int:
    return _status_bytes(root, "VmRSS:")


def _status_bytes(root: Path, field: str) -> int:
    for line in _lines(root / "proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _first_line(path: Path) -> str:
    lines = _lines(path)
    return lines[0].strip() if lines else ""


def _table(path: Path) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _meminfo(root: Path) -> tuple[int, int]:
    table = _table(root / "proc/meminfo")
    total = table["MemTotal"] * KIB
    return total, table.get("MemAvailable", table["MemFree"]) * KIB


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and directory of every control group of this process, leaf first.

    Inside a container /proc/self/cgroup may hold the path on the host; then only the mount itself
    exists, and it is the container's own group.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        mounts = (controller, controllers) if controllers else (".", "unified")
        for mount in {root / "sys/fs/cgroup" / name for name in mounts}:
            leaf = mount / path.lstrip("/")
            for group in (leaf, *leaf.parents):
                yield version, group
                if group == mount:
                    break


def _cpu_quotas(root: Path) -> Iterator[int]:
    """Yield every quota in whole CPUs: a fraction cannot run a thread that never waits."""
    for version, group in _groups(root, "cpu"):
        if version == 2:
            words = _first_line(group / "cpu.max").split()
        else:
            words = [
                _first_line(group / "cpu.cfs_quota_us"),
                _first_line(group / "cpu.cfs_period_us"),
            ]
        if len(words) == 2 and all(word.isdigit() for word in words):
            yield int(words[0]) // max(int(words[1]), 1)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    for version, group in _groups(root, "memory"):
        if version == 2:
            limits = [_first_line(group / name) for name in ("memory.max", "memory.high")]
            used, prefix = _first_line(group / "memory.current"), ""
        else:
            limits = [_first_line(group / "memory.limit_in_bytes")]
            used, prefix = _first_line(group / "memory.usage_in_bytes"), "total_"
        limit = min((int(text) for text in limits if text.isdigit()), default=UNLIMITED)
        if limit >= UNLIMITED or not used.isdigit():
            continue
        stat = _table(group / "memory.stat")
        cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        yield limit, max(int(used) - cache, 0)


def _num_physical_cores(root: Path, cpus: frozenset[int]) -> int:
    topology = root / "sys/devices/system/cpu"
    return len(
        {
            _first_line(topology / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu{cpu}"
            for cpu in cpus
        }
    )
