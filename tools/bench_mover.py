"""Shares of a link that movers reach while other threads want the interpreter.

python -m tools.bench_mover [--seconds 3]

The link is simulated and only takes the time, so its rate may exceed that of host memory. The
movers, their packets and the lanes are those of a GPU. "pages" has all copies queued beforehand;
"layers" is a schedule that streams layers through two slots, whose next copy waits for the layer
before the last in the lane of the GPU, a Python thread.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from raymoe import _native
from raymoe.device.lane import ThreadLane, call_all
from raymoe.device.mover import Copies, Link
from raymoe.runtime.executor import Executor
from raymoe.schedule.graph import Buffer, Op, Resource, Schedule, Task
from raymoe.schedule.timeline import Timeline
from raymoe.units import GB, MIB

RATES = (12 * GB, 25 * GB, 55 * GB)
PAGE_BYTES = 64 * MIB
PAGES_OF_LAYER = 16
SMALL_BYTES = MIB


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Repeat `work` in a thread."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def torch_calls() -> None:
    """Issue small torch operations during 30 % of the time."""
    one, until_s = torch.ones(16), time.perf_counter() + 0.3e-3
    while time.perf_counter() < until_s:
        one.add_(1.0)
    time.sleep(0.7e-3)


def python_alone() -> None:
    for _ in range(100_000):
        pass


OTHERS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "idle": nothing,
    "torch calls at 30 %": lambda: in_thread(torch_calls),
    "Python always busy": lambda: in_thread(python_alone),
}


def pages(num_pages: int) -> Schedule:
    """Pages that wait for nothing, and a small copy when every fourth of them is there."""
    tasks = []
    for page in range(num_pages):
        buffer = (Buffer("page", (page,)),)
        tasks.append(_task(Op.W, 0, page, Resource.HTOD, writes=buffer))
        if page % 4 == 3:
            tasks.append(_task(Op.HID, 0, page, Resource.HTOD, reads=buffer))
    return Schedule("pages", tuple(tasks))


def layers(num_pages: int) -> Schedule:
    tasks = []
    for layer in range(num_pages // PAGES_OF_LAYER):
        slot = [Buffer("slot", (layer % 2, page)) for page in range(PAGES_OF_LAYER)]
        for page, buffer in enumerate(slot):
            tasks.append(_task(Op.W, layer, page, Resource.HTOD, writes=(buffer,)))
        tasks.append(_task(Op.EXPERTS, layer, 0, Resource.GPU, reads=tuple(slot)))
    return Schedule("layers", tuple(tasks))


def _task(op: Op, layer: int, part: int, resource: Resource, **buffers: tuple[Buffer, ...]) -> Task:
    return Task(op=op, layer=layer, part=part, resource=resource, **buffers)


def copy(task: Task, _state: None) -> Copies | None:
    if task.op is Op.EXPERTS:
        return None
    # Addresses that nobody reads.
    return Copies([(1 << 30, 1 << 30, PAGE_BYTES if task.op is Op.W else SMALL_BYTES)])


def run(schedule: Schedule, bytes_per_s: float) -> Timeline:
    runtime = _native.SimulatedLink(bytes_per_s=bytes_per_s, copies=False)
    link = Link(runtime, runtime.new_stream)
    lanes = {**link.lanes, Resource.GPU: ThreadLane(Resource.GPU)}
    try:
        executor = Executor(schedule, dict.fromkeys(Op, copy), lanes, traffic=link.traffic)
        return executor.run(None)
    finally:
        call_all(lane.close for lane in lanes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    rates = " ".join(f"{rate / GB:>5.0f} GB/s" for rate in RATES)
    title = f"{'schedule':<8} {'beside':<20} {rates}   longest wait of a small copy, packets\n"
    sys.stdout.write(title)
    for build in (pages, layers):
        for name, other in OTHERS.items():
            shares, waits = [], []
            for rate in RATES:
                num_pages = max(3 * PAGES_OF_LAYER, int(seconds * rate / PAGE_BYTES))
                with other():
                    timeline = run(build(num_pages), rate)
                use = timeline.links[Resource.HTOD]
                shares.append(use.num_bytes / timeline.makespan_s / rate)
                small = [span for span in timeline.spans if span.task.op is Op.HID]
                packet_s = 16 * MIB / rate
                waits += [(span.duration_s - SMALL_BYTES / rate) / packet_s for span in small]
            line = " ".join(f"{100 * share:>8.1f} %" for share in shares)
            longest = f"{max(waits):.2f}" if waits else ""
            sys.stdout.write(f"{build.__name__:<8} {name:<20} {line}   {longest}\n")


if __name__ == "__main__":
    main()
