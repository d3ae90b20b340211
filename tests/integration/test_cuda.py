"""The CUDA path of the engine: on a GPU, and on a stand-in for one that works later than asked."""

import pytest
import torch

from raymoe.device.cuda import CudaDevice
from raymoe.engine import runner_loading
from raymoe.errors import ConfigError
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.specs.presets_hardware import hardware_preset
from raymoe.units import GIB
from tests.integration import test_schedules as schedules
from tests.unit.device.deferred_cuda import DeferredCuda, without_native_kernels

__all__ = ["without_native_kernels"]

FAMILIES, SCENARIOS, PLACEMENTS = schedules.FAMILIES, schedules.SCENARIOS, schedules.DEVICES
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def check(family: str, schedule: str, scenario: str, placement: str, **config: object) -> None:
    schedules.check(family, schedule, scenario, PLACEMENTS[placement], device="cuda", **config)


@pytest.mark.parametrize("pace", [0.0, 0.4], ids=["lazy", "random"])
@pytest.mark.parametrize(
    ("family", "schedule", "scenario", "placement"),
    [
        ("mixtral", "cgopipe", "mixed lengths", "pages"),
        ("mixtral", "module_batching", "long prompt", "staged"),
        ("mixtral", "flexgen_s4", "early end", "resident share"),
        ("deepseek_v3", "module_batching", "mixed lengths", "pages"),
    ],
)
def test_a_device_that_works_later_gives_the_tokens_of_the_cpu(
    family: str,
    schedule: str,
    scenario: str,
    placement: str,
    pace: float,
    monkeypatch: pytest.MonkeyPatch,
    without_native_kernels: list[DeferredCuda],
) -> None:
    cuda = DeferredCuda(pace=pace)
    without_native_kernels.append(cuda)
    monkeypatch.setattr(runner_loading, "open_cuda", lambda *_, **__: CudaDevice(cuda, GIB))
    check(family, schedule, scenario, placement, hardware=hardware_preset("t4"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_device_is_refused_with_what_to_do() -> None:
    name = schedules.plain_configuration("mixtral")
    with pytest.raises(ConfigError, match="use the device 'cpu' or 'emulated'"):
        schedules.make_engine(name, {}, device="cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_schedule_and_scenario(family: str, schedule: str, scenario: str) -> None:
    check(family, schedule, scenario, "pages")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
def test_every_schedule_and_placement(schedule: str, placement: str) -> None:
    check("qwen2_moe", schedule, "long prompt", placement)
