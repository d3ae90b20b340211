"""What has no order is reported with both accesses, and nothing else is."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from raymoe import _native
from raymoe.device.lane import Mark
from raymoe.device.mover import Copies
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.units import MIB
from tests.unit.device.checked_cuda import CheckedCuda, CheckedDevice, watch
from tests.unit.device.happens_before import Wait, asked_for, find_hazards


class Lanes:
    """A device with memory on both sides, and one task for each of its lanes."""

    def __init__(self, cuda: CheckedCuda) -> None:
        self.cuda, self.device = cuda, CheckedDevice(cuda, MIB)
        self.there, self.here = self.device.allocate(64), self.device.allocate_pinned(64)

    def compute(self, *after: Mark, call: Callable[[], object] | None = None) -> Mark:
        return self.submit(Op.PRE, Resource.GPU, call or (lambda: self.there.add_(1)), *after)

    def fill(self, *after: Mark) -> Mark:
        return self.submit(Op.ATTN, Resource.CPU, lambda: self.here.fill_(1), *after)

    def send(self, *after: Mark, begin: int = 0) -> Mark:
        copies = Copies.of((self.there[begin:], self.here[begin:]))
        return self.submit(Op.HID, Resource.HTOD, lambda: copies, *after)

    def fetch(self, source: Tensor, *after: Mark) -> Mark:
        copies = Copies.of((self.here, source))
        return self.submit(Op.QKV, Resource.DTOH, lambda: copies, *after)

    def submit(self, op: Op, resource: Resource, call: Callable[[], object], *after: Mark) -> Mark:
        task = Task(op=op, resource=resource, layer=0, part=0, reads=(), writes=())
        return self.device.lanes[resource].submit(task, call, after)

    def hazards(self, overlooks: Callable[[Wait], bool] = asked_for) -> list[str]:
        self.device.close()
        return [str(hazard) for hazard in find_hazards(self.cuda.trace, overlooks)]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lanes]:
    cuda = CheckedCuda()
    watch(monkeypatch, cuda)
    with cuda.watching():
        lanes = Lanes(cuda)
        yield lanes
        lanes.device.close()


READ_TOO_EARLY = (
    "write after write in device memory for buffers: add_ of pre[0,0] on stream gpu, "
    "and before it copy of hid[0,0] on stream htod"
)
FILLED_TOO_EARLY = (
    "write after read in pinned buffer: fill_ of attn[0,0] on raymoe-lane-cpu, "
    "and before it copy of hid[0,0] on stream htod"
)
SENT_TOO_EARLY = (
    "read after write in pinned buffer: copy of hid[0,0] on stream htod, "
    "and before it fill_ of attn[0,0] on raymoe-lane-cpu"
)


def test_tasks_that_wait_for_each_other_are_in_order(lanes: Lanes) -> None:
    sent = lanes.send(lanes.fill())
    lanes.compute(sent).wait()
    lanes.fill(sent).wait()
    assert lanes.hazards() == []


@pytest.mark.parametrize(
    ("wait", "hazard"),
    [
        (Wait("hid", "pre"), READ_TOO_EARLY),
        (Wait("hid", "attn"), FILLED_TOO_EARLY),
        (Wait("attn", "hid"), SENT_TOO_EARLY),
    ],
)
def test_a_wait_that_is_overlooked_is_missing(lanes: Lanes, wait: Wait, hazard: str) -> None:
    sent = lanes.send(lanes.fill())
    lanes.compute(sent)
    lanes.fill(sent)
    assert hazard in lanes.hazards(lambda kind: kind == wait)


def test_tasks_of_two_lanes_need_a_wait(lanes: Lanes) -> None:
    sent = lanes.send()
    lanes.compute()
    lanes.fill(sent).wait()
    (hazard,) = lanes.hazards()
    assert "copy of hid[0,0]" in hazard  # which of them comes first is left to chance
    assert "add_ of pre[0,0]" in hazard


def test_what_a_thread_has_waited_for_comes_before_what_it_submits(lanes: Lanes) -> None:
    lanes.send().wait()
    lanes.fill()
    lanes.compute()
    assert lanes.hazards() == []


def test_accesses_to_different_bytes_need_no_order(lanes: Lanes) -> None:
    lanes.send(begin=32)
    lanes.compute(call=lambda: lanes.there[:32].add_(1))
    assert lanes.hazards() == []


@pytest.mark.parametrize("waits", [False, True])
def test_the_default_stream_is_waited_for(lanes: Lanes, waits: bool) -> None:
    moved = torch.ones(64, dtype=torch.uint8).to(lanes.cuda.device)
    if waits:
        lanes.device.synchronize()
    lanes.compute(call=lambda: lanes.there.add_(moved)).wait()
    assert [hazard.split(":")[0] for hazard in lanes.hazards()] == [
        "read after write in a result in engine"
    ] * (not waits)


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_reads_what_it_has_waited_for(lanes: Lanes, waits: bool) -> None:
    ids = torch.empty(1, dtype=torch.int64)
    with lanes.device.computing():
        logits_RV = lanes.there.float()[None]
        _native.argmax(logits_RV.cpu() if waits else logits_RV, ids)
    assert ["argmax on MainThread" in hazard for hazard in lanes.hazards()] == [True] * (not waits)


@pytest.mark.parametrize("is_asked", [False, True])
def test_memory_outlives_the_tasks_that_use_it(lanes: Lanes, is_asked: bool) -> None:
    made = lanes.device.compute(lambda: lanes.there + 1)
    lanes.fetch(made).wait()
    del made
    hazards = lanes.hazards(lambda wait: not is_asked and wait.waited == "qkv")
    assert hazards == [
        "write after read in a result in raymoe-lane-gpu: free on MainThread, "
        "and before it copy of qkv[0,0] on stream dtoh"
    ] * (not is_asked)


def test_memory_is_not_used_when_it_is_freed(lanes: Lanes) -> None:
    made = lanes.device.compute(lambda: lanes.there + 1)
    copies = Copies.of((lanes.here, made))
    del made
    lanes.submit(Op.QKV, Resource.DTOH, lambda: copies).wait()
    assert lanes.hazards() == [
        "use after free in a result in raymoe-lane-gpu: copy of qkv[0,0] on stream dtoh, "
        "and before it free on MainThread"
    ]
