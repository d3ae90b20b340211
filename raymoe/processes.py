"""Memory, CPU time and command lines of processes, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

OS_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that one or more processes use.

    Attributes:
        rss_bytes: Resident memory; shared pages count for each process.
        cpu_s: User and system time so far.
    """

    rss_bytes: int = 0
    cpu_s: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.rss_bytes + other.rss_bytes, self.cpu_s + other.cpu_s)


def usage_of(pid: int, root: Path = Path("/proc")) -> Usage | None:
    try:
        status = (root / str(pid) / "statm").read_text().split()
        fields = _stat(root / str(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not status:
        return None
    user, system = int(fields[11]), int(fields[12])
    return Usage(int(status[1]) * OS_PAGE_BYTES, (user + system) / TICKS_PER_S)


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a process from a later one of the same id.

    Attributes:
        uid: User that it runs as.
        start_ticks: When it started, since the boot of the machine.
    """

    pid: int
    uid: int
    start_ticks: int


def identity_of(pid: int, root: Path = Path("/proc")) -> Identity | None:
    """Return the identity of a process; None if it has ended, or ends."""
    try:
        fields = _stat(root / str(pid))
        uid = (root / str(pid)).stat().st_uid
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if fields[0] in {"Z", "X"} else Identity(pid, uid, int(fields[19]))


def arguments_of(pid: int, root: Path = Path("/proc")) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        line = (root / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [os.fsdecode(one) for one in line.split(b"\0")[:-1]]


def is_runnable(pid: int, root: Path = Path("/proc")) -> bool:
    try:
        return _stat(root / str(pid))[0] == "R"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat(directory: Path) -> list[str]:
    return (directory / "stat").read_text().rpartition(")")[2].split()
