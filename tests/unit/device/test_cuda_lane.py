"""Lanes that are streams, on a device that works late or at random moments: order and waits."""

from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from raymoe.device.cuda import CudaLane
from raymoe.device.lane import Cancelled, Lane, ThreadLane
from raymoe.errors import ExecutionError
from raymoe.runtime.executor import Bindings, Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from tests.unit.device.fake_cuda import FakeCuda, FakeEvent, FakeStream
from tests.unit.runtime.random_schedules import (
    Memory,
    new_memory,
    random_schedule,
    serial_result,
    work,
)

STREAMS = (Resource.GPU, Resource.HTOD, Resource.DTOH)
Lanes = Mapping[Resource, Lane]


def lanes_of(api: FakeCuda) -> Lanes:
    runtime = api.open_runtime()
    return {
        resource: CudaLane(resource, api, runtime) if resource in STREAMS else ThreadLane(resource)
        for resource in Resource
    }


def close(lanes: Lanes) -> None:
    for lane in lanes.values():
        lane.close()


@pytest.fixture
def api() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def lanes(api: FakeCuda) -> Iterator[Lanes]:
    lanes = lanes_of(api)
    yield lanes
    close(lanes)


def run_on(api: FakeCuda) -> Bindings[Memory]:
    def run(task: Task, memory: Memory) -> None:
        if task.resource in STREAMS:
            api.launch(partial(work, task, memory))
        else:
            work(task, memory)

    return dict.fromkeys(Op, run)


def chain(*ops: tuple[Op, Resource]) -> Schedule:
    link = Buffer("link")
    tasks = [
        Task(op=op, layer=k, part=0, resource=resource, reads=(link,), writes=(link,))
        for k, (op, resource) in enumerate(ops)
    ]
    return Schedule("chain", tuple(tasks), frozenset({link}))


@pytest.mark.parametrize("delay", [0.0, 0.5, 0.9])
def test_streams_and_threads_give_the_serial_result(delay: float) -> None:
    for seed in range(40):
        schedule, api = random_schedule(seed), FakeCuda(delay=delay, seed=seed)
        memory, lanes = new_memory(schedule), lanes_of(api)
        Executor(schedule, run_on(api), lanes).run(memory)
        close(lanes)
        assert memory == serial_result(schedule)


def test_the_host_waits_for_the_device_only_where_the_host_needs_it(
    api: FakeCuda, lanes: Lanes
) -> None:
    schedule = chain(
        (Op.W, Resource.HTOD), (Op.POST, Resource.GPU), (Op.QKV, Resource.DTOH),
        (Op.ATTN, Resource.CPU), (Op.HID, Resource.HTOD), (Op.POST, Resource.GPU),
    )  # fmt: skip
    memory = new_memory(schedule)
    Executor(schedule, run_on(api), lanes).run(memory)
    assert memory == serial_result(schedule)
    waits = [name for name in api.host_waits if name != "MainThread"]
    # Once for the clock, before the first task; else only the CPU's lane.
    assert waits == ["raymoe-lane-htod", "raymoe-lane-cpu"]


def test_work_is_issued_before_the_device_has_done_what_it_waits_for(
    api: FakeCuda, lanes: Lanes
) -> None:
    calls: list[str] = []
    loaded = lanes[Resource.HTOD].submit(
        _task(Op.W), lambda: api.launch(lambda: calls.append("load")), ()
    )
    used = lanes[Resource.GPU].submit(
        _task(Op.POST), lambda: api.launch(lambda: calls.append("use")), [loaded]
    )
    assert isinstance(lanes[Resource.GPU], CudaLane)
    lanes[Resource.GPU].submit(_task(Op.PRE), lambda: calls.append("issued"), ()).wait()
    assert calls == ["issued", "load", "use"]
    assert loaded.is_done
    assert used.is_done


def test_times_are_those_of_the_device(api: FakeCuda, lanes: Lanes) -> None:
    marks = [
        lanes[Resource.GPU].submit(
            _task(Op.POST), lambda: [api.launch(lambda: None) for _ in range(3)] and None, ()
        )
        for _ in range(2)
    ]
    marks[-1].wait()
    # The start, three steps of one second, the end.
    assert marks[0].end_s - marks[0].start_s == pytest.approx(4.0)
    assert marks[1].start_s - marks[0].end_s == pytest.approx(1.0)


def test_a_task_that_failed_half_issued_is_over_when_its_mark_says_so(
    api: FakeCuda, lanes: Lanes
) -> None:
    calls: list[str] = []

    def issue() -> None:
        api.launch(lambda: calls.append("half"))
        raise ValueError("no second half")

    mark = lanes[Resource.GPU].submit(_task(Op.POST), issue, ())
    with pytest.raises(Cancelled) as caught:
        mark.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert calls == ["half"]
    assert mark.is_done
    assert mark.start_s == mark.end_s == 0.0


def test_streams_do_not_wait_for_what_was_cancelled(api: FakeCuda, lanes: Lanes) -> None:
    calls: list[str] = []
    failed = lanes[Resource.CPU].submit(_task(Op.ATTN), lambda: 1 // 0, ())
    waiting = lanes[Resource.HTOD].submit(_task(Op.HID), lambda: calls.append("load"), [failed])
    behind = lanes[Resource.GPU].submit(_task(Op.POST), lambda: calls.append("use"), [waiting])
    for mark in (waiting, behind):
        with pytest.raises(Cancelled):
            mark.wait()
    assert calls == []


def test_a_fault_of_the_device_names_the_task(api: FakeCuda, lanes: Lanes) -> None:
    def run(task: Task, _state: None) -> None:
        if task.op is Op.POST:
            api.launch(lambda: 1 // 0)

    schedule = chain((Op.W, Resource.HTOD), (Op.POST, Resource.GPU), (Op.ATTN, Resource.CPU))
    executor = Executor(schedule, dict.fromkeys(Op, run), lanes)
    with pytest.raises(ExecutionError, match=r"on lane \w+ .*CUDA error: .*zero"):
        executor.run(None)
    api._fault = None  # a real device would stay broken; the fixture closes this one


def test_close_waits_for_the_stream(api: FakeCuda) -> None:
    lane: CudaLane[FakeStream, FakeEvent] = CudaLane(Resource.GPU, api, api.open_runtime())
    calls: list[str] = []
    lane.submit(_task(Op.POST), lambda: api.launch(lambda: calls.append("done")), ())
    lane.close()
    assert calls == ["done"]


def test_the_clock_is_set_anew_when_it_is_old(api: FakeCuda) -> None:
    def anchors(anchor_s: float) -> int:
        api.anchor_s, before = anchor_s, len(api.host_waits)
        lane = CudaLane(Resource.GPU, api, api.open_runtime())
        for _ in range(3):
            lane.submit(_task(Op.POST), lambda: None, ())
        lane.close()
        return len(api.host_waits) - before

    assert anchors(60.0) == 1
    assert anchors(0.0) == 6  # for the start and the end of each task


def _task(op: Op) -> Task:
    return Task(op=op, layer=0, part=0, resource=Resource.GPU)
