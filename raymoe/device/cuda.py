"""One GPU: its streams and memory, and threads and host memory on its NUMA node.

A copy between a GPU and the memory of another socket uses the link between the sockets, which all
other traffic shares. Assumptions: Linux, sysfs in its usual place.

Source: Linux, Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci;
set_mempolicy(2), mbind(2).
"""

import contextlib
import ctypes
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Generic

import torch
from torch import Tensor

from raymoe import _native
from raymoe.device.cuda_api import (
    CudaApi,
    CudaDriver,
    EventT,
    PinnedMemory,
    PinningThread,
    StreamT,
    TorchCuda,
)
from raymoe.device.device import MemoryLedger, T
from raymoe.device.find_gpu import check_compiler, check_cuda, half_dtype, read_text
from raymoe.device.host_memory import map_memory
from raymoe.device.lane import (
    Call,
    Cancelled,
    Lane,
    Mark,
    TaskMark,
    ThreadContext,
    ThreadLane,
    Worker,
    call_all,
)
from raymoe.device.mover import Link
from raymoe.errors import CapacityError, ConfigError, PerformanceWarning
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import LinkUse
from raymoe.units import MIB, format_bytes

PREFERRED, DEFAULT = 1, 0  # policies of set_mempolicy(2) and mbind(2)
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers
MBIND = {"x86_64": 237, "aarch64": 235}
_MASK_BITS = 1024  # upper bound of NUMA nodes

SetPolicy = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaPlace:
    """A NUMA node, with those of its CPUs that this process may use."""

    node: int
    cpus: frozenset[int]


def find_place(
    pci_address: str, root: Path = Path("/"), allowed: frozenset[int] | None = None
) -> NumaPlace | None:
    """Return the NUMA node of a GPU; None if there is only one node or it is not known."""
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = {
        int(path.name.removeprefix("node")): parse_cpus(read_text(path / "cpulist"))
        for path in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    node = int(read_text(root / "sys/bus/pci/devices" / pci_address / "numa_node") or -1)
    cpus = nodes.get(node, frozenset()) & allowed
    if len(nodes) < 2 or not cpus:
        return None
    return NumaPlace(node=node, cpus=cpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list such as "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ConfigError(f"{text!r} is no list of CPUs such as 0-3,8")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def bind_thread(place: NumaPlace | None) -> None:
    """Pin the calling thread, and threads that it starts, to the CPUs of a node."""
    if place is not None:
        os.sched_setaffinity(0, place.cpus)


@contextmanager
def starting_near(place: NumaPlace | None) -> Iterator[None]:
    """Pin threads that start meanwhile to the CPUs of a node."""
    before = os.sched_getaffinity(0)
    bind_thread(place)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def memory_near(place: NumaPlace | None, set_policy: SetPolicy | None = None) -> Iterator[None]:
    """Prefer a node for pages that this thread makes, also those of a file in memory.

    Other nodes serve when it is full. Threads that it starts meanwhile inherit the preference, but
    others write too: `bind_memory` is for memory that can be mapped first.
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


def bind_memory(memory: Tensor, place: NumaPlace) -> str | None:
    """Prefer a node for pages of `memory`, whichever thread writes them first.

    Pages that exist stay where they are, and other nodes serve when it is full.

    Args:
        memory: Begins at a page.

    Returns:
        The reason if the kernel refuses, or the container, as Docker's does by default.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        return f"the call is not known for {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(memory.nbytes),
        ctypes.c_ulong(PREFERRED),
        _node_mask(place.node),
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_ulong(0),
    )
    return os.strerror(ctypes.get_errno()) if failed else None


def near(
    place: NumaPlace | None, context: Callable[[], AbstractContextManager[object]]
) -> Callable[[], AbstractContextManager[object]]:
    """Return a thread context that first pins its thread to a node."""

    def bound() -> AbstractContextManager[object]:
        bind_thread(place)
        return context()

    return bound


def _set_policy(policy: int, node: int | None) -> None:
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(
        ctypes.c_long(number),
        ctypes.c_long(policy),
        None if node is None else _node_mask(node),
        ctypes.c_ulong(0 if node is None else _MASK_BITS),
    )


def _node_mask(node: int) -> "ctypes.Array[ctypes.c_ulong]":
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    return mask


class CudaLane(Generic[StreamT, EventT]):
    """Owns a stream and the thread that issues to it.

    A dependency on a task of another stream becomes a wait of the stream; the thread waits only
    until that task is issued. A dependency on a task of a host lane blocks the thread, which delays
    this stream only. Buffers that several streams use must not come from torch's caching allocator
    during a run, because it tracks one stream per buffer.
    """

    is_synchronous = False

    def __init__(
        self,
        resource: Resource,
        api: CudaApi[StreamT, EventT],
        runtime: _native.DeviceRuntime,
        context: ThreadContext | None = None,
    ) -> None:
        self.resource = resource
        self.stream = api.new_stream()
        self._handle = api.handle(self.stream)
        self._api, self._runtime = api, runtime
        self._worker = Worker(f"raymoe-lane-{resource}", context or api.thread_context)

    def submit(self, task: Task, call: Call, after: Sequence[Mark]) -> TaskMark:
        del task  # the device determines its duration
        mark = TaskMark()
        self._worker.put(partial(self._run, call, after, mark))
        return mark

    def run(self, call: Callable[[], T]) -> T:
        """Call on the lane's thread in its stream; return when all of it is done."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                with self._api.use(self.stream):
                    result = call()
                self._api.wait_stream(self.stream)
            except BaseException as error:  # the caller gets it
                done.set_exception(error)
            else:
                done.set_result(result)

        self._worker.put(job)
        return done.result()

    def close(self) -> None:
        if self._worker.close():
            self._api.wait_stream(self.stream)

    def _run(self, call: Call, after: Sequence[Mark], mark: TaskMark) -> None:
        try:
            if not self._runtime.begin(self._handle, after, mark):
                raise Cancelled("a task before was cancelled")
            with self._api.use(self.stream):
                call()
            self._runtime.end(self._handle, mark)
        except BaseException as error:  # the waiters of the mark get it
            # Work that the call enqueued before it failed still uses its buffers. If the device
            # itself failed, nothing runs any more, and the error at hand explains it.
            with contextlib.suppress(RuntimeError):
                self._api.wait_stream(self.stream)
            mark.cancel(error)


ONE_RANGE = 1 << 62  # no chunk ends in it: torch copies a buffer in one call, within one range
# For kernels, workspaces of matrix products and the allocator's rounding.
RESERVE_BYTES = 512 * MIB


class CudaDevice(Generic[StreamT, EventT]):
    """One GPU: the GPU lane is a stream, copies are movers, CPU and HOST_COPY lanes are threads.

    `poison` is None, because a stream's work is not done when its call returns.
    """

    poison = None

    def __init__(
        self,
        driver: CudaDriver[StreamT, EventT],
        memory_bytes: int,
        place: NumaPlace | None = None,
    ) -> None:
        """Start the lanes.

        Args:
            memory_bytes: Total that `allocate` gives out.
            place: NUMA node of the GPU, for the threads that feed it; CPU lane kernels use all
                cores.
        """
        self._place = place
        self._nearby = nearby = near(place, driver.thread_context)
        self._driver = driver
        self.ledger = MemoryLedger(memory_bytes)
        self.torch_device = driver.device
        self._pinned: list[PinnedMemory | PinningThread] = []
        self._is_placement_refused = False
        self._runtime = driver.open_runtime()
        self._copy_streams: list[StreamT] = []
        with starting_near(place):
            self._link = Link(self._runtime, self._new_copy_stream)
        self._compute = CudaLane(Resource.GPU, driver, self._runtime, nearby)
        self.lanes: Mapping[Resource | Op, Lane] = MappingProxyType(
            {
                **self._link.lanes,
                Resource.GPU: self._compute,
                Resource.CPU: ThreadLane(Resource.CPU, context=driver.thread_context),
                Resource.HOST_COPY: ThreadLane(Resource.HOST_COPY, context=nearby),
            }
        )

    def _new_copy_stream(self, _to_device: bool) -> int:
        self._copy_streams.append(self._driver.new_stream())
        return self._driver.handle(self._copy_streams[-1])

    def allocate(self, num_bytes: int, purpose: str = "buffers") -> Tensor:
        self.ledger.take(num_bytes, purpose)
        try:
            return self._driver.allocate(num_bytes)
        except torch.OutOfMemoryError as error:
            raise self._no_room(num_bytes, purpose) from error

    def prepare(self, num_bytes: int, compile_kernels: Callable[[], object]) -> None:
        def start() -> None:
            self._driver.reserve(num_bytes)
            compile_kernels()

        try:
            self._compute.run(start)
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
        return memory_near(self._place)

    def bind(self, memory: Tensor) -> None:
        place = self._place
        reason = None if place is None else bind_memory(memory, place)
        if place is not None and reason is not None and not self._is_placement_refused:
            self._is_placement_refused = True
            warnings.warn(
                f"host memory cannot be placed on NUMA node {place.node}, that of the GPU (mbind: "
                f"{reason}), and copies from another node are slower: allow it (docker run "
                f"--cap-add SYS_NICE), or start the process by numactl --preferred={place.node}",
                PerformanceWarning,
                stacklevel=2,
            )

    def allocate_pinned(self, num_bytes: int) -> Tensor:
        """Map and page-lock as much as was asked for; torch's allocator takes a power of two."""
        memory = map_memory(num_bytes)
        self.bind(memory)
        pinned = PinnedMemory(memory, self._driver)
        reason = pinned.register(chunk_bytes=ONE_RANGE)
        if reason is not None:
            raise CapacityError(
                f"cannot pin {format_bytes(num_bytes)} of host memory for buffers between host and "
                f"GPU: {reason}. Give the container more memory, or reduce host_memory_bytes"
            )
        self._pinned.append(pinned)
        return memory

    def pin(self, memory: Tensor) -> str | None:
        """Page-lock host memory until `close`; return the reason if that is refused."""
        return self.start_pinning(memory).wait()

    def start_pinning(self, memory: Tensor) -> PinningThread:
        pinning = PinningThread(memory, self._driver, self._nearby)
        self._pinned.append(pinning)
        return pinning

    def compute(self, call: Callable[[], T]) -> T:
        """Call on the GPU lane's thread in its stream; return when all of it is done."""
        return self._compute.run(call)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the calling thread launch kernels in the stream of the GPU lane."""
        with self._driver.thread_context(), self._driver.use(self._compute.stream):
            yield

    def synchronize(self) -> None:
        """Wait for the current stream: allocations, copies and kernels of the calling thread."""
        self._driver.synchronize()

    def traffic(self) -> Mapping[Resource, LinkUse]:
        return self._link.traffic()

    def close(self) -> None:
        """End the lanes and release pinned memory.

        A device that has failed refuses some of it; the rest is released all the same, and the
        first refusal is raised.
        """
        pinned, self._pinned = self._pinned, []
        call_all(
            [
                *(lane.close for lane in self.lanes.values()),
                *(memory.close for memory in pinned),
                self._runtime.close,
            ]
        )


def free_gpu_bytes(index: int = 0) -> int:
    """Free memory of a GPU beside what the context and torch's libraries take in this process.

    CUDA loads its libraries and kernels when they are first used, so this uses those that need
    most: matrix products, attention and sorting.
    """
    check_cuda(index)
    device = torch.device("cuda", index)
    with torch.inference_mode():
        for dtype in (half_dtype(), torch.float32):
            matrix = torch.ones(1, 16, 64, dtype=dtype, device=device)
            torch.nn.functional.linear(matrix, matrix[0])
            torch.bmm(matrix, matrix.mT)
            torch.nn.functional.scaled_dot_product_attention(matrix, matrix, matrix)
        matrix.softmax(-1).topk(2)[1].sort()[0].cumsum(-1)
        torch.cuda.default_stream(device).synchronize()
    del matrix
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes)


def open_cuda(
    index: int = 0, memory_bytes: int | None = None
) -> CudaDevice[torch.cuda.Stream, torch.cuda.Event]:
    """Open the CUDA device `index`.

    `memory_bytes` limits torch's allocator too; None uses what is free now, less 512 MiB for torch.

    Raises:
        ConfigError: There is no such GPU, or Triton cannot compile kernels for it.
    """
    check_cuda(index)
    check_compiler(torch.cuda.get_device_capability(index))
    driver = TorchCuda(index)
    driver.limit_memory(memory_bytes)
    if memory_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info(driver.device)
        memory_bytes = max(free_bytes - RESERVE_BYTES, 0)
    return CudaDevice(driver, memory_bytes, find_place(driver.pci_address))
