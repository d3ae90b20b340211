"""Rates of a link and a device from the events of a device that takes a second for every step."""

import random
import threading
from collections.abc import Callable

import pytest

from raymoe.device.lane import Cancelled
from raymoe.measure.gpu import (
    NUM_RUNS,
    ROWS,
    Background,
    DeviceJobs,
    LinkCopies,
    LinkRates,
    StreamRun,
    measure_link,
    measure_rates,
    quick_rates,
    seconds_on_stream,
    with_device,
)
from raymoe.measure.timing import KernelJob
from raymoe.specs.hardware import HardwareSpec
from tests.unit.device.fake_cuda import FakeCuda, FakeEvent, FakeStream

HOST = HardwareSpec(
    name="host", num_cores=2, host_memory_bytes=1, host_bytes_per_s=1.0, host_flop_per_s=1.0,
    host_copy_bytes_per_s=1.0,
)  # fmt: skip


def steps(api: FakeCuda, count: int) -> Callable[[], None]:
    """A call that keeps the device busy for so many seconds."""

    def call() -> None:
        for _ in range(count):
            api.launch(lambda: None)

    return call


def attention_job(api: FakeCuda, seconds: int) -> KernelJob:
    return KernelJob(
        kernel="", case="", calls=[steps(api, seconds)], bytes_per_call=6000, flop_per_call=9000
    )


def of_run(calls: int, step_s: int) -> float:
    """Seconds per call of a run: its steps, and that of the event behind them."""
    return (calls * step_s + 1) / calls


def test_a_run_takes_from_its_first_call_to_the_end_of_its_last() -> None:
    api = FakeCuda()
    stream = api.new_stream()
    busy = StreamRun(api, stream, [steps(api, 50)])
    assert StreamRun(api, stream, [steps(api, 2), steps(api, 3)]).seconds() == 2 + 3 + 1
    assert busy.seconds() == 51


def test_runs_are_as_long_as_their_share_of_the_time() -> None:
    api = FakeCuda()
    stream, step_s = api.new_stream(), random.randint(1, 9)
    once_s = of_run(2, step_s)
    measured = seconds_on_stream(api, stream, [steps(api, step_s)], 20 * NUM_RUNS * once_s + 1e-6)
    assert measured == pytest.approx(of_run(20, step_s))
    assert len(stream.steps) == step_s * (2 + 20 * NUM_RUNS) + 2 * (1 + NUM_RUNS)


def test_one_call_is_made_even_where_it_takes_longer_than_there_is() -> None:
    api = FakeCuda()
    assert seconds_on_stream(api, api.new_stream(), [steps(api, 7)], 0.0) == of_run(1, 7)


def attention(seconds: list[float]) -> KernelJob:
    """A job of the CPU; appends to `seconds` while it runs."""
    pause = threading.Event()
    return KernelJob(
        kernel="attention",
        case="",
        calls=[lambda: seconds.append(float(pause.wait(0.001)))],
        bytes_per_call=5e6,
        flop_per_call=0.0,
    )


def test_every_rate_of_the_link_is_that_of_its_own_copies() -> None:
    api, calls = FakeCuda(), []
    copies = LinkCopies(
        num_bytes=1000,
        htod=steps(api, 1),
        dtoh=steps(api, 2),
        pageable_htod=steps(api, 3),
        pageable_dtoh=steps(api, 4),
    )
    rates = measure_link(api, copies, attention(calls), 1e4)
    for rate, step_s in (
        (rates.htod, 1), (rates.dtoh, 2), (rates.pageable_htod, 3), (rates.pageable_dtoh, 4),
        (rates.duplex_htod, 1), (rates.duplex_dtoh, 2), (rates.busy_htod, 1),
    ):  # fmt: skip
        assert rate == pytest.approx(1000 / step_s, rel=1e-2)
    assert calls, "the CPU had nothing to do while the link was measured"
    assert 5e6 / 1.0 < rates.busy_attention < 5e6 / 0.001


def test_quick_rates_are_what_a_call_does_in_its_share_of_the_time() -> None:
    api = FakeCuda()
    calls = [(6000.0, steps(api, 1)), (6000.0, steps(api, 3))]
    assert quick_rates(api, calls, 2e4) == pytest.approx([6000.0, 2000.0], rel=1e-2)
    assert len(api.streams) == 1


class LoggingCuda(FakeCuda):
    """Notes what is recorded (r) and awaited (w)."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ""

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self.log += "r"
        super().record(event, stream)

    def wait_event(self, event: FakeEvent) -> None:
        self.log += "w"
        super().wait_event(event)


def test_both_directions_are_under_way_before_either_is_awaited() -> None:
    api = LoggingCuda()
    one, two = steps(api, 1), steps(api, 1)
    copies = LinkCopies(num_bytes=1, htod=one, dtoh=two, pageable_htod=one, pageable_dtoh=two)
    measure_link(api, copies, attention([]), 0.0)
    # With no time each measurement is one call; the pairs are those recorded without a wait.
    assert "rrrr" * NUM_RUNS + "w" in api.log


def test_what_fails_in_the_background_is_raised() -> None:
    with pytest.raises(Cancelled) as caught, Background([lambda: 1 // 0]):
        pass
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_background_goes_on_until_it_is_left() -> None:
    seen = threading.Semaphore(0)
    with Background([seen.release]) as background:
        for _ in range(100):
            assert seen.acquire(timeout=10)
    assert background.num_calls >= 100
    assert background.seconds_per_call > 0


def test_rates_of_the_device_are_operations_and_bytes_over_its_seconds() -> None:
    api = FakeCuda()
    jobs = DeviceJobs(
        products=[[steps(api, 1 + rows // 64)] for rows in ROWS],
        product_parameters=1000,
        experts=[[steps(api, 2 + rows // 16)] for rows in ROWS],
        expert_parameters=3000,
        reads=[steps(api, 5)],
        read_bytes=10**6,
        stored_experts={bits: [[steps(api, bits)] for _ in ROWS] for bits in (8, 4)},
        decodes={128: attention_job(api, 3), 1024: attention_job(api, 6)},
        prefills={512: attention_job(api, 9)},
        small=[steps(api, 4)],
        states=attention_job(api, 7),
    )
    rates = measure_rates(api, jobs, 1e5)
    assert rates.bytes_per_s == pytest.approx(2e6 / 5, rel=5e-3)
    for rows in ROWS:
        product, expert = 2 * rows * 1000 / (1 + rows // 64), 2 * rows * 3000 / (2 + rows // 16)
        assert rates.product_flop_per_s.at(rows) == pytest.approx(product, rel=5e-3)
        assert rates.expert_flop_per_s.at(rows) == pytest.approx(expert, rel=5e-3)
    link = LinkRates(
        htod=1.0,
        dtoh=2.0,
        pageable_htod=3.0,
        pageable_dtoh=4.0,
        duplex_htod=5.0,
        duplex_dtoh=6.0,
        busy_htod=7.0,
        busy_attention=8.0,
    )
    node = with_device(HOST, 16 << 30, link, rates)
    curves = node.device_curves
    assert node.has_gpu
    assert node.gpu_memory_bytes == 16 << 30
    assert node.gpu_bytes_per_s == rates.bytes_per_s
    assert node.gpu_flop_per_s == rates.product_flop_per_s.highest
    assert (node.htod_bytes_per_s, node.dtoh_bytes_per_s) == (1.0, 2.0)
    assert curves is not None
    assert (curves.pageable_htod_bytes_per_s, curves.pageable_dtoh_bytes_per_s) == (3.0, 4.0)
    assert (curves.duplex_htod_bytes_per_s, curves.duplex_dtoh_bytes_per_s) == (5.0, 6.0)
    assert (curves.busy_htod_bytes_per_s, curves.busy_attention_bytes_per_s) == (7.0, 8.0)
    assert curves.product_flop_per_s == rates.product_flop_per_s
    assert curves.expert_flop_per_s == rates.expert_flop_per_s
    assert curves.expert_flop_per_s_of_8_bits is not None
    assert curves.expert_flop_per_s_of_8_bits.at(16) == pytest.approx(32 * 3000 / 8, rel=5e-3)
    assert curves.expert_flop_per_s_of_4_bits is not None
    assert curves.expert_flop_per_s_of_4_bits.at(16) == pytest.approx(32 * 3000 / 4, rel=5e-3)
    assert curves.attention_bytes_per_s is not None
    assert curves.attention_bytes_per_s.at(128) == pytest.approx(6000 / 3, rel=5e-3)
    assert curves.attention_bytes_per_s.at(1024) == pytest.approx(6000 / 6, rel=5e-3)
    assert curves.prefill_flop_per_s is not None
    assert curves.prefill_flop_per_s.at(512) == pytest.approx(9000 / 9, rel=5e-3)
    assert curves.tasks_per_s == pytest.approx(1 / 4, rel=5e-3)
    assert curves.state_bytes_per_s == pytest.approx(6000 / 7, rel=5e-3)
