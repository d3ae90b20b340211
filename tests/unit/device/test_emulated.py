"""The device made of host memory: limits, poison, pace."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from raymoe.device.emulated import EmulatedDevice, RandomStalls, sleep_until
from raymoe.errors import CapacityError, ConfigError
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.units import KIB, MIB
from tests.unit.device.native_threads import native_thread_names

LOAD = Task(op=Op.W, layer=0, part=0, resource=Resource.HTOD)


class Fixed:
    """Every task takes the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def duration_s(self, task: Task) -> float:
        return self.seconds


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with closing(EmulatedDevice(MIB, Fixed(0.0))) as device:
        yield device


def test_memory_is_separate_and_reads_as_nan_until_it_is_written(device: EmulatedDevice) -> None:
    first, second = device.allocate(64), device.allocate(64)
    first.view(torch.bfloat16).zero_()
    assert torch.isnan(second.view(torch.float32)).all()
    assert torch.isnan(second.view(torch.bfloat16)).all()
    assert torch.isnan(second.view(torch.float16)).all()
    assert (second.view(torch.int32) == -1).all()


def test_used_bytes_count_whole_allocations(device: EmulatedDevice) -> None:
    device.allocate(1)
    device.allocate(300)
    device.allocate(0)
    assert device.ledger.used_bytes == 256 + 512
    assert device.ledger.memory_bytes == MIB


def test_too_much_memory_is_refused_with_a_table(device: EmulatedDevice) -> None:
    device.allocate(512 * KIB, "weight slots")
    device.allocate(128 * KIB, "hidden states")
    device.allocate(128 * KIB, "hidden states")
    with pytest.raises(CapacityError) as caught:
        device.allocate(512 * KIB, "KV staging")
    message = str(caught.value)
    assert "1.00 MiB is 256.00 KiB short for KV staging" in message
    rows = [line.split() for line in message.splitlines() if line.startswith("  ")]
    assert rows == [
        ["weight", "slots", "512.00", "KiB"],
        ["hidden", "states", "256.00", "KiB"],
        ["free", "256.00", "KiB"],
        ["KV", "staging", "(asked)", "512.00", "KiB"],
    ]
    assert device.ledger.used_bytes == 768 * KIB
    device.allocate(256 * KIB)


def test_negative_sizes_are_refused(device: EmulatedDevice) -> None:
    with pytest.raises(ConfigError, match="-1 bytes asked"):
        device.allocate(-1)
    with pytest.raises(ConfigError, match="cannot be negative"):
        EmulatedDevice(-1, Fixed(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6, dtype=dtype)
    EmulatedDevice.poison(tensor[:, 1:3])
    assert torch.isnan(tensor[:, 1:3]).all()
    assert not torch.isnan(tensor[:, 3:]).any()


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int32, -1), (torch.uint8, 255), (torch.bool, True)]
)
def test_poison_of_numbers_without_nan(dtype: torch.dtype, value: int) -> None:
    tensor = torch.zeros(4, dtype=dtype)
    EmulatedDevice.poison(tensor)
    assert tensor.tolist() == [value] * 4


def test_a_refused_device_starts_no_threads_and_a_closed_one_leaves_none() -> None:
    before = _threads()
    with closing(EmulatedDevice(0, Fixed(0.0))):
        python = [f"raymoe-lane-{lane}" for lane in ("cpu", "gpu", "host_copy")]
        assert _threads() == sorted([*before, *python, *MOVERS])
    with pytest.raises(ConfigError):
        EmulatedDevice(-1, Fixed(0.0))
    assert _threads() == before


MOVERS = tuple(f"raymoe-lane-{lane}"[:15] for lane in ("pages", "kv", "htod", "dtoh"))


def _threads() -> list[str]:
    """Names of Python threads of lanes, and of native ones as Linux cuts them."""
    names = [thread.name for thread in threading.enumerate() if "raymoe-lane" in thread.name]
    return sorted([*names, *(name for name in native_thread_names() if name in MOVERS)])


def test_there_is_a_lane_for_every_resource_and_it_is_in_inference_mode(
    device: EmulatedDevice,
) -> None:
    own = {resource: resource for resource in Resource}
    own |= dict.fromkeys((Op.W, Op.KV), Resource.HTOD)
    assert {name: lane.resource for name, lane in device.lanes.items()} == own
    modes: list[bool] = []
    device.lanes[Resource.GPU].submit(
        LOAD, lambda: modes.append(torch.is_inference_mode_enabled()), ()
    ).wait()
    assert modes == [True]


def test_a_task_takes_at_least_its_time_however_short_its_work() -> None:
    with closing(EmulatedDevice(0, Fixed(0.04), time_scale=0.5)) as device:
        mark = device.lanes[Resource.HTOD].submit(LOAD, lambda: None, ())
        mark.wait()
        assert mark.end_s - mark.start_s >= 0.02
        device.cost = Fixed(0.08)
        mark = device.lanes[Resource.HTOD].submit(LOAD, lambda: None, ())
        mark.wait()
        assert mark.end_s - mark.start_s >= 0.04


def test_a_stall_delays_the_work_within_the_task() -> None:
    times: list[float] = []
    with closing(EmulatedDevice(0, Fixed(0.04), stall=lambda _task: 0.02)) as device:
        copied = device.lanes[Resource.HTOD].submit(LOAD, lambda: None, ())
        copied.wait()
        mark = device.lanes[Resource.GPU].submit(
            LOAD, lambda: times.append(time.perf_counter()), ()
        )
        mark.wait()
        assert copied.end_s - copied.start_s >= 0.04
    assert times[0] - mark.start_s >= 0.02
    assert mark.end_s - mark.start_s >= 0.04


def test_stalls_depend_on_seed_and_task_alone() -> None:
    tasks = [Task(op=Op.W, layer=k, part=0, resource=Resource.HTOD) for k in range(1000)]
    stall = RandomStalls(probability=0.25, longest_s=2.0, seed=7)
    seconds = [stall(task) for task in tasks]
    again = RandomStalls(probability=0.25, longest_s=2.0, seed=7)
    assert [again(task) for task in reversed(tasks)] == seconds[::-1]
    assert [
        RandomStalls(probability=0.25, longest_s=2.0, seed=8)(task) for task in tasks
    ] != seconds
    stalled = [second for second in seconds if second > 0]
    assert 200 < len(stalled) < 300
    assert 1.5 < max(stalled) <= 2.0


def test_a_deadline_in_the_past_returns_at_once_and_one_ahead_is_kept() -> None:
    sleep_until(0.0)
    deadline_s = time.perf_counter() + 0.01
    sleep_until(deadline_s)
    assert time.perf_counter() >= deadline_s


@pytest.mark.slow
def test_deadlines_are_kept_to_about_50_microseconds() -> None:
    late = []
    for _ in range(500):
        deadline_s = time.perf_counter() + 0.002
        sleep_until(deadline_s)
        late.append(time.perf_counter() - deadline_s)
    assert sorted(late)[len(late) // 2] < 50e-6
