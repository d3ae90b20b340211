"""What a plan says it needs is what the engine takes."""

import zlib

import pytest

from raymoe.device.emulated import EmulatedDevice
from raymoe.engine import loading
from raymoe.schedule.builders import STREAMING_BUILDERS
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

    monkeypatch.setattr(loading, "EmulatedDevice", make)
    return made


@pytest.mark.parametrize("placement", schedules.DEVICES)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
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
