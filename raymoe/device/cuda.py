"""Threads and host memory beside a GPU, on machines with several NUMA nodes.

A copy between a GPU and the memory of another socket crosses the link between the sockets, and
shares it with everything else that does. Assumptions: Linux, sysfs in its usual place.

Source: Linux, Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci;
set_mempolicy(2).
"""

import contextlib
import ctypes
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple

import torch
from torch import Tensor

from raymoe.device.cuda_api import (
    CHUNK_BYTES,
    CudaApi,
    CudaDriver,
    EventT,
    PacketCopier,
    PinnedMemory,
    Runs,
    StreamT,
    TorchCuda,
    copy_one_by_one,
    cut_runs,
)
from raymoe.device.device import MemoryLedger
from raymoe.device.lane import Call, HostMark, Lane, Mark, ThreadContext, ThreadLane, Worker
from raymoe.errors import CapacityError, ConfigError
from raymoe.schedule.graph import Resource, Task
from raymoe.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


PREFERRED, DEFAULT = 1, 0  # policies of set_mempolicy(2)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_MASK_BITS = 1024  # nodes that any kernel has at most

SetPolicy = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaPlace:
    """A NUMA node of several.

    Attributes:
        cpus: Those of its CPUs that this process may use.
    """

    node: int
    cpus: frozenset[int]


def find_place(
    pci_address: str, root: Path = Path("/"), allowed: frozenset[int] | None = None
) -> NumaPlace | None:
    """The NUMA node of a GPU; None where it makes no difference or is not known.

    Args:
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


# Event times are float32 milliseconds since the anchor: after a minute still exact to 4 us.
ANCHOR_S = 60.0


class _Anchor(NamedTuple, Generic[EventT]):
    event: EventT
    host_s: float


class _Issued(NamedTuple, Generic[EventT]):
    start: EventT
    done: EventT
    anchor: _Anchor[EventT]


class CudaMark(Generic[StreamT, EventT]):
    """The end of a task on a stream: first it is *issued*, later the device is done with it."""

    __slots__ = ("_api", "_issue", "_issued", "stream")

    def __init__(self, api: CudaApi[StreamT, EventT], stream: StreamT) -> None:
        self.stream = stream
        self._api = api
        self._issue = HostMark()
        self._issued: _Issued[EventT] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if not self._issue.is_done:
            return False
        return self._issued is None or self._api.is_done(self._issued.done)

    @property
    def start_s(self) -> float:
        return self._time_s(self._issued.start) if self._issued else 0.0

    @property
    def end_s(self) -> float:
        return self._time_s(self._issued.done) if self._issued else 0.0

    def wait(self) -> None:
        """Block the calling thread until the device is done with the task.

        Raises:
            Cancelled: The task failed or was not started.
        """
        self._api.wait_event(self.wait_issued())

    def wait_issued(self) -> EventT:
        """Block until the task is in its stream; returns the event of its end.

        Raises:
            Cancelled: The task failed or was not started.
        """
        self._issue.wait()
        assert self._issued is not None
        return self._issued.done

    def finish(self, issued: _Issued[EventT]) -> None:
        """Say that the task is in its stream; once, by its lane."""
        self._issued = issued
        self._issue.finish(0.0, 0.0)

    def cancel(self, error: BaseException) -> None:
        """Say that the task will not be done; once, instead of `finish`."""
        self._issue.cancel(error)

    def _time_s(self, event: EventT) -> float:
        assert self._issued is not None
        anchor = self._issued.anchor
        return anchor.host_s + self._api.elapsed_s(anchor.event, event)


class CudaLane(Generic[StreamT, EventT]):
    """Owns a stream and the thread that issues to it.

    A dependency on a task of another stream is a wait of the stream; the thread waits only until
    that task is issued. A dependency on a task of a host lane blocks the thread, and so holds back
    this stream alone. Buffers that several streams use must not come from torch's caching
    allocator while a run lasts: it knows one stream per buffer.
    """

    is_synchronous = False

    def __init__(
        self,
        resource: Resource,
        api: CudaApi[StreamT, EventT],
        context: ThreadContext | None = None,
    ) -> None:
        """Start the thread.

        Args:
            resource: What the lane stands for.
            context: Entered by the thread; None for that of `api`.
        """
        self.resource = resource
        self.stream = api.new_stream()
        self._api = api
        self._anchor: _Anchor[EventT] | None = None
        self._last: EventT | None = None
        self._worker = Worker(f"raymoe-lane-{resource}", context or api.thread_context)

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> CudaMark[StreamT, EventT]:
        """Queue `call`, which enqueues the work of `task` on the stream; see `Lane.submit`."""
        del task  # its length is the device's affair
        mark = CudaMark(self._api, self.stream)
        self._worker.put(partial(self._run, call, after, mark))
        return mark

    def close(self) -> None:
        """Issue what was submitted, wait until the stream is done, end the thread."""
        self._worker.close()
        self._api.wait_stream(self.stream)

    def _run(self, call: Call, after: Sequence[Mark], mark: CudaMark[StreamT, EventT]) -> None:
        try:
            issued = self._issue(call, after)
        except BaseException as error:  # whatever it is belongs to those who wait for the mark
            # What the call enqueued before it failed still uses its buffers. If the device itself
            # failed, nothing runs any more, and the error at hand says why.
            with contextlib.suppress(RuntimeError):
                self._api.wait_stream(self.stream)
            mark.cancel(error)
        else:
            self._last = issued.done
            mark.finish(issued)

    def _issue(self, call: Call, after: Sequence[Mark]) -> _Issued[EventT]:
        api, stream = self._api, self.stream
        anchor = self._recent_anchor()
        for before in after:
            if not isinstance(before, CudaMark):
                before.wait()
            elif before.stream is not stream:
                api.stream_wait(stream, before.wait_issued())
            else:
                before.wait_issued()
        start, done = api.new_event(), api.new_event()
        with api.use(stream):
            api.record(start, stream)
            call()
            api.record(done, stream)
        return _Issued(start, done, anchor)

    def _recent_anchor(self) -> _Anchor[EventT]:
        """The lane's anchor; a new one where it is old and the stream has nothing to do."""
        anchor = self._anchor
        if anchor is not None:
            is_recent = time.perf_counter() - anchor.host_s < ANCHOR_S
            if is_recent or (self._last is not None and not self._api.is_done(self._last)):
                return anchor
        event = self._api.new_event()
        self._api.record(event, self.stream)
        self._api.wait_event(event)
        self._anchor = _Anchor(event, time.perf_counter())
        return self._anchor


logger = logging.getLogger(__name__)

# For the kernels themselves, the workspaces of matrix products and the allocator's rounding.
RESERVE_BYTES = 512 * MIB


class CudaDevice(Generic[StreamT, EventT]):
    """One GPU.

    Attributes:
        lanes: GPU, HTOD and DTOH are streams, CPU and HOST_COPY threads; closed with the device.
        ledger: Who has how much of the memory.
        torch_device: Where torch finds the memory.
        poison: None: a stream's work is not done when its call returns.
    """

    poison = None

    def __init__(
        self,
        driver: CudaDriver[StreamT, EventT],
        memory_bytes: int,
        place: NumaPlace | None = None,
    ) -> None:
        """Start the lanes; `open_cuda` is the usual way.

        Args:
            memory_bytes: How much `allocate` gives out in all.
            place: NUMA node of the GPU, on which the threads stay that feed it; kernels of the CPU
                lane use all cores that this process may.
        """
        self._place = place
        nearby = near(place, driver.thread_context)
        self._driver = driver
        self.ledger = MemoryLedger(memory_bytes)
        self.torch_device = driver.device
        self._pinned: list[PinnedMemory] = []
        streams = {
            resource: CudaLane(resource, driver, nearby)
            for resource in (Resource.GPU, Resource.HTOD, Resource.DTOH)
        }
        threads = {
            Resource.CPU: ThreadLane(Resource.CPU, context=driver.thread_context),
            Resource.HOST_COPY: ThreadLane(Resource.HOST_COPY, context=nearby),
        }
        self._compute_stream = streams[Resource.GPU].stream
        self.lanes: Mapping[Resource, Lane] = MappingProxyType({**streams, **threads})
        self._copy_stream = streams[Resource.HTOD].stream
        self._loader = PacketCopier(driver, self._copy_stream)

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        """Take device memory as a uint8 tensor with unspecified contents.

        Args:
            purpose: Row of the table that a refusal shows, such as "weight slots".

        Raises:
            CapacityError: The device has not that much left.
        """
        self.ledger.take(num_bytes, purpose)
        try:
            return self._driver.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            raise self._no_room(num_bytes, purpose) from error

    def reserve(self, num_bytes: int) -> None:
        """Take memory for what operations allocate while they run, and leave it to them.

        Raises:
            CapacityError: The GPU has not that much left.
        """
        try:
            self._driver.reserve(num_bytes, self._compute_stream)
        except torch.OutOfMemoryError as error:
            raise self._no_room(num_bytes, "intermediates") from error

    def _no_room(self, num_bytes: int, purpose: str) -> CapacityError:
        return CapacityError(
            f"the GPU has no {format_bytes(num_bytes)} left for {purpose}, although "
            f"{format_bytes(self.ledger.memory_bytes)} may be used: something else uses it (see "
            f"nvidia-smi). Taken so far:\n{self.ledger.table()}\n"
            "Free it, or set device_memory_bytes to what there is"
        )

    def memory_near(self) -> AbstractContextManager[None]:
        """Have host memory that this thread is the first to touch come from the GPU's node."""
        return memory_near(self._place)

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Take page-locked host memory, for buffers that are copied in every step."""
        return self._driver.allocate_pinned(num_bytes)

    def pin(self, memory: Tensor) -> str | None:
        """Page-lock host memory until `close`; the reason where that is refused."""
        pinned = PinnedMemory(memory, self._driver)
        reason = pinned.register()
        if reason is None:
            self._pinned.append(pinned)
            logger.info("pinned %s in %.1f s", format_bytes(memory.nbytes), pinned.seconds)
        return reason

    def load(self, target: Tensor, source: Tensor) -> None:
        """Copy a page of weights in packets; only in tasks of the HTOD lane."""
        self._loader.copy(target, source)

    def load_blocks(self, target: Tensor, source: Tensor, runs: Runs) -> None:
        """Copy runs of rows in one call where CUDA has it; only in tasks of the HTOD lane."""
        if not runs:
            return
        row_bytes = source[0].nbytes
        pieces = cut_runs(runs, row_bytes, source.data_ptr(), CHUNK_BYTES)
        if any(pinned.holds(source) for pinned in self._pinned):
            self._driver.copy_batch(target, source, pieces, self._copy_stream)
        else:
            copy_one_by_one(target, source, pieces)

    def synchronize(self) -> None:
        """Wait for the default stream: what the calling thread allocated, copied and computed."""
        self._driver.synchronize()

    def close(self) -> None:
        """Finish what was submitted, end the lanes, unpin; may be called again."""
        for lane in self.lanes.values():
            lane.close()
        while self._pinned:
            self._pinned.pop().close()


def check_cuda(index: int = 0) -> None:
    """Refuse a CUDA device that is not there.

    Raises:
        ConfigError: There is no such GPU, or torch was built without CUDA.
    """
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no CUDA device {index}: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()}; use the device 'cpu' or 'emulated'"
        )


def open_cuda(
    index: int = 0, memory_bytes: int | None = None
) -> CudaDevice[torch.cuda.Stream, torch.cuda.Event]:
    """The CUDA device `index`.

    Args:
        memory_bytes: How much may be used, by torch's allocator too; None for what is free now,
            less 512 MiB for what torch itself needs.

    Raises:
        ConfigError: There is no such GPU, or torch was built without CUDA.
    """
    check_cuda(index)
    driver = TorchCuda(index)
    driver.limit_memory(memory_bytes)
    if memory_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(driver.device)
        memory_bytes = max(free_bytes - RESERVE_BYTES, 0)
    return CudaDevice(driver, memory_bytes, find_place(driver.pci_address))
