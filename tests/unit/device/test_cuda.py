"""The CUDA device on a GPU: memory, pinned copies, streams; without one, a clear refusal."""

import mmap
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from raymoe.device import cuda as cuda_module
from raymoe.device.cuda import CudaDevice, open_cuda
from raymoe.device.cuda_api import PinnedMemory
from raymoe.device.mover import Copies
from raymoe.engine.release import return_memory
from raymoe.errors import CapacityError, ConfigError
from raymoe.memory.arena import HostArena
from raymoe.runtime.executor import Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.units import GIB, MIB
from tests.unit.device.deferred_cuda import DeferredCuda

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with closing(open_cuda(memory_bytes=2 * GIB)) as device:
        yield device


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no GPU 99: .*or choose the device 'cpu'"):
        open_cuda(99)


def test_kernels_are_compiled_where_steps_run_after_memory_was_reserved() -> None:
    cuda, seen = DeferredCuda(), []

    def compile_kernels() -> None:
        seen.append((threading.current_thread().name, cuda.is_in_stream, list(cuda.allocated)))

    with closing(CudaDevice(cuda, GIB)) as device:
        device.prepare(MIB, compile_kernels)
        assert seen == [("raymoe-lane-gpu", True, [MIB])]
        cuda.memory_bytes = MIB
        with pytest.raises(CapacityError, match=r"no 2\.00 MiB left for intermediates"):
            device.prepare(2 * MIB, compile_kernels)
    assert len(seen) == 1


class RegisteringCuda(DeferredCuda):
    """Keeps which host memory is page-locked."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.ranges: dict[int, int] = {}
        self._limit_bytes = limit_bytes

    def register(self, address: int, num_bytes: int) -> str | None:
        if sum(self.ranges.values()) + num_bytes > self._limit_bytes:
            return "out of memory"
        self.ranges[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def test_buffers_are_pinned_in_their_size_and_in_one_range_until_the_device_is_closed() -> None:
    cuda, sizes = RegisteringCuda(64 * MIB), [5, 3 * MIB + 1, 33 * MIB]
    with closing(CudaDevice(cuda, GIB)) as device:
        buffers = [device.allocate_pinned(size) for size in [0, *sizes]][1:]
        places = [buffer.data_ptr() for buffer in buffers]
        assert cuda.ranges == dict(zip(places, sizes, strict=True))
        assert [place % mmap.PAGESIZE for place in places] == [0, 0, 0]
        for buffer in buffers:
            assert not buffer.any()
        with pytest.raises(
            CapacityError, match=r"cannot pin 32\.00 MiB .*: out of memory after 0 B"
        ):
            device.allocate_pinned(32 * MIB)
        assert len(cuda.ranges) == 3
    assert cuda.ranges == {}


def test_a_buffer_over_the_border_of_a_chunk_is_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RegisteringCuda(GIB)
    memory = torch.zeros(8 * mmap.PAGESIZE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % mmap.PAGESIZE :][: 6 * mmap.PAGESIZE]
    monkeypatch.setattr(cuda_module, "map_memory", lambda _: memory)
    defaults = PinnedMemory.register.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "chunk_bytes", mmap.PAGESIZE)
    with closing(CudaDevice(cuda, GIB)) as device:
        device.allocate_pinned(memory.nbytes)
        assert cuda.ranges == {memory.data_ptr(): memory.nbytes}


@pytest.mark.gpu
@needs_gpu
def test_pinned_buffers_are_known_to_torch_and_take_no_more_than_they_hold(
    device: CudaDevice,
) -> None:
    buffer = device.allocate_pinned(3 * MIB + 5)
    assert buffer.is_pinned()
    assert buffer.nbytes == 3 * MIB + 5


@pytest.mark.gpu
@needs_gpu
def test_what_was_reserved_comes_back_after_products_in_steps() -> None:
    def multiply() -> None:
        square = torch.ones(512, 512, device="cuda")
        torch.mm(square, square)

    return_memory()
    before = torch.cuda.memory_reserved()
    with closing(open_cuda(memory_bytes=GIB)) as device:
        device.prepare(256 * MIB, multiply)
        assert torch.cuda.memory_reserved() - before >= 256 * MIB
    return_memory()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.gpu
@needs_gpu
def test_memory_is_limited(device: CudaDevice) -> None:
    device.allocate(GIB, "weight slots")
    assert device.ledger.used_bytes == GIB
    with pytest.raises(CapacityError, match="weight slots"):
        device.allocate(GIB + 1, "KV staging")


@pytest.mark.gpu
@needs_gpu
def test_pages_travel_through_three_streams_and_back(device: CudaDevice) -> None:
    pages, result, slots = Buffer("pages"), Buffer("result"), [Buffer("slot", (k,)) for k in (0, 1)]
    tasks = []
    for layer in range(16):
        slot = slots[layer % 2]
        load = Task(
            op=Op.W, layer=layer, part=0, resource=Resource.HTOD, reads=(pages,), writes=(slot,)
        )
        use = Task(
            op=Op.EXPERTS, layer=layer, part=0, resource=Resource.GPU, reads=(slot, result),
            writes=(result,),
        )  # fmt: skip
        tasks += [load, use]
    tasks.append(Task(op=Op.QKV, layer=0, part=0, resource=Resource.DTOH, reads=(result,)))
    arena = HostArena(16 * 32 * MIB)
    host = arena.allocate(16 * 32 * MIB).view(torch.float32).view(16, -1)
    host.copy_(torch.arange(16, dtype=torch.float32)[:, None].expand_as(host))
    assert device.pin(host) is None
    memory = device.allocate(2 * 32 * MIB).view(torch.float32).view(2, -1)
    total = device.allocate(32 * MIB).view(torch.float32)
    total.zero_()
    back = device.allocate_pinned(32 * MIB).view(torch.float32)
    run = {
        Op.W: lambda task, _: Copies.of((memory[task.layer % 2], host[task.layer])),
        Op.EXPERTS: lambda task, _: total.add_(memory[task.layer % 2]),
        Op.QKV: lambda _task, _: Copies.of((back, total)),
    }
    torch.cuda.current_stream().synchronize()
    schedule = Schedule("pages", tuple(tasks), frozenset({pages, result}))
    timeline = Executor(schedule, run, device.lanes).run(None)
    assert (back == sum(range(16))).all()
    assert all(span.duration_s > 0 for span in timeline.spans)


@pytest.mark.gpu
@needs_gpu
def test_packets_reach_nine_tenths_of_one_pinned_copy(device: CudaDevice) -> None:
    num_bytes = 512 * MIB
    arena = HostArena(num_bytes)
    host, target = arena.allocate(num_bytes), device.allocate(num_bytes)
    assert device.pin(host) is None
    stream = torch.cuda.current_stream()

    def seconds(copy) -> float:  # type: ignore[no-untyped-def]
        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            copy()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    def whole() -> None:
        target.copy_(host, non_blocking=True)
        stream.synchronize()

    lane = device.lanes[Op.W]
    load = Task(op=Op.W, layer=0, part=0, resource=Resource.HTOD)

    def packets() -> None:
        lane.submit(load, lambda: Copies.of((target, host)), ()).wait()

    whole()
    assert seconds(whole) / seconds(packets) >= 0.9
