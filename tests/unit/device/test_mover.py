"""Native movers: all bytes arrive, two packets in flight, errors, and what crossed the link."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from raymoe import _native
from raymoe.device.cuda import CudaDevice
from raymoe.device.lane import Cancelled, TaskMark, released_on_error
from raymoe.device.mover import Copies, CopyTime, Link, MoverLane
from raymoe.errors import ConfigError, ExecutionError
from raymoe.runtime.executor import Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from tests.unit.device.deferred_cuda import BreakableCuda, DeferredCuda, lane_threads
from tests.unit.device.fake_cuda import FakeCuda, FakeEvent
from tests.unit.runtime.random_schedules import new_memory, random_schedule, serial_result, work

LOAD = Task(op=Op.W, layer=0, part=0, resource=Resource.HTOD)
ROW = 24


@contextmanager
def mover_on(
    api: FakeCuda, *, packet_bytes: int = 16, chunk_bytes: int = 1 << 30
) -> Iterator[MoverLane]:
    mover = _native.Mover(
        "mover", api.open_runtime(), api.handle(api.new_stream()), to_device=True,
        packet_bytes=packet_bytes, chunk_bytes=chunk_bytes, meter=_native.LinkMeter(),
    )  # fmt: skip
    lane = MoverLane(Resource.HTOD, mover)
    try:
        yield lane
    finally:
        lane.close()


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", [0, 1, 16, 17, 1000])
def test_all_bytes_arrive_in_packets(num_bytes: int) -> None:
    api, source = FakeCuda(), random_bytes(num_bytes)
    target = torch.zeros_like(source)
    with mover_on(api) as lane:
        mark = lane.submit(LOAD, lambda: Copies.of((target, source)), ())
        mark.wait()
        assert torch.equal(target, source)
        assert mark.is_done
        assert mark.end_s > mark.start_s > 0
    assert api.copies == [[16]] * (num_bytes // 16) + [[num_bytes % 16]] * (num_bytes % 16 > 0)


def test_at_most_two_packets_are_in_flight_and_more_if_they_are_small() -> None:
    def num_enqueued(sizes: list[int]) -> int:
        """Copies that are enqueued before the host waits for the first."""
        api = FakeCuda()
        api.anchor_s = 1e9
        with mover_on(api) as lane:
            lane.submit(LOAD, Copies, ()).wait()  # sets the clock
            counts, synchronize = [], api.wait_event

            def wait_event(event: FakeEvent) -> None:
                counts.append(len(api.copies))
                synchronize(event)

            api.wait_event = wait_event  # type: ignore[method-assign]
            pages = [random_bytes(size) for size in sizes]
            pairs = [(torch.zeros_like(page), page) for page in pages]
            marks = [lane.submit(LOAD, partial(Copies.of, pair), ()) for pair in pairs]
            marks[-1].wait()
        return counts[0]

    assert num_enqueued([160, 160]) == 2
    assert num_enqueued([16, 16, 16]) == 2
    assert num_enqueued([8] * 10) == 4


def test_no_copy_crosses_a_multiple_of_the_chunk_in_host_memory() -> None:
    memory = torch.arange(256, dtype=torch.int64).to(torch.uint8).repeat(4)
    begin = -memory.data_ptr() % 64 + 40  # 24 bytes before a multiple of 64
    source = memory[begin : begin + 24 + 64 + 10]
    target, api = torch.zeros_like(source), FakeCuda()
    with mover_on(api, packet_bytes=40, chunk_bytes=64) as lane:
        lane.submit(LOAD, lambda: Copies.of((target, source)), ()).wait()
    assert torch.equal(target, source)
    assert api.copies == [[24], [16], [40], [8], [10]]


def test_types_may_differ_but_not_sizes_or_strides() -> None:
    target = torch.zeros(2, 8, dtype=torch.uint8)
    assert Copies.of((target, torch.ones(4))).rows[0][2] == 16
    with pytest.raises(ConfigError, match="cannot copy 20 bytes to 16 bytes"):
        Copies.of((target, torch.ones(5)))
    with pytest.raises(ConfigError, match="in one piece"):
        Copies.of((target, torch.ones(8)[::2]))
    with pytest.raises(ValueError, match="too small"), mover_on(FakeCuda(), packet_bytes=0):
        pass


@pytest.mark.parametrize("version", [12060, 12080, 13000])
@pytest.mark.parametrize("has_batches", [True, False])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_runs_of_pinned_blocks_travel_in_one_call(
    version: int, has_batches: bool, is_pinned: bool
) -> None:
    api, runs = FakeCuda(), np.array([(3, 0, 2), (30, 2, 5), (0, 9, 1)])
    api.version, api.has_batches = version, has_batches
    source = torch.randint(0, 256, (40, ROW), dtype=torch.uint8)
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    for begin, into, count in runs:
        expected[into : into + count] = source[begin : begin + count]
    with mover_on(api, packet_bytes=1000) as lane:
        copies = Copies.of_runs(target, source, runs, is_pinned=is_pinned)
        lane.submit(LOAD, lambda: copies, ()).wait()
        lane.submit(
            LOAD, lambda: Copies.of_runs(target, source, runs[:0], is_pinned=True), ()
        ).wait()
    assert torch.equal(target, expected)
    sizes = [2 * ROW, 5 * ROW, ROW]
    in_one = is_pinned and has_batches and version >= 12080
    assert api.copies == ([sizes] if in_one else [[size] for size in sizes])


def test_a_refused_batch_is_an_error() -> None:
    api, source = FakeCuda(), torch.zeros(4, ROW)
    api._memcpybatchasync = lambda *_: 1  # type: ignore[method-assign]
    with mover_on(api, packet_bytes=1000) as lane:
        runs = np.array([(0, 0, 1), (2, 2, 1)])
        target = torch.zeros_like(source)
        copies = Copies.of_runs(target, source, runs, is_pinned=True)
        mark = lane.submit(LOAD, lambda: copies, ())
        with pytest.raises(Cancelled) as caught:
            mark.wait()
    assert "CUDA error 1 in cudaMemcpyBatchAsync" in str(caught.value.__cause__)


@pytest.mark.parametrize("delay", [0.0, 0.5, 0.9])
def test_movers_streams_and_threads_give_the_serial_result(delay: float) -> None:
    """A copy's source is the number of a task, which is done when the device would copy."""
    for seed in range(30):
        schedule, api = random_schedule(seed), DeferredCuda(delay=delay, seed=seed)
        calls: dict[int, Callable[[], object]] = {}

        def copy(target, source, num_bytes, kind, stream, api=api, calls=calls) -> None:
            with api._lock:
                api._stream(stream).steps.append(calls[source])
                api._drift()

        api._memcpyasync = copy  # type: ignore[method-assign]
        device = CudaDevice(api, 1 << 30)

        def run(task: Task, memory, api=api, calls=calls) -> Copies | None:
            if task.resource in {Resource.HTOD, Resource.DTOH}:
                calls[task.layer + 1] = partial(work, task, memory)
                return Copies([(1, task.layer + 1, 1)])
            if task.resource is Resource.GPU:
                api.launch(partial(work, task, memory))
            else:
                work(task, memory)
            return None

        memory = new_memory(schedule)
        Executor(schedule, dict.fromkeys(Op, run), device.lanes).run(memory)
        device.close()
        assert memory == serial_result(schedule)


@pytest.mark.parametrize("op", [Op.W, Op.KV])
def test_pages_and_kv_do_not_wait_for_hidden_states_that_wait_for_the_cpu(op: Op) -> None:
    device = CudaDevice(DeferredCuda(), 1 << 30)
    may_end, lanes = threading.Event(), device.lanes
    page = torch.ones(100)
    late = lanes[Resource.CPU].submit(_task(Op.ATTN), lambda: may_end.wait(10), ())
    hidden = lanes[Resource.HTOD].submit(_task(Op.HID), Copies, [late])
    target = torch.zeros(100)
    lanes[op].submit(_task(op), lambda: Copies.of((target, page)), ()).wait()
    assert torch.equal(target, page)
    assert not hidden.is_done
    may_end.set()
    hidden.wait()
    device.close()


def test_a_failed_call_an_old_failure_and_a_token_cancel_a_copy() -> None:
    with mover_on(FakeCuda()) as lane:
        failed = lane.submit(LOAD, lambda: 1 // 0, ())
        waiting = lane.submit(LOAD, Copies, [failed])
        token = _native.CancelToken()
        token.cancel()
        cancelled = lane.submit(LOAD, lambda: Copies(token=token), ())
        for mark, cause in ((failed, ZeroDivisionError), (waiting, type(None))):
            with pytest.raises(Cancelled) as caught:
                mark.wait()
            assert isinstance(caught.value.__cause__, cause)
            assert mark.start_s == mark.end_s == 0.0
        with pytest.raises(Cancelled):
            cancelled.wait()
    with pytest.raises(ExecutionError, match="mover is closed"):
        lane.submit(LOAD, Copies, ())


def test_a_fault_of_the_device_is_the_error_of_the_task_that_copies() -> None:
    api = FakeCuda()
    with mover_on(api) as lane:
        lane.submit(LOAD, Copies, ()).wait()
        api._fault = ValueError("an illegal address")
        schedule = Schedule("load", (LOAD,), frozenset())
        target, source = torch.zeros(10), torch.zeros(10)
        copies = Copies.of((target, source))
        executor = Executor(schedule, {Op.W: lambda *_: copies}, {Resource.HTOD: lane})
        with pytest.raises(ExecutionError, match=r"w\[0,0\].*CUDA error.*an illegal address"):
            executor.run(None)
        api._fault = None


def test_what_is_called_when_bytes_are_there_comes_before_the_end_of_the_task() -> None:
    link = _native.SimulatedLink(bytes_per_s=1e9, copies=True)
    lane = Link(link, link.new_stream).lanes[Op.W]
    source, events = random_bytes(1000), []
    target = torch.zeros_like(source)

    def on_done() -> None:
        assert not mark.is_done
        events.append(torch.equal(target, source))

    is_submitted = threading.Event()
    copies = Copies.of((target, source))
    copies.on_done = lambda: is_submitted.wait(10) and on_done()
    mark = lane.submit(LOAD, lambda: copies, ())
    is_submitted.set()
    mark.wait()
    assert events == [True]
    broken = Copies(on_done=lambda: 1 // 0)
    failed = lane.submit(LOAD, lambda: broken, ())
    with pytest.raises(Cancelled) as caught:
        failed.wait()
    assert "ZeroDivisionError" in str(caught.value.__cause__)
    lane.close()


def test_a_small_copy_waits_for_one_packet_of_pages() -> None:
    packet_s = 0.05
    link = _native.SimulatedLink(bytes_per_s=(16 << 20) / packet_s, copies=False)
    lanes = Link(link, link.new_stream).lanes
    page = torch.empty(64 << 20, dtype=torch.uint8)
    pages = [lanes[Op.W].submit(LOAD, lambda: Copies.of((page, page)), ()) for _ in range(2)]
    while not pages[0].is_done:
        time.sleep(packet_s / 10)
    small = lanes[Resource.HTOD].submit(
        _task(Op.HID), lambda: Copies.of((page[:1000], page[:1000])), ()
    )
    pages[1].wait()
    assert small.is_done
    # One packet is in progress and one waits: the small copy goes before the second of them, which
    # would end 1.8 packets later.
    assert small.end_s - small.start_s <= 1.4 * packet_s
    for lane in lanes.values():
        lane.close()


def test_traffic_counts_bytes_and_the_time_in_which_they_moved() -> None:
    link = _native.SimulatedLink(bytes_per_s=0.0, copies=True)
    movers = Link(link, link.new_stream, lambda _task: CopyTime(0.004, 0.001))
    page, source = random_bytes(1000), random_bytes(1000)
    for key in (Op.W, Op.KV, Resource.HTOD, Resource.DTOH):
        for _ in range(2):
            copies = Copies.of((page, source))
            movers.lanes[key].submit(LOAD, lambda copies=copies: copies, ()).wait()
            time.sleep(0.02)  # a gap, which does not count
    traffic = movers.traffic()
    for lane in movers.lanes.values():
        lane.close()
    assert traffic[Resource.HTOD].num_bytes == 6000
    assert traffic[Resource.DTOH].num_bytes == 2000
    for resource, num_copies in ((Resource.HTOD, 6), (Resource.DTOH, 2)):
        assert 0.004 * num_copies <= traffic[resource].busy_s
        assert traffic[resource].bytes_per_s <= 1000 / 0.004


def test_a_mover_waits_for_a_mark_that_a_python_thread_ends() -> None:
    mark = TaskMark()
    with mover_on(FakeCuda()) as lane:
        copied = lane.submit(LOAD, Copies, [mark])
        assert not copied.is_done
        mark.finish(1.0, 2.0)
        copied.wait()
    assert (mark.start_s, mark.end_s) == (1.0, 2.0)


def test_a_device_that_has_failed_releases_everything_and_raises_the_first_error() -> None:
    cuda = BreakableCuda()
    device = CudaDevice(cuda, 1 << 30)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096
    for page in range(2):
        part = memory[begin + page * 8192 : begin + page * 8192 + 4096]
        assert device.pin(part) is None
    cuda.fail("an illegal address")
    with pytest.raises(RuntimeError, match="cudaStreamSynchronize: CUDA error: an illegal address"):
        device.close()
    assert cuda.registered == set()
    assert lane_threads() == []
    device.close()


def test_an_error_of_releasing_does_not_hide_the_first() -> None:
    def release() -> None:
        raise RuntimeError("second")

    with pytest.raises(KeyError, match="first") as caught, released_on_error(release):
        raise KeyError("first")
    assert caught.value.__notes__ == ["and releasing failed: RuntimeError: second"]
    with released_on_error(release):
        pass


def _task(op: Op) -> Task:
    return Task(op=op, layer=0, part=0, resource=Resource.GPU, reads=(Buffer("x"),))
