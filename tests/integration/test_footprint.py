"""What a plan says it needs is what the engine takes."""

import zlib

import pytest

from raymoe.device.emulated import EmulatedDevice
from raymoe.engine import rank_model
from raymoe.errors import InfeasiblePlanError
from raymoe.plan.footprint import workspace_bytes
from raymoe.schedule.builders import RING_SCHEDULES, STREAMING_BUILDERS
from raymoe.specs.hardware import hardware_preset
from raymoe.units import KIB
from tests.integration import test_schedules as schedules
from tests.parity.configurations import first_of_each_family

NAMES = [c.name for c in first_of_each_family() if c.family not in {"llama", "qwen3", "mistral"}]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedDevice]:
    """The devices that engines make."""
    made: list[EmulatedDevice] = []

    def make(*args: object) -> EmulatedDevice:
        made.append(EmulatedDevice(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(rank_model, "EmulatedDevice", make)
    return made


PAIRS = [
    (schedule, placement)
    for schedule in STREAMING_BUILDERS
    for placement in schedules.DEVICES
    if placement != "ring" or schedule in RING_SCHEDULES  # the others load whole layers
]
PAIRS.sort(key=lambda pair: zlib.crc32(repr(pair).encode()))
# Each schedule and each placement at least once.
QUICK = {*{pair[0]: pair for pair in PAIRS}.values(), *{pair[1]: pair for pair in PAIRS}.values()}


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
)
def test_device_memory_is_counted_to_the_kilobyte(
    schedule: str, placement: str, devices: list[EmulatedDevice]
) -> None:
    name = NAMES[zlib.crc32(f"{schedule} {placement}".encode()) % len(NAMES)]
    policy = schedules.DEVICES[placement]
    with schedules.make_engine(
        name, {}, device="emulated", schedule=schedule, device_policy=policy
    ) as engine:
        assert engine.plan is not None
        footprint = engine.plan.device_footprint
        assert footprint is not None
        planned = footprint.total - footprint.bytes_of("intermediates")
    (device,) = devices
    assert device.ledger.used_bytes == pytest.approx(planned, abs=32 * KIB)


def test_the_cap_is_honoured_to_the_byte(devices: list[EmulatedDevice]) -> None:
    name = schedules.plain_configuration("mixtral")
    config = {"device": "emulated", "device_policy": schedules.DEVICES["pages"]}
    config |= {"schedule": "module_batching", "hardware": hardware_preset("t4")}
    with schedules.make_engine(name, {}, **config) as engine:
        assert engine.plan is not None
        footprint = engine.plan.device_footprint
        assert footprint is not None
    with schedules.make_engine(name, {}, device_memory_bytes=footprint.total, **config) as engine:
        used_bytes = devices[-1].ledger.used_bytes
        (row,) = engine.generate([[1, 2, 3]], {"temperature": 0, "max_tokens": 4})
        assert row.error == ""
        assert devices[-1].ledger.used_bytes == used_bytes, "passes allocate nothing"
        assert used_bytes + workspace_bytes(footprint) <= footprint.total
    with pytest.raises(InfeasiblePlanError, match=r"\(1 B short\)(.|\n)*weight slots(.|\n)*total"):
        schedules.make_engine(name, {}, device_memory_bytes=footprint.total - 1, **config)
