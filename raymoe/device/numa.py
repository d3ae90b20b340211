"""Threads and host memory beside a GPU, on machines with several NUMA nodes.

A copy between a GPU and the memory of another socket crosses the link between the sockets, and
shares it with everything else that does. Assumptions: Linux, sysfs in its usual place.

Source: Linux, Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci;
set_mempolicy(2).
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymoe.errors import ConfigError

PREFERRED, DEFAULT = 1, 0  # policies of set_mempolicy(2)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_MASK_BITS = 1024  # nodes that any kernel has at most

SetPolicy = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaPlace:
    """A NUMA node of several.

    Attributes:
        node: Its number.
        cpus: Those of its CPUs that this process may use.
    """

    node: int
    cpus: frozenset[int]


def find_place(
    pci_address: str, root: Path = Path("/"), allowed: frozenset[int] | None = None
) -> NumaPlace | None:
    """The NUMA node of a GPU; None where it makes no difference or is not known.

    Args:
        pci_address: Of the GPU, such as "0000:3b:00.0".
        root: Where sys is found; tests give a tree of their own.
        allowed: CPUs that may be used; None asks the operating system.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = {
        int(path.name.removeprefix("node")): parse_cpus(_text(path / "cpulist"))
        for path in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    node = int(_text(root / "sys/bus/pci/devices" / pci_address / "numa_node") or -1)
    cpus = nodes.get(node, frozenset()) & allowed
    if len(nodes) < 2 or not cpus:
        return None
    return NumaPlace(node=node, cpus=cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """CPUs of a list such as "0-3,8,10-11".

    Raises:
        ConfigError: It is none.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ConfigError(f"{text!r} is no list of CPUs such as 0-3,8")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def bind_thread(place: NumaPlace | None) -> None:
    """Keep the calling thread, and those that it starts, on the CPUs of a node."""
    if place is not None:
        os.sched_setaffinity(0, place.cpus)


@contextmanager
def memory_near(place: NumaPlace | None, set_policy: SetPolicy | None = None) -> Iterator[None]:
    """Have pages that this thread is the first to touch come from a node while it has some free.

    Threads that it starts meanwhile inherit that. Memory of other nodes is taken when the node is
    full.

    Args:
        place: The node; None changes nothing.
        set_policy: The system call, (policy, node); for tests.
    """
    if place is None:
        yield
        return
    change = set_policy or _set_policy
    change(PREFERRED, place.node)
    try:
        yield
    finally:
        change(DEFAULT, None)


def near(
    place: NumaPlace | None, context: Callable[[], AbstractContextManager[object]]
) -> Callable[[], AbstractContextManager[object]]:
    """A thread context that binds its thread to a node first."""

    def bound() -> AbstractContextManager[object]:
        bind_thread(place)
        return context()

    return bound


def _set_policy(policy: int, node: int | None) -> None:
    """set_mempolicy(2); a container may forbid it, which costs rate and nothing else."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(
        ctypes.c_long(number),
        ctypes.c_long(policy),
        None if node is None else mask,
        ctypes.c_ulong(0 if node is None else _MASK_BITS),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
